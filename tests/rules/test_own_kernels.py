"""Convolutions with a kernel of each unit's own, and all that is taken back through them."""

import numpy as np
import pytest
import tensorflow as tf

from tests.convolutions import CASES, in_graph, in_mode, problem, seen_by
from tfdp.rules import own_kernels, patches
from tfdp.rules.own_kernels import convolved


def definition(x, kernels, g, geometry):
    """Return outputs, and gradients of inputs and kernels, entry by entry, in float64."""
    units, rows, *spatial, channels = x.shape
    *size, depth, filters = kernels.shape[1:]
    groups = channels // depth
    # Where each number of the kernel looks; 0 is the padding.
    pixels = np.arange(1, 1 + np.prod(spatial)).reshape(1, 1, *spatial, 1)
    flat = np.zeros((units, rows, 1 + pixels.size, channels))
    flat[:, :, 1:] = x.reshape(units, rows, pixels.size, channels)
    of_flat = np.zeros_like(flat)
    g_flat = g.reshape(units, rows, np.prod(g.shape[2:-1]), filters).astype("float64")
    outputs, of_kernels = np.zeros_like(g_flat), np.zeros(kernels.shape)
    for place, window in seen_by(pixels, size, geometry):
        seen = window.ravel()
        for group in range(groups):
            own = slice(group * depth, (group + 1) * depth)
            out = slice(group * filters // groups, (group + 1) * filters // groups)
            kernel = kernels[(slice(None), *place, slice(None), out)].astype("float64")
            rows_seen, g_out = flat[:, :, seen, own], g_flat[..., out]
            outputs[..., out] += np.einsum("uktc,uco->ukto", rows_seen, kernel)
            back = np.einsum("ukto,uco->uktc", g_out, kernel)
            np.add.at(of_flat[..., own], (slice(None), slice(None), seen), back)
            of_kernels[(slice(None), *place, slice(None), out)] = np.einsum(
                "uktc,ukto->uco", rows_seen, g_out
            )
    return outputs.reshape(g.shape), of_flat[:, :, 1:].reshape(x.shape), of_kernels


def numbers(case, rng, n=3, rows=2):
    x, g, options = problem(case, rng, n, rows)
    kernels = rng.normal(size=[n, *options["kernel_shape"]]).astype("float32")
    return x, kernels, g, options["geometry"]


def run(x, kernels, g, v, geometry):
    """Return outputs, gradients, and the gradients of ``<gradient of inputs, v>``."""
    watched = [x, kernels, g]
    with tf.GradientTape() as outer:
        outer.watch(watched)
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs = convolved(x, kernels, positions=g.shape[2:-1], geometry=geometry)
        gradients = tape.gradient(outputs, [x, kernels], output_gradients=g)
    again = outer.gradient(gradients[0], [g, kernels], output_gradients=v)
    return [outputs, *gradients, *again]


def check(mode, case, rng):
    x, kernels, g, geometry = numbers(case, rng)
    v = rng.normal(size=x.shape).astype("float32")
    found = in_mode(mode, lambda *given: run(*given, geometry), x, kernels, g, v)
    outputs_of_v, _, of_kernels_of_v = definition(v, kernels, g, geometry)
    expected = [*definition(x, kernels, g, geometry), outputs_of_v, of_kernels_of_v]
    for actual, each in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, each, rtol=1e-4, atol=1e-4)


@pytest.fixture
def large(monkeypatch):
    """Take the ways of large images for small ones."""
    monkeypatch.setattr(patches, "_LARGEST_PATCHES", 0)


@pytest.mark.parametrize("case", CASES)
def test_small_images(case, rng):
    check("eager", case, rng)


@pytest.mark.parametrize(
    "case",
    [
        "same",
        "one_channel_valid",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("valid", "strided_same", "stride_beyond_kernel", "dilated")
        ),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("whole_image", "grouped", "line", "line_strided", "box")
        ),
    ],
)
@pytest.mark.usefixtures("large")
def test_large_images(case, rng):
    check("graph", case, rng)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["same", "strided", "line", "grouped"])
@pytest.mark.usefixtures("large")
def test_large_images_under_xla(case, rng):
    check("xla", case, rng)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("case", ["same", "grouped"])
def test_one_graph_takes_any_number_of_units(case, rng):
    x, kernels, g, geometry = numbers(case, rng, n=4)
    traced = in_graph(lambda x, k, g: run(x, k, g, x, geometry), x, kernels, g)
    for n in (0, 1, 4):
        outputs, of_inputs, *_ = traced(x[:n], kernels[:n], g[:n])
        expected = definition(x[:n], kernels[:n], g[:n], geometry)
        np.testing.assert_allclose(outputs, expected[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(of_inputs, expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_large", [False, True])
def test_gradients_begin_with_no_zeros_and_keep_no_steps(is_large, rng, monkeypatch):
    if is_large:
        monkeypatch.setattr(patches, "_LARGEST_PATCHES", 0)
    x, kernels, g, geometry = numbers("same", rng)
    traced = in_graph(lambda x, k, g: run(x, k, g, x, geometry)[1], x, kernels, g)
    operations = traced.get_concrete_function().graph.get_operations()
    kinds = {op.type for op in operations}
    assert not kinds & {"StridedSliceGrad", "TensorListPushBack", "EmptyTensorList"}
    assert ("StatelessWhile" in kinds) == is_large


def test_the_ways_are_chosen_by_size(rng, monkeypatch):
    monkeypatch.setattr(own_kernels, "_by_windows", None)
    monkeypatch.setitem(
        CASES, "large", ((80, 80, 2), (3, 3), (1, 1), (1, 1), "SAME", 1, 2)
    )
    x, kernels, g, geometry = numbers("large", rng, n=2, rows=1)
    found = convolved(
        tf.constant(x), tf.constant(kernels), positions=[80, 80], geometry=geometry
    )
    expected, *_ = definition(x, kernels, g, geometry)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
