"""What `DPModel.fit` does around the steps that Keras runs."""

import contextlib
from collections.abc import Iterator

import keras

from tfdp import _keras
from tfdp._types import Logs
from tfdp.data.training_data import TrainingData
from tfdp.distribute.shares import check_shareable, shared_out
from tfdp.distribute.workers import agree_on_training, lost_workers
from tfdp.errors import NotPrivateError
from tfdp.losses import regularizers
from tfdp.training.callback import StepCallback, find_queries
from tfdp.training.fit_callbacks import LedgerCallback
from tfdp.training.journal import restored_journals
from tfdp.training.releases import Trained, prepared_releases
from tfdp.training.sessions import Sessions


@contextlib.contextmanager
def fitting(
    sessions: Sessions,
    data: TrainingData,
    callbacks: list[keras.callbacks.Callback],
    epochs: range,
    class_weight: dict[int, float] | None,
) -> Iterator[tuple[TrainingData, list[keras.callbacks.Callback]]]:
    """Settle what a call of `fit` is made for, and count what Keras runs in it.

    Args:
        sessions: Of the private model.
        data: What `fit` was given.
        callbacks: Likewise, tfdp's own first.
        epochs: That are to run.
        class_weight: What replicas weigh the rows of their shares with.

    Yields:
        Data and callbacks as Keras gets them.
    """
    private, ledger, replicas = sessions.private, sessions.ledger, sessions.replicas
    recorder, optimizer = ledger.recorder, private.optimizer
    steps = data.steps_per_epoch and data.steps_per_epoch * len(epochs)
    acting = [each for each in callbacks if isinstance(each, StepCallback)]
    first = LedgerCallback(ledger, optimizer, data, replicas)
    with _only_fit(sessions), lost_workers(replicas):
        if replicas.strategy is not None:
            check_shareable(data)
        kept = restored_journals(callbacks, recorder, ledger.noise_to_come)
        paths = [journal.path for journal in kept]
        agree_on_training(replicas, recorder, optimizer, data, epochs, paths)
        for callback in acting:
            callback.before_training(optimizer, steps)
        clipper = sessions.clipper(data.scheme)
        data = sessions.check(data, clipper)
        regularizers.check_number_of_examples(
            private.trainable_variables, data.scheme.number_of_examples
        )
        sessions.renew_keys()
        for callback in acting:
            callback.set_model(private)
            find_queries(callback, optimizer)
        session = sessions.made(data.scheme, clipper, recorder, acting)
        sessions.settle(session)
        trained = Trained(
            session.objective,
            sessions.checked.outputs[1],
            data,
            ledger,
            replicas,
            epochs,
            private.unit,
        )
        releases = prepared_releases(trained, callbacks)
        recorder.journals = kept
        with ledger.counting(session, data, len(epochs), steps, releases):
            if replicas.strategy is not None:
                data = shared_out(
                    data,
                    replicas,
                    epochs=len(epochs),
                    rows_per_unit=session.clipper.rows_per_unit,
                    class_weight=class_weight,
                )
            else:
                data = data.as_pipeline(private.steps_per_execution)
            sessions.acting = session.callbacks
            try:
                yield data, [first, *callbacks, *kept, _BatchCallback(sessions)]
            finally:
                session.released.put_back()
                # Keras would export what layers have measured of the rows.
                _keras.reset_metrics(private.model)


class _BatchCallback(keras.callbacks.Callback):
    """Tells, behind all other callbacks, that a batch of `fit` comes next."""

    def __init__(self, sessions: Sessions) -> None:
        super().__init__()
        self._sessions = sessions

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Let the training function be called once."""
        self._sessions.expects_batch = True


@contextlib.contextmanager
def _only_fit(sessions: Sessions) -> Iterator[None]:
    """Refuse a `fit` inside of this one."""
    if sessions.acting is not None:
        raise NotPrivateError(
            "Only one `fit` of a private model may run: the steps of both would be "
            "clipped as those of the last one. Received: model="
            f"{sessions.private.name!r}, in the midst of its own `fit`. Call it when that "
            "has returned, or take single steps in the callback: "
            "`private.train_on_batch(x, y)`."
        )
    sessions.acting, sessions.expects_batch = (), False
    try:
        yield
    finally:
        sessions.acting = None
