"""Rules of convolutions, where inputs have lengths that nobody knows beforehand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.engine_checks import clipped, ghost_like
from tests.reference import clipped_sum
from tfdp.checks.engine import choose
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.losses.objective import Objective

ROWS = 4
SERIES = {
    "same": [layers.Conv1D(3, 3, padding="same", activation="relu"), layers.GRU(2)],
    "causal": [layers.Conv1D(3, 2, padding="causal"), layers.GRU(2)],
    "strided": [layers.Conv1D(3, 3, strides=2), layers.LSTM(2)],
    "pooled": [layers.MaxPooling1D(2), layers.SimpleRNN(2)],
    "averaged": [layers.AveragePooling1D(2, padding="same"), layers.GRU(2)],
    "two": [
        layers.Conv1D(3, 3, activation="tanh"),
        layers.Conv1D(2, 2),
        layers.GlobalMaxPooling1D(),
    ],
    "pointwise": [layers.Conv1D(3, 1, strides=2), layers.GRU(2)],
    "groups": [layers.Conv1D(4, 3, groups=2), layers.GRU(2)],
    "separable": [layers.SeparableConv1D(3, 3), layers.GRU(2)],
    "transposed": [layers.Conv1DTranspose(2, 3, strides=2), layers.GRU(2)],
    "lora": [layers.Conv1D(3, 3), layers.GRU(2)],
}
IMAGES = {
    "images": [
        layers.Conv2D(3, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.DepthwiseConv2D(2, padding="same"),
        layers.GlobalAveragePooling2D(),
    ],
}
QUICK = {"same", "images"}
CASES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in (*SERIES, *IMAGES)
]


@pytest.mark.parametrize("name", CASES)
def test_spaces_of_open_lengths_equal_single_rows(name, rng):
    lengths = (9, 8) if name in IMAGES else (9,)
    keras.utils.set_random_seed(1)
    stack = IMAGES.get(name) or SERIES[name]
    stack = [type(each).from_config(each.get_config()) for each in stack]
    model = keras.Sequential([
        keras.Input((*(None for _ in lengths), 2)),
        *stack,
        layers.Dense(1),
    ])
    if name == "lora":
        stack[0].enable_lora(2)
        factor = stack[0].lora_kernel_b
        factor.assign(rng.normal(size=factor.shape))
    x = rng.normal(size=(ROWS, *lengths, 2)).astype("float32")
    x[1] *= 30
    y = rng.normal(size=(ROWS, 1)).astype("float32")
    objective = Objective.of(model, "mse")
    specs = (
        tf.TensorSpec([None, *(None for _ in lengths), 2]),
        tf.TensorSpec([None, 1]),
        None,
    )
    engine = choose("auto", objective, specs)
    assert isinstance(engine, BookkeepingEngine)

    gradients = []
    for row in range(ROWS):
        with tf.GradientTape() as tape:
            error = model(x[row : row + 1], training=True) - y[row : row + 1]
            loss = tf.reduce_mean(tf.square(error))
        values = [each.value for each in model.trainable_variables]
        gradients.append([np.asarray(each) for each in tape.gradient(loss, values)])
    gradients = [np.stack(each) for each in zip(*gradients, strict=True)]
    clip = 0.9 * float(np.median(clipped_sum(gradients, 1.0)[1]))
    expected, norms = clipped_sum(gradients, clip)

    for each in (engine, ghost_like(engine)):
        sums, found = clipped(each, objective, x, y, clip, like=specs)
        np.testing.assert_allclose(found, norms, rtol=2e-4)
        for total, wanted in zip(sums, expected, strict=True):
            np.testing.assert_allclose(total, wanted, rtol=0, atol=2e-4 * clip * ROWS)
