"""Layers that assign variables: no example may see what others have left there."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.problems import precision
from tfdp.errors import UnsupportedLayerError

ROWS, WIDTH = 5, 4


class Turning(layers.Layer):
    """Turns a variable around in each call."""

    def __init__(self, turn, **kwargs):
        super().__init__(**kwargs)
        self.turn = turn
        self.inner = layers.Dense(WIDTH)

    def build(self, shape):
        self.inner.build(shape)
        of = {"shape": (shape[-1], WIDTH), "initializer": "glorot_uniform"}
        self.own = self.add_weight(**of, name="own")
        self.fixed = self.add_weight(**of, name="fixed", trainable=False)

    def call(self, x):
        return ops.tanh(self.turn(self, x))


def of_fixed(layer, x):
    layer.fixed.assign(-layer.fixed)
    return layer.inner(x) + ops.matmul(x, layer.fixed)


def of_kernel(layer, x):
    layer.inner.kernel.assign(-layer.inner.kernel)
    return layer.inner(x)


def at_once(layer, x):
    turned = layer.own.value.assign(-tf.convert_to_tensor(layer.own))
    return ops.matmul(x, tf.convert_to_tensor(turned))


def model(turn):
    with precision("float64"):
        inputs = keras.Input((3,))
        return keras.Model(inputs, layers.Dense(1)(Turning(turn)(inputs)))


def data(rng):
    return rng.normal(size=(ROWS, 3)), rng.normal(size=(ROWS, 1))


@pytest.mark.parametrize("turn", [of_fixed, of_kernel])
def test_passes_of_a_batch_do_not_see_what_others_left(turn, rng):
    x, y = data(rng)
    with pytest.raises(UnsupportedLayerError, match="between the passes"):
        tfdp.clipped_gradients(
            model(turn), "mse", x, y, l2_norm_clip=1.0, physical_batch_size=1
        )
    private = tfdp.DPModel(model(turn), physical_batch_size=1)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    before = private.get_weights()
    with pytest.raises(UnsupportedLayerError, match="physical_batch_size=None"):
        private.fit(x, y, batch_size=2, verbose=0)
    for old, new in zip(before, private.get_weights(), strict=True):
        np.testing.assert_array_equal(abs(old), abs(new))


@pytest.mark.parametrize("turn", [of_fixed, of_kernel])
def test_one_pass_is_that_of_single_rows(turn, rng):
    x, y = data(rng)
    x[2] *= 1e6
    of_turned = model(turn)
    start = of_turned.get_weights()

    def clipped(rows):
        of_turned.set_weights(start)
        with precision("float64"):
            found = tfdp.clipped_gradients(
                of_turned, "mse", x[rows], y[rows], l2_norm_clip=1e-3
            )
        return [tf.convert_to_tensor(each) for each in found.gradients]

    whole = clipped(list(range(ROWS)))
    for row in range(ROWS):
        others = clipped([n for n in range(ROWS) if n != row])
        change = [a - b for a, b in zip(whole, others, strict=True)]
        assert tf.linalg.global_norm(change) <= 1e-3 * (1 + 1e-9)


def test_examples_in_turn_do_not_see_what_others_left(rng):
    x, y = data(rng)
    with pytest.raises(Exception, match="one after the other"):
        tfdp.clipped_gradients(model(at_once), "mse", x, y, l2_norm_clip=1e-3)


def test_dropout_is_no_such_layer(rng):
    """Generators of random numbers move on, which nobody sees."""
    x, y = data(rng)
    inputs = keras.Input((3,))
    outputs = layers.Dense(1)(layers.Dropout(0.5)(layers.Dense(4)(inputs)))
    private = tfdp.DPModel(keras.Model(inputs, outputs), physical_batch_size=1)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    private.fit(x, y, batch_size=2, verbose=0)
