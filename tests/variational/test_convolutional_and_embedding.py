"""Convolutions and embeddings with a posterior: gradients, predictions, saving."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.reference import assert_all_close, clipped_sum
from tfdp._views_per_example import number_of_views, views_per_example
from tfdp.clipping import clip_as_tensor
from tfdp.engines import BookkeepingEngine
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective
from tfdp.variational import (
    VariationalConv1D,
    VariationalConv2D,
    VariationalEmbedding,
    posterior,
    posterior_samples,
    predictive_intervals,
)
from tfdp.variational.base import VariationalLayer

UNITS = 4
OPTIONS = {"number_of_examples": 40, "dtype": "float64"}


class Rows:
    """Which rows of all the model is run on."""

    def __init__(self):
        self.now = slice(None)


@pytest.fixture
def rows(monkeypatch):
    rows = Rows()

    def noise(layer, inputs):
        found = {}
        for name, weights in layer.posteriors.items():
            size = (24, *weights.mean.shape)
            numbers = np.random.default_rng(len(name)).normal(size=size)
            if layer.shares_draws:
                numbers = numbers[: number_of_views()]
            else:
                numbers = numbers[rows.now][: inputs.shape[0]]
            found[name] = tf.constant(numbers)
        return found

    def signs(layer, shape):
        found = np.random.default_rng(len(layer.name)).choice([-1, 1], (24, *shape[1:]))
        return tf.constant(found[rows.now][: shape[0]], "float64")

    monkeypatch.setattr(VariationalLayer, "noise", noise)
    monkeypatch.setattr(VariationalLayer, "_signs", signs)
    return rows


def square(y, outputs):
    return tf.reduce_sum(tf.square(y - outputs), -1)


def convolution(draws, **options):
    options = OPTIONS | {"draws": draws} | options
    return keras.Sequential([
        keras.Input((5, 6, 2), dtype="float64"),
        VariationalConv2D(
            3, (3, 2), padding="same", strides=(2, 1), activation="tanh",
            name="one", **options,
        ),
        VariationalConv2D(2, 2, use_bias=False, name="two", **options),
        keras.layers.GlobalAveragePooling2D(dtype="float64"),
        keras.layers.Dense(1, dtype="float64"),
    ])  # fmt: skip


def series(draws, **options):
    options = OPTIONS | {"draws": draws} | options
    return keras.Sequential([
        keras.Input((8, 2), dtype="float64"),
        VariationalConv1D(
            3, 3, padding="causal", strides=2, activation="tanh", name="one", **options
        ),
        VariationalConv1D(2, 2, use_bias=False, name="two", **options),
        keras.layers.GlobalAveragePooling1D(dtype="float64"),
        keras.layers.Dense(1, dtype="float64"),
    ])


def embedding(draws, **options):
    options = OPTIONS | {"draws": draws} | options
    return keras.Sequential([
        keras.Input((4,), dtype="int32"),
        VariationalEmbedding(6, 3, name="one", **options),
        keras.layers.Dense(3, activation="tanh", dtype="float64"),
        keras.layers.GlobalAveragePooling1D(dtype="float64"),
        keras.layers.Dense(1, dtype="float64"),
    ])


def data(network, rng, views):
    number = UNITS * views
    y = rng.normal(size=(number, 1))
    y[:views] = 1e6  # An outlier.
    if network is embedding:
        # Ids occur more than once in a row.
        return rng.integers(0, 6, size=(number, 4)).astype("int32"), y
    shape = (8, 2) if network is series else (5, 6, 2)
    return rng.normal(size=(number, *shape)), y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "draws", "views", "kl"),
    [
        *(
            (network, *options)
            for network in (convolution, series, embedding)
            for options in (
                ("shared", 1, "inside"),
                ("shared", 3, "outside"),
                ("per_example", 2, "inside"),
            )
        ),
        (convolution, "flipout", 1, "outside"),
        (convolution, "flipout", 2, "inside"),
        (series, "flipout", 2, "inside"),
        (embedding, "flipout", 1, "outside"),
        (embedding, "flipout", 2, "inside"),
    ],
)
def test_norms_and_sums_are_those_of_single_units(network, draws, views, kl, rows, rng):
    model = network(draws, kl=kl)
    for variable in model.trainable_variables:
        variable.assign(variable.numpy() + rng.normal(size=variable.shape, scale=0.3))
    x, y = data(network, rng, views)
    expected = gradients_one_by_one(model, x, y, views, rows)
    clip = float(np.median(clipped_sum(expected, 1.0)[1]))
    expected, norms = clipped_sum(expected, clip)
    assert np.max(norms) > 1e3 * clip
    objective = Objective.of(model, square)
    clip_batch = tf.function(BookkeepingEngine().clip_and_sum, autograph=False)
    sums, found, _ = clip_batch(
        dataclasses.replace(objective, views=views),
        Batch(x, y, None, tf.zeros(len(x), tf.bool)),
        l2_norm_clip=clip_as_tensor(clip, objective.variables),
        rows_per_unit=views,
    )
    np.testing.assert_allclose(found, norms, rtol=1e-6)
    assert_all_close(sums, expected, rtol=0, atol=1e-6 * clip * UNITS)


def gradients_one_by_one(model, x, y, views, rows):
    found = []
    variables = model.trainable_variables
    for unit in range(UNITS):
        rows.now = slice(unit * views, (unit + 1) * views)
        with views_per_example(views), tf.GradientTape() as tape:
            outputs = model(x[rows.now], training=True)
            loss = tf.reduce_mean(square(y[rows.now], outputs))
            for variable in variables:
                if getattr(variable.regularizer, "kl", "") == "inside":
                    loss += tf.cast(variable.regularizer(variable.value), loss.dtype)
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        found.append([tf.convert_to_tensor(gradient) for gradient in gradients])
    rows.now = slice(None)
    return [np.stack(of_variable) for of_variable in zip(*found, strict=True)]


IMAGES = (VariationalConv2D, keras.layers.Conv2D, (7, 6, 3))
SERIES = (VariationalConv1D, keras.layers.Conv1D, (9, 3))


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize(
    ("kinds", "padding"),
    [
        *((kinds, each) for kinds in (IMAGES, SERIES) for each in ("same", "valid")),
        (SERIES, "causal"),
    ],
)
def test_at_inference_it_is_that_of_the_means(kinds, padding, strides, rng):
    of_posterior, of_keras, shape = kinds
    x = rng.normal(size=(2, *shape)).astype("float32")
    options = {"strides": strides, "padding": padding}
    layer = of_posterior(4, 3, number_of_examples=40, **options)
    plain = of_keras(4, 3, **options)
    plain.build(x.shape)
    found = layer(x)
    plain.set_weights([layer.kernel_mean.numpy(), layer.bias_mean.numpy()])
    np.testing.assert_allclose(found, plain(x), atol=1e-5)
    assert layer.compute_output_shape(x.shape) == found.shape


def test_vectors_of_rows_that_share_a_draw_are_not_correlated():
    """An id's are the same within a row, and deviate as the posterior does."""
    layer = VariationalEmbedding(
        3, 2, number_of_examples=40, draws="flipout", initial_scale=0.3, seed=1
    )
    number = 4000
    ids = np.tile([[1, 2, 1]], (2 * number, 1))
    with views_per_example(number):
        vectors = layer(ids, training=True)
    first, second = np.asarray(vectors).reshape(2, number, 3, 2)
    np.testing.assert_array_equal(first[:, 0], first[:, 2])
    together = [rows[:, place] for rows in (first, second) for place in (0, 1)]
    together = np.concatenate(together, -1) - np.tile(
        layer.embeddings_mean.numpy()[1:].ravel(), 2
    )
    np.testing.assert_allclose(together.mean(0), 0, atol=4 * 0.3 / np.sqrt(number))
    covariance = np.cov(together, rowvar=False) / 0.3**2
    np.testing.assert_allclose(covariance, np.eye(8), atol=6 / np.sqrt(number))


@pytest.mark.slow
@pytest.mark.parametrize("network", [convolution, series, embedding])
def test_models_train_predict_and_are_loaded(network, tmp_path, rng):
    model = network("shared", dtype="float32")
    private = tfdp.DPModel(model, engine="bookkeeping")
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    x, _ = data(network, rng, 10)
    private.fit(x, np.ones((40, 1)), batch_size=10, verbose=0)
    name = "one/embeddings" if network is embedding else "one/kernel"
    shape = posterior(model)[name].mean.shape
    assert posterior_samples(model, 2)[name].shape == (2, *shape)
    low, high = predictive_intervals(model, x[:3], 0.5, draws=20)
    assert np.all(low < high)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(x), model(x), rtol=1e-5)
    assert again.layers[0].get_config() == model.layers[0].get_config()


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: VariationalConv2D(0, 3, number_of_examples=9), "filters"),
        (lambda: VariationalConv2D(1, (3, 0), number_of_examples=9), "kernel_size"),
        (lambda: VariationalConv2D(1, (3,), number_of_examples=9), "kernel_size"),
        (
            lambda: VariationalConv2D(1, 3, number_of_examples=9, draws="local"),
            "draws",
        ),
        (
            lambda: VariationalConv2D(1, 3, number_of_examples=9, padding="causal"),
            "padding",
        ),
        (lambda: VariationalConv1D(1, (3, 3), number_of_examples=9), "kernel_size"),
        (lambda: VariationalConv1D(1, 3, strides=0, number_of_examples=9), "strides"),
        (
            lambda: VariationalConv1D(1, 3, number_of_examples=9, padding="full"),
            "padding",
        ),
        (lambda: VariationalEmbedding(0, 3, number_of_examples=9), "input_dim"),
        (lambda: VariationalEmbedding(3, np.nan, number_of_examples=9), "output_dim"),
        (
            lambda: VariationalEmbedding(3, 3, number_of_examples=9, draws="local"),
            "draws",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(make, argument):
    with pytest.raises(ValueError, match=f"`{argument}` must be"):
        make()


@pytest.mark.parametrize("shape", [(None, 5, 5), (None, None, 5, 1), (None, 2, 5, 1)])
def test_inputs_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"known shape|must fit"):
        VariationalConv2D(2, 3, number_of_examples=40).build(shape)


@pytest.mark.parametrize("shape", [(None, 5), (None, None, 1), (None, 2, 1)])
def test_series_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"known shape|must fit"):
        VariationalConv1D(2, 3, number_of_examples=40).build(shape)
