"""PrivacyBudget: epsilon in the logs, and no step beyond the target."""

import csv

import keras
import numpy as np
import pytest
from keras import layers

import tfdp
from tfdp.accounting import PoissonSteps

DELTA = 1e-3
TARGET = 2.0


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(200, 3)).astype("float32"), rng.integers(0, 2, 200)


def private(sampling="poisson", noise_multiplier=1.0, **compile_options):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    wrapped = tfdp.DPModel(model, sampling=sampling)
    wrapped.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=noise_multiplier),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **compile_options,
    )
    return wrapped


def budget(target=TARGET):
    return tfdp.callbacks.PrivacyBudget(DELTA, target)


def affordable_steps():
    segment = PoissonSteps(0, 1.0, 200, 20)
    return tfdp.accounting.affordable_count(
        tfdp.accounting.Ledger(), segment, TARGET, DELTA
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"steps_per_execution": 4}, {"run_eagerly": True}, {"jit_compile": True}],
    ids=str,
)
def test_the_last_affordable_step_is_the_last(rows, options):
    model = private(**options)
    model.fit(*rows, batch_size=20, epochs=9, callbacks=[budget()], verbose=0)
    assert model.ledger.steps == affordable_steps() == 17
    assert int(model.optimizer.iterations) == 17
    assert model.epsilon(DELTA) <= TARGET
    one_more = model.ledger.add(PoissonSteps(1, 1.0, 200, 20))
    assert one_more.epsilon(DELTA) > TARGET
    assert not model.ledger.cut_short


@pytest.mark.slow
def test_shuffled_passes_end_whole(rows):
    model = private("shuffle", noise_multiplier=4.0)
    model.fit(*rows, batch_size=20, epochs=9, callbacks=[budget()], verbose=0)
    passes = model.ledger.passes
    assert int(model.optimizer.iterations) == 10 * passes
    assert model.epsilon(DELTA) <= TARGET


def test_a_spent_budget_refuses_before_the_first_step(rows):
    model = private()
    model.fit(*rows, batch_size=20, epochs=9, callbacks=[budget()], verbose=0)
    weights = model.get_weights()
    spent = model.ledger
    with pytest.raises(tfdp.errors.PrivacyBudgetError, match="Received"):
        model.fit(*rows, batch_size=20, callbacks=[budget()], verbose=0)
    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        model.fit(*rows, batch_size=20, verbose=0)
    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        model.train_on_batch(*rows)
    assert model.ledger == spent
    for old, new in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_a_larger_target_goes_on(rows):
    model = private()
    model.fit(*rows, batch_size=20, epochs=9, callbacks=[budget()], verbose=0)
    model.fit(*rows, batch_size=20, epochs=1, callbacks=[budget(2.2)], verbose=0)
    assert model.ledger.steps > 17
    assert model.epsilon(DELTA) <= 2.2


def test_train_on_batch_is_bound(rows):
    model = private(noise_multiplier=4.0)
    model.fit(*rows, batch_size=20, callbacks=[budget()], verbose=0)

    def train():
        for _ in range(100):
            model.train_on_batch(*rows)

    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        train()
    assert model.ledger.steps > 10
    assert model.epsilon(DELTA) <= TARGET


def test_less_noise_in_mid_training_shrinks_what_is_left(rows):
    model = private(noise_multiplier=2.0)
    change = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: setattr(
            model.optimizer, "noise_multiplier", 1.0 if epoch else 2.0
        )
    )
    model.fit(*rows, batch_size=20, epochs=9, callbacks=[change, budget()], verbose=0)
    assert model.epsilon(DELTA) <= TARGET
    assert {segment.noise_multiplier for segment in model.ledger.segments} == {2, 1}


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_noise_lowered_before_a_step_does_not_overspend(rows, steps_per_execution):
    model = private(noise_multiplier=4.0, steps_per_execution=steps_per_execution)
    change = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(
            model.optimizer, "noise_multiplier", 0.5
        )
    )
    model.fit(*rows, batch_size=20, callbacks=[change, budget(1.0)], verbose=0)
    assert model.epsilon(DELTA) <= 1.0


def test_noise_lowered_inside_a_pass_does_not_overspend(rows):
    model = private("shuffle", noise_multiplier=8.0)
    change = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(
            model.optimizer, "noise_multiplier", 8.0 if batch < 5 else 2.0
        )
    )
    target = tfdp.accounting.Ledger((
        tfdp.accounting.ShuffledPasses(2, 8.0, 200, 20),
    )).epsilon(DELTA)
    callbacks = [change, tfdp.callbacks.PrivacyBudget(DELTA, target)]
    model.fit(*rows, batch_size=20, epochs=3, callbacks=callbacks, verbose=0)
    assert int(model.optimizer.iterations) == 5
    assert model.epsilon(DELTA) <= target


@pytest.mark.filterwarnings("ignore:Training without noise")
def test_no_budget_has_room_for_a_step_without_noise(rows):
    model = private(noise_multiplier=0.0)
    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        model.fit(*rows, batch_size=20, callbacks=[budget()], verbose=0)
    assert model.ledger.steps == 0


def test_a_saved_budget_binds_after_loading(rows, tmp_path):
    model = private()
    model.fit(*rows, batch_size=20, epochs=9, callbacks=[budget()], verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        loaded.fit(*rows, batch_size=20, verbose=0)


def test_a_loaded_model_keeps_what_was_spent(rows, tmp_path):
    model = private()
    model.fit(*rows, batch_size=20, epochs=9, callbacks=[budget()], verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        loaded.fit(*rows, batch_size=20, callbacks=[budget()], verbose=0)


@pytest.mark.slow
def test_epsilon_is_in_every_log(rows, tmp_path):
    model = private()
    log = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    history = model.fit(
        *rows,
        batch_size=20,
        epochs=3,
        callbacks=[log, tfdp.callbacks.PrivacyBudget(DELTA)],
        verbose=0,
    )
    epsilons = history.history["epsilon"]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == model.epsilon(DELTA)
    with (tmp_path / "log.csv").open() as file:
        written = [float(row["epsilon"]) for row in csv.DictReader(file)]
    assert written == pytest.approx(epsilons)


def test_a_plain_model_is_refused(rows):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(tfdp.errors.NotPrivateError):
        model.fit(*rows, callbacks=[budget()], verbose=0)


@pytest.mark.parametrize("value", [0, 1, -1, float("nan"), float("inf"), 1e9])
def test_bad_deltas_are_refused(value):
    with pytest.raises(ValueError, match="Received: delta="):
        tfdp.callbacks.PrivacyBudget(value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_bad_targets_are_refused(value):
    with pytest.raises(ValueError, match="Received: target_epsilon="):
        tfdp.callbacks.PrivacyBudget(DELTA, value)
