"""Blocks of columns that see inputs of their own make the gradient of one matrix."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.terms.test_terms import SEEDS, check, outer, variable
from tfdp.rules.terms import Columns, Kept, OuterProducts, Units

WIDTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def columns(rng, units, positions, d, widths):
    """A term of blocks, and its gradients in float64."""
    found = [outer(rng, units, positions, d, width) for width in widths]
    truth = [gradients.reshape(units, d, -1) for _, gradients in found]
    pairs = [term.pairs[0] for term, _ in found]
    term = Columns.of(variable(d, sum(widths)), *map(list, zip(*pairs, strict=True)))
    return term, np.concatenate(truth, 2).reshape(units, -1)


@pytest.mark.slow
@settings(max_examples=30)
@given(SEEDS, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), WIDTHS)
def test_blocks_are_one_matrix(seed, units, positions, d, widths):
    rng = np.random.default_rng(seed)
    term, truth = columns(rng, units, positions, d, widths)
    assert isinstance(term, Columns if len(widths) > 1 else OuterProducts)
    check(term, truth, Units(units, 1))
    # Rows of one unit, and uses of one matrix, are positions of it.
    if units % 2 == 0:
        pairs = truth.reshape(units // 2, 2, -1).sum(1)
        check(term, pairs, Units(units // 2, 2))
    other, of_other = columns(rng, units, positions + 1, d, widths)
    check(term.merged(other), truth + of_other, Units(units, 1))


def test_blocks_move_as_their_gradients_do(rng):
    units, widths = Units(3, 1), [2, 1, 3]
    term, _ = columns(rng, 3, 4, 5, widths)
    other, _ = columns(rng, 3, 2, 5, widths)
    whole, of_other = (
        Kept(each.variable, each.instantiate(units)) for each in (term, other)
    )
    for direction in (other, of_other):
        np.testing.assert_allclose(
            term.inner_products(direction, units),
            whole.inner_products(of_other, units),
            rtol=1e-4,
        )
    for name, width in (("applied", 5), ("applied_back", 6)):
        rows = tf.constant(rng.normal(size=(3, 4, width)), tf.float32)
        np.testing.assert_allclose(
            getattr(term, name)(rows, units),
            getattr(whole, name)(rows, units),
            rtol=1e-4,
            atol=1e-5,
        )


def test_blocks_of_other_widths_are_not_merged(rng):
    term, _ = columns(rng, 2, 1, 3, [2, 2])
    for widths in ([1, 3], [4]):
        other, _ = columns(rng, 2, 1, 3, widths)
        assert term.merged(other) is None
        assert other.merged(term) is None


def test_blocks_that_disagree_are_multiplied_with_each_other(rng):
    # The wide block has a smaller gradient than factors, the narrow one has not.
    term, _ = columns(rng, 2, 8, 9, [1, 200])
    ways = {block.how("auto", Units(2, 1)) for block in term.blocks}
    assert ways == {"keep", "gram"}
    assert term.how("auto", Units(2, 1)) == "gram"
    assert term.how("instantiate", Units(2, 1)) == "drop"
    assert term.numbers("gram", Units(2, 1)) == 2 * 2 * 8 * 8
    assert term.numbers("drop", Units(2, 1)) == 9 * 201
