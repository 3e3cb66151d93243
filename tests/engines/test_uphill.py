"""Gradients taken uphill, against weights that are really moved for each unit."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.engine_checks import (
    NAN,
    OUTLIER,
    Uphill,
    check,
    check_clipped,
    clipped,
    pool,
    runner,
)
from tests.problems import PROBLEMS, precision, take
from tests.reference import uphill_gradients
from tfdp import clipped_gradients
from tfdp.ascent.losses import BAM, Ascent
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.engines.vectorized import VectorizedEngine, unit_gradients
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.batch import Batch as RowsOfBatch
from tfdp.losses.objective import Objective
from tfdp.rules import own_kernels, patches
from tfdp.rules.terms import Convolution

pytestmark = pytest.mark.keras_private

SAM = Uphill(radius=0.3, mix=1.0, is_exact=False)
MIXED = Uphill(radius=0.3, mix=0.7, is_exact=False)
EXACT = Uphill(radius=0.3, mix=0.8, is_exact=True)

ENGINES = [
    VectorizedEngine(),
    BookkeepingEngine(),
    GhostEngine(),
    BookkeepingEngine(norms="gram"),
    BookkeepingEngine(norms="instantiate"),
]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def tolerance(problem):
    # A step uphill has the error of the gradient that it goes along.
    return 2e-5 if "lora" in problem.tags else 1e-8


# One for each way in which a layer is linear in its variables.
@pytest.mark.parametrize(
    ("name", "engines", "mode", "ascent"),
    [
        pytest.param(
            "called_twice", ENGINES[1:2], "graph", MIXED, marks=pytest.mark.smoke
        ),
        ("custom_loss", ENGINES[:1], "graph", EXACT),
        ("cnn", ENGINES[2:], "graph", EXACT),
        ("conv_called_twice", ENGINES[1:3], "graph", SAM),
        ("reversible_tied", ENGINES[1:2], "graph", SAM),
        ("time_distributed_shared", ENGINES[1:2], "graph", EXACT),
        slow("attention", ENGINES[:2], "graph", SAM),
        slow("cnn", ENGINES[:2], "graph", EXACT),
        slow("conv2d_grouped", ENGINES[1:2], "graph", SAM),
        pytest.param(
            "conv_called_twice",
            ENGINES[:2],
            "graph",
            MIXED,
            marks=pytest.mark.exhaustive,
        ),
        slow("conv_transpose_padded", ENGINES[1:2], "graph", SAM),
        pytest.param(
            "embedding_lstm",
            ENGINES[1:2],
            "graph",
            EXACT,
            marks=pytest.mark.exhaustive,
        ),
        slow("group_norm_axes", ENGINES[1:2], "graph", SAM),
        pytest.param(
            "gru_reset_before_masked",
            ENGINES[1:2],
            "graph",
            SAM,
            marks=pytest.mark.exhaustive,
        ),
        slow("separable_conv_strided", ENGINES[1:2], "graph", SAM),
        slow("simple_rnn", ENGINES[1:2], "graph", SAM),
    ],
)
def test_engines_equal_one_unit_at_a_time(name, engines, mode, ascent):
    problem = PROBLEMS[name]
    run = runner(problem, engines, mode, ascent=ascent)
    check(problem, run, OUTLIER, tolerance(problem), ascent=ascent)


@pytest.mark.parametrize(
    ("name", "engines", "ascent"),
    [
        ("linear_regression", ENGINES[1:2], EXACT),
        slow("cnn", ENGINES[:3], SAM),
        pytest.param("cnn", ENGINES[:3], EXACT, marks=pytest.mark.exhaustive),
    ],
)
def test_what_has_no_gradient_adds_nothing(name, engines, ascent):
    problem = PROBLEMS[name]
    run = runner(problem, engines, "graph", ascent=ascent)
    for rows in (NAN, [0], []):
        check(problem, run, rows, tolerance(problem), ascent=ascent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ascent"),
    [
        ("conv_called_twice", EXACT),
        # Standardised kernels have lengths of their own.
        pytest.param("ws_conv_called_twice", EXACT, marks=pytest.mark.exhaustive),
        pytest.param("ws_conv_grouped", MIXED, marks=pytest.mark.exhaustive),
    ],
)
def test_units_of_two_examples(name, ascent):
    problem = PROBLEMS[name]
    run = runner(problem, ENGINES[1:], "graph", unit_size=2, ascent=ascent)
    check(problem, run, OUTLIER, 1e-8, unit_size=2, ascent=ascent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("cnn", ENGINES[:2]),
        pytest.param("simple_rnn", ENGINES[1:2], marks=pytest.mark.exhaustive),
    ],
)
def test_float32_with_xla(name, engines):
    problem = PROBLEMS[name]
    run = runner(problem, engines, "xla", "float32", ascent=EXACT)
    check(problem, run, OUTLIER, 1e-4, ascent=EXACT)


@pytest.mark.parametrize(
    ("name", "engines", "mode", "ascent"),
    [
        ("cnn", ENGINES[2:3], "graph", EXACT),
        pytest.param(
            "layer_norm",
            ENGINES[1:3],
            "graph",
            EXACT,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_half_precision_does_not_exceed_the_clip_norm(name, engines, mode, ascent):
    problem = PROBLEMS[name]
    run = runner(problem, engines, mode, "mixed_float16", ascent=ascent)
    check_clipped(problem, run, (0.033,))


def test_exact_is_the_slope_of_the_penalised_loss():
    """Finite differences of ``L + lambda ||grad L||``."""
    problem = PROBLEMS["mlp_logits"]
    batch = problem.batch(1)
    (found, *_) = uphill_gradients(problem, batch, radius=0.3, mix=1.0, is_exact=True)
    with precision("float64"):
        model = problem.build("float64")
        objective = Objective.of(model, problem.loss("float64"))
        data = keras.tree.map_structure(tf.convert_to_tensor, tuple(batch[:2]))
        rows = RowsOfBatch(*data, None, tf.zeros([1], tf.bool))
        variable = model.trainable_variables[0]
        start, h = variable.numpy(), 1e-6
        direction = np.random.default_rng(0).normal(size=start.shape)

        def penalised(at):
            variable.assign(at)
            gradients, y_pred = unit_gradients(objective, rows)
            norm = tf.linalg.global_norm(gradients)
            return float(objective.losses(*data, y_pred, None)[0] + 0.3 * norm)

        slope = (
            penalised(start + h * direction) - penalised(start - h * direction)
        ) / (2 * h)
    np.testing.assert_allclose(np.sum(found[0] * direction), slope, rtol=1e-6)


OF_RULES = [
    *((ENGINES[1], ascent) for ascent in (SAM, MIXED, EXACT)),
    (ENGINES[2], MIXED),
]


# Under "exact" the vectorized engine has one pass.
@pytest.mark.parametrize(("engine", "ascent"), [(ENGINES[0], SAM), *OF_RULES])
def test_both_passes_have_the_same_masks(engine, ascent):
    """A loss that is linear in the weights has the same gradient everywhere."""
    model = keras.Sequential([
        keras.Input((50,)),
        layers.Dropout(0.5, seed=1),
        layers.Dense(1),
    ])
    x, y = np.ones((3, 50), "float32"), np.zeros((3, 1), "float32")
    objective = Objective.of(model, lambda y_true, y_pred: y_pred)
    state = model.layers[0].seed_generator.state
    sums = []
    for uphill in (None, at(5.0, ascent)):
        state.assign([1, 2])
        moved = dataclasses.replace(objective, ascent=uphill)
        sums.append(clipped(engine, moved, x, y, 1e9)[0])
        assert state.numpy().tolist() == [1, 3]
    np.testing.assert_allclose(sums[0][0], sums[1][0], rtol=1e-5)
    assert np.unique(sums[0][0]).size > 1


def at(radius, ascent):
    return Ascent(lambda: tf.constant(radius, tf.float64), ascent.mix, ascent.is_exact)


@pytest.mark.parametrize(("engine", "ascent"), [(ENGINES[0], EXACT), *OF_RULES])
def test_a_gradient_of_zero_goes_nowhere(engine, ascent):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    x = np.array([[0, 0], [1, 2]], "float32")
    y = model(x).numpy() + np.array([[0.0], [1.0]], "float32")
    objective = dataclasses.replace(Objective.of(model, "mse"), ascent=at(0.1, ascent))
    sums, norms = clipped(engine, objective, x, y, 1.0)
    assert norms[0] < 1e-12
    assert norms[1] > 1
    assert all(np.isfinite(total).all() for total in sums)


@pytest.mark.parametrize("name", ["dense_subclass", "lora_embedding"])
def test_layers_that_are_not_linear_are_named(name):
    problem = PROBLEMS[name]
    run = runner(problem, [BookkeepingEngine()], "graph", ascent=SAM)
    with pytest.raises(UnsupportedLayerError, match=r"linear in them. Received: `"):
        run(take(pool(problem).batch, [0, 1]), 1.0)


@pytest.mark.slow
def test_gradients_of_sums_are_spread_by_broadcasting():
    # TensorFlow would make tiles of them, which takes many times as long.
    model = keras.Sequential([
        keras.Input((8, 6)),
        layers.GroupNormalization(2),
        layers.Flatten(),
        layers.Dense(1),
    ])
    loss = BAM("mse", radius=0.3, ascent="exact")

    @tf.function(autograph=False)
    def gradients(x, y):
        return clipped_gradients(model, loss, x, y, l2_norm_clip=1.0).gradients

    specs = tf.TensorSpec([4, 8, 6]), tf.TensorSpec([4, 1])
    graph = gradients.get_concrete_function(*specs).graph.as_graph_def()
    made = {node.op for each in graph.library.function for node in each.node_def}
    assert "BroadcastTo" in made
    assert "Tile" not in made


@pytest.mark.parametrize("ascent", [SAM, slow(EXACT)], ids=["sam", "exact"])
def test_large_images_go_uphill_with_kernels_of_their_own(ascent, monkeypatch):
    """As `test_engines_equal_one_unit_at_a_time`: with an outlier, and clipped."""
    one_by_one, found = own_kernels._one_by_one, []

    def spied(*args):
        found.append(args)
        return one_by_one(*args)

    monkeypatch.setattr(own_kernels, "_one_by_one", spied)
    monkeypatch.setattr(patches, "_LARGEST_PATCHES", 0)
    monkeypatch.setattr(Convolution, "how", lambda *_: "keep")
    problem = PROBLEMS["cnn"]
    run = runner(problem, ENGINES[1:2], "graph", ascent=ascent)
    check(problem, run, OUTLIER, tolerance(problem), ascent=ascent)
    assert found
