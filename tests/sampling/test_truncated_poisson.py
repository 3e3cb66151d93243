"""Poisson draws with a bound: what is cut, and what that costs."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp

from tfdp.accounting import Ledger, Segment
from tfdp.accounting.users import user_epsilon
from tfdp.sampling import Poisson, TruncatedPoisson, samplings

KEY = 11
CUT = TruncatedPoisson(1000, 10, 16)


@pytest.mark.slow
def test_a_bound_near_the_mean_costs_what_dp_accounting_says():
    run = Segment(CUT, 128, 1.0)
    assert Ledger((run,)).epsilon(1e-6) == pytest.approx(5.105, abs=1e-3)
    free = Segment(Poisson(1000, 10), 128, 1.0)
    assert Ledger((free,)).epsilon(1e-6) == pytest.approx(1.015, abs=1e-3)


@pytest.mark.parametrize(
    ("n", "batch_size", "z"),
    [
        pytest.param(1000, 10, 1.0, marks=pytest.mark.slow),
        pytest.param(1000, 1, 0.8, marks=pytest.mark.slow),
        pytest.param(60_000, 256, 1.1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_free_bound_costs_less_than_a_percent(n, batch_size, z):
    bound = TruncatedPoisson(n, batch_size, n).free_bound
    cut = Segment(TruncatedPoisson(n, batch_size, bound), 200, z)
    free = Segment(Poisson(n, batch_size), 200, z)
    ratio = Ledger((cut,)).epsilon(1e-5) / Ledger((free,)).epsilon(1e-5)
    assert 1 - 1e-6 < ratio < 1.01


@pytest.mark.parametrize(
    ("n", "batch_size", "z", "steps", "delta"),
    [
        pytest.param(1000, 10, 1.0, 128, 1e-6, marks=pytest.mark.slow),
        pytest.param(60_000, 256, 0.6, 5000, 1e-5, marks=pytest.mark.exhaustive),
    ],
)
def test_what_draws_no_warning_costs_less_than_a_percent(
    n, batch_size, z, steps, delta
):
    bound = next(
        bound
        for bound in range(batch_size, n)
        if not TruncatedPoisson(n, batch_size, bound).cuts_often
    )
    assert bound < TruncatedPoisson(n, batch_size, n).free_bound
    cut = Segment(TruncatedPoisson(n, batch_size, bound), steps, z)
    free = Segment(Poisson(n, batch_size), steps, z)
    assert Ledger((cut,)).epsilon(delta) < 1.01 * Ledger((free,)).epsilon(delta)


@pytest.mark.parametrize(
    ("n", "batch_size", "is_near"),
    # Of one example, six standard deviations cost 3 %.
    [(1000, 10, False), (60_000, 256, False), (1000, 50, False), (1000, 1, True)],
)
def test_six_standard_deviations_above_the_mean_are_enough(n, batch_size, is_near):
    q = batch_size / n
    bound = math.ceil(batch_size + 6 * math.sqrt(n * q * (1 - q)))
    assert TruncatedPoisson(n, batch_size, bound).cuts_often == is_near


@pytest.mark.slow
def test_rdp_has_an_upper_bound():
    run = Segment(CUT, 128, 1.0)
    twice = dp_accounting.PoissonSampledDpEvent(
        0.01, dp_accounting.GaussianDpEvent(0.5)
    )
    expected = rdp.RdpAccountant().compose(twice, 128).get_epsilon(1e-6)
    assert Ledger((run,)).epsilon(1e-6, "RDP") == pytest.approx(expected)
    assert expected > Ledger((run,)).epsilon(1e-6)


def test_without_the_event_of_dp_accounting_the_upper_bound_stands_in(monkeypatch):
    monkeypatch.setattr("tfdp.sampling.truncated_poisson._EVENT", None)
    assert CUT.event(128, 1.0) == CUT.rdp_event(128, 1.0)


def test_nothing_is_cut_where_the_bound_is_all_of_the_data():
    assert TruncatedPoisson(50, 5, 50).event(3, 1.0) == Poisson(50, 5).event(3, 1.0)
    assert TruncatedPoisson(50, 50, 60).event(3, 1.0) == Poisson(50, 50).event(3, 1.0)


@pytest.mark.parametrize(("count", "z"), [(0, 1.0), (3, 0.0)])
def test_no_steps_and_no_noise(count, z):
    assert CUT.event(count, z) == Poisson(1000, 10).event(count, z)
    assert Ledger((Segment(CUT, count, z),)).epsilon(1e-5) == (math.inf if count else 0)


def test_users_pay_for_what_makes_room_for_their_examples():
    cut, free = Segment(CUT, 128, 2.0), Segment(Poisson(1000, 10), 128, 1.0)
    options = {"max_examples_per_user": 4, "accountant": "RDP"}
    expected = user_epsilon(free, 1e-6, **options)
    assert user_epsilon(cut, 1e-6, **options) == pytest.approx(expected)


def test_small_draws_are_those_of_poisson_and_large_ones_a_part_of_them():
    sizes = set()
    for index in range(300):
        drawn = CUT.draw(KEY, 1, index)
        free = Poisson(1000, 10).draw(KEY, 1, index)
        assert len(drawn) == min(len(free), 16)
        assert set(drawn) <= set(free)
        assert (np.diff(drawn) > 0).all()
        sizes.add(len(free))
        np.testing.assert_array_equal(drawn, CUT.draw(KEY, 1, index))
    assert max(sizes) > 16


@pytest.mark.statistical
def test_every_drawn_example_stays_as_often_as_every_other():
    scheme = TruncatedPoisson(8, 6, 6)
    kept, drawn = np.zeros(8), np.zeros(8)
    for index in range(4000):
        free = Poisson(8, 6).draw(KEY, 2, index)
        if len(free) == 8:
            drawn += 1
            kept[scheme.draw(KEY, 2, index)] += 1
    share = kept / drawn
    assert (abs(share - 0.75) < 5 * np.sqrt(0.75 * 0.25 / drawn)).all()


def test_tables_compare_it_with_poisson_and_with_passes():
    assert list(CUT.redrawn(10)) == ["truncated Poisson", "Poisson-sampled", "shuffled"]
    assert list(Poisson(1000, 10).redrawn(10)) == ["Poisson-sampled", "shuffled"]
    assert samplings()["poisson"] is Poisson


def test_a_bound_below_the_mean_is_refused():
    with pytest.raises(ValueError, match=r"at least the expected.*max_batch_size=9"):
        TruncatedPoisson(1000, 10, 9)
    with pytest.raises(ValueError, match="max_batch_size"):
        TruncatedPoisson(1000, 10, math.nan)


def test_it_is_told_and_saved():
    ledger = Ledger((Segment(CUT, 128, 1.0),))
    assert Ledger.from_json(ledger.to_json()) == ledger
    assert "cut to 16 examples" in ledger.segments[0].words()


@pytest.mark.slow
def test_a_free_bound_is_counted_exactly_where_rdp_knows_little():
    n, batch_size, steps, z = 60_000, 256, 5000, 0.45
    bound = TruncatedPoisson(n, batch_size, n).free_bound
    cut = Ledger((Segment(TruncatedPoisson(n, batch_size, bound), steps, z),))
    free = Ledger((Segment(Poisson(n, batch_size), steps, z),))
    assert cut.epsilon(1e-5, "RDP") > 200
    assert cut.epsilon(1e-5) == pytest.approx(free.epsilon(1e-5), rel=0.01)
