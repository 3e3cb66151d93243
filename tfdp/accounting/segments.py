"""What was run, as values: how batches were drawn, how often, and with what noise."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import dp_accounting

from tfdp._validate import instance, non_negative
from tfdp.sampling import Poisson, Scheme, Shuffled, Unknown, scheme_of_kind


@dataclasses.dataclass(frozen=True)
class Segment:
    """A number of releases of one noised sum, over batches drawn in one way.

    What the scheme knows is read from the segment, too: ``segment.number_of_examples``,
    and the count under its own name, ``segment.steps`` or ``segment.passes``.

    Args:
        scheme: How the batches were drawn.
        count: Steps taken, an empty batch is one too; or passes begun.
        noise_multiplier: Noise standard deviation over the sum's l2 sensitivity, the
            smallest in these releases; ``0`` is no noise. Nothing downstream halves or
            doubles it: where several examples share a clipped gradient the sensitivity
            is twice the clip norm, and the caller has divided by that.
        released: What was released if these were no training steps: names of metrics.
            They then do not count as steps.

    Raises:
        TypeError: If an argument is no number, or `released` no text.
        ValueError: If the count is negative or fractional, or the noise multiplier is
            negative or not finite.

    Example:
        >>> from tfdp.sampling import Poisson
        >>> Segment(Poisson(60_000, 256), 235, 1.1).steps
        235
    """

    scheme: Scheme
    count: int
    noise_multiplier: float
    released: str = ""

    def __post_init__(self) -> None:
        instance("released", self.released, str)
        known = scheme_of_kind(self.scheme.kind)
        if known.__qualname__ != type(self.scheme).__qualname__:
            raise ValueError(
                f"Scheme `{type(self.scheme).__qualname__}` needs a `kind` of its own: "
                "a file would take it for another one. Received: "
                f"kind={self.scheme.kind!r}, which is that of `{known.__qualname__}`."
            )
        noise_multiplier = non_negative("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "count", _count(self.scheme.counts, self.count))
        object.__setattr__(self, "noise_multiplier", noise_multiplier)

    def __getattr__(self, name: str) -> Any:
        """Return what the scheme knows, or the count under its own name."""
        if name.startswith("_") or name in {"scheme", "count"}:
            raise AttributeError(name)
        return self.count if name == self.scheme.counts else getattr(self.scheme, name)

    def with_count(self, count: int) -> "Segment":
        """Return the same segment with another number of releases."""
        return dataclasses.replace(self, count=count)

    def event(self) -> dp_accounting.DpEvent:
        """Return the segment as an event of dp_accounting."""
        return self.scheme.event(self.count, self.noise_multiplier)

    def alternatives(self) -> "tuple[Segment, ...]":
        """Return what may have run: the segment itself, or all that a search may run."""
        return self.scheme.segments_of_tries or (self,)

    def words(self) -> str:
        """Say in a few words what ran."""
        noise = f"noise multiplier {self.noise_multiplier:.7g}"
        if not self.released:
            return self.scheme.words(self.count, noise)
        some = "a release" if self.count == 1 else f"{self.count} releases"
        number, drawn = self.scheme.number_of_examples, self.scheme.expected_batch_size
        units = f"{number} {self.scheme.unit}s"
        of = f"all {units}"
        if self.scheme.sampling_probability < 1:
            of = (
                f"a Poisson draw: {drawn} of {units} expected, sampling probability "
                f"{self.scheme.sampling_probability:g}"
            )
        return f"{some} of {self.released}, {noise}, of {of}"

    def redrawn(self) -> "dict[str, Segment]":
        """Return what this would have been under other schemes, by their labels."""
        return {
            label: dataclasses.replace(self, scheme=scheme, count=count)
            for label, (scheme, count) in self.scheme.redrawn(self.count).items()
        }


class _OfOneScheme(type):
    """Makes segments of one scheme, and tells them from others by `isinstance`."""

    scheme: type[Scheme]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Segment) and isinstance(instance.scheme, cls.scheme)


class PoissonSteps(metaclass=_OfOneScheme):
    """Makes a `Segment` of steps whose batches were Poisson draws.

    Args:
        steps: Number of steps taken; an empty batch is a step too.
        noise_multiplier: Noise standard deviation over l2 sensitivity.
        number_of_examples: Size of the data set, which is public.
        expected_batch_size: Expected number of examples in a draw.

    Example:
        >>> PoissonSteps(235, 1.1, 60_000, 256).sampling_probability
        0.004266666666666667
    """

    scheme = Poisson

    def __new__(  # type: ignore[misc]
        cls,
        steps: int,
        noise_multiplier: float,
        number_of_examples: int,
        expected_batch_size: int,
    ) -> Segment:
        """Make it."""
        scheme = Poisson(number_of_examples, expected_batch_size)
        return Segment(scheme, steps, noise_multiplier)


class ShuffledPasses(metaclass=_OfOneScheme):
    """Makes a `Segment` of passes in which an example occurs at most once.

    Args:
        passes: Number of passes begun; each counts in full.
        noise_multiplier: Smallest noise standard deviation over l2 sensitivity.
        number_of_examples: Size of the data set, which is public.
        expected_batch_size: Number of examples in a batch.
        examples_per_unit: Examples that share one clipped gradient.

    Example:
        >>> ShuffledPasses(15, 1.1, 60_000, 256).count
        15
    """

    scheme = Shuffled

    def __new__(  # type: ignore[misc]
        cls,
        passes: int,
        noise_multiplier: float,
        number_of_examples: int,
        expected_batch_size: int,
        examples_per_unit: int = 1,
    ) -> Segment:
        """Make it."""
        scheme = Shuffled(number_of_examples, expected_batch_size, examples_per_unit)
        return Segment(scheme, passes, noise_multiplier)


class UnamplifiedSteps(metaclass=_OfOneScheme):
    """Makes a `Segment` of steps on unknown batches: each counts in full.

    Args:
        steps: Number of steps taken.
        noise_multiplier: Noise standard deviation over l2 sensitivity.
        examples_per_unit: Examples that share one clipped gradient.

    Example:
        >>> UnamplifiedSteps(100, 8.0).count
        100
    """

    scheme = Unknown

    def __new__(  # type: ignore[misc]
        cls, steps: int, noise_multiplier: float, examples_per_unit: int = 1
    ) -> Segment:
        """Make it."""
        return Segment(Unknown(examples_per_unit), steps, noise_multiplier)


def segment_to_dict(segment: Segment) -> dict[str, Any]:
    """Describe a segment in a dictionary that JSON can hold.

    Args:
        segment: The segment.

    Returns:
        The kind of its scheme, its count and noise, what was released if these were no
        steps, and the scheme's fields.

    Example:
        >>> segment_to_dict(UnamplifiedSteps(3, 1.1))["kind"]
        'unamplified_steps'
    """
    return {
        "kind": segment.scheme.kind,
        segment.scheme.counts: segment.count,
        "noise_multiplier": segment.noise_multiplier,
        **({"released": segment.released} if segment.released else {}),
        **segment.scheme.fields(),
    }


def segment_from_dict(fields: Mapping[str, Any]) -> Segment:
    """Return the segment that `segment_to_dict` described.

    Args:
        fields: As `segment_to_dict` returned them.

    Returns:
        A segment equal to the one described.

    Raises:
        ValueError: If the kind is unknown, or a field is missing, unknown or wrong.

    Example:
        >>> segment_from_dict(segment_to_dict(UnamplifiedSteps(3, 1.1))).count
        3
    """
    arguments = dict(fields)
    kind = arguments.pop("kind", None)
    scheme = scheme_of_kind(kind)
    try:
        count = arguments.pop(scheme.counts, None)
        noise_multiplier = arguments.pop("noise_multiplier", None)
        released = arguments.pop("released", "")
        return Segment(scheme(**arguments), count, noise_multiplier, released)
    except TypeError as error:
        raise ValueError(
            f"A segment of kind {kind!r} cannot have these fields. "
            f"Received: {arguments!r}. {error}"
        ) from error


def _count(name: str, value: Any) -> int:
    """Return `value` as an int with value >= 0, or raise."""
    result = non_negative(name, value)
    if result != int(result):
        raise ValueError(
            f"`{name}` must be a whole number. Received: {name}={value!r}."
        )
    return int(result)
