"""What several forms say is said in the same words."""

from tfdp.reports.form import Form
from tfdp.reports.questions import QUESTIONS


def test_answers_and_blanks(facts):
    form = Form(facts(answers={"bias": "None seen."}))
    assert form.answer("bias") == "None seen."
    blank = form.answer("utility")
    assert blank == f'____ {QUESTIONS["utility"]} [answers: "utility"]'


def test_audits_are_named(facts):
    assert not Form(facts()).audits
    audits = [{"audit": "replay", "rows": 50}, {"audit": "canaries", "bound": 0.5}]
    found = Form(facts(audits=audits)).audits
    assert found == "audit: replay, rows: 50; audit: canaries, bound: 0.5"


def test_weights_that_did_not_train_are_named(facts):
    assert "`small/last/kernel`, `small/last/bias`" in Form(facts()).untrained
    assert Form(facts() | {"not_trained": []}).untrained.endswith("updated: none.")
