"""The graph of the proof is the graph that runs, where it is what the step would trace."""

import queue

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.reference import clipped_sum
from tfdp.engines import BookkeepingEngine, GhostEngine
from tfdp.engines.traced import TracedPass

pytestmark = pytest.mark.filterwarnings("ignore:Training without noise")

ROWS = 12


def model():
    return keras.Sequential([
        keras.Input((3,)),
        layers.Dense(4, activation="tanh"),
        layers.Dropout(0.5),
        layers.Lambda(noted),
        layers.Dense(2),
    ])


# Of Python's own: what it holds is no reason to prove a model again.
CALLS = queue.SimpleQueue()


def calls():
    """Return the shapes of the calls that were noted since this was asked."""
    return [CALLS.get() for _ in range(CALLS.qsize())]


def noted(x):
    CALLS.put(x.shape)
    return x


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3)).astype("float32")
    x[1] *= 1e4
    return x, rng.normal(size=(ROWS, 2)).astype("float32")


def private(inner, loss="mse", optimizer=None, *, expected_batch_size=None, **options):
    wrapped = tfdp.DPModel(inner, **options)
    wrapped.compile(
        tfdp.optimizers.DPOptimizer(
            optimizer or keras.optimizers.SGD(1.0),
            l2_norm_clip=0.5,
            noise_multiplier=0.0,
            expected_batch_size=expected_batch_size,
        ),
        loss,
    )
    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "ghost"},
        {"physical_batch_size": 5, "optimizer": keras.optimizers.Adam()},
    ],
    ids=["whole", "ghost", "passes"],
)
def test_a_model_is_traced_once(options):
    wrapped = private(model(), **options)
    calls()
    wrapped.fit(*data(), batch_size=ROWS, epochs=2, verbose=0)
    assert len(calls()) == 1


SCHEDULE = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.2])


@pytest.mark.parametrize("radius", [0.1, SCHEDULE], ids=["number", "schedule"])
def test_uphill_too_there_and_here(radius):
    wrapped = private(model(), tfdp.losses.BAM("mse", radius=radius))
    calls()
    wrapped.fit(*data(), batch_size=ROWS, epochs=2, verbose=0)
    assert len(calls()) == 2


def test_derivatives_are_traced_once_for_their_number_of_rows():
    loss = tfdp.losses.BAM("mse", ascent="exact")
    wrapped = private(model(), loss, expected_batch_size=ROWS)
    x, y = data()

    def traced(rows):
        calls()
        wrapped.train_on_batch(x[:rows], y[:rows])
        return [shape[0] for shape in calls()]

    assert [rows for rows in traced(ROWS) if rows] == [ROWS, ROWS]
    assert wrapped._checked.traced.rows == ROWS
    # TensorFlow takes a second number for any: that pass was kept as well.
    assert traced(4) == []
    assert traced(ROWS) == traced(4) == []


class Counting(layers.Layer):
    """Asks how many rows there are, which is one where each is taken by itself."""

    def call(self, x):
        return x / keras.ops.cast(keras.ops.shape(x)[0], x.dtype)


@pytest.mark.slow
def test_units_that_are_taken_apart_run_in_the_graph_that_was_tried():
    """Variables of the optimizer are made before: a graph that makes them is another."""
    inner = keras.Sequential([
        keras.Input((3,)),
        Counting(),
        layers.Lambda(noted),
        layers.Dense(2),
    ])
    wrapped = private(inner, optimizer=keras.optimizers.Adam())
    calls()
    wrapped.fit(*data(), batch_size=ROWS, epochs=2, verbose=0)
    taken_apart = sum(shape[0] == 1 for shape in calls())
    # Two look at a single row to tell the rules of the layers, and the third is the map.
    assert (wrapped._checked.engine.name, taken_apart) == ("apart", 3)
    assert wrapped.optimizer.iterations.numpy() == 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"physical_batch_size": 5}])
def test_losses_that_change_are_traced_anew(options):
    """Each of them is the one that is clipped, also after `compile`."""
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    x, y = data()
    for loss in ("mse", "mae"):
        wrapped = private(inner, loss, **options)
        rows = []
        for row in range(ROWS):
            with tf.GradientTape() as tape:
                y_pred = inner(x[row : row + 1])
                value = keras.losses.get(loss)(y[row : row + 1], y_pred)
            rows.append(tape.gradient(value, inner.trainable_variables))
        stacked = [np.stack(of_variable) for of_variable in zip(*rows, strict=True)]
        expected, _ = clipped_sum(stacked, 0.5)
        before = inner.get_weights()
        wrapped.fit(x, y, batch_size=ROWS, verbose=0)
        moved = [a - b for a, b in zip(before, inner.get_weights(), strict=True)]
        for each, total in zip(moved, expected, strict=True):
            np.testing.assert_allclose(each * ROWS, total, atol=1e-4)


def test_a_pass_fits_what_it_was_traced_for():
    known, other = object(), object()
    traced = TracedPass(BookkeepingEngine(), known, None, None)
    assert traced.fits(BookkeepingEngine(), known, ROWS, 1)
    assert not traced.fits(BookkeepingEngine(), other, ROWS, 1)
    assert not traced.fits(GhostEngine(), known, ROWS, 1)
    assert not traced.fits(BookkeepingEngine(), known, ROWS, 2)
    assert not traced.fits(BookkeepingEngine(), known, ROWS, tf.constant(1))
    for rows in (ROWS, ROWS + 1):
        of_some = TracedPass(BookkeepingEngine(), known, rows, None)
        assert of_some.fits(BookkeepingEngine(), known, ROWS, 1) == (rows == ROWS)


@pytest.mark.slow
def test_masks_differ_between_steps():
    """What is drawn in the pass goes on from step to step."""
    inner = keras.Sequential([
        keras.Input((200,)),
        layers.Dropout(0.5, seed=1),
        layers.Dense(1, use_bias=False, kernel_initializer="ones", trainable=True),
    ])
    wrapped = private(inner)
    moves = []
    for _ in range(2):
        before = inner.get_weights()[0]
        wrapped.fit(np.ones((1, 200)), np.zeros((1, 1)), batch_size=1, verbose=0)
        moves.append(before != inner.get_weights()[0])
    assert (moves[0] != moves[1]).mean() > 0.3
