"""A search that lets only its best model out, as a part of a ledger."""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import dp_accounting
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from tfdp._validate import instance
from tfdp.accounting.segments import Segment, segment_from_dict, segment_to_dict
from tfdp.accounting.selection import OneOfDpEvent, leaves
from tfdp.accounting.tries import Tries, tries_from_dict
from tfdp.sampling import Scheme


@dataclasses.dataclass(frozen=True)
class BestOf(Scheme):
    """The best of a secret number of trainings, each of settings that are drawn anew.

    Each try is the same random function of the data: draw settings, train, and hand out
    the model and its score. What leaves is the try of the largest score. If the number of
    tries has one of the laws of `Tries`, that costs what Theorems 2 and 6 of [1]_ say
    [dp_accounting's `RepeatAndSelectDpEvent`], from the Rényi divergences of one try.
    Those are at each order the largest among *all* candidates, drawn or not: which were
    drawn would tell of the number of tries, and the dearest one alone may be the cheaper
    one at another order.

    Two tries of equal score are told apart by which came first. Tries do not know of each
    other, so that is as if each had a random number for it, and the theorems want no more
    than an order.

    Bins that are drawn once and for all are no secret here: every pass is counted as a
    release of every row, which holds whatever the bins are. So holds what is added up
    with the search, which has no other accountant than RDP.

    Args:
        tries: The law of the number of tries.
        candidates: What each of the possible trainings runs, at most: for every candidate
            its segments.

    Raises:
        TypeError: If `tries` is no law or a segment none.
        ValueError: If there is no candidate, or one that runs nothing, or a search in it.

    Example:
        >>> from tfdp.accounting import Ledger, PoissonSteps
        >>> training = PoissonSteps(14_100, 1.1, 60_000, 256)
        >>> search = BestOf(tfdp.tuning.Geometric(mean=10), [[training]])
        >>> round(Ledger((search.segment(),)).epsilon(delta=1e-5), 2)
        5.06

    References:
        .. [1] Papernot and Steinke, "Hyperparameter Tuning with Renyi Differential
           Privacy", ICLR 2022. https://arxiv.org/abs/2110.03620
    """

    kind: ClassVar[str] = "best_of"
    counts: ClassVar[str] = "searches"
    is_known_to_pld: ClassVar[bool] = False

    tries: Tries
    candidates: tuple[tuple[Segment, ...], ...]

    def __post_init__(self) -> None:
        """Check what it is made of; files have dictionaries in place of objects."""
        if isinstance(self.tries, dict):
            object.__setattr__(self, "tries", tries_from_dict(self.tries))
        instance("tries", self.tries, Tries)
        candidates = tuple(map(_candidate, self.candidates))
        object.__setattr__(self, "candidates", tuple(dict.fromkeys(candidates)))
        if not candidates:
            raise ValueError("`candidates` must have one. Received: candidates=[].")

    @property
    def number_of_examples(self) -> int | None:  # type: ignore[override]
        """Size of the data set, None if no candidate says it."""
        known = (each.scheme.number_of_examples for each in self.segments_of_tries)
        return max((each for each in known if each), default=None)

    @property
    def expected_batch_size(self) -> None:  # type: ignore[override]
        """Unknown: candidates may differ in it."""

    @property
    def segments_of_tries(self) -> tuple[Segment, ...]:
        """The segments of all candidates."""
        return tuple(segment for each in self.candidates for segment in each)

    def segment(self, searches: int = 1) -> Segment:
        """Return the search as a part of a ledger."""
        return Segment(self, searches, self._least_noise())

    def fields(self) -> dict[str, Any]:
        """Return what it is made of, for files."""
        return {
            "tries": self.tries.to_dict(),
            "candidates": [
                list(map(segment_to_dict, each)) for each in self.candidates
            ],
        }

    def event(self, count: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return what a number of searches cost, in terms that RDP knows."""
        if count == 0:
            return dp_accounting.NoOpDpEvent()
        try_ = OneOfDpEvent(tuple(map(candidate_event, self.candidates)))
        has_none = any(
            isinstance(each, dp_accounting.NonPrivateDpEvent) for each in leaves(try_)
        )
        # Its noise is that of its candidates: nobody may take it for less.
        if has_none or noise_multiplier < self._least_noise():
            return dp_accounting.NonPrivateDpEvent()
        search = RepeatAndSelectDpEvent(try_, self.tries.mean, self.tries.shape)
        return dp_accounting.SelfComposedDpEvent(search, count)

    def words(self, count: int, noise: str) -> str:
        """Say how the search went."""
        searches = "a search" if count == 1 else f"{count} searches, in each"
        tries = [
            " and ".join(segment.words() for segment in each)
            for each in self.candidates
        ]
        return (
            f"{searches}: the best of a secret number of tries, {self.tries.words()}; "
            f"each try at most {', or '.join(tries)}"
        )

    def assumption(self) -> str:
        """Say that the rest stays inside."""
        return (
            "That nothing else of a search gets out than its best model, neither the "
            "other models, their scores and logs, nor how many there were, is taken on "
            "trust; how long it took tells of their number."
        )

    def _least_noise(self) -> float:
        return min(segment.noise_multiplier for segment in self.segments_of_tries)


def candidate_event(segments: Iterable[Segment]) -> dp_accounting.DpEvent:
    """Return what a candidate costs, as RDP knows it.

    Args:
        segments: What it runs.
    """
    return dp_accounting.ComposedDpEvent([
        each.scheme.rdp_event(each.count, each.noise_multiplier) for each in segments
    ])


def _candidate(segments: Iterable[Segment | dict[str, Any]]) -> tuple[Segment, ...]:
    found = tuple(
        segment_from_dict(each) if isinstance(each, dict) else each for each in segments
    )
    for segment in found:
        instance("candidates", segment, Segment)
        if isinstance(segment.scheme, BestOf):
            raise ValueError(
                "A candidate must be trainings, not another search. Received: "
                f"{segment.words()}."
            )
    if not any(segment.count for segment in found):
        raise ValueError(
            "A candidate must run something. Received: a candidate without steps. Use "
            "`epochs=1` or more."
        )
    return found
