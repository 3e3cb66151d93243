"""Layers that assign variables, or move other states: no example sees what others left."""

import dataclasses
import math
from typing import Any

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


@pytest.mark.slow
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
    with pytest.raises(Exception, match="through it by itself"):
        tfdp.clipped_gradients(model(at_once), "mse", x, y, l2_norm_clip=1e-3)


@pytest.mark.slow
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


# ------------------------------------------------- what else moves on, and who keeps it


@dataclasses.dataclass
class Moving:
    """A layer that moves something on in each call.

    Attributes:
        turn: Makes outputs of the layer and of inputs.
        init: Gives the layer what it moves.
    """

    turn: Any
    init: Any = lambda layer: None


def sign_of(number):
    return tf.cos(tf.cast(number, tf.float64) * math.pi)


def with_table(layer):
    layer.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, 0.0)


def counted_in_a_table(layer, x):
    key = tf.constant([0], tf.int64)
    number = tf.ensure_shape(layer.table.lookup(key), [1])[0]
    with tf.control_dependencies([layer.table.insert(key, [number + 1])]):
        return layer.inner(x) * sign_of(tf.identity(number))


def counted_up(layer, x):
    number = tf.raw_ops.ResourceCountUpTo(
        resource=layer.counter.handle, limit=1_000_000, T=tf.int64
    )
    return layer.inner(x) * sign_of(number)


def with_counter(layer):
    layer.counter = tf.Variable(0, dtype=tf.int64, trainable=False)


def tossed(layer, x):
    """Draws one coin for all rows, from a seed that everybody knows."""
    coin = tf.random.uniform([], seed=7, dtype=tf.float64)
    return layer.inner(x) * tf.sign(coin - 0.5)


def with_generator(layer):
    layer.generator = tf.random.Generator.from_seed(1)


def drawn_by_tensorflow(layer, x):
    return layer.inner(x) * layer.generator.normal([], dtype=tf.float64)


def with_state_that_looks_like_a_seed(layer):
    layer.state = tf.Variable(
        1.0, dtype=tf.float64, trainable=False, name="seed_generator_state"
    )


def turned(layer, x):
    layer.state.assign(-layer.state)
    return layer.inner(x) * layer.state.read_value()


def in_a_case(layer, x):
    branches = [lambda: layer.state.assign(-layer.state)] * 2
    tf.switch_case(tf.constant(0), branches)
    return layer.inner(x) * layer.state.read_value()


def with_seeds(layer):
    layer.seeds = keras.random.SeedGenerator(3)


def read_as_a_number(layer, x):
    layer.seeds.next()
    number = tf.cast(tf.convert_to_tensor(layer.seeds.state)[1], tf.float64)
    return layer.inner(x) * sign_of(number)


def read_as_a_length(layer, x):
    layer.seeds.next()
    number = tf.convert_to_tensor(layer.seeds.state)[1] % 2
    return layer.inner(x) * sign_of(tf.shape(tf.zeros([number + 1]))[0])


def drawn_as_a_number(layer, x):
    """What moves on by known steps does so with a secret key, too."""
    return layer.inner(x) * sign_of(layer.seeds.next()[1])


MOVING = {
    "length by a seed": Moving(read_as_a_length, with_seeds),
    "seed for a number": Moving(drawn_as_a_number, with_seeds),
    "table": Moving(counted_in_a_table, with_table),
    "counter": Moving(counted_up, with_counter),
    "coin": Moving(tossed),
    "generator": Moving(drawn_by_tensorflow, with_generator),
    "named as a seed": Moving(turned, with_state_that_looks_like_a_seed),
    "case": Moving(in_a_case, with_state_that_looks_like_a_seed),
    "number of a seed": Moving(read_as_a_number, with_seeds),
}
# A vectorized map changes a variable once for all.
ONCE_FOR_ALL = {"named as a seed", "case"}


def moving_model(name):
    of = MOVING[name]
    with precision("float64"):
        layer = Turning(of.turn)
        of.init(layer)
        inputs = keras.Input((3,))
        return keras.Model(inputs, layers.Dense(1)(layer(inputs)))


@pytest.mark.parametrize("name", MOVING)
def test_passes_do_not_see_how_far_others_have_moved_it(name, rng):
    x, y = data(rng)
    with pytest.raises(
        UnsupportedLayerError,
        match=r"between the passes|serve to draw alone|for other examples",
    ):
        tfdp.clipped_gradients(
            moving_model(name), "mse", x, y, l2_norm_clip=1.0, physical_batch_size=1
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVING)
def test_examples_by_themselves_do_not_see_it_either(name, rng):
    x, y = data(rng)

    @tf.function(autograph=False)
    def clipped(x, y):
        return tfdp.clipped_gradients(
            model, "mse", x, y, l2_norm_clip=1.0, engine="vectorized"
        ).gradients

    model = moving_model(name)
    if name in ONCE_FOR_ALL:

        def afresh(rows):
            model.set_weights(start)
            state.assign(before)
            run = tf.function(clipped.python_function, autograph=False)
            return run(tf.constant(x[rows]), tf.constant(y[rows]))

        state = model.layers[1].state
        start, before = model.get_weights(), np.array(state)
        whole = afresh(np.arange(ROWS))
        for row in range(ROWS):
            others = afresh(np.delete(np.arange(ROWS), row))
            change = [
                tf.convert_to_tensor(one) - other
                for one, other in zip(whole, others, strict=True)
            ]
            assert tf.linalg.global_norm(change) <= 1 + 1e-9
        return
    with pytest.raises(
        UnsupportedLayerError, match=r"leave nothing for other|serve to draw alone"
    ):
        clipped(tf.constant(x), tf.constant(y))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "vectorized"])
def test_a_backward_pass_that_keeps_data_is_refused(engine, rng):
    def keeping(layer, x):
        @tf.custom_gradient
        def same(z):
            def gradient(of_z):
                key = tf.constant([0], tf.int64)
                before = tf.ensure_shape(layer.table.lookup(key), [1])[0]
                kept = layer.table.insert(key, [tf.reduce_sum(z * z)])
                with tf.control_dependencies([kept]):
                    return of_z * sign_of(before)

            return tf.identity(z), gradient

        return same(layer.inner(x))

    x, y = data(rng)
    with precision("float64"):
        layer = Turning(keeping)
        with_table(layer)
        inputs = keras.Input((3,))
        private = tfdp.DPModel(
            keras.Model(inputs, layers.Dense(1)(layer(inputs))), engine=engine
        )
        optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
        private.compile(optimizer, "mse")
        with pytest.raises(UnsupportedLayerError, match="what depends on the data"):
            private.fit(x, y, batch_size=2, verbose=0)


def test_what_one_row_alone_would_assign_is_refused(rng):
    def of_one(layer, x):
        if x.shape[0] == 1:
            layer.fixed.assign_add(tf.reduce_sum(x) * ops.ones_like(layer.fixed))
        return layer.inner(x)

    x, y = data(rng)
    private = tfdp.DPModel(model(of_one), engine="vectorized")
    optimizer = tfdp.optimizers.DPSGD(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4
    )
    private.compile(optimizer, "mse")
    with pytest.raises(UnsupportedLayerError, match="keeps what depends on the data"):
        private.train_on_batch(x, y)


def test_augmentations_that_count_their_calls_are_none_for_passes(rng):
    x, y = data(rng)
    number = tf.Variable(0.0, trainable=False)

    def noisier(x):
        number.assign_add(1.0)
        return x * tf.cast(number.read_value(), x.dtype)

    with precision("float64"):
        private = tfdp.DPModel(
            keras.Sequential([keras.Input((3,)), layers.Dense(1)]),
            augmentation=noisier,
            physical_batch_size=1,
        )
        optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
        private.compile(optimizer, "mse")
        with pytest.raises(UnsupportedLayerError, match="between the passes"):
            private.fit(x, y, batch_size=2, verbose=0)
