"""Orders of shuffled passes."""

import numpy as np

from tfdp.sampling.shuffled import shuffled_order


def test_an_order_has_every_example_once():
    order = shuffled_order(2**127 + 1, 0, number_of_examples=1000)
    np.testing.assert_array_equal(np.sort(order), np.arange(1000))


def test_passes_and_keys_have_orders_of_their_own():
    orders = [
        shuffled_order(key, number, number_of_examples=1000)
        for key in (0, 2**100)
        for number in (0, 1, 2**40)
    ]
    correlations = np.corrcoef(orders)
    assert np.abs(correlations - np.eye(6)).max() < 0.2
    np.testing.assert_array_equal(
        orders[1], shuffled_order(0, 1, number_of_examples=1000)
    )


def test_no_block_of_numbers_is_used_twice():
    """A permutation of many rows reads far into the sequence of its key."""
    large = shuffled_order(0, 0, number_of_examples=1_000_000)
    other = shuffled_order(0, 1, number_of_examples=1_000_000)
    assert abs(np.corrcoef(large, other)[0, 1]) < 0.01
