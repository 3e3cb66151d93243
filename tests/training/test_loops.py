"""Clipped gradients in loops of one's own equal one example at a time."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.problems import PROBLEMS, Batch, nan_row, scale_outlier, take
from tests.reference import assert_all_close, clipped_sum, problem_gradients
from tfdp.clipping import ClippedSum
from tfdp.engines.vectorized import VectorizedEngine

pytestmark = pytest.mark.keras_private

PROBLEM = PROBLEMS["subclassed"]

# Rows of a pool: the second one a million times as large, the third one NaN.
OUTLIER = [0, 7, 2, 3]
NAN = [0, 1, 8, 3]


# Nothing of a model changes, and it is checked once.
@functools.cache
def model_of(problem):
    return problem.build()


@functools.cache
def pool(problem):
    """Seven examples of a problem, an outlier and NaN, and the gradient of each."""
    batch = problem.batch(7)
    parts = [
        tuple(each)
        for each in (
            batch,
            take(scale_outlier(batch, 1), [1]),
            take(nan_row(batch, 2), [2]),
        )
    ]
    batch = Batch(
        *keras.tree.map_structure(
            lambda *leaves: None if leaves[0] is None else np.concatenate(leaves),
            *parts,
        )
    )
    return batch, problem_gradients(problem, batch)


def clipper(mode, problem, **options):
    """A function of batch and clip norm that gives the problem's clipped sum."""
    model, loss = model_of(problem), problem.loss()

    def function(x, y, sample_weight, clip):
        return tfdp.clipped_gradients(
            model, loss, x, y, sample_weight, l2_norm_clip=clip, **options
        )

    if mode != "eager":
        function = tf.function(function, jit_compile=mode == "xla", autograph=False)

    def run(batch, clip):
        as_tensors = keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.constant(leaf), tuple(batch)
        )
        return function(*as_tensors, tf.constant(clip, tf.float32))

    return run


def of_any_size(**options):
    """A traced function of x and y, with one graph for batches of all sizes."""
    model = model_of(PROBLEM)

    @tf.function(
        input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])],
        autograph=False,
    )
    def function(x, y):
        return tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=0.5, **options)

    return function


def active_clip(gradients, unit_size=1):
    """A clip norm that half of the units exceed."""
    _, norms = clipped_sum(gradients, 1.0, unit_size)
    finite = norms[np.isfinite(norms)]
    return float(np.median(finite)) * 0.9


def check(run, problem, rows, unit_size=1):
    """Compare what some rows of the pool give."""
    batch, gradients = pool(problem)
    return compare(
        run, take(batch, rows), [each[rows] for each in gradients], unit_size
    )


def compare(run, batch, gradients, unit_size=1):
    clip = active_clip(gradients, unit_size)
    expected, norms = clipped_sum(gradients, clip, unit_size)
    assert (norms[np.isfinite(norms)] > clip).any()
    result = run(batch, clip)
    assert isinstance(result, ClippedSum)
    assert_all_close(result.gradients, expected, rtol=0, atol=3e-5 * clip * len(norms))
    np.testing.assert_allclose(result.norms, norms, rtol=5e-5, atol=1e-6 * clip)
    assert float(result.l2_norm_clip) == pytest.approx(clip)
    assert float(result.l2_sensitivity) == pytest.approx(clip * min(unit_size, 2))
    return result


# --------------------------------------------------------------- problems and modes


# Masks, weights, several outputs.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [("masked_weighted", "graph"), ("list_weighted", "eager")],
)
def test_equals_one_example_at_a_time(name, mode):
    problem = PROBLEMS[name]
    run = clipper(mode, problem)
    check(run, problem, [0, 1, 2, 3])
    # One example a million times as large counts no more than the clip norm.
    check(run, problem, OUTLIER)
    # One that is not finite counts as none. What that is the reference says: a
    # maximum or a mask may stop a NaN.
    check(run, problem, NAN)


@pytest.mark.parametrize("num_microbatches", [None, 3])
def test_an_empty_batch_gives_zeros(num_microbatches):
    run = clipper("eager", PROBLEM, num_microbatches=num_microbatches)
    result = run(PROBLEM.batch(0), 0.5)
    for gradient, variable in zip(
        result.gradients, model_of(PROBLEM).trainable_variables, strict=True
    ):
        np.testing.assert_array_equal(gradient, np.zeros(variable.shape))
    assert result.norms.shape == [0]


@pytest.mark.parametrize(
    ("num_microbatches", "unit_size", "physical_batch_size", "mode"),
    [
        (None, 1, 2, "eager"),
        (4, 2, 4, "graph"),
        pytest.param(4, 2, 4, "xla", marks=pytest.mark.slow),
    ],
)
def test_in_passes(num_microbatches, unit_size, physical_batch_size, mode):
    run = clipper(
        mode,
        PROBLEM,
        num_microbatches=num_microbatches,
        physical_batch_size=physical_batch_size,
    )
    check(run, PROBLEM, [0, 1, 2, 3, 4, 5, 6], unit_size)
    check(run, PROBLEM, [0, 7, 2, 3, 4, 5, 6], unit_size)


def test_passes_hold_whole_microbatches():
    run = clipper("eager", PROBLEM, num_microbatches=3, physical_batch_size=3)
    with pytest.raises(ValueError, match="physical_batch_size=4"):
        run(PROBLEM.batch(6), 0.5)


@pytest.mark.parametrize("size", [0, -1, 1.5, float("nan")])
def test_bad_physical_batch_size(size):
    run = clipper("eager", PROBLEM, physical_batch_size=size)
    with pytest.raises(ValueError, match="physical_batch_size"):
        run(PROBLEM.batch(4), 0.5)


def test_passes_of_microbatches_need_a_known_batch():
    function = of_any_size(num_microbatches=2, physical_batch_size=4)
    with pytest.raises(ValueError, match="unknown size"):
        function(*PROBLEM.batch(4)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_any_batch_size_in_one_trace(num_microbatches):
    function = of_any_size(num_microbatches=num_microbatches)
    batch, gradients = pool(PROBLEM)
    function(batch.x, batch.y)
    traced = function.experimental_get_tracing_count()
    for n in (0, 1, 2, 3, 4, 7):
        unit_size = 1 if num_microbatches is None else max(-(-n // 2), 1)
        expected, norms = clipped_sum([each[:n] for each in gradients], 0.5, unit_size)
        result = function(batch.x[:n], batch.y[:n])
        assert_all_close(result.gradients, expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(result.norms, norms, rtol=5e-5)
        assert int(result.examples_per_unit) == unit_size
        assert float(result.l2_sensitivity) == (0.5 if unit_size == 1 else 1.0)
    assert function.experimental_get_tracing_count() == traced


def test_every_unit_is_inside_the_ball():
    run, batch = clipper("eager", PROBLEM), scale_outlier(PROBLEM.batch(6), 3)
    for row in range(6):
        result = run(take(batch, [row]), 1e-3)
        flat = np.concatenate([np.ravel(part) for part in result.gradients])
        assert np.linalg.norm(flat.astype("float64")) <= 1e-3 * (1 + 1e-6)


@pytest.mark.slow
def test_removing_an_example_moves_the_sum_by_at_most_the_sensitivity():
    # The other rows have a part in what Keras divides by.
    problem = PROBLEMS["ignored_class"]
    batch = scale_outlier(problem.batch(4), 1)
    clip = 0.5 * active_clip(problem_gradients(problem, batch))
    run = clipper("eager", problem)
    whole = run(batch, clip)
    for row in range(4):
        rest = take(batch, np.arange(4) != row)
        part = run(rest, clip)
        moved = [
            np.ravel(a - b)
            for a, b in zip(whole.gradients, part.gradients, strict=True)
        ]
        moved = np.linalg.norm(np.concatenate(moved))
        assert moved <= float(whole.l2_sensitivity) * (1 + 1e-4)


# ------------------------------------------------------------------- sample weights


@pytest.mark.slow
def test_weights_scale_losses_before_clipping():
    x, y, _ = PROBLEM.batch(5)
    sample_weight = np.array([0.0, 1e-3, 1.0, 10.0, 1e6], "float32")
    batch = Batch(x, y, sample_weight)
    compare(clipper("eager", PROBLEM), batch, problem_gradients(PROBLEM, batch))


# --------------------------------------------------------------------- microbatches


@pytest.mark.parametrize(
    ("rows", "num_microbatches", "unit_size"),
    [
        ([0, 1, 2, 3, 4, 7], 6, 1),
        ([0, 1, 2, 3, 4, 7], 1, 6),
        ([0, 1, 2, 3, 7], 2, 3),
        ([0, 1, 2, 3, 4, 5, 7], 3, 3),
        ([0, 1, 2, 3, 7], 4, 2),
        ([0, 7, 2], 8, 1),
        ([7], 1, 1),
    ],
)
def test_means_of_consecutive_examples_are_clipped(rows, num_microbatches, unit_size):
    run = clipper("eager", PROBLEM, num_microbatches=num_microbatches)
    result = check(run, PROBLEM, rows, unit_size)
    assert int(result.examples_per_unit) == unit_size


def test_a_bad_example_takes_its_microbatch_with_it():
    run = clipper("eager", PROBLEM, num_microbatches=3)
    result = check(run, PROBLEM, [0, 1, 3, 8, 4, 5], unit_size=2)
    np.testing.assert_array_equal(np.isfinite(result.norms), [True, False, True])


# ---------------------------------------------------------------- padding and users


def padded(scheme_options):
    """A drawn batch with padding, which is large, and the rows that it is of."""
    x, y, _ = PROBLEM.batch(7)
    x[2] *= 1e6
    drawn = tfdp.data.PoissonDataset(x, y, expected_batch_size=4, **scheme_options)
    (x, y), is_padding = drawn.batch_of(
        np.array([3, 5, -1, 2, -1, -1, 0, -1, -1, -1, -1, -1])
    )
    x[is_padding], y[is_padding] = 1e3, -1e3
    return x, y, is_padding


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("passes", [None, 6])
@pytest.mark.parametrize("users", [None, 3])
def test_padding_is_no_example(mode, passes, users):
    bound = {"max_batch_size": 7}
    of_users = {"user_ids": np.arange(7) % 5, "examples_per_user": users}
    x, y, is_padding = padded(of_users if users else bound)
    gradients = problem_gradients(PROBLEM, Batch(x[~is_padding], y[~is_padding], None))
    if users:  # Two rows of the first, one each of two others.
        gradients = [
            np.stack([each[:2].mean(0), each[2], each[3]]) for each in gradients
        ]
    clip = active_clip(gradients)
    expected, norms = clipped_sum(gradients, clip)
    assert (norms > clip).any()
    model = model_of(PROBLEM)

    def clipped(x, y, is_padding):
        return tfdp.clipped_gradients(
            model,
            "mse",
            x,
            y,
            l2_norm_clip=clip,
            physical_batch_size=passes,
            is_padding=is_padding,
            examples_per_user=users,
        )

    if mode == "graph":
        specs = [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in (x, y)]
        specs.append(tf.TensorSpec([None], tf.bool))
        clipped = tf.function(clipped, input_signature=specs, autograph=False)
    result = clipped(x, y, is_padding)
    assert_all_close(result.gradients, expected, rtol=0, atol=1e-4 * clip)
    np.testing.assert_allclose(result.norms, norms, rtol=5e-5)
    assert float(result.l2_sensitivity) == pytest.approx(clip)
    # Without a row it is an empty batch.
    nothing = clipped(x[:0], y[:0], is_padding[:0])
    assert not any(np.any(each) for each in nothing.gradients)
    # A user, or an example, that goes takes as much as it may.
    without = clipped(x, y, is_padding | (np.arange(12) < 3))
    moved = [a - b for a, b in zip(result.gradients, without.gradients, strict=True)]
    moved = np.linalg.norm(np.concatenate([np.ravel(each) for each in moved]))
    assert moved <= clip * (1 if users else 2) * (1 + 1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_padding": np.zeros(3, bool)}, "is_padding with 3 rows"),
        ({"examples_per_user": 2}, "examples_per_user=2, 5 rows"),
        ({"examples_per_user": 0}, "`examples_per_user` must be a whole"),
        (
            {"examples_per_user": 5, "physical_batch_size": 3},
            "whole microbatches, or users",
        ),
        (
            {"is_padding": np.zeros(5, bool), "num_microbatches": 5},
            "beside `is_padding`",
        ),
        ({"examples_per_user": 5, "num_microbatches": 1}, "beside `examples_per_user`"),
    ],
    ids=str,
)
def test_padding_and_users_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        refused(**changes)()


# ------------------------------------------------------------------ what it accepts


def root_of_squares(y_true, y_pred):
    return tf.sqrt(tf.reduce_sum(tf.square(y_true - y_pred), axis=-1))


def coupled_rows(y_true, y_pred):
    """Must never see more than the rows it may couple."""
    return tf.reduce_sum(tf.square(y_pred - y_true)) * tf.reduce_mean(y_pred)


@pytest.mark.parametrize("loss", [root_of_squares, coupled_rows])
def test_losses_may_be_functions(loss):
    batch, model, expected = PROBLEM.batch(4), model_of(PROBLEM), []
    for row in range(4):
        with tf.GradientTape() as tape:
            one = take(batch, [row])
            value = tf.reduce_sum(loss(tf.constant(one.y), model(one.x)))
        expected.append([
            np.array(g) for g in tape.gradient(value, model.trainable_variables)
        ])
    gradients = [
        np.stack(rows).astype("float64") for rows in zip(*expected, strict=True)
    ]
    clip = active_clip(gradients)
    result = tfdp.clipped_gradients(model, loss, batch.x, batch.y, l2_norm_clip=clip)
    assert_all_close(
        result.gradients, clipped_sum(gradients, clip)[0], rtol=0, atol=1e-4 * clip
    )


@pytest.mark.parametrize("loss", ["mse", keras.losses.MeanSquaredError])
def test_losses_may_be_named_or_objects(loss):
    batch, gradients = pool(PROBLEM)
    loss = loss if isinstance(loss, str) else loss()
    result = tfdp.clipped_gradients(
        model_of(PROBLEM), loss, batch.x[:4], batch.y[:4], l2_norm_clip=0.5
    )
    expected, _ = clipped_sum([each[:4] for each in gradients], 0.5)
    assert_all_close(result.gradients, expected, rtol=0, atol=1e-4)


def test_inputs_may_be_arrays_and_tensors():
    x, y, _ = PROBLEM.batch(3)
    arrays, tensors = (
        tfdp.clipped_gradients(
            model_of(PROBLEM), "mse", kind(x), kind(y), l2_norm_clip=0.5
        )
        for kind in (np.asarray, tf.constant)
    )
    assert_all_close(arrays.gradients, tensors.gradients, rtol=0)


@pytest.mark.parametrize("engine", ["auto", "vectorized", VectorizedEngine()])
def test_engines_by_name_and_as_objects(engine):
    check(clipper("eager", PROBLEM, engine=engine), PROBLEM, [0, 7, 2])


@pytest.mark.slow
def test_a_model_that_was_never_called_is_built_and_runs_in_training_mode():
    seen = []

    class Spy(keras.layers.Dense):
        def call(self, x, training=None):
            seen.append(training)
            return super().call(x)

    result = tfdp.clipped_gradients(
        keras.Sequential([Spy(2)]),
        "mse",
        np.ones([3, 4], "float32"),
        np.ones([3, 2]),
        l2_norm_clip=1.0,
    )
    assert [gradient.shape for gradient in result.gradients] == [[4, 2], [2]]
    assert seen[-1] is True


@pytest.mark.slow
def test_examples_get_dropout_masks_of_their_own():
    model = keras.Sequential([keras.Input((500,)), keras.layers.Dropout(0.5, seed=1)])
    model.add(keras.layers.Dense(1, kernel_initializer="ones", use_bias=False))
    step = tf.function(
        lambda x: tfdp.clipped_gradients(
            model, lambda _, y_pred: y_pred[:, 0], x, x[:, :1], l2_norm_clip=1e6
        )
    )
    x = tf.repeat(tf.eye(2, 500)[:1] * 0 + 1, 2, axis=0)
    first, second = step(x).gradients[0].numpy().ravel(), step(x).gradients[0].numpy()
    # Twice the same mask would leave 0 and 4 only.
    assert np.mean(np.isclose(first, 2)) == pytest.approx(0.5, abs=0.1)
    assert np.mean(np.isclose(first, second.ravel())) < 0.6


@pytest.mark.slow
def test_nothing_of_the_model_changes():
    model = PROBLEM.build()
    before = model.get_weights()
    tfdp.clipped_gradients(model, "mse", *PROBLEM.batch(3), l2_norm_clip=1.0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_clip_norm_may_be_the_optimizer_s_variable():
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=0.25, noise_multiplier=1.0)
    batch, gradients = pool(PROBLEM)
    result = tfdp.clipped_gradients(
        model_of(PROBLEM),
        "mse",
        batch.x[:3],
        batch.y[:3],
        l2_norm_clip=optimizer.l2_norm_clip,
    )
    expected, _ = clipped_sum([each[:3] for each in gradients], 0.25)
    assert_all_close(result.gradients, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_low_precision_stays_inside_the_ball(policy):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    x = np.linspace(-50, 50, 12).reshape(3, 4).astype("float32")
    result = tfdp.clipped_gradients(
        model, "mse", x, np.ones([3, 3], "float32"), l2_norm_clip=0.5
    )
    flat = np.concatenate([np.ravel(part) for part in result.gradients])
    assert {gradient.dtype for gradient in result.gradients} == {tf.float32}
    assert 0 < np.linalg.norm(flat) <= 1.5 * (1 + 1e-5)


# -------------------------------------------------------------------------- refusals


def refused(**changes):
    x, y, _ = PROBLEM.batch()
    arguments = {"model": model_of(PROBLEM), "loss": "mse", "l2_norm_clip": 1.0}
    arguments |= {"x": x, "y": y} | changes
    return lambda: tfdp.clipped_gradients(**arguments)


@pytest.mark.parametrize("value", [0, -1.0, np.nan, np.inf])
def test_clip_norm_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match=r"`l2_norm_clip` must be positive.*Received"):
        refused(l2_norm_clip=value)()


@pytest.mark.parametrize("value", ["1", None, True])
def test_clip_norm_must_be_a_number(value):
    with pytest.raises(TypeError, match=r"`l2_norm_clip` must be a number\. Received"):
        refused(l2_norm_clip=value)()


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-2, ValueError), (1.5, ValueError), ("2", TypeError)],
)
def test_microbatches_must_be_a_whole_number(value, error):
    with pytest.raises(error, match=r"`num_microbatches` must be a whole.*Received"):
        refused(num_microbatches=value)()


@pytest.mark.parametrize("engine", ["fast", None, 3, VectorizedEngine])
def test_unknown_engines_are_refused(engine):
    with pytest.raises(ValueError, match=r"`engine` must be .*Received: engine=.*Use"):
        refused(engine=engine)()


def test_a_model_without_trainable_variables_is_refused():
    model = PROBLEM.build()
    model.trainable = False
    with pytest.raises(ValueError, match=r"nothing to train\. Received: .*Set `model"):
        refused(model=model)()


def test_weights_that_cancel_are_refused():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    # Inside a traced function TensorFlow may wrap the `UnsupportedLossError`.
    with pytest.raises(Exception, match=r"cancels.*Use `reduction="):
        refused(loss=loss, sample_weight=np.ones(5, "float32"))()


@pytest.mark.slow
def test_autograph_has_nothing_to_say_of_a_traced_loop(caplog):
    model, batch = PROBLEM.build(), PROBLEM.batch(4)
    optimizer = tfdp.optimizers.DPSGD(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4
    )

    @tf.function
    def step(x, y):
        clipped_sum = tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1.0)
        optimizer.apply_clipped_sum(clipped_sum, model.trainable_variables)

    # TensorFlow's logger does not hand on what it prints.
    logger = logging.getLogger("tensorflow")
    logger.addHandler(caplog.handler)
    try:
        step(batch.x, batch.y)
    finally:
        logger.removeHandler(caplog.handler)
    assert "AutoGraph" not in caplog.text


# ------------------------------------------------------- what is checked, and when


def small():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    rng = np.random.default_rng(0)
    return model, rng.normal(size=(4, 3)).astype("float32"), rng.normal(size=(4, 2))


def coupled(y_true, y_pred):
    return tf.reduce_sum(tf.square(y_pred - tf.reduce_mean(y_pred, 0)), -1)


@pytest.mark.slow
def test_each_loss_is_checked():
    model, x, y = small()
    tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1.0)
    with pytest.raises(tfdp.errors.UnsupportedLossError, match="other examples"):
        tfdp.clipped_gradients(model, coupled, x, y, l2_norm_clip=1.0)
    # And one that was checked is not checked again.
    known = len(vars(model)["_checked_by_tfdp"])
    for loss in ("mse", "mse"):
        tfdp.clipped_gradients(model, loss, x, y, l2_norm_clip=1.0)
    assert len(vars(model)["_checked_by_tfdp"]) == known == 1


@pytest.mark.parametrize(
    ("rows", "received"),
    [
        ((3, 5, None), "x with 3 rows, y with 5 rows"),
        ((4, 1, None), "x with 4 rows, y with 1 rows"),
        ((4, 4, 3), "x with 4 rows, y with 4 rows, sample_weight with 3 rows"),
    ],
)
def test_data_of_different_lengths_are_refused(rows, received):
    model, _, _ = small()
    x, y, weights = (None if n is None else np.ones((n, 3), "float32") for n in rows)
    y = y[:, :2]
    weights = None if weights is None else weights[:, 0]
    with pytest.raises(ValueError, match=f"Received: {received}"):
        tfdp.clipped_gradients(model, "mse", x, y, weights, l2_norm_clip=1.0)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("engine", ["bookkeeping", "vectorized"])
def test_no_row_is_broadcast_where_graphs_do_not_know_lengths(engine, jit_compile):
    """One row of targets would be part of every loss."""
    model, x, _ = small()

    def clip(x, y, weights):
        return tfdp.clipped_gradients(
            model, "mse", x, y, weights, l2_norm_clip=1.0, engine=engine
        ).norms

    open_lengths = [tf.TensorSpec([None, *each]) for each in (x.shape[1:], (2,), ())]
    clip = tf.function(
        clip, autograph=False, input_signature=open_lengths, jit_compile=jit_compile
    )
    rows = len(x)
    assert len(clip(x, tf.ones((rows, 2)), tf.ones(rows))) == rows
    said = "Input to reshape" if jit_compile else "must have the same number of rows"
    for targets, weights in ((1, rows), (rows, 1), (rows + 1, rows), (rows, rows - 1)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=said):
            clip(x, tf.ones((targets, 2)), tf.ones(weights))


def test_tensorflows_sparse_loss_takes_whole_numbers():
    model, x, _ = small()
    labels = np.array([0, 1, 1, 0])

    def loss(y_true, y_pred):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y_true, y_pred)

    ours = tfdp.clipped_gradients(
        model,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        x,
        labels,
        l2_norm_clip=0.1,
    )
    theirs = tfdp.clipped_gradients(model, loss, x, labels, l2_norm_clip=0.1)
    for one, other in zip(ours.gradients, theirs.gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
