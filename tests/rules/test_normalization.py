"""Gradients of normalized rows, and gradients of these."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.engine_checks import OUTLIER, check, runner
from tests.problems import PROBLEMS, Problem
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.rules.normalization import _mean_and_rate, _normalized, _scaled


@pytest.mark.parametrize("name", ["group_norm_axes", "layer_norm_axes", "rms_norm"])
def test_rows_have_the_gradients_of_single_ones(name):
    check(PROBLEMS[name], runner(PROBLEMS[name], [BookkeepingEngine()]), OUTLIER)


@pytest.mark.parametrize("layer", [layers.LayerNormalization, layers.RMSNormalization])
def test_whole_numbers_stay_whole_as_in_keras(layer):
    problem = Problem(
        "whole",
        lambda: keras.Sequential([
            keras.Input((4,), dtype="int32"),
            layer(),
            layers.Lambda(lambda x: keras.ops.cast(x, keras.config.floatx())),
            layers.Dense(1),
        ]),
        lambda rng: (rng.integers(-9, 9, size=4).astype("int32"), rng.normal(size=1)),
        "mse",
    )
    check(problem, runner(problem, [BookkeepingEngine()]), (0, 1, 3))


def test_a_scale_of_one_number_is_for_all():
    def model():
        layer = layers.RMSNormalization()
        layer.build((None, 1))
        return keras.Sequential([keras.Input((4,)), layers.Dense(4), layer])

    problem = Problem(
        "one_scale",
        model,
        lambda rng: (rng.normal(size=4), rng.normal(size=4)),
        "mse",
    )
    check(problem, runner(problem, [BookkeepingEngine()]), (0, 1, 3))


def test_rows_of_one_large_number_are_zero():
    x = tf.fill([2, 7], 1e6 / 3)
    normalized = _normalized(x, [1], 1e-3, is_centered=True)
    np.testing.assert_array_equal(normalized, layers.LayerNormalization()(x))


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
