"""What reports ask people, because no program knows it."""

import datetime as dt
from collections.abc import Mapping

QUESTIONS = {
    "curator": "Who trains the model and publishes it?",
    "curator_type": "What is the curator: Government, Industry or Nonprofit?",
    "contact": "Whom can people ask about the model and about their data?",
    "description": "What is the model, in a sentence or two?",
    "intended_use": "What is the model for?",
    "limitations": "What should it not be used for, and by whom?",
    "license": "Under which license is it published (an identifier such as apache-2.0)?",
    "region": "Which region do the data describe, and whose laws apply?",
    "sector": (
        "Which sector is it: Technology, Healthcare, Education, Government, Energy or "
        "Finance?"
    ),
    "publication_date": "When is it first published (YYYY-MM-DD)?",
    "data": "What are the rows, whose are they, and how and when were they collected?",
    "data_collection": (
        "Which of the data had to be collected, who agreed to it, and when are they "
        "deleted?"
    ),
    "data_source": "Do new rows come in (Dynamic), or are they fixed (Static)?",
    "rows_per_person": (
        "How many rows (with users as units: how many ids) can one person have, and "
        "what sees to it?"
    ),
    "release_type": "Is it published once (One release), or again (Many releases)?",
    "other_releases": (
        "What else is published of the same data, also later versions, and what does "
        "all of it cost together?"
    ),
    "unprotected": (
        "What of the data is published without noise: metrics, counts, vocabularies, "
        "figures of audits?"
    ),
    "trust_model": "Who sees the raw rows, and why are they trusted?",
    "access_control": (
        "What keeps others from the raw rows, from logs, and from what training leaves "
        "on disk?"
    ),
    "side_channels": (
        "Who else can see how long training and answers take, how much memory they "
        "use, or their error messages?"
    ),
    "preprocessing": "What was computed from the rows before training, and looked at?",
    "settings": (
        "How were clip norm, noise, epochs and architecture chosen: by public data, by "
        "a private search, or by trainings on these rows that the ledger lacks?"
    ),
    "pretrained": (
        'Which weights did training begin with, and on what were these trained ("none" '
        "for random ones)?"
    ),
    "justification": "Why this epsilon, this delta and this unit?",
    "audit": "Was the training audited: how, by whom, and what came out?",
    "utility": "How good is the model, on which rows that are public?",
    "bias": "For whom is it worse, small groups above all, and how was that looked at?",
    "registry_authors": "Who has filled in this entry?",
}

_CHOICES = {
    "data_source": ("Static", "Dynamic"),
    "release_type": ("One release", "Many releases"),
}

BLANK = "____"


def checked_answers(answers: object) -> dict[str, str]:
    """Return answers to some of the questions, or refuse them.

    Args:
        answers: By the names of the questions; None for none.

    Returns:
        The answers without space around them, in the order of the questions.

    Raises:
        TypeError: If they are no dictionary of strings.
        ValueError: If there is no such question, or an answer is none to it.
    """
    answers = {} if answers is None else answers
    if not isinstance(answers, Mapping):
        raise TypeError(
            "`answers` must be a dictionary from questions to answers. Received: "
            f'answers={answers!r:.200}. Use `answers={{"curator": "..."}}`.'
        )
    unknown = [name for name in answers if name not in QUESTIONS]
    if unknown:
        raise ValueError(
            f"`answers` must be to questions that reports have. Received: {unknown}. "
            f"Use some of {', '.join(map(repr, QUESTIONS))}."
        )
    return {
        name: _checked(name, answers[name]) for name in QUESTIONS if name in answers
    }


def _checked(name: str, answer: object) -> str:
    if not isinstance(answer, str):
        raise TypeError(
            f"`answers` must be strings. Received: {name}={answer!r:.200}. Use "
            f'`answers={{"{name}": "..."}}`.'
        )
    answer = answer.strip()
    if not answer or BLANK in answer:
        raise ValueError(
            f"`answers` must not be blank. Received: {name}={answer!r:.200}. Leave it "
            f"out, or answer: {QUESTIONS[name]}"
        )
    choices = _CHOICES.get(name, (answer,))
    if answer not in choices:
        raise ValueError(
            f"The answer to `{name}` must be one of {', '.join(map(repr, choices))}. "
            f"Received: {name}={answer!r}."
        )
    if name == "publication_date":
        _check_date(answer)
    return answer


def _check_date(answer: str) -> None:
    try:
        is_date = dt.date.fromisoformat(answer).isoformat() == answer
    except ValueError:
        is_date = False
    if not is_date:
        raise ValueError(
            "The answer to `publication_date` must be a date. Received: "
            f'publication_date={answer!r}. Use `"2026-01-31"`.'
        )
