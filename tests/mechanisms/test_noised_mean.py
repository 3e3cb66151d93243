"""Means with noise: sensitivity, noise, standard errors, draws."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from scipy import stats

from tfdp.mechanisms.noised_mean import Bounded, NoisedMean
from tfdp.sampling import Poisson

ACCURACY = Bounded("accuracy", 0.0, 1.0)
LOSS = Bounded("loss", -1.0, 5.0, nan_is_upper=True)


def mean(noise_multiplier=2.0, number=10, expected=10, values=(ACCURACY, LOSS)):
    return NoisedMean(values, Poisson(number, expected), noise_multiplier)


def test_a_value_outside_of_its_range_counts_as_an_end():
    rows = np.array([
        [0.25, 4.0],
        [7.0, -7.0],
        [math.inf, math.inf],
        [-math.inf, -math.inf],
        [math.nan, math.nan],
    ])
    added = mean().of_units(rows, np.arange(5), 5)
    expected = [[-0.25, 2.0], [0.5, -3.0], [0.5, 3.0], [-0.5, -3.0], [-0.5, 3.0]]
    np.testing.assert_array_equal(added, expected)
    assert mean().l2_sensitivity == math.sqrt(2)


@hypothesis.given(
    st.lists(st.floats(width=64), min_size=2, max_size=12),
    st.integers(1, 6),
)
def test_a_unit_never_moves_the_sum_further(numbers, units):
    rows = np.array(numbers[: len(numbers) // 2 * 2]).reshape(-1, 2)
    of_rows = np.arange(len(rows)) % units
    added = mean().of_units(rows, of_rows, units)
    moved = np.linalg.norm(added / [0.5, 3.0], axis=1)
    assert (moved <= mean().l2_sensitivity).all()


def test_a_user_counts_by_the_mean_of_its_rows():
    rows = np.array([[1.0], [0.0], [1.0], [1.0], [0.0]])
    added = mean(values=(ACCURACY,)).of_units(rows, np.array([0, 0, 1, 0, 2]), 3)
    np.testing.assert_allclose(added[:, 0], [2 / 3 - 0.5, 0.5, -0.5])


def test_without_a_unit_the_middle_is_released_with_noise():
    noised = mean(noise_multiplier=1e-9)
    total = noised.of_units(np.zeros((0, 2)), np.arange(0), 0).sum(0)
    released = noised.noised(total)
    assert released == pytest.approx({"accuracy": 0.5, "loss": 2.0}, abs=1e-6)


@pytest.mark.statistical
def test_noise_has_its_standard_deviation_and_no_two_are_alike():
    noised = mean(noise_multiplier=2.0)
    draws = 2000
    found = np.array([
        list(noised.noised(np.zeros(2)).values()) for _ in range(draws)
    ]) - [0.5, 2.0]
    for one, half_width in zip(found.T, [0.5, 3.0], strict=True):
        stddev = 2.0 * math.sqrt(2) * half_width / 10
        statistic = (one**2).sum() / stddev**2
        assert 1e-6 < stats.chi2.cdf(statistic, draws) < 1 - 1e-6
    assert len(np.unique(found)) == 2 * draws
    assert abs(np.corrcoef(found.T)[0, 1]) < 5 / math.sqrt(draws)


def test_the_standard_error_of_all_rows_is_that_of_the_noise():
    errors = mean(noise_multiplier=2.0, values=(ACCURACY,)).standard_errors()
    assert errors == {"accuracy": pytest.approx(2.0 * 0.5 / 10)}


@pytest.mark.statistical
def test_the_standard_error_of_a_draw_is_what_is_seen():
    noised = mean(1.0, number=100, expected=25, values=(ACCURACY,))
    rows = (np.arange(100) < 70).astype(float)[:, None]
    found = []
    for _ in range(2000):
        drawn = noised.draw()
        total = noised.of_units(rows[drawn], np.arange(len(drawn)), len(drawn)).sum(0)
        found.append(noised.noised(total)["accuracy"])
    error = noised.standard_errors()["accuracy"]
    assert error == pytest.approx(math.hypot(0.5 / 25, 0.5 * math.sqrt(0.75 / 25)))
    assert np.mean(found) == pytest.approx(0.7, abs=5 * error / math.sqrt(2000))
    assert np.std(found) == pytest.approx(error, rel=0.1)


def test_draws_are_secret_and_new(rng):
    del rng
    noised = mean(number=200, expected=100)
    draws = [tuple(noised.draw()) for _ in range(3)]
    assert len(set(draws)) == 3
    assert list(mean().draw()) == list(range(10))
