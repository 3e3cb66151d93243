import math

import dp_accounting
import numpy as np
import pytest

from tfdp.accounting.segments import (
    PoissonSteps,
    Segment,
    ShuffledPasses,
    UnamplifiedSteps,
    segment_from_dict,
    segment_to_dict,
)
from tfdp.sampling import Poisson

SEGMENTS = [
    PoissonSteps(235, 1.1, 60_000, 256),
    ShuffledPasses(15, 1.1, 60_000, 256, examples_per_unit=4),
    UnamplifiedSteps(100, 8.0),
]


def gaussian(segment):
    """Return the Gaussian release inside a segment's event."""
    release = segment.event().event
    is_sampled = isinstance(release, dp_accounting.PoissonSampledDpEvent)
    return release.event if is_sampled else release


def test_poisson_steps_are_sampled_releases():
    event = PoissonSteps(235, 1.1, 60_000, 256).event()
    assert event == dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            256 / 60_000, dp_accounting.GaussianDpEvent(1.1)
        ),
        235,
    )


@pytest.mark.parametrize(
    "segment", [ShuffledPasses(15, 1.1, 60_000, 256), UnamplifiedSteps(15, 1.1)]
)
def test_other_segments_are_releases_of_everything(segment):
    assert segment.event() == dp_accounting.SelfComposedDpEvent(
        dp_accounting.GaussianDpEvent(1.1), 15
    )


def test_a_batch_larger_than_the_data_is_all_of_it():
    steps = PoissonSteps(3, 1.1, 100, 256)
    assert steps.sampling_probability == 1.0
    assert steps.event() == UnamplifiedSteps(3, 1.1).event()


@pytest.mark.parametrize("noise", [1, np.float32(1.25), np.int64(2), np.float64(1.25)])
@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: segment.kind)
def test_every_noise_multiplier_is_a_plain_float(segment, noise):
    fields = segment_to_dict(segment) | {"noise_multiplier": noise}
    changed = segment_from_dict(fields)
    assert type(changed.noise_multiplier) is float
    assert type(gaussian(changed).noise_multiplier) is float
    assert gaussian(changed).noise_multiplier == noise


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: segment.kind)
def test_counts_are_plain_ints(segment):
    counted = segment.with_count(np.int64(7))
    assert type(counted.count) is int
    assert counted.count == 7
    assert counted.with_count(segment.count) == segment


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: segment.kind)
def test_no_releases_are_no_event(segment):
    assert segment.with_count(0).event() == dp_accounting.NoOpDpEvent()


@pytest.mark.parametrize("noise", [0, 0.0, 1e-160, 1e-7])
def test_no_noise_is_no_privacy(noise):
    event = PoissonSteps(1, noise, 10, 1).event()
    assert event == dp_accounting.NonPrivateDpEvent()


def test_noise_beyond_all_sense_is_taken_for_less():
    assert gaussian(UnamplifiedSteps(1, 1e200)).noise_multiplier == 1e6


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: segment.kind)
def test_a_dictionary_round_trip_gives_the_segment_back(segment):
    assert segment_from_dict(segment_to_dict(segment)) == segment


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "poisson"}, "kind='poisson'"),
        ({"kind": ["poisson_steps"]}, "must be one of"),
        ({"passes": 3}, "cannot have these fields"),
        ({"steps": None}, "steps=None"),
        ({"steps": 1.5}, "steps=1.5"),
    ],
)
def test_a_damaged_dictionary_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        segment_from_dict(segment_to_dict(SEGMENTS[0]) | change)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, -math.inf])
@pytest.mark.parametrize(
    "name",
    ["steps", "noise_multiplier", "number_of_examples", "expected_batch_size"],
)
def test_numbers_out_of_range_are_refused(name, value):
    fields = {
        "steps": 1,
        "noise_multiplier": 1.0,
        "number_of_examples": 10,
        "expected_batch_size": 2,
    }
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}={value}"):
        PoissonSteps(**(fields | {name: value}))


@pytest.mark.parametrize("value", ["3", None, True, [1]])
@pytest.mark.parametrize("name", ["passes", "noise_multiplier", "examples_per_unit"])
def test_wrong_types_are_refused(name, value):
    fields = {
        "passes": 1,
        "noise_multiplier": 1.0,
        "number_of_examples": 10,
        "expected_batch_size": 2,
    }
    with pytest.raises(TypeError, match=f"`{name}`.*Received: {name}="):
        ShuffledPasses(**(fields | {name: value}))


@pytest.mark.parametrize("name", ["number_of_examples", "expected_batch_size"])
def test_zero_sizes_are_refused(name):
    fields = {"number_of_examples": 10, "expected_batch_size": 2} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0"):
        PoissonSteps(1, 1.0, **fields)


def test_what_is_released_beside_the_steps_says_so():
    one = Segment(Poisson(1000, 1000), 1, 20.0, "private_accuracy")
    assert one.words() == (
        "a release of private_accuracy, noise multiplier 20, of all 1000 examples"
    )
    drawn = Segment(Poisson(1000, 100), 3, 20.0, "private_loss")
    assert drawn.words() == (
        "3 releases of private_loss, noise multiplier 20, of a Poisson draw: 100 of "
        "1000 examples expected, sampling probability 0.1"
    )
    for segment in (one, drawn):
        assert segment_from_dict(segment_to_dict(segment)) == segment
    assert "released" not in segment_to_dict(PoissonSteps(1, 1.1, 1000, 100))
    with pytest.raises(TypeError, match="released"):
        Segment(Poisson(1000, 100), 1, 20.0, None)
