"""What a ledger leaves to attackers: how often they find a member, at most."""

import math

import numpy as np

from tfdp._validate import probability
from tfdp.accounting.accountant import deltas
from tfdp.accounting.ledger import Ledger

_LINES = 500


def true_positive_rate(ledger: Ledger, false_positive_rate: float) -> float:
    """Bound how often any attack finds a record that was trained on.

    The attack may know all other records and see all weights of the training. It calls a
    record a member; of records that are none it does so at the false-positive rate. Of
    those that are members it then finds, for every epsilon with its delta, at most
    ``exp(epsilon) * false_positive_rate + delta``, and misses at least
    ``exp(-epsilon) * (1 - false_positive_rate - delta)`` [1]_. The smallest of these
    bounds is returned; the deltas come from the privacy loss distribution of all that
    ran, or from Rényi differential privacy where that would be too large.

    Guarantees:
        The result is an upper bound, for one record (one user, where users are the
        unit), whichever finite number of epsilons is tried. Runs that were cut short
        count in full, as in the statement.

    Args:
        ledger: What was run.
        false_positive_rate: Between 0 and 1.

    Returns:
        The largest true-positive rate, between ``false_positive_rate``, where nothing
        ran, and ``1``, where something ran without noise.

    Raises:
        TypeError: If the rate is no number.
        ValueError: If it is outside (0, 1).

    Example:
        >>> from tfdp.accounting import PoissonSteps
        >>> ledger = Ledger().add(PoissonSteps(14_063, 1.1, 60_000, 256))
        >>> round(true_positive_rate(ledger, 0.01), 3)
        0.04

    References:
        .. [1] Kairouz, Oh, Viswanath, "The Composition Theorem for Differential
           Privacy", ICML 2015, theorem 2.1. https://arxiv.org/abs/1311.0776
    """
    rate = probability("false_positive_rate", false_positive_rate)
    # Beyond the first, the first of the bounds is above 1; 10 is enough for the other.
    epsilons = np.linspace(0.0, max(-math.log(rate), 10.0), _LINES)
    found = deltas(ledger.planned().merged().segments, epsilons)
    up = np.exp(epsilons) * rate + found
    down = 1 - np.exp(-epsilons) * (1 - rate - found)
    # Rounding must not take it below what guessing has.
    return float(np.clip(min(up.min(), down.min()), rate, 1.0))
