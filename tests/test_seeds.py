"""Seeds are secret, those of rows differ, and nothing is random where that is refused."""

import functools
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.distribute.processes import run_mirrored
from tfdp import _seeds
from tfdp._seeds import (
    RandomError,
    drawing_again,
    renew_key,
    secret_seeds,
    seeds_of_row,
    without_chance,
)


def of_row(generator, row, draws=1):
    with seeds_of_row(tf.constant(row)) as advance:
        seeds = [tuple(generator.next().numpy()) for _ in range(draws)]
    return seeds, advance


def test_every_draw_of_every_row_has_a_seed_of_its_own():
    generator = keras.random.SeedGenerator(3)
    before = generator.state.numpy().tolist()
    seeds = [seed for row in range(5) for seed in of_row(generator, row, 4)[0]]
    assert len(set(seeds)) == 20
    # The state moves when it is told to, once for each draw.
    assert generator.state.numpy().tolist() == before
    _, advance = of_row(generator, 0, 2)
    advance()
    moved = generator.state.numpy().tolist()
    other = keras.random.SeedGenerator(3)
    for _ in range(2):
        other.next()
    assert moved == other.state.numpy().tolist()


def test_generators_may_leave_the_row_out():
    generator = keras.random.SeedGenerator(3)
    generator.is_same_for_all_rows = True
    assert of_row(generator, 0)[0] == of_row(generator, 4)[0]


def test_the_same_is_drawn_again():
    generator = keras.random.SeedGenerator(3)
    with seeds_of_row(tf.constant(1)):
        first = generator.next().numpy().tolist()
        with drawing_again():
            assert generator.next().numpy().tolist() == first
        assert generator.next().numpy().tolist() != first


def test_chance_is_refused_where_it_is_and_not_behind():
    generator = keras.random.SeedGenerator(3)
    with without_chance():
        with without_chance(), pytest.raises(RandomError):
            generator.next()
        with pytest.raises(RandomError):
            generator.next()
    generator.next()


def test_an_error_sets_everything_back():
    generator = keras.random.SeedGenerator(3)
    plain = keras.random.SeedGenerator(3)

    def fail():
        with seeds_of_row(tf.constant(2)):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert generator.next().numpy().tolist() == plain.next().numpy().tolist()
    assert generator.state.numpy().tolist() != [3, 0]


def seeds(model, number=3, **attributes):
    """The seeds that a model gets from one state of a generator."""
    generator = keras.random.SeedGenerator(3)
    vars(generator).update(attributes)
    with secret_seeds(model):
        return [tuple(generator.next().numpy()) for _ in range(number)]


def test_states_do_not_tell_the_seeds():
    model, other = keras.Sequential(), keras.Sequential()
    drawn = seeds(model)
    assert seeds(model) == drawn
    renew_key(model, is_known=False)
    again = seeds(model)
    assert len({*drawn, *again, *seeds(other)}) == 9
    generator = keras.random.SeedGenerator(3)
    plain = [tuple(generator.next().numpy()) for _ in range(3)]
    assert not {*drawn, *again} & {*plain}
    renew_key(model, is_known=True)
    assert seeds(model) == plain
    # All rows draw the same: there is no place in it.
    renew_key(model, is_known=False)
    assert seeds(model, is_same_for_all_rows=True) == plain


def test_rows_have_secret_seeds_too():
    model = keras.Sequential()
    renew_key(model, is_known=False)
    generator = keras.random.SeedGenerator(3)
    with secret_seeds(model):
        drawn = [of_row(generator, row, 2)[0] for row in range(3)]
    plain = [of_row(generator, row, 2)[0] for row in range(3)]
    assert len({seed for row in drawn + plain for seed in row}) == 12


@pytest.mark.slow
def test_keys_are_gone_with_their_models():
    model = keras.Sequential()
    renew_key(model, is_known=False)
    words = weakref.ref(_seeds._key_of(model).words)
    del model
    gc.collect()
    assert words() is None


def dropout():
    return keras.Sequential([
        keras.Input((8,)),
        layers.Dense(6),
        layers.Dropout(0.5),
        layers.Dense(1),
    ])


def dense():
    return keras.Sequential([keras.Input((8,)), layers.Dense(1)])


@keras.saving.register_keras_serializable("tests")
def noisy(x):
    return x + keras.random.normal(keras.ops.shape(x))


def drawing_again_for_gradients():
    class Recomputed(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dropout = layers.Dropout(0.5)

        def call(self, x, training=None):
            drop = tf.recompute_grad(lambda x: self.dropout(x, training=training))
            return drop(x)

    return keras.Sequential([keras.Input((8,)), Recomputed(), layers.Dense(1)])


# What draws, the model and how; with XLA or without.
DRAWING = {
    "bookkeeping": (dropout, {}, False),
    "vectorized": (dropout, {"engine": "vectorized"}, False),
    "apart": (dropout, {"engine": "apart"}, False),
    "in passes": (dropout, {"physical_batch_size": 4}, False),
    "compiled": (dropout, {}, True),
    "backward": (drawing_again_for_gradients, {}, False),
    "views": (dense, {"augmentation": noisy}, False),
}
ROWS = np.linspace(-1.0, 1.0, 64, dtype="float32").reshape(8, 8)


def one_batch(private):
    private.train_on_batch(ROWS, ROWS[:, :1])


def one_epoch(private):
    data = tf.data.Dataset.from_tensors((ROWS, ROWS[:, :1]))
    declared = tfdp.data.declare(
        data, number_of_examples=8, expected_batch_size=8, sampling="shuffle"
    )
    private.fit(declared, verbose=0)


def trained(name, train, **options):
    """The weights behind one batch, from the same states of the seeds each time."""
    keras.utils.set_random_seed(1)
    make, private_options, jit_compile = DRAWING[name]
    model = make()
    private = tfdp.DPModel(model, **private_options)
    # Masks alone are random.
    optimizer = tfdp.optimizers.DPSGD(
        0.1,
        l2_norm_clip=1.0,
        noise_multiplier=0.0,
        expected_batch_size=8,
        **options,
    )
    private.compile(optimizer, "mse", jit_compile=jit_compile)
    train(private)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.parametrize(
    "train", [pytest.param(one_batch, marks=pytest.mark.exhaustive), one_epoch]
)
@pytest.mark.parametrize(
    "name",
    [
        "views",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("bookkeeping", "vectorized", "in passes", "backward")
        ),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("apart", "compiled")
        ),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:The privacy noise is reproducible", "ignore:Training without noise"
)
def test_who_knows_the_seeds_does_not_know_the_masks(name, train):
    assert np.any(trained(name, train) != trained(name, train))
    first, second = (trained(name, train, noise_seed=1) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_the_key_is_that_of_who_trains():
    model = dense()

    def private(**options):
        private = tfdp.DPModel(model)
        private.compile(
            tfdp.optimizers.DPSGD(
                0.1,
                l2_norm_clip=1.0,
                noise_multiplier=1.0,
                expected_batch_size=8,
                **options,
            ),
            "mse",
        )
        return private

    secret = private()
    with pytest.warns(match="reproducible"):
        known = private(noise_seed=1)
    for train, is_known in (
        (secret.train_on_batch, False),
        (known.train_on_batch, True),
        (
            functools.partial(tfdp.clipped_gradients, model, "mse", l2_norm_clip=1),
            False,
        ),
    ):
        train(x=ROWS, y=ROWS[:, :1])
        assert _seeds._key_of(model).is_known == is_known


@pytest.mark.slow
def test_masks_of_a_loop_of_ones_own_are_secret():
    def norms():
        keras.utils.set_random_seed(1)
        clipped_sum = tfdp.clipped_gradients(
            dropout(), "mse", ROWS, ROWS[:, :1], l2_norm_clip=1.0
        )
        return clipped_sum.norms.numpy()

    assert np.any(norms() != norms())


@pytest.mark.slow
def test_replicas_have_masks_of_their_own(tmp_path):
    found = run_mirrored(tmp_path, "masks")
    first, second = found["masks"]
    assert first != second
