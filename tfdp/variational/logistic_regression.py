"""Logistic regression with a posterior over its coefficients."""

import math

import keras
import numpy as np
from keras import ops

from tfdp._types import Config, Tensor
from tfdp.variational.layers import DenseProduct
from tfdp.variational.product import root_of

# For narrow Gaussians, of which these are nodes.
_NODES, _WEIGHTS = np.polynomial.hermite.hermgauss(32)
_LOG_WEIGHTS = np.log(_WEIGHTS) - math.log(math.pi) / 2

# For wide ones: numbers, and the logistic density there times the step between them.
_LOGISTIC_NODES = np.arange(-30, 30.25, 0.5)
_LOGISTIC_WEIGHTS = 0.5 / (2 + 2 * np.cosh(_LOGISTIC_NODES))


@keras.saving.register_keras_serializable(package="tfdp")
class PredictiveLogit(DenseProduct):
    """A `VariationalDense` whose outputs at inference are averaged over the posterior.

    The outputs are logits. At inference they are those of the mean probability: the
    integral of ``sigmoid(z)`` over the Gaussian of z, always the same for the same
    inputs. It is a sum over points of the Gaussian where that is narrow. Where it is
    wide, it is one over points of the logistic distribution, whose chance to lie below
    the Gaussian is the same integral.
    """

    def at_inference(self, inputs: Tensor) -> Tensor:
        """Return the logits of mean probabilities."""
        return self.averaged(*self.moments(inputs))

    def averaged(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the logits of the mean probabilities, given the moments of logits."""
        scale = root_of(variance)
        logit = ops.where(scale < 1, _of_narrow(mean, scale), _of_wide(mean, scale))
        return ops.cast(logit, self.compute_dtype)


def _of_narrow(mean: Tensor, scale: Tensor) -> Tensor:
    scale = ops.minimum(scale, 1.0)
    nodes = ops.convert_to_tensor(math.sqrt(2) * _NODES, mean.dtype)
    logits = mean[..., None] + scale[..., None] * nodes
    weights = ops.convert_to_tensor(_LOG_WEIGHTS, mean.dtype)
    positive, negative = (
        ops.logsumexp(weights + ops.log_sigmoid(each), axis=-1)
        for each in (logits, -logits)
    )
    return positive - negative


def _of_wide(mean: Tensor, scale: Tensor) -> Tensor:
    scale = ops.maximum(scale, 1.0)
    nodes = ops.convert_to_tensor(_LOGISTIC_NODES, mean.dtype)
    weights = ops.convert_to_tensor(_LOGISTIC_WEIGHTS, mean.dtype)
    distances = (mean[..., None] - nodes) / (math.sqrt(2) * scale[..., None])
    # Twice the chance above one half, of either sign: no digits are lost near zero.
    share = ops.sum(weights * ops.erf(distances), axis=-1)
    share = ops.clip(share, -1 + 1e-6, 1 - 1e-6)
    return ops.log1p(share) - ops.log1p(-share)


@keras.saving.register_keras_serializable(package="tfdp")
class BayesianLogisticRegression(keras.Model):
    """Logistic regression with a Gaussian posterior over its coefficients.

    Outputs are logits, of shape ``(N, 1)``: compile it with
    ``loss=keras.losses.BinaryCrossentropy(from_logits=True)``, whose value is minus the
    log-likelihood. At inference (`predict`, an export) they are the logits of the
    probabilities averaged over the posterior, without any chance.

    Args:
        number_of_examples: See `VariationalDense`.
        prior_scale: Likewise.
        draws: Likewise.
        kl: Likewise.
        use_bias: Whether there is an intercept, with a posterior too.
        initial_scale: See `VariationalDense`.
        rank: See `VariationalDense`. With at least 1, coefficients of inputs that are
            alike vary together, and `draws` must be `"shared"` or `"per_example"`.
        seed: Likewise.
        **kwargs: Name and dtype.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range.

    Example:
        >>> x = np.random.normal(size=(200, 2))
        >>> y = (x[:, :1] > 0).astype("float32")
        >>> model = BayesianLogisticRegression(number_of_examples=200)
        >>> private = tfdp.DPModel(model)
        >>> private.compile(
        ...     tfdp.optimizers.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        ...     loss=keras.losses.BinaryCrossentropy(from_logits=True),
        ... )
        >>> history = private.fit(x, y, batch_size=20, verbose=0)
        >>> keras.ops.sigmoid(model.predict(x[:3], verbose=0)).shape
        TensorShape([3, 1])
        >>> sorted(tfdp.variational.credible_intervals(model, 0.95))
        ['logit/bias', 'logit/kernel']
    """

    outputs_are_logits = True

    def __init__(
        self,
        *,
        number_of_examples: int,
        prior_scale: float = 1.0,
        draws: str = "local",
        kl: str = "outside",
        use_bias: bool = True,
        initial_scale: float = 0.1,
        rank: int = 0,
        seed: int | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self._config: Config = {
            "number_of_examples": number_of_examples,
            "prior_scale": prior_scale,
            "draws": draws,
            "kl": kl,
            "use_bias": use_bias,
            "initial_scale": initial_scale,
            "rank": rank,
            "seed": seed,
        }
        self.logit = PredictiveLogit(
            1, kernel_initializer="zeros", name="logit", **self._config
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Build the layer."""
        self.logit.build(input_shape)
        self.built = True

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Return logits."""
        return self.logit(inputs, training=training)

    def get_config(self) -> Config:
        """Return the arguments."""
        return {**super().get_config(), **self._config}
