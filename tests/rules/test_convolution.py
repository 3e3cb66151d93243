"""Filter gradients of single examples, in both ways of computing them."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tfdp.rules import convolution
from tfdp.rules.convolution import filter_gradients


def padding_of(size, kernel, stride, dilation, padding):
    """Rows added before, rows added behind, rows of the output."""
    reach = (kernel - 1) * dilation + 1
    if padding == "VALID":
        return 0, 0, (size - reach) // stride + 1
    outputs = math.ceil(size / stride)
    missing = max((outputs - 1) * stride + reach - size, 0)
    return missing // 2, missing - missing // 2, outputs


def one_by_one(x, g, kernel_shape, strides, dilations, padding):
    """The definition: a sum over rows and positions, kernel entry by kernel entry."""
    height, width, depth, filters = kernel_shape
    groups = x.shape[-1] // depth
    (top, bottom, rows), (left, right, columns) = (
        padding_of(x.shape[2 + i], kernel_shape[i], strides[i], dilations[i], padding)
        for i in range(2)
    )
    assert g.shape[2:4] == (rows, columns)
    x = np.pad(x, [(0, 0), (0, 0), (top, bottom), (left, right), (0, 0)])
    result = np.zeros((len(x), *kernel_shape))
    for i, j in itertools.product(range(height), range(width)):
        seen = x[
            :,
            :,
            i * dilations[0] :: strides[0],
            j * dilations[1] :: strides[1],
        ][:, :, :rows, :columns]
        for group in range(groups):
            own = slice(group * depth, (group + 1) * depth)
            out = slice(group * filters // groups, (group + 1) * filters // groups)
            result[:, i, j, :, out] = np.einsum(
                "nuhwc,nuhwo->nco", seen[..., own], g[..., out]
            )
    return result


# Rows, columns, channels; kernel; strides; dilations; padding; groups; filters.
CASES = {
    "valid": ((6, 5, 2), (3, 2), (1, 1), (1, 1), "VALID", 1, 4),
    "same": ((6, 5, 2), (3, 2), (1, 1), (1, 1), "SAME", 1, 4),
    "strided": ((7, 6, 2), (3, 3), (2, 2), (1, 1), "VALID", 1, 3),
    "strided_same": ((7, 6, 2), (3, 3), (2, 2), (1, 1), "SAME", 1, 3),
    "stride_beyond_kernel": ((8, 8, 2), (2, 1), (3, 3), (1, 1), "SAME", 1, 2),
    "dilated": ((7, 9, 2), (3, 3), (1, 1), (2, 2), "VALID", 1, 3),
    "dilated_same": ((7, 9, 2), (3, 2), (1, 1), (2, 2), "SAME", 1, 3),
    "grouped": ((5, 5, 4), (2, 2), (1, 1), (1, 1), "VALID", 2, 6),
    "depthwise": ((5, 4, 3), (3, 3), (1, 1), (1, 1), "SAME", 3, 6),
    "grouped_strided": ((6, 7, 4), (3, 2), (2, 2), (1, 1), "SAME", 2, 4),
    "one_channel": ((6, 5, 1), (3, 2), (1, 1), (1, 1), "SAME", 1, 4),
    "one_channel_strided": ((7, 8, 1), (4, 4), (2, 2), (1, 1), "SAME", 1, 3),
    "one_channel_valid": ((7, 8, 1), (2, 3), (2, 2), (1, 1), "VALID", 1, 3),
    "one_channel_dilated": ((9, 8, 1), (3, 2), (1, 1), (2, 2), "VALID", 1, 3),
    "one_channel_large_kernel": ((13, 13, 1), (12, 12), (1, 1), (1, 1), "SAME", 1, 2),
    "whole_image": ((4, 3, 2), (4, 3), (1, 1), (1, 1), "VALID", 1, 5),
    "pointwise": ((4, 3, 5), (1, 1), (1, 1), (1, 1), "SAME", 1, 2),
    "one_row": ((1, 8, 2), (1, 3), (1, 1), (1, 1), "SAME", 1, 2),
}

# TensorFlow's own operation knows neither dilations nor groups on a CPU, except
# through XLA.
LIMITED = {name for name, case in CASES.items() if case[3] != (1, 1) or case[5] > 1}


def problem(case, rng, n=3, rows=1):
    image, kernel, strides, dilations, padding, groups, filters = CASES[case]
    outputs = [
        padding_of(image[i], kernel[i], strides[i], dilations[i], padding)[2]
        for i in range(2)
    ]
    x = rng.normal(size=[n, rows, *image]).astype("float32")
    g = rng.normal(size=[n, rows, *outputs, filters]).astype("float32")
    options = {
        "kernel_shape": (*kernel, image[2] // groups, filters),
        "strides": strides,
        "dilations": dilations,
        "padding": padding,
    }
    return x, g, options


def run(mode, x, g, options):
    def compute(x, g):
        return filter_gradients(x, g, **options)

    if mode == "eager":
        return compute(tf.constant(x), tf.constant(g))
    # The number of examples is not known while tracing.
    specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in (x, g)]
    if mode == "xla":
        return tf.function(compute, jit_compile=True)(x, g)
    return tf.function(compute, input_signature=specs)(x, g)


@pytest.fixture
def examples_in_a_loop(monkeypatch):
    """Take the way of large images for small ones."""
    monkeypatch.setattr(convolution, "_LARGEST_PATCHES", 0)


def check(mode, case, rng, **sizes):
    x, g, options = problem(case, rng, **sizes)
    actual = run(mode, x, g, options)
    expected = one_by_one(x.astype("float64"), g.astype("float64"), *options.values())
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", sorted(set(CASES) - LIMITED))
def test_the_definition_is_what_gradient_tape_gives(case, rng):
    x, g, options = problem(case, rng)
    kernel = tf.zeros(options["kernel_shape"])
    expected = []
    for row, output_gradient in zip(x, g, strict=True):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            y = tf.nn.conv2d(row, kernel, options["strides"], options["padding"])
            value = tf.reduce_sum(y * output_gradient)
        expected.append(tape.gradient(value, kernel))
    actual = one_by_one(x, g, *options.values())
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", sorted(LIMITED))
def test_the_definition_is_what_gradient_tape_gives_under_xla(case, rng):
    x, g, options = problem(case, rng, n=1)

    @tf.function(jit_compile=True)
    def gradient(kernel):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            y = tf.nn.conv2d(
                x[0],
                kernel,
                options["strides"],
                options["padding"],
                dilations=options["dilations"],
            )
            value = tf.reduce_sum(y * g[0])
        return tape.gradient(value, kernel)

    actual = one_by_one(x, g, *options.values())[0]
    expected = gradient(tf.zeros(options["kernel_shape"]))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("case", CASES)
def test_small_images(case, mode, rng):
    check(mode, case, rng)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("case", sorted(set(CASES) - LIMITED))
def test_large_images(case, mode, rng, examples_in_a_loop):
    check(mode, case, rng)


@pytest.mark.parametrize("case", CASES)
def test_large_images_under_xla(case, rng, examples_in_a_loop):
    check("xla", case, rng)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_a_really_large_image_takes_the_loop(mode, rng, monkeypatch):
    monkeypatch.setattr(convolution, "_patches", None)
    monkeypatch.setitem(
        CASES, "large", ((80, 80, 2), (3, 3), (1, 1), (1, 1), "SAME", 1, 2)
    )
    x, g, options = problem("large", rng, n=2)
    expected = one_by_one(x.astype("float64"), g.astype("float64"), *options.values())
    # A sum of 6400 products.
    np.testing.assert_allclose(run(mode, x, g, options), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("case", ["same", "one_channel", "strided_same"])
@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_an_example_are_summed(case, n, rows, is_large, rng, monkeypatch):
    if is_large:
        monkeypatch.setattr(convolution, "_LARGEST_PATCHES", 0)
    check("graph", case, rng, n=n, rows=rows)


def test_rows_of_a_grouped_convolution_are_summed(rng):
    check("graph", "grouped", rng, n=2, rows=3)


@pytest.mark.parametrize("case", ["valid", "one_channel", "grouped"])
def test_float64_is_computed_in_float64(case, rng):
    x, g, options = problem(case, rng)
    x, g = x.astype("float64"), g.astype("float64")
    actual = run("graph", x, g, options)
    assert actual.dtype == "float64"
    np.testing.assert_allclose(actual, one_by_one(x, g, *options.values()), rtol=1e-10)


@pytest.mark.parametrize("case", ["same", "one_channel", "grouped"])
def test_a_bad_example_spoils_no_other(case, rng):
    x, g, options = problem(case, rng)
    x[1, 0, 0, 0, 0] = np.nan
    actual = run("graph", x, g, options).numpy()
    assert np.isnan(actual[1]).any()
    assert np.isfinite(actual[[0, 2]]).all()
