"""Runs that are killed and go on: the ledger is never behind what ran."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tfdp._journal import Journal, journals
from tfdp.accounting import PoissonSteps

ROOT = Path(__file__).parents[1]
ROWS = 40

# Trains 10 steps an epoch and is killed after some steps; prints what there is at
# the end.
SCRIPT = """
import json, os, signal, sys
import keras, numpy as np, tfdp

folder, last_step, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
private = tfdp.DPModel(model, sampling=options["sampling"])
private.compile(
    tfdp.optimizers.DPAdam(0.1, l2_norm_clip=9.0, noise_multiplier=4.0),
    "mse",
    steps_per_execution=options["steps_per_execution"],
)
ran = []

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        ran.append(int(private.recorder.steps))
        if int(private.optimizer.iterations) >= last_step:
            os.kill(os.getpid(), signal.SIGKILL)

callbacks = [
    keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False),
    tfdp.callbacks.PrivacyBudget(1e-3, options.get("target")),
    Kill(),
]
if options["callback"] == "schedules":
    callbacks += [
        tfdp.callbacks.ClipNormScheduler(lambda step: 1 / (1 + step)),
        tfdp.callbacks.NoiseMultiplierScheduler(lambda step: 4.0 - 0.1 * (step // 10)),
    ]
private.fit(x, x[:, :1], batch_size=4, epochs=4, callbacks=callbacks, verbose=0)
print(json.dumps({
    "iterations": int(private.optimizer.iterations),
    "clip": float(private.optimizer.l2_norm_clip),
    "noise": float(private.optimizer.noise_multiplier),
    "segments": [[s.count, s.noise_multiplier] for s in private.ledger.segments],
    "cut_short": len(private.ledger.cut_short),
    "epsilon": private.epsilon(1e-3),
    "first": ran[0],
}))
"""


def run(folder, last_step, callback="none", sampling="poisson", **options):
    """Return what a process printed, or nothing if it was killed."""
    options = {"steps_per_execution": 1} | options
    options |= {"callback": callback, "sampling": sampling}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, str(last_step), json.dumps(options)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode == -signal.SIGKILL:
        return None
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_a_killed_run_goes_on_with_all_that_ran(tmp_path):
    assert run(tmp_path, 27) is None
    found = run(tmp_path, 1000)
    assert found["iterations"] == 40
    # 27 steps, then those of the third epoch again and the fourth.
    assert found["segments"] == [[47, 4.0]]
    assert found["first"] == 28
    assert found["cut_short"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"callback": "schedules"}, None),
        ({"sampling": "shuffle", "steps_per_execution": 5}, [5]),
    ],
    ids=str,
)
def test_whatever_is_trained(tmp_path, options, counts):
    whole = run(tmp_path / "whole", 1000, **options)
    assert run(tmp_path / "killed", 27, **options) is None
    found = run(tmp_path / "killed", 1000, **options)
    assert found["iterations"] == 40
    assert found["noise"] == whole["noise"]
    assert found["epsilon"] >= whole["epsilon"]
    if counts is not None:
        assert [count for count, _ in found["segments"]] == counts
    if options.get("callback") == "schedules":
        assert found["clip"] == whole["clip"] == 1 / 40
        # The seven steps that were lost had at least this noise.
        assert found["segments"] == [[10, 4.0], [10, 3.9], [17, 3.8], [10, 3.7]]


@pytest.mark.slow
def test_killed_twice_and_in_the_first_epoch(tmp_path):
    assert run(tmp_path, 4) is None
    # Nothing was saved: another four steps, then twelve of 20.
    assert run(tmp_path, 12) is None
    found = run(tmp_path, 1000)
    assert sum(count for count, _ in found["segments"]) == 4 + 12 + 30


@pytest.mark.slow
def test_a_budget_knows_of_the_steps_that_were_lost(tmp_path):
    target = tfdp.accounting.Ledger((PoissonSteps(37, 4.0, ROWS, 4),)).epsilon(1e-3)
    assert run(tmp_path, 27, target=target) is None
    found = run(tmp_path, 1000, target=target)
    assert found["segments"] == [[37, 4.0]]
    assert found["epsilon"] <= target
    assert found["iterations"] == 30


def private(sampling="poisson", noise_multiplier=1.5):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    wrapped = tfdp.DPModel(model, sampling=sampling)
    wrapped.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=noise_multiplier),
        "mse",
    )
    return wrapped


def fit(model, *callbacks, epochs=2):
    x = np.ones((ROWS, 3), "float32")
    model.fit(
        x, x[:, :1], batch_size=4, epochs=epochs, callbacks=[*callbacks], verbose=0
    )


class Stop(keras.callbacks.Callback):
    """Ends a run with an exception, as a crash does."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if not self.after:
            raise RuntimeError("stop")


@pytest.fixture
def backup(tmp_path):
    return keras.callbacks.BackupAndRestore(tmp_path / "backup")


@pytest.mark.slow
def test_a_run_that_ends_leaves_no_file(backup):
    fit(private(), backup)
    assert not Path(backup.backup_dir).exists()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_less_noise_set_by_a_callback_is_written_down(backup, sampling):
    model = private(sampling)
    lower = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(
            model.optimizer, "noise_multiplier", 1.5 - 0.1 * batch
        )
    )
    with pytest.raises(RuntimeError, match="stop"):
        fit(model, Stop(5), backup, lower)
    other = private(sampling)
    Journal(other.recorder, backup.backup_dir).restore()
    least = min(segment.noise_multiplier for segment in other.ledger.segments)
    assert least == pytest.approx(1.1)
    assert other.epsilon(1e-3) >= model.epsilon(1e-3)


def test_the_line_is_there_before_the_step(backup):
    counts = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            other = private()
            Journal(other.recorder, backup.backup_dir).restore()
            counts.append((other.ledger.steps, self.model.ledger.steps))

    fit(private(), backup, Reads(), epochs=1)
    assert counts == [(n, n) for n in range(1, 11)]


def test_a_line_that_was_cut_off_is_left_out(backup):
    with pytest.raises(RuntimeError, match="stop"):
        fit(private(), backup, Stop(3))
    path = next(Path(backup.backup_dir).glob("*.jsonl"))
    path.write_text(path.read_text() + "[4, 4")
    other = private()
    Journal(other.recorder, backup.backup_dir).restore()
    assert other.ledger.segments == (PoissonSteps(3, 1.5, ROWS, 4),)


@pytest.mark.slow
def test_a_pass_that_is_open_counts_again(backup):
    """Less noise in later steps of a pass counts for all of it."""
    model = private("shuffle")
    x = np.ones((ROWS, 3), "float32")
    lower = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: setattr(
            model.optimizer, "noise_multiplier", 1.5 - epoch
        )
    )
    data = tfdp.data.declare(
        tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(ROWS).batch(4),
        number_of_examples=ROWS,
        expected_batch_size=4,
        sampling="shuffle",
    )
    with pytest.raises(RuntimeError, match="stop"):
        model.fit(
            data,
            steps_per_epoch=5,
            epochs=2,
            callbacks=[Stop(7), backup, lower],
            verbose=0,
        )
    other = private("shuffle")
    Journal(other.recorder, backup.backup_dir).restore()
    assert other.ledger.segments[-1].noise_multiplier == 0.5
    assert other.epsilon(1e-3) >= model.epsilon(1e-3)


@pytest.mark.slow
def test_other_trainings_of_a_callback_are_written_down(backup):
    model, x = private(), np.ones((4, 3), "float32")
    model.optimizer.expect_batch_size(4)
    also = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: (
            batch == 3 and model.train_on_batch(x, x[:, :1])
        )
    )
    with pytest.raises(RuntimeError, match="stop"):
        fit(model, also, backup, Stop(6))
    other = private()
    Journal(other.recorder, backup.backup_dir).restore()
    assert other.ledger.merged() == model.ledger.merged()


@pytest.mark.slow
def test_restoring_twice_counts_once(backup):
    with pytest.raises(RuntimeError, match="stop"):
        fit(private(), backup, Stop(3))
    other = private()
    for _ in range(2):
        Journal(other.recorder, backup.backup_dir).restore()
    assert other.ledger.steps == 3


def test_only_backups_have_journals(tmp_path, caplog):
    recorder = private().recorder
    others = [
        keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
        tfdp.callbacks.PrivacyBudget(1e-3),
    ]
    assert journals(others, recorder) == []
    with caplog.at_level("WARNING", "absl"):
        remote = keras.callbacks.BackupAndRestore("gs://bucket/folder")
        assert journals([remote], recorder) == []
    assert "no journal in gs://bucket/folder" in caplog.text


@pytest.mark.slow
def test_a_checkpoint_brings_everything_back(tmp_path):
    path = tmp_path / "model.keras"
    fit(
        private(noise_multiplier=77.0),
        keras.callbacks.ModelCheckpoint(path),
        tfdp.callbacks.NoiseMultiplierScheduler(lambda step: 2.0 - 0.05 * step),
        tfdp.callbacks.AdaptiveQuantileClip(0.5),
    )
    loaded = keras.models.load_model(path)
    assert int(loaded.optimizer.iterations) == 20
    assert float(loaded.optimizer.noise_multiplier) == 2.0 - 0.05 * 19
    assert loaded.ledger.steps == 20
    clip = float(loaded.optimizer.l2_norm_clip)
    assert clip not in {1.0, 9.0}
    seen = []
    fit(
        loaded,
        tfdp.callbacks.NoiseMultiplierScheduler(lambda step: 2.0 - 0.05 * step),
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(logs["noise_multiplier"])
        ),
        epochs=1,
    )
    assert seen[0] == 1.0
    assert loaded.ledger.steps == 30
