"""What is proven of open lengths holds for all of them."""

import pytest
import tensorflow as tf

from tests.checks.test_rows import found
from tfdp.checks.convolutions import convolutions_of_rows

D = 4


def in_parts(x, *shape):
    """Normalizes what is put together, and puts it back."""
    parts = tf.reshape(x, [-1, *shape])
    return tf.reshape(parts - tf.reduce_mean(parts, 1, keepdims=True), tf.shape(x))


def first(x, number=8):
    return in_parts(x[:, :number], 8, D)


def time_major(x):
    return tf.transpose(x, [1, 0, 2])


def halves(x):
    """Takes the first half of what is put one behind the other."""
    return tf.reshape(x, [2, -1, D])[0]


def mean_of_short(x):
    """Rows meet in short sequences alone."""
    return tf.where(tf.shape(x)[1] < 100, x + tf.reduce_mean(x, 0), x)


def mean_of_threes(x):
    return tf.where(tf.shape(x)[1] % 3 == 0, x + tf.reduce_mean(x, 0), x)


def max_pool(x, size, stride=None, padding="VALID"):
    return tf.nn.max_pool1d(x, size, stride or size, padding)


def beside_a_window(x):
    """That has no place in short lengths, which alone would show the other."""
    return tf.reduce_sum(first(x, 512), 1) + tf.reduce_sum(max_pool(x, 600), 1)


def of_another(x, y):
    return tf.reshape(x, [-1, tf.shape(y)[1], D])


def profiles(x):
    """Height and width one behind the other, times before rows."""
    height = tf.transpose(tf.reduce_mean(x, 2), [1, 0, 2])
    width = tf.transpose(tf.reduce_mean(x, 1), [1, 0, 2])
    return halves(tf.concat([height, width], 0))


def tiled_by_length(x):
    times = tf.shape(x)[1] // 16 + 2
    return halves(tf.reshape(tf.tile(x[:, 0], [times, 1]), [-1, D]))


def in_columns_to_fifty(x):
    width = tf.minimum(tf.shape(x)[3], 50)
    return tf.reshape(x[:, 0, 0, :width], [-1, 50 * D])


def padded_to(x, length, number=8):
    """Taken apart as if it had so many entries, and `number` more."""
    more = tf.pad(x, [(0, 0), (0, number), (0, 0)])
    return in_parts(more, length + number, D)


def shifted_in_nothing(x, begin):
    """Of no position there are none but the last: one is there all the same."""
    joined = tf.concat([begin[:, None], x[:, :-1]], 1)
    return padded_to(joined, tf.shape(x)[1])


def of_two_branches(x):
    """One of which has another length."""
    length = tf.shape(x)[1]
    y = tf.cond(length > 1, lambda: x, lambda: tf.repeat(x, 3, axis=1))
    return padded_to(x + y, length)


def left_by_minus_one(x, y):
    """What is left where five fewer are one fewer than none."""
    length = tf.shape(x)[1]
    left = tf.reshape(x[:, 5:], [tf.shape(x)[0], length - 5, D])
    return in_parts(tf.concat([y, left], 1), length, D)


def sliced_by_minus_one(x):
    length = tf.shape(x)[1]
    left = tf.slice(x, [0, 0, 0], [-1, length - 5, -1])
    return in_parts(tf.concat([left, x], 1), 2 * length - 5, D)


def backwards(x):
    """From the first entry back to the last there are none."""
    return padded_to(x[:, ::-1], tf.shape(x[:, 0 : tf.shape(x)[1] : -1])[1])


def overflown(x):
    return padded_to(x, tf.shape(x)[1] * 65536 * 65536 // 65536 // 65536)


def of_wide_numbers(x):
    """32 bits of it are none."""
    wide = tf.shape(x, tf.int64)[1] * 2**32 + 1
    return padded_to(x[:, :1], tf.cast(wide, tf.int32))


def rounded(x):
    many = tf.shape(x)[1] * 2**14 * 2**10
    one = tf.cast(tf.cast(many + 1, tf.float32), tf.int32) - many
    return padded_to(tf.reduce_sum(x, 1, keepdims=True), one)


def squeezed(x):
    """Without all axes of one entry, where an open one may be one of them."""
    return padded_to(x, tf.shape(tf.squeeze(tf.ones([tf.shape(x)[1], 1, D])))[0])


def by_axes_of_gradients(x, y):
    """They are those of the rows, too, where an open length is 1."""
    shape = tf.stack([tf.shape(y)[1], D])
    axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(x), s1=shape)
    return x + tf.reduce_sum(x, axes[1])


def by_shape_of_a_list(x):
    """Which may be open, whatever is in the list."""
    rows = tf.ones([2, tf.shape(x)[1]])
    made = tf.raw_ops.TensorListFromTensor(tensor=rows, element_shape=tf.constant([-1]))
    shape = tf.raw_ops.TensorListElementShape(input_handle=made, shape_type=tf.int32)
    return padded_to(x, shape[0], 9)


def by_another_minus_one(x):
    """What is left differs with what else is asked."""
    rows, length = tf.unstack(tf.shape(x)[:2])
    first, second = (tf.reshape(x, [rows, length - 5, depth]) for depth in (D, D // 2))
    return in_parts(first, tf.shape(second)[1], D)


def by_axes_that_are_equal(x):
    """They are summed over, too, where another axis is."""
    shape = tf.stack([tf.shape(x)[0], 1, 1])
    axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(x), s1=shape)
    return x + tf.raw_ops.Sum(input=x, axis=axes[0])


def summed_and_cut(x, y):
    shape = tf.stack([tf.shape(x)[0], tf.shape(y)[1], D])
    axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(x), s1=shape)
    left = tf.raw_ops.Sum(input=x, axis=axes[1])
    return tf.reshape(left, [-1, tf.shape(x)[1], D])


def by_shape_of_a_list_in_a_loop(x):
    rows = tf.ones([2, tf.shape(x)[1]])
    made = tf.raw_ops.TensorListFromTensor(tensor=rows, element_shape=tf.constant([-1]))
    shape = tf.raw_ops.TensorListElementShape(input_handle=made, shape_type=tf.int32)
    return tf.while_loop(
        lambda i, *_: i < 1,
        lambda i, x, shape: (i + 1, in_parts(x, shape[0] + 9, D), shape),
        [0, tf.pad(x, [(0, 0), (0, 9), (0, 0)]), shape],
        [tf.TensorShape([]), tf.TensorShape([None, None, D]), tf.TensorShape([1])],
    )[1]


def of_powers(x):
    """16 to the power of 8 is none in 32 bits."""
    length = tf.shape(x)[1]
    power = tf.reduce_prod(tf.stack([length] * 8))
    return padded_to(x[:, :1], power + 1)


# Rows meet at some lengths, or nobody knows that they do not.
MEETING = {
    "first": (first, (None, D)),
    "last": (lambda x: in_parts(x[:, -8:], 8, D), (None, D)),
    "first flat": (lambda x: in_parts(x[:, :8], 8 * D), (None, D)),
    "smaller": (lambda x: first(x, tf.minimum(tf.shape(x)[1], 8)), (None, D)),
    "larger": (lambda x: first(x, tf.maximum(tf.shape(x)[1], 8)), (None, D)),
    "first of an image": (
        lambda x: in_parts(x[:, :8, :8], 8, 8, D),
        (None, None, D),
    ),
    "first behind a pool": (lambda x: first(max_pool(x, 2)), (None, D)),
    "first of what is repeated": (
        lambda x: in_parts(tf.repeat(x, 50, 1)[:, :100], 100, D),
        (None, D),
    ),
    "time-major parts": (lambda x: halves(time_major(x[:, :8])), (None, D)),
    "time-major pools": (
        lambda x: halves(tf.concat([time_major(x), time_major(max_pool(x, 2))], 0)),
        (None, D),
    ),
    "split": (
        lambda x: tf.split(tf.reshape(time_major(x[:, :8]), [-1, D]), 2)[0],
        (None, D),
    ),
    "profiles": (profiles, (None, None, D)),
    "tiles": (tiled_by_length, (None, D)),
    "short": (mean_of_short, (None, D)),
    "threes": (mean_of_threes, (None, D)),
    "beside a window": (beside_a_window, (None, D)),
    "thirds": (
        lambda x: tf.reshape(
            max_pool(x, 3, 3, "SAME"), [-1, tf.shape(x)[1] // 3 + 1, D]
        ),
        (None, D),
    ),
    "fifths": (
        lambda x: tf.reshape(x[:, ::5], [-1, tf.shape(x)[1] // 5 + 1, D]),
        (None, D),
    ),
    "pairs behind dilation": (
        lambda x: in_parts(
            tf.nn.convolution(x, tf.ones([3, D, D], x.dtype), dilations=2), 2, D
        ),
        (None, D),
    ),
    "columns": (in_columns_to_fifty, (None, None, None, D)),
    "another": (of_another, (None, D), (None, D)),
    # One position is as many as the other has.
    "broadcast": (
        lambda x, y: in_parts(tf.concat([x + y, x], 1), 2 * tf.shape(x)[1], D),
        (None, D),
        (None, D),
    ),
    # Cut at both ends, it may be empty, and padded again longer than it was.
    "padded again": (
        lambda x: in_parts(
            tf.pad(x[:, 5:], [(0, 0), (5, 0), (0, 0)]), tf.shape(x)[1], D
        ),
        (None, D),
    ),
    "padded windows": (
        lambda x: in_parts(
            tf.pad(max_pool(x, 3, 1), [(0, 0), (2, 0), (0, 0)]), tf.shape(x)[1], D
        ),
        (None, D),
    ),
    "picked and padded again": (
        lambda x: in_parts(
            tf.pad(
                tf.gather(x, tf.range(tf.shape(x)[1] - 5), axis=1),
                [(0, 0), (5, 0), (0, 0)],
            ),
            tf.shape(x)[1],
            D,
        ),
        (None, D),
    ),
    "shifted in nothing": (shifted_in_nothing, (None, D), (D,)),
    "two branches": (of_two_branches, (None, D)),
    "left by minus one": (left_by_minus_one, (None, D), (5, D)),
    "sliced by minus one": (sliced_by_minus_one, (None, D)),
    "backwards": (backwards, (None, D)),
    "overflown": (overflown, (None, D)),
    "of wide numbers": (of_wide_numbers, (None, D)),
    "rounded": (rounded, (None, D)),
    "squeezed": (squeezed, (None, D)),
    "axes of gradients": (by_axes_of_gradients, (D,), (None, D)),
    "shape of a list": (by_shape_of_a_list, (None, D)),
    "another minus one": (by_another_minus_one, (None, D)),
    "axes that are equal": (by_axes_that_are_equal, (None, D)),
    "summed and cut": (summed_and_cut, (None, D), (None, D)),
    "shape of a list in a loop": (by_shape_of_a_list_in_a_loop, (None, D)),
    "powers": (of_powers, (None, D)),
    "over itself": (
        lambda x: padded_to(x[:, :0], tf.shape(x)[1] // tf.shape(x)[1] - 1),
        (None, D),
    ),
    "of an output's length": (
        lambda x, y: tf.reshape(x, [-1, tf.shape(y)[1]]),
        (None,),
        (None,),
    ),
}


@pytest.mark.parametrize("name", MEETING)
def test_what_may_meet_at_some_length_is_not_proven(name):
    with convolutions_of_rows():
        assert found(*MEETING[name], dtype=tf.float32)


def flat(x):
    """All positions of all rows, one by one, and back."""
    rows = tf.tanh(tf.reshape(x, [-1, x.shape[-1]]))
    return tf.reshape(rows, [tf.shape(x)[0], -1, x.shape[-1]])


def of_rows(y, x):
    """All that each row has, one behind the other."""
    return tf.reshape(y, [tf.shape(x)[0], -1])


def shifted(x):
    begin = tf.zeros_like(x[:, :1])
    return flat(tf.concat([begin, x[:, :-1]], 1) + x)


def attention(x):
    heads = tf.reshape(x, [tf.shape(x)[0], tf.shape(x)[1], 2, D // 2])
    scores = tf.nn.softmax(tf.einsum("bihd,bjhd->bhij", heads, heads))
    mixed = tf.einsum("bhij,bjhd->bihd", scores, heads)
    return flat(tf.reshape(mixed, tf.shape(x)))


def up_and_down(x):
    down = max_pool(x, 2, padding="SAME")
    up = tf.repeat(down, 2, 1)[:, : tf.shape(x)[1]]
    return flat(tf.concat([up, x], 2))


def by_gradients(x, y):
    """Of what is broadcast, they are summed where one of both has one entry."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum((x - y) ** 2)
    return flat(tape.gradient(loss, x))


KEPT_APART = {
    "flat": (flat, (None, D)),
    "shifted": (shifted, (None, D)),
    "attention": (attention, (None, D)),
    "up and down": (up_and_down, (None, D)),
    "causal": (
        lambda x: flat(tf.pad(x, [(0, 0), (3, 0), (0, 0)])[:, :-3] + x),
        (None, D),
    ),
    "put together again": (
        lambda x: flat(tf.concat([x[:, 2:], x[:, :2]], 1) + x),
        (None, D),
    ),
    "backwards": (lambda x: flat(x[:, ::-1] + x), (None, D)),
    "in another order": (
        lambda x: flat(tf.gather(x, tf.range(tf.shape(x)[1])[::-1], axis=1) + x),
        (None, D),
    ),
    "windows": (lambda x: flat(max_pool(x, 5, 5)), (None, D)),
    "many windows": (
        lambda x: flat(max_pool(max_pool(max_pool(x, 6, 1), 2), 5)),
        (None, D),
    ),
    "dilated": (
        lambda x: flat(tf.nn.convolution(x, tf.ones([3, D, D], x.dtype), dilations=2)),
        (None, D),
    ),
    "dilated as before": (
        lambda x: flat(
            x
            + tf.nn.convolution(
                x, tf.ones([3, D, D], x.dtype), dilations=2, padding="SAME"
            )
        ),
        (None, D),
    ),
    "positions": (
        lambda x: flat(x + tf.ones([50, D], x.dtype)[: tf.shape(x)[1]]),
        (None, D),
    ),
    "one for each": (
        lambda x, y: of_rows(tf.reshape(x, [-1, D]) + tf.reshape(y, [-1, D]), x),
        (None, D),
        (None, D),
    ),
    "gradients": (by_gradients, (None, D), (None, D)),
    "images": (
        lambda x: of_rows(tf.reshape(x, [-1, tf.shape(x)[2], D]), x),
        (None, None, D),
    ),
    "volumes": (
        lambda x: of_rows(tf.reshape(tf.nn.max_pool3d(x, 3, 2, "SAME"), [-1, D]), x),
        (None, None, None, D),
    ),
}


@pytest.mark.parametrize("name", KEPT_APART)
def test_what_holds_for_all_lengths_is_proven(name):
    with convolutions_of_rows():
        assert not found(*KEPT_APART[name], dtype=tf.float32)


def test_a_convolution_that_may_have_no_place_is_not_proven():
    """As raw operations are, which nothing makes fail."""

    def convolved(x):
        kernel = tf.ones([3, 3, D, D])
        return tf.raw_ops.Conv2D(
            input=x, filter=kernel, strides=[1] * 4, padding="VALID"
        )

    assert found(convolved, (None, 9, D), dtype=tf.float32)

    def checked(x):
        """By something else."""
        with tf.control_dependencies([tf.debugging.assert_greater(tf.shape(x)[0], 0)]):
            return convolved(tf.identity(x))

    assert found(checked, (None, 9, D), dtype=tf.float32)
    assert not found(convolved, (9, 9, D), dtype=tf.float32)
