"""Losses that a model computes of all rows are those of single rows, with a loop's speed.

They are taken apart where each row's part is proven to be what it would have alone.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.engine_checks import clipped
from tests.reference import clipped_sum
from tfdp.checks.engine import choose
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

ROWS, WIDTH = 6, 3
SIGNATURE = [tf.TensorSpec([None, WIDTH + 1]), tf.TensorSpec([None, WIDTH])]


class Computing(keras.Model):
    """A model with a loss, and a weight for it."""

    def __init__(self, compute):
        super().__init__()
        self.dense = layers.Dense(
            WIDTH, activity_regularizer=keras.regularizers.L2(0.1)
        )
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.compute = compute

    def call(self, x):
        self.kept = self.dense(x)
        return self.kept

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return self.compute(self, x, y, y_pred)


def squares(y, y_pred):
    return ops.square(y - y_pred)


def variance(_, x, y, y_pred):
    """Divide by what a second output says."""
    return ops.mean(squares(y, y_pred) * ops.sigmoid(y_pred[:, :1]) + y_pred[:, :1])


def classes(_, x, y, y_pred):
    """Ask for the class of each place, of which TensorFlow asserts how many there are."""
    del x
    labels = ops.cast(y[:, :1] > 0, "int32")
    logits = ops.expand_dims(y_pred, 1)
    return ops.mean(ops.sparse_categorical_crossentropy(labels, logits, True))


SPLIT = {
    "classes": classes,
    "mean": lambda _, x, y, y_pred: ops.mean(ops.sum(squares(y, y_pred), -1)),
    "sum": lambda _, x, y, y_pred: ops.sum(squares(y, y_pred)),
    "a value for each row": lambda _, x, y, y_pred: ops.sum(squares(y, y_pred), -1),
    "several": lambda _, x, y, y_pred: (
        ops.mean(squares(y, y_pred)) - 0.5 * ops.mean(ops.sum(y_pred, -1)) / 3
    ),
    "a sum of scalars": lambda _, x, y, y_pred: ops.sum([
        ops.mean(squares(y, y_pred)),
        ops.sum(ops.abs(y_pred)),
    ]),
    "a mean of scalars": lambda _, x, y, y_pred: ops.mean(
        ops.stack([ops.mean(squares(y, y_pred)), ops.sum(ops.abs(y_pred))])
    ),
    "keras": lambda _, x, y, y_pred: keras.losses.Huber()(y, y_pred),
    "keras, summed": lambda _, x, y, y_pred: keras.losses.MeanSquaredError("sum")(
        y, y_pred
    ),
    "with what layers add": lambda model, x, y, y_pred: (
        keras.losses.LogCosh()(y, y_pred) + sum(model.losses)
    ),
    "divided by the rows": lambda _, x, y, y_pred: (
        ops.sum(squares(y, y_pred)) / ops.cast(ops.shape(x)[0], x.dtype)
    ),
    "divided by all entries": lambda _, x, y, y_pred: (
        ops.sum(squares(y, y_pred)) / ops.cast(ops.size(y_pred), x.dtype)
    ),
    "of inputs": lambda _, x, y, y_pred: ops.mean(x[:, :WIDTH] * squares(y, y_pred)),
    "of what was kept": lambda model, x, y, y_pred: ops.mean(squares(y, model.kept)),
    "variance": variance,
    "of a weight": lambda model, x, y, y_pred: (
        ops.mean(squares(y, y_pred) * ops.exp(-model.scale)) + model.scale
    ),
}
ALONE = {
    "not linear": lambda _, x, y, y_pred: ops.sqrt(1 + ops.mean(squares(y, y_pred))),
    "product": lambda _, x, y, y_pred: (
        ops.mean(squares(y, y_pred)) * ops.mean(ops.tanh(y_pred))
    ),
    "more rows, more loss": lambda _, x, y, y_pred: (
        ops.sum(squares(y, y_pred)) * ops.cast(ops.shape(x)[0], x.dtype) ** 2
    ),
    "divided by other lengths": lambda _, x, y, y_pred: (
        ops.sum(squares(y, y_pred))
        / (1 + ops.cast(ops.shape(ops.concatenate([x, x], 0))[0], x.dtype))
    ),
    "masked": lambda _, x, y, y_pred: (
        ops.sum(squares(y, y_pred)) / (1 + ops.sum(ops.cast(x > 0, x.dtype)))
    ),
}


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, WIDTH + 1)).astype("float32")
    y = rng.normal(size=(ROWS, WIDTH)).astype("float32")
    x[2] *= 30
    return x, y


def objective_of(compute):
    keras.utils.set_random_seed(1)
    model = Computing(compute)
    model(data()[0])
    model.compile()
    return Objective.of_compute_loss(model)


def check_single_rows(objective, engine):
    x, y = data()
    gradients = []
    for row in range(ROWS):
        one, target = x[row : row + 1], y[row : row + 1]
        with tf.GradientTape() as tape:
            y_pred = objective.model(one, training=True)
            loss = ops.sum(objective.model.compute_loss(one, target, y_pred))
        values = [each.value for each in objective.model.trainable_variables]
        found = tape.gradient(loss, values, unconnected_gradients="zero")
        gradients.append([np.asarray(each) for each in found])
    gradients = [np.stack(of_variable) for of_variable in zip(*gradients, strict=True)]
    clip = 0.9 * float(np.median(clipped_sum(gradients, 1.0)[1]))
    expected, norms = clipped_sum(gradients, clip)
    run = functools.partial(clipped, engine, objective, clip=clip)
    in_graph = tf.function(run, input_signature=SIGNATURE, autograph=False)
    for each in (run, in_graph):
        sums, found = each(tf.constant(x), tf.constant(y))
        np.testing.assert_allclose(found, norms, rtol=2e-4)
        for total, wanted in zip(sums, expected, strict=True):
            np.testing.assert_allclose(total, wanted, rtol=0, atol=2e-4 * clip * ROWS)


QUICK = {
    "classes",
    "keras",
    "with what layers add",
    "divided by the rows",
    "of a weight",
}


# Sums and means that others have as well.
ONE_MORE = {"mean", "keras, summed"}


def marks_of(name):
    if name in QUICK:
        return []
    return [pytest.mark.exhaustive if name in ONE_MORE else pytest.mark.slow]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(name)) for name in SPLIT]
)
def test_a_loss_of_all_rows_is_taken_apart(name):
    objective = objective_of(SPLIT[name])
    engine = choose("auto", objective, (*data(), None))
    assert (engine.name, engine.splits_losses) == ("bookkeeping", True)
    check_single_rows(objective, engine)
    forward = tf.function(
        lambda x, y: objective.forward(Batch(x, y), splits_losses=True)[1],
        input_signature=SIGNATURE,
        autograph=False,
    )
    operations = forward.get_concrete_function().graph.get_operations()
    assert not any("While" in op.type for op in operations)


@pytest.mark.parametrize(
    "name",
    [
        "masked",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ALONE
            if name != "masked"
        ),
    ],
)
def test_other_losses_are_asked_for_each_row_alone(name):
    objective = objective_of(ALONE[name])
    engine = choose("auto", objective, (*data(), None))
    assert (engine.name, engine.splits_losses) == ("bookkeeping", False)
    check_single_rows(objective, engine)


@pytest.mark.slow
def test_what_a_loss_counts_it_counts_once_for_all_rows():
    """One row after the other would find what those before have left."""
    counter = tf.Variable(0)

    def compute(_, x, y, y_pred):
        del x
        counter.assign_add(1)
        return ops.sqrt(1 + ops.mean(squares(y, y_pred)))

    objective = objective_of(compute)
    engine = choose("auto", objective, (*data(), None))
    assert engine.name == "apart"
    counter.assign(0)
    clipped(engine, objective, *data(), 1.0)
    assert counter.numpy() == 1


def test_rows_that_meet_in_a_loss_are_not_taken_apart():
    """Nor does a mean at the end hide it."""

    def compute(_, x, y, y_pred):
        del x
        return ops.mean(squares(y, y_pred - ops.mean(y_pred, axis=0)))

    objective = objective_of(compute)
    with pytest.raises((UnsupportedLossError, UnsupportedLayerError)):
        choose("auto", objective, (*data(), None))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["traced", "run"])
def test_a_loss_that_cannot_take_several_rows_is_asked_for_one(when):
    def compute(_, x, y, y_pred):
        if when == "run":
            tf.debugging.assert_equal(tf.shape(x)[0], 1)
        elif x.shape[0] != 1:
            raise ValueError("one row, please")
        return ops.sum(squares(y, y_pred))

    objective = objective_of(compute)
    engine = choose("auto", objective, (*data(), None))
    check_single_rows(objective, engine)
