"""Steps are counted where they run, and a limit binds them there."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.runs.recording import (
    KINDS,
    POISSON,
    SHUFFLED,
    counts,
    record,
    recorded,
    run_schedule,
    segments,
    steps_that_fit,
)
from tfdp.accounting import Ledger, UnamplifiedSteps
from tfdp.runs.counter import UNDECLARED
from tfdp.runs.recorder import LedgerRecorder

# Distinct noise multipliers that a counter keeps apart.
ROWS = 1024


def test_a_new_recorder_has_run_nothing():
    recorder = LedgerRecorder()
    assert recorder.ledger == Ledger()
    assert recorder.steps == 0
    assert bool(recorder.counter.has_room())


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_counted_in_the_kind_that_was_begun(kind):
    recorder = recorded(kind, 1.5, 1.5, 1.5)
    assert recorder.ledger.segments == segments(kind, z1_5=3)
    assert recorder.counter.scheme == kind
    assert recorder.steps == 3


def test_steps_before_any_beginning_count_in_full():
    recorder = LedgerRecorder()
    record(recorder, 2.0, 2.0)
    assert recorder.ledger.segments == (UnamplifiedSteps(2, 2.0),)


def test_a_traced_step_counts_at_every_call():
    recorder = recorded(POISSON)
    step = tf.function(lambda z: recorder.counter.record(z, 1.0))
    for z in (1.0, 1.0, 2.0, 1.0):
        step(tf.constant(z, tf.float64))
    assert counts(recorder) == {1.0: 3, 2.0: 1}
    assert recorder.steps == 4


def test_steps_of_a_loop_in_the_graph_are_all_counted():
    recorder = recorded(POISSON)

    @tf.function
    def loop(steps):
        for number in tf.range(steps):
            recorder.counter.record(1.0 + tf.cast(number // 3, tf.float64), 1.0)

    loop(tf.constant(8))
    assert counts(recorder) == {1.0: 3, 2.0: 3, 3.0: 2}


def test_a_step_in_a_branch_not_taken_is_not_counted():
    recorder = recorded(POISSON)

    @tf.function
    def step(is_taken):
        def record_one():
            recorder.counter.record(tf.constant(1.0, tf.float64), 1.0)
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


@pytest.mark.slow
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


# --------------------------------------------------------------------------- passes


@pytest.mark.parametrize(("steps", "passes"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_pass_counts_once_from_its_first_step_on(steps, passes):
    recorder = recorded(SHUFFLED, *[1.5] * steps, steps_per_release=4)
    assert recorder.ledger.segments == segments(SHUFFLED, z1_5=passes)
    assert recorder.steps == steps


def test_a_pass_counts_at_its_smallest_noise_multiplier():
    recorder = recorded(
        SHUFFLED, 2.0, 1.0, 3.0, 3.0, 2.5, 3.0, 4.0, 5.0, steps_per_release=3
    )
    assert counts(recorder) == {1.0: 1, 2.5: 1, 4.0: 1}
    record(recorder, 0.5)
    assert counts(recorder) == {1.0: 1, 2.5: 1, 0.5: 1}


def test_a_restart_of_the_data_begins_a_new_pass():
    recorder = recorded(SHUFFLED, 1.0, 1.0, steps_per_release=10)
    recorder.counter.begin_release()
    recorder.counter.begin_release()
    assert counts(recorder) == {1.0: 1}
    record(recorder, *[1.0] * 10)
    assert counts(recorder) == {1.0: 2}
    record(recorder, 1.0)
    assert counts(recorder) == {1.0: 3}


def test_passes_in_the_graph():
    recorder = recorded(SHUFFLED, steps_per_release=5)
    run_schedule(recorder, np.linspace(2.0, 1.0, 13))
    expected = np.linspace(2.0, 1.0, 13)[[4, 9, 12]]
    np.testing.assert_allclose(sorted(counts(recorder)), sorted(expected))
    assert recorder.ledger.passes == 3


# --------------------------------------------------------------------------- limits


@pytest.mark.parametrize("further", [0, 1, 3])
def test_steps_fit_up_to_the_limit(further):
    recorder = recorded(POISSON, 1.0, 1.0)
    recorder.counter.allow(further)
    assert steps_that_fit(recorder, 9) == further
    assert not recorder.counter.has_room()


@pytest.mark.parametrize("further", [0, 1, 2])
def test_a_begun_pass_may_end_and_so_many_more_may_begin(further):
    recorder = recorded(SHUFFLED, 1.0, steps_per_release=4)
    recorder.counter.allow(further)
    assert steps_that_fit(recorder, 99) == 3 + 4 * further


def test_a_limit_binds_traced_steps_and_moves_without_retracing():
    recorder = recorded(POISSON)

    @tf.function
    def step():
        def record_one():
            recorder.counter.record(tf.constant(1.0, tf.float64), 1.0)
            return True

        return tf.cond(recorder.counter.has_room(), record_one, lambda: False)

    recorder.counter.allow(2)
    assert [bool(step()) for _ in range(4)] == [True, True, False, False]
    recorder.counter.allow(1)
    assert [bool(step()) for _ in range(2)] == [True, False]
    assert counts(recorder) == {1.0: 3}


def test_a_new_segment_has_no_limit():
    recorder = recorded(POISSON)
    recorder.counter.allow(0)
    recorder.begin(POISSON)
    assert steps_that_fit(recorder, 3) == 3
