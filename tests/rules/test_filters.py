"""Kernel gradients of single examples, in all ways of computing them."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.convolutions import (
    CASES,
    LIMITED,
    ONE_GROUP,
    PLANE,
    in_graph,
    in_mode,
    problem,
    seen_by,
)
from tfdp.rules import patches
from tfdp.rules.filters import depthwise_gradients, filter_gradient, filter_gradients


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


def run(mode, x, g, options):
    return in_mode(mode, lambda x, g: filter_gradients(x, g, **options), x, g)


@pytest.fixture
def no_patches(monkeypatch):
    """Take the ways of large images for small ones."""
    monkeypatch.setattr(patches, "_LARGEST_PATCHES", 0)


def compare(actual, x, g, options):
    expected = one_by_one(x.astype("float64"), g.astype("float64"), **options)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def check(mode, case, rng):
    x, g, options = problem(case, rng)
    compare(run(mode, x, g, options), x, g, options)


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
def compiled(cases, quick):
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, marks=[] if case in quick else [pytest.mark.slow])
            for case in cases
        ],
    )


# Others are computed in one way, however large they are.
TWO_WAYS = [case for case in ONE_GROUP if not case.startswith("box")]


@pytest.mark.parametrize("case", CASES)
def test_small_images(case, rng):
    check("eager", case, rng)


@compiled(CASES, quick=())
def test_small_images_under_xla(case, rng):
    check("xla", case, rng)


@pytest.mark.parametrize("case", TWO_WAYS)
@pytest.mark.usefixtures("no_patches")
def test_large_images(case, rng):
    check("eager", case, rng)


@pytest.mark.slow
@compiled(TWO_WAYS, quick={"strided_same"})
@pytest.mark.usefixtures("no_patches")
def test_large_images_under_xla(case, rng):
    check("xla", case, rng)


@pytest.mark.parametrize(
    "mode", ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]
)
def test_a_really_large_image_is_not_laid_out_in_patches(mode, rng, monkeypatch):
    monkeypatch.setattr("tfdp.rules.filters.patches", None)
    monkeypatch.setitem(
        CASES, "large", ((80, 80, 2), (3, 3), (1, 1), (1, 1), "SAME", 1, 2)
    )
    x, g, options = problem("large", rng, n=2)
    expected = one_by_one(x.astype("float64"), g.astype("float64"), **options)
    # A sum of 6400 products.
    np.testing.assert_allclose(run(mode, x, g, options), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        "same",
        "strided",
        "one_channel",
        "line",
        "box",
        "grouped",
        "depthwise",
        "depthwise_many_positions",
    ],
)
def test_one_graph_takes_any_number_of_examples(case, is_large, rng, monkeypatch):
    if is_large:
        monkeypatch.setattr(patches, "_LARGEST_PATCHES", 0)
    x, g, options = problem(case, rng, n=4, rows=3)
    traced = in_graph(lambda x, g: filter_gradients(x, g, **options), x, g)
    for n in (0, 1, 4):
        compare(traced(x[:n], g[:n]), x[:n], g[:n], options)


@pytest.mark.parametrize("case", ["valid", "one_channel", "grouped"])
def test_float64_is_computed_in_float64(case, rng):
    x, g, options = problem(case, rng)
    x, g = x.astype("float64"), g.astype("float64")
    actual = run("graph", x, g, options)
    assert actual.dtype == "float64"
    np.testing.assert_allclose(actual, one_by_one(x, g, **options), rtol=1e-10)


@pytest.mark.parametrize("case", ["same", "one_channel", "grouped", "depthwise"])
def test_a_bad_example_spoils_no_other(case, rng):
    x, g, options = problem(case, rng)
    x[1, 0, 0, 0, 0] = np.nan
    actual = run("graph", x, g, options).numpy()
    assert np.isnan(actual[1]).any()
    assert np.isfinite(actual[[0, 2]]).all()


@pytest.mark.parametrize("case", CASES)
def test_the_ordinary_gradient_is_the_sum_over_all_rows(case, rng):
    x, g, options = problem(case, rng, n=3)
    actual = filter_gradient(tf.constant(x[:, 0]), tf.constant(g[:, 0]), **options)
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
    actual = depthwise_gradients(tf.constant(x), tf.constant(g), **options)
    options["kernel_shape"] = (*kernel, 1, channels * multiplier)
    expected = one_by_one(x.astype("float64"), g.astype("float64"), **options)
    np.testing.assert_allclose(
        actual, expected.reshape(actual.shape), rtol=1e-4, atol=1e-4
    )
