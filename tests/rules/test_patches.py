"""What kernels see at each position: laid out, and multiplied with itself."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.convolutions import ONE_GROUP, PLANE, in_mode, problem, seen_by
from tfdp.rules.patches import patch_gram, patches


@pytest.mark.parametrize("case", sorted(PLANE.intersection(ONE_GROUP)))
def test_patches_are_what_a_kernel_sees(case, rng):
    x, _, options = problem(case, rng)
    kernel = options["kernel_shape"][:-2]
    seen = [part[:, 0] for _, part in seen_by(x, kernel, options["geometry"])]
    laid_out = in_mode("graph", lambda x: patches(x, **options), x[:, 0])
    expected = np.stack(seen, -2).reshape(laid_out.shape)
    np.testing.assert_array_equal(laid_out, expected)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        *((case, "eager") for case in sorted(PLANE.intersection(ONE_GROUP))),
        ("strided_same", "graph"),
        ("strided_same", "xla"),
    ],
)
def test_gradients_of_patches(case, mode, rng):
    """Linear maps: the gradient is the transpose, and that of the gradient the map."""
    x, _, options = problem(case, rng)

    def transposed(x, other, taken):
        with tf.GradientTape() as second:
            second.watch(taken)
            with tf.GradientTape() as first:
                first.watch(x)
                seen = patches(x, **options)
            gradient = first.gradient(seen, x, output_gradients=taken)
        return gradient, second.gradient(gradient, taken, output_gradients=other)

    x, other = x[:, 0], rng.normal(size=x[:, 0].shape).astype("float32")
    of_other = patches(tf.constant(other), **options).numpy()
    taken = rng.normal(size=of_other.shape).astype("float32")
    gradient, back = in_mode(mode, transposed, x, other, taken)
    np.testing.assert_allclose(
        np.sum(gradient * other, axis=(1, 2, 3)),
        np.sum(of_other * taken, axis=(1, 2, 3)),
        rtol=1e-4,
        atol=1e-4,
    )
    np.testing.assert_allclose(back, of_other, rtol=1e-6)


@pytest.mark.parametrize("case", ["strided_same", "dilated"])
def test_xla_copies_patches_and_multiplies_nothing(case, rng):
    x, _, options = problem(case, rng)
    x = tf.constant(x[:, 0])
    lay_out = tf.function(lambda x: patches(x, **options), jit_compile=True)
    compiled = lay_out.experimental_get_compiler_ir(x)(stage="hlo")
    assert not {"convolution", "dot"}.intersection(compiled.replace("(", " ").split())
    np.testing.assert_array_equal(lay_out(x), patches(x, **options))


@pytest.mark.parametrize(
    ("case", "mode"),
    [*((case, "eager") for case in ONE_GROUP), ("line", "graph"), ("same", "graph")],
)
def test_inner_products_of_patches(case, mode, rng):
    x, g, options = problem(case, rng)
    geometry, kernel = options["geometry"], options["kernel_shape"][:-2]
    seen = [part for _, part in seen_by(x.astype("float64"), kernel, geometry)]
    rows = np.stack(seen, -2).reshape(len(x), math.prod(g.shape[2:-1]), -1)
    actual = in_mode(
        mode,
        lambda x: patch_gram(x, x, positions=g.shape[2:-1], **options),
        x,
    )
    expected = rows @ rows.transpose(0, 2, 1)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
