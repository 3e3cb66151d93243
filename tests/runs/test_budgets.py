"""A budget binds whoever changes what it covers."""

import contextlib
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.runs.models import (
    DELTA,
    both_of,
    data,
    fit,
    ledger_of,
    loop,
    optimizer,
    part,
    private,
)
from tests.runs.recording import (
    POISSON,
    record,
    recorded,
    run_schedule,
    steps_that_fit,
)
from tfdp.accounting import Ledger, PoissonSteps
from tfdp.errors import PrivacyBudgetError
from tfdp.runs.budgets import enforce_budget
from tfdp.runs.recorder import Budget


def limited(one, other, steps):
    """A model of two with a budget for some steps, of which it takes four."""
    both = private(both_of(one, other))
    target = ledger_of(steps).epsilon(DELTA)
    fit(both, callbacks=[tfdp.callbacks.PrivacyBudget(DELTA, target)])
    return both, target


@pytest.mark.smoke
def test_a_budget_binds_whoever_trains_a_part():
    one, other = part("one"), part("other")
    first = private(one)
    both, target = limited(one, other, 10)
    fit(first, epochs=5)
    assert both.ledger.steps == first.ledger.steps == 10
    assert both.epsilon(DELTA) <= target
    for model in (first, private(other)):
        before = [weight.numpy() for weight in model.weights]
        with pytest.raises(tfdp.errors.PrivacyBudgetError, match="no room"):
            fit(model)
        with pytest.raises(tfdp.errors.PrivacyBudgetError, match="no room"):
            model.train_on_batch(*data())
        for weight, value in zip(model.weights, before, strict=True):
            np.testing.assert_array_equal(weight, value)
    assert both.ledger.steps == 10


@pytest.mark.slow
def test_a_budget_does_not_bind_who_only_reads_a_part():
    one, other = part("one"), part("other")
    first = private(one)
    target = ledger_of(4).epsilon(DELTA)
    fit(first, callbacks=[tfdp.callbacks.PrivacyBudget(DELTA, target)])
    one.trainable = False
    both = private(both_of(one, other))
    fit(both, epochs=2)
    assert both.ledger.steps == 12
    assert first.ledger.steps == 4


@pytest.mark.parametrize("traced", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_budget_binds_loops_of_ones_own(traced):
    """Loops that were traced before there was a budget, too."""
    one, other = part("one"), part("other")
    opt = optimizer(noise_multiplier=40.0)
    step = loop(one, opt, traced=traced)
    step()
    both = private(both_of(one, other), noise_multiplier=40.0)
    of_ten = tfdp.accounting.Ledger((tfdp.accounting.UnamplifiedSteps(10, 40.0),))
    target = of_ten.epsilon(DELTA)
    fit(both, callbacks=[tfdp.callbacks.PrivacyBudget(DELTA, target)])
    error = tf.errors.InvalidArgumentError if traced else tfdp.errors.PrivacyBudgetError
    taken = both.ledger.steps
    values = []

    def go_on():
        for _ in range(50):
            values.append(one.get_weights())
            step()

    with pytest.raises(error, match="no room"):
        go_on()
    assert both.epsilon(DELTA) <= target
    # Steps on Poisson batches cost less than those of the loop.
    assert 5 <= both.ledger.steps - taken < 10
    for now, value in zip(one.get_weights(), values[-1], strict=True):
        np.testing.assert_array_equal(now, value)
    fit(both, callbacks=[tfdp.callbacks.PrivacyBudget(DELTA, None)])
    step()


@pytest.mark.slow
def test_traced_loops_that_take_turns_share_one_budget():
    one, other = part("one"), part("other")
    steps = [loop(each, optimizer(), traced=True) for each in (one, other)]
    for step in steps:
        step()
    both = private(both_of(one, other))
    target = 2 * both.epsilon(DELTA)
    fit(both, callbacks=[tfdp.callbacks.PrivacyBudget(DELTA, target)])
    taken = both.ledger.steps

    def take_turns():
        for turn in range(50):
            steps[turn % 2]()

    with pytest.raises(tf.errors.InvalidArgumentError, match="no room"):
        take_turns()
    assert both.ledger.steps > taken + 1
    assert 0.7 * target < both.epsilon(DELTA) <= target


@pytest.mark.slow
def test_a_budget_covers_what_a_part_reads_from_elsewhere():
    """S trains W, which T reads to train V, which the model with the budget has."""
    read, trained = part("read", units=3), part("trained")
    holder = private(both_of(trained, part("other")))
    target = ledger_of(60).epsilon(DELTA)
    fit(holder, callbacks=[tfdp.callbacks.PrivacyBudget(DELTA, target)])
    inputs = keras.Input((3,))
    read.trainable = False
    reader = private(keras.Model(inputs, trained(read(inputs))))
    reader.train_on_batch(*data())
    read.trainable = True
    source = private(both_of(read, part("source", units=3)))
    for _ in range(40):
        source.train_on_batch(*data())
    # What it would read now has cost more than the budget leaves.
    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        reader.train_on_batch(*data())


@pytest.mark.slow
def test_a_budget_that_was_loaded_binds_as_well(tmp_path):
    both, target = limited(part("one"), part("other"), 10)
    both.save(tmp_path / "both.keras")
    loaded = keras.models.load_model(tmp_path / "both.keras")
    fit(private(loaded.model.get_layer("one")), epochs=5)
    assert loaded.ledger.steps == 10
    assert loaded.epsilon(DELTA) <= target


@pytest.mark.parametrize("traced", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_budget_binds_train_step(traced):
    one = part("one")
    first = private(one)
    first.train_on_batch(*data())
    both, target = limited(one, part("other"), 60)
    batch = tuple(map(tf.constant, data()))
    step = tf.function(first.train_step) if traced else first.train_step

    def go_on():
        for _ in range(60):
            step(batch)

    if traced:
        # In a graph a step without room does nothing.
        go_on()
    else:
        with pytest.raises(tfdp.errors.PrivacyBudgetError):
            go_on()
    taken, values = both.ledger.steps, one.get_weights()
    assert 5 < taken < 40
    assert both.epsilon(DELTA) <= target
    with contextlib.suppress(tfdp.errors.PrivacyBudgetError):
        step(batch)
    assert both.ledger.steps == taken
    np.testing.assert_array_equal(one.get_weights()[0], values[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps_per_execution", [pytest.param(1, marks=pytest.mark.slow), 4]
)
def test_a_callback_that_trains_a_part_spends_of_the_same_budget(steps_per_execution):
    one = part("one")
    first = private(one)
    both = tfdp.DPModel(both_of(one, part("other")))
    both.compile(optimizer(), "mse", steps_per_execution=steps_per_execution)

    def train_part(batch, logs):
        if batch == 3:
            with contextlib.suppress(tfdp.errors.PrivacyBudgetError):
                fit(first)

    trains = keras.callbacks.LambdaCallback(on_train_batch_end=train_part)
    target = ledger_of(12).epsilon(DELTA)
    budget = tfdp.callbacks.PrivacyBudget(DELTA, target)
    fit(both, epochs=5, callbacks=[budget, trains])
    assert 10 <= both.ledger.steps <= 12
    assert both.epsilon(DELTA) <= target


@pytest.mark.slow
def test_a_budget_binds_layers_that_came_later():
    model = part("model")
    first = private(model)
    target = ledger_of(8).epsilon(DELTA)
    fit(first, callbacks=[tfdp.callbacks.PrivacyBudget(DELTA, target)])
    model.add(layers.Dense(1))
    model.layers[0].trainable = False
    fit(private(model), epochs=5)
    assert first.ledger.steps == 8
    assert first.epsilon(DELTA) <= target


@pytest.mark.slow
def test_the_budget_of_a_model_that_is_gone_binds_nobody():
    model = part("model")

    def budget(steps):
        return tfdp.callbacks.PrivacyBudget(DELTA, ledger_of(steps).epsilon(DELTA))

    first = private(model)
    fit(first, callbacks=[budget(4)])
    second = private(model)
    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        fit(second, callbacks=[budget(20)])
    del first
    gc.collect()
    fit(second, epochs=2, callbacks=[budget(20)])
    assert second.ledger.steps == 12


@pytest.mark.slow
def test_loops_under_a_budget_run_beside_others():
    one, other = part("one"), part("other")
    opts = [optimizer(noise_multiplier=80.0) for _ in range(2)]
    steps = [
        loop(each, opt, traced=False)
        for each, opt in zip((one, other), opts, strict=True)
    ]

    @tf.function
    def both_steps():
        for step in steps:
            step()

    both_steps()
    both = private(both_of(one, other), noise_multiplier=80.0)
    fit(both, callbacks=[tfdp.callbacks.PrivacyBudget(DELTA, 0.3)])
    unrelated = private(part("unrelated"))
    for _ in range(3):
        both_steps()
        fit(unrelated)
    assert both.ledger.steps == 12
    assert unrelated.ledger.steps == 12


# --------------------------------------------------------------------- one recorder


@pytest.mark.slow
def test_a_budget_follows_what_is_restored():
    """No step runs on a limit that did not know of the steps restored."""
    recorder = recorded(POISSON)
    recorder.budget = Budget(
        1e-3, Ledger((PoissonSteps(10, 1.0, 1000, 50),)).epsilon(1e-3)
    )
    enforce_budget(recorder, np.array([1.0]))
    recorder.restore(recorded(POISSON, *[1.0] * 6).state())
    assert not recorder.counter.has_room()
    enforce_budget(recorder, np.array([1.0]))
    assert steps_that_fit(recorder, 10) == 4
    with pytest.raises(PrivacyBudgetError):
        enforce_budget(recorder, np.array([1.0]))


@pytest.mark.slow
def test_a_limit_of_what_is_left_counts_as_it_will_be_recorded():
    """The levels of the whole plan are coarser than those of its rest."""
    planned = np.linspace(8.0, 1.0, 300)
    recorder = recorded(POISSON, noise_multipliers=planned)
    run_schedule(recorder, planned[:220])
    spent = recorder.ledger.epsilon(1e-3, "RDP")
    recorder.budget = Budget(1e-3, 1.5 * spent)
    enforce_budget(recorder, planned[220:], "rest")
    for noise_multiplier in planned[220:]:
        if recorder.counter.has_room(noise_multiplier):
            record(recorder, noise_multiplier)
    assert 220 < recorder.ledger.steps < 300
    assert recorder.ledger.epsilon(1e-3) <= recorder.budget.target_epsilon
