"""Attacks on the draws of schemes: what they prove stays below what is claimed.

The attacker sees every noised sum of one training, in which each canary has a direction
of its own, and knows all other rows: along a direction the sums are then whether the
canary was drawn, plus noise. A fair coin decides for each whether it is in the data.
"""

import numpy as np
import pytest
from scipy import special

from tfdp.accounting import Segment
from tfdp.accounting.accountant import epsilon
from tfdp.audit import epsilon_lower_bound
from tfdp.sampling import (
    BallsInBins,
    CyclicPoisson,
    FixedBins,
    Poisson,
    TruncatedPoisson,
)
from tfdp.sampling.poisson_users import PoissonUsers

pytestmark = [pytest.mark.slow, pytest.mark.statistical]

DELTA = 1e-5
CANARIES = 3000
NOISE_MULTIPLIER = 4.0
STEPS = 20
CLAIMED = epsilon([Segment(Poisson(40, 20), STEPS, NOISE_MULTIPLIER)], DELTA)


def noised_sums(draw, steps, rows_of_canary=1):
    """What a training releases along each canary, and which of them were in it.

    Args:
        draw: Returns the batch of a step; canaries that are out contribute nothing.
        steps: Of the training.
        rows_of_canary: Rows that it has, each an example of the scheme.
    """
    rng = np.random.default_rng(0)
    inserted = rng.integers(0, 2, CANARIES) == 1
    sums = NOISE_MULTIPLIER * rng.normal(size=(steps, CANARIES))
    for step in range(steps):
        counts = np.bincount(draw(step) // rows_of_canary, minlength=CANARIES)
        sums[step] += counts * inserted
    return sums, inserted


def proven_epsilon(scheme, rows_of_canary=1):
    """A lower bound of epsilon that holds with 95 % confidence."""

    def draw(step):
        epoch, index = divmod(step, scheme.steps_per_epoch)
        return scheme.draw(7, epoch, index)

    sums, inserted = noised_sums(draw, STEPS, rows_of_canary)
    # By the likelihood of a canary that is drawn with the scheme's probability.
    share = scheme.expected_batch_size / scheme.number_of_examples
    size = rows_of_canary
    shift = np.exp((size * sums - size**2 / 2) / NOISE_MULTIPLIER**2)
    scores = np.log1p(share * (shift - 1)).sum(0)
    return epsilon_lower_bound(scores, inserted, DELTA)


@pytest.mark.parametrize(
    ("scheme", "count"),
    [
        (Poisson(CANARIES, CANARIES // 2), STEPS),
        (TruncatedPoisson(CANARIES, CANARIES // 2, CANARIES // 2 + 90), STEPS),
        (PoissonUsers(CANARIES, CANARIES // 2, 5), STEPS),
        (CyclicPoisson(CANARIES, CANARIES // 4, parts=2), STEPS // 4),
        (BallsInBins(CANARIES, CANARIES // 2), STEPS // 2),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_no_more_is_proven_than_claimed(scheme, count):
    claimed = epsilon([Segment(scheme, count, NOISE_MULTIPLIER)], DELTA)
    assert 0 < proven_epsilon(scheme) < claimed


def test_users_that_are_split_over_units_are_found_out():
    """Five rows of one user, each drawn by a coin of its own, at the price of one."""
    scheme = Poisson(5 * CANARIES, 5 * CANARIES // 2)
    assert proven_epsilon(scheme, rows_of_canary=5) > CLAIMED


def test_bins_that_are_used_again_and_not_counted_are_found_out():
    """Files that are read in every epoch, at the price of bins drawn anew for each."""
    epochs, bins = 100, 10
    scheme = BallsInBins(CANARIES, CANARIES // bins)
    files = [scheme.draw(7, 1, index) for index in range(bins)]
    sums, inserted = noised_sums(lambda step: files[step % bins], epochs * bins)
    # A canary is in one bin, the same in all epochs; nobody knows in which.
    of_bins = sums.reshape(epochs, bins, CANARIES).sum(0)
    scores = special.logsumexp((of_bins - epochs / 2) / NOISE_MULTIPLIER**2, axis=0)
    found = epsilon_lower_bound(scores, inserted, DELTA)
    fixed = FixedBins(CANARIES, CANARIES // bins, batches_per_epoch=bins, bins=1)
    claimed, counted = (
        epsilon([Segment(each, epochs, NOISE_MULTIPLIER)], DELTA)
        for each in (scheme, fixed)
    )
    assert claimed < found < counted
