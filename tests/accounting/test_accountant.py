import importlib.metadata
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tfdp.accounting import accountant
from tfdp.accounting.accountant import epsilon, reported_epsilon
from tfdp.accounting.segments import PoissonSteps, ShuffledPasses, UnamplifiedSteps
from tfdp.sampling import Poisson

MNIST = PoissonSteps(14_063, 1.1, 60_000, 256)
# Much noise, which makes the distributions small.
CHEAP = PoissonSteps(875, 10.0, 50_000, 4096)

segments = st.one_of(
    st.builds(
        PoissonSteps,
        steps=st.integers(0, 500),
        noise_multiplier=st.floats(8, 20),
        number_of_examples=st.just(10_000),
        expected_batch_size=st.integers(1, 500),
    ),
    st.builds(
        ShuffledPasses,
        passes=st.integers(0, 20),
        noise_multiplier=st.floats(8, 20),
        number_of_examples=st.just(10_000),
        expected_batch_size=st.just(100),
    ),
    st.builds(
        UnamplifiedSteps,
        steps=st.integers(0, 20),
        noise_multiplier=st.floats(8, 20),
    ),
)
few = settings(max_examples=6)


def forget():
    for cached in ("_epsilon", "_composed_rdp", "_composed_loss", "_loss_of_a_draw"):
        getattr(accountant, cached).cache_clear()


@pytest.mark.parametrize(
    ("run", "rdp_epsilon", "pld_epsilon"),
    [
        (MNIST, 2.596656, 2.381779),
        (CHEAP, 0.987709, 0.902772),
    ],
)
def test_known_values(run, rdp_epsilon, pld_epsilon):
    assert epsilon([run], 1e-5, "RDP") == pytest.approx(rdp_epsilon, rel=2e-3)
    assert epsilon([run], 1e-5, "PLD") == pytest.approx(pld_epsilon, rel=1e-4)
    assert epsilon([run], 1e-5) == epsilon([run], 1e-5, "PLD")


def test_known_value_of_two_phases():
    phases = [PoissonSteps(500, noise, 100, 1) for noise in (1.5, 1.0)]
    assert epsilon(phases, 1e-5, "RDP") == pytest.approx(1.772545, rel=2e-3)


def test_shuffled_passes_are_not_amplified():
    passes = ShuffledPasses(60, 16.0, 60_000, 256)
    assert epsilon([passes], 1e-5) == pytest.approx(1.9226, rel=1e-3)
    assert epsilon([UnamplifiedSteps(60, 16.0)], 1e-5) == epsilon([passes], 1e-5)


@pytest.mark.parametrize("name", ["RDP", "PLD"])
@pytest.mark.parametrize("noise", [4, np.float32(4.1), np.int64(5)])
def test_the_type_of_the_noise_multiplier_changes_nothing(noise, name):
    """A number that is no float, composed as it is, gave 2.10 for 5.26."""
    mixed = [PoissonSteps(500, noise, 100, 1), UnamplifiedSteps(2, noise)]
    plain = [PoissonSteps(500, float(noise), 100, 1), UnamplifiedSteps(2, float(noise))]
    forget()
    result = epsilon(mixed, 1e-5, name)
    forget()
    assert result == epsilon(plain, 1e-5, name)


@pytest.mark.slow
def test_several_segments_are_what_dp_accounting_makes_of_their_events():
    run = [PoissonSteps(500, 4.0, 100, 1), UnamplifiedSteps(2, 9.0), CHEAP]
    by_rdp, by_pld = rdp.RdpAccountant(), pld.PLDAccountant()
    for segment in run:
        by_rdp.compose(segment.event())
        by_pld.compose(segment.event())
    assert epsilon(run, 1e-5, "RDP") == pytest.approx(by_rdp.get_epsilon(1e-5))
    assert epsilon(run, 1e-5, "PLD") == pytest.approx(by_pld.get_epsilon(1e-5))


@pytest.mark.slow
def test_what_is_reported_is_the_smaller_bound():
    rare = PoissonSteps(1_000_000, 30.0, 100_000, 1)
    assert epsilon([rare], 1e-6, "RDP") < epsilon([rare], 1e-6, "PLD")
    for run in (rare, MNIST):
        figures = [epsilon([run], 1e-6, name) for name in ("RDP", "PLD")]
        assert reported_epsilon([run], 1e-6) == min(figures)


@pytest.mark.parametrize("name", ["RDP", "PLD"])
def test_nothing_run_costs_nothing(name):
    assert epsilon([], 1e-5, name) == 0.0
    assert epsilon([UnamplifiedSteps(0, 1.0), MNIST.with_count(0)], 1e-5, name) == 0.0
    assert epsilon([UnamplifiedSteps(0, 0.0)], 1e-5, name) == 0.0


@pytest.mark.parametrize("name", ["RDP", "PLD"])
@pytest.mark.parametrize("noise", [0, 1e-160])
@pytest.mark.parametrize(
    "bare", [lambda z: PoissonSteps(1, z, 10, 1), lambda z: UnamplifiedSteps(1, z)]
)
def test_no_noise_is_no_privacy(bare, noise, name):
    assert epsilon([MNIST, bare(noise)], 1e-5, name) == math.inf


@pytest.mark.skipif(
    importlib.metadata.version("dp-accounting") == "0.4.3",
    reason="It raises a ValueError where a cost rounds to less than 0.",
)
def test_very_much_noise_costs_nothing_or_little():
    assert 0 <= epsilon([PoissonSteps(10, 1e200, 10, 1)], 1e-5, "RDP") < 1e-3
    assert 0 <= epsilon([PoissonSteps(10, 1e200, 10, 1)], 1e-5, "PLD") < 1e-3


@pytest.mark.parametrize(
    "run",
    [
        PoissonSteps(10, 0.199, 1000, 1),  # memory grows with 1 / noise**2
        PoissonSteps(14_063, 0.25, 60_000, 256),  # and with epsilon
        UnamplifiedSteps(14_063, 1.1),
        PoissonSteps(1_000_001, 1.1, 10**6, 10),  # time grows with the count
    ],
    ids=["noise", "epsilon", "epsilon unamplified", "count"],
)
def test_rdp_stands_in_where_pld_is_not_affordable(run, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("PLD was run.")

    accountant._epsilon.cache_clear()
    monkeypatch.setattr(accountant, "_composed_loss", refuse)
    assert epsilon([run], 1e-5, "PLD") == epsilon([run], 1e-5, "RDP") > 0


def test_pld_is_used_up_to_its_limits():
    at_the_limits = (PoissonSteps(1_000_000, 0.2, 1000, 1), UnamplifiedSteps(1, 0.01))
    assert accountant._pld_is_affordable(at_the_limits, 200.0)
    assert not accountant._pld_is_affordable(at_the_limits, 200.1)


def test_the_orders_that_dp_accounting_leaves_out_are_not_announced(caplog):
    """At this setting some versions cannot sum six of the orders."""
    forget()
    epsilon([PoissonSteps(7, 3.0, 10, 3)], 1e-5, "RDP")
    assert not caplog.records


@pytest.mark.slow
def test_more_segments_than_python_recurses():
    run = tuple(UnamplifiedSteps(1, 100.0 + i) for i in range(1200))
    composed = rdp.RdpAccountant()
    for segment in run:
        composed.compose(segment.event())
    assert epsilon(run, 1e-5, "RDP") == pytest.approx(composed.get_epsilon(1e-5))


@pytest.mark.parametrize("name", ["RDP", "PLD"])
def test_a_growing_last_segment_does_not_compose_the_others_again(name, monkeypatch):
    run = [PoissonSteps(10, noise, 10_000, 100) for noise in (3.0, 4.0, 5.0)]
    epsilon([*run, UnamplifiedSteps(1, 9.0)], 1e-5, name)
    composed = []
    monkeypatch.setattr(Poisson, "event", composed.append)
    assert epsilon([*run, UnamplifiedSteps(2, 9.0)], 1e-5, name) > 0
    assert not composed


def test_a_step_of_a_draw_is_analysed_once(monkeypatch):
    run = PoissonSteps(235, 1.234, 60_000, 256)
    first = epsilon([run], 1e-5)
    monkeypatch.setattr(
        accountant.privacy_loss_distribution, "from_gaussian_mechanism", None
    )
    assert epsilon([run.with_count(470)], 1e-5) > first > 0


def test_a_record_replaced_by_an_empty_one_costs_what_a_record_removed_costs():
    special = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    sampled = rdp.RdpAccountant(neighboring_relation=special)
    if not sampled.supports(CHEAP.event()):
        pytest.skip("This version of dp_accounting knows it without sampling only.")
    sampled.compose(CHEAP.event())
    assert epsilon([CHEAP], 1e-5, "RDP") == sampled.get_epsilon(1e-5)
    sampled = pld.PLDAccountant(neighboring_relation=special)
    sampled.compose(CHEAP.event())
    assert epsilon([CHEAP], 1e-5) == pytest.approx(sampled.get_epsilon(1e-5))


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 2, math.nan, math.inf])
def test_delta_out_of_range_is_refused(delta):
    with pytest.raises(ValueError, match=r"`delta`.*Received: delta="):
        epsilon([MNIST], delta)


@pytest.mark.parametrize("delta", [None, "1e-5", True])
def test_delta_of_a_wrong_type_is_refused(delta):
    with pytest.raises(TypeError, match=r"`delta`.*Received: delta="):
        epsilon([], delta)


@pytest.mark.parametrize("name", ["pld", "GDP", None])
def test_an_unknown_accountant_is_refused(name):
    with pytest.raises(ValueError, match="`accountant` must be one of 'PLD', 'RDP'"):
        epsilon([], 1e-5, name)


@pytest.mark.slow
@few
@given(segments, st.integers(1, 500), st.sampled_from(["RDP", "PLD"]))
def test_more_steps_cost_more(segment, more, name):
    longer = segment.with_count(segment.count + more)
    cost = epsilon([segment], 1e-5, name)
    assert cost >= 0
    assert epsilon([longer], 1e-5, name) >= cost * (1 - 1e-9)


@few
@given(segments, st.floats(1.01, 3), st.sampled_from(["RDP", "PLD"]))
def test_more_noise_costs_less(segment, factor, name):
    noisier = type(segment)(**{
        **segment.__dict__,
        "noise_multiplier": factor * segment.noise_multiplier,
    })
    cost = epsilon([segment], 1e-5, name)
    assert epsilon([noisier], 1e-5, name) <= cost * (1 + 1e-9)


@few
@given(segments, segments, st.sampled_from(["RDP", "PLD"]))
def test_together_costs_no_less_than_the_dearer(one, other, name):
    together = epsilon([one, other], 1e-5, name)
    assert together >= epsilon([one], 1e-5, name) * (1 - 1e-6) - 1e-4
    assert together >= epsilon([other], 1e-5, name) * (1 - 1e-6) - 1e-4


@few
@given(segments, st.floats(1e-8, 1e-3), st.floats(1.1, 100))
def test_a_larger_delta_costs_less(segment, delta, factor):
    cost = epsilon([segment], delta)
    assert epsilon([segment], min(delta * factor, 0.9)) <= cost


# Steps, noise and batch of a million rows, each of which is in nearly all batches, and a
# delta for which what float64 rounds in a convolution counted.
MANY_STEPS = [
    (100_000, 300.0, 1e-10),
    (100_000, 300.0, 1e-14),
    (20_000, 150.0, 1e-13),
    (20_000, 150.0, 1e-6),
]


def least_epsilon(steps, noise_multiplier, chance, delta):
    """Of a test of the sum of all releases: no bound can be below it."""
    far = 12 * math.sqrt(steps * chance * (1 - chance)) + 60
    counts = np.arange(int(steps * chance - far), steps + 1)
    weights = stats.binom.logpmf(counts, steps, chance)
    stddev = noise_multiplier * math.sqrt(steps)
    at = np.linspace(0, steps + 20 * stddev, 4001)
    tails = stats.norm.logsf((at[:, None] - counts) / stddev)
    with_row = np.logaddexp.reduce(weights + tails, axis=1)
    at, with_row = at[with_row > math.log(delta)], with_row[with_row > math.log(delta)]
    above = with_row + np.log1p(-np.exp(math.log(delta) - with_row))
    return np.max(above - stats.norm.logsf(at / stddev))


@pytest.mark.parametrize(("steps", "noise_multiplier", "delta"), MANY_STEPS)
def test_what_convolutions_round_makes_no_epsilon_smaller(
    steps, noise_multiplier, delta
):
    rows = 10**6
    chance = (rows - 1) / rows
    segment = PoissonSteps(steps, noise_multiplier, rows, rows - 1)
    least = least_epsilon(steps, noise_multiplier, chance, delta)
    assert least <= epsilon([segment], delta) <= epsilon([segment], delta, "RDP")
