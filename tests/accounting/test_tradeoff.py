import math

import numpy as np
import pytest
from scipy import stats

from tfdp.accounting import Ledger, PoissonSteps, Segment, true_positive_rate
from tfdp.accounting.accountant import deltas
from tfdp.sampling import BallsInBins, Unknown


def gaussian(noise_multiplier, count=1):
    return Ledger((Segment(Unknown(), count, noise_multiplier),))


@pytest.mark.parametrize("rate", [1e-6, 0.001, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("noise_multiplier", [0.5, 2.0, 20.0])
def test_one_gaussian_has_the_power_of_the_best_test(noise_multiplier, rate):
    best = stats.norm.sf(stats.norm.isf(rate) - 1 / noise_multiplier)
    found = true_positive_rate(gaussian(noise_multiplier), rate)
    assert best <= found <= best * 1.01


@pytest.mark.slow
def test_one_poisson_step_has_the_power_of_the_best_test():
    """The mixture against the Gaussian, thresholds on the sum: both are monotone."""
    ledger = Ledger((PoissonSteps(1, 1.0, 10, 2),))
    rate, probability = 0.05, 0.2
    threshold = stats.norm.isf(rate)
    best = (1 - probability) * rate + probability * stats.norm.sf(threshold - 1)
    assert best <= true_positive_rate(ledger, rate) <= best * 1.01


@pytest.mark.slow
def test_steps_compose():
    several = true_positive_rate(gaussian(3.0, count=9), 0.01)
    assert several == pytest.approx(true_positive_rate(gaussian(1.0), 0.01), rel=1e-3)


@pytest.mark.slow
def test_deltas_are_those_of_the_epsilons():
    for ledger in (
        gaussian(1.0),
        Ledger((Segment(BallsInBins(100, 20), 2, 1.5),)),
        Ledger((PoissonSteps(50, 1.0, 1000, 20),)),
    ):
        found = ledger.epsilon(1e-4)
        assert deltas(ledger.segments, [found])[0] == pytest.approx(1e-4, rel=1e-2)


def test_a_loss_distribution_too_large_leaves_the_bound_of_rdp():
    ledger = Ledger((PoissonSteps(3, 0.15, 10_000, 10),))
    assert 0.01 < true_positive_rate(ledger, 0.01) < 1


def test_nothing_ran_or_ran_without_noise():
    assert true_positive_rate(Ledger(), 0.01) == 0.01
    assert true_positive_rate(gaussian(0.0), 0.01) == 1.0
    assert true_positive_rate(gaussian(1e-3), 0.01) == pytest.approx(1.0)


@pytest.mark.slow
def test_runs_cut_short_count_in_full():
    run = Segment(Unknown(), 1, 2.0)
    whole = true_positive_rate(Ledger((run, run)), 0.01)
    assert true_positive_rate(Ledger((run,), cut_short=(run,)), 0.01) == whole


@pytest.mark.parametrize("rate", [0, 1, -0.1, math.nan, np.inf])
def test_rates_outside_of_0_and_1_are_refused(rate):
    with pytest.raises(ValueError, match="false_positive_rate"):
        true_positive_rate(gaussian(1.0), rate)
