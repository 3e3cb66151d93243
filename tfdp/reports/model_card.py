"""A model card: what model hubs show of a model, in Markdown."""

import json
from collections.abc import Iterator

from tfdp._types import Config
from tfdp.reports.form import Form
from tfdp.reports.questions import QUESTIONS


def model_card(facts: Config) -> str:
    """Write a model card, with the front matter that model hubs read.

    Args:
        facts: See `facts_of`.

    Returns:
        Markdown after a block of YAML.
    """
    form = Form(facts)
    sections = {
        "The model": _model(form),
        "Training": _training(form),
        "Privacy": _privacy(form),
        "Not covered": facts["not_covered"],
        "Questions about it": [form.answer("contact")],
    }
    text = "\n".join(
        f"## {title}\n\n" + "".join(f"{_item(each)}\n" for each in items)
        for title, items in sections.items()
    )
    return f"{_front_matter(facts)}\n# {facts['model']}\n\n{text}"


def _front_matter(facts: Config) -> str:
    license_ = facts["answers"].get("license")
    # Text in quotes is the same in JSON and in YAML.
    license_line = (
        f"license: {json.dumps(license_)}"
        if license_
        else f'# ____ {QUESTIONS["license"]} [answers: "license"]\n# license:'
    )
    tags = ["keras", "tensorflow", "tfdp"]
    if facts["differentially_private"]:
        tags.append("differential-privacy")
    lines = ["---", license_line, "library_name: keras", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---", ""])


def _item(text: str) -> str:
    return "- " + text.replace("\n", "\n  ")


def _model(form: Form) -> Iterator[str]:
    yield form.answer("description")
    yield f"For: {form.answer('intended_use')}"
    yield f"Not for: {form.answer('limitations')}"
    yield f"By: {form.answer('curator')}"
    yield f"Quality: {form.answer('utility')}"
    yield f"For whom it is worse: {form.answer('bias')}"
    yield f"Weights: {form.fingerprint}"


def _training(form: Form) -> Iterator[str]:
    versions = ", ".join(
        f"{name} {version}" for name, version in form.facts["versions"].items()
    )
    yield f"Data: {form.answer('data')}"
    yield f"Before training: {form.answer('preprocessing')}"
    yield f"{form.untrained} {form.facts['pretrained']} {form.answer('pretrained')}"
    yield form.mechanism
    yield f"Settings: {form.facts['settings']} {form.answer('settings')}"
    yield f"Made with {versions}, reported on {form.facts['date']}."


def _privacy(form: Form) -> Iterator[str]:
    facts = form.facts
    yield f"Guarantee: {form.guarantee}"
    yield form.meaning
    yield f"{facts['unit']} {form.answer('rows_per_person')}"
    yield facts["neighbouring_relation"]
    yield f"{facts['trust_model']} {form.answer('trust_model')}"
    yield f"Covered: {facts['covered']}"
    yield f"Audits: {form.audits}"
