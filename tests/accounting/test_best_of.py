import dataclasses
import json
import math

import pytest

from tfdp.accounting import (
    BestOf,
    Ledger,
    PoissonSteps,
    ShuffledPasses,
    UnamplifiedSteps,
    compose,
    epsilon,
    privacy_report,
    privacy_statement,
    user_epsilon,
)
from tfdp.accounting.segments import Segment, segment_from_dict, segment_to_dict
from tfdp.accounting.tries import Geometric, Poisson, TruncatedNegativeBinomial
from tfdp.sampling import BallsInBins, PoissonUsers

TRAINING = PoissonSteps(14_100, 1.1, 60_000, 256)
DELTA = 1e-5
SEARCH = BestOf(Geometric(10), [[TRAINING]])


def cost(*segments):
    return epsilon(segments, DELTA)


@pytest.mark.smoke
def test_published_figures():
    assert epsilon([TRAINING], DELTA, "RDP") == pytest.approx(2.600, abs=5e-4)
    ten = TRAINING.with_count(141_000)
    assert epsilon([ten], DELTA, "RDP") == pytest.approx(9.61, abs=5e-3)
    for tries, figure in [
        (Geometric(10), 5.06),
        (Poisson(10), 5.76),
        (TruncatedNegativeBinomial(0, 10), 4.30),
    ]:
        found = cost(BestOf(tries, [[TRAINING]]).segment())
        assert found == pytest.approx(figure, abs=5e-3)


def test_both_accountants_give_the_figure_of_rdp():
    segment = SEARCH.segment()
    assert epsilon([segment], DELTA, "PLD") == epsilon([segment], DELTA, "RDP")


def test_searches_compose_with_each_other_and_with_trainings():
    one = cost(SEARCH.segment())
    assert cost(SEARCH.segment(2)) == cost(SEARCH.segment(), SEARCH.segment())
    assert (
        one < cost(SEARCH.segment(), TRAINING) < one + epsilon([TRAINING], DELTA, "RDP")
    )
    assert cost(SEARCH.segment(2)) > cost(SEARCH.segment(), TRAINING)
    ledger = Ledger((SEARCH.segment(),))
    merged = compose(ledger, ledger).merged()
    assert merged.segments == (SEARCH.segment(2),)
    assert merged.segments[0].searches == 2
    assert merged.steps == merged.passes == 0


def test_a_candidate_may_be_several_segments_and_the_dearest_counts():
    longer = BestOf(Geometric(10), [[TRAINING], [TRAINING, UnamplifiedSteps(5, 20.0)]])
    dearest = BestOf(Geometric(10), [[TRAINING, UnamplifiedSteps(5, 20.0)]])
    assert cost(longer.segment()) == cost(dearest.segment()) > cost(SEARCH.segment())


def test_candidates_that_cost_the_same_are_dearer_together_where_curves_cross():
    short, long = PoissonSteps(200, 0.8, 10_000, 100), UnamplifiedSteps(1, 2.0)
    both = cost(BestOf(Geometric(10), [[short], [long]]).segment())
    assert both >= max(
        cost(BestOf(Geometric(10), [[each]]).segment()) for each in (short, long)
    )


def test_equal_candidates_are_one():
    assert BestOf(Geometric(10), [[TRAINING], [TRAINING]]) == SEARCH


def test_files():
    search = BestOf(
        Poisson(3), [[TRAINING], [ShuffledPasses(3, 4.0, 600, 256), TRAINING]]
    )
    segment = search.segment(2)
    fields = json.loads(json.dumps(segment_to_dict(segment), allow_nan=False))
    assert segment_from_dict(fields) == segment
    ledger = Ledger((segment,), cut_short=(SEARCH.segment(),))
    assert Ledger.from_json(ledger.to_json()) == ledger


@pytest.mark.parametrize(
    "change",
    [
        {"tries": {"law": "fixed"}},
        {"candidates": []},
        {"candidates": [[]]},
        {"candidates": [[{"kind": "no"}]]},
        {"more": 1},
    ],
)
def test_damaged_files(change):
    with pytest.raises(ValueError, match="Received"):
        segment_from_dict(segment_to_dict(SEARCH.segment()) | change)


def test_what_candidates_must_be():
    with pytest.raises(TypeError, match="candidates"):
        BestOf(Geometric(10), [["training"]])
    with pytest.raises(TypeError, match="tries"):
        BestOf(10, [[TRAINING]])
    with pytest.raises(ValueError, match="not another search"):
        BestOf(Geometric(10), [[SEARCH.segment()]])
    with pytest.raises(ValueError, match="must run something"):
        BestOf(Geometric(10), [[TRAINING.with_count(0)]])


def test_a_candidate_without_noise_is_not_private():
    assert math.isinf(
        cost(
            BestOf(
                Geometric(2), [[TRAINING], [PoissonSteps(1, 0.0, 60_000, 256)]]
            ).segment()
        )
    )
    assert math.isinf(cost(BestOf(Poisson(2), [[UnamplifiedSteps(1, 1e-9)]]).segment()))


def test_nobody_takes_its_noise_for_less():
    quieter = dataclasses.replace(SEARCH.segment(), noise_multiplier=0.5)
    assert math.isinf(cost(quieter))


def test_no_search_costs_nothing():
    assert cost(SEARCH.segment(0)) == 0


def test_bins_count_as_releases_of_all_rows():
    bins = Segment(BallsInBins(1000, 100), 4, 8.0)
    whole = UnamplifiedSteps(4, 8.0)
    of_bins = cost(BestOf(Geometric(3), [[bins]]).segment())
    assert of_bins == pytest.approx(cost(BestOf(Geometric(3), [[whole]]).segment()))
    # Beside a search the bins have no other figure, whatever they cost alone.
    assert cost(SEARCH.segment(), bins) == pytest.approx(cost(SEARCH.segment(), whole))


def test_the_statement_tells_of_the_search():
    text = " ".join(privacy_statement(Ledger((SEARCH.segment(),)), DELTA).split())
    assert "This training is (5.055, 1e-05)-differentially private." in text
    assert "the best of a secret number of tries, geometric with mean 10" in text
    assert "14100 steps, noise multiplier 1.1" in text
    assert "nor how many there were, is taken on trust" in text
    assert "Protected is one example" in text


def test_the_report_tells_of_the_search():
    report = privacy_report(Ledger((SEARCH.segment(),)), DELTA)
    json.dumps(report, allow_nan=False)
    assert report["epsilon"] == cost(SEARCH.segment())
    assert report["accountant"] == "RDP"
    assert report["sampling"] == ["poisson_steps"]
    assert report["noise_multiplier"] == 1.1


def test_delta_is_compared_with_the_rows_of_the_candidates():
    with pytest.warns(UserWarning, match="number_of_examples=60000"):
        privacy_statement(Ledger((SEARCH.segment(),)), 1e-3)


def test_users():
    segment = SEARCH.segment()
    assert math.isinf(user_epsilon(segment, DELTA, max_examples_per_user=2))
    assert user_epsilon(segment, DELTA, max_examples_per_user=1) == cost(segment)
    of_users = Segment(PoissonUsers(1000, 10, 5), 100, 1.0)
    search = BestOf(Geometric(10), [[of_users]]).segment()
    assert user_epsilon(search, DELTA, max_examples_per_user=5) == cost(search)
    assert "Protected is one user" in privacy_statement(Ledger((search,)), DELTA)
    text = privacy_statement(Ledger((segment,)), DELTA)
    assert "Several rows of one person" in text
    assert "nothing is proven of them after a search" in " ".join(text.split())
    assert "says how much" not in " ".join(text.split())
    text = privacy_statement(Ledger((segment,)), DELTA, max_examples_per_user=3)
    assert "Nothing is proven for all rows of one user together." in text
