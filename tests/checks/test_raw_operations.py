"""Ways to let rows meet that are written in TensorFlow's own operations."""

import pytest
import tensorflow as tf

from tests.checks.test_rows import D, found, number_of, times

RAW = tf.raw_ops
LENGTH, PLACES = tf.Variable(14), tf.Variable(8)
SHAPE = tf.Variable([1, D])
ONES = tf.Variable(tf.ones([1, 1, D], tf.float64), shape=tf.TensorShape(None))
DIAGONALS = tf.Variable([-1, 1])
DRAWS = tf.random.Generator.from_seed(1)


def empty_list(shape, dtype):
    return RAW.EmptyTensorList(
        element_shape=tf.constant(shape, tf.int32),
        max_num_elements=-1,
        element_dtype=dtype,
    )


def pushed_by_data(x):
    """A list that is longer if some row is large."""

    def push(items):
        return RAW.TensorListPushBack(input_handle=items, tensor=tf.constant(1))

    items = empty_list([], tf.int32)
    return tf.cond(tf.reduce_max(x) > 6, lambda: push(push(items)), lambda: push(items))


def stacked(items, shape, dtype):
    return RAW.TensorListStack(
        input_handle=items, element_shape=shape, element_dtype=dtype
    )


def list_of_all(x):
    return RAW.TensorListFromTensor(tensor=x[None], element_shape=tf.shape(x))


def rows_pushed(x):
    items = RAW.TensorListFromTensor(tensor=x, element_shape=tf.constant([D]))
    for _ in range(5):
        items = RAW.TensorListPushBack(
            input_handle=items, tensor=tf.zeros([D], x.dtype)
        )
    return times(x, number_of(stacked(items, tf.constant([D]), x.dtype)))


def resized(x):
    items = RAW.TensorListFromTensor(
        tensor=tf.transpose(x), element_shape=tf.constant([-1])
    )
    items = RAW.TensorListResize(input_handle=items, size=D + number_of(x) % 2)
    return tf.reduce_mean(stacked(items, tf.stack([number_of(x)]), x.dtype), 0)


def concatenated(x):
    items = RAW.TensorListReserve(
        element_shape=tf.constant([2]), num_elements=number_of(x), element_dtype=x.dtype
    )
    items = RAW.TensorListSetItem(
        input_handle=items, index=0, item=tf.ones([2], x.dtype)
    )
    joined, _ = RAW.TensorListConcatV2(
        input_handle=items,
        element_shape=tf.constant([2]),
        leading_dims=tf.constant([], tf.int64),
        element_dtype=x.dtype,
    )
    return x * tf.reduce_mean(joined)


def transformed(x):
    frequencies = RAW.RFFT(
        input=tf.cast(x, tf.float32),
        fft_length=tf.stack([LENGTH]),
        Tcomplex=tf.complex64,
    )
    return tf.reshape(frequencies, [-1, 4])[: number_of(x)]


def drawn_classes(x):
    classes = tf.random.stateless_categorical(x, PLACES, [1, 2], tf.int32)
    return tf.reshape(classes, [-1, D])[: number_of(x)]


def shapes_of_gamma(x):
    drawn = RAW.RandomGamma(shape=tf.stack([number_of(x)]), alpha=tf.constant([1.0, 1]))
    return times(x, tf.cast(tf.reduce_sum(tf.sign(drawn), 0)[0], tf.int32))


def diagonals(x):
    return RAW.MatrixDiagV3(
        diagonal=x,
        k=DIAGONALS,
        num_rows=-1,
        num_cols=-1,
        padding_value=tf.constant(0.0, x.dtype),
        align="RIGHT_LEFT",
    )[: number_of(x)]


def gradient_of_a_slice(x):
    place = number_of(x) % D
    return RAW.StridedSliceGrad(
        shape=tf.shape(x),
        begin=tf.stack([0, place]),
        end=tf.stack([0, place + 1]),
        strides=[1, 1],
        dy=x[:, :1],
        begin_mask=1,
        end_mask=1,
        ellipsis_mask=0,
        new_axis_mask=0,
        shrink_axis_mask=0,
    )


def image(x):
    return tf.reshape(x, [-1, D, 1, 1])


def widened(x):
    size = tf.stack([number_of(x), 5 + number_of(x) % 2, 1, 1])
    kernel = tf.ones([3, 1, 1, 1], x.dtype)
    return tf.nn.conv2d_transpose(image(x), kernel, size, [2, 1])


def projected(x):
    return RAW.ImageProjectiveTransformV3(
        images=tf.cast(image(x), tf.float32),
        transforms=tf.constant([[1.0, 0, 0, 0, 1, 0, 0, 0]]),
        output_shape=tf.stack([1 + number_of(x) % 2, 1]),
        fill_value=0.0,
        interpolation="NEAREST",
    )


def keeps_by_mask(x):
    DRAWS.normal(tf.shape(tf.boolean_mask(x, x[:, 0] > 6)))
    return x


def keeps_in_a_branch(x):
    def draw():
        return RAW.StatefulUniform(
            resource=DRAWS.state.handle,
            algorithm=tf.constant(1, tf.int64),
            shape=[D],
            dtype=tf.float32,
        )

    tf.cond(tf.reduce_max(x) > 6, draw, lambda: tf.zeros([D]))
    return x


def keeps_by_reference(x):
    kept = RAW.VariableV2(shape=[], dtype=x.dtype, shared_name="kept")
    assigned = RAW.Assign(
        ref=kept, value=tf.reduce_mean(x), validate_shape=True, use_locking=True
    )
    with tf.control_dependencies([assigned]):
        return tf.identity(x)


def vector_keys(x):
    """A key is a vector along the last axis: those of all rows."""
    table = tf.lookup.experimental.DenseHashTable(
        key_dtype=tf.int64,
        value_dtype=tf.float32,
        default_value=0.0,
        empty_key=[0, 0],
        deleted_key=[-1, -1],
    )
    return table.lookup(tf.transpose(tf.cast(x, tf.int64)))


def tiled(x):
    """As many ones as there are rows, of something whose length nobody knows."""
    some = tf.where(tf.range(3) < PLACES)
    ones = tf.ones_like(tf.tile(some, [number_of(x), 1]))
    return x * tf.cast(tf.reduce_sum(ones), x.dtype)


def mean_by_rank(x, ones):
    """The mean of all rows, if these ones have two axes more than they seem to."""
    mean = tf.reduce_mean(x * ones, 1, keepdims=True)
    return tf.reshape(x + mean, tf.shape(x))


def either(x):
    flat = tf.ones([D], x.dtype)
    return mean_by_rank(x, tf.cond(LENGTH > 1, ONES.read_value, lambda: flat))


def either_or_rows(x):
    return mean_by_rank(
        x, tf.ones_like(tf.cond(LENGTH > 1, ONES.read_value, lambda: x))
    )


def in_no_round(x):
    shapes = tf.TensorShape([]), tf.TensorShape(None)
    _, ones = tf.while_loop(
        lambda n, _: n < 0,
        lambda n, _: (n + 1, tf.ones([D], x.dtype)),
        (0, ONES.read_value()),
        shape_invariants=shapes,
    )
    return mean_by_rank(x, ones)


def popped(x):
    items = empty_list(-1, x.dtype)
    for each in (tf.ones([D], x.dtype), ONES.read_value()):
        items = RAW.TensorListPushBack(input_handle=items, tensor=each)
    _, last = RAW.TensorListPopBack(
        input_handle=items, element_shape=tf.constant(-1), element_dtype=x.dtype
    )
    return mean_by_rank(x, last)


def never_set(x, shape):
    return RAW.TensorListReserve(
        element_shape=shape, num_elements=1, element_dtype=x.dtype
    )


def stack_of_zeros(x):
    zeros = stacked(never_set(x, SHAPE), SHAPE, x.dtype)
    return mean_by_rank(x, tf.exp(zeros))


def item_of_zeros(x):
    shape = tf.concat([[1], SHAPE], 0)
    zeros = RAW.TensorListGetItem(
        input_handle=never_set(x, shape),
        index=0,
        element_shape=shape,
        element_dtype=x.dtype,
    )
    return mean_by_rank(x, tf.exp(zeros))


def number_of_zeros(x):
    shape = tf.stack([number_of(x)])
    zeros = stacked(never_set(x, shape), shape, x.dtype)
    return x * tf.reduce_sum(tf.ones_like(zeros))


def joined_zeros(x):
    zeros, _ = RAW.TensorListConcatV2(
        input_handle=never_set(x, tf.stack([number_of(x)])),
        element_shape=tf.stack([number_of(x)]),
        leading_dims=tf.constant([], tf.int64),
        element_dtype=x.dtype,
    )
    return x * tf.reduce_sum(tf.ones_like(zeros))


def either_length(x):
    def zeros(shape):
        return lambda: never_set(x, shape)

    items = tf.cond(LENGTH > 1, zeros(tf.stack([number_of(x)])), zeros([5]))
    return x * tf.reduce_sum(tf.ones_like(stacked(items, [-1], x.dtype)))


def filled_or_not(x):
    def filled():
        return RAW.TensorListSetItem(
            input_handle=never_set(x, -1), index=0, item=tf.ones([5], x.dtype)
        )

    items = tf.cond(LENGTH < 1, filled, lambda: never_set(x, -1))
    shape = tf.stack([number_of(x)])
    return x * tf.reduce_sum(tf.ones_like(stacked(items, shape, x.dtype)))


def axes_of_zeros(x):
    """The number of axes of what nobody has put into a list."""
    shape = tf.concat([[1], tf.ones([number_of(x) % 2], tf.int32)], 0)
    zeros = stacked(never_set(x, shape), shape, x.dtype)
    return times(x, tf.rank(zeros))


def numbers_of(x):
    return tf.cast(x[:, 0], tf.int32)


def sum_of_ones(x, like):
    return x * tf.reduce_sum(tf.ones_like(like), [0])


def reversed_by_rows(x):
    turned = RAW.ReverseV2(tensor=tf.ones([2, 3], x.dtype), axis=numbers_of(x))
    return x + tf.reduce_sum(turned[0])


def split_by_rows(x):
    parts = RAW.SplitV(
        value=tf.ones([9], x.dtype), size_splits=numbers_of(x), axis=0, num_split=2
    )
    return sum_of_ones(x, parts[0])


def axes_by_rows(x):
    axes = RAW.BroadcastGradientArgs(s0=numbers_of(x), s1=tf.constant([1, 3])).r0
    return times(x, tf.reduce_sum(axes, 0))


def offsets_by_rows(x):
    offsets = RAW.ConcatOffset(concat_dim=0, shape=[numbers_of(x), numbers_of(x)])
    return times(x, tf.reduce_sum(offsets[1], 0))


def shuffled_by_rows(x):
    seeds = tf.stack([numbers_of(x)] * 3, 1)
    place = RAW.RandomIndexShuffle(index=1, seed=seeds, max_index=9)
    return times(x, tf.reduce_sum(place, 0))


def half_set(x):
    items = RAW.TensorListReserve(
        element_shape=-1, num_elements=2, element_dtype=x.dtype
    )
    return RAW.TensorListSetItem(
        input_handle=items, index=0, item=tf.ones([2], x.dtype)
    )


def item_of(x, items, index, shape):
    item = RAW.TensorListGetItem(
        input_handle=items, index=index, element_shape=shape, element_dtype=x.dtype
    )
    return sum_of_ones(x, item)


def longer_list(x):
    items = RAW.TensorListFromTensor(tensor=tf.ones([2, 2], x.dtype), element_shape=-1)
    return RAW.TensorListResize(input_handle=items, size=5)


def joined_by_rows(x):
    joined, _ = RAW.TensorListConcatV2(
        input_handle=half_set(x),
        element_shape=[-1],
        leading_dims=tf.cast(numbers_of(x), tf.int64),
        element_dtype=x.dtype,
    )
    return sum_of_ones(x, joined)


def spectrum_of_unknown_rank(x):
    """The second transform goes along the rows, if nobody knows where they are."""

    def again(n, h):
        h = RAW.RFFT(input=h, fft_length=[3], Tcomplex=tf.complex64)
        return n + 1, tf.math.real(RAW.IFFT2D(input=h))

    shapes = tf.TensorShape([]), tf.TensorShape(None)
    state = (0, tf.cast(x, tf.float32))
    return tf.while_loop(lambda n, _: n < 2, again, state, shape_invariants=shapes)[1]


def mean_along_a_narrow_axis(x):
    """255 + 1 is 0 in eight bits, which is the axis of the rows."""
    axis = tf.constant(255, tf.uint8) + tf.constant(1, tf.uint8)
    x = x[:, :, None]
    return (x + tf.reduce_mean(x, tf.cast(axis, tf.int32), keepdims=True))[..., 0]


def reversed_by_truths(x):
    """The first version has a truth for each axis, and no numbers of axes."""
    return RAW.Reverse(tensor=x, dims=[True, True])


def mean_handed_on(x):
    mean = RAW.FusedBatchNormV3(
        x=tf.cast(x[:, None, None], tf.float32),
        scale=tf.ones([D]),
        offset=tf.zeros([D]),
        mean=tf.cast(tf.reduce_mean(x, 0), tf.float32),
        variance=tf.ones([D]),
        is_training=False,
    ).batch_mean
    return x - tf.cast(mean, x.dtype)


def batch_for_a_space(x):
    kernel = tf.ones([3, 1, 1, D, D], x.dtype)
    found = RAW.Conv(
        input=x[:, None, None],
        filter=kernel,
        strides=[1] * 5,
        padding="SAME",
        batch_dims=0,
    )
    return found[:, 0, 0]


def mean_along_a_chosen_axis(x):
    """Of the first version, a vector says which rows to take."""
    axes = RAW.Select(
        condition=[True, False], x=[[1, 1], [1, 1]], y=tf.zeros([2, 2], tf.int32)
    )
    return x - tf.reduce_mean(x, axes[1, 0], keepdims=True)


def last_of(*lists):
    """Lists are put into a list, and the last comes out again."""
    outer = empty_list([], tf.variant)
    for items in lists:
        outer = RAW.TensorListPushBack(input_handle=outer, tensor=items)
    _, popped = RAW.TensorListPopBack(
        input_handle=outer,
        element_shape=tf.constant([], tf.int32),
        element_dtype=tf.variant,
    )
    return popped


def features(x):
    """A list with a tensor for each feature, of all rows."""
    return RAW.TensorListFromTensor(
        tensor=tf.transpose(x), element_shape=tf.constant([-1])
    )


def zeros_of_a_list(x):
    shape = tf.stack([number_of(x)])
    zeros = stacked(last_of(never_set(x, shape)), shape, x.dtype)
    return x * tf.reduce_sum(tf.ones_like(zeros))


def shape_of_a_list(x, shape):
    zeros = stacked(last_of(never_set(x, shape)), SHAPE, x.dtype)
    return mean_by_rank(x, tf.exp(zeros))


def mean_of_a_list(x):
    rows = stacked(last_of(features(x)), tf.constant([-1]), x.dtype)
    return x - tf.reduce_mean(rows, 1)


def rows_in_a_list(x):
    items = RAW.TensorListFromTensor(tensor=x, element_shape=tf.constant([D]))
    return times(x, RAW.TensorListLength(input_handle=last_of(items)))


def on_other_axes_of_a_list(x):
    """The lists have rows on different axes, and either may come out."""
    lists = [
        RAW.TensorListFromTensor(tensor=each[None], element_shape=-1)
        for each in (x, tf.transpose(x))
    ]
    return x + tf.reduce_sum(stacked(last_of(*lists), tf.constant([D, -1]), x.dtype)[0])


def popped_twice(x):
    """A list of one row, that had three."""
    items = RAW.TensorListFromTensor(
        tensor=tf.ones([D, 2], x.dtype), element_shape=tf.constant([2])
    )
    for _ in range(D - 1):
        items, _ = RAW.TensorListPopBack(
            input_handle=items, element_shape=tf.constant([2]), element_dtype=x.dtype
        )
    return items


def pushed_behind(x):
    items = RAW.TensorListFromTensor(
        tensor=tf.ones([1, 2], x.dtype), element_shape=tf.constant([2])
    )
    return RAW.TensorListPushBack(input_handle=items, tensor=tf.ones([2], x.dtype))


def split_by_length(x, items):
    """Parts of the batch in place of features, if the length is not what it seems."""
    number = tf.shape(stacked(items, tf.constant([2]), x.dtype))[0]
    return tf.reshape(x, [-1, number])[: number_of(x)]


def split_by_shape_of_lists(x):
    items = RAW.TensorListFromTensor(
        tensor=tf.ones([D], x.dtype), element_shape=tf.constant([], tf.int32)
    )
    outer = RAW.TensorListPushBack(
        input_handle=empty_list([], tf.variant), tensor=items
    )
    shape = RAW.TensorListElementShape(input_handle=outer, shape_type=tf.int32)
    return tf.reshape(x, [-1, tf.reduce_prod(shape)])[: number_of(x)]


def zeros_of(x, change):
    """Zeros that nobody has set, as many as there are rows, in a list that was moved."""
    items = RAW.TensorListReserve(
        element_shape=tf.constant([-1]), num_elements=2, element_dtype=x.dtype
    )
    zeros = stacked(change(items), tf.stack([number_of(x)]), x.dtype)
    return x * tf.reduce_sum(tf.ones_like(zeros))


MOVED = {
    "stacked": lambda items: tf.stack([items, items])[0],
    "gathered": lambda items: tf.gather(tf.stack([items, items]), 1),
    "reshaped": lambda items: tf.reshape(tf.reshape(items, [1]), []),
    "filled": lambda items: tf.fill([2], items)[0],
    "chosen": lambda items: tf.where(LENGTH > 1, items, items),
    "joined": lambda items: RAW.TensorListConcatLists(
        input_a=items, input_b=items, element_dtype=tf.float64
    ),
    "in_a_list": last_of,
    "twice": lambda items: last_of(last_of(items)),
}


@pytest.mark.parametrize("change", MOVED.values(), ids=MOVED)
def test_lists_that_were_moved_may_still_be_new(change):
    assert found(lambda x: zeros_of(x, change), (D,))


HIDDEN = [
    lambda x: split_by_length(x, popped_twice(x)),
    lambda x: split_by_length(x, last_of(popped_twice(x))),
    lambda x: split_by_length(x, pushed_behind(x)),
    split_by_shape_of_lists,
    zeros_of_a_list,
    lambda x: shape_of_a_list(x, SHAPE),
    lambda x: shape_of_a_list(x, -1),
    mean_of_a_list,
    rows_in_a_list,
    on_other_axes_of_a_list,
    reversed_by_truths,
    mean_handed_on,
    batch_for_a_space,
    mean_along_a_chosen_axis,
    mean_along_a_narrow_axis,
    reversed_by_rows,
    split_by_rows,
    axes_by_rows,
    offsets_by_rows,
    shuffled_by_rows,
    joined_by_rows,
    spectrum_of_unknown_rank,
    lambda x: item_of(x, half_set(x), 1, tf.stack([number_of(x)])),
    lambda x: item_of(x, half_set(x), 1, numbers_of(x)),
    lambda x: item_of(x, longer_list(x), 4, tf.stack([number_of(x)])),
    either,
    either_or_rows,
    in_no_round,
    popped,
    stack_of_zeros,
    item_of_zeros,
    number_of_zeros,
    joined_zeros,
    axes_of_zeros,
    either_length,
    filled_or_not,
    lambda x: times(x, tf.reduce_sum(stacked(pushed_by_data(x), [], tf.int32))),
    lambda x: times(x, RAW.TensorListLength(input_handle=pushed_by_data(x))),
    lambda x: times(
        x,
        RAW.TensorListElementShape(input_handle=list_of_all(x), shape_type=tf.int32)[0],
    ),
    rows_pushed,
    resized,
    concatenated,
    transformed,
    drawn_classes,
    shapes_of_gamma,
    diagonals,
    gradient_of_a_slice,
    widened,
    projected,
    keeps_by_mask,
    keeps_in_a_branch,
    keeps_by_reference,
    vector_keys,
    tiled,
]


@pytest.mark.parametrize("function", HIDDEN)
def test_what_hides_in_an_operation_is_found(function):
    assert found(function, (D,))


def gradient_sized_by_rows(x):
    return RAW.Conv2DBackpropInput(
        input_sizes=numbers_of(x),
        filter=tf.ones([1, 1, 1, 1], x.dtype),
        out_backprop=image(x),
        strides=[1, 2, 1, 1],
        padding="SAME",
    )


def projected_by_rows(x):
    return RAW.ImageProjectiveTransformV3(
        images=tf.cast(image(x), tf.float32),
        transforms=tf.constant([[1.0, 0, 0, 0, 1, 0, 0, 0]]),
        output_shape=numbers_of(x),
        fill_value=0.0,
        interpolation="NEAREST",
    )


@pytest.mark.parametrize(
    ("function", "rows"), [(gradient_sized_by_rows, 4), (projected_by_rows, 2)]
)
def test_sizes_with_as_many_numbers_as_rows_are_no_rows(function, rows):
    assert found(function, (D,), rows=rows)


def test_lists_in_lists_keep_rows_where_they_are():
    def function(x):
        rows = stacked(last_of(features(x)), tf.constant([-1]), x.dtype)
        return tf.transpose(rows)

    assert not found(function, (D,))
