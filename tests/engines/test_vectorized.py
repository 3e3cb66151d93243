"""The vectorized engine against one example at a time in float64."""

import logging
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.engine_checks import BATCHES, OUTLIER, check, runner
from tests.problems import PROBLEMS, cases, precision
from tfdp import _tree
from tfdp.checks.following import traced_pass
from tfdp.clipping import clip_as_tensor
from tfdp.engines import passes
from tfdp.engines.vectorized import VectorizedEngine
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

ENGINES = [VectorizedEngine()]

# Loops over time run one example after the other where they cannot be vectorized.
LOOPS = {"embedding_lstm", "lstm_unrolled_masked"}
# Grouped and dilated kernels are vectorized in ways of their own.
CONVOLUTIONS = {
    "conv1d_grouped",
    "conv3d_grouped",
    "depthwise_conv_dilated",
    "separable_conv1d_dilated",
    "ws_conv_grouped",
}
OF_ALL_TAGS = {case.id for case in cases(lacking={"random", "rnn"}, is_few=True)}
QUICK = {
    "called_twice": [pytest.mark.smoke],
    "cnn": [],
    "masked_weighted": [],
    "tied_embedding": [],
    "unused": [],
}


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(PROBLEMS[name], id=name, marks=QUICK.get(name, [pytest.mark.slow]))
        for name in sorted(QUICK.keys() | LOOPS | CONVOLUTIONS | OF_ALL_TAGS)
    ],
)
def test_graph_equals_one_example_at_a_time(problem):
    run = runner(problem, ENGINES)
    for rows in BATCHES:
        check(problem, run, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"), [("dict_losses", "graph"), ("mlp_logits", "xla")]
)
def test_float32(name, mode):
    run = runner(PROBLEMS[name], ENGINES, mode, "float32")
    check(PROBLEMS[name], run, OUTLIER, 2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", cases(lacking={"random"}, is_few=True))
def test_every_tag_with_xla(problem):
    check(problem, runner(problem, ENGINES, "xla"), OUTLIER)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "conv2d_grouped", "dict_losses"])
def test_units_of_two_examples(name):
    problem = PROBLEMS[name]
    check(problem, runner(problem, ENGINES, unit_size=2), OUTLIER, unit_size=2)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("dropout", "graph"),
        pytest.param("attention_dropout", "xla", marks=pytest.mark.slow),
        pytest.param("gaussian_noise", "graph", marks=pytest.mark.slow),
        pytest.param("lstm_dropout", "xla", marks=pytest.mark.exhaustive),
    ],
)
def test_random_layers_draw_for_each_example_and_each_call(name, mode):
    problem = PROBLEMS[name]
    with precision("float32"):
        objective = Objective.of(problem.build(), problem.loss(), problem.loss_weights)
        clip = clip_as_tensor(1e9, objective.variables)
        first = problem.batch(1)
        rows = _tree.map_tensors(
            lambda leaf: tf.repeat(tf.convert_to_tensor(leaf), 6, axis=0), tuple(first)
        )

        def run():
            return passes.run(
                lambda batch: VectorizedEngine().clip_and_sum(
                    objective, batch, l2_norm_clip=clip, rows_per_unit=1
                ),
                rows,
                rows_per_unit=1,
            )[1]

        run = tf.function(run, jit_compile=mode == "xla", autograph=False)
        norms = np.stack([run(), run()])
    assert len(np.unique(norms)) > 6
    assert np.any(norms[0] != norms[1])


@pytest.mark.slow
def test_what_cannot_be_vectorized_is_said_once(caplog):
    problem = PROBLEMS["masked_lstm"]
    with caplog.at_level(logging.WARNING, "absl"):
        check(problem, runner(problem, ENGINES), OUTLIER)
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


@pytest.mark.parametrize("layer", ["DepthwiseConv2D", "SeparableConv2D", "Conv2D"])
def test_what_a_kernel_never_sees_has_no_gradient(layer, rng):
    """In bfloat16 TensorFlow leaves it as it is in memory: it may be of other rows."""
    options = {"strides": 4, "padding": "same"}
    filters = {} if layer == "DepthwiseConv2D" else {"filters": 3}
    with precision("mixed_bfloat16"):
        model = keras.Sequential([
            keras.Input((7, 1, 3)),
            getattr(keras.layers, layer)(kernel_size=(4, 5), **filters, **options),
            keras.layers.Flatten(),
            keras.layers.Dense(1, dtype="float32"),
        ])
    x, y = rng.normal(size=(6, 7, 1, 3)), rng.normal(size=(6, 1))
    clipped = tfdp.clipped_gradients(
        model, "mse", x, y, l2_norm_clip=1.0, engine="vectorized"
    )
    # Of five columns all but the third lie on padding.
    of_columns = np.abs(clipped.gradients[0]).reshape(4, 5, -1).sum((0, 2))
    np.testing.assert_array_equal(of_columns > 0, [0, 0, 1, 0, 0])
    # Memory may be zero by chance.
    rows = _tree.signature_of(Batch(x.astype("float32"), y, None, np.zeros(6, bool)))
    objective = Objective.of(model, "mse")
    traced = traced_pass(VectorizedEngine(), objective, rows, rows_per_unit=1)
    graph = traced.function.graph.as_graph_def()
    functions = [node for each in graph.library.function for node in each.node_def]
    dtypes = {
        tf.as_dtype(node.attr["T"].type)
        for node in [*graph.node, *functions]
        if "BackpropFilter" in node.op
    }
    assert dtypes <= {tf.float32}
