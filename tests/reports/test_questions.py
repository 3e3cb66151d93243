"""Blanks say what to answer, and answers fill them in every form."""

import json
import re

import keras
import pytest

import tfdp
from tfdp.reports import FORMS
from tfdp.reports.questions import BLANK, QUESTIONS, checked_answers

ANSWERS = {name: f"Said of {name}." for name in QUESTIONS} | {
    "publication_date": "2026-01-31",
    "release_type": "One release",
    "data_source": "Static",
    "license": "apache-2.0",
}


@pytest.fixture(scope="module")
def private():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    return tfdp.DPModel(model)


def text_of(private, form, **options):
    report = private.privacy_report(1e-3, form, **options)
    return report if isinstance(report, str) else json.dumps(report, indent=1)


@pytest.mark.parametrize("form", FORMS)
def test_filled_forms_have_no_blanks(private, form):
    filled = text_of(private, form, answers=ANSWERS)
    assert BLANK not in filled
    assert "- [ ]" not in filled
    if form == "json":
        report = json.loads(filled)
        assert report["answers"] == ANSWERS
        assert report["questions"] == {}


def test_every_blank_has_its_question_and_every_question_a_blank(private):
    asked = set()
    for form in set(FORMS) - {"json"}:
        text = text_of(private, form).replace('\\"', '"')
        found = re.findall(r'____ (.*?) \[answers: "(\w+)"\]', text)
        assert len(found) == text.count(BLANK)
        for question, name in found:
            assert question == QUESTIONS[name].replace("\\", "")
        asked |= {name for _, name in found}
    assert asked == set(QUESTIONS)
    report = private.privacy_report(1e-3)
    assert report["questions"] == QUESTIONS
    assert report["answers"] == {}


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"json"}))
def test_an_answer_fills_its_blank_alone(private, form):
    empty = text_of(private, form).replace('\\"', '"')
    for name in QUESTIONS:
        text = text_of(private, form, answers={name: ANSWERS[name]})
        blanks = empty.count(f'[answers: "{name}"]')
        assert text.count(BLANK) == empty.count(BLANK) - blanks


def test_answers_of_several_lines_stay_in_their_line(private):
    text = text_of(private, "nist-800-226", answers={"bias": " One.\n\nTwo. "})
    assert "- [x] **Bias**: One.\n\n  Two.\n" in text


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ({"trustmodel": "x"}, ValueError, r"\['trustmodel'\].*'trust_model'"),
        ({"curator": 3}, TypeError, "must be strings"),
        ({"curator": None}, TypeError, "must be strings"),
        ({"curator": "  "}, ValueError, "must not be blank.*Who trains"),
        ({"curator": "____ Who"}, ValueError, "must not be blank"),
        ({"release_type": "once"}, ValueError, "'One release', 'Many releases'"),
        ({"data_source": "static"}, ValueError, "'Static', 'Dynamic'"),
        ({"publication_date": "31.1.2026"}, ValueError, "must be a date"),
        ({"publication_date": "20260131"}, ValueError, "must be a date"),
        (["curator"], TypeError, "must be a dictionary"),
        ("curator", TypeError, "must be a dictionary"),
    ],
)
def test_wrong_answers_are_refused(answers, error, words):
    with pytest.raises(
        error, match=rf"(?s){words}.*" if "Received" in words else words
    ):
        checked_answers(answers)


def test_they_are_refused_before_anything_is_exported(private, tmp_path):
    with pytest.raises(ValueError, match="`answers` must be to questions"):
        tfdp.export.export_private_model(
            private, tmp_path / "m" / "1", delta=1e-3, answers={"whom": "me"}
        )
    assert not list(tmp_path.iterdir())


def test_an_export_takes_them(private, tmp_path):
    path = tmp_path / "m" / "1"
    report = tfdp.export.export_private_model(
        private,
        path,
        delta=1e-3,
        answers={"curator": "A hospital"},
        audits=[{"audit": "replay"}],
    )
    assert report["answers"] == {"curator": "A hospital"}
    assert report["audits"] == [{"audit": "replay"}]
    saved = json.loads((path / "assets.extra" / "privacy_report.json").read_text())
    assert saved == report
