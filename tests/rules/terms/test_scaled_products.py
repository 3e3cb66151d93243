"""Terms whose matrix is scaled number by number."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.rules.terms import Kept, ScaledProducts, Units

D, P = 3, 2


class Variable:
    shape = (D, P)
    path = "kernel"


def term(rng, rows, between, views, dtype="float64"):
    a = rng.normal(size=(rows, *between, D)).astype(dtype)
    g = rng.normal(size=(rows, *between, P)).astype(dtype)
    scale = rng.normal(size=(views, D, P)).astype(dtype)
    return ScaledProducts(Variable(), *map(tf.constant, (a, g, scale)))


def gradients(term, units):
    """One row after the other."""
    a, g, scale = (tensor.numpy() for tensor in term.read())
    rows = [
        scale[row % len(scale)] * np.tensordot(a[row], g[row], (axes := [*range(a.ndim - 2)], axes))
        if a.ndim > 2
        else scale[row % len(scale)] * np.outer(a[row], g[row])
        for row in range(len(a))
    ]  # fmt: skip
    return np.reshape(rows, (units, -1, D * P)).sum(1)


CASES = [
    (4, 1, (), 1),
    (2, 2, (), 1),
    (2, 3, (), 3),
    (4, 1, (), 4),
    (2, 2, (5,), 2),
    (3, 1, (2, 2), 1),
]


@pytest.mark.parametrize(("units", "rows", "between", "views"), CASES)
def test_norms_and_sums_are_those_of_single_rows(rng, units, rows, between, views):
    scaled = term(rng, units * rows, between, views)
    expected = gradients(scaled, units)
    grouped = Units(units, rows)
    np.testing.assert_allclose(scaled.instantiate(grouped), expected)
    squares = np.square(expected).sum(1)
    how = scaled.how("auto", grouped)
    assert (how == "gram") == (rows == 1 and not between)
    found = scaled.squares_of_dropped(grouped)
    if how == "gram":
        found = scaled.squares_by_gram(grouped)
    np.testing.assert_allclose(found, squares, rtol=1e-9)
    assert np.all(found.numpy() >= squares * (1 - 1e-15))
    weights = rng.uniform(size=units)
    total = scaled.weighted_sum(scaled.factors(grouped), tf.constant(weights))
    np.testing.assert_allclose(np.ravel(total), weights @ expected)


def test_squares_of_very_different_numbers(rng):
    """In float32 the square of the inputs would be zero, that of the others infinite."""
    scaled = term(rng, 4, (), 1, "float32")
    scaled.a *= 1e-30
    scaled.g *= 1e30
    expected = np.square(gradients(scaled, 4).astype("float64")).sum(1)
    found = scaled.squares_by_gram(Units(4, 1))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.all(found.numpy() >= expected)


def test_products_with_other_terms(rng):
    units = Units(2, 2)
    term_ = term(rng, 4, (), 1)
    scaled = term_.movable(units)
    expected = gradients(term_, 2)
    other = rng.normal(size=(2, D * P))
    found = scaled.inner_products(Kept(Variable(), tf.constant(other)), units)
    np.testing.assert_allclose(found, np.sum(expected * other, 1))
    factors = rng.normal(size=(2, P))
    found = scaled.by_column(tf.constant(factors), units).instantiate(units)
    expected = (expected.reshape(2, D, P) * factors[:, None]).reshape(2, -1)
    np.testing.assert_allclose(found, expected)
