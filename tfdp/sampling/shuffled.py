"""Shuffled passes: every example once, in an order that a key decides."""

import dataclasses
import functools
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tfdp.sampling.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Shuffled(Scheme):
    """Passes over the data in which an example occurs at most once.

    The order of the examples is of no use to the proof, so a pass costs as much as one
    step on all of the data. A pass counts in full as soon as it has begun.

    Args:
        number_of_examples: Size of the data set, which is public.
        expected_batch_size: Number of examples in a batch.
        examples_per_unit: Examples that share one clipped gradient.

    Example:
        >>> Shuffled(60_000, 256).counts
        'passes'
    """

    kind: ClassVar[str] = "shuffled_passes"
    sampling: ClassVar[str] = "shuffle"
    label: ClassVar[str] = "shuffled"
    counts: ClassVar[str] = "passes"
    allows_units: ClassVar[bool] = True
    is_shuffled_by_keras: ClassVar[bool] = True
    allows_shared_noise: ClassVar[bool] = True

    number_of_examples: int
    expected_batch_size: int
    examples_per_unit: int = 1

    def draw(
        self, key: int, epoch: int, index: int, repetition: int = 0
    ) -> NDArray[np.int64]:
        """Cut a batch out of the order of a pass."""
        del repetition
        order = shuffled_order(key, epoch, number_of_examples=self.number_of_examples)
        size = self.expected_batch_size
        return np.sort(order[index * size : (index + 1) * size])

    def words(self, count: int, noise: str) -> str:
        """Say how many passes there were."""
        return (
            f"{count} passes, {noise}, shuffled batches of {self.expected_batch_size} "
            f"of {self.number_of_examples} examples: a row at most once a pass"
        )

    @property
    def examples_per_release(self) -> int:
        """Examples in a pass."""
        return self.number_of_examples


@functools.lru_cache(maxsize=2)  # All batches of a pass are cut out of one order.
def shuffled_order(
    key: int, pass_number: int, *, number_of_examples: int
) -> NDArray[np.int64]:
    """Return the order in which a pass takes the examples.

    Args:
        key: A whole number in [0, 2^128); see `fresh_key`.
        pass_number: From 0; passes of one key are in unrelated orders.
        number_of_examples: N, at least 1.

    Returns:
        The numbers from 0 to N - 1, a function of the arguments alone; not to be
        written to.

    Example:
        >>> sorted(shuffled_order(7, 0, number_of_examples=3).tolist())
        [0, 1, 2]
    """
    counter = np.array([0, pass_number, 0, 0], np.uint64)
    random = np.random.Generator(np.random.Philox(key=key, counter=counter))
    order = random.permutation(number_of_examples)
    order.setflags(write=False)
    return order
