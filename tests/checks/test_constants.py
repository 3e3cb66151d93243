"""What is worked out for sizes is what TensorFlow computes, for any number of rows."""

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdp.checks.graph import Analysis
from tfdp.checks.sizes import Size
from tfdp.checks.values import Value

# Functions of one or two vectors of three whole numbers, to such a vector.
UNARY = {
    "negative": tf.negative,
    "absolute": tf.abs,
    "reversed": lambda a: tf.reverse(a, [0]),
    "slice": lambda a: tf.concat([a[1:], a[:1]], 0),
    "steps": lambda a: tf.concat([a[::2], a[-1:]], 0),
    "last": lambda a: tf.stack([a[-1], a[0], a[-2]]),
    "masked": lambda a: tf.slice(tf.pad(a, [[1, 1]]), [1], [3]),
    "padded": lambda a: tf.pad(a[1:], [[1, 0]], constant_values=5),
    "gather": lambda a: tf.gather(a, [2, 0, 0]),
    "product": lambda a: tf.stack([tf.reduce_prod(a), a[0], tf.reduce_sum(a)]),
    "extremes": lambda a: tf.stack([tf.reduce_max(a), tf.reduce_min(a), a[1]]),
    "wide": lambda a: tf.cast(tf.cast(a, tf.int64), tf.int32),
    "float": lambda a: tf.cast(tf.cast(a, tf.float32), tf.int32),
    "range of floats": lambda a: a + tf.cast(tf.range(3.0), tf.int32),
    "truth": lambda a: tf.cast(tf.cast(a, tf.bool), tf.int32),
    "square": lambda a: tf.reduce_sum(tf.transpose(tf.stack([a, a])), 1),
    "reshaped": lambda a: tf.reshape(tf.reshape(a, [1, 3]), [-1]),
    "squeezed": lambda a: tf.squeeze(tf.expand_dims(a, 0), 0),
    "filled": lambda a: tf.fill([3], a[1]),
    "stitched": lambda a: tf.dynamic_stitch([[0, 2], [1]], [a[:2], a[2:]]),
    "one hot": lambda a: a * tf.one_hot(1, 3, dtype=tf.int32),
    "permuted": lambda a: tf.gather(a, tf.math.invert_permutation([2, 0, 1])),
    "range": lambda a: a + tf.range(3),
    "divided": lambda a: a // 2,
    "rest": lambda a: a % 3,
    "truncated": lambda a: tf.truncatediv(a, -3),
    "truncated rest": lambda a: tf.truncatemod(a, -3),
}
BINARY = {
    "sum": tf.add,
    "difference": tf.subtract,
    "times": tf.multiply,
    "quotient": lambda a, b: a // tf.where(tf.equal(b, 0), 1, b),
    "remainder": lambda a, b: a % tf.where(tf.equal(b, 0), 1, b),
    "larger": tf.maximum,
    "smaller": tf.minimum,
    "where": lambda a, b: tf.where(a > b, a, b),
    "not where": lambda a, b: tf.where((a <= b) | tf.equal(a, 1), b, 2 * a),
    "broadcast": lambda a, b: tf.broadcast_dynamic_shape(
        tf.ones_like(a), tf.maximum(b, 1)
    ),
    "differ": lambda a, b: tf.cast(tf.not_equal(a, b) & (a >= 0), tf.int32),
    "less": lambda a, b: tf.cast(tf.logical_not(a < b), tf.int32),
}
ROWS = (1, 2, 5, 12)


def applied(steps):
    """A function of a batch: each step takes results of steps before it."""

    def run(x):
        rows = tf.shape(x)[0]
        known = [tf.stack([rows, 3, 2 * rows]), tf.constant([0, -2, 4])]
        for name, *places in steps:
            one, other = (known[place % len(known)] for place in places)
            known.append(
                UNARY[name](one) if name in UNARY else BINARY[name](one, other)
            )
        return known[-1]

    return run


def check(steps):
    function = tf.function(applied(steps), autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec([None, 3])).graph
    batch = Value(0, lengths=(Size(1), 3))
    known = {graph.inputs[0].op.name: batch}
    (value,) = Analysis(None).values(graph, known, graph.outputs)
    results = [function(tf.zeros([rows, 3])).numpy().tolist() for rows in ROWS]
    if value.numbers is None:
        # What counts rows must be said to, if nobody has worked it out.
        assert value.causes or results == results[:1] * len(ROWS), steps
        return
    for rows, result in zip(ROWS, results, strict=True):
        for number, real in zip(value.numbers.tolist(), result, strict=True):
            if isinstance(number, Size):
                assert number.block is None or number.block * rows == real, steps
            else:
                assert number == real, (steps, value.numbers)


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_one_operation(name, places):
    check([(name, *places)])


steps_ = st.tuples(
    st.sampled_from([*UNARY, *BINARY]), st.integers(0, 9), st.integers(0, 9)
)


@pytest.mark.slow
@given(st.lists(steps_, min_size=2, max_size=6))
def test_several_operations(steps):
    check(steps)
