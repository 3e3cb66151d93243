"""The request that warms a server up is one of TensorFlow Serving's messages."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from tensorflow_serving.apis import prediction_log_pb2

import tfdp
from tfdp.export.warmup import made_up_rows, prediction_log


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.text(max_size=300),
    st.dictionaries(st.text(max_size=200), st.integers(0, 70), max_size=4),
)
def test_requests_are_tensorflow_servings(name, sizes):
    rows = {key: tf.range(float(size)) for key, size in sizes.items()}
    encoded = prediction_log(name, "serving_default", rows)
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.model_spec.name = name
    log.predict_log.request.model_spec.signature_name = "serving_default"
    for key, value in rows.items():
        log.predict_log.request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
    assert prediction_log_pb2.PredictionLog.FromString(encoded) == log


def spec(*shape, dtype=tf.float32, name="x"):
    return tf.TensorSpec(shape, dtype, name)


@pytest.mark.parametrize(
    ("wanted", "fitted", "shape"),
    [
        (spec(None, 3), None, (1, 3)),
        (spec(None, None), None, (1, 32)),
        (spec(None, None), spec(None, 6), (1, 6)),
        (spec(None, None, 4), spec(None, 7, 4), (1, 7, 4)),
        (spec(None, None), spec(None, None), (1, 32)),
        # They are of something else.
        (spec(None, None, 4), spec(None, 7, 5), (1, 32, 4)),
        (spec(None, None), spec(None, 6, 2), (1, 32)),
        (spec(None, None), tf.TensorSpec(None), (1, 32)),
        (spec(None, None), [spec(None, 6), spec(None, 6)], (1, 32)),
        (spec(None, None, dtype=tf.string), spec(None, 5, dtype=tf.string), (1, 5)),
    ],
)
def test_made_up_rows_are_as_long_as_those_of_fit(wanted, fitted, shape):
    (row,) = made_up_rows(wanted, fitted).values()
    assert tuple(row.shape) == shape
    assert row.dtype == wanted.dtype


class WithPositions(layers.Layer):
    def __init__(self, most):
        super().__init__()
        self.most = most

    def call(self, x):
        length = tf.shape(x)[1]
        with tf.control_dependencies([
            tf.debugging.assert_less_equal(length, self.most)
        ]):
            return x * 1.0


@pytest.mark.slow
def test_a_model_of_any_length_is_warmed_up_with_that_of_its_training(tmp_path):
    """Eight positions are all that it has: 32 would fail."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = WithPositions(8)(layers.Embedding(5, 4)(ids))
    model = keras.Model(ids, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        loss="mse",
        run_eagerly=True,
    )
    private.fit(np.ones((20, 6), int), np.ones((20, 1)), batch_size=10, verbose=0)
    path = tmp_path / "m" / "1"
    tfdp.export.export_private_model(private, path, delta=1e-3)
    requests = str(path / "assets.extra" / "tf_serving_warmup_requests")
    (record,) = tf.data.TFRecordDataset(requests)
    log = prediction_log_pb2.PredictionLog.FromString(record.numpy())
    row = tf.make_ndarray(log.predict_log.request.inputs["ids"])
    assert row.shape == (1, 6)
