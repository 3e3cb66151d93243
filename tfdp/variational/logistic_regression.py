"""Logistic regression with a posterior over its coefficients."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from tfdp.variational.layers import VariationalDense

_NODES, _WEIGHTS = np.polynomial.hermite.hermgauss(32)


@keras.saving.register_keras_serializable(package="tfdp")
class PredictiveLogit(VariationalDense):
    """A `VariationalDense` whose outputs at inference are averaged over the posterior.

    The outputs are logits. At inference they are those of the mean probability: the
    integral of ``sigmoid(z)`` over the Gaussian of z, by Gauss-Hermite quadrature with
    32 nodes, always the same for the same inputs.
    """

    def outputs(self, mean: Any, variance: Any, *, training: bool | None) -> Any:
        """Draw logits in training; average their probabilities at inference."""
        if training:
            return super().outputs(mean, variance, training=training)
        offsets = ops.sqrt(2 * ops.maximum(variance, 1e-30))[..., None]
        nodes = ops.convert_to_tensor(_NODES, mean.dtype)
        logits = mean[..., None] + offsets * nodes
        shares = ops.convert_to_tensor(
            np.log(_WEIGHTS) - math.log(math.pi) / 2, mean.dtype
        )
        positive, negative = (
            ops.logsumexp(shares + ops.log_sigmoid(each), axis=-1)
            for each in (logits, -logits)
        )
        return ops.cast(positive - negative, self.compute_dtype)


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

    def __init__(
        self,
        *,
        number_of_examples: int,
        prior_scale: float = 1.0,
        draws: str = "local",
        kl: str = "outside",
        use_bias: bool = True,
        initial_scale: float = 0.1,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._config: dict[str, Any] = {
            "number_of_examples": number_of_examples,
            "prior_scale": prior_scale,
            "draws": draws,
            "kl": kl,
            "use_bias": use_bias,
            "initial_scale": initial_scale,
            "seed": seed,
        }
        self.logit = PredictiveLogit(
            1, kernel_initializer="zeros", name="logit", **self._config
        )

    def build(self, input_shape: Any) -> None:
        """Build the layer."""
        self.logit.build(input_shape)
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Return logits."""
        return self.logit(inputs, training=training)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**super().get_config(), **self._config}
