"""Entries are put into tensors by their numbers: rows stay apart where these say so."""

import pytest
import tensorflow as tf

from tests.checks.test_rows import found, gradient_of, is_proven

D = 3
FREE = tf.constant([[0], [2]])


def number_of(x):
    return tf.shape(x)[0]


def own_places(rows, inner=(0, 2), *, own=(1, 0), plus=0):
    """Numbers of a place in each row, and of the row."""
    numbers = tf.expand_dims(tf.range(rows) + plus if plus else tf.range(rows), 1)
    numbers *= tf.constant(own)
    constant = tf.tile(tf.constant([[inner]]), tf.stack([rows, 1, 1]))
    return constant + tf.expand_dims(numbers, 1)


def put(x, change=lambda places: places, **options):
    rows = number_of(x)
    places = change(own_places(rows, **options))
    return tf.scatter_nd(places, x[:, :1], [rows, 4])


def time_first(x):
    return tf.transpose(x, [1, 0, 2])


def steps(function):
    """Put what is made of some steps into others, for all rows at once."""

    def run(x):
        x = time_first(x)
        return time_first(function(x, x[:2]))

    return run


def ctc(x):
    rows = number_of(x)
    labels = tf.tile(tf.constant([[1, 2]]), [rows, 1])
    lengths = tf.fill([rows], 2), tf.fill([rows], 4)
    x = tf.cast(x, tf.float32)
    return tf.nn.ctc_loss(labels, x, *lengths, False, blank_index=0)


def flat(x, plus=0):
    """Scatter the numbers of each row, flat, to other places of the same row."""
    size = x.shape[1]
    places = tf.range(number_of(x))[:, None] * size + tf.argsort(x) + plus
    numbers = tf.reshape(places, [-1, 1])
    put = tf.scatter_nd(numbers, tf.reshape(x, [-1]), [number_of(x) * size])
    return tf.reshape(put, [-1, size])


def put_some(x, number=2, change=lambda rows, _: rows):
    """Put numbers in place of the largest of each row."""
    rows = number_of(x)
    of_rows = change(tf.repeat(tf.range(rows), number), rows)
    places = tf.reshape(tf.math.top_k(x, number)[1], [-1])
    return tf.tensor_scatter_nd_update(
        x, tf.stack([of_rows, places], -1), 2 * tf.repeat(x[:, 0], number)
    )


APART = {
    "own place": (put, (D,)),
    "flat": (flat, (D,)),
    "zeros, by free numbers": (
        steps(lambda x, part: tf.scatter_nd(FREE, part, tf.shape(x))),
        (4, D),
    ),
    "added": (steps(lambda x, part: tf.tensor_scatter_nd_add(x, FREE, part)), (4, D)),
    "updated": (
        steps(lambda x, part: tf.tensor_scatter_nd_update(x, FREE, part)),
        (4, D),
    ),
    "the largest": (
        steps(lambda x, part: tf.tensor_scatter_nd_max(x, FREE, part)),
        (4, D),
    ),
    "into empty": (
        steps(
            lambda x, part: tf.tensor_scatter_nd_add(
                tf.raw_ops.Empty(shape=tf.shape(x), dtype=x.dtype, init=True),
                FREE,
                part,
            )
        ),
        (4, D),
    ),
    "ctc": (ctc, (4, 5)),
    "some of each row's": (put_some, (D,)),
    "one of each row's": (lambda x: put_some(x, 1), (D,)),
}
# What no proof is tried of: the gradient gathers by numbers of rows.
NO_GRADIENT = {"own place", "flat", "the largest"}

MEETING = {
    "flat, one too far": lambda x: flat(x, 1),
    "next row": lambda x: put(
        x, lambda places: tf.math.floormod(places, number_of(x)), plus=1
    ),
    "first row": lambda x: put(x, own=(0, 0)),
    "every second row": lambda x: put(x, own=(2, 0)),
    "place by row": lambda x: put(x, own=(1, 1)),
    "place by data": lambda x: put(
        x, lambda places: places + tf.cast(x[:, None, :2] > 0, tf.int32)
    ),
    "place by number": lambda x: put(
        x, lambda places: places + tf.stack([0, number_of(x) % 2])
    ),
    "row by data": lambda x: tf.scatter_nd(tf.cast(x[:, :1], tf.int32), x, tf.shape(x)),
    "other rows": lambda x: tf.scatter_nd(
        tf.range(number_of(x))[::-1, None], x, tf.shape(x)
    ),
    "one of the rows": lambda x: tf.tensor_scatter_nd_add(x, [[0]], x[:1]),
    "rows by number": lambda x: tf.tensor_scatter_nd_update(
        tf.zeros_like(x), tf.range(number_of(x))[::-1, None], x
    ),
    "what was there": lambda x: (
        x + tf.raw_ops.Empty(shape=tf.shape(x), dtype=x.dtype, init=False)
    ),
    "constants to some of the rows": lambda x: (
        x + tf.scatter_nd(FREE, tf.ones([2, D], x.dtype), tf.shape(x))
    ),
    "some of the next row's": lambda x: put_some(
        x, change=lambda of_rows, rows: tf.math.floormod(of_rows + 1, rows)
    ),
    "some of others": lambda x: put_some(
        x, change=lambda of_rows, rows: tf.range(2 * rows) % rows
    ),
    "constants to entries of some": lambda x: (
        x + tf.scatter_nd([[0, 1], [2, 1]], tf.ones([2], x.dtype), tf.shape(x))
    ),
    "rows of a list": lambda x: (
        tf
        .TensorArray(x.dtype, number_of(x))
        .unstack(x)
        .write(0, tf.ones([D], x.dtype))
        .stack()
    ),
    "rows in place of columns": lambda x: (
        tf.tensor_scatter_nd_add(
            tf.zeros([D, number_of(x)], x.dtype), [[0]], x[:, :1][None, :, 0]
        )
        @ x
    ),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("rows", [None, 6])
def test_rows_put_entries_into_themselves(name, rows):
    function, shape = APART[name]
    assert [str(each.operation) for each in found(function, shape, rows=rows)] == []


@pytest.mark.parametrize("name", [name for name in APART if name not in NO_GRADIENT])
def test_so_do_their_gradients(name):
    function, shape = APART[name]
    assert is_proven(gradient_of(function), shape)


@pytest.mark.parametrize("name", MEETING)
def test_other_numbers_let_rows_meet(name):
    assert found(MEETING[name], (D,))
