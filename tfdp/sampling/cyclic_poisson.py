"""Cyclic Poisson sampling: draws from one fixed part of the examples after the other."""

import dataclasses
import math
from typing import ClassVar

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from tfdp.sampling.poisson import poisson_indices
from tfdp.sampling.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(Scheme):
    """Poisson draws from one fixed part of the examples after the other [1]_.

    The examples are cut into parts by their numbers, which the data do not decide. The
    i-th step of an epoch draws from part i, modulo the number of parts, each example of
    it by a coin of its own: an example cannot be in two steps that are closer than that.
    Noise that steps share needs this distance; with independent noise `Poisson` costs
    less.

    Every epoch begins with the first part, so epochs are what counts, each as whole:
    as many Poisson draws as it takes from its first part.

    Args:
        number_of_examples: Size of the data set, which is public.
        expected_batch_size: Expected number of examples in a draw.
        parts: Number of parts.

    Raises:
        ValueError: If there are more parts than examples.

    Example:
        >>> scheme = CyclicPoisson(60_000, 256)
        >>> round(scheme.sampling_probability, 4)
        0.0085
        >>> int(scheme.draw(key=7, epoch=1, index=1)[0]) % 2
        1

    References:
        .. [1] Choquette-Choo et al., "(Amplified) Banded Matrix Factorization: A
           unified approach to private training", NeurIPS 2023, section 4.
           https://arxiv.org/abs/2306.08153
    """

    kind: ClassVar[str] = "cyclic_poisson_passes"
    sampling: ClassVar[str] = "cyclic_poisson"
    counts: ClassVar[str] = "passes"

    number_of_examples: int
    expected_batch_size: int
    parts: int = 2

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        if self.parts > self.number_of_examples:
            raise ValueError(
                "`parts` must be at most the number of examples. Received: "
                f"parts={self.parts}, number_of_examples={self.number_of_examples}."
            )

    @property
    def sampling_probability(self) -> float:
        """Probability with which a step draws a given example of its part."""
        in_a_part = self.number_of_examples / self.parts
        return min(1.0, self.expected_batch_size / in_a_part)

    def draw(
        self, key: int, epoch: int, index: int, repetition: int = 0
    ) -> NDArray[np.int64]:
        """Draw a batch from the part whose turn it is."""
        first = index % self.parts
        chosen = poisson_indices(
            key,
            (epoch, index, repetition),
            number_of_examples=len(range(first, self.number_of_examples, self.parts)),
            sampling_probability=self.sampling_probability,
        )
        return first + self.parts * chosen

    def event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return the draws from the first part, of which there are most."""
        steps = math.ceil(self.number_of_examples / self.expected_batch_size)
        return super().event(count * math.ceil(steps / self.parts), noise_multiplier)

    def words(self, count: int, noise: str) -> str:
        """Say how many epochs there were."""
        return (
            f"{count} passes, {noise}, of {self.steps_per_epoch} Poisson draws each "
            f"from {self.parts} fixed parts of {self.number_of_examples} examples in "
            f"turn: {self.expected_batch_size} examples expected, sampling "
            f"probability {self.sampling_probability:g} in a part"
        )
