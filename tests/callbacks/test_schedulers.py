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


def private(slope, noise_multiplier=0.0, sampling="shuffle", **options):
    """A model whose every example has the gradient `slope`, and one step an epoch."""
    model = keras.Sequential([
        keras.Input((4,)),
        layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])
    wrapped = tfdp.DPModel(model, sampling=sampling)
    wrapped.compile(
        tfdp.optimizers.DPSGD(
            1.0,
            l2_norm_clip=77.0,
            noise_multiplier=noise_multiplier,
            noise_seed=5,
            **options,
        ),
        lambda y_true, y_pred: slope * keras.ops.sum(y_pred, axis=-1),
    )
    return wrapped


def data(slope=1.0):
    x = np.zeros((ROWS, 4), "float32")
    x[:, 0] = slope
    return x, np.zeros((ROWS, 1), "float32")


def length(model):
    return float(np.linalg.norm(model.get_weights()[0]))


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


@pytest.mark.slow
def test_each_step_clips_with_its_own_norm(tmp_path):
    """A second `fit` goes on in the schedule; without it the last norm stays."""
    schedule, model, lengths = SCHEDULES["square"], private(100.0), Lengths()
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv", append=True)
    scheduler = ClipNormScheduler(schedule)
    for callbacks in ([logger, scheduler], [logger, scheduler], []):
        model.fit(*data(), batch_size=4, callbacks=[*callbacks, lengths], verbose=0)
    model.optimizer.l2_norm_clip = 2.0
    model.fit(*data(), batch_size=4, callbacks=[lengths], verbose=0)
    # The slope's direction is always the same, so the clipped steps add up.
    norms = [float(schedule(step)) for step in range(6)]
    expected = [*norms, *norms[-1:] * 3, 2.0, 2.0, 2.0]
    np.testing.assert_allclose(np.diff([0, *lengths.seen]), expected, rtol=1e-4)
    with (tmp_path / "log.csv").open() as file:
        logged = [float(row["l2_norm_clip"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(logged, [norms[2], norms[5]], rtol=1e-6)


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


@pytest.mark.slow
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
    scheduler = ClipNormScheduler(SCHEDULES["function"], steps=2)
    model.fit(
        generated(),
        steps_per_epoch=4,
        # Lists in lists are for Keras, too.
        callbacks=[[keras.callbacks.CallbackList([scheduler])]],
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
    options = {"batch_size": ROWS, "steps_per_epoch": 3, "verbose": 0}
    model.fit(*data(), callbacks=[scheduler], **options)
    model.save_weights(tmp_path / "old.weights.h5")
    model.fit(*data(), callbacks=[scheduler], **options)
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
    model.fit(*data(), callbacks=callbacks, **options)
    assert seen == [7.5, 7.0, 6.5]
    assert model.ledger.steps == 9


@pytest.mark.slow
def test_a_budget_notices_steps_that_come_again():
    """Iterations set back to where the noise is least, at the end of each epoch."""
    model = private(1.0, 77.0, sampling="poisson")
    again = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.optimizer.iterations.assign(0)
    )
    target = Ledger((PoissonSteps(13, 64.0, ROWS, ROWS),)).epsilon(1e-3)
    model.fit(
        *data(),
        batch_size=ROWS,
        steps_per_epoch=6,
        epochs=8,
        callbacks=[
            NoiseMultiplierScheduler(lambda n: 16 * (4.0 + n)),
            again,
            PrivacyBudget(1e-3, target),
        ],
        verbose=0,
    )
    assert 12 < model.ledger.steps < 48
    assert model.epsilon(1e-3) <= target


@pytest.mark.slow
def test_a_budget_loses_no_step_when_weights_are_loaded(tmp_path):
    model = private(1.0, noise_multiplier=64.0, sampling="poisson")
    options = {"batch_size": ROWS, "steps_per_epoch": 6, "verbose": 0}
    model.fit(*data(), **options)
    model.save_weights(tmp_path / "old.weights.h5")
    load = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: model.load_weights(
            tmp_path / "old.weights.h5"
        )
    )
    target = Ledger((PoissonSteps(12, 64.0, ROWS, ROWS),)).epsilon(1e-3)
    model.fit(*data(), callbacks=[load, PrivacyBudget(1e-3, target)], **options)
    assert model.ledger.steps == 12


def halving(step):
    return 4.0 * 0.5 ** (step // 4)


@pytest.mark.slow
def test_a_pass_counts_with_the_least_noise_in_it():
    """So does what was planned when somebody stops."""
    model = private(1.0, noise_multiplier=77.0)
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", epoch == 1)
    )
    model.fit(
        *data(),
        batch_size=2,
        epochs=4,
        callbacks=[NoiseMultiplierScheduler(halving), stop],
        verbose=0,
    )
    assert model.ledger.segments == (
        ShuffledPasses(1, 2.0, ROWS, 2),
        ShuffledPasses(1, 1.0, ROWS, 2),
    )
    assert model.ledger.cut_short == (ShuffledPasses(2, 0.125, ROWS, 2),)


@pytest.mark.slow
def test_many_noise_multipliers_are_counted_as_few_that_are_less():
    schedule = schedules.PolynomialDecay(4.0, 90, 1.0)
    model = private(1.0, noise_multiplier=77.0, sampling="poisson")
    model.fit(
        *data(),
        batch_size=ROWS,
        steps_per_epoch=96,
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
    cost = model.ledger.epsilon(1e-3, "RDP")
    exact = Ledger(tuple(PoissonSteps(1, z, ROWS, ROWS) for z in used))
    assert exact.epsilon(1e-3, "RDP") <= cost <= 1.05 * exact.epsilon(1e-3, "RDP")


@pytest.mark.slow
def test_a_budget_allows_the_steps_whose_planned_noise_fits():
    def rising(step):
        return 48.0 + 8 * step

    model = private(1.0, 77.0, sampling="poisson")
    segments = tuple(PoissonSteps(1, rising(n), ROWS, ROWS) for n in range(4))
    budget = PrivacyBudget(1e-3, Ledger(segments).epsilon(1e-3))
    model.fit(
        *data(),
        batch_size=ROWS,
        epochs=8,
        callbacks=[NoiseMultiplierScheduler(rising), budget],
        verbose=0,
    )
    assert model.ledger.segments == segments
    assert not model.ledger.cut_short


@pytest.mark.slow
def test_a_budget_of_passes_takes_the_least_noise_that_is_planned():
    model = private(1.0, 77.0)
    target = Ledger((ShuffledPasses(3, 32.0, ROWS, 2),)).epsilon(1e-3)
    model.fit(
        *data(),
        batch_size=2,
        epochs=10,
        callbacks=[
            NoiseMultiplierScheduler(lambda step: 64.0 if step < 6 else 32.0),
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


@pytest.mark.slow
def test_levels_of_planned_noise_are_those_of_the_sensitivity():
    """Of 40 noise multipliers at most 32 stand for all, each of them a half."""
    model = private(1.0, num_microbatches=ROWS // 2)
    falling = NoiseMultiplierScheduler(lambda step: 64.0 - step)
    model.fit(*data(), batch_size=ROWS, epochs=40, verbose=0, callbacks=[falling])
    found = [s.noise_multiplier for s in model.ledger.segments]
    assert model.ledger.passes == 40
    assert len(found) <= 32
    assert min(found) == 12.5
    assert max(found) <= 32.0
