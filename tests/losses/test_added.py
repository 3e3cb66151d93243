"""What a row has of a loss that layers add is what it would have alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.engine_checks import OUTLIER, Uphill, check, runner
from tests.problems import PROBLEMS, Problem, floats, precision
from tests.reference import assert_all_close, clipped_sum, problem_gradients
from tests.small import noiseless
from tfdp import engines
from tfdp.checks.engine import choose
from tfdp.engines.apart import ApartEngine
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

ROWS = 6


class Adding(layers.Layer):
    """Adds what a function makes of its input, and has a number that does not train."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.weight = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="weight"
        )

    def call(self, x):
        self.add_loss(self.function(self, x))
        return x


class AddingOfItsOwn(layers.Layer):
    """Adds a loss of what it computes with a variable, and returns something else."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x * self.scale)))
        return x + ops.sin(self.scale)


class DenseAdding(layers.Dense):
    """Adds a loss of its kernel and rows, of which the rule that it is given knows nothing."""

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x @ self.kernel)))
        return super().call(x)


class OfPositions(layers.Layer):
    """A layer inside sees rows times positions, and regularizes what it makes of them."""

    def __init__(self, **options):
        super().__init__(name="of_positions")
        penalty = keras.regularizers.L2(0.3)
        self.inner = layers.Dense(2, activity_regularizer=penalty, name="inner")
        self.inner.trainable = options.get("trainable", True)

    def call(self, x):
        y = self.inner(ops.reshape(x, (-1, x.shape[-1])))
        self.add_loss([ops.mean(y**2), ops.sum(y, axis=1)])
        return ops.reshape(y, (-1, x.shape[1], 2))


def model_with(*inner):
    return keras.Sequential([
        keras.Input((3,)),
        layers.Dense(4, "tanh"),
        *inner,
        layers.Dense(2),
    ])


def adding(function):
    """A problem whose model adds a loss in the middle."""
    return of_layer(lambda: Adding(function))


def of_layer(make):
    return Problem("added", lambda: model_with(make()), floats(3, 2), "mse")


def count(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


# Sums and means over rows, and what is linear after them.
TAKEN_APART = {
    "mean": lambda _, x: ops.mean(ops.square(x)),
    "mean of sums": lambda _, x: -0.5 * ops.mean(ops.sum(x - ops.exp(x), axis=1)),
    "sum": lambda _, x: ops.sum(ops.abs(x)) / 3,
    "each row": lambda _, x: ops.sum(x**2, axis=-1),
    "columns": lambda _, x: ops.sum(x**2, axis=-1, keepdims=True),
    "weighted": lambda layer, x: layer.weight * (2 * ops.mean(x**2) + 1) - ops.mean(x),
    "half precision": lambda _, x: ops.cast(
        0.1 * ops.mean(ops.cast(x, "float32")), x.dtype
    ),
    "list": lambda _, x: [ops.mean(x), ops.sum(x)],
}
# What a row has alone, but of which no row of a batch has a part.
NOT_TAKEN_APART = {
    "divided by the rows": lambda _, x: ops.sum(x**2) / count(x),
    "not linear": lambda _, x: ops.sqrt(1 + ops.mean(x**2)),
    "product": lambda _, x: ops.mean(x**2) * ops.mean(ops.exp(x)),
    "largest": lambda _, x: ops.max(x),
    "keras": lambda _, x: keras.losses.MeanSquaredError()(ops.zeros_like(x), x),
    "other axis": lambda _, x: ops.mean(ops.sum(x**2, axis=0)[:3]),
}


def chosen(problem, seen=None, engine="auto"):
    objective = Objective.of(problem.build(), problem.loss())
    return choose(engine, objective, tuple(problem.batch(3)), seen)


@pytest.mark.parametrize("name", TAKEN_APART)
def test_sums_over_rows_are_taken_apart(name):
    problem = adding(TAKEN_APART[name])
    assert chosen(problem) == BookkeepingEngine()
    with precision("float64"):
        model = problem.build("float64")
        objective = Objective.of(model, problem.loss("float64"))
        x, y, _ = problem.batch(4, "float64")

        @tf.function(autograph=False)
        def losses(x, y):
            return objective.forward(Batch(x, y))[1]

        alone = [losses(x[row : row + 1], y[row : row + 1])[0] for row in range(4)]
        np.testing.assert_allclose(losses(x, y), alone, rtol=1e-12)
        # Nothing is left that Keras would add to another loss.
        assert model.losses == []


@pytest.mark.parametrize(
    "function",
    [
        lambda layer, x: 0.01 * layer.activity_regularizer(x),
        lambda layer, x: ops.mean(x) + 0 * layer.activity_regularizer(x),
    ],
)
def test_a_layer_may_ask_its_regularizer_itself(function):
    """What it adds then is that, and not what Keras will ask the regularizer for."""

    def build():
        return model_with(Adding(function, activity_regularizer="l2"))

    problem = Problem("asked", build, floats(3, 2), "mse")
    with precision("float64"):
        model = problem.build("float64")
        objective = Objective.of(model, problem.loss("float64"))
        x, y, _ = problem.batch(4, "float64")
        forward = tf.function(
            lambda *row: objective.forward(Batch(*row))[1], autograph=False
        )
        losses = forward(x, y)
        for row in range(4):
            one = x[row : row + 1]
            y_pred = model(one)
            expected = sum(model.losses) + ops.mean((y_pred - y[row : row + 1]) ** 2)
            np.testing.assert_allclose(losses[row], expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_TAKEN_APART)
def test_other_losses_are_of_each_unit_by_itself_and_warned_of(name, caplog):
    problem = adding(NOT_TAKEN_APART[name])
    assert chosen(problem) == ApartEngine()
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("may be another loss" in each for each in warned)
    with pytest.raises(UnsupportedLayerError, match=r"must be a sum.*Received: `addi"):
        chosen(problem, engine="bookkeeping")


@pytest.mark.parametrize(
    "name",
    ["divided by the rows", pytest.param("not linear", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("engine", [ApartEngine(), engines.VectorizedEngine()])
def test_each_unit_by_itself(name, engine):
    problem = adding(NOT_TAKEN_APART[name])
    check(problem, runner(problem, [engine], unit_size=2), OUTLIER, unit_size=2)


@pytest.mark.parametrize(
    "name", ["activity", pytest.param("bottleneck", marks=pytest.mark.slow)]
)
def test_units_of_two_one_of_them_padded(name):
    problem = PROBLEMS[name]
    all_of_them = [
        BookkeepingEngine(),
        GhostEngine(),
        ApartEngine(),
        engines.VectorizedEngine(),
    ]
    check(problem, runner(problem, all_of_them, unit_size=2), OUTLIER, unit_size=2)


@pytest.mark.parametrize(
    "is_exact", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", ["activity", pytest.param("bottleneck", marks=pytest.mark.slow)]
)
def test_uphill_from_what_is_added_too(name, is_exact):
    problem, ascent = PROBLEMS[name], Uphill(0.3, 0.5, is_exact)
    both = [BookkeepingEngine(), engines.VectorizedEngine()]
    check(problem, runner(problem, both, ascent=ascent), OUTLIER, ascent=ascent)


class Table(layers.Layer):
    """Multiplies rows by a table of weights, or of positions, that is regularized."""

    def __init__(self, length, of_positions):
        super().__init__()
        regularizer = keras.regularizers.L2(0.3)
        if of_positions:
            self.inner = layers.Embedding(length, 4, activity_regularizer=regularizer)
            self.table = ops.arange(length)
        else:
            self.inner = layers.Dense(4, "tanh", activity_regularizer=regularizer)
            self.table = self.add_weight(shape=(length, 3), name="table")

    def call(self, x):
        return x * ops.mean(self.inner(self.table), 0)


@pytest.mark.parametrize(
    ("length", "of_positions"),
    [
        (4, False),
        (5, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
        pytest.param(5, False, marks=pytest.mark.slow),
    ],
)
def test_a_regularized_table_has_the_penalty_of_each_row(length, of_positions):
    """Its leading axis is not one of rows: nobody divides by them."""
    problem = of_layer(lambda: Table(length, of_positions))
    engine = chosen(problem)
    assert type(engine) is BookkeepingEngine
    check(problem, runner(problem, [engine, engines.VectorizedEngine()]), OUTLIER)


@pytest.mark.slow
def test_a_layer_that_is_called_on_a_variable_is_explained():
    model = tfdp.DPModel(of_layer(lambda: Table(4, of_positions=False)).build())
    model.compile(noiseless(), "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), batch_size=4, verbose=0)
    assert "table" in model.explain()


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [False, True])
def test_rows_of_several_entries_have_their_mean(trainable):
    """Newer Keras divides by rows times positions."""
    problem = Problem(
        "positions",
        lambda: keras.Sequential([
            keras.Input((5, 3)),
            layers.Dense(4),
            OfPositions(trainable=trainable),
            layers.GlobalAveragePooling1D(),
        ]),
        floats((5, 3), 2),
        "mse",
    )
    engine = chosen(problem)
    assert type(engine) is BookkeepingEngine
    check(problem, runner(problem, [engine]), OUTLIER)


@pytest.mark.slow
def test_a_static_number_of_rows_passes_for_no_other_number():
    """Divided by 4, a loss of 4 rows looks like a quarter of a sum."""
    assert chosen(adding(lambda _, x: ops.sum(x) / 4), 4) == BookkeepingEngine()
    by_rows = adding(NOT_TAKEN_APART["divided by the rows"])
    assert chosen(by_rows, 4) == ApartEngine()


def test_another_axis_of_as_many_entries_is_none_of_rows():
    columns = adding(lambda _, x: ops.mean(ops.sum(x**2, axis=0)))
    with pytest.raises(UnsupportedLayerError, match="rows of a batch meet"):
        chosen(columns, 4)


def test_a_loop_over_rows_is_told_of_the_loss_that_has_none():
    """`test_ctc_is_followed_row_by_row` has the advice."""

    def of_loop(_, x):
        return ops.mean(tf.scan(lambda _, row: ops.sum(row**2), x, 0.0))

    with pytest.raises(UnsupportedLayerError, match=r"`keras\.ops\.ctc_loss\("):
        chosen(adding(of_loop), 4)


def test_rows_that_are_constants_of_a_graph_are_no_weights():
    problem = PROBLEMS["activity"]
    batch = problem.batch(4)
    expected, norms = clipped_sum(problem_gradients(problem, batch), 1.0)
    model = problem.build()

    @tf.function(autograph=False)
    def from_arrays():
        return tfdp.clipped_gradients(model, "mse", *batch, l2_norm_clip=1.0)

    @tf.function(autograph=False)
    def from_iterator(rows):
        return tfdp.clipped_gradients(model, "mse", *next(rows), l2_norm_clip=1.0)

    rows = iter(tf.data.Dataset.from_tensors(batch[:2]))
    for result in (from_arrays(), from_iterator(rows)):
        np.testing.assert_allclose(result.norms, norms, rtol=1e-4)
        assert_all_close(result.gradients, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_loss_inside_a_rule_is_seen_by_no_rule():
    """What a layer returns says nothing of what it adds: its weights are followed."""
    problem = Problem("own", lambda: model_with(AddingOfItsOwn()), floats(3, 2), "mse")
    engine = chosen(problem)
    assert engine == BookkeepingEngine(follows_leaves=True)
    check(problem, runner(problem, [engine, ApartEngine()], "graph"), OUTLIER)


def test_a_loss_inside_a_registered_rule_is_not_lost(monkeypatch):
    monkeypatch.setattr(tfdp.rules.registry, "RULES", dict(tfdp.rules.registry.RULES))
    tfdp.rules.register(DenseAdding, tfdp.rules.dense.dense)
    problem = Problem("own", lambda: model_with(DenseAdding(4)), floats(3, 2), "mse")
    check(problem, runner(problem, [BookkeepingEngine()]), OUTLIER)


@pytest.mark.slow
def test_rows_of_a_number_that_is_not_known_are_in_no_unit():
    model = PROBLEMS["activity"].build()

    def clipped(engine):
        return tf.function(
            lambda x, y: tfdp.clipped_gradients(
                model, "mse", x, y, l2_norm_clip=1.0, num_microbatches=2, engine=engine
            ),
            autograph=False,
            input_signature=[tf.TensorSpec((None, n)) for n in (3, 2)],
        )

    x, y, _ = PROBLEMS["activity"].batch(4)
    with pytest.raises(UnsupportedLayerError, match="static number of rows"):
        clipped("vectorized")(x, y)
    assert len(clipped("bookkeeping")(x, y).norms) == 2


# -------------------------------------------------------------------- in a DPModel


class VAE(keras.Model):
    """Learns without targets and has no loss but those that it adds."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers.Dense(2), layers.Dense(3)

    def call(self, x):
        code = self.encoder(x)
        self.add_loss(0.5 * ops.mean(ops.sum(ops.square(code), axis=1)))
        decoded = self.decoder(code)
        self.add_loss(ops.mean(ops.square(x - decoded)))
        return decoded


class OwnLoss(VAE):
    """Has one more, and asks for the others."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return 2 * ops.mean(ops.abs(y_pred)) + sum(self.losses)


def rows(outlier=5.0):
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    x[1] *= outlier
    return x


def gradient_of_rows(model, x):
    """Gradients in plain Keras, a row at a time."""
    variables, found = model.trainable_variables, []
    for row in range(len(x)):
        with tf.GradientTape() as tape:
            y_pred = model(x[row : row + 1], training=True)
            loss = model.compute_loss(x[row : row + 1], None, y_pred)
        found.append(tape.gradient(loss, variables))
    return [np.stack(of_variable) for of_variable in zip(*found, strict=True)]


@pytest.mark.parametrize("make", [VAE, OwnLoss])
@pytest.mark.parametrize(
    "physical_batch_size", [pytest.param(None, marks=pytest.mark.slow), 4]
)
def test_a_model_without_another_loss_trains(make, physical_batch_size):
    model, x = make(), rows()
    model.compile(None)
    loss = float(model.compute_loss(x, None, model(x)))
    gradients = gradient_of_rows(model, x)
    _, norms = clipped_sum(gradients, 1.0)
    clip = float(np.median(norms))
    expected, _ = clipped_sum(gradients, clip)
    before = [variable.numpy() for variable in model.trainable_variables]
    private = tfdp.DPModel(
        model, sampling="shuffle", physical_batch_size=physical_batch_size
    )
    optimizer = noiseless(expected_batch_size=ROWS)
    optimizer.learning_rate, optimizer.l2_norm_clip = 1.0, clip
    private.compile(optimizer)
    history = private.fit(x, batch_size=ROWS, verbose=0)
    assert private._checked.engine == BookkeepingEngine()
    np.testing.assert_allclose(history.history["loss"], [loss], rtol=1e-5)
    moved = [
        ROWS * (start - variable.numpy())
        for start, variable in zip(before, model.trainable_variables, strict=True)
    ]
    assert_all_close(moved, expected, rtol=0, atol=1e-4 * clip)
    now = float(model.compute_loss(x, None, model(x)))
    np.testing.assert_allclose(private.evaluate(x, verbose=0), now, rtol=1e-5)


@pytest.mark.parametrize(
    "engine", ["auto", pytest.param("vectorized", marks=pytest.mark.slow)]
)
def test_the_logged_loss_is_that_of_first_views(engine):
    model, x = PROBLEMS["activity"].build(), rows()
    y = np.ones((ROWS, 2), "float32")
    model.compile(None, "mse")
    # The mean of what rows have alone: older Keras adds the regularizer's up.
    one = (np.s_[row : row + 1] for row in range(ROWS))
    loss = np.mean([model.compute_loss(x[r], y[r], model(x[r])) for r in one])
    private = tfdp.DPModel(
        model,
        engine=engine,
        sampling="shuffle",
        augmentation=layers.GaussianNoise(0.0),
        augmentation_multiplicity=2,
    )
    private.compile(noiseless(expected_batch_size=ROWS), "mse")
    history = private.fit(x, y, batch_size=ROWS, verbose=0)
    np.testing.assert_allclose(history.history["loss"], [loss], rtol=1e-5)


def test_a_loss_must_come_from_somewhere():
    plain = tfdp.DPModel(model_with())
    with pytest.raises(ValueError, match="`loss` is missing"):
        plain.compile(noiseless())
    own_code = tfdp.DPModel(PROBLEMS["custom_layer"].build())
    own_code.compile(noiseless())
    with pytest.raises(ValueError, match="`loss` is missing"):
        own_code.fit(rows(), batch_size=ROWS, verbose=0)
