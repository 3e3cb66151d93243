"""What several examples of one user cost, against integrals of the definition."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, rdp
from dp_accounting.pld import privacy_loss_distribution
from scipy import special, stats

from tfdp.accounting import PoissonSteps, Segment, ShuffledPasses
from tfdp.accounting.accountant import epsilon
from tfdp.accounting.users import (
    _divergence,
    _epsilon_of_group,
    _epsilon_of_releases,
    user_epsilon,
)
from tfdp.sampling import (
    BallsInBins,
    CyclicPoisson,
    FixedBins,
    Shuffled,
    TruncatedPoisson,
)
from tfdp.sampling.poisson import log_binomial

HAS_MIXTURES = hasattr(privacy_loss_distribution, "from_mixture_gaussian_mechanism")


def chances(size, probability):
    return tuple(log_binomial(size, probability).tolist())


def cost(segment, delta, size, accountant="RDP"):
    return user_epsilon(
        segment, delta, max_examples_per_user=size, accountant=accountant
    )


@pytest.mark.parametrize("accountant", ["RDP", "PLD"])
@pytest.mark.parametrize("size", [3])
def test_examples_of_a_pass_divide_the_noise(size, accountant):
    run = ShuffledPasses(5, 4.0, 10_000, 64)
    less_noise = ShuffledPasses(5, 4.0 / size, 10_000, 64)
    assert cost(run, 1e-6, size, accountant) == pytest.approx(
        epsilon([less_noise], 1e-6, accountant), rel=1e-6
    )


@pytest.mark.parametrize("accountant", ["RDP", "PLD"])
def test_one_example_costs_what_an_example_costs(accountant):
    run = PoissonSteps(100, 1.0, 1000, 10)
    assert cost(run, 1e-5, 1, accountant) == epsilon([run], 1e-5, accountant)


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("probability", [1e-5, 0.01, 0.6])
def test_the_divergence_of_one_example_is_that_of_the_library(
    noise_multiplier, probability
):
    orders = [2, 3, 8, 32]
    accountant = rdp.RdpAccountant(orders).compose(
        PoissonSampledDpEvent(probability, GaussianDpEvent(noise_multiplier))
    )
    expected = [accountant.get_epsilon(delta) for delta in (1e-2, 1e-5)]
    ours = [_divergence(n, noise_multiplier, chances(1, probability)) for n in orders]
    found = [rdp.compute_epsilon(orders, ours, delta)[0] for delta in (1e-2, 1e-5)]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


QUICK_DIVERGENCES = {(1.1, 0.3, 7), (2.0, 0.999, 2), (9.0, 1e-4, 2), (9.0, 0.3, 7)}


@pytest.mark.parametrize(
    ("order", "probability", "size"),
    [
        pytest.param(*case, marks=[] if case in QUICK_DIVERGENCES else pytest.mark.slow)
        for case in itertools.product([1.1, 2.0, 9.0], [1e-4, 0.3, 0.999], [2, 7])
    ],
)
def test_the_divergence_is_an_integral(order, probability, size):
    noise_multiplier = 0.8
    counts = np.arange(size + 1)
    weights = stats.binom.pmf(counts, size, probability)

    x = np.linspace(-90, 150, 600_001)
    without = stats.norm.logpdf(x, scale=noise_multiplier)
    shifted = stats.norm.logpdf(x[:, None] - counts, scale=noise_multiplier)
    present = special.logsumexp(shifted, b=weights, axis=1)
    logs = [
        special.logsumexp(order * first + (1 - order) * second)
        for first, second in ((present, without), (without, present))
    ]
    expected = (max(logs) + math.log(x[1] - x[0])) / (order - 1)
    found = _divergence(order, noise_multiplier, chances(size, probability))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize(
    "accountant", ["RDP", pytest.param("PLD", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("probability", "noise_multiplier", "size"),
    [(0.01, 1.0, 3), (0.9, 4.0, 2), (0.001, 0.5, 20)],
)
def test_the_epsilon_of_a_step_is_never_too_small(
    probability, noise_multiplier, size, accountant
):
    """The delta at that epsilon, from its definition, in both directions."""
    run = PoissonSteps(1, noise_multiplier, 1000, round(1000 * probability))
    delta = 1e-4
    found = cost(run, delta, size, accountant)
    counts = np.arange(size + 1)[:, None]
    weights = stats.binom.pmf(counts, size, probability)
    x = np.linspace(-12 * noise_multiplier, size + 12 * noise_multiplier, 400_001)
    without = stats.norm.pdf(x, scale=noise_multiplier)
    present = (weights * stats.norm.pdf(x - counts, scale=noise_multiplier)).sum(0)
    for first, second in ((present, without), (without, present)):
        loss = np.maximum(first - math.exp(found) * second, 0)
        assert loss.sum() * (x[1] - x[0]) <= delta
    if accountant == "PLD" and HAS_MIXTURES and size < 20:
        close = max(
            np.maximum(first - math.exp(0.99 * found - 0.01) * second, 0).sum()
            for first, second in ((present, without), (without, present))
        )
        assert close * (x[1] - x[0]) > delta


@pytest.mark.slow
def test_more_examples_cost_more_and_no_noise_everything():
    run = PoissonSteps(500, 1.0, 10_000, 64)
    costs = [cost(run, 1e-6, size) for size in (1, 2, 5, 30, 300)]
    assert costs == sorted(costs)
    assert costs[-1] < math.inf
    assert cost(PoissonSteps(500, 0.0, 10_000, 64), 1e-6, 3) == math.inf
    # Where all are in every batch there is nothing to draw.
    whole = PoissonSteps(5, 9.0, 100, 100)
    assert cost(whole, 1e-5, 3) == pytest.approx(
        epsilon([ShuffledPasses(5, 3.0, 100, 100)], 1e-5, "RDP")
    )


def test_examples_of_a_user_are_in_all_releases_of_a_pass():
    """Whatever the scheme says of it: its event has five releases a pass."""
    passes = Segment(CyclicPoisson(100, 10), 3, 8.0)
    whole = ShuffledPasses(15, 8.0 / 2, 100, 10)
    found = _epsilon_of_releases(passes, 1e-5, 2, "RDP")
    assert found == pytest.approx(epsilon([whole], 1e-5, "RDP"))
    fixed = Segment(FixedBins(100, 10, batches_per_epoch=10, bins=1), 3, 8.0)
    whole = ShuffledPasses(3, 8.0 / 2, 100, 10)
    assert cost(fixed, 1e-5, 2) == pytest.approx(epsilon([whole], 1e-5, "RDP"))
    assert cost(passes.with_count(0), 1e-5, 2) == 0


def test_what_is_no_gaussian_release_is_not_taken_for_free():
    class Laplace(Shuffled):
        kind = "laplace_passes"
        sampling = None

        def rdp_event(self, count, noise_multiplier):
            return dp_accounting.LaplaceDpEvent(noise_multiplier)

    with pytest.raises(TypeError, match="Received: LaplaceDpEvent"):
        cost(Segment(Laplace(100, 10), 1, 8.0), 1e-5, 2)


GROUPS = [
    Segment(CyclicPoisson(1000, 100), 2, 3.0),
    pytest.param(Segment(BallsInBins(1000, 100), 3, 2.0), marks=pytest.mark.slow),
    pytest.param(Segment(FixedBins(1000, 100, 10, 1), 3, 3.0), marks=pytest.mark.slow),
    pytest.param(
        Segment(TruncatedPoisson(1000, 100, 190), 40, 2.0), marks=pytest.mark.exhaustive
    ),
]


@pytest.mark.parametrize("segment", GROUPS)
def test_users_cost_at_most_what_group_privacy_says(segment):
    """The least k e over a table of one example's guarantees."""
    delta, size = 1e-5, 2
    least = math.inf
    for log_delta in np.linspace(math.log(delta), math.log(1e-12), 25):
        of_one = epsilon([segment], math.exp(log_delta))
        log_sum = special.logsumexp(of_one * np.arange(size))
        if log_delta + log_sum <= math.log(delta):
            least = min(least, size * of_one)
    found = cost(segment, delta, size, "PLD")
    assert 2 * epsilon([segment], delta) < found <= 1.001 * least
    assert 0.9 * least < found


@pytest.mark.parametrize("size", [2, 5])
def test_a_group_of_gaussian_releases_is_never_too_cheap(size):
    """What they really cost is known: size times the shift."""
    run = ShuffledPasses(4, 6.0, 1000, 10)
    exact = epsilon([ShuffledPasses(4, 6.0 / size, 1000, 10)], 1e-5)
    of_group = _epsilon_of_group(run, 1e-5, size, "PLD", most=math.inf)
    assert exact < of_group < 3 * exact
    assert _epsilon_of_group(run, 1e-5, size, "PLD", most=of_group) == math.inf
    assert cost(run, 1e-5, size, "PLD") == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("size", [0, 1.5])
def test_a_user_has_a_whole_number_of_examples(size):
    with pytest.raises(ValueError, match=f"max_examples_per_user={size}"):
        cost(PoissonSteps(100, 1.0, 1000, 10), 1e-5, size)
