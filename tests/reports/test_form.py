"""What several forms say is said in the same words."""

import pytest

from tfdp.accounting import BestOf, PoissonSteps
from tfdp.accounting.tries import Geometric
from tfdp.reports.form import Form
from tfdp.reports.model_card import model_card
from tfdp.reports.nist import checklist
from tfdp.reports.questions import QUESTIONS
from tfdp.reports.registry import registry


def test_answers_and_blanks(facts):
    form = Form(facts(answers={"bias": "None seen."}))
    assert form.answer("bias") == "None seen."
    blank = form.answer("utility")
    assert blank == f'____ {QUESTIONS["utility"]} [answers: "utility"]'


def test_audits_are_named(facts):
    assert Form(facts()).audits.startswith("____ Was the training audited")
    audits = [{"audit": "replay", "rows": 50}, {"audit": "canaries", "bound": 0.5}]
    found = Form(facts(audits=audits)).audits
    assert found == "audit: replay, rows: 50; audit: canaries, bound: 0.5"


@pytest.mark.parametrize(
    ("audit", "agrees"),
    [
        ({"nonprivate_passed": False}, False),
        ({"nonprivate_passed": True}, True),
        ({"audit": "one of their own"}, True),
    ],
)
def test_audits_that_contradict_the_ledger_are_no_success(facts, audit, agrees):
    known = facts(audits=[{"audit": "fine", "nonprivate_passed": True}, audit])
    assert Form(known).audits_agree == agrees
    (line,) = (each for each in checklist(known).splitlines() if "Audits" in each)
    assert line.startswith("- [x]" if agrees else "- [ ]")
    for form in (checklist, model_card, lambda facts: str(registry(facts))):
        assert ("An audit CONTRADICTS what is stated" in form(known)) != agrees


def test_only_trainings_are_composed_by_both_accountants(facts):
    assert "by privacy loss distributions and by" in Form(facts()).composition
    search = BestOf(Geometric(3), [[PoissonSteps(10, 8.0, 60_000, 256)]]).segment()
    of_search = Form(facts(search)).composition
    assert "loss distributions" not in of_search
    assert "by Rényi differential privacy alone" in of_search


def test_weights_that_did_not_train_are_named(facts):
    assert "`small/last/kernel`, `small/last/bias`" in Form(facts()).untrained
    assert Form(facts() | {"not_trained": []}).untrained.endswith("updated: none.")
