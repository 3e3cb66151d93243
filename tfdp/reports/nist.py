"""A checklist after NIST SP 800-226."""

import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from tfdp._types import Config
from tfdp.reports.form import Form
from tfdp.reports.questions import BLANK

_NO_QUERIES = (
    "Whoever has the model has its weights, or what is computed from them; nobody "
    "queries the rows. Rows and checkpoints can be put away when training has ended."
)


class _Item(NamedTuple):
    """A line: what it is about, what is known, and whether that is as it should be."""

    title: str
    text: str
    holds: bool = True


def checklist(facts: Config) -> str:
    """Write a checklist after the topics of NIST's guidelines [1]_, in words of tfdp.

    Args:
        facts: See `facts_of`.

    Returns:
        Markdown. A box has a cross if its line is known and as it should be.

    References:
        .. [1] Near et al., "Guidelines for Evaluating Differential Privacy Guarantees",
           NIST SP 800-226, 2025. https://doi.org/10.6028/NIST.SP.800-226
    """
    form = Form(facts)
    sections = {
        "Privacy parameters": _parameters(form),
        "Unit of privacy": _unit(form),
        "Several releases": _releases(form),
        "Algorithms and their correctness": _algorithms(form),
        "Utility and bias": _utility(form),
        "Queries and trust": _trust(form),
        "Side channels": _side_channels(form),
        "Security of the data and access to them": _security(form),
        "Exposure by data collection": _collection(form),
    }
    text = "".join(
        f"\n## {title}\n\n" + "".join(map(_line, items))
        for title, items in sections.items()
    )
    return (
        f"# Differential privacy of `{facts['model']}`: a checklist\n\n"
        "After the topics of NIST SP 800-226, Guidelines for Evaluating Differential "
        f"Privacy Guarantees. Made on {facts['date']}.\n{text}"
    )


def _line(item: _Item) -> str:
    is_done = item.holds and BLANK not in item.text
    line = f"- [{'x' if is_done else ' '}] **{item.title}**: {item.text}"
    return textwrap.indent(line, "  ").removeprefix("  ") + "\n"


def _parameters(form: Form) -> Iterator[_Item]:
    facts = form.facts
    yield _Item("Epsilon and delta", form.guarantee, form.is_private)
    yield _Item("Variant", "approximate, (epsilon, delta), from Gaussian noise.")
    yield _delta(form)
    if form.budget:
        yield _Item("Budget", form.budget)
    yield _Item("In plain words", form.meaning, form.is_private)
    yield _Item("Why so much", form.answer("justification"))
    if facts["planned_segments"] != facts["segments"]:
        text = "A run was stopped early; epsilon is that of what was planned."
        yield _Item("Planned and run", text)


def _delta(form: Form) -> _Item:
    numbers = filter(None, form.facts["numbers_of_examples"])
    delta, most = form.facts["delta"], max(numbers, default=0)
    if not most:
        return _Item("Size of delta", f"{delta:g}; the number of records is not known.")
    text = f"{delta:g}, {delta * most:.2g} of one over the number of records, {most}."
    return _Item("Size of delta", text, delta * most < 1)


def _unit(form: Form) -> Iterator[_Item]:
    yield _Item("Unit", form.facts["unit"])
    yield _Item("Neighbours", form.facts["neighbouring_relation"])
    yield _Item("People", form.answer("rows_per_person"))


def _releases(form: Form) -> Iterator[_Item]:
    yield _Item("Composition", form.composition)
    yield _Item("Other releases", form.answer("other_releases"))
    yield _Item("How often", form.answer("release_type"))
    yield _Item("New rows", form.answer("data_source"))
    yield _Item("Without noise", form.answer("unprotected"))


def _algorithms(form: Form) -> Iterator[_Item]:
    facts = form.facts
    yield _Item("Mechanism", form.mechanism)
    yield _Item("Not covered", " ".join(facts["not_covered"]), form.is_private)
    yield _Item("Weights", form.fingerprint)
    yield _Item("Weights that did not train", form.untrained)
    text = f"{facts['pretrained']} {form.answer('pretrained')}"
    yield _Item("Weights from elsewhere", text)
    yield _Item("Preprocessing", form.answer("preprocessing"))
    text = f"{facts['settings']} {form.answer('settings')}"
    yield _Item("Settings", text)
    yield _Item("Audits", form.audits, form.audits_agree)


def _utility(form: Form) -> Iterator[_Item]:
    yield _Item("Utility", form.answer("utility"))
    yield _Item("Bias", form.answer("bias"))


def _trust(form: Form) -> Iterator[_Item]:
    yield _Item("Queries", _NO_QUERIES)
    text = f"{form.facts['trust_model']} {form.answer('trust_model')}"
    yield _Item("Trust model", text)


def _side_channels(form: Form) -> Iterator[_Item]:
    seeded = form.facts["noise_seed_fixed"] or form.facts["sampling_seed_fixed"]
    yield _Item("Floating point and randomness", form.arithmetic, not seeded)
    text = f"How long steps took is not covered. {form.answer('side_channels')}"
    yield _Item("Time, memory, messages", text)


def _security(form: Form) -> Iterator[_Item]:
    yield _Item("Access", form.answer("access_control"))


def _collection(form: Form) -> Iterator[_Item]:
    yield _Item("What the data are", form.answer("data"))
    yield _Item("Why they are there", form.answer("data_collection"))
