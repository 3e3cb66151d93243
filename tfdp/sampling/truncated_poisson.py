"""Poisson draws that a bound cuts: batches never have more examples than it."""

import dataclasses
import math
from typing import ClassVar

import dp_accounting
import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from tfdp.sampling.poisson import Poisson, second_generator
from tfdp.sampling.scheme import Scheme

# dp_accounting 0.4 does not have it.
_EVENT = getattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent", None)

# A bound that is so many standard deviations above the mean, and a little more where
# batches are small, costs less than a percent of epsilon at deltas of 1e-9 or more.
_DEVIATIONS = 6

# Where draws are cut less often, that costs about a percent at most at a delta of 1e-6.
# At 1e-8 it may be a third of epsilon: no number is right for all deltas, and the delta is
# not known before the statement, which has the figure of draws that are not cut, too.
_RARELY = 1e-6


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(Poisson):
    """Poisson draws of which a uniformly random part stays where they are too large.

    An example that leaves a full batch makes room for another one, so such a batch
    changes by up to twice the clip norm [1]_. A bound near the mean is often met, and
    costs far more than it saves; see `free_bound`.

    Args:
        number_of_examples: Size of the data set, which is public.
        expected_batch_size: Expected number of examples in a draw before it is cut,
            and the divisor of the noised sum.
        max_batch_size: Largest number of examples in a batch.

    Raises:
        ValueError: If the bound is below the mean.

    Example:
        >>> scheme = TruncatedPoisson(60_000, 256, max_batch_size=360)
        >>> len(scheme.draw(key=7, epoch=1, index=0)) <= 360
        True

    References:
        .. [1] https://arxiv.org/abs/2508.15089 (2025), from which dp_accounting has it.
    """

    kind: ClassVar[str] = "truncated_poisson_steps"
    sampling: ClassVar[str | None] = None
    label: ClassVar[str] = "truncated Poisson"
    most_change_in_clips: ClassVar[int] = 2

    max_batch_size: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        if self.max_batch_size < self.examples_per_release:
            raise ValueError(
                "`max_batch_size` must be at least the expected batch size. Received: "
                f"max_batch_size={self.max_batch_size}, expected_batch_size="
                f"{self.expected_batch_size}. Use `max_batch_size={self.free_bound}`."
            )

    @property
    def free_bound(self) -> int:
        """A bound that costs less than a percent of epsilon at deltas of 1e-9 or more.

        It is the number of all examples at most. At smaller deltas it may cost several
        times as much.
        """
        n, q = self.number_of_examples, self.sampling_probability
        # By Bernstein's inequality, as small draws have longer tails than the normal
        # distribution: a draw is above it with a probability below exp(-6^2 / 2).
        deviation = math.sqrt(1 + n * q * (1 - q))
        return min(n, math.ceil(n * q + _DEVIATIONS * (1 + deviation)))

    @property
    def cuts_often(self) -> bool:
        """Whether more than a draw in a million is above the bound."""
        chance = binom.sf(
            self.max_batch_size, self.number_of_examples, self.sampling_probability
        )
        return bool(chance > _RARELY)

    @property
    def slots(self) -> int:
        """Every batch is padded to the bound."""
        return self.max_batch_size

    def draw(
        self, key: int, epoch: int, index: int, repetition: int = 0
    ) -> NDArray[np.int64]:
        """Draw a batch as `Poisson` does, and a random part of it if it is too large."""
        drawn = super().draw(key, epoch, index, repetition)
        if len(drawn) <= self.max_batch_size:
            return drawn
        random = second_generator(key, (epoch, index, repetition))
        return np.sort(random.choice(drawn, self.max_batch_size, replace=False))

    def event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return truncated draws, if dp_accounting knows what they cost."""
        drawn = super().event(count, noise_multiplier)
        is_noised = isinstance(drawn, dp_accounting.SelfComposedDpEvent)
        if self.max_batch_size >= self.number_of_examples or not is_noised:
            return drawn  # Nothing is ever cut, or nothing helps.
        if _EVENT is None:
            return self.rdp_event(count, noise_multiplier)
        release = _EVENT(
            self.number_of_examples,
            self.sampling_probability,
            self.max_batch_size,
            drawn.event.event.noise_multiplier,
        )
        return dp_accounting.SelfComposedDpEvent(release, count)

    def rdp_event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return draws each of which changes by as much as a full one may.

        Whether an example is drawn is a coin of its own. Only if it is the batches
        with it and without it differ, by that example and by one that made room.
        """
        return super().event(count, noise_multiplier / self.most_change_in_clips)

    def rough_event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return draws that are not cut, where hardly any is."""
        if self.max_batch_size < self.free_bound:
            return self.rdp_event(count, noise_multiplier)
        return super().event(count, noise_multiplier)

    def words(self, count: int, noise: str) -> str:
        """Say how many draws there were."""
        return (
            f"{super().words(count, noise)}, cut to {self.max_batch_size} examples at "
            "most"
        )

    def redrawn(self, count: int) -> dict[str, tuple[Scheme, int]]:
        """Return it, and what the same training is under other schemes."""
        others = Poisson(self.number_of_examples, self.expected_batch_size)
        return {self.label: (self, count), **others.redrawn(count)}
