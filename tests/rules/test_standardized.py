"""Gradients of standardised kernels: projected factors equal projected gradients."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tfdp
from tests.engine_checks import clipped
from tests.problems import precision
from tests.reference import assert_all_close, clipped_sum, per_example_gradients
from tests.rules.terms.test_terms import SEEDS, check, convolution, outer
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.engines.vectorized import VectorizedEngine
from tfdp.layers import WSConv2D
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective
from tfdp.rules.terms import Kept, Standardized, Units

TERMS = ["outer", "same", "strided", "dilated", "grouped"]


def standardized(rng, name, units=3, dtype="float32", divided=True):
    """A term, and its gradients in float64."""
    if name == "outer":
        products, full = outer(rng, units, 4, 6, 5, dtype=dtype)
    else:
        products, full = convolution(rng, name, units, dtype=dtype)
    shape = products.variable.shape
    columns = shape[-1]
    kernel = rng.normal(size=shape)
    kernel -= kernel.mean(tuple(range(len(shape) - 1)))
    kernel = kernel.astype(dtype)
    flat = kernel.reshape(-1, columns).astype("float64")
    full = full.reshape(units, -1, columns)
    along = np.einsum("ko,uko->uo", flat, full)
    taken = along / np.sum(flat**2, 0) if divided else rng.normal(size=along.shape)
    truth = full - full.mean(1, keepdims=True) - flat * taken[:, None]
    numbers = (tf.constant(each.astype(dtype)) for each in (along, taken))
    term = Standardized(products, tf.constant(kernel), *numbers)
    return term, truth.reshape(units, -1)


@pytest.mark.parametrize(
    ("name", "divided"),
    [*((name, True) for name in TERMS), ("outer", False), ("grouped", False)],
)
def test_gradients_are_projected(name, divided, rng):
    term, truth = standardized(rng, name, divided=divided)
    check(term, truth, Units(3, 1), can_gram=name != "grouped")


@settings(max_examples=10)
@example(0, -7.0)
@example(1, -3.5)
@given(SEEDS, st.floats(-7, 0))
def test_norms_are_bounded_where_all_but_nothing_is_left(seed, exponent):
    """Factors along the kernel, whose product the projection takes away."""
    rng = np.random.default_rng(seed)
    term, _ = standardized(rng, "outer")
    units, tiny = Units(3, 1), 10.0**exponent
    ((a, g),) = term.products.pairs
    column = term.kernel[:, :1]
    a = tf.transpose(column)[None] + tiny * a
    g = tf.concat([g[..., :1], tf.zeros_like(g[..., 1:])], -1)
    full = np.einsum("utd,utp->udp", a, g)
    along = np.einsum("ko,uko->uo", term.kernel, full).astype("float32")
    taken = along / np.sum(np.square(term.kernel), 0)
    term.products.pairs = [(a, g)]
    term.uses = [(tf.constant(along), tf.constant(taken))]
    for unit in range(3):
        alone = np.eye(3)[unit]
        total = term.weighted_sum(term.factors(units), tf.constant(alone))
        norm = np.linalg.norm(np.asarray(total, "float64"))
        assert np.sqrt(term.squares_by_gram(units)[unit]) >= norm
        assert np.sqrt(term.squares_of_dropped(units)[unit]) >= norm


@pytest.mark.parametrize("name", TERMS)
def test_products_of_gradients(name, rng):
    units = Units(3, 1)
    one, _ = standardized(rng, name, dtype="float64", divided=False)
    other, _ = standardized(rng, name, dtype="float64", divided=False)
    other = with_kernel_of(other, one)
    columns = one.variable.shape[-1]
    kernel = np.reshape(one.kernel, (-1, columns))
    expected = np.sum(one.instantiate(units) * other.instantiate(units), 1)
    for each in (other, Kept(other.variable, other.instantiate(units))):
        np.testing.assert_allclose(one.inner_products(each, units), expected)
    by_column = np.reshape(one.instantiate(units), (3, -1, columns))
    np.testing.assert_allclose(one.column_squares(units), np.sum(by_column**2, 1))
    np.testing.assert_allclose(
        one.column_products(units), np.sum(by_column * kernel, 1)
    )
    factors = rng.normal(size=(3, columns))
    scaled = one.by_column(tf.constant(factors), units)
    expected = by_column * factors[:, None]
    np.testing.assert_allclose(scaled.instantiate(units), expected.reshape(3, -1))
    kept = Kept(one.variable, one.instantiate(units)).by_column(
        tf.constant(factors), units
    )
    np.testing.assert_allclose(kept.gradients, expected.reshape(3, -1))


def with_kernel_of(term, other):
    """The same products and numbers taken, of the kernel of another term."""
    columns = term.variable.shape[-1]
    full = np.reshape(term.products.instantiate(Units(3, 1)), (3, -1, columns))
    along = np.einsum("ko,uko->uo", np.reshape(other.kernel, (-1, columns)), full)
    ((_, taken),) = term.uses
    along = tf.constant(along.astype(taken.dtype.name))
    return Standardized(term.products, other.kernel, along, taken)


def test_all_uses_are_one_sum(rng):
    units = Units(3, 1)
    one, truth = standardized(rng, "same")
    other = with_kernel_of(standardized(rng, "same")[0], one)
    check(one.merged(other), truth + other.instantiate(units).numpy(), units)
    matrix, _ = outer(rng, 3, 2, 3, 3)
    assert one.merged(matrix) is None
    assert one.merged(standardized(rng, "strided")[0]) is None


def test_moving_a_term_moves_its_gradients(rng):
    units = Units(3, 1)
    term, _ = standardized(rng, "same", dtype="float64")
    derivatives = {id(t): tf.constant(rng.normal(size=t.shape)) for t in term.tensors()}
    moved = term.moved(
        lambda t: derivatives[id(t)], tf.constant(0.1, tf.float64)
    ).instantiate(units)

    def at(step):
        other = copy.copy(term)
        other.products = copy.copy(term.products)
        other.products.calls = [
            tuple(t + step * derivatives[id(t)] for t in call)
            for call in term.products.calls
        ]
        other.uses = [
            tuple(t + step * derivatives[id(t)] for t in use) for use in term.uses
        ]
        return other.instantiate(units)

    slope = (at(1e-6) - at(-1e-6)) / 2e-6
    np.testing.assert_allclose(
        moved, term.instantiate(units) + 0.1 * slope, rtol=1e-6, atol=1e-6
    )


@pytest.mark.slow
def test_lora_is_followed_to_where_its_kernel_meets_the_rows(rng):
    with precision("float64"):
        model = keras.Sequential([keras.Input((4, 4, 2)), WSConv2D(3, 3)])
        model.add(keras.layers.GlobalAveragePooling2D())
        model.layers[0].enable_lora(2)
        for variable in model.trainable_variables:
            variable.assign(rng.normal(size=variable.shape))
        x, y = rng.normal(size=(4, 4, 4, 2)), rng.normal(size=(4, 3))
        gradients = per_example_gradients(model, keras.losses.get("mse"), x, y)
        clip = float(np.median(clipped_sum(gradients, 1.0)[1]))
        expected, norms = clipped_sum(gradients, clip)
        found = tfdp.clipped_gradients(
            model, "mse", x, y, l2_norm_clip=clip, engine="bookkeeping"
        )
    np.testing.assert_allclose(found.norms, norms, rtol=1e-6)
    assert_all_close(found.gradients, expected, rtol=0, atol=1e-6 * clip)


def network(*layers, shape):
    model = keras.Sequential([keras.Input(shape), *layers])
    for variable in model.trainable_variables:
        value = np.random.default_rng(0).normal(size=variable.shape)
        variable.assign(value)
    return model


@pytest.mark.parametrize(
    ("mean", "engine"), [(1.0, GhostEngine()), (1e3, BookkeepingEngine())], ids=repr
)
def test_no_example_exceeds_the_clip_norm_where_kernels_have_a_mean(mean, engine, rng):
    """Inputs along the kernel, in which next to nothing is left of the gradient."""
    model = network(
        WSConv2D(64, 3, use_bias=False), keras.layers.Flatten(), shape=(3, 3, 64)
    )
    layer = model.layers[0]
    layer.gain.trainable = False
    spread = 5e-4 if mean == 1 else 0.02
    layer.kernel.assign(mean + spread * rng.normal(size=layer.kernel.shape))
    full = layer.kernel.numpy().astype("float64")
    full -= full.mean((0, 1, 2))
    # The column of which rounding leaves the largest mean.
    once = layer.kernel.value - tf.reduce_mean(layer.kernel.value, [0, 1, 2])
    column = np.argmax(np.abs(np.mean(once, (0, 1, 2), dtype="float64")))
    along = full[..., column] / np.sqrt(np.mean(full[..., column] ** 2))
    clip, objective = tf.constant(1e-3), Objective.of(model, "mse")
    for power in range(4):
        noise = 1e-2 * 10.0**-power * rng.normal(size=(3, 3, 64))
        x = (1 + 0.3 * along + noise).astype("float32")[None]
        y = np.zeros((1, 64), "float32")
        y[:, column] = -5e3
        sums, _, _ = tf.function(engine.clip_and_sum, autograph=False)(
            objective,
            Batch(tf.constant(x), tf.constant(y), None, tf.constant([False])),
            l2_norm_clip=clip,
            rows_per_unit=1,
        )
        squares = [np.sum(np.square(np.asarray(each, "float64"))) for each in sums]
        assert np.sqrt(sum(squares)) <= 1e-3 * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ascent", ["sam", "exact"])
def test_bam_through_time_distributed(ascent, rng):
    shape = (3, 4, 4, 2)
    model = network(
        keras.layers.TimeDistributed(WSConv2D(3, 3)),
        keras.layers.GlobalAveragePooling3D(),
        shape=shape,
    )
    loss = tfdp.losses.BAM("mse", radius=0.3, ascent=ascent)
    x, y = rng.normal(size=(4, *shape)), rng.normal(size=(4, 3))
    one, other = (
        tfdp.clipped_gradients(model, loss, x, y, l2_norm_clip=0.1, engine=engine)
        for engine in ("bookkeeping", "vectorized")
    )
    np.testing.assert_allclose(one.norms, other.norms, rtol=1e-3)
    for left, right in zip(one.gradients, other.gradients, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_float16_does_not_overflow_where_the_layer_does_not(rng):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network(WSConv2D(8, 3), shape=(5, 5, 16))
    finally:
        keras.config.set_dtype_policy("float32")
    layer = model.layers[0]
    layer.kernel.assign(layer.kernel.value * 1000)
    x, y = rng.normal(size=(4, 5, 5, 16)), rng.normal(size=(4, 3, 3, 8))
    objective = Objective.of(model, "mse")
    (_, norms), (_, expected) = (
        clipped(engine, objective, x.astype("float32"), y.astype("float32"), 1.0)
        for engine in (BookkeepingEngine(), VectorizedEngine())
    )
    np.testing.assert_allclose(norms, expected, rtol=0.05)
