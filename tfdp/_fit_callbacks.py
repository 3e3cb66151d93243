"""What `DPModel.fit` calls while it runs: tfdp's own callbacks, then the user's."""

import collections
import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp._replicas import Replicas
from tfdp._workers import check_same_model
from tfdp.ascent.losses import AscentLoss
from tfdp.ascent.released import ReleasedGradient
from tfdp.clipping import ClippedSum
from tfdp.data import PoissonDataset
from tfdp.data.training_data import TrainingData
from tfdp.errors import PrivacyBudgetError
from tfdp.histories import remember_values
from tfdp.optimizers import DPOptimizer
from tfdp.recorder import LedgerRecorder

# How names of logged values begin that do not tell of the private rows, or are noised.
_HARMLESS = ("val_", "public_", "epsilon", "l2_norm_clip", "noise_multiplier")


@dataclasses.dataclass(frozen=True)
class Step:
    """What callbacks see of a step, in the training graph.

    Attributes:
        optimizer: Has not moved the weights yet.
        clipped_sum: What was clipped, on all replicas, not noised, with the C that
            clipped. Noise is drawn with that one, whatever callbacks do to the
            optimizer's.
        stream: Of the step's noise; see `tfdp.noise.noise_of_query`.
        clip: Clips the gradients of the plain loss with a C, under the dropout masks
            of the step, for callbacks that set `clips_again`: those of the step's
            batch or, as second argument, of ``(x, y, sample_weight)``.
        ascent: The loss that takes gradients uphill, if any.
        released: The gradient that was released last, for `SAT`.
    """

    optimizer: DPOptimizer
    clipped_sum: ClippedSum
    stream: tf.Tensor
    clip: Callable[..., ClippedSum]
    ascent: AscentLoss | None
    released: ReleasedGradient

    @property
    def expected_units(self) -> tf.Tensor:
        """The public divisor of the sum, a float64 scalar tensor."""
        return self.optimizer.expected_units(self.clipped_sum.examples_per_unit)


class PrivacyCallback(keras.callbacks.Callback):
    """Base of tfdp's callbacks: `fit` runs them first, so that loggers see them.

    Attributes:
        sets: The variable of the optimizer that the callback sets, and logs.
        clips_again: Whether `during_step` calls `Step.clip`.
    """

    sets: str | None = None
    clips_again = False

    def before_training(self, model: Any, planned_steps: int | None) -> None:
        """See the `DPModel`, and how many steps it will take, before `fit` begins."""

    def before_step(self, optimizer: DPOptimizer) -> None:
        """Set what a step needs; runs in the training graph."""

    def during_step(self, step: Step) -> None:
        """Learn from a step before weights move; runs in the training graph."""

    def scheduled_noise_multiplier(self, iteration: tf.Tensor) -> tf.Tensor | None:
        """Say what noise multiplier the callback sets.

        Args:
            iteration: The optimizer's `iterations`, int64, of any shape.

        Returns:
            float64, of that shape; None if it sets none.
        """

    def query_noise_multiplier(self, iteration: tf.Tensor) -> tf.Tensor | None:
        """Say how much noise protects what the callback learns from a step.

        Args:
            iteration: See `scheduled_noise_multiplier`.

        Returns:
            Noise over the sensitivity of units of one example, infinite for steps
            that it learns nothing from, float64, of that shape; None if it never
            does.
        """

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Log what the callback has set."""
        self._log(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log what the callback has set last."""
        self._log(logs)

    def _log(self, logs: dict[str, Any] | None) -> None:
        if self.sets is not None and logs is not None:
            logs[self.sets] = float(getattr(self.model.optimizer, self.sets).numpy())

    @classmethod
    def has_own(cls, *names: str) -> bool:
        """Tell whether the callback does more in one of these methods than its base."""
        return any(
            getattr(cls, name) is not getattr(PrivacyCallback, name) for name in names
        )


class LedgerCallback(PrivacyCallback):
    """Tells the ledger where epochs begin, and ends `fit` when the budget is spent.

    Args:
        recorder: Of the model that trains.
        data: What it trains on.
        replicas: That train it.

    Raises:
        PrivacyBudgetError: When an epoch begins, if what was restored leaves no
            room for a step.
    """

    def __init__(
        self, recorder: LedgerRecorder, data: TrainingData, replicas: Replicas
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._data = data
        self._replicas = replicas

    def on_train_begin(self, logs: Any = None) -> None:
        """Expect to see the first epoch, which may not be the one asked for."""
        self._has_begun = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin a new pass, and remember which draws are used up."""
        if not self._has_begun:
            # After a backup was restored some epochs are not run.
            epochs = self.params["epochs"] - epoch
            self._recorder.planned_items = planned_items(self._data, epochs)
            check_same_model(self._replicas, self.model, epoch)
            self._has_begun = True
        if self._data.begins_pass_each_epoch:
            self._recorder.begin_item()
        if isinstance(self._data.x, PoissonDataset):
            self._recorder.sampled_epochs = self._data.x.epoch
        # What a backup restored may have spent the budget.
        self.model.limit_to_budget()

    def on_train_end(self, logs: Any = None) -> None:
        """Tell the other processes, which may have epochs to run, if there was none."""
        if not self._has_begun:
            check_same_model(self._replicas, self.model, self.params["epochs"])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Ask for the steps to come: others may have taken some meanwhile."""
        with contextlib.suppress(PrivacyBudgetError):
            self.model.limit_to_budget(self.model.steps_per_execution)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop if the budget has no room, also where the noise has changed."""
        try:
            self.model.limit_to_budget()
        except PrivacyBudgetError:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Recognise later copies of what the weights are now."""
        remember_values(self.model.model.weights)


def _flattened(callbacks: Any) -> list[keras.callbacks.Callback]:
    """List callbacks, those in lists and in Keras's lists of callbacks included."""
    found = []
    for callback in keras.tree.flatten([] if callbacks is None else callbacks):
        if isinstance(callback, keras.callbacks.CallbackList):
            found += _flattened(callback.callbacks)
        else:
            found.append(callback)
    return found


def planned_items(data: TrainingData, epochs: int) -> int | None:
    """Return how many steps or passes the ledger is to count in some epochs.

    Args:
        data: To train on.
        epochs: How many.

    Returns:
        Their number, None if the data do not tell.
    """
    if data.begins_pass_each_epoch and data.batches_per_pass > 1:
        return epochs
    steps = data.steps_per_epoch and data.steps_per_epoch * epochs
    return steps and math.ceil(steps / data.batches_per_pass)


def sorted_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """List callbacks, tfdp's own first; warn of those that read private metrics.

    Args:
        callbacks: What `fit` got.

    Returns:
        The callbacks as a flat list.

    Raises:
        ValueError: If two of tfdp's callbacks set the same variable.
    """
    callbacks = _flattened(callbacks)
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and not monitor.startswith(_HARMLESS):
            warnings.warn(
                f"`{type(callback).__name__}` decides by a metric of the private "
                "data, and no noise covers its decision. Received: monitor="
                f"{monitor!r}. Monitor a metric of public validation data, "
                f"`monitor='val_{monitor}'`.",
                stacklevel=3,
            )
    setters = collections.defaultdict(list)
    for callback in callbacks:
        if isinstance(callback, PrivacyCallback) and callback.sets is not None:
            setters[callback.sets].append(type(callback).__name__)
    for name, types in setters.items():
        if len(types) > 1:
            raise ValueError(
                f"Only one callback may set `{name}`. Received: callbacks="
                f"[{', '.join(types)}]. Leave all but one out."
            )
    return sorted(callbacks, key=lambda item: not isinstance(item, PrivacyCallback))
