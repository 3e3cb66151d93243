"""The vectorized engine against one example at a time in float64."""

import logging
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.problems import PROBLEMS, cases, nan_row, precision, scale_outlier
from tests.reference import TOLERANCE, assert_all_close, clipped_sum, problem_gradients
from tfdp import _tree
from tfdp.clipping import clip_as_tensor
from tfdp.engines.passes import run_whole
from tfdp.engines.vectorized import VectorizedEngine
from tfdp.losses.objective import Objective

MODES = ("eager", "graph", "xla")


def clipped(problem, batch, mode, dtype, clip, rows_per_unit=1):
    """Run the engine on a problem in one of the modes."""
    with precision(dtype):
        objective = Objective.of(
            problem.build(dtype), problem.loss(dtype), problem.loss_weights
        )
        clip = clip_as_tensor(clip, objective.variables)

        def run(data):
            sums, norms, _ = run_whole(
                lambda rows: VectorizedEngine().clip_and_sum(
                    objective, rows, l2_norm_clip=clip, rows_per_unit=rows_per_unit
                ),
                data,
                rows_per_unit=rows_per_unit,
            )
            return sums, norms

        if mode != "eager":
            run = tf.function(run, jit_compile=mode == "xla", autograph=False)
        return run(_tree.map_tensors(tf.convert_to_tensor, tuple(batch)))


def check(problem, batch, mode, dtype, tolerance, unit_size=1):
    """Compare with the reference, with clipping active for half of the units."""
    gradients = problem_gradients(problem, batch)
    _, norms = clipped_sum(gradients, 1.0, unit_size)
    finite = norms[np.isfinite(norms)]
    clip = float(np.median(finite)) * 0.9 if finite.any() else 1.0
    expected, norms = clipped_sum(gradients, clip, unit_size)
    sums, result_norms = clipped(problem, batch, mode, dtype, clip, unit_size)
    assert_all_close(sums, expected, rtol=0, atol=tolerance * clip * max(len(norms), 1))
    np.testing.assert_array_equal(np.isfinite(result_norms), np.isfinite(norms))
    at = np.isfinite(norms)
    np.testing.assert_allclose(
        result_norms[at], norms[at], rtol=tolerance, atol=tolerance * clip
    )


# One of each kind of layer and of structure.
FEW = [
    "mlp_logits",
    "cnn",
    "conv2d_grouped",
    "embedding_lstm",
    "attention",
    "called_twice",
    "dict_losses",
    "masked_weighted",
    "unused",
]
SLOW = {"cnn", "dict_losses", "embedding_lstm"}
few = pytest.mark.parametrize(
    "problem",
    [
        pytest.param(
            PROBLEMS[name], id=name, marks=[pytest.mark.slow] if name in SLOW else []
        )
        for name in FEW
    ],
)


# Loops over time run one example after the other where they cannot be vectorized.
@pytest.mark.parametrize(
    "problem",
    [
        *cases(lacking={"random", "rnn"}, is_slow=True),
        *(
            pytest.param(PROBLEMS[name], id=name, marks=pytest.mark.slow)
            for name in ("embedding_lstm", "lstm_unrolled_masked", "simple_rnn_masked")
        ),
    ],
)
def test_graph_equals_one_example_at_a_time(problem):
    # Keras keeps the adapters of LoRA in float32.
    tolerance = 2e-5 if "lora" in problem.tags else TOLERANCE
    check(problem, scale_outlier(problem.batch(5), 2), "graph", "float64", tolerance)


def with_outlier(problem):
    """Scale one example; only a little where a softmax of huge numbers jumps."""
    return scale_outlier(
        problem.batch(5), 2, 10 if "attention" in problem.tags else 1e6
    )


@few
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_eager_and_xla_equal_one_example_at_a_time(problem, mode):
    check(problem, with_outlier(problem), mode, "float32", 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("problem", cases(lacking={"random"}, is_few=True))
def test_every_tag_with_xla(problem):
    check(problem, with_outlier(problem), "xla", "float32", 2e-5)


@pytest.mark.parametrize(
    "problem", [PROBLEMS["mlp_logits"], PROBLEMS["attention"]], ids=["mlp", "attention"]
)
@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row(problem, rows):
    check(problem, problem.batch(rows), "graph", "float64", TOLERANCE)


@pytest.mark.parametrize(
    "problem",
    [PROBLEMS["conv2d_grouped"], PROBLEMS["attention"]],
    ids=["conv", "attention"],
)
def test_a_row_of_nan_contributes_nothing(problem):
    check(problem, nan_row(problem.batch(5), 1), "graph", "float64", TOLERANCE)


@pytest.mark.slow
@few
def test_units_of_two_examples(problem):
    check(problem, problem.batch(5), "graph", "float64", TOLERANCE, unit_size=2)


@pytest.mark.parametrize("problem", cases(having={"random"}, lacking={"rnn"}))
@pytest.mark.parametrize("mode", MODES)
def test_random_layers_draw_for_each_example_and_each_call(problem, mode):
    check_draws(problem, mode)


@pytest.mark.slow
def test_random_layers_in_a_loop_over_time():
    check_draws(PROBLEMS["lstm_dropout"], "xla")


def check_draws(problem, mode):
    with precision("float32"):
        objective = Objective.of(problem.build(), problem.loss(), problem.loss_weights)
        clip = clip_as_tensor(1e9, objective.variables)
        first = problem.batch(1)
        rows = _tree.map_tensors(
            lambda leaf: tf.repeat(tf.convert_to_tensor(leaf), 6, axis=0), tuple(first)
        )

        def run():
            return run_whole(
                lambda batch: VectorizedEngine().clip_and_sum(
                    objective, batch, l2_norm_clip=clip, rows_per_unit=1
                ),
                rows,
                rows_per_unit=1,
            )[1]

        if mode != "eager":
            run = tf.function(run, jit_compile=mode == "xla", autograph=False)
        norms = np.stack([run(), run()])
    assert len(np.unique(norms)) > 6
    assert np.any(norms[0] != norms[1])


@pytest.mark.slow
def test_what_cannot_be_vectorized_is_said_once(caplog):
    problem = PROBLEMS["masked_lstm"]
    with caplog.at_level(logging.WARNING):
        check(problem, problem.batch(3), "graph", "float64", TOLERANCE)
    said = [text for text in caplog.messages if "one example after the other" in text]
    assert len(said) == 1


def test_each_layer_with_variables_is_explained():
    model = PROBLEMS["cnn"].build()
    rows = VectorizedEngine().explain(model, None)
    trainable = [layer for layer in model.layers if layer.trainable_variables]
    assert [row.path for row in rows] == [layer.name for layer in trainable]
    assert [row.bytes for row in rows] == [
        sum(4 * math.prod(variable.shape) for variable in layer.trainable_variables)
        for layer in trainable
    ]
