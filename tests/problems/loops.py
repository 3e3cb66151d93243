"""Layers that use variables, or call layers, in loops of a known number of steps."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.problems.building import floats, sequential
from tests.problems.problem import problem, register

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


def of_made(layer, x):
    """What is made of a weight before the loop, and another one as it is."""
    own = ops.softplus(layer.own)
    offset = ops.ones((2, 1)) * layer.own[0]
    return ops.fori_loop(
        0,
        TIME,
        lambda _, h: ops.tanh(ops.matmul(h, own) + offset[1:] + layer.own[2]),
        x,
    )


def passed_on(layer, x):
    """A weight that each step hands to the next."""
    return tf.while_loop(
        lambda number, *_: number < TIME,
        lambda number, h, own: (number + 1, ops.tanh(ops.matmul(h, own)), own),
        (0, x, tf.convert_to_tensor(layer.own)),
    )[1]


def looked_up(layer, x):
    """Rows of a matrix that the data decide about."""

    def step(_, h):
        return h * ops.take(layer.own, ops.argmax(h, -1), axis=0) + layer.own[0]

    return ops.fori_loop(0, TIME, step, x)


def of_series(layer, x):
    """Matrices and vectors on the last axis of something longer."""

    def step(_, h):
        h = ops.matmul(h, layer.own) + ops.where(h > 0, h * layer.own[0], layer.own[1])
        return ops.tanh(h + layer.inner(h) + ops.swapaxes(layer.own, 0, 1)[None, :1])

    return ops.fori_loop(0, TIME, step, x)[:, -1]


def of_one(layer, x):
    """A single position that becomes an entry, and a position again."""

    def step(_, h):
        flat = ops.matmul(ops.reshape(h, (-1, WIDTH)), layer.own)
        return ops.tanh(ops.reshape(flat, (-1, 1, WIDTH)) + layer.inner(h))

    return ops.fori_loop(0, TIME, step, x)[:, -1]


def long(layer, x):
    """More steps than are taken one by one."""
    step = lambda _, h: ops.tanh(layer.inner(h) + x)  # noqa: E731
    return ops.fori_loop(0, 100, step, ops.matmul(x, layer.own))


def by_number(layer, x):
    """Another row of a matrix in each step."""
    step = lambda t, h: h * ops.take(layer.own, t % WIDTH, axis=0) + x  # noqa: E731
    return ops.fori_loop(0, TIME, step, x)


def decaying(layer, x):
    """A matrix that each step changes."""
    step = lambda _, pair: (ops.tanh(pair[0] @ pair[1]), 0.5 * pair[1])  # noqa: E731
    own = tf.convert_to_tensor(layer.own)
    return ops.fori_loop(0, TIME, step, (x, own))[0]


def renewed(layer, x):
    """A matrix that each step reads for the next one."""
    step = lambda _, pair: (ops.tanh(pair[0] @ pair[1]), layer.own * 1.0)  # noqa: E731
    return ops.fori_loop(0, TIME, step, (x, tf.eye(WIDTH, dtype=x.dtype)))[0]


def given_back(layer, x):
    """A matrix that the last step gives to what follows the loop."""
    step = lambda _, pair: (ops.tanh(pair[0] @ layer.own), layer.own * 2.0)  # noqa: E731
    h, own = ops.fori_loop(0, TIME, step, (x, tf.eye(WIDTH, dtype=x.dtype)))
    return h @ own


def without_rows(layer, x):
    """A loop that makes something of a weight alone, and one of the rows."""
    step = lambda _, v: ops.tanh(ops.matmul(v, layer.own) + 1)  # noqa: E731
    return x * ops.fori_loop(0, TIME, step, ops.ones((1, WIDTH)))


def with_a_gradient(layer, x):
    """An activation that TensorFlow gives a gradient of its own."""
    step = lambda _, h: tf.nn.silu(ops.matmul(h, layer.own))  # noqa: E731
    return ops.fori_loop(0, TIME, step, x)


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


@register
class Mixed(layers.Layer):
    """A recurrent cell with a layer in it, and a weight of its own."""

    state_size = WIDTH

    def build(self, shape):
        self.inner = layers.Dense(WIDTH)
        self.inner.build(shape)
        self.kept = self.add_weight(shape=(WIDTH,), initializer="ones", name="kept")

    def call(self, x, states):
        h = ops.tanh(self.inner(x) + states[0] * ops.sigmoid(self.kept))
        return h, [h]


def of_activation():
    """What the rule of the layer gives up for the weights of its activation."""
    return sequential((TIME, WIDTH), layers.SimpleRNN(WIDTH, activation=layers.PReLU()))


def with_zeros(rng):
    x = rng.normal(size=(TIME, WIDTH))
    x[rng.integers(TIME)] = 0
    return x, rng.normal(size=WIDTH)


def fresh(make):
    """Make a model whose layers have the same names each time."""
    keras.utils.clear_session(free_memory=False)
    return make()


def of(run, *shape):
    def make():
        return sequential(shape, Loop(run), layers.Dense(2))

    return problem(run.__name__, lambda: fresh(make), floats(shape, (2,)), "mse")


def of_gradients_inside(layer, x):
    """A gradient that each step takes."""

    def step(_, h):
        with tf.GradientTape() as tape:
            tape.watch(h)
            value = ops.sum(ops.square(ops.tanh(ops.matmul(h, layer.own))), -1)
        return ops.tanh(h @ layer.own) - 0.3 * tape.gradient(value, h)

    return ops.fori_loop(0, TIME, step, x)


def of_a_gradient(layer, x):
    """A gradient that the layer takes itself, back through the loop."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        step = lambda _, h: ops.tanh(ops.matmul(h, layer.own))  # noqa: E731
        h = ops.fori_loop(0, TIME, step, x)
    return h + tape.gradient(h, x)


def of_cell():
    return sequential((TIME, WIDTH), layers.RNN(Cell()), layers.Dense(2))


def of_masked_cell():
    """Time steps that do not count, backwards, with a weight of one more kind."""
    return sequential(
        (TIME, WIDTH),
        layers.Masking(),
        layers.RNN(Cell(), return_sequences=True),
        layers.RNN([layers.LSTMCell(2), Mixed()], go_backwards=True),
    )


_ON_VECTORS = (
    counted, called, until, at_most, over_constants, of_made, of_gradients_inside, passed_on,
    looked_up, long,
    nested, by_number, decaying, renewed, given_back, without_rows, with_a_gradient,
)  # fmt: skip

PROBLEMS = {
    **{run.__name__: of(run, WIDTH) for run in _ON_VECTORS},
    **{run.__name__: of(run, TIME, WIDTH) for run in (over_time, of_series)},
    "of_one": of(of_one, 1, WIDTH),
    "cell": problem("cell", lambda: fresh(of_cell), floats((TIME, WIDTH), (2,)), "mse"),
    "of_activation": problem(
        "of_activation",
        lambda: fresh(of_activation),
        floats((TIME, WIDTH), (WIDTH,)),
        "mse",
    ),
    "masked_cell": problem(
        "masked_cell", lambda: fresh(of_masked_cell), with_zeros, "mse"
    ),
}

# Problems whose loops are not taken whole.
UNROLLED = {
    "nested", "by_number", "decaying", "renewed", "given_back", "without_rows", "with_a_gradient",
}  # fmt: skip
