"""The ledger: what was really run, as a value."""

import dataclasses
import json
import math
from typing import Any

from tfdp.accounting import accountant as accountants
from tfdp.accounting.segments import Segment, segment_from_dict, segment_to_dict

_SEGMENTS = ("segments", "cut_short")
# Files that were written before there was anything to release have none of these.
_FLAGS_OF_RELEASES = ("ended_by_release", "saw_other_rows")
FLAGS = ("noise_seed_fixed", "sampling_seed_fixed", *_FLAGS_OF_RELEASES)


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What was really run on one data set, and the epsilon that it cost.

    A ledger never changes: adding to it gives a new one.

    Args:
        segments: What was run, in order.
        cut_short: Steps that were planned and not taken, because something other than a
            privacy budget ended the run. The decision to stop may have looked at
            private data, so only ``planned()`` is proven for such runs.
        noise_seed_fixed: Whether a user chose a seed of the noise.
        sampling_seed_fixed: Whether a user chose a seed of the draws.
        ended_by_release: Whether a run ended early because of what was released of the
            same data: that decision is covered, and nothing is owed for what was
            planned.
        saw_other_rows: Whether metrics of other private rows were released, which have
            a ledger of their own.

    Raises:
        TypeError: If a segment is none, or a flag is no bool.

    Example:
        >>> from tfdp.accounting import Ledger, PoissonSteps
        >>> ledger = Ledger().add(PoissonSteps(14_063, 1.1, 60_000, 256))
        >>> round(ledger.epsilon(delta=1e-5), 3)
        2.382
    """

    segments: tuple[Segment, ...] = ()
    cut_short: tuple[Segment, ...] = ()
    noise_seed_fixed: bool = False
    sampling_seed_fixed: bool = False
    ended_by_release: bool = False
    saw_other_rows: bool = False

    def __post_init__(self) -> None:
        for name in _SEGMENTS:
            segments = tuple(getattr(self, name))
            for segment in segments:
                if not isinstance(segment, Segment):
                    raise TypeError(
                        f"`{name}` must hold segments only. Received: {segment!r}."
                    )
            object.__setattr__(self, name, segments)
        for name in FLAGS:
            flag = getattr(self, name)
            if not isinstance(flag, bool):
                raise TypeError(
                    f"`{name}` must be True or False. Received: {name}={flag!r}."
                )

    @property
    def steps(self) -> int:
        """Steps run, those inside shuffled passes and of searches left out."""
        return sum(
            s.count
            for s in self.segments
            if s.scheme.counts == "steps" and not s.released
        )

    @property
    def passes(self) -> int:
        """Passes that have begun."""
        return sum(s.count for s in self.segments if s.scheme.counts_passes)

    @property
    def releases(self) -> int:
        """Releases of metrics, which are no steps."""
        return sum(s.count for s in self.segments if s.released)

    @property
    def looks(self) -> int:
        """Moments up to the end at which a released value could have ended a run.

        1 where none has ended one. Where it was a value of other rows nobody knows more
        than that it came after a step.
        """
        if not self.ended_by_release:
            return 1
        return max(
            self.releases, self.steps + self.passes if self.saw_other_rows else 1
        )

    def delta_at_end(self, delta: float) -> float:
        """Return the share of a delta at which the last of the looks is accounted.

        Where a run ends depends on the data then. What it has cost by the k-th look holds
        with a delta for each: ``6 / (pi k)^2`` of the whole, which adds up to it over
        all k.

        Args:
            delta: Of the guarantee.

        Returns:
            The same where no released value has ended a run.
        """
        return delta if self.looks == 1 else delta * 6 / (math.pi * self.looks) ** 2

    def add(self, *segments: Segment) -> "Ledger":
        """Return a ledger in which these segments ran after the others."""
        return dataclasses.replace(self, segments=self.segments + segments)

    def planned(self) -> "Ledger":
        """Return the ledger as it were if every run had reached its planned end."""
        return dataclasses.replace(
            self, segments=self.segments + self.cut_short, cut_short=()
        )

    def merged(self) -> "Ledger":
        """Return the same ledger with equal segments added up and empty ones gone.

        A merged segment stands where its last part stood.
        """
        return dataclasses.replace(
            self, segments=_merged(self.segments), cut_short=_merged(self.cut_short)
        )

    def epsilon(self, delta: float, accountant: str = "PLD") -> float:
        """Compute the epsilon of everything that was run.

        Args:
            delta: Probability with which the bound may fail, between 0 and 1.
            accountant: ``"PLD"`` or ``"RDP"``.

        Returns:
            An upper bound, ``0`` where nothing ran, ``inf`` where noise was missing.

        Raises:
            TypeError: If ``delta`` is no number.
            ValueError: If ``delta`` is outside (0, 1) or the accountant is unknown.

        Example:
            >>> Ledger().epsilon(delta=1e-5)
            0.0
        """
        return accountants.epsilon(self.merged().segments, delta, accountant)

    def to_json(self) -> str:
        """Return the ledger as JSON.

        Returns:
            The text that `from_json` reads.

        Example:
            >>> Ledger.from_json(Ledger().to_json()) == Ledger()
            True
        """
        fields: dict[str, Any] = {
            name: [segment_to_dict(segment) for segment in getattr(self, name)]
            for name in _SEGMENTS
        }
        return json.dumps(fields | {name: getattr(self, name) for name in FLAGS})

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """Read a ledger that `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            A ledger equal to the one written.

        Raises:
            ValueError: If the text is damaged: no JSON, or a field is missing,
                unknown or wrong.
        """
        try:
            fields: dict[str, Any] = dict.fromkeys(_FLAGS_OF_RELEASES, False)
            fields |= json.loads(text)
            if sorted(fields) != sorted(_SEGMENTS + FLAGS):
                raise ValueError(f"Its fields are {sorted(fields)}.")
            for name in _SEGMENTS:
                fields[name] = [segment_from_dict(entry) for entry in fields[name]]
            return cls(**fields)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"A ledger must be JSON written by `Ledger.to_json`. {error} "
                f"Received: text={text!r:.200}."
            ) from error


def compose(*ledgers: Ledger) -> Ledger:
    """Return the joint ledger of models trained on the same data.

    What several of the models come from counts once for each; the ledger of a private
    model that has the weights of all of them counts it once.

    Args:
        *ledgers: One ledger a model, all of the same data set.

    Returns:
        A ledger whose epsilon protects against someone who sees all of the models.

    Raises:
        TypeError: If an argument is no ledger.

    Example:
        >>> from tfdp.accounting import Ledger, PoissonSteps, compose
        >>> one = Ledger((PoissonSteps(875, 10.0, 50_000, 4096),))
        >>> round(compose(one, one).epsilon(delta=1e-5), 3)
        1.319
    """
    for ledger in ledgers:
        if not isinstance(ledger, Ledger):
            raise TypeError(f"`compose` takes ledgers only. Received: {ledger!r}.")
    return Ledger(
        segments=tuple(s for ledger in ledgers for s in ledger.segments),
        cut_short=tuple(s for ledger in ledgers for s in ledger.cut_short),
        **{flag: any(getattr(each, flag) for each in ledgers) for flag in FLAGS},
    )


def _merged(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    counts: dict[Segment, int] = {}
    for segment in segments:
        if segment.count:
            key = segment.with_count(1)
            counts[key] = counts.pop(key, 0) + segment.count
    return tuple(key.with_count(count) for key, count in counts.items())
