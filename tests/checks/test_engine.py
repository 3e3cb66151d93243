"""Models that book-keeping must not be trusted with go to the vectorized engine."""

import dataclasses
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.problems import (
    PROBLEMS,
    Problem,
    floats,
    register,
    sequential,
)
from tests.reference import assert_all_close, clipped_sum, problem_gradients
from tfdp import engines, rules
from tfdp.ascent.losses import Ascent
from tfdp.checks.engine import choose
from tfdp.checks.following import check_objective
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

ROWS = 4


# -------------------------------------------------------------- out of rules' reach


@register
class Borrowing(layers.Layer):
    """Multiplies by the matrix of another layer, perhaps by numbers of its own too."""

    def __init__(self, lender, own=False, **options):
        super().__init__(**options)
        # Keras must not find it, or it would be a layer of this one.
        self.lender = lambda: lender
        self.own = own

    def build(self, shape):
        if self.own:
            self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, x):
        if self.own:
            x *= self.scale
        return ops.matmul(x, ops.transpose(self.lender().kernel))


def borrowing(own):
    lender = layers.Dense(3, activation="tanh", name="lender")
    return sequential((4,), lender, Borrowing(lender, own))


@register
class OwnWeight(keras.Model):
    """A weight of the model itself, used in its `call`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.slope = self.add_weight(shape=(3,), name="slope")
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(x * self.slope)


@register
class Residual(layers.Layer):
    """A layer in a layer, and a weight beside it."""

    def build(self, shape):
        self.gain = self.add_weight(shape=(1,), name="gain")
        self.inner = layers.Dense(shape[-1], activation="tanh")
        self.inner.build(shape)

    def call(self, x):
        return x + self.gain * self.inner(x)


@register
class Looping(layers.Layer):
    """Calls a layer for one position after the other."""

    def build(self, shape):
        self.inner = layers.Dense(2, activation="tanh")
        self.inner.build((None, shape[-1]))

    def call(self, x):
        steps = tf.map_fn(self.inner, tf.transpose(x, [1, 0, 2]))
        return tf.transpose(steps[..., :2], [1, 0, 2])


@register
class While(Looping):
    """Calls a layer more often than loops are unrolled, in one that is not followed."""

    def call(self, x):
        # TensorFlow gives `silu` a gradient of its own.
        step = lambda n, h: (n + 1, tf.nn.silu(self.inner(h)))  # noqa: E731
        return tf.while_loop(lambda n, _: n < 65, step, (0, x))[1]


@register
class Cell(layers.Layer):
    """A recurrent cell with a matrix, and a layer beside it."""

    state_size = 2

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")
        self.inner = layers.Dense(2)
        self.inner.build((None, 2))

    def call(self, x, states):
        h = ops.tanh(ops.matmul(x, self.kernel) + self.inner(states[0]))
        return h, [h]


@register
class TimeMajor(layers.Layer):
    """Calls a layer with positions on the leading axis."""

    def build(self, shape):
        self.inner = layers.Dense(2, activation="tanh", name="inner")
        self.inner.build(shape)

    def call(self, x):
        return ops.transpose(self.inner(ops.transpose(x, (1, 0, 2))), (1, 0, 2))


@register
class Flattened(TimeMajor):
    """Calls a layer with all positions of all examples on the leading axis."""

    def call(self, x):
        steps = x.shape[1]
        rows = self.inner(ops.reshape(x, (-1, x.shape[-1])))
        return ops.reshape(rows, (-1, steps, 2))


@register
class Noisy(layers.Layer):
    """A leaf that draws random numbers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(3)

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, x, training=False):
        x *= self.scale
        if training:
            x = keras.random.dropout(x, 0.5, seed=self.seed_generator)
        return x


@register
class OwnLoss(keras.Model):
    """A loss that depends on a weight directly."""

    def __init__(self, **options):
        super().__init__(**options)
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(x)

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        return ops.mean(ops.square(y - y_pred) * ops.sum(self.head.kernel))


# Used elsewhere than in a call that has a rule, and followed from there.
FOLLOWED = {
    "borrowed": Problem("borrowed", lambda: borrowing(False), floats(4, 4), "mse"),
    "weight_of_model": Problem("weight_of_model", OwnWeight, floats(3, 2), "mse"),
    "weight_beside_layer": Problem(
        "weight_beside_layer",
        lambda: sequential((3,), Residual(), Residual()),
        floats(3, 3),
        "mse",
    ),
    "weight_in_time_distributed": Problem(
        "weight_in_time_distributed",
        lambda: sequential((3, 2), layers.TimeDistributed(Residual())),
        floats((3, 2), (3, 2)),
        "mse",
    ),
    "tied": PROBLEMS["tied_embedding"],
    "time_major": Problem(
        "time_major",
        lambda: sequential((3, 2), TimeMajor()),
        floats((3, 2), (3, 2)),
        "mse",
    ),
    "time_major_square": Problem(
        "time_major_square",
        lambda: sequential((ROWS, 2), TimeMajor()),
        floats((ROWS, 2), (ROWS, 2)),
        "mse",
    ),
    "flattened": Problem(
        "flattened",
        lambda: sequential((3, 2), Flattened()),
        floats((3, 2), (3, 2)),
        "mse",
    ),
}
# The model, an example, the loss, and what the refusal must name.
UNSUPPORTED = {
    "borrowed_beside_own": (
        lambda: borrowing(True),
        floats(4, 4),
        "mse",
        ["lender/kernel"],
    ),
    "map": (
        lambda: sequential((3, 2), Looping()),
        floats((3, 2), (3, 2)),
        "mse",
        ["dense"],
    ),
    "while": (lambda: sequential((2,), While()), floats(2, 2), "mse", ["dense"]),
    "cell": (
        lambda: sequential((3, 2), layers.RNN(Cell())),
        floats((3, 2), 2),
        "mse",
        ["`rnn`", "no variables of its own"],
    ),
    "many_steps": (
        lambda: sequential((65, 1), layers.RNN([layers.SimpleRNNCell(2, "silu")])),
        floats((65, 1), 2),
        "mse",
        ["simple_rnn_cell", "fixed number of steps"],
    ),
}


def problem_of(name):
    make_model, example, loss, _ = UNSUPPORTED[name]
    return Problem(name, make_model, example, loss)


# Loops.
DEAR = {"cell", "many_steps", "map"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in DEAR else [])
        for name in UNSUPPORTED
        # In a graph its weights are followed.
        if name != "cell"
    ],
)
def test_what_rules_do_not_reach_is_refused_by_name(name):
    problem = problem_of(name)
    objective = Objective.of(problem.build(), problem.loss())
    engine = "ghost" if name == "borrowed_beside_own" else "bookkeeping"
    if name == "borrowed_beside_own":
        # Its own number would be followed, but not uphill.
        ascent = Ascent(lambda: tf.constant(0.1, tf.float64), 0.5, False)
        objective = dataclasses.replace(objective, ascent=ascent)
    with pytest.raises(UnsupportedLayerError) as refusal:
        choose(engine, objective, tuple(problem.batch(ROWS)))
    text = str(refusal.value)
    assert f"Engine '{engine}' cannot" in text
    assert text.endswith("`engine='auto'`.")
    assert all(named in text for named in UNSUPPORTED[name][3]), text
    assert "\n" not in text


@pytest.mark.slow
@pytest.mark.parametrize("problem", FOLLOWED.values(), ids=FOLLOWED)
def test_what_is_used_elsewhere_is_followed(problem, caplog):
    batch, clip = problem.batch(ROWS), 0.1
    with caplog.at_level(logging.INFO, "absl"):
        result = tfdp.clipped_gradients(
            problem.build(), problem.loss(), *batch[:2], l2_norm_clip=clip
        )
    expected, norms = clipped_sum(problem_gradients(problem, batch), clip)
    np.testing.assert_allclose(result.norms, norms, rtol=2e-5)
    assert_all_close(result.gradients, expected, rtol=0, atol=2e-5 * clip * ROWS)
    assert not any("tfdp takes" in text for text in caplog.messages)


@pytest.mark.parametrize("engine", ["auto", "vectorized"])
def test_states_that_go_from_batch_to_batch_are_refused_before_any_step(engine):
    layer = layers.SimpleRNN(2, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(ROWS, 3, 2)), layer])
    data = np.ones((ROWS, 3, 2), "float32"), np.ones((ROWS, 2), "float32"), None
    objective = Objective.of(model, "mse")
    with pytest.raises(UnsupportedLayerError, match=r"`layer.stateful = False`"):
        choose(engine, objective, data)
    assert not np.any(layer.states[0])
    layer.stateful = False
    assert choose(engine, objective, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["many_steps", "map"])
def test_what_rules_do_not_reach_is_vectorized(name, caplog):
    check_vectorized(problem_of(name), caplog)


@pytest.mark.slow
def test_the_engine_is_chosen_just_so_while_a_graph_is_built(caplog):
    check_vectorized(problem_of("map"), caplog, tf.function(autograph=False))


def check_vectorized(problem, caplog, wrapper=lambda function: function):
    """Compare with the reference; exactly one line says what engine it is."""
    batch, clip = problem.batch(ROWS), 0.1
    model, loss = problem.build(), problem.loss()

    def run(*data):
        return tfdp.clipped_gradients(
            model, loss, *data, l2_norm_clip=clip, engine="auto"
        )

    with caplog.at_level(logging.INFO, "absl"):
        result = wrapper(run)(*batch[:2])
    expected, norms = clipped_sum(problem_gradients(problem, batch), clip)
    np.testing.assert_allclose(result.norms, norms, rtol=2e-5)
    assert_all_close(result.gradients, expected, rtol=0, atol=2e-5 * clip * ROWS)
    said = [text for text in caplog.messages if "tfdp takes" in text]
    assert len(said) == 1
    assert "\n" not in said[0]


class Tagging(keras.Model):
    """Numbers in the data pick the losses of tags, which a weight of its own has a part in."""

    def __init__(self, counts_rows, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.counts_rows = layers.Dense(5), counts_rows
        self.transition = self.add_weight(shape=(5, 5), name="transition")

    def call(self, x):
        return self.inner(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        log = ops.log_softmax(y_pred @ self.transition)
        picked = ops.take_along_axis(log, y[..., None], axis=-1)
        if self.counts_rows:
            picked *= ops.cast(ops.shape(y)[0], picked.dtype)
        return -ops.mean(picked)


class Steep(keras.Model):
    """A penalty on what the model's outputs change by with its inputs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.Sequential([keras.Input((3,)), layers.Dense(1, "tanh")])

    def call(self, x):
        return self.inner(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self.inner(x)
        slope = tape.gradient(outputs, x)
        return ops.mean((y_pred - y) ** 2) + ops.mean(slope**2)


class Sampled(keras.Model):
    """Compares with a few classes that are drawn, by TensorFlow or by Keras."""

    def __init__(self, is_drawn_by_keras, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.is_drawn_by_keras = layers.Dense(5), is_drawn_by_keras
        self.classes = self.add_weight(shape=(20, 5), name="classes")
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        return self.inner(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        if not self.is_drawn_by_keras:
            classes = tf.convert_to_tensor(self.classes)
            labels = tf.cast(y, "int64")
            return ops.mean(
                tf.nn.sampled_softmax_loss(
                    classes, tf.zeros(20), labels, y_pred, num_sampled=7, num_classes=20
                )
            )
        drawn = keras.random.randint((7,), 0, 20, seed=self.seed_generator)
        own = ops.sum(y_pred * ops.take(self.classes, y[:, 0], axis=0), -1)
        others = y_pred @ ops.transpose(ops.take(self.classes, drawn, axis=0))
        return ops.mean(ops.logsumexp(others - own[:, None], axis=-1))


@pytest.mark.slow
def test_a_loss_that_draws_otherwise_is_told_how(rng, caplog):
    x, y = rng.normal(size=(2 * ROWS, 3)), rng.integers(0, 20, (2 * ROWS, 1))
    with pytest.raises(UnsupportedLossError, match=r"keras.random.randint\(\(7,\)"):
        lines_of(Sampled(is_drawn_by_keras=False), x, y, caplog)
    lines_of(Sampled(is_drawn_by_keras=True), x, y, caplog)


def lines_of(model, x, y, caplog):
    private = tfdp.DPModel(model)
    private.compile(tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0))
    with caplog.at_level(logging.INFO, "absl"):
        private.fit(x, y, batch_size=ROWS, verbose=0)
    return [text for text in caplog.messages if "tfdp takes" in text]


@pytest.mark.slow
def test_what_keeps_a_loss_from_being_taken_apart_is_said(rng, caplog):
    x, y = rng.normal(size=(2 * ROWS, 6, 3)), rng.integers(0, 5, (2 * ROWS, 6))
    (said,) = lines_of(Tagging(counts_rows=True), x, y, caplog)
    of_all, _, of_each = said.partition(" Of each row alone: ")
    assert "must not depend on how many examples there are" in of_all
    assert "transition" in of_each
    caplog.clear()
    assert not lines_of(Tagging(counts_rows=False), x, y, caplog)


@pytest.mark.slow
def test_a_loss_that_takes_gradients_is_vectorized_and_not_said_to_be_slow(rng, caplog):
    x = rng.normal(size=(2 * ROWS, 3)).astype("float32")
    (said,) = lines_of(Steep(), x, x[:, :1], caplog)
    assert said.partition(": ")[2].startswith("A model or a loss that takes gradients")


# --------------------------------------------------------- what only numbers can tell


@register
class Doubling(layers.Layer):
    """A leaf for rules that are wrong: ``2 x kernel + bias``."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")
        self.bias = self.add_weight(shape=(2,), name="bias")

    def call(self, x):
        return 2 * ops.matmul(x, self.kernel) + self.bias


def doubling_rule(factor, bias):
    def rule(call):
        x, layer = call.inputs, call.layer

        def terms(g):
            found = [rules.OuterProducts(layer.kernel, factor * x, g)]
            return [*found, rules.PerRow(layer.bias, g)] if bias else found

        return call.watch(call.run(x), terms)

    return rule


@pytest.fixture
def table(monkeypatch):
    """Forget what a test registers."""
    monkeypatch.setattr(rules.registry, "RULES", dict(rules.registry.RULES))


@pytest.mark.parametrize(
    ("factor", "bias", "named"),
    [
        (2.0, True, None),
        (2.0, False, "sums for `sequential/doubling/bias`"),
        (1.0, True, "sums for `sequential/doubling/kernel`"),
        (4.0, True, "sums for `sequential/doubling/kernel`"),
    ],
)
@pytest.mark.smoke
def test_a_rule_that_is_wrong_is_found_out(factor, bias, named, table):
    # A head that starts at zero lets nothing through at first.
    model = sequential((3,), Doubling(), layers.Dense(1, kernel_initializer="zeros"))
    rules.register(Doubling, doubling_rule(factor, bias))
    objective = Objective.of(model, "mse")
    batch = linear_data()
    weights = [variable.numpy() for variable in model.variables]
    if named is None:
        assert choose("bookkeeping", objective, batch) == BookkeepingEngine()
    else:
        with pytest.raises(UnsupportedLayerError, match=named):
            choose("bookkeeping", objective, batch)
    for variable, before in zip(model.variables, weights, strict=True):
        np.testing.assert_array_equal(variable, before)


def linear_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3)).astype("float32")
    return x, rng.normal(size=(ROWS, 1)).astype("float32"), None


def test_positions_in_place_of_examples_do_not_hide_behind_a_head_of_zeros():
    model = sequential(
        (ROWS, 2), TimeMajor(), layers.Dense(1, kernel_initializer="zeros")
    )
    x = np.random.default_rng(0).normal(size=(ROWS, ROWS, 2)).astype("float32")
    objective = Objective.of(model, "mse")
    engine = choose("bookkeeping", objective, (x, np.ones((ROWS, ROWS, 1)), None))
    assert ("time_major/inner", 0) in dict(engine.places)


# ------------------------------------------------------------------ other ways around


class ForAllRows(layers.Layer):
    """Uses layers on something else than rows."""

    def __init__(self, function, inner=None):
        super().__init__()
        self.function = function
        self.embedding = layers.Embedding(4, 6)
        self.inner = inner

    def call(self, x):
        return self.function(x, self.embedding, self.inner)


@pytest.mark.parametrize(
    ("function", "inner"),
    [
        pytest.param(
            lambda x, embed, _: x + embed(ops.convert_to_tensor(2)),
            None,
            id="scalar",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda x, embed, norm: x + norm(embed(ops.arange(4))),
            lambda: layers.LayerNormalization(axis=0),
            id="axis_of_positions",
        ),
        pytest.param(
            lambda x, embed, dense: (
                dense(x) + ops.stop_gradient(dense(embed(ops.arange(4))))
            ),
            lambda: layers.Dense(6),
            id="stopped",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_calls_that_a_rule_was_not_written_for_are_no_error(function, inner):
    model = keras.Sequential([
        keras.Input((4, 6)),
        ForAllRows(function, inner and inner()),
        layers.Flatten(),
        layers.Dense(1),
    ])
    x = np.random.default_rng(0).normal(size=(5, 4, 6)).astype("float32")
    y = np.ones((5, 1), "float32")
    objective = Objective.of(model, "mse")
    assert choose("auto", objective, (x, y, None)) == BookkeepingEngine()

    @tf.function(
        input_signature=[tf.TensorSpec([None, 4, 6]), tf.TensorSpec([None, 1])]
    )
    def norms(x, y):
        return tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1.0).norms

    expected = tfdp.clipped_gradients(
        model, "mse", x, y, l2_norm_clip=1.0, engine="vectorized"
    )
    np.testing.assert_allclose(norms(x, y), expected.norms, rtol=1e-4)


def test_errors_of_a_model_stay_what_they_are():
    is_broken = False

    def may_break(x):
        if is_broken:
            raise KeyError("own")
        return x

    model = keras.Sequential([
        keras.Input((4, 6)),
        layers.Lambda(may_break),
        layers.Dense(1),
    ])
    is_broken, x = True, np.ones((5, 4, 6), "float32")
    with pytest.raises(KeyError, match="own"):
        choose("auto", Objective.of(model, "mse"), (x, x[..., :1], None))


def test_a_weight_that_a_loss_of_all_rows_uses_is_followed():
    model = OwnLoss()
    x, y = np.ones((ROWS, 3), "float32"), np.ones((ROWS, 2), "float32")
    model(x)
    model.compile()
    objective = Objective.of_compute_loss(model)
    assert choose("auto", objective, (x, y, None)) == BookkeepingEngine()


@pytest.mark.slow
@register
class Leaf(layers.Layer):
    """A layer without a rule, and without layers in it."""

    def __init__(self, product=ops.matmul, **kwargs):
        super().__init__(**kwargs)
        self.product = product

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], 2), name="matrix")
        self.scale = self.add_weight(shape=(2,), initializer="ones", name="scale")

    def call(self, x):
        return self.scale * ops.tanh(self.product(x, self.matrix))


def chosen_for(leaf, seen=None, loss="mse", **options):
    model = keras.Sequential([keras.Input((3,)), leaf, layers.Dense(2)])
    objective = dataclasses.replace(Objective.of(model, loss), **options)
    data = np.ones((ROWS, 3), "float32"), np.ones((ROWS, 2), "float32"), None
    return choose("auto", objective, data, seen)


def test_layers_without_a_rule_are_followed(caplog):
    with caplog.at_level(logging.INFO, "absl"):
        engine = chosen_for(Leaf())
    assert type(engine) is BookkeepingEngine
    assert engine.follows_leaves
    assert not caplog.messages


@pytest.mark.slow
def test_what_is_not_followed_has_the_rule_of_leaves(caplog):
    @tf.custom_gradient
    def product(x, matrix):
        def gradient(g):
            return tf.matmul(g, matrix, transpose_b=True), tf.matmul(
                x, g, transpose_a=True
            )

        return tf.matmul(x, matrix), gradient

    leaf = Leaf(lambda x, matrix: product(x, tf.convert_to_tensor(matrix)))
    engine = chosen_for(leaf)
    assert type(engine) is BookkeepingEngine
    assert not engine.follows_leaves
    assert "tfdp has no rule" in caplog.text


def test_a_use_among_several_outputs_is_not_lost():
    def product(x, matrix):
        _, matrix = tf.raw_ops.IdentityN(input=[x, tf.convert_to_tensor(matrix)])
        return tf.matmul(x, matrix)

    # Nothing is known of such an operation, but that it matters.
    assert not chosen_for(Leaf(product)).follows_leaves


def test_one_long_loop_of_nothing_is_no_reason_to_give_up():
    """Whatever else has to be found out before rows are proven to stay apart."""

    class Windows(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = layers.Dense(3, "tanh")

        def call(self, x):
            x = ops.fori_loop(0, 100, lambda _, h: 0.5 * (h + ops.roll(h, 1, -1)), x)
            windows = self.inner(ops.reshape(x, (-1, 3)))
            return ops.reshape(windows, (-1, 6))

    model = keras.Sequential([keras.Input((6,)), Windows(), layers.Dense(2)])
    data = np.ones((ROWS, 6), "float32"), np.ones((ROWS, 2), "float32"), None
    engine = choose("auto", Objective.of(model, "mse"), data)
    assert type(engine) is BookkeepingEngine
    assert engine.places


@pytest.mark.slow
def test_int8_layers_train_their_bias():
    """It is followed to where it meets the rows; the rule of the layer knows no int8."""
    model = sequential((4,), layers.Dense(3, "tanh"), layers.Dense(2))
    model.layers[0].quantize("int8")
    assert [v.name for v in model.trainable_variables] == ["bias", "kernel", "bias"]
    problem = PROBLEMS["linear_regression"]
    x = problem.batch(ROWS).x @ np.ones((3, 4), "float32")
    y = np.ones((ROWS, 2), "float32")
    result = tfdp.clipped_gradients(
        model, "mse", x, y, l2_norm_clip=0.1, engine="bookkeeping"
    )
    variables = model.trainable_variables
    sums = [np.zeros(variable.shape) for variable in variables]
    for row in range(ROWS):
        with tf.GradientTape() as tape:
            error = model(x[row : row + 1]) - y[row]
            loss = tf.reduce_mean(tf.square(error))
        gradients = tape.gradient(loss, variables)
        length = tf.linalg.global_norm(gradients)
        np.testing.assert_allclose(result.norms[row], length, rtol=1e-5)
        share = min(1, 0.1 / float(length))
        sums = [a + share * np.asarray(b) for a, b in zip(sums, gradients, strict=True)]
    for mine, total in zip(result.gradients, sums, strict=True):
        np.testing.assert_allclose(mine, total, atol=1e-6)


def test_spectral_normalization_is_refused_before():
    model = sequential((3,), layers.SpectralNormalization(layers.Dense(1)))
    x, y, _ = linear_data()
    with pytest.raises(UnsupportedLayerError, match="spectral_normalization"):
        tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1.0)


def test_checkpointed_activations_are_recorded():
    with keras.RematScope(mode="activations"):
        model = sequential((3,), layers.Dense(3, activation="tanh"), layers.Dense(1))
    assert choose("auto", Objective.of(model, "mse"), linear_data()) == (
        BookkeepingEngine()
    )


@pytest.mark.parametrize(
    ("engine", "hidden"), [("ghost", layers.Flatten()), ("auto", layers.LSTM(2))]
)
def test_a_model_that_rules_reach_keeps_its_engine(engine, hidden, caplog):
    model = sequential((3,), layers.Reshape((3, 1)), hidden, layers.Dense(1))
    with caplog.at_level(logging.WARNING, "absl"):
        chosen = choose(engine, Objective.of(model, "mse"), linear_data())
    assert chosen == engines.get(engine)
    assert not caplog.messages


UPHILL = {
    "sam": Ascent(lambda: tf.constant(0.02, tf.float64), mix=0.8, is_exact=False),
    "exact": Ascent(lambda: tf.constant(0.02, tf.float64), mix=0.8, is_exact=True),
}


def objective_uphill(ascent, model, loss):
    return dataclasses.replace(Objective.of(model, loss), ascent=UPHILL[ascent])


def convolved_in_a_loop():
    """A kernel whose gradients of single examples are taken one by one."""
    convolution = layers.Conv2D(2, 3, padding="same")
    model = sequential((32, 32, 8), convolution, layers.Flatten(), layers.Dense(1))
    return objective_uphill("sam", model, "mse"), np.ones((ROWS, 32, 32, 8))


def looked_up():
    model = sequential((3,), layers.Embedding(9, 2), layers.Flatten(), layers.Dense(1))
    return objective_uphill("exact", model, "mse"), np.arange(3 * ROWS).reshape(-1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("build", [convolved_in_a_loop, looked_up])
def test_rows_are_followed_uphill(build):
    objective, x = build()
    chosen = choose("bookkeeping", objective, (x, np.ones((ROWS, 1)), None))
    assert chosen == BookkeepingEngine()


@pytest.mark.slow
@pytest.mark.parametrize("ascent", UPHILL)
@pytest.mark.parametrize("first", [True, False])
def test_what_lets_rows_meet_is_found_uphill(ascent, first):
    mixing = layers.Lambda(lambda x: x - ops.mean(x, 0, keepdims=True))
    hidden = layers.Dense(3, activation="tanh")
    ordered = [mixing, hidden] if first else [hidden, mixing]
    model = sequential((3,), *ordered, layers.Dense(1))
    with pytest.raises(UnsupportedLayerError, match="rows of a batch meet"):
        choose("auto", objective_uphill(ascent, model, "mse"), linear_data())


class DropConnect(layers.Layer):
    """A leaf that draws from Keras's global generator, which it does not own."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")

    def call(self, x, training=None):
        kernel = keras.random.dropout(self.kernel, 0.5) if training else self.kernel
        return ops.matmul(x, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [lambda run: run, tf.function])
def test_unseeded_layers_are_random_from_the_first_pass(wrapper):
    keras.utils.clear_session()  # No generator of seeds is left.
    model = sequential((3,), DropConnect())
    x, y = np.ones((64, 3), "float32"), np.zeros((64, 2), "float32")

    @wrapper
    def norms():
        return tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1.0).norms

    first, second = np.asarray(norms()), np.asarray(norms())
    # All rows have the mask that Keras draws for all, another one each time.
    np.testing.assert_allclose(first, first[0], rtol=1e-6)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("engine", [BookkeepingEngine(), GhostEngine()])
def test_weights_with_a_mask_have_the_norm_of_that_draw(engine):
    model = sequential((3,), DropConnect(), layers.Dense(1))
    objective = Objective.of(model, "mse")
    assert choose(engine, objective, linear_data()).name == engine.name
    x, y = np.full((1, 3), 1e5, "float32"), np.ones((1, 1), "float32")

    def clipped(clip):
        @tf.function(autograph=False)
        def run():
            return tfdp.clipped_gradients(
                model, "mse", x, y, l2_norm_clip=clip, engine=engine
            )

        found = run()
        return float(tf.linalg.global_norm(found.gradients)), float(found.norms[0])

    for _ in range(3):
        total, norm = clipped(1e30)
        np.testing.assert_allclose(total, norm, rtol=1e-5)
        assert clipped(1.0)[0] <= 1


def test_a_wrong_rule_is_found_out_beside_a_row_of_nan(table):
    rules.register(Doubling, doubling_rule(1.0, bias=True))
    objective = Objective.of(sequential((3,), Doubling(), layers.Dense(1)), "mse")
    x, y, weight = linear_data()
    x[1] = np.nan
    with pytest.raises(UnsupportedLayerError, match="doubling"):
        choose("bookkeeping", objective, (x, y, weight))


def test_examples_without_weight_are_no_reason_to_refuse():
    objective = Objective.of(sequential((3,), layers.Dense(1)), "mse")
    x, y, _ = linear_data()
    data = (x, y, np.zeros(len(x), "float32"))
    assert choose("bookkeeping", objective, data) == BookkeepingEngine()


# ------------------------------------------------------------- axes of unknown length


class Angles(layers.Layer):
    """Turns pairs of numbers by an angle that grows along the sequence."""

    def call(self, x):
        places = ops.arange(ops.shape(x)[1], dtype="float32")
        angles = ops.einsum("bi,j->bij", places[None], ops.ones((1,)))
        angles = ops.reshape(angles, (*ops.shape(angles)[:-1], 1))
        return x * ops.cos(angles) + ops.flip(x, -1) * ops.sin(angles)


def test_angles_along_sequences_of_any_length():
    model = sequential((None, 2), layers.Dense(2), Angles(), layers.Dense(1))
    data = tf.TensorSpec([None, None, 2]), tf.TensorSpec([None, None, 1]), None
    objective = Objective.of(model, "mse")
    assert choose("bookkeeping", objective, data) == BookkeepingEngine()


def batches_of_lengths(*lengths):
    """Batches of four sequences, one length for each batch."""
    rng = np.random.default_rng(0)
    for length in lengths:
        yield rng.normal(size=(ROWS, length, 3)).astype("float32"), np.ones((ROWS, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (layers.Conv1D(2, 3), None),
        (layers.Dense(2, name="steps"), None),
        (layers.Conv1D(2, 3, dilation_rate=2), None),
    ],
)
def test_sequences_of_any_length(layer, reason, caplog):
    """Whatever needs a known shape is vectorized, others keep their engine."""
    model = sequential(
        (None, 3), layer, layers.GlobalAveragePooling1D(), layers.Dense(1)
    )
    private = tfdp.DPModel(model, sampling="shuffle")
    optimizer = tfdp.optimizers.DPSGD(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=ROWS
    )
    private.compile(optimizer, "mse")
    data = tf.data.Dataset.from_generator(
        lambda: batches_of_lengths(5, 7),
        output_signature=(
            tf.TensorSpec([None, None, 3]),
            tf.TensorSpec([None, 1]),
        ),
    ).apply(tf.data.experimental.assert_cardinality(2))
    with caplog.at_level(logging.INFO, "absl"):
        private.fit(data, verbose=0)
    said = [text for text in caplog.messages if "tfdp takes" in text]
    assert len(said) == (reason is not None)
    assert all(reason in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "vectorized"])
def test_time_steps_of_unknown_number_are_refused(engine):
    """Newer Keras takes the number of rows for that of the time steps then."""
    model = sequential(
        (None, 3),
        layers.TimeDistributed(layers.Dense(2)),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1),
    )

    def norms(x, y):
        return tfdp.clipped_gradients(
            model, "mse", x, y, l2_norm_clip=1.0, engine=engine
        ).norms

    signature = [tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, 1])]
    x, y = next(batches_of_lengths(5))
    # None in the signature, so that the layer sees no number of time steps.
    kept = tf.function(model.layers[0], input_signature=signature[:1], autograph=False)
    if kept(x).shape == (ROWS, 5, 2):
        pytest.skip("this Keras runs time steps of unknown number as they are")
    with pytest.raises(UnsupportedLayerError, match="rows of one length"):
        tf.function(norms, input_signature=signature, autograph=False)(x, y)

    def followed(x, y):
        return norms(tf.ensure_shape(x, (None, 5, 3)), y)

    traced = tf.function(followed, input_signature=signature, autograph=False)
    np.testing.assert_allclose(traced(x, y), norms(x, y), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "vectorized"])
def test_graphs_may_take_sequences_of_any_length(engine):
    model = sequential(
        (None, 3), layers.Dense(2), layers.GlobalAveragePooling1D(), layers.Dense(1)
    )

    def norms(x, y):
        result = tfdp.clipped_gradients(
            model, "mse", x, y, l2_norm_clip=1.0, engine=engine
        )
        return result.norms

    signature = [tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, 1])]
    traced = tf.function(norms, input_signature=signature, autograph=False)
    for x, y in batches_of_lengths(5, 7):
        np.testing.assert_allclose(traced(x, y), norms(x, y), rtol=1e-5)


class Reading(keras.Model):
    """Compares whole words, by what TensorFlow 1 calls a function."""

    def __init__(self, power=1):
        super().__init__()
        self.dense = layers.Dense(5)
        self.power = power

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        loss = keras.losses.CTC()(y, y_pred)
        return loss if self.power == 1 else loss**self.power


class Endpoint(layers.Layer):
    """Takes what is to be read as an input, and adds the loss."""

    def call(self, words, y_pred):
        ones = ops.ones_like(words[:, 0])
        lengths = ones * words.shape[1], ones * y_pred.shape[1]
        self.add_loss(ops.ctc_loss(words, y_pred, *lengths))
        return y_pred


def readings():
    """Data of `Reading`, and the clipped sum of what one row after the other has."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 6, 3)).astype("float32")
    x[2] *= 9
    y = rng.integers(1, 5, size=(ROWS, 2)).astype("int32")
    model = Reading()
    model(x)
    gradients = []
    for row in range(ROWS):
        with tf.GradientTape() as tape:
            loss = keras.losses.CTC()(y[row : row + 1], model(x[row : row + 1]))
        values = [each.value for each in model.trainable_variables]
        gradients.append([np.asarray(each) for each in tape.gradient(loss, values)])
    gradients = [np.stack(of_variable) for of_variable in zip(*gradients, strict=True)]
    return model, x, y, gradients


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compute_loss", "compile", "add_loss"])
def test_ctc_is_followed_row_by_row(way):
    model, x, y, gradients = readings()
    data = x, y
    if way == "compute_loss":
        model.compile()
        objective = Objective.of_compute_loss(model)
    elif way == "compile":
        objective = Objective.of(model, keras.losses.CTC())
    else:
        inputs = keras.Input((6, 3)), keras.Input((2,), dtype="int32")
        outputs = Endpoint()(inputs[1], model.dense(inputs[0]))
        objective = Objective.of(keras.Model(inputs, outputs), None)
        data = (x, y), None
    assert choose("auto", objective, (*data, None)) == BookkeepingEngine()
    expected, norms = clipped_sum(gradients, 1.0)
    clip = float(np.median(norms))
    expected, norms = clipped_sum(gradients, clip)
    run = tf.function(
        lambda: BookkeepingEngine().clip_and_sum(
            objective, filled_up(data), l2_norm_clip=tf.constant(clip), rows_per_unit=1
        ),
        autograph=False,
    )
    sums, found, _ = run()
    np.testing.assert_allclose(found, norms, rtol=1e-4)
    assert_all_close(sums, expected, rtol=0, atol=1e-4 * clip * ROWS)


def filled_up(data):
    """A batch of an unknown number of rows, all of them real."""

    def forgotten(leaf):
        leaf = tf.constant(leaf)
        return tf.raw_ops.PlaceholderWithDefault(
            input=leaf, shape=[None, *leaf.shape[1:]]
        )

    x, y = keras.tree.map_structure(
        lambda leaf: None if leaf is None else forgotten(leaf), data
    )
    return Batch(x, y, None, forgotten(np.zeros(ROWS, bool)))


@pytest.mark.slow
def test_a_loss_without_a_gradient_in_loops_is_of_each_unit_by_itself():
    model = Reading(power=2)
    x, y = np.ones((ROWS, 6, 3), "float32"), np.ones((ROWS, 2), "int32")
    model(x)
    model.compile()
    objective = Objective.of_compute_loss(model)
    with pytest.raises(UnsupportedLayerError, match="no gradient in a loop over rows"):
        choose("bookkeeping", objective, (x, y, None))
    check_objective(objective, (x, y, None))


class Spreading(layers.Layer):
    """Adds how far rows are from their mean."""

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x - ops.mean(x, axis=0))))
        return x


def test_a_layer_that_adds_losses_is_told_of_its_own_loss():
    model = sequential((3,), layers.Dense(2), Spreading(name="spread"), layers.Dense(1))
    x = np.ones((ROWS, 3), "float32")
    with pytest.raises(UnsupportedLayerError, match=r"`spread`.*add_loss\(") as caught:
        choose("auto", Objective.of(model, "mse"), (x, x[:, :1], None))
    assert "CTC" not in str(caught.value)


@pytest.mark.slow
def test_the_line_of_a_gradient_is_that_of_its_operation(caplog):
    def picked(x):
        return tf.gather(x, tf.cast(x[:, :, 0], "int32"), batch_dims=1)

    model = sequential(
        (None, 3),
        layers.Dense(3),
        layers.Lambda(picked, name="picked"),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1),
    )
    # Of open lengths nothing is proven.
    x, y = tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, 1])
    with caplog.at_level("INFO", "absl"):
        choose("auto", Objective.of(model, "mse"), (x, y, None))
    (line,) = [
        r.getMessage() for r in caplog.records if "gradient_tape/" in r.getMessage()
    ]
    assert f"({__file__}:{picked.__code__.co_firstlineno + 1})" in line
    assert "give that axis a fixed length, `keras.Input((20, 3))`" in line


@pytest.mark.slow
def test_other_variables_are_checked_anew():
    """What a model that is frozen may do, one that trains may not."""
    model = sequential((3,), layers.Dense(2), layers.BatchNormalization())
    x, y, _ = linear_data()
    y = np.repeat(y, 2, axis=1)
    norm = model.layers[1]
    norm.trainable = False
    result = tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1e9)
    assert len(result.gradients) == 2
    norm.trainable = True
    with pytest.raises(UnsupportedLayerError, match="batch statistics"):
        tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=1e9)


# ------------------------------------------------------------------------ the losses


def weighted_by_share(y, y_pred, sample_weight):
    losses = ops.mean(ops.square(ops.cast(y, y_pred.dtype) - y_pred), axis=-1)
    return losses * ops.cast(sample_weight / ops.mean(sample_weight), losses.dtype)


def masked_mean(y, y_pred, sample_weight):
    mask = ops.cast(y > 0, y_pred.dtype)
    losses = ops.sum(ops.abs(y_pred) * mask, axis=-1)
    return losses * ops.cast(ops.size(mask), losses.dtype) / ops.sum(mask)


def standardized(y, y_pred, sample_weight):
    losses = ops.mean(ops.abs(y_pred), axis=-1)
    return losses - ops.max(losses)


LABELS = np.array([0, 1, 2, 1, 0, 2])
PROBABILITIES = np.random.default_rng(2).dirichlet(np.ones(3), size=6).astype("float32")
WEIGHTS = np.array([0.5, 2.0, 1.0, 3.0, 1.0, 1.0])


class Given(keras.Model):
    """Predicts what it is given."""

    def __init__(self):
        super().__init__(autocast=False)

    def call(self, x):
        return x


def check_loss(losses, y, y_pred, sample_weight=None):
    objective = Objective(Given(), lambda x, *batch: losses(*batch), [])
    check_objective(objective, (y_pred, y, sample_weight))


@pytest.mark.parametrize(
    ("losses", "y"),
    [
        (keras.losses.SparseCategoricalCrossentropy(reduction=None), LABELS),
        (
            keras.losses.CategoricalCrossentropy(reduction=None),
            np.eye(3)[LABELS],
        ),
        (keras.losses.MeanSquaredError(reduction=None), np.eye(3)[LABELS]),
        (lambda y, y_pred, sample_weight: -ops.log(y_pred[:, 0]), None),
        (lambda y, y_pred, sample_weight: y_pred[:, 0] * np.nan, LABELS),
    ],
    ids=["sparse", "categorical", "squared", "no targets", "nan"],
)
@pytest.mark.parametrize("sample_weight", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_losses_of_one_example_each_pass(losses, y, sample_weight, dtype):
    check_loss(losses, y, ops.cast(PROBABILITIES, dtype), sample_weight)


@pytest.mark.parametrize(
    ("losses", "y"),
    [
        (keras.losses.Circle(reduction=None), LABELS),
        (weighted_by_share, np.eye(3)[LABELS]),
        (masked_mean, np.eye(3)[LABELS][:, [0, 0, 1]]),
        (standardized, None),
    ],
    ids=["circle", "weights", "mask", "maximum"],
)
@pytest.mark.parametrize("rows", [3, 6])
def test_losses_that_couple_examples_are_refused(losses, y, rows):
    y = None if y is None else y[:rows]
    with pytest.raises(UnsupportedLossError, match=r"Circle.*Use a loss that|in-batch"):
        check_loss(losses, y, PROBABILITIES[:rows], WEIGHTS[:rows])


def test_losses_of_nested_outputs_are_followed():
    def losses(y, y_pred, sample_weight):
        return y_pred["a"][:, 0] + ops.mean(y_pred["b"])

    with pytest.raises(UnsupportedLossError, match="must not depend on other"):
        check_loss(losses, None, {"a": PROBABILITIES, "b": PROBABILITIES})


def test_a_reduced_loss_is_refused():
    with pytest.raises(UnsupportedLossError, match=r"returned shape \(\)"):
        check_loss(keras.losses.MeanSquaredError(), PROBABILITIES, PROBABILITIES)


# ------------------------------------------------------------------- Python functions


class Calling(layers.Layer):
    """Calls a Python function with its inputs."""

    def __init__(self, function, *, stateful, **options):
        super().__init__(**options)
        self.function, self.stateful = function, stateful

    def call(self, x):
        y = tf.numpy_function(self.function, [x], tf.float32, stateful=self.stateful)
        return tf.ensure_shape(y, x.shape)


def calling(function, engine, *, stateful):
    model = sequential((4,), Calling(function, stateful=stateful), layers.Dense(1))
    private = tfdp.DPModel(model, engine=engine)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    private.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)
    return private


@pytest.mark.parametrize("engine", ["auto", "vectorized"])
def test_python_that_may_remember_rows_is_refused(engine):
    seen = []

    def remember(row):
        seen.append(row)
        return row * np.float32(len(seen))

    # Run row by row, each would still be multiplied by how many came before.
    with pytest.raises(UnsupportedLayerError, match=r"not known: .*stateful=False"):
        calling(remember, engine, stateful=True)
    assert calling(np.tanh, "auto", stateful=False).ledger.steps


# ------------------------------------------------- engines that take each unit by itself


class Kept(layers.Layer):
    """Keeps the sum of the rows, which nobody noises."""

    def build(self, shape):
        self.sum = self.add_weight(
            shape=shape[-1:], trainable=False, initializer="zeros"
        )

    def call(self, x):
        self.sum.assign(self.sum + ops.sum(x, axis=0))
        return x


class OwnVectorized(tfdp.engines.VectorizedEngine):
    """An engine of somebody's own."""


@pytest.mark.parametrize(
    "engine", ["apart", "vectorized", tfdp.engines.ApartEngine(), OwnVectorized()]
)
@pytest.mark.parametrize("keeping", [Kept, layers.BatchNormalization])
def test_what_keeps_rows_is_refused_where_units_are_alone(engine, keeping):
    model = sequential((3,), keeping(), layers.Dense(1))
    with pytest.raises(UnsupportedLayerError):
        choose(engine, Objective.of(model, "mse"), linear_data())
