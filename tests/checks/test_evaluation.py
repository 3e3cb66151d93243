"""Values of rows in inference, against Keras evaluating one row after the other."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tfdp import _tree
from tfdp.checks.evaluation import evaluation_function
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.metrics import MeanMetric
from tfdp.losses.objective import Objective

ROWS = 7


def tokens(rng):
    model = keras.Sequential([
        keras.Input((5,), dtype="int32"),
        layers.Embedding(6, 4, mask_zero=True),
        layers.Dense(3),
    ])
    x = rng.integers(0, 6, (ROWS, 5))
    x[:, 0] = 1
    return model, x, rng.integers(0, 3, (ROWS, 5))


def named_inputs(rng):
    inputs = {name: keras.Input((3,), name=name) for name in "ab"}
    outputs = layers.Dense(3)(layers.Add()(list(inputs.values())))
    x = {name: rng.normal(size=(ROWS, 3)).astype("float32") for name in "ab"}
    return keras.Model(inputs, outputs), x, rng.integers(0, 3, ROWS)


def stack(rng, *more, units=3, dtype=None):
    with_dropout = [layers.Dense(4, activation="relu"), layers.Dropout(0.5)]
    last = layers.Dense(units, dtype=dtype)
    model = keras.Sequential([keras.Input((3,)), *with_dropout, *more, last])
    x = rng.normal(size=(ROWS, 3)).astype("float32")
    return model, x, rng.integers(0, min(units + 1, 3), ROWS)


def categorical(rng):
    model, x, y = stack(rng)
    return model, x, np.eye(3)[y]


PROBLEMS = {
    "binary": lambda rng: stack(rng, units=1),
    "categorical": categorical,
    "sparse": stack,
    "named_inputs": named_inputs,
    "mixed_precision": lambda rng: stack(rng, dtype="mixed_float16"),
    "batch_normalization": lambda rng: stack(rng, layers.BatchNormalization()),
    "masks": tokens,
    "added_losses": lambda rng: stack(rng, layers.ActivityRegularization(0.1)),
}


def loss_of(problem):
    if problem == "binary":
        return keras.losses.BinaryCrossentropy(from_logits=True)
    if problem == "categorical":
        return keras.losses.CategoricalCrossentropy(from_logits=True)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def evaluated(model, x, y, metrics, loss="mse", sample_weight=None):
    batch = (x, y, sample_weight)
    objective = Objective.of(model, loss)
    signature = _tree.signature_of(batch)
    outputs = _tree.signature_of(model(x, training=True))
    functions = [
        None if each == "loss" else MeanMetric(each).of_rows(signature[1], outputs)
        for each in metrics
    ]
    return evaluation_function(objective, functions, signature)(*batch).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_values_are_what_keras_finds_for_each_row_alone(problem, rng):
    model, x, y = PROBLEMS[problem](rng)
    loss = loss_of(problem)
    found = evaluated(model, x, y, ["loss", "accuracy"], loss)
    assert found.dtype == np.float64
    model.compile(loss=loss, metrics=["accuracy"])
    for row, values in enumerate(found):
        one = keras.tree.map_structure(lambda a, row=row: a[row : row + 1], (x, y))
        # Older Keras goes on counting.
        model.reset_metrics()
        expected = model.test_on_batch(*one, return_dict=True)
        # As much as float16 tells, where that is computed with.
        assert values[0] == pytest.approx(expected["loss"], rel=2e-3)
        assert values[1] == pytest.approx(expected["accuracy"])


def test_weights_scale_the_loss_alone(rng):
    model, x, y = stack(rng)
    weights = rng.random(ROWS)
    both = [
        evaluated(model, x, y, ["loss", "accuracy"], loss_of(""), sample_weight)
        for sample_weight in (weights, np.ones(ROWS))
    ]
    np.testing.assert_allclose(both[0][:, 0], weights * both[1][:, 0], rtol=1e-5)
    np.testing.assert_array_equal(both[0][:, 1], both[1][:, 1])


def test_functions_of_several_outputs_get_all_of_them(rng):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {name: layers.Dense(2)(inputs) for name in "ab"})
    x = rng.normal(size=(ROWS, 3)).astype("float32")
    y = {name: rng.integers(0, 2, ROWS) for name in "ab"}

    def both_right(y_true, y_pred):
        right = [
            keras.metrics.sparse_categorical_accuracy(y_true[name], y_pred[name])
            for name in "ab"
        ]
        return right[0] * right[1]

    loss = dict.fromkeys("ab", loss_of(""))
    found = evaluated(model, x, y, [both_right, "loss"], loss)
    logits = {name: value.numpy() for name, value in model(x).items()}
    right = [logits[name].argmax(-1) == y[name] for name in "ab"]
    np.testing.assert_array_equal(found[:, 0], right[0] & right[1])
    with pytest.raises(ValueError, match="one output"):
        evaluated(model, x, y, ["accuracy"], loss)


@keras.saving.register_keras_serializable("test")
class Mixed(layers.Layer):
    """Lets rows meet, in inference alone."""

    def call(self, inputs, training=None):
        if training:
            return inputs
        return inputs - tf.reduce_mean(inputs, 0)


@pytest.mark.slow
@pytest.mark.parametrize("in_metric", [False, True])
def test_rows_that_would_meet_are_evaluated_one_by_one(in_metric, rng, caplog):
    model, x, y = stack(rng, *([] if in_metric else [Mixed()]))

    def relative(y_true, y_pred):
        of_rows = y_pred[:, 0]
        return of_rows - tf.reduce_mean(of_rows) + tf.cast(y_true, tf.float32)

    metrics = [relative if in_metric else "accuracy", "loss"]
    with caplog.at_level("INFO", logger="absl"):
        found = evaluated(model, x, y, metrics, loss_of(""))
    assert "each row" in caplog.text
    x[1:] *= 1e6
    other = evaluated(model, x, y, metrics, loss_of(""))
    np.testing.assert_array_equal(found[0], other[0])
    if in_metric:
        np.testing.assert_array_equal(found[:, 0], y)


class Keeps(layers.Layer):
    """Keeps data, in inference alone."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), trainable=False)

    def call(self, inputs, training=None):
        if not training:
            self.seen.assign_add(tf.reduce_sum(inputs))
        return inputs


def test_a_model_that_keeps_data_is_refused(rng):
    model, x, y = stack(rng, Keeps(name="keeps"))

    seen = float(model.get_layer("keeps").seen)
    with pytest.raises(UnsupportedLayerError, match="keeps"):
        evaluated(model, x, y, ["accuracy"], loss_of(""))
    assert float(model.get_layer("keeps").seen) == seen


class Remembers(layers.Layer):
    """Keeps the mean of what it predicts for, and nothing in training."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], trainable=False, name="mean")

    def __init__(self, assign, **kwargs):
        super().__init__(**kwargs)
        self.assign = assign

    def call(self, x, training=False):
        if not training:
            self.assign(self.mean, keras.ops.mean(x, axis=0))
        return x


def assign_in_a_function(variable, value):
    def assign(value):
        tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)

    tf.function(assign, autograph=False)(value)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "assign",
    [
        lambda variable, value: variable.assign(value),
        lambda variable, value: variable.value.assign_add(value),
        lambda variable, value: variable.value[:].assign(value),
        lambda variable, value: tf.raw_ops.AssignAddVariableOp(
            resource=variable.value.handle, value=value
        ),
        assign_in_a_function,
    ],
    ids=["keras", "tensorflow", "slice", "raw", "function"],
)
def test_a_private_model_keeps_nothing_of_what_it_predicts_for(
    assign, run_eagerly, rng
):
    _, x, y = stack(rng)
    model = keras.Sequential([keras.Input((3,)), Remembers(assign), layers.Dense(3)])
    model.layers[0].mean.assign(np.zeros(3))
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=run_eagerly,
    )
    for see in (
        lambda: private.predict(x, verbose=0),
        lambda: private.evaluate(x, y, verbose=0),
        lambda: private(x),
        lambda: private.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0),
    ):
        with pytest.raises(UnsupportedLayerError, match="mean`, assigned"):
            see()
        np.testing.assert_array_equal(model.layers[0].mean, np.zeros(3))
    # Before any step.
    assert private.ledger.steps == 0
    # By itself it is an ordinary model.
    model.predict(x, verbose=0)
    assert np.any(model.layers[0].mean)
