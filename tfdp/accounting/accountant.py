"""Segments to epsilon, with the accountants of dp_accounting."""

import contextlib
import copy
import functools
import logging
import math
from collections.abc import Iterable, Iterator

import dp_accounting
from dp_accounting import pld, rdp

from tfdp._validate import one_of, probability
from tfdp.accounting.segments import PoissonSteps, Segment

ACCOUNTANTS = ("PLD", "RDP")

# Privacy loss distributions are computed up to these limits. Their memory grows with
# epsilon and with 1 / noise_multiplier**2, to tens of gigabytes, and their time with
# the count. Beyond them the RDP figure stands in, which is an upper bound too.
_PLD_MOST_EPSILON = 200.0
_PLD_MOST_COUNT = 1_000_000
_PLD_LEAST_POISSON_NOISE = 0.2

# Grid on which privacy loss is rounded up; the coarser one where many segments would
# take long. It costs up to a percent, or more where RDP has the smaller bound anyway.
_PLD_INTERVAL = 1e-4
_PLD_COARSE_INTERVAL = 5e-4
_PLD_FEW_SEGMENTS = 4


def epsilon(
    segments: Iterable[Segment], delta: float, accountant: str = "PLD"
) -> float:
    """Compute the joint epsilon of segments run on the same data.

    Neighbouring data sets differ in one record, which one of them replaces by an
    empty record that contributes nothing.

    Guarantees:
        The result is an upper bound that is never negative: ``0`` where nothing ran
        and ``inf`` where something ran without noise. Where privacy loss
        distributions would need too much memory (epsilon above 200, Poisson sampling
        with a noise multiplier below 0.2, more than a million steps), ``"PLD"``
        returns the bound of ``"RDP"``, and of more than four segments the smaller of
        both.

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
        >>> steps = PoissonSteps(14_063, 1.1, 60_000, 256)
        >>> round(epsilon([steps], delta=1e-5), 3)
        2.382
        >>> round(epsilon([steps], delta=1e-5, accountant="RDP"), 3)
        2.597
    """
    delta = probability("delta", delta)
    accountant = one_of("accountant", accountant, ACCOUNTANTS)
    return _epsilon(tuple(s for s in segments if s.count), delta, accountant)


def reported_epsilon(segments: Iterable[Segment], delta: float) -> float:
    """Compute the epsilon to publish: the smaller of the two accountants' bounds.

    Args:
        segments: What was run.
        delta: Probability with which the bound may fail, between 0 and 1.

    Returns:
        The smaller epsilon at ``delta``.

    Example:
        >>> round(reported_epsilon([PoissonSteps(875, 10.0, 50_000, 4096)], 1e-5), 3)
        0.903
    """
    segments = tuple(segments)
    return min(epsilon(segments, delta, name) for name in ACCOUNTANTS)


@functools.lru_cache(maxsize=4096)
def _epsilon(segments: tuple[Segment, ...], delta: float, accountant: str) -> float:
    upper_bound = math.inf
    if accountant == "PLD":
        bound_of_rdp = _epsilon(segments, delta, "RDP")
        if not _pld_is_affordable(segments, bound_of_rdp):
            return bound_of_rdp
        if len(segments) > _PLD_FEW_SEGMENTS:
            accountant, upper_bound = "coarse PLD", bound_of_rdp
    with _absl_warnings_off():
        result = float(_composed(segments, accountant).get_epsilon(delta))
    return min(max(0.0, result), upper_bound)


def _pld_is_affordable(segments: tuple[Segment, ...], upper_bound: float) -> bool:
    return upper_bound <= _PLD_MOST_EPSILON and all(
        segment.count <= _PLD_MOST_COUNT
        and not (
            isinstance(segment, PoissonSteps)
            and segment.noise_multiplier < _PLD_LEAST_POISSON_NOISE
        )
        for segment in segments
    )


@functools.lru_cache(maxsize=64)
def _composed(
    segments: tuple[Segment, ...], accountant: str
) -> dp_accounting.PrivacyAccountant:
    """Return an accountant that has composed the segments; callers do not change it.

    All but the last segment come out of the cache while a run adds to the last one.
    Every hundredth time all are composed anew, which bounds the recursion.
    """
    if not segments:
        return _fresh(accountant)
    known = segments[:-1] if len(segments) % 100 else ()
    result = copy.deepcopy(_composed(known, accountant))
    for segment in segments[len(known) :]:
        result.compose(segment.event())
    return result


def _fresh(accountant: str) -> dp_accounting.PrivacyAccountant:
    relation = _neighboring_relation()
    if accountant == "RDP":
        return rdp.RdpAccountant(neighboring_relation=relation)
    interval = _PLD_INTERVAL if accountant == "PLD" else _PLD_COARSE_INTERVAL
    return pld.PLDAccountant(
        neighboring_relation=relation, value_discretization_interval=interval
    )


@functools.cache
def _neighboring_relation() -> dp_accounting.NeighboringRelation:
    """Return the relation to compose under.

    That is a record replaced by an empty one. Versions of dp_accounting that do not
    know Poisson sampling under it have the same numbers under add-or-remove-one.
    """
    special = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    sampled = dp_accounting.PoissonSampledDpEvent(
        0.5, dp_accounting.GaussianDpEvent(1.0)
    )
    fresh = (rdp.RdpAccountant, pld.PLDAccountant)
    if all(make(neighboring_relation=special).supports(sampled) for make in fresh):
        return special
    return dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


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
