"""Kernel gradients of single examples, in all ways of computing them."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tfdp.rules import filters
from tfdp.rules.filters import (
    Geometry,
    depthwise_gradients,
    filter_gradient,
    filter_gradients,
    patch_gram,
)


def padding_of(size, kernel, stride, dilation, padding):
    """Zeros before, zeros behind, length of the output."""
    reach = (kernel - 1) * dilation + 1
    if padding == "VALID":
        return 0, 0, (size - reach) // stride + 1
    outputs = math.ceil(size / stride)
    missing = max((outputs - 1) * stride + reach - size, 0)
    return missing // 2, missing - missing // 2, outputs


def seen_by(x, kernel, geometry):
    """What each number of a kernel sees: pairs of its place and ``(..., *spatial, C)``."""
    axes = [
        padding_of(x.shape[2 + i], kernel[i], stride, dilation, geometry.padding)
        for i, (stride, dilation) in enumerate(
            zip(geometry.strides, geometry.dilations, strict=True)
        )
    ]
    x = np.pad(x, [(0, 0), (0, 0), *[axis[:2] for axis in axes], (0, 0)])
    for place in itertools.product(*map(range, kernel)):
        seen = x
        for i, (at, axis) in enumerate(zip(place, axes, strict=True)):
            first, step = at * geometry.dilations[i], geometry.strides[i]
            picked = first + step * np.arange(axis[2])
            seen = np.take(seen, picked, axis=2 + i)
        yield place, seen


def one_by_one(x, g, kernel_shape, geometry):
    """The definition: a sum over rows and positions, kernel entry by kernel entry."""
    *kernel, depth, filters = kernel_shape
    groups = x.shape[-1] // depth
    result = np.zeros((len(x), *kernel_shape))
    for place, seen in seen_by(x, kernel, geometry):
        assert seen.shape[:-1] == g.shape[:-1]
        positions = len(x), math.prod(g.shape[1:-1])
        flat, flat_g = (part.reshape(*positions, part.shape[-1]) for part in (seen, g))
        for group in range(groups):
            own = slice(group * depth, (group + 1) * depth)
            out = slice(group * filters // groups, (group + 1) * filters // groups)
            result[(slice(None), *place, slice(None), out)] = np.einsum(
                "utc,uto->uco", flat[..., own], flat_g[..., out]
            )
    return result


# Spatial axes and channels; kernel; strides; dilations; padding; groups; filters.
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
    "many_channels": ((4, 3, 64), (2, 2), (1, 1), (1, 1), "SAME", 1, 2),
    "whole_image": ((4, 3, 2), (4, 3), (1, 1), (1, 1), "VALID", 1, 5),
    "pointwise": ((4, 3, 5), (1, 1), (1, 1), (1, 1), "SAME", 1, 2),
    "one_row": ((1, 8, 2), (1, 3), (1, 1), (1, 1), "SAME", 1, 2),
    "line": ((8, 2), (3,), (1,), (1,), "SAME", 1, 3),
    "line_strided": ((9, 2), (4,), (3,), (1,), "SAME", 1, 3),
    "line_dilated": ((9, 2), (3,), (1,), (2,), "VALID", 1, 3),
    "line_grouped": ((6, 4), (3,), (2,), (1,), "SAME", 2, 4),
    "box": ((4, 3, 5, 2), (2, 1, 3), (1, 1, 1), (1, 1, 1), "VALID", 1, 3),
    "box_strided": ((4, 3, 5, 2), (2, 2, 3), (2, 1, 2), (1, 1, 1), "SAME", 1, 3),
    "box_dilated": ((4, 3, 5, 2), (2, 2, 2), (1, 1, 1), (2, 1, 2), "VALID", 1, 3),
    "box_grouped": ((3, 3, 2, 4), (2, 2, 2), (1, 1, 1), (1, 1, 1), "SAME", 2, 2),
}

# TensorFlow's own operation knows neither dilations nor groups on a CPU, except
# through XLA.
LIMITED = {name for name, case in CASES.items() if set(case[3]) != {1} or case[5] > 1}
ONE_GROUP = sorted(name for name, case in CASES.items() if case[5] == 1)
PLANE = {name for name, case in CASES.items() if len(case[1]) == 2}


def problem(case, rng, n=3, rows=1):
    image, kernel, strides, dilations, padding, groups, filters = CASES[case]
    outputs = [
        padding_of(image[i], kernel[i], strides[i], dilations[i], padding)[2]
        for i in range(len(kernel))
    ]
    x = rng.normal(size=[n, rows, *image]).astype("float32")
    g = rng.normal(size=[n, rows, *outputs, filters]).astype("float32")
    options = {
        "kernel_shape": (*kernel, image[-1] // groups, filters),
        "geometry": Geometry(strides, dilations, padding),
    }
    return x, g, options


def in_mode(mode, function, *arrays):
    """Call a function of arrays whose leading axis is not known while tracing."""
    if mode == "eager":
        return function(*map(tf.constant, arrays))
    specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in arrays]
    if mode == "xla":
        return tf.function(function, jit_compile=True)(*arrays)
    return tf.function(function, input_signature=specs)(*arrays)


def run(mode, x, g, options):
    return in_mode(mode, lambda x, g: filter_gradients(x, g, **options), x, g)


@pytest.fixture
def no_patches(monkeypatch):
    """Take the ways of large images for small ones."""
    monkeypatch.setattr(filters, "_LARGEST_PATCHES", 0)


def check(mode, case, rng, **sizes):
    x, g, options = problem(case, rng, **sizes)
    actual = run(mode, x, g, options)
    expected = one_by_one(x.astype("float64"), g.astype("float64"), **options)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------- the definition


def convolve(x, kernel, geometry):
    return tf.nn.convolution(
        x, kernel, geometry.strides, geometry.padding, dilations=geometry.dilations
    )


@pytest.mark.parametrize("case", sorted(PLANE - LIMITED))
def test_the_definition_is_what_gradient_tape_gives(case, rng):
    x, g, options = problem(case, rng)
    kernel = tf.zeros(options["kernel_shape"])
    expected = []
    for row, output_gradient in zip(x, g, strict=True):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            y = convolve(row, kernel, options["geometry"])
            value = tf.reduce_sum(y * output_gradient)
        expected.append(tape.gradient(value, kernel))
    actual = one_by_one(x, g, **options)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", sorted(LIMITED))
def test_the_definition_is_what_gradient_tape_gives_under_xla(case, rng):
    x, g, options = problem(case, rng, n=1)

    @tf.function(jit_compile=True)
    def gradient(kernel):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            y = convolve(x[0], kernel, options["geometry"])
            value = tf.reduce_sum(y * g[0])
        return tape.gradient(value, kernel)

    actual = one_by_one(x, g, **options)[0]
    expected = gradient(tf.zeros(options["kernel_shape"]))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------- gradients of kernels


# XLA takes a second or more to compile each.
QUICK = {"strided_same", "grouped", "one_channel_dilated", "line", "box"}
compiled = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in CASES
    ],
)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("case", CASES)
def test_small_images(case, mode, rng):
    check(mode, case, rng)


@compiled
def test_small_images_under_xla(case, rng):
    check("xla", case, rng)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("no_patches")
def test_large_images(case, mode, rng):
    check(mode, case, rng)


@compiled
@pytest.mark.usefixtures("no_patches")
def test_large_images_under_xla(case, rng):
    check("xla", case, rng)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_a_really_large_image_is_not_laid_out_in_patches(mode, rng, monkeypatch):
    monkeypatch.setattr(filters, "patches", None)
    monkeypatch.setitem(
        CASES, "large", ((80, 80, 2), (3, 3), (1, 1), (1, 1), "SAME", 1, 2)
    )
    x, g, options = problem("large", rng, n=2)
    expected = one_by_one(x.astype("float64"), g.astype("float64"), **options)
    # A sum of 6400 products.
    np.testing.assert_allclose(run(mode, x, g, options), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("case", sorted(PLANE.intersection(ONE_GROUP)))
def test_gradients_of_patches(case, rng):
    """Linear maps: the gradient is the transpose, and that of the gradient the map."""
    x, _, options = problem(case, rng)

    def transposed(x, other, taken):
        with tf.GradientTape() as second:
            second.watch(taken)
            with tf.GradientTape() as first:
                first.watch(x)
                seen = filters.patches(x, **options)
            gradient = first.gradient(seen, x, output_gradients=taken)
        return gradient, second.gradient(gradient, taken, output_gradients=other)

    x, other = x[:, 0], rng.normal(size=x[:, 0].shape).astype("float32")
    of_other = filters.patches(tf.constant(other), **options).numpy()
    taken = rng.normal(size=of_other.shape).astype("float32")
    gradient, back = in_mode("graph", transposed, x, other, taken)
    np.testing.assert_allclose(
        np.sum(gradient * other, axis=(1, 2, 3)),
        np.sum(of_other * taken, axis=(1, 2, 3)),
        rtol=1e-4,
        atol=1e-4,
    )
    np.testing.assert_allclose(back, of_other, rtol=1e-6)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("case", ["same", "one_channel", "line", "box", "grouped"])
@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_an_example_are_summed(case, n, rows, is_large, rng, monkeypatch):
    if is_large:
        monkeypatch.setattr(filters, "_LARGEST_PATCHES", 0)
    check("graph", case, rng, n=n, rows=rows)


@pytest.mark.parametrize("case", ["valid", "one_channel", "grouped"])
def test_float64_is_computed_in_float64(case, rng):
    x, g, options = problem(case, rng)
    x, g = x.astype("float64"), g.astype("float64")
    actual = run("graph", x, g, options)
    assert actual.dtype == "float64"
    np.testing.assert_allclose(actual, one_by_one(x, g, **options), rtol=1e-10)


@pytest.mark.parametrize("case", ["same", "one_channel", "grouped"])
def test_a_bad_example_spoils_no_other(case, rng):
    x, g, options = problem(case, rng)
    x[1, 0, 0, 0, 0] = np.nan
    actual = run("graph", x, g, options).numpy()
    assert np.isnan(actual[1]).any()
    assert np.isfinite(actual[[0, 2]]).all()


@pytest.mark.parametrize("case", CASES)
def test_the_ordinary_gradient_is_the_sum_over_all_rows(case, rng):
    x, g, options = problem(case, rng, n=3)
    actual = in_mode(
        "graph", lambda x, g: filter_gradient(x, g, **options), x[:, 0], g[:, 0]
    )
    expected = one_by_one(x.astype("float64"), g.astype("float64"), **options).sum(0)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("case", ["valid", "strided_same", "dilated", "line_strided"])
def test_depthwise_gradients_are_those_of_as_many_groups_as_channels(
    case, multiplier, rng
):
    x, g, options = problem(case, rng)
    *kernel, channels, _ = options["kernel_shape"]
    g = rng.normal(size=[*g.shape[:-1], channels * multiplier]).astype("float32")
    options["kernel_shape"] = (*kernel, channels, multiplier)
    actual = in_mode(
        "graph", lambda x, g: depthwise_gradients(x, g, **options), x[:, 0], g[:, 0]
    )
    options["kernel_shape"] = (*kernel, 1, channels * multiplier)
    expected = one_by_one(x.astype("float64"), g.astype("float64"), **options)
    np.testing.assert_allclose(
        actual, expected.reshape(actual.shape), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("case", ONE_GROUP)
def test_inner_products_of_patches(case, rng):
    x, g, options = problem(case, rng)
    geometry, kernel = options["geometry"], options["kernel_shape"][:-2]
    seen = [part for _, part in seen_by(x.astype("float64"), kernel, geometry)]
    patches = np.stack(seen, -2).reshape(len(x), math.prod(g.shape[2:-1]), -1)
    actual = in_mode(
        "graph",
        lambda x: patch_gram(x, x, positions=g.shape[2:-1], **options),
        x,
    )
    expected = patches @ patches.transpose(0, 2, 1)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
