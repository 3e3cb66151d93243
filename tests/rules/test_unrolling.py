"""Loops of a known number of steps, taken step by step."""

import concurrent.futures
import dataclasses

import pytest
import tensorflow as tf
from keras import ops

from tests.engine_checks import OUTLIER, check, check_clipped, ghost_like, runner
from tests.problems.loops import PROBLEMS, UNROLLED, WIDTH, of
from tfdp.checks.engine import choose
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Objective
from tfdp.rules.unrolling import MOST_UNROLLED, loops_run_by, unrolled

pytestmark = pytest.mark.keras_private


def chosen(problem, engine="auto"):
    objective = Objective.of(problem.build(), problem.loss())
    return choose(engine, objective, tuple(problem.batch(3)))


# Taken so where somebody asks for it.
ASKED = ("called", "at_most", "over_time", "cell")


@pytest.mark.parametrize(
    "name",
    [
        "by_number",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in [*sorted(UNROLLED - {"by_number"}), "until"]
        ),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ASKED),
    ],
)
def test_a_loop_equals_one_example_at_a_time(name):
    problem = PROBLEMS[name]
    engine = dataclasses.replace(BookkeepingEngine(), unrolls_loops=True)
    if name in UNROLLED:
        engine = chosen(problem)
        assert type(engine) is BookkeepingEngine
        assert engine.unrolls_loops
    run = runner(problem, [engine, ghost_like(engine)], "graph")
    check(problem, run, OUTLIER)
    check_clipped(problem, run, [1e6])


@pytest.mark.slow
def test_what_is_too_long_or_ended_by_data_stays_a_loop():
    def long(layer, x):
        step = lambda _, h: tf.nn.silu(layer.inner(h))  # noqa: E731
        return ops.fori_loop(0, MOST_UNROLLED + 1, step, ops.matmul(x, layer.own))

    def by_data(layer, x):
        steps = ops.cast(ops.shape(x)[0], "int32")
        return ops.fori_loop(0, steps, lambda _, h: layer.inner(h), x) + layer.own[0]

    for run in (long, by_data):
        with pytest.raises(UnsupportedLayerError, match=r"fixed|rows of a batch meet"):
            chosen(of(run, WIDTH), "bookkeeping")


@pytest.mark.slow
def test_a_loop_that_no_gradient_comes_through_is_left_alone():
    def apart(layer, x):
        step = lambda n, h: (n + 1, layer.inner(h))  # noqa: E731
        h = tf.while_loop(lambda n, _: n < 3, step, (0, x), back_prop=False)[1]
        return tf.matmul(x, tf.convert_to_tensor(layer.own)) + h

    engine = chosen(of(apart, WIDTH))
    assert not (type(engine) is BookkeepingEngine and engine.unrolls_loops)


@pytest.mark.slow
def test_a_loop_without_variables_is_left_alone():
    def smooth(layer, x):
        x = ops.matmul(layer.inner(x), layer.own)
        return ops.fori_loop(0, 100, lambda _, h: 0.5 * (h + ops.roll(h, 1, -1)), x)

    engine = chosen(of(smooth, WIDTH))
    assert type(engine) is BookkeepingEngine
    assert engine.unrolls_loops is None


@pytest.mark.parametrize(
    ("cond", "body", "start", "most", "end"),
    [
        (lambda i: i < 3, lambda i: i + 1, 0, None, 3),
        (lambda t: t < 1, lambda t: t + 0.25, 0.0, None, 1.0),
        (lambda i: (i < 10) & (i % 7 < 6), lambda i: i * 2, 1, None, 16),
        (lambda i: i < 100, lambda i: i + 1, 0, 5, 5),
        (lambda i: i < 0, lambda i: i + 1, 2, None, 2),
    ],
)
def test_it_counts_as_a_loop_does(cond, body, start, most, end):
    @tf.function(autograph=False)
    def both():
        options = {"maximum_iterations": most}
        args = (cond, lambda i: [body(i)], [tf.constant(start)])
        return (
            unrolled(*args, **options),
            tf.while_loop(*args, **options),
        )

    graph = both.get_concrete_function().graph
    assert sum(op.type.endswith("While") for op in graph.get_operations()) == 1
    assert [float(each[0]) for each in both()] == [end, end]


@pytest.mark.slow
def test_nothing_is_left_of_it_but_for_the_thread_that_records():
    chosen(PROBLEMS["counted"])

    def seen(*args, **kwargs):
        raise AssertionError

    with loops_run_by(seen):
        with pytest.raises(AssertionError):
            tf.while_loop(lambda i: i < 2, lambda i: [i + 1], [tf.constant(0)])
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            loop = other.submit(ops.fori_loop, 0, 2, lambda i, x: x + 1, tf.constant(0))
        assert int(loop.result()) == 2
    assert int(ops.fori_loop(0, 2, lambda i, x: x + 1, tf.constant(0))) == 2
