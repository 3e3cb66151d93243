"""The weight of the divergence from the prior, as it rises over a training."""

import keras
import numpy as np
from absl import logging

from tfdp import _keras, _validate
from tfdp.callbacks.schedulers import Schedule, tabulate
from tfdp.variational.base import VariationalLayer
from tfdp.variational.posterior import unwrapped


class KLAnnealing(keras.callbacks.Callback):
    """Sets the weight of the divergence from the prior for each step.

    The loss of a batch is its mean of minus the log-likelihood, plus ``kl_weight * KL /
    N``. A weight that rises from 0 lets the means find what the data say before the prior
    pulls at them [1]_ [2]_. Works under `keras.Model` and `tfdp.DPModel`. The step is the
    optimizer's `iterations`, which are saved, so that a run that resumes goes on where it
    was; the weight itself is saved with the layers. `fit` logs `kl_weight`.

    Guarantees:
        The weight is a public number and no data enter the divergence: whatever the
        schedule, an example's gradient is clipped as before, and epsilon is the same.

    **At the end the weight must be 1**, so that the divergence counts 1 / N: only then is
    the loss minus the evidence lower bound over N, and what is trained a posterior. Let
    it be 1 for long enough to arrive there. If it is another one at the end, the log says
    so.

    Args:
        schedule: A number of steps, over which the weight rises from 0 to 1 in equal
            parts. Or a `keras.optimizers.schedules` object or a function, from the
            number of a step, 0 at first, to a weight of at least 0; it must not depend
            on private data. With `steps_per_execution`, all steps of an execution have
            the weight of its first.

    Raises:
        TypeError: If `schedule` is none of them.
        ValueError: If a number of steps is less than 1; when training begins, if a weight
            is negative or not finite, the number of steps is not known beforehand or
            there is no variational layer.

    Example:
        >>> x, y = np.random.normal(size=(100, 3)), np.ones((100, 1))
        >>> model = keras.Sequential([
        ...     keras.Input((3,)),
        ...     tfdp.variational.VariationalDense(1, number_of_examples=100),
        ... ])
        >>> private = tfdp.DPModel(model)
        >>> private.compile(
        ...     tfdp.optimizers.DPAdam(0.01, l2_norm_clip=1.0, noise_multiplier=1.0),
        ...     loss="mse",
        ... )
        >>> history = private.fit(
        ...     x, y, batch_size=10, epochs=3, verbose=0, callbacks=[KLAnnealing(16)]
        ... )
        >>> history.history["kl_weight"]
        [0.5625, 1.0, 1.0]

    References:
        .. [1] Bowman et al., "Generating Sentences from a Continuous Space", CoNLL 2016,
           section 3.1. https://arxiv.org/abs/1511.06349
        .. [2] Sønderby et al., "Ladder Variational Autoencoders", NeurIPS 2016, on
           warm-up. https://arxiv.org/abs/1602.02282
    """

    def __init__(self, schedule: int | Schedule) -> None:
        super().__init__()
        if not callable(schedule):
            steps = _validate.positive_int(
                "schedule", schedule, "Use `KLAnnealing(1000)` for a thousand steps."
            )
            schedule = keras.optimizers.schedules.PolynomialDecay(0.0, steps, 1.0)
        self.schedule = schedule
        self._layers: list[VariationalLayer] = []
        self._weights, self._weight = np.ones(1), 1.0

    def on_train_begin(self, logs: object = None) -> None:
        """Compute the weights of all steps, and check them before the first."""
        self._layers = [
            layer
            for layer in _keras.flatten_layers(unwrapped(self.model))
            if isinstance(layer, VariationalLayer)
        ]
        if not self._layers:
            raise ValueError(
                "`KLAnnealing` must have a variational layer. Received: model "
                f"`{self.model.name}` without one. Use "
                "`tfdp.variational.VariationalDense(...)`."
            )
        steps = self.params.get("steps")
        if steps is None:
            raise ValueError(
                "`KLAnnealing` must know how many steps there will be. Received: data of "
                "unknown length. Use `fit(..., steps_per_epoch=100)`."
            )
        # From the first on: a backup may set the run back by any number of steps.
        last = int(self.model.optimizer.iterations) + self.params["epochs"] * steps
        self._weights = tabulate(self.schedule, max(last, 1))
        for step, weight in enumerate(self._weights):
            _validate.non_negative(f"schedule({step})", float(weight))
        self._set_weight()

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Set the weight of the step that begins."""
        # Always: a backup that was restored has brought its own.
        self._set_weight()

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Log the weight of the epoch's last step."""
        if logs is not None:
            logs["kl_weight"] = self._weight

    def on_train_end(self, logs: object = None) -> None:
        """Say so if it is no posterior that was trained."""
        if abs(self._weight - 1) > 1e-6:
            logging.warning(
                "`KLAnnealing` ended with a weight of %g. The divergence from the prior "
                "must count 1 / N in the end, with a weight of 1, for a posterior.",
                self._weight,
            )

    def _set_weight(self) -> None:
        """Set the weight of the step that is next."""
        step = min(int(self.model.optimizer.iterations), len(self._weights) - 1)
        self._weight = float(self._weights[step])
        for layer in self._layers:
            layer.kl_weight.assign(self._weight)
