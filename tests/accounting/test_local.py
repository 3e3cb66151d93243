"""What noised replies cost a client."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.accounting import (
    PoissonSteps,
    calibrate_gaussian,
    calibrate_local_noise_multiplier,
    epsilon,
    local_epsilon,
    local_privacy_statement,
)
from tfdp.accounting.local import TrustedQueries, joint_local_epsilon

STUDY = {"delta": 1e-7}


def exact_delta(noise, target):
    """Theorem 8 of Balle and Wang, for noise over sensitivity."""

    def below(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    shift = target * noise
    return below(0.5 / noise - shift) - math.exp(target) * below(-0.5 / noise - shift)


@pytest.mark.parametrize(
    ("relation", "noise", "sensitivity"),
    [
        ({}, 1.40423, 2),
        ({"neighboring_relation": "add_or_remove_one"}, 0.70211, 1),
    ],
)
def test_known_noise(relation, noise, sensitivity):
    found = calibrate_local_noise_multiplier(8.0, **STUDY, **relation)
    assert found == pytest.approx(noise, abs=6e-6)
    assert exact_delta(found / sensitivity, 8.0) <= 1e-7
    assert exact_delta((found - 1e-5) / sensitivity, 8.0) > 1e-7


@pytest.mark.parametrize(
    ("participations", "expected"),
    [(0, 0.0), (1, 8.0), (2, 12.0), (5, 21.0), (10, 32.9)],
)
def test_known_cost_of_several_replies(participations, expected):
    found = local_epsilon(1.404227, **STUDY, participations=participations)
    assert found == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    target=st.floats(0.05, 50.0),
    delta=st.sampled_from([1e-9, 1e-7, 1e-4]),
    participations=st.integers(1, 20),
    relation=st.sampled_from(["replace_one", "add_or_remove_one"]),
)
def test_all_replies_together_stay_within_the_target(
    target, delta, participations, relation
):
    noise = calibrate_local_noise_multiplier(
        target,
        delta=delta,
        max_participations=participations,
        neighboring_relation=relation,
    )
    spent = local_epsilon(
        noise, delta, participations=participations, neighboring_relation=relation
    )
    assert spent == pytest.approx(target, rel=1e-3)
    sensitivity = 2 if relation == "replace_one" else 1
    of_all = noise / sensitivity / math.sqrt(participations)
    assert exact_delta(of_all, target) <= delta * (1 + 1e-9)


@pytest.mark.parametrize("participations", [1, 1000, 100_000])
def test_the_bound_is_exact(participations):
    found = local_epsilon(1.404227, 1e-7, participations=participations)
    of_all = 1.404227 / 2 / math.sqrt(participations)
    if participations == 1:
        assert exact_delta(of_all, found) == pytest.approx(1e-7, rel=1e-6)
    assert found == pytest.approx(
        {1: 8.0, 1000: 1247.5, 100_000: 103_768}[participations], rel=1e-4
    )


@pytest.mark.parametrize(
    ("target", "delta"), [(50.0, 1e-5), (100.0, 1e-5), (1e9, 1e-7)]
)
def test_the_end_of_the_noise_is_accounted(target, delta):
    """What noise of one client cannot reach tells it from another."""
    noise = calibrate_local_noise_multiplier(target, delta=delta)
    assert local_epsilon(noise, delta) <= target
    assert math.erfc((12.1 - 2 / noise) / math.sqrt(2)) / 2 < delta
    assert local_epsilon(noise / 2, delta) == math.inf


def test_replies_with_noise_of_their_own():
    alike = joint_local_epsilon([1.404227] * 5, 1e-7)
    assert alike == local_epsilon(1.404227, 1e-7, participations=5)
    # As one Gaussian of both.
    noise = (1.5**-2 + 3.0**-2) ** -0.5
    assert joint_local_epsilon([1.5, 3.0], 1e-7) == pytest.approx(
        local_epsilon(noise, 1e-7), rel=1e-9
    )
    assert joint_local_epsilon([], 1e-7) == 0.0
    assert joint_local_epsilon([1.5, 1e-9], 1e-7) == math.inf


def test_a_delta_that_no_noise_keeps_is_refused():
    with pytest.raises(ValueError, match="No noise keeps"):
        calibrate_local_noise_multiplier(8.0, delta=1e-300)


@pytest.mark.parametrize(
    ("participations", "error"),
    [
        (-2, ValueError),
        (2.5, ValueError),
        (math.nan, ValueError),
        ("2", TypeError),
        (True, TypeError),
    ],
)
def test_bad_participations(participations, error):
    with pytest.raises(error, match="`participations` must be"):
        local_epsilon(1.4, 1e-7, participations=participations)


def test_no_noise_is_no_privacy():
    assert local_epsilon(0.0, **STUDY) == math.inf
    text = local_privacy_statement(0.0, 1e-7, participations=1)
    assert text.startswith("These replies are not differentially private")


@pytest.mark.parametrize(
    "arguments",
    [
        {"target_epsilon": 0.0},
        {"target_epsilon": -1.0},
        {"target_epsilon": math.nan},
        {"target_epsilon": math.inf},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": math.nan},
        {"max_participations": 0},
        {"max_participations": 1.5},
        {"neighboring_relation": "replace-one"},
    ],
    ids=str,
)
def test_bad_arguments_of_the_calibration(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments)).split("_")[-1]):
        calibrate_local_noise_multiplier(
            **({"target_epsilon": 8.0, "delta": 1e-7} | arguments)
        )


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_bad_noise(noise):
    with pytest.raises(ValueError, match="noise_multiplier"):
        local_epsilon(noise, **STUDY)


class TestTrustedQueries:
    def test_known_cost_of_the_quantile(self):
        """One Gaussian of multiplier 10, for a client that takes part once."""
        queries = TrustedQueries("C", 10.0, 2.0, per_client=1)
        assert queries.epsilon(1e-7, "add_or_remove_one") == pytest.approx(
            0.447, abs=5e-4
        )
        # A client that is replaced moves a count of halves twice as far.
        assert queries.epsilon(1e-7, "replace_one") == pytest.approx(
            epsilon_of_gaussian(5.0), rel=1e-3
        )

    @pytest.mark.parametrize("noise", [0.05, 0.2, 0.28])
    def test_the_end_of_their_noise_is_accounted(self, noise):
        """It ends at 7.35 standard deviations, earlier than that of replies."""
        queries = TrustedQueries("C", noise, 2.0, per_client=1)
        assert queries.epsilon(1e-7, "replace_one") == math.inf

    def test_together_with_replies_nothing_costs_less(self):
        """Also where the end of the replies' noise is what counts."""
        noise = calibrate_local_noise_multiplier(60.0, delta=1e-7)
        text = local_privacy_statement(
            noise,
            1e-7,
            participations=1,
            queries=TrustedQueries("C", 1e6, 2.0, per_client=1),
        )
        together = " ".join(text.split()).split("together are (")[1].split(",")[0]
        assert float(together) >= round(local_epsilon(noise, 1e-7), 3)

    def test_several_queries_add_up(self):
        queries = TrustedQueries("C", 10.0, 2.0, per_client=3)
        assert queries.epsilon(1e-7, "add_or_remove_one") == pytest.approx(
            epsilon_of_gaussian(10 / math.sqrt(3)), rel=1e-6
        )

    def test_the_smaller_figure_is_for_poisson_clients_only(self):
        """0.0034 on a fine grid; on tfdp's an upper bound, still far below 0.447."""
        poisson = PoissonSteps(10_000, 10.0, 10_000_000, 1000)
        assert 0.0034 < epsilon([poisson], 1e-7) < 0.02

    def test_known_cost_of_the_median(self):
        noise = calibrate_gaussian(0.8, 1e-8)
        assert noise == pytest.approx(6.304, abs=1e-3)
        queries = TrustedQueries("C", noise, math.sqrt(2), per_client=1)
        assert queries.epsilon(1e-8, "add_or_remove_one") == pytest.approx(
            0.8, abs=1e-3
        )
        enough = TrustedQueries("C", 8.915, math.sqrt(2), per_client=1)
        assert enough.epsilon(1e-8, "replace_one") == pytest.approx(0.8, abs=1e-3)


def epsilon_of_gaussian(noise):
    """By bisection."""
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if exact_delta(noise, middle) > 1e-7 else (low, middle)
        )
    return high


class TestStatement:
    def test_of_local_replies(self):
        text = local_privacy_statement(1.404227, 1e-7, participations=2)
        assert "(12.009, 1e-07)-locally" in text
        assert "Replies of a client: 2 at most" in text
        assert "not purely local" not in text
        assert "Trust model: Local. Nobody but the client" in text
        assert "aggregator" not in text

    def test_of_a_run_with_a_trusted_aggregator(self):
        text = local_privacy_statement(
            1.404227,
            1e-7,
            participations=1,
            queries=TrustedQueries("AdaptiveQuantileClip", 10.0, 2.0, per_client=1),
        )
        text = " ".join(text.split())
        assert "not purely local" in text
        assert "(0.447, 1e-07)" in text
        assert "AdaptiveQuantileClip" in text
        assert "Only the aggregator is trusted besides" in text
        # Both together cost more than either, and less than their sum.
        together = float(text.split("together are (")[1].split(",")[0])
        assert 8.0 < together < 8.0 + 0.932

    def test_of_the_weaker_relation_says_so(self):
        text = local_privacy_statement(
            0.702114, 1e-7, participations=1, neighboring_relation="add_or_remove_one"
        )
        assert "replaced by noise alone" in " ".join(text.split())
        assert "(8.000, 1e-07)" in text
