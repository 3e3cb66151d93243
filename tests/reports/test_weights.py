"""A digest of weights is that of their values, in every file of a model."""

import hashlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.exports import EXPORTS
from tfdp.reports.weights import weights_sha256


def reference(arrays):
    """The sentence `HOW`, in other words."""
    digests = sorted(
        hashlib.sha256(f"{a.dtype.name} {a.shape}".encode() + a.tobytes()).digest()
        for a in arrays
    )
    return hashlib.sha256(b"".join(digests)).hexdigest()


def small(name="small"):
    return keras.Sequential([keras.Input((3,)), layers.Dense(2)], name=name)


def test_it_is_that_of_the_values():
    model = small()
    found = weights_sha256(model.weights)
    assert found == reference(model.get_weights())
    other = small("other")
    assert weights_sha256(other.weights) != found
    other.set_weights(model.get_weights())
    assert weights_sha256(other.weights) == found
    other.trainable = False
    assert weights_sha256(other.weights) == found
    other.layers[0].bias.assign([0.0, 1e-30])
    assert weights_sha256(other.weights) != found


def test_shapes_and_dtypes_count():
    values = [np.zeros(4), np.zeros((2, 2)), np.zeros(4, "float16"), np.zeros(4, int)]
    found = {
        weights_sha256([keras.Variable(each, dtype=each.dtype.name)]) for each in values
    }
    assert len(found) == len(values)
    assert weights_sha256([keras.Variable([1.0], dtype="bfloat16")])


@pytest.mark.parametrize("ending", ["m.keras", "m.weights.h5"])
def test_files_keep_it(ending, tmp_path):
    model = small()
    wanted = weights_sha256(model.weights)
    if ending == "m.keras":
        model.save(tmp_path / ending)
        loaded = keras.saving.load_model(tmp_path / ending)
    else:
        model.save_weights(tmp_path / ending)
        loaded = small("loaded")
        loaded.load_weights(tmp_path / ending)
    assert weights_sha256(loaded.weights) == wanted


@pytest.mark.parametrize(
    "name",
    [
        name if name == "tokens" else pytest.param(name, marks=pytest.mark.slow)
        for name in EXPORTS
    ],
)
def test_it_is_that_of_what_is_served_without_keras(name, tmp_path):
    private = tfdp.DPModel(EXPORTS[name].model())
    x = EXPORTS[name].x(np.random.default_rng(0), 2)
    if name == "scores":
        private.model(x)
    path = tmp_path / "m" / "1"
    tfdp.export.export_private_model(private, path, delta=1e-3, warmup=x)
    report = json.loads((path / "assets.extra" / "privacy_report.json").read_text())
    reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
    names = set(reader.get_variable_to_shape_map()) - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    assert report["weights"]["sha256"] == reference(map(reader.get_tensor, names))


@pytest.mark.slow
def test_averages_that_wait_are_what_is_reported(tmp_path):
    private = tfdp.DPModel(small())
    private.compile(
        tfdp.optimizers.DPSGD(
            0.1,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            expected_batch_size=10,
            use_ema=True,
            ema_momentum=0.5,
        ),
        loss="mse",
        run_eagerly=True,
    )
    for _ in range(2):
        private.train_on_batch(np.ones((10, 3)), np.ones((10, 2)))
    now = private.privacy_report(1e-3)["weights"]["sha256"]
    assert now == weights_sha256(private.model.weights)
    path = tmp_path / "m" / "1"
    report = tfdp.export.export_private_model(private, path, delta=1e-3)
    assert report["weights"]["sha256"] != now
    private.optimizer.finalize_variable_values(private.model.trainable_variables)
    assert report["weights"]["sha256"] == weights_sha256(private.model.weights)
