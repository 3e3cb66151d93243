"""Stops by a metric that was released with noise."""

from collections.abc import Sequence

import keras

from tfdp import _validate
from tfdp._types import Logs, Nest
from tfdp.training.model_ledger import ModelLedger
from tfdp.training.releases import ReleasingCallback, WatchingCallback, direction_of

_PREFIX = "private_"


class PrivateEarlyStopping(WatchingCallback):
    """Ends a training when a released metric has stopped improving.

    It reads what a `tfdp.callbacks.PrivateEvaluation` of the same `fit` releases, and
    nothing else. So steps that are not taken are not owed: the ledger has what was run, and
    not what was planned. But where the run ends depends on the data, so statements and
    reports give each moment at which it could have ended a delta of its own, which makes
    their epsilon somewhat larger than that of the ledger; see `Ledger.delta_at_end`.
    (`keras.callbacks.EarlyStopping` on the same log decides as privately, but counts
    epochs between releases as without improvement, and the ledger, which does not know
    how it decides, has the training as one that was cut short.)

    Args:
        monitor: Name of a log of `PrivateEvaluation`, such as `"private_accuracy"`.
        min_delta: Least change that is an improvement, at least 0; by default the
            standard error of the released value.
        patience: Releases without improvement after which the training ends.
        verbose: As in Keras.
        mode: `"min"`, `"max"`, or `"auto"`, which goes by the name.
        baseline: As in Keras: the value that is to be beaten. It must not come from the
            data.
        restore_best_weights: As in Keras: whether the weights of the epoch with the
            best value are put back in the end.
        start_from_epoch: As in Keras.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If a number is out of its range, or `monitor` is not the name of a
            released metric.

    Example:
        >>> stop = tfdp.callbacks.PrivateEarlyStopping("private_accuracy", patience=3)
    """

    def __init__(
        self,
        monitor: Nest = "private_accuracy",
        *,
        min_delta: float | None = None,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__()
        if not (isinstance(monitor, str) and monitor.startswith(_PREFIX)):
            raise ValueError(
                "`monitor` must be a metric that `PrivateEvaluation` releases: any other "
                f"one decides by exact values of the data. Received: monitor={monitor!r}. "
                "Use `monitor='private_accuracy'` beside "
                "`PrivateEvaluation(['accuracy'], noise_multiplier=20.0)`."
            )
        if min_delta is not None:
            min_delta = _validate.non_negative("min_delta", min_delta)
        if baseline is not None:
            baseline = _validate.number("baseline", baseline)
        self.monitor = monitor
        self.min_delta = min_delta
        self.mode = "max" if direction_of(monitor, mode) > 0 else "min"
        self._options = {
            "patience": _validate.seed("patience", patience),
            "verbose": verbose,
            "baseline": baseline,
            "restore_best_weights": restore_best_weights,
            "start_from_epoch": _validate.seed("start_from_epoch", start_from_epoch),
        }

    def watch(
        self, releasing: Sequence[ReleasingCallback], ledger: ModelLedger
    ) -> None:
        """Find who releases what it monitors."""
        sources = [each for each in releasing if self.monitor in each.names]
        if not sources:
            names = [name for each in releasing for name in each.names]
            raise ValueError(
                "`monitor` must be a log of a `PrivateEvaluation` in the same `fit`. "
                f"Received: monitor={self.monitor!r}, released are "
                f"{', '.join(map(repr, names)) or 'no metrics'}. Use "
                "`callbacks=[PrivateEvaluation(['accuracy'], noise_multiplier=20.0), "
                "PrivateEarlyStopping('private_accuracy')]`."
            )
        self._source, self._ledger = sources[0], ledger
        min_delta = self.min_delta
        if min_delta is None:
            min_delta = self._source.standard_error(self.monitor)
        self._stopping = keras.callbacks.EarlyStopping(
            self.monitor, min_delta=min_delta, mode=self.mode, **self._options
        )
        self._stopping.set_model(self.model)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Begin to wait anew."""
        self._stopping.on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Decide, if something was released in this epoch."""
        if self._source.released_epoch != epoch:
            return
        has_stopped = self.model.stop_training
        self._stopping.on_epoch_end(
            epoch, {self.monitor: self._source.released[self.monitor]}
        )
        if self.model.stop_training and not has_stopped:
            self._ledger.recorder.end_by_release()

    def on_train_end(self, logs: Logs = None) -> None:
        """Put the best weights back, if that was asked for."""
        self._stopping.on_train_end(logs)
