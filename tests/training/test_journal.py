"""Runs that are killed and go on: the ledger is never behind what ran."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests import forks
from tfdp.accounting import (
    Ledger,
    PoissonSteps,
    Segment,
    ShuffledPasses,
    UnamplifiedSteps,
)
from tfdp.accounting.segments import segment_to_dict
from tfdp.runs.counter import UNDECLARED
from tfdp.runs.recorder import LedgerRecorder
from tfdp.sampling import Poisson, Shuffled
from tfdp.training.journal import Journal, restored_journals

ROWS = 40

POISSON = Poisson(ROWS, 4)
SHUFFLED = Shuffled(ROWS, 4)


# ------------------------------------------------------------------- what is written


class Run:
    """Steps of a recorder, each written down before it is counted."""

    def __init__(self, folder, scheme=POISSON, steps_per_execution=1, **options):
        self.trained = private()
        self.optimizer = self.trained.optimizer
        ledger = self.trained._model_ledger
        self.recorder = ledger.recorder
        self.recorder.begin(scheme, **options)
        self.journal = Journal(self.recorder, folder, ledger.noise_to_come)
        self.journal.set_model(SimpleNamespace(steps_per_execution=steps_per_execution))

    def restore(self):
        """What a run that is killed now leaves behind, as any other run finds it."""
        found = LedgerRecorder()
        Journal(found, self.journal.path.parent, list).restore()
        return found

    def begin_epoch(self):
        self.journal.on_epoch_begin(0)

    def step(self, noise_multiplier=1.5):
        self.optimizer.noise_multiplier = noise_multiplier
        self.journal.on_train_batch_begin(0)
        # The last moment before the step counts.
        killed = self.restore()
        for _ in range(self.journal.model.steps_per_execution):
            self.count(noise_multiplier)
        return killed

    def count(self, noise_multiplier):
        counter = self.recorder.counter
        counted = noise_multiplier / counter.scheme.sensitivity_in_clips
        counter.record(tf.constant(counted, tf.float64), 1.0)


@pytest.mark.smoke
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_steps_are_written_down_before_they_run(tmp_path, steps_per_execution):
    run = Run(tmp_path, steps_per_execution=steps_per_execution)
    assert run.restore().ledger.steps == 0
    for epoch in range(2):
        run.begin_epoch()
        for step in range(2):
            killed = run.step()
            steps = (2 * epoch + step + 1) * steps_per_execution
            assert killed.ledger.segments == (PoissonSteps(steps, 1.5, ROWS, 4),)
            assert killed.steps == steps
    assert killed.ledger == run.recorder.ledger


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    run = Run(tmp_path)
    run.begin_epoch()
    for _ in range(3):
        run.step()
    path = run.journal.path
    path.write_text(path.read_text() + "[4, 4")
    assert run.restore().ledger.segments == (PoissonSteps(3, 1.5, ROWS, 4),)


@pytest.mark.parametrize("scheme", [POISSON, SHUFFLED])
def test_the_least_noise_of_an_epoch_counts(tmp_path, scheme):
    run = Run(tmp_path, scheme)
    run.begin_epoch()
    for noise_multiplier in (1.5, 1.1, 1.3):
        killed = run.step(noise_multiplier)
    assert killed.ledger.segments == (Segment(scheme, 3, 1.1),)


def test_steps_of_one_execution_begin_several_passes(tmp_path):
    run = Run(tmp_path, SHUFFLED, steps_per_execution=3, steps_per_release=5)
    run.begin_epoch()
    for passes in (1, 2, 2, 3):
        expected = (ShuffledPasses(passes, 1.5, ROWS, 4),)
        assert run.step().ledger.segments == expected
        assert run.recorder.ledger.segments == expected


def test_a_unit_of_several_examples_halves_what_is_written(tmp_path):
    run = Run(tmp_path, SHUFFLED.in_units(2))
    run.begin_epoch()
    (found,) = run.step(1.5).ledger.segments
    assert found.noise_multiplier == 0.75


def test_a_pass_that_is_open_counts_again(tmp_path):
    """Less noise in later steps of a pass counts for all of it."""
    run = Run(tmp_path, SHUFFLED, steps_per_release=10)
    for noise_multiplier in (1.5, 0.5):
        run.begin_epoch()
        for _ in range(5):
            killed = run.step(noise_multiplier)
    assert run.recorder.ledger.segments == (ShuffledPasses(1, 0.5, ROWS, 4),)
    first = ShuffledPasses(1, 1.5, ROWS, 4)
    assert killed.ledger.segments == (first, ShuffledPasses(1, 0.5, ROWS, 4))
    # The eleventh step begins another.
    assert run.step(0.5).ledger.segments == (first, ShuffledPasses(2, 0.5, ROWS, 4))


def test_other_trainings_of_a_callback_are_written_down(tmp_path):
    run = Run(tmp_path)
    run.begin_epoch()
    run.step()
    run.recorder.begin(UNDECLARED)
    run.count(1.5)
    killed = run.step()
    assert killed.ledger.segments == (
        PoissonSteps(1, 1.5, ROWS, 4),
        UnamplifiedSteps(2, 1.5),
    )
    assert killed.ledger == run.recorder.ledger


def test_a_run_that_goes_on_and_is_killed_again_counts_in_all(tmp_path):
    run = Run(tmp_path)
    run.begin_epoch()
    for _ in range(3):
        run.step()
    again = Run(tmp_path)
    for _ in range(2):  # Restoring twice counts once.
        again.journal.restore()
    assert again.recorder.ledger.steps == 3
    again.begin_epoch()
    for _ in range(2):
        killed = again.step()
    assert killed.ledger.segments == (PoissonSteps(5, 1.5, ROWS, 4),)
    assert killed.steps == again.recorder.steps == 5


@pytest.mark.slow
def test_a_fit_that_was_interrupted_counts_what_it_took_from_there_on(tmp_path):
    """What might have run does not stand for what runs later, with less noise."""
    model = private(noise_multiplier=4.0, steps_per_execution=5)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(RuntimeError, match="stop"):
        fit(model, backup, Stop(1))
    model.optimizer.noise_multiplier = 0.5
    fit(model, backup)
    assert model.ledger.segments == (
        PoissonSteps(5, 4.0, ROWS, 4),
        PoissonSteps(10, 0.5, ROWS, 4),
    )


def test_a_journal_of_an_earlier_version_is_read(tmp_path):
    segment = PoissonSteps(10, 1.5, ROWS, 4)
    header = {
        "run": "killed",
        "segment": segment_to_dict(segment),
        "state": {
            "ledger": Ledger((segment,)).to_json(),
            "steps": 10,
            "sampled_epochs": 0,
            "runs": {"killed": 10},
            "budget": None,
            "last_clip": None,
        },
    }
    journal = Journal(LedgerRecorder(), tmp_path, list)
    journal.path.write_text(f"{json.dumps(header)}\n[3, 3, 1.25]\n")
    recorder = LedgerRecorder()
    for _ in range(2):
        Journal(recorder, tmp_path, list).restore()
        assert set(recorder.ledger.segments) == {
            segment,
            PoissonSteps(3, 1.25, ROWS, 4),
        }
    assert recorder.steps == 13


def test_only_backups_have_journals(tmp_path, caplog):
    recorder = private().recorder
    others = [
        keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
        tfdp.callbacks.PrivacyBudget(1e-3),
    ]
    assert restored_journals(others, recorder, list) == []
    with caplog.at_level("WARNING", "absl"):
        remote = keras.callbacks.BackupAndRestore("gs://bucket/folder")
        assert restored_journals([remote], recorder, list) == []
    assert "no journal in gs://bucket/folder" in caplog.text


# ------------------------------------------------------------------------- under fit


def private(noise_multiplier=1.5, **options):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    wrapped = tfdp.DPModel(model)
    wrapped.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=noise_multiplier),
        "mse",
        **options,
    )
    return wrapped


def fit(model, *callbacks, batch_size=4, epochs=1):
    x = np.ones((ROWS, 3), "float32")
    model.fit(
        x,
        x[:, :1],
        batch_size=batch_size,
        epochs=epochs,
        callbacks=[*callbacks],
        verbose=0,
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


def test_a_fit_that_stops_goes_on_with_all_that_ran(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    model = private(run_eagerly=True)
    less_noise = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(
            model.optimizer, "noise_multiplier", 1.25 - 0.125 * batch
        )
    )
    with pytest.raises(RuntimeError, match="stop"):
        fit(model, backup, less_noise, Stop(3), batch_size=10)
    # What callbacks behind the backup have set is in the line of the step.
    killed = LedgerRecorder()
    Journal(killed, backup.backup_dir, list).restore()
    assert killed.ledger.segments == (PoissonSteps(3, 1.0, ROWS, 10),)
    other = private(run_eagerly=True)
    seen = []
    sees = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(other.ledger.steps)
    )
    fit(other, sees, backup, batch_size=10)
    assert seen == [4, 5, 6, 7]
    assert other.ledger.segments == (
        PoissonSteps(3, 1.0, ROWS, 10),
        PoissonSteps(4, 1.5, ROWS, 10),
    )
    # A run that ends leaves no file.
    assert not Path(backup.backup_dir).exists()


class TakesSteps(keras.callbacks.Callback):
    """Takes two steps when an epoch ends, and crashes."""

    def __init__(self, take):
        super().__init__()
        self.take = take

    def on_epoch_end(self, epoch, logs=None):
        self.take(self.model)
        self.take(self.model)
        raise RuntimeError("stop")


def one_on_a_batch(model):
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))


def one_of_a_loop(model):
    clipped = tfdp.clipped_gradients(
        model.model,
        "mse",
        tf.ones((4, 3)),
        tf.ones((4, 1)),
        l2_norm_clip=model.optimizer.l2_norm_clip,
    )
    model.optimizer.apply_clipped_sum(clipped, model.model.trainable_variables)


def one_of_another_model(model):
    other = tfdp.DPModel(model.model)
    other.compile(
        tfdp.optimizers.DPSGD(
            0.1, l2_norm_clip=1.0, noise_multiplier=1.5, expected_batch_size=4
        ),
        "mse",
    )
    one_on_a_batch(other)


def one_of_its_own(model):
    model.train_step((tf.ones((4, 3)), tf.ones((4, 1))))


class StepsInAGraph(keras.callbacks.Callback):
    """Takes a step of a loop after each batch, in a graph; or lets another model `fit`."""

    def __init__(self, is_fit):
        super().__init__()
        self.is_fit = is_fit

    def on_train_begin(self, logs=None):
        self.step = tf.function(lambda: one_of_a_loop(self.model), autograph=False)
        self.other = tfdp.DPModel(keras.Sequential([self.model.model.layers[0]]))
        self.other.compile(
            tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.5), "mse"
        )

    def on_train_batch_end(self, batch, logs=None):
        if not self.is_fit:
            self.step()
        elif batch == 0:
            fit(self.other, batch_size=20)


@pytest.mark.parametrize("is_fit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_of_graphs_and_of_other_models_are_written_down(is_fit, tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    model = private()
    optimizer = tfdp.optimizers.DPSGD(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.5, expected_batch_size=10
    )
    model.compile(optimizer, "mse")
    with pytest.raises(RuntimeError, match="stop"):
        fit(model, StepsInAGraph(is_fit), backup, Stop(3), batch_size=10)
    killed = LedgerRecorder()
    Journal(killed, backup.backup_dir, list).restore()
    # The last one of the graph came after the last batch began.
    assert killed.all_steps == model.recorder.all_steps - (0 if is_fit else 1)


def test_a_run_that_has_ended_states_no_more_than_it_ran(tmp_path):
    """Of three steps that go together the last ones may be less."""
    backup = keras.callbacks.BackupAndRestore(
        tmp_path / "backup", delete_checkpoint=False
    )
    model = private(steps_per_execution=3)
    fit(model, backup, batch_size=10)
    found = LedgerRecorder()
    Journal(found, backup.backup_dir, list).restore()
    assert found.all_steps == model.ledger.steps == 4


TAKEN = [
    *(one_on_a_batch, one_of_a_loop),
    *(pytest.param(take, marks=pytest.mark.slow) for take in (one_of_another_model,)),
    one_of_its_own,
]


@pytest.mark.parametrize("take", TAKEN)
def test_single_steps_of_a_callback_are_written_down(take, tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    model = private()
    with pytest.raises(RuntimeError, match="stop"):
        fit(model, backup, TakesSteps(take), batch_size=10)
    killed = LedgerRecorder()
    Journal(killed, backup.backup_dir, list).restore()
    assert set(killed.ledger.segments) == {
        PoissonSteps(4, 1.5, ROWS, 10),
        UnamplifiedSteps(2, 1.5),
    }


# ------------------------------------------------------------------- real processes

# Trains 10 steps an epoch and is killed after some steps; prints what there is at
# the end.
SCRIPT = """
import json, os, signal, sys
import keras, numpy as np, tfdp

folder, last_step, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
private = tfdp.DPModel(model)
private.compile(
    tfdp.optimizers.DPAdam(0.1, l2_norm_clip=9.0, noise_multiplier=4.0), "mse"
)
ran = []

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        ran.append(private.recorder.steps)
        if int(private.optimizer.iterations) >= last_step:
            os.kill(os.getpid(), signal.SIGKILL)

callbacks = [
    keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False),
    tfdp.callbacks.PrivacyBudget(1e-3, options.get("target")),
    Kill(),
]
if options.get("callback") == "schedules":
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


def run(folder, last_step, **options):
    """Return what a process printed, or nothing if it was killed."""
    process = forks.run(SCRIPT, folder, last_step, json.dumps(options))
    if process.returncode == -signal.SIGKILL:
        return None
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_all_that_ran(tmp_path):
    assert run(tmp_path, 27, callback="schedules") is None
    found = run(tmp_path, 1000, callback="schedules")
    assert found["iterations"] == 40
    assert found["first"] == 28
    assert found["cut_short"] == 0
    assert found["noise"] == 3.7
    assert found["clip"] == 1 / 40
    # 27 steps, then those of the third epoch again and the fourth; the seven that
    # were lost had at least this noise.
    assert found["segments"] == [[10, 4.0], [10, 3.9], [17, 3.8], [10, 3.7]]


@pytest.mark.slow
def test_killed_twice_and_in_the_first_epoch(tmp_path):
    target = tfdp.accounting.Ledger((PoissonSteps(37, 4.0, ROWS, 4),)).epsilon(1e-3)
    assert run(tmp_path, 4, target=target) is None
    # Nothing was saved: another four steps, then twelve of 20.
    assert run(tmp_path, 12, target=target) is None
    # A budget knows of the steps that were lost.
    found = run(tmp_path, 1000, target=target)
    assert found["segments"] == [[37, 4.0]]
    assert found["epsilon"] <= target
    assert found["iterations"] == 31


@pytest.mark.slow
def test_a_checkpoint_brings_everything_back(tmp_path):
    path = tmp_path / "model.keras"
    fit(
        private(noise_multiplier=77.0),
        keras.callbacks.ModelCheckpoint(path),
        tfdp.callbacks.NoiseMultiplierScheduler(lambda step: 2.0 - 0.05 * step),
        tfdp.callbacks.AdaptiveQuantileClip(0.5),
        epochs=2,
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
    )
    assert seen[0] == 1.0
    assert loaded.ledger.steps == 30
