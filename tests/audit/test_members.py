import json
import math

import keras
import numpy as np
import pytest
from keras import layers
from scipy import stats

import tfdp
from tests import small
from tfdp.accounting import true_positive_rate
from tfdp.audit import membership
from tfdp.audit.members import _interval, _likelihood_ratios, _Rows

ROWS = 400


def rows(number=ROWS, seed=0, columns=30):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, columns)).astype("float32")
    return x, rng.integers(0, 2, number)


def trained(noise_multiplier, number=40):
    """A model that learns random labels."""
    model = keras.Sequential([keras.Input((30,)), layers.Dense(2)])
    private = tfdp.DPModel(model)
    optimizer = tfdp.optimizers.DPSGD(
        0.5, l2_norm_clip=1.0, noise_multiplier=noise_multiplier
    )
    private.compile(optimizer, small.logits_loss())
    members = rows(number)
    private.fit(*members, batch_size=number // 2, epochs=2, verbose=0)
    return private, members


def test_what_is_known_by_heart_is_found_and_is_more_than_the_ledger_allows():
    """Weights that fit the members exactly, which the ledger knows nothing of."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2040, 40)).astype("float32"), rng.normal(size=(2040, 1))
    model = keras.Sequential([
        keras.Input((40,)),
        layers.Dense(1, use_bias=False),
    ])
    model.set_weights([np.linalg.lstsq(x[:40], y[:40], rcond=None)[0]])
    private = small.private(model, loss="mse")
    report = membership(private, (x[:40], y[:40]), (x[40:], y[40:]))
    assert (report.members, report.non_members) == (40, 2000)
    assert len(report.results) == 4
    for each in report.results:
        assert each.nonprivate_true_positive_rate > 0.5
        assert each.most_true_positives == each.target_false_positive_rate
        low, high = each.nonprivate_false_positive_interval
        assert low <= each.nonprivate_false_positive_rate <= high < 0.05
        assert each.most_true_positives_there == high
    assert not report.nonprivate_passed
    assert "MORE than allowed" in str(report)


@pytest.mark.slow
def test_a_private_model_gives_away_no_more_than_its_ledger_allows():
    private, members = trained(2.0)
    report = membership(private, members, rows(seed=1))
    assert report.nonprivate_passed
    for each in report.results:
        rate = each.target_false_positive_rate
        assert each.most_true_positives == true_positive_rate(private.ledger, rate)
        assert each.most_true_positives < each.most_true_positives_there


@pytest.mark.slow
def test_steps_of_plain_keras_leave_no_bound():
    private, members = trained(2.0)
    private.model.compile("sgd", small.logits_loss())
    private.model.fit(*members, verbose=0)
    report = membership(private, members, rows(seed=1))
    assert {each.most_true_positives for each in report.results} == {1.0}


@pytest.mark.slow
def test_losses_are_those_of_each_example():
    private, (x, y) = trained(1.0)
    expected = [private.evaluate(x[n : n + 1], y[n : n + 1], verbose=0) for n in (0, 7)]
    found = private.nonprivate_losses(x, y, batch_size=16)
    assert found.shape == (40,)
    np.testing.assert_allclose(found[[0, 7]], expected, rtol=1e-5)
    weights = np.full(40, 2.0)
    np.testing.assert_allclose(
        private.nonprivate_losses(x, y, weights), 2 * found, rtol=1e-5
    )


def test_scores_are_by_class():
    """The harder class is not compared with the easier one."""
    rng = np.random.default_rng(0)
    classes = np.arange(2000) % 2
    others = _Rows(np.exp(rng.normal(size=2000) + 2.0 * classes - 3.0), classes)
    alike = _Rows(np.exp(np.array([-3.0, -1.0])), np.array([0, 1]))
    scores = _likelihood_ratios(alike, others)
    np.testing.assert_allclose(scores, 0, atol=0.15)
    unknown = _likelihood_ratios(alike._replace(classes=np.array([5, 5])), others)
    assert unknown[0] > unknown[1] + 0.5


def test_intervals_are_clopper_and_pearsons():
    low, high = _interval(3, 40, 0.9)
    assert low == pytest.approx(stats.beta.ppf(0.05, 3, 38))
    assert high == pytest.approx(stats.beta.ppf(0.95, 4, 37))
    assert _interval(0, 40, 0.9)[0] == 0


def test_targets_of_other_kinds_are_taken():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, "softmax")])
    x, y = small.data(40, outlier=False)
    one_hot = np.eye(2)[y]
    for loss, targets in (
        ("categorical_crossentropy", one_hot),
        ("mse", one_hot - 0.3),
    ):
        private = small.private(model, loss=loss)
        report = membership(private, (x, targets), (x, targets))
        assert len(report.results) == 4


@pytest.mark.slow
def test_a_report_prints_and_is_json():
    private, members = trained(1.0)
    report = membership(private, members, rows(seed=1), false_positive_rates=(0.05,))
    fields = json.loads(json.dumps(report.to_dict()))
    assert fields["audit"] == "membership"
    assert [each["attack"] for each in fields["results"]] == [
        "loss",
        "likelihood ratio",
    ]
    assert "5.00%" in str(report)
    assert "not to be published" in str(report)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"members": rows()[0]}, TypeError, r"members=\(x, y\)"),
        ({"members": rows(0)}, ValueError, "1 rows"),
        ({"non_members": rows(1)}, ValueError, "2 rows"),
        ({"confidence": math.nan}, ValueError, "confidence"),
        ({"false_positive_rates": (0.0,)}, ValueError, "false_positive_rates"),
        ({"private": small.network()}, TypeError, "DPModel"),
    ],
)
def test_bad_arguments_are_refused(change, error, match):
    arguments = {"members": rows(), "non_members": rows(seed=1)}
    if "private" not in change:
        arguments["private"] = small.private(
            keras.Sequential([keras.Input((30,)), layers.Dense(2)])
        )
    with pytest.raises(error, match=match):
        membership(**arguments | change)
