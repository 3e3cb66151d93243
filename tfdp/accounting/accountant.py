"""Segments to epsilon, with what dp_accounting has for it.

It knows neighbours that differ in a record that one of them replaces by an empty one
only in later versions; under add-or-remove-one, its default, the numbers are the same.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution, privacy_loss_mechanism

from tfdp._validate import one_of, probability
from tfdp.accounting.allocation import loss_of_allocation
from tfdp.accounting.segments import Segment
from tfdp.accounting.selection import RdpAccountant
from tfdp.sampling import RandomAllocationDpEvent, Scheme, Unknown
from tfdp.sampling.scheme import LEAST_AMPLIFIED_NOISE

ACCOUNTANTS = ("PLD", "RDP")
# RDP of a scheme's `rough_event`: no bound, and never reported.
_ROUGHLY = "rough RDP"

# Privacy loss distributions are computed up to these limits. Their memory grows with
# epsilon and with 1 / noise_multiplier**2, to tens of gigabytes, and their time with
# the count. Beyond them the RDP figure stands in, which is an upper bound too.
_PLD_MOST_EPSILON = 200.0
_PLD_MOST_COUNT = 1_000_000

# Grid on which privacy loss is rounded up; the coarser one where many segments would
# take long. It costs up to a percent, or more where RDP has the smaller bound anyway.
_PLD_INTERVAL = 1e-4
_PLD_COARSE_INTERVAL = 5e-4
_PLD_FEW_SEGMENTS = 4
# Convolutions of losses round in float64: of a delta so much may be lost for each of the
# steps. At most 2e-17 was seen, against sums of all steps' releases and 80-bit floats.
_LOST_BY_A_STEP = 1e-15
# At which a run's epsilon says whether its loss distribution is affordable.
_SMALL_DELTA = 1e-6


def epsilon(
    segments: Iterable[Segment], delta: float, accountant: str = "PLD"
) -> float:
    """Compute the joint epsilon of segments run on the same data.

    Neighbouring data sets differ in one record, which one of them replaces by an
    empty record that contributes nothing.

    Guarantees:
        The result is an upper bound that is never negative: ``0`` where nothing ran
        and ``inf`` where something ran without noise. Where privacy loss
        distributions would need too much memory (epsilon above 200, Poisson sampling or
        balls in bins with a noise multiplier below 0.2, more than a million steps), and for
        searches, which have none, ``"PLD"`` returns the bound of ``"RDP"``, and of more
        than four segments the smaller of both.

    Args:
        segments: What was run.
        delta: Probability with which the bound may fail, between 0 and 1.
        accountant: ``"PLD"``, privacy loss distributions, or ``"RDP"``, Rényi
            differential privacy.

    Returns:
        The epsilon at ``delta``.

    Raises:
        TypeError: If ``delta`` is no number.
        ValueError: If ``delta`` is outside (0, 1) or the accountant is unknown.

    Example:
        >>> from tfdp.accounting import PoissonSteps
        >>> steps = PoissonSteps(14_063, 1.1, 60_000, 256)
        >>> round(epsilon([steps], delta=1e-5), 3)
        2.382
        >>> round(epsilon([steps], delta=1e-5, accountant="RDP"), 3)
        2.597
    """
    delta = probability("delta", delta)
    accountant = one_of("accountant", accountant, ACCOUNTANTS)
    return _epsilon(_counted(segments), delta, accountant)


def reported_epsilon(segments: Iterable[Segment], delta: float) -> float:
    """Compute the epsilon to publish: the smaller of the two accountants' bounds.

    Args:
        segments: What was run.
        delta: Probability with which the bound may fail, between 0 and 1.

    Returns:
        The smaller epsilon at ``delta``.

    Example:
        >>> from tfdp.accounting import PoissonSteps
        >>> round(reported_epsilon([PoissonSteps(875, 10.0, 50_000, 4096)], 1e-5), 3)
        0.903
    """
    segments = tuple(segments)
    return min(epsilon(segments, delta, name) for name in ACCOUNTANTS)


def deltas(
    segments: Iterable[Segment], epsilons: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Compute the joint deltas of segments at several epsilons.

    Args:
        segments: What was run.
        epsilons: Epsilons of at least 0, shape ``(K,)``.

    Returns:
        An upper bound at each epsilon, float64, shape ``(K,)``, from privacy loss
        distributions, or Rényi differential privacy where `epsilon` takes that: all
        ``1`` where something ran without noise.

    Example:
        >>> from tfdp.accounting import PoissonSteps
        >>> steps = PoissonSteps(14_063, 1.1, 60_000, 256)
        >>> f"{deltas([steps], [2.382])[0]:.1e}"
        '1.0e-05'
    """
    segments = _counted(segments)
    if any(segment.noise_multiplier == 0 for segment in segments):
        return np.ones(len(epsilons))
    few = len(segments) <= _PLD_FEW_SEGMENTS
    is_cheap = all(
        segment.scheme.is_known_to_pld for segment in segments
    ) and _pld_is_affordable(segments, _rough_epsilon(segments, _SMALL_DELTA))
    bounds = [np.ones(len(epsilons))]
    if is_cheap:
        loss = _composed_loss(segments, _PLD_INTERVAL if few else _PLD_COARSE_INTERVAL)
        lost = _lost(segments)
        bounds.append(loss.get_delta_for_epsilon(np.asarray(epsilons)) + lost)
        in_full = _in_full(segments)
        if in_full != segments:
            bounds.append(deltas(in_full, epsilons))
    if not is_cheap or not few:
        with _absl_warnings_off():
            composed = _composed_rdp(segments)
            bounds.append(np.array([composed.get_delta(each) for each in epsilons]))
    lowest: np.ndarray = np.maximum(0.0, np.min(bounds, axis=0))
    return lowest


def rough_epsilon(segments: Iterable[Segment], delta: float) -> float:
    """Return about the epsilon of segments, quickly: to begin a search with.

    Args:
        segments: What was run.
        delta: Probability with which the bound may fail, between 0 and 1.

    Returns:
        No bound: the figure of RDP for draws that cost about as much.
    """
    return _rough_epsilon(_counted(segments), delta)


def merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return segments whose costs add up.

    Args:
        segments: What was run.

    Returns:
        The same; of those that go by the same draws one alone, of one release with the
        noise that all of them have together, where the last of them stood.
    """
    found: dict[Scheme | int, list[Segment]] = {}
    for place, segment in enumerate(segments):
        key = place if segment.scheme.adds_up else segment.scheme
        found[key] = [*found.pop(key, []), segment]
    return tuple(map(_together, found.values()))


def _together(parts: list[Segment]) -> Segment:
    """Return releases of different noise on the same draws as a single one."""
    if parts[0].scheme.adds_up:
        return parts[0]
    least = min(part.noise_multiplier for part in parts)
    if least == 0:
        return Segment(parts[0].scheme, 1, 0.0)
    shares = (math.sqrt(part.count) * least / part.noise_multiplier for part in parts)
    return Segment(parts[0].scheme, 1, least / math.hypot(*shares))


def _counted(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return merged(s for s in segments if s.count)


@functools.lru_cache(maxsize=4096)
def _epsilon(segments: tuple[Segment, ...], delta: float, accountant: str) -> float:
    if accountant in {"RDP", _ROUGHLY}:
        with _absl_warnings_off():
            return max(
                0.0, float(_composed_rdp(segments, accountant).get_epsilon(delta))
            )
    if not all(segment.scheme.is_known_to_pld for segment in segments):
        return _epsilon(segments, delta, "RDP")
    few = len(segments) <= _PLD_FEW_SEGMENTS
    is_cheap = few and _pld_is_affordable(segments, _rough_bound(segments, delta))
    # The rough bound mostly comes out of the cache; a closer one takes longer.
    if not is_cheap and not _pld_is_affordable(
        segments, _rough_epsilon(segments, delta)
    ):
        return _epsilon(segments, delta, "RDP")
    lost = _lost(segments)
    if not lost < delta:
        return _epsilon(segments, delta, "RDP")
    interval = _PLD_INTERVAL if few else _PLD_COARSE_INTERVAL
    loss = _composed_loss(segments, interval)
    result = max(0.0, float(loss.get_epsilon_for_delta(delta - lost)))
    in_full = _in_full(segments)
    if in_full != segments and _may_be_less(in_full, segments, result, delta):
        result = min(result, _epsilon(in_full, delta, accountant))
    if few and math.isfinite(result) and 10 * lost < delta:
        return result
    # What a loss distribution cuts off, or rounds, may be more than a tiny delta.
    return min(result, _epsilon(segments, delta, "RDP"))


def lost_by_rounding(steps: int) -> float:
    """Return how much of a delta may be lost where the losses of so many steps compose."""
    return _LOST_BY_A_STEP * steps


def _lost(segments: tuple[Segment, ...]) -> float:
    return lost_by_rounding(sum(map(_convolutions, segments)))


@functools.lru_cache(maxsize=4096)
def _convolutions(segment: Segment) -> int:
    """Count the steps of a segment whose losses are composed."""
    return _convolutions_of(segment.event())


def _convolutions_of(event: dp_accounting.DpEvent) -> int:
    match event:
        case dp_accounting.ComposedDpEvent():
            return sum(map(_convolutions_of, event.events))
        case dp_accounting.SelfComposedDpEvent():
            # Gaussian releases together are one.
            is_gaussian = isinstance(event.event, dp_accounting.GaussianDpEvent)
            return 1 if is_gaussian else event.count * _convolutions_of(event.event)
        case RandomAllocationDpEvent():
            return int(event.batches)
    return 1


def _in_full(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return segments with whole passes for random allocations, which cost at most that.

    What is computed for allocations may be more where bins are few and the noise small.
    """
    return tuple(
        dataclasses.replace(each, scheme=Unknown()) if _is_allocation(each) else each
        for each in segments
    )


@functools.lru_cache(maxsize=4096)
def _is_allocation(segment: Segment) -> bool:
    event = segment.event()
    return isinstance(getattr(event, "event", event), RandomAllocationDpEvent)


def _may_be_less(
    in_full: tuple[Segment, ...],
    segments: tuple[Segment, ...],
    result: float,
    delta: float,
) -> bool:
    """Tell whether whole passes, alone, cost less than all of the segments."""
    if not math.isfinite(result):
        return True
    shift = math.hypot(
        *(
            math.sqrt(whole.count) / whole.noise_multiplier
            for whole, segment in zip(in_full, segments, strict=True)
            if whole != segment
        )
    )
    whole = privacy_loss_mechanism.GaussianPrivacyLoss(1 / shift)
    return bool(whole.get_delta_for_epsilon(result) < delta)


def _rough_bound(segments: tuple[Segment, ...], delta: float) -> float:
    """Return about an upper bound, the same one for nearly all epochs of a run.

    The counts are rounded up to powers of two, so that it mostly comes out of the
    cache.
    """
    longer = tuple(s.with_count(1 << (s.count - 1).bit_length()) for s in segments)
    return _rough_epsilon(longer, delta)


def _rough_epsilon(segments: tuple[Segment, ...], delta: float) -> float:
    knows_all = all(map(is_known_to_rdp, segments))
    return _epsilon(segments, delta, "RDP" if knows_all else _ROUGHLY)


@functools.lru_cache(maxsize=4096)
def is_known_to_rdp(segment: Segment) -> bool:
    """Tell whether RDP knows what a segment costs, and not just an upper bound of it.

    Args:
        segment: What was run.

    Returns:
        False for bins, for example.
    """
    scheme, count, noise = segment.scheme, segment.count, segment.noise_multiplier
    return bool(scheme.rough_event(count, noise) == scheme.rdp_event(count, noise))


def _pld_is_affordable(segments: tuple[Segment, ...], upper_bound: float) -> bool:
    return upper_bound <= _PLD_MOST_EPSILON and all(
        segment.count <= _PLD_MOST_COUNT
        and segment.noise_multiplier >= _least_noise(segment)
        for segment in segments
    )


@functools.lru_cache(maxsize=4096)
def _least_noise(segment: Segment) -> float:
    """Return the noise multiplier from which on PLD takes the segment."""
    event = segment.event()
    release = getattr(event, "event", event)
    is_gaussian = isinstance(release, dp_accounting.GaussianDpEvent)
    return 0.0 if is_gaussian else LEAST_AMPLIFIED_NOISE


@functools.lru_cache(maxsize=64)
def _composed_rdp(
    segments: tuple[Segment, ...], accountant: str = "RDP"
) -> RdpAccountant:
    """Return an accountant that has composed the segments; callers do not change it."""
    if not segments:
        return RdpAccountant()
    known = _known_part(segments)
    result = copy.deepcopy(_composed_rdp(known, accountant))
    for segment in segments[len(known) :]:
        scheme = segment.scheme
        event = scheme.rough_event if accountant == _ROUGHLY else scheme.rdp_event
        result.compose(event(segment.count, segment.noise_multiplier))
    return result


@functools.lru_cache(maxsize=64)
def _composed_loss(
    segments: tuple[Segment, ...], interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the distribution of the privacy loss of the segments together."""
    if not segments:
        return privacy_loss_distribution.identity(interval)
    known = _known_part(segments)
    result = _composed_loss(known, interval)
    for segment in segments[len(known) :]:
        result = result.compose(_loss(segment.event(), interval))
    return result


def _known_part(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return the segments whose composition is looked up, and not made anew.

    All but the last segment come out of the cache while a run adds to the last one.
    Every hundredth time all are composed anew, which bounds the recursion.
    """
    return segments[:-1] if len(segments) % 100 else ()


def _loss(
    event: dp_accounting.DpEvent, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the distribution of the privacy loss of a segment."""
    match event:
        case dp_accounting.ComposedDpEvent():
            losses = (_loss(each, interval) for each in event.events)
            identity = privacy_loss_distribution.identity(interval)
            return functools.reduce(
                lambda one, other: one.compose(other), losses, identity
            )
        case dp_accounting.SelfComposedDpEvent(event=dp_accounting.GaussianDpEvent()):
            return privacy_loss_distribution.from_gaussian_mechanism(
                event.event.noise_multiplier / math.sqrt(event.count),
                value_discretization_interval=interval,
            )
        case dp_accounting.SelfComposedDpEvent():
            return _loss(event.event, interval).self_compose(event.count)
        case dp_accounting.PoissonSampledDpEvent():
            return _loss_of_a_draw(event, interval)
        case RandomAllocationDpEvent():
            return _loss_of_an_allocation(event, interval)
    if type(event).__name__ == "TruncatedSubsampledGaussianDpEvent":
        return _loss_of_a_truncated_draw(event, interval)
    raise TypeError(
        "A scheme's `event` must be composed of Gaussian releases, Poisson draws of them "
        f"and random allocations. Received: {event!r}."
    )


@functools.lru_cache(maxsize=64)
def _loss_of_a_draw(
    release: dp_accounting.PoissonSampledDpEvent, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the distribution of the privacy loss of one step.

    It takes most of the time of all this, and is the same after every epoch.
    """
    return privacy_loss_distribution.from_gaussian_mechanism(
        release.event.noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=release.sampling_probability,
    )


@functools.lru_cache(maxsize=64)
def _loss_of_a_truncated_draw(
    release: dp_accounting.DpEvent, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the distribution of the privacy loss of one step with a full batch, too."""
    return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        release.dataset_size,
        release.sampling_probability,
        release.truncated_batch_size,
        release.noise_multiplier,
        value_discretization_interval=interval,
    )


@functools.lru_cache(maxsize=64)
def _loss_of_an_allocation(
    event: RandomAllocationDpEvent, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Return the distribution of the privacy loss of an epoch of balls in bins."""
    return loss_of_allocation(event.batches, event.noise_multiplier, interval)


@contextlib.contextmanager
def _absl_warnings_off() -> Iterator[None]:
    """Silence the note, one a Rényi order, that dp_accounting left the order out."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger = logging.getLogger("absl")
    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)
