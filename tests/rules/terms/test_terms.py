"""What gradients are made of: norms, sums and merging equal the gradients themselves."""

import copy
import types

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.rules.test_filters import CASES, one_by_one, problem
from tfdp.rules.geometry import Geometry
from tfdp.rules.terms import Convolution, Kept, OuterProducts, PerRow, Units

SEEDS = st.integers(0, 2**32)


def variable(*shape):
    return types.SimpleNamespace(shape=shape)


def outer(rng, units, positions, d, p, ids=False, dtype="float32"):
    """A term, and its gradients in float64."""
    a = rng.integers(d, size=(units, positions)) if ids else None
    dense = np.eye(d)[a] if ids else rng.normal(size=(units, positions, d))
    a = a if ids else dense.astype(dtype)
    g = rng.normal(size=(units, positions, p)).astype(dtype)
    dense = dense if ids else a.astype("float64")
    truth = np.einsum("utd,utp->udp", dense, g.astype("float64"))
    term = OuterProducts(variable(d, p), tf.constant(a), tf.constant(g))
    return term, truth.reshape(units, -1)


def convolution(rng, case, units, rows=1, dtype="float32"):
    x, g, options = problem(case, rng, n=units, rows=rows)
    truth = one_by_one(x.astype("float64"), g.astype("float64"), **options)
    term = Convolution(
        variable(*options["kernel_shape"]),
        tf.constant(x.reshape(-1, *x.shape[2:]).astype(dtype)),
        tf.constant(g.reshape(-1, *g.shape[2:]).astype(dtype)),
        options["geometry"],
    )
    return term, truth.reshape(units, -1)


def test_lengths_of_an_open_space_are_of_each_row(rng):
    """Else what a row sees would be multiplied by the gradients of another."""

    @tf.function(
        input_signature=[tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, None, 2])]
    )
    def lengths(x, g):
        geometry = Geometry((1,), (1,), "VALID")
        return Convolution(variable(4, 3, 2), x, g, geometry).lengths(Units(3, 6))

    x, g = rng.normal(size=(6, 9, 3)), rng.normal(size=(6, 6, 2))
    usual = lengths(x, g)
    # In each unit, a row that sees much and has small gradients.
    x[::2] *= 1e6
    g[::2] *= 1e-6
    np.testing.assert_allclose(lengths(x, g), usual, rtol=1e-5)
    norms = [np.linalg.norm(each.reshape(6, -1), axis=1) for each in (x, g)]
    of_rows = 2 * np.prod(norms, axis=0)
    np.testing.assert_allclose(usual, of_rows.reshape(3, 2).sum(1), rtol=1e-5)


def check(term, truth, units, can_gram=True):
    """Compare gradients, norms and a weighted sum with the gradients in float64."""
    scale = max(np.abs(truth).max(initial=0), 1)
    instantiated = term.instantiate(units)
    assert instantiated.shape == truth.shape
    np.testing.assert_allclose(instantiated, truth, rtol=1e-4, atol=1e-5 * scale)
    squares = np.sum(truth**2, axis=1)
    bounds = [term.squares_of_dropped(units)]
    if can_gram:
        bounds.append(term.squares_by_gram(units))
    # Where large numbers cancel, bounds are above by what rounds of the large ones.
    lengths = np.max(term.lengths(units), initial=0)
    atol = 1e-4 * scale**2 + 1e-5 * lengths**2
    for bound in bounds:
        assert bound.dtype == tf.float64
        assert np.all(bound >= squares * (1 - 1e-6))
        np.testing.assert_allclose(bound, squares, rtol=3e-3, atol=atol)
    weights = np.linspace(0, 1, len(truth))
    for part in (term, term.kept(units)):
        total = part.weighted_sum(part.factors(units), tf.constant(weights))
        assert total.shape == term.variable.shape
        np.testing.assert_allclose(
            np.ravel(total), weights @ truth, rtol=1e-4, atol=1e-5 * scale
        )
    unweighted = term.weighted_sum(term.factors(units), None)
    np.testing.assert_allclose(
        np.ravel(unweighted), truth.sum(0), rtol=1e-4, atol=1e-4 * scale
    )


@settings(max_examples=30)
@given(
    SEEDS,
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 30),
    st.integers(1, 30),
    st.booleans(),
)
@example(seed=15, units=1, positions=15, d=1, p=1, ids=False)
def test_outer_products(seed, units, positions, d, p, ids):
    rng = np.random.default_rng(seed)
    term, truth = outer(rng, units, positions, d, p, ids)
    check(term, truth, Units(units, 1))


@pytest.mark.parametrize("case", CASES)
def test_convolutions(case, rng):
    term, truth = convolution(rng, case, 3)
    check(term, truth, Units(3, 1), can_gram=CASES[case][5] == 1)


@pytest.mark.parametrize("case", ["same", "line_strided", "box"])
def test_convolutions_of_several_rows(case, rng):
    term, truth = convolution(rng, case, 2, rows=3)
    check(term, truth, Units(2, 3))
    unknown = Units(2, None)
    assert term.how("gram", unknown) != "gram"
    check(term, truth, unknown, can_gram=False)


def matrices(rng):
    """Terms whose gradients are matrices: factors, ids, and gradients themselves."""
    numbers = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 4, 6))
    a, g = (tf.constant(factor, tf.float64) for factor in numbers)
    ids = tf.constant(rng.integers(0, 5, (3, 4)), tf.int32)
    matrix = variable(5, 6)
    terms = [OuterProducts(matrix, a, g), OuterProducts(matrix, ids, g)]
    kept = terms[0].kept(Units(3, 1))
    return [*terms, kept, terms[0].merged(terms[1])]


def test_inner_products_are_those_of_the_gradients(rng):
    units = Units(3, 1)
    for one in matrices(rng):
        for other in matrices(rng):
            expected = np.sum(one.instantiate(units) * other.instantiate(units), 1)
            np.testing.assert_allclose(
                one.inner_products(other, units), expected, rtol=1e-9
            )


@pytest.mark.parametrize("case", CASES)
def test_inner_products_of_convolutions(case, rng):
    for rows in (1, 2):
        units = Units(3, rows)
        one, _ = convolution(rng, case, 3, rows=rows)
        other, _ = convolution(rng, case, 3, rows=rows)
        expected = np.sum(one.instantiate(units) * other.instantiate(units), 1)
        for each in (other, other.kept(units)):
            np.testing.assert_allclose(
                one.inner_products(each, units), expected, rtol=1e-4, atol=1e-3
            )


def test_products_with_the_gradients_of_units(rng):
    units = Units(3, 1)
    rows, back = rng.normal(size=(3, 2, 5)), rng.normal(size=(3, 2, 6))
    for term in matrices(rng):
        full = np.reshape(term.instantiate(units), (3, 5, 6))
        np.testing.assert_allclose(term.applied(tf.constant(rows), units), rows @ full)
        np.testing.assert_allclose(
            term.applied_back(tf.constant(back), units), back @ full.transpose(0, 2, 1)
        )


def test_scaling_columns_scales_those_of_the_gradients(rng):
    """Of units of one row and of two, with axes between and without."""
    for rows in (1, 2):
        units = Units(4 // rows, rows)
        factors = rng.normal(size=(units.number, 2))
        gradients = rng.normal(size=(4, 5, 3, 2))
        a, g = (tf.constant(rng.normal(size=(4, 5, size))) for size in (3, 2))
        matrix = OuterProducts(variable(3, 2), a, g)
        for term in (
            PerRow(variable(3, 2), tf.constant(gradients)),
            PerRow(variable(3, 2), tf.constant(gradients[:, 0])),
            PerRow(variable(2), tf.constant(gradients)),
            matrix,
            matrix.kept(units),
        ):
            before = term.instantiate(units)
            expected = np.reshape(before, (units.number, -1, 2)) * factors[:, None]
            scaled = term.by_column(tf.constant(factors), units).instantiate(units)
            np.testing.assert_allclose(scaled, np.reshape(expected, before.shape))


def test_moving_a_term_moves_its_gradients(rng):
    """``(a + r da) (x) (g + r dg)`` without what is of second order in r."""
    units, rate = Units(3, 1), tf.constant(0.1, tf.float64)
    for term in matrices(rng):
        derivatives = {
            id(t): tf.constant(rng.normal(size=t.shape)) for t in term.tensors()
        }

        def at(sign, term=term, derivatives=derivatives):
            other = copy.copy(term)
            if isinstance(term, OuterProducts):
                other.pairs = [
                    tuple(
                        t + sign * 1e-6 * derivatives[id(t)]
                        if id(t) in derivatives
                        else t
                        for t in pair
                    )
                    for pair in term.pairs
                ]
            else:
                other.gradients += sign * 1e-6 * derivatives[id(term.gradients)]
            return other.instantiate(units)

        slope = (at(1) - at(-1)) / 2e-6
        moved = term.moved(lambda t, found=derivatives: found[id(t)], rate)
        np.testing.assert_allclose(
            moved.instantiate(units),
            term.instantiate(units) + 0.1 * slope,
            rtol=1e-6,
            atol=1e-6,
        )


@settings(max_examples=20)
@given(SEEDS, st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=2))
def test_all_uses_of_a_matrix_are_one_sum(seed, uses):
    rng = np.random.default_rng(seed)
    terms, truths = zip(
        *[outer(rng, 3, positions, 5, 4, ids) for positions, ids in uses[:4]],
        strict=True,
    )
    merged = terms[0]
    for term in terms[1:]:
        merged = merged.merged(term)
    check(merged, np.sum(truths, axis=0), Units(3, 1))


@settings(max_examples=20)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4))
def test_merging_is_concatenation(seed, first, second):
    rng = np.random.default_rng(seed)
    term, _ = outer(rng, 2, first + second, 4, 3)
    ((a, g),) = term.pairs
    parts = [
        OuterProducts(term.variable, a[:, part], g[:, part])
        for part in (slice(first), slice(first, None))
    ]
    merged, units = parts[0].merged(parts[1]), Units(2, 1)
    for one, other in (
        (merged.squares_by_gram(units), term.squares_by_gram(units)),
        (merged.instantiate(units), term.instantiate(units)),
        (merged.lengths(units), term.lengths(units)),
        (
            merged.weighted_sum(merged.factors(units), None),
            term.weighted_sum(term.factors(units), None),
        ),
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_uses_of_one_kernel_on_images_of_several_sizes(rng):
    first, truth = convolution(rng, "same", 3)
    second, of_second = convolution(rng, "same", 3)
    x, g = (tensor.numpy() for tensor in second.calls[0])
    second.calls = [(tf.constant(x[:, 1:]), tf.constant(g[:, 1:]))]
    cut = {"kernel_shape": first.variable.shape, "geometry": first.geometry}
    of_second = one_by_one(x[:, None, 1:], g[:, None, 1:], **cut).reshape(3, -1)
    merged = first.merged(second)
    check(merged, truth + of_second, Units(3, 1), can_gram=False)
    assert merged.how("gram", Units(3, 1)) == "drop"


def test_what_cannot_be_one_term_is_not_merged(rng):
    matrix, _ = outer(rng, 2, 2, 6, 4)
    turned, _ = outer(rng, 2, 2, 4, 6)
    strided, _ = convolution(rng, "strided", 2)
    plain, _ = convolution(rng, "valid", 2)
    rows = PerRow(variable(4), tf.zeros([2, 4]))
    for one, other in (
        (matrix, turned),
        (matrix, plain),
        (plain, strided),
        (plain, matrix),
        (rows, rows),
    ):
        assert one.merged(other) is None


@pytest.mark.parametrize("rows", [1, 2, None])
def test_rows_are_summed_to_units(rows, rng):
    gradients = rng.normal(size=(4, 5, 3, 2)).astype("float32")
    units = Units(4 // (rows or 2), rows)
    of_units = gradients.reshape(units.number, -1, 6).astype("float64").sum(1)
    term = PerRow(variable(3, 2), tf.constant(gradients))
    check(term, of_units, units)
    term, truth = outer(rng, 4, 3, 5, 2)
    of_units = truth.reshape(units.number, -1, 10).sum(1)
    check(term, of_units, units)


def test_half_precision_is_summed_in_float32(rng):
    term, _ = outer(rng, 3, 4, 5, 2, dtype="float16")
    units = Units(3, 1)
    results = [
        term.instantiate(units),
        term.weighted_sum(term.factors(units), tf.ones([3])),
        PerRow(variable(2), term.pairs[0][1]).instantiate(units),
    ]
    assert all(result.dtype == tf.float32 for result in results)


# ------------------------------------------------------------------ ways to the norm


def test_ways_to_the_norm_of_a_matrix(rng):
    units = Units(2, 1)
    few, _ = outer(rng, 2, 3, 40, 30)
    many, _ = outer(rng, 2, 50, 4, 5)
    one, _ = outer(rng, 2, 1, 4, 5)
    ids, _ = outer(rng, 2, 50, 4, 5, ids=True)
    ways = {
        (few, "auto"): ("gram", 2 * 3 * 3),
        (few, "gram"): ("gram", 18),
        (few, "instantiate"): ("drop", 1200),
        (many, "auto"): ("keep", 20),
        (many, "gram"): ("gram", 5000),
        (one, "auto"): ("gram", 1),
        (ids, "auto"): ("drop", 50 * 5),
        (ids, "instantiate"): ("drop", 50 * 5),
        (ids, "gram"): ("drop", 50 * 5),
    }
    for (term, norms), (way, numbers) in ways.items():
        assert term.how(norms, units) == way
        assert term.numbers(way, units) == numbers
    # Where nothing is known of the number of positions.
    assert few.numbers("gram", Units(2, None)) is None
    assert few.how("auto", Units(2, None)) == "keep"
    assert ids.how("auto", Units(2, None)) == "drop"
    assert ids.numbers("drop", Units(2, None)) is None
    assert Kept(variable(3, 4), tf.zeros([2, 12])).numbers("keep", units) == 12


def test_ways_to_the_norm_of_a_kernel(rng):
    units = Units(2, 1)
    small, _ = convolution(rng, "same", 2)
    grouped, _ = convolution(rng, "grouped", 2)
    x, g = tf.zeros([2, 4, 4, 256]), tf.zeros([2, 4, 4, 256])
    wide = Convolution(variable(3, 3, 256, 256), x, g, small.geometry)
    assert small.how("auto", units) == "keep"
    assert small.how("gram", units) == "gram"
    assert small.how("instantiate", units) == "drop"
    assert grouped.how("gram", units) == "drop"
    assert wide.how("auto", units) == "gram"
    assert wide.numbers("gram", units) < wide.numbers("keep", units)


@pytest.mark.parametrize(("rows", "repeats"), [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("between", [(), (4,), (4, 5), (0,)], ids=str)
def test_positions_of_a_unit_lie_along_one_axis(rows, repeats, between, rng):
    calls = rng.normal(size=(3 * rows * repeats, *between, 2))
    positions = rows * repeats * int(np.prod(between))

    @tf.function(input_signature=[tf.TensorSpec((None, *between, 2), tf.float64)])
    def viewed(tensor):
        units = Units(tf.shape(tensor)[0] // (rows * repeats), rows)
        known = units.view(tensor, [2], repeats)
        assert known.shape[1:] == (positions, 2)
        return known, units.view(tensor, [2])

    for found in viewed(calls):
        np.testing.assert_array_equal(found, calls.reshape(3, positions, 2))
