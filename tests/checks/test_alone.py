"""Losses that are asked for one row see no other, and hand nothing on."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tfdp.engines.apart import ApartEngine
from tfdp.engines.vectorized import VectorizedEngine
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError

pytestmark = pytest.mark.keras_private

D = 3


def test_a_compute_loss_that_reads_the_batch_is_refused():
    """Rows that `call` leaves behind are those of the whole batch."""

    class Peeking(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)
            self.box = {}

        def call(self, x):
            self.box["x"] = x
            return self.dense(x)

        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            return ops.mean(y_pred) * ops.mean(self.box["x"])

    private = tfdp.DPModel(Peeking())
    private.compile(tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0))
    with pytest.raises(UnsupportedLossError, match="as a whole"):
        private.fit(np.ones((8, D)), np.ones((8, 1)), batch_size=4, verbose=0)


class RowAfterRow(keras.Model):
    """A loss that no sum is, so each row is asked for by itself, and what it hands on."""

    def __init__(self, adds):
        super().__init__()
        self.dense, self.adds = layers.Dense(1), adds
        self.seen = keras.metrics.Mean(name="seen")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.generator = tf.random.Generator.from_seed(1)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = ops.sqrt(ops.mean(ops.square(y - y_pred)))
        return loss + ops.mean(y_pred) * ops.cast(self.adds(self, loss), loss.dtype)


def mean_up_to_now(model, loss):
    model.seen.update_state(loss)
    return model.seen.result()


def calls_up_to_now(model, _):
    model.calls.assign_add(1.0)
    return model.calls


FROM_ROW_TO_ROW = {
    "metric": mean_up_to_now,
    "counter": calls_up_to_now,
    "generator": lambda model, _: model.generator.normal(()),
    "seed": lambda model, _: model.seeds.next()[1] % 2,
}


@pytest.mark.parametrize("of", ["compile", "tracker"])
def test_losses_read_no_metric_of_the_training(of):
    """One row would have a part in the gradients of all that come after it."""
    error = keras.metrics.MeanAbsoluteError()

    def loss(y, p):
        read = error if of == "compile" else private.metrics[0]
        return ops.mean(ops.square(y - p), -1) * read.result()

    private = tfdp.DPModel(keras.Sequential([keras.Input((D,)), layers.Dense(1)]))
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        loss,
        metrics=[error],
    )
    with pytest.raises(UnsupportedLossError, match="must read no metric"):
        private.fit(np.ones((8, D)), np.ones((8, 1)), batch_size=4, verbose=0)


def fit_row_after_row(name, engine):
    private = tfdp.DPModel(RowAfterRow(FROM_ROW_TO_ROW[name]), engine=engine)
    private.compile(tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0))
    private.fit(np.ones((8, D)), np.ones((8, 1)), batch_size=4, verbose=0)
    return private._checked.engine


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("counter", "ghost"),
        *((name, "auto") for name in ("metric", "generator", "seed")),
        *(
            pytest.param(name, engine, marks=pytest.mark.slow)
            for name in ("metric", "generator", "seed")
            for engine in ("vectorized", "ghost")
        ),
    ],
)
def test_losses_hand_nothing_from_row_to_row(name, engine):
    said = {"metric": "reads a metric", "counter": "leaves to the next row"}
    refused = UnsupportedLayerError, UnsupportedLossError
    with pytest.raises(refused, match=said.get(name, "seed|Rng")):
        fit_row_after_row(name, engine)


@pytest.mark.parametrize(
    ("engine", "chosen"), [("auto", ApartEngine()), ("vectorized", VectorizedEngine())]
)
def test_calls_may_be_counted_where_rows_run_at_once(engine, chosen):
    assert fit_row_after_row("counter", engine) == chosen
