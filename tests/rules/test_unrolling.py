"""Loops of a known number of steps, in which variables are used or layers called."""

import concurrent.futures

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.engine_checks import OUTLIER, check, check_clipped, ghost_like, runner
from tests.problems.building import floats, sequential
from tests.problems.problem import problem, register
from tfdp.checks.engine import choose
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Objective
from tfdp.rules.unrolling import MOST_UNROLLED, loops_run_by, unrolled

pytestmark = pytest.mark.keras_private

TIME, WIDTH = 4, 3


@register
class Loop(layers.Layer):
    """Uses a matrix of its own, or calls a layer, in a loop."""

    def __init__(self, run, **kwargs):
        super().__init__(**kwargs)
        self.run = run
        self.inner = layers.Dense(WIDTH, "tanh")

    def build(self, shape):
        self.inner.build(shape)
        self.own = self.add_weight(shape=(WIDTH, WIDTH), name="own")

    def call(self, x):
        return self.run(self, x)


def counted(layer, x):
    return ops.fori_loop(
        0, TIME, lambda _, h: h + ops.tanh(ops.matmul(h, layer.own)), layer.inner(x)
    )


def called(layer, x):
    step = lambda t, h: h + layer.inner(h) * ops.cast(t, h.dtype)  # noqa: E731
    return ops.fori_loop(0, TIME, step, ops.matmul(x, layer.own))


def until(layer, x):
    """As long as a time of steps of a quarter is below 1."""
    return ops.while_loop(
        lambda time, _: time < 1.0,
        lambda time, h: (time + 0.25, layer.inner(ops.matmul(h, layer.own))),
        (0.0, x),
    )[1]


def at_most(layer, x):
    return tf.while_loop(
        lambda _: True,
        lambda h: [layer.inner(tf.matmul(h, tf.convert_to_tensor(layer.own)))],
        [x],
        maximum_iterations=TIME,
    )[0]


def nested(layer, x):
    inner = lambda h: ops.fori_loop(0, 2, lambda _, h: layer.inner(h), h)  # noqa: E731
    return ops.fori_loop(0, 2, lambda _, h: inner(ops.matmul(h, layer.own)), x)


def over_time(layer, x):
    def step(h, x):
        h = ops.tanh(ops.matmul(h, layer.own) + layer.inner(x))
        return h, h

    start = ops.zeros_like(x[:, 0])
    return ops.scan(step, start, ops.transpose(x, (1, 0, 2)))[1][-1]


def over_constants(layer, x):
    def step(h, x):
        h = ops.tanh(ops.matmul(h, layer.own)) + layer.inner(h) * x
        return h, h

    return ops.scan(step, x, ops.ones((TIME, 1, WIDTH)))[0]


@register
class Cell(layers.Layer):
    """A recurrent cell of one's own."""

    state_size = WIDTH

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], WIDTH), name="kernel")
        self.recurrent = self.add_weight(shape=(WIDTH, WIDTH), name="recurrent")
        self.scale = self.add_weight(shape=(WIDTH,), initializer="ones", name="scale")

    def call(self, x, states):
        h = ops.matmul(x, self.kernel) + ops.matmul(states[0], self.recurrent)
        h = ops.tanh(h) * self.scale
        return h, [h]


def fresh(make):
    """Make a model whose layers have the same names each time."""
    keras.utils.clear_session(free_memory=False)
    return make()


def of(run, *shape):
    def make():
        return sequential(shape, Loop(run), layers.Dense(2))

    return problem(run.__name__, lambda: fresh(make), floats(shape, (2,)), "mse")


def of_cell():
    return sequential((TIME, WIDTH), layers.RNN(Cell()), layers.Dense(2))


PROBLEMS = {
    **{
        run.__name__: of(run, WIDTH)
        for run in (counted, called, until, at_most, nested)
    },
    "over_time": of(over_time, TIME, WIDTH),
    "cell": problem("cell", lambda: fresh(of_cell), floats((TIME, WIDTH), (2,)), "mse"),
}


def chosen(problem, engine="auto"):
    objective = Objective.of(problem.build(), problem.loss())
    return choose(engine, objective, tuple(problem.batch(3)))


QUICK = {"cell"}
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in PROBLEMS
]


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_equals_one_example_at_a_time(name):
    problem = PROBLEMS[name]
    engine = chosen(problem)
    assert type(engine) is BookkeepingEngine
    assert engine.unrolls_loops
    run = runner(problem, [engine, ghost_like(engine)], "graph")
    check(problem, run, OUTLIER)
    check_clipped(problem, run, [1e6])


@pytest.mark.slow
def test_what_is_too_long_or_ended_by_data_stays_a_loop():
    def long(layer, x):
        step = lambda _, h: layer.inner(h)  # noqa: E731
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
def test_a_model_with_a_loop_trains_and_is_explained(rng):
    problem = PROBLEMS["counted"]
    private = tfdp.DPModel(problem.build())
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    private.compile(optimizer, "mse")
    x, y = rng.normal(size=(8, WIDTH)), rng.normal(size=(8, 2))
    private.fit(x, y, batch_size=4, verbose=0)
    assert "own" in private.explain()


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
