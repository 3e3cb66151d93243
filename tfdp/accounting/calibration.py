"""From a target epsilon back to the noise, or to the number of steps."""

import functools
import math
from collections.abc import Callable, Iterable

import numpy as np
from dp_accounting.pld import accountant as pld_accountant
from dp_accounting.pld import common

from tfdp._validate import one_of, positive, positive_int, probability
from tfdp.accounting.accountant import ACCOUNTANTS, epsilon, rough_epsilon
from tfdp.accounting.ledger import Ledger
from tfdp.accounting.segments import Segment
from tfdp.sampling import samplings

# Noise multipliers are searched among the multiples of 1 / _PER_UNIT, and steps and
# passes among the whole numbers, up to these ends.
_PER_UNIT = 1_000_000
# So many of which are a step of a search that another one begins with.
_PER_GUESS = 1000
_MOST_NOISE = 100_000 * _PER_UNIT
MOST_COUNT = 1_000_000_000

# Segments and delta -> epsilon.
_Cost = Callable[[Iterable[Segment], float], float]
_COSTS: dict[str, _Cost] = {
    name: functools.partial(epsilon, accountant=name) for name in ACCOUNTANTS
}


def calibrate_noise_multiplier(
    target_epsilon: float,
    *,
    n: int,
    batch_size: int,
    epochs: float | None = None,
    steps: int | None = None,
    delta: float,
    accountant: str = "PLD",
    sampling: str = "poisson",
) -> float:
    """Find the least noise multiplier that keeps a training within an epsilon.

    The training is ``epochs * ceil(n / batch_size)`` steps, rounded up, on batches that
    are drawn as `sampling` says, which is what `fit` takes; or `steps` of them. Where
    passes are what counts, each counts as soon as it has begun.

    Guarantees:
        The epsilon of that training with the returned noise multiplier, by the same
        accountant, is at most ``target_epsilon``, also where the multiplier is held
        in single precision, as optimizers hold it. To about five digits there is no
        smaller one.

    Args:
        target_epsilon: Epsilon that the training may cost.
        n: Number of examples in the training data.
        batch_size: Expected number of examples in a batch.
        epochs: Number of epochs, which need not be whole.
        steps: Number of steps, in place of epochs.
        delta: Probability with which the bound may fail, between 0 and 1.
        accountant: ``"PLD"`` or ``"RDP"``: the one that the budget is kept by.
        sampling: As in `DPModel`: ``"poisson"``, ``"balls_in_bins"``, ``"shuffle"``,
            ``"cyclic_poisson"``, or that of a scheme of your own.

    Returns:
        The noise multiplier, with six decimals.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If an argument is out of its range, not one of `epochs` and
            `steps` is given, or no noise is enough.

    Example:
        >>> calibrate_noise_multiplier(
        ...     3.0, n=60_000, batch_size=256, epochs=60, delta=1e-5, accountant="RDP"
        ... )
        1.014801
    """
    target_epsilon = positive("target_epsilon", target_epsilon)
    one_of("accountant", accountant, ACCOUNTANTS)
    n = positive_int("n", n)
    batch_size = positive_int("batch_size", batch_size)
    if (epochs is None) == (steps is None):
        raise ValueError(
            "One of `epochs` and `steps` says how long the training is. Received: "
            f"epochs={epochs!r}, steps={steps!r}. Use `epochs=10`, or `steps=1000`."
        )
    if epochs is not None:
        steps = math.ceil(positive("epochs", epochs) * -(-n // batch_size))
    steps = positive_int("steps", steps)
    delta = probability("delta", delta)
    one_of("sampling", sampling, tuple(samplings()))
    scheme = samplings()[sampling](n, batch_size)
    count = steps
    if scheme.counts_passes:
        count = -(-steps // (scheme.steps_per_epoch or 1))

    def excess(noise: int, cost: _Cost) -> float:
        multiplier = noise / _PER_UNIT
        least = min(multiplier, float(np.float32(multiplier)))
        return cost([Segment(scheme, count, least)], delta) - target_epsilon

    exact, rough, per_guess = _COSTS[accountant], _COSTS[accountant], 1
    if accountant == "PLD":
        rough, per_guess = rough_epsilon, _PER_GUESS
    guess = _PER_UNIT // per_guess
    noise = per_guess * _least_noise(
        lambda k: excess(k * per_guess, rough), guess // 2, guess
    )
    if accountant == "PLD":
        noise = _least_noise(
            lambda k: excess(k, exact), noise * 4 // 5, noise + noise // 100 + 1
        )
    if excess(noise, exact) > 0:
        raise ValueError(
            f"`target_epsilon` is too small for {steps} steps by {accountant} "
            f"accounting, whatever the noise. Received: "
            f"target_epsilon={target_epsilon}, delta={delta}."
        )
    return noise / _PER_UNIT


def calibrate_gaussian(epsilon: float, delta: float) -> float:
    """Find the least noise for one release by the analytic Gaussian mechanism [1]_.

    Args:
        epsilon: Epsilon of the release.
        delta: Probability with which the bound may fail, between 0 and 1.

    Returns:
        The noise multiplier: standard deviation over l2 sensitivity.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If an argument is out of its range.

    Example:
        >>> round(calibrate_gaussian(0.8, delta=1e-8), 3)
        6.304

    References:
        .. [1] Balle and Wang, "Improving the Gaussian Mechanism for Differential
           Privacy: Analytical Calibration and Optimal Denoising", ICML 2018,
           Theorem 8. https://arxiv.org/abs/1805.06530
    """
    guarantee = common.DifferentialPrivacyParameters(
        positive("epsilon", epsilon), probability("delta", delta)
    )
    return float(pld_accountant.get_smallest_gaussian_noise(guarantee))


def affordable_count(
    ledger: Ledger,
    segment: Segment,
    target_epsilon: float,
    delta: float,
    accountant: str = "PLD",
    *,
    noise_multipliers: np.ndarray | None = None,
    most: int = MOST_COUNT,
) -> int:
    """Find how many more steps or passes an epsilon allows.

    Guarantees:
        With the returned number of steps or passes added to the ledger, its epsilon
        by the same accountant is at most ``target_epsilon``; with one more it would
        not be, unless `most` is reached.

    Args:
        ledger: What was run already.
        segment: What is to be added; its own count is ignored.
        target_epsilon: Epsilon that everything together may cost.
        delta: Probability with which the bound may fail, between 0 and 1.
        accountant: ``"PLD"`` or ``"RDP"``.
        noise_multipliers: Of the steps or passes to come, the last one for all that
            follow; by default the segment's.
        most: Largest count that is looked for.

    Returns:
        The number of steps or passes; ``0`` too if the budget is spent already.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If an argument is out of its range.

    Example:
        >>> from tfdp.accounting import PoissonSteps
        >>> step = PoissonSteps(1, 1.1, 60_000, 256)
        >>> affordable_count(Ledger(), step, 3.0, delta=1e-5, accountant="RDP")
        18338
    """
    target_epsilon = positive("target_epsilon", target_epsilon)
    one_of("accountant", accountant, ACCOUNTANTS)

    noise = np.array([segment.noise_multiplier])
    if noise_multipliers is not None:
        noise = np.asarray(noise_multipliers)

    def excess(count: int, cost: _Cost) -> float:
        longer = ledger.add(*with_noise(segment, noise, count))
        return cost(longer.merged().segments, delta) - target_epsilon

    count = _greatest_count(lambda k: excess(k, _COSTS["RDP"]), 0, 1, most)
    if accountant == "PLD" and count < most:
        near = _greatest_count(
            lambda k: excess(k, rough_epsilon), count, count + 1, most
        )
        count = _greatest_count(
            lambda k: excess(k, _COSTS["PLD"]), near, near + near // 4 + 1, most
        )
    return count


def with_noise(segment: Segment, noise: np.ndarray, count: int) -> list[Segment]:
    """Return as many steps or passes, each with its own noise multiplier.

    Args:
        segment: Says how they are drawn.
        noise: Of each; the last one is that of all that follow.
        count: How many.

    Returns:
        A segment for each noise multiplier, in the order of their first.
    """
    values, first, counts = np.unique(
        noise[:count], return_index=True, return_counts=True
    )
    if count > len(noise):
        counts[values == noise[-1]] += count - len(noise)
    return [
        Segment(segment.scheme, int(counts[place]), float(values[place]))
        for place in np.argsort(first)
    ]


def _least_noise(excess: Callable[[int], float], low: int, high: int) -> int:
    """Return the least number without excess, or the greatest one that is searched."""
    while excess(high) > 0:
        if high >= _MOST_NOISE:
            return _MOST_NOISE
        low, high = high, 2 * high
    while low > 0 and excess(low) <= 0:
        low, high = low // 2, low
    return _crossing(excess, inside=high, outside=low)


def _greatest_count(
    excess: Callable[[int], float], low: int, high: int, most: int
) -> int:
    """Return the greatest number without excess, from 0 to `most`."""
    if most < MOST_COUNT and excess(most) <= 0:
        return most
    while low > 0 and excess(low) > 0:
        low, high = low // 2, low
    while high < most and excess(high) <= 0:
        low, high = high, min(4 * high, most)
    if high >= most and excess(most) <= 0:
        return most
    return _crossing(excess, inside=low, outside=min(high, most))


def _crossing(excess: Callable[[int], float], inside: int, outside: int) -> int:
    """Return the number next to the change of sign, on the side without excess.

    False position with the Illinois rule: an end that stays twice counts for half.
    Accounting is slow, and this takes a third of the calls of bisection.
    """
    value_inside, value_outside, kept = excess(inside), excess(outside), ""
    while abs(outside - inside) > 1:
        share = value_inside / (value_inside - value_outside)
        guess = inside + round(share * (outside - inside))
        guess = min(max(guess, min(inside, outside) + 1), max(inside, outside) - 1)
        value = excess(guess)
        if value <= 0:
            inside, value_inside = guess, value
            value_outside /= 2 if kept == "outside" else 1
            kept = "outside"
        else:
            outside, value_outside = guess, value
            value_inside /= 2 if kept == "inside" else 1
            kept = "inside"
    return inside
