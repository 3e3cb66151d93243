"""Few noise multipliers for many: never more noise than there was."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdp.accounting.levels import folded, lowered, noise_levels

NOISE = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=300)


@given(NOISE)
def test_no_step_counts_with_more_noise_than_it_had(values):
    values = np.array(values)
    levels = noise_levels(values)
    counted = lowered(values, levels)
    assert 1 <= len(levels) <= 32
    assert (counted <= values).all()
    assert counted.min() == values.min()
    widest = (values.max() / values.min()) ** (1 / 32)
    assert (values <= counted * widest * (1 + 1e-9)).all()


@given(NOISE)
def test_up_to_32_different_values_stay(values):
    values = np.unique(values)[:32]
    np.testing.assert_array_equal(lowered(values, noise_levels(values)), values)


@given(st.floats(1e-2, 1e2), st.floats(1e-2, 1e2))
def test_two_releases_are_worth_one_with_less_noise(one, other):
    both = folded(one, other)
    assert both < min(one, other)
    np.testing.assert_allclose(1 / both**2, 1 / one**2 + 1 / other**2, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_no_noise_in_one_release_is_no_noise():
    assert folded(np.float64(0.0), 1.0) == 0
    assert folded(2.0, np.inf) == pytest.approx(2.0)
