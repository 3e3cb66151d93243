"""Book-keeping and ghost clipping against one example at a time in float64."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.engine_checks import (
    BATCHES,
    NAN,
    OUTLIER,
    check,
    check_clipped,
    clipped,
    length,
    runner,
)
from tests.problems import PROBLEMS, Batch, Problem, cases, floats, sequential, take
from tests.problems.loops import PROBLEMS as LOOPS
from tests.reference import assert_all_close, clipped_sum, problem_gradients
from tfdp.ascent.losses import Ascent
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.losses.batch import Batch as RowsOfBatch
from tfdp.losses.objective import Objective
from tfdp.losses.regularizers import GaussianDivergence

pytestmark = pytest.mark.keras_private

ENGINES = [
    engine(norms=norms)
    for engine in (BookkeepingEngine, GhostEngine)
    for norms in ("auto", "gram", "instantiate")
]

# One for each kind of rule and of structure.
FEW = [
    "conv2d_grouped",
    "conv_called_twice",
    "einsum_mixed_kernel",
    "group_norm_axes",
    "gru_reset_before_masked",
    "reversible_tied",
    "time_distributed_shared",
    "ws_conv_called_twice",
]
# Of all these the quick tests leave some out.
SLOW = {
    *("conv2d_grouped", "group_norm_axes", "gru_reset_before_masked"),
    "ws_conv_called_twice",
}


def those(names, slow=SLOW, one_more=()):
    def marks_of(name):
        if name in one_more:
            return [pytest.mark.exhaustive]
        return [pytest.mark.slow] if name in slow else []

    return pytest.mark.parametrize(
        "problem",
        [
            pytest.param(PROBLEMS[name], id=name, marks=marks_of(name))
            for name in names
            if name in PROBLEMS
        ],
    )


few = those(FEW)


class Doubled(layers.Layer):
    """Calls a layer with each row twice."""

    def build(self, shape):
        self.inner = layers.Dense(2, activation="relu", name="inner")
        self.inner.build(shape)

    def call(self, x):
        return self.inner(ops.concatenate([x, x]))[: ops.shape(x)[0]]


def traced_for_any_rows(engine, model, ascent=None):
    """Return `clip_and_sum` for any number of rows, without the proof that comes first."""
    objective = Objective.of(model, "mse")
    objective = dataclasses.replace(objective, ascent=ascent)

    @tf.function(
        autograph=False,
        input_signature=[tf.TensorSpec([None, *model.input_shape[1:]])] * 2,
    )
    def run(x, y):
        padding = tf.zeros([tf.shape(x)[0]], tf.bool)
        return engine.clip_and_sum(
            objective,
            RowsOfBatch(x, y, None, padding),
            l2_norm_clip=tf.constant(0.1),
            rows_per_unit=1,
        )[0]

    return run


@pytest.mark.parametrize(
    "ascent",
    [None, Ascent(lambda: tf.constant(0.1, tf.float64), mix=0.5, is_exact=False)],
    ids=["here", "uphill"],
)
@pytest.mark.parametrize("engine", [BookkeepingEngine(), GhostEngine()], ids=repr)
def test_nothing_is_summed_along_an_axis_of_something_else(engine, ascent):
    run = traced_for_any_rows(engine, sequential((2,), Doubled()), ascent)
    # Two lengths are no error to TensorFlow where one of them is 1: they are broadcast.
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be those of"):
        run(tf.ones([1, 2]), tf.ones([1, 2]))
    # Here TensorFlow may refuse to add [6] and [3] before the check has run.
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(tf.ones([3, 2]), tf.ones([3, 2]))


def test_nothing_lies_between_a_layer_and_its_activation():
    """TensorFlow computes both in one operation only if no other asks for the first."""
    model = sequential((3,), layers.Dense(3, "relu"), layers.Dense(3))
    graph = (
        traced_for_any_rows(BookkeepingEngine(), model).get_concrete_function().graph
    )
    (of_layer,) = [
        operation.inputs[0].op
        for operation in graph.get_operations()
        if operation.type == "Relu"
    ]
    while of_layer.type == "Identity":
        assert len(of_layer.outputs[0].consumers()) == 1
        of_layer = of_layer.inputs[0].op
    assert of_layer.type == "BiasAdd"
    assert len(of_layer.outputs[0].consumers()) == 1


@pytest.mark.smoke
@pytest.mark.parametrize("engine", [BookkeepingEngine(), GhostEngine()], ids=repr)
def test_a_graph_equals_one_example_at_a_time(engine):
    problem = PROBLEMS["called_twice"]
    run = runner(problem, [engine])
    for rows in BATCHES:
        check(problem, run, rows)


IN_GRAPHS = {
    case.id: case
    for case in (
        *cases(lacking={"random", "tied"}, is_few=True),
        *cases(having={"compiled"}),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("problem", IN_GRAPHS.values())
def test_graphs_equal_one_example_at_a_time(problem):
    run = runner(problem, [BookkeepingEngine()])
    for rows in BATCHES:
        check(problem, run, rows)


# What differs little from the others.
ONE_MORE = {
    *("attention_no_bias", "conv_lstm_other_axes", "cross_attention", "embedding_lstm"),
    *("gru_no_bias", "gru_reset_before", "gru_stacked", "lstm_unrolled"),
    *("rnn_of_cells", "simple_rnn", "time_distributed_lstm", "ws_conv"),
}


def without_one_more(cases):
    """Leave to exhaustive tests what differs little from the others."""
    return [
        pytest.param(
            *case.values,
            id=case.id,
            marks=pytest.mark.exhaustive if case.id in ONE_MORE else case.marks,
        )
        for case in cases
    ]


@pytest.mark.parametrize(
    "problem",
    without_one_more(cases(lacking={"compiled", "random", "tied"}, is_slow=True)),
)
def test_all_problems_equal_one_example_at_a_time(problem):
    # Dice is no sum over rows.
    engine = BookkeepingEngine(splits_losses=problem.name != "dice")
    run = runner(problem, [engine])
    check(problem, run, OUTLIER)
    check(problem, run, NAN)


@few
def test_all_engines_equal_one_example_at_a_time(problem):
    check(problem, runner(problem, ENGINES[:4], "graph"), OUTLIER)


@those(
    FEW,
    slow=set(FEW) - {"einsum_mixed_kernel", "reversible_tied"},
    one_more={"gru_reset_before_masked", "ws_conv_called_twice"},
)
def test_all_engines_with_units_of_two(problem):
    run = runner(problem, ENGINES[2:], "graph", unit_size=2)
    check(problem, run, (1, 6, 5, 3, 4), unit_size=2)


@those(["group_norm_axes", "reversible_tied"])
def test_float32(problem):
    run = runner(problem, [BookkeepingEngine(), GhostEngine()], "graph", "float32")
    check(problem, run, OUTLIER, 1e-5)


@those(["conv_called_twice", "reversible_tied"], slow={"reversible_tied"})
def test_float32_with_xla(problem):
    run = runner(problem, [BookkeepingEngine()], "xla", "float32")
    check(problem, run, OUTLIER, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("problem", cases(lacking={"random", "tied"}, is_few=True))
def test_every_tag_with_xla(problem):
    check(problem, runner(problem, [BookkeepingEngine()], "xla"), OUTLIER)


# ------------------------------------------------------------------ what must hold


HALF = {
    "attention": "mixed_bfloat16",
    "cnn": "mixed_float16",
    "conv_transpose_padded": "mixed_float16",
    "custom_layer": "mixed_bfloat16",
    "depthwise_conv_dilated": "mixed_bfloat16",
    "einsum_lora": "mixed_bfloat16",
    "einsum_mixed_kernel": "mixed_float16",
    "embedding_lstm": "mixed_float16",
    "layer_norm": "mixed_float16",
    "mlp_logits": "mixed_float16",
    "reversible_tied": "mixed_float16",
    "separable_conv_strided": "mixed_float16",
}


@those(HALF, slow=HALF.keys() - {"cnn"})
def test_half_precision_does_not_exceed_the_clip_norm(problem):
    run = runner(
        problem, [ENGINES[0], ENGINES[1], ENGINES[3]], dtype=HALF[problem.name]
    )
    check_clipped(problem, run, (0.1, 0.033))


@pytest.mark.parametrize(
    "layer", [layers.Dense(2), layers.Conv1D(2, 1), layers.Conv1D(2, 2)]
)
def test_a_gradient_that_cancels_moves_the_sum_by_no_more_than_the_clip_norm(
    layer, rng
):
    """Its factors are huge: whoever sums them up again rounds all other examples."""
    x = rng.normal(size=(5, 4, 3)).astype("float32")
    x[2] = 1e12 * np.array([1, 1, -1, -1])[:, None] * x[2, 0]
    problem = Problem(
        "cancelling",
        lambda: sequential((4, 3), type(layer).from_config(layer.get_config())),
        lambda rng: (rng.normal(size=(4, 3)), 0.0),
        lambda y_true, y_pred: ops.sum(y_pred, axis=(1, 2)),
    )
    run = runner(problem, ENGINES, "graph", "float32")
    everyone, others = Batch(x, np.zeros(5, "float32")), [0, 1, 3, 4]
    for (sums, _), (rest, _) in zip(
        run(everyone, 1.0), run(take(everyone, others), 1.0), strict=True
    ):
        moved = [one - other for one, other in zip(sums, rest, strict=True)]
        assert length(moved) <= 1 + 1e-2


@pytest.mark.parametrize("engine", [BookkeepingEngine(), GhostEngine()], ids=repr)
def test_thousands_of_equal_positions_do_not_exceed_the_clip_norm(engine, rng):
    """Each of them adds the same: rounding in turn errs the same way each time."""
    clip = 0.1
    lookup = sequential(
        (4096,),
        layers.Embedding(50, 8),
        layers.GlobalAveragePooling1D(),
        layers.Dense(3, kernel_initializer="ones"),
        dtype="int32",
    )
    product = sequential(
        (4096, 3), layers.Dense(8, use_bias=False), layers.GlobalAveragePooling1D()
    )
    lookup.layers[-1].trainable = False
    ids = np.zeros((1, 4096), "int32")
    for model, x in ((lookup, ids), (product, np.ones((1, 4096, 3), "float32"))):
        size, objective = model.output_shape[-1], Objective.of(model, "mse")
        for _ in range(4):
            y = 10 + rng.uniform(size=(1, size)).astype("float32")
            sums, (norm,) = clipped(engine, objective, x, y, clip)
            assert norm > clip
            assert length(sums) <= clip * (1 + 1e-6)


def test_whole_numbers_that_are_multiplied_are_no_ids(rng):
    model = sequential((5,), layers.Dense(4), layers.EinsumDense("ab,bc->ac", 2))
    x, y = rng.integers(3, size=(4, 5)), np.ones((4, 2), "float32")
    expected, *others = (
        clipped(
            BookkeepingEngine(),
            Objective.of(sequential((5,), *model.layers, dtype=dtype), "mse"),
            x.astype(dtype),
            y,
            0.1,
        )[0]
        for dtype in ("float32", "int32", "uint8")
    )
    for found in others:
        assert_all_close(found, expected, rtol=1e-5)


def test_units_without_rows_do_not_even_add_what_weights_cost():
    cost = GaussianDivergence(
        "mean", prior_scale=1.0, number_of_examples=2, kl="inside"
    )
    model = sequential((3,), layers.Dense(2, kernel_regularizer=cost))
    objective = Objective.of(model, "mse")
    x, y = np.ones((1, 3), "float32"), model(np.ones((1, 3))).numpy()
    for engine in (BookkeepingEngine(), GhostEngine()):
        (kernel, _), (norm,) = clipped(engine, objective, x, y, 1e-2)
        assert norm > 1e-2
        np.testing.assert_allclose(length([kernel]), 1e-2, rtol=1e-5)
        sums, norms = clipped(engine, objective, x[:0], y[:0], 1e-2)
        assert length(sums) == 0
        assert norms.shape == [0]


# Kept out of the table: without rules it would run one example after the other.
RNN_DROPOUT = Problem(
    "rnn_dropout",
    lambda: sequential(
        (3, 4),
        layers.SimpleRNN(
            4, dropout=0.5, recurrent_dropout=0.5, return_sequences=True, seed=1
        ),
        layers.LSTM(
            4, dropout=0.5, recurrent_dropout=0.5, return_sequences=True, seed=2
        ),
        layers.GRU(3, dropout=0.5, seed=3),
    ),
    floats((3, 4), 3),
    "mse",
)


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(PROBLEMS["dropout"], id="dropout"),
        pytest.param(PROBLEMS["gaussian_noise"], id="gaussian_noise"),
        pytest.param(
            PROBLEMS["attention_dropout"],
            id="attention_dropout",
            marks=pytest.mark.slow,
        ),
        # Single rows under their masks: `tests/rules/test_recurrent.py`.
        pytest.param(RNN_DROPOUT, id="rnn_dropout", marks=pytest.mark.exhaustive),
    ],
)
def test_norm_and_sum_see_the_same_dropout(problem):
    run = runner(problem, [BookkeepingEngine(), GhostEngine()])
    check_clipped(problem, run, (1e-3,))


def low_rank(*model):
    """A model in which updates of low rank are multiplied by 3."""
    model = sequential(*model)
    for layer in model.layers:
        layer.enable_lora(2, lora_alpha=6)
    return model


# In the table alpha is the rank.
LOW_RANK = {
    "dense": (
        lambda: low_rank((4,), layers.Dense(5, "tanh"), layers.Dense(3)),
        floats(4, 3),
    ),
    "einsum": (
        lambda: low_rank(
            (3, 4),
            layers.EinsumDense("abc,cde->abde", (3, 2, 3), bias_axes="de"),
            layers.EinsumDense("abde,def->abf", (3, 2)),
        ),
        floats((3, 4), (3, 2)),
    ),
    "conv": (
        lambda: low_rank((5, 4, 2), layers.Conv2D(3, 2)),
        floats((5, 4, 2), (4, 3, 3)),
    ),
    "embedding": (
        lambda: low_rank((5,), layers.Embedding(6, 3)),
        lambda rng: (rng.integers(6, size=5), rng.normal(size=(5, 3))),
    ),
}


@pytest.mark.parametrize("name", LOW_RANK)
def test_updates_of_low_rank_are_scaled(name):
    problem = Problem(name, *LOW_RANK[name], "mse", tags=frozenset({"lora"}))
    check(problem, runner(problem, [BookkeepingEngine()], "graph"), OUTLIER)


# ------------------------------------------------------------------------ under fit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "engine", "physical_batch_size", "jit_compile"),
    [
        (PROBLEMS["cnn"], "bookkeeping", None, False),
        (PROBLEMS["cnn"], "bookkeeping", 3, True),
        pytest.param(
            *(PROBLEMS["cnn"], "ghost", None, True), marks=pytest.mark.exhaustive
        ),
        (PROBLEMS["cnn"], "ghost", 3, False),
        (PROBLEMS["cnn"], "vectorized", 3, False),
        (LOOPS["cell"], "bookkeeping", 3, True),
        pytest.param(*(LOOPS["cell"], "ghost", 3, False), marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_of_fit_is_the_clipped_mean(
    problem, engine, physical_batch_size, jit_compile
):
    rows = 7
    batch = problem.batch(rows)
    total, norms = clipped_sum(problem_gradients(problem, batch), 0.3)
    assert np.any(norms > 0.3)
    private = tfdp.DPModel(
        problem.build(),
        engine=engine,
        physical_batch_size=physical_batch_size,
        sampling="shuffle",
    )
    with pytest.warns(UserWarning, match="not private"):
        optimizer = tfdp.optimizers.DPSGD(0.25, l2_norm_clip=0.3, noise_multiplier=0.0)
    private.compile(optimizer, problem.loss(), jit_compile=jit_compile)
    before = [variable.numpy() for variable in private.trainable_variables]
    private.fit(batch.x, batch.y, batch_size=rows, verbose=0)
    (segment,) = private.ledger.segments
    assert (segment.passes, segment.noise_multiplier) == (1, 0.0)
    assert segment.expected_batch_size == rows
    expected = [
        weight - 0.25 * gradient / rows
        for weight, gradient in zip(before, total, strict=True)
    ]
    assert_all_close(private.trainable_variables, expected, rtol=1e-5, atol=1e-6)
