"""Draws of whole weights: with signs for each example, and of weights that vary together."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.problems import precision
from tests.reference import assert_all_close, clipped_sum
from tfdp._seeds import renew_key, seeds_of_row
from tfdp._views_per_example import views_per_example
from tfdp.clipping import clip_as_tensor
from tfdp.engines import (
    ApartEngine,
    BookkeepingEngine,
    GhostEngine,
    VectorizedEngine,
)
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective
from tfdp.variational import VariationalDense

ROWS = 8
OPTIONS = {"number_of_examples": 40, "draws": "flipout"}


def square(y, outputs):
    return tf.reduce_sum(tf.square(y - outputs), [1, 2])


# Flipout, and weights that vary together.
KINDS = {
    "flipout": {"draws": "flipout"},
    "shared": {"draws": "shared", "rank": 2},
    "per_example": {"draws": "per_example", "rank": 3},
}


def network(rng, kind="flipout"):
    """With positions, which share the signs of their row, or its weights."""
    options = KINDS[kind] | {"number_of_examples": 40, "dtype": "float64", "seed": 3}
    model = keras.Sequential([
        keras.Input((2, 3), dtype="float64"),
        VariationalDense(4, activation="softplus", name="one", **options),
        VariationalDense(2, name="two", use_bias=False, kl="inside", **options),
    ])
    for variable in model.trainable_variables:
        shift = rng.normal(size=variable.shape, scale=0.5)
        variable.assign(variable.numpy() + shift)
    return model


@pytest.fixture
def data(rng):
    x, y = rng.normal(size=(ROWS, 2, 3)), rng.normal(size=(ROWS, 2, 2))
    y[2] = 1e6  # An outlier.
    return x, y


def generators(layer):
    found = [layer.seed_generator, getattr(layer, "sign_generator", None)]
    return [each for each in found if each is not None]


@contextlib.contextmanager
def with_seeds_put_back(*layers):
    states = [each.state for layer in layers for each in generators(layer)]
    before = [state.numpy() for state in states]
    yield
    for state, value in zip(states, before, strict=True):
        state.assign(value)


def drawn_by(layer, rows, patch):
    """Return what a batch will draw, and whether each row has some of its own."""
    drawn = []
    for name in ("_normal", "_signs"):
        draw, is_of_rows = getattr(layer, name), name == "_signs"

        def note(shape, draw=draw, is_of_rows=is_of_rows or not layer.shares_draws):
            drawn.append((draw(shape), is_of_rows))
            return drawn[-1][0]

        patch.setattr(layer, name, note)
    inputs = tf.zeros((rows, 2, layer.kernel_mean.shape[0]), "float64")
    with with_seeds_put_back(layer):
        layer.noise(inputs)
        layer.signs(inputs)
    return drawn


@contextlib.contextmanager
def drawn_for_all_rows(model, x, monkeypatch):
    """Let a batch's rows be run by themselves with what the batch will draw for them.

    Yields:
        A function of a slice, the rows that are run.
    """
    now = [slice(None)]
    with monkeypatch.context() as patch:
        for layer in model.layers:
            drawn = itertools.cycle(drawn_by(layer, len(x), patch))

            def again(_, calls=drawn):
                numbers, is_of_rows = next(calls)
                return numbers[now[0]] if is_of_rows else numbers

            patch.setattr(layer, "_normal", again)
            patch.setattr(layer, "_signs", again)

        def run(rows):
            now[0] = rows

        yield run


def gradients_of_units(model, x, y, rows_per_unit, before_unit):
    found = []
    variables = model.trainable_variables
    for unit in range(ROWS // rows_per_unit):
        rows = slice(unit * rows_per_unit, (unit + 1) * rows_per_unit)
        with before_unit(unit, rows), tf.GradientTape() as tape:
            outputs = model(x[rows], training=True)
            loss = tf.reduce_mean(square(y[rows], outputs))
            for variable in variables:
                if variable.regularizer.kl == "inside":
                    loss += variable.regularizer(variable.value)
        found.append(tape.gradient(loss, [variable.value for variable in variables]))
    return [np.stack(of_variable) for of_variable in zip(*found, strict=True)]


def expected_gradients(engine, model, x, y, rows_per_unit, monkeypatch):
    # These draw for each unit by itself, with its number.
    if isinstance(engine, VectorizedEngine | ApartEngine):
        return gradients_of_units(
            *(model, x, y, rows_per_unit),
            lambda unit, _: seeds_of_row(tf.constant(unit)),
        )
    with drawn_for_all_rows(model, x, monkeypatch) as run:
        return gradients_of_units(
            *(model, x, y, rows_per_unit),
            lambda _, rows: contextlib.nullcontext(run(rows)),
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("engine", "rows_per_unit"),
    [
        (BookkeepingEngine(), 1),
        *(
            pytest.param(engine, rows_per_unit, marks=pytest.mark.slow)
            for engine, rows_per_unit in [
                (BookkeepingEngine(), 2),
                (GhostEngine(), 1),
                (VectorizedEngine(), 2),
                (ApartEngine(), 1),
            ]
        ),
        *(
            pytest.param(engine, rows_per_unit, marks=pytest.mark.exhaustive)
            for engine, rows_per_unit in [
                (GhostEngine(), 2),
                (VectorizedEngine(), 1),
                (ApartEngine(), 2),
            ]
        ),
    ],
    ids=repr,
)
def test_norms_and_sums_are_those_of_rows_with_what_they_draw(
    engine, rows_per_unit, kind, data, rng, monkeypatch
):
    """What is really drawn, by every engine."""
    model = network(rng, kind)
    expected = expected_gradients(engine, model, *data, rows_per_unit, monkeypatch)
    clip = float(np.median(clipped_sum(expected, 1.0)[1]))
    expected, norms = clipped_sum(expected, clip)
    assert np.max(norms) > 1e3 * clip
    renew_key(model, is_known=True)
    with precision("float64"):
        objective = Objective.of(model, square)
        sums, found, _ = tf.function(engine.clip_and_sum, autograph=False)(
            objective,
            Batch(*map(tf.constant, data), None, tf.zeros(ROWS, tf.bool)),
            l2_norm_clip=clip_as_tensor(clip, objective.variables),
            rows_per_unit=rows_per_unit,
        )
    np.testing.assert_allclose(found, norms, rtol=1e-9)
    assert_all_close(sums, expected, rtol=0, atol=1e-9 * clip * ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_draws_whatever_the_others_are(kind, data, rng):
    x, _ = data
    others = np.concatenate([x[:1], 1e6 * x[1:]])
    layer = network(rng, kind).layers[0]
    with with_seeds_put_back(layer):
        first = layer(x, training=True)
    np.testing.assert_array_equal(layer(others, training=True)[0], first[0])


def two_rows_for_each_draw(draws, rng, number=4000):
    """Return the outputs of two equal rows that have a draw in common, for many draws."""
    layer = VariationalDense(
        2, number_of_examples=40, draws=draws, initial_scale=0.3, seed=1
    )
    x = np.repeat(rng.normal(size=(1, 3)), 2 * number, 0).astype("float32")
    with views_per_example(number):
        return np.asarray(layer(x, training=True)).reshape(2, number, 2)


def test_rows_that_share_a_draw_are_not_correlated(rng):
    """Nor are outputs with the signs of a row, which would be no independent weights."""
    first, second = two_rows_for_each_draw("shared", rng)
    np.testing.assert_allclose(first, second, rtol=1e-5)
    outputs = two_rows_for_each_draw("flipout", rng)
    together = np.concatenate(outputs, -1)
    correlations = np.corrcoef(together, rowvar=False)
    np.testing.assert_allclose(correlations, np.eye(4), atol=4 / np.sqrt(4000))


@pytest.mark.slow
def test_gradients_of_a_batch_vary_less_than_with_shared_weights(rng):
    x = rng.normal(size=(50, 3)).astype("float32")
    spread = {}
    for draws in ("shared", "flipout", "per_example"):
        layer = VariationalDense(
            1, number_of_examples=50, draws=draws, initial_scale=0.5, seed=2
        )
        layer.build(x.shape)
        found = []
        for _ in range(100):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(layer(x, training=True)))
            found.append(tape.gradient(loss, layer.kernel_mean.value).numpy())
        spread[draws] = np.var(found, axis=0).sum()
    assert spread["flipout"] < spread["shared"] / 10
    assert spread["flipout"] < 3 * spread["per_example"]


@pytest.mark.slow
def test_all_passes_of_a_step_share_the_draw_and_have_signs_of_their_own():
    """One weight has two values: its mean, more or less the same number."""
    model = keras.Sequential([
        keras.Input((1,)),
        VariationalDense(1, use_bias=False, initial_scale=2.0, **OPTIONS),
    ])
    model.layers[0].kernel_mean.assign([[0.3]])
    # Signs of two passes are alike once in 2^60 times.
    x, y = np.ones((240, 1), "float32"), np.zeros((240, 1), "float32")
    options = {"l2_norm_clip": 1.0, "physical_batch_size": 60}
    for engine in ("bookkeeping", "vectorized"):
        norms = tfdp.clipped_gradients(
            model, "mse", x, y, engine=engine, **options
        ).norms
        assert len(np.unique(np.round(norms.numpy(), 4))) == 2
        of_passes = norms.numpy().reshape(4, 60)
        assert not np.allclose(of_passes[0], of_passes[1], rtol=1e-4)


@pytest.mark.slow
def test_models_train_by_bookkeeping_and_are_loaded(tmp_path, rng):
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(4, activation="relu", **OPTIONS),
        VariationalDense(1, **OPTIONS),
    ])
    private = tfdp.DPModel(model, augmentation_multiplicity=2)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    x = rng.normal(size=(40, 3)).astype("float32")
    before = model.get_weights()
    private.fit(x, np.ones((40, 1)), batch_size=10, verbose=0)
    assert "variational_product" in str(private.explain())
    assert all(
        np.any(left != right)
        for left, right in zip(before, model.get_weights(), strict=True)
    )
    private.save(tmp_path / "private.keras")
    again = keras.saving.load_model(tmp_path / "private.keras")
    np.testing.assert_allclose(again(x), private(x), rtol=1e-5)
    assert again.model.layers[0].draws == "flipout"
    again.fit(x, np.ones((40, 1)), batch_size=10, verbose=0)


def test_signs_do_not_come_of_the_numbers_they_multiply():
    layers = [VariationalDense(1, seed=seed, **OPTIONS) for seed in (0, 1)]
    states = [
        tuple(generator.state.numpy())
        for layer in layers
        for generator in (layer.seed_generator, layer.sign_generator)
    ]
    assert len(set(states)) == 4
