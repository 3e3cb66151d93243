"""Tests of what a batch is, and of its lengths."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.losses.batch import Batch, check_equal_rows, number_of_rows, with_equal_rows


def test_the_number_of_rows_is_static_where_it_can_be():
    assert number_of_rows({"a": None, "b": np.zeros([3, 2])}) == 3

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def count(x):
        return number_of_rows((None, x))

    assert int(count(tf.zeros([3, 2]))) == 3


X, Y = np.zeros([3, 2]), np.zeros([3])

UNEQUAL = {
    "y": (Batch(X, Y[:1]), "x with 3 rows, y with 1 rows"),
    "weight": (Batch(X, Y, Y[:2]), "sample_weight with 2 rows"),
    "inputs": (Batch({"a": X, "b": X[:1]}, Y), "x with 1 and 3 rows"),
    "padding": (Batch(X, Y, is_padding=np.zeros([4], bool)), "is_padding with 4 rows"),
    "scalar": (Batch(X, Y, 2.0), "sample_weight with no rows"),
}


@pytest.mark.parametrize(("batch", "received"), UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("check", [check_equal_rows, with_equal_rows])
def test_known_lengths_must_be_equal(check, batch, received):
    with pytest.raises(
        ValueError, match=f"same number of rows.*Received: .*{received}"
    ):
        check(batch)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    ("length", "error"), [(3, None), (1, "rows|reshape"), (4, "rows|reshape")]
)
def test_open_lengths_are_compared_when_the_graph_runs(jit_compile, length, error):
    @tf.function(
        input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None])],
        jit_compile=jit_compile,
    )
    def rows(x, y):
        x, y, *_ = with_equal_rows(Batch(x, y))
        return tf.reduce_sum(x) + tf.reduce_sum(y)

    given = tf.ones([3, 2]), tf.ones([length])
    if error is None:
        assert rows(*given) == 9
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match=error):
            rows(*given)


def test_known_lengths_bring_no_operations():
    batch = Batch(tf.ones([3, 2]), None, tf.ones([3]))
    assert with_equal_rows(batch) is batch
