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
    pool,
    runner,
)
from tests.problems import PROBLEMS, precision, take
from tests.reference import uphill_gradients
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.engines.passes import run_whole
from tfdp.engines.vectorized import VectorizedEngine, unit_gradients
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.ascent import Ascent
from tfdp.losses.objective import Batch as RowsOfBatch
from tfdp.losses.objective import Objective

SAM = Uphill(radius=0.3, mix=1.0, is_exact=False)
MIXED = Uphill(radius=0.3, mix=0.7, is_exact=False)
EXACT = Uphill(radius=0.3, mix=0.8, is_exact=True)
KINDS = {"sam": SAM, "mixed": MIXED, "exact": EXACT}

kinds = pytest.mark.parametrize("ascent", KINDS.values(), ids=KINDS)

ENGINES = [
    VectorizedEngine(),
    BookkeepingEngine(),
    GhostEngine(),
    BookkeepingEngine(norms="gram"),
    BookkeepingEngine(norms="instantiate"),
]


def slow(name):
    return pytest.param(PROBLEMS[name], id=name, marks=pytest.mark.slow)


# One for each way in which a layer is linear in its variables.
FEW = [
    *map(slow, ["attention", "conv2d_grouped", "conv_transpose_padded"]),
    "conv_called_twice",
    slow("group_norm_axes"),
    "reversible_tied",
    slow("separable_conv_strided"),
    "time_distributed_shared",
]


def those(names):
    return pytest.mark.parametrize(
        "problem",
        [
            pytest.param(PROBLEMS[name], id=name) if isinstance(name, str) else name
            for name in names
        ],
    )


def tolerance(problem):
    # A step uphill has the error of the gradient that it goes along.
    return 2e-5 if "lora" in problem.tags else 1e-8


@those(FEW)
def test_engines_equal_one_unit_at_a_time(problem):
    run = runner(problem, ENGINES[:2], ascent=SAM)
    check(problem, run, OUTLIER, tolerance(problem), ascent=SAM)


@pytest.mark.slow
@those(["cnn"])
@pytest.mark.parametrize("ascent", [SAM, EXACT], ids=["sam", "exact"])
def test_what_has_no_gradient_adds_nothing(problem, ascent):
    run = runner(problem, ENGINES[:3], ascent=ascent)
    for rows in (NAN, [0], []):
        check(problem, run, rows, tolerance(problem), ascent=ascent)


@pytest.mark.slow
@those(["conv_called_twice"])
@pytest.mark.parametrize("ascent", [MIXED, EXACT], ids=["mixed", "exact"])
def test_units_of_two_examples(problem, ascent):
    run = runner(problem, ENGINES, unit_size=2, ascent=ascent)
    check(problem, run, OUTLIER, tolerance(problem), unit_size=2, ascent=ascent)


@those(["cnn", slow("attention")])
@pytest.mark.parametrize(
    ("mode", "ascent"),
    [
        pytest.param("eager", EXACT, id="eager-exact"),
        pytest.param("graph", EXACT, id="graph-exact"),
        pytest.param("xla", SAM, id="xla-sam"),
        pytest.param("xla", EXACT, id="xla-exact", marks=pytest.mark.slow),
    ],
)
def test_in_every_mode(problem, mode, ascent):
    run = runner(problem, ENGINES[:2], mode, "float32", ascent=ascent)
    check(problem, run, OUTLIER, 1e-4, ascent=ascent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ascent"),
    [("gru_reset_before_masked", SAM), ("simple_rnn", SAM), ("embedding_lstm", EXACT)],
)
def test_recurrent_cells_move_their_matrices(name, ascent):
    problem = PROBLEMS[name]
    run = runner(problem, [BookkeepingEngine()], ascent=ascent)
    check(problem, run, OUTLIER, tolerance(problem), ascent=ascent)


@pytest.mark.slow
@those(["simple_rnn"])
def test_recurrent_cells_with_xla(problem):
    run = runner(problem, [BookkeepingEngine()], "xla", "float32", ascent=EXACT)
    check(problem, run, OUTLIER, 1e-4, ascent=EXACT)


@pytest.mark.slow
@those(["ws_conv_called_twice"])
def test_slices_of_xla_are_differentiated_twice(problem):
    run = runner(problem, ENGINES[3:4], "xla", "float32", ascent=EXACT)
    # Norms by Gram matrices are rounded up.
    check(problem, run, OUTLIER, 1e-3, ascent=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ascent"), [("ws_conv_grouped", MIXED), ("ws_conv_called_twice", EXACT)]
)
def test_standardised_kernels_have_lengths_of_their_own(name, ascent):
    problem = PROBLEMS[name]
    run = runner(problem, ENGINES[1:], unit_size=2, ascent=ascent)
    check(problem, run, OUTLIER, 1e-8, unit_size=2, ascent=ascent)


@those(["cnn", slow("attention"), slow("layer_norm")])
@pytest.mark.parametrize("ascent", [pytest.param(SAM, marks=pytest.mark.slow), EXACT])
def test_half_precision_does_not_exceed_the_clip_norm(problem, ascent):
    run = runner(problem, ENGINES[1:3], dtype="mixed_float16", ascent=ascent)
    check_clipped(problem, run, (0.1, 0.033))


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


@kinds
@pytest.mark.parametrize("engine", ENGINES[:3])
def test_both_passes_have_the_same_masks(engine, ascent):
    """A loss that is linear in the weights has the same gradient everywhere."""
    model = keras.Sequential([
        keras.Input((50,)),
        layers.Dropout(0.5, seed=1),
        layers.Dense(1),
    ])
    x, y = np.ones((3, 50), "float32"), np.zeros((3, 1), "float32")
    objective = Objective.of(model, lambda y_true, y_pred: y_pred)
    step = Ascent(tf.constant(5.0, tf.float64), ascent.mix, ascent.is_exact)
    model.layers[0].seed_generator.state.assign([1, 2])
    sums = []
    for uphill in (None, step):
        model.layers[0].seed_generator.state.assign([1, 2])
        at = dataclasses.replace(objective, ascent=uphill)
        sums.append(
            run_whole(
                lambda batch, at=at: engine.clip_and_sum(
                    at, batch, l2_norm_clip=tf.constant(1e9), rows_per_unit=1
                ),
                (tf.constant(x), tf.constant(y), None),
                rows_per_unit=1,
            )[0]
        )
        after = model.layers[0].seed_generator.state.numpy().tolist()
    np.testing.assert_allclose(sums[0][0], sums[1][0], rtol=1e-5)
    assert np.unique(sums[0][0]).size > 1
    assert after == [1, 3]


@kinds
@pytest.mark.parametrize("engine", ENGINES[:3])
def test_a_gradient_of_zero_goes_nowhere(engine, ascent):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    x = np.array([[0, 0], [1, 2]], "float32")
    y = model(x).numpy() + np.array([[0.0], [1.0]], "float32")
    objective = dataclasses.replace(
        Objective.of(model, "mse"),
        ascent=Ascent(tf.constant(0.1, tf.float64), ascent.mix, ascent.is_exact),
    )
    sums, norms, _ = run_whole(
        lambda batch: engine.clip_and_sum(
            objective, batch, l2_norm_clip=tf.constant(1.0), rows_per_unit=1
        ),
        (tf.constant(x), tf.constant(y), None),
        rows_per_unit=1,
    )
    assert norms[0] < 1e-12
    assert norms[1] > 1
    assert all(np.isfinite(total).all() for total in sums)


@pytest.mark.parametrize("name", ["custom_layer", "lora_embedding"])
def test_layers_that_are_not_linear_are_named(name):
    problem = PROBLEMS[name]
    run = runner(problem, [BookkeepingEngine()], ascent=SAM)
    with pytest.raises(UnsupportedLayerError, match=r"linear in them. Received: `"):
        run(take(pool(problem).batch, [0, 1]), 1.0)
