"""Poisson sampling: every example takes part in a step by a coin of its own."""

import dataclasses
import math
import secrets
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tfdp import _validate
from tfdp.sampling.scheme import Scheme

_KEY_BITS = 128
_WORD_BITS = 64
# What else is random in a draw begins so many blocks behind its coins.
_FAR = 2**63


@dataclasses.dataclass(frozen=True)
class Poisson(Scheme):
    """Each example is in or out of each batch by a coin of its own.

    Args:
        number_of_examples: Size of the data set, which is public.
        expected_batch_size: Expected number of examples in a draw; where it is larger
            than the data, every batch is all of them.

    Example:
        >>> Poisson(60_000, 256).sampling_probability
        0.004266666666666667
    """

    kind: ClassVar[str] = "poisson_steps"
    sampling: ClassVar[str | None] = "poisson"
    label: ClassVar[str] = "Poisson-sampled"

    number_of_examples: int
    expected_batch_size: int

    @property
    def sampling_probability(self) -> float:
        """Probability with which a step draws a given example."""
        return min(1.0, self.expected_batch_size / self.number_of_examples)

    def draw(
        self, key: int, epoch: int, index: int, repetition: int = 0
    ) -> NDArray[np.int64]:
        """Draw a batch: see `poisson_indices`."""
        return poisson_indices(
            key,
            (epoch, index, repetition),
            number_of_examples=self.number_of_examples,
            sampling_probability=self.sampling_probability,
        )

    def log_chances(self, examples: int) -> NDArray[np.float64]:
        """Return the logarithms of the binomial distribution."""
        if self.sampling_probability == 1:
            return super().log_chances(examples)
        return log_binomial(examples, self.sampling_probability)

    def words(self, count: int, noise: str) -> str:
        """Say how many draws there were."""
        return (
            f"{count} steps, {noise}, Poisson-sampled batches: "
            f"{self.expected_batch_size} of {self.number_of_examples} examples "
            f"expected, sampling probability {self.sampling_probability:g}"
        )

    @property
    def examples_per_release(self) -> int:
        """Examples expected in a draw."""
        return min(self.expected_batch_size, self.number_of_examples)


def fresh_key() -> int:
    """Return a secret 128-bit key from the operating system."""
    return secrets.randbits(_KEY_BITS)


def seeded_key(seed: object) -> int:
    """Return the 128-bit key that belongs to a seed.

    Who knows the seed knows every draw made with this key.

    Args:
        seed: A whole number of at least 0.

    Returns:
        The key. Different seeds give unrelated keys.

    Raises:
        TypeError: If `seed` is not a whole number.
        ValueError: If `seed` is negative.
    """
    sequence = np.random.SeedSequence(_validate.seed("seed", seed))
    low, high = sequence.generate_state(2, np.uint64)
    return int(low) | int(high) << _WORD_BITS


def poisson_probability(
    *, expected_batch_size: object, number_of_examples: object
) -> float:
    """Return the probability with which each example joins a batch.

    Args:
        expected_batch_size: Mean number of examples in a batch, a whole number
            from 1 to `number_of_examples`.
        number_of_examples: Number of examples to draw from, at least 1.

    Returns:
        `expected_batch_size / number_of_examples`, in (0, 1].

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is not a whole number of at least 1, or if the
            batches are to be larger than the data.
    """
    examples = _validate.positive_int("number_of_examples", number_of_examples)
    batch_size = _validate.positive_int("expected_batch_size", expected_batch_size)
    if batch_size > examples:
        raise ValueError(
            "`expected_batch_size` must be at most the number of examples. "
            f"Received: expected_batch_size={batch_size}, "
            f"number_of_examples={examples}. "
            f"Use `expected_batch_size={examples}` to take all of them in every step."
        )
    return batch_size / examples


def poisson_indices(
    key: int,
    draw: Sequence[int],
    *,
    number_of_examples: int,
    sampling_probability: float,
) -> NDArray[np.int64]:
    """Draw one Poisson batch.

    The number of examples is drawn from Binomial(N, q), then a uniform subset of
    that size. Every subset of k examples then has the probability
    ``q**k * (1 - q)**(N - k)`` that it has when each example tosses a coin of its
    own, which is what amplification by sampling assumes [1]_.

    Guarantees:
        The result depends on the arguments alone. Distinct values of `draw` read
        disjoint parts of the Philox sequence of `key` [2]_: their batches are
        independent, and to whoever does not know the key they look random (Philox
        passes statistical tests; it is no certified cryptographic generator). Time
        and memory grow with the size of the batch, not with N.

    Args:
        key: The secret, a whole number in [0, 2^128); see `fresh_key`.
        draw: The name of the draw, three whole numbers in [0, 2^64). Two draws of
            the same name are the same batch: never use a name twice in training.
        number_of_examples: N, at least 1.
        sampling_probability: q, in (0, 1].

    Returns:
        Distinct indices in [0, N), ascending, int64, shape (n,); n may be 0.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument lies outside its range.

    Example:
        >>> indices = poisson_indices(
        ...     fresh_key(), (1, 0, 0), number_of_examples=8, sampling_probability=1.0
        ... )
        >>> indices.tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]

    References:
        .. [1] Mironov, Talwar and Zhang, "Rényi Differential Privacy of the Sampled
           Gaussian Mechanism", 2019. https://arxiv.org/abs/1908.10530
        .. [2] Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
           https://doi.org/10.1145/2063384.2063405
    """
    examples = _validate.positive_int("number_of_examples", number_of_examples)
    probability = _validate.number("sampling_probability", sampling_probability)
    if not 0 < probability <= 1:
        raise ValueError(
            "`sampling_probability` must be above 0 and at most 1. "
            f"Received: sampling_probability={sampling_probability!r}."
        )
    if not _fits(key, _KEY_BITS):
        # The key is a secret: no message shows it.
        raise ValueError("`key` must be a whole number in [0, 2^128).")
    if len(draw) != 3 or not all(_fits(number, _WORD_BITS) for number in draw):
        raise ValueError(
            f"`draw` must be three whole numbers in [0, 2^64). Received: draw={draw!r}."
        )
    random = _generator(key, draw)
    size = random.binomial(examples, probability)
    return np.sort(random.choice(examples, size, replace=False, shuffle=False))


def second_generator(key: int, draw: Sequence[int]) -> np.random.Generator:
    """Return what else is random in a draw, independent of which examples it has.

    Args:
        key: Of `poisson_indices`, likewise secret.
        draw: Likewise, the name of the draw.
    """
    return _generator(key, draw, block=_FAR)


def _generator(key: int, draw: Sequence[int], block: int = 0) -> np.random.Generator:
    # Philox counts blocks in the lowest of four words. The name of the draw fills
    # the other three, so that no two draws share a block.
    counter = np.array([block, *draw], np.uint64)
    return np.random.Generator(np.random.Philox(key=int(key), counter=counter))


def _fits(value: object, bits: int) -> bool:
    """Whether `value` is a whole number in [0, 2^bits)."""
    return isinstance(value, int | np.integer) and 0 <= int(value) < 2**bits


def log_binomial(number: int, probability: float) -> NDArray[np.float64]:
    """Return the logarithms of the chances of 0 to `number` hits."""
    log_factorials = np.array([math.lgamma(n + 1) for n in range(number + 1)])
    hits = np.arange(number + 1)
    result: NDArray[np.float64] = (
        log_factorials[-1]
        - log_factorials
        - log_factorials[::-1]
        + hits * math.log(probability)
        + (number - hits) * math.log1p(-probability)
    )
    return result
