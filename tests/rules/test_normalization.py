"""Gradients of normalized rows, and gradients of these."""

import numpy as np
import pytest
import tensorflow as tf

from tests.engine_checks import OUTLIER, check, runner
from tests.problems import PROBLEMS
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.rules.normalization import _mean_and_rate, _scaled


@pytest.mark.parametrize("name", ["group_norm_axes", "layer_norm_axes", "rms_norm"])
def test_rows_have_the_gradients_of_single_ones(name):
    check(PROBLEMS[name], runner(PROBLEMS[name], [BookkeepingEngine()]), OUTLIER)


def _by_definition(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    mean = tf.reduce_mean(x, [1, 2, 4], keepdims=True)
    variance = tf.reduce_mean((x - mean) ** 2, [1, 2, 4], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3) * scale


def _by_rates(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    mean, rate = _mean_and_rate(x, [1, 2, 4], 1e-3)
    return _scaled(x, rate * scale, -mean * rate * scale)


@pytest.mark.parametrize("is_graph", [True, False])
def test_gradients_of_gradients_are_those_of_the_definition(is_graph, rng):
    """`tf.nn.moments` leaves out that the mean moves, of which these are made."""
    x, weights = (tf.constant(rng.normal(size=(2, 3, 3, 2, 2))) for _ in range(2))
    scale = tf.constant(rng.normal(size=(1, 1, 1, 2, 2)))

    def twice(normalized):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(weights * normalized(x, scale) ** 2)
            gradient = inner.gradient(loss, x)
            square = tf.reduce_sum(gradient**2)
        return gradient, outer.gradient(square, x)

    found = (tf.function(twice) if is_graph else twice)(_by_rates)
    for mine, expected in zip(found, twice(_by_definition), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-10)
