"""What runs is counted where it runs, and a ledger never gets smaller."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.accounting import (
    Ledger,
    PoissonSteps,
    Segment,
    UnamplifiedSteps,
)
from tfdp.errors import PrivacyBudgetError
from tfdp.runs.budgets import enforce_budget
from tfdp.runs.recorder import UNDECLARED, Budget, LedgerRecorder
from tfdp.sampling import Poisson, Shuffled

POISSON = Poisson(1000, 50)
SHUFFLED = Shuffled(1000, 50)
KINDS = (UNDECLARED, POISSON, SHUFFLED)

# Distinct noise multipliers that a recorder keeps apart.
ROWS = 1024


def record(recorder, *noise_multipliers):
    for noise_multiplier in noise_multipliers:
        recorder.record(tf.constant(noise_multiplier, tf.float64))


def recorded(segment, *noise_multipliers, **options):
    recorder = LedgerRecorder(list)
    recorder.begin(segment, **options)
    record(recorder, *noise_multipliers)
    return recorder


def counts(recorder):
    """Noise multipliers and how often each occurs."""
    return {s.noise_multiplier: s.count for s in recorder.ledger.segments}


def segments(kind, **counts_):
    """Segments of one kind: ``z1_5=3`` is three at noise multiplier 1.5."""
    return tuple(
        Segment(kind, count, float(name[1:].replace("_", ".")))
        for name, count in counts_.items()
    )


# ---------------------------------------------------------------------- counting


def test_a_new_recorder_has_run_nothing():
    recorder = LedgerRecorder()
    assert recorder.ledger == Ledger()
    assert recorder.steps == 0
    assert bool(recorder.has_room())


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_counted_in_the_kind_that_was_begun(kind):
    recorder = recorded(kind, 1.5, 1.5, 1.5)
    assert recorder.ledger.segments == segments(kind, z1_5=3)
    assert recorder.scheme == kind
    assert recorder.steps == 3


def test_steps_before_any_beginning_count_in_full():
    recorder = LedgerRecorder()
    record(recorder, 2.0, 2.0)
    assert recorder.ledger.segments == (UnamplifiedSteps(2, 2.0),)


def test_a_traced_step_counts_at_every_call():
    recorder = recorded(POISSON)
    step = tf.function(recorder.record)
    for z in (1.0, 1.0, 2.0, 1.0):
        step(tf.constant(z, tf.float64))
    assert counts(recorder) == {1.0: 3, 2.0: 1}
    assert recorder.steps == 4


def test_steps_of_a_loop_in_the_graph_are_all_counted():
    recorder = recorded(POISSON)

    @tf.function
    def loop(steps):
        for number in tf.range(steps):
            recorder.record(1.0 + tf.cast(number // 3, tf.float64))

    loop(tf.constant(8))
    assert counts(recorder) == {1.0: 3, 2.0: 3, 3.0: 2}


def test_a_step_in_a_branch_not_taken_is_not_counted():
    recorder = recorded(POISSON)

    @tf.function
    def step(is_taken):
        def record_one():
            recorder.record(tf.constant(1.0, tf.float64))
            return True

        return tf.cond(is_taken, record_one, lambda: False)

    for is_taken in (True, False, True):
        step(tf.constant(is_taken))
    assert counts(recorder) == {1.0: 2}
    assert recorder.steps == 2


def test_asking_for_the_ledger_changes_nothing():
    recorder = recorded(POISSON, 1.0, 2.0)
    assert recorder.ledger == recorder.ledger
    record(recorder, 2.0)
    assert counts(recorder) == {1.0: 1, 2.0: 2}


@pytest.mark.slow
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5]), max_size=12))
def test_every_noise_multiplier_gets_its_own_count(noise_multipliers):
    recorder = recorded(POISSON, *noise_multipliers)
    expected = {z: noise_multipliers.count(z) for z in noise_multipliers}
    assert counts(recorder) == expected


def run_schedule(recorder, noise_multipliers):
    table = tf.constant(noise_multipliers, tf.float64)

    @tf.function
    def loop():
        for number in tf.range(len(noise_multipliers)):
            recorder.record(table[number])

    loop()


@pytest.mark.parametrize(
    ("order", "beyond"),
    [
        ("falling", -1),
        ("rising", 0),
        ("mixed", 1),
        ("falling", 2),
        *(
            pytest.param(order, 500, marks=pytest.mark.slow)
            for order in ("falling", "rising", "mixed")
        ),
        ("mixed", 60),
    ],
)
def test_more_noise_multipliers_than_the_table_holds_count_on_the_safe_side(
    beyond, order, rng
):
    steps = ROWS + beyond
    schedule = np.linspace(3.0, 1.0, steps)
    if order == "rising":
        schedule = schedule[::-1]
    if order == "mixed":
        schedule = rng.permutation(schedule)
    recorder = recorded(POISSON)
    run_schedule(recorder, schedule)
    ledger = recorder.ledger
    assert ledger.steps == steps
    # At every level at least as many steps have as little noise as really had.
    reported = np.repeat(
        [s.noise_multiplier for s in ledger.segments],
        [s.count for s in ledger.segments],
    )
    assert (np.sort(reported) <= np.sort(schedule)).all()
    if beyond <= 1:
        np.testing.assert_array_equal(np.sort(reported), np.sort(schedule))
    assert reported.min() == schedule.min()


def test_epsilon_is_never_smaller_than_that_of_the_schedule():
    schedule = np.linspace(60.0, 40.0, ROWS + 300)
    recorder = recorded(UNDECLARED)
    run_schedule(recorder, schedule)
    # Gaussian steps compose to one of 1 / z^2 = sum 1 / z_i^2.
    exact = Ledger((UnamplifiedSteps(1, np.sum(schedule**-2.0) ** -0.5),))
    row_wise = sum(s.count * s.noise_multiplier**-2 for s in recorder.ledger.segments)
    bound = Ledger((UnamplifiedSteps(1, row_wise**-0.5),))
    assert bound.epsilon(1e-5) >= exact.epsilon(1e-5)
    assert bound.epsilon(1e-5) <= exact.epsilon(1e-5) * 1.1


def test_noise_multipliers_that_come_again_take_no_further_rows():
    recorder = recorded(POISSON)
    run_schedule(recorder, [1.0, 2.0] * 1500)
    assert counts(recorder) == {1.0: 1500, 2.0: 1500}


def test_of_many_planned_noise_multipliers_some_stand_for_all():
    planned = np.linspace(2.0, 1.0, 300)
    recorder = recorded(POISSON, noise_multipliers=planned)
    run_schedule(recorder, planned)
    found = counts(recorder)
    assert len(found) <= 32
    assert sum(found.values()) == 300
    reported = np.repeat(list(found), list(found.values()))
    assert (np.sort(reported) <= np.sort(planned)).all()
    assert (np.sort(reported) >= np.sort(planned) / 1.03).all()
    # What was not planned counts as it is, or as the level below.
    record(recorder, 0.5)
    assert counts(recorder)[0.5] == 1


def test_planned_noise_of_shared_gradients_counts_by_the_half():
    kind = dataclasses.replace(SHUFFLED, examples_per_unit=3)
    planned = np.array([2.0, 1.0])
    recorder = recorded(kind, 1.0, 0.5, 0.7, noise_multipliers=planned)
    assert counts(recorder) == {1.0: 1, 0.5: 2}


@pytest.mark.slow
def test_a_budget_follows_what_is_restored():
    """No step runs on a limit that did not know of the steps restored."""
    recorder = recorded(POISSON)
    recorder.budget = Budget(
        1e-3, Ledger((PoissonSteps(10, 1.0, 1000, 50),)).epsilon(1e-3)
    )
    enforce_budget(recorder, np.array([1.0]))
    recorder.restore(recorded(POISSON, *[1.0] * 6).state())
    assert not recorder.has_room()
    enforce_budget(recorder, np.array([1.0]))
    assert steps_that_fit(recorder, 10) == 4
    with pytest.raises(PrivacyBudgetError):
        enforce_budget(recorder, np.array([1.0]))


@pytest.mark.slow
def test_a_limit_of_what_is_left_counts_as_it_will_be_recorded():
    """The levels of the whole plan are coarser than those of its rest."""
    planned = np.linspace(8.0, 1.0, 300)
    recorder = recorded(POISSON, noise_multipliers=planned)
    run_schedule(recorder, planned[:220])
    spent = recorder.ledger.epsilon(1e-3, "RDP")
    recorder.budget = Budget(1e-3, 1.5 * spent)
    enforce_budget(recorder, planned[220:], "rest")
    for noise_multiplier in planned[220:]:
        if recorder.has_room(noise_multiplier):
            record(recorder, noise_multiplier)
    assert 220 < recorder.ledger.steps < 300
    assert recorder.ledger.epsilon(1e-3) <= recorder.budget.target_epsilon


# ------------------------------------------------------------------------ passes


@pytest.mark.parametrize(("steps", "passes"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_pass_counts_once_from_its_first_step_on(steps, passes):
    recorder = recorded(SHUFFLED, *[1.5] * steps, steps_per_item=4)
    assert recorder.ledger.segments == segments(SHUFFLED, z1_5=passes)
    assert recorder.steps == steps


def test_a_pass_counts_at_its_smallest_noise_multiplier():
    recorder = recorded(
        SHUFFLED, 2.0, 1.0, 3.0, 3.0, 2.5, 3.0, 4.0, 5.0, steps_per_item=3
    )
    assert counts(recorder) == {1.0: 1, 2.5: 1, 4.0: 1}
    record(recorder, 0.5)
    assert counts(recorder) == {1.0: 1, 2.5: 1, 0.5: 1}


def test_a_restart_of_the_data_begins_a_new_pass():
    recorder = recorded(SHUFFLED, 1.0, 1.0, steps_per_item=10)
    recorder.begin_item()
    recorder.begin_item()
    assert counts(recorder) == {1.0: 1}
    record(recorder, *[1.0] * 10)
    assert counts(recorder) == {1.0: 2}
    record(recorder, 1.0)
    assert counts(recorder) == {1.0: 3}


def test_passes_in_the_graph():
    recorder = recorded(SHUFFLED, steps_per_item=5)
    run_schedule(recorder, np.linspace(2.0, 1.0, 13))
    expected = np.linspace(2.0, 1.0, 13)[[4, 9, 12]]
    np.testing.assert_allclose(sorted(counts(recorder)), sorted(expected))
    assert recorder.ledger.passes == 3


# -------------------------------------------------------------------- one after other


def test_kinds_of_data_follow_each_other():
    recorder = recorded(POISSON, 1.0, 1.0)
    recorder.begin(SHUFFLED, steps_per_item=2)
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
    recorder.begin(SHUFFLED, planned_items=10)
    recorder.begin(POISSON, planned_items=10)
    assert recorder.ledger == before


def test_an_open_pass_ends_with_its_segment():
    recorder = recorded(SHUFFLED, 1.0, steps_per_item=10)
    recorder.begin(SHUFFLED, steps_per_item=10)
    record(recorder, 1.0)
    assert counts(recorder) == {1.0: 2}


# ------------------------------------------------------------------------- limits


def steps_that_fit(recorder, tries, noise_multiplier=1.0):
    for done in range(tries):
        if not recorder.has_room():
            return done
        record(recorder, noise_multiplier)
    return tries


@pytest.mark.parametrize("further", [0, 1, 3])
def test_steps_fit_up_to_the_limit(further):
    recorder = recorded(POISSON, 1.0, 1.0)
    recorder.limit(further)
    assert steps_that_fit(recorder, 9) == further
    assert not recorder.has_room()


@pytest.mark.parametrize("further", [0, 1, 2])
def test_a_begun_pass_may_end_and_so_many_more_may_begin(further):
    recorder = recorded(SHUFFLED, 1.0, steps_per_item=4)
    recorder.limit(further)
    assert steps_that_fit(recorder, 99) == 3 + 4 * further


def test_a_limit_binds_traced_steps_and_moves_without_retracing():
    recorder = recorded(POISSON)

    @tf.function
    def step():
        def record_one():
            recorder.record(tf.constant(1.0, tf.float64))
            return True

        return tf.cond(recorder.has_room(), record_one, lambda: False)

    recorder.limit(2)
    assert [bool(step()) for _ in range(4)] == [True, True, False, False]
    recorder.limit(1)
    assert [bool(step()) for _ in range(2)] == [True, False]
    assert counts(recorder) == {1.0: 3}


def test_a_new_segment_has_no_limit():
    recorder = recorded(POISSON)
    recorder.limit(0)
    recorder.begin(POISSON)
    assert steps_that_fit(recorder, 3) == 3


# -------------------------------------------------------------- planned and stopped


def test_a_run_that_somebody_stopped_is_noted_with_what_was_planned():
    recorder = recorded(POISSON, 1.5, 1.5, planned_items=10)
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == segments(POISSON, z1_5=8)
    assert recorder.ledger.planned().merged().segments == segments(POISSON, z1_5=10)


@pytest.mark.parametrize("planned", [None, 3, 2])
def test_a_run_that_reached_its_plan_was_not_stopped(planned):
    recorder = recorded(POISSON, 1.0, 1.0, 1.0, planned_items=planned)
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == ()


def test_a_run_that_its_limit_ended_was_not_stopped():
    recorder = recorded(POISSON, planned_items=10)
    recorder.limit(3)
    assert steps_that_fit(recorder, 10) == 3
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == ()
    assert recorder.ledger.steps == 3


def test_a_run_stopped_before_its_limit_is_noted():
    recorder = recorded(POISSON, 1.0, planned_items=10)
    recorder.limit(5)
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == segments(POISSON, z1_0=9)


def test_passes_not_begun_are_what_a_stopped_shuffled_run_lacks():
    recorder = recorded(SHUFFLED, *[1.0] * 5, steps_per_item=4, planned_items=6)
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == segments(SHUFFLED, z1_0=4)


# ------------------------------------------------------------------------- seeds


def test_a_known_seed_is_never_forgotten():
    recorder = recorded(POISSON)
    for noise, sampling in ((False, False), (True, False), (False, True)):
        recorder.note_seeds(noise=noise, sampling=sampling)
    recorder.note_seeds(noise=False, sampling=False)
    recorder.begin(POISSON)
    assert recorder.ledger.noise_seed_fixed
    assert recorder.ledger.sampling_seed_fixed


# ------------------------------------------------------------ saving and restoring


def copy(recorder):
    other = LedgerRecorder()
    other.restore(recorder.state())
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_restores_the_whole_ledger(kind):
    recorder = recorded(POISSON, 1.0, planned_items=5)
    recorder.begin(kind, steps_per_item=2)
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


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS), noise_lists, st.sampled_from(KINDS), noise_lists, st.data()
)
def test_restoring_never_lowers_a_ledger(kind, here, other_kind, there, data):
    recorder = recorded(
        kind, *here, planned_items=data.draw(st.sampled_from([None, 5]))
    )
    if data.draw(st.booleans()):
        recorder.begin(kind)
    recorder.note_seeds(noise=data.draw(st.booleans()), sampling=False)
    other = recorded(other_kind, *there, planned_items=7)
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
    assert recorder.last_clip == 0.5
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
    recorder = recorded(SHUFFLED, 1.0, steps_per_item=2)
    recorder.restore(recorder.state())
    record(recorder, 1.0, 1.0, 1.0)
    # The pass that was open goes on.
    assert counts(recorder) == {1.0: 2}


def test_a_restore_during_a_run_keeps_its_limit_and_its_plan():
    recorder = recorded(POISSON, 1.0, planned_items=10)
    recorder.limit(3)
    assert steps_that_fit(recorder, 1) == 1
    recorder.restore(recorded(POISSON).state())
    assert recorder.ledger.cut_short == ()
    assert steps_that_fit(recorder, 1) == 1
    assert recorder.has_room()
    ended = copy(recorder)
    recorder.begin(UNDECLARED)
    assert recorder.ledger.cut_short == segments(POISSON, z1_0=7)
    assert ended.ledger.cut_short == ()


def test_a_restore_does_not_lift_a_limit_that_was_reached():
    recorder = recorded(POISSON, 1.0)
    recorder.limit(0)
    recorder.restore(LedgerRecorder().state())
    assert not recorder.has_room()


def test_two_recorders_share_nothing():
    one, other = recorded(POISSON, 1.0), recorded(POISSON)
    one.limit(0)
    assert other.ledger == Ledger()
    assert bool(other.has_room())


@pytest.mark.parametrize("text", ["", "{}", '{"ledger": "", "steps": 0}'])
def test_a_damaged_state_changes_nothing(text):
    recorder = recorded(POISSON, 1.0)
    ledger = recorder.ledger
    with pytest.raises((ValueError, KeyError)):
        recorder.restore(text)
    assert recorder.ledger == ledger


# ------------------------------------------------------------------ several processes


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
