"""What runs is kept under its name, and a ledger never gets smaller."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs.recording import (
    KINDS,
    POISSON,
    SHUFFLED,
    counts,
    record,
    recorded,
    segments,
    steps_that_fit,
)
from tfdp.accounting import Ledger, PoissonSteps
from tfdp.accounting.runs import Run
from tfdp.runs.counter import UNDECLARED
from tfdp.runs.recorder import Budget, LedgerRecorder, Reservation

# ------------------------------------------------------------------ one after other


def test_kinds_of_data_follow_each_other():
    recorder = recorded(POISSON, 1.0, 1.0)
    recorder.begin(SHUFFLED, steps_per_release=2)
    record(recorder, 1.0, 1.0, 1.0)
    recorder.begin(POISSON)
    record(recorder, 1.0, 2.0)
    assert set(recorder.ledger.segments) == {
        *segments(POISSON, z1_0=3, z2_0=1),
        *segments(SHUFFLED, z1_0=2),
    }
    assert recorder.steps == 7


def test_a_beginning_without_steps_leaves_no_trace():
    recorder = recorded(POISSON, 1.0)
    before = recorder.ledger
    recorder.begin(SHUFFLED, planned_releases=10)
    recorder.begin(POISSON, planned_releases=10)
    assert recorder.ledger == before


def test_an_open_pass_ends_with_its_segment():
    recorder = recorded(SHUFFLED, 1.0, steps_per_release=10)
    recorder.begin(SHUFFLED, steps_per_release=10)
    record(recorder, 1.0)
    assert counts(recorder) == {1.0: 2}


# -------------------------------------------------------------- planned and stopped


def test_a_run_that_somebody_stopped_is_noted_with_what_was_planned():
    recorder = recorded(POISSON, 1.5, 1.5, planned_releases=10)
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == segments(POISSON, z1_5=8)
    assert recorder.ledger.planned().merged().segments == segments(POISSON, z1_5=10)


@pytest.mark.parametrize("planned", [None, 3, 2])
def test_a_run_that_reached_its_plan_was_not_stopped(planned):
    recorder = recorded(POISSON, 1.0, 1.0, 1.0, planned_releases=planned)
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == ()


def test_a_run_that_its_limit_ended_was_not_stopped():
    recorder = recorded(POISSON, planned_releases=10)
    recorder.counter.allow(3)
    assert steps_that_fit(recorder, 10) == 3
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == ()
    assert recorder.ledger.steps == 3


@pytest.mark.parametrize(
    ("noise_multiplier", "owed"),
    [(1.0, 5), pytest.param(0.5, 9, id="lowered"), pytest.param(2.0, 5, id="raised")],
)
def test_a_run_stopped_before_its_limit_owes_what_that_would_have_let_it(
    noise_multiplier, owed
):
    recorder = recorded(POISSON, 1.0, planned_releases=10)
    recorder.counter.allow(5, noise_multiplier=noise_multiplier)
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == segments(POISSON, z1_0=owed)


@pytest.mark.parametrize("is_spent", [False, True])
@pytest.mark.parametrize("is_by_release", [False, True])
def test_of_a_run_without_a_plan_released_values_may_have_been_the_end(
    is_by_release, is_spent
):
    recorder = recorded(POISSON, 1.0)
    if is_by_release:
        recorder.end_by_release()
    if is_spent:
        recorder.end_by_budget()
    recorder.begin(UNDECLARED)
    assert recorder.ledger.ended_by_release == (is_by_release and not is_spent)


def test_a_limit_that_does_not_stand_has_ended_nothing():
    recorder = recorded(POISSON, 1.0, planned_releases=10)
    recorder.counter.allow(5)
    recorder.counter.revoke()
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == segments(POISSON, z1_0=9)


def test_a_part_of_a_budget_that_is_used_up_has_ended_nothing():
    recorder = recorded(POISSON, planned_releases=10)
    recorder.counter.allow(3, is_final=False)
    assert steps_that_fit(recorder, 10) == 3
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == segments(POISSON, z1_0=7)


def test_passes_not_begun_are_what_a_stopped_shuffled_run_lacks():
    recorder = recorded(SHUFFLED, *[1.0] * 5, steps_per_release=4, planned_releases=6)
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == segments(SHUFFLED, z1_0=4)


# ---------------------------------------------------------------------------- seeds


def test_a_known_seed_is_never_forgotten():
    recorder = recorded(POISSON)
    for noise, sampling in ((False, False), (True, False), (False, True)):
        recorder.note_seeds(noise=noise, sampling=sampling)
    recorder.note_seeds(noise=False, sampling=False)
    recorder.begin(POISSON)
    assert recorder.ledger.noise_seed_fixed
    assert recorder.ledger.sampling_seed_fixed


# ------------------------------------------------------------- saving and restoring


def copy(recorder):
    other = LedgerRecorder()
    other.restore(recorder.state())
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_restores_the_whole_ledger(kind):
    recorder = recorded(POISSON, 1.0, planned_releases=5)
    recorder.begin(kind, steps_per_release=2)
    recorder.note_seeds(noise=True, sampling=False)
    record(recorder, 1.0, 2.0, 3.0)
    recorder.sampled_epochs = 4
    other = copy(recorder)
    assert other.ledger == recorder.ledger
    assert other.steps == 4
    assert other.sampled_epochs == 4
    assert copy(other).ledger == recorder.ledger


def test_a_state_is_json():
    assert set(json.loads(LedgerRecorder().state())) == {
        "sampled_epochs",
        "runs",
        "budget",
        "last_clip",
    }


def test_restoring_an_earlier_state_of_the_same_run_changes_nothing():
    recorder = recorded(POISSON, 1.0, 1.0, 2.0)
    early = recorder.state()
    record(recorder, 2.0, 3.0)
    ledger = recorder.ledger
    recorder.restore(early)
    assert recorder.ledger == ledger
    assert recorder.steps == 5


def test_restoring_a_later_state_of_the_same_run_takes_it_over():
    recorder = recorded(POISSON, 1.0)
    other = copy(recorder)
    other.begin(POISSON)
    record(other, 1.0, 2.0)
    recorder.restore(other.state())
    assert recorder.ledger == other.ledger
    assert recorder.steps == 3


def test_restoring_another_run_adds_it():
    recorder = recorded(POISSON, 1.0, 1.0)
    recorder.restore(recorded(SHUFFLED, 3.0).state())
    assert set(recorder.ledger.segments) == {
        *segments(POISSON, z1_0=2),
        *segments(SHUFFLED, z3_0=1),
    }


def test_restoring_a_run_that_is_longer_here_and_shorter_there_adds_both():
    recorder = recorded(POISSON, 1.0, 1.0, 2.0)
    other = recorded(POISSON, 1.0, 2.0, 2.0)
    recorder.restore(other.state())
    assert counts(recorder) == {1.0: 3, 2.0: 3}


noise_lists = st.lists(st.sampled_from([1.0, 2.0]), max_size=4)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.sampled_from(KINDS), noise_lists, st.sampled_from(KINDS), noise_lists, st.data()
)
def test_restoring_never_lowers_a_ledger(kind, here, other_kind, there, data):
    recorder = recorded(
        kind, *here, planned_releases=data.draw(st.sampled_from([None, 5]))
    )
    if data.draw(st.booleans()):
        recorder.begin(kind)
    recorder.note_seeds(noise=data.draw(st.booleans()), sampling=False)
    other = recorded(other_kind, *there, planned_releases=7)
    if data.draw(st.booleans()):
        other.begin(other_kind)
    other.note_seeds(noise=data.draw(st.booleans()), sampling=data.draw(st.booleans()))
    before, steps = recorder.ledger, recorder.steps
    recorder.restore(other.state())
    after = recorder.ledger
    assert recorder.steps == steps + len(there)
    for ledger in (before, other.ledger):
        for name in ("segments", "cut_short"):
            held = {s.with_count(1): s.count for s in getattr(after, name)}
            for segment in getattr(ledger, name):
                assert held[segment.with_count(1)] >= segment.count
        assert after.noise_seed_fixed >= ledger.noise_seed_fixed
        assert after.sampling_seed_fixed >= ledger.sampling_seed_fixed


def test_runs_are_known_by_their_names():
    """Whatever is loaded, in whatever order: each run counts where it was furthest."""
    first, second = recorded(POISSON, 1.0), recorded(POISSON, 2.0, 2.0)
    states = [first.state(), second.state()]
    record(first, 1.0)
    both = copy(first)
    states.append(first.state())
    for state in (*states, *reversed(states)):
        both.restore(state)
    assert counts(both) == {1.0: 2, 2.0: 2}
    assert both.steps == 4
    # One that goes on here is where it is here.
    for state in states:
        first.restore(state)
    record(first, 1.0)
    assert counts(first) == {1.0: 3, 2.0: 2}


def test_a_ledger_that_an_earlier_version_saved_still_loads():
    """It had one ledger for all runs, and only the steps of each."""

    def saved(runs, ledger):
        return json.dumps({
            "ledger": ledger.to_json(),
            "steps": sum(runs.values()),
            "sampled_epochs": 2,
            "runs": runs,
            "budget": None,
            "last_clip": 0.5,
        })

    one = Ledger((PoissonSteps(3, 1.0, 1000, 50),))
    recorder = LedgerRecorder()
    recorder.restore(saved({"a": 3}, one))
    assert recorder.ledger == one
    assert (recorder.steps, recorder.sampled_epochs) == (3, 2)
    longer = one.add(PoissonSteps(2, 1.0, 1000, 50)).merged()
    recorder.restore(saved({"a": 5}, longer))
    assert recorder.ledger == longer
    # Of several at once nobody knows which steps are whose.
    several = one.add(PoissonSteps(1, 2.0, 1000, 50))
    for _ in range(2):
        recorder.restore(saved({"a": 3, "b": 1}, several))
        assert counts(recorder) == {1.0: 8, 2.0: 1}
    recorder.restore(saved({"a": 2, "b": 2}, several))
    assert counts(recorder) == {1.0: 11, 2.0: 2}


def test_counting_goes_on_after_a_restore():
    recorder = recorded(SHUFFLED, 1.0, steps_per_release=2)
    recorder.restore(recorder.state())
    record(recorder, 1.0, 1.0, 1.0)
    # The pass that was open goes on.
    assert counts(recorder) == {1.0: 2}


def test_a_restore_during_a_run_keeps_its_limit_and_its_plan():
    recorder = recorded(POISSON, 1.0, planned_releases=10)
    recorder.counter.allow(3)
    assert steps_that_fit(recorder, 1) == 1
    recorder.restore(recorded(POISSON).state())
    assert recorder.ledger.cut_short == ()
    assert steps_that_fit(recorder, 1) == 1
    assert recorder.counter.has_room()
    ended = copy(recorder)
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == segments(POISSON, z1_0=7)
    assert ended.ledger.cut_short == ()


def test_a_restore_does_not_lift_a_limit_that_was_reached():
    recorder = recorded(POISSON, 1.0)
    recorder.counter.allow(0)
    recorder.restore(LedgerRecorder().state())
    assert not recorder.counter.has_room()


def test_two_recorders_share_nothing():
    one, other = recorded(POISSON, 1.0), recorded(POISSON)
    one.counter.allow(0)
    assert other.ledger == Ledger()
    assert bool(other.counter.has_room())


@pytest.mark.parametrize("text", ["", "{}", '{"ledger": "", "steps": 0}'])
def test_a_damaged_state_changes_nothing(text):
    recorder = recorded(POISSON, 1.0)
    ledger = recorder.ledger
    with pytest.raises((ValueError, KeyError)):
        recorder.restore(text)
    assert recorder.ledger == ledger


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize("kind", [POISSON, SHUFFLED])
def test_processes_agree_on_one_training(kind):
    """Their journals know of three steps and of two; the next life counts on."""
    first, second = LedgerRecorder(), LedgerRecorder()
    states = []
    for recorder, steps in ((first, 3), (second, 2)):
        recorder.begin(kind)
        recorder.agree([recorder.state()] * 2, "the training")
        record(recorder, *[1.0] * steps)
        states.append(recorder.state())
    for recorder in (first, second):
        recorder.agree(states, "its next life")
        recorder.begin(kind)
        record(recorder, 2.0)
        assert recorder.run == "its next life"
        assert recorder.steps == 4
        assert recorder.ledger.segments == segments(kind, z1=3, z2=1)
    assert json.loads(first.state()) == json.loads(second.state())
    agreed = first.state()
    first.agree([agreed, second.state()], "its next life")
    assert first.state() == agreed


def test_trainings_apart_are_added_up_by_agreement():
    first, second = recorded(POISSON, 1.0), recorded(POISSON, 1.0, 1.0)
    states = [first.state(), second.state()]
    for recorder in (first, second):
        recorder.agree(states, "together")
        assert recorder.ledger.segments == segments(POISSON, z1=3)
        assert recorder.steps == 3
        record(recorder, 1.0)
        assert recorder.ledger.segments == segments(POISSON, z1=4)


def test_a_run_can_be_a_part_of_something_that_counts_for_it():
    recorder = recorded(POISSON, 1.0, 1.0)
    name = recorder.run
    whole = Run(Ledger((PoissonSteps(9, 1.0, 60, 20),)), 4, 0.5)
    recorder.join({"before": whole, "search": whole}, "search")
    assert recorder.ledger == Ledger((PoissonSteps(18, 1.0, 60, 20),))
    assert name not in recorder.state()
    # What it runs from here on is a run of its own.
    recorder.begin(UNDECLARED)
    assert recorder.own_run().steps == 0
    assert set(recorder.all_runs()) == {"before", "search"}


PROJECT = SimpleNamespace(path=Path("data.json"))


def test_a_plan_ends_where_the_part_of_a_project_ends():
    recorder = LedgerRecorder()
    recorder.begin(UNDECLARED, planned_releases=9)
    recorder.plan(9)
    assert recorder.counter.planned_releases == 9
    part = Reservation(recorder.run, recorder.beginnings, 4, 1.0)
    recorder.budget = Budget(1e-5, 1.0, project=PROJECT, reservation=part)
    recorder.plan(9)
    assert recorder.counter.planned_releases == 4
    assert recorder.budget.has_reserved(recorder, 1.0) == 4
    assert recorder.budget.has_reserved(recorder, 0.9) == -1
    # Another model of the project has weights that this training changes.
    assert Budget(1e-5, 1.0, PROJECT).has_reserved(recorder, 1.0) == 4
    other = SimpleNamespace(path=Path("other.json"))
    assert Budget(1e-5, 1.0, other).has_reserved(recorder, 1.0) == 0
    assert recorder.budget.has_reserved(LedgerRecorder(), 1.0) == 0
    assert Budget(1e-5, 1.0).has_reserved(recorder, 0.0) == float("inf")
    assert Budget(1e-5, 1.0, lacks_project=True).has_reserved(recorder, 1.0) == -1
    # Files keep the numbers alone, and that there was a project.
    assert json.loads(recorder.state())["budget"] == {
        "delta": 1e-5,
        "target_epsilon": 1.0,
        "lacks_project": True,
    }
    recorder.begin(UNDECLARED)
    recorder.plan(9)
    assert recorder.counter.planned_releases == 9
    assert recorder.budget.has_reserved(recorder, 1.0) == 0
