"""PrivacyBudget: epsilon in the logs, and no step beyond the target."""

import keras
import numpy as np
import pytest
from keras import layers

import tfdp
from tfdp.accounting import Ledger, PoissonSteps, ShuffledPasses, UnamplifiedSteps
from tfdp.errors import NotPrivateError, PrivacyBudgetError

DELTA = 1e-3
ROWS = 12


@pytest.fixture
def rows(rng):
    return rng.normal(size=(ROWS, 3)).astype("float32"), rng.integers(0, 2, ROWS)


def private(
    sampling="shuffle", noise_multiplier=64.0, num_microbatches=None, **options
):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    wrapped = tfdp.DPModel(model, sampling=sampling)
    wrapped.compile(
        tfdp.optimizers.DPSGD(
            0.1,
            l2_norm_clip=1.0,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options,
    )
    return wrapped


def fit(model, rows, *callbacks, batch_size=4, epochs=9, **options):
    model.fit(
        *rows,
        batch_size=batch_size,
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
        **options,
    )


def passes(count, noise_multiplier=64.0, **options):
    return ShuffledPasses(count, noise_multiplier, ROWS, 4, **options)


def budget_of(*segments):
    """A budget that has room for these."""
    return tfdp.callbacks.PrivacyBudget(DELTA, Ledger(segments).epsilon(DELTA))


def test_a_spent_budget_binds_everywhere(rows, tmp_path):
    model = private()
    budget = budget_of(passes(2), UnamplifiedSteps(3, 128.0))
    fit(model, rows, budget)
    assert model.ledger.segments == (passes(2),)
    assert not model.ledger.cut_short
    assert int(model.optimizer.iterations) == 6
    model.optimizer.noise_multiplier = 128.0
    for _ in range(3):
        model.train_on_batch(*rows)
    spent, weights = model.ledger, model.get_weights()
    assert spent.segments == (passes(2), UnamplifiedSteps(3, 128.0))
    assert spent.epsilon(DELTA) <= budget.target_epsilon

    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    loaded.optimizer.expect_batch_size(4)
    for each in (model, loaded):
        with pytest.raises(PrivacyBudgetError, match="Received"):
            each.train_on_batch(*rows)
        with pytest.raises(PrivacyBudgetError):
            fit(each, rows)
        with pytest.raises(PrivacyBudgetError):
            fit(each, rows, budget)
        assert each.ledger == spent
        for old, new in zip(weights, each.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)

    # A larger one goes on.
    larger = budget_of(*spent.segments, passes(2, 128.0))
    fit(loaded, rows, larger)
    assert set(loaded.ledger.segments) == {*spent.segments, passes(2, 128.0)}


def test_units_of_several_examples_cost_two_clips(rows):
    model = private(num_microbatches=2)
    counted = passes(2, 32.0, examples_per_unit=2)
    fit(model, rows, budget_of(counted), epochs=4)
    assert model.ledger.segments == (counted,)


def change_noise(model, when, noise_of):
    """Sets the noise when a batch or an epoch begins, by its number."""

    def change(number, logs):
        model.optimizer.noise_multiplier = noise_of(number)

    return keras.callbacks.LambdaCallback(**{when: change})


def test_less_noise_in_mid_training_shrinks_what_is_left(rows):
    model = private()
    change = change_noise(
        model, "on_epoch_begin", lambda epoch: 32.0 if epoch else 64.0
    )
    fit(model, rows, change, budget_of(passes(1), passes(2, 32.0)))
    assert model.ledger.segments == (passes(1), passes(2, 32.0))


def test_less_noise_inside_a_pass_does_not_overspend(rows):
    model = private()
    change = change_noise(
        model, "on_train_batch_begin", lambda batch: 64.0 if batch < 2 else 16.0
    )
    fit(model, rows, change, budget_of(passes(2)))
    assert int(model.optimizer.iterations) == 2
    assert model.ledger.segments == (passes(1),)


@pytest.mark.slow
def test_less_noise_in_several_steps_at_once_does_not_overspend(rows):
    model = private("poisson", steps_per_execution=5)
    change = change_noise(model, "on_train_batch_begin", lambda batch: 32.0)
    steps = PoissonSteps(2, 32.0, ROWS, 4)
    fit(model, rows, change, budget_of(steps), batch_size=4, steps_per_epoch=5)
    assert model.ledger.segments == (steps,)


@pytest.mark.filterwarnings("ignore:Training without noise")
def test_no_budget_has_room_for_a_step_without_noise(rows):
    model = private(noise_multiplier=0.0)
    with pytest.raises(PrivacyBudgetError):
        fit(model, rows, budget_of(passes(2)))
    assert not model.ledger.segments


def test_a_plain_model_is_refused(rows):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(NotPrivateError):
        fit(model, rows, budget_of(passes(2)))


@pytest.mark.parametrize("value", [0, 1, -1, float("nan"), float("inf"), 1e9])
def test_bad_deltas_are_refused(value):
    with pytest.raises(ValueError, match="Received: delta="):
        tfdp.callbacks.PrivacyBudget(value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_bad_targets_are_refused(value):
    with pytest.raises(ValueError, match="Received: target_epsilon="):
        tfdp.callbacks.PrivacyBudget(DELTA, value)
