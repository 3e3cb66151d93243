"""Outputs under weights drawn from the posterior."""

import keras
import numpy as np
import pytest
from scipy import special

import tfdp
from tfdp.variational import (
    posterior_samples,
    predictive_intervals,
    predictive_mean,
    predictive_samples,
)


@pytest.fixture
def x(rng):
    return rng.normal(size=(5, 3)).astype("float32")


def of_single_models(x, samples):
    return [
        np.tanh(x @ kernel + bias) @ last
        for kernel, bias, last in zip(
            *(samples[name] for name in ("one/kernel", "one/bias", "two/kernel")),
            strict=True,
        )
    ]


@pytest.mark.parametrize("wrap", [lambda model: model, tfdp.DPModel])
def test_samples_are_those_of_single_models(model, x, wrap):
    before = model.get_weights()
    found = predictive_samples(wrap(model), x, draws=20, seed=3)
    expected = of_single_models(x, posterior_samples(model, 20, seed=3))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    for left, right in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_mean_is_that_of_single_models(model, x):
    found = predictive_mean(
        model, x, draws=20, activation=keras.activations.sigmoid, seed=3
    )
    outputs = of_single_models(x, posterior_samples(model, 20, seed=3))
    np.testing.assert_allclose(found, special.expit(outputs).mean(0), rtol=1e-5)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_hold_their_share_of_new_draws(model, x, level):
    low, high = predictive_intervals(model, x, level, draws=2000, seed=1)
    new = np.array(of_single_models(x, posterior_samples(model, 20_000, seed=2)))
    inside = (low <= new) & (new <= high)
    # Quantiles of 2,000 draws: five standard deviations of the share.
    np.testing.assert_allclose(inside.mean(0), level, atol=0.06)


def test_samples_without_a_seed_differ(model, x):
    first, second = (predictive_samples(model, x, draws=1) for _ in range(2))
    assert np.all(first != second)


@pytest.mark.parametrize("level", [0, 1, 1.5, np.nan])
def test_a_level_is_a_probability(model, x, level):
    with pytest.raises(ValueError, match="level"):
        predictive_intervals(model, x, level)


@pytest.mark.parametrize("draws", [0, -1])
@pytest.mark.parametrize("predict", [predictive_mean, predictive_samples])
def test_there_are_draws(model, x, predict, draws):
    with pytest.raises(ValueError, match="draws"):
        predict(model, x, draws=draws)


def test_a_model_without_posterior_is_refused(x):
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="variational layer"):
        predictive_samples(plain, x)
