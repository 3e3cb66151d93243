"""Runs are known by their names, each as it was at its furthest moment."""

import dataclasses
import json

import pytest

from tfdp.accounting import Ledger, PoissonSteps, Segment, UnamplifiedSteps
from tfdp.accounting.runs import (
    Run,
    ledger_of,
    runs_from_state,
    runs_to_dict,
    union,
)
from tfdp.sampling import Poisson


def run(steps, noise_multiplier=1.0, clip=None, **flags):
    segments = (PoissonSteps(steps, noise_multiplier, 1000, 50),)
    return Run(Ledger(segments, **flags), steps, clip)


def test_a_union_has_every_run_once_as_far_as_it_came():
    early, late, other = run(2), run(5), run(3, 2.0)
    for several in ([{"a": early, "b": other}, {"a": late}], [{"b": other, "a": late}]):
        found = union(*several, {"a": early})
        assert list(found) == list(several[0])
        assert found == {"a": late, "b": other}
    assert union() == {}


@pytest.mark.parametrize("flag", ["noise_seed_fixed", "sampling_seed_fixed"])
def test_a_seed_that_one_moment_knows_is_not_forgotten(flag):
    for several in ([run(2, **{flag: True}), run(5)], [run(5), run(2, **{flag: True})]):
        found = union(*({"a": each} for each in several))["a"]
        assert found.steps == 5
        assert getattr(found.ledger, flag)


@pytest.mark.parametrize("is_planned", [False, True])
def test_what_a_run_owes_is_not_forgotten(is_planned):
    """A file that was saved with the last step does not know that it was the last."""
    owed = PoissonSteps(90, 1.0, 1000, 50)
    ledger = Ledger((PoissonSteps(10, 1.0, 1000, 50),))
    stopped = dataclasses.replace(ledger, cut_short=(owed,))
    if is_planned:
        stopped = stopped.planned()
    for order in ((ledger, stopped), (stopped, ledger)):
        assert union(*({"a": Run(each, 10)} for each in order)) == {
            "a": Run(stopped, 10)
        }


def test_the_ledger_of_runs_adds_them_up():
    found = ledger_of({"a": run(2), "b": run(3), "c": run(1, 2.0)})
    assert set(found.segments) == {
        PoissonSteps(5, 1.0, 1000, 50),
        PoissonSteps(1, 2.0, 1000, 50),
    }


def test_runs_come_back_from_files():
    runs = {"a": run(2, clip=0.5), "b": run(3, noise_seed_fixed=True)}
    saved = json.loads(json.dumps({"runs": runs_to_dict(runs)}))
    assert runs_from_state(saved) == runs


def test_runs_of_earlier_versions_had_no_clip_norm_and_one_ledger():
    ledger = Ledger((UnamplifiedSteps(3, 1.0),))
    saved = {"runs": {"a": {"ledger": ledger.to_json(), "steps": 3}}}
    assert runs_from_state(saved) == {"a": Run(ledger, 3)}
    saved = {"runs": {"a": 2, "b": 1}, "ledger": ledger.to_json(), "steps": 3}
    ((name, found),) = runs_from_state(saved).items()
    assert name not in {"a", "b"}
    assert found == Run(ledger, 3)


@pytest.mark.parametrize("state", [{}, {"runs": {"a": {"steps": 1}}}])
def test_damaged_states_raise(state):
    with pytest.raises(KeyError):
        runs_from_state(state)


def test_of_two_moments_of_as_many_steps_that_with_more_releases_counts():
    release = Segment(Poisson(100, 100), 1, 20.0, "private_accuracy")
    steps = PoissonSteps(5, 1.0, 100, 10)
    before = Run(Ledger((steps,)), 5)
    after = Run(Ledger((steps, release)), 5)
    for order in ((before, after), (after, before)):
        assert union(*({"a": each} for each in order)) == {"a": after}
