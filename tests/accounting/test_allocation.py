"""Random allocation: never below the truth, and close above it, in both directions."""

import math

import numpy as np
import pytest
from scipy import special

from tfdp.accounting import accountant
from tfdp.accounting.accountant import deltas, epsilon
from tfdp.accounting.allocation import loss_of_allocation
from tfdp.accounting.segments import Segment
from tfdp.sampling import BallsInBins, FixedBins, Poisson, Shuffled

INTERVAL = 1e-4


def directions(batches, noise_multiplier):
    loss = loss_of_allocation(batches, noise_multiplier, INTERVAL)
    return loss._pmf_remove, loss._pmf_add


def call(strike, z):
    """The mean of (X - strike)+ where log X is normal, X has mean 1."""
    beyond = np.maximum(strike, 1e-300)
    d = -np.log(beyond) * z
    value = special.ndtr(d + 0.5 / z) - strike * special.ndtr(d - 0.5 / z)
    return np.where(strike <= 0, 1 - strike, value)


def exact_of_two(epsilon, z):
    """Both divergences of two batches: a closed form in one, an integral over both."""
    normal = np.linspace(-12, 12, 200_001)
    density = np.exp(-(normal**2) / 2) * (normal[1] - normal[0]) / math.sqrt(2 * np.pi)
    x = np.exp(normal / z - 0.5 / z**2)
    remove = call(2 * math.exp(epsilon) - x, z) / 2
    # (K - S)+ = (S - K)+ - S + K
    strike = 2 * math.exp(-epsilon) - x
    add = (call(strike, z) - 1 + strike) * math.exp(epsilon) / 2
    return float(density @ remove), float(density @ add)


def sampled(batches, z, epsilons, samples):
    """Estimates of both divergences, with their standard errors."""
    rng = np.random.default_rng(5)
    normal = rng.normal(size=(samples, batches))
    out, into = [], []
    logs = normal / z - 0.5 / z**2
    of_others = np.logaddexp.reduce(logs, axis=1) - math.log(batches)
    logs[:, 0] += 1 / z**2
    of_example = np.logaddexp.reduce(logs, axis=1) - math.log(batches)
    for each in epsilons:
        out.append(np.maximum(0, -np.expm1(each - of_example)))
        into.append(np.maximum(0, -np.expm1(each + of_others)))
    return [
        (np.mean(found, axis=1), np.std(found, axis=1) / math.sqrt(samples))
        for found in (np.array(out), np.array(into))
    ]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("noise_multiplier", "batches", "least", "most"),
    [(1.0, 10, 2.177, 2.202), (0.7, 1000, 0.570, 0.601)],
)
def test_published_values(noise_multiplier, batches, least, most):
    run = Segment(BallsInBins(10 * batches, 10), 1, noise_multiplier)
    assert least < epsilon([run], 1e-5) < most


@pytest.mark.parametrize("noise_multiplier", [0.4, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("of_scale", [0.5, 2.0, 3.5])
def test_two_batches_cost_what_an_integral_says(noise_multiplier, of_scale):
    e = of_scale / noise_multiplier
    for found, exact in zip(
        directions(2, noise_multiplier), exact_of_two(e, noise_multiplier), strict=True
    ):
        delta = found.get_delta_for_epsilon(e)
        assert exact - 1e-12 <= delta <= exact * 1.01 + 1e-9


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("noise_multiplier", "batches", "samples"),
    [
        (1.0, 10, 100_000),
        (0.5, 30, 30_000),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1.0, 10, 1_000_000), (0.7, 100, 100_000), (4.0, 5, 1_000_000))
        ),
    ],
)
def test_simulated_losses_agree(noise_multiplier, batches, samples):
    epsilons = np.array([0.2, 0.5, 1.0]) / min(1, noise_multiplier)
    if noise_multiplier > 1:
        epsilons /= noise_multiplier
    simulated = sampled(batches, noise_multiplier, epsilons, samples)
    for found, (mean, error) in zip(
        directions(batches, noise_multiplier), simulated, strict=True
    ):
        bound = np.array(found.get_delta_for_epsilon(epsilons.tolist()))
        assert np.all(bound > mean - 5 * error)
        assert np.all(bound < 1.01 * mean + 5 * error + 1e-9)


def simulated_delta(e, batches, z, epochs, samples, tilt):
    """The delta of removing an example at an epsilon, with its standard error.

    One batch of each epoch is drawn further out than the example is, so that losses are
    seen that matter at a small delta, whichever batch has them.
    """
    rng = np.random.default_rng(11)
    loss, weight = np.zeros(samples), np.zeros(samples)
    for _ in range(epochs):
        normal = rng.normal(size=(samples, batches))
        normal[:, 0] += tilt
        logs = [
            np.logaddexp.reduce(shift * normal - shift**2 / 2, axis=1)
            for shift in (1 / z, tilt)
        ]
        loss += logs[0] - math.log(batches)
        weight += logs[0] - logs[1]
    found = np.exp(weight) * np.maximum(0, -np.expm1(e - loss))
    return found.mean(), found.std() / math.sqrt(samples)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("z", "batches", "epochs", "delta", "tilt", "samples"),
    [
        (1.0, 10, 1, 1e-5, 3.0, 100_000),
        (1.0, 20, 5, 1e-5, 2.0, 50_000),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (0.7, 1000, 1, 1e-5, 4.0, 10_000),
                (0.9, 400, 1, 1e-6, 4.5, 30_000),
                (1.3, 234, 1, 1e-8, 6.0, 60_000),
                (3.0, 5, 10, 1e-5, 1.2, 300_000),
            )
        ),
    ],
)
def test_epsilons_have_the_delta_that_is_simulated(
    z, batches, epochs, delta, tilt, samples
):
    e = epsilon([Segment(BallsInBins(10 * batches, 10), epochs, z)], delta)
    found, error = simulated_delta(e, batches, z, epochs, samples, tilt)
    assert error < 0.2 * delta
    assert 0.85 * delta - 4 * error < found < delta + 4 * error


@pytest.mark.parametrize(
    ("noise_multiplier", "batches"), [(0.3, 7), (1.0, 500), (30.0, 3)]
)
def test_what_is_lost_counts_as_an_unbounded_loss(noise_multiplier, batches):
    for found in directions(batches, noise_multiplier):
        assert 0 < found._infinity_mass < 1e-8
        assert found._probs.sum() + found._infinity_mass >= 1
        assert np.all(found._probs >= 0)


@pytest.mark.slow
def test_it_lies_between_poisson_draws_and_whole_releases():
    """Of one epoch: removing hides as in draws that are as large, about."""
    bins = epsilon([Segment(BallsInBins(60_000, 256), 1, 1.0)], 1e-5)
    drawn = epsilon([Segment(Poisson(60_000, 256), 235, 1.0)], 1e-5)
    whole = epsilon([Segment(BallsInBins(60_000, 60_000), 1, 1.0)], 1e-5)
    assert 0.5 * drawn < bins < 1.2 * drawn < whole
    assert whole == pytest.approx(4.377, abs=1e-3)


def test_an_epoch_is_analysed_once(monkeypatch):
    run = Segment(BallsInBins(6000, 60), 3, 1.234)
    first = epsilon([run], 1e-5)
    monkeypatch.setattr(accountant, "loss_of_allocation", None)
    assert epsilon([run.with_count(6)], 1e-5) > first > 0


def test_epochs_compose():
    loss = loss_of_allocation(10, 2.0, INTERVAL)
    by_hand = loss.compose(loss).compose(loss).get_epsilon_for_delta(1e-5)
    run = Segment(BallsInBins(100, 10), 3, 2.0)
    assert epsilon([run], 1e-5) == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.slow
def test_little_noise_and_a_fallback_are_bounds():
    """Below 0.2 a pass counts as a whole release."""
    little, less = (
        epsilon([Segment(BallsInBins(1000, 10), 1, z)], 1e-5) for z in (0.2, 0.19)
    )
    assert 0 < little < less < math.inf
    assert epsilon([Segment(BallsInBins(1000, 10), 1, 0.0)], 1e-5) == math.inf


@pytest.mark.slow
def test_a_tiny_delta_costs_what_whole_releases_cost_at_most():
    found = epsilon([Segment(BallsInBins(50, 10), 1, 0.9)], 1e-12)
    assert found <= epsilon([Segment(Shuffled(50, 10), 1, 0.9)], 1e-12, "RDP")


@pytest.mark.slow
def test_few_bins_cost_no_more_than_whole_releases():
    bins = [Segment(BallsInBins(200, 100), 1, 0.3)]
    most = epsilon([Segment(Shuffled(200, 100), 1, 0.3)], 1e-5)
    assert epsilon(bins, 1e-5) <= most
    assert deltas(bins, [most])[0] <= 1.01e-5


@pytest.mark.slow
@pytest.mark.parametrize("noise_multiplier", [0.2, 0.3])
def test_few_bins_among_others_cost_no_more_either(noise_multiplier):
    drawn = Segment(Poisson(1000, 10), 20, 1.0)
    fixed = Segment(FixedBins(200, 100, 2, bins=1), 1, noise_multiplier)
    whole = Segment(Shuffled(200, 100), 1, noise_multiplier)
    most = epsilon([whole, drawn], 1e-5)
    assert epsilon([fixed, drawn], 1e-5) <= most
    assert deltas([fixed, drawn], [most])[0] <= 1.01e-5


@pytest.mark.slow
def test_a_little_more_noise_costs_no_more_where_bins_are_few():
    runs = [Segment(BallsInBins(200, 100), 1, z) for z in (0.19, 0.2, 0.21, 0.3, 0.4)]
    costs = [epsilon([run], 1e-5) for run in runs]
    assert costs == sorted(costs, reverse=True)
