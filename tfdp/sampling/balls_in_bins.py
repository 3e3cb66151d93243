"""Balls in bins: every example is in one batch of an epoch, by a coin of its own."""

import dataclasses
import functools
import math
from typing import ClassVar

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from tfdp.sampling.poisson import second_generator
from tfdp.sampling.scheme import LEAST_AMPLIFIED_NOISE, Scheme


@dataclasses.dataclass(frozen=True)
class RandomAllocationDpEvent(dp_accounting.DpEvent):
    """Releases with Gaussian noise, one of which has an example; a coin decides which.

    Attributes:
        batches: How many releases there are.
        noise_multiplier: Standard deviation of the noise of each over its l2
            sensitivity.
    """

    batches: int
    noise_multiplier: float


class _Bins(Scheme):
    """Every example is in one batch of each pass: what that costs is in `event`."""

    counts: ClassVar[str] = "passes"

    number_of_examples: int

    def rdp_event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return a whole release for each epoch: it costs at most that."""
        return Scheme.event(self, count, noise_multiplier)

    def rough_event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return Poisson draws as large as the bins."""
        return _as_draws(self.event(count, noise_multiplier))

    @property
    def examples_per_release(self) -> int:
        """Examples in a pass."""
        return self.number_of_examples


@dataclasses.dataclass(frozen=True)
class BallsInBins(_Bins):
    """Each example draws, by a coin of its own, its batch of this epoch.

    Every example is used once an epoch, as in shuffled passes, and an epoch costs much
    less than theirs: whoever sees all of its batches does not know in which an example
    was. Batches differ in size, and may be empty. Equal cuts of a shuffled order are
    another thing: there examples know of each other. An epoch is one release of
    `RandomAllocationDpEvent` [1]_, and counts as soon as it has begun.

    Args:
        number_of_examples: Size of the data set, which is public.
        expected_batch_size: Expected number of examples in a batch, and the divisor of
            the noised sum.
        batches_per_epoch: Number of batches. By default the number of examples over
            the expected batch size, rounded up.

    Example:
        >>> scheme = BallsInBins(60_000, 256)
        >>> scheme.batches_per_epoch
        235
        >>> sum(len(scheme.draw(key=7, epoch=1, index=i)) for i in range(235))
        60000

    References:
        .. [1] Feldman and Shenfeld, "Efficient Privacy Loss Accounting for Subsampling
           and Random Allocation", 2026. https://arxiv.org/abs/2602.17284
    """

    kind: ClassVar[str] = "balls_in_bins_passes"
    sampling: ClassVar[str | None] = "balls_in_bins"
    batches_are_bins: ClassVar[bool] = True

    number_of_examples: int
    expected_batch_size: int
    batches_per_epoch: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.batches_per_epoch is None:
            batches = math.ceil(self.number_of_examples / self.expected_batch_size)
            object.__setattr__(self, "batches_per_epoch", batches)
        super().__post_init__()

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        assert self.batches_per_epoch is not None  # noqa: S101 (see `__post_init__`)
        return self.batches_per_epoch

    def in_epochs_of(self, batches: int) -> Scheme:
        """Return the scheme for so many batches, which must have the expected size."""
        if abs(self.number_of_examples / batches - self.expected_batch_size) >= 1:
            size = math.ceil(self.number_of_examples / batches)
            raise ValueError(
                "An epoch of balls in bins uses every row once. Received: "
                f"{batches} batches of {self.expected_batch_size} expected, "
                f"{self.number_of_examples} rows. Use `batch_size={size}`, or leave "
                "`steps_per_epoch` out."
            )
        return dataclasses.replace(self, batches_per_epoch=batches)

    def draw(
        self, key: int, epoch: int, index: int, repetition: int = 0
    ) -> NDArray[np.int64]:
        """Take a batch out of the bins of an epoch, all of which are of the same coins.

        Args:
            key: See `Scheme.draw`.
            epoch: Likewise.
            index: Likewise.
            repetition: With another one the coins of the epoch are other ones.

        Returns:
            Indices, ascending. Who trains on a batch twice has used its examples twice.
        """
        rows, ends = bins_of_epoch(
            key, (epoch, repetition), self.number_of_examples, self.steps_per_epoch
        )
        return rows[ends[index] : ends[index + 1]]

    def event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return an allocation for each epoch."""
        return _allocations(
            super().event(count, noise_multiplier), self.steps_per_epoch, together=False
        )

    def words(self, count: int, noise: str) -> str:
        """Say how many epochs there were."""
        return (
            f"{count} passes, {noise}, balls-in-bins batches: each of "
            f"{self.number_of_examples} examples in one of {self.steps_per_epoch} batches, by "
            "a fresh coin of its own in every pass"
        )


@dataclasses.dataclass(frozen=True)
class FixedBins(_Bins):
    """Bins that were drawn once, when files were written, and are read every epoch.

    An example is in the same batch of every epoch, so epochs do not hide each other:
    all of them together are one random allocation with the noise multiplier over the
    square root of their number. That is far more than as many epochs with fresh bins
    cost, and holds for all trainings on the same files together.

    Args:
        number_of_examples: Size of the data set, which is public.
        expected_batch_size: Expected number of examples in a batch, and the divisor of
            the noised sum.
        batches_per_epoch: Number of bins.
        bins: A random number that tells these bins from others.

    Example:
        >>> FixedBins(60_000, 257, batches_per_epoch=234, bins=7).event(4, 2.0)
        RandomAllocationDpEvent(batches=234, noise_multiplier=1.0)
    """

    kind: ClassVar[str] = "fixed_bins_passes"
    adds_up: ClassVar[bool] = False

    number_of_examples: int
    expected_batch_size: int
    # No defaults: both are chosen where the bins are written.
    batches_per_epoch: int
    bins: int

    @property
    def steps_per_epoch(self) -> int:
        """Number of bins."""
        return self.batches_per_epoch

    def event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return one allocation, with the noise that all epochs have together."""
        return _allocations(
            super().event(count, noise_multiplier),
            self.batches_per_epoch,
            together=True,
        )

    def words(self, count: int, noise: str) -> str:
        """Say how many epochs there were, and that the bins are the same in all."""
        return (
            f"{count} passes, {noise}, over {self.batches_per_epoch} bins that were "
            f"drawn once (number {self.bins}): each of {self.number_of_examples} "
            "examples is in the same batch of every pass, and all passes together "
            "count as one, with their noise over the square root of their number"
        )


@functools.lru_cache(maxsize=2)  # All batches of an epoch are of the same coins.
def bins_of_epoch(
    key: int, epoch: tuple[int, int], number_of_examples: int, batches: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put every example into a bin.

    Args:
        key: A whole number in [0, 2^128); see `fresh_key`.
        epoch: The name of the epoch, two whole numbers in [0, 2^64).
        number_of_examples: N, at least 1.
        batches: Number of bins.

    Returns:
        The examples, bin by bin and ascending in each, and where bins begin and end in
        them, shape ``(batches + 1,)``; a function of the arguments alone.

    Example:
        >>> rows, ends = bins_of_epoch(7, (1, 0), 6, 2)
        >>> sorted(rows.tolist()), len(ends)
        ([0, 1, 2, 3, 4, 5], 3)
    """
    number, repetition = epoch
    random = second_generator(key, (number, 0, repetition))
    bins = random.integers(batches, size=number_of_examples)
    rows = np.argsort(bins, kind="stable")
    ends = np.append(0, np.cumsum(np.bincount(bins, minlength=batches)))
    for array in (rows, ends):
        array.setflags(write=False)
    return rows, ends


def _allocations(
    releases: dp_accounting.DpEvent, batches: int, *, together: bool
) -> dp_accounting.DpEvent:
    """Return what releases on all examples cost where each has one bin of them."""
    if not isinstance(releases, dp_accounting.SelfComposedDpEvent) or batches == 1:
        return releases  # There is nothing, or nothing helps.
    noise_multiplier = releases.event.noise_multiplier
    if together:
        noise_multiplier /= math.sqrt(releases.count)
    if noise_multiplier < LEAST_AMPLIFIED_NOISE:
        return releases
    allocation = RandomAllocationDpEvent(batches, noise_multiplier)
    if together:
        return allocation
    return dp_accounting.SelfComposedDpEvent(allocation, releases.count)


def _as_draws(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Return Poisson draws in the place of allocations."""
    match event:
        case dp_accounting.SelfComposedDpEvent(event=RandomAllocationDpEvent()):
            allocation, count = event.event, event.count
        case RandomAllocationDpEvent():
            allocation, count = event, 1
        case _:
            return event
    release = dp_accounting.GaussianDpEvent(allocation.noise_multiplier)
    draw = dp_accounting.PoissonSampledDpEvent(1 / allocation.batches, release)
    return dp_accounting.SelfComposedDpEvent(draw, allocation.batches * count)
