"""Local privacy: what a client's noised replies cost it, whoever receives them.

The replies of a client are clipped to C and noised by the client itself, with a
standard deviation of ``noise_multiplier * C``. Without a trusted server neighbours
differ in what one client has: all of its examples are replaced by any others, which
moves a reply by 2C.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

from tfdp._validate import (
    non_negative,
    one_of,
    positive,
    positive_int,
    probability,
)
from tfdp.accounting.text import filled

# How far a clipped reply moves, in multiples of C.
_SENSITIVITIES = {"replace_one": 2.0, "add_or_remove_one": 1.0}
RELATIONS = tuple(_SENSITIVITIES)
_DECIMALS = 6

# Standard deviations at which noise ends: that of replies is `tfdp.mechanisms.local.long_normal`,
# that of queries `standard_normal`.
_END_OF_REPLIES = 12.1
_END_OF_QUERIES = 7.35

# Less noise than this counts as none.
_LEAST_NOISE = 1e-6
_MOST_NOISE = 1e12


class _Releases(NamedTuple):
    """How many Gaussian releases; how far each moves and where its noise ends, in sigma."""

    number: int
    moves: float
    end: float


def calibrate_local_noise_multiplier(
    target_epsilon: float,
    *,
    delta: float,
    max_participations: int = 1,
    neighboring_relation: str = "replace_one",
) -> float:
    """Find the least noise that keeps all replies of a client within an epsilon.

    By the analytic Gaussian mechanism [1]_, which holds for every epsilon; the
    textbook's formula does for epsilon below 1 only. The noise of real clients ends at
    12 standard deviations; that is accounted too, and asks for more noise where epsilon
    is so large, above 50, that it matters.

    Args:
        target_epsilon: Epsilon that all replies of a client together may cost.
        delta: Probability with which the bound may fail, between 0 and 1.
        max_participations: How many replies a client sends at most.
        neighboring_relation: `"replace_one"`: the client's examples are replaced by
            any others, what local privacy means. `"add_or_remove_one"`: the client's
            reply is replaced by noise alone; half as much noise, and twice as many
            standard deviations between two clients.

    Returns:
        The noise multiplier, a standard deviation over C, with six decimals, rounded
        up.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range.

    Example:
        >>> calibrate_local_noise_multiplier(8.0, delta=1e-7)
        1.404227

    References:
        .. [1] Balle and Wang, "Improving the Gaussian Mechanism for Differential
           Privacy: Analytical Calibration and Optimal Denoising", ICML 2018,
           Theorem 8. https://arxiv.org/abs/1805.06530
    """
    target = positive("target_epsilon", target_epsilon)
    count = positive_int("max_participations", max_participations)
    relation = one_of("neighboring_relation", neighboring_relation, RELATIONS)
    delta = probability("delta", delta)
    noise = _least(
        lambda noise: _epsilon([_replies(noise, count, relation)], delta) <= target
    )
    if noise > _MOST_NOISE:
        raise ValueError(
            "No noise keeps so small a `target_epsilon` at so small a `delta`. "
            f"Received: target_epsilon={target_epsilon}, delta={delta}, "
            f"max_participations={max_participations}. Use `delta=1e-9`."
        )
    return float(math.ceil(noise * 10**_DECIMALS) / 10**_DECIMALS)


def local_epsilon(
    noise_multiplier: float,
    delta: float,
    *,
    participations: int = 1,
    neighboring_relation: str = "replace_one",
) -> float:
    """Compute what the replies of a client cost it together.

    Args:
        noise_multiplier: Standard deviation of each reply's noise over its C; C may
            differ from reply to reply.
        delta: Probability with which the bound may fail, between 0 and 1.
        participations: How many replies the client sends.
        neighboring_relation: See `calibrate_local_noise_multiplier`.

    Returns:
        An upper bound, ``0`` without a reply and ``inf`` without noise.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range.

    Example:
        >>> round(local_epsilon(1.404227, 1e-7, participations=2), 2)
        12.01
    """
    replies = _replies(noise_multiplier, participations, neighboring_relation)
    return _epsilon([replies], probability("delta", delta))


def joint_local_epsilon(
    noise_multipliers: Iterable[float],
    delta: float,
    *,
    neighboring_relation: str = "replace_one",
) -> float:
    """Compute what replies with noise of their own each cost a client together.

    Args:
        noise_multipliers: See `local_epsilon`, of each reply.
        delta: Probability with which the bound may fail, between 0 and 1.
        neighboring_relation: See `calibrate_local_noise_multiplier`.

    Returns:
        See `local_epsilon`.
    """
    counts = collections.Counter(noise_multipliers)
    replies = [
        _replies(noise, count, neighboring_relation) for noise, count in counts.items()
    ]
    return _epsilon(replies, probability("delta", delta))


@dataclasses.dataclass(frozen=True)
class TrustedQueries:
    """What a trusted aggregator releases of values that clients send it un-noised.

    Attributes:
        learner: What the answers are for.
        noise_multiplier: Standard deviation of the noise over how far an answer moves
            when a client is left out.
        replaced_over_left_out: How much further it moves when a client is replaced.
        per_client: How many queries a client is in at most.
    """

    learner: str
    noise_multiplier: float
    replaced_over_left_out: float
    per_client: int

    def epsilon(self, delta: float, neighboring_relation: str) -> float:
        """Compute what the answers cost a client.

        Args:
            delta: Probability with which the bound may fail, between 0 and 1.
            neighboring_relation: See `calibrate_local_noise_multiplier`.

        Returns:
            An upper bound against everybody but the aggregator.
        """
        return _epsilon([self.releases(neighboring_relation)], delta)

    def releases(self, neighboring_relation: str) -> _Releases:
        """Return what a client is in, for the accountant."""
        replaced = neighboring_relation == "replace_one"
        moves = self.replaced_over_left_out if replaced else 1.0
        return _Releases(
            self.per_client, moves / self.noise_multiplier, _END_OF_QUERIES
        )


def local_privacy_statement(
    noise_multiplier: float,
    delta: float,
    *,
    participations: int,
    neighboring_relation: str = "replace_one",
    queries: TrustedQueries | None = None,
    unit: str = "client",
) -> str:
    """Say in words what local privacy clients have, and what is not covered.

    Args:
        noise_multiplier: See `local_epsilon`.
        delta: Probability with which the bound may fail, between 0 and 1.
        participations: How many replies a client has sent at most.
        neighboring_relation: See `calibrate_local_noise_multiplier`.
        queries: What a trusted aggregator learns besides, if there is one.
        unit: What a client is: ``"client"``, or ``"user"`` where the clients of a
            simulation are the users of a data set.

    Returns:
        The text, with epsilon rounded to three decimals.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range.

    Example:
        >>> text = local_privacy_statement(1.404227, 1e-7, participations=1)
        >>> print(text.splitlines()[0])
        The replies of a client are (8.000, 1e-07)-locally differentially private.
    """
    delta = probability("delta", delta)
    replies = _replies(noise_multiplier, participations, neighboring_relation)
    figure = _epsilon([replies], delta)
    if math.isinf(figure):
        headline = (
            "These replies are not differentially private: their noise is too little."
        )
    else:
        headline = (
            f"The replies of a client are ({figure:.3f}, {delta:g})-locally "
            "differentially private."
        )
    paragraphs = [
        headline,
        *(
            _of_queries(queries, replies, delta, neighboring_relation)
            if queries
            else ()
        ),
        f"{_PROTECTED[one_of('unit', unit, tuple(_PROTECTED))]} Neighbours: "
        f"{_NEIGHBOURS[neighboring_relation]}. A client clips its reply to C and "
        f"adds Gaussian noise of standard deviation {noise_multiplier:g} C before "
        "anything leaves it, so the bound holds against the server too, and whatever "
        "becomes of the replies: weights, clip norms that follow from them, models.",
        "Trust model: Local. Nobody but the client has its examples, or its replies "
        "without noise."
        + (
            " Only the aggregator is trusted besides, with the norms."
            if queries
            else ""
        ),
        f"Replies of a client: {participations} at most. More replies cost more.",
        "Not covered: that a client took part, and when, and how long that took; "
        "metrics, and values named `nonprivate_*`, which are exact; decisions made by "
        "them; validation rows; what was computed from the examples beforehand; other "
        "runs with the same clients, such as those that chose the hyperparameters; "
        "noise as a computer draws it (Philox is no certified cryptographic generator, "
        "and its floating-point bits are not protected).",
    ]
    return "\n\n".join(map(filled, paragraphs)) + "\n"


_PROTECTED = {
    "client": "Protected are all examples of a client together.",
    "user": (
        "A client is a user, that is all rows of x with the same id. Protected are all "
        "of them together, however many they are."
    ),
}

_NEIGHBOURS = {
    "replace_one": "they are replaced by any others (replace-one)",
    "add_or_remove_one": (
        "the client's reply is replaced by noise alone (add-or-remove-one), which says "
        "nothing of one client's examples against another's: for that epsilon is the "
        "one of twice the sensitivity"
    ),
}


def _of_queries(
    queries: TrustedQueries,
    replies: _Releases,
    delta: float,
    neighboring_relation: str,
) -> Iterator[str]:
    """Yield what a run with a trusted aggregator must admit."""
    left_out, replaced = (
        queries.epsilon(delta, relation)
        for relation in ("add_or_remove_one", "replace_one")
    )
    together = _epsilon([replies, queries.releases(neighboring_relation)], delta)
    yield (
        f"But this run is not purely local. For {queries.learner} a trusted aggregator "
        "learns something exact of the norm of every client's gradient; against it "
        "there is no bound. It releases noised answers, "
        f"{queries.per_client} about a client at most. Against everybody else the "
        f"answers are ({left_out:.3f}, {delta:g})-differentially private, centrally, "
        f"when a client is left out, and ({replaced:.3f}, {delta:g}) when it is "
        f"replaced; answers and replies together are ({together:.3f}, {delta:g})."
    )


def _replies(
    noise_multiplier: float, participations: float, neighboring_relation: str
) -> _Releases:
    """Check the arguments of `local_epsilon`, and return its releases."""
    noise = non_negative("noise_multiplier", noise_multiplier)
    count = 0
    if participations != 0:
        count = positive_int("participations", participations)
    relation = one_of("neighboring_relation", neighboring_relation, RELATIONS)
    moves = _SENSITIVITIES[relation] / noise if noise else math.inf
    return _Releases(count, moves, _END_OF_REPLIES)


def _epsilon(releases: list[_Releases], delta: float) -> float:
    """Return the epsilon of Gaussian releases by theorem 8 of Balle and Wang.

    Args:
        releases: All of them together are as one that moves by the root of the sum of
            their squares.
        delta: Probability with which the bound may fail, between 0 and 1.

    Returns:
        An upper bound, to ten digits.
    """
    releases = [each for each in releases if each.number]
    if not releases:
        return 0.0
    moves = math.hypot(*(math.sqrt(each.number) * each.moves for each in releases))
    # What lies beyond the end of one neighbour's noise tells it from the other.
    delta -= sum(
        each.number * math.erfc((each.end - each.moves) / math.sqrt(2)) / 2
        for each in releases
    )
    if delta <= 0 or moves > 1 / _LEAST_NOISE:
        return math.inf
    delta_at = GaussianPrivacyLoss(1 / moves).get_delta_for_epsilon
    if delta_at(0.0) <= delta:
        return 0.0
    return _least(lambda epsilon: delta_at(epsilon) <= delta)


def _least(is_enough: Callable[[float], bool]) -> float:
    """Return the least positive number that is enough, to ten digits, from above.

    Args:
        is_enough: True from some number on.

    Returns:
        The number, or one above `_MOST_NOISE` if there is none below it.
    """
    low, high = 0.0, 1.0
    while not is_enough(high):
        low, high = high, 2 * high
        if high > 2 * _MOST_NOISE:
            return high
    while high - low > high * 1e-11:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
