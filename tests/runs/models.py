"""Models that have weights in common."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdp

ROWS = 20
DELTA = 1e-3
# So much noise that epsilon takes little time.
NOISE = 8.0


def data():
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    return x, x[:, :1]


def part(name, units=1):
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(units, name=f"{name}_dense")], name=name
    )


def both_of(one, other):
    """A model of two towers."""
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Add()([one(inputs), other(inputs)]))


def optimizer(**options):
    options = {"l2_norm_clip": 1.0, "noise_multiplier": NOISE, **options}
    return tfdp.optimizers.DPSGD(0.1, expected_batch_size=5, **options)


def private(model, **options):
    wrapped = tfdp.DPModel(model)
    wrapped.compile(optimizer(**options), "mse", run_eagerly=True)
    return wrapped


def fit(model, epochs=1, **options):
    """Take four steps an epoch."""
    x, y = data()
    model.fit(x, y, batch_size=5, epochs=epochs, verbose=0, **options)


def loop(model, opt, *, traced):
    """A step of a loop of one's own."""
    x, y = map(tf.constant, data())

    def step():
        clipped = tfdp.clipped_gradients(
            model, "mse", x[:5], y[:5], l2_norm_clip=opt.l2_norm_clip
        )
        opt.apply_clipped_sum(clipped, model.trainable_variables)

    return tf.function(step) if traced else step


def ledger_of(steps):
    segments = (tfdp.accounting.PoissonSteps(steps, NOISE, ROWS, 5),)
    return tfdp.accounting.Ledger(segments)
