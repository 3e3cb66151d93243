"""Training on several replicas, of one process and of several."""

import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.distribute.cases import (
    CASES,
    fit,
    network,
    one_device_scope,
    optimizer,
    rows,
    weights_of,
)
from tests.distribute.processes import run_mirrored, run_workers

pytestmark = [
    pytest.mark.keras_private,
    pytest.mark.filterwarnings("ignore:The privacy noise is reproducible"),
    pytest.mark.filterwarnings("ignore:Training without noise"),
    pytest.mark.filterwarnings("ignore:Draws made with a `seed`"),
]


def assert_as_on_one_device(found, name):
    private, history = fit(CASES[name])
    np.testing.assert_allclose(
        found["weights"], weights_of(private), rtol=0, atol=1e-5, err_msg=name
    )
    assert found["ledger"] == private.ledger.to_json(), name
    assert found["copies_agree"], name
    assert found["history"].keys() == history.keys(), name
    for key, values in history.items():
        np.testing.assert_allclose(
            found["history"][key], values, rtol=1e-4, err_msg=f"{name}: {key}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["eager"],
        ["passes", "elsewhere", "users"],
        pytest.param(
            ["vectorized", "jit", "median", "bounded"], marks=pytest.mark.exhaustive
        ),
    ],
    ids=lambda names: f"{names[0]}_to_{names[-1]}",
)
def test_two_mirrored_devices_train_as_one(names, tmp_path):
    found = run_mirrored(tmp_path, "train", *names)
    for name in names:
        assert_as_on_one_device(found[name], name)


@pytest.mark.slow
def test_what_draws_is_saved_and_exported(tmp_path):
    found = run_mirrored(tmp_path, "others", tmp_path)
    assert found["copies_agree"]
    assert found["reported"] == found["epsilon"] < found["epsilon_after_loading"]
    assert "Gram" in found["explained"]
    private = keras.models.load_model(tmp_path / "private.keras")
    x, _ = rows()
    np.testing.assert_allclose(
        private.predict(x, verbose=0), found["prediction"], atol=1e-6
    )
    exported = tf.saved_model.load(tmp_path / "export" / "1")
    outputs = exported.signatures["serving_default"](tf.constant(x))
    np.testing.assert_allclose(*outputs.values(), found["prediction"], atol=1e-6)
    kinds = [error.split(":")[0] for error in found["errors"]]
    assert kinds == [
        "ValueError",
        "NotPrivateError",
        "TypeError",
        "UnsupportedLayerError",
        "NotPrivateError",
    ]


@pytest.mark.exhaustive
def test_three_mirrored_devices_train_as_one(tmp_path):
    found = run_mirrored(tmp_path, "train", "declared", replicas=3)
    assert_as_on_one_device(found["declared"], "declared")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "workers", "replicas"),
    [
        (["noised", "sat"], 2, 2),
        pytest.param(["quantile", "released"], 3, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_workers_train_as_one(names, workers, replicas, tmp_path):
    of_workers = run_workers(
        tmp_path, "train", *names, workers=workers, replicas=replicas
    )
    for name in names:
        assert_as_on_one_device(of_workers[0][name], name)
        for found in of_workers[1:]:
            assert found[name]["weights"] == of_workers[0][name]["weights"], name
            assert found[name]["ledger"] == of_workers[0][name]["ledger"], name


def assert_one_noise(found):
    # 120,000 numbers: the standard deviation is known to 0.2 %.
    np.testing.assert_allclose(found["ratio"], 1.0, rtol=0.01)
    assert found["correlation"] < 0.02
    assert found["copies_agree"]


def assert_noise_is_found_wrong(found, ratio):
    with pytest.raises(AssertionError):
        assert_one_noise(found)
    np.testing.assert_allclose(found["ratio"], ratio, rtol=0.01)


@pytest.mark.slow
def test_workers_have_one_noise(tmp_path):
    first, second = run_workers(tmp_path, "noise", "none")
    assert_one_noise(first["none"])
    assert first["none"]["weights"] == second["none"]["weights"]


@pytest.mark.slow
def test_mirrored_devices_have_one_noise_and_wrong_noise_would_be_found(tmp_path):
    found = run_mirrored(
        tmp_path,
        "noise",
        "none",
        "each_adds_all",
        "each_adds_a_part",
        "all_add_the_same_share",
    )
    assert_one_noise(found["none"])
    assert_noise_is_found_wrong(found["each_adds_all"], math.sqrt(2))
    assert_noise_is_found_wrong(found["each_adds_a_part"], math.sqrt(1 / 2))
    assert_noise_is_found_wrong(found["all_add_the_same_share"], math.sqrt(2))


# ------------------------------------------------------------- workers that are lost


@pytest.mark.slow
def test_a_worker_that_dies_comes_back(tmp_path):
    survivor, dead = run_workers(tmp_path, "killed", tmp_path, 1, may_fail=True)
    assert dead is None
    assert "Another worker of this training is gone" in survivor["error"]
    assert "BackupAndRestore" in survivor["error"]
    first, second = run_workers(tmp_path, "killed", tmp_path, -1)
    assert first["weights"] == second["weights"]
    assert first["epochs"] == [1, 2]  # The first epoch was not run again.
    # Five steps an epoch, and two or three of the epoch that was run twice.
    begun = (tmp_path / "begun_0").read_text().count("step")
    for found in first, second:
        assert 17 <= found["steps"] <= begun + 1
        expected = tfdp.accounting.Ledger().add(
            tfdp.accounting.PoissonSteps(
                steps=found["steps"],
                noise_multiplier=0.8,
                number_of_examples=40,
                expected_batch_size=8,
            )
        )
        assert found["epsilon"] == pytest.approx(expected.epsilon(1e-3))
        assert found["val_loss"] == pytest.approx(found["evaluated"], rel=1e-5)
    restored = keras.models.load_model(tmp_path / "model_0.keras")
    np.testing.assert_allclose(weights_of(restored), first["weights"], rtol=1e-6)
    assert restored.epsilon(1e-3) == first["epsilon"]


def assert_refused(found, error):
    assert re.match(error, found["error"]), found["error"]
    assert found["moved"] == 0


@pytest.mark.slow
def test_workers_with_different_arguments_are_refused(tmp_path):
    errors = {
        "examples": r"ValueError: .*data=.*number_of_examples=30",
        "rows": "NotPrivateError: .*same order",
        "weights": "ValueError: .*checksum",
        "epochs": r"ValueError: .*epochs=\['0 to 2', '0 to 3'\]",
        "directory": "ValueError: .*directory of its own",
    }
    for found in run_workers(tmp_path, "different", tmp_path / "backup", *errors):
        for what, error in errors.items():
            assert_refused(found[what], error)


@pytest.mark.slow
def test_workers_that_read_in_another_order_are_refused(tmp_path):
    for found in run_workers(tmp_path, "different", tmp_path, "order"):
        assert_refused(
            found["order"], "NotPrivateError: The workers do not take the same step"
        )


@pytest.mark.exhaustive
def test_workers_with_another_clip_norm_stop(tmp_path):
    for found in run_workers(tmp_path, "different", tmp_path, "clip"):
        assert "The workers do not take the same step" in found["clip"]["error"]


@pytest.mark.slow
def test_a_worker_with_nothing_left_to_do_says_so(tmp_path):
    for found in run_workers(tmp_path, "different", tmp_path, "no_epoch"):
        assert_refused(
            found["no_epoch"],
            "WorkerLostError: .* or does something else|ValueError: .*first epoch",
        )


@pytest.mark.slow
@pytest.mark.smoke
def test_a_mirrored_device_alone(rng):
    with one_device_scope():
        private = tfdp.DPModel(network())
        private.compile(optimizer(), "mse", metrics=["mae"])
    x, y = rng.normal(size=(40, 2)), rng.normal(size=(40, 1))
    history = private.fit(x, y, batch_size=20, verbose=0, validation_data=(x, y))
    assert set(history.history) == {"loss", "mae", "val_loss", "val_mae"}
    assert private.ledger.segments[0].steps == 2
    private.optimizer.expect_batch_size(8)
    private.train_on_batch(x[:8], y[:8])
    assert private.ledger.steps == 3
