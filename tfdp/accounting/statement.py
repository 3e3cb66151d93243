"""The privacy statement: what a ledger proves, in words and as data."""

import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from tfdp._validate import positive_int, probability
from tfdp.accounting.accountant import epsilon, merged, reported_epsilon
from tfdp.accounting.ledger import FLAGS, Ledger
from tfdp.accounting.meaning import FALSE_POSITIVE_RATE, best_attack, in_words
from tfdp.accounting.segments import Segment, segment_to_dict
from tfdp.accounting.text import filled
from tfdp.accounting.users import user_epsilon

_Segments: TypeAlias = tuple[Segment, ...]
# A label, whether its figures hold, and what they are of.
_Row: TypeAlias = tuple[str, bool, _Segments]

_ACCOUNTANTS = ("RDP", "PLD")

_ADJACENCY = (
    "Neighbouring data sets: {one} replaced by an empty one that contributes "
    "nothing (zero-out); the figures are those of adding or removing {it}. Public "
    "are the number of {records}, the sampling probability, the number of steps, and "
    "the constant that clipped sums are divided by. All weights seen during training "
    "are covered, not only the last."
)

_TRUST_MODEL = (
    "Central. Whoever trains has the rows as they are, and is trusted with them and with "
    "adding the noise. The figures hold against everybody else, whatever they know "
    "besides, also against those who see the weights after every step."
)

_NOT_COVERED = (
    "Training metrics: Keras's `loss` and metrics and everything named `nonprivate_*` "
    "are exact. Publishing them, or deciding by them (early stopping, keeping the best "
    "checkpoint, lowering the learning rate, a person watching), is outside the "
    "guarantee. `tfdp.callbacks.PrivateEvaluation` releases metrics that are inside.",
    "Validation rows, and every decision made by them, unless they are public or "
    "`tfdp.callbacks.PrivateEvaluation` looks at them: for these its own ledger says what "
    "was spent.",
    "What was computed from the data beforehand: adapted preprocessing layers, "
    "vocabularies, scalers, class weights, oversampling.",
    "Other runs on the same data, such as those that chose the hyperparameters, unless "
    "they were tries of a `tfdp.tuning.PrivateSearch`. Runs that have a ledger can be "
    "added up: `tfdp.accounting.Project`, `tfdp.accounting.compose`.",
    "Trainings that the ledger does not know: of weights loaded from elsewhere, from "
    "plain files of another process for example, copied between two steps, averaged or "
    "changed.",
    "How long steps took.",
    "Noise as a computer draws it: Philox is no certified cryptographic generator, and "
    "single gradients, if observed, are not protected against attacks on their "
    "floating-point bits (Mironov, 2012).",
)


def privacy_statement(
    ledger: Ledger, delta: float, *, max_examples_per_user: int | None = None
) -> str:
    """Say in words what a ledger proves, and what it does not.

    The epsilon stated is that of what really ran, the smaller of the bounds of both
    accountants. What it would be had another scheme drawn the batches comes last, apart
    from it and labelled so.

    Args:
        ledger: What was run.
        delta: Probability with which the bound may fail, between 0 and 1. A value of
            ``1 / number_of_examples`` or more draws a warning.
        max_examples_per_user: How many rows a user has at most; then the text says what
            holds for all of them together, by mixtures of Gaussians [1]_. Whoever
            trains sees to it: `tfdp.data.bound_contributions`.

    Returns:
        The text, with epsilon rounded to three decimals.

    Raises:
        TypeError: If ``delta`` is no number.
        ValueError: If ``delta`` is outside (0, 1).

    Example:
        >>> from tfdp.accounting import PoissonSteps
        >>> ledger = Ledger().add(PoissonSteps(14_063, 1.1, 60_000, 256))
        >>> print(privacy_statement(ledger, delta=1e-5).splitlines()[0])
        This training is (2.382, 1e-05)-differentially private.

    References:
        .. [1] Choquette-Choo et al., "Privacy Amplification for Matrix Mechanisms",
           2023, section 3. https://arxiv.org/abs/2310.15526
    """
    delta = probability("delta", delta)
    run, planned = ledger.merged().segments, ledger.planned().merged().segments
    if delta * _most_examples(planned) >= 1:
        warnings.warn(_delta_message(planned, delta), stacklevel=2)
    paragraphs = [
        _headline(reported_epsilon(planned, ledger.delta_at_end(delta)), delta),
        *_cautions(ledger, planned, delta),
        filled(in_words(best_attack(ledger), of_users=_units(planned) == {"user"})),
        filled(_unit(planned)),
        *_users(planned, ledger.delta_at_end(delta), delta, max_examples_per_user),
        filled(_adjacency(planned)),
        filled(f"Trust model: {_TRUST_MODEL}"),
        *_lists(run, planned),
        *_releases(ledger),
        _table(_rows(run, planned), ledger.delta_at_end(delta), _title(ledger, delta)),
        "Not covered:\n" + _items(_NOT_COVERED),
        *_comparison(planned, delta),
    ]
    return "\n\n".join(paragraphs) + "\n"


def privacy_report(ledger: Ledger, delta: float) -> dict[str, Any]:
    """Say what a ledger proves, and what it does not, as data that JSON can hold.

    Args:
        ledger: What was run.
        delta: As for `privacy_statement`.

    Returns:
        ``differentially_private``: whether all that ran had noise.
        ``epsilon``, ``delta``, ``accountant``: what is proven, by the accountant whose
        bound is smaller; an infinite epsilon is None, here and below.
        ``bounds``: a dictionary for every row of the statement's table, with its
        ``label``, whether it ``holds``, and its ``RDP`` and ``PLD`` epsilon. The
        figures of rows that do not hold are of batches drawn another way.
        ``best_attack``: of those who are no members, the ``false_positive_rate`` that
        an attack accuses, and the largest ``true_positive_rate`` that it has then.
        ``neighbouring_relation``, ``unit``, ``trust_model``, ``not_covered``: sentences.
        ``units``: what is protected, ``"example"`` or ``"user"``, or both.
        ``sampling``: how batches were drawn, the kinds of the segments.
        ``segments``: what ran; ``planned_segments``: what runs that were cut short
        had announced is added, and epsilon is that of these.
        ``noise_multiplier``: the smallest in them, None if nothing ran.
        ``noise_seed_fixed``, ``sampling_seed_fixed``: whether somebody chose a seed,
        and may know it.
        ``ended_by_release``: whether a run ended early because of a released metric.
        ``saw_other_rows``: whether metrics of other private rows were released, which
        a ledger of their own accounts for.

    Raises:
        TypeError: If ``delta`` is no number.
        ValueError: If ``delta`` is outside (0, 1).

    Example:
        >>> from tfdp.accounting import PoissonSteps
        >>> ledger = Ledger().add(PoissonSteps(14_063, 1.1, 60_000, 256))
        >>> report = privacy_report(ledger, delta=1e-5)
        >>> report["accountant"], round(report["epsilon"], 3)
        ('PLD', 2.382)
    """
    delta = probability("delta", delta)
    run, planned = ledger.merged().segments, ledger.planned().merged().segments
    at_end = ledger.delta_at_end(delta)
    bounds = [
        {
            "label": label,
            "holds": holds,
            **{name: _finite(epsilon(each, at_end, name)) for name in _ACCOUNTANTS},
        }
        for label, holds, each in (*_rows(run, planned), *_redrawn(planned))
    ]
    proven: dict[str, Any] = next(row for row in bounds if row["holds"])
    accountants = [name for name in _ACCOUNTANTS if proven[name] is not None]
    accountant = min(accountants, key=proven.__getitem__, default=None)
    return {
        "differentially_private": accountant is not None,
        "epsilon": accountant and proven[accountant],
        "delta": delta,
        "accountant": accountant,
        "bounds": bounds,
        "best_attack": {
            "false_positive_rate": FALSE_POSITIVE_RATE,
            "true_positive_rate": best_attack(ledger),
        },
        "neighbouring_relation": _adjacency(planned),
        "unit": _unit(planned),
        "units": sorted(_units(planned) or {"example"}),
        "trust_model": _TRUST_MODEL,
        "sampling": sorted({s.scheme.kind for s in _parts(planned) if not s.released}),
        "segments": [segment_to_dict(segment) for segment in run],
        "planned_segments": [segment_to_dict(segment) for segment in planned],
        "noise_multiplier": min(
            (segment.noise_multiplier for segment in planned), default=None
        ),
        **{flag: getattr(ledger, flag) for flag in FLAGS},
        "not_covered": list(_NOT_COVERED),
    }


def _finite(figure: float) -> float | None:
    return None if math.isinf(figure) else figure


def _headline(figure: float, delta: float) -> str:
    if math.isinf(figure):
        return "This training is not differentially private: steps ran without noise."
    return f"This training is ({figure:.3f}, {delta:g})-differentially private."


def _cautions(ledger: Ledger, planned: _Segments, delta: float) -> Iterator[str]:
    """Yield the paragraphs that only some trainings need."""
    if delta * _most_examples(planned) >= 1:
        yield filled(f"Warning: {_delta_message(planned, delta)}")
    if any(segment.count for segment in ledger.cut_short):
        yield filled(
            "A run was stopped before its planned end by something else than a privacy "
            "budget. That decision may depend on the data, so the epsilon stated is that "
            "of all that was planned. What was decided by exact values, such as the loss, "
            "may tell more of the data than that."
        )
    seeds = []
    if ledger.noise_seed_fixed:
        seeds.append("the noise and the masks of rows")
    if ledger.sampling_seed_fixed:
        seeds.append("the draws of batches")
    if seeds:
        yield filled(
            f"A seed was chosen for {' and '.join(seeds)}: the guarantee holds only "
            f"against someone who does not know it."
        )


def _parts(segments: _Segments) -> _Segments:
    """Return the segments with what searches may have run in place of these."""
    return tuple(
        dict.fromkeys(part for each in segments for part in each.alternatives())
    )


def _units(segments: _Segments) -> set[str]:
    return {part.scheme.unit for part in _parts(segments)}


def _most_examples(segments: _Segments) -> int:
    return max((s.scheme.number_of_examples or 0 for s in segments), default=0)


def _delta_message(segments: _Segments, delta: float) -> str:
    return (
        f"`delta` must be well below 1 / number_of_examples to mean anything: a "
        f"mechanism that publishes one whole record satisfies a larger one. Received: "
        f"delta={delta:g}, number_of_examples={_most_examples(segments)}"
        f"{' (users)' if _units(segments) == {'user'} else ''}."
    )


def _adjacency(segments: _Segments) -> str:
    units = _units(segments) or {"example"}
    records = " and that of ".join(f"{unit}s" for unit in sorted(units))
    if units == {"user"}:
        one, it = "each record of one user is", "a user"
    else:
        one, it = "one record is", "a record"
    return _ADJACENCY.format(records=records, one=one, it=it)


def _unit(segments: _Segments) -> str:
    units = _units(segments)
    if units == {"user"}:
        text = (
            "Protected is one user, that is all rows of x with the same id. The mean "
            "gradient of a user's rows is clipped, so their number does not matter."
        )
    else:
        text = (
            "Protected is one example, that is one row of x. Several rows of one person "
            "are not one row: together they are protected less"
        )
        if all(segment.alternatives() == (segment,) for segment in segments):
            text += " (`privacy_statement(..., max_examples_per_user=)` says how much)."
        else:
            text += ", and nothing is proven of them after a search."
    if len(units) > 1:
        # The mean gradient of the others in a unit moves with one row.
        text += (
            " Some of the steps had users as units: figures of one example hold only for "
            "users who have no other."
        )
    parts = _parts(segments)
    sizes = {part.scheme.examples_per_unit for part in parts} - {1}
    if sizes:
        text += (
            f" Groups of {' or '.join(map(str, sorted(sizes)))} examples were clipped "
            f"together, which doubles the sensitivity (the noise multipliers below are "
            f"relative to the doubled one); no figure of Poisson sampling holds for "
            f"them."
        )
    assumptions = dict.fromkeys(each.scheme.assumption() for each in segments + parts)
    return " ".join([text, *filter(None, assumptions)])


def _users(
    segments: _Segments, delta_at_end: float, delta: float, examples: int | None
) -> Iterator[str]:
    """Yield what holds for all examples of a user, if their number is bounded."""
    if examples is None:
        return
    examples = positive_int("max_examples_per_user", examples)
    if _units(segments) == {"user"}:
        return  # What is said of one user holds for any number of rows.
    segments = merged(segments)
    # Segments are composed by adding up what each costs at its part of delta.
    part = delta_at_end / max(1, len(segments))
    figure = sum(
        user_epsilon(
            segment, part, max_examples_per_user=examples, accountant=_ACCOUNTANTS[1]
        )
        for segment in segments
        if segment.count
    )
    if math.isinf(figure):
        yield filled("Nothing is proven for all rows of one user together.")
        return
    yield filled(
        f"For a user with at most {examples} rows, all of them together, it is "
        f"({figure:.3f}, {delta:g})-differentially private. That no user has more rows "
        "is taken on trust."
    )


def _lists(run: _Segments, planned: _Segments) -> Iterator[str]:
    yield "What ran:\n" + (_items(map(Segment.words, run)) or "- nothing")
    if planned != run:
        yield "What was planned:\n" + _items(map(Segment.words, planned))


def _releases(ledger: Ledger) -> Iterator[str]:
    """Yield what was released beside the weights, and what may be decided by it."""
    sentences = []
    if ledger.releases:
        sentences.append(
            "The metrics that were released are covered like the weights, and so is "
            "every decision by them alone: stopping, keeping the best checkpoint, "
            "lowering the learning rate."
        )
    if ledger.ended_by_release:
        sentences.append(
            "A run was ended by a released value. Steps that it did not take are not "
            "owed. But the data have had a part in where it ended, so each moment at "
            f"which it could have ended up to then, {ledger.looks} at most, has a delta of its "
            "own: the k-th 6 / (pi k)^2 of the whole."
        )
    if sentences:
        yield filled(" ".join(sentences))
    if ledger.saw_other_rows:
        yield filled(
            "Metrics of other private rows were released during the training. What that "
            "cost those rows is in a ledger of their own: `evaluation.ledger`."
        )


def _title(ledger: Ledger, delta: float) -> str:
    share = ""
    if ledger.looks > 1:
        share = f", of which its end has {ledger.delta_at_end(delta):.3g}"
    return (
        f"Epsilon at delta = {delta:g}{share} by either accountant, the smaller is "
        "reported:"
    )


def _table(rows: Iterable[_Row], delta: float, title: str) -> str:
    """Return the epsilons of rows by either accountant."""
    lines = [title, "".join(f"{name:>9}" for name in _ACCOUNTANTS)]
    for label, _, segments in rows:
        figures = [epsilon(segments, delta, name) for name in _ACCOUNTANTS]
        lines.append("".join(f"{figure:9.3f}" for figure in figures) + f"  {label}")
    return "\n".join(lines)


def _comparison(planned: _Segments, delta: float) -> Iterator[str]:
    """Yield the figures of batches drawn in another way, if there are any."""
    rows = list(_redrawn(planned))
    if rows:
        title = (
            "For comparison only: figures of trainings that did not run. On batches "
            "that are drawn in another way this one would have"
        )
        yield _table(rows, delta, filled(title))


def _rows(run: _Segments, planned: _Segments) -> Iterator[_Row]:
    """Yield a label, whether its figures hold, and what they are of."""
    yield "what ran", planned == run, run
    if planned != run:
        yield "what was planned", True, planned


def _redrawn(planned: _Segments) -> Iterator[_Row]:
    """Yield the same of what did not run: batches drawn in other ways."""
    # What was released beside the steps stays what it is.
    releases = tuple(segment for segment in planned if segment.released)
    steps = tuple(segment for segment in planned if not segment.released)
    options = [segment.redrawn() for segment in steps]
    for label in dict.fromkeys(label for option in options for label in option):
        redrawn = tuple(option[label] for option in options if label in option)
        if redrawn == steps or len(redrawn) < len(steps):
            continue
        some_were = set(redrawn) & set(steps)
        truth = "not all of this run's were" if some_were else "this run's were not"
        all_of_it = (*redrawn, *releases)
        yield f"would hold for {label} batches; {truth}", False, all_of_it


def _items(items: Iterable[str]) -> str:
    return "\n".join(
        textwrap.fill(item, 80, initial_indent="- ", subsequent_indent="  ")
        for item in items
    )
