"""Variables that are used elsewhere than in calls of their layers, and book-keeping."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.engine_checks import BATCHES, OUTLIER, check, check_clipped, runner
from tests.problems import Problem, floats, register, sequential
from tests.reference import assert_all_close, clipped_sum, problem_gradients
from tfdp.checks.engine import choose
from tfdp.engines.apart import ApartEngine
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Objective
from tfdp.rules import made

pytestmark = pytest.mark.keras_private

ENGINES = [BookkeepingEngine(), GhostEngine()]
IDS, LENGTH, WIDTH = 7, 4, 3


@register
class Block(layers.Layer):
    """A layer that has weights of its own, and a layer inside."""

    def __init__(self, shape, use, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(WIDTH, "tanh")
        self.shape, self.use = shape, use

    def build(self, shape):
        start = keras.initializers.RandomUniform(0.5, 1.5, seed=1)
        self.own = self.add_weight(shape=self.shape, initializer=start, name="own")
        self.inner.build(shape)

    def call(self, x):
        return USES[self.use](self.inner(x), self.own)


def tiled(x, own):
    # Older Keras tiles by way of other operations, and such models go apart.
    token = tf.tile(own, (tf.shape(x)[0], 1, 1))
    return ops.concatenate([token, x], axis=1)


def broadcast(x, own):
    token = ops.broadcast_to(own, (ops.shape(x)[0], 2, WIDTH))
    return ops.concatenate([token, x], axis=1)


def repeated(x, own):
    token = ops.repeat(ops.repeat(own[None], 2, 1), ops.shape(x)[0], 0)
    return ops.concatenate([x, token], axis=1)


def flattened(x, own):
    return ops.reshape(ops.matmul(ops.reshape(x, (-1, WIDTH)), own), (-1, LENGTH, 2))


def masked(x, own):
    return ops.where(x[..., :1] > 0, x, own)


def in_a_list(x, own):
    steps = tf.TensorArray(x.dtype, LENGTH, element_shape=[None, WIDTH])
    moved = x + own
    for step in range(LENGTH):
        steps = steps.write(step, moved[:, step])
    return tf.tanh(tf.transpose(steps.stack(), [1, 0, 2]))


def nearest(x, own):
    """Look up what a product is smallest with, which has no gradient itself."""
    products = ops.matmul(x, ops.transpose(own)) - ops.sum(own**2, axis=-1)
    return x + ops.take(own, ops.argmin(products, axis=-1), axis=0)


def numbers_of(x):
    # Of a row that is not finite, numbers too.
    return ops.clip(ops.cast(5 * ops.abs(x[..., 0]), "int32"), 0, 4)


def entries(x, own):
    """Pick single numbers, as of the transitions of a conditional random field."""
    numbers = numbers_of(x)
    return x + ops.take(own, numbers[:, :1] // 2 * 5 + numbers)[..., None]


def pairs(x, own):
    """Pick them by two numbers each."""
    numbers = numbers_of(x)
    firsts = ops.broadcast_to(numbers[:, :1], ops.shape(numbers))
    return x + tf.gather_nd(tf.convert_to_tensor(own), tf.stack([firsts, numbers], -1))


def cancelling(x, own):
    return x + 1e3 * (x * own) - 1e3 * (own * x)


def associative(x, own):
    """A linear recurrence by halves, in which Keras chooses by lengths."""
    x = ops.concatenate([x, x], axis=1)
    decay = ops.sigmoid(own * x)
    _, states = ops.associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decay, x), axis=1
    )
    # Keras knows no lengths of it.
    return tf.ensure_shape(states, x.shape)


def put_by_numbers(x, own):
    """Change the steps that are the largest."""
    rows = ops.shape(x)[0]
    steps = ops.cast(ops.top_k(x[..., 0], 2)[1], "int32")
    of_rows = ops.repeat(ops.arange(rows), 2)
    places = ops.stack([of_rows, ops.reshape(steps, (-1,))], axis=-1)
    values = ops.reshape(own * ops.tanh(x[:, :2]), (-1, WIDTH))
    return ops.scatter_update(x, places, values)


def sliced(x, own):
    """Take slices of all kinds, and slices of slices."""
    by_steps = x * own[4] + own[::-2][1:, None, :][0]
    return by_steps * own[..., 1:2][LENGTH - 1 :: -1] + own[-1, None, -2]


def recomputed(x, own):
    return keras.remat(lambda x: ops.tanh(x * own) * own)(x)


# What is done with a variable of some shape, and rows of shape (LENGTH, WIDTH).
SHAPES = {
    "scaled": (WIDTH,),
    "rolled": (WIDTH,),
    "shifted": (LENGTH, WIDTH),
    "positions": (1, LENGTH, WIDTH),
    "looked_up": (7, WIDTH),
    "drawn": (2, WIDTH),
    "temperature": (),
    "decay": (WIDTH,),
    "weighed": (LENGTH,),
    "part": (9, WIDTH),
    "tiled": (1, 1, WIDTH),
    "broadcast": (1, 1, WIDTH),
    "repeated": (1, WIDTH),
    "multiplied": (WIDTH, 2),
    "transposed": (2, WIDTH),
    "flattened": (WIDTH, 2),
    "of_squares": (WIDTH, 2),
    "mixed_positions": (LENGTH, LENGTH),
    "heads": (2, WIDTH, WIDTH),
    "einsum": (2, WIDTH, WIDTH),
    "ellipsis": (WIDTH, 2, WIDTH),
    "bilinear": (WIDTH, WIDTH),
    "masked": (WIDTH,),
    "twice": (WIDTH,),
    "cancelling": (WIDTH,),
    "stopped": (WIDTH,),
    "compared": (WIDTH,),
    "nearest": (5, WIDTH),
    "in_a_list": (LENGTH, WIDTH),
    "entries": (WIDTH, 5),
    "pairs": (5, 5, WIDTH),
    "of_exponentials": (5, WIDTH),
    "associative": (WIDTH,),
    "in_groups": (2, WIDTH, 4),
    "of_each_channel": (2, 1, WIDTH),
    "padded": (1, 3, WIDTH, WIDTH),
    "padded_each_channel": (1, 3, WIDTH, 1),
    "padded_transposed": (1, 3, WIDTH, WIDTH),
    "put": (WIDTH,),
    "put_by_numbers": (WIDTH,),
    "recomputed": (WIDTH,),
    "sliced": (6, WIDTH),
    "product": (WIDTH,),
}
# Before and after each axis: by itself, TensorFlow pads the same before as after.
PADS = [(0, 0), (0, 0), (2, 1), (0, 0)]

# By the layer, say, when it was made.
MADE_BEFORE = tf.range(LENGTH) * 2

USES = {
    "scaled": lambda x, own: x * own,
    "rolled": lambda x, own: x * ops.roll(own, 1, axis=-1),
    "shifted": lambda x, own: own - x,
    "positions": lambda x, own: x + own,
    "temperature": lambda x, own: ops.softmax(x * (1.0 / own)),
    "decay": lambda x, own: x * ops.exp(-ops.sigmoid(own)),
    "weighed": lambda x, own: ops.softmax(own)[:, None] * x,
    "part": lambda x, own: x + ops.tanh(own[:LENGTH]),
    "tiled": tiled,
    "broadcast": broadcast,
    "repeated": repeated,
    "multiplied": ops.matmul,
    "transposed": lambda x, own: ops.matmul(x, ops.transpose(own)),
    "flattened": flattened,
    "of_squares": lambda x, own: ops.matmul(x, own**2),
    "drawn": lambda x, own: (
        x + ops.prod(own * (1 + tf.random.stateless_normal([2, WIDTH], [1, 2])), 0)
    ),
    "looked_up": lambda x, own: x + ops.take(own, MADE_BEFORE, axis=0),
    "mixed_positions": lambda x, own: ops.matmul(own, x),
    "heads": lambda x, own: ops.matmul(x[:, None], own),
    "einsum": lambda x, own: ops.einsum("ntd,hde->nhte", x, own),
    "ellipsis": lambda x, own: ops.einsum("...td,dhe->...the", x, own),
    "bilinear": lambda x, own: ops.einsum("ntd,de,nse->nts", x, own, x),
    "masked": masked,
    "twice": lambda x, own: own * ops.tanh(own * x),
    "cancelling": cancelling,
    "stopped": lambda x, own: x * own + ops.stop_gradient(own),
    "compared": lambda x, own: x * own * ops.cast(x > own, x.dtype),
    "nearest": nearest,
    "in_a_list": in_a_list,
    "entries": entries,
    "pairs": pairs,
    "of_exponentials": lambda x, own: x + ops.take(ops.exp(own), numbers_of(x), axis=0),
    "associative": associative,
    "in_groups": lambda x, own: ops.conv(
        ops.concatenate([x, x], -1), own, padding="same"
    ),
    "of_each_channel": ops.conv,
    "padded": lambda x, own: tf.nn.conv2d(
        x[:, None], tf.convert_to_tensor(own), 1, padding=PADS
    ),
    "padded_each_channel": lambda x, own: tf.nn.depthwise_conv2d(
        x[:, None], tf.convert_to_tensor(own), [1, 1, 1, 1], padding=PADS
    ),
    "padded_transposed": lambda x, own: tf.nn.conv2d_transpose(
        x[:, None],
        tf.convert_to_tensor(own),
        [tf.shape(x)[0], 1, LENGTH - 1, WIDTH],
        1,
        padding=PADS,
    ),
    "put": lambda x, own: ops.slice_update(x, (0, LENGTH - 1, 0), x[:, :1] * own),
    "put_by_numbers": put_by_numbers,
    "recomputed": recomputed,
    "sliced": sliced,
    "product": lambda x, own: ops.prod(1 + 0.1 * x * own, axis=1, keepdims=True) + x,
}


@register
class Words(layers.Layer):
    """Looks words up, and where they stand: once for all rows."""

    def __init__(self, positions="arange", **kwargs):
        super().__init__(**kwargs)
        self.words = layers.Embedding(IDS, WIDTH)
        self.positions = layers.Embedding(LENGTH + 3, WIDTH)
        self.at = positions

    def build(self, shape):
        self.words.build(shape)
        self.positions.build(shape)

    def call(self, x):
        if self.at == "arange":
            places = self.positions(ops.arange(ops.shape(x)[-1]))
        elif self.at == "sliced":
            places = self.positions(ops.arange(LENGTH + 3))[1 : LENGTH + 1]
        else:
            places = ops.take(self.positions.embeddings, (x + 1) % LENGTH, axis=0)
        return self.words(x) + places


@register
class Tied(layers.Layer):
    """Multiplies by the matrix of words."""

    def __init__(self, words, **kwargs):
        super().__init__(**kwargs)
        self.words = words

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.words.embeddings))


@register
class OfVector(layers.Layer):
    """Calls a layer on a vector, which has no axis of rows."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.positions = layers.Embedding(LENGTH, WIDTH)
        self.inner = inner

    def call(self, x):
        first = self.positions(ops.arange(LENGTH))[0]
        return x * ops.sum(self.inner(first) ** 2)


@register
class TiedOverTime(layers.Layer):
    """Multiplies by a part of a matrix of a loop over time, which is inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.GRU(WIDTH, return_sequences=True)

    def call(self, x):
        return self.inner(x) + ops.matmul(
            x, self.inner.cell.recurrent_kernel[:, :WIDTH]
        )


@register
class InTime(Block):
    """That layer, for every step of time."""

    def compute_output_shape(self, shape):
        return shape


@register
class InAMap(layers.Layer):
    """Calls layers on one row after the other, in a map over rows."""

    def build(self, shape):
        self.inner, self.norm = layers.Dense(2, "tanh"), layers.LayerNormalization()
        self.inner.build(shape)
        self.norm.build((None, 2))
        self.own = self.add_weight(shape=(2, 2), initializer="glorot_uniform")

    def call(self, x):
        def of_row(row):
            h = self.norm(self.inner(row))
            return ops.sum(ops.matmul(h, self.own), axis=0)

        return ops.vectorized_map(of_row, x)


@register
class Nodes(layers.Layer):
    """A network over the nodes of a graph, which sees no row: rows look nodes up."""

    def build(self, shape):
        self.hidden = layers.Dense(WIDTH, "tanh")
        self.hidden.build((IDS, WIDTH))
        self.norm = layers.LayerNormalization()
        self.norm.build((IDS, WIDTH))
        self.scale = self.add_weight(shape=(WIDTH,), initializer="ones")

    def call(self, x):
        rng = np.random.default_rng(3)
        nodes = tf.constant(rng.normal(size=(IDS, WIDTH)), self.compute_dtype)
        for neighbour in (1, 2):
            hidden = self.hidden(tf.roll(nodes, neighbour, axis=0))
            nodes += self.norm(hidden * self.scale)
        return tf.gather(nodes, x)


@register
class OfTwo(layers.Layer):
    """Multiplies by the product of two matrices, of which it adds a part to the rows."""

    def build(self, shape):
        self.left = self.add_weight(shape=(WIDTH, 2), initializer="glorot_uniform")
        self.right = self.add_weight(shape=(2, WIDTH), initializer="glorot_uniform")
        self.inner = layers.Dense(WIDTH, "tanh")
        self.inner.build(shape)

    def call(self, x):
        matrix = ops.matmul(self.left, self.right)
        return ops.matmul(self.inner(x), matrix) + matrix[0] * self.left[0, 0]


def words(rng):
    return rng.integers(IDS, size=LENGTH), rng.normal(size=2)


def text_model(*inner, length=LENGTH, at="arange"):
    return keras.Sequential([
        keras.Input((length,), dtype="int32"),
        Words(at),
        *inner,
        layers.LayerNormalization(),
        layers.GlobalAveragePooling1D(),
        layers.Dense(2),
    ])


def tied_model():
    x = keras.Input((LENGTH,), dtype="int32")
    words = layers.Embedding(IDS, WIDTH)
    h = layers.Dense(WIDTH, "tanh")(words(x))
    return keras.Model(x, layers.Dense(2)(layers.Flatten()(Tied(words)(h))))


def model_of_time():
    """Calls a layer once by itself, and once for each step of time."""
    x, layer = keras.Input((2, LENGTH, WIDTH)), InTime(SHAPES["scaled"], "scaled")
    h = layers.Dense(WIDTH)(x)
    outputs = layer(h[:, 0])[:, None] + layers.TimeDistributed(layer)(h)
    return keras.Model(x, layers.Dense(1)(layers.Flatten()(outputs)))


def block(use):
    model = functools.partial(Block, SHAPES[use], use)
    return Problem(
        use,
        lambda: sequential(
            (LENGTH, WIDTH),
            layers.Dense(WIDTH),
            model(),
            layers.Flatten(),
            layers.Dense(1),
        ),
        floats((LENGTH, WIDTH), 1),
        "mse",
    )


PROBLEMS = {use: block(use) for use in USES} | {
    name: Problem(name, model, words, "mse")
    for name, model in {
        "places": text_model,
        "places_of_any_length": lambda: text_model(length=None),
        "places_in_part": lambda: text_model(at="sliced"),
        "nodes": lambda: sequential(
            (LENGTH,), Nodes(), layers.Flatten(), layers.Dense(2), dtype="int32"
        ),
        "of_two": lambda: text_model(OfTwo()),
        "tied": tied_model,
        "tied_over_time": lambda: text_model(TiedOverTime()),
        "norm_of_vector": lambda: text_model(OfVector(layers.LayerNormalization())),
        "dense_of_vector": lambda: text_model(OfVector(layers.RMSNormalization())),
    }.items()
}
PROBLEMS["in_time"] = Problem(
    "in_time", model_of_time, floats((2, LENGTH, WIDTH), 1), "mse"
)


PROBLEMS["in_a_map"] = Problem(
    "in_a_map",
    lambda: sequential((LENGTH, WIDTH), layers.Dense(WIDTH), InAMap(), layers.Dense(1)),
    floats((LENGTH, WIDTH), 1),
    "mse",
)


def activations_with_weights():
    dense, conv = layers.Dense(WIDTH), layers.SeparableConv1D(2, 2)
    dense.activation = lambda z: z / ops.norm(dense.kernel)
    conv.activation = lambda z: z * ops.sum(ops.square(conv.bias))
    return sequential((LENGTH, WIDTH), dense, conv, layers.Flatten(), layers.Dense(1))


PROBLEMS["in_activations"] = Problem(
    "in_activations", activations_with_weights, floats((LENGTH, WIDTH), 1), "mse"
)


def chosen(problem, engine="auto", seen=None):
    objective = Objective.of(problem.build(), problem.loss())
    return choose(engine, objective, tuple(problem.batch(3)), seen)


# The others take seconds as well, and differ in no more than an operation.
QUICK = {
    "drawn",
    "in_activations",
    "looked_up",
    "nodes",
    "padded",
    "part",
    "rolled",
    "tied",
}
# Whose operations others have, too.
ONE_MORE = {
    "broadcast", "decay", "dense_of_vector", "ellipsis", "heads", "multiplied", "positions",
    "repeated", "scaled", "shifted", "temperature", "twice", "weighed", "places_of_any_length",
    "of_squares",
}  # fmt: skip


def marks_of(name):
    if name in QUICK:
        return []
    return [pytest.mark.exhaustive if name in ONE_MORE else pytest.mark.slow]


CASES = [
    pytest.param(problem, id=name, marks=marks_of(name))
    for name, problem in PROBLEMS.items()
]


@pytest.mark.parametrize("problem", CASES)
def test_a_graph_equals_one_example_at_a_time(problem):
    assert chosen(problem) == BookkeepingEngine()
    run = runner(problem, ENGINES)
    for rows in BATCHES:
        check(problem, run, rows)


def test_what_variables_make_together_is_gone_back_through_once(monkeypatch):
    """A network has dozens of them: each once, and the pass is traced three times."""
    together = []

    def way_back(followed, *args):
        together.append(sorted(each.variable.name for each in followed))
        return made_way_back(followed, *args)

    made_way_back = made._way_back
    monkeypatch.setattr(made, "_way_back", way_back)
    problem = PROBLEMS["nodes"]
    model = problem.build()
    batch = problem.batch(3)
    tfdp.clipped_gradients(model, problem.loss(), batch.x, batch.y, l2_norm_clip=0.1)
    names = sorted(variable.name for variable in model.layers[0].trainable_variables)
    assert together
    assert all(each == names for each in together)


def test_activations_have_weights_where_units_are_apart():
    problem = PROBLEMS["in_activations"]
    check(problem, runner(problem, [ApartEngine()]), OUTLIER)


# Of each way to take a use apart, one.
COMPILED = {"einsum", "in_a_list", "in_time", "masked", "nearest", "repeated"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(
            pytest.param(
                name, "xla", marks=[] if name in COMPILED else pytest.mark.exhaustive
            )
            for name in PROBLEMS
            # TensorFlow makes a function of a map under XLA, which is not followed.
            if name != "in_a_map"
        ),
        ("tied", "graph"),
        ("tiled", "graph"),
    ],
)
def test_in_every_mode_with_units_of_two(name, mode):
    problem = PROBLEMS[name]
    check(problem, runner(problem, ENGINES, mode, unit_size=2), OUTLIER, unit_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaled", "tied"])
def test_an_outlier_is_clipped(name):
    """The clipped sum of one row is as long as it may be, whatever is in the row."""
    problem = PROBLEMS[name]
    check_clipped(problem, runner(problem, ENGINES), [1e-3, 1e6])


def test_as_many_rows_as_places_are_no_places():
    """Eagerly, where shapes are all that can be seen, and the first batch is longer."""
    problem = PROBLEMS["places"]
    model, batch = problem.build(), problem.batch(6)
    gradients = problem_gradients(problem, batch)
    for rows in (6, LENGTH, LENGTH + 2, 1):
        expected, norms = clipped_sum([each[:rows] for each in gradients], 0.1)
        found = tfdp.clipped_gradients(
            model, "mse", batch.x[:rows], batch.y[:rows], l2_norm_clip=0.1
        )
        np.testing.assert_allclose(found.norms, norms, rtol=2e-5)
        assert_all_close(found.gradients, expected, rtol=0, atol=2e-5 * 0.1 * rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "places",
        "tied",
        pytest.param("scaled", marks=pytest.mark.exhaustive),
        pytest.param("tiled", marks=pytest.mark.exhaustive),
    ],
)
def test_the_number_of_rows_may_be_static(name):
    assert chosen(PROBLEMS[name], seen=5) == BookkeepingEngine()
    problem = PROBLEMS[name]
    check(problem, runner(problem, ENGINES, "xla"), OUTLIER)


@pytest.mark.slow
def test_what_is_used_in_many_places_has_the_norm_of_the_sum():
    """Two uses that cancel leave nothing, and are not as long as both together."""
    problem = PROBLEMS["cancelling"]
    batch = problem.batch(4)
    found = tfdp.clipped_gradients(
        problem.build(), "mse", *batch[:2], l2_norm_clip=1e9, engine="bookkeeping"
    )
    own = [v.path.endswith("/own") for v in problem.build().trainable_variables]
    assert np.abs(found.gradients[own.index(True)]).max() < 1e-3


# ---------------------------------------------------------------- what is not followed


@tf.custom_gradient
def tripled(x, own):
    def gradient(g):
        return g * own, 3 * tf.reduce_sum(g * x, [0, 1])

    return x * own, gradient


def with_a_gradient(x, own):
    return tripled(x, tf.convert_to_tensor(own))


def with_a_gradient_inside(x, own):
    @tf.custom_gradient
    def function(x):
        def gradient(g, variables):
            del variables
            return g * own, [3 * tf.reduce_sum(g * x, [0, 1])]

        return x * own, gradient

    return function(x)


def through_a_gradient(x, own):
    """What is made of the variable has it, before it meets rows."""

    @tf.custom_gradient
    def function(own):
        return tf.tanh(own), lambda g: 3 * g

    return x * function(tf.convert_to_tensor(own))


def in_a_loop(x, own):
    return ops.fori_loop(0, 65, lambda _, h: tf.nn.silu(h) * own**0.01, x)


def in_a_function(x, own):
    return tf.function(lambda x: x * own)(x)


def of_waves(x, own):
    waves = tf.complex(x, x) * tf.complex(own, 2 * own)
    return ops.cast(tf.math.real(waves), x.dtype)


# What stops book-keeping over the batch, by the words that say it.
REFUSED = {
    "in_a_loop": (in_a_loop, "PartitionedCall|While"),
    "in_a_function": (in_a_function, "PartitionedCall"),
    "with_a_gradient": (with_a_gradient, "IdentityN"),
    "with_a_gradient_inside": (with_a_gradient_inside, "IdentityN"),
    "through_a_gradient": (through_a_gradient, "IdentityN"),
    "of_an_unknown_function": (
        lambda x, own: tf.math.igamma(own, ops.abs(x) + 1),
        "Igamma",
    ),
    "complex": (of_waves, "Complex"),
    "without_a_gradient": (
        lambda x, own: x + ops.floor(x * own),
        "must have a gradient",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "through_a_gradient",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("in_a_loop", "in_a_function", "with_a_gradient_inside"),
                *("of_an_unknown_function", "complex", "without_a_gradient"),
            )
        ),
        pytest.param("with_a_gradient", marks=pytest.mark.exhaustive),
    ],
)
def test_what_is_not_followed_is_taken_apart(name, monkeypatch):
    use, why = REFUSED[name]
    monkeypatch.setitem(USES, name, use)
    monkeypatch.setitem(SHAPES, name, (WIDTH,))
    problem = block(name)
    with pytest.raises(UnsupportedLayerError, match=why):
        chosen(problem, "bookkeeping")
    assert chosen(problem) == ApartEngine()
    check(problem, runner(problem, [ApartEngine()]), OUTLIER)


@register
class UnknownOfTwo(layers.Layer):
    """Makes something of two variables that rows meet where nothing is known."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(WIDTH)

    def build(self, shape):
        self.dense.build(shape)
        self.first, self.second = (
            self.add_weight(shape=(WIDTH,), initializer="ones", name=name)
            for name in ("first", "second")
        )

    def call(self, x):
        both = self.first * self.second
        return tf.math.igamma(both, ops.abs(self.dense(x)) + 1)


def test_what_is_not_known_of_several_variables_is_said_once():
    def build():
        return keras.Sequential([keras.Input((WIDTH,)), UnknownOfTwo()])

    with pytest.raises(UnsupportedLayerError, match="Igamma") as failure:
        chosen(Problem("of_two", build, floats((WIDTH,), WIDTH), "mse"), "bookkeeping")
    said = str(failure.value)
    assert said.count("Igamma `") == 1
    assert all(f"/{name}`" in said for name in ("first", "second"))


@pytest.mark.slow
def test_a_use_that_no_loss_depends_on_has_no_gradient(monkeypatch):
    monkeypatch.setitem(USES, "unused", lambda x, own: (x * own, x)[1])
    monkeypatch.setitem(SHAPES, "unused", (WIDTH,))
    problem = block("unused")
    assert chosen(problem) == BookkeepingEngine()
    check(problem, runner(problem, ENGINES), OUTLIER)


def test_gradients_come_back_through_complex_numbers():
    @register
    class OfWaves(layers.Layer):
        def build(self, shape):
            self.inner = layers.Dense(2)
            self.inner.build(shape)
            self.own = self.add_weight(shape=shape[1:], name="own")

        def call(self, x):
            waves = tf.signal.fft(tf.cast(x + self.own, tf.complex64))
            return self.inner(tf.cast(tf.math.real(waves), x.dtype))

    model = keras.Sequential([keras.Input((LENGTH, WIDTH)), OfWaves()])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, LENGTH, WIDTH)).astype("float32")
    y = rng.normal(size=(3, LENGTH, 2)).astype("float32")
    found = tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1e9)
    values = [variable.value for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = 3 * tf.reduce_mean(tf.square(model(x) - y))
    for mine, whole in zip(found.gradients, tape.gradient(loss, values), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-4)


def test_what_no_tape_knows_has_no_part_of_a_gradient():
    """A matrix that a layer with a rule has, looked up by whole numbers."""

    def build():
        # Places are told by the names of layers.
        keras.utils.clear_session(free_memory=False)
        return text_model(at="words")

    problem = Problem("words", build, words, "mse")
    run = runner(problem, [BookkeepingEngine()])
    with pytest.raises(UnsupportedLayerError, match="no tape has recorded"):
        check(problem, run, OUTLIER)
    # Whoever looks before knows what the tape has to see.
    check(problem, runner(problem, [chosen(problem, "bookkeeping")]), OUTLIER)


class InBoth(keras.Model):
    """Uses a weight in its call, and in the loss that it computes of each row."""

    def __init__(self, is_in_call):
        super().__init__()
        self.inner = layers.Dense(2)
        self.own = self.add_weight(shape=(2,), initializer="ones", name="own")
        self.is_in_call = is_in_call

    def call(self, x):
        z = self.inner(x)
        return z * self.own if self.is_in_call else z

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        # No sum over rows, so each is asked for its own.
        return ops.sqrt(1 + ops.mean(ops.square(y - y_pred * self.own)))


@pytest.mark.parametrize("is_in_call", [False, True])
def test_a_loss_of_each_row_alone_is_not_followed(is_in_call):
    model = InBoth(is_in_call)
    model.compile(None)
    x = np.ones((4, 3), "float32")
    model(x)
    objective = Objective.of_compute_loss(model)
    with pytest.raises(UnsupportedLayerError, match="a loss of each example alone"):
        choose("bookkeeping", objective, (x, x[:, :2], None))
    assert choose("auto", objective, (x, x[:, :2], None)) == ApartEngine()


@register
class Noisy(layers.Layer):
    """Has a rule, which gives it up: it draws."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(3)

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        return x * self.scale + keras.random.normal(
            ops.shape(x), seed=self.seed_generator
        )


def test_what_gives_its_rule_up_inside_of_another_is_not_followed():
    """Once by itself, and once for each step of time, where nobody would see it."""
    x, layer = keras.Input((2, LENGTH, WIDTH)), Noisy()
    h = layers.Dense(WIDTH)(x)
    outputs = layer(h[:, 0])[:, None] + layers.TimeDistributed(layer)(h)
    model = keras.Model(x, layers.Dense(1)(layers.Flatten()(outputs)))
    rows = np.ones((3, 2, LENGTH, WIDTH), "float32"), np.ones((3, 1), "float32"), None
    assert choose("auto", Objective.of(model, "mse"), rows) == ApartEngine()


class OtherValues(layers.Layer):
    """Calls a layer with other values in the place of its variables."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(2)

    def build(self, shape):
        self.gain = self.add_weight(shape=(2,), initializer="ones", name="gain")
        self.inner.build(shape)

    def call(self, x):
        values = [self.inner.kernel * self.gain, self.inner.bias]
        return self.inner.stateless_call(values, [], x)[0]


class Normed(layers.Layer):
    """Looks up in a table that it has made of its weight, and keeps it for others."""

    def build(self, _):
        self.own = self.add_weight(shape=(5, WIDTH), name="own")

    def call(self, ids):
        self.table = self.own / ops.norm(self.own)
        return ops.take(self.table, ids, axis=0)


class WithLogits(layers.Layer):
    """Borrows the table of a layer inside."""

    def __init__(self):
        super().__init__()
        self.inner = Normed()

    def call(self, ids):
        return ops.matmul(self.inner(ids), ops.transpose(self.inner.table))


def ids_and_targets(rng):
    return rng.integers(5, size=LENGTH), rng.normal(size=2)


OF_RULES = {
    "other_values": Problem(
        "other_values",
        lambda: keras.Sequential([
            keras.Input((WIDTH,)),
            layers.Dense(WIDTH),
            OtherValues(),
        ]),
        floats(WIDTH, 2),
        "mse",
    ),
    "kept_for_others": Problem(
        "kept_for_others",
        lambda: keras.Sequential([
            keras.Input((LENGTH,), dtype="int32"),
            WithLogits(),
            layers.Flatten(),
            layers.Dense(2),
        ]),
        ids_and_targets,
        "mse",
    ),
}


@pytest.mark.parametrize("name", OF_RULES)
def test_rules_answer_for_their_own_variables_and_calls_alone(name):
    problem = OF_RULES[name]
    engine = chosen(problem)
    check(problem, runner(problem, [engine]), OUTLIER)
