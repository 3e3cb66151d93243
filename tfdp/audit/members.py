"""Attacks that tell rows that were trained on from others, beside what epsilon allows."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from tfdp._types import Array, Nest
from tfdp._validate import instance, probability
from tfdp.accounting import true_positive_rate
from tfdp.data.training_data import number_of_examples
from tfdp.model import DPModel
from tfdp.training.model_ledger import steps_of_plain_keras

# Rows of a class from which its own mean and spread are taken, at least.
_ENOUGH = 20

# Losses are not told apart below this.
_LEAST_LOSS = 1e-12


@dataclasses.dataclass(frozen=True)
class AttackResult:
    """How often an attack finds members at one false-positive rate.

    Attributes:
        attack: `"loss"` or `"likelihood ratio"`.
        target_false_positive_rate: What its threshold was chosen for.
        nonprivate_false_positive_rate: Share of other rows that it called members.
        nonprivate_false_positive_interval: That contains the rate with the confidence.
        nonprivate_true_positive_rate: Share of the members that it found.
        nonprivate_true_positive_interval: Likewise.
        most_true_positives: The largest rate that the ledger allows at the target.
        most_true_positives_there: The same at the upper end of the interval of false
            positives.
    """

    attack: str
    target_false_positive_rate: float
    nonprivate_false_positive_rate: float
    nonprivate_false_positive_interval: tuple[float, float]
    nonprivate_true_positive_rate: float
    nonprivate_true_positive_interval: tuple[float, float]
    most_true_positives: float
    most_true_positives_there: float

    @property
    def nonprivate_passed(self) -> bool:
        """Whether the attack finds no more than the ledger allows, by both intervals."""
        least = self.nonprivate_true_positive_interval[0]
        return least <= self.most_true_positives_there


@dataclasses.dataclass(frozen=True)
class MembershipReport:
    """What attacks on a model find. It is of private rows: keep it where they are.

    Attributes:
        members: Rows that were trained on.
        non_members: Rows that were not; half of them choose thresholds, half judge.
        confidence: Of each interval.
        results: One for each attack and false-positive rate.
    """

    members: int
    non_members: int
    confidence: float
    results: tuple[AttackResult, ...]

    @property
    def nonprivate_passed(self) -> bool:
        """Whether no attack finds more than the ledger allows."""
        return all(each.nonprivate_passed for each in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        fields = dataclasses.asdict(self)
        fields["results"] = [
            {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in result.items()
            }
            for result in fields["results"]
        ]
        passed = self.nonprivate_passed
        return {"audit": "membership", **fields, "nonprivate_passed": passed}

    def __str__(self) -> str:
        """Say it as a table."""
        lines = [
            f"Attacks on {self.members} members and {self.non_members} other rows; "
            f"intervals hold with confidence {self.confidence:g}:",
            "  at FPR   found  [      interval]  allowed  attack",
        ]
        for each in self.results:
            low, high = each.nonprivate_true_positive_interval
            lines.append(
                f"{each.target_false_positive_rate:8.2%} "
                f"{each.nonprivate_true_positive_rate:7.2%}  "
                f"[{low:6.2%}, {high:6.2%}] {each.most_true_positives:8.2%}  "
                f"{each.attack}" + (" MORE than allowed" * (not each.nonprivate_passed))
            )
        return "\n".join([*lines, "Computed from private rows: not to be published."])


class _Rows(NamedTuple):
    """Losses of rows, and the classes that they are compared within; 0 for all alike."""

    losses: Array
    classes: Array


class _Scores(NamedTuple):
    """How much rows look like members, to one attack."""

    members: Array
    choosing: Array
    judging: Array


def membership(
    private: DPModel,
    members: Nest,
    non_members: Nest,
    *,
    false_positive_rates: tuple[float, ...] = (0.001, 0.01),
    confidence: float = 0.95,
) -> MembershipReport:
    """Attack a model by the losses of rows, and compare with what its ledger allows.

    Two attacks: `"loss"` calls the rows of the smallest losses members [1]_.
    `"likelihood ratio"` takes the log-odds ``log(p / (1 - p))`` of ``p = exp(-loss)``
    by how far it lies above those of rows of the same class that are no members, a
    normal distribution for each class [2]_ (the offline attack, with one model in place
    of shadow models). Half of the other rows, taken at random, give the distributions
    and choose the thresholds; the other half and all members judge them, with Clopper and
    Pearson's intervals.

    Beside what is found stands the most that any attack could: see
    `tfdp.accounting.true_positive_rate`. The two compare if members and other rows are
    drawn alike, as by a coin for each row; otherwise an attack finds how they differ. With
    ``unit="user"`` give one row of each user, all of whose rows were trained on, or none.
    Attacks that train many models find more than these: what they do not find is no
    proof.

    Args:
        private: A trained model.
        members: ``(x, y)`` or ``(x, y, sample_weight)``, arrays of rows that it was
            trained on.
        non_members: Likewise, of rows that it was not trained on.
        false_positive_rates: Between 0 and 1. For a rate of 0.001 thousands of other
            rows are needed.
        confidence: Of the intervals, between 0 and 1.

    Returns:
        A report that prints, and has `to_dict`. It was computed from private rows
        without noise, so it is private, too.

    Raises:
        TypeError: If `private` is no `DPModel`, or rows are no tuple.
        ValueError: If there are no members or fewer than two others, or a number is out
            of its range.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> private = tfdp.DPModel(model)
        >>> private.compile(
        ...     tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        ...     loss="mse",
        ... )
        >>> rng = np.random.default_rng(0)
        >>> x, y = rng.normal(size=(400, 2)), rng.normal(size=(400, 1))
        >>> history = private.fit(x[:200], y[:200], batch_size=20, verbose=0)
        >>> report = tfdp.audit.membership(
        ...     private, (x[:200], y[:200]), (x[200:], y[200:])
        ... )
        >>> report.nonprivate_passed
        True

    References:
        .. [1] Yeom et al., "Privacy Risk in Machine Learning", CSF 2018, section 3.
           https://arxiv.org/abs/1709.01604
        .. [2] Carlini et al., "Membership Inference Attacks From First Principles",
           S&P 2022, section IV. https://arxiv.org/abs/2112.03570
    """
    instance("private", private, DPModel)
    confidence = probability("confidence", confidence)
    rates = [probability("false_positive_rates", each) for each in false_positive_rates]
    trained = _rows(private, "members", members, 1)
    others = _rows(private, "non_members", non_members, 2)
    order = np.random.default_rng(0).permutation(len(others.losses))
    choosing, judging = (
        _Rows(*(each[part] for each in others)) for part in np.array_split(order, 2)
    )
    parts = trained, choosing, judging
    attacks = {
        "loss": _Scores(*(-each.losses for each in parts)),
        "likelihood ratio": _Scores(
            *(_likelihood_ratios(each, choosing) for each in parts)
        ),
    }
    has_plain_steps = bool(steps_of_plain_keras(private.model))

    @functools.cache
    def most(rate: float) -> float:
        """Return what is allowed; nothing is proven for steps of plain Keras."""
        if has_plain_steps or rate >= 1:
            return 1.0
        return true_positive_rate(private.ledger, rate)

    return MembershipReport(
        members=len(trained.losses),
        non_members=len(others.losses),
        confidence=confidence,
        results=tuple(
            _judged(name, scores, rate, confidence, most)
            for name, scores in attacks.items()
            for rate in rates
        ),
    )


def _judged(
    name: str,
    scores: _Scores,
    rate: float,
    confidence: float,
    most: Callable[[float], float],
) -> AttackResult:
    """Choose a threshold for a false-positive rate, and judge it on other rows."""
    allowed = math.floor(rate * len(scores.choosing))
    threshold = np.sort(scores.choosing)[::-1][min(allowed, len(scores.choosing) - 1)]
    found = int(np.count_nonzero(scores.members > threshold))
    alarms = int(np.count_nonzero(scores.judging > threshold))
    hits = _interval(found, len(scores.members), confidence)
    false = _interval(alarms, len(scores.judging), confidence)
    return AttackResult(
        attack=name,
        target_false_positive_rate=rate,
        nonprivate_false_positive_rate=alarms / len(scores.judging),
        nonprivate_false_positive_interval=false,
        nonprivate_true_positive_rate=found / len(scores.members),
        nonprivate_true_positive_interval=hits,
        most_true_positives=most(rate),
        most_true_positives_there=most(false[1]),
    )


def _interval(number: int, trials: int, confidence: float) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of a probability."""
    interval = stats.binomtest(number, trials).proportion_ci(confidence, "exact")
    return float(interval.low), float(interval.high)


def _rows(private: DPModel, name: str, rows: Nest, least: int) -> _Rows:
    """Return what attacks know of rows."""
    if not isinstance(rows, tuple) or len(rows) not in {2, 3}:
        raise TypeError(
            f"`{name}` must be a tuple of arrays. Received: {name} of type "
            f"{type(rows).__name__}. Use `{name}=(x, y)`."
        )
    number = number_of_examples(rows[0])
    if number < least:
        raise ValueError(
            f"`{name}` must have {least} rows at least. Received: {number}. Give more "
            f"rows, `{name}=(x, y)`."
        )
    losses = np.asarray(private.nonprivate_losses(*rows), np.float64)
    # A row whose loss is not finite looks like nothing that was trained on.
    losses = np.where(np.isfinite(losses), losses, 1e30)
    return _Rows(losses, _classes(rows[1], number))


def _classes(y: Nest, number: int) -> Array:
    """Return the class of each row, if targets are of one."""
    alike = np.zeros(number, np.int64)
    if not hasattr(y, "shape"):
        return alike
    y = np.asarray(y)
    if y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all():
        places: Array = np.argmax(y, axis=1)
        return places
    whole = y.reshape(number, -1)
    if whole.shape[1] != 1 or not np.array_equal(whole, np.round(whole)):
        return alike
    numbers: Array = whole[:, 0].astype(np.int64)
    return numbers


def _likelihood_ratios(rows: _Rows, others: _Rows) -> Array:
    """Return how far rows lie above others of their class, in standard deviations."""
    scores, of_others = _log_odds(rows.losses), _log_odds(others.losses)
    result = _standardised(scores, of_others)
    for each in np.unique(rows.classes):
        of_class = of_others[others.classes == each]
        if len(of_class) >= _ENOUGH:
            is_of_class = rows.classes == each
            result[is_of_class] = _standardised(scores[is_of_class], of_class)
    return result


def _log_odds(losses: Array) -> Array:
    """Return the log-odds of the probability that a loss is the logarithm of."""
    losses = np.maximum(losses, _LEAST_LOSS)
    log_odds: Array = -losses - np.log(-np.expm1(-losses))
    return log_odds


def _standardised(scores: Array, others: Array) -> Array:
    # The median and quartiles: a few rows of huge loss do not decide.
    low, middle, high = np.quantile(others, [0.25, 0.5, 0.75])
    spread = (high - low) / (2 * stats.norm.ppf(0.75))
    standardised: Array = (scores - middle) / max(spread, 1e-12)
    return standardised
