import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdp.accounting.ledger import Ledger, compose
from tfdp.accounting.segments import (
    PoissonSteps,
    Segment,
    ShuffledPasses,
    UnamplifiedSteps,
)
from tfdp.sampling import Poisson, Shuffled

POISSON = PoissonSteps(1000, 1.1, 60_000, 256)
SHUFFLED = ShuffledPasses(3, 4.0, 60_000, 256)
UNKNOWN = UnamplifiedSteps(5, 9.0, examples_per_unit=2)
FULL = Ledger((POISSON, SHUFFLED, UNKNOWN), cut_short=(POISSON,), noise_seed_fixed=True)

parts = st.lists(
    st.builds(
        lambda segment, count: segment.with_count(count),
        st.sampled_from([POISSON, SHUFFLED, UNKNOWN]),
        st.integers(0, 50),
    ),
    max_size=8,
)


def test_a_new_ledger_is_empty_and_free():
    assert Ledger().segments == ()
    assert Ledger().steps == Ledger().passes == 0
    assert Ledger().epsilon(1e-5) == 0.0


def test_adding_gives_another_ledger():
    empty = Ledger()
    one = empty.add(POISSON)
    assert empty == Ledger()
    assert one.add(SHUFFLED, UNKNOWN).segments == (POISSON, SHUFFLED, UNKNOWN)


def test_a_ledger_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.segments = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.segments[0].steps = 0


def test_totals():
    assert FULL.steps == 1005
    assert FULL.passes == 3


def test_equal_segments_merge_and_empty_ones_go():
    ledger = Ledger((POISSON, UNKNOWN, SHUFFLED.with_count(0), POISSON.with_count(7)))
    assert ledger.merged().segments == (UNKNOWN, POISSON.with_count(1007))


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": 1.2},
        {"scheme": Poisson(60_001, 256)},
        {"scheme": Poisson(60_000, 257)},
        {"scheme": Shuffled(60_000, 256)},
    ],
)
def test_different_segments_do_not_merge(change):
    ledger = Ledger((POISSON, dataclasses.replace(POISSON, **change)))
    assert ledger.merged() == ledger


def test_splitting_a_segment_changes_nothing():
    parts = [POISSON.with_count(count) for count in (1, 400, 599)]
    for name in ("RDP", "PLD"):
        split = Ledger().add(*parts).epsilon(1e-5, name)
        assert split == Ledger().add(POISSON).epsilon(1e-5, name)


def test_adding_costs_more():
    costs = [FULL.add(UNKNOWN.with_count(n)).epsilon(1e-5) for n in (0, 1, 10)]
    assert costs[0] == FULL.epsilon(1e-5)
    assert costs == sorted(set(costs))


def test_planned_holds_what_was_not_run():
    planned = FULL.planned()
    assert planned.merged().segments == (SHUFFLED, UNKNOWN, POISSON.with_count(2000))
    assert planned.cut_short == ()
    assert planned.noise_seed_fixed
    assert planned.epsilon(1e-5) > FULL.epsilon(1e-5)
    assert planned.planned() == planned


def test_composed_ledgers_cost_as_one():
    other = Ledger((POISSON,), sampling_seed_fixed=True)
    joint = compose(FULL, other)
    assert joint.segments == (POISSON, SHUFFLED, UNKNOWN, POISSON)
    assert joint.cut_short == (POISSON,)
    assert joint.noise_seed_fixed
    assert joint.sampling_seed_fixed
    twice = Ledger((POISSON.with_count(2000), SHUFFLED, UNKNOWN))
    assert joint.epsilon(1e-5) == pytest.approx(twice.epsilon(1e-5), rel=1e-9)
    assert compose() == Ledger()


def test_only_ledgers_compose():
    with pytest.raises(TypeError, match="Received: Segment"):
        compose(FULL, POISSON)


@given(parts, parts, st.booleans(), st.booleans())
def test_json_gives_the_ledger_back(run, cut_short, noise, sampling):
    ledger = Ledger(tuple(run), tuple(cut_short), noise, sampling)
    assert Ledger.from_json(ledger.to_json()) == ledger


@given(parts)
def test_merging_keeps_the_totals(run):
    ledger = Ledger(tuple(run))
    merged = ledger.merged()
    assert (merged.steps, merged.passes) == (ledger.steps, ledger.passes)
    assert merged.merged() == merged
    assert len(merged.segments) <= 3


def edited(**changes):
    return json.dumps(json.loads(FULL.to_json()) | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "3",
        "[]",
        "{}",
        FULL.to_json()[:-5],
        FULL.to_json().replace("1.1", "NaN"),
        FULL.to_json().replace("1.1", "-1.1"),
        FULL.to_json().replace("1.1", "1" + "0" * 400),
        FULL.to_json().replace("1000", '"1000"'),
        FULL.to_json().replace("poisson_steps", "poisson"),
        FULL.to_json().replace('"cut_short"', '"cut"'),
        edited(extra=1),
        edited(segments=None),
        edited(segments=["poisson_steps"]),
        edited(segments=[{}]),
        edited(noise_seed_fixed=0),
        None,
    ],
)
def test_damaged_json_is_refused(text):
    with pytest.raises(ValueError, match=r"written by `Ledger.to_json`.*Received: te"):
        Ledger.from_json(text)


def test_a_list_of_segments_becomes_a_tuple():
    assert Ledger([POISSON]) == Ledger((POISSON,))


def test_what_is_no_segment_is_refused():
    with pytest.raises(TypeError, match="`segments` must hold segments"):
        Ledger((POISSON, 3))
    with pytest.raises(TypeError, match="`cut_short` must hold segments"):
        Ledger(cut_short=("poisson",))


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_a_flag_that_is_no_bool_is_refused(value):
    with pytest.raises(TypeError, match="Received: sampling_seed_fixed="):
        Ledger(sampling_seed_fixed=value)


RELEASES = Segment(Poisson(60_000, 60_000), 3, 20.0, "private_accuracy")


@pytest.mark.slow
def test_releases_are_no_steps_and_cost_as_they_would():
    steps = PoissonSteps(235, 1.1, 60_000, 256)
    ledger = Ledger((RELEASES, steps))
    assert (ledger.steps, ledger.releases) == (235, 3)
    as_steps = dataclasses.replace(RELEASES, released="")
    alone = Ledger((steps,))
    assert ledger.epsilon(1e-5) == Ledger((as_steps, steps)).epsilon(1e-5)
    assert ledger.epsilon(1e-5) > alone.epsilon(1e-5)
    assert len(ledger.add(as_steps).merged().segments) == 3
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_files_from_before_there_were_releases_are_read():
    fields = json.loads(Ledger((PoissonSteps(1, 1.1, 100, 10),)).to_json())
    del fields["ended_by_release"], fields["saw_other_rows"]
    ledger = Ledger.from_json(json.dumps(fields))
    assert not ledger.ended_by_release
    assert not ledger.saw_other_rows
    del fields["noise_seed_fixed"]
    with pytest.raises(ValueError, match="written by"):
        Ledger.from_json(json.dumps(fields))
