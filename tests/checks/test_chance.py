"""Draws that rows get by their places have secret seeds, or are no batch's."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tfdp.checks.model import validate_model
from tfdp.checks.operations import chance

pytestmark = pytest.mark.keras_private

D = 3
GENERATOR = tf.random.Generator.from_seed(1)


class Draws(layers.Layer):
    """Adds what a function draws for each row."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.seed_generator = keras.random.SeedGenerator(1)
        self.count = self.add_weight(dtype="int32", trainable=False, initializer="ones")

    def call(self, x):
        return x + self.draw(self, tf.shape(x))


def branch(layer, shape, draw):
    return tf.cond(layer.count > 0, lambda: draw(shape), lambda: tf.zeros(shape))


def from_outside(layer, shape):
    seed = tf.stack([layer.count.value, 2])
    return branch(layer, shape, lambda shape: tf.random.stateless_normal(shape, seed))


def of_state_from_outside(layer, shape):
    seed = GENERATOR.make_seeds(1)[:, 0]
    return branch(layer, shape, lambda shape: tf.random.stateless_normal(shape, seed))


def in_a_loop(layer, shape):
    def body(i, total):
        return i + 1, total + tf.random.stateless_uniform(shape, [i, 1])

    return tf.while_loop(lambda i, _: i < 3, body, [0, tf.zeros(shape)])[1]


@tf.function
def in_a_function(shape, seed):
    return tf.random.stateless_normal(shape, seed)


def categories(layer, shape, of=tf.ones, **seed):
    drawn = keras.random.categorical(of(shape), D, **seed)
    return tf.cast(drawn, "float32")


def secret(layer, shape):
    return keras.random.normal(shape, seed=layer.seed_generator)


SECRET = {
    "a generator of the layer": lambda layer, shape: keras.random.normal(
        shape, seed=layer.seed_generator
    ),
    "a seed of it, in a branch": lambda layer, shape: branch(
        layer, shape, lambda s: keras.random.normal(s, seed=layer.seed_generator)
    ),
    "categories": lambda layer, shape: categories(
        layer, shape, seed=layer.seed_generator
    ),
    "Keras's generator": lambda layer, shape: keras.random.uniform(shape),
    "dropout": lambda layer, shape: keras.random.dropout(
        tf.ones(shape), 0.5, seed=layer.seed_generator
    ),
    "for all rows alike": lambda layer, shape: keras.random.normal((1, D), seed=1),
}
KNOWN = {
    "a number": lambda layer, shape: keras.random.normal(shape, seed=1),
    "a number, in a branch": lambda layer, shape: branch(
        layer, shape, lambda s: keras.random.normal(s, seed=1)
    ),
    "a counter, from outside of a branch": from_outside,
    "numbers of rounds": in_a_loop,
    "numbers for a function": lambda layer, shape: in_a_function(
        shape, tf.constant([1, 2])
    ),
    "categories": lambda layer, shape: categories(layer, shape, seed=1),
    "categories of what is drawn by a secret seed": lambda layer, shape: categories(
        layer, shape, lambda shape: secret(layer, shape), seed=1
    ),
    "numbers of TensorFlow": lambda layer, shape: tf.random.stateless_normal(
        shape, [1, 2]
    ),
    "a counter": lambda layer, shape: tf.random.stateless_normal(
        shape, [layer.count.value, 2]
    ),
}
# Their state moves from row to row, however rows are run.
KNOWN_WITH_STATE = {
    "a seed of TensorFlow": lambda layer, shape: tf.random.normal(shape, seed=3),  # noqa: TID251
    "a generator of TensorFlow": lambda layer, shape: GENERATOR.normal(shape),
    "its seeds, from outside of a branch": of_state_from_outside,
    "it, for a shape from outside": lambda layer, shape: branch(
        layer, shape, lambda _: GENERATOR.normal(shape)
    ),
    "rates of rows": lambda layer, shape: tf.random.poisson([], tf.ones(shape), seed=3),
}


def problems(draw):
    model = keras.Sequential([keras.Input((D,)), Draws(draw), layers.Dense(1)])
    return validate_model(model, np.ones((4, D)))


@pytest.mark.parametrize("name", SECRET)
def test_secret_draws_are_proven(name):
    assert problems(SECRET[name]) == []


def test_what_the_system_seeds_is_secret():
    # What Keras's `set_random_seed` has set is known.
    tf.random.set_seed(None)  # noqa: TID251
    assert problems(lambda layer, shape: tf.random.normal(shape)) == []  # noqa: TID251


@pytest.mark.parametrize("name", KNOWN)
def test_known_draws_are_those_of_one_row(name):
    (problem,) = problems(KNOWN[name])
    assert not problem.is_certain
    assert "SeedGenerator" in problem.fix


@pytest.mark.parametrize("name", KNOWN_WITH_STATE)
@pytest.mark.parametrize("engine", ["auto", "vectorized", "apart"])
def test_known_draws_that_move_on_are_refused(name, engine):
    # How far a generator has moved tells how many rows there were.
    found = problems(KNOWN_WITH_STATE[name])
    assert found
    assert all(problem.is_certain for problem in found)
    model = keras.Sequential([
        keras.Input((D,)),
        Draws(KNOWN_WITH_STATE[name]),
        layers.Dense(1),
    ])
    private = tfdp.DPModel(model, engine=engine)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="known seed"):
        private.fit(np.ones((8, D)), np.ones((8, 1)), batch_size=4, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"physical_batch_size": 4}])
@pytest.mark.parametrize("name", ["a number", "numbers of TensorFlow"])
def test_a_number_of_rows_that_is_known_hides_no_draw(name, options):
    model = keras.Sequential([keras.Input((D,)), Draws(KNOWN[name]), layers.Dense(1)])
    private = tfdp.DPModel(model, **options)
    optimizer = tfdp.optimizers.DPSGD(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4
    )
    private.compile(optimizer, "mse")
    x, y = np.ones((4, D)), np.ones((4, 1))
    if options:
        private.fit(x, y, batch_size=4, verbose=0)
    else:
        private.train_on_batch(x, y)
    assert private._checked.engine.name == "apart"


def test_seeds_have_the_names_that_are_looked_for():
    """In whatever version of TensorFlow: what has another name would be data."""
    unknown = [
        name
        for name in dir(tf.raw_ops)
        if name.startswith(chance._BY_SEEDS)
        and not name.startswith(chance._NOT_DRAWING)
        and not inspect.signature(getattr(tf.raw_ops, name)).parameters.keys()
        & set(chance._SEED_INPUTS)
    ]
    assert not unknown
