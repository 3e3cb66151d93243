"""Book-keeping and ghost clipping against one example at a time in float64."""

import numpy as np
import pytest
from keras import layers, ops

import tfdp
from tests.engine_checks import NAN, OUTLIER, check, check_clipped, length, runner
from tests.problems import PROBLEMS, Batch, Problem, cases, floats, sequential, take
from tests.reference import assert_all_close, clipped_sum, problem_gradients
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine

ENGINES = [
    engine(norms=norms)
    for engine in (BookkeepingEngine, GhostEngine)
    for norms in ("auto", "gram", "instantiate")
]
BATCHES = (OUTLIER, NAN, [0], [])

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
SLOW = {"embedding_lstm", "gru_reset_before_masked", "rnn_dropout", "scalar_loss"}


def those(names):
    return pytest.mark.parametrize(
        "problem",
        [
            pytest.param(
                PROBLEMS[name],
                id=name,
                marks=[pytest.mark.slow] if name in SLOW else [],
            )
            for name in names
            if name in PROBLEMS
        ],
    )


few = those(FEW)


@pytest.mark.parametrize("problem", cases(lacking={"random", "tied"}, is_slow=True))
def test_graph_equals_one_example_at_a_time(problem):
    run = runner(problem, [BookkeepingEngine()])
    for rows in BATCHES:
        check(problem, run, rows)


@few
def test_other_engines_equal_one_example_at_a_time(problem):
    engines = [
        GhostEngine(),
        BookkeepingEngine(norms="gram"),
        BookkeepingEngine(norms="instantiate"),
    ]
    run = runner(problem, engines)
    for rows in BATCHES:
        check(problem, run, rows)


@pytest.mark.slow
@few
def test_units_of_two_examples(problem):
    engines = [BookkeepingEngine(), GhostEngine(norms="gram")]
    run = runner(problem, engines, unit_size=2)
    for rows in BATCHES:
        check(problem, run, rows, unit_size=2)


@few
def test_float32_eagerly(problem):
    run = runner(problem, [BookkeepingEngine(), GhostEngine()], "eager", "float32")
    check(problem, run, OUTLIER, 1e-5)


@those(["conv_called_twice", "embedding_lstm", "reversible_tied"])
def test_float32_with_xla(problem):
    run = runner(problem, [BookkeepingEngine()], "xla", "float32")
    check(problem, run, OUTLIER, 1e-5)


# ------------------------------------------------------------------ what must hold


@those([
    "attention",
    "cnn",
    "conv_transpose_padded",
    "custom_layer",
    "depthwise_conv_dilated",
    "einsum_lora",
    "einsum_mixed_kernel",
    "embedding_lstm",
    "layer_norm",
    "mlp_logits",
    "reversible_tied",
    "separable_conv_strided",
])
@pytest.mark.parametrize(
    "dtype", [pytest.param("mixed_bfloat16", marks=pytest.mark.slow), "mixed_float16"]
)
def test_half_precision_does_not_exceed_the_clip_norm(problem, dtype):
    run = runner(problem, [ENGINES[0], ENGINES[1], ENGINES[3]], dtype=dtype)
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
    run = runner(problem, ENGINES, dtype="float32")
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
        size = model.output_shape[-1]
        for _ in range(4):
            y = 10 + rng.uniform(size=(1, size)).astype("float32")
            result = tfdp.clipped_gradients(
                model, "mse", x, y, l2_norm_clip=clip, engine=engine
            )
            assert result.norms[0] > clip
            assert length(result.gradients) <= clip * (1 + 1e-6)


def test_whole_numbers_that_are_multiplied_are_no_ids(rng):
    model = sequential((5,), layers.Dense(4), layers.EinsumDense("ab,bc->ac", 2))
    x = rng.integers(3, size=(4, 5))
    y = np.ones((4, 2), "float32")
    expected = tfdp.clipped_gradients(
        model, "mse", x.astype("float32"), y, l2_norm_clip=0.1
    )
    for dtype in ("int32", "uint8"):
        found = tfdp.clipped_gradients(
            sequential((5,), *model.layers, dtype=dtype),
            "mse",
            x.astype(dtype),
            y,
            l2_norm_clip=0.1,
            engine="bookkeeping",
        )
        assert_all_close(found.gradients, expected.gradients, rtol=1e-5)


# Kept out of the table: without rules it would run one example after the other.
RNN_DROPOUT = Problem(
    "rnn_dropout",
    lambda: sequential(
        (3, 4),
        layers.SimpleRNN(
            4, dropout=0.5, recurrent_dropout=0.5, return_sequences=True, seed=1
        ),
        layers.LSTM(4, dropout=0.5, return_sequences=True, seed=2),
        layers.GRU(3, dropout=0.5, seed=3),
    ),
    floats((3, 4), 3),
    "mse",
)


@pytest.mark.parametrize(
    "problem",
    [
        *cases(having={"random"}, lacking={"rnn"}),
        pytest.param(RNN_DROPOUT, id="rnn_dropout", marks=pytest.mark.slow),
    ],
)
def test_norm_and_sum_see_the_same_dropout(problem):
    run = runner(problem, [BookkeepingEngine(), GhostEngine()])
    check_clipped(problem, run, (1e-3,))


# ------------------------------------------------------------------------ under fit


def steps(problem, rows, engine, physical_batch_size, jit_compile):
    """Train for two epochs of one batch, without noise."""
    model = problem.build()
    private = tfdp.DPModel(
        model,
        engine=engine,
        physical_batch_size=physical_batch_size,
        sampling="shuffle",
    )
    with pytest.warns(UserWarning, match="not private"):
        optimizer = tfdp.optimizers.DPSGD(0.25, l2_norm_clip=0.3, noise_multiplier=0.0)
    private.compile(optimizer, problem.loss(), jit_compile=jit_compile)
    batch = problem.batch(rows)
    private.fit(batch.x, batch.y, batch_size=rows, epochs=2, verbose=0)
    return private


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn"])
def test_every_engine_trains_the_same_in_one_pass_and_in_several(name):
    problem, rows = PROBLEMS[name], 7
    expected = None
    for engine, physical_batch_size, jit_compile in (
        ("bookkeeping", None, False),
        ("bookkeeping", 3, False),
        ("bookkeeping", 3, True),
        ("ghost", None, True),
        ("ghost", 3, False),
        (BookkeepingEngine(norms="instantiate"), 3, False),
        ("vectorized", 3, False),
    ):
        private = steps(problem, rows, engine, physical_batch_size, jit_compile)
        (segment,) = private.ledger.segments
        assert (segment.passes, segment.noise_multiplier) == (2, 0.0)
        assert segment.expected_batch_size == rows
        weights = private.model.get_weights()
        expected = expected or weights
        assert_all_close(weights, expected, rtol=1e-5, atol=1e-6)
    start = problem.build().get_weights()
    assert all(np.any(new != old) for new, old in zip(expected, start, strict=True))


def test_a_step_of_fit_is_the_clipped_mean():
    problem, rows = PROBLEMS["cnn"], 7
    gradients = problem_gradients(problem, problem.batch(rows))
    total, norms = clipped_sum(gradients, 0.3)
    assert np.any(norms > 0.3)
    private = tfdp.DPModel(problem.build(), engine="ghost", physical_batch_size=3)
    with pytest.warns(UserWarning, match="not private"):
        optimizer = tfdp.optimizers.DPSGD(0.25, l2_norm_clip=0.3, noise_multiplier=0.0)
    private.compile(optimizer, problem.loss())
    before = [variable.numpy() for variable in private.trainable_variables]
    batch = problem.batch(rows)
    # Every row is drawn with probability one.
    private.fit(batch.x, batch.y, batch_size=rows, verbose=0)
    expected = [
        weight - 0.25 * gradient / rows
        for weight, gradient in zip(before, total, strict=True)
    ]
    assert_all_close(private.trainable_variables, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("problem", cases(lacking={"random", "tied"}, is_few=True))
def test_every_tag_with_xla(problem):
    check(problem, runner(problem, [BookkeepingEngine()], "xla"), OUTLIER)


@pytest.mark.slow
@few
def test_every_engine_with_units_of_two(problem):
    run = runner(problem, ENGINES, unit_size=2)
    for rows in (OUTLIER, NAN):
        check(problem, run, rows, unit_size=2)
