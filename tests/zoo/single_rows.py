"""A model of the table against a loop over single rows."""

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.problems import precision
from tests.reference import clipped_sum
from tests.zoo.entry import OUTLIER, ROWS, Entry, engine_of


def check_single_rows(entry: Entry) -> None:
    """One step moves a model as the clipped gradients of single rows would."""
    with precision(entry.dtype):
        model = entry.build(0.0)
        x, *_ = batch = entry.batch()
        model(keras.tree.map_structure(tf.convert_to_tensor, x))
        gradients = single_rows(model, entry.make_loss(), *batch)
        _, norms = clipped_sum(gradients, 1.0)
        clip = 0.9 * float(np.median(norms))
        assert norms[OUTLIER] > 5 * clip
        expected, _ = clipped_sum(gradients, clip)
        tolerance = 1e-8 if entry.dtype == "float64" else 1e-4
        before = [variable.numpy() for variable in model.trainable_variables]
        private = trained(entry, model, batch, clip)
        assert engine_of(private) == entry.engine
        for variable, start, total in zip(
            model.trainable_variables, before, expected, strict=True
        ):
            moved = (start - variable.numpy()) * ROWS
            np.testing.assert_allclose(
                moved, total, rtol=0, atol=tolerance * clip * ROWS
            )


def single_rows(
    model: keras.Model, loss, x, y, weights, rows: int = ROWS
) -> list[np.ndarray]:
    """Return the gradient of each row by itself, in a loop."""
    if loss is not None:
        model.compile(None, loss)
    variables = model.trainable_variables

    @tf.function(autograph=False, reduce_retracing=True)
    def gradients(x, y, weights):
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            value = tf.reduce_sum(model.compute_loss(x, y, y_pred, weights))
        found = tape.gradient(value, variables, unconnected_gradients="zero")
        return [tf.convert_to_tensor(gradient) for gradient in found]

    found = [gradients(*_row((x, y, weights), row)) for row in range(rows)]
    return [np.stack(of_variable) for of_variable in zip(*found, strict=True)]


def _row(batch, row):
    return keras.tree.map_structure(
        lambda array: (
            None if array is None else tf.convert_to_tensor(array[row : row + 1])
        ),
        batch,
    )


def trained(entry: Entry, model: keras.Model, batch, clip: float) -> tfdp.DPModel:
    """Take one step without noise, of length 1, on the whole batch."""
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPOptimizer(
            keras.optimizers.SGD(1.0), l2_norm_clip=clip, noise_multiplier=0.0
        ),
        entry.make_loss(),
    )
    x, y, weights = batch
    if isinstance(x, list):
        # Which a dataset would put together.
        x = tuple(x)
    batch = (x, y) if weights is None else (x, y, weights)
    rows = tf.data.Dataset.from_tensors(batch)
    declared = tfdp.data.declare(
        rows, number_of_examples=ROWS, expected_batch_size=ROWS, sampling="shuffle"
    )
    private.fit(declared, verbose=0)
    return private
