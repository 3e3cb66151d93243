"""What an evaluation is asked for: which arrays are the same rows."""

import numpy as np
import pytest

from tfdp.callbacks.evaluated import share_memory


@pytest.mark.parametrize(
    ("part", "is_shared"),
    [
        (lambda a: a, True),
        (lambda a: a[3:], True),
        (lambda a: a[::-1], True),
        (lambda a: a.T[1:].T, True),
        (np.copy, False),
        (lambda a: a[[0, 1]], False),
        (lambda a: a.tolist(), False),
    ],
)
def test_rows_that_share_memory_are_recognised(part, is_shared):
    rows = np.arange(24.0).reshape(8, 3)
    assert share_memory(rows, part(rows)) == is_shared


def test_parts_of_one_array_are_different_rows():
    rows = np.arange(24.0).reshape(8, 3)
    assert not share_memory(rows[:4], rows[4:])
    assert not share_memory(rows[::2], rows[1::2])
    source = rows.tolist()
    assert share_memory(source, source)
