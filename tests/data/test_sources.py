"""Which arrays are known to have rows in common."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.data.sources import have_common_rows


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
    assert have_common_rows(rows, part(rows)) == is_shared


def test_parts_of_one_array_are_different_rows():
    rows = np.arange(24.0).reshape(8, 3)
    assert not have_common_rows(rows[:4], rows[4:])
    assert not have_common_rows(rows[::2], rows[1::2])
    source = iter(rows)
    assert not have_common_rows(source, rows)


def test_a_row_that_is_broadcast_is_common_to_nobody():
    rows = np.arange(24.0).reshape(8, 3)
    mask = np.broadcast_to(rows[:1], rows.shape)
    assert not have_common_rows({"x": rows, "mask": mask[:4]}, {"mask": mask[4:]})


def test_a_pipeline_is_one_source():
    pipeline = tf.data.Dataset.from_tensor_slices(np.zeros((4, 2))).batch(2)
    declared = tfdp.data.declare(
        pipeline, number_of_examples=4, expected_batch_size=2, sampling="shuffle"
    )
    assert have_common_rows(declared, pipeline)
    assert not have_common_rows(declared, pipeline.take(1))
