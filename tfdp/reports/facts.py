"""All that is known of a private model: the report that other forms are made from."""

import datetime as dt
import importlib.metadata
import math
import platform
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tfdp._types import Config
from tfdp.accounting import Ledger, privacy_report
from tfdp.reports.questions import QUESTIONS, checked_answers
from tfdp.reports.weights import HOW, weights_sha256
from tfdp.runs.histories import was_trained
from tfdp.runs.recorder import LedgerRecorder

_COVERED = (
    "The weights that trained, after every step and as they are now: every output that "
    "is computed from them and from public inputs."
)
_PRETRAINED = (
    "What the weights were before their first private step, and what was made of them "
    "elsewhere, is not covered: if other rows trained them, nothing is said of those."
)
_OF_AUDITS = (
    "Figures of audits: they were measured on rows, without noise. Publishing them is "
    "outside the guarantee."
)
_OF_PLAIN_STEPS = (
    "The weights as they are now: plain Keras has trained them after they had become "
    "private, without clipping and noise."
)


def facts_of(
    model: keras.Model,
    recorder: LedgerRecorder,
    ledger: Ledger,
    delta: float,
    *,
    plain_steps: int,
    answers: Mapping[str, str] | None,
    audits: Iterable[object],
) -> Config:
    """Gather what is known of a private model.

    Args:
        model: The wrapped model.
        recorder: Of its steps.
        ledger: All that its weights come from.
        delta: As for `tfdp.accounting.privacy_report`.
        plain_steps: Steps that plain Keras has taken since it became private.
        answers: See `QUESTIONS`.
        audits: Results with a method `to_dict`, or dictionaries.

    Returns:
        See `tfdp.DPModel.privacy_report`: numbers, strings, lists and dictionaries.

    Raises:
        TypeError: If an answer is no string, or an audit is none.
        ValueError: If `delta` is outside (0, 1), or an answer or an audit is wrong.
    """
    given, described = checked_answers(answers), _described(audits)
    facts = privacy_report(ledger, delta)
    if described:
        facts["not_covered"].append(_OF_AUDITS)
    if plain_steps:
        _withdraw(facts)
    planned = ledger.planned().merged().segments
    weights, budget = model.weights if model.built else [], recorder.budget
    return {
        "report_version": 2,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "model": model.name,
        "weights": {
            "number": sum(math.prod(weight.shape) for weight in weights),
            "sha256": weights_sha256(weights),
            "how": HOW,
        },
        **facts,
        "trainings": [segment.words() for segment in planned],
        "numbers_of_examples": [each.scheme.number_of_examples for each in planned],
        "budget": budget
        and {"delta": budget.delta, "target_epsilon": budget.target_epsilon},
        "steps": recorder.all_steps,
        "plain_keras_steps": plain_steps,
        "l2_norm_clip": recorder.last_clip,
        "covered": _COVERED,
        "not_trained": [
            weight.path for weight in model.weights if not was_trained(weight)
        ],
        "pretrained": _PRETRAINED,
        "settings": _settings(facts["planned_segments"]),
        "audits": described,
        "answers": given,
        "questions": {
            name: question
            for name, question in QUESTIONS.items()
            if name not in given and not (name == "audit" and described)
        },
        "versions": {
            "tfdp": tfdp.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
            "dp-accounting": importlib.metadata.version("dp-accounting"),
            "python": platform.python_version(),
        },
    }


def _settings(segments: list[Config]) -> str:
    """Say what the ledger knows of how settings were chosen."""
    if any(segment["kind"] == "best_of" for segment in segments):
        return "A private search chose some settings; epsilon has what it cost."
    return "The ledger has no search that chose settings."


def _withdraw(facts: Config) -> None:
    """Let a report prove nothing: the weights are not those that the ledger is of."""
    facts |= {"differentially_private": False, "epsilon": None, "accountant": None}
    facts["bounds"] = [{**row, "holds": False} for row in facts["bounds"]]
    facts["best_attack"]["true_positive_rate"] = 1.0
    facts["not_covered"].insert(0, _OF_PLAIN_STEPS)


def _described(audits: Iterable[object]) -> list[Config]:
    """Return the results of audits as values for JSON."""
    if isinstance(audits, (str, Mapping)) or not isinstance(audits, Iterable):
        raise TypeError(_no_audits(audits))
    return [_plain(_asked(audit)) for audit in audits]


def _asked(audit: Any) -> Mapping[str, object]:
    if isinstance(audit, Mapping):
        return audit
    described = getattr(audit, "to_dict", lambda: None)()
    if not isinstance(described, Mapping):
        raise TypeError(_no_audits([audit]))
    return described


def _no_audits(audits: object) -> str:
    return (
        "`audits` must be a list of results of `tfdp.audit`, which have a method "
        f"`to_dict`. Received: audits={audits!r:.200}. Use `audits=[result]`."
    )


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it; what is not finite is None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        "`audits` must be of numbers, strings, lists and dictionaries. Received: "
        f"{value!r:.200} in one of them. Leave it out."
    )
