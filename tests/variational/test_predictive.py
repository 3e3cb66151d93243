"""What a posterior predicts, against models of single draws."""

import keras
import numpy as np
import pytest
from scipy import special, stats

import tfdp
from tfdp.variational import (
    VariationalDense,
    posterior_samples,
    predictive_intervals,
    predictive_mean,
    predictive_samples,
)


@pytest.mark.parametrize("wrap", [lambda model: model, tfdp.DPModel])
def test_predictions_are_those_of_single_models(model, wrap, rng):
    x = rng.normal(size=(5, 3)).astype("float32")
    before = model.get_weights()
    options = {"draws": 20, "activation": keras.activations.sigmoid, "seed": 3}
    samples = posterior_samples(model, 20, seed=3)
    expected = [
        special.expit(
            np.tanh(x @ samples["one/kernel"][n] + samples["one/bias"][n])
            @ samples["two/kernel"][n]
        )
        for n in range(20)
    ]
    model = wrap(model)
    found = predictive_samples(model, x, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    mean = predictive_mean(model, x, **options)
    np.testing.assert_allclose(mean, np.mean(expected, 0), rtol=1e-5)
    ends = predictive_intervals(model, x, 0.9, **options)
    quantiles = np.quantile(expected, (0.05, 0.95), axis=0)
    np.testing.assert_allclose(ends, quantiles, rtol=1e-5)
    for left, right in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_of_a_linear_model_are_those_of_its_gaussian(level, rng):
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(1, number_of_examples=10, initial_scale=0.4),
    ])
    x = rng.normal(size=(4, 3)).astype("float32")
    mean, variance = model.layers[0].moments(x)
    found = predictive_intervals(model, x, level, draws=20_000, seed=1)
    expected = stats.norm.interval(level, mean, np.sqrt(variance))
    np.testing.assert_allclose(found, expected, atol=0.05)


@pytest.mark.parametrize("of", [predictive_mean, predictive_samples])
@pytest.mark.parametrize("draws", [0, -1, 1.5, np.nan])
def test_numbers_of_draws_out_of_range_are_refused(model, of, draws):
    with pytest.raises(ValueError, match="`draws` must be"):
        of(model, np.zeros((1, 3)), draws=draws)


@pytest.mark.parametrize("level", [0, 1, -0.5, np.nan])
def test_levels_out_of_range_are_refused(model, level):
    with pytest.raises(ValueError, match="`level` must lie"):
        predictive_intervals(model, np.zeros((1, 3)), level)


def test_too_few_draws_for_a_level_are_refused(model):
    with pytest.raises(ValueError, match="Use `draws=40` or more"):
        predictive_intervals(model, np.zeros((1, 3)), 0.95, draws=39)


def test_models_without_a_posterior_are_refused():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="must have a variational layer"):
        predictive_samples(model, np.zeros((1, 2)))
