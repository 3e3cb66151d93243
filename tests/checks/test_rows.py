"""Rows that meet are found, whatever the batch; what is proven never lets them meet."""

import contextlib
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, ops

import tfdp
from tests.problems import cases, precision, recurrent
from tfdp import _tree, engines
from tfdp._seeds import secret_seeds
from tfdp._tracing import made_of_rows
from tfdp.checks.convolutions import convolutions_of_rows
from tfdp.checks.engine import choose
from tfdp.checks.following import traced_pass
from tfdp.checks.tracing import Trace
from tfdp.engines.apart import ApartEngine
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.engines.vectorized import VectorizedEngine
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

D = 3


def secret_noise(shape, dtype):
    with secret_seeds(NOISY):
        return keras.random.normal(shape, dtype=dtype)


NOISY = keras.Sequential()


def found(function, *shapes, dtype=tf.float64, rows=None):
    """What is found in a function of tensors with these shapes of a row."""
    specs = [tf.TensorSpec([rows, *shape], dtype) for shape in shapes]
    return Trace(None).found(function, specs, rows)


def is_proven(function, *shapes, **options):
    return not found(function, *shapes, **options)


# ------------------------------------------------------------ what lets rows meet


def global_norm(x):
    return tf.clip_by_global_norm([x], 1.0)[0]


def mean_for_nan(x):
    return tf.where(tf.math.is_nan(x), tf.reduce_mean(x, 0), x)


def capacity(x):
    place = tf.cumsum(tf.cast(x[:, :1] > 0, x.dtype), axis=0)
    return x * tf.cast(place <= 4, x.dtype)


@tf.custom_gradient
def mixing_gradient(x):
    return tf.identity(x), lambda g: g - tf.reduce_mean(g, axis=0)


def views(x):
    """All rows three times, each time others, one after the other."""
    return tf.concat([x, tf.square(x), -x], axis=0)


def ones(x, times):
    """So many for each row, in a column."""
    return tf.ones([times * tf.shape(x)[0], 1], x.dtype)


def in_four(x, factors):
    """Multiply each row, four times in turn, by factors of which all are beside it."""
    repeated = tf.reshape(tf.stack([x] * 4, axis=1), [-1, D])
    return tf.reshape(repeated * factors, [-1, 4, D])[:, 0]


def gradient_of(function):
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    return run


def inside_function(x):
    return tf.function(lambda x: x - tf.reduce_max(x), autograph=False)(x)


def inside_loop(x):
    return tf.while_loop(
        lambda n, _: n < 3, lambda n, h: (n + 1, h + tf.reduce_mean(h, 0)), (0, x)
    )[1]


def as_long_as_a_row_asks(x):
    return tf.while_loop(lambda h: tf.reduce_max(h) > 1.0, lambda h: (h / 2.0,), (x,))[
        0
    ]


def if_there_are_many(x):
    return tf.cond(tf.shape(x)[0] > 5, lambda: x * 2.0, lambda: x * 3.0)


def if_a_row_is_large(x):
    return tf.cond(tf.reduce_max(x) > 5.0, lambda: x * 2.0, lambda: x)


def late_mean_after(x, steps):
    return tf.cond(steps > 100.0, lambda: x - tf.reduce_mean(x, 0), lambda: x)


STEPS = tf.Variable(0.0, dtype=tf.float64)

MEETING = {
    "rows for a kernel, backwards": lambda x: tf.raw_ops.Dilation2DBackpropInput(
        input=tf.zeros([1, 8, D, 1], x.dtype),
        filter=x[..., None],
        out_backprop=tf.ones([1, 1, 1, 1], x.dtype),
        strides=[1, 1, 1, 1],
        rates=[1, 1, 1, 1],
        padding="VALID",
    ),
    "places in the whole batch": lambda x: tf.raw_ops.MaxPoolGradWithArgmax(
        input=x[:, None, :, None],
        grad=x[:, None, :, None],
        argmax=tf.zeros([2, 1, D, 1], tf.int64),
        ksize=[1, 1, 1, 1],
        strides=[1, 1, 1, 1],
        padding="VALID",
        include_batch_in_index=True,
    ),
    "solved": lambda x: tf.linalg.solve(tf.eye(tf.shape(x)[0], dtype=x.dtype), x),
    "turned around": lambda x: tf.reverse_sequence(
        x, tf.fill([D], number_of(x)), seq_axis=0, batch_axis=1
    ),
    "mean": lambda x: x - tf.reduce_mean(x, 0),
    "mean for nan": mean_for_nan,
    "global norm": global_norm,
    "capacity": capacity,
    "gradient": gradient_of(mixing_gradient),
    "function": inside_function,
    "loop": inside_loop,
    "loop until": as_long_as_a_row_asks,
    "late": lambda x: late_mean_after(x, STEPS),
    "number of rows": lambda x: x / tf.cast(tf.shape(x)[0], x.dtype),
    "number of ones": lambda x: x / tf.reduce_sum(tf.ones_like(x[:, 0])),
    "parity": lambda x: x * tf.cast(tf.shape(x)[0] % 2, x.dtype),
    "if many": if_there_are_many,
    "if large": if_a_row_is_large,
    "reversed": lambda x: x + tf.reverse(x, [0]),
    "shifted": lambda x: tf.roll(x, 1, 0),
    "first row": lambda x: x - x[:1],
    "last row": lambda x: x - x[-1],
    "own place": lambda x: x * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None],
    "place in a table": lambda x: (
        x + tf.range(100.0, dtype=x.dtype)[: tf.shape(x)[0], None]
    ),
    "pairs": lambda x: tf.reshape(
        tf.reshape(x, [-1, 2, D]) - tf.reduce_mean(tf.reshape(x, [-1, 2, D]), 1, True),
        tf.shape(x),
    ),
    "half of a row": lambda x: tf.reshape(
        tf.reshape(tf.transpose(x), [-1, D]), tf.shape(x)
    ),
    "gram": lambda x: x @ tf.transpose(x) @ x,
    "softmax": lambda x: tf.nn.softmax(x, 0),
    "sort": lambda x: tf.sort(x, 0),
    "median": lambda x: x - ops.median(x, axis=0),
    "top": lambda x: x - tf.math.top_k(tf.transpose(x), 1).values[:, 0],
    "unique": lambda x: x * tf.cast(tf.size(tf.unique(x[:, 0]).y), x.dtype),
    "where": lambda x: x * tf.cast(tf.shape(tf.where(x[:, 0] > 0))[0], x.dtype),
    "mask": lambda x: x + tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0)),
    "gather": lambda x: tf.gather(x, [0, 0, 1]),
    "gather by rows": lambda x: tf.gather(x, tf.cast(x[:, 0] > 0, tf.int32)),
    "segments": lambda x: tf.math.unsorted_segment_sum(
        x, tf.cast(x[:, 0] > 0, tf.int32), 2
    ),
    "broadcast": lambda x: x[:, 0] * x[:, :1],
    "doubled": lambda x: tf.concat([x, x], 0),
    "views from the next row on": lambda x: views(x)[1 : number_of(x) + 1],
    "views up to the row before": lambda x: views(x)[number_of(x) - 1 :][
        : number_of(x)
    ],
    "every third of the views": lambda x: views(x)[::3],
    "views as entries": lambda x: tf.reshape(views(x), [-1, 3, *x.shape[1:]])[:, 0],
    "views and a constant": lambda x: tf.concat([tf.ones([1, D], x.dtype), x], 0)[:-1],
    "views turned": lambda x: tf.roll(views(x), number_of(x), 0)[: number_of(x)],
    "half of the rows": lambda x: in_four(
        x, tf.concat([ones(x, 2), 0 * ones(x, 2)], 0)
    ),
    "a quarter of the rows": lambda x: in_four(
        x, gradient_of(lambda z: z[: number_of(x)])(ones(x, 4))
    ),
    "views of others": lambda x: tf.split(tf.concat([x, x[::-1]], 0), 2)[1],
    "permutation": tf.random.shuffle,
    "normalization": lambda x: tf.nn.batch_normalization(
        x, *tf.nn.moments(x, 0), None, None, 1e-3
    ),
    "norm": lambda x: x / tf.norm(x),
    "python": lambda x: tf.numpy_function(lambda a: a - a.mean(0), [x], x.dtype),
    "einsum": lambda x: tf.einsum("ni,mi->mi", x, x),
    "bins": lambda x: (
        x * tf.cast(tf.math.bincount(tf.cast(x[:, 0] > 0, tf.int32))[0], x.dtype)
    ),
    "argmax": lambda x: x * tf.cast(tf.argmax(x, 0), x.dtype),
}


def of_neighbours(x):
    """Sums over four entries that belong to one row if they are in their order."""
    flat = tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, D])
    return tf.reduce_sum(tf.reshape(flat, [-1, 4, D]), 1)


MEETING_POSITIONS = {
    "neighbours": of_neighbours,
    "as many bins as the largest": lambda x: tf.math.bincount(
        tf.cast(x[:, 0], tf.int32), minlength=4, maxlength=9, axis=-1
    ),
    "bins of all": lambda x: (
        x * tf.cast(tf.math.bincount(tf.cast(x[:, 0, 0], tf.int32))[0], x.dtype)
    ),
    "segments of rows": lambda x: tf.math.unsorted_segment_sum(x, [0, 0, 1], 2),
    "segments by data": lambda x: tf.math.unsorted_segment_sum(
        tf.transpose(x, [1, 0, 2]), tf.cast(x[0, :, 0], tf.int32), 2
    ),
    "tiles beside flat positions": lambda x: (
        flat_positions(x)
        + tf.tile(tf.range(4.0, dtype=x.dtype), [tf.shape(x)[0]])[:, None]
    ),
    "positions behind and before": lambda x: (
        flat_positions(x) + tf.reshape(x, [-1, D]) + zeros_as(flat_positions(x))
    ),
    "other order": lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), tf.shape(x)),
    "flat softmax": lambda x: tf.nn.softmax(tf.reshape(x, [-1, D]), 0),
    "same position": lambda x: x - tf.reduce_mean(x, 0),
}


def flat_positions(x):
    """Rows of every position, one position after the other."""
    return tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, D])


def zeros_as(x):
    """A state to begin with, as a recurrent layer makes it."""
    return tf.zeros([tf.shape(x)[0], D], x.dtype)


def number_of(x):
    return tf.shape(x)[0]


def kept(x):
    return tf.boolean_mask(x, x[:, 0] < 7.0)


def times(x, number):
    return x * tf.cast(number, x.dtype)


SOME = tf.Variable(1.0, dtype=tf.float64)


def picked_at_the_end(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x[-1]
    return x * tape.gradient(y, x)


def filled_list(size, x):
    return tf.TensorArray(x.dtype, size, element_shape=[]).write(0, 1.0).stack()


EIGHT = np.arange(8.0)


def at_own_place_of_both(x):
    """Row r takes entry r of itself."""
    numbers = tf.repeat(tf.range(number_of(x))[:, None], 2, axis=1)
    return tf.gather_nd(x, numbers)[:, None]


def put_at_own_place(x):
    numbers = tf.tile(tf.range(number_of(x))[:, None], [1, 2])
    return tf.scatter_nd(numbers, x[:, 0], [number_of(x), 20])


# Found by people who tried to get past.
HIDDEN = {
    # One truth, but where there are eight rows.
    "as many as codes": lambda x: x * tf.cast(x[:, 0] == EIGHT, x.dtype)[:, None],
    "not as many as codes": lambda x: x * tf.cast(x[:, 0] != EIGHT, x.dtype)[:, None],
    "number of what is compared": lambda x: times(
        x, tf.size(tf.range(number_of(x))[::-1] == tf.range(8))
    ),
    "axes of what is compared": lambda x: times(x, tf.rank(x[:, 0] == EIGHT)),
    "entry by own place": at_own_place_of_both,
    "into entry by own place": put_at_own_place,
    "all are kept": lambda x: tf.cond(
        tf.equal(number_of(kept(x)), number_of(x)), lambda: x, lambda: -100.0 * x
    ),
    "how many are kept": lambda x: times(x, number_of(kept(x)) // number_of(x)),
    "ones of what is kept": lambda x: (
        x[:, 0]
        * tf.reduce_sum(
            tf.ones_like(tf.boolean_mask(x, tf.reduce_any(x > 1.0, 0), axis=1)),
            1,
        )
    ),
    "branches of two ranks": lambda x: (
        x[:, 0] + tf.reduce_sum(tf.cond(SOME > 0, lambda: x, lambda: x[:, 0]), -1)
    ),
    "column by number": lambda x: x[:, number_of(x) % 3],
    "columns by number": lambda x: tf.reduce_sum(x[:, : number_of(x) % 3 + 1], 1),
    "slice by number": lambda x: tf.slice(x, [0, number_of(x) % 3], [-1, 1]),
    "the last one": picked_at_the_end,
    "the first of a list": lambda x: filled_list(number_of(x), x)[:, None] * x,
    "length of a list": lambda x: times(
        x, tf.TensorArray(x.dtype, number_of(x), dynamic_size=True).size()
    ),
    "spaces by number": lambda x: tf.batch_to_space(
        tf.reshape(x, [-1, 3, 1, 1]), [1, 1], tf.stack([[number_of(x) % 2, 1], [0, 0]])
    ),
    "tiles by number": lambda x: times(
        x,
        tf.size(
            tf.tile(tf.where(tf.range(3.0, dtype=x.dtype) < SOME), [number_of(x), 1])
        ),
    ),
    "branches of two lengths": lambda x: times(
        x,
        number_of(
            tf.cond(SOME > 0, lambda: tf.zeros([number_of(x)]), lambda: tf.zeros([5]))
        )
        // number_of(x),
    ),
    "negative numbers": lambda x: times(
        x, -1 * tf.maximum(number_of(x) * -1, -5) // number_of(x)
    ),
    "truths": lambda x: times(
        x, tf.cast(tf.cast(number_of(x), tf.bool), tf.int32) // number_of(x)
    ),
    "no place": lambda x: (
        x + tf.reduce_sum(x, axis=tf.one_hot(-1, 1, dtype=tf.int32), keepdims=True)
    ),
    "overflow": lambda x: times(x, number_of(x) * -(2**31) // -(2**31) // number_of(x)),
    "axis by number": lambda x: x * tf.reduce_sum(x, axis=number_of(x) % 2),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_hides_is_found(name):
    assert found(HIDDEN[name], (D,))


def in_chunks(x):
    """One chunk of each row, if it is short."""
    rows, length = tf.unstack(tf.shape(x)[:2])
    chunks = (length + 15) // 16
    x = tf.pad(x, [[0, 0], [0, 16 * chunks - length], [0, 0]])
    return tf.reduce_mean(tf.reshape(x, [chunks, rows, 16, D]), [0, 2])


def along_an_axis_by_length(x):
    return x - tf.reduce_mean(x, tf.shape(x)[1] % 2, keepdims=True)


def in_seconds(x):
    """Of sounds longer than a second."""
    rows, length = tf.unstack(tf.shape(x)[:2])
    parts = tf.maximum(length // 16000, 1)
    x = tf.reshape(x[:, : parts * (length // parts)], [parts, rows, -1, D])
    return tf.reduce_mean(x, [0, 2])


def along_the_axis_of_a_truth(x):
    """Numbers of two lengths are compared: the result has no axis, but for length 7."""
    is_equal = tf.zeros([tf.shape(x)[1]]) == tf.ones([7])
    return x - tf.reduce_mean(x, tf.rank(is_equal), keepdims=True)


def in_pairs(x):
    """Pairs of positions, of which the last is of two rows where their number is odd."""
    pairs = tf.reshape(x, [-1, 2, D])
    return tf.reshape(pairs - tf.reduce_mean(pairs, 1, keepdims=True), tf.shape(x))


def pools(x):
    """Make 2 positions of all short lengths, and an even number of many long ones."""
    return tf.nn.avg_pool1d(tf.nn.max_pool1d(x, 2, 2, "VALID"), 3, 3, "SAME")


def strided(x):
    """Short lengths have no position."""
    for stride in (3, 4):
        x = tf.nn.conv1d(x, tf.ones([9, D, D], x.dtype), stride, "VALID")
    return x


def pools_of_images(x):
    """Along one axis or the other, lengths become even."""
    return tf.nn.max_pool2d(x, 2, 3, "VALID")


def with_its_pools(x):
    """Two lengths that differ, whose sum is even."""
    return tf.concat([x, tf.nn.max_pool1d(x, 5, 3, "VALID")], 1)


def cropped(x):
    """What is left of short lengths is nothing."""
    return tf.nn.max_pool1d(x, 3, 4, "VALID")[:, 2:-2]


# What leaves an even number of positions of many lengths, and an odd one of others.
EVEN = {
    "pools": (pools, (None, D)),
    "windows": (strided, (None, D)),
    "images": (pools_of_images, (None, None, D)),
    "joined": (with_its_pools, (None, D)),
    "cropped": (cropped, (None, D)),
    "the first": (lambda x: x[:, :8], (None, D)),
    "the rest": (lambda x: x[:, 1_000_000:], (None, D)),
    "some": (lambda x: x[:, 15::16], (None, D)),
    "a part": (lambda x: x[:, : tf.shape(x)[1] // 16], (None, D)),
}


@pytest.mark.parametrize("name", EVEN)
def test_pairs_of_an_open_number_of_positions_are_not_proven(name):
    before, shape = EVEN[name]
    assert found(lambda x: in_pairs(before(x)), shape)


def test_parts_of_axes_whose_lengths_are_known_are_proven():
    def in_heads(x):
        heads = tf.reshape(x, [tf.shape(x)[0], tf.shape(x)[1], 2, 3])
        flat = tf.reshape(heads, [-1, 3])
        return tf.reshape(tf.tanh(flat), [tf.shape(x)[0], -1, 6])

    assert is_proven(in_heads, (None, 6))


def turned_far(x):
    """An axis that is far from the rows, and as long as another at most by chance."""
    length = tf.shape(x)[4]
    return tf.reshape(x, [-1, length, 1, 1, length])[: number_of(x)]


def turned_farther(x):
    length = tf.shape(x)[6]
    return tf.reshape(x, [-1, length, 1, 1, 1, 1, length])[: number_of(x)]


def turned_images(x):
    """As many columns as lines, if an image is a square."""
    return tf.reshape(x, [-1, tf.shape(x)[1], tf.shape(x)[1]])[: number_of(x)]


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (in_chunks, (None, D)),
        (along_an_axis_by_length, (None, D)),
        (in_seconds, (None, D)),
        (turned_images, (None, None)),
        (along_the_axis_of_a_truth, (None, D)),
        (turned_far, (None, 1, 1, None)),
        (turned_farther, (None, 1, 1, 1, 1, None)),
    ],
)
def test_what_holds_for_some_lengths_is_not_proven_for_all(function, shape):
    assert found(function, shape)


def test_what_holds_for_all_lengths_is_proven():
    def middle(x):
        flat = tf.reshape(x, [number_of(x) * tf.shape(x)[1], D])
        return tf.reshape(tf.tanh(flat), tf.shape(x))[:, tf.shape(x)[1] // 2]

    assert is_proven(middle, (None, D))


def test_windows_behind_windows_are_proven():
    def halved_often(x):
        for _ in range(5):
            x = tf.nn.max_pool1d(x, 2, 2, "VALID")
        flat = tf.reshape(x, [-1, D])
        return tf.reshape(flat, [tf.shape(x)[0], -1, D])

    def of_sounds(x):
        x = tf.nn.conv1d(x, tf.ones([80, D, D], x.dtype), 16, "VALID")
        return tf.reduce_sum(tf.nn.max_pool1d(x, 4, 4, "SAME"), 1)

    assert is_proven(halved_often, (None, D))
    with convolutions_of_rows():
        assert is_proven(of_sounds, (None, D))


def test_windows_inside_of_a_loop_are_not_proven():
    """Nobody knows what lengths its rounds have."""

    def halved(x):
        def once(i, x):
            return i + 1, tf.nn.max_pool1d(x, 2, 2, "SAME")

        shapes = tf.TensorShape([]), tf.TensorShape([None, None, D])
        x = tf.while_loop(lambda i, _: i < 2, once, (0, x), shape_invariants=shapes)[1]
        return tf.reduce_mean(tf.reshape(x, [-1, 2, D]), 1)

    assert found(halved, (None, D))


def test_negative_batch_dims_and_tables_of_defaults():
    def picked(x):
        x = tf.transpose(x, [1, 0, 2])
        places = tf.cast(x[:, :, 0] > 0, tf.int32)
        picked = tf.gather(x, places, axis=2, batch_dims=-1)
        return tf.transpose(tf.reduce_sum(picked, 2))

    assert found(picked, (4, D))
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def looked_up(x):
        default = tf.cast(tf.reduce_max(x), tf.float32)
        return table.lookup(tf.cast(x, tf.int64), dynamic_default_values=default)

    assert found(looked_up, (D,))


@pytest.mark.parametrize("name", [*MEETING, *MEETING_POSITIONS])
def test_rows_that_meet_are_found(name):
    if name in MEETING:
        assert found(MEETING[name], (D,))
    else:
        assert found(MEETING_POSITIONS[name], (4, D))


def with_transpose(x):
    """Return matrices that are symmetric and positive."""
    return x @ tf.linalg.matrix_transpose(x) + tf.eye(x.shape[1], dtype=x.dtype)


APART = {
    "dense": (lambda x: tf.nn.relu(x @ tf.ones([D, 2], x.dtype)), (D,)),
    "softmax": (tf.nn.softmax, (D,)),
    "attention": (
        lambda x: tf.nn.softmax(tf.matmul(x, x, transpose_b=True)) @ x,
        (4, D),
    ),
    "positions as rows": (
        lambda x: tf.reshape(
            tf.reshape(x, [-1, D]) @ tf.ones([D, D], x.dtype), tf.shape(x)
        ),
        (4, D),
    ),
    "time first": (
        lambda x: tf.transpose(tf.cumsum(tf.transpose(x, [1, 0, 2])), [1, 0, 2]),
        (4, D),
    ),
    "flat, time first": (
        lambda x: tf.transpose(
            tf.reshape(
                2.0 * tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, D]),
                [4, -1, D],
            ),
            [1, 0, 2],
        ),
        (4, D),
    ),
    "loop over time of every position": (
        lambda x: tf.transpose(
            tf.reshape(
                tf.scan(
                    lambda h, t: tf.tanh(h) + t,
                    flat_positions(x)[None] * tf.ones([3, 1, 1], x.dtype),
                    zeros_as(flat_positions(x)),
                )[-1],
                [4, -1, D],
            ),
            [1, 0, 2],
        ),
        (4, D),
    ),
    "bins": (
        lambda x: (
            x
            * tf.math.bincount(
                tf.cast(x, tf.int32), minlength=D, maxlength=D, axis=-1, dtype=x.dtype
            )
        ),
        (D,),
    ),
    "frames": (lambda x: tf.signal.frame(x, 4, 2), (10,)),
    "segments": (
        lambda x: tf.transpose(
            tf.math.unsorted_segment_sum(
                tf.transpose(x, [1, 0, 2]), tf.constant([1, 0, 1, 1]), 2
            ),
            [1, 0, 2],
        ),
        (4, D),
    ),
    "at most of at least": (
        lambda x: (
            x
            * tf.ones(
                [
                    tf.maximum(2, tf.minimum(2, tf.cast(tf.reduce_max(x), tf.int32))),
                    1,
                    1,
                ],
                x.dtype,
            )[0, 0]
        ),
        (D,),
    ),
    "positions": (lambda x: x + tf.range(4.0, dtype=x.dtype)[:, None], (4, D)),
    "noise": (lambda x: x + secret_noise(tf.shape(x), x.dtype), (D,)),
    "one draw for all": (lambda x: x * keras.random.normal([], dtype=x.dtype), (D,)),
    "loop over time": (
        lambda x: tf.scan(lambda h, t: h + t, tf.transpose(x, [1, 0, 2]))[-1],
        (4, D),
    ),
    "map over time": (
        lambda x: tf.transpose(
            tf.map_fn(tf.square, tf.transpose(x, [1, 0, 2])), [1, 0, 2]
        ),
        (4, D),
    ),
    "top": (lambda x: tf.math.top_k(x, 2).values, (D,)),
    "own places": (
        lambda x: tf.gather(x, tf.argsort(x), batch_dims=1),
        (D,),
    ),
    "branch": (lambda x: tf.cond(STEPS > 1.0, lambda: 2.0 * x, lambda: x), (D,)),
    "dilated": (
        lambda x: tf.nn.conv2d(
            x, tf.ones([2, 2, 2, 3], x.dtype), 1, "VALID", dilations=2
        ),
        (6, 6, 2),
    ),
    "ends": (lambda x: tf.concat([tf.zeros_like(x), x], -1), (D,)),
    "largest": (lambda x: x * tf.cast(tf.argmax(x, 1)[:, None], x.dtype), (4, D)),
    "rolled": (lambda x: tf.roll(x, 1, -1), (4, D)),
    "mirrored": (lambda x: tf.pad(x, [[0, 0], [1, 1]], "REFLECT"), (4,)),
    "band": (lambda x: tf.linalg.band_part(x, 0, -1), (D, D)),
    "diagonal": (tf.linalg.diag, (D,)),
    "ids": (
        lambda x: x * tf.one_hot(tf.cast(x[:, 0], tf.int32), D, dtype=x.dtype),
        (D,),
    ),
    "product so far": (lambda x: tf.math.cumprod(x, 1), (4, D)),
    "spectrum": (
        lambda x: tf.math.real(tf.signal.fft(tf.cast(x, tf.complex128))),
        (4,),
    ),
    "resized": (
        lambda x: tf.cast(tf.image.resize(x, [6, 6]), x.dtype),
        (4, 4, 2),
    ),
    "pooled": (lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), (4, 4, 2)),
    "places of the largest": (
        lambda x: tf.nn.max_pool_with_argmax(x, 2, 2, "SAME").output,
        (4, 4, 2),
    ),
    "table": (
        lambda x: tf.gather_nd(
            tf.ones([5, 2], x.dtype), tf.cast(x[:, :1] > 0, tf.int32)
        ),
        (D,),
    ),
    "entries of each": (lambda x: tf.gather(x, [0, 2], axis=2), (4, D)),
    "split": (lambda x: tf.concat(tf.split(x, [1, 3], 1)[::-1], 1), (4, D)),
    "taken apart": (lambda x: tf.add_n(tf.unstack(x, axis=2)), (4, D)),
    "slices": (lambda x: x[..., 1:, tf.newaxis] * x[:, ::2, :1, None][:, :1], (4, D)),
    "slice": (lambda x: tf.slice(x, [0, 1, 0], [-1, 2, -1]), (4, D)),
    "tiled": (lambda x: tf.tile(x, [1, 2, 1]), (4, D)),
    "broadcast": (lambda x: tf.broadcast_to(x[:, None], [tf.shape(x)[0], 2, D]), (D,)),
    "means of each": (lambda x: x - tf.reduce_mean(x, [1, 2], keepdims=True), (4, D)),
    "fixed statistics": (
        lambda x: tf.cast(
            tf.compat.v1.nn.fused_batch_norm(
                tf.cast(x, tf.float32),
                tf.ones(2),
                tf.zeros(2),
                tf.zeros(2),
                tf.ones(2),
                is_training=False,
            )[0],
            x.dtype,
        ),
        (4, 4, 2),
    ),
    "einsum": (
        lambda x: tf.einsum("...td,de->...te", x, tf.ones([D, 2], x.dtype)),
        (4, D),
    ),
    "case": (
        lambda x: tf.switch_case(tf.constant(1), [lambda: x, lambda: 2.0 * x]),
        (D,),
    ),
    "function": (tf.function(tf.tanh, autograph=False), (D,)),
    "squeezed": (lambda x: tf.squeeze(x[:, :, None], 2), (D,)),
    "list": (
        lambda x: tf.transpose(
            tf.TensorArray(x.dtype, 4).unstack(tf.transpose(x, [1, 0, 2])).stack(),
            [1, 0, 2],
        ),
        (4, D),
    ),
    "views": (lambda x: tf.split(tf.tanh(views(x)), 3, 0)[2], (4, D)),
    "views by where they begin": (
        lambda x: tf.tanh(views(x))[number_of(x) : 2 * number_of(x)],
        (4, D),
    ),
    "last views": (
        lambda x: tf.reduce_sum(
            tf.reshape(views(x)[number_of(x) :], [2, -1, 4, D]), axis=0
        ),
        (4, D),
    ),
    "part of the views": (
        lambda x: tf.slice(views(x), [number_of(x), 0, 0], [number_of(x), 4, D]),
        (4, D),
    ),
    "tiled rows": (
        lambda x: tf.reduce_sum(
            tf.reshape(tf.square(tf.tile(x, [2, 1])), [2, -1, D]), axis=0
        ),
        (D,),
    ),
    "views of entries": (
        lambda x: tf.reshape(
            tf.split(
                tf.concat([tf.reshape(x, [-1, D]), tf.reshape(-x, [-1, D])], 0), 2
            )[1],
            [-1, 4, D],
        ),
        (4, D),
    ),
    "padded": (lambda x: tf.pad(x, [[0, 0], [1, 1]]), (D,)),
    "top of positions": (lambda x: tf.math.top_k(x, 2).values, (4, D)),
    "sorted": (lambda x: tf.sort(x, 1), (4, D)),
    "median": (lambda x: ops.median(x, axis=1), (4, D)),
    "quantile": (lambda x: ops.quantile(x, 0.3, axis=-1, keepdims=True), (4, D)),
    "cholesky": (lambda x: tf.linalg.cholesky(with_transpose(x)), (D, D)),
    "solved": (lambda x: tf.linalg.solve(with_transpose(x), x), (D, D)),
    "logarithm of determinant": (
        lambda x: tf.linalg.slogdet(with_transpose(x))[1],
        (D, D),
    ),
    "eigenvalues": (lambda x: tf.linalg.eigh(with_transpose(x))[0], (D, D)),
    "singular values": (lambda x: tf.linalg.svd(x, compute_uv=False), (D, D)),
    "inverse of any": (tf.linalg.pinv, (4, D)),
    "other diagonal": (lambda x: tf.linalg.set_diag(x, x[:, 0]), (D, D)),
    "turned in part": (
        lambda x: tf.reverse_sequence(x, tf.fill([tf.shape(x)[0]], 2), seq_axis=1),
        (4, D),
    ),
    "resized smoothly": (
        lambda x: tf.image.resize(tf.cast(x, tf.float32), [3, 3], antialias=True),
        (6, 6, 2),
    ),
    "spectrum of images": (
        lambda x: tf.abs(tf.signal.rfft2d(tf.cast(x, tf.float32))),
        (4, 4),
    ),
    "images of a spectrum": (
        lambda x: tf.signal.irfft2d(tf.cast(x, tf.complex64)),
        (4, 3),
    ),
    "searched in its own": (
        lambda x: x * tf.cast(tf.searchsorted(tf.sort(x), x), x.dtype),
        (D,),
    ),
    "mel": (
        lambda x: (
            x
            @ tf.cast(
                tf.signal.linear_to_mel_weight_matrix(4, D, 800, 20.0, 390.0), x.dtype
            )
        ),
        (D,),
    ),
}


WITHOUT_PROVEN_GRADIENT = {
    *("top", "own places", "places of the largest", "table", "entries of each"),
    *("other diagonal", "part of the views", "median", "quantile"),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_rows_that_stay_apart_are_proven(name, with_gradient):
    function, shape = APART[name]
    if with_gradient and name in WITHOUT_PROVEN_GRADIENT:
        pytest.skip("Its gradient puts numbers where flat indices say, or is none.")
    if with_gradient:
        function = gradient_of(function)
    assert [str(each.operation) for each in found(function, shape)] == []


# ------------------------------------------------------------- the check of the check

# Functions of (rows, 4, 3): some keep the rows apart, others do not.
LINKS = [
    tf.identity,
    tf.tanh,
    lambda x: x * tf.ones([3], x.dtype),
    lambda x: x + tf.reduce_mean(x, 0, keepdims=True),
    lambda x: x + tf.reduce_mean(x, 1, keepdims=True),
    lambda x: x + tf.reduce_max(x, -1, keepdims=True),
    lambda x: tf.cumsum(x, 0),
    lambda x: tf.cumsum(x, 1, reverse=True),
    lambda x: tf.reverse(x, [0]),
    lambda x: tf.reverse(x, [2]),
    lambda x: tf.roll(x, 1, 0),
    lambda x: tf.roll(x, [1, 2], [1, 2]),
    lambda x: tf.transpose(tf.cumsum(tf.transpose(x, [1, 0, 2]), 0), [1, 0, 2]),
    lambda x: tf.transpose(tf.cumsum(tf.transpose(x, [1, 0, 2]), 1), [1, 0, 2]),
    lambda x: tf.reshape(tf.cumsum(tf.reshape(x, [-1, 3]), 1), tf.shape(x)),
    lambda x: tf.reshape(tf.cumsum(tf.reshape(x, [-1, 3]), 0), tf.shape(x)),
    lambda x: tf.reshape(tf.cumsum(tf.reshape(x, [-1, 2, 3]), 1), tf.shape(x)),
    lambda x: tf.reshape(tf.cumsum(tf.reshape(x, [-1, 8, 3]), 1), tf.shape(x)),
    lambda x: tf.reshape(tf.cumsum(tf.reshape(x, [4, -1, 3]), 0), tf.shape(x)),
    lambda x: tf.reshape(tf.cumsum(tf.reshape(x, [4, -1, 3]), 1), tf.shape(x)),
    lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), tf.shape(x)),
    lambda x: tf.reshape(tf.transpose(x, [0, 2, 1]), tf.shape(x)),
    lambda x: tf.stack(tf.unstack(x, axis=1)[::-1], axis=1),
    lambda x: tf.concat([x[:, 1:], x[:, :1]], 1),
    lambda x: tf.concat([x[1:], x[:1]], 0),
    lambda x: tf.gather(x, [3, 0, 0, 1], axis=1),
    lambda x: tf.gather(x, tf.argsort(x, 1), axis=1, batch_dims=1)[:, :, 0],
    lambda x: tf.sort(x, 0),
    lambda x: tf.sort(x, 1),
    lambda x: tf.nn.softmax(x, 0),
    lambda x: tf.nn.softmax(x, 1),
    lambda x: tf.matmul(tf.matmul(x, x, transpose_b=True), x),
    lambda x: tf.einsum("nti,mti->nti", x, x),
    lambda x: tf.einsum("nti,nsi->nsi", x, x),
    lambda x: x * tf.expand_dims(x[:, 0], 1),
    lambda x: x * tf.expand_dims(tf.transpose(x[:, 0])[:, :1], 0)[..., 0],
    lambda x: tf.where(x > 0, x, tf.reduce_min(x, 0)),
    lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x),
    lambda x: x / tf.cast(tf.shape(x)[0], x.dtype),
    lambda x: x / tf.cast(tf.shape(x)[1], x.dtype),
    lambda x: x * tf.reduce_sum(tf.ones_like(x), 0)[0],
    lambda x: tf.pad(x[:, :, :2], [[0, 0], [0, 0], [1, 0]]),
    lambda x: tf.tile(x[:, :1], [1, 4, 1]),
    lambda x: tf.repeat(x[:, ::2], 2, axis=1),
    lambda x: tf.squeeze(tf.expand_dims(x, 0), 0),
    lambda x: tf.scan(lambda h, t: h + t, x),
    lambda x: tf.map_fn(lambda row: row * 2, x),
    lambda x: tf.space_to_batch(x[..., None], [2, 1], [[0, 0], [0, 0]])[:, :, :, 0],
    lambda x: tf.split(tf.concat([x, tf.tanh(x)], 0), 2)[1],
    lambda x: tf.concat([x, tf.tanh(x)], 0)[tf.shape(x)[0] :],
    lambda x: tf.concat([x, tf.tanh(x)], 0)[1 : tf.shape(x)[0] + 1],
    lambda x: tf.concat([x, tf.tanh(x)], 0)[::2],
    lambda x: tf.tile(x, [2, 1, 1])[1 : 1 + tf.shape(x)[0]],
    lambda x: tf.reshape(tf.tile(x, [2, 1, 1]), [2, -1, 4, 3])[1],
    lambda x: tf.reshape(tf.tile(x, [2, 1, 1]), [-1, 2, 4, 3])[:, 1],
]


def rows_reach(function, rows=5):
    """For each row whether changing it changes what another one has."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4, 3))

    def run(x):
        with tf.GradientTape() as tape:
            x = tf.constant(x)
            tape.watch(x)
            y = function(x)
        return [y, tape.gradient(y, x)]

    before = run(x)
    fewer = run(x[:-1])
    for row in range(rows):
        changed = x.copy()
        changed[row] += rng.normal(size=(4, 3))
        others = np.arange(rows) != row
        for one, other in zip(before, run(changed), strict=True):
            if one is not None and not np.array_equal(one[others], other[others]):
                return True
    return any(
        one is not None and not np.allclose(one[:-1], other, rtol=1e-12)
        for one, other in zip(before, fewer, strict=True)
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.integers(0, len(LINKS) - 1), min_size=1, max_size=3))
def test_what_is_proven_never_lets_rows_meet(numbers):
    def chain(x):
        for number in numbers:
            x = LINKS[number](x)
        return x

    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(x)
        gradient = tape.gradient(y, x)
        return [y] if gradient is None else [y, gradient]

    try:
        chain(tf.zeros([5, 4, 3], tf.float64))
    except (tf.errors.InvalidArgumentError, ValueError):
        return  # Shapes that do not fit for every number of rows.
    try:
        proven = is_proven(both, (4, 3))
    except (tf.errors.InvalidArgumentError, ValueError):
        return
    if proven:
        assert not rows_reach(chain)


def test_most_links_that_keep_rows_apart_are_proven():
    """So that the test above says something."""
    proven = sum(is_proven(link, (4, 3)) for link in LINKS)
    assert proven >= 20


# --------------------------------------------------------------------- state, losses


class Keeps(layers.Layer):
    """Assigns what `update` makes of a batch to a variable, perhaps now and then."""

    def __init__(self, update, **kwargs):
        super().__init__(**kwargs)
        self.update = update
        self.memory = self.add_weight(shape=(), trainable=False, name="memory")

    def call(self, x):
        self.update(self.memory, x)
        return x


def assign_if(memory, x):
    tf.cond(
        tf.reduce_max(x) > 3.0,
        lambda: memory.value.assign(1.0),
        lambda: tf.identity(memory.value),
    )


def assign_in_function(memory, x):
    tf.function(lambda x: memory.value.assign(tf.reduce_mean(x)), autograph=False)(x)


@pytest.mark.parametrize(
    "update",
    [
        lambda memory, x: memory.assign(ops.mean(x)),
        lambda memory, x: memory.assign_add(ops.cast(ops.shape(x)[0], "float32")),
        lambda memory, x: memory.assign(x[0, 0]),
        assign_if,
        assign_in_function,
    ],
    ids=["mean", "rows", "first", "branch", "function"],
)
@pytest.mark.parametrize("engine", ["auto", "vectorized"])
def test_what_keeps_data_is_refused_by_name(update, engine):
    model = keras.Sequential([keras.Input((D,)), Keeps(update), layers.Dense(1)])
    objective = Objective.of(model, "mse")
    with pytest.raises(UnsupportedLayerError, match="memory` changes with the data"):
        choose(engine, objective, (np.ones((4, D)), np.ones((4, 1)), None))


class Table(layers.Layer):
    """Puts rows into a table, or looks rows up in it."""

    def __init__(self, writes, **kwargs):
        super().__init__(**kwargs)
        self.writes = writes
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def call(self, x):
        keys = tf.cast(x[:, 0], tf.int64)
        if self.writes:
            self.table.insert(keys, x[:, 0])
        found = self.table.lookup(keys)
        return x + tf.reshape(tf.ensure_shape(found, [None]), [-1, 1])


@pytest.mark.parametrize("writes", [True, False])
def test_tables_that_keep_rows_are_not_proven(writes):
    model = keras.Sequential([keras.Input((D,)), Table(writes), layers.Dense(1)])
    assert bool(tfdp.validate_model(model, np.ones((4, D)))) == writes


def test_a_generator_of_tensorflow_is_random():
    generator = tf.random.Generator.from_seed(1)
    assert is_proven(lambda x: x + generator.uniform([D], dtype=x.dtype), (D,))

    def moved_by_a_row(x):
        generator.uniform(tf.cast(x[0, :1], tf.int32))
        return x

    def moved_by_how_many(x):
        generator.uniform(tf.shape(x)[:1])
        return x + generator.uniform([D], dtype=x.dtype)

    assert found(moved_by_a_row, (D,))
    assert found(moved_by_how_many, (D,))


def test_counters_of_calls_are_free_of_data():
    model = keras.Sequential([
        keras.Input((D,)),
        Keeps(lambda memory, x: memory.assign_add(1.0)),
        layers.Dropout(0.5),
        layers.Dense(1),
    ])
    assert tfdp.validate_model(model, np.ones((4, D))) == []


@pytest.mark.parametrize("engine", ["auto", "vectorized"])
def test_a_compute_loss_that_keeps_a_mean_is_refused(engine):
    class Keeping(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)
            self.seen = tf.Variable(0.0, trainable=False, name="seen")

        def call(self, x):
            return self.dense(x)

        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            loss = ops.mean(ops.square(y - y_pred))
            self.seen.assign(0.9 * self.seen + 0.1 * loss)
            return loss

    private = tfdp.DPModel(Keeping(), engine=engine)
    private.compile(tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0))
    with pytest.raises(UnsupportedLossError, match="changed `seen"):
        private.fit(np.ones((8, D)), np.ones((8, 1)), batch_size=4, verbose=0)
    assert not private.ledger.segments


# ----------------------------------------------------------------- which engine it is


class Unknown(layers.Layer):
    """Has an operation that is not in the table, and keeps the rows apart."""

    def call(self, x):
        return tf.linalg.cross(x[:, :3], tf.ones_like(x[:, :3]))


def unknown_model():
    return keras.Sequential([
        keras.Input((D,)),
        layers.Dense(D),
        Unknown(name="unknown"),
        layers.Dense(1),
    ])


@pytest.mark.slow
def test_what_is_not_proven_runs_row_by_row_with_one_line(caplog):
    model = unknown_model()
    data = (np.ones((4, D)), np.ones((4, 1)), None)
    with caplog.at_level("INFO", "absl"):
        engine = choose("auto", Objective.of(model, "mse"), data)
    assert engine == ApartEngine()
    (line,) = [r.getMessage() for r in caplog.records if "by itself" in r.msg]
    assert "`unknown` (Unknown)" in line
    assert "test_rows.py:" in line
    with pytest.raises(UnsupportedLayerError, match="nobody knows whether rows"):
        choose("bookkeeping", Objective.of(model, "mse"), data)
    (problem,) = tfdp.validate_model(model, data[0])
    assert not problem.is_certain


def with_lambda(function):
    return keras.Sequential([
        keras.Input((D,)),
        layers.Dense(D),
        layers.Lambda(function, name="inner", output_shape=(D,)),
        layers.Dense(1),
    ])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "vectorized"])
@pytest.mark.parametrize("name", ["number of rows", "own place"])
def test_what_counts_rows_runs_by_itself_and_is_warned_of(name, engine, caplog):
    """A row by itself is a batch of one, which may not be what is meant."""
    objective = Objective.of(with_lambda(MEETING[name]), "mse")
    data = (np.ones((4, D)), np.ones((4, 1)), None)
    expected = ApartEngine() if engine == "auto" else engines.get(engine)
    assert choose(engine, objective, data) == expected
    (line,) = [
        r.getMessage()
        for r in caplog.records
        if "where that number is 1" in r.msg % r.args
    ]
    assert "`inner` (Lambda)" in line
    assert "counts the rows of a batch" in line
    assert "test_rows.py:" in line
    with pytest.raises(UnsupportedLayerError, match="counts the rows of a batch"):
        choose("bookkeeping", objective, data)


def said_to_be_of_rows(x):
    return made_of_rows([tf.map_fn(tf.nn.softmax, x)], [x])[0]


@pytest.mark.parametrize("rows", [None, 4])
def test_what_is_said_of_rows_holds_where_they_are(rows):
    assert is_proven(said_to_be_of_rows, (D,), rows=rows)
    for before in (tf.transpose, lambda x: x - tf.reduce_mean(x, 0)):
        meeting = found(lambda x, f=before: said_to_be_of_rows(f(x)), (D,), rows=rows)
        assert any(each.cause.is_certain for each in meeting)


@pytest.mark.slow
def test_a_loop_over_rows_is_told_of_the_map_that_works():
    data = (np.ones((4, D)), np.ones((4, 1)), None)
    looping = with_lambda(lambda x: tf.map_fn(tf.nn.softmax, x))
    with pytest.raises(UnsupportedLayerError, match=r"ops.vectorized_map\(f, x\)"):
        choose("auto", Objective.of(looping, "mse"), data)
    mapped = with_lambda(lambda x: ops.vectorized_map(tf.nn.softmax, x))
    assert choose("auto", Objective.of(mapped, "mse"), data) == BookkeepingEngine()


class OwnKernels(layers.Layer):
    """A convolution of each row with a kernel that is made of it."""

    def __init__(self, convolve):
        super().__init__()
        self.convolve = convolve

    def build(self, shape):
        self.kernels = layers.Dense(9 * shape[-1])
        self.kernels.build((None, shape[-1]))

    def call(self, x):
        kernels = ops.reshape(
            self.kernels(ops.mean(x, (1, 2))), (-1, 9 * x.shape[-1], 1)
        )
        return self.convolve(x, kernels)


def by_a_map(x, kernels):
    return ops.vectorized_map(
        lambda row: ops.conv(row[0][None], ops.reshape(row[1], (3, 3, -1, 1)))[0],
        (x, kernels),
    )


def by_patches(x, kernels):
    patches = ops.image.extract_patches(x, 3, padding="same")
    return ops.einsum("nhwp,npk->nhwk", patches, kernels)


@pytest.mark.slow
def test_a_map_that_becomes_a_loop_is_told_of_the_product_that_works():
    data = (np.ones((4, 5, 5, 2)), np.ones((4, 1)), None)

    def objective(convolve):
        inner = OwnKernels(convolve), layers.GlobalAveragePooling2D()
        return Objective.of(keras.Sequential([keras.Input((5, 5, 2)), *inner]), "mse")

    with pytest.raises(UnsupportedLayerError, match="extract_patches"):
        choose("auto", objective(by_a_map), data)
    assert choose("auto", objective(by_patches), data) == BookkeepingEngine()


REPEATED = np.repeat(np.arange(D), [1, 2, *[1] * (D - 2)])


@pytest.mark.parametrize(
    ("refused", "instead", "advice"),
    [
        (
            lambda x: ops.bincount(ops.cast(x, "int32"), minlength=3),
            lambda x: tf.math.bincount(
                ops.cast(x, "int32"), minlength=3, maxlength=3, axis=-1
            ),
            "tf.math.bincount",
        ),
        (
            lambda x: ops.repeat(x, np.bincount(REPEATED), axis=1),
            lambda x: ops.take(x, REPEATED, axis=1),
            "ops.take",
        ),
    ],
    ids=["bincount", "repeat"],
)
def test_what_makes_rows_meet_is_told_of_what_does_not(refused, instead, advice):
    x = ops.cast(np.arange(4 * D).reshape(4, D) % 3, "float32")
    np.testing.assert_array_equal(instead(x), refused(x))

    def objective(function):
        first = with_lambda(lambda x: ops.cast(function(x)[:, :D], "float32"))
        return Objective.of(first, "mse")

    data = (x, np.ones((4, 1)), None)
    with pytest.raises(UnsupportedLayerError, match=advice):
        choose("auto", objective(refused), data)
    assert choose("auto", objective(instead), data) == BookkeepingEngine()


@pytest.mark.slow
def test_a_loss_that_counts_rows_is_that_of_a_batch_of_one(caplog):
    def shared(y_true, y_pred):
        losses = tf.reduce_sum(tf.square(y_true - y_pred), -1)
        return losses / tf.cast(tf.shape(y_pred)[0], losses.dtype)

    model = with_lambda(tf.identity)
    data = (np.ones((4, D)), np.ones((4, 1)), None)
    assert choose("auto", Objective.of(model, shared), data) == ApartEngine()
    assert "must not depend on how many examples there are" in caplog.text
    assert ".." not in caplog.text


# Whatever else is counted, these rows meet.
CERTAIN = {
    "reversed": MEETING["reversed"],
    "shifted": MEETING["shifted"],
    "first row": MEETING["first row"],
    "numbers that are known": lambda x: x + tf.gather(x, [1, 0, 3, 2]),
    "shuffled": lambda x: x + tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0]))),
    "shuffled by Keras": lambda x: (
        x + tf.gather(x, keras.random.shuffle(tf.range(tf.shape(x)[0]), seed=1))
    ),
    "batch statistics": lambda x: (
        x - tf.reduce_sum(x, 0) / tf.cast(tf.shape(x)[0], x.dtype)
    ),
    "batch statistics after counting": lambda x: (lambda y: y - tf.reduce_mean(y, 0))(
        x * tf.cast(tf.shape(x)[0], x.dtype)
    ),
    "known segments": lambda x: tf.math.unsorted_segment_sum(x, [0, 0, 1, 1], 4),
}


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("name", CERTAIN)
def test_rows_that_meet_for_certain_are_refused(name, rows):
    objective = Objective.of(with_lambda(CERTAIN[name]), "mse")
    data = (np.ones((4, D)), np.ones((4, 1)), None)
    with pytest.raises(UnsupportedLayerError, match="in it, rows of a batch meet"):
        choose("auto", objective, data, rows)


def test_a_custom_gradient_that_mixes_is_not_book_kept():
    model = keras.Sequential([
        keras.Input((D,)),
        layers.Dense(D),
        layers.Lambda(mixing_gradient),
        layers.Dense(1),
    ])
    data = (np.ones((4, D)), np.ones((4, 1)), None)
    assert choose("auto", Objective.of(model, "mse"), data) == ApartEngine()
    with pytest.raises(UnsupportedLayerError, match="over the rows"):
        choose("ghost", Objective.of(model, "mse"), data)


def test_an_ordinary_model_is_proven():
    model = keras.Sequential([
        keras.Input((8, 8, 3)),
        layers.Conv2D(4, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(10),
    ])
    data = (np.ones((4, 8, 8, 3)), np.zeros(4, int), None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    engine = choose("auto", Objective.of(model, loss), data)
    assert engine == BookkeepingEngine()


@pytest.mark.parametrize("depth", [(), (3,)])
def test_what_onednn_reads_of_other_rows_is_refused(depth):
    """Of one channel, by steps of 1 and of more, for outputs of one column."""

    class Striding(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(*[1 for _ in depth], 2, 3, 1, 2))

        def call(self, x):
            if depth:
                return tf.nn.conv3d(x, self.kernel, (1, 2, 1, 2, 1), "VALID")
            return tf.nn.conv2d(x, self.kernel, (1, 2), "VALID")

    for width in (6, 3):
        rows = (*depth, 8, width, 1)
        model = keras.Sequential([keras.Input(rows), Striding()])
        data = (np.ones((4, *rows)), np.ones((4, *model.output_shape[1:])), None)
        with (
            pytest.raises(UnsupportedLayerError, match="the same stride along rows")
            if width == 3
            else contextlib.nullcontext()
        ):
            choose("auto", Objective.of(model, "mse"), data)


@pytest.mark.parametrize(
    "engine",
    [
        "auto",
        *(pytest.param(e, marks=pytest.mark.slow) for e in ("vectorized", "apart")),
    ],
)
def test_a_row_by_itself_does_not_escape_onednn(engine):
    """TensorFlow's vectorized map puts all rows into one convolution."""
    model = keras.Sequential([
        keras.Input((1, 8, 3, 1)),
        layers.Lambda(lambda x: x + 0 * tf.cast(tf.shape(tf.where(x > 0))[0], x.dtype)),
        layers.Conv3D(8, 2, strides=(1, 1, 3), padding="same"),
    ])
    data = (np.ones((4, 1, 8, 3, 1)), np.ones((4, *model.output_shape[1:])), None)
    with pytest.raises(UnsupportedLayerError, match="by a fault of oneDNN"):
        choose(engine, Objective.of(model, "mse"), data)


class RawConvolution(layers.Layer):
    """Escapes what makes those of TensorFlow's functions in another dtype."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(1, 2, shape[-1], 2))

    def call(self, x):
        kernel = tf.cast(self.kernel, x.dtype)
        return tf.raw_ops.Conv2D(
            input=x, filter=kernel, strides=[1, 1, 1, 1], padding="VALID"
        )


@pytest.mark.parametrize(
    ("layer", "is_refused"),
    [
        (lambda: layers.Conv2D(8, 2, strides=2), False),
        (lambda: layers.Conv2D(8, 1), False),
        (RawConvolution, True),
    ],
    ids=["float32", "pointwise", "raw"],
)
def test_convolutions_in_bfloat16_are_made_in_float32(layer, is_refused):
    """In bfloat16 oneDNN reads memory of other rows."""
    with precision("mixed_bfloat16"):
        model = keras.Sequential([
            keras.Input((6, 6, 3)),
            layer(),
            layers.Flatten(),
            layers.Dense(1, dtype="float32"),
        ])
    data = (np.ones((4, 6, 6, 3), "float32"), np.ones((4, 1), "float32"), None)
    objective = Objective.of(model, "mse")
    if is_refused:
        with pytest.raises(UnsupportedLayerError, match="in float32 it does not"):
            choose("auto", objective, data)
        return
    engine = choose("auto", objective, data)
    rows = _tree.signature_of(Batch(*data, np.zeros(4, bool)))
    traced = traced_pass(engine, objective, rows, rows_per_unit=1)
    graph = traced.function.graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    dtypes = {tf.as_dtype(node.attr["T"].type) for node in nodes if node.op == "Conv2D"}
    assert dtypes == {tf.float32}


class Unpooled(layers.Layer):
    """Puts numbers where maxima were, or where the data say."""

    def __init__(self, by_data, **kwargs):
        super().__init__(**kwargs)
        self.by_data = by_data

    def call(self, x):
        pooled, places = tf.nn.max_pool_with_argmax(x, 2, 2, "VALID")
        if self.by_data:
            places = tf.cast(x[:, ::2, ::2], tf.int64)
        return tf.raw_ops.MaxPoolGradWithArgmax(
            input=x,
            grad=pooled,
            argmax=places,
            ksize=[1, 2, 2, 1],
            strides=[1, 2, 2, 1],
            padding="VALID",
        )


@pytest.mark.parametrize("by_data", [False, True])
def test_numbers_go_back_to_where_maxima_were(by_data):
    model = keras.Sequential([
        keras.Input((4, 4, 1)),
        Unpooled(by_data),
        layers.Flatten(),
        layers.Dense(1),
    ])
    data = (np.ones((4, 4, 4, 1)), np.ones((4, 1)), None)
    with (
        pytest.raises(UnsupportedLayerError, match="where other rows are")
        if by_data
        else contextlib.nullcontext()
    ):
        choose("bookkeeping", Objective.of(model, "mse"), data)


# --------------------------------------------------------------- layers that have rules

# A layer's matrix is used by another one.
NOT_RECORDED = {"tied_embedding"}


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(
            *case.values,
            id=case.id,
            marks=[pytest.mark.exhaustive]
            if case.marks or case.values[0] in recurrent.PROBLEMS
            else [],
        )
        for case in cases(is_slow=True)
        if case.id not in NOT_RECORDED
    ],
)
def test_every_problem_is_proven_without_running_it(problem):
    objective = Objective.of(problem.build(), problem.loss(), problem.loss_weights)
    data = tuple(problem.batch(2))
    chosen = choose("bookkeeping", objective, data)
    # A loss that is no sum over rows is asked for each.
    splits_losses = not problem.name.startswith("dice")
    chosen = dataclasses.replace(chosen, follows_leaves=False, unrolls_loops=None)
    assert chosen == BookkeepingEngine(splits_losses=splits_losses)


# --------------------------------------------------------------- rows that layers see


SEEN = []


class MeanIfStatic(layers.Layer):
    """Mixes rows only where it knows how many there are, and notes how many."""

    def call(self, x):
        if x.shape[0] is None:
            return x
        SEEN.append(x.shape[0])
        return x - ops.mean(x, axis=0)


def static_model(run_eagerly=False, jit_compile=False, loss="mse", **options):
    model = keras.Sequential([keras.Input((D,)), MeanIfStatic(), layers.Dense(1)])
    private = tfdp.DPModel(model, **options)
    private.compile(
        tfdp.optimizers.DPSGD(
            0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4
        ),
        loss,
        run_eagerly=run_eagerly,
        jit_compile=jit_compile,
    )
    return private


@contextlib.contextmanager
def functions_run_eagerly():
    """TensorFlow's switch for the debugger, which no model knows of."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.filterwarnings("ignore:Even though the `tf.config")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "switch",
    [
        contextlib.nullcontext,
        pytest.param(functions_run_eagerly, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    "way",
    [
        *("passes", "batches", "one batch", "loop"),
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in (
                *("jit", "eager", "replica", "views", "views of a replica"),
                *("eager step", "eager loop"),
            )
        ),
    ],
)
def test_passes_forget_how_many_rows_there_are(way, switch):
    """What is proven for any number of rows is what runs, eagerly too."""
    x, y = np.ones((8, D), "float32"), np.ones((8, 1))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True)

    @tf.function
    def own_loop(model):
        return tfdp.clipped_gradients(
            model, "mse", tf.constant(x), tf.constant(y), l2_norm_clip=1.0
        )

    def train_again(scope=contextlib.nullcontext, **options):
        """Variables are made, and views looked at, by a call before."""
        with scope():
            private = static_model(engine="bookkeeping", **options)
        private.fit(batches, verbose=0)
        SEEN.clear()
        private.train_function = None
        private.fit(batches, verbose=0)

    replica = tf.distribute.MirroredStrategy(["/cpu:0"]).scope
    views = {"augmentation": MeanIfStatic(), "augmentation_multiplicity": 2}

    trains = {
        "passes": lambda: static_model(physical_batch_size=4).fit(
            x, y, batch_size=4, verbose=0
        ),
        "batches": lambda: static_model().fit(batches, verbose=0),
        "one batch": lambda: static_model().train_on_batch(x[:4], y[:4]),
        "jit": lambda: static_model(jit_compile=True).fit(batches, verbose=0),
        "loop": lambda: own_loop(static_model().model),
        "eager": lambda: static_model(run_eagerly=True).fit(
            x, y, batch_size=4, verbose=0
        ),
        "replica": lambda: train_again(replica, physical_batch_size=4),
        "views": lambda: train_again(**views),
        "views of a replica": lambda: train_again(replica, **views),
        "eager step": lambda: static_model().train_step((x, y)),
        "eager loop": lambda: tfdp.clipped_gradients(
            static_model().model, "mse", x, y, l2_norm_clip=1.0
        ),
    }
    SEEN.clear()
    with switch():
        trains[way]()
    assert SEEN == []


@pytest.mark.slow
def test_the_sizes_that_layers_will_see_are_looked_at():
    """Where gradients are differentiated, which would take longer without."""
    x, y = np.ones((8, D), "float32"), np.ones((8, 1))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True)

    exact = tfdp.losses.BAM("mse", radius=0.1, ascent="exact")

    @tf.function(autograph=False)
    def own_loop(model):
        return tfdp.clipped_gradients(
            *(model, exact, tf.constant(x), tf.constant(y)),
            l2_norm_clip=1.0,
            engine="bookkeeping",
        )

    trains = {
        "exact": lambda: static_model(loss=exact).fit(batches, verbose=0),
        "passes": lambda: static_model(loss=exact, physical_batch_size=4).fit(
            x, y, batch_size=4, verbose=0
        ),
        "one batch": lambda: static_model(loss=exact).train_on_batch(x, y),
        "graph": lambda: own_loop(static_model().model),
        "step": lambda: static_model(loss=exact).train_step((x, y)),
        "fit": lambda: static_model(loss=exact, run_eagerly=True).fit(
            x, y, batch_size=4, verbose=0
        ),
        "loop": lambda: tfdp.clipped_gradients(
            static_model().model, exact, x, y, l2_norm_clip=1.0, engine="bookkeeping"
        ),
    }
    for train in trains.values():
        with pytest.raises(UnsupportedLayerError, match="the mean over the rows"):
            train()


class MixesManyRows(layers.Layer):
    """Mixes rows where it sees more than 32, for certain or not."""

    def __init__(self, *, is_certain):
        super().__init__()
        self.is_certain = is_certain

    def call(self, x):
        if x.shape[0] is None or x.shape[0] <= 32:
            return x
        if self.is_certain:
            return x - ops.mean(x, axis=0)
        return x + tf.reshape(tf.transpose(x), tf.shape(x))


def mixing_many(loss, *, is_certain, expected_batch_size=None, **options):
    model = keras.Sequential([
        keras.Input((D,)),
        MixesManyRows(is_certain=is_certain),
        layers.Dense(1),
    ])
    private = tfdp.DPModel(model)
    optimizer = tfdp.optimizers.DPSGD(
        0.1,
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        expected_batch_size=expected_batch_size,
    )
    private.compile(optimizer, loss, **options)
    return private


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        pytest.param(
            tfdp.losses.BAM("mse", radius=0.1, ascent="exact"),
            {"jit_compile": True},
            id="passes",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            tfdp.losses.BAM("mse", radius=0.1, ascent="exact"), {}, id="uphill"
        ),
        pytest.param(
            tfdp.losses.BAM("mse", radius=0.1, ascent="exact"),
            {"run_eagerly": True},
            id="eager",
        ),
    ],
)
def test_each_number_of_rows_that_is_seen_is_looked_at(loss, options):
    """However many others were before."""
    x, y = np.ones((64, D), "float32"), np.ones((64, 1), "float32")
    private = mixing_many(loss, is_certain=True, **options)

    def train(rows):
        batches = tf.data.Dataset.from_tensor_slices((x, y))
        declared = tfdp.data.declare(
            batches.batch(rows, drop_remainder=True),
            number_of_examples=64,
            expected_batch_size=rows,
            sampling="shuffle",
        )
        private.fit(declared, steps_per_epoch=1, verbose=0)

    for rows in (1, 2, 4, 8):
        train(rows)
    with pytest.raises(UnsupportedLayerError, match="the mean over the rows"):
        train(64)


@pytest.mark.slow
def test_each_eager_batch_is_looked_at():
    """Sizes that vary, as Poisson draws do."""
    x, y = np.ones((64, D), "float32"), np.ones((64, 1), "float32")
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    declared = tfdp.data.declare(
        rows.take(4).batch(4).concatenate(rows.skip(4).batch(60)),
        number_of_examples=64,
        expected_batch_size=4,
        sampling="shuffle",
    )
    exact = tfdp.losses.BAM("mse", radius=0.1, ascent="exact")
    private = mixing_many(exact, is_certain=True, run_eagerly=True)
    with pytest.raises(UnsupportedLayerError, match="the mean over the rows"):
        private.fit(declared, verbose=0)
    assert private.optimizer.iterations.numpy() == 1


def test_each_batch_of_an_eager_loop_is_looked_at():
    loss = tfdp.losses.BAM("mse", radius=0.1, ascent="exact")
    model = mixing_many("mse", is_certain=True).model
    for rows in (4, 5):
        x, y = np.ones((rows, D), "float32"), np.ones((rows, 1), "float32")
        tfdp.clipped_gradients(model, loss, x, y, l2_norm_clip=1.0)
    x, y = np.ones((64, D), "float32"), np.ones((64, 1), "float32")
    with pytest.raises(UnsupportedLayerError, match="the mean over the rows"):
        tfdp.clipped_gradients(model, loss, x, y, l2_norm_clip=1.0)


@pytest.mark.parametrize("mix", [tf.cumsum, lambda noise: tf.sort(noise, axis=0)])
def test_what_is_drawn_for_rows_depends_on_places_where_it_is_mixed(mix):
    """The last row has the sum of all draws, or the largest of them."""

    def run(x):
        return x + mix(secret_noise(tf.shape(x), x.dtype))

    assert not is_proven(run, (D,))


@pytest.mark.parametrize(
    "numbers",
    [
        lambda rows: rows - 1 - tf.range(rows),
        lambda rows: tf.range(rows) % 2,
        lambda rows: tf.minimum(tf.range(rows), 4),
    ],
)
def test_rows_that_are_picked_by_places_are_refused(numbers):
    """No data say which, so that is meant: by itself a row would pick itself."""
    (gather,) = {
        each.cause.is_certain
        for each in found(lambda x: tf.gather(x, numbers(tf.shape(x)[0])), (D,))
        if each.cause.op.type == "GatherV2"
    }
    assert gather


def test_as_many_rows_as_units_are_no_bias():
    """Keras takes what is added for a bias where it sees as many rows as units."""
    inputs = keras.Input((D,))
    scaled = layers.Add()([layers.Dense(3)(inputs), layers.Dense(1)(inputs)])
    model = keras.Model(inputs, scaled)
    exact = tfdp.losses.BAM("mse", radius=0.1, ascent="exact")
    x, y = np.ones((4, D), "float32"), np.ones((4, 1), "float32")
    tfdp.clipped_gradients(model, exact, x, y, l2_norm_clip=1.0)
    with pytest.raises(UnsupportedLayerError, match="adds rows as a bias"):
        tfdp.clipped_gradients(model, exact, x[:3], y[:3], l2_norm_clip=1.0)
    # Without derivatives of gradients no layer sees how many there are.
    tfdp.clipped_gradients(model, "mse", x[:3], y[:3], l2_norm_clip=1.0)


@pytest.mark.slow
def test_a_row_alone_meets_none():
    """Keras takes what is added for a bias where it has one axis with entries."""
    inputs = keras.Input((1, D))
    added = layers.Add()([layers.Dense(4)(inputs), layers.Dense(4)(inputs)])
    model = keras.Model(inputs, layers.Flatten()(added))
    x, y = np.full((2, 1, D), 1e6, "float32"), np.ones((2, 4), "float32")
    clipped = [
        tfdp.clipped_gradients(
            model, "mse", x[:n], y[:n], l2_norm_clip=1.0, engine="bookkeeping"
        ).gradients
        for n in (1, 2)
    ]
    for alone, both in zip(*clipped, strict=True):
        np.testing.assert_allclose(2 * alone, both, rtol=1e-5)
    assert tf.linalg.global_norm(clipped[0]) <= 1 + 1e-6


@pytest.mark.parametrize("name", ["twice", "none", "of entries"])
def test_a_row_alone_ends_in_one_entry(name):
    """Two entries of a row would be clipped one by one."""
    ends = {
        "twice": lambda x: tf.concat([x, x], 0),
        "none": tf.reduce_sum,
        "of entries": tf.transpose,
    }
    assert is_proven(lambda x: tf.squeeze(x)[tf.newaxis], (D,), rows=1)
    assert not is_proven(ends[name], (D,), rows=1)


@pytest.mark.slow
def test_eager_steps_take_the_engine_that_was_proven_for_their_rows():
    private = mixing_many(
        tfdp.losses.BAM("mse", radius=0.1, ascent="exact"),
        is_certain=False,
        expected_batch_size=4,
        run_eagerly=True,
    )
    for rows in (64, 4):
        x = np.ones((rows, D), "float32")
        private.train_on_batch(x, np.ones((rows, 1), "float32"))
    # Of the next 64 no step would ask again.
    assert private._checked.engine == VectorizedEngine()


@pytest.mark.parametrize("name", APART)
def test_rows_of_static_number_are_proven_apart(name):
    function, shape = APART[name]
    assert is_proven(function, shape, rows=6)


@pytest.mark.parametrize("name", MEETING)
def test_rows_of_static_number_that_meet_are_found(name):
    counts = {"number of rows", "number of ones", "parity", "if many"}
    # The gradient of a sum is the same for all rows, as long as their number is.
    places = {"own place", "place in a table", "half of the rows"}
    if name in counts | places | {"a quarter of the rows", "gradient"}:
        pytest.skip("Where the number of rows is static, it is no secret.")
    assert found(MEETING[name], (D,), rows=6)
