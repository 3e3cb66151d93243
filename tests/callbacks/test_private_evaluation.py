"""PrivateEvaluation: what it releases, what that costs, and what it refuses."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests import forks
from tests.small import data, private
from tfdp.accounting import Ledger, PoissonSteps, Segment
from tfdp.callbacks import PrivateEvaluation
from tfdp.data.rows import rows_of
from tfdp.errors import NotPrivateError
from tfdp.mechanisms.noised_mean import NoisedMean
from tfdp.runs.recorder import LedgerRecorder
from tfdp.sampling import Poisson, PoissonUsers
from tfdp.training.journal import Journal

ROWS = 40
DELTA = 1e-3
# So little noise that values can be compared.
LITTLE = 1e-9


def rows(number=ROWS):
    return data(number, outlier=False)


def fit(model, *callbacks, xy=None, epochs=1, batch_size=10, **options):
    x, y = rows() if xy is None else xy
    return model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        callbacks=list(callbacks),
        verbose=0,
        **options,
    ).history


def released(number, count, noise_multiplier, what="private_accuracy"):
    return Segment(Poisson(number, number), count, noise_multiplier, what)


# ------------------------------------------------------------------------ the values


@pytest.mark.smoke
def test_what_is_released_is_logged_and_counted(tmp_path):
    evaluation = PrivateEvaluation(
        ["accuracy", "loss"], every=2, noise_multiplier=8.0, ranges={"loss": (0, 4)}
    )
    names = "private_accuracy", "private_loss"
    model = private()
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    history = fit(model, log, evaluation, epochs=5)
    for name, half_width in zip(names, [0.5, 2.0], strict=True):
        error = 8 * math.sqrt(2) * half_width / ROWS
        # What was released stays until the next release.
        first, again, second, last = history[name]
        assert first == again != second == last
        assert history[f"{name}_standard_error"] == pytest.approx([error] * 4)
    what = "private_accuracy, private_loss"
    assert model.ledger.segments == (
        released(ROWS, 2, 8.0, what),
        PoissonSteps(20, 1.0, ROWS, 10),
    )
    assert (model.ledger.steps, model.ledger.releases) == (20, 2)
    by_hand = Ledger(model.ledger.segments[1:]).add(
        released(ROWS, 1, 8.0), released(ROWS, 1, 8.0)
    )
    assert model.epsilon(DELTA) == pytest.approx(by_hand.epsilon(DELTA))
    header, *lines = (tmp_path / "log.csv").read_text().splitlines()
    place = header.split(",").index("private_accuracy")
    column = [line.split(",")[place] for line in lines]
    assert column == ["NA", *map(str, history["private_accuracy"])]
    assert "2 releases of private_accuracy," in model.privacy_statement(DELTA)
    assert evaluation.ledger == Ledger()


def total(evaluation, x, y):
    """What is summed of rows, before the noise."""
    evaluation._rows = rows_of(x, y, None)
    return evaluation._total()


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [1e30, math.nan, pytest.param(math.inf, marks=SLOW), pytest.param(0.0, marks=SLOW)],
)
def test_a_row_moves_the_sum_by_its_sensitivity_at_most(value, monkeypatch):
    evaluation = PrivateEvaluation(
        ["accuracy", "loss"],
        noise_multiplier=8.0,
        ranges={"loss": (0, 0.5)},
        physical_batch_size=3,
    )
    fit(private(), evaluation)
    draw = np.array([0, 3, 4, 7, 9, 20, 39])
    monkeypatch.setattr(NoisedMean, "draw", lambda _: draw)
    x, y = rows()
    other = x.copy()
    other[7] = value
    before, after = total(evaluation, x, y), total(evaluation, other, y)
    monkeypatch.setattr(NoisedMean, "draw", lambda _: np.delete(draw, 3))
    without = total(evaluation, x, y)
    sensitivity = evaluation._mean.l2_sensitivity
    assert sensitivity == math.sqrt(2)
    for moved in (before, after):
        assert np.isfinite(moved).all()
        # Sums are rounded, also those of the other rows.
        by = np.linalg.norm((moved - without) / [0.5, 0.25])
        assert by <= sensitivity * (1 + 1e-6)
    monkeypatch.setattr(NoisedMean, "draw", lambda _: np.arange(0))
    np.testing.assert_array_equal(total(evaluation, x, y), [0, 0])


@pytest.mark.slow
def test_a_draw_of_some_rows_costs_what_it_costs():
    evaluation = PrivateEvaluation(
        ["accuracy"], noise_multiplier=4.0, expected_batch_size=10
    )
    model = private()
    history = fit(model, evaluation)
    assert model.ledger.segments[0] == Segment(
        Poisson(ROWS, 10), 1, 4.0, "private_accuracy"
    )
    error = math.hypot(4 * 0.5 / 10, 0.5 * math.sqrt(0.75 / 10))
    assert history["private_accuracy_standard_error"] == [pytest.approx(error)]


IDS = np.arange(ROWS) % 8 // np.array([1, 2] * (ROWS // 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_own", [False, pytest.param(True, marks=SLOW)], ids=["trained", "others"]
)
def test_all_rows_of_a_user_are_one_value(is_own):
    x, y = rows()
    own = {"x": x.copy(), "y": y, "user_ids": IDS} if is_own else {}
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=LITTLE, **own)
    model = private(wrap={"unit": "user"})
    history = fit(
        model, evaluation, xy=(x, y), batch_size=4, user_ids=IDS, examples_per_user=2
    )
    are_right = model.predict(x, verbose=0).argmax(-1) == y
    users = [are_right[user == IDS].mean() for user in set(IDS.tolist())]
    (value,) = history["private_val_accuracy" if is_own else "private_accuracy"]
    assert value == pytest.approx(np.mean(users), abs=1e-6)
    ledger = evaluation.ledger if is_own else model.ledger
    scheme = PoissonUsers(len(users), len(users), examples_per_user=1)
    assert ledger.segments[0].scheme == scheme
    assert "users" in ledger.segments[0].words()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["shuffle", "balls_in_bins", "cyclic_poisson"])
def test_rows_are_evaluated_however_batches_are_drawn(sampling):
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=LITTLE)
    model = private(wrap={"sampling": sampling})
    (value,) = fit(model, evaluation)["private_accuracy"]
    x, y = rows()
    are_right = model.predict(x, verbose=0).argmax(-1) == y
    assert value == pytest.approx(are_right.mean(), abs=1e-6)
    assert model.ledger.segments[0] == released(ROWS, 1, LITTLE)
    assert model.ledger.steps == 0


# ------------------------------------------------------------------------ other rows


@pytest.mark.slow
def test_other_rows_have_a_ledger_of_their_own():
    x, y = rows(30)
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=3.0, x=x, y=y)
    model = private()
    history = fit(model, evaluation, epochs=2)
    assert len(history["private_val_accuracy"]) == 2
    of_others = released(30, 2, 3.0, "private_val_accuracy")
    assert evaluation.ledger.segments == (of_others,)
    assert model.ledger.segments == (PoissonSteps(8, 1.0, ROWS, 10),)
    assert "a ledger of their own" in model.privacy_statement(DELTA)
    assert tfdp.accounting.privacy_report(model.ledger, DELTA)["saw_other_rows"]


@pytest.mark.slow
def test_rows_of_the_training_are_no_other_rows():
    x, y = rows()
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=3.0, x=x[:9], y=y[:9])
    model = private()
    with pytest.raises(ValueError, match="share memory"):
        fit(model, evaluation, xy=(x, y))
    assert model.ledger == Ledger()
    fit(model, evaluation, xy=(x[9:], y[9:]))


def test_users_need_to_be_known_in_other_rows_too():
    x, y = rows(9)
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=3.0, x=x, y=y)
    model = private(wrap={"unit": "user"})
    with pytest.raises(ValueError, match="user_ids"):
        fit(model, evaluation, batch_size=4, user_ids=IDS, examples_per_user=2)


# ------------------------------------------------------------------------ the ledger


def test_a_release_counts_before_anybody_sees_it(tmp_path, monkeypatch):
    model, found = private(), []
    noised = NoisedMean.noised

    def killed(self, total):
        # What a process would find that goes on from here.
        recorder = LedgerRecorder()
        Journal(recorder, tmp_path, list).restore()
        found.append((model.ledger, recorder.ledger))
        return noised(self, total)

    monkeypatch.setattr(NoisedMean, "noised", killed)
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=3.0)
    fit(model, evaluation, backup, epochs=2)
    steps = 0
    for number, (own, restored) in enumerate(found, 1):
        steps += 4
        expected = {released(ROWS, number, 3.0), PoissonSteps(steps, 1.0, ROWS, 10)}
        assert set(own.segments) == set(restored.segments) == expected


@pytest.mark.slow
def test_saved_models_have_their_releases_once(tmp_path):
    model = private()
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=3.0)
    fit(model, evaluation)
    model.save_weights(tmp_path / "before.weights.h5")
    # One release more, and no step.
    ledger = model._model_ledger
    ledger.recorder.to_come = {evaluation: released(ROWS, 1, 3.0)}
    assert ledger.release(evaluation)
    model.save(tmp_path / "after.keras")
    model.load_weights(tmp_path / "before.weights.h5")
    assert model.ledger.releases == 2

    # As in another process, where the run is not known.
    state = ledger.state()
    other = LedgerRecorder()
    other.restore(state)
    assert other.ledger == model.ledger
    loaded = keras.models.load_model(tmp_path / "after.keras")
    assert loaded.ledger == model.ledger
    assert not ledger.release(evaluation)


@pytest.mark.slow
def test_a_budget_keeps_room_for_the_last_release():
    model = private()
    evaluation = PrivateEvaluation(["accuracy"], every=3, noise_multiplier=6.0)
    both = Ledger((PoissonSteps(9, 1.0, ROWS, 10), released(ROWS, 1, 6.0)))
    # What is composed in another order is rounded otherwise.
    budget = tfdp.callbacks.PrivacyBudget(DELTA, both.epsilon(DELTA) * 1.001)
    history = fit(model, budget, evaluation, epochs=9)
    # After two epochs and a step: the budget ends it before the third epoch does.
    assert set(model.ledger.segments) == set(both.segments)
    assert not model.ledger.cut_short
    assert len(history["private_accuracy"]) == 1
    assert history["epsilon"][-1] == model.epsilon(DELTA) <= budget.target_epsilon


@pytest.mark.slow
def test_releases_come_out_of_the_budget_of_the_steps():
    model = private()
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=2.0)
    target = Ledger((PoissonSteps(24, 1.0, ROWS, 10),)).epsilon(DELTA)
    budget = tfdp.callbacks.PrivacyBudget(DELTA, target)
    history = fit(model, budget, evaluation, epochs=9)
    ledger = model.ledger
    assert 0 < ledger.steps < 24
    assert ledger.releases == len(history["private_accuracy"]) > 1
    assert ledger.epsilon(DELTA) <= target
    # There is no room for one step more.
    assert ledger.add(PoissonSteps(1, 1.0, ROWS, 10)).epsilon(DELTA) > target
    assert not ledger.cut_short


@pytest.mark.slow
def test_a_release_without_room_is_not_made(caplog):
    model = private()
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=0.01)
    budget = tfdp.callbacks.PrivacyBudget(DELTA, 10.0)
    history = fit(model, budget, evaluation, epochs=2)
    assert "no room for a release of private_accuracy in epoch 2" in caplog.text
    assert "private_accuracy" not in history
    assert model.ledger.segments == (PoissonSteps(8, 1.0, ROWS, 10),)


@pytest.mark.slow
def test_it_says_by_how_much_epsilon_rises(caplog):
    with caplog.at_level("INFO", "absl"):
        fit(private(), PrivateEvaluation(["accuracy"], noise_multiplier=6.0))
    steps = Ledger((PoissonSteps(4, 1.0, ROWS, 10),))
    delta = 0.1 / ROWS
    both = steps.add(released(ROWS, 1, 6.0))
    for ledger in (steps, both):
        assert f"{ledger.epsilon(delta, 'RDP'):.4g}" in caplog.text


@pytest.mark.slow
def test_a_step_in_between_takes_no_release_away():
    model = private()
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=6.0)
    x, y = rows()
    step = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, _: epoch == 1 and model.train_on_batch(x, y)
    )
    history = fit(model, evaluation, step, epochs=3)
    assert len(history["private_accuracy"]) == model.ledger.releases == 3


@pytest.mark.slow
def test_what_is_cut_short_owes_the_releases_too():
    model = private()
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=6.0)
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: setattr(model, "stop_training", True)
    )
    fit(model, evaluation, stop, epochs=3)
    assert set(model.ledger.cut_short) == {
        PoissonSteps(8, 1.0, ROWS, 10),
        released(ROWS, 2, 6.0),
    }


# ------------------------------------------------------------- whom it can be read by


@pytest.mark.slow
def test_a_callback_that_reads_released_values_draws_no_warning(tmp_path):
    model = private(metrics=["accuracy"])
    monitor = {"monitor": "private_accuracy", "mode": "max"}
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", save_best_only=True, **monitor
    )
    plateau = keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=0, **monitor)
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=6.0)
    history = fit(model, best, plateau, evaluation, epochs=3)
    assert best.best == max(history["private_accuracy"])
    with pytest.warns(UserWarning, match="PrivateEvaluation"):
        fit(model, keras.callbacks.EarlyStopping("loss"), evaluation)


@pytest.mark.slow
def test_others_cannot_call_their_logs_private():
    stop = keras.callbacks.EarlyStopping("private_accuracy", mode="max")
    exact = keras.metrics.SparseCategoricalAccuracy(name="private_accuracy")
    with pytest.raises(ValueError, match="must not begin"):
        private(metrics=[exact])
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=6.0)

    class Exact(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["private_accuracy"] = 0.75

    with pytest.raises(NotPrivateError, match="somebody else"):
        fit(private(), Exact(), stop, evaluation)


# ------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"noise_multiplier": 0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier"),
        ({"every": 0}, ValueError, "every"),
        ({"physical_batch_size": 1.5}, ValueError, "physical_batch_size"),
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size"),
        ({"metrics": []}, ValueError, "metrics"),
        ({"metrics": [3]}, TypeError, "metric"),
        ({"metrics": ["auc"]}, ValueError, "not a mean over examples"),
        ({"metrics": [keras.metrics.Precision()]}, ValueError, "not a mean"),
        ({"metrics": ["no_such_metric"]}, ValueError, "no_such_metric"),
        ({"metrics": ["loss"]}, ValueError, "ranges={'loss'"),
        ({"metrics": ["mse"]}, ValueError, "needs a range"),
        ({"metrics": ["accuracy", "accuracy"]}, ValueError, "of its own"),
        ({"ranges": {"accuracy": (1, 0)}}, ValueError, "rise"),
        ({"ranges": {"accuracy": (0, math.nan)}}, ValueError, "rise"),
        ({"ranges": {"accuracy": (0, math.inf)}}, ValueError, "finite"),
        ({"ranges": {"accuracy": 1.0}}, ValueError, "lower, upper"),
        ({"ranges": {"loss": (0, 1)}}, ValueError, "names of metrics"),
        ({"y": np.ones(3)}, ValueError, "x=None"),
        ({"x": np.ones((3, 3)), "y": np.ones(2)}, ValueError, "rows"),
        ({"x": np.ones((3, 3)), "user_ids": [1]}, ValueError, "user_ids"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments, error, match):
    arguments = {"metrics": ["accuracy"], "noise_multiplier": 1.0, **arguments}
    with pytest.raises(error, match=match):
        PrivateEvaluation(**arguments)


def test_data_that_come_in_batches_are_refused():
    dataset = tf.data.Dataset.from_tensor_slices(rows()).batch(10)
    declared = tfdp.data.declare(
        dataset, number_of_examples=ROWS, expected_batch_size=10, sampling="shuffle"
    )
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=1.0)
    model = private()
    with pytest.raises(ValueError, match="in batches"):
        model.fit(declared, callbacks=[evaluation], verbose=0)
    too_many = PrivateEvaluation(
        ["accuracy"], noise_multiplier=1.0, expected_batch_size=ROWS + 1
    )
    with pytest.raises(ValueError, match="at most the number of examples"):
        fit(model, too_many)
    again = PrivateEvaluation(["accuracy"], noise_multiplier=1.0)
    with pytest.raises(ValueError, match="two of them"):
        fit(model, evaluation, again)
    assert model.ledger == Ledger()


def test_a_model_without_privacy_is_refused():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "mse")
    evaluation = PrivateEvaluation(["accuracy"], noise_multiplier=1.0)
    with pytest.raises(NotPrivateError, match="DPModel"):
        model.fit(np.ones((4, 3)), np.ones((4, 2)), callbacks=[evaluation], verbose=0)


# ------------------------------------------------------------------- real processes

# Trains 4 steps an epoch, and dies before the third value is seen if it is told to.
SCRIPT = """
import os, sys
import keras, numpy as np, tfdp
from tfdp.mechanisms.noised_mean import NoisedMean

folder, dies = sys.argv[1], sys.argv[2] == "dies"
x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
private = tfdp.DPModel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
private.compile(tfdp.optimizers.DPAdam(0.1, l2_norm_clip=9.0, noise_multiplier=4.0), "mse")
noised, seen = NoisedMean.noised, []

def noised_or_dead(self, total):
    seen.append(noised(self, total))
    if dies and len(seen) == 3:
        os._exit(9)
    return seen[-1]

NoisedMean.noised = noised_or_dead
callbacks = [
    keras.callbacks.BackupAndRestore(folder),
    tfdp.callbacks.PrivateEvaluation(
        ["loss"], noise_multiplier=3.0, ranges={"loss": (0.0, 9.0)}
    ),
]
private.fit(x, x[:, :1], batch_size=10, epochs=4, callbacks=callbacks, verbose=0)
print(private.ledger.to_json())
"""


@pytest.mark.slow
def test_a_release_that_nobody_saw_counts_after_a_kill(tmp_path):
    assert forks.run(SCRIPT, tmp_path, "dies").returncode == 9
    done = forks.run(SCRIPT, tmp_path, "goes on")
    assert done.returncode == 0, done.stderr[-2000:]
    ledger = Ledger.from_json(done.stdout.splitlines()[-1])
    # The third epoch was run twice, and so was its release.
    assert (ledger.steps, ledger.releases) == (20, 5)
