"""A posterior that knows how far noise moved it: the mixture of those on the way."""

import math

import keras
import numpy as np
from absl import logging

from tfdp import _validate
from tfdp.variational.base import Weights
from tfdp.variational.posterior import weights_by_name


class AveragedPosterior(keras.callbacks.Callback):
    """Replaces the posterior at the end of `fit` by that of the steps before.

    Each step leaves means m and standard deviations s that its noise has moved. The last
    ones are as far off as any. In their place come those of the equal mixture of the
    Gaussians that the last steps of the training left, which for each weight has ::

        mean = E[m]
        variance = E[s**2] + Var[m]

    with means and variance over these steps (as the diagonal of SWAG [1]_, for
    posteriors). So more noise gives wider intervals, which `credible_intervals`,
    `predictive_mean` and exports then have, and a mean that the noise has moved less. The
    intervals are wider than they must be: they have the error of single steps, not that of
    their mean.

    Guarantees:
        What it reads are weights that private training has released, all of them: the
        epsilon of DP-SGD is that of the whole sequence of its weights, so this costs
        nothing more.

    Of weights that vary together (`rank`), the correlations stay those of the last step.

    What it does not know is clipping, which may move every step alike, and weights that
    have not arrived yet: train until they go to and fro, and begin with
    ``initial_scale=prior_scale``, so that a posterior that did not move is the prior.

    Args:
        share: Of the planned steps, those last ones that count; more than 0, at most 1.
            Of a training that ends before them, the last posterior stays, and the log
            says so. With `steps_per_execution`, the last step of each execution counts.

    Raises:
        TypeError: If `share` is not a number.
        ValueError: If it is out of its range; when training begins, if the number of
            steps is not known beforehand or there is no variational layer.

    Example:
        >>> x = np.random.normal(size=(200, 2))
        >>> y = (x[:, :1] > 0).astype("float32")
        >>> model = tfdp.variational.BayesianLogisticRegression(
        ...     number_of_examples=200, prior_scale=1.0, initial_scale=1.0
        ... )
        >>> private = tfdp.DPModel(model)
        >>> private.compile(
        ...     tfdp.optimizers.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        ...     loss=keras.losses.BinaryCrossentropy(from_logits=True),
        ... )
        >>> history = private.fit(
        ...     x,
        ...     y,
        ...     batch_size=20,
        ...     epochs=2,
        ...     verbose=0,
        ...     callbacks=[AveragedPosterior()],
        ... )
        >>> low, high = tfdp.variational.credible_intervals(model)["logit/kernel"]
        >>> bool(np.all(low < high))
        True

    References:
        .. [1] Maddox et al., "A Simple Baseline for Bayesian Uncertainty in Deep
           Learning", NeurIPS 2019, section 3.2. https://arxiv.org/abs/1902.02476
    """

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.share = _validate.positive("share", share)
        if share > 1:
            raise ValueError(
                "`share` must be at most 1. Received: "
                f"share={share}. Use `AveragedPosterior(0.5)`."
            )

    def on_train_begin(self, logs: object = None) -> None:
        """Forget what was seen, and count the steps that are not read."""
        steps = self.params.get("steps")
        if steps is None:
            raise ValueError(
                "`AveragedPosterior` must know how many steps there will be. Received: "
                "data of unknown length. Use `fit(..., steps_per_epoch=100)`."
            )
        # Refused before the first step, not after it; a model may not be built yet.
        if self.model.built:
            next(weights_by_name(self.model))
        self._steps = steps
        self._begin: int | None = None
        self._seen = 0
        self._sums: dict[str, np.ndarray] = {}

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Find the first step that counts, of all that are left to be trained."""
        self._epoch = epoch
        if self._begin is None:
            planned = (self.params["epochs"] - epoch) * self._steps
            self._begin = epoch * self._steps + math.floor((1 - self.share) * planned)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Read the posterior that a step has left."""
        if self._begin is None or self._epoch * self._steps + batch < self._begin:
            return
        self._seen += 1
        for name, weights in weights_by_name(self.model):
            mean, scale = (
                keras.ops.convert_to_numpy(each).astype("float64")
                for each in (weights.mean, weights.scale)
            )
            moments = np.stack([mean, mean**2 + scale**2])
            self._sums[name] = self._sums.get(name, 0.0) + moments

    def on_train_end(self, logs: object = None) -> None:
        """Put the mixture's mean and standard deviation in the place of the last."""
        if not self._seen:
            logging.warning(
                "`AveragedPosterior` left the posterior of the last step: the training "
                "ended before the last %g of its planned steps.",
                self.share,
            )
            return
        for name, weights in weights_by_name(self.model):
            mean, square = self._sums[name] / self._seen
            _assign(weights, mean, np.sqrt(np.maximum(square - mean**2, 1e-30)))


def _assign(weights: Weights, mean: np.ndarray, scale: np.ndarray) -> None:
    weights.mean.assign(mean)
    # The inverse of softplus, which is the scale itself where that is large.
    weights.rho.assign(scale + np.log(-np.expm1(-scale)))
