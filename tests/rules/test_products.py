"""Norms from inner products are never below the truth, whatever cancels."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

from tfdp.rules import products
from tfdp.rules.products import dots, inner_products, roundoff, squares_from_grams

# What an adversary, or an image of one colour, can make of a row's numbers.
KINDS = ("normal", "constant", "common", "steps")


def draw(rng, kind, rows, size):
    """Rows that are random, of one number each, alike, or of two numbers."""
    scales = rng.uniform(0.3, 1, (rows, 1)) * rng.choice([-1, 1], (rows, 1))
    if kind == "normal":
        return rng.normal(size=(rows, size))
    if kind == "constant":
        return np.broadcast_to(scales, (rows, size))
    if kind == "common":
        return scales * rng.normal(size=size) + 1e-4 * rng.normal(size=(rows, size))
    return np.where(np.arange(size) % 2 == 0, scales, 1 / scales)


def factors(seed, positions, d, p, kind, noise):
    """Rows a and g whose outer products add up to nearly zero."""
    rng = np.random.default_rng(seed)
    a, g = draw(rng, kind, positions, d), draw(rng, "constant", positions, p)
    # The last row of g makes up for all others, where those of a are alike.
    others = np.sum(a[:-1, :1] * g[:-1], axis=0) / a[-1, 0]
    g = np.concatenate([g[:-1], -others[None]]) if positions > 1 else g
    g = g * (1 + 10.0**noise * rng.normal(size=(positions, 1)))
    return a.astype("float32"), g.astype("float32")


def bound(a, g):
    error = 8 * 2**-24 + roundoff(a.shape[-1], a.dtype) + roundoff(g.shape[-1], g.dtype)
    return squares_from_grams(inner_products(a, a), inner_products(g, g), error=error)


def compare(a, g, bound=bound):
    """The bound, the truth, and the truth if nothing cancelled."""
    squares = float(bound(tf.constant(a[None]), tf.constant(g[None]))[0])
    a, g = a.astype("float64"), g.astype("float64")
    lengths = np.linalg.norm(a, axis=1) @ np.linalg.norm(g, axis=1)
    return squares, np.sum(np.square(a.T @ g)), lengths**2


sizes = st.integers(1, 700)


@given(
    st.integers(0, 2**32),
    st.integers(1, 40),
    sizes,
    sizes,
    st.sampled_from(KINDS),
    st.floats(-7, 0),
)
@example(0, 2, 4096, 1, "constant", -2.7)
@example(1, 2, 4096, 512, "constant", -2.5)
@example(2, 196, 1, 512, "constant", -2.5)
@example(3, 700, 8, 8, "constant", 0.0)
def test_cancelling_sums_are_not_below_the_truth(seed, positions, d, p, kind, noise):
    a, g = factors(seed, positions, d, p, kind, noise)
    squares, truth, without_signs = compare(a, g)
    assert squares >= truth
    assert squares <= truth * (1 + 1e-3) + 5e-5 * without_signs


@pytest.mark.parametrize(
    ("size", "jit_compile"),
    [(64, True), (600, False), pytest.param(4096, True, marks=pytest.mark.slow)],
)
def test_neither_are_they_in_graphs(size, jit_compile):
    in_graph = tf.function(bound, jit_compile=jit_compile)
    for seed in range(30):
        a, g = factors(seed, 2, size, 3, "constant", -3 + seed / 15)
        squares, truth, _ = compare(a, g, in_graph)
        assert squares >= truth


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_inner_products_in_parts(size, rng):
    a, b = rng.normal(size=(2, 3, size)), rng.normal(size=(2, 4, size))
    np.testing.assert_allclose(
        inner_products(tf.constant(a), tf.constant(b)), a @ b.transpose(0, 2, 1)
    )


@pytest.mark.parametrize("size", [700, 4096])
def test_they_are_one_product_where_hardware_rounds_more(size, monkeypatch):
    monkeypatch.setattr(products, "matmul_roundoff", lambda dtype: 2.0**-11)
    a = tf.ones([1, 2, size])
    traced = tf.function(inner_products).get_concrete_function(a, a)
    kinds = [operation.type for operation in traced.graph.get_operations()]
    assert kinds.count("BatchMatMul") == 1
    # Of the sum as a whole, beside what the factors lose.
    of_sum = roundoff(size, tf.float32) - 2 * 2.0**-11
    assert size / 4 * 2.0**-24 <= of_sum < 2.0**-11


@pytest.mark.parametrize(
    ("size", "jit_compile"),
    [
        (1, False),
        (64, True),
        (256, False),
        (700, True),
        (4096, False),
        pytest.param(4096, True, marks=pytest.mark.slow),
    ],
)
def test_alike_numbers_round_by_no_more_than_is_said(size, jit_compile):
    @tf.function(jit_compile=jit_compile)
    def product(a):
        return inner_products(a, a)

    rng = np.random.default_rng(size)
    for rows in (2, 64):
        a = draw(rng, "constant", rows, size).astype("float32")[None]
        wide = a.astype("float64")
        lengths = np.linalg.norm(wide, axis=2)
        error = product(tf.constant(a)) - wide @ wide.transpose(0, 2, 1)
        bound = roundoff(size, tf.float32) + 2**-23
        limit = bound * lengths[:, :, None] * lengths[:, None, :]
        assert np.all(np.abs(error) <= limit)


def test_factors_too_small_to_square_do_not_shorten_a_norm():
    # The squares of `g` vanish in float32; beside `a` its numbers do not.
    a, g = tf.fill([1, 4, 64], 2e18), tf.fill([1, 4, 256], 2e-20)
    true = np.linalg.norm(np.full((64, 256), 4 * 2e18 * 2e-20))
    squares = squares_from_grams(inner_products(a, a), inner_products(g, g), error=0.0)
    assert np.sqrt(squares[0]) >= true


def test_products_too_small_for_the_dtype_do_not_shorten_a_norm():
    # Both Gram matrices are there; their products vanish in float32.
    a = tf.fill([1, 30, 4], 1e-10)
    true = np.linalg.norm(np.full((4, 4), 30 * 1e-20))
    gram = inner_products(a, a)
    assert np.sqrt(squares_from_grams(gram, gram, error=0.0)[0]) >= true


@pytest.mark.parametrize("shape", [(4,), (2, 5), (0,), (2, None), (None, 0)], ids=str)
def test_products_of_each_unit_are_added_up(shape, rng):
    known = [4 if length is None else length for length in shape]
    a, b = (rng.normal(size=(3, *known)).astype("float32") for _ in range(2))
    signature = [tf.TensorSpec((None, *shape))] * 2
    found = tf.function(dots, input_signature=signature)(a, b)
    np.testing.assert_allclose(found, np.sum((a * b).reshape(3, -1), 1), rtol=1e-5)
