"""What holds replicas together: one strategy, one model, and nobody lost."""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._replicas import Replicas
from tfdp.data.shares import DIFFERENT_BATCHES
from tfdp.data.training_data import TrainingData
from tfdp.errors import NotPrivateError, WorkerLostError
from tfdp.optimizers import DPOptimizer


def replicas_of(model: keras.Model) -> Replicas:
    """Return the replicas that have copies of a model's weights.

    Args:
        model: To be wrapped here.

    Returns:
        Those of the strategy that it was made with.

    Raises:
        ValueError: If it is wrapped in the scope of another one.
    """
    replicas = Replicas(_keras.strategy_of_model(model))
    if replicas.strategy is None and tf.distribute.has_strategy():
        raise ValueError(
            f"Model `{model.name}` must be made where it is wrapped: in the scope of "
            "the `tf.distribute` strategy. Received: a model made outside of the scope "
            f"of {tf.distribute.get_strategy()!r}. Use `with strategy.scope(): model = "
            "keras.Sequential([...])`."
        )
    return replicas


def check_distribution(
    replicas: Replicas, optimizer: DPOptimizer, steps_per_execution: int
) -> None:
    """Refuse an optimizer of other replicas than the model's, and several steps at once.

    Args:
        replicas: Of the model.
        optimizer: That is to train it.
        steps_per_execution: Of `compile`.

    Raises:
        ValueError: If they do not go together.
    """
    made_in = _keras.strategy_of_optimizer(optimizer.inner_optimizer)
    strategy = replicas.strategy
    is_other = made_in is not strategy
    if strategy is None:
        is_other = made_in.num_replicas_in_sync > 1
    if is_other:
        raise ValueError(
            "Optimizer and model must be made in the scope of the same "
            f"`tf.distribute` strategy. Received: optimizer={optimizer.name!r} made in "
            f"that of {made_in!r}, and a model made in that of {strategy!r}. Use "
            "`with strategy.scope(): model = ...; optimizer = ...`."
        )
    if strategy is not None and steps_per_execution != 1:
        raise ValueError(
            "Replicas take one step at a time. Received: steps_per_execution="
            f"{steps_per_execution!r} with {strategy!r}. Leave it out."
        )


def check_agreement(
    replicas: Replicas, model: Any, epoch: int, data: TrainingData
) -> None:
    """Let all processes count the same, and refuse to begin where they differ.

    Args:
        replicas: Of the model.
        model: The `DPModel`.
        epoch: Number of the epoch that begins first.
        data: What `fit` was given.

    Raises:
        ValueError: If they would not train the same model alike.
    """
    if replicas.processes == 1:
        return
    recorder = model.recorder
    states = replicas.texts_of_all(recorder.state())
    recorder.agree(states, replicas.texts_of_all(recorder.run)[0])
    checksum = 0
    for variable in [*model.model.weights, *model.optimizer.variables]:
        value = keras.ops.convert_to_numpy(variable.value)
        checksum = zlib.crc32(value.tobytes(), checksum)
    facts = {
        "first epoch": epoch,
        "steps of the optimizer": int(model.optimizer.iterations.numpy()),
        "number of examples": getattr(data.segment, "number_of_examples", 0),
        "batch size": data.expected_batch_size or 0,
        "steps in an epoch": data.steps_per_epoch or 0,
        "checksum of the weights and the optimizer": checksum,
        "checksum of the ledger": zlib.crc32(model.ledger.to_json().encode()),
    }
    of_all = replicas.of_all(list(facts.values()))
    different = [
        f"{name}={sorted(set(values.tolist()))}"
        for name, values in zip(facts, of_all.T, strict=True)
        if len(set(values.tolist())) > 1
    ]
    if different:
        raise ValueError(
            "All workers must begin with the same model, on the same data. Received: "
            f"{', '.join(different)}. Where their backups differ, copy the directory "
            "of the worker that is ahead over those of the others."
        )


@contextlib.contextmanager
def lost_workers(replicas: Replicas) -> Iterator[None]:
    """Say what to do when another process is gone, or has other batches.

    Args:
        replicas: Of the model.

    Raises:
        NotPrivateError: If the processes read different batches.
        WorkerLostError: If one is gone.
        InvalidArgumentError: Of TensorFlow, if it is about something else.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if DIFFERENT_BATCHES not in str(error):
            raise
        raise NotPrivateError(
            f"{DIFFERENT_BATCHES}: an example could count twice in a step. Received: "
            "a `tf.data` pipeline that differs between processes. Let it read the "
            "same rows in the same order everywhere, `dataset.shuffle(..., seed=1)`, "
            "without random changes of the rows (`DPModel(augmentation=...)` makes "
            "those); or use arrays."
        ) from error
    except _OF_LOST_WORKERS as error:
        if replicas.processes == 1:
            raise
        raise WorkerLostError(
            "Another worker of this training is gone, and no step is taken without "
            f"it. Received: {type(error).__name__} in one of {replicas.processes} "
            "processes. Start all workers again: with `keras.callbacks."
            "BackupAndRestore(directory_of_this_worker)` they go on from the last "
            "epoch, and the ledger has every step that was taken."
        ) from error


# What collective operations raise when a process has died or does not answer.
_OF_LOST_WORKERS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
