"""One training under every way of drawing its batches."""

import pytest

from tfdp.accounting import reported_epsilon, segments_by_sampling
from tfdp.sampling import TruncatedPoisson, samplings, scheme_of_kind

RUN = {"n": 1000, "batch_size": 64, "epochs": 2.5, "noise_multiplier": 2.0}


@pytest.fixture(scope="module")
def segments():
    return segments_by_sampling(**RUN)


def test_all_schemes_are_there(segments):
    # Of users there are no numbers in a plan for rows.
    kinds = {segment.scheme.kind for segment in segments.values()}
    assert len(kinds) == len(segments) == 7
    own = {
        name: scheme
        for name, scheme in samplings().items()
        if scheme.__module__.startswith("tfdp.")
    }
    assert own.keys() <= segments.keys()
    for name, scheme in own.items():
        assert segments[name].scheme == scheme(1000, 64)
    assert all(scheme_of_kind(kind) for kind in kinds)


def test_begun_passes_count_whole(segments):
    for segment in segments.values():
        assert segment.count == (3 if segment.counts_passes else 40)
        assert segment.noise_multiplier == 2.0


def test_the_bound_costs_less_than_a_percent(segments):
    scheme = segments["truncated_poisson"].scheme
    assert isinstance(scheme, TruncatedPoisson)
    assert scheme.max_batch_size == scheme.free_bound


@pytest.mark.slow
def test_what_is_known_less_of_costs_more(segments):
    figures = {name: reported_epsilon([s], 1e-5) for name, s in segments.items()}
    for less, more in (
        ("poisson", "truncated_poisson"),
        ("poisson", "cyclic_poisson"),
        ("poisson", "shuffle"),
        ("balls_in_bins", "fixed_bins"),
        ("fixed_bins", "shuffle"),
        ("shuffle", "unknown"),
    ):
        assert figures[less] <= figures[more]


@pytest.mark.slow
def test_one_example_has_no_parts():
    run = RUN | {"n": 1, "batch_size": 1}
    segments = segments_by_sampling(**run)
    assert "cyclic_poisson" not in segments
    assert len({reported_epsilon([s], 1e-5) for s in segments.values()}) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 1001}, "Use `batch_size=1000`"),
        ({"n": 0}, "Received: n=0"),
        ({"epochs": 0}, "Received: epochs=0"),
        ({"noise_multiplier": -1}, "Received: noise_multiplier=-1"),
    ],
)
def test_wrong_numbers(wrong, message):
    with pytest.raises(ValueError, match=message):
        segments_by_sampling(**RUN | wrong)
