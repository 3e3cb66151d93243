"""The first blocks of each model train by book-keeping, as a loop over rows would."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.applications import APPLICATIONS, trained_head, trained_whole
from tests.problems import precision
from tests.reference import clipped_sum
from tests.zoo.entry import engine_of
from tests.zoo.single_rows import single_rows
from tfdp import _keras

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Training without noise"),
    pytest.mark.filterwarnings("ignore:`batch_size` is as large"),
]

ROWS, OUTLIER = 3, 1


def check(model, x, y):
    """Take one step without noise, of length 1, and compare with single rows."""
    for layer in _keras.flatten_layers(model):
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    weights = np.ones(ROWS)
    weights[OUTLIER] = 1000
    gradients = single_rows(model, "mse", x, y, weights, rows=ROWS)
    _, norms = clipped_sum(gradients, 1.0)
    clip = 0.9 * float(np.median(norms))
    assert norms[OUTLIER] > 5 * clip
    expected, _ = clipped_sum(gradients, clip)
    before = [variable.numpy() for variable in model.trainable_variables]
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPSGD(1.0, l2_norm_clip=clip, noise_multiplier=0.0), "mse"
    )
    rows = tf.data.Dataset.from_tensors((x, y, weights))
    private.fit(
        tfdp.data.declare(
            rows, number_of_examples=ROWS, expected_batch_size=ROWS, sampling="shuffle"
        ),
        verbose=0,
    )
    assert engine_of(private) == "bookkeeping"
    for variable, start, total in zip(
        model.trainable_variables, before, expected, strict=True
    ):
        moved = (start - variable.numpy()) * ROWS
        np.testing.assert_allclose(moved, total, rtol=0, atol=1e-8 * clip * ROWS)


# Two kinds of blocks that most of the others are made of.
FEW = {"MobileNetV2", "ResNet50V2"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FEW else pytest.mark.exhaustive)
        for name in APPLICATIONS
    ],
)
def test_whole_and_as_a_frozen_trunk(name):
    application = APPLICATIONS[name]
    with precision("float64"):
        trunk = application.trunk(is_whole=False)
        batch = application.batch(ROWS)
        check(trained_whole(trunk), *batch)
        check(trained_head(trunk), *batch)
