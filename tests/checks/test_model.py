"""What breaks per-example privacy is found, nothing else is, and nothing changes."""

import dataclasses
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tfdp.checks.model import check_model
from tfdp.errors import UnsupportedLayerError
from tfdp.validation import Problem, validate_model

pytestmark = pytest.mark.keras_private

STATISTICS = "its batch statistics mix"
SPECTRAL = "it overwrites the kernel"
MIXING = "in it, rows of a batch meet: operation"
MEMORY = "its state"
STATEFUL = "`stateful=True` hands the state"


# ---------------------------------------------------------------- layers that mix


class Centre(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class AddReversed(layers.Layer):
    def call(self, x):
        return x + 0.1 * ops.flip(x, axis=0)


class AddEarlierRows(layers.Layer):
    def call(self, x):
        return ops.cumsum(x, axis=0)


class AttendToBatch(layers.Layer):
    def call(self, x):
        return ops.softmax(x @ ops.transpose(x), axis=-1) @ x


class NormalizeEverySecondRow(layers.Layer):
    def call(self, x):
        halves = ops.reshape(x, (-1, 2, *x.shape[1:]))
        halves -= ops.mean(halves, axis=0, keepdims=True)
        return ops.reshape(halves, ops.shape(x))


class MixInsideFunction(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = Centre(name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return tf.function(self.inner, autograph=False)(x)


class TwoOutputs(layers.Layer):
    def call(self, x):
        return {"own": 2.0 * x, "total": ops.sum(x, axis=0)}


class Block(layers.Layer):
    """Mixes in its own `call`, between layers that do not."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [layers.Dense(3, name="first"), layers.Dense(3, name="second")]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
            shape = part.compute_output_shape(shape)

    def call(self, x):
        x = self.parts[0](x)
        return self.parts[1](x / ops.max(x, axis=0, keepdims=True))


# --------------------------------------------------------- layers that keep state


class Remember(layers.Layer):
    """Assigns to a variable what `update` makes of its value and the batch."""

    def __init__(self, update, **kwargs):
        super().__init__(**kwargs)
        self.update = update
        self.memory = self.add_weight(
            shape=(), initializer="zeros", name="memory", trainable=False
        )

    def call(self, x):
        self.memory.assign(self.update(self.memory, x))
        return x


def count_calls(memory, x):
    return memory + 1.0


def count_rows(memory, x):
    return memory + ops.cast(ops.shape(x)[0], "float32")


def running_mean(memory, x):
    return 0.99 * memory + 0.01 * ops.mean(x)


class RememberInTensorFlow(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.memory = tf.Variable(0.0, name="memory")

    def call(self, x):
        self.memory.assign(tf.reduce_mean(x))
        return x


class RememberInKernel(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1],), name="kernel")

    def call(self, x):
        self.kernel.assign(ops.mean(x, axis=0))
        return x


class Metered(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean()

    def call(self, x):
        self.mean.update_state(x)
        return x


# -------------------------------------------------------------- losses, randomness


class Penalize(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x


class PenalizeSpread(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x - ops.mean(x, axis=0))))
        return x


class TensorFlowNoise(layers.Layer):
    def call(self, x):
        return x + tf.random.uniform(ops.shape(x)[1:])


class UnseededNoise(layers.Layer):
    def call(self, x):
        return x + keras.random.normal(ops.shape(x))


class PythonNoise(layers.Layer):
    def call(self, x):
        return x + random.random()


class DrawsByData(layers.Layer):
    """Moves its seed once or not at all; the outputs do not depend on it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        if tf.executing_eagerly() and int(1000 * ops.sum(x)) % 2:
            keras.random.normal((), seed=self.seed_generator)
        return x


class Gate(layers.Layer):
    """A scale per feature that starts at zero."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="zeros")

    def call(self, x):
        return x * self.scale


# --------------------------------------------------------------------- the models


def sequential(*parts):
    return keras.Sequential(list(parts), name="model")


def dense(name="dense", **kwargs):
    return layers.Dense(4, name=name, **kwargs)


def normalization(name="norm", **kwargs):
    return layers.BatchNormalization(name=name, **kwargs)


def frozen(layer):
    layer.trainable = False
    return layer


def functional(make, shape=(4,)):
    inputs = keras.Input(shape)
    return keras.Model(inputs, make(inputs), name="model")


def mixing_operation(inputs):
    return dense()(inputs - ops.mean(inputs, axis=0, keepdims=True))


def mixing_before_zeros(inputs):
    centred = inputs - ops.mean(inputs, axis=0, keepdims=True)
    return dense(kernel_initializer="zeros")(centred)


def mixing_behind_gate(inputs):
    return inputs + Gate()(ops.flip(inputs, axis=0))


def base_model():
    return keras.Sequential([normalization(), dense()], name="base")


def base_in_functional_model(inputs):
    """Keras ignores the `training` given here when the whole model is training."""
    return dense("head")(base_model()(inputs, training=False))


class BaseInInferenceMode(keras.Model):
    def __init__(self):
        super().__init__(name="model")
        self.base, self.head = base_model(), dense("head")

    def call(self, x):
        return self.head(self.base(x, training=False))


def shared_normalization(inputs):
    norm = normalization("shared")
    return norm(dense("a")(norm(inputs)))


def shared_by_towers(layer):
    def make(inputs):
        a, b = (keras.Sequential([layer, dense()], name=name) for name in "ab")
        return a(inputs) + b(inputs)

    return functional(make)


class Nested(keras.Model):
    """Layers in lists, dicts and models; a dict of inputs and of outputs."""

    def __init__(self):
        super().__init__(name="model")
        self.embed = layers.Embedding(10, 4, name="embed")
        self.towers = {"text": [sequential(normalization(), dense()), Centre(name="c")]}
        self.towers["text"][0].name = "tower"
        self.head = dense("head")

    def call(self, inputs, training=None):
        x = ops.mean(self.embed(inputs["ids"]), axis=1)
        for layer in self.towers["text"]:
            x = layer(x)
        return {"logits": self.head(x), "numbers": inputs["numbers"]}


class AddsLoss(keras.Model):
    def __init__(self):
        super().__init__(name="model")
        self.dense = dense()

    def call(self, x):
        y = self.dense(x)
        self.add_loss(ops.mean(y))
        return y


class BatchMeanOutput(keras.Model):
    def call(self, x):
        return x, ops.mean(x)


class PositionsAsRows(keras.Model):
    """Has the positions of all examples as rows in between, and in an output."""

    def __init__(self):
        super().__init__(name="model")
        self.dense = dense()
        self.over_positions = layers.Softmax(axis=0)

    def call(self, x):
        rows = self.dense(ops.reshape(x, (-1, 4)))
        y = ops.transpose(ops.reshape(rows, (-1, 6, 4)), (1, 0, 2))
        return rows, ops.transpose(self.over_positions(y), (1, 0, 2))


def attention(**kwargs):
    layer = layers.MultiHeadAttention(2, 2, dropout=0.5, name="attention", **kwargs)
    return functional(lambda x: layer(x, x), (6, 4))


def adapted():
    layer = layers.Normalization()
    layer.adapt(numbers())
    return layer


def numbers(*shape):
    return np.random.default_rng(1).normal(size=shape or (8, 4))


def ids(*shape):
    return np.random.default_rng(1).integers(0, 10, size=shape or (8, 6))


def mixed_inputs():
    return {"ids": ids(), "numbers": numbers(8, 2)}


SOUND = {
    "normalization": (
        lambda: sequential(
            adapted(),
            layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1"),
            layers.LayerNormalization(),
            layers.GroupNormalization(2),
            frozen(normalization()),
        ),
        numbers,
    ),
    "losses that layers add": (
        lambda: sequential(
            dense("a", activity_regularizer="l2"), Penalize(), AddsLoss()
        ),
        numbers,
    ),
    "activity regularizer inside attention": (
        lambda: attention(activity_regularizer="l2"),
        lambda: numbers(8, 6, 4),
    ),
    "randomness and state": (
        lambda: sequential(
            dense(),
            layers.Dropout(0.5),
            layers.GaussianNoise(1.0),
            layers.GaussianDropout(0.5),
            UnseededNoise(),
            TensorFlowNoise(),
            PythonNoise(),
            DrawsByData(),
            Remember(count_calls),
            Metered(),
        ),
        numbers,
    ),
    "spatial dropout": (
        lambda: sequential(layers.SpatialDropout1D(0.5)),
        lambda: numbers(8, 6, 4),
    ),
    "augmentation": (
        lambda: sequential(layers.RandomFlip(), layers.RandomRotation(0.2)),
        lambda: numbers(8, 6, 6, 1),
    ),
    "attention": (attention, lambda: numbers(8, 6, 4)),
    "recurrent": (
        lambda: sequential(
            layers.Embedding(10, 4, mask_zero=True),
            layers.SimpleRNN(3, dropout=0.5, recurrent_dropout=0.5),
        ),
        lambda: ids(8, 2),
    ),
    "convolution": (
        lambda: sequential(layers.Conv2D(3, 2), layers.MaxPool2D(), layers.Flatten()),
        lambda: numbers(8, 6, 6, 1),
    ),
    "frozen model": (
        lambda: frozen(sequential(normalization(), dense())),
        numbers,
    ),
    "base in inference mode": (BaseInInferenceMode, numbers),
    "positions as rows": (PositionsAsRows, lambda: numbers(8, 6, 4)),
    "strings": (
        lambda: sequential(
            keras.Input((), dtype="string"),
            layers.StringLookup(vocabulary=["a", "b"]),
            layers.Embedding(4, 2),
        ),
        lambda: np.array(["a", "b", "c"]),
    ),
    "missing values": (
        lambda: sequential(layers.Dense(2)),
        lambda: np.full((8, 4), np.nan),
    ),
}

UNSOUND = {
    "normalization": (
        lambda: sequential(
            dense("a"),
            normalization("norm"),
            normalization("bare", center=False, scale=False),
            layers.SpectralNormalization(dense("b"), name="spectral"),
        ),
        numbers,
        [("norm", STATISTICS), ("bare", STATISTICS), ("spectral", SPECTRAL)],
    ),
    "mixing": (
        lambda: sequential(
            dense("a"),
            Centre(name="centre"),
            dense("b"),
            AddReversed(name="reversed"),
            AddEarlierRows(name="sum"),
            layers.Softmax(axis=0, name="softmax"),
            AttendToBatch(name="attention"),
            NormalizeEverySecondRow(name="halves"),
            MixInsideFunction(name="function"),
            Block(name="block"),
        ),
        numbers,
        [
            (name, MIXING)
            for name in (
                *("centre", "reversed", "sum", "softmax", "attention", "halves"),
                *("function", "block"),
            )
        ],
    ),
    "memory": (
        lambda: sequential(
            Remember(running_mean, name="mean"),
            Remember(count_rows, name="rows"),
            RememberInTensorFlow(name="tensorflow"),
            RememberInKernel(name="kernel"),
            dense(),
        ),
        numbers,
        [(name, MEMORY) for name in ("mean", "rows", "tensorflow", "kernel")],
    ),
    "states of batches": (
        lambda: sequential(
            keras.Input(batch_shape=(8, 6, 4)),
            layers.Bidirectional(
                layers.GRU(3, stateful=True, return_sequences=True), name="both"
            ),
            layers.RNN(layers.LSTMCell(3), stateful=True, name="cell"),
        ),
        lambda: numbers(8, 6, 4),
        [
            (name, STATEFUL)
            for name in ("both/forward_gru", "both/backward_gru", "cell")
        ],
    ),
    "losses": (
        lambda: sequential(
            dense("a", activity_regularizer="l2"), Penalize(), PenalizeSpread(name="p")
        ),
        numbers,
        [("p", MIXING)],
    ),
    "time steps": (
        lambda: sequential(
            layers.TimeDistributed(normalization(), name="steps"),
            layers.TimeDistributed(Centre(name="c"), name="more"),
        ),
        lambda: numbers(8, 3, 4),
        [("steps/norm", STATISTICS), ("more/c", MIXING)],
    ),
    "normalization of constants": (
        lambda: sequential(normalization()),
        lambda: np.zeros((1, 4)),
        [("norm", STATISTICS)],
    ),
    "shared normalization": (
        lambda: functional(shared_normalization),
        numbers,
        [("shared", STATISTICS)],
    ),
    "normalization shared by towers": (
        lambda: shared_by_towers(normalization("shared")),
        numbers,
        [("a/shared", STATISTICS)],
    ),
    "running mean shared by towers": (
        lambda: shared_by_towers(Remember(running_mean, name="shared")),
        numbers,
        [("a/shared", MEMORY)],
    ),
    "normalization in a base model": (
        lambda: functional(base_in_functional_model),
        numbers,
        [("base/norm", STATISTICS)],
    ),
    "nested": (
        Nested,
        mixed_inputs,
        [("tower/norm", STATISTICS), ("c", MIXING)],
    ),
    "mixing of an output without rows": (
        lambda: functional(TwoOutputs(name="two")),
        numbers,
        [("two", MIXING)],
    ),
    "mixing operation": (
        lambda: functional(mixing_operation),
        numbers,
        [("model", MIXING)],
    ),
    "mixing before zero weights": (
        lambda: functional(mixing_before_zeros),
        numbers,
        [("model", MIXING)],
    ),
    "mixing behind a closed gate": (
        lambda: functional(mixing_behind_gate),
        numbers,
        [("model", MIXING)],
    ),
    "scalar output": (BatchMeanOutput, numbers, [("batch_mean_output", MIXING)]),
    "mixing of integers": (
        lambda: sequential(layers.Embedding(10, 4), Centre(name="c")),
        ids,
        [("c", MIXING)],
    ),
    "mixing of one row": (
        lambda: sequential(layers.Embedding(10, 4), Centre(name="c")),
        lambda: ids(1, 6),
        [("c", MIXING)],
    ),
    "mixing of zeros": (
        lambda: sequential(Centre(name="c")),
        lambda: np.zeros((1, 4)),
        [("c", MIXING)],
    ),
    "mixing of strings": (
        lambda: sequential(
            keras.Input((), dtype="string"),
            layers.StringLookup(vocabulary=["a", "b"]),
            layers.Embedding(4, 2),
            Centre(name="c"),
        ),
        lambda: tf.constant(["a", "b"]),
        [("c", MIXING)],
    ),
    "mixing beside missing values": (
        lambda: sequential(Centre(name="c")),
        lambda: np.concatenate([numbers(4, 3), np.full((4, 1), np.nan)], axis=1),
        [("c", MIXING)],
    ),
    "mixed examples": (
        lambda: sequential(layers.MixUp(seed=1, name="mixup")),
        lambda: numbers(8, 6, 6, 1),
        [("mixup", MIXING)],
    ),
}


def by_name(table):
    return [pytest.param(*case, id=name) for name, case in table.items()]


@pytest.mark.parametrize(("make_model", "make_x"), by_name(SOUND))
def test_sound_models_have_no_problem(make_model, make_x):
    assert validate_model(make_model(), make_x()) == []


@pytest.mark.parametrize(("make_model", "make_x", "expected"), by_name(UNSOUND))
def test_problems_are_found_and_named(make_model, make_x, expected):
    x = make_x()
    given = keras.tree.map_structure(np.array, x)
    found = validate_model(make_model(), x)
    keras.tree.map_structure(np.testing.assert_array_equal, x, given)
    assert [problem.path for problem in found] == [path for path, _ in expected]
    for problem, (_, reason) in zip(found, expected, strict=True):
        assert problem.reason.startswith(reason)


@pytest.mark.parametrize(
    "policy", ["float16", "bfloat16", "mixed_float16", "mixed_bfloat16", "float64"]
)
def test_precision_changes_no_verdict(policy):
    keras.config.set_dtype_policy(policy)
    model = sequential(
        keras.Input((6, 4)),
        layers.Dense(4, activation="softmax"),
        Centre(name="c"),
        layers.Dropout(0.5),
        normalization(),
        layers.LayerNormalization(),
        AddReversed(name="r"),
        Remember(count_rows, name="m"),
    )
    found = validate_model(model, numbers(8, 6, 4))
    assert [problem.path for problem in found] == ["c", "norm", "r", "m"]


# ------------------------------------------------------------- nothing is changed


class Stateful(keras.Model):
    """One of every kind of state that a pass may change."""

    def __init__(self):
        super().__init__(name="model")
        self.stack = [
            dense(kernel_regularizer="l2"),
            normalization(),
            layers.Dropout(0.5, seed=3),
            layers.SpectralNormalization(layers.Dense(4)),
            Remember(running_mean),
            RememberInTensorFlow(),
            Metered(),
            Penalize(),
            UnseededNoise(),
            PythonNoise(),
        ]
        self.calls_left = None

    def call(self, x, training=None):
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise ZeroDivisionError("of the user")
        for layer in self.stack:
            x = layer(x)
        return x

    def state(self):
        variables = [*self.variables, *self.metrics_variables, self.stack[5].memory]
        return [variable.numpy().tobytes() for variable in variables]


def attributes(model):
    """All but what TensorFlow adds when it looks for variables."""
    return [
        {name for name in vars(layer) if not name.startswith("_self_")}
        for layer in (model, *model.stack)
    ]


def test_every_variable_is_restored():
    stateful = Stateful()
    stateful.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    stateful.fit(numbers(), numbers(), batch_size=4, verbose=0)
    before, attributes_before = stateful.state(), attributes(stateful)
    chance = random.getstate()
    for calls_left in (None, 0):
        stateful.calls_left = calls_left
        if calls_left is None:
            assert validate_model(stateful, numbers())
        else:
            with pytest.raises(ZeroDivisionError, match="of the user"):
                validate_model(stateful, numbers())
        assert stateful.state() == before
        assert attributes(stateful) == attributes_before
        assert random.getstate() == chance
        assert len(stateful.losses) == 1  # That of the kernel.


def test_unseeded_draws_go_on_as_if_nothing_had_happened():
    model = sequential(UnseededNoise(), layers.Dropout(0.5))
    model.build((None, 4))

    def draws(validates):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        if validates:
            validate_model(model, numbers())
        return [random.random(), *keras.random.normal((3,)).numpy()]

    assert draws(validates=True) == draws(validates=False)


@pytest.mark.slow
def test_training_goes_on_as_if_nothing_had_happened():
    weights = []
    for validates in (False, True):
        keras.utils.set_random_seed(0)
        model = sequential(dense(), normalization(), layers.Dropout(0.5), dense("b"))
        model.compile(keras.optimizers.Adam(), "mse")
        for _ in range(2):
            model.fit(numbers(), numbers(), batch_size=4, verbose=0)
            if validates:
                validate_model(model, numbers())
        weights.append([w.tobytes() for w in model.get_weights()])
    assert weights[0] == weights[1]


def test_the_user_keeps_his_own_call():
    model = sequential(dense())
    model.build((None, 4))

    def tripled(x, training=None):
        return 3.0 * x

    object.__setattr__(model.layers[0], "call", tripled)
    assert validate_model(model, numbers()) == []
    assert model.layers[0].call is tripled


def test_an_unbuilt_model_is_built_for_any_batch_size_and_not_run():
    model = sequential(dense(), normalization(), Remember(count_rows))
    validate_model(model, numbers())
    assert model.input_shape == (None, 4)
    np.testing.assert_array_equal(model.get_layer("norm").moving_mean, np.zeros(4))
    assert float(model.layers[-1].memory) == 0.0


# ---------------------------------------------------------------- the made-up rows


BOUNDS = np.array([3] * 30 + [10] * 30 + [256])


class Bounded(layers.Layer):
    """Fails if a column has a number that is not below its bound."""

    def call(self, x):
        for numbers in (x, ops.round(x)):
            ids = ops.cast(numbers, "int32")
            tf.debugging.assert_non_negative(ids)
            tf.debugging.assert_less(ids, tf.constant(BOUNDS, "int32"))
        return ops.cast(ids, "float32")


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [("int64", 1), ("uint8", 2), ("float32", 8), ("float64", 1), ("int64", 8)],
)
def test_vocabularies_hold(dtype, rows):
    x = np.random.default_rng(0).integers(0, BOUNDS, size=(rows, len(BOUNDS)))
    x[0] = BOUNDS - 1
    assert validate_model(sequential(Bounded()), x.astype(dtype)) == []


@pytest.mark.parametrize("x", [np.zeros((0, 4)), np.float32(1.0), [[1.0, 2.0]]])
def test_inputs_without_rows_are_refused(x):
    with pytest.raises(ValueError, match=r"leading axis\. Received: an array"):
        validate_model(sequential(dense()), x)


# --------------------------------------------------------------------- the messages


@pytest.mark.smoke
def test_check_model_names_all_problems_at_once():
    model = sequential(
        Centre(name="c"),
        normalization("first"),
        PenalizeSpread(name="p"),
        frozen(normalization("frozen")),
        AddReversed(name="r"),
        normalization("second"),
        Remember(count_rows, name="m"),
    )
    expected = [
        ("c", MIXING),
        ("first", STATISTICS),
        ("p", MIXING),
        ("r", MIXING),
        ("second", STATISTICS),
        ("m", MEMORY),
    ]
    with pytest.raises(UnsupportedLayerError) as raised:
        check_model(model, numbers())
    message = str(raised.value)
    lines = message.splitlines()[1:]
    assert len(lines) == len(expected)
    for (path, reason), line in zip(expected, lines, strict=True):
        assert line.startswith(f"  * `{path}` (")
        assert reason in line
    assert "Received: model=<Sequential name=model" in message
    assert "`tfdp.fix_model(model)` replaces it by GroupNormalization" in message
    assert "`layer.trainable = False`" in message


def test_check_model_accepts_a_sound_model():
    check_model(sequential(dense(), layers.Dropout(0.5)), numbers())


def test_a_problem_reads_as_a_sentence():
    problem = Problem("encoder/head", "MyDense", "it mixes rows", "Use `Dense`.")
    assert str(problem) == "`encoder/head` (MyDense): it mixes rows. Use `Dense`."
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.path = "other"
