"""What `DPModel.fit` calls while it runs: tfdp's own callbacks, then the user's."""

import collections
import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import keras
import numpy as np

from tfdp._types import Logs, Nest
from tfdp.data.training_data import TrainingData
from tfdp.distribute.replicas import Replicas
from tfdp.distribute.workers import check_same_model
from tfdp.errors import PrivacyBudgetError
from tfdp.runs.histories import remember_values
from tfdp.runs.recorder import LedgerRecorder
from tfdp.training.arguments import HARMLESS
from tfdp.training.callback import StepCallback
from tfdp.training.model_ledger import ModelLedger
from tfdp.training.releases import (
    Columns,
    OnlyReleased,
    ReleasingCallback,
    WatchingCallback,
)

# What to do where another metric is no way out.
_OUT = (
    "Leave it out: a row whose gradient is not finite is left out of the sum, and moves "
    "no weight."
)
_OTHER_ROWS = (
    "The rows of `validation_data` are trained on: give public ones, "
    "`validation_data=(x_public, y_public)`, or monitor what is released with noise, "
    "`tfdp.callbacks.PrivateEvaluation`."
)


class _OpenPlan:
    """Plans epochs to come as the longest before, of data that do not tell their length.

    Args:
        recorder: Of the training, which begins.
        epochs: How many it has.
    """

    def __init__(self, recorder: LedgerRecorder, epochs: int) -> None:
        self._recorder, self._to_come = recorder, epochs
        self._beginnings = recorder.beginnings
        self._before = np.array([0, recorder.steps])
        self._longest = np.array([0, 0])

    def end_epoch(self) -> None:
        """Plan what is to come after an epoch."""
        self._to_come -= 1
        recorder = self._recorder
        now = np.array([recorder.counter.releases_begun, recorder.steps])
        self._longest = np.maximum(self._longest, now - self._before)
        self._before = now
        # If a callback's step has begun another segment, each step counts there.
        counts_steps = recorder.beginnings != self._beginnings
        longest = int(self._longest[int(counts_steps)])
        recorder.plan(int(now[0]) + longest * self._to_come)


class LedgerCallback(StepCallback):
    """Tells the ledger where epochs begin, and ends `fit` when the budget is spent.

    Args:
        ledger: Of the model that trains.
        data: What it trains on.
        replicas: That train it.

    Raises:
        PrivacyBudgetError: When an epoch begins, if what was restored leaves no
            room for a step.
    """

    def __init__(
        self, ledger: ModelLedger, data: TrainingData, replicas: Replicas
    ) -> None:
        super().__init__()
        self._model_ledger = ledger
        self._recorder = ledger.recorder
        self._data = data
        self._replicas = replicas

    def on_train_begin(self, logs: Logs = None) -> None:
        """Expect to see the first epoch, which may not be the one asked for."""
        self._has_begun = False
        self._beginnings = self._recorder.beginnings

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begin a new pass, and remember which draws are used up."""
        if not self._has_begun:
            # After a backup was restored some epochs are not run.
            epochs = self.params["epochs"] - epoch
            planned = self._planned(epochs)
            self._recorder.plan(planned)
            self._open_plan = None
            if planned is None:
                self._open_plan = _OpenPlan(self._recorder, epochs)
            self._check_same_model(epoch)
            self._has_begun = True
        if self._data.begins_pass_each_epoch:
            self._recorder.counter.begin_release()
        drawn = self._data.drawn
        if drawn is not None and drawn.seeded:
            self._recorder.sampled_epochs = drawn.epoch
        # What a backup restored may have spent the budget.
        self._model_ledger.limit(1)

    def _planned(self, epochs: int) -> int | None:
        """Return how many releases the segment has with those of so many epochs."""
        if self._recorder.beginnings == self._beginnings:
            planned = self._data.planned_releases(epochs)
        else:
            # A callback has taken a step, and what comes counts as that does, step by step.
            steps = self._data.steps_per_epoch
            planned = None if steps is None else steps * epochs
        # Those of a callback's steps are beside the plan.
        begun = self._recorder.counter.releases_begun
        return None if planned is None else begun + planned

    def on_train_end(self, logs: Logs = None) -> None:
        """Tell the other processes, which may have epochs to run, if there was none."""
        if not self._has_begun:
            self._check_same_model(self.params["epochs"])

    def _check_same_model(self, epoch: int) -> None:
        optimizer = self.model.optimizer
        check_same_model(
            self._replicas,
            [*(self._recorder.weights() or []), *optimizer.variables],
            {
                "first epoch": epoch,
                "steps of the optimizer": int(optimizer.iterations.numpy()),
            },
            self._recorder.ledger,
        )

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Ask for the steps to come: others may have taken some meanwhile."""
        self._model_ledger.check_dials()
        with contextlib.suppress(PrivacyBudgetError):
            self._model_ledger.limit(self.model.steps_per_execution)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Stop if the budget has no room, also where the noise has changed."""
        try:
            self._model_ledger.limit(1)
        except PrivacyBudgetError:
            self._recorder.end_by_budget()
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Plan on, and recognise later copies of what the weights are now."""
        if self._open_plan is not None:
            self._open_plan.end_epoch()
        remember_values(self._recorder.weights() or [])


def flattened(callbacks: Nest) -> list[keras.callbacks.Callback]:
    """List callbacks, those in lists and in Keras's lists of callbacks included.

    Args:
        callbacks: As `fit` gets them.

    Returns:
        A flat list, in their order.
    """
    found = []
    for callback in keras.tree.flatten([] if callbacks is None else callbacks):
        if isinstance(callback, keras.callbacks.CallbackList):
            found += flattened(callback.callbacks)
        else:
            found.append(callback)
    return found


class ExactDecision(NamedTuple):
    """How a callback decides by what no noise covers.

    Attributes:
        callback: Its type.
        metric: What it decides by.
        received: The argument that says so.
        fix: What to do where another metric is no way out, None elsewhere.
    """

    callback: str
    metric: str
    received: str
    fix: str | None = None


def exact_decisions(
    callbacks: list[keras.callbacks.Callback], *, validates_private_rows: bool = False
) -> Iterator[ExactDecision]:
    """Find callbacks that decide by metrics of private rows without noise.

    Args:
        callbacks: Of a training, in a flat list.
        validates_private_rows: Whether the validation data are rows that are trained on.

    Yields:
        How each of them does.

    Raises:
        ValueError: If two callbacks release the same.
    """
    released = _released_by(callbacks)
    for callback in callbacks:
        name, monitor = type(callback).__name__, getattr(callback, "monitor", None)
        if isinstance(callback, keras.callbacks.TerminateOnNaN):
            yield ExactDecision(name, "loss", f"callbacks with `{name}`", _OUT)
        if not isinstance(monitor, str) or isinstance(callback, WatchingCallback):
            continue
        if not getattr(callback, "save_best_only", True):
            # It saves whatever the metric is.
            continue
        received = f"monitor={monitor!r}"
        if validates_private_rows and monitor.startswith("val_"):
            yield ExactDecision(name, monitor, received, _OTHER_ROWS)
        elif monitor not in released and not monitor.startswith(HARMLESS):
            yield ExactDecision(name, monitor, received)


class BatchCallback(keras.callbacks.Callback):
    """Tells the model, behind all other callbacks, that a batch of `fit` comes next."""

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Let the training function be called once."""
        self.model.expect_batch()


def sorted_callbacks(
    callbacks: Nest, *, validates_private_rows: bool = False
) -> list[keras.callbacks.Callback]:
    """List callbacks, tfdp's own first; warn of those that read private metrics.

    Metrics that were released with noise may be read: where a callback that releases
    them is among these, and nobody else logs under their names.

    Args:
        callbacks: What `fit` got.
        validates_private_rows: See `exact_decisions`.

    Returns:
        The callbacks as a flat list, with some of tfdp's between them.

    Raises:
        ValueError: If two of tfdp's callbacks set the same variable, or budget.
    """
    callbacks = flattened(callbacks)
    released = _released_by(callbacks)
    decisions = exact_decisions(
        callbacks, validates_private_rows=validates_private_rows
    )
    for each in decisions:
        other = (
            "Monitor a metric of public validation data, "
            f"`monitor='val_{each.metric}'`, or one that is released with noise: "
            "`tfdp.callbacks.PrivateEvaluation`."
        )
        warnings.warn(
            f"`{each.callback}` decides by a metric of the private data, and no noise "
            f"covers its decision. Received: {each.received}. {each.fix or other}",
            stacklevel=3,
        )
    setters = collections.defaultdict(list)
    for callback in callbacks:
        if isinstance(callback, StepCallback) and callback.sets is not None:
            setters[callback.sets].append(type(callback).__name__)
    alone = [kind.__name__ for each in callbacks if (kind := _alone_kind(each))]
    for name in set(alone):
        if alone.count(name) > 1:
            raise ValueError(
                f"Only one `{name}` may act in a `fit`: each sets what the other has set. "
                f"Received: callbacks={alone}. Leave all but one out; a `PrivacyBudget` takes "
                "a budget of the model and a project, `PrivacyBudget(delta, "
                "target_epsilon, project=...)`."
            )
    for name, types in setters.items():
        if len(types) > 1:
            raise ValueError(
                f"Only one callback may set `{name}`. Received: callbacks="
                f"[{', '.join(types)}]. Leave all but one out."
            )
    # What is released comes before all that may read it, and before what it costs.
    callbacks.sort(
        key=lambda item: (
            not isinstance(item, ReleasingCallback),
            not isinstance(item, StepCallback),
        )
    )
    return [each for one in callbacks for each in _with_guards(one, released)]


def _alone_kind(callback: keras.callbacks.Callback) -> type | None:
    """Return the class, its own or one above, of which `fit` takes one callback only."""
    if not (isinstance(callback, StepCallback) and callback.is_alone):
        return None
    return next(kind for kind in type(callback).__mro__ if "is_alone" in vars(kind))


def _with_guards(
    callback: keras.callbacks.Callback, released: Mapping[str, ReleasingCallback]
) -> Iterator[keras.callbacks.Callback]:
    """Yield a callback of Keras's between those that make the logs fit for it."""
    monitor = getattr(callback, "monitor", None)
    is_watching = isinstance(callback, WatchingCallback)
    if isinstance(monitor, str) and monitor in released and not is_watching:
        yield OnlyReleased(released[monitor], monitor)
    names = tuple(released)
    if not (names and isinstance(callback, keras.callbacks.CSVLogger)):
        yield callback
        return
    yield Columns(names, are_added=True)
    yield callback
    yield Columns(names, are_added=False)


def _released_by(
    callbacks: list[keras.callbacks.Callback],
) -> dict[str, ReleasingCallback]:
    """Return who releases which log.

    Raises:
        ValueError: If two callbacks release the same.
    """
    released: dict[str, ReleasingCallback] = {}
    for callback in callbacks:
        for name in callback.names if isinstance(callback, ReleasingCallback) else ():
            if name in released:
                raise ValueError(
                    f"Only one callback may release `{name}`. Received: two of them. "
                    "Leave one out, or give one of the metrics another name."
                )
            released[name] = callback
    return released
