"""Poisson draws from one fixed part after the other."""

import numpy as np
import pytest

from tfdp.accounting.accountant import epsilon
from tfdp.accounting.segments import Segment
from tfdp.accounting.users import user_epsilon
from tfdp.sampling import CyclicPoisson, Poisson, Unknown, samplings

ROWS, BATCH = 60, 6
SCHEME = CyclicPoisson(ROWS, BATCH, parts=3)


def test_it_has_a_name():
    assert samplings()["cyclic_poisson"](ROWS, BATCH) == CyclicPoisson(ROWS, BATCH, 2)


@pytest.mark.statistical
def test_a_step_draws_from_the_part_whose_turn_it_is():
    batches = [SCHEME.draw(5, 1, index) for index in range(900)]
    for index, batch in enumerate(batches):
        assert set(batch % 3) <= {index % 3}
    counts = np.bincount(np.concatenate(batches), minlength=ROWS)
    # Each row: 300 coins of probability 0.3.
    assert np.abs(counts - 90).max() < 5 * np.sqrt(300 * 0.3 * 0.7)
    sizes = np.array([len(batch) for batch in batches])
    assert sizes.var() == pytest.approx(20 * 0.3 * 0.7, rel=0.25)


def test_parts_of_unlike_size_are_whole():
    scheme = CyclicPoisson(7, 7, parts=3)
    drawn = [scheme.draw(5, 1, index).tolist() for index in range(3)]
    assert drawn == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("accountant", ["PLD", "RDP"])
def test_an_epoch_costs_the_draws_from_its_first_part(accountant):
    """Ten steps: four of the first part."""
    found = epsilon([Segment(SCHEME, 2, 2.0)], 1e-5, accountant)
    draws = Segment(Poisson(20, 6), 8, 2.0)
    assert found == pytest.approx(epsilon([draws], 1e-5, accountant))


@pytest.mark.slow
def test_users_may_be_in_all_draws_of_a_part():
    segment = Segment(SCHEME, 2, 9.0)
    found = user_epsilon(segment, 1e-5, max_examples_per_user=3, accountant="PLD")
    all_in = epsilon([Segment(Unknown(), 8, 3.0)], 1e-5)
    assert 3 * epsilon([segment], 1e-5) < found <= all_in


def test_more_parts_than_rows_are_refused():
    with pytest.raises(ValueError, match=r"`parts` must be at most.*parts=8"):
        CyclicPoisson(7, 2, parts=8)


def test_longer_epochs_are_refused():
    """They would take more draws from a part than are counted."""
    assert SCHEME.in_epochs_of(4) is SCHEME
    with pytest.raises(ValueError, match="at most the batches of a pass"):
        SCHEME.in_epochs_of(11)
