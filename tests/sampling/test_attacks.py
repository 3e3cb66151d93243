"""Attacks on the draws of schemes: what they prove stays below what is claimed.

The attacker sees every noised sum of a training, and knows all rows but the canary's:
the sums are then whether the canary was drawn, plus noise.
"""

import numpy as np
import pytest
from scipy import stats

from tfdp.accounting import Segment
from tfdp.accounting.accountant import epsilon
from tfdp.sampling import CyclicPoisson, Poisson, TruncatedPoisson
from tfdp.sampling.poisson_users import PoissonUsers

pytestmark = [pytest.mark.slow, pytest.mark.statistical]

DELTA = 1e-5
STEPS = 20
TRIALS = 3000
NOISE_MULTIPLIER = 4.0
CLAIMED = epsilon([Segment(Poisson(40, 20), STEPS, NOISE_MULTIPLIER)], DELTA)


def sums(scheme, canaries, steps_of_epoch):
    """How many canaries are in each step of each trial."""
    draws = np.empty((TRIALS, STEPS))
    for trial in range(TRIALS):
        for step in range(STEPS):
            epoch, index = divmod(step, steps_of_epoch)
            drawn = scheme.draw(trial, epoch, index)
            draws[trial, step] = np.isin(canaries, drawn).sum()
    return draws


def proven_epsilon(scheme, canaries=(0,), probability=0.5):
    """A lower bound of epsilon that holds with 95 % confidence.

    Sums are judged by the likelihood of a canary that is drawn with a probability. The
    threshold is chosen on one half of the trials and judged on the other.
    """
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, TRIALS, STEPS)) * NOISE_MULTIPLIER
    noise[0] += sums(scheme, canaries, scheme.steps_per_epoch)
    size = len(canaries)
    shift = np.exp((size * noise - size**2 / 2) / NOISE_MULTIPLIER**2)
    scores = np.log1p(probability * (shift - 1)).sum(axis=2)
    half = TRIALS // 2

    def bound(threshold, present, absent):
        hits, alarms = (present > threshold).sum(), (absent > threshold).sum()
        least = stats.beta.ppf(0.025, hits, half - hits + 1)
        most = stats.beta.ppf(0.975, alarms + 1, half - alarms)
        return np.log(max(np.nan_to_num(least) - DELTA, 1e-12) / most)

    first, second = scores[:, :half], scores[:, half:]
    thresholds = np.quantile(first[0], np.linspace(0.05, 0.95, 19))
    best = max(thresholds, key=lambda each: bound(each, *first))
    return bound(best, *second)


@pytest.mark.parametrize(
    ("scheme", "count"),
    [
        (Poisson(40, 20), STEPS),
        (TruncatedPoisson(40, 20, 22), STEPS),
        (PoissonUsers(40, 20, 5), STEPS),
        (CyclicPoisson(40, 10, parts=2), STEPS // 4),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_no_more_is_proven_than_claimed(scheme, count):
    claimed = epsilon([Segment(scheme, count, NOISE_MULTIPLIER)], DELTA)
    assert 0 < proven_epsilon(scheme) < claimed


def test_users_that_are_split_over_units_are_found_out():
    """Five rows of one user, each drawn by a coin of its own, at the price of one."""
    rows = tuple(range(5))
    assert proven_epsilon(Poisson(200, 100), rows) > CLAIMED
