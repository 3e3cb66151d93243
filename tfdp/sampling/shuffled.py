"""Shuffled passes: every example once, in an order that a key decides."""

import numpy as np
from numpy.typing import NDArray


def shuffled_order(
    key: int, pass_number: int, *, number_of_examples: int
) -> NDArray[np.int64]:
    """Return the order in which a pass takes the examples.

    Args:
        key: A whole number in [0, 2^128); see `fresh_key`.
        pass_number: From 0; passes of one key are in unrelated orders.
        number_of_examples: N, at least 1.

    Returns:
        The numbers from 0 to N - 1, a function of the arguments alone.

    Example:
        >>> sorted(shuffled_order(7, 0, number_of_examples=3).tolist())
        [0, 1, 2]
    """
    counter = np.array([0, pass_number, 0, 0], np.uint64)
    random = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return random.permutation(number_of_examples)
