"""What `tf.vectorized_map` makes of operations equals one element at a time."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp import _keras
from tfdp.engines import vectorization
from tfdp.engines.vectorization import efficient_vectorization

pytestmark = pytest.mark.keras_private

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


def of_normals(rng, *shape):
    return rng.normal(size=(N, *shape)).astype("float32")


def check(function, elements, known="static", alone=None):
    """Compare the vectorized map of a function with one element after the other.

    Args:
        function: From a dict of arrays to a dict of results or lists of results.
        elements: A dict of arrays, with the elements on their leading axes.
        known: One of `SHAPES`.
        alone: The same function in another way, for one element.

    Returns:
        The names of the operations in the vectorized graph.
    """
    specs = {name: spec(array, known) for name, array in elements.items()}

    @tf.function(input_signature=[specs])
    def vectorized(elements):
        with efficient_vectorization():
            return tf.vectorized_map(function, elements)  # noqa: TID251

    rows = [
        (alone or function)({name: tf.constant(a[row]) for name, a in elements.items()})
        for row in range(N)
    ]
    actual = vectorized(elements)
    assert actual.keys() == rows[0].keys()
    for name, found in actual.items():
        expected = [tf.nest.flatten(row[name]) for row in rows]
        parts = tf.nest.flatten(found)
        for left, *right in zip(parts, *expected, strict=True):
            assert left.shape == [N, *right[0].shape], name
            np.testing.assert_allclose(
                left, np.stack(right), rtol=1e-5, atol=1e-5, err_msg=name
            )
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


@pytest.mark.parametrize("known", SHAPES[1:])
def test_matrix_products(known, rng, conversions):
    elements, shared = {}, {}
    for name, (*shapes, stacked, _, _) in PRODUCTS.items():
        for side, shape in zip("xy", shapes, strict=True):
            array = of_normals(rng, *shape)
            if side in stacked:
                elements[f"{name} {side}"] = array
            else:
                shared[f"{name} {side}"] = tf.constant(array[0])

    def function(elements):
        factors = shared | elements
        return {
            name: tf.raw_ops.BatchMatMulV2(
                x=factors[f"{name} x"],
                y=factors[f"{name} y"],
                adj_x=adj_x,
                adj_y=adj_y,
            )
            for name, (*_, adj_x, adj_y) in PRODUCTS.items()
        }

    check(function, elements, known)
    assert conversions == ["BatchMatMulV2"] * len(PRODUCTS)


@pytest.mark.slow
def test_gradients_of_matrix_products(rng):
    elements = {name: of_normals(rng, *case[0]) for name, case in PRODUCTS.items()}
    shared = {
        name: tf.constant(rng.normal(size=case[1]), tf.float32)
        for name, case in PRODUCTS.items()
    }

    def gradients(x, y, adj_x, adj_y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            product = tf.raw_ops.BatchMatMulV2(x=x, y=y, adj_x=adj_x, adj_y=adj_y)
            value = tf.reduce_sum(tf.sin(product))
        return tape.gradient(value, [x, y])

    def function(elements):
        return {
            name: gradients(x, shared[name], *PRODUCTS[name][-2:])
            for name, x in elements.items()
        }

    check(function, elements)


# --------------------------------------------------------------------------- pooling

# Window, strides, padding.
POOLS = {
    "usual": (2, 2, "VALID"),
    "overlapping": (3, 1, "SAME"),
    "overlapping_strided": (3, 2, "SAME"),
    "oblong": ([2, 1], [1, 2], "VALID"),
    "explicit": (2, 2, [[0, 0], [1, 0], [0, 1], [0, 0]]),
}


def pool_gradients(elements):
    (x,) = elements.values()
    gradients = {}
    for name, (window, strides, padding) in POOLS.items():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.max_pool2d(x, window, strides, padding)
            value = tf.reduce_sum(tf.sin(y))
        gradients[name] = tape.gradient(value, x)
    return gradients


@pytest.mark.parametrize("known", SHAPES[1:])
def test_gradients_of_max_pooling(known, rng, conversions):
    check(pool_gradients, {"x": of_normals(rng, 2, 5, 6, 3)}, known)
    assert conversions.count("MaxPoolGrad") == len(POOLS)


def test_equal_maxima_get_what_they_get_alone(rng):
    x = rng.integers(2, size=(N, 1, 4, 4, 2)).astype("float32")
    check(pool_gradients, {"x": x})


# ----------------------------------------------------------------------- convolution


def kernel_gradient(x, kernel, **options):
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        value = tf.reduce_sum(tf.sin(tf.nn.conv2d(x, kernel, **options)))
    return tape.gradient(value, kernel)


CONVOLUTIONS = {
    "valid": {"strides": 1, "padding": "VALID"},
    "same": {"strides": 1, "padding": "SAME"},
    "strided": {"strides": 2, "padding": "SAME"},
    "unequal_strides": {"strides": [2, 1], "padding": "VALID"},
}


@pytest.mark.parametrize(
    ("rows", "channels", "known"),
    [(1, 1, "open"), (2, 3, "open"), (1, 3, "static")],
)
def test_gradients_of_shared_kernels(rows, channels, known, rng, conversions):
    kernel = tf.constant(rng.normal(size=[3, 2, channels, 2]), tf.float32)

    def function(elements):
        return {
            name: kernel_gradient(elements["x"], kernel, **options)
            for name, options in CONVOLUTIONS.items()
        }

    operations = check(function, {"x": of_normals(rng, rows, 6, 5, channels)}, known)
    assert conversions.count("Conv2DBackpropFilter") == len(CONVOLUTIONS)
    assert not operations & {"While", "StatelessWhile"}


@pytest.mark.slow
@pytest.mark.parametrize("dilations", [1, 2])
def test_gradients_of_dilated_kernels_under_xla(dilations, rng, conversions):
    kernel = tf.constant(rng.normal(size=[3, 2, 2, 2]), tf.float32)

    # Without XLA a CPU has no such operation: the comparison is made by hand.
    @tf.function(jit_compile=True)
    def gradients(x, is_vectorized):
        def function(x):
            return kernel_gradient(
                x, kernel, strides=1, padding="VALID", dilations=dilations
            )

        with efficient_vectorization():
            return tf.vectorized_map(function, x) if is_vectorized else function(x[0])  # noqa: TID251

    x = of_normals(rng, 1, 7, 6, 2)
    together = gradients(x, True)
    for row in range(N):
        alone = gradients(x[row : row + 1], False)
        np.testing.assert_allclose(together[row], alone, rtol=1e-4, atol=1e-4)
    assert "Conv2DBackpropFilter" in conversions


@pytest.mark.filterwarnings("ignore:Using a while_loop")
def test_images_of_unknown_size_are_left_to_tensorflow(rng, conversions):
    kernel = tf.constant(rng.normal(size=[2, 2, 3, 2]), tf.float32)

    def function(elements):
        return {
            "kernel": kernel_gradient(elements["x"], kernel, **CONVOLUTIONS["same"])
        }

    check(function, {"x": of_normals(rng, 1, 5, 4, 3)}, "dynamic")
    assert "Conv2DBackpropFilter" not in conversions


@pytest.mark.filterwarnings("ignore:Using a while_loop")
def test_a_shared_image_is_left_to_tensorflow(rng, conversions):
    image = tf.constant(rng.normal(size=[1, 5, 4, 3]), tf.float32)

    def function(elements):
        return {
            "kernel": tf.raw_ops.Conv2DBackpropFilter(
                input=image,
                filter_sizes=[2, 2, 3, 2],
                out_backprop=elements["g"],
                strides=[1, 1, 1, 1],
                padding="VALID",
            )
        }

    check(function, {"g": of_normals(rng, 1, 4, 3, 2)})
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


# -------------------------------------------------------------------------- squeezing


@pytest.mark.parametrize("elements", [1, 3])
def test_squeezing_leaves_the_axis_of_the_elements(rng, elements):
    x = rng.normal(size=(elements, 1, 3, 1)).astype("float32")

    @tf.function(input_signature=[tf.TensorSpec([None, 1, 3, 1])])
    def squeezed(x):
        with efficient_vectorization():
            return tf.vectorized_map(tf.squeeze, x)  # noqa: TID251

    assert squeezed(x).shape == (elements, 3)


def test_a_squeeze_of_unknown_shape_is_left_to_tensorflow(rng):
    def function(elements):
        return {"x": tf.squeeze(elements["x"], [0])}

    check(function, {"x": of_normals(rng, 1, 3)}, "dynamic")
