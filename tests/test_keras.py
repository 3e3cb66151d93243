"""What is replaced in Keras and TensorFlow for a while, and put back."""

import threading
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp import _keras

pytestmark = pytest.mark.keras_private


def gathered(x):
    # Its gradient makes tiles of a list of numbers.
    return tf.gather(x, tf.constant([[1, 1], [0, 2]]), batch_dims=1)


def test_gradients_of_what_rows_gather_stay_in_the_rows():
    @tf.function(autograph=False)
    def gradient_of_gathered(x, places):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = [[1.0], [2.0], [3.0]] * tf.gather(x, places, batch_dims=1)
        # What is gathered is not asked for: on a CPU it would be an error.
        return tape.gradient(y, x)

    with _keras.gradients_of_rows():
        found = gradient_of_gathered(tf.zeros([3, 2]), tf.constant([[1], [2], [-1]]))
    np.testing.assert_array_equal(found, [[0, 1], [0, 2], [3, 0]])


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (lambda x: tf.reduce_sum(x, 1), ("Tile", "BroadcastTo")),
        (tf.reduce_mean, ("Tile", "BroadcastTo")),
        (lambda x: tf.tile(x, [1, 2]), ("Tile", "Tile")),
        (gathered, (None, None)),
    ],
)
def test_sums_are_spread_by_broadcasting(function, kinds, rng):
    x = rng.normal(size=(2, 3))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.square(function(x))
        return tape.gradient(y, x)

    found = []
    for spreads, kind in zip((False, True), kinds, strict=True):
        traced = tf.function(gradient, autograph=False)
        with _keras.gradients_of_rows() if spreads else nullcontext():
            graph = traced.get_concrete_function(tf.TensorSpec(x.shape, x.dtype))
        made = {op.type for op in graph.graph.get_operations()}
        assert kind is None or kind in made
        found.append(graph(tf.constant(x)))
    np.testing.assert_allclose(*found)


# Input shape, kernel shape, and how one slides over the other.
IN_GROUPS = {
    "1d": ((7, 4), (3, 2, 6), {"strides": 2, "padding": "same"}),
    "2d": ((5, 6, 6), (2, 3, 3, 4), {"padding": "same", "dilation_rate": (2, 1)}),
    "2d, strides": ((5, 6, 4), (2, 3, 2, 4), {"strides": (2, 1)}),
    "3d": ((3, 3, 4, 4), (2, 1, 2, 2, 2), {"padding": "same"}),
    "3d, depth 1": ((3, 3, 4, 2), (2, 1, 2, 1, 4), {"strides": (1, 2, 1)}),
    "1d, depth 1": ((7, 3), (3, 1, 6), {"dilation_rate": 2, "padding": "same"}),
    "2d, depth 1": ((6, 6, 3), (3, 3, 1, 6), {"strides": 2, "padding": "same"}),
    "2d, one stride": ((6, 6, 3), (3, 3, 1, 6), {"strides": (2,)}),
    "2d, NumPy": ((6, 6, 4), (3, 3, 2, 6), {"strides": np.int64(2)}),
    "2d, depth 1, strides": ((6, 6, 3), (3, 3, 1, 6), {"strides": (2, 1)}),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("has_onednn", [True, False])
@pytest.mark.parametrize("name", IN_GROUPS)
def test_convolutions_in_groups_are_those_of_the_groups(
    name, has_onednn, dtype, rng, monkeypatch
):
    of_inputs, of_kernel, how = IN_GROUPS[name]
    if not has_onednn:
        monkeypatch.setattr(_keras._pywrap_util_port, "IsMklEnabled", lambda: False)
    x = tf.constant(rng.normal(size=(2, *of_inputs)), dtype)
    kernel = tf.constant(rng.normal(size=of_kernel), dtype)
    groups = of_inputs[-1] // of_kernel[-2]
    options = {
        "strides": how.get("strides", 1),
        "padding": how.get("padding", "valid").upper(),
        "dilations": how.get("dilation_rate", 1),
    }

    def one_by_one(x, kernel):
        pairs = zip(tf.split(x, groups, -1), tf.split(kernel, groups, -1), strict=True)
        return tf.concat([tf.nn.convolution(*pair, **options) for pair in pairs], -1)

    @tf.function(autograph=False)
    def gradients(convolve, x, kernel):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = convolve(x, kernel)
            loss = tf.reduce_sum(y * tf.cos(y))
        return y, tape.gradient(loss, x)

    with _keras.models_run_plainly():
        traced = gradients.get_concrete_function(
            lambda *given: keras.ops.conv(*given, **how), x, kernel
        )
    assert "_XlaMustCompile" not in str(traced.graph.as_graph_def(add_shapes=False))
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    for found, true in zip(
        traced(x, kernel), gradients(one_by_one, x, kernel), strict=True
    ):
        np.testing.assert_allclose(found, true, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("strides", [(2, 1), (1, 3)])
def test_kernels_of_single_pixels_slide_by_equal_strides(strides, padding, rng):
    """By different ones TensorFlow's gradient of the kernel writes beyond its memory."""
    x, kernel = rng.normal(size=(4, 5, 7, 3)), rng.normal(size=(1, 1, 3, 2))
    of_line = x[:, 0], kernel[0]
    with tf.Graph().as_default() as graph:
        with _keras.convolutions_replaced(lambda *_: None):
            found = (
                tf.nn.conv2d(x, kernel, strides, padding),
                tf.nn.conv1d(*of_line, strides[1], padding),
                tf.nn.convolution(x, kernel, strides, padding),
            )
        made = [op for op in graph.get_operations() if op.type == "Conv2D"]
        found = tf.compat.v1.Session().run(found)
    assert [op.get_attr("strides") for op in made] == [[1, 1, 1, 1]] * len(made)
    for each in found[::2]:
        np.testing.assert_allclose(each, tf.nn.conv2d(x, kernel, strides, padding))
    np.testing.assert_allclose(found[1], tf.nn.conv1d(*of_line, strides[1], padding))


@pytest.mark.parametrize(
    ("convolve", "shape", "kernel", "shorter"),
    [
        (tf.nn.conv1d, (2, 3, 4), (3, 4, 4), (2, 2, 4)),
        (tf.nn.conv2d, (2, 3, 5, 4), (3, 3, 4, 4), (2, 5, 2, 4)),
        (tf.nn.conv3d, (2, 3, 5, 3, 4), (3, 3, 3, 4, 4), (2, 3, 5, 2, 4)),
        (tf.nn.depthwise_conv2d, (2, 3, 5, 4), (3, 3, 4, 1), (2, 2, 5, 4)),
    ],
)
def test_convolutions_without_a_place_fail(convolve, shape, kernel, shorter):
    """There oneDNN returns what is in memory."""
    strides = 1 if len(shape) == 3 else [1] * len(shape)
    kernel = tf.ones(kernel)

    def run(x):
        with _keras.convolutions_replaced(lambda *_: None):
            return convolve(x, kernel, strides, "VALID")

    of_any = tf.TensorSpec([None] * (len(shape) - 1) + [4])
    traced = tf.function(run, autograph=False, input_signature=[of_any])
    x = tf.ones(shape)
    np.testing.assert_array_equal(traced(x), convolve(x, kernel, strides, "VALID"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="a place for its window"):
        traced(tf.ones(shorter))
    # What has a length that is known asks nothing.
    whole = tf.function(run, autograph=False).get_concrete_function(
        tf.TensorSpec(shape)
    )
    assert not any(op.type == "Assert" for op in whole.graph.get_operations())


@pytest.mark.parametrize(
    ("padding", "data_format", "shape", "kernel"),
    [
        ("VALID", "NCHW", (None, 4, 9, None), (3, 3, 4, 4)),
        ([(0, 0), (1, 0), (0, 0), (0, 0)], "NHWC", (None, None, 9, 4), (3, 3, 4, 4)),
        ("VALID", "NHWC", (None, 9, 9, 4), (None, 3, 4, 4)),
    ],
)
def test_open_lengths_of_all_kinds_are_compared(padding, data_format, shape, kernel):
    @tf.function(autograph=False)
    def convolve(x, kernel):
        return tf.nn.conv2d(x, kernel, 1, padding, data_format)

    with _keras.convolutions_replaced(lambda *_: None):
        traced = convolve.get_concrete_function(
            tf.TensorSpec(shape), tf.TensorSpec(kernel)
        )
    operations = traced.graph.get_operations()
    (made,) = [op for op in operations if op.type == "Conv2D"]
    assert _keras.fails_without_a_place(made)


@pytest.mark.parametrize("begin", [(0, 1, 0), (0, 4, 3), (2, -1, 9)])
def test_slices_are_updated_as_by_xla(begin, rng):
    x, part = rng.normal(size=(3, 5, 4)), rng.normal(size=(3, 2, 1))

    @tf.function(autograph=False)
    def updated(x, part, begin):
        return keras.ops.slice_update(x, begin, part)

    rows = tf.TensorSpec([None, 5, 4], x.dtype), tf.TensorSpec([None, 2, 1], x.dtype)
    with _keras.models_run_plainly():
        traced = updated.get_concrete_function(*rows, tf.TensorSpec([3], tf.int32))
    assert not any(op.type.startswith("Xla") for op in traced.graph.get_operations())
    np.testing.assert_array_equal(
        traced(tf.constant(x), tf.constant(part), tf.constant(begin)),
        updated(tf.constant(x), tf.constant(part), tf.constant(begin)),
    )
    # Of open lengths XLA alone knows which are the same.
    open_rows = [tf.TensorSpec([None, None, 4], x.dtype)] * 2
    with _keras.models_run_plainly():
        traced = updated.get_concrete_function(*open_rows, tf.TensorSpec([3], tf.int32))
        found = traced(
            tf.constant(x), tf.constant(2 * x[:, 1:]), tf.constant([0, 0, 0])
        )
    np.testing.assert_array_equal(found, np.concatenate([2 * x[:, 1:], x[:, 4:]], 1))
    with _keras.models_run_plainly():
        np.testing.assert_array_equal(keras.ops.slice_update(x, begin, 2 * x), 2 * x)
        # Fewer rows than there are is what XLA alone does.
        first = updated(tf.constant(x), tf.constant(part[:1]), tf.constant([1, 0, 0]))
    np.testing.assert_array_equal(first[1, :2, :1], part[0])


def test_convolutions_of_unknown_channels_are_left_alone():
    kernel = tf.ones([3, 2, 4])

    @tf.function(input_signature=[tf.TensorSpec([None, 5, None])])
    def convolved(x):
        return keras.ops.conv(x, kernel)

    with _keras.models_run_plainly():
        assert convolved(tf.ones([1, 5, 2])).shape == (1, 3, 4)
    layer = keras.layers.Conv1D(2, 2, data_format="channels_first")
    layer(tf.ones([1, 3, 4]))
    traced = tf.function(layer.call).get_concrete_function(tf.TensorSpec([1, 3, None]))
    assert traced.structured_outputs.shape.as_list() == [1, 2, None]


@pytest.mark.parametrize("axis", [1, (1, -1), [2], (), None])
@pytest.mark.parametrize("keepdims", [True, False])
def test_products_along_axes_are_those_of_tensorflow(axis, keepdims, rng):
    x = rng.normal(size=(2, 5, 6))
    x[0, 0, 0] = x[1, 2, 3] = 0
    x = x[:, None] if axis == () else x

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_prod(x, axis, keepdims)
        return y, tape.gradient(y, x)

    expected = gradient(tf.constant(x))
    with _keras.models_run_plainly():
        found = gradient(tf.constant(x))
        whole = tf.reduce_prod(tf.constant([[2, 3]]), axis=1)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    assert whole.numpy() == [6]


def test_groups_of_channels_in_half_precision_are_those_of_keras(rng):
    x, kernel = rng.normal(size=(2, 12, 12, 12, 2)), rng.normal(size=(2, 2, 2, 1, 6))
    expected = keras.ops.conv(x, kernel, strides=4, padding="same")
    half = [tf.cast(each, tf.float16) for each in (x, kernel)]
    with _keras.models_run_plainly():
        found = keras.ops.conv(*half, strides=4, padding="same")
    assert found.dtype == tf.float16
    np.testing.assert_allclose(found, expected, atol=2e-2)


@pytest.mark.parametrize("value", [1.5, np.ones(2), {"a": 1, "b": (None, 2)}])
def test_outputs_of_known_branches_are_those_of_tensorflow(value):
    found = []
    for context in (nullcontext, _keras.models_run_plainly):
        with tf.Graph().as_default(), context():
            chosen = tf.cond(tf.equal(4, 4), lambda: value, lambda: value)
        found.append(tf.nest.map_structure(type, chosen))
    assert found[0] == found[1]


def test_what_is_not_known_is_left_to_tensorflow():
    ragged = tf.ragged.constant([[2.0], [1.0, 3.0]])
    for context in (nullcontext, _keras.models_run_plainly):
        with context():
            np.testing.assert_array_equal(tf.reduce_prod(ragged, axis=1), [2, 3])
            for axis in (3, [1, -1]):
                with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
                    tf.reduce_prod(tf.ones([2, 3]), axis=axis)
            updated = tf.function(
                lambda x: keras.ops.slice_update(x, (0, 0), [[1.0]]),
                input_signature=[tf.TensorSpec(None, tf.float64)],
            )
            np.testing.assert_array_equal(
                updated(tf.zeros([1, 2], tf.float64)), [[1, 0]]
            )


def test_known_conditions_are_their_branch():
    def chosen(x, known):
        is_even = tf.equal(4, 4) if known else tf.equal(tf.shape(x)[0] % 2, 0)
        return tf.cond(is_even, lambda: x[:, :2], lambda: x)

    for known, length in ((True, 2), (False, None)):
        traced = tf.function(chosen, autograph=False)
        with _keras.models_run_plainly():
            traced = traced.get_concrete_function(tf.TensorSpec([None, 3]), known)
        assert traced.structured_outputs.shape.as_list() == [None, length]
    # Outside, and where it is a variable, TensorFlow's own decides.
    with tf.Graph().as_default():
        assert chosen(tf.zeros([2, 3]), True).op.type != "StridedSlice"
    with _keras.models_run_plainly():
        assert tf.cond(tf.Variable(True), lambda: 1, lambda: 2) == 1


def test_other_threads_run_as_ever():
    kernel, x = tf.ones([2, 1, 2]), tf.ones([1, 4, 2])
    found = []

    def trace():
        traced = tf.function(lambda: keras.ops.conv(x, kernel), autograph=False)
        graph = traced.get_concrete_function().graph.as_graph_def()
        found.append("_XlaMustCompile" in str(graph))

    with _keras.models_run_plainly():
        trace()
        thread = threading.Thread(target=trace)
        thread.start()
        thread.join()
    trace()
    assert found == [False, True, True]
