"""Batches that have one row in common, and what counts as equal in it."""

import numpy as np
import pytest

from tfdp._comparison import agree, probe_rows, tolerance_of, with_others_changed


@pytest.mark.parametrize("row", range(4))
def test_one_row_stays_and_all_others_change(row):
    x = {
        "floats": np.random.default_rng(1).normal(size=(4, 2)),
        "zeros": np.zeros((4, 2)),
        "ids": np.array([[7, 1], [7, 1], [2, 5], [0, 9]]),
        "strings": np.array(["a", "b", "c", "d"]),
        "flags": np.array([True, False, True, True]),
    }
    changed = with_others_changed(x, row)
    for name, value in x.items():
        same = (changed[name] == value).reshape(4, -1)
        assert same[row].all()
        assert not np.delete(same, row, axis=0).any(axis=1).any(), name
        assert changed[name].dtype == value.dtype


@pytest.mark.parametrize(
    ("dtype", "rounding", "difference"),
    [("float64", 1e-6, 1e-3), ("float16", 1e-3, 5e-2), ("bfloat16", 1e-2, 0.2)],
)
def test_rounding_is_no_difference(dtype, rounding, difference):
    tolerance = tolerance_of(["float32", dtype])
    values = np.array([[1.0, 2.0, np.nan, np.inf], [3.0, 4.0, 5.0, 6.0]] * 2)

    def agrees(other, row=None):
        return agree([values], [other], row, tolerance)

    assert agrees(values * (1 + rounding))
    assert not agrees(values * (1 + difference))
    assert not agrees(np.nan_to_num(values))
    assert not agrees(values[:, :2])
    other = values.copy()
    other[3] += 1.0
    assert [agrees(other, row) for row in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("given", [1, 3, 9])
def test_there_are_always_four_rows(given):
    x = {"ids": np.arange(given), "floats": np.ones((given, 2, 3))}
    rows = probe_rows("x", x)
    assert rows["ids"].tolist() == [row % given for row in range(4)]
    assert rows["floats"].shape == (4, 2, 3)
