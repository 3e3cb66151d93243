"""Metrics of single examples, against Keras's means over them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.losses.metrics import MeanMetric

N = 6


def shapes():
    rng = np.random.default_rng(0)
    of_classes = rng.integers(0, 3, N)
    scores = rng.random((N, 3)).astype("float32")
    return {
        "sparse": (of_classes, scores),
        "sparse_column": (of_classes[:, None], scores),
        "categorical": (np.eye(3)[of_classes], scores),
        "binary": (of_classes % 2, scores[:, :1]),
        "binary_column": (of_classes[:, None] % 2, scores[:, :1]),
        "sequences": (
            rng.integers(0, 3, (N, 4)),
            rng.random((N, 4, 3)).astype("float32"),
        ),
    }


def no_loss(y_true, y_pred):
    return 0 * y_pred[:, 0]


@pytest.mark.parametrize("identifier", ["accuracy", "acc"])
@pytest.mark.parametrize("shape", shapes())
def test_accuracies_are_resolved_as_keras_does(identifier, shape):
    y, y_pred = map(tf.constant, shapes()[shape])
    metric = MeanMetric(identifier)
    assert (metric.name, metric.is_accuracy) == (identifier, True)
    found = metric.of_rows(y, y_pred)(y, y_pred)
    assert found.dtype == tf.float64
    helper = keras.Sequential([keras.Input(y_pred.shape[1:]), keras.layers.Identity()])
    helper.compile(loss=no_loss, metrics=[identifier])
    for row in range(N):
        rows = slice(row, row + 1)
        # Older Keras goes on counting.
        helper.reset_metrics()
        logs = helper.test_on_batch(y_pred[rows], y[rows], return_dict=True)
        assert float(found[row]) == pytest.approx(logs[identifier])


@pytest.mark.parametrize(
    ("identifier", "name", "is_accuracy"),
    [
        ("mse", "mse", False),
        (keras.metrics.MeanAbsoluteError(name="error"), "error", False),
        (keras.metrics.mean_squared_error, "mean_squared_error", False),
        (keras.metrics.SparseTopKCategoricalAccuracy(k=2), None, True),
        (keras.metrics.CategoricalAccuracy, "categorical_accuracy", True),
    ],
)
def test_means_of_keras_are_known(identifier, name, is_accuracy):
    metric = MeanMetric(identifier)
    assert metric.name == name or "top_k" in metric.name
    assert metric.is_accuracy == is_accuracy


def test_options_of_a_metric_are_kept():
    y, y_pred = map(tf.constant, shapes()["sparse"])
    for k in (1, 3):
        metric = MeanMetric(keras.metrics.SparseTopKCategoricalAccuracy(k=k))
        found = metric.of_rows(y, y_pred)(y, y_pred)
        top = np.argsort(-y_pred.numpy())[:, :k]
        np.testing.assert_array_equal(found, (top == y.numpy()[:, None]).any(1))


def test_a_function_of_a_batch_is_asked_for_each_row():
    def largest_error(y_true, y_pred):
        return tf.reduce_max(tf.abs(y_true - y_pred))

    y = tf.reshape(tf.range(6.0), (3, 2))
    y_pred = tf.zeros((3, 2))
    metric = MeanMetric(largest_error)
    assert metric.name == "largest_error"
    np.testing.assert_array_equal(metric.of_rows(y, y_pred)(y, y_pred), [1, 3, 5])


class Counts(keras.metrics.MeanMetricWrapper):
    """No mean any more."""

    def result(self):
        return self.total


@pytest.mark.parametrize(
    ("identifier", "error", "match"),
    [
        ("auc", ValueError, "AUC"),
        ("precision", ValueError, "not a mean over examples"),
        (keras.metrics.F1Score(), ValueError, "not a mean over examples"),
        (Counts(keras.metrics.mean_squared_error), ValueError, "Counts"),
        ("nothing", ValueError, "nothing"),
        (None, TypeError, "metric"),
        (1.0, TypeError, "metric"),
    ],
    ids=str,
)
def test_what_is_no_mean_is_refused(identifier, error, match):
    with pytest.raises(error, match=match):
        MeanMetric(identifier)


def test_targets_are_needed():
    with pytest.raises(ValueError, match="compares one output with its targets"):
        MeanMetric("accuracy").of_rows(None, tf.zeros((2, 3)))
    function = MeanMetric(lambda y_true, y_pred: tf.reduce_mean(y_pred))
    with pytest.raises(ValueError, match="for every example"):
        function.of_rows(None, tf.zeros((2, 3)))(None, tf.zeros((2, 3)))
