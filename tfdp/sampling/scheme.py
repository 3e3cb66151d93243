"""What a way of drawing batches is: it draws, costs, and says so."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, cast

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from tfdp._validate import positive_int

# Less noise than this tells which batch has an example: chance gains next to nothing, and
# a privacy loss distribution takes gigabytes. RDP counts such draws; of bins, passes count.
LEAST_AMPLIFIED_NOISE = 0.2

# Noise outside this range is brought inside it, to the safe side: less counts as
# none, more counts as the upper end. Beyond it the sums of dp_accounting overflow,
# and at 1e-160 they give an epsilon of 0.
_LEAST_NOISE = 1e-6
_MOST_NOISE = 1e6


class Scheme(abc.ABC):
    """How the batches of a training are drawn, and what their releases cost.

    A subclass is a frozen dataclass of whole numbers; no other code asks which one it
    has. It is known to ledgers, files, statements and budgets as soon as it is
    defined: import its module before a ledger that names it is loaded.

    Required are `kind` and `words`; `draw`, if tfdp is to draw the batches. If sampling
    lowers the cost: `sampling_probability` or `event`, and `log_chances` for users with
    several examples. Without these every release counts in full. All of it is taken on
    trust: a cost that is too small is an epsilon that is too small. The guide on parts
    of your own says when to override what else there is.

    Attributes:
        kind: Its name in saved ledgers; no two schemes have the same.
        sampling: Its name in `DPModel(sampling=...)` and `tfdp.data.declare`, if it
            has one. It is then made as ``scheme(number_of_examples,
            expected_batch_size)``.
        label: What its batches are called in tables that compare schemes.
        counts: What is counted: `"steps"`, or `"passes"`, each of which is one release
            and counts as soon as it has begun; or `"searches"`.
        allows_units: Whether several examples may share a clipped gradient: not where
            one example more would shift all groups behind it.
        is_shuffled_by_keras: Whether Keras's own shuffling of arrays draws it.
        most_change_in_clips: By how many clip norms a batch changes, at most, with
            each of its examples that goes: 2 where another one may take its place.
        adds_up: Whether releases of one training and of another are independent, so
            that what they cost adds up. Where all go by the same draws they do not,
            and count as one segment, with as much noise as they have together.
        allows_shared_noise: Whether a pass costs what it costs also where its steps
            share noise.
        batches_are_bins: Whether each example tosses a coin for its batch of the pass:
            batches then vary in size, and what they cost depends on their number.
        is_known_to_pld: Whether its `event` has a privacy loss distribution; where it has
            none, RDP accounts for it and for all that is added up with it.
        number_of_examples: Size of the data set, which is public; None if unknown.
        expected_batch_size: Expected number of examples in a batch, likewise.
        examples_per_unit: Examples that share one clipped gradient.
        unit: What an example of the scheme is: `"example"`, one row of the data, or
            `"user"`, all rows of a user.
    """

    kind: ClassVar[str]
    unit: ClassVar[str] = "example"
    sampling: ClassVar[str | None] = None
    label: ClassVar[str] = ""
    counts: ClassVar[str] = "steps"
    allows_units: ClassVar[bool] = False
    is_shuffled_by_keras: ClassVar[bool] = False
    most_change_in_clips: ClassVar[int] = 1
    adds_up: ClassVar[bool] = True
    allows_shared_noise: ClassVar[bool] = False
    batches_are_bins: ClassVar[bool] = False
    is_known_to_pld: ClassVar[bool] = True

    number_of_examples: int | None
    expected_batch_size: int | None
    examples_per_unit: int = 1

    def __init_subclass__(cls) -> None:
        """Let files and arguments name the scheme."""
        kind = cls.__dict__.get("kind")
        if kind is None:  # An abstract base class of schemes.
            return
        known = _KINDS.get(kind)
        # The same class, read again, is no other one.
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(
                f"`kind` of a scheme must be its own. Received: kind={kind!r} of "
                f"`{cls.__qualname__}`, which is that of `{known.__qualname__}`. Use "
                f"`kind = {cls.__name__.lower()!r}`."
            )
        _KINDS[kind] = cls

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            TypeError: If one is no number.
            ValueError: If one is not a positive whole number.
        """
        for name, value in self.fields().items():
            object.__setattr__(self, name, positive_int(name, value))

    def fields(self) -> dict[str, int]:
        """Return what it is made of, for files."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @property
    def counts_passes(self) -> bool:
        """Whether passes over the data are counted, not steps."""
        return self.counts == "passes"

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps in an epoch, if nobody asks for another number; None if unknown."""
        n, size = self.number_of_examples, self.expected_batch_size
        return -(-n // size) if n and size else None

    @property
    def segments_of_tries(self) -> tuple[Any, ...]:
        """What a search may have run, as segments; none for a way of drawing batches."""
        return ()

    def in_epochs_of(self, batches: int) -> "Scheme":
        """Return the scheme for epochs of so many batches.

        Args:
            batches: How many. Fewer than `steps_per_epoch` end a pass early, which
                costs as much as all of it.

        Returns:
            A scheme that may be the same.

        Raises:
            ValueError: If a pass has not so many.
        """
        most = self.steps_per_epoch
        if self.counts_passes and most is not None and batches > most:
            raise ValueError(
                "An epoch must have at most the batches of a pass. Received: "
                f"{batches} batches in an epoch, {most} in a pass. Leave "
                "`steps_per_epoch` and `.repeat()` out."
            )
        return self

    @property
    def sensitivity_in_clips(self) -> int:
        """The l2 sensitivity of a step's clipped sum, as a multiple of the clip norm.

        A unit of several examples does not vanish with one of them: it is replaced.
        """
        return 1 if self.examples_per_unit == 1 else 2

    @property
    def rows_per_example(self) -> int:
        """Consecutive rows of a batch that one example of the scheme has, padding too."""
        return 1

    @property
    def slots(self) -> int | None:
        """Examples that every batch is padded to; None where it is as it was drawn."""
        return None

    @property
    def sampling_probability(self) -> float:
        """Probability with which a release has a given example in it."""
        return 1.0

    def log_chances(self, examples: int) -> NDArray[np.float64]:
        """Return how likely a release has 0, ..., k of a user's k examples in it.

        Args:
            examples: The k.

        Returns:
            Logarithms of the probabilities of 0, ..., k, shape ``(k + 1,)``. By default
            all are in it for sure, which costs most.
        """
        return np.array([-np.inf] * examples + [0.0])

    def in_units(self, examples_per_unit: int) -> "Scheme":
        """Return the scheme for units of several examples, if it allows them."""
        if not self.allows_units:
            return self
        changed: Scheme = dataclasses.replace(  # type: ignore[type-var]
            self, examples_per_unit=examples_per_unit
        )
        return changed

    def draw(
        self, key: int, epoch: int, index: int, repetition: int = 0
    ) -> NDArray[np.int64]:
        """Draw a batch, a function of the arguments alone.

        Args:
            key: A secret whole number in [0, 2^128); see `fresh_key`.
            epoch: Number of the epoch, in [0, 2^64).
            index: Place of the batch in the epoch.
            repetition: How often that batch was drawn before.

        Returns:
            Distinct indices in [0, number_of_examples), ascending, shape ``(n,)``; n
            may be 0.

        Raises:
            NotImplementedError: If tfdp cannot draw such batches.
        """
        raise NotImplementedError

    def event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return what a number of releases with Gaussian noise cost.

        Args:
            count: Steps taken, or passes begun.
            noise_multiplier: Standard deviation of the noise over the l2 sensitivity.

        Returns:
            An event of dp_accounting: Gaussian releases, Poisson draws of them, or
            `RandomAllocationDpEvent`, composed.
        """
        if count == 0:
            return dp_accounting.NoOpDpEvent()
        if noise_multiplier < _LEAST_NOISE:
            return dp_accounting.NonPrivateDpEvent()
        release = dp_accounting.GaussianDpEvent(min(noise_multiplier, _MOST_NOISE))
        if self.sampling_probability < 1:
            release = dp_accounting.PoissonSampledDpEvent(
                self.sampling_probability, release
            )
        return dp_accounting.SelfComposedDpEvent(release, count)

    def rdp_event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return what RDP takes them for: `event`, or an upper bound that it knows."""
        return self.event(count, noise_multiplier)

    def rough_event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return about what `event` costs, in terms that RDP knows.

        It is never reported: searches for the noise of a target begin with it.
        """
        return self.rdp_event(count, noise_multiplier)

    @abc.abstractmethod
    def words(self, count: int, noise: str) -> str:
        """Say what ran, for the statement.

        Args:
            count: Steps taken, or passes begun.
            noise: Says how much noise they had.
        """

    def assumption(self) -> str:
        """Say what is taken on trust beyond what `words` says; empty for nothing."""
        return ""

    @property
    def examples_per_release(self) -> int | None:
        """Examples expected in a step, or a pass; None if tables compare it with none.

        A scheme that has them, a `label` and a `sampling` is also what others are
        compared with.
        """
        return None

    def redrawn(self, count: int) -> "dict[str, tuple[Scheme, int]]":
        """Return what the same training is under each scheme that it could have had.

        Args:
            count: Steps taken, or passes begun, under this one.

        Returns:
            Schemes, and how often each draws to have at least as many examples, by
            their labels; this one is among them if it has a label.
        """
        found: dict[str, tuple[Scheme, int]] = {}
        examples = self.examples_per_release
        n, batch_size = self.number_of_examples, self.expected_batch_size
        for kind in _KINDS.values():
            if isinstance(self, kind):
                if self.label:
                    found[self.label] = self, count
            elif examples and n and batch_size and kind.sampling and kind.label:
                other = samplings()[kind.sampling](n, batch_size)
                of_other = other.examples_per_release
                if of_other and (self.examples_per_unit == 1 or kind.allows_units):
                    found[kind.label] = other, -(-count * examples // of_other)
        return found


# By the names in files, in the order in which tables compare them.
_KINDS: dict[str, type[Scheme]] = {}


def scheme_of_kind(kind: object) -> type[Scheme]:
    """Return the scheme that a saved ledger names.

    Args:
        kind: What the file says.

    Raises:
        ValueError: If there is none of that name.
    """
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"A segment's `kind` must be one of {', '.join(map(repr, _KINDS))}. "
            f"Received: kind={kind!r}."
        )
    return _KINDS[kind]


def samplings() -> dict[str, Callable[[int, int], Scheme]]:
    """Return what makes the schemes that arguments can name, by these names.

    Returns:
        Functions of the number of examples and the expected batch size.
    """
    named = {each.sampling: each for each in _KINDS.values() if each.sampling}
    return cast("dict[str, Callable[[int, int], Scheme]]", named)
