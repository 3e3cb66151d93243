"""What callbacks know of a training whose metrics they release with noise."""

import abc
import dataclasses
from collections.abc import Sequence

import keras

from tfdp._types import Logs, Nest
from tfdp._validate import one_of
from tfdp.accounting import Segment
from tfdp.data.training_data import TrainingData
from tfdp.distribute.replicas import Replicas
from tfdp.errors import NotPrivateError
from tfdp.losses.objective import Objective
from tfdp.training.callback import StepCallback
from tfdp.training.model_ledger import ModelLedger

# How names end of which it is known.
_LESS_IS_BETTER = ("loss", "error", "perplexity")
_MORE_IS_BETTER = ("accuracy", "acc", "auc", "precision", "recall", "f1_score")


def direction_of(metric: str, mode: str) -> int:
    """Return 1 if more of a metric is better, else -1.

    Args:
        metric: Its name in a history.
        mode: ``"max"`` or ``"min"``; ``"auto"`` to go by the name.

    Raises:
        ValueError: If the name does not tell, or the mode is another one.
    """
    mode = one_of("mode", mode, ("auto", "min", "max"))
    if mode != "auto":
        return 1 if mode == "max" else -1
    if metric.endswith(_LESS_IS_BETTER):
        return -1
    if metric.endswith(_MORE_IS_BETTER):
        return 1
    raise ValueError(
        "`mode` must say whether more is better where a name does not tell. Received: "
        f"mode='auto' for {metric!r}. Use `mode='max'` or `mode='min'`."
    )


@dataclasses.dataclass(frozen=True)
class Trained:
    """A training that is about to begin.

    Attributes:
        objective: The model, and the loss of each example.
        outputs: Nest of `tf.TensorSpec` of what the model predicts.
        data: What it trains on.
        ledger: Of the model.
        replicas: That train it.
        epochs: That are to run.
        unit: What is protected, `"example"` or `"user"`.
    """

    objective: Objective
    outputs: Nest
    data: TrainingData
    ledger: ModelLedger
    replicas: Replicas
    epochs: range
    unit: str


class ReleasingCallback(StepCallback, abc.ABC):
    """A callback that releases metrics with noise, and logs them.

    Attributes:
        released: The values released last, by the names that they are logged under;
            empty before there are some. Nobody else can log under these names.
        names: Those names, also before there are values.
        released_epoch: When that was; None before.
        sees_other_rows: Whether it looks at private rows that the model does not train on,
            which have a ledger of their own.
    """

    sees_other_rows = False
    released: dict[str, float]
    names: tuple[str, ...]
    released_epoch: int | None

    @abc.abstractmethod
    def prepare(self, trained: Trained) -> Segment:
        """See the training before it begins.

        Args:
            trained: It.

        Returns:
            All that is to be released of the rows that the model trains on, as the
            model's ledger has it. Each needs `trained.ledger.release(self)` before.
        """

    @abc.abstractmethod
    def standard_error(self, name: str) -> float:
        """Return that of a log of `names`, 0 if it is a standard error itself."""


class WatchingCallback(StepCallback, abc.ABC):
    """A callback that decides by released values, and by nothing else."""

    @abc.abstractmethod
    def watch(
        self, releasing: Sequence[ReleasingCallback], ledger: ModelLedger
    ) -> None:
        """See, before the training begins, who releases something in it.

        Args:
            releasing: They.
            ledger: Of the model.
        """


def prepared_releases(
    trained: Trained, callbacks: Sequence[keras.callbacks.Callback]
) -> dict[ReleasingCallback, Segment]:
    """Let callbacks that release metrics see what they will release them of.

    Args:
        trained: The training, which is about to begin.
        callbacks: All of its callbacks.

    Returns:
        What each of those is to release.
    """
    found = [each for each in callbacks if isinstance(each, ReleasingCallback)]
    releases = {callback: callback.prepare(trained) for callback in found}
    for callback in callbacks:
        if isinstance(callback, WatchingCallback):
            callback.watch(found, trained.ledger)
    return releases


class OnlyReleased(keras.callbacks.Callback):
    """Refuses, before a callback reads it, what somebody else logs under the name.

    Args:
        callback: Releases it.
        name: Of the log.
    """

    def __init__(self, callback: ReleasingCallback, name: str) -> None:
        super().__init__()
        self._callback = callback
        self._name = name

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Compare what is logged with what was released."""
        check_logs(logs, self._name, self._callback.released.get(self._name))


def check_logs(logs: Logs, name: str, released: float | None) -> None:
    """Refuse a log that is not what was released.

    Args:
        logs: Of an epoch.
        name: Of the log.
        released: What is to be there; None for nothing.

    Raises:
        NotPrivateError: If something else is.
    """
    if logs is not None and logs.get(name) != released:
        raise NotPrivateError(
            f"`{name}` is what `PrivateEvaluation` releases, and decisions by it are "
            f"covered. Received: logs[{name!r}] of somebody else. Rename that metric or "
            "log."
        )


class Columns(keras.callbacks.Callback):
    """Lets a `CSVLogger`, which takes its columns from the first epoch, have more.

    One of these runs before the logger, and one behind it.

    Args:
        names: Of columns for what is logged in later epochs.
        are_added: Whether this is the one before.
    """

    _MISSING = "NA"

    def __init__(self, names: tuple[str, ...], *, are_added: bool) -> None:
        super().__init__()
        self._names = names
        self._are_added = are_added

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add what is missing, as the logger would write it, or take it out again."""
        if logs is None:
            return
        for name in self._names:
            if self._are_added:
                logs.setdefault(name, self._MISSING)
            elif logs.get(name) == self._MISSING:
                del logs[name]
