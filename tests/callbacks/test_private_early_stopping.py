"""PrivateEarlyStopping: when it stops, what that costs, and what it refuses."""

import math

import keras
import numpy as np
import pytest

import tfdp
from tests.small import data, private
from tfdp.accounting import Ledger, PoissonSteps, Segment
from tfdp.callbacks import PrivateEarlyStopping, PrivateEvaluation
from tfdp.mechanisms.noised_mean import NoisedMean
from tfdp.sampling import Poisson

ROWS = 40
DELTA = 1e-3


@pytest.fixture
def releases(monkeypatch):
    """Let values of one's own be released, one after the other."""

    def release(*values):
        to_come = iter(values)
        monkeypatch.setattr(
            NoisedMean,
            "noised",
            lambda self, _: {each.name: next(to_come) for each in self.values},
        )

    return release


def evaluation(metric="accuracy", every=1, **options):
    return PrivateEvaluation([metric], every=every, noise_multiplier=4.0, **options)


def fit(model, *callbacks, epochs=20):
    x, y = data(ROWS, outlier=False)
    return model.fit(
        x, y, batch_size=20, epochs=epochs, callbacks=list(callbacks), verbose=0
    ).history


@pytest.mark.smoke
@pytest.mark.slow
def test_a_run_that_it_ends_costs_what_it_took(releases):
    releases(0.5, 0.7, 0.6, 0.72, 0.8)
    model = private()
    # The standard error of a release is 0.05: what is less is no improvement.
    stop = PrivateEarlyStopping("private_accuracy", patience=2)
    history = fit(model, stop, evaluation())
    assert history["private_accuracy"] == [0.5, 0.7, 0.6, 0.72]
    ledger = model.ledger
    assert set(ledger.segments) == {
        PoissonSteps(8, 1.0, ROWS, 20),
        Segment(Poisson(ROWS, ROWS), 4, 4.0, "private_accuracy"),
    }
    assert not ledger.cut_short
    assert ledger.ended_by_release
    statement = " ".join(model.privacy_statement(DELTA).split())
    assert (
        "ended by a released value. Steps that it did not take are not owed"
        in statement
    )
    assert "stopped before its planned end" not in statement
    assert Ledger.from_json(ledger.to_json()) == ledger


@pytest.mark.slow
def test_epochs_without_a_release_are_not_counted(releases):
    releases(0.5, 0.4, 0.3)
    model = private()
    history = fit(model, evaluation(every=3), PrivateEarlyStopping(patience=2))
    assert len(history["loss"]) == 9


@pytest.mark.slow
def test_a_loss_is_to_fall(releases):
    releases(2.0, 1.5, 1.6)
    model = private()
    stop = PrivateEarlyStopping("private_loss", patience=1, min_delta=0.0)
    history = fit(model, stop, evaluation("loss", ranges={"loss": (0, 4)}))
    assert history["private_loss"] == [2.0, 1.5, 1.6]


@pytest.mark.slow
def test_other_rows_may_end_a_run(releases):
    releases(0.5, 0.4)
    model = private()
    x, y = data(20, outlier=False)
    history = fit(
        model,
        evaluation(x=x, y=y),
        PrivateEarlyStopping("private_val_accuracy", patience=1),
    )
    assert history["private_val_accuracy"] == [0.5, 0.4]
    assert (model.ledger.steps, model.ledger.cut_short) == (4, ())
    statement = " ".join(model.privacy_statement(DELTA).split())
    assert (
        "ended by a released value. Steps that it did not take are not owed"
        in statement
    )
    assert "a ledger of their own" in statement


@pytest.mark.slow
def test_the_best_weights_are_put_back(releases):
    releases(0.5, 0.9, 0.6, 0.6)
    model, weights = private(), []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: weights.append(model.get_weights())
    )
    stop = PrivateEarlyStopping(patience=2, restore_best_weights=True)
    fit(model, note, stop, evaluation())
    for best, now in zip(weights[1], model.get_weights(), strict=True):
        np.testing.assert_array_equal(best, now)
    assert model.ledger.steps == 8


def test_what_ends_a_run_otherwise_is_owed_as_before(releases):
    def by_exact_values():
        stop = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: setattr(model, "stop_training", True)
        )
        fit(model, stop, evaluation(), PrivateEarlyStopping(patience=3), epochs=4)

    releases(*[0.5] * 9)
    model = private()
    by_exact_values()
    assert model.ledger.cut_short
    assert not model.ledger.ended_by_release

    # It has ended, but somebody goes on.
    model = private()
    go_on = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, _: setattr(model, "stop_training", epoch == 4)
    )
    fit(model, evaluation(every=2), PrivateEarlyStopping(patience=1), go_on)
    assert model.ledger.cut_short
    assert not model.ledger.ended_by_release


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on_from_its_file(releases, tmp_path):
    releases(0.5, 0.4, 0.4, 0.4)
    model = private()
    fit(model, evaluation(), PrivateEarlyStopping(patience=1))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.ledger == model.ledger
    fit(loaded, evaluation(), epochs=1)
    assert loaded.ledger.ended_by_release
    assert (loaded.ledger.steps, loaded.ledger.releases) == (6, 3)


@pytest.mark.slow
def test_what_is_not_released_is_refused():
    for monitor in ("loss", "val_accuracy", "accuracy", None):
        with pytest.raises(ValueError, match="PrivateEvaluation"):
            PrivateEarlyStopping(monitor)
    model = private()
    with pytest.raises(ValueError, match="released are no metrics"):
        fit(model, PrivateEarlyStopping("private_accuracy"))
    loss = evaluation("loss", ranges={"loss": (0, 4)})
    with pytest.raises(ValueError, match="released are 'private_loss'"):
        fit(private(), loss, PrivateEarlyStopping("private_accuracy"))
    assert model.ledger == Ledger()


def test_it_asks_which_values_are_better():
    error = evaluation("mse", ranges={"mse": (0, 1)})
    with pytest.raises(ValueError, match="mode='min'"):
        fit(private(), error, PrivateEarlyStopping("private_mse"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"min_delta": -1}, ValueError),
        ({"min_delta": math.nan}, ValueError),
        ({"patience": -1}, ValueError),
        ({"patience": 1.5}, TypeError),
        ({"mode": "up"}, ValueError),
        ({"baseline": "high"}, TypeError),
        ({"start_from_epoch": -1}, ValueError),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        tfdp.callbacks.PrivateEarlyStopping(**arguments)
