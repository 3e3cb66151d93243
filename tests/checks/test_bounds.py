"""Rows may pick entries among those of all rows, if their numbers are proven their own."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.checks.test_rows import found, gradient_of, is_proven

T, D = 4, 3
SHAPE = (T, D)


def rows_of(x):
    return tf.shape(x)[0]


def places(x, times=T, plus=0):
    """Where each row begins, if all entries lie one after the other."""
    return (tf.range(rows_of(x)) * times + plus)[:, None]


def largest(x, number=2):
    """Numbers of the largest entries of each row, of shape (N, number)."""
    return tf.math.top_k(x[:, :, 0], number)[1]


def whole(x, most=50):
    """Whole numbers that are in the data."""
    return tf.cast(tf.clip_by_value(x[:, :2, 0], -most, most), tf.int32)


def pick(x, numbers):
    """Take entries from those of all rows; of shape (N, number, D)."""
    return tf.gather(tf.reshape(x, [-1, D]), numbers)


def put(x, numbers):
    """Sum entries into those of all rows."""
    flat = tf.reshape(numbers, [-1])
    parts = tf.reshape(x[:, : numbers.shape[1]], [-1, D])
    return tf.reshape(
        tf.math.unsorted_segment_sum(parts, flat, rows_of(x) * T), tf.shape(x)
    )


def pick_in_row(x, numbers):
    """Take one entry of each row; of shape (N, D)."""
    pairs = tf.stack([tf.range(rows_of(x)), numbers], axis=1)
    return tf.gather_nd(x, pairs)


def nothing(x, number):
    """So many zeros, in the shape of numbers of a row."""
    return clipped(tf.zeros([number], tf.int32), high=1)[None]


def count(x):
    """Count the rows of a batch."""
    return tf.range(rows_of(x))


def remainders(x):
    """What is never negative, and is made of how many rows there are."""
    return tf.zeros([rows_of(x)], tf.int32) + rows_of(x) % 5


def none(x):
    """Make no number."""
    return tf.zeros([], x.dtype)


def of_constants(x):
    """Pick constants, one for each row."""
    return tf.where(count(x) >= 0, tf.gather(tf.ones([1], x.dtype), 0), none(x))


def of_long_numbers(x, numbers, *others):
    """Pick entries, unless numbers are negative, or something else."""
    is_picked = functools.reduce(tf.logical_and, others, numbers >= 0)
    entries = tf.gather(tf.reshape(x, [-1, D])[:, 0], tf.maximum(numbers, 0))
    return tf.where(is_picked, entries, none(x))


def clipped(numbers, low=0, high=T - 1):
    return tf.clip_by_value(numbers, low, high)


def last(x):
    """The number of the last of the first entries that are large; -1 if none is."""
    return tf.reduce_sum(tf.cast(x[:, :, :1] > 1.0, tf.int32), axis=1) - 1


def from_the_end(numbers, others=None, *, below=0, length=T):
    others = numbers if others is None else others
    return tf.where(numbers < below, others + length, numbers)


# Numbers, of shape (N, 2), that point to a row's own entries.
OWN = {
    "of the largest": lambda x: largest(x) + places(x),
    "of the first": lambda x: places(x) + tf.constant([0, T - 1]),
    "clipped": lambda x: clipped(whole(x)) + places(x),
    "remainders": lambda x: whole(x) % T + places(x),
    "from the other end": lambda x: (T - 1 - largest(x)) + places(x),
    "of one of the largest": lambda x: (
        tf.argmax(x, axis=1)[:, :2] + tf.cast(places(x), tf.int64)
    ),
    "negative ones count from the end": lambda x: (
        tf.where(largest(x) < 0, largest(x) + T, largest(x)) + places(x)
    ),
    "in another order": lambda x: tf.transpose(
        tf.transpose(largest(x)) + tf.transpose(places(x))
    ),
    "as long numbers": lambda x: (
        tf.cast(largest(x), tf.int64) + tf.cast(places(x), tf.int64)
    ),
    "of pieces": lambda x: places(x, times=2) * 2 + tf.reshape(largest(x), [-1, 2]),
    "of the last": lambda x: from_the_end(last(x)) + places(x),
    "less one and more": lambda x: largest(x) + (places(x, plus=1) - 1),
    "joined": lambda x: (
        places(x) + tf.concat([largest(x, 1), clipped(whole(x))[:, :1]], axis=1)
    ),
    "joined places": lambda x: tf.concat(
        [places(x) + largest(x, 1), places(x, plus=T - 1)], axis=-1
    ),
}

# What each of these points to belongs to others, or is said by them.
OTHERS = {
    "anywhere": lambda x: whole(x) + places(x),
    "one too far": lambda x: clipped(whole(x), high=T) + places(x),
    "one before": lambda x: clipped(whole(x), low=-1) + places(x),
    "bounded on one side": lambda x: tf.maximum(whole(x), 0) + places(x),
    "too close": lambda x: largest(x) + places(x, times=T - 1),
    "too far apart": lambda x: largest(x) + places(x, times=T + 1),
    "of the next row": lambda x: largest(x) + places(x, plus=T),
    "of the row before": lambda x: largest(x) + places(x, plus=-T),
    "in reverse": lambda x: largest(x) + places(x)[::-1],
    "of the first row": largest,
    "of one row less": lambda x: largest(x) + tf.range(1, rows_of(x))[:, None] * T,
    "of every second": lambda x: largest(x) + tf.range(0, rows_of(x), 2)[:, None] * T,
    "squared places": lambda x: largest(x) + places(x) * places(x),
    "remainders of places": lambda x: places(x) % T + places(x) + 0 * largest(x),
    "by place": lambda x: (
        clipped(largest(x) + tf.range(rows_of(x))[:, None]) + places(x)
    ),
    "by a table of places": lambda x: (
        tf.gather([0, 1, 2, 3, 2, 1, 0, 3], places(x, times=1)) + places(x)
    ),
    "by the number of rows": lambda x: (largest(x) + rows_of(x)) % T + places(x),
    "by other rows": lambda x: (
        (largest(x) + tf.reduce_max(largest(x), axis=0)) % T + places(x)
    ),
    "by the row before": lambda x: tf.roll(largest(x), 1, axis=0) + places(x),
    "beyond what an integer has": lambda x: (
        tf.minimum(tf.maximum(whole(x), 0) + (2**31 - 1), T - 1) + places(x)
    ),
    "beyond what an integer has for certain": lambda x: (
        tf.minimum(clipped(whole(x), 2**31 - 2, 2**31 - 1) + 2, T - 1) + places(x)
    ),
    "by whether rows are many": lambda x: (
        tf.stack([0, rows_of(x) % 2]) + places(x) + 0 * largest(x)
    ),
    "cast from what is not a number": lambda x: (
        tf.cast(tf.clip_by_value(x[:, :2, 0], 0.0, 3.0), tf.int32) + places(x)
    ),
    "cut off": lambda x: (
        tf.cast(tf.maximum(tf.cast(whole(x), tf.int64), 0) * 2**33, tf.int32) // 2**29
        + places(x)
    ),
    "chosen": lambda x: tf.where(
        tf.reduce_sum(x) > 0, largest(x) + places(x), clipped(whole(x)) + places(x)
    ),
    "less where rows are many": lambda x: (
        tf.where(largest(x) + places(x) < 9, largest(x), (largest(x) + 1) % T)
        + places(x)
    ),
    "in a number that other rows decide": lambda x: tf.where(
        largest(x)[:, :1] + nothing(x, 1 + clipped(tf.reduce_max(whole(x)))) < 0,
        largest(x)[:, :1],
        largest(x)[:, :1] + places(x),
    ),
    "as often as there are rows": lambda x: (
        places(x) + tf.zeros([10], tf.int32)[None, : rows_of(x)]
    ),
    "as often as there are other rows": lambda x: (
        places(x) + tf.minimum(tf.range(1, rows_of(x)), 5)[None] * 0
    ),
    "true or false": lambda x: (
        tf.cast(tf.cast(clipped(whole(x), -1, 0), tf.bool), tf.int32) * 2
        + tf.cast(tf.cast(clipped(whole(x), -1, 0), tf.bool), tf.int32) * 2
        + places(x)
    ),
    "not the first": lambda x: (
        largest(x) + tf.cast(tf.cast(places(x, 1), tf.bool), tf.int32) * T
    ),
    "negative where rows are many": lambda x: tf.where(
        places(x, 2**30) < 0, largest(x) * 0, largest(x) + places(x)
    ),
    "wrapped around before it is long": lambda x: (
        tf.cast(places(x, 2**30), tf.int64)
        - tf.cast(rows_of(x), tf.int64) * 0
        - tf.range(tf.cast(rows_of(x), tf.int64))[:, None] * 2**30
        + tf.cast(largest(x) + places(x), tf.int64)
    ),
    "of one after the last": lambda x: from_the_end(last(x) + 1) + places(x),
    "of the last if there is one": lambda x: last(x) + places(x),
    "from a farther end": lambda x: from_the_end(last(x), length=T + 1) + places(x),
    "from a nearer end": lambda x: from_the_end(last(x) - 4) + places(x),
    "the first from the end, too": lambda x: from_the_end(last(x), below=1) + places(x),
    "another from the end": lambda x: (
        from_the_end(last(x), last(x) + last(x)) + places(x)
    ),
    "not negative in the first row": lambda x: tf.where(
        places(x, -1) < 0, largest(x) * 0, largest(x) + places(x)
    ),
    "joined to what is anywhere": lambda x: (
        places(x) + tf.concat([largest(x, 1), whole(x)[:, :1]], axis=1)
    ),
    "joined to places of others": lambda x: tf.concat(
        [places(x) + largest(x, 1), places(x)[::-1]], axis=1
    ),
    "joined to a place for all": lambda x: tf.concat(
        [places(x) + largest(x, 1), clipped(whole(x))[:, :1]], axis=1
    ),
    "the first behind the others": lambda x: tf.concat(
        [largest(x)[1:] + places(x)[1:], largest(x)[:1]], axis=0
    ),
    "looked up": lambda x: tf.gather([5, 6, 7, 8], clipped(whole(x))) - 5 + places(x),
    "places that others had": lambda x: (
        largest(x)
        + (tf.range(rows_of(x)) - tf.range(rows_of(x))[::-1])[:, None]
        + places(x)
    ),
}

# By the number of rows, where that is static, or by an entry for each place.
STATIC = {
    *("remainders of places", "by place", "by a table of places"),
    *("by the number of rows", "less where rows are many", "by whether rows are many"),
    *("as often as there are rows", "as often as there are other rows"),
    *("not the first", "negative where rows are many", "not negative in the first row"),
    "wrapped around before it is long",
    # Of these no graph can be made.
    *("of one row less", "of every second"),
}

IN_ROW = {
    "the largest": lambda x: tf.argmax(x[:, :, 0], axis=1, output_type=tf.int32),
    # What there is not is nothing, or an error: in no case is it another row's.
    "any": lambda x: whole(x)[:, 0],
}
NOT_IN_ROW = {
    "by place": lambda x: tf.range(rows_of(x)) % T,
    "own place": lambda x: tf.range(rows_of(x)),
    "by the number of rows": lambda x: (
        tf.argmax(x[:, :, 0], axis=1, output_type=tf.int32) + rows_of(x)
    ),
    "by other rows": lambda x: tf.argmax(x[::-1, :, 0], axis=1, output_type=tf.int32),
}


def entries_of_the_largest(x):
    """Keras's way: numbers that are negative count from the end."""
    order = ops.argsort(x, axis=1)
    return ops.take_along_axis(x, order[:, :2], axis=1)


def relative_scores(x):
    """Scores by relative positions, for each of which all rows have one place."""
    positions = ops.arange(T)
    apart = ops.clip(positions[:, None] - positions[None] + 2, 0, T - 1)
    scores = tf.einsum("ntd,nsd->nts", x, x)
    apart = ops.broadcast_to(apart[None], (rows_of(x), T, T))
    return tf.gather(scores, apart, batch_dims=2)


def in_batches(x):
    return tf.gather(x, clipped(whole(x)), batch_dims=1)


def in_batches_by_two(x):
    """Pick numbers by two of their own, as TensorFlow does: by three."""
    numbers = tf.concat([clipped(whole(x)), clipped(whole(x), high=D - 1)], axis=1)
    return tf.gather_nd(x, tf.reshape(numbers, [-1, 2, 2]), batch_dims=1)


def by_places_joined(x, places):
    return tf.gather_nd(x, tf.concat([places[:, None], largest(x, 1)], axis=1))


APART = {
    **{f"pick {name}": lambda x, of=of: pick(x, of(x)) for name, of in OWN.items()},
    **{f"put {name}": lambda x, of=of: put(x, of(x)) for name, of in OWN.items()},
    **{
        f"in row {n}": lambda x, of=of: pick_in_row(x, of(x))
        for n, of in IN_ROW.items()
    },
    "along an axis": entries_of_the_largest,
    "relative scores": relative_scores,
    "in batches": in_batches,
    "in batches by two": in_batches_by_two,
    "by places joined": lambda x: by_places_joined(x, count(x)),
}
MEETING = {
    **{f"pick {name}": lambda x, of=of: pick(x, of(x)) for name, of in OTHERS.items()},
    **{f"put {name}": lambda x, of=of: put(x, of(x)) for name, of in OTHERS.items()},
    **{
        f"in row {name}": lambda x, of=of: pick_in_row(x, of(x))
        for name, of in NOT_IN_ROW.items()
    },
    "by places of others joined": lambda x: by_places_joined(x, count(x)[::-1]),
    "rows twice": lambda x: pick(tf.tile(x, [2, 1, 1]), largest(x) + places(x, 2 * T)),
    "kept as often as there are rows": lambda x: tf.reduce_sum(
        tf.where(remainders(x)[:, None, None, None] >= 0, x, none(x)), axis=1
    ),
    "picked as often as there are rows": lambda x: tf.reduce_sum(
        tf.where(
            count(x)[:, None, None] >= 0, tf.gather(x[:, 0], [0], axis=1), none(x)
        ),
        axis=1,
    ),
    "kept by columns": lambda x: tf.reduce_sum(
        tf.where(count(x)[None] >= 0, tf.gather(x[:, 0], [0], axis=1), none(x)), axis=1
    ),
    "kept and picked by columns": lambda x: tf.reduce_sum(
        tf.where(
            count(x)[None] >= 0,
            tf.gather(x[:, 0, :1], tf.maximum(count(x), 0)),
            none(x),
        ),
        axis=1,
    ),
    "times the rows": lambda x: x * tf.reduce_sum(of_constants(x)),
    "times the place": lambda x: x * tf.cumsum(of_constants(x))[:, None, None],
    "by data, and for one row otherwise": lambda x: pick(
        x,
        tf.where(
            rows_of(x) > 1,
            tf.range(rows_of(x)) * T + clipped(whole(x))[:, 0],
            1,
        ),
    ),
    "as often as other rows say": lambda x: tf.reduce_sum(
        tf.where(
            tf.logical_and(
                largest(x)[:, :1] + places(x) >= 0,
                tf.zeros([tf.reduce_max(largest(x))], tf.int32) >= 0,
            ),
            tf.gather(
                tf.reshape(x, [-1, D])[:, 0],
                tf.maximum(largest(x)[:, :1] + places(x), 0),
            ),
            none(x),
        ),
        axis=1,
    ),
    "the first where numbers overflow": lambda x: pick(
        x, tf.maximum(tf.cast(count(x) * T, tf.int64), 0)
    ),
    "the first where they had overflown": lambda x: pick(
        x, tf.cast(tf.maximum(count(x) * T, 0), tf.int64)
    ),
    "none where numbers overflow": lambda x: of_long_numbers(
        x, tf.cast(count(x) * T, tf.int64)
    ),
    "none where others overflow": lambda x: of_long_numbers(
        x, tf.range(tf.shape(x, tf.int64)[0]) * T, count(x) * T >= 0
    ),
    "none where others say so": lambda x: of_long_numbers(
        x,
        tf.range(tf.shape(x, tf.int64)[0]) * T,
        tf.fill([rows_of(x)], tf.reduce_max(x) > 0),
    ),
    "of another type than what is asked": lambda x: tf.where(
        count(x)[:, None] * 10**6 >= 0,
        tf.gather(
            tf.reshape(x, [-1]), tf.maximum(tf.cast(count(x), tf.int64) * T * D, 0)
        )[:, None],
        none(x),
    ),
    "kept unless numbers overflow": lambda x: tf.where(
        places(x, 2**20)[:, :, None] >= 0, x, 0.0
    ),
    "picked unless numbers overflow": lambda x: tf.where(
        places(x, 2**20)[:, :, None] >= 0, pick(x, largest(x) + places(x)), 0.0
    ),
    "picked where places are low": lambda x: tf.where(
        7 - places(x)[:, :, None] >= 0, pick(x, largest(x) + places(x)), 0.0
    ),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("rows", [None, pytest.param(6, marks=pytest.mark.slow)])
def test_own_entries_are_proven_own(name, rows):
    function = APART[name]
    assert found(function, SHAPE, rows=rows) == []
    # The gradient of a sum asks which numbers are negative. So may those be that were cast.
    is_cast = name in {"put of one of the largest", "put as long numbers"}
    if not is_cast or rows is not None:
        assert found(gradient_of(function), SHAPE, rows=rows) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_they_are(name):
    """The proof is right: a row's entries are those of the row alone."""
    function = APART[name]
    rng = np.random.default_rng(0)
    x = tf.constant(rng.uniform(0, T - 1, (6, *SHAPE)))
    for of in (function, gradient_of(function)):
        together = of(x)
        alone = tf.concat([of(x[n : n + 1]) for n in range(6)], axis=0)
        np.testing.assert_allclose(together, alone, rtol=1e-12)


@pytest.mark.parametrize("name", MEETING)
def test_others_are_not(name):
    assert not is_proven(MEETING[name], SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in MEETING if name.split(" ", 1)[1] not in STATIC]
)
def test_nor_are_they_for_a_static_number_of_rows(name):
    of_places = {
        *("in row by place", "in row own place", "in row by the number of rows"),
        *("times the rows", "times the place", "by data, and for one row otherwise"),
        "of another type than what is asked",
    }
    beginnings = "kept ", "picked ", "the first where", "none where"
    if name in of_places or name.startswith(beginnings):
        pytest.skip("Where the number of rows is static, places are numbers.")
    assert not is_proven(MEETING[name], SHAPE, rows=6)


def test_of_open_lengths_nothing_is_known():
    """What is below two of them may be above another."""

    def first(x):
        return pick(x, clipped(whole(x), high=9) + places(x, tf.shape(x)[1]))

    assert is_proven(first, (11, D))
    assert not is_proven(first, (T, D))
    assert not is_proven(first, (None, D))


@pytest.mark.parametrize("length", [6, 8])
def test_columns_are_not_taken_for_rows(length):
    """Where there are as many numbers as rows."""

    def columns(x):
        none = tf.math.top_k(x[:, :, 0], 6)[1]
        return pick(x, tf.where(none < 0, none, tf.range(6) * length))

    assert not is_proven(columns, (length, D), rows=6)


def test_a_number_for_each_place_is_looked_at():
    def by_a_table(x):
        return pick(x, tf.constant([[0], [T], [2 * T], [0], [4 * T], [5 * T]]))

    assert not is_proven(by_a_table, SHAPE, rows=6)


@pytest.mark.slow
def test_numbers_may_have_a_long_history():
    def run(x):
        numbers = largest(x)
        for _ in range(500):
            numbers = tf.minimum(numbers + 0 * numbers, T - 1)
        return pick(x, numbers + places(x))

    assert not is_proven(run, SHAPE)


def test_numbers_count_from_either_end_for_any_layer():
    inputs = keras.Input(SHAPE)
    outputs = keras.layers.Lambda(entries_of_the_largest)(inputs)
    assert is_proven(keras.Model(inputs, outputs), SHAPE, dtype=tf.float32)
