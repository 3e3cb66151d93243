"""Weights that vary together, against Gaussians with their whole covariance matrix."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.losses.regularizers import gradient_of
from tfdp.variational import (
    AveragedPosterior,
    VariationalConv2D,
    VariationalDense,
    credible_intervals,
    posterior,
    posterior_samples,
    predictive_intervals,
    predictive_mean,
    predictive_samples,
)

N, PRIOR = 40, 0.7
OPTIONS = {"number_of_examples": N, "prior_scale": PRIOR, "draws": "shared"}


def dense_layer(rng, rank=2, use_bias=True, dtype="float64"):
    """Of 3 inputs and 2 outputs: at most 8 weights."""
    layer = VariationalDense(
        2, rank=rank, use_bias=use_bias, dtype=dtype, name="one", **OPTIONS
    )
    return moved(layer, rng, (None, 3))


def convolution(rng):
    options = OPTIONS | {"dtype": "float64"}
    layer = VariationalConv2D(2, (2, 1), rank=3, name="one", **options)
    return moved(layer, rng, (None, 4, 4, 2))


def moved(layer, rng, shape):
    layer.build(shape)
    for variable in layer.trainable_variables:
        variable.assign(variable.numpy() + rng.normal(size=variable.shape, scale=0.7))
    return layer


def flat(by_name):
    """Lay weights of shape ``(V, ...)`` out in the order of `covariance`."""
    parts = [np.reshape(by_name["kernel"], (len(by_name["kernel"]), -1))]
    if "bias" in by_name:
        parts.append(np.asarray(by_name["bias"]))
    return np.concatenate(parts, 1)


def moments(layer):
    """Return the mean vector and the whole covariance matrix of all weights."""
    means = {name: of.mean.numpy()[None] for name, of in layer.posteriors.items()}
    diagonal, u = map(np.asarray, layer.covariance())
    u = u.reshape(diagonal.size, -1)
    return flat(means)[0], np.diag(diagonal.ravel()) + u @ u.T


LAYERS = {
    "dense": dense_layer,
    "rank 1": lambda rng: dense_layer(rng, rank=1),
    "without bias": lambda rng: dense_layer(rng, use_bias=False),
    "more than weights": lambda rng: dense_layer(rng, rank=11),
    "mean field": lambda rng: dense_layer(rng, rank=0),
    "convolution": convolution,
}
of_all_layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


@of_all_layers
def test_the_divergence_is_that_of_the_whole_gaussian(make, rng):
    layer = make(rng)
    mean, covariance = moments(layer)
    expected = (
        (np.trace(covariance) + mean @ mean) / PRIOR**2
        - len(mean)
        + len(mean) * np.log(PRIOR**2)
        - np.linalg.slogdet(covariance)[1]
    ) / 2
    found = N * sum(float(v.regularizer(v)) for v in layer.trainable_variables)
    np.testing.assert_allclose(found, expected, rtol=1e-7)


@of_all_layers
def test_what_is_drawn_has_the_covariance(make, rng):
    """Noise is linear in what it is made of: one number at a time tells all of it."""
    layer = make(rng)
    size = len(moments(layer)[0])
    unit, begin = np.eye(size + layer.rank), [0]

    def normal(shape):
        numbers = unit[:, begin[0] : begin[0] + np.prod(shape[1:])]
        begin[0] += np.prod(shape[1:])
        return tf.constant(numbers.reshape(shape))

    noise = layer.noise_of(normal, len(unit))
    deviations = flat({
        name: of.deviations(noise[name]) for name, of in layer.posteriors.items()
    })
    _, covariance = moments(layer)
    np.testing.assert_allclose(deviations.T @ deviations, covariance, atol=1e-12)
    scales = flat({name: of.scale[None] for name, of in layer.posteriors.items()})[0]
    np.testing.assert_allclose(np.diag(covariance), scales**2)


@of_all_layers
def test_outputs_have_the_moments_of_the_whole_gaussian(make, rng):
    layer = make(rng)
    shape = (2, 4, 4, 2) if isinstance(layer, VariationalConv2D) else (5, 3)
    rows = np.asarray(layer.seen(rng.normal(size=shape)))
    rows = rows.reshape(-1, rows.shape[-1])
    mean, covariance = moments(layer)
    found = layer.moments(rows)
    if layer.use_bias:
        rows = np.concatenate([rows, np.ones((len(rows), 1))], 1)
    weights = mean.reshape(rows.shape[1], 2)
    np.testing.assert_allclose(found[0], rows @ weights)
    for output in range(2):
        of_output = covariance[output::2, output::2]
        variance = np.einsum("ni,ij,nj->n", rows, of_output, rows)
        np.testing.assert_allclose(found[1][:, output], variance)


def test_a_divergence_of_large_factors_has_a_finite_slope(rng):
    layer = dense_layer(rng, dtype="float32")
    layer.factors.assign(1e6 * np.ones(layer.factors.shape))
    slope = gradient_of(layer.factors.regularizer, layer.factors)
    assert np.all(np.isfinite(slope))
    layer.factors.assign(np.zeros(layer.factors.shape))
    np.testing.assert_array_equal(layer.factors.regularizer(layer.factors), 0)


@pytest.fixture
def model(rng):
    layer = VariationalDense(2, rank=2, name="one", **OPTIONS)
    return keras.Sequential([keras.Input((3,)), moved(layer, rng, (None, 3))])


@pytest.mark.slow
def test_samples_and_predictions_are_those_of_the_gaussian(model, rng):
    samples = posterior_samples(model, 40_000, seed=1)
    _, covariance = moments(model.layers[0])
    found = flat({name.removeprefix("one/"): each for name, each in samples.items()})
    np.testing.assert_allclose(np.cov(found, rowvar=False), covariance, atol=0.03)
    assert found.dtype == "float32"
    for name, (low, high) in credible_intervals(model, 0.9).items():
        inside = np.mean((low <= samples[name]) & (samples[name] <= high), 0)
        np.testing.assert_allclose(inside, 0.9, atol=0.01)
    x = rng.normal(size=(4, 3)).astype("float32")
    outputs = predictive_samples(model, x, draws=50, seed=2)
    drawn = posterior_samples(model, 50, seed=2)
    expected = x @ drawn["one/kernel"] + drawn["one/bias"][:, None]
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        predictive_mean(model, x, draws=50, seed=2), expected.mean(0), atol=1e-5
    )
    low, high = predictive_intervals(model, x, 0.9, draws=50, seed=2)
    np.testing.assert_allclose(low, np.quantile(expected, 0.05, 0), atol=1e-5)
    np.testing.assert_allclose(high, np.quantile(expected, 0.95, 0), atol=1e-5)


def private(model, **options):
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPAdam(0.05, l2_norm_clip=1.0, noise_multiplier=1.0),
        "mse",
        **options,
    )
    return private


@pytest.mark.slow
def test_a_model_trains_privately_and_is_loaded(model, tmp_path, rng):
    x = rng.normal(size=(N, 3)).astype("float32")
    before = model.layers[0].factors.numpy()
    trained = private(model)
    trained.fit(
        *(x, x[:, :2]),
        batch_size=10,
        verbose=0,
        callbacks=[AveragedPosterior()],
    )
    assert np.all(model.layers[0].factors.numpy() != before)
    assert "variational_product" in str(trained.explain())
    trained.save(tmp_path / "private.keras")
    again = keras.saving.load_model(tmp_path / "private.keras")
    assert again.model.layers[0].get_config() == model.layers[0].get_config()
    for left, right in zip(
        moments(again.model.layers[0]), moments(model.layers[0]), strict=True
    ):
        np.testing.assert_array_equal(left, right)
    samples = (posterior_samples(each, 3, seed=1) for each in (again, trained))
    for left, right in zip(*map(dict.values, samples), strict=True):
        np.testing.assert_array_equal(left, right)
    assert list(posterior(again)) == ["one/kernel", "one/bias"]


@pytest.mark.slow
def test_the_posterior_of_a_linear_model_is_the_exact_one(rng):
    """With its correlation, and so with its standard deviations."""
    x = rng.normal(size=(200, 2)) @ [[1, 0.8], [0, 0.6]]
    y = x @ [[1.0], [-2.0]] + rng.normal(size=(200, 1))
    model = keras.Sequential([
        keras.Input((2,)),
        VariationalDense(
            1,
            number_of_examples=200,
            use_bias=False,
            prior_scale=0.1,
            draws="per_example",
            rank=1,
        ),
    ])
    trained = tfdp.DPModel(model)
    decay = keras.optimizers.schedules.PolynomialDecay(0.05, 2000, 1e-4)
    trained.compile(
        tfdp.optimizers.DPAdam(decay, l2_norm_clip=100.0, noise_multiplier=1e-3),
        loss=lambda y, outputs: keras.ops.sum(keras.ops.square(y - outputs), -1) / 2,
        steps_per_execution=50,
    )
    trained.fit(x, y, batch_size=200, steps_per_epoch=2000, verbose=0)
    expected = np.linalg.inv(x.T @ x + np.eye(2) / 0.1**2)
    mean, covariance = moments(model.layers[0])
    np.testing.assert_allclose(mean, (expected @ x.T @ y)[:, 0], atol=0.01)
    # The last steps leave some scatter; without correlation there is no off-diagonal.
    np.testing.assert_allclose(covariance, expected, rtol=0.25)
    # What mean field is too narrow by.
    alone = 1 / np.sqrt(np.diag(np.linalg.inv(expected)))
    assert np.all(
        posterior(model)["variational_dense/kernel"].scale[:, 0] > 1.1 * alone
    )


@pytest.mark.parametrize("draws", ["local", "flipout"])
def test_draws_of_something_else_than_weights_are_refused(draws):
    with pytest.raises(ValueError, match=r"vary together.*Use `draws='shared'`"):
        VariationalDense(2, number_of_examples=N, rank=2, draws=draws)


@pytest.mark.parametrize(
    ("rank", "error"),
    [
        (-1, ValueError),
        (1.5, ValueError),
        (np.nan, ValueError),
        ("2", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_ranks_out_of_range_are_refused(rank, error):
    with pytest.raises(error, match="`rank` must be"):
        VariationalDense(2, rank=rank, **OPTIONS)
