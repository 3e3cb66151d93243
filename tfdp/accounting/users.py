"""What a training costs users who have several examples in it."""

import dataclasses
import functools
import math

import dp_accounting
import numpy as np
from dp_accounting import rdp
from dp_accounting.pld import privacy_loss_distribution

from tfdp._validate import positive_int
from tfdp.accounting.accountant import epsilon, lost_by_rounding
from tfdp.accounting.segments import Segment
from tfdp.sampling import Unknown

# Standard deviations of the noise beyond which nothing is left, and from one point of
# an integral to the next: both are far below what float64 rounds.
_REACH = 13.0
_SPACING = 1 / 8
# What float64 may have rounded off the logarithm of an integral.
_ROUNDOFF = 1e-13
# Numbers in an integral; orders that need more are left out.
_MOST_NUMBERS = 2_000_000

_ORDERS = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 65), 128, 256, 512)

# Privacy loss distributions of mixtures take seconds on a finer grid, and with more
# examples for the noise; the figure of RDP stands in.
_PLD_INTERVAL = 1e-3
_PLD_MOST_EPSILON = 200.0
_PLD_MOST_EXAMPLES = 20.0


def user_epsilon(
    segment: Segment,
    delta: float,
    *,
    max_examples_per_user: int,
    accountant: str = "PLD",
) -> float:
    """Compute the epsilon of all the examples of one user.

    In a pass the examples of a user change the sums of its steps by
    ``max_examples_per_user`` times as much as one example, at most, when they are all
    in one batch. A Poisson draw has a binomial number of them, and a step is then the
    mixture of Gaussians of [1]_, whose Rényi divergences are integrated here. Where what
    one example costs says more, by group privacy [2]_, that is returned: mostly for schemes
    that are not Poisson draws.

    Args:
        segment: What was run.
        delta: Probability with which the bound may fail, between 0 and 1.
        max_examples_per_user: Largest number of examples of one user.
        accountant: ``"PLD"`` or ``"RDP"``.

    Returns:
        An upper bound; ``inf`` where there was no noise, and for searches, of which
        nothing is proven for several examples.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If an argument is out of its range.

    Example:
        >>> from tfdp.accounting import PoissonSteps
        >>> run = PoissonSteps(200, 2.0, 10_000, 100)
        >>> for rows in (1, 3):
        ...     figure = user_epsilon(run, 1e-5, max_examples_per_user=rows)
        ...     print(f"{rows}: {figure:.2f}")
        1: 0.27
        3: 0.90

    References:
        .. [1] Choquette-Choo et al., "Privacy Amplification for Matrix Mechanisms",
           2023, section 3. https://arxiv.org/abs/2310.15526
        .. [2] Vadhan, "The Complexity of Differential Privacy", 2017, proof of lemma
           2.2.
    """
    max_examples_per_user = positive_int("max_examples_per_user", max_examples_per_user)
    of_one = epsilon([segment], delta, accountant)
    parts = segment.alternatives()
    if parts != (segment,):
        of_users = all(part.scheme.unit == "user" for part in parts)
        return of_one if of_users or max_examples_per_user == 1 else math.inf
    is_user = max_examples_per_user == 1 or segment.scheme.unit == "user"
    if is_user or not segment.count:
        return of_one
    result = _epsilon_of_releases(segment, delta, max_examples_per_user, accountant)
    # A scheme may cost more than its chances say.
    result = max(of_one, result)
    of_group = _epsilon_of_group(
        segment, delta, max_examples_per_user, accountant, most=result
    )
    return min(result, of_group)


def _epsilon_of_releases(
    segment: Segment, delta: float, examples: int, accountant: str
) -> float:
    """Return what the sums cost, by how many examples of the user are in each."""
    # As if all were in every release.
    releases = segment.scheme.rdp_event(segment.count, segment.noise_multiplier)
    noise_multiplier = _noise_of_all(releases) / examples
    together = Segment(Unknown(), 1, noise_multiplier)
    # Each example of the user that is drawn may have made room for another one.
    change = segment.scheme.most_change_in_clips
    segment = dataclasses.replace(
        segment, noise_multiplier=segment.noise_multiplier / change
    )
    log_chances = tuple(segment.scheme.log_chances(examples).tolist())
    if log_chances[-1] == 0 or noise_multiplier == 0:
        return epsilon([together], delta, accountant)
    result = min(
        _epsilon_by_rdp(segment, delta, log_chances),
        epsilon([together], delta, "RDP"),
    )
    shift = examples / segment.noise_multiplier
    is_affordable = result <= _PLD_MOST_EPSILON and shift <= _PLD_MOST_EXAMPLES
    if accountant == "PLD" and is_affordable:
        result = min(result, _epsilon_by_pld(segment, delta, log_chances))
    return result


def _epsilon_of_group(
    segment: Segment, delta: float, examples: int, accountant: str, most: float
) -> float:
    """Return what group privacy says, from the figures of one example.

    Where one example has (e, d), k of them have (k e, d (1 + exp(e) + ... +
    exp((k - 1) e))), whatever was run. So the e is sought that suffices for the d which
    makes this sum the delta.

    Returns:
        The k e, a tenth of a percent above the least at most; ``inf`` if it is `most` or
        more.
    """

    def of_one(at_epsilon: float) -> float:
        log_sum = np.logaddexp.reduce(at_epsilon * np.arange(examples))
        part = math.exp(math.log(delta) - log_sum)
        if part == 0:
            return math.inf
        return epsilon([segment], part, accountant)

    too_low, enough = 0.0, epsilon([segment], delta, accountant)
    while examples * enough < most:
        needed = of_one(enough)
        if needed <= enough:
            break
        too_low, enough = enough, max(needed, 1.25 * enough)
    else:
        return math.inf
    while enough - too_low > 1e-3 * enough:
        middle = (too_low + enough) / 2
        if of_one(middle) <= middle:
            enough = middle
        else:
            too_low = middle
    return examples * enough


def _noise_of_all(event: dp_accounting.DpEvent) -> float:
    """Return the noise multiplier of one release that costs as much without sampling."""
    return 1 / math.sqrt(_squared_shifts(event))


def _squared_shifts(event: dp_accounting.DpEvent) -> float:
    """Add up the squares of how far each release moves, over its noise."""
    match event:
        case dp_accounting.NonPrivateDpEvent():
            return math.inf
        case dp_accounting.GaussianDpEvent():
            return 1 / float(event.noise_multiplier) ** 2
        case dp_accounting.PoissonSampledDpEvent():
            return _squared_shifts(event.event)
        case dp_accounting.SelfComposedDpEvent():
            return float(event.count * _squared_shifts(event.event))
        case dp_accounting.ComposedDpEvent():
            return math.fsum(map(_squared_shifts, event.events))
    raise TypeError(
        "A scheme's `rdp_event` must be composed of Gaussian releases and Poisson draws "
        f"of them. Received: {event!r}."
    )


def _epsilon_by_rdp(
    segment: Segment, delta: float, log_chances: tuple[float, ...]
) -> float:
    divergences = segment.count * np.array([
        _divergence(order, segment.noise_multiplier, log_chances) for order in _ORDERS
    ])
    is_known = np.isfinite(divergences)
    if not is_known.any():
        return math.inf
    orders = np.array(_ORDERS)[is_known]
    result, _ = rdp.compute_epsilon(orders, divergences[is_known], delta)
    return float(result)


@functools.lru_cache(maxsize=4096)
def _divergence(
    order: float, noise_multiplier: float, log_chances: tuple[float, ...]
) -> float:
    """Return the Rényi divergence of a step with the user and one without.

    With r the ratio of their densities and q the Gaussian of the step without, it is
    ``log(integral q r^order) / (order - 1)`` in one direction and
    ``log(integral q r^(1 - order)) / (order - 1)`` in the other; this is the larger.

    Returns:
        The divergence; ``inf`` where the integral takes too many numbers.
    """
    log_weights, examples = np.array(log_chances), len(log_chances) - 1
    # Left of all Gaussians r is that of a draw without the user.
    behind = _REACH**2 + 2 * (order - 1) * -log_weights[0]
    points = (
        math.sqrt(behind) * noise_multiplier + order * examples
    ) / noise_multiplier
    if (points + _REACH) / _SPACING * (examples + 1) > _MOST_NUMBERS:
        return math.inf
    spacing = _SPACING * noise_multiplier
    x = np.arange(
        -math.sqrt(behind) * noise_multiplier,
        order * examples + _REACH * noise_multiplier,
        spacing,
    )
    counts = np.arange(examples + 1.0)[:, None]
    variance = noise_multiplier**2
    exponents = log_weights[:, None] + counts * (2 * x - counts) / (2 * variance)
    log_ratio = np.logaddexp.reduce(exponents, axis=0)
    log_density = -(x**2) / (2 * variance) + math.log(_SPACING / math.sqrt(2 * math.pi))
    logs = [
        float(np.logaddexp.reduce(power * log_ratio + log_density))
        for power in (order, 1 - order)
    ]
    return (max(0.0, *logs) + _ROUNDOFF) / (order - 1)


def _epsilon_by_pld(
    segment: Segment, delta: float, log_chances: tuple[float, ...]
) -> float:
    of_mixture = getattr(
        privacy_loss_distribution, "from_mixture_gaussian_mechanism", None
    )
    lost = lost_by_rounding(segment.count)
    if of_mixture is None or not lost < delta:  # dp_accounting 0.4 has no mixtures.
        return math.inf
    weights = np.exp(log_chances)
    loss = of_mixture(
        segment.noise_multiplier,
        list(range(len(weights))),
        list(weights / weights.sum()),
        value_discretization_interval=_PLD_INTERVAL,
    )
    loss = loss.self_compose(segment.count)
    return max(0.0, float(loss.get_epsilon_for_delta(delta - lost)))
