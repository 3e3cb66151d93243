"""What counts as a change of others."""

import numpy as np
import pytest

from tfdp.audit import comparison


def changed(change, far=1e6, dtype="float32"):
    """Return whether a change of the second of three rows is seen beside a far one."""
    rows = np.ones([3, 4], dtype)
    rows[0] = far
    others = rows.copy()
    others[1] += change
    return comparison._others_differ(rows, others, rows=2, all_rows=3)


@pytest.mark.parametrize("far", [1.0, 1e6, np.inf, np.nan])
def test_a_far_row_does_not_hide_what_changes_others(far):
    assert changed(0.01, far)
    assert not changed(1e-6, far)


def test_the_last_row_may_change():
    rows, others = np.ones([3, 4]), np.ones([3, 4])
    others[2] = 5.0
    assert not comparison._others_differ(rows, others, rows=2, all_rows=3)


def test_imaginary_parts_count():
    assert changed(0.01j, dtype="complex64")


def test_rows_of_nothing_and_positions_along_the_first_axis():
    nothing = np.ones([3, 0])
    assert not comparison._others_differ(nothing, nothing, rows=2, all_rows=3)
    positions, others = np.ones([6, 2]), np.ones([6, 2])
    others[3] = 2.0
    assert comparison._others_differ(positions, others, rows=2, all_rows=3)
    assert not comparison._others_differ(positions, others, rows=1, all_rows=3)
