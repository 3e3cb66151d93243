"""A small model, rows for it, and what trains it."""

import keras
import numpy as np
import pytest
from keras import layers

import tfdp

ROWS = 12
CLIP = 0.5
RATE = 0.25


def data(rows=ROWS, outlier=True):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 3)).astype("float32")
    if outlier:
        x[1] *= 1e6
    return x, rng.integers(0, 2, rows).astype("int32")


def network():
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        keras.Input((3,)),
        layers.Dense(4, activation="tanh"),
        layers.Dense(2),
    ])


def logits_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer(noise_multiplier=1.0, **options):
    return tfdp.optimizers.DPSGD(
        RATE, l2_norm_clip=CLIP, noise_multiplier=noise_multiplier, **options
    )


def noiseless(**options):
    with pytest.warns(UserWarning, match="not private"):
        return optimizer(0.0, **options)


def private(model=None, opt=None, loss=None, *, wrap=None, **compile_options):
    model = tfdp.DPModel(model or network(), **(wrap or {}))
    model.compile(opt or optimizer(), loss or logits_loss(), **compile_options)
    return model
