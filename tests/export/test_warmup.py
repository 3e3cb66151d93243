"""The request that warms a server up is one of TensorFlow Serving's messages."""

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow_serving.apis import prediction_log_pb2

from tfdp.export.warmup import prediction_log


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
