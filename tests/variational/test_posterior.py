"""What a trained posterior says, and what is exported of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import integrate, special, stats

import tfdp
from tfdp.variational import (
    BayesianLogisticRegression,
    VariationalDense,
    credible_intervals,
    posterior,
    posterior_samples,
)


@pytest.mark.parametrize("wrap", [lambda model: model, tfdp.DPModel])
def test_means_and_scales_by_name(model, wrap):
    found = posterior(wrap(model))
    assert list(found) == ["one/kernel", "one/bias", "two/kernel"]
    layer = model.layers[0]
    np.testing.assert_array_equal(found["one/kernel"].mean, layer.kernel_mean)
    expected = np.log1p(np.exp(layer.kernel_rho.numpy()))
    np.testing.assert_allclose(found["one/kernel"].scale, expected, rtol=1e-6)


def test_samples_have_the_moments_of_the_posterior(model):
    samples = posterior_samples(model, 20_000, seed=1)
    for name, (mean, scale) in posterior(model).items():
        assert samples[name].shape == (20_000, *mean.shape)
        difference = np.abs(samples[name].mean(0) - mean)
        assert np.all(difference < 5 * scale / np.sqrt(20_000))
        np.testing.assert_allclose(samples[name].std(0), scale, rtol=0.04)


def test_samples_without_a_seed_differ(model):
    first, second = (posterior_samples(model, 1)["one/bias"] for _ in range(2))
    assert np.all(first != second)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_hold_their_share(model, level):
    samples = posterior_samples(model, 20_000, seed=1)
    for name, (low, high) in credible_intervals(model, level).items():
        inside = (low <= samples[name]) & (samples[name] <= high)
        np.testing.assert_allclose(inside.mean(0), level, atol=0.02)


@pytest.fixture(params=[{}, {"rank": 2, "draws": "per_example"}], ids=str)
def regression(rng, request):
    model = BayesianLogisticRegression(
        number_of_examples=40, initial_scale=1.5, **request.param
    )
    model.build((None, 3))
    if model.logit.rank:
        model.logit.factors.assign(rng.normal(size=(4, 1, 2)))
    model.logit.kernel_mean.assign(rng.normal(size=(3, 1)))
    return model


def test_regression_predicts_the_mean_probability(regression, rng):
    x = rng.normal(size=(4, 3)).astype("float32")
    mean, variance = regression.logit.moments(x)
    expected = [
        integrate.quad(
            lambda z, m=m, s=s: special.expit(z) * stats.norm.pdf(z, m, s),
            m - 12 * s,
            m + 12 * s,
        )[0]
        for m, s in zip(np.ravel(mean), np.sqrt(np.ravel(variance)), strict=True)
    ]
    found = special.expit(regression(x))
    np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-4)


def test_regression_has_the_variance_of_its_samples(regression, rng):
    x = rng.normal(size=(4, 3)).astype("float32")
    _, variance = regression.logit.moments(x)
    samples = posterior_samples(regression, 40_000, seed=1)
    logits = np.einsum("rd,vdp->vrp", x, samples["logit/kernel"])
    logits += samples["logit/bias"][:, None]
    np.testing.assert_allclose(variance, logits.var(0), rtol=0.05)


def test_regression_draws_in_training(regression, rng):
    x = rng.normal(size=(4, 3)).astype("float32")
    first, second, inference = (regression(x, training=t) for t in (True, True, False))
    assert np.all(np.not_equal(first, second))
    assert np.all(np.not_equal(first, inference))


@pytest.mark.slow
def test_probabilities_of_any_width():
    means, scales = np.meshgrid(
        [-10.0, 0.0, 2.0, 3.0], [0.01, 0.5, 0.99, 1.01, 3.0, 20.0, 50.0]
    )
    layer = BayesianLogisticRegression(number_of_examples=40).logit
    logits = layer.averaged(tf.constant(means), tf.constant(scales**2)).numpy()
    for mean, scale, logit in zip(*map(np.ravel, (means, scales, logits)), strict=True):
        expected, _ = integrate.quad(
            lambda z, m=mean, s=scale: special.expit(z) * stats.norm.pdf(z, m, s),
            mean - 12 * scale,
            mean + 12 * scale,
            points=[0.0] if abs(mean) < 12 * scale else None,
            limit=400,
        )
        np.testing.assert_allclose(special.expit(logit), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_regression_far_from_the_boundary_stays_finite(regression, far):
    x = np.full((1, 3), far, "float32")
    assert np.all(np.isfinite(regression(x)))


@pytest.mark.slow
def test_an_export_has_no_chance_in_it(regression, tmp_path, rng):
    inputs = keras.Input((3,), name="inputs")
    private = tfdp.DPModel(keras.Model(inputs, regression(inputs)))
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    x = rng.normal(size=(7, 3)).astype("float32")
    tfdp.export.export_private_model(private, tmp_path / "1", delta=1e-3)
    served = tf.saved_model.load(tmp_path / "1").signatures["serving_default"]
    first, second = (
        next(iter(served(inputs=tf.constant(x)).values())) for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, regression(x), rtol=1e-5)


def test_layers_of_one_name_are_refused():
    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.one = VariationalDense(1, number_of_examples=10, name="same")
            self.two = VariationalDense(1, number_of_examples=10, name="same")

        def call(self, x):
            return self.two(self.one(x))

    model = Twice()
    model(np.zeros((1, 2)))
    with pytest.raises(ValueError, match="names of their own"):
        posterior(model)


def test_models_without_a_posterior_are_refused():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="must have a variational layer"):
        posterior(model)


@pytest.mark.parametrize("level", [0, 1, -0.5, np.nan])
def test_levels_out_of_range_are_refused(model, level):
    with pytest.raises(ValueError, match="`level` must lie"):
        credible_intervals(model, level)


@pytest.mark.parametrize("number", [0, -1, 1.5, np.nan])
def test_numbers_of_draws_out_of_range_are_refused(model, number):
    with pytest.raises(ValueError, match="`number` must be"):
        posterior_samples(model, number)
