"""Prints the table: engines, and how many weights have which rule.

``python -m tests.applications [names]``. For each model, trained whole and as a frozen
trunk of a new head: the engine, the BatchNormalization that `fix_model` replaced, the
weights that train, the norms of single rows' gradients beside those of a loop, and
seconds of CPU to the end of the first step.
"""

import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.applications import APPLICATIONS, Application, trained_head, trained_whole
from tests.zoo.entry import engine_of
from tfdp import _keras

ROWS = 2


def _norm(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """Return the norm of one row's gradient."""
    with tf.GradientTape() as tape:
        loss = keras.losses.MeanSquaredError()(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    return float(tf.linalg.global_norm(gradients))


def _without_chance(model: keras.Model) -> None:
    for layer in _keras.flatten_layers(model):
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0


def _line(application: Application, what: str) -> str:
    trunk = application.trunk()
    model = trained_whole(trunk) if what == "whole" else trained_head(trunk)
    normalized = sum(
        isinstance(layer, keras.layers.GroupNormalization)
        for layer in _keras.flatten_layers(model)
    )
    start = time.process_time()
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    x, y = application.batch(ROWS)
    private.fit(x, y, batch_size=ROWS, verbose=0)
    seconds = time.process_time() - start
    _without_chance(model)
    found = tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1.0).norms
    alone = [_norm(model, x[row : row + 1], y[row : row + 1]) for row in range(ROWS)]
    away = np.max(np.abs(found / np.array(alone) - 1))
    weights = sum(int(np.prod(each.shape)) for each in model.trainable_variables)
    return (
        f"{application.name:18} {what:6} {engine_of(private):12}{normalized:5}"
        f"{weights:12,}{away:9.0e}{seconds:9.1f}"
    )


def main(names: list[str]) -> None:
    """Print two lines for each model."""
    print(
        f"{'model':18} {'':6} {'engine':12}{'fixed':>5}{'weights':>12}{'away':>9}"
        f"{'first, s':>9}"
    )
    for name in names or APPLICATIONS:
        for what in ("whole", "head"):
            keras.utils.clear_session(free_memory=False)
            print(_line(APPLICATIONS[name], what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
