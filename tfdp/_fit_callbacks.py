"""What `DPModel.fit` calls while it runs: tfdp's own callbacks, then the user's."""

import warnings
from typing import Any

import keras

from tfdp.data import PoissonDataset
from tfdp.data.training_data import TrainingData
from tfdp.errors import PrivacyBudgetError
from tfdp.optimizers import DPOptimizer
from tfdp.recorder import LedgerRecorder


class PrivacyCallback(keras.callbacks.Callback):
    """Base of tfdp's callbacks: `fit` runs them first, so that loggers see them."""

    def before_training(self, model: Any, planned_steps: int | None) -> None:
        """See the `DPModel`, and how many steps it will take, before `fit` begins."""

    def before_step(self, optimizer: DPOptimizer) -> None:
        """Set what a step needs; runs in the training graph."""


class LedgerCallback(PrivacyCallback):
    """Tells the ledger where epochs begin, and ends `fit` when the budget is spent.

    Args:
        recorder: Of the model that trains.
        data: What it trains on.
    """

    def __init__(self, recorder: LedgerRecorder, data: TrainingData) -> None:
        super().__init__()
        self._recorder = recorder
        self._data = data

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin a new pass, and remember which draws are used up."""
        if self._data.begins_pass_each_epoch:
            self._recorder.begin_item()
        if isinstance(self._data.x, PoissonDataset):
            self._recorder.sampled_epochs = self._data.x.epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop if the budget has no room, also where the noise has changed."""
        try:
            self.model.enforce_budget()
        except PrivacyBudgetError:
            self.model.stop_training = True


def sorted_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """List callbacks, tfdp's own first; warn of those that read private metrics.

    Args:
        callbacks: What `fit` got.

    Returns:
        The callbacks as a flat list.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    callbacks = keras.tree.flatten(callbacks or [])
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and not monitor.startswith(("val_", "epsilon")):
            warnings.warn(
                f"`{type(callback).__name__}` decides by a metric of the private "
                "data, and no noise covers its decision. Received: monitor="
                f"{monitor!r}. Monitor a metric of public validation data, "
                f"`monitor='val_{monitor}'`.",
                stacklevel=3,
            )
    return sorted(callbacks, key=lambda item: not isinstance(item, PrivacyCallback))
