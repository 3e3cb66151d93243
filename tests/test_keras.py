"""What is replaced in Keras and TensorFlow for a while, and put back."""

from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf

from tfdp import _keras

pytestmark = pytest.mark.keras_private


def gathered(x):
    # Its gradient makes tiles of a list of numbers.
    return tf.gather(x, tf.constant([[1, 1], [0, 2]]), batch_dims=1)


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (lambda x: tf.reduce_sum(x, 1), ("Tile", "BroadcastTo")),
        (tf.reduce_mean, ("Tile", "BroadcastTo")),
        (lambda x: tf.tile(x, [1, 2]), ("Tile", "Tile")),
        (gathered, (None, None)),
    ],
)
def test_sums_are_spread_by_broadcasting(function, kinds, rng):
    x = rng.normal(size=(2, 3))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.square(function(x))
        return tape.gradient(y, x)

    found = []
    for spreads, kind in zip((False, True), kinds, strict=True):
        traced = tf.function(gradient, autograph=False)
        with _keras.sums_spread_by_broadcasting() if spreads else nullcontext():
            graph = traced.get_concrete_function(tf.TensorSpec(x.shape, x.dtype))
        made = {op.type for op in graph.graph.get_operations()}
        assert kind is None or kind in made
        found.append(graph(tf.constant(x)))
    np.testing.assert_allclose(*found)
