"""Private training on several machines, or on several processes of this one.

    python examples/multi_worker.py
    python examples/multi_worker.py --workers=3 --kill_in_epoch=4

Without `TF_CONFIG` this starts the workers as processes on this machine, on the digits
that come with scikit-learn. When one ends in an error, the others notice within seconds
and end too; all are started again, and go on from the last epoch. `--kill_in_epoch`
lets the last worker die once to show it: the ledger still has every step that was taken.

On machines of your own, run the same file on each, with `TF_CONFIG` set as TensorFlow
wants it; `MultiWorkerMirroredStrategy` takes all GPUs of a machine:

    TF_CONFIG='{"cluster": {"worker": ["host0:12345", "host1:12345"]},
                "task": {"type": "worker", "index": 0}}' \
        python examples/multi_worker.py --output_dir=DIRECTORY

What goes between the workers is not encrypted: gradients that have no noise yet, and the
seed of the noise. Their network must be one you trust.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdp

_WORKERS = flags.DEFINE_integer(
    "workers", 2, "Processes to start on this machine.", lower_bound=1
)
_RESTARTS = flags.DEFINE_integer(
    "restarts", 3, "How often to start all again when one fails.", lower_bound=0
)
_KILL_IN_EPOCH = flags.DEFINE_integer(
    "kill_in_epoch", None, "Let the last worker die once, in the middle of this epoch."
)
_TARGET_EPSILON = flags.DEFINE_float(
    "target_epsilon", 3.5, "Epsilon that the training may cost."
)
_DELTA = flags.DEFINE_float("delta", 1e-4, "Delta of the guarantee.")
_EPOCHS = flags.DEFINE_integer("epochs", 20, "Number of epochs.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    256,
    "Expected number of images in a batch, of all workers together.",
    lower_bound=1,
    upper_bound=1437,
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir",
    "runs/multi_worker",
    "Folder for the trained model, logs and backups; each worker has its own part.",
)

# In which workers notice that another is gone, with some more.
_SECONDS_TO_NOTICE = 60


def main(argv: Sequence[str]) -> None:
    """Be a worker if `TF_CONFIG` says so, and start workers if there is none."""
    if len(argv) > 1:
        sys.exit(f"multi_worker: everything is a flag. Received: {' '.join(argv[1:])}.")
    try:
        if "TF_CONFIG" in os.environ:
            train()
        else:
            launch(argv[0])
    except (OSError, ValueError, tfdp.errors.WorkerLostError) as error:
        sys.exit(f"multi_worker: {error}")


def launch(script: str) -> None:
    """Start workers, and start them again where one fails."""
    noise_multiplier()  # Wrong flags are found before any worker starts.
    output = Path(_OUTPUT_DIR.value)
    output.mkdir(parents=True, exist_ok=True)
    for attempt in range(_RESTARTS.value + 1):
        print(f"Starting {_WORKERS.value} workers; their logs are in {output}{os.sep}")
        if run_workers(script, output):
            return
        if attempt < _RESTARTS.value:
            print("A worker failed. Starting all again, from the last epoch.")
    sys.exit(
        f"multi_worker: workers failed {_RESTARTS.value + 1} times. Received: "
        f"restarts={_RESTARTS.value}. The reason is at the end of "
        f"{output / 'worker_0.log'} or of another worker's log."
    )


def run_workers(script: str, output: Path) -> bool:
    """Run all workers until they are done, or one has failed."""
    addresses = [f"localhost:{port}" for port in free_ports(_WORKERS.value)]
    workers = []
    for index in range(_WORKERS.value):
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        with (output / f"worker_{index}.log").open("a") as log:
            # The chief's progress is shown.
            stdout = None if index == 0 else log
            workers.append(
                subprocess.Popen(
                    [sys.executable, script, *flags.FLAGS.flags_into_string().split()],
                    env=environment,
                    stdout=stdout,
                    stderr=log,
                )
            )
    try:
        return wait_for(workers)
    finally:
        for worker in workers:
            worker.kill()


def wait_for(workers: list[Any]) -> bool:
    """Wait for all workers; where one fails, only until the others have noticed."""
    end = float("inf")
    while True:
        codes = [worker.poll() for worker in workers]
        if None not in codes or time.monotonic() > end:
            return all(code == 0 for code in codes)
        if end == float("inf") and any(codes):
            end = time.monotonic() + _SECONDS_TO_NOTICE
        time.sleep(0.2)


def free_ports(number: int) -> list[int]:
    """Find ports of this machine that nobody uses."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def load_data() -> tuple[Any, Any]:
    """Load the digits: training and test images with labels."""
    digits = load_digits()
    x = (digits.images[..., np.newaxis] / 16).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(
        x, digits.target, test_size=0.2, random_state=0
    )
    return (x_train, y_train), (x_test, y_test)


def noise_multiplier() -> float:
    """Find the noise for the target epsilon; the number of workers has no part in it."""
    return tfdp.calibrate_noise_multiplier(
        _TARGET_EPSILON.value,
        n=len(load_data()[0][0]),
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        delta=_DELTA.value,
    )


def train() -> None:
    """Train as one of the workers."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    task = strategy.cluster_resolver
    is_chief = task.task_id == 0
    output = Path(_OUTPUT_DIR.value) / f"worker_{task.task_id}"
    output.mkdir(parents=True, exist_ok=True)
    train_data, test_data = load_data()
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ])
        optimizer = tfdp.optimizers.DPAdam(
            learning_rate=0.01, l2_norm_clip=1.0, noise_multiplier=noise_multiplier()
        )
    private = tfdp.DPModel(model)
    private.compile(
        optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    callbacks = [
        tfdp.callbacks.PrivacyBudget(
            _DELTA.value, target_epsilon=_TARGET_EPSILON.value
        ),
        # Every worker saves and restores, in a directory of its own.
        keras.callbacks.BackupAndRestore(str(output / "backup")),
    ]
    is_last = task.task_id == len(task.cluster_spec().as_dict()["worker"]) - 1
    if _KILL_IN_EPOCH.value is not None and is_last:
        callbacks.append(DieOnce(_KILL_IN_EPOCH.value, output / "has_died"))
    private.fit(
        *train_data,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        validation_data=test_data,
        callbacks=callbacks,
        verbose=2 if is_chief else 0,
    )
    # Saving reads metrics of all workers: each saves, and the chief's is the one to keep.
    model.save(output / "digits.keras")
    if is_chief:
        print("\n" + private.privacy_statement(_DELTA.value))
        print(f"Epsilon: {private.epsilon(_DELTA.value):.3f} at delta {_DELTA.value:g}")
        print(f"The trained model: {output / 'digits.keras'}", flush=True)


class DieOnce(keras.callbacks.Callback):
    """Ends this process in the middle of an epoch, if it has not done so before.

    Args:
        epoch: Number of the epoch, from 1.
        mark: File that remembers it.
    """

    def __init__(self, epoch: int, mark: Path) -> None:
        super().__init__()
        self.epoch = epoch
        self.mark = mark

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See whether it is the epoch."""
        self.is_due = epoch + 1 == self.epoch and not self.mark.exists()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Die in its third step."""
        if self.is_due and batch == 2:
            self.mark.touch()
            os._exit(1)


if __name__ == "__main__":
    app.run(main)
