"""From the scores of canaries to an epsilon that cannot be smaller."""

import math
from collections.abc import Callable

import numpy as np
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
from numpy.typing import ArrayLike
from scipy import optimize, special, stats

from tfdp._validate import one_of, positive_int, probability

CURVES = ("gaussian", "any")

# Of the canaries so many are guessed at by default: the surest. Of 1,000 in a single
# Gaussian release it proved 0.59, 0.57 and 0.51 of epsilon on average, at a delta of 1e-5
# and noise multipliers of 0.5, 1 and 2; a tenth or a quarter proved less at the ends.
_GUESSED = 0.2

# No audit proves more, and e to the power of it is a number.
_MOST_EPSILON = 200.0


def epsilon_lower_bound(
    scores: ArrayLike,
    inserted: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    *,
    guesses: int | None = None,
    curve: str = "gaussian",
) -> float:
    """Compute an epsilon that a mechanism exceeds, from one run with canaries in it.

    Each canary was inserted or not by a fair coin of its own. The highest scores are
    guessed to be inserted ones, as many of the lowest to be others, and from the
    number of right guesses follows how private the mechanism cannot be.

    ``curve="any"`` assumes nothing: were the mechanism ``(epsilon, delta)``-private, so
    many right guesses would be too unlikely [1]_ (theorem 5.2). ``curve="gaussian"``
    proves much more and assumes that the trade-off between the errors of attackers is
    that of a Gaussian mechanism, whose noise is what it finds out [2]_. It holds for
    noised sums that everything is in; the curve of many steps over Poisson draws nearly
    is one, with heavier tails, so that their epsilon is larger still.

    Guarantees:
        The result exceeds the mechanism's epsilon with a probability of
        ``1 - confidence`` at most, if the coins were fair and independent and the
        number of guesses was not chosen by them.

    Args:
        scores: How much each of m canaries looks inserted, finite numbers, shape
            ``(m,)``.
        inserted: Whether it was, bools, shape ``(m,)``.
        delta: Of the epsilon, between 0 and 1.
        confidence: Between 0 and 1.
        guesses: How many canaries are guessed at, 2 to m; by default a fifth of them.
        curve: `"gaussian"` or `"any"`.

    Returns:
        The epsilon, at least 0. It was computed from what the coins decided, as any
        attack is: where the canaries are private rows, it is private, too.

    Raises:
        TypeError: If a number is none.
        ValueError: If a number is out of its range, the lengths differ, or there are
            fewer than two canaries.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> inserted = rng.integers(0, 2, 1000) == 1
        >>> scores = inserted + rng.normal(size=1000)  # Noise multiplier 1.
        >>> bound = tfdp.audit.epsilon_lower_bound(scores, inserted, delta=1e-5)
        >>> 2.19 < bound < 4.38
        True

    References:
        .. [1] Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run",
           NeurIPS 2023. https://arxiv.org/abs/2305.08846
        .. [2] Mahloujifar, Melis, Chaudhuri, "Auditing f-Differential Privacy in One
           Run", ICML 2025, algorithm 3. https://arxiv.org/abs/2410.22235
    """
    delta = probability("delta", delta)
    error = 1 - probability("confidence", confidence)
    curve = one_of("curve", curve, CURVES)
    right, guesses, canaries = right_guesses(scores, inserted, guesses)
    if curve == "any":
        return _greatest(
            lambda epsilon: p_value(right, guesses, canaries, epsilon, delta) <= error,
            _MOST_EPSILON,
        )
    shift = _greatest(
        lambda shift: gaussian_is_refuted(right, guesses, canaries, shift, error), 40.0
    )
    return _epsilon_of_shift(shift, delta)


def right_guesses(
    scores: ArrayLike, inserted: ArrayLike, guesses: int | None = None
) -> tuple[int, int, int]:
    """Count the right ones among guesses at the canaries of the extreme scores.

    Args:
        scores: See `epsilon_lower_bound`.
        inserted: Likewise.
        guesses: Likewise.

    Returns:
        How many are right, how many there are, and the number of canaries.

    Raises:
        TypeError: See `epsilon_lower_bound`.
        ValueError: Likewise.
    """
    scores, inserted = np.asarray(scores, float), np.asarray(inserted)
    if scores.ndim != 1 or scores.shape != inserted.shape or len(scores) < 2:
        raise ValueError(
            "`scores` and `inserted` must have one number for each of at least two "
            f"canaries. Received: scores of shape {scores.shape}, inserted of shape "
            f"{inserted.shape}. Use `inserted[:len(scores)]`."
        )
    if inserted.dtype != bool:
        raise TypeError(
            "`inserted` must hold bools. Received: inserted of dtype "
            f"{inserted.dtype}. Use `inserted == 1`."
        )
    if not np.isfinite(scores).all():
        raise ValueError(
            "`scores` must be finite. Received: "
            f"{np.count_nonzero(~np.isfinite(scores))} that are not. Use "
            "`np.nan_to_num(scores)`."
        )
    canaries = len(scores)
    if guesses is None:
        guesses = max(2, round(_GUESSED * canaries))
    guesses = positive_int("guesses", guesses)
    if not 2 <= guesses <= canaries:
        raise ValueError(
            f"`guesses` must be 2 to {canaries}, the number of canaries. Received: "
            f"guesses={guesses}. Leave it out."
        )
    # Ties are broken by place, which knows nothing of the coins.
    order = np.argsort(scores, kind="stable")
    out, into = order[: guesses // 2], order[guesses // 2 - guesses :]
    right = np.count_nonzero(inserted[into]) + np.count_nonzero(~inserted[out])
    return int(right), guesses, canaries


def p_value(
    right: int, guesses: int, canaries: int, epsilon: float, delta: float
) -> float:
    """Bound how likely so many guesses are right if the mechanism is private.

    Args:
        right: Right guesses, v.
        guesses: All guesses, r.
        canaries: Whether each was inserted was a fair coin; m.
        epsilon: Of the mechanism.
        delta: Likewise.

    Returns:
        ``P[W >= v] + m delta max_i (2 / i) P[v > W >= v - i]`` with W binomial, of r
        trials that succeed with the probability ``1 / (1 + exp(-epsilon))``, at most 1.
    """
    success = special.expit(epsilon)
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, success))
    # Beyond v the probability does not grow, and 1 / i falls.
    slack = (2 * below / np.arange(1, right + 1)).max(initial=0.0)
    likely = stats.binom.sf(right - 1, guesses, success)
    return float(min(1.0, likely + canaries * delta * slack))


def gaussian_is_refuted(
    right: int, guesses: int, canaries: int, shift: float, error: float
) -> bool:
    """Tell whether so many right guesses are too unlikely for a Gaussian mechanism.

    With ``p_i`` the probability of i right ones among g guesses at m canaries, let
    ``R_c = sum_{i>=c} i p_i / m`` and ``H_c = sum_{i>=c} (g - i) p_i / m``: how likely
    a canary taken at random is guessed rightly, or wrongly, in such a run. Beside c
    right guesses at the others a right one obeys the trade-off of the mechanism,
    ``H_c >= F(R_{c+1})``, with F the smallest error for such a power, convex. If ``P[i
    >= v]`` were `error` or more, all would be at least what is computed here from c = v
    downwards; but ``R_0 + H_0`` is g / m.

    Args:
        right: Right guesses, v.
        guesses: All guesses, g.
        canaries: m.
        shift: By how many standard deviations a canary moves the Gaussian.
        error: How unlikely they have to be.

    Returns:
        True if so many are less likely than `error`.
    """

    def least_false(hits: float) -> float:
        return float(special.ndtr(special.ndtri(hits) - shift))

    share = guesses / canaries
    hits = error * right / canaries
    misses = error * share - hits
    for number in range(right - 1, 0, -1):
        more = max(0.0, least_false(hits) - misses)
        hits += number / (guesses - number) * more
        misses += more
        if hits + misses > share:
            return True
    return hits + max(misses, least_false(hits)) > share


def _greatest(is_refuted: Callable[[float], bool], most: float) -> float:
    """Return the greatest number that is refuted, as smaller ones are; 0 for none."""
    least, above = 0.0, most
    if is_refuted(most):
        return most
    while above - least > 1e-6 * max(1.0, least):
        middle = (least + above) / 2
        if is_refuted(middle):
            least = middle
        else:
            above = middle
    return least


def _epsilon_of_shift(shift: float, delta: float) -> float:
    """Return the epsilon of a Gaussian mechanism."""
    if shift == 0:
        return 0.0
    delta_at = GaussianPrivacyLoss(1 / shift).get_delta_for_epsilon
    if delta_at(0.0) <= delta:
        return 0.0
    most = shift**2 / 2 + shift * math.sqrt(2 * math.log(1 / delta))
    return float(optimize.brentq(lambda e: delta_at(e) - delta, 0.0, most))
