"""Book-keeping with each unit by itself against one example at a time in float64."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.engine_checks import BATCHES, NAN, OUTLIER, check, runner
from tests.problems import PROBLEMS, Problem, cases, floats, register, sequential
from tfdp.checks.engine import choose
from tfdp.engines.apart import ApartEngine
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.engines.vectorized import VectorizedEngine
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

ENGINES = [ApartEngine()]
TOKENS, LENGTH, WIDTH = 7, 4, 6


class Positions(layers.Layer):
    """Learned positions, looked up once for all rows."""

    def __init__(self):
        super().__init__()
        self.tokens = layers.Embedding(TOKENS, WIDTH)
        self.positions = layers.Embedding(LENGTH, WIDTH)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(LENGTH))


class ClassToken(layers.Layer):
    """A row of its own before the others, and a layer inside."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")
        self.inner = layers.Dense(WIDTH)
        self.inner.build(shape)

    def call(self, x):
        token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[-1]))
        return self.inner(ops.concatenate([token, x], axis=1))


class OverNodes(layers.Layer):
    """A recurrent layer on nodes times rows."""

    def __init__(self):
        super().__init__()
        self.over_time = layers.LSTM(3)

    def call(self, x):
        nodes, steps, width = x.shape[1:]
        h = self.over_time(ops.reshape(x, (-1, steps, width)))
        return ops.mean(ops.reshape(h, (-1, nodes, 3)), axis=1)


class Tied(layers.Layer):
    """Multiplies with the matrix of a layer inside, and with its transpose."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(WIDTH, "tanh")

    def call(self, x):
        return ops.matmul(self.inner(x), ops.transpose(self.inner.kernel))


class OfVector(layers.Layer):
    """Calls a layer on a vector, which has no axis of rows."""

    def __init__(self, inner):
        super().__init__()
        self.positions = layers.Embedding(LENGTH, WIDTH)
        self.inner = inner

    def call(self, x):
        first = self.positions(ops.arange(LENGTH))[0]
        return x * ops.sum(self.inner(first) ** 2)


class TiedOverTime(layers.Layer):
    """Multiplies with a matrix of a recurrent layer inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x) + ops.matmul(x, self.inner.cell.recurrent_kernel[:, :2])


class Noisy(layers.Layer):
    """Has a variable and no rule, and draws in training."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        noise = keras.random.normal(ops.shape(x), seed=self.seed_generator)
        return x * self.scale + 0.1 * noise


@register
class Grouped(layers.Layer):
    """Each point with those that are next to it, looked up among all of a batch."""

    def call(self, x):
        rows, points, width = ops.shape(x)[0], *x.shape[1:]
        apart = ops.sum(ops.square(x[:, :, None] - x[:, None]), -1)
        near = ops.cast(ops.top_k(-apart, 2)[1], "int32")
        near += ops.arange(rows, dtype="int32")[:, None, None] * points
        grouped = ops.take(ops.reshape(x, (-1, width)), near, axis=0)
        return ops.max(grouped, axis=2)


@register
class Pooled(layers.Layer):
    """The sums of groups of points, of which those of all rows have numbers."""

    def call(self, x):
        rows, width = ops.shape(x)[0], x.shape[-1]
        groups = ops.cast(x[..., 0] > 0, "int32")
        groups += 2 * ops.arange(rows, dtype="int32")[:, None]
        sums = ops.segment_sum(
            ops.reshape(x, (-1, width)), ops.reshape(groups, (-1,)), 2 * rows
        )
        return ops.reshape(sums, (-1, 2, width))


@register
class EachRow(layers.Layer):
    """Attends inside of each row, in a map over rows."""

    def call(self, x):
        def attend(row):
            return ops.softmax(row @ ops.transpose(row)) @ row

        return ops.vectorized_map(attend, x)


@register
class EachPoint(layers.Layer):
    """Calls layers in a map over points, one of them outside of it, too."""

    def __init__(self):
        super().__init__()
        self.mapped, self.both = layers.Dense(3, "tanh"), layers.Dense(3, "tanh")

    def build(self, shape):
        self.mapped.build((None, shape[-1]))
        self.both.build((None, 3))

    def call(self, x):
        of_points = ops.transpose(x, (1, 0, 2))
        of_points = ops.vectorized_map(
            lambda rows: self.both(self.mapped(rows)), of_points
        )
        return self.both(ops.transpose(of_points, (1, 0, 2)))


@register
class EachOverTime(layers.Layer):
    """Calls a recurrent layer in a map over rows."""

    def __init__(self):
        super().__init__()
        self.over_time = layers.LSTM(3, return_sequences=True)

    def build(self, shape):
        self.over_time.build(shape)

    def call(self, x):
        return ops.vectorized_map(lambda row: self.over_time(row[None])[0], x)


@register
class Chosen(layers.Layer):
    """Changes some of the points alone: two of each row, or those that are positive."""

    def __init__(self, has_two):
        super().__init__()
        self.has_two = has_two
        self.inner = keras.Sequential([layers.Dense(3, "tanh"), layers.Dense(3)])

    def build(self, shape):
        self.inner.build((None, shape[-1]))

    def call(self, x):
        x = tf.convert_to_tensor(x)
        first = x[..., 0]
        least = tf.sort(first, axis=1)[:, 2:3] if self.has_two else 0.0
        chosen = tf.where(first > least)
        return tf.tensor_scatter_nd_add(x, chosen, self.inner(tf.gather_nd(x, chosen)))


@register
class Rolled(layers.Layer):
    """A leaf without a rule, which turns its last axis."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale")

    def call(self, x):
        return ops.roll(x * self.scale, 1, axis=-1) ** 2


def text_model(*inner):
    return keras.Sequential([
        keras.Input((LENGTH,), dtype="int32"),
        Positions(),
        *inner,
        layers.LayerNormalization(),
        layers.GlobalAveragePooling1D(),
        layers.Dense(2, name="head"),
    ])


def tokens_and_targets(rng):
    return rng.integers(TOKENS, size=LENGTH), rng.normal(size=2)


def points_model(inner):
    return sequential(
        (5, 3),
        layers.Dense(3, "tanh"),
        inner,
        layers.GlobalAveragePooling1D(),
        layers.Dense(1),
    )


# What has layers that do not see the rows of a batch as such.
MODELS = {
    "positions": Problem("positions", text_model, tokens_and_targets, "mse"),
    "class_token": Problem(
        "class_token",
        lambda: text_model(ClassToken(), layers.Dense(WIDTH, "tanh")),
        tokens_and_targets,
        "mse",
    ),
    "tied": Problem("tied", lambda: text_model(Tied()), tokens_and_targets, "mse"),
    "nodes": Problem(
        "nodes",
        lambda: keras.Sequential([
            keras.Input((3, LENGTH, 2)),
            OverNodes(),
            layers.Dense(1),
        ]),
        floats((3, LENGTH, 2), 1),
        "mse",
    ),
    "grouped": Problem(
        "grouped", lambda: points_model(Grouped()), floats((5, 3), 1), "mse"
    ),
    "pooled": Problem(
        "pooled", lambda: points_model(Pooled()), floats((5, 3), 1), "mse"
    ),
    "each_row": Problem(
        "each_row", lambda: points_model(EachRow()), floats((5, 3), 1), "mse"
    ),
    "each_point": Problem(
        "each_point", lambda: points_model(EachPoint()), floats((5, 3), 1), "mse"
    ),
    "each_over_time": Problem(
        "each_over_time",
        lambda: points_model(EachOverTime()),
        floats((5, 3), 1),
        "mse",
    ),
    "two_chosen": Problem(
        "two_chosen", lambda: points_model(Chosen(True)), floats((5, 3), 1), "mse"
    ),
    "some_chosen": Problem(
        "some_chosen", lambda: points_model(Chosen(False)), floats((5, 3), 1), "mse"
    ),
    "layer_norm_of_vector": Problem(
        "layer_norm_of_vector",
        lambda: text_model(OfVector(layers.LayerNormalization())),
        tokens_and_targets,
        "mse",
    ),
    "rms_norm_of_vector": Problem(
        "rms_norm_of_vector",
        lambda: text_model(OfVector(layers.RMSNormalization())),
        tokens_and_targets,
        "mse",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            id=name,
            marks=[pytest.mark.slow]
            if name not in {"tied", "each_row", "each_point", "two_chosen"}
            else [],
        )
        for name in MODELS
    ],
)
def test_layers_that_do_not_see_the_rows_of_a_batch(name):
    problem = MODELS[name]
    run = runner(problem, ENGINES)
    for rows in (OUTLIER, (0,)):
        check(problem, run, rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pooled", "each_row"])
def test_maps_and_sums_of_own_entries_need_no_rows_apart(name):
    problem = MODELS[name]
    objective = Objective.of(problem.build(), problem.loss())
    engine = choose("auto", objective, tuple(problem.batch(3)))
    assert engine == BookkeepingEngine()
    check(problem, runner(problem, [engine]), OUTLIER)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recurrent",
    [
        layers.GRU,
        pytest.param(layers.LSTM, marks=pytest.mark.slow),
        pytest.param(layers.SimpleRNN, marks=pytest.mark.slow),
    ],
)
def test_a_recurrent_matrix_that_is_used_elsewhere(recurrent):
    def build():
        # Places are told by the names of layers.
        keras.utils.clear_session(free_memory=False)
        return keras.Sequential([
            keras.Input((LENGTH, 2)),
            TiedOverTime(recurrent(2, return_sequences=True)),
            layers.Flatten(),
            layers.Dense(1),
        ])

    problem = Problem(recurrent.__name__, build, floats((LENGTH, 2), 1), "mse")
    # The loop over time has a gradient of its own, which knows nothing of the matrix.
    batch = problem.batch(3)
    run = functools.partial(tfdp.clipped_gradients, problem.build(), "mse")
    # Inside of a map TensorFlow may wrap the `UnsupportedLayerError`.
    with pytest.raises(Exception, match="used elsewhere"):
        run(*batch[:2], l2_norm_clip=1.0, engine=ApartEngine())
    # Of the whole batch it is followed to where it meets the rows.
    engine = choose("auto", Objective.of(build(), problem.loss()), tuple(batch))
    assert type(engine) is BookkeepingEngine
    check(problem, runner(problem, [engine]), OUTLIER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("positions", "graph"),
        ("class_token", "xla"),
        ("grouped", "xla"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("positions", "xla"),
                ("class_token", "graph"),
                ("grouped", "graph"),
            )
        ),
    ],
)
def test_in_every_mode_with_units_of_two(name, mode):
    problem = MODELS[name]
    check(problem, runner(problem, ENGINES, mode, unit_size=2), OUTLIER, unit_size=2)


@pytest.mark.slow
def test_axes_from_the_end_are_no_axis_of_the_examples():
    """TensorFlow's vectorized map rolls such axes along the examples."""
    problem = Problem(
        "rolled",
        lambda: sequential((3,), layers.Dense(3), Rolled(), layers.Dense(1)),
        floats((3,), 1),
        "mse",
    )
    for engine in (ApartEngine(), BookkeepingEngine(), VectorizedEngine()):
        check(problem, runner(problem, [engine]), OUTLIER)


OF_ALL_TAGS = {case.id for case in cases(lacking={"random", "rnn"}, is_few=True)}
QUICK = {"called_twice", "cnn", "masked_weighted", "unused"}


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(
            PROBLEMS[name], id=name, marks=[] if name in QUICK else [pytest.mark.slow]
        )
        for name in sorted(OF_ALL_TAGS | QUICK)
    ],
)
def test_a_graph_equals_one_example_at_a_time(problem):
    run = runner(problem, ENGINES)
    for rows in BATCHES:
        check(problem, run, rows)


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        pytest.param("conv2d_grouped", marks=pytest.mark.slow),
        "dict_losses",
    ],
)
def test_units_of_two_examples(name):
    problem = PROBLEMS[name]
    run = runner(problem, ENGINES, "graph", unit_size=2)
    check(problem, run, OUTLIER, unit_size=2)
    check(problem, run, NAN, unit_size=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", cases(lacking={"random", "rnn"}, is_few=True))
def test_every_tag_with_xla(problem):
    check(problem, runner(problem, ENGINES, "xla"), OUTLIER)


@pytest.mark.slow
def test_random_layers_draw_for_each_example_and_each_call():
    model = keras.Sequential([keras.Input((3,)), Noisy(), layers.Dense(1)])
    x = np.ones((6, 3), "float32")

    def norms(engine):
        clipped = functools.partial(tfdp.clipped_gradients, model, "mse", engine=engine)
        return np.asarray(clipped(x, x[:, :1], l2_norm_clip=1.0).norms)

    for engine in (ApartEngine(), BookkeepingEngine()):
        first, second = norms(engine), norms(engine)
        assert len(set(first)) == 6
        assert not set(first) & set(second)


class NoisyLoop(Noisy):
    """Draws in a loop that is neither taken whole nor, as long as it is, unrolled."""

    def call(self, x):
        step = lambda _, h: ops.silu(h) + super(NoisyLoop, self).call(h)  # noqa: E731
        return ops.fori_loop(0, 65, step, x)


@pytest.mark.slow
def test_where_no_rule_reaches_anything_whole_gradients_are_taken(caplog):
    model = keras.Sequential([keras.Input((3,)), NoisyLoop()])
    x = np.ones((4, 3), "float32")
    with caplog.at_level("WARNING", "absl"):
        engine = choose("auto", Objective.of(model, "mse"), (x, x, None))
    assert engine.name == "vectorized"
    assert "whole gradients" in caplog.text


@pytest.mark.slow
def test_a_model_trains_with_it_and_is_explained():
    problem = MODELS["class_token"]
    private = tfdp.DPModel(problem.build(), engine="apart")
    optimizer = tfdp.optimizers.DPSGD(
        learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=1.0
    )
    private.compile(optimizer, problem.loss())
    before = [variable.numpy() for variable in private.trainable_variables]
    private.fit(*problem.batch(8)[:2], batch_size=4, verbose=0)
    for variable, value in zip(private.trainable_variables, before, strict=True):
        assert np.any(variable != value)
    table = private.explain()
    assert "embedding" in table
    # Of the layer with a layer in it, nothing but its own variable.
    (line,) = [row for row in table.splitlines() if "vectorized" in row]
    assert "/token" in line


@pytest.mark.parametrize("engine", ["apart", ApartEngine()], ids=["named", "object"])
def test_it_is_saved_as_what_it_is(engine):
    private = tfdp.DPModel(text_model(), engine=engine)
    config = private.get_config()
    assert config["engine"] == "apart"
    assert tfdp.engines.get(config["engine"]) == ApartEngine()
