import dataclasses
import math
import statistics

import numpy as np
import pytest

from tfdp.accounting import calibration
from tfdp.accounting.accountant import epsilon
from tfdp.accounting.calibration import (
    affordable_count,
    calibrate_gaussian,
    calibrate_noise_multiplier,
)
from tfdp.accounting.ledger import Ledger
from tfdp.accounting.segments import (
    PoissonSteps,
    Segment,
    ShuffledPasses,
    UnamplifiedSteps,
)
from tfdp.sampling import BallsInBins, FixedBins

MNIST = {"n": 60_000, "batch_size": 256, "epochs": 60, "delta": 1e-5}
SMALL = {"n": 1000, "batch_size": 30, "epochs": 3, "delta": 1e-4}

LEDGERS = {
    "empty": Ledger(),
    "used": Ledger((PoissonSteps(500, 4.0, 10_000, 100), UnamplifiedSteps(2, 20.0))),
}
SEGMENTS = {
    "poisson": PoissonSteps(99, 4.0, 10_000, 100),
    "shuffled": ShuffledPasses(99, 20.0, 10_000, 100),
    "unknown": UnamplifiedSteps(99, 20.0),
}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        pytest.param(1.0, 2.0275, marks=pytest.mark.smoke),
        pytest.param(3.0, 0.9697, marks=pytest.mark.slow),
    ],
)
def test_known_value(target, expected):
    noise = calibrate_noise_multiplier(target, **MNIST)
    assert noise == pytest.approx(expected, rel=1e-3)

    def cost(noise):
        return epsilon([PoissonSteps(14_100, noise, 60_000, 256)], 1e-5)

    assert cost(noise) <= target < cost(noise * (1 - 2e-5))


@pytest.mark.parametrize(
    ("target", "batch_size"), [(0.01, 60_000), (3.0, 256), (1e3, 60_000)]
)
def test_rdp_noise_is_the_least_that_is_enough(target, batch_size):
    setting = MNIST | {"batch_size": batch_size}
    noise = calibrate_noise_multiplier(target, **setting, accountant="RDP")
    steps = 60 * math.ceil(60_000 / batch_size)

    def cost(noise):
        return epsilon([PoissonSteps(steps, noise, 60_000, batch_size)], 1e-5, "RDP")

    assert cost(noise) <= target < cost(noise * (1 - 2e-5))


@pytest.mark.parametrize(
    ("target", "batch_size"), [(0.05, 30), (0.5, 1000), (0.5, 5000), (500.0, 1000)]
)
def test_the_steps_are_those_of_fit(target, batch_size):
    setting = SMALL | {"batch_size": batch_size}
    noise = calibrate_noise_multiplier(target, **setting)
    steps = 3 * math.ceil(1000 / batch_size)

    def cost(noise):
        ledger = Ledger().add(PoissonSteps(steps, noise, 1000, batch_size))
        return ledger.epsilon(delta=1e-4)

    assert cost(noise) <= target < cost(noise * (1 - 2e-5))
    assert cost(np.float32(noise)) <= target


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["PLD", "RDP"])
def test_a_target_that_no_noise_reaches_is_refused(accountant, monkeypatch):
    monkeypatch.setattr(calibration, "_MOST_NOISE", 16_000_000)
    with pytest.raises(ValueError, match=r"too small for 102 steps.*Received: target"):
        calibrate_noise_multiplier(1e-6, **SMALL, accountant=accountant)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"target_epsilon": 0}, ValueError),
        ({"target_epsilon": math.nan}, ValueError),
        ({"target_epsilon": math.inf}, ValueError),
        ({"target_epsilon": "3"}, TypeError),
        ({"n": 0}, ValueError),
        ({"n": None}, TypeError),
        ({"batch_size": -1}, ValueError),
        ({"epochs": -1.5}, ValueError),
        ({"epochs": math.nan}, ValueError),
        ({"delta": 0}, ValueError),
        ({"delta": 1}, ValueError),
        ({"accountant": "GDP"}, ValueError),
    ],
)
def test_wrong_arguments_of_calibration_are_refused(change, error):
    (name,) = change
    arguments = SMALL | {"target_epsilon": 1.0} | change
    with pytest.raises(error, match=f"`{name}`.*Received: {name}="):
        calibrate_noise_multiplier(**arguments)


@pytest.mark.parametrize("accountant", ["PLD", "RDP"])
@pytest.mark.parametrize("segment", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize(("name", "target"), [("empty", 0.3), ("used", 1.0)])
def test_the_affordable_count_is_the_last_within_budget(
    name, segment, target, accountant
):
    ledger = LEDGERS[name]
    count = affordable_count(ledger, segment, target, 1e-5, accountant)

    def cost(count):
        return ledger.add(segment.with_count(count)).epsilon(1e-5, accountant)

    assert count == 0 or cost(count) <= target
    assert cost(count + 1) > target


@pytest.mark.parametrize("accountant", ["PLD", "RDP"])
def test_a_spent_budget_affords_nothing(accountant):
    ledger = LEDGERS["used"]
    spent = ledger.epsilon(1e-5, accountant)
    step = SEGMENTS["poisson"]
    assert affordable_count(ledger, step, spent / 2, 1e-5, accountant) == 0
    assert affordable_count(ledger, step, spent * 1.5, 1e-5, accountant) > 0


def test_a_count_in_two_halves_is_the_count():
    step = SEGMENTS["poisson"]
    count = affordable_count(Ledger(), step, 0.3, 1e-5)
    half = Ledger((step.with_count(count // 2),))
    assert affordable_count(half, step, 0.3, 1e-5) == count - count // 2


def test_no_noise_affords_nothing():
    assert affordable_count(Ledger(), UnamplifiedSteps(1, 0.0), 1e6, 1e-5) == 0


def test_nobody_takes_more_than_a_billion_steps():
    rare = PoissonSteps(1, 1000.0, 10**9, 1)
    assert affordable_count(Ledger(), rare, 3.0, 1e-5) == 1_000_000_000


@pytest.mark.parametrize("target", [0, -1, math.nan, math.inf])
def test_a_wrong_target_of_the_count_is_refused(target):
    with pytest.raises(ValueError, match=r"`target_epsilon`.*Received: target_eps"):
        affordable_count(Ledger(), SEGMENTS["poisson"], target, 1e-5)


def test_a_wrong_delta_or_accountant_of_the_count_is_refused():
    with pytest.raises(ValueError, match="Received: delta=0"):
        affordable_count(Ledger(), SEGMENTS["poisson"], 1.0, 0)
    with pytest.raises(ValueError, match="Received: accountant='GDP'"):
        affordable_count(Ledger(), SEGMENTS["poisson"], 1.0, 1e-5, "GDP")


@pytest.mark.parametrize("curve", [float, math.atan, math.sinh])
@pytest.mark.parametrize("ends", [(0, 1000), (1000, 0)])
def test_a_crossing_is_found_in_few_calls(curve, ends):
    calls = []
    sign = 1 if ends[0] < ends[1] else -1

    def excess(k):
        calls.append(k)
        return sign * curve((k - 617.5) / 100)

    inside, outside = ends
    assert calibration._crossing(excess, inside, outside) == (617 if sign > 0 else 618)
    assert len(calls) <= 14


NOISE = {
    "falling": np.array([12.0, 12.0, 9.0, 6.0, 4.5]),
    "rising": np.array([4.5, 6.0, 9.0, 12.0]),
    "changing": np.array([6.0, 9.0] * 40),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "accountant"),
    [
        ("empty", "falling", "PLD"),
        ("used", "changing", "PLD"),
        ("used", "rising", "RDP"),
    ],
)
def test_steps_with_noise_of_their_own(name, shape, accountant):
    ledger, noise = LEDGERS[name], NOISE[shape]
    segment = PoissonSteps(0, 77.0, 100, 10)
    target = ledger.epsilon(1e-3, accountant) + 0.3
    count = affordable_count(
        ledger, segment, target, 1e-3, accountant, noise_multipliers=noise
    )

    def cost(steps):
        each = [noise[min(n, len(noise) - 1)] for n in range(steps)]
        parts = (
            dataclasses.replace(segment.with_count(1), noise_multiplier=z) for z in each
        )
        return ledger.add(*parts).epsilon(1e-3, accountant)

    assert count
    assert cost(count) <= target < cost(count + 1)


@pytest.mark.parametrize(
    ("epsilon_", "delta", "expected"),
    [(0.8, 1e-8, 6.304), (8.0, 1e-7, 0.70211), (1.0, 1e-5, 3.730)],
)
def test_the_analytic_gaussian_mechanism(epsilon_, delta, expected):
    noise = calibrate_gaussian(epsilon_, delta)
    assert noise == pytest.approx(expected, rel=2e-4)

    def delta_of(z):
        """Balle and Wang's Theorem 8, for a sensitivity of 1."""
        phi = statistics.NormalDist().cdf
        return phi(0.5 / z - epsilon_ * z) - math.exp(epsilon_) * phi(
            -0.5 / z - epsilon_ * z
        )

    assert delta_of(noise) <= delta < delta_of(noise * (1 - 1e-5))


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_bad_arguments_of_the_gaussian_mechanism(bad):
    with pytest.raises(ValueError, match="Received: epsilon="):
        calibrate_gaussian(bad, 1e-5)
    with pytest.raises(ValueError, match="Received: delta="):
        calibrate_gaussian(1.0, bad)


@pytest.mark.parametrize("length", [{}, {"epochs": 1, "steps": 10}])
def test_a_training_has_epochs_or_steps(length):
    with pytest.raises(
        ValueError, match=r"One of `epochs` and `steps`.*Received: epochs"
    ):
        calibrate_noise_multiplier(1.0, n=100, batch_size=10, delta=1e-3, **length)


@pytest.mark.slow
def test_steps_and_parts_of_epochs():
    by_epochs = calibrate_noise_multiplier(2.0, **SMALL, accountant="RDP")
    options = {key: SMALL[key] for key in ("n", "batch_size", "delta")}
    options["accountant"] = "RDP"
    # 34 batches of 30 for 1,000 examples.
    assert calibrate_noise_multiplier(2.0, steps=102, **options) == by_epochs
    assert calibrate_noise_multiplier(2.0, epochs=2.99, **options) == by_epochs
    halves = calibrate_noise_multiplier(2.0, epochs=1.5, **options)
    assert halves == calibrate_noise_multiplier(2.0, steps=51, **options) < by_epochs


@pytest.mark.slow
@pytest.mark.parametrize("target", [3.0, 0.5])
def test_noise_of_balls_in_bins_is_the_least_that_is_enough(target):
    noise = calibrate_noise_multiplier(target, **MNIST, sampling="balls_in_bins")

    def cost(noise):
        return epsilon([Segment(BallsInBins(60_000, 256), 60, noise)], 1e-5)

    assert cost(noise) <= target < cost(noise * (1 - 2e-5))
    # A little less than Poisson draws need: `test_known_value`.
    assert 0.97 < noise / (0.9697 if target == 3.0 else 3.647) < 1


def test_a_begun_epoch_of_balls_in_bins_counts_whole():
    setting = SMALL | {"sampling": "balls_in_bins", "accountant": "RDP"}
    whole = calibrate_noise_multiplier(3.0, **setting)
    assert calibrate_noise_multiplier(3.0, **(setting | {"epochs": 2.1})) == whole


def test_a_sampling_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="`sampling` must be one of"):
        calibrate_noise_multiplier(3.0, **SMALL, sampling="unknown")


@pytest.mark.parametrize(
    "scheme",
    [
        BallsInBins(6000, 60),
        pytest.param(FixedBins(6000, 60, 100, bins=7), marks=pytest.mark.slow),
    ],
)
def test_affordable_epochs_are_as_many_as_the_target_allows(scheme):
    epoch = Segment(scheme, 1, 4.0)
    ledger = Ledger((epoch.with_count(2),))
    count = affordable_count(ledger, epoch, 0.4, 1e-5)
    assert ledger.add(epoch.with_count(count)).epsilon(1e-5) <= 0.4
    assert ledger.add(epoch.with_count(count + 1)).epsilon(1e-5) > 0.4
