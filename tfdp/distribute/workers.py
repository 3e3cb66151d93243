"""What replicas must have in common to train together, and errors when one is lost."""

import contextlib
import json
import socket
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Variable
from tfdp.accounting import Ledger
from tfdp.data.training_data import TrainingData
from tfdp.distribute.replicas import STRATEGIES, Replicas
from tfdp.distribute.shares import DIFFERENT_STEPS
from tfdp.errors import NotPrivateError, WorkerLostError
from tfdp.optimizers import DPOptimizer
from tfdp.runs.recorder import LedgerRecorder


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
    if replicas.strategy is None:
        if tf.distribute.has_strategy():
            raise ValueError(
                f"Model `{model.name}` must be made where it is wrapped: in the scope "
                "of the `tf.distribute` strategy. Received: a model made outside of "
                f"the scope of {tf.distribute.get_strategy()!r}. Use `with "
                "strategy.scope(): model = keras.Sequential([...])`."
            )
        return replicas
    foreign = [
        f"`{weight.path}`"
        for weight in model.weights
        if getattr(weight.value, "distribute_strategy", None) is not replicas.strategy
    ]
    if foreign:
        raise ValueError(
            f"All layers of model `{model.name}` must be made in the scope of its "
            f"`tf.distribute` strategy. Received: {', '.join(foreign)}, made "
            "outside. Make the layers in `with strategy.scope():` too."
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
    # Without a strategy Keras may name TensorFlow's default one.
    is_other = (
        isinstance(made_in, STRATEGIES) if strategy is None else made_in is not strategy
    )
    if is_other:
        raise ValueError(
            "Optimizer and model must be made in the scope of the same "
            f"`tf.distribute` strategy. Received: optimizer={optimizer.name!r} made in "
            f"that of {made_in!r}, and a model made in that of {strategy!r}. Use "
            "`with strategy.scope(): model = ...; optimizer = ...`."
        )
    if strategy is None:
        return
    inner = optimizer.inner_optimizer
    if inner.use_ema and inner.ema_overwrite_frequency:
        raise ValueError(
            "Replicas put moving averages into the weights at the end only. Received: "
            f"ema_overwrite_frequency={inner.ema_overwrite_frequency!r} with "
            f"{strategy!r}. Leave it out."
        )
    if steps_per_execution != 1:
        raise ValueError(
            "Replicas take one step at a time. Received: steps_per_execution="
            f"{steps_per_execution!r} with {strategy!r}. Leave it out."
        )


def check_scope(replicas: Replicas) -> None:
    """Refuse to train in the scope of another strategy than the model's.

    Args:
        replicas: Of the model.

    Raises:
        ValueError: If this is called in one.
    """
    if tf.distribute.has_strategy() and (
        tf.distribute.get_strategy() is not replicas.strategy
    ):
        raise ValueError(
            "A model trains on the replicas that it was made for. Received: a call in "
            f"the scope of {tf.distribute.get_strategy()!r}, and a model made in that "
            f"of {replicas.strategy!r}. Make model and optimizer there too."
        )


def agree_on_training(
    replicas: Replicas,
    recorder: LedgerRecorder,
    optimizer: DPOptimizer,
    data: TrainingData,
    epochs: range,
    journals: list[Path],
) -> None:
    """Let all processes count alike, and refuse where they were asked for different.

    Args:
        replicas: Of the model.
        recorder: Of the model.
        optimizer: That is to train it.
        data: What `fit` was given.
        epochs: That it was asked for.
        journals: Files beside the backups.

    Raises:
        ValueError: If arguments differ, or backups do not.
    """
    if replicas.processes == 1:
        return
    states = replicas.texts_of_all(recorder.state())
    runs = replicas.texts_of_all(recorder.run)
    new = replicas.texts_of_all(uuid.uuid4().hex)[0]
    # Where they have counted alike, as after an earlier `fit`, the run goes on.
    is_agreed = len(set(runs)) == len(set(states)) == 1
    recorder.agree(states, runs[0] if is_agreed else new)
    is_pipeline = isinstance(data.x, tf.data.Dataset)
    facts = {
        "data": f"{data.scheme}",
        "batches": f"{int(data.x.cardinality())}" if is_pipeline else "",
        "steps in an epoch": f"{data.steps_per_epoch}",
        "epochs": f"{epochs.start} to {epochs.stop}",
        "num_microbatches": f"{optimizer.num_microbatches}",
        "l2_norm_clip": f"{float(optimizer.l2_norm_clip.numpy()):g}",
        "noise_multiplier": f"{float(optimizer.noise_multiplier.numpy()):g}",
    }
    _refuse_different(replicas, facts)
    # Each process writes its own backup: in one folder they would overwrite others'.
    folders = [f"{socket.gethostname()}:{each.resolve()}" for each in journals]
    per_process = replicas.number // replicas.processes
    of_processes = replicas.texts_of_all(json.dumps(folders))[::per_process]
    used = [folder for text in of_processes for folder in json.loads(text)]
    if len(set(used)) < len(used):
        raise ValueError(
            "Each worker needs a backup directory of its own. Received: "
            f"BackupAndRestore in {', '.join(sorted(set(used)))} of several workers. "
            "Use `BackupAndRestore(f'backup/worker_{index}')`."
        )


def check_same_model(
    replicas: Replicas, variables: list[Variable], facts: dict[str, int], ledger: Ledger
) -> None:
    """Refuse to begin where processes would not go on from the same model.

    Args:
        replicas: Of the model.
        variables: Of model and optimizer, with what backups restored.
        facts: That must be the same, by name.
        ledger: What was run.

    Raises:
        ValueError: If they differ.
    """
    if replicas.processes == 1:
        return
    checksum = 0
    for variable in variables:
        value = keras.ops.convert_to_numpy(variable.value)
        checksum = zlib.crc32(value.tobytes(), checksum)
    facts = {
        **facts,
        "checksum of the weights and the optimizer": checksum,
        "checksum of the ledger": zlib.crc32(ledger.to_json().encode()),
    }
    _refuse_different(replicas, facts)


def _refuse_different(replicas: Replicas, facts: Mapping[str, int | str]) -> None:
    """Refuse to go on where a process has a fact that another one has not."""
    of_all = [json.loads(text) for text in replicas.texts_of_all(json.dumps(facts))]
    found = {name: {each[name] for each in of_all} for name in facts}
    different = [
        f"{name}={sorted(values)}" for name, values in found.items() if len(values) > 1
    ]
    if different:
        raise ValueError(
            "All workers must do the same, with the same model and data. Received: "
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
        if DIFFERENT_STEPS not in str(error):
            raise
        raise NotPrivateError(
            f"{DIFFERENT_STEPS}: an example could count twice, or with too little "
            "noise. Received: a batch, clip norm, noise multiplier or number of steps "
            "that differs between processes. Let a `tf.data` pipeline read the same "
            "rows in the same order everywhere, `dataset.shuffle(..., seed=1)`, without "
            "random changes (`DPModel(augmentation=...)` makes those), and callbacks "
            "do the same on every worker. Then start all processes anew: those that have "
            "stopped here wait for each other."
        ) from error
    except _OF_LOST_WORKERS as error:
        # Internal errors are of many kinds; those of collectives say so.
        is_other = isinstance(error, tf.errors.InternalError) and (
            "ollective" not in str(error)
        )
        if replicas.processes == 1 or is_other:
            raise
        raise WorkerLostError(
            "Another worker of this training is gone, or does something else, and no "
            f"step is taken without it. Received: {type(error).__name__} in one of {replicas.processes} "
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
