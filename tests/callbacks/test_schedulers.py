"""Schedulers: every step clips, is noised and counts with the values of its own."""

import csv
import math

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers import schedules

import tfdp
from tfdp.accounting import Ledger, PoissonSteps, ShuffledPasses
from tfdp.callbacks import (
    AdaptiveQuantileClip,
    ClipNormScheduler,
    NoiseMultiplierScheduler,
    PrivacyBudget,
)
from tfdp.callbacks.schedulers import tabulate

ROWS = 12
SCHEDULES = {
    "switch": schedules.PiecewiseConstantDecay([2], [2.0, 0.5]),
    "square_root": schedules.PolynomialDecay(1.0, 6, 0.1, power=0.5),
    "linear": schedules.PolynomialDecay(1.0, 6, 0.1),
    "square": schedules.PolynomialDecay(1.0, 6, 0.1, power=2.0),
    "exponential": schedules.ExponentialDecay(1.0, 3, 0.5),
    "cosine": schedules.CosineDecay(1.0, 6, alpha=0.1),
    "function": lambda step: 1 / (1 + step),
}
OPTIONS = [
    {},
    {"steps_per_execution": 3},
    {"run_eagerly": True},
    {"jit_compile": True},
]


def private(slope, noise_multiplier=0.0, sampling="shuffle", **options):
    """A model whose every example has the gradient `slope`, and one step an epoch."""
    model = keras.Sequential([
        keras.Input((4,)),
        layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])
    wrapped = tfdp.DPModel(model, sampling=sampling)
    wrapped.compile(
        tfdp.optimizers.DPSGD(
            1.0, l2_norm_clip=77.0, noise_multiplier=noise_multiplier, noise_seed=5
        ),
        lambda y_true, y_pred: slope * keras.ops.sum(y_pred, axis=-1),
        **options,
    )
    return wrapped


def data(slope=1.0):
    x = np.zeros((ROWS, 4), "float32")
    x[:, 0] = slope
    return x, np.zeros((ROWS, 1), "float32")


def length(model):
    return float(np.linalg.norm(model.get_weights()[0]))


class Weights(keras.callbacks.Callback):
    """Notes the weights after every batch that Keras sees."""

    def __init__(self):
        super().__init__()
        self.seen = [np.zeros((4, 1))]

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.get_weights()[0])


class Lengths(keras.callbacks.Callback):
    """Notes how far the weights are from zero after every batch that Keras sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(length(self.model))


pytestmark = pytest.mark.filterwarnings(
    "ignore:Training without noise", "ignore:The privacy noise is reproducible"
)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_step_clips_with_its_own_norm(name):
    schedule, model, lengths = SCHEDULES[name], private(1.0), Lengths()
    callbacks = [ClipNormScheduler(schedule), lengths]
    history = model.fit(*data(), batch_size=2, epochs=1, callbacks=callbacks, verbose=0)
    # The slope's direction is always the same, so the clipped steps add up.
    expected = [min(1.0, float(schedule(step))) for step in range(6)]
    np.testing.assert_allclose(np.diff([0, *lengths.seen]), expected, rtol=1e-5)
    last = history.history["l2_norm_clip"]
    np.testing.assert_allclose(last, float(schedule(5)), rtol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_however_steps_are_run(options):
    schedule, model = SCHEDULES["linear"], private(100.0, **options)
    model.fit(
        *data(),
        batch_size=2,
        epochs=2,
        callbacks=[ClipNormScheduler(schedule)],
        verbose=0,
    )
    expected = sum(float(schedule(step)) for step in range(12))
    np.testing.assert_allclose(length(model), expected, rtol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_noise_is_that_of_the_norm_that_clips(options):
    """Without a slope a step is noise alone, of a seed: its size tells C."""
    sizes = []
    for schedule in (lambda step: 1.0, lambda step: 3.0):
        model = private(0.0, noise_multiplier=1.0, **options)
        model.fit(
            *data(), batch_size=12, callbacks=[ClipNormScheduler(schedule)], verbose=0
        )
        sizes.append(length(model))
    np.testing.assert_allclose(sizes[1], 3 * sizes[0], rtol=1e-5)


@pytest.mark.slow
def test_epsilon_does_not_depend_on_the_schedule():
    ledgers = []
    for callbacks in ([], [ClipNormScheduler(SCHEDULES["square"])]):
        model = private(1.0, noise_multiplier=1.5)
        model.fit(*data(), batch_size=2, epochs=2, callbacks=callbacks, verbose=0)
        ledgers.append(model.ledger)
    assert ledgers[0] == ledgers[1]


def test_a_second_fit_goes_on_where_the_first_one_ended():
    model, scheduler = private(100.0), ClipNormScheduler(SCHEDULES["function"])
    for _ in range(2):
        model.fit(*data(), batch_size=4, callbacks=[scheduler], verbose=0)
    expected = sum(1 / (1 + step) for step in range(6))
    np.testing.assert_allclose(length(model), expected, rtol=1e-5)


def test_without_the_callback_the_last_norm_stays():
    model = private(100.0)
    model.fit(
        *data(),
        batch_size=12,
        callbacks=[ClipNormScheduler(lambda step: 0.25)],
        verbose=0,
    )
    model.fit(*data(), batch_size=12, verbose=0)
    model.optimizer.l2_norm_clip = 2.0
    model.fit(*data(), batch_size=12, verbose=0)
    np.testing.assert_allclose(length(model), 0.25 + 0.25 + 2, rtol=1e-5)


def test_loggers_see_the_norm(tmp_path):
    model, path = private(1.0), tmp_path / "log.csv"
    callbacks = [keras.callbacks.CSVLogger(path), ClipNormScheduler(lambda step: 0.5)]
    model.fit(*data(), batch_size=6, epochs=2, callbacks=callbacks, verbose=0)
    with path.open() as file:
        assert [row["l2_norm_clip"] for row in csv.DictReader(file)] == ["0.5", "0.5"]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda step: 3.0 - step,
        lambda step: math.nan if step == 3 else 1.0,
        lambda step: math.inf if step == 3 else 1.0,
        lambda step: 1e-30 if step == 3 else 1.0,
        schedules.PolynomialDecay(1.0, 3, 0.0),
    ],
)
def test_a_norm_out_of_range_is_refused_before_the_first_step(schedule):
    model = private(1.0)
    with pytest.raises(ValueError, match=r"At step 3 .*`l2_norm_clip` must .*Received"):
        model.fit(
            *data(), batch_size=2, callbacks=[ClipNormScheduler(schedule)], verbose=0
        )
    assert not model.ledger.steps
    assert length(model) == 0


def generated():
    x, y = data()
    while True:
        yield x[:2], y[:2]


def test_the_number_of_steps_must_be_known():
    model = private(100.0)
    model.optimizer.expect_batch_size(2)
    model.compile(
        tfdp.optimizers.DPSGD(
            1.0, l2_norm_clip=1.0, noise_multiplier=0.0, expected_batch_size=2
        ),
        model.loss,
    )
    with pytest.raises(ValueError, match=r"steps=None.* Use .*steps=1000"):
        model.fit(generated(), callbacks=[ClipNormScheduler(SCHEDULES["function"])])
    model.fit(
        generated(),
        steps_per_epoch=4,
        callbacks=[ClipNormScheduler(SCHEDULES["function"], steps=2)],
        verbose=0,
    )
    np.testing.assert_allclose(length(model), 1 + 3 / 2, rtol=1e-5)


@pytest.mark.parametrize("schedule", [0.5, None, "cosine"])
def test_only_schedules_are_taken(schedule):
    with pytest.raises(TypeError, match=r"`schedule` must .*Received: schedule="):
        ClipNormScheduler(schedule)


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_steps_must_be_a_positive_whole_number(steps):
    with pytest.raises(ValueError, match="`steps` must"):
        ClipNormScheduler(lambda step: 1.0, steps=steps)


@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_are_the_schedule(name):
    schedule = SCHEDULES[name]
    expected = [float(schedule(step)) for step in range(9)]
    np.testing.assert_allclose(tabulate(schedule, 9), expected, rtol=1e-6)


class Plain(schedules.LearningRateSchedule):
    """A schedule that only plain numbers can be put into."""

    def __call__(self, step):
        return 2.0 if step < 3 else 1.0 / (1.0 + step)

    def get_config(self):
        return {}


def test_schedules_for_plain_numbers():
    np.testing.assert_allclose(tabulate(Plain(), 5), [2, 2, 2, 1 / 4, 1 / 5])


@pytest.mark.slow
def test_callbacks_in_lists_of_lists():
    model = private(100.0)
    inner = keras.callbacks.CallbackList([ClipNormScheduler(lambda step: 0.25)])
    model.fit(*data(), batch_size=12, callbacks=[[inner]], verbose=0)
    np.testing.assert_allclose(length(model), 0.25, rtol=1e-5)


def test_no_epoch_at_all():
    model = private(1.0, sampling="poisson")
    for scheduler in (ClipNormScheduler, NoiseMultiplierScheduler):
        model.fit(
            *data(),
            batch_size=2,
            epochs=2,
            initial_epoch=2,
            callbacks=[scheduler(lambda step: 1.0)],
            verbose=0,
        )
    assert not model.ledger.steps


@pytest.mark.slow
def test_older_weights_take_the_schedule_back(tmp_path):
    """As a backup does that is restored in the same process."""
    model, seen = private(1.0, noise_multiplier=1.0, sampling="poisson"), []
    scheduler = NoiseMultiplierScheduler(lambda step: 9.0 - step / 2)
    model.fit(*data(), batch_size=4, callbacks=[scheduler], verbose=0)
    model.save_weights(tmp_path / "old.weights.h5")
    model.fit(*data(), batch_size=4, callbacks=[scheduler], verbose=0)
    callbacks = [
        keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: model.load_weights(tmp_path / "old.weights.h5"),
            on_train_batch_end=lambda batch, logs: seen.append(
                logs["noise_multiplier"]
            ),
        ),
        scheduler,
        PrivacyBudget(1e-3, 5.0),
    ]
    model.fit(*data(), batch_size=4, callbacks=callbacks, verbose=0)
    assert seen == [7.5, 7.0, 6.5]
    assert model.ledger.steps == 9


def test_what_was_planned_had_the_noise_that_was_planned():
    model = private(1.0, 77.0, sampling="poisson")
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True)
    )
    model.fit(
        *data(),
        batch_size=2,
        epochs=2,
        callbacks=[NoiseMultiplierScheduler(lambda n: 4.0 if n < 6 else 1.0), stop],
        verbose=0,
    )
    assert model.ledger.segments == (PoissonSteps(6, 4.0, ROWS, 2),)
    assert model.ledger.cut_short == (PoissonSteps(6, 1.0, ROWS, 2),)


@pytest.mark.slow
def test_a_budget_notices_steps_that_come_again():
    """Iterations set back to where the noise is least, at the end of each epoch."""
    model = private(1.0, 77.0, sampling="poisson")
    again = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.optimizer.iterations.assign(0)
    )
    target = Ledger((PoissonSteps(12, 4.0, ROWS, 2),)).epsilon(1e-3)
    model.fit(
        *data(),
        batch_size=2,
        epochs=8,
        callbacks=[
            NoiseMultiplierScheduler(lambda n: 4.0 + n),
            again,
            PrivacyBudget(1e-3, target),
        ],
        verbose=0,
    )
    assert 12 < model.ledger.steps < 48
    assert model.epsilon(1e-3) <= target


@pytest.mark.slow
def test_a_budget_loses_no_step_when_weights_are_loaded(tmp_path):
    model = private(1.0, noise_multiplier=5.0, sampling="poisson")
    model.fit(*data(), batch_size=2, verbose=0)
    model.save_weights(tmp_path / "old.weights.h5")
    load = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: model.load_weights(
            tmp_path / "old.weights.h5"
        )
    )
    callbacks = [load, PrivacyBudget(1e-3, 50.0)]
    model.fit(*data(), batch_size=2, callbacks=callbacks, verbose=0)
    assert model.ledger.steps == 12


def halving(step):
    return 4.0 * 0.5 ** (step // 4)


def test_each_step_is_noised_with_its_own_multiplier():
    """Without a slope a step is noise alone, the same numbers in both runs."""
    moves = []
    for callbacks in ([], [NoiseMultiplierScheduler(halving)]):
        model, weights = private(0.0, noise_multiplier=1.0), Weights()
        model.fit(
            *data(), batch_size=2, epochs=2, callbacks=[*callbacks, weights], verbose=0
        )
        moves.append(np.diff(weights.seen, axis=0))
    factors = np.array([halving(step) for step in range(12)])[:, None, None]
    np.testing.assert_allclose(moves[1], factors * moves[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_ledger_counts_every_step_with_its_own_noise(options):
    model = private(1.0, noise_multiplier=77.0, sampling="poisson", **options)
    history = model.fit(
        *data(),
        batch_size=2,
        epochs=2,
        callbacks=[NoiseMultiplierScheduler(halving), PrivacyBudget(1e-3)],
        verbose=0,
    )
    expected = tuple(PoissonSteps(4, z, ROWS, 2) for z in (4.0, 2.0, 1.0))
    assert model.ledger.segments == expected
    assert history.history["noise_multiplier"] == [2.0, 1.0]
    assert history.history["epsilon"][-1] == Ledger(expected).epsilon(1e-3)


def test_a_pass_counts_with_the_least_noise_in_it():
    model = private(1.0, noise_multiplier=77.0)
    model.fit(
        *data(),
        batch_size=2,
        epochs=2,
        callbacks=[NoiseMultiplierScheduler(halving)],
        verbose=0,
    )
    assert model.ledger.segments == (
        ShuffledPasses(1, 2.0, ROWS, 2),
        ShuffledPasses(1, 1.0, ROWS, 2),
    )


@pytest.mark.slow
def test_many_noise_multipliers_are_counted_as_few_that_are_less():
    schedule = schedules.PolynomialDecay(4.0, 90, 1.0)
    model = private(1.0, noise_multiplier=77.0, sampling="poisson")
    model.fit(
        *data(),
        batch_size=1,
        epochs=8,
        callbacks=[NoiseMultiplierScheduler(schedule)],
        verbose=0,
    )
    counted = model.ledger.segments
    assert len(counted) <= 32
    used = sorted(float(schedule(step)) for step in range(96))
    spread = sorted(z for s in counted for z in [s.noise_multiplier] * s.steps)
    assert len(spread) == 96
    # Graphs and eager code may round the schedule differently.
    assert all(
        one <= other * (1 + 1e-6) < 1.05 * one
        for one, other in zip(spread, used, strict=True)
    )
    exact = Ledger().add(*(PoissonSteps(1, z, ROWS, 1) for z in used)).merged()
    cost = model.ledger.epsilon(1e-3, "RDP")
    assert exact.epsilon(1e-3, "RDP") <= cost <= 1.05 * exact.epsilon(1e-3, "RDP")


@pytest.mark.parametrize(
    ("schedule", "steps_per_execution"),
    [(halving, 1), (halving, 5), (lambda step: 1.5 + 0.25 * step, 1)],
)
def test_a_budget_allows_the_steps_whose_planned_noise_fits(
    schedule, steps_per_execution
):
    model = private(
        1.0, 77.0, sampling="poisson", steps_per_execution=steps_per_execution
    )
    target = Ledger((PoissonSteps(7, 2.0, ROWS, 2),)).epsilon(1e-3)
    model.fit(
        *data(),
        batch_size=2,
        epochs=10,
        callbacks=[NoiseMultiplierScheduler(schedule), PrivacyBudget(1e-3, target)],
        verbose=0,
    )
    taken = model.ledger.steps
    assert 0 < taken < 60
    assert int(model.optimizer.iterations) == taken
    assert model.epsilon(1e-3) <= target
    one_more = model.ledger.add(PoissonSteps(1, schedule(taken), ROWS, 2))
    assert one_more.epsilon(1e-3) > target
    assert not model.ledger.cut_short


@pytest.mark.slow
def test_a_budget_of_passes_takes_the_least_noise_that_is_planned():
    model = private(1.0, 77.0)
    target = Ledger((ShuffledPasses(3, 4.0, ROWS, 2),)).epsilon(1e-3)
    model.fit(
        *data(),
        batch_size=2,
        epochs=10,
        callbacks=[
            NoiseMultiplierScheduler(lambda step: 8.0 if step < 6 else 4.0),
            PrivacyBudget(1e-3, target),
        ],
        verbose=0,
    )
    assert model.ledger.passes == 3
    assert model.epsilon(1e-3) <= target


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_noise_out_of_range_is_refused_before_the_first_step(bad):
    model = private(1.0)
    with pytest.raises(ValueError, match=r"At step 3 .*`noise_multiplier` must"):
        model.fit(
            *data(),
            batch_size=2,
            callbacks=[NoiseMultiplierScheduler(lambda n: bad if n == 3 else 1.0)],
            verbose=0,
        )
    assert not model.ledger.steps


@pytest.mark.parametrize(
    "callbacks",
    [
        [ClipNormScheduler(lambda n: 1.0), AdaptiveQuantileClip(0.5)],
        [NoiseMultiplierScheduler(lambda n: 1.0)] * 2,
    ],
)
def test_one_callback_alone_may_set_a_variable(callbacks):
    model = private(1.0)
    with pytest.raises(ValueError, match=r"Only one callback may set `\w+`. Received"):
        model.fit(*data(), batch_size=2, callbacks=callbacks, verbose=0)
    assert not model.ledger.steps


def test_both_schedules_together():
    model = private(100.0, noise_multiplier=0.0, sampling="poisson")
    model.fit(
        *data(),
        batch_size=ROWS,
        epochs=3,
        callbacks=[
            ClipNormScheduler(SCHEDULES["function"]),
            NoiseMultiplierScheduler(lambda step: 1e-6 * (1 + step)),
        ],
        verbose=0,
    )
    np.testing.assert_allclose(length(model), 1 + 1 / 2 + 1 / 3, rtol=1e-4)
    assert len(model.ledger.segments) == 3
