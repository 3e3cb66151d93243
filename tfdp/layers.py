"""Layers that private training likes and Keras does not have."""

from collections.abc import MutableMapping

import keras
from keras import ops

from tfdp import _validate
from tfdp._types import Array, Config, Tensor


@keras.saving.register_keras_serializable(package="tfdp")
class WSConv2D(keras.layers.Conv2D):
    """2-D convolution with a standardised kernel.

    Each output channel's kernel is moved and scaled to mean 0 and length 1, and then
    multiplied by a gain that is learnt [1]_ [2]_::

        gain * (W - mean(W)) / sqrt(max(sum((W - mean(W)) ** 2), epsilon))

    Together with `keras.layers.GroupNormalization` this takes the place of batch
    normalization, which mixes examples and so has no place in private training. The
    book-keeping engine has a rule for it: an example's gradient is that of an ordinary
    convolution, projected.

    Args:
        filters: Number of output channels.
        kernel_size: As in `keras.layers.Conv2D`.
        epsilon: Least squared length that kernels are divided by, positive.
        kernel_initializer: Of W. How long it makes the kernels decides how fast they
            turn, not what the layer computes.
        **kwargs: As in `keras.layers.Conv2D`.

    Raises:
        ValueError: If `epsilon` is not positive.

    Example:
        >>> layer = tfdp.layers.WSConv2D(16, 3, padding="same")
        >>> layer(np.zeros((8, 32, 32, 3), "float32")).shape
        TensorShape([8, 32, 32, 16])

    References:
        .. [1] Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and
           Weight Standardization", 2019. https://arxiv.org/abs/1903.10520
        .. [2] De et al., "Unlocking High-Accuracy Differentially Private Image
           Classification through Scale", 2022, section 3.
           https://arxiv.org/abs/2204.13650
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        *,
        epsilon: float = 1e-4,
        kernel_initializer: str | keras.initializers.Initializer = "lecun_normal",
        **kwargs: object,
    ) -> None:
        super().__init__(
            filters, kernel_size, kernel_initializer=kernel_initializer, **kwargs
        )
        self.epsilon = _validate.positive("epsilon", epsilon, "Use `epsilon=1e-4`.")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add the kernel, the bias and the gain, which is 1 at first."""
        # First: with a `lora_rank`, nothing can be added once the kernel is built.
        self.gain = self.add_weight(
            name="gain", shape=(self.filters,), initializer="ones"
        )
        super().build(input_shape)

    def convolution_op(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        """Convolve with the standardised kernel, which is computed in float32."""
        kernel = centred(kernel)
        squares = ops.sum(ops.square(kernel), axis=(0, 1, 2))
        scale = ops.rsqrt(ops.maximum(squares, self.epsilon))
        scale *= ops.cast(self.gain, scale.dtype)
        return super().convolution_op(
            inputs, ops.cast(kernel * scale, self.compute_dtype)
        )

    def save_own_variables(self, store: MutableMapping[str, Array]) -> None:
        """Save the gain beside what `keras.layers.Conv2D` knows of."""
        super().save_own_variables(store)
        store[str(len(store.keys()))] = self.gain

    def load_own_variables(self, store: MutableMapping[str, Array]) -> None:
        """Load the gain too."""
        super().load_own_variables(store)
        self.gain.assign(store[str(len(store.keys()) - 1)])

    def get_config(self) -> Config:
        """Return the arguments."""
        return {**super().get_config(), "epsilon": self.epsilon}


def centred(kernel: Tensor) -> Tensor:
    """Subtract the mean of each output channel's kernel, in at least float32.

    Args:
        kernel: Shape ``(..., O)``.

    Returns:
        The same shape.
    """
    if keras.backend.standardize_dtype(kernel.dtype) in ("float16", "bfloat16"):
        kernel = ops.cast(kernel, "float32")
    axes = tuple(range(len(kernel.shape) - 1))
    # Where a mean is large, what is left of it after rounding is not small beside the
    # rest of the kernel: it is taken away in turn.
    for _ in range(2):
        kernel -= ops.mean(kernel, axis=axes, keepdims=True)
    return kernel
