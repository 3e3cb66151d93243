"""What was run, as values: one class for each way of drawing batches.

A segment is a number of releases of the same noised sum. Its noise multiplier is
always the noise's standard deviation divided by the sum's l2 sensitivity, so that
nothing downstream halves or doubles it: where several examples share a clipped
gradient the sensitivity is twice the clip norm, and the caller has divided by that.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import dp_accounting

from tfdp._validate import non_negative, positive_int

# Noise outside this range is brought inside it, to the safe side: less counts as
# none, more counts as the upper end. Beyond it the sums of dp_accounting overflow,
# and at 1e-160 they give an epsilon of 0.
_LEAST_NOISE = 1e-6
_MOST_NOISE = 1e6


@dataclasses.dataclass(frozen=True)
class PoissonSteps:
    """Steps whose batches were Poisson draws: each example in or out by its own coin.

    Args:
        steps: Number of steps taken; an empty batch is a step too.
        noise_multiplier: Noise standard deviation over l2 sensitivity; ``0`` is no
            noise.
        number_of_examples: Size of the data set, which is public.
        expected_batch_size: Expected number of examples in a draw.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If a count is negative or fractional, or the noise multiplier is
            negative or not finite.

    Example:
        >>> PoissonSteps(235, 1.1, 60_000, 256).sampling_probability
        0.004266666666666667
    """

    kind: ClassVar[str] = "poisson_steps"

    steps: int
    noise_multiplier: float
    number_of_examples: int
    expected_batch_size: int

    def __post_init__(self) -> None:
        _assign(
            self,
            steps=_count("steps", self.steps),
            noise_multiplier=non_negative("noise_multiplier", self.noise_multiplier),
            number_of_examples=positive_int(
                "number_of_examples", self.number_of_examples
            ),
            expected_batch_size=positive_int(
                "expected_batch_size", self.expected_batch_size
            ),
        )

    @property
    def sampling_probability(self) -> float:
        """Probability with which a step draws a given example."""
        return min(1.0, self.expected_batch_size / self.number_of_examples)

    @property
    def count(self) -> int:
        """Number of releases."""
        return self.steps

    def with_count(self, count: int) -> "PoissonSteps":
        """Return the same segment with another number of steps."""
        return dataclasses.replace(self, steps=count)

    def event(self) -> dp_accounting.DpEvent:
        """Return the segment as an event of dp_accounting."""
        return _releases(self.steps, self.noise_multiplier, self.sampling_probability)


@dataclasses.dataclass(frozen=True)
class ShuffledPasses:
    """Passes over the data in which an example occurs at most once.

    The order of the examples does not matter, so a pass costs as much as one step on
    all of the data. A pass counts in full as soon as it has started.

    Args:
        passes: Number of passes started.
        noise_multiplier: Smallest noise standard deviation over l2 sensitivity in
            these passes; ``0`` is no noise.
        number_of_examples: Size of the data set, which is public.
        expected_batch_size: Number of examples in a batch.
        examples_per_unit: Examples that share one clipped gradient.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If a count is negative or fractional, or the noise multiplier is
            negative or not finite.

    Example:
        >>> ShuffledPasses(15, 1.1, 60_000, 256).count
        15
    """

    kind: ClassVar[str] = "shuffled_passes"

    passes: int
    noise_multiplier: float
    number_of_examples: int
    expected_batch_size: int
    examples_per_unit: int = 1

    def __post_init__(self) -> None:
        _assign(
            self,
            passes=_count("passes", self.passes),
            noise_multiplier=non_negative("noise_multiplier", self.noise_multiplier),
            number_of_examples=positive_int(
                "number_of_examples", self.number_of_examples
            ),
            expected_batch_size=positive_int(
                "expected_batch_size", self.expected_batch_size
            ),
            examples_per_unit=positive_int("examples_per_unit", self.examples_per_unit),
        )

    @property
    def count(self) -> int:
        """Number of releases."""
        return self.passes

    def with_count(self, count: int) -> "ShuffledPasses":
        """Return the same segment with another number of passes."""
        return dataclasses.replace(self, passes=count)

    def event(self) -> dp_accounting.DpEvent:
        """Return the segment as an event of dp_accounting."""
        return _releases(self.passes, self.noise_multiplier)


@dataclasses.dataclass(frozen=True)
class UnamplifiedSteps:
    """Steps on batches of which nothing is known: every step counts in full.

    Assumes that a batch contains an example at most once.

    Args:
        steps: Number of steps taken.
        noise_multiplier: Noise standard deviation over l2 sensitivity; ``0`` is no
            noise.
        examples_per_unit: Examples that share one clipped gradient.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If a count is negative or fractional, or the noise multiplier is
            negative or not finite.

    Example:
        >>> UnamplifiedSteps(100, 8.0).count
        100
    """

    kind: ClassVar[str] = "unamplified_steps"

    steps: int
    noise_multiplier: float
    examples_per_unit: int = 1

    def __post_init__(self) -> None:
        _assign(
            self,
            steps=_count("steps", self.steps),
            noise_multiplier=non_negative("noise_multiplier", self.noise_multiplier),
            examples_per_unit=positive_int("examples_per_unit", self.examples_per_unit),
        )

    @property
    def count(self) -> int:
        """Number of releases."""
        return self.steps

    def with_count(self, count: int) -> "UnamplifiedSteps":
        """Return the same segment with another number of steps."""
        return dataclasses.replace(self, steps=count)

    def event(self) -> dp_accounting.DpEvent:
        """Return the segment as an event of dp_accounting."""
        return _releases(self.steps, self.noise_multiplier)


Segment: TypeAlias = PoissonSteps | ShuffledPasses | UnamplifiedSteps

_KINDS: dict[str, type[Segment]] = {
    PoissonSteps.kind: PoissonSteps,
    ShuffledPasses.kind: ShuffledPasses,
    UnamplifiedSteps.kind: UnamplifiedSteps,
}


def segment_to_dict(segment: Segment) -> dict[str, Any]:
    """Describe a segment in a dictionary that JSON can hold.

    Args:
        segment: The segment.

    Returns:
        Its kind and its fields.

    Example:
        >>> segment_to_dict(UnamplifiedSteps(3, 1.1))["kind"]
        'unamplified_steps'
    """
    return {"kind": segment.kind, **dataclasses.asdict(segment)}


def segment_from_dict(fields: Mapping[str, Any]) -> Segment:
    """Return the segment that `segment_to_dict` described.

    Args:
        fields: The kind of the segment and the fields of its class.

    Returns:
        A segment equal to the one described.

    Raises:
        ValueError: If the kind is unknown, or a field is missing, unknown or wrong.

    Example:
        >>> segment_from_dict(segment_to_dict(UnamplifiedSteps(3, 1.1)))
        UnamplifiedSteps(steps=3, noise_multiplier=1.1, examples_per_unit=1)
    """
    arguments = dict(fields)
    kind = arguments.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"A segment's `kind` must be one of {', '.join(map(repr, _KINDS))}. "
            f"Received: kind={kind!r}."
        )
    try:
        return _KINDS[kind](**arguments)
    except TypeError as error:
        raise ValueError(
            f"A segment of kind {kind!r} cannot have these fields. "
            f"Received: {arguments!r}. {error}"
        ) from error


def _assign(segment: Segment, **values: float) -> None:
    for name, value in values.items():
        object.__setattr__(segment, name, value)


def _count(name: str, value: Any) -> int:
    """Return `value` as an int with value >= 0, or raise."""
    result = non_negative(name, value)
    if result != int(result):
        raise ValueError(
            f"`{name}` must be a whole number. Received: {name}={value!r}."
        )
    return int(result)


def _releases(
    count: int, noise_multiplier: float, sampling_probability: float = 1.0
) -> dp_accounting.DpEvent:
    """Return `count` releases of one Gaussian sum, of all examples or of a draw."""
    if count == 0:
        return dp_accounting.NoOpDpEvent()
    if noise_multiplier < _LEAST_NOISE:
        return dp_accounting.NonPrivateDpEvent()
    release = dp_accounting.GaussianDpEvent(min(noise_multiplier, _MOST_NOISE))
    if sampling_probability < 1:
        release = dp_accounting.PoissonSampledDpEvent(sampling_probability, release)
    return dp_accounting.SelfComposedDpEvent(release, count)
