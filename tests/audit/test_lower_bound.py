import math

import numpy as np
import pytest
from scipy import stats

import tfdp
from tfdp.accounting import Ledger, Segment
from tfdp.audit import epsilon_lower_bound
from tfdp.audit.lower_bound import gaussian_is_refuted, p_value, right_guesses
from tfdp.sampling import Poisson, Unknown

DELTA = 1e-5
CANARIES = 1000


def true_epsilon(noise_multiplier):
    return Ledger((Segment(Unknown(), 1, noise_multiplier),)).epsilon(DELTA)


def release(rng, noise_multiplier, canaries=CANARIES):
    """A noised sum in which each canary has a direction of its own."""
    inserted = rng.integers(0, 2, canaries) == 1
    return inserted + noise_multiplier * rng.normal(size=canaries), inserted


@pytest.mark.parametrize(
    ("noise_multiplier", "at_least"), [(0.5, 0.55), (1.0, 0.5), (2.0, 0.45), (8.0, 0.0)]
)
def test_a_gaussian_release_is_bounded_from_below(noise_multiplier, at_least):
    """On average half of epsilon, and hardly ever all of it."""
    rng, epsilon = np.random.default_rng(5), true_epsilon(noise_multiplier)
    found = np.array([
        epsilon_lower_bound(*release(rng, noise_multiplier), DELTA) for _ in range(40)
    ])
    assert found.mean() > at_least * epsilon
    assert (found > epsilon).mean() <= 0.05


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("curve", ["gaussian", "any"])
@pytest.mark.parametrize("noise_multiplier", [0.5, 3.0])
@pytest.mark.parametrize("guesses", [20, 1000])
def test_at_most_one_run_in_twenty_is_above_epsilon(curve, noise_multiplier, guesses):
    rng, epsilon = np.random.default_rng(6), true_epsilon(noise_multiplier)
    above = [
        epsilon_lower_bound(
            *release(rng, noise_multiplier), DELTA, guesses=guesses, curve=curve
        )
        > epsilon
        for _ in range(200)
    ]
    assert np.mean(above) <= 0.05


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("curve", ["gaussian", "any"])
def test_canaries_that_leak_together_do_not_refute_what_is_true(curve):
    """One coin gives all away or none: the mechanism with the most uncertain guesses."""
    rng, delta, above = np.random.default_rng(7), 0.04, 0
    for _ in range(300):
        inserted = rng.integers(0, 2, CANARIES) == 1
        scores = rng.normal(size=CANARIES)
        if rng.random() < delta:
            scores = inserted.astype(float)
        above += epsilon_lower_bound(scores, inserted, delta, curve=curve) > 0
    assert above / 300 <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "steps", "noise"),
    [(Poisson(10, 1), 10, 0.5), (Poisson(10, 5), 20, 4.0), (Poisson(20, 1), 400, 1.0)],
)
def test_poisson_draws_cost_more_than_the_gaussian_that_they_look_like(
    draw, steps, noise
):
    """So their curve may be taken for a Gaussian's: at what guesses are about, and delta."""
    ledger = Ledger((Segment(draw, steps, noise),))
    for rate in (0.02, 0.1, 0.5):
        found = tfdp.accounting.true_positive_rate(ledger, rate)
        shift = stats.norm.isf(rate) - stats.norm.isf(found)
        for delta in (1e-6, 1e-3):
            gaussian = Ledger((Segment(Unknown(), 1, 1 / shift),)).epsilon(delta)
            assert ledger.epsilon(delta) >= 0.99 * gaussian


def test_one_guess_is_right_as_often_as_the_best_test_is():
    best = stats.norm.cdf(1.5 / 2)
    assert gaussian_is_refuted(1, 1, 1, 1.5, best + 1e-9)
    assert not gaussian_is_refuted(1, 1, 1, 1.5, best - 1e-9)


def test_the_p_value_is_the_binomial_tail_without_delta():
    assert p_value(50, 50, 100, 2.0, 0.0) == pytest.approx(
        (1 / (1 + math.exp(-2))) ** 50
    )
    # All of 100 right: an accuracy of 0.05 ** 0.01 is refuted, by the logit an epsilon.
    inserted = np.arange(100) % 2 == 1
    found = epsilon_lower_bound(
        inserted.astype(float), inserted, 1e-12, guesses=100, curve="any"
    )
    accuracy = 0.05**0.01
    assert found == pytest.approx(math.log(accuracy / (1 - accuracy)), abs=1e-4)


def test_the_p_value_has_its_slack_for_delta():
    """With a plain loop over what theorem 5.2 takes the maximum of."""
    right, guesses, canaries, delta = 20, 30, 60, 1e-3
    binomial = stats.binom(guesses, 1 / (1 + math.exp(-0.5)))
    slack = max(
        2 / i * sum(binomial.pmf(w) for w in range(max(0, right - i), right))
        for i in range(1, canaries + 1)
    )
    expected = binomial.sf(right - 1) + canaries * delta * slack
    assert p_value(right, guesses, canaries, 0.5, delta) == pytest.approx(expected)


@pytest.mark.parametrize("curve", ["gaussian", "any"])
def test_guesses_that_are_no_better_than_chance_prove_nothing(curve):
    scores, inserted = np.zeros(100), np.arange(100) % 2 == 1
    assert epsilon_lower_bound(scores, inserted, DELTA, curve=curve) == 0
    assert epsilon_lower_bound(-1.0 * inserted, inserted, DELTA, curve=curve) == 0


def test_the_surest_are_guessed_at():
    scores = np.array([5.0, -5.0, 0.1, 4.0, -4.0, -0.1])
    inserted = np.array([True, False, False, False, True, True])
    assert right_guesses(scores, inserted, 2) == (2, 2, 6)
    assert right_guesses(scores, inserted, 4) == (2, 4, 6)
    assert right_guesses(scores, inserted, 6) == (2, 6, 6)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"delta": math.nan}, ValueError, "delta"),
        ({"confidence": 1.0}, ValueError, "confidence"),
        ({"guesses": 1}, ValueError, "guesses"),
        ({"guesses": 101}, ValueError, "guesses"),
        ({"guesses": "all"}, TypeError, "guesses"),
        ({"curve": "laplace"}, ValueError, "curve"),
        ({"scores": np.full(100, np.nan)}, ValueError, "scores"),
        ({"scores": np.ones(99)}, ValueError, "inserted"),
        ({"scores": np.ones((100, 1))}, ValueError, "inserted"),
        ({"inserted": np.ones(100)}, TypeError, "bools"),
        ({"scores": np.ones(1), "inserted": np.ones(1, bool)}, ValueError, "two"),
    ],
)
def test_bad_arguments_are_refused(change, error, match):
    arguments = {"scores": np.ones(100), "inserted": np.ones(100, bool), "delta": DELTA}
    with pytest.raises(error, match=match):
        epsilon_lower_bound(**arguments | change)
