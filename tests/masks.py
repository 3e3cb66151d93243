"""Recurrent layers under dropout, whose gates may have masks of their own.

The masks that a batch draws are given, row by row, to Keras's own layers.
"""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

from tests.engine_checks import clipped
from tests.problems import precision
from tests.reference import assert_all_close, clipped_sum
from tfdp._keras import attributes_replaced, flatten_layers
from tfdp._seeds import renew_key
from tfdp.engines import BookkeepingEngine, GhostEngine
from tfdp.losses.objective import Objective


def data(model, rng):
    """Six rows; the second has inputs of a million, the third such targets."""
    (inputs,) = model.inputs
    if inputs.dtype == "int32":
        lengths = rng.integers(1, 5, size=6)
        x = rng.integers(1, 6, size=(6, 4)) * (np.arange(4) < lengths[:, None])
    else:
        x = rng.normal(size=(6, *inputs.shape[1:])).astype("float32")
        x[1] *= 1e6
    y = rng.normal(size=(6, *model.output_shape[1:])).astype("float32")
    y[2] *= 1e6
    return x, y


class Masks:
    """Records the masks of a batch, then gives each row alone its own of them."""

    def __init__(self, model):
        self.cells = [
            each for each in flatten_layers(model) if hasattr(each, "seed_generator")
        ]
        self.states = [cell.seed_generator.state for cell in self.cells]
        self.drawn = []

    @contextlib.contextmanager
    def of(self, row=None):
        remaining = iter(self.drawn)

        def get(original, *args):
            if row is None:
                self.drawn.append(original(*args))
                return self.drawn[-1]
            return keras.tree.map_structure(
                lambda mask: None if mask is None else mask[row : row + 1],
                next(remaining),
            )

        with contextlib.ExitStack() as entered:
            for cell in self.cells:
                for name in ("get_dropout_mask", "get_recurrent_dropout_mask"):
                    replaced = {name: functools.partial(get, getattr(cell, name))}
                    entered.enter_context(attributes_replaced(cell, **replaced))
            yield


def with_masks_drawn(make_model, rng):
    """A model with its data, the masks that a batch draws, and the way back to them."""
    model = make_model()
    x, y = data(model, rng)
    renew_key(model, is_known=True)
    masks = Masks(model)
    begin = [state.numpy() for state in masks.states]
    with masks.of():
        model(x, training=True)

    def again():
        for state, value in zip(masks.states, begin, strict=True):
            state.assign(value)

    return model, x, y, masks, again


def gradients_of_row(model, masks, x, y, row):
    with masks.of(row), tf.GradientTape() as tape:
        y_pred = model(x[row : row + 1], training=True)
        loss = tf.reduce_mean(tf.square(y_pred - y[row]))
    gradients = tape.gradient(loss, model.trainable_variables)
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


def stacked(rows):
    return [np.stack(of_variable) for of_variable in zip(*rows, strict=True)]


def check(found, gradients, clip, tolerance):
    sums, found_norms = found
    expected, norms = clipped_sum(gradients, clip)
    atol = tolerance * clip
    np.testing.assert_allclose(found_norms, norms, rtol=tolerance, atol=atol)
    assert_all_close(sums, expected, rtol=0, atol=atol * len(norms))


def median(gradients):
    return np.float64(np.median(clipped_sum(gradients, 1.0)[1]) * 0.9)


def check_clipping_under_masks(make_model, rng):
    """Book-keeping of a batch clips each row as Keras's layers see it, in float64."""
    with precision("float64"):
        model, x, y, masks, again = with_masks_drawn(make_model, rng)
        rows = [gradients_of_row(model, masks, x, y, row) for row in range(len(y))]
        gradients = stacked(rows)
        clip = median(gradients)
        assert clipped_sum(gradients, 1.0)[1].max() > 1e5 * clip
        for engine in (BookkeepingEngine(), GhostEngine(norms="gram")):
            again()
            found = clipped(engine, Objective.of(model, "mse"), x, y, clip)
            check(found, gradients, clip, 1e-9)
