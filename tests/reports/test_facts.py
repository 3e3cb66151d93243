"""What is known of a private model is true, and JSON can hold it."""

import datetime as dt
import json
import math

import keras
import numpy as np
import pytest
from keras import layers

import tfdp
from tfdp.reports.facts import _settings

DELTA = 1e-3


def private_of(model, **options):
    private = tfdp.DPModel(model, engine="bookkeeping", **options)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1),
        loss="mse",
        run_eagerly=True,
    )
    return private


def small():
    return keras.Sequential(
        [
            keras.Input((3,), name="x"),
            layers.Dense(2, name="first"),
            layers.Dense(1, name="last"),
        ],
        name="small",
    )


def fitted(model, rows=20, **options):
    private = private_of(model, **options)
    private.fit(np.ones((rows, 3)), np.ones((rows, 1)), batch_size=10, verbose=0)
    return private


@pytest.fixture(scope="module")
def private():
    return fitted(small())


def plain(report):
    """Check that a report is JSON without `NaN` or `Infinity`, and return it."""
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    return report


@pytest.mark.slow
def test_it_has_all_of_the_ledgers_report(private):
    report = plain(private.privacy_report(DELTA))
    of_ledger = tfdp.accounting.privacy_report(private.ledger, DELTA)
    assert of_ledger.items() <= report.items()
    assert report["report_version"] == 2
    assert report["model"] == "small"
    assert abs(
        dt.date.fromisoformat(report["date"]) - dt.datetime.now(dt.UTC).date()
    ) <= dt.timedelta(1)
    assert report["weights"]["number"] == 3 * 2 + 2 + 2 + 1
    assert (report["steps"], report["plain_keras_steps"]) == (2, 0)
    assert report["l2_norm_clip"] == 1.0
    assert report["budget"] is None
    (training,) = report["trainings"]
    assert "2 steps, noise multiplier 1.1, Poisson-sampled" in training
    assert report["trust_model"].startswith("Central")
    assert report["settings"] == "The ledger has no search that chose settings."


@pytest.mark.slow
def test_no_metric_norm_or_batch_is_in_any_form(private):
    marker = 1234.5678
    model = small()
    noisy = private_of(model)
    noisy.fit(
        np.full((50, 3), marker),
        np.full((50, 1), marker),
        batch_size=10,
        verbose=0,
        callbacks=[tfdp.callbacks.BiasLogger(every=1)],
    )
    for form in ("json", "registry", "nist-800-226", "model-card"):
        text = json.dumps(noisy.privacy_report(DELTA, form))
        assert "1234.5" not in text
        for word in ("nonprivate_norm", "nonprivate_clip", "history", "'loss'"):
            assert word not in text


@pytest.mark.slow
def test_it_is_the_same_after_saving_and_loading(private, tmp_path):
    before = private.privacy_report(DELTA)
    private.save(tmp_path / "private.keras")
    after = keras.saving.load_model(tmp_path / "private.keras").privacy_report(DELTA)
    for report in (before, after):
        del report["date"]
    assert before == after


@pytest.mark.slow
def test_budgets_are_in_it():
    private = private_of(small())
    budget = tfdp.callbacks.PrivacyBudget(delta=DELTA, target_epsilon=5.0)
    x, y = np.ones((20, 3)), np.ones((20, 1))
    private.fit(x, y, batch_size=10, verbose=0, callbacks=[budget])
    report = plain(private.privacy_report(DELTA))
    assert report["budget"] == {"delta": DELTA, "target_epsilon": 5.0}
    text = private.privacy_report(DELTA, "nist-800-226")
    assert "(5, 0.001) was set" in text


@pytest.mark.slow
def test_users_are_the_unit():
    private = private_of(small(), unit="user")
    x, y, users = np.ones((20, 3)), np.ones((20, 1)), np.repeat(np.arange(10), 2)
    private.fit(x, y, batch_size=5, user_ids=users, examples_per_user=2, verbose=0)
    report = plain(private.privacy_report(DELTA))
    assert report["units"] == ["user"]
    entry = private.privacy_report(DELTA, "registry")["deployment"]["privacy_loss"]
    assert entry["privacy_unit"] == "User-level"
    assert entry["number_of_privacy_units"] == 10
    assert "all your data were used" in entry["privacy_parameters_details"]


@pytest.mark.slow
def test_bins_are_in_it():
    private = fitted(small(), sampling="balls_in_bins")
    report = plain(private.privacy_report(DELTA))
    assert report["sampling"] == [report["segments"][0]["kind"]]
    assert "balls_in_bins" in report["sampling"][0]


@pytest.mark.slow
def test_without_noise_nothing_is_proven_and_it_stays_json():
    private = tfdp.DPModel(small())
    with pytest.warns(UserWarning, match="not private"):
        optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=0.0)
    private.compile(optimizer, loss="mse", run_eagerly=True)
    private.fit(np.ones((20, 3)), np.ones((20, 1)), batch_size=20, verbose=0)
    report = plain(private.privacy_report(DELTA))
    assert report["epsilon"] is None
    assert not report["differentially_private"]
    assert report["best_attack"]["true_positive_rate"] == 1.0
    entry = plain(private.privacy_report(DELTA, "registry"))
    assert entry["deployment"]["privacy_loss"]["privacy_parameters"] == {}
    text = private.privacy_report(DELTA, "nist-800-226")
    assert "- [ ] **Epsilon and delta**: None: steps ran without noise." in text
    card = private.privacy_report(DELTA, "model-card")
    assert "- differential-privacy" not in card
    assert "Guarantee: None: steps ran without noise." in card


@pytest.mark.slow
def test_nothing_is_proven_of_what_plain_keras_trained_afterwards():
    private = fitted(small())
    private.model.compile("sgd", "mse", run_eagerly=True)
    private.model.fit(np.ones((10, 3)), np.ones((10, 1)), verbose=0)
    report = plain(private.privacy_report(DELTA))
    assert report["plain_keras_steps"] == 1
    assert report["epsilon"] is report["accountant"] is None
    assert not report["differentially_private"]
    assert not any(row["holds"] for row in report["bounds"])
    assert report["best_attack"]["true_positive_rate"] == 1.0
    assert "plain Keras has trained them" in report["not_covered"][0]
    for form in ("registry", "nist-800-226", "model-card"):
        text = json.dumps(private.privacy_report(DELTA, form))
        assert "None: plain Keras trained the model without noise" in text


@pytest.mark.slow
def test_frozen_weights_are_named(tmp_path):
    model = small()
    model.layers[0].trainable = False
    report = fitted(model).privacy_report(DELTA)
    assert [path.split("/")[-2] for path in report["not_trained"]] == ["first"] * 2
    assert "before their first private step" in report["pretrained"]


def test_a_model_that_has_no_weights_yet():
    report = plain(
        tfdp.DPModel(keras.Sequential([layers.Dense(1)])).privacy_report(DELTA)
    )
    assert report["weights"]["number"] == 0
    assert report["epsilon"] == 0.0


def test_searches_of_the_ledger_are_known():
    assert "private search" in _settings([
        {"kind": "poisson_steps"},
        {"kind": "best_of"},
    ])


# ---------------------------------------------------------------------- audits


class Audit:
    def __init__(self, described):
        self.described = described

    def to_dict(self):
        return self.described


def test_audits_are_in_every_form(private):
    audit = Audit({
        "audit": "canaries",
        "nonprivate_epsilon_lower_bound": np.float32(0.5),
        "epsilon": math.inf,
        "rates": np.array([0.1, 0.2]),
        "right": np.int64(7),
    })
    audits = [audit, {"audit": "membership", "note": None, "pairs": ((1, True),)}]
    report = plain(private.privacy_report(DELTA, audits=audits))
    assert report["audits"] == [
        {
            "audit": "canaries",
            "nonprivate_epsilon_lower_bound": 0.5,
            "epsilon": None,
            "rates": [0.1, 0.2],
            "right": 7,
        },
        {"audit": "membership", "note": None, "pairs": [[1, True]]},
    ]
    assert "audit" not in report["questions"]
    assert "outside the guarantee" in report["not_covered"][-1]
    for form in ("registry", "nist-800-226", "model-card"):
        text = json.dumps(private.privacy_report(DELTA, form, audits=audits))
        assert "audit: canaries, nonprivate_epsilon_lower_bound: 0.5" in text


@pytest.mark.parametrize("audit", [None, "none", Audit([1]), Audit({"x": object()})])
def test_what_is_no_audit_is_refused(private, audit):
    with pytest.raises(TypeError, match=r"`audits` must .* Received: .*"):
        private.privacy_report(DELTA, audits=[audit])


def test_a_single_audit_is_no_list(private):
    with pytest.raises(TypeError, match=r"`audits` must .* Received: .*"):
        private.privacy_report(DELTA, audits=Audit({}))


@pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan, math.inf])
def test_delta_is_checked(private, delta):
    with pytest.raises(ValueError, match="`delta`"):
        private.privacy_report(delta)


def test_other_formats_are_refused(private):
    with pytest.raises(ValueError, match=r"`format` must be one of 'json'.*Received"):
        private.privacy_report(DELTA, "yaml")
