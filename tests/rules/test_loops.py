"""Loops that are taken whole: what each step does with variables, for all steps at once."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.engine_checks import (
    BATCHES,
    OUTLIER,
    check,
    check_clipped,
    clipped,
    ghost_like,
    runner,
)
from tests.problems.building import floats, sequential
from tests.problems.loops import (
    PROBLEMS,
    TIME,
    UNROLLED,
    WIDTH,
    Cell,
    Mixed,
    of,
    of_a_gradient,
    over_time,
)
from tests.problems.problem import problem, register
from tests.reference import assert_all_close, clipped_sum, problem_gradients
from tfdp.checks.engine import choose
from tfdp.engines.apart import ApartEngine
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.batch import Batch as RowsOfBatch
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

WHOLE = {name: each for name, each in PROBLEMS.items() if name not in UNROLLED}
QUICK = {"cell"}
# Ways into a loop and out of it, not what its steps do with weights.
ONE_MORE = {"at_most", "called", "counted", "over_constants", "over_time"}


def marks_of(name):
    if name in QUICK:
        return []
    return [pytest.mark.exhaustive if name in ONE_MORE else pytest.mark.slow]


NAMES = [pytest.param(name, marks=marks_of(name)) for name in WHOLE]


def chosen(problem, engine="auto"):
    objective = Objective.of(problem.build(), problem.loss())
    return choose(engine, objective, tuple(problem.batch(3)))


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_equals_one_example_at_a_time(name):
    problem = WHOLE[name]
    engine = chosen(problem)
    assert type(engine) is BookkeepingEngine
    assert engine.unrolls_loops is None
    run = runner(problem, [engine, ghost_like(engine)], "graph")
    for rows in BATCHES if name == "cell" else [OUTLIER]:
        check(problem, run, rows)
    check_clipped(problem, run, [1e6])


COMPILED = {"looked_up", "of_series", "until"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in COMPILED else pytest.mark.exhaustive)
        for name in WHOLE
    ],
)
def test_under_xla_with_units_of_two(name):
    problem = WHOLE[name]
    engine = chosen(problem)
    run = runner(problem, [engine, ghost_like(engine)], "xla", unit_size=2)
    check(problem, run, OUTLIER, unit_size=2)


def test_the_graph_does_not_grow_with_the_steps():
    """One loop forwards and one backwards, whatever their number."""

    def operations(time):
        problem = of(over_time, time, WIDTH)
        objective = Objective.of(problem.build(), "mse")

        @tf.function(autograph=False)
        def run(x, y):
            rows = RowsOfBatch(x, y, None, tf.zeros([3], tf.bool))
            clip = tf.constant(1.0)
            return BookkeepingEngine().clip_and_sum(
                objective, rows, l2_norm_clip=clip, rows_per_unit=1
            )[0]

        x, y, _ = problem.batch(3)
        graph = run.get_concrete_function(tf.constant(x), tf.constant(y)).graph
        types = [op.type for op in graph.get_operations()]
        assert sum(name.endswith("While") for name in types) == 2
        return types

    assert operations(4) == operations(40)


def of_no_rows(layer, x):
    """A loop over as many rows of a matrix as the batch may have."""
    step = lambda _, v: ops.tanh(ops.matmul(v, layer.own))  # noqa: E731
    return ops.matmul(x, ops.fori_loop(0, TIME, step, ops.eye(WIDTH)))


def rows_second(layer, x):
    """A matrix whose rows come before those of the batch."""
    step = lambda _, h: ops.tanh(ops.sum(layer.own[:, None] * h, 0) + h)  # noqa: E731
    return ops.fori_loop(0, TIME, step, x)


def rows_last(layer, x):
    """The rows on the last axis."""
    step = lambda _, h: ops.tanh(ops.matmul(layer.own, h))  # noqa: E731
    return ops.transpose(ops.fori_loop(0, TIME, step, ops.transpose(x)))


@pytest.mark.parametrize(
    "run",
    [
        of_no_rows,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (rows_second, rows_last)
        ),
    ],
)
def test_as_many_rows_as_features(run):
    """Lengths of other axes than the rows' are theirs too."""
    problem = of(run, WIDTH)
    batch = problem.batch(WIDTH)
    expected, norms = clipped_sum(problem_gradients(problem, batch), 0.1)
    found = tfdp.clipped_gradients(
        problem.build(), "mse", batch.x, batch.y, l2_norm_clip=0.1
    )
    np.testing.assert_allclose(found.norms, norms, rtol=2e-5)
    assert_all_close(found.gradients, expected, rtol=0, atol=2e-5 * 0.1 * WIDTH)


@pytest.mark.slow
def test_a_step_draws_once(rng):
    """Dropout in a cell: the gradients are those of what was drawn, in every step."""

    @register
    class Dropping(Cell):
        def __init__(self, **options):
            super().__init__(**options)
            self.dropout = layers.Dropout(0.5, seed=1)

        def call(self, x, states):
            return super().call(self.dropout(x, training=True), states)

    def build():
        model = sequential((TIME, WIDTH), layers.RNN(Dropping()))
        for weight in model.trainable_variables:
            weight.assign(np.random.default_rng(1).normal(size=weight.shape))
        return model

    shapes = (1, TIME, WIDTH), (1, WIDTH)
    x, y = (tf.constant(rng.normal(size=each), tf.float32) for each in shapes)
    model, objective = build(), Objective.of(build(), "mse")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    expected = tape.gradient(loss, model.trainable_variables)

    @tf.function(autograph=False)
    def run(x, y):
        return clipped(BookkeepingEngine(), objective, x, y, 1e6)

    for one, other in zip(run(x, y)[0], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)


def symbolic(layer, x):
    """A gradient by no tape, where there is one, which does not ask for the weight."""
    with (
        tf.GradientTape()
        if tf.executing_eagerly()
        else contextlib.nullcontext() as tape
    ):
        if tape is not None:
            tape.watch(x)
        h = ops.fori_loop(0, TIME, lambda _, h: ops.tanh(h + layer.own[0]), x)
    return h + (tf.gradients(h, x)[0] if tape is None else tape.gradient(h, x))


@pytest.mark.parametrize(
    "run", [symbolic, pytest.param(of_a_gradient, marks=pytest.mark.slow)]
)
def test_a_gradient_of_ones_own_goes_through_single_steps(run):
    """Another way from the weights to the loss than by what a step makes of rows."""
    problem = of(run, WIDTH)
    engine = chosen(problem)
    assert engine.unrolls_loops
    check(problem, runner(problem, [engine], "graph"), OUTLIER)


@pytest.mark.slow
def test_functions_in_a_step_stay_what_they_are():
    """TensorFlow keeps what it has traced once, also a tape that did not record."""

    @tf.function(autograph=False)
    def slope(h):
        with tf.GradientTape() as tape:
            tape.watch(h)
            value = tf.reduce_sum(tf.tanh(h) ** 3)
        return tape.gradient(value, h, unconnected_gradients="zero")

    def sloping(layer, x):
        step = lambda _, h: ops.tanh(ops.matmul(h, layer.own)) + slope(h)  # noqa: E731
        return ops.fori_loop(0, TIME, step, x)

    x, y, _ = of(sloping, WIDTH).batch(3)
    tfdp.clipped_gradients(of(sloping, WIDTH).build(), "mse", x, y, l2_norm_clip=1.0)
    expected = np.tanh(x) ** 2 * (1 - np.tanh(x) ** 2) * 3
    np.testing.assert_allclose(slope(tf.constant(x)), expected, rtol=1e-4)


@pytest.mark.slow
def test_loops_of_half_precision_are_taken_whole():
    def build():
        cell = Cell(dtype="mixed_float16")
        return sequential((TIME, WIDTH), layers.RNN(cell, dtype="mixed_float16"))

    halved = problem("halved", build, floats((TIME, WIDTH), (WIDTH,)), "mse")
    engine = chosen(halved)
    assert type(engine) is BookkeepingEngine
    assert engine.unrolls_loops is None
    batch = halved.batch(5)
    expected, norms = clipped_sum(problem_gradients(halved, batch), 1e6)
    found = tfdp.clipped_gradients(
        halved.build(), "mse", batch.x, batch.y, l2_norm_clip=1e6
    )
    np.testing.assert_allclose(found.norms, norms, rtol=0.02)
    assert_all_close(found.gradients, expected, rtol=0, atol=0.02 * norms.max())


@pytest.mark.slow
def test_cells_are_not_lost_apart():
    problem = WHOLE["cell"]
    check(problem, runner(problem, [ApartEngine()]), OUTLIER)


@pytest.mark.slow
def test_a_model_with_a_loop_trains_and_is_explained(rng):
    private = tfdp.DPModel(PROBLEMS["counted"].build())
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    private.compile(optimizer, "mse")
    x, y = rng.normal(size=(8, WIDTH)), rng.normal(size=(8, 2))
    private.fit(x, y, batch_size=4, verbose=0)
    assert "own" in private.explain()


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "weights"), [(Cell, 3), (Mixed, 3)])
def test_each_weight_of_a_cell_is_explained_once(cell, weights, rng):
    private = tfdp.DPModel(sequential((TIME, WIDTH), layers.RNN(cell())))
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    private.compile(optimizer, "mse")
    x, y = rng.normal(size=(8, TIME, WIDTH)), rng.normal(size=(8, WIDTH))
    private.fit(x, y, batch_size=4, verbose=0)
    lines = [line for line in private.explain().splitlines() if "rnn/" in line]
    assert len(lines) == weights, lines


def mixing(layer, x):
    """Rows that meet in a step."""
    step = lambda _, h: ops.tanh(ops.matmul(h - ops.mean(h, 0), layer.own))  # noqa: E731
    return ops.fori_loop(0, TIME, step, x)


def rolled(layer, x):
    """Rows that take each other's places."""
    step = lambda _, h: ops.matmul(ops.roll(h, 1, 0), layer.own)  # noqa: E731
    return ops.fori_loop(0, TIME, step, x)


def remembering(layer, x):
    """The first row, seen by all others in the last step."""
    step = lambda _, h: ops.matmul(h, layer.own) + h[:1]  # noqa: E731
    return ops.fori_loop(0, TIME, step, x)


def of_weights(layer, x):
    """The gradient of a weight, which all rows are in."""
    with tf.GradientTape() as tape:
        step = lambda _, h: ops.tanh(ops.matmul(h, layer.own))  # noqa: E731
        h = ops.fori_loop(0, TIME, step, x)
    gradient = tape.gradient(h, layer.own.value, unconnected_gradients="zero")
    return h * (1 + ops.sum(ops.square(gradient)))


@pytest.mark.parametrize("run", [mixing, rolled, remembering, of_weights])
def test_rows_that_meet_are_refused(run):
    for engine in ("auto", "bookkeeping"):
        with pytest.raises(UnsupportedLayerError, match="rows of a batch meet"):
            chosen(of(run, WIDTH), engine)
