"""Layers that multiply by a matrix whose numbers have a posterior."""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from tfdp._types import Config, Tensor
from tfdp.variational.base import VariationalLayer


class VariationalProduct(VariationalLayer):
    """A product of what the layer sees with a kernel, a bias, an activation; abstract.

    Args:
        activation: Name of a Keras activation, or a function.
        use_bias: Whether there is a bias, with a posterior too.
        kernel_initializer: Of the kernel's means.
        bias_initializer: Of the bias's means.
        **kwargs: Of `VariationalLayer`.
    """

    def __init__(
        self,
        *,
        activation: Callable[[Tensor], Tensor] | str | None,
        use_bias: bool,
        kernel_initializer: keras.initializers.Initializer | str,
        bias_initializer: keras.initializers.Initializer | str,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)

    def _add_product(self, shape: tuple[int | None, ...]) -> None:
        """Add a kernel, and a bias as long as its last axis."""
        self._add("kernel", shape, self.kernel_initializer)
        self.bias_mean = self.bias_rho = None
        if self.use_bias:
            self._add("bias", shape[-1:], self.bias_initializer)

    def seen(self, inputs: Tensor) -> Tensor:
        """Return what is multiplied at each position, shape ``(R, ..., d)``."""
        return inputs

    @property
    def kernel_scale(self) -> Tensor:
        """Standard deviations of the kernel's weights, of its shape."""
        return self.posteriors["kernel"].scale

    @property
    def bias_scale(self) -> Tensor | None:
        """Standard deviations of the bias, of its shape; None without one."""
        return self.posteriors["bias"].scale if self.use_bias else None

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Apply weights: drawn ones in training, otherwise their means."""
        rows = self.seen(inputs)
        if training and self.draws != "local":
            return self.activation(self.multiplied(rows, self.noise(rows)))
        return self.outputs(*self.moments(rows), training=training)

    def multiplied(self, inputs: Tensor, noise: dict[str, Tensor]) -> Tensor:
        """Multiply inputs by drawn weights.

        Args:
            inputs: From `seen`, shape ``(R, ..., d)``.
            noise: From `noise`, V draws; row r takes number ``r % V``.

        Returns:
            Shape ``(R, ..., p)``, before the activation.
        """
        posteriors = self.posteriors
        kernels = posteriors["kernel"].drawn(noise["kernel"])
        number, p = ops.shape(kernels)[0], self.kernel_mean.shape[-1]
        d = math.prod(self.kernel_mean.shape) // p
        kernels = ops.reshape(kernels, (number, d, p))
        between = ops.shape(inputs)[1:-1]
        positions = math.prod(between) if between else 1
        rows = ops.cast(inputs, kernels.dtype)
        rows = ops.reshape(rows, (-1, number, positions, d))
        # One product for each draw: TensorFlow's product of matrices that are broadcast
        # was seen to write beside its memory.
        rows = ops.reshape(ops.transpose(rows, (1, 0, 2, 3)), (number, -1, d))
        outputs = ops.matmul(rows, kernels)
        if "bias" in noise:
            outputs += posteriors["bias"].drawn(noise["bias"])[:, None]
        outputs = ops.reshape(outputs, (number, -1, positions, p))
        outputs = ops.transpose(outputs, (1, 0, 2, 3))
        shape = (ops.shape(inputs)[0], *between, p)
        return ops.cast(ops.reshape(outputs, shape), self.compute_dtype)

    def moments(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the outputs under the posterior.

        Args:
            inputs: From `seen`, shape ``(R, ..., d)``.

        Returns:
            Two tensors of shape ``(R, ..., p)``, before the activation, in at least
            float32.
        """
        dtype = self.wide_dtype
        rows = ops.cast(inputs, dtype)
        matrix = (-1, self.kernel_mean.shape[-1])
        mean = ops.matmul(rows, ops.reshape(ops.cast(self.kernel_mean, dtype), matrix))
        scales = ops.reshape(ops.cast(self.kernel_scale, dtype), matrix)
        variances = ops.square(scales)
        variance = ops.matmul(ops.square(rows), variances)
        if self.use_bias:
            mean += ops.cast(self.bias_mean, dtype)
            variance += ops.square(ops.cast(self.bias_scale, dtype))
        return mean, variance

    def outputs(
        self, mean: Tensor, variance: Tensor, *, training: bool | None
    ) -> Tensor:
        """Make outputs of their moments.

        Args:
            mean: From `moments`.
            variance: From `moments`.
            training: Whether to draw them.

        Returns:
            The layer's outputs, of the same shape.
        """
        if training:
            mean += root_of(variance) * self._normal(ops.shape(mean))
        return self.activation(ops.cast(mean, self.compute_dtype))

    def get_config(self) -> Config:
        """Return the arguments."""
        return {
            **super().get_config(),
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }


def root_of(variance: Tensor) -> Tensor:
    """Return standard deviations, with a finite gradient where one is zero."""
    return ops.sqrt(ops.maximum(variance, 1e-30))
