"""Layers whose weights have a posterior: independent Gaussians."""

import math
from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import ops

from tfdp import _validate
from tfdp._types import Config, Tensor, Variable
from tfdp._views_per_example import number_of_views
from tfdp.losses.regularizers import GaussianDivergence


class Weights(NamedTuple):
    """The posterior of a kernel, or of a bias.

    Attributes:
        mean: Means.
        rho: The standard deviations are ``ln(1 + exp(rho))``; of the same shape.
    """

    mean: Variable
    rho: Variable

    @property
    def scale(self) -> Tensor:
        """Standard deviations."""
        return ops.softplus(ops.convert_to_tensor(self.rho))

    def drawn(self, noise: Tensor) -> Tensor:
        """Make weights of standard normal numbers, in the dtype of these."""
        mean, scale = ops.convert_to_tensor(self.mean), self.scale
        return ops.cast(mean, noise.dtype) + ops.cast(scale, noise.dtype) * noise

    def by_rho(self, by_scale: Tensor) -> Tensor:
        """Return derivatives by `rho`, given those by the scale."""
        slope = ops.sigmoid(ops.convert_to_tensor(self.rho))  # That of softplus.
        return by_scale * ops.cast(slope, by_scale.dtype)


@keras.saving.register_keras_serializable(package="tfdp")
class VariationalDense(keras.layers.Layer):
    """A dense layer with a Gaussian posterior over each of its weights.

    Each weight is ``w ~ N(mean, scale^2)``, ``scale = ln(1 + exp(rho))``, all
    independent of each other (mean field); the prior is ``N(0, prior_scale^2)``. In
    training, weights are drawn as ``mean + scale * eps`` [1]_, and the layer's weight
    regularizers are the Kullback-Leibler divergence from the prior over N: with a loss
    that is minus the log-likelihood of an example, `fit` minimizes minus the evidence
    lower bound over N, under `keras.Model` and, privately [3]_, `tfdp.DPModel`.
    Several draws for each example are averaged before clipping by ``DPModel(model,
    augmentation_multiplicity=draws)``. At inference the weights are their means;
    `tfdp.variational.predictive_mean` averages over the posterior.

    Guarantees:
        Under `DPModel` the gradients of means and scales of all layers are clipped
        together, to one norm. What is drawn here does not depend on data.

    Args:
        units: Size of the outputs, p.
        number_of_examples: N, of the training data; public. `DPModel.fit` refuses data
            that have another number.
        prior_scale: Standard deviation of the prior of every weight.
        draws: `"local"`: outputs are drawn instead of weights [2]_, for inputs of shape
            ``(N, d)``; it has the least variance. `"per_example"`: each example has
            weights of its own, ``d p`` numbers for each. `"shared"`: one draw for all
            examples of a step.
        kl: `"outside"`: the divergence's gradient is added after the noise, because
            no data enter it. `"inside"`: each example's loss has ``KL / N``, which is
            clipped with it, as in [3]_.
        activation: Name of a Keras activation, or a function.
        use_bias: Whether there is a bias, with a posterior too.
        initial_scale: Standard deviation of the posterior at first.
        kernel_initializer: Of the kernel's means, as in `keras.layers.Dense`.
        bias_initializer: Of the bias's means.
        seed: Of the draws; they need not be secret.
        **kwargs: Name, dtype, and `trainable`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range, or inputs of `draws="local"`
            have more than two axes.

    Example:
        >>> x, y = np.random.normal(size=(100, 3)), np.ones((100, 1))
        >>> model = keras.Sequential([
        ...     keras.Input((3,)),
        ...     VariationalDense(8, number_of_examples=100, activation="tanh"),
        ...     VariationalDense(1, number_of_examples=100),
        ... ])
        >>> private = tfdp.DPModel(model)
        >>> private.compile(
        ...     tfdp.optimizers.DPAdam(0.01, l2_norm_clip=1.0, noise_multiplier=1.0),
        ...     loss="mse",
        ... )
        >>> history = private.fit(x, y, batch_size=10, verbose=0)
        >>> model.layers[0].kernel_scale.shape
        TensorShape([3, 8])

    References:
        .. [1] Blundell et al., "Weight Uncertainty in Neural Networks", ICML 2015,
           section 3.2. https://arxiv.org/abs/1505.05424
        .. [2] Kingma et al., "Variational Dropout and the Local Reparameterization
           Trick", NeurIPS 2015, equation 6. https://arxiv.org/abs/1506.02557
        .. [3] Jälkö et al., "Differentially Private Variational Inference for
           Non-conjugate Models", UAI 2017, Algorithm 1.
           https://arxiv.org/abs/1610.08749
    """

    def __init__(
        self,
        units: int,
        *,
        number_of_examples: int,
        prior_scale: float = 1.0,
        draws: str = "local",
        kl: str = "outside",
        activation: Callable[[Tensor], Tensor] | str | None = None,
        use_bias: bool = True,
        initial_scale: float = 0.1,
        kernel_initializer: keras.initializers.Initializer | str = "glorot_uniform",
        bias_initializer: keras.initializers.Initializer | str = "zeros",
        seed: int | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.units = _validate.positive_int("units", units)
        self._divergences = [
            GaussianDivergence(
                part,
                prior_scale=prior_scale,
                number_of_examples=number_of_examples,
                kl=kl,
            )
            for part in ("mean", "scale")
        ]
        all_draws = ("shared", "per_example", "local")
        self.draws = _validate.one_of("draws", draws, all_draws)
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.initial_scale = _validate.positive("initial_scale", initial_scale)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        # Read by the engine that takes one example at a time.
        self.seed_generator.is_same_for_all_rows = draws == "shared"

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add means and scales of the kernel, and of the bias."""
        if self.draws == "local" and len(input_shape) != 2:
            raise ValueError(
                "`draws='local'` needs inputs of shape (N, d): positions that share "
                "weights would be drawn as if they did not. Received: inputs of shape "
                f"{tuple(input_shape)} of layer `{self.name}`. Use `draws='shared'` or "
                "`draws='per_example'`."
            )
        shape = (input_shape[-1], self.units)
        self.kernel_mean, self.kernel_rho = self._add(
            "kernel", shape, self.kernel_initializer
        )
        self.bias_mean = self.bias_rho = None
        if self.use_bias:
            self.bias_mean, self.bias_rho = self._add(
                "bias", (self.units,), self.bias_initializer
            )

    def _add(
        self,
        name: str,
        shape: tuple[int | None, ...],
        initializer: keras.initializers.Initializer,
    ) -> list[Variable]:
        # So that its softplus is the scale.
        rho = self.initial_scale + math.log(-math.expm1(-self.initial_scale))
        starts = (initializer, keras.initializers.Constant(rho))
        return [
            self.add_weight(shape, initializer=start, regularizer=part, name=name + of)
            for of, start, part in zip(
                ("_mean", "_rho"), starts, self._divergences, strict=True
            )
        ]

    @property
    def posteriors(self) -> dict[str, Weights]:
        """The posterior of the kernel and, if there is one, that of the bias."""
        found = {"kernel": Weights(self.kernel_mean, self.kernel_rho)}
        if self.use_bias:
            found["bias"] = Weights(self.bias_mean, self.bias_rho)
        return found

    @property
    def wide_dtype(self) -> str:
        """The dtype of sums and squares, which would overflow in half precision."""
        return str(keras.backend.result_type(self.compute_dtype, "float32"))

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
        if training and self.draws != "local":
            return self.activation(self.multiplied(inputs, self.noise(inputs)))
        return self.outputs(*self.moments(inputs), training=training)

    def noise(self, inputs: Tensor) -> dict[str, Tensor]:
        """Draw what weights of `"shared"` and `"per_example"` are made of.

        Args:
            inputs: Shape ``(R, ..., d)``.

        Returns:
            Standard normal numbers as `posteriors`, with a leading axis of V draws: R,
            or one for each view of an example.
        """
        number = number_of_views() if self.draws == "shared" else ops.shape(inputs)[0]
        return {
            name: self._normal((number, *weights.mean.shape))
            for name, weights in self.posteriors.items()
        }

    def _normal(self, shape: tuple[int | Tensor, ...]) -> Tensor:
        dtype = self.wide_dtype
        return keras.random.normal(shape, dtype=dtype, seed=self.seed_generator)

    def multiplied(self, inputs: Tensor, noise: dict[str, Tensor]) -> Tensor:
        """Multiply inputs by drawn weights.

        Args:
            inputs: Shape ``(R, ..., d)``.
            noise: From `noise`, V draws; row r takes number ``r % V``.

        Returns:
            Shape ``(R, ..., p)``, before the activation.
        """
        posteriors = self.posteriors
        kernels = posteriors["kernel"].drawn(noise["kernel"])
        number, (d, p) = ops.shape(kernels)[0], self.kernel_mean.shape
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
            inputs: Shape ``(R, ..., d)``.

        Returns:
            Two tensors of shape ``(R, ..., p)``, before the activation, in at least
            float32.
        """
        dtype = self.wide_dtype
        rows = ops.cast(inputs, dtype)
        mean = ops.matmul(rows, ops.cast(self.kernel_mean, dtype))
        variances = ops.square(ops.cast(self.kernel_scale, dtype))
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

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        """Return the shape of the outputs."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> Config:
        """Return the arguments."""
        divergence, _ = self._divergences
        return {
            **super().get_config(),
            "units": self.units,
            "number_of_examples": divergence.number_of_examples,
            "prior_scale": divergence.prior_scale,
            "kl": divergence.kl,
            "draws": self.draws,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "initial_scale": self.initial_scale,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "seed": self.seed,
        }


def root_of(variance: Tensor) -> Tensor:
    """Return standard deviations, with a finite gradient where one is zero."""
    return ops.sqrt(ops.maximum(variance, 1e-30))
