"""Layers that are called on windows or nodes as rows, compared with single rows."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.engine_checks import NAN, OUTLIER, Uphill, check, ghost_like, runner
from tests.problems.building import floats, sequential
from tests.problems.problem import problem, register
from tfdp import _keras
from tfdp.ascent.losses import Ascent
from tfdp.checks.engine import choose
from tfdp.engines.apart import ApartEngine
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.losses.objective import Objective
from tfdp.rules.places import ROWS_FIRST, NotedPlaces, Place

pytestmark = pytest.mark.keras_private


class Stacked(layers.Layer):
    """Has layers that it calls on something else than rows."""

    def __init__(self, *stack, **kwargs):
        super().__init__(**kwargs)
        self.stack = list(stack)


@register
class Windows(Stacked):
    """Calls layers on pieces of each row: ``(rows, windows, ...)`` as rows."""

    def call(self, x):
        shape = ops.shape(x)
        x = ops.reshape(x, (-1, *shape[2:]))
        for layer in self.stack:
            x = layer(x)
        return ops.reshape(x, (-1, shape[1], *x.shape[1:]))


@register
class Nodes(Stacked):
    """Calls layers on ``(nodes, rows, ...)`` as rows, all rows of a node together."""

    def __init__(self, *stack, entries=1, **kwargs):
        super().__init__(*stack, **kwargs)
        self.entries = entries

    def call(self, x):
        nodes, *others = x.shape[1:]
        x = ops.reshape(x, (-1, nodes // self.entries, self.entries, *others))
        order = range(2, len(x.shape))
        x = ops.transpose(x, (1, 0, *order))
        x = ops.reshape(x, (-1, *others))
        for layer in self.stack:
            x = layer(x)
        x = ops.reshape(x, (nodes // self.entries, -1, self.entries, *x.shape[1:]))
        x = ops.transpose(x, (1, 0, *range(2, len(x.shape))))
        return ops.reshape(x, (-1, nodes, *x.shape[3:]))


@register
class NodesFirst(Stacked):
    """Calls layers on ``(nodes, rows, ...)`` as it is."""

    def call(self, x):
        order = (1, 0, *range(2, len(x.shape)))
        x = ops.transpose(x, order)
        for layer in self.stack:
            x = layer(x)
        return ops.transpose(x, order)


@register
class Views(Stacked):
    """Calls layers on all rows, and on all of them otherwise, one after the other."""

    def __init__(self, *stack, joins=True, **kwargs):
        super().__init__(*stack, **kwargs)
        self.joins = joins

    def call(self, x):
        rows = ops.shape(x)[0]
        if self.joins:
            x = ops.concatenate([x, ops.square(x)], axis=0)
        else:
            x = ops.tile(x, (2, *[1] * (len(x.shape) - 1)))
        for layer in self.stack:
            x = layer(x)
        first, second = (x[:rows], x[rows:]) if self.joins else ops.split(x, 2)
        return first * ops.tanh(second)


@register
class OwnMatrix(layers.Layer):
    """A matrix, a bias for each position, and one that is looked up."""

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], 3), name="matrix")
        self.shift = self.add_weight(shape=(*shape[-2:-1], 3), name="shift")
        self.table = self.add_weight(shape=(2, 3), name="table")

    def call(self, x):
        kinds = ops.cast(x[..., 0] > 0, "int32")
        x = ops.matmul(x, self.matrix) + self.shift
        return ops.tanh(x + ops.take(self.table, kinds, axis=0))


@register
class OwnEinsum(layers.Layer):
    """A matrix for each head."""

    def build(self, shape):
        self.heads = self.add_weight(shape=(2, shape[-1], 2), name="heads")

    def call(self, x):
        return ops.tanh(ops.einsum("rtd,hdk->rthk", x, self.heads))


@register
class Attention(layers.Layer):
    """Attention in windows, with a bias for each pair of places, as of Swin."""

    def build(self, shape):
        self.places, dim = shape[-2:]
        self.query = layers.Dense(dim)
        self.query.build(shape)
        self.table = self.add_weight(shape=(2 * self.places - 1, 1), name="table")
        place = np.arange(self.places)
        self.pairs = place[:, None] - place[None, :] + self.places - 1

    def call(self, x):
        scores = ops.matmul(self.query(x), ops.transpose(x, (0, 2, 1)))
        bias = ops.take(self.table, self.pairs.ravel(), axis=0)
        bias = ops.reshape(bias, (1, self.places, self.places))
        return ops.matmul(ops.softmax(scores + bias), x)


def twice():
    """The same layer on rows and on pieces of them."""
    shared = layers.Dense(2, "tanh")
    inputs = keras.Input((4, 2))
    return keras.Model(
        inputs, layers.Dense(2)(shared(inputs) + Windows(shared)(inputs))
    )


def masked():
    """Pieces some of which end early."""
    inputs = keras.Input((2, 3, 2))
    masked = ops.where(inputs[..., :1] > -0.5, inputs, 0.0)
    stack = layers.Masking(), layers.LSTM(2, return_sequences=True), layers.GRU(2)
    return keras.Model(inputs, Nodes(*stack)(masked))


MODELS = {
    "windows": lambda: sequential(
        (4, 3),
        Windows(layers.Dense(3, "tanh"), layers.LayerNormalization(), layers.Dense(2)),
    ),
    "windows_of_images": lambda: sequential(
        (2, 4, 4, 1), Windows(layers.Conv2D(2, 3, activation="tanh"), layers.Flatten())
    ),
    "windows_of_positions": lambda: sequential(
        (2, 3, 2), Windows(OwnMatrix(), OwnEinsum(), layers.Flatten())
    ),
    "attention_in_windows": lambda: sequential((2, 3, 2), Windows(Attention())),
    "nodes": lambda: sequential(
        (3, 2),
        Nodes(layers.Dense(3, "tanh"), layers.LayerNormalization(), layers.Dense(2)),
    ),
    "nodes_of_sequences": masked,
    "nodes_between": lambda: sequential(
        (4, 3, 2), Nodes(layers.LSTM(2), layers.Dense(2), entries=2)
    ),
    "nodes_by_matrix": lambda: sequential(
        (4, 3, 2), Nodes(OwnMatrix(), layers.Flatten(), entries=2)
    ),
    "nodes_first": lambda: sequential(
        (4, 3, 2), NodesFirst(layers.Dense(3), OwnMatrix())
    ),
    "nodes_of_windows": lambda: sequential(
        (2, 3, 2),
        Nodes(layers.TimeDistributed(layers.Dense(2, "tanh")), layers.Dense(1)),
    ),
    "views": lambda: sequential(
        (4, 2), Views(layers.Dense(3, "tanh"), OwnMatrix()), layers.Dense(2)
    ),
    "views_of_sequences": lambda: sequential(
        (3, 2), Views(layers.LSTM(3), layers.LayerNormalization(), joins=False)
    ),
    "twice": twice,
}


def fresh(make):
    """Make a model whose layers have the same names each time."""
    keras.utils.clear_session(free_memory=False)
    return make()


@functools.cache
def problem_of(name):
    model = fresh(MODELS[name])
    example = floats(model.input_shape[1:], model.output_shape[1:])
    return problem(name, functools.partial(fresh, MODELS[name]), example, "mse")


def engine_of(name, ascent=None):
    """Choose the engine that a model trains with."""
    problem = problem_of(name)
    objective = Objective.of(problem.build(), problem.loss(), None)
    if ascent is not None:
        step = Ascent(
            lambda: tf.constant(ascent.radius, tf.float64), ascent.mix, ascent.is_exact
        )
        objective = dataclasses.replace(objective, ascent=step)
    return choose("auto", objective, tuple(problem.batch(3)))


def names(*quick, one_more=()):
    """Parametrize by models, of which the quick tests have these.

    Args:
        *quick: For the quick tests.
        one_more: What differs little from the others.
    """

    def marks_of(name):
        if name in quick:
            return []
        return [pytest.mark.exhaustive if name in one_more else pytest.mark.slow]

    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks_of(name)) for name in MODELS]
    )


@names(
    "attention_in_windows",
    "views",
    # Of what these are made of, others are left.
    one_more={"nodes_of_windows", "windows", "nodes"},
)
def test_gradients_equal_one_example_at_a_time(name):
    engine = engine_of(name)
    assert isinstance(engine, BookkeepingEngine)
    assert engine.places
    ghost = ghost_like(engine)
    run = runner(problem_of(name), [engine, ghost])
    for rows in (OUTLIER, NAN, (0,), ()):
        check(problem_of(name), run, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "nodes_first",
        "windows",
        pytest.param("attention_in_windows", marks=pytest.mark.exhaustive),
    ],
)
def test_gradients_are_the_same_when_they_are_compiled(name):
    run = runner(problem_of(name), [engine_of(name)], "xla")
    check(problem_of(name), run, OUTLIER)


@names(
    "nodes_between",
    one_more=MODELS.keys() - {"nodes", "nodes_by_matrix", "twice", "views", "windows"},
)
def test_units_have_several_rows(name):
    run = runner(problem_of(name), [engine_of(name)], unit_size=2)
    check(problem_of(name), run, (0, 5, 3, 4), unit_size=2)


@pytest.mark.parametrize(
    ("name", "is_exact"),
    [
        ("windows", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("windows", True), ("nodes", True), ("twice", False))
        ),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("nodes", False),
                ("twice", True),
                ("windows_of_images", False),
                ("windows_of_images", True),
            )
        ),
    ],
)
def test_units_go_uphill(name, is_exact):
    ascent = Uphill(0.1, 0.7, is_exact)
    engine = engine_of(name, ascent)
    assert isinstance(engine, BookkeepingEngine)
    run = runner(problem_of(name), [engine], ascent=ascent)
    check(problem_of(name), run, OUTLIER, ascent=ascent)


@register
class OfEachWindow(layers.Layer):
    """Has a bias for each window of a row, so that windows are not alike."""

    def build(self, shape):
        self.bias = self.add_weight(shape=(4, shape[-1]), name="bias")

    def call(self, x):
        rows = ops.shape(x)[0] // 4
        bias = ops.broadcast_to(self.bias[None], (rows, *self.bias.shape))
        return ops.tanh(x * ops.reshape(bias, (-1, x.shape[-1])))


@pytest.mark.slow
def test_windows_that_are_not_alike_are_followed():
    """A layer that nobody knows may treat windows of a row in different ways."""
    of_each = problem(
        "of_each_window",
        lambda: sequential((4, 3), Windows(OfEachWindow(name="bias"), name="windows")),
        floats((4, 3), (4, 3)),
        "mse",
    )
    objective = Objective.of(of_each.build(), of_each.loss(), None)
    engine = choose("auto", objective, tuple(of_each.batch(3)))
    for mode in ("graph", "xla"):
        check(of_each, runner(of_each, [engine], mode), OUTLIER)


@pytest.mark.slow
def test_pieces_of_unknown_number_are_no_rows():
    """What lies so for one length of a row may lie elsewhere for another."""
    inputs = keras.Input((None, 3))
    pieces = Windows(layers.Dense(2))(inputs)
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(pieces))
    data = tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, 2]), None
    assert choose("auto", Objective.of(model, "mse"), data) == ApartEngine()


PLACES = [
    ROWS_FIRST,
    Place(0, times=3),
    Place(0, entries=2),
    Place(0, times=3, entries=2),
    Place(1),
    Place(2, times=2, entries=3),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_rows_come_first(place, rows):
    number = np.arange(rows)[None, :, None] * np.ones((place.times, 1, place.entries))
    lengths = [3, 5]
    lengths.insert(place.axis, number.size)
    along = [1] * 3
    along[place.axis] = number.size
    tensor = tf.constant(np.broadcast_to(number.reshape(along), lengths))
    found = place.rows_first(tensor)
    expected = np.repeat(np.arange(rows), place.of_row)[:, None, None]
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))
    assert found.shape == (rows * place.of_row, 3, 5)


@pytest.mark.parametrize("place", [each for each in PLACES if each.axis == 0])
def test_rows_are_put_back(place):
    tensor = tf.reshape(tf.range(4 * place.of_row * 2), [-1, 2])
    found = place.put_back(place.rows_first(tensor))
    np.testing.assert_array_equal(found, tensor)


def test_masks_come_with_their_rows():
    inputs = tf.reshape(tf.range(12), [6, 2])
    masked = _keras.with_mask(inputs, inputs > 3)
    place = Place(times=3)
    found = place.rows_first(masked)
    np.testing.assert_array_equal(_keras.keras_mask(found), found > 3)
    back = place.put_back(found)
    np.testing.assert_array_equal(_keras.keras_mask(back), inputs > 3)


def test_calls_are_counted_by_their_paths():
    noted = NotedPlaces({("dense", 1): Place(1)})
    found = [noted.next(path, []) for path in ("dense", "other", "dense", "dense")]
    assert found == [None, None, Place(1), None]
    assert noted.paths == {"dense"}
