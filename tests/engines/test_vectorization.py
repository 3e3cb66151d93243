"""What `tf.vectorized_map` makes of operations equals one element at a time."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp import _keras
from tfdp.engines import vectorization
from tfdp.engines.vectorization import efficient_vectorization

# What is known of the shapes while tracing: all, all but the number of elements,
# or nothing but the ranks.
SHAPES = ("static", "open", "dynamic")
N = 4


def spec(array, known):
    shape = list(array.shape)
    if known != "static":
        shape[0] = None
    if known == "dynamic":
        shape = [None] * len(shape)
    return tf.TensorSpec(shape, array.dtype)


def of_normals(rng, *shapes):
    return [rng.normal(size=(N, *shape)).astype("float32") for shape in shapes]


def check(function, elements, known="static", jit_compile=False):
    """Compare the vectorized map of a function with one element after the other.

    Returns:
        The names of the operations in the vectorized graph.
    """

    @tf.function(
        input_signature=[spec(element, known) for element in elements],
        jit_compile=jit_compile,
    )
    def vectorized(*elements):
        with efficient_vectorization():
            return tf.vectorized_map(lambda e: function(*e), elements)

    expected = [function(*map(tf.constant, row)) for row in zip(*elements, strict=True)]
    expected = [np.stack(parts) for parts in zip(*expected, strict=True)]
    actual = vectorized(*elements)
    for left, right in zip(actual, expected, strict=True):
        assert left.shape == right.shape
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    graph = vectorized.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return {node.op for node in nodes}


@pytest.fixture
def conversions(monkeypatch):
    """Names of the converters that converted something."""
    used = []
    real = _keras.pfor_converters

    def spying(converters):
        def spy(name, convert):
            def converted(pfor_input):
                output = convert(pfor_input)
                if output is not None:
                    used.append(name)
                return output

            return converted

        return real({name: spy(name, convert) for name, convert in converters.items()})

    monkeypatch.setattr(vectorization._keras, "pfor_converters", spying)
    return used


# --------------------------------------------------------------------------- sums


@pytest.mark.parametrize("known", SHAPES)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(
    "axes", [[], [0], [1], [-1], [-3], [0, 2], [-1, 0], [0, 1, 2], 1, -2]
)
def test_sums_over_constant_axes(axes, keepdims, known, rng, conversions):
    def function(x):
        return (tf.raw_ops.Sum(input=x, axis=axes, keep_dims=keepdims),)

    check(function, of_normals(rng, (2, 3, 4)), known)
    assert conversions == ["Sum"]


BROADCASTS = [
    ((4, 3), (3,)),
    ((4, 3), (1, 3)),
    ((4, 3), (4, 1)),
    ((4, 3), (1, 1)),
    ((4, 3), ()),
    ((4, 3), (4, 3)),
    ((), (2,)),
    ((1,), (3,)),
    ((2, 1, 3), (4, 1)),
    ((1, 1), (1, 1)),
    ((1,), (1, 1)),
    ((2, 1, 3), (1, 5, 1)),
    ((0, 3), (3,)),
]


def broadcast_gradients(left, right):
    with tf.GradientTape() as tape:
        tape.watch([left, right])
        value = tf.reduce_sum(tf.sin(left * right + left - right / 3))
    return tape.gradient(value, [left, right])


@pytest.mark.parametrize("known", SHAPES)
@pytest.mark.parametrize(("left", "right"), BROADCASTS)
def test_gradients_of_broadcasts(left, right, known, rng):
    check(broadcast_gradients, of_normals(rng, left, right), known)


@pytest.mark.parametrize(("left", "right"), BROADCASTS)
def test_gradients_of_what_all_elements_share(left, right, rng):
    shared = tf.constant(rng.normal(size=right), tf.float32)
    check(lambda x: broadcast_gradients(x, shared), of_normals(rng, left))
    check(lambda x: broadcast_gradients(shared, x), of_normals(rng, left))


def test_a_sum_over_no_axes_copies_nothing(rng, conversions):
    shared = tf.constant(rng.normal(size=[3]), tf.float32)

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = x * shared
        return (tape.gradient(value, x, output_gradients=tf.ones([4, 3])),)

    operations = check(function, of_normals(rng, (4, 3)))
    assert "Sum" not in operations


def test_axes_that_only_the_data_tell_are_left_to_tensorflow(rng, conversions):
    def function(x, axis):
        axes = tf.where(tf.constant(True), tf.range(1), tf.range(1))
        return (tf.raw_ops.Sum(input=x, axis=axes + 0 * tf.size(x)), axis)

    check(function, [*of_normals(rng, (2, 3)), np.zeros([N], "float32")], "dynamic")
    assert conversions == []


# -------------------------------------------------------------------- matrix products

# Shapes of an element's factors; which are stacked; adj_x, adj_y.
PRODUCTS = {
    "both": ((2, 3, 4), (2, 4, 5), "xy", False, False),
    "both_broadcast": ((2, 1, 3, 4), (5, 4, 2), "xy", False, False),
    "both_broadcast_left": ((3, 4), (6, 4, 2), "xy", False, False),
    "shared_matrix": ((2, 3, 4), (4, 5), "x", False, False),
    "shared_matrix_deep": ((2, 2, 3, 4), (4, 5), "x", False, False),
    "shared_matrix_transposed": ((2, 3, 4), (5, 4), "x", False, True),
    "shared_matrix_adjoint_rows": ((2, 4, 3), (4, 5), "x", True, False),
    "shared_batch": ((2, 3, 4), (2, 4, 5), "x", False, False),
    "shared_batch_broadcast": ((2, 3, 4), (1, 4, 5), "x", False, False),
    "shared_left": ((3, 4), (2, 4, 5), "y", False, False),
    "shared_left_transposed": ((4, 3), (2, 5, 4), "y", True, True),
    "shared_left_batch": ((2, 3, 4), (4, 5), "y", False, False),
    "both_transposed": ((2, 4, 3), (2, 5, 4), "xy", True, True),
    "no_rows": ((2, 0, 4), (4, 5), "x", False, False),
    "ones": ((1, 1, 1), (1, 1), "x", False, False),
}


@pytest.mark.parametrize("known", SHAPES)
@pytest.mark.parametrize("case", PRODUCTS)
def test_matrix_products(case, known, rng, conversions):
    x_shape, y_shape, stacked, adj_x, adj_y = PRODUCTS[case]
    arrays = dict(zip("xy", of_normals(rng, x_shape, y_shape), strict=True))
    shared = {name: tf.constant(array[0]) for name, array in arrays.items()}

    def function(*elements):
        factors = shared | dict(zip(stacked, elements, strict=True))
        return (tf.raw_ops.BatchMatMulV2(**factors, adj_x=adj_x, adj_y=adj_y),)

    check(function, [arrays[name] for name in stacked], known)
    assert conversions == ["BatchMatMulV2"]


@pytest.mark.parametrize("case", PRODUCTS)
def test_gradients_of_matrix_products(case, rng):
    x_shape, y_shape, _, adj_x, adj_y = PRODUCTS[case]
    shared = tf.constant(rng.normal(size=y_shape), tf.float32)

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch([x, shared])
            product = tf.raw_ops.BatchMatMulV2(x=x, y=shared, adj_x=adj_x, adj_y=adj_y)
            value = tf.reduce_sum(tf.sin(product))
        return tape.gradient(value, [x, shared])

    check(function, of_normals(rng, x_shape))


# --------------------------------------------------------------------------- pooling

# Window, strides, padding.
POOLS = {
    "usual": (2, 2, "VALID"),
    "overlapping": (3, 1, "SAME"),
    "overlapping_strided": (3, 2, "SAME"),
    "oblong": ([2, 1], [1, 2], "VALID"),
    "explicit": (2, 2, [[0, 0], [1, 0], [0, 1], [0, 0]]),
}


def pool_gradient(x, pool):
    window, strides, padding = POOLS[pool]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.max_pool2d(x, window, strides, padding)
        value = tf.reduce_sum(tf.sin(y))
    return (tape.gradient(value, x),)


@pytest.mark.parametrize("known", SHAPES)
@pytest.mark.parametrize("pool", POOLS)
def test_gradients_of_max_pooling(pool, known, rng, conversions):
    elements = of_normals(rng, (2, 5, 6, 3))
    check(lambda x: pool_gradient(x, pool), elements, known)
    assert conversions.count("MaxPoolGrad") == 1


@pytest.mark.parametrize("pool", ["usual", "overlapping"])
def test_equal_maxima_get_what_they_get_alone(pool, rng):
    elements = [rng.integers(2, size=(N, 1, 4, 4, 2)).astype("float32")]
    check(lambda x: pool_gradient(x, pool), elements)


# ----------------------------------------------------------------------- convolution


def kernel_gradient(x, kernel, **options):
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        value = tf.reduce_sum(tf.sin(tf.nn.conv2d(x, kernel, **options)))
    return (tape.gradient(value, kernel),)


CONVOLUTIONS = {
    "valid": {"strides": 1, "padding": "VALID"},
    "same": {"strides": 1, "padding": "SAME"},
    "strided": {"strides": 2, "padding": "SAME"},
    "unequal_strides": {"strides": [2, 1], "padding": "VALID"},
}


@pytest.mark.parametrize("known", ["static", "open"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_gradients_of_shared_kernels(case, rows, channels, known, rng, conversions):
    kernel = tf.constant(rng.normal(size=[3, 2, channels, 2]), tf.float32)
    operations = check(
        lambda x: kernel_gradient(x, kernel, **CONVOLUTIONS[case]),
        of_normals(rng, (rows, 6, 5, channels)),
        known,
    )
    assert "Conv2DBackpropFilter" in conversions
    assert not operations & {"While", "StatelessWhile"}


@pytest.mark.parametrize("dilations", [1, 2])
def test_gradients_of_dilated_kernels_under_xla(dilations, rng, conversions):
    kernel = tf.constant(rng.normal(size=[3, 2, 2, 2]), tf.float32)

    # Without XLA a CPU has no such operation: the comparison is made by hand.
    @tf.function(jit_compile=True)
    def gradients(x, is_vectorized):
        def function(x):
            return kernel_gradient(
                x, kernel, strides=1, padding="VALID", dilations=dilations
            )[0]

        with efficient_vectorization():
            return tf.vectorized_map(function, x) if is_vectorized else function(x[0])

    (x,) = of_normals(rng, (1, 7, 6, 2))
    together = gradients(x, True)
    for row in range(N):
        alone = gradients(x[row : row + 1], False)
        np.testing.assert_allclose(together[row], alone, rtol=1e-4, atol=1e-4)
    assert "Conv2DBackpropFilter" in conversions


@pytest.mark.filterwarnings("ignore:Using a while_loop")
def test_images_of_unknown_size_are_left_to_tensorflow(rng, conversions):
    kernel = tf.constant(rng.normal(size=[2, 2, 3, 2]), tf.float32)
    check(
        lambda x: kernel_gradient(x, kernel, strides=1, padding="SAME"),
        of_normals(rng, (1, 5, 4, 3)),
        "dynamic",
    )
    assert "Conv2DBackpropFilter" not in conversions


@pytest.mark.filterwarnings("ignore:Using a while_loop")
def test_a_shared_image_is_left_to_tensorflow(rng, conversions):
    image = tf.constant(rng.normal(size=[1, 5, 4, 3]), tf.float32)

    def function(output_gradient):
        return (
            tf.raw_ops.Conv2DBackpropFilter(
                input=image,
                filter_sizes=[2, 2, 3, 2],
                out_backprop=output_gradient,
                strides=[1, 1, 1, 1],
                padding="VALID",
            ),
        )

    check(function, of_normals(rng, (1, 4, 3, 2)))
    assert conversions == []


# -------------------------------------------------------------------------- registry


@pytest.mark.parametrize("fails", [False, True])
def test_tensorflow_gets_its_own_conversions_back(fails):
    registry = _keras.pfor._pfor_converter_registry
    before = dict(registry)
    try:
        with efficient_vectorization():
            assert dict(registry) != before
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert dict(registry) == before


# ----------------------------------------------------- kernels that differ, squeezing


@pytest.mark.parametrize("known", SHAPES[:2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("channels", [2, 4])
def test_convolutions_with_a_kernel_for_each(
    rng, conversions, known, padding, channels
):
    def function(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.nn.conv2d(x, kernel, 2, padding)
            total = tf.reduce_sum(outputs**2)
        return outputs, tape.gradient(total, x)

    check(function, of_normals(rng, (2, 5, 6, channels), (3, 2, 2, 4)), known)
    assert conversions == ["Conv2D", "Conv2DBackpropInput"]


@pytest.mark.parametrize("elements", [1, 3])
def test_squeezing_leaves_the_axis_of_the_elements(rng, elements):
    x = rng.normal(size=(elements, 1, 3, 1)).astype("float32")

    @tf.function(input_signature=[tf.TensorSpec([None, 1, 3, 1])])
    def squeezed(x):
        with efficient_vectorization():
            return tf.vectorized_map(tf.squeeze, x)

    assert squeezed(x).shape == (elements, 3)


def test_a_squeeze_of_unknown_shape_is_left_to_tensorflow(rng):
    check(lambda x: (tf.squeeze(x, [0]),), of_normals(rng, (1, 3)), "dynamic")
