"""Fixed models are the same models with other normalization, and train privately."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.engine_checks import length
from tests.problems import precision
from tests.reference import assert_all_close, clipped_sum, per_example_gradients
from tfdp import fix_model
from tfdp._keras import layers_by_path
from tfdp.errors import UnsupportedLayerError
from tfdp.validation import validate_model

pytestmark = pytest.mark.keras_private


def batch_norm(name, **options):
    return layers.BatchNormalization(name=name, **options)


def group_norm(groups):
    """Stands in for `batch_norm`, with the groups that each layer should get."""

    def make(name, **options):
        return layers.GroupNormalization(groups[name], name=name, **options)

    return make


def numbers(*shape):
    return np.random.default_rng(1).normal(size=shape).astype("float32")


def images():
    return numbers(5, 8, 8, 3)


def shuffle_weights(model):
    rng = np.random.default_rng(2)
    for weight in model.weights:
        if weight.dtype.startswith("float"):
            # Variances are positive.
            weight.assign(rng.uniform(0.5, 1.5, weight.shape))
    return model


# --------------------------------------------------------------- the models, with both


def sequential(norm):
    return keras.Sequential([
        keras.Input((8, 8, 3), name="pixels"),
        layers.Conv2D(6, 3, use_bias=False),
        norm("norm", epsilon=1e-2),
        layers.ReLU(),
        layers.Flatten(),
        layers.Dense(8),
        norm("flat", scale=False),
        layers.Dense(2),
    ])


def residual(norm):
    """Blocks with shortcuts and a depthwise convolution, and a model in it."""
    stem = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same", use_bias=False),
            norm("stem_norm"),
        ],
        name="stem",
    )
    inputs = keras.Input((8, 8, 3))
    x = stem(inputs)
    y = layers.Conv2D(12, 1, use_bias=False)(x)
    y = layers.ReLU(6.0)(norm("expanded")(y))
    y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(y)
    y = layers.ReLU(6.0)(norm("depthwise")(y))
    y = norm("projected")(layers.Conv2D(4, 1, use_bias=False)(y))
    x = layers.GlobalAveragePooling2D()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(3)(x), name="residual")


def twice_nested(norm):
    innermost = keras.Sequential([keras.Input((16,)), norm("a")], name="innermost")
    inner_inputs = keras.Input((16,))
    inner = keras.Model(inner_inputs, innermost(inner_inputs), name="inner")
    inputs = keras.Input((16,))
    return keras.Model(inputs, inner(inputs) + norm("b")(inputs))


def shared(norm):
    """A layer called twice, and one that is in two models."""
    twice, both = norm("twice"), norm("both")
    towers = [
        keras.Sequential([keras.Input((16,)), both, layers.Dense(16)], name=name)
        for name in "ab"
    ]
    inputs = keras.Input((16,))
    x = twice(layers.Dense(16)(twice(inputs)))
    return keras.Model(inputs, towers[0](x) - towers[1](x))


def dicts(norm):
    inputs = {"u": keras.Input((16,), name="u"), "v": keras.Input((16,), name="v")}
    x = ops.concatenate([norm("norm")(inputs["u"]), inputs["v"][:, :2]], axis=-1)
    mean = ops.mean(x, axis=-1, keepdims=True)
    return keras.Model(inputs, {"all": layers.Dense(2, name="all")(x), "mean": mean})


def masked(norm):
    return keras.Sequential([
        keras.Input((6,), dtype="int32"),
        layers.Embedding(10, 8, mask_zero=True),
        norm("norm"),
        layers.GlobalAveragePooling1D(),
    ])


def masked_functional(norm):
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(10, 8, mask_zero=True)(inputs)
    x = norm("norm")(x, training=False)
    return keras.Model(inputs, layers.GlobalAveragePooling1D()(x))


def of_each_step(norm):
    return keras.Sequential([
        keras.Input((2, 16)),
        layers.TimeDistributed(norm("inner"), name="steps"),
        layers.TimeDistributed(keras.Sequential([layers.Dense(32), norm("deep")])),
    ])


def channels_first(norm):
    return keras.Sequential([keras.Input((6, 4, 4)), norm("norm", axis=1)])


def options(norm):
    return keras.Sequential([
        keras.Input((32,)),
        norm(
            "norm",
            axis=-1,
            center=True,
            beta_initializer=keras.initializers.Constant(0.5),
            gamma_initializer="zeros",
            beta_regularizer="l2",
            gamma_regularizer=keras.regularizers.L1(0.1),
            beta_constraint="non_neg",
            gamma_constraint=keras.constraints.MaxNorm(3.0),
            dtype="mixed_bfloat16",
        ),
        norm("plain", center=False, scale=False, dtype="float64"),
    ])


def a_function(norm):
    unknown_to_keras = 3.0
    return keras.Sequential([
        keras.Input((16,)),
        norm("norm"),
        layers.Lambda(lambda x: np.pi * x + unknown_to_keras),
    ])


def blocks(norm):
    """Layers with code of their own: as pointnet has, in a list, when they are built."""

    class Convolved(layers.Layer):
        def __init__(self, filters, name):
            super().__init__(name=name)
            self.filters = filters
            self.convolved = layers.Conv1D(filters, 1, use_bias=False)
            self.norm = norm("norm", epsilon=1e-2)

        def call(self, x, training=None):
            return ops.relu(self.norm(self.convolved(x), training=training))

    class Stack(layers.Layer):
        def __init__(self, name):
            super().__init__(name=name)
            self.parts = [layers.Dense(4), Convolved(8, "inside")]
            self.inner = keras.Sequential([layers.Dense(16), norm("last")])

        def build(self, shape):
            self.late = norm("late")
            self.late.build(shape)

        def call(self, x):
            x = self.late(x)
            for part in self.parts:
                x = part(x)
            return self.inner(x)

    inputs = keras.Input((4, 8))
    x = Stack(name="stack")(Convolved(8, name="first")(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalMaxPooling1D()(x)))


def a_class(norm):
    """A model whose whole code is its own."""

    class Residual(keras.Model):
        def __init__(self, width=16):
            super().__init__(name="of_a_class")
            self.width = width
            self.hidden = layers.Dense(width, name="hidden")
            self.norm = norm("norm")

        def call(self, x):
            return x + self.norm(self.hidden(x))

        def get_config(self):
            return {"width": self.width}

    model = Residual()
    model(np.zeros((1, 16)))
    return model


def ids():
    return np.random.default_rng(1).integers(0, 3, (5, 6)).astype("int32")


MODELS = {
    "sequential": (sequential, images, {"norm": 6, "flat": 1}),
    "residual": (
        residual,
        images,
        {"stem_norm": 4, "expanded": 12, "depthwise": 12, "projected": 4},
    ),
    "twice nested": (twice_nested, lambda: numbers(5, 16), {"a": 1, "b": 1}),
    "shared": (shared, lambda: numbers(5, 16), {"twice": 1, "both": 1}),
    "dicts": (
        dicts,
        lambda: {"u": numbers(5, 16), "v": numbers(5, 16)},
        {"norm": 1},
    ),
    "masked": (masked, ids, {"norm": 2}),
    "masked, functional": (masked_functional, ids, {"norm": 2}),
    "time steps": (of_each_step, lambda: numbers(5, 2, 16), {"inner": 1, "deep": 2}),
    "channels first": (channels_first, lambda: numbers(5, 6, 4, 4), {"norm": 6}),
    "options": (options, lambda: numbers(5, 32), {"norm": 2, "plain": 2}),
    "function": (a_function, lambda: numbers(5, 16), {"norm": 1}),
    "blocks": (
        blocks,
        lambda: numbers(5, 4, 8),
        {"norm": 2, "late": 2, "last": 4},
    ),
    "class": (a_class, lambda: numbers(5, 16), {"norm": 1}),
}
every = pytest.mark.parametrize(
    ("make", "make_x", "groups"), MODELS.values(), ids=MODELS
)


def outputs(model, x):
    x = keras.tree.map_structure(ops.convert_to_tensor, x)
    return keras.tree.map_structure(np.asarray, model(x, training=True))


def assert_same(found, expected):
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)


@every
def test_equals_the_model_that_has_groups_from_the_start(make, make_x, groups):
    model = shuffle_weights(make(batch_norm))
    fixed = fix_model(model)
    # As for the same layers, so for the same weights.
    keras.utils.clear_session(free_memory=False)
    expected = make(group_norm(groups))
    assert [weight.name for weight in fixed.weights] == [
        weight.name for weight in expected.weights
    ]
    expected.set_weights(fixed.get_weights())
    x = make_x()
    assert_same(outputs(fixed, x), outputs(expected, x))
    kinds = {type(layer) for _, layer in layers_by_path(fixed)}
    assert layers.BatchNormalization not in kinds


@every
def test_keeps_what_is_not_replaced_and_leaves_the_given_model(make, make_x, groups):
    model = shuffle_weights(make(batch_norm))
    before, config = outputs(model, make_x()), str(model.get_config())
    weights = model.get_weights()
    fixed = fix_model(model)
    assert fixed.name == model.name
    names = [
        [
            layer.name
            for layer in each.layers
            if not isinstance(layer, layers.InputLayer)
        ]
        for each in (model, fixed)
    ]
    assert names[0] == names[1]
    for attribute in ("input_names", "output_names"):
        assert getattr(fixed, attribute, None) == getattr(model, attribute, None)
    kept = [weight for weight in model.weights if "moving" not in weight.name]
    assert len(kept) == len(fixed.weights)
    for old, new in zip(kept, fixed.weights, strict=True):
        assert (old.name, old.dtype) == (new.name, new.dtype)
        np.testing.assert_array_equal(old, new)
    for weight in fixed.variables:
        weight.assign(ops.zeros_like(weight))
    fixed.trainable = False
    assert_same(model.get_weights(), weights)
    assert_same(outputs(model, make_x()), before)
    assert str(model.get_config()) == config
    assert model.trainable


@pytest.mark.smoke
def test_carries_over_what_a_layer_was_made_with():
    fixed = fix_model(options(batch_norm)).get_layer("norm")
    expected = options(group_norm({"norm": 2, "plain": 2})).get_layer("norm")
    assert fixed.get_config() == expected.get_config()


class Renamed(layers.BatchNormalization):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def get_config(self):
        return {"factor": self.factor}


@pytest.mark.parametrize(
    "layer",
    [lambda: Renamed(2.0), lambda: layers.BatchNormalization(synchronized=True)],
    ids=["subclass", "synchronized"],
)
def test_every_kind_of_batch_normalization_is_replaced(layer):
    fixed = fix_model(keras.Sequential([keras.Input((32,)), layer()]))
    assert type(fixed.layers[0]) is layers.GroupNormalization


# --------------------------------------------------------------- the number of groups


@pytest.mark.parametrize(
    ("shape", "most", "groups"),
    [
        ((32, 32, 64), 32, 32),
        ((32, 32, 64), 16, 16),
        ((32, 32, 24), 32, 24),
        ((32, 32, 24), 16, 12),
        ((32, 32, 37), 32, 1),
        ((1, 1, 512), 32, 32),
        ((1, 1, 64), 32, 4),
        ((2, 2, 64), 32, 16),
        ((None, None, 64), 32, 32),
        ((None, 8), 32, 8),
        ((64,), 32, 4),
        ((64,), np.int64(2), 2),
        ((24,), 32, 1),
        ((2,), 32, 1),
        ((4, 1), 32, 1),
    ],
)
def test_groups_hold_enough_values(shape, most, groups):
    model = keras.Sequential([keras.Input(shape), batch_norm("norm")])
    assert fix_model(model, most).get_layer("norm").groups == groups


def test_a_value_alone_cannot_be_normalized():
    inputs = keras.Input((1,))
    x = batch_norm("first")(inputs)
    x = batch_norm("wide")(layers.Dense(16)(x))
    x = batch_norm("second")(layers.Reshape((1, 1, 1))(layers.Dense(1)(x)))
    with pytest.raises(ValueError, match="one value of each example") as raised:
        fix_model(keras.Model(inputs, x))
    message = str(raised.value)
    assert "`first` (BatchNormalization)" in message
    assert "`second` (BatchNormalization)" in message
    assert "wide" not in message
    assert "freeze it: `layer.trainable = False`" in message


# ------------------------------------------------------- copies of all that is no norm


class Own(layers.Layer):
    """Unknown to Keras, with layers and a seed of its own, built by hand."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.parts = [layers.Dense(units), layers.Dropout(0.5)]

    def build(self, shape):
        self.parts[0].build(shape)

    def call(self, x, training=None):
        return self.parts[1](self.parts[0](x), training=training)


class OwnModel(keras.Model):
    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(units)
        self.norm = batch_norm("norm", trainable=False)

    def call(self, x):
        return self.norm(self.dense(x))


def own_model():
    model = OwnModel()
    model(numbers(3, 4))
    return model


def of(*parts, shape=(4,), dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])


def adapted_numbers():
    layer = layers.Normalization()
    layer.adapt(numbers(8, 4))
    return of(layer, layers.Discretization([-0.5, 0.5]))


def adapted_strings():
    layer = layers.StringLookup(output_mode="multi_hot")
    layer.adapt(np.array([["a"], ["b"], ["b"]]))
    return of(layer, shape=(1,), dtype="string")


def adapted_text():
    layer = layers.TextVectorization(output_mode="multi_hot")
    layer.adapt(np.array(["a b", "b c", "c d"]))
    return of(layer, shape=(1,), dtype="string")


def low_rank():
    model = of(layers.Dense(4), layers.Dense(3))
    model.layers[0].enable_lora(2)
    return shuffle_weights(model)


def quantized():
    model = of(layers.Dense(4), layers.Dense(3))
    for layer in model.layers:
        layer.quantize("int8")
    return model


def frozen_norm():
    norm = batch_norm("norm")
    norm.trainable = False
    return shuffle_weights(of(layers.Dense(4), norm))


def attention():
    inputs = keras.Input((6, 4))
    x = layers.MultiHeadAttention(2, 3, dropout=0.5)(inputs, inputs)
    return keras.Model(inputs, layers.Bidirectional(layers.SimpleRNN(3))(x))


COPIED = {
    "numbers": (adapted_numbers, lambda: numbers(3, 4)),
    "strings": (adapted_strings, lambda: np.array([["a"], ["b"], ["z"]])),
    "vocabulary": (
        lambda: of(layers.StringLookup(vocabulary=["a"]), shape=(1,), dtype="string"),
        lambda: np.array([["a"], ["b"]]),
    ),
    "text": (adapted_text, lambda: np.array([["a b"], ["c z"]])),
    "low rank": (low_rank, lambda: numbers(3, 4)),
    "quantized": (quantized, lambda: numbers(3, 4)),
    "dropout": (
        lambda: of(layers.Dropout(0.5), layers.GaussianNoise(1.0)),
        lambda: numbers(3, 4),
    ),
    "frozen norm": (frozen_norm, lambda: numbers(3, 4)),
    "attention": (attention, lambda: numbers(3, 6, 4)),
    "unknown layer": (lambda: of(Own(3)), lambda: numbers(3, 4)),
    "unknown layer in steps": (
        lambda: of(layers.TimeDistributed(Own(3)), shape=(6, 4)),
        lambda: numbers(3, 6, 4),
    ),
    "unknown layer in a wrapper": (
        lambda: of(
            layers.Bidirectional(layers.RNN(layers.LSTMCell(3))),
            Own(2),
            shape=(6, 4),
        ),
        lambda: numbers(3, 6, 4),
    ),
    "subclassed": (own_model, lambda: numbers(3, 4)),
    "subclassed inside": (lambda: of(own_model()), lambda: numbers(3, 4)),
}


@pytest.mark.parametrize(
    ("make", "make_x"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name == "quantized"))
        for name, case in COPIED.items()
    ],
)
def test_copies_do_what_the_originals_do(make, make_x):
    model = make()
    copy = fix_model(model)
    assert type(copy) is type(model)
    assert {id(variable) for variable in copy.variables}.isdisjoint(
        id(variable) for variable in model.variables
    )
    assert_same(copy.get_weights(), model.get_weights())
    # The same masks are drawn, too.
    assert_same(outputs(copy, make_x()), outputs(model, make_x()))
    assert [weight.trainable for weight in copy.weights] == [
        weight.trainable for weight in model.weights
    ]


def test_what_does_not_train_does_not_train_in_the_copy():
    model = residual(batch_norm)
    model.get_layer("stem").trainable = False
    model.get_layer("stem").layers[0].trainable = True
    model.get_layer("projected").trainable = False
    model.layers[2].kernel.trainable = False
    fixed = fix_model(model)
    flags = [
        {
            path: layer.trainable
            for path, layer in layers_by_path(each)
            if not isinstance(layer, layers.InputLayer)
        }
        for each in (model, fixed)
    ]
    assert flags[0] == flags[1]
    assert [weight.path for weight in fixed.trainable_weights] == [
        weight.path for weight in model.trainable_weights
    ]
    kept = [
        fixed.get_layer("stem").get_layer("stem_norm"),
        fixed.get_layer("projected"),
    ]
    assert [type(layer) for layer in kept] == [layers.BatchNormalization] * 2
    assert type(fixed.get_layer("expanded")) is layers.GroupNormalization


# ----------------------------------------------------- classes that only name a model


class Named(keras.Model):
    def __init__(self, width):
        inputs = keras.Input((32,))
        outputs = batch_norm("norm")(layers.Dense(width)(inputs))
        super().__init__(inputs, outputs)


class NamedSequential(keras.Sequential):
    def __init__(self):
        super().__init__([keras.Input((32,)), batch_norm("norm")])


class Weighted(Named):
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("make", [lambda: Named(48), NamedSequential])
def test_a_class_without_code_becomes_a_plain_model(make):
    model = make()
    fixed = fix_model(model)
    assert isinstance(model, type(fixed))
    assert validate_model(fixed, numbers(4, 32)) == []


# -------------------------------------------------------------------- what is refused


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = batch_norm("norm")
        self.still = batch_norm("still", trainable=False)

    def build(self, shape):
        self.norm.build(shape)
        self.still.build(shape)

    def call(self, x):
        return self.still(self.norm(x))


class CannotBeCopied(Block):
    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def get_config(self):
        return super().get_config()


def test_all_that_is_out_of_reach_is_named_at_once():
    block = CannotBeCopied(len, name="block")
    inner = keras.Sequential([keras.Input((4,)), block], name="inner")
    inputs = keras.Input((4,))
    other = CannotBeCopied(len, name="other")
    model = keras.Model(inputs, other(inner(inputs)), name="model")
    with pytest.raises(UnsupportedLayerError, match="cannot be replaced") as raised:
        fix_model(model)
    lines = str(raised.value).splitlines()[1:]
    assert [line.split("`")[1] for line in lines] == ["inner/block/norm", "other/norm"]
    assert all("GroupNormalization(groups=...)` there" in line for line in lines)
    assert all("'function'" in line for line in lines)


def test_losses_and_steps_of_its_own_are_not_lost():
    with pytest.raises(
        UnsupportedLayerError, match=r"Weighted, which its `get_config`"
    ):
        fix_model(Weighted(8))


def test_what_is_frozen_inside_of_a_layer_stays():
    model = keras.Sequential([keras.Input((32,)), Block(name="block")])
    model.layers[0].still.moving_mean.assign(numbers(32))
    fixed = fix_model(model).layers[0]
    assert type(fixed.norm) is layers.GroupNormalization
    assert type(fixed.still) is layers.BatchNormalization
    np.testing.assert_array_equal(fixed.still.moving_mean, numbers(32))


@pytest.mark.slow
def test_layers_with_code_of_their_own_train_and_keep_their_weights(tmp_path):
    """From a file that only has weights; the class makes batch normalization."""
    model = blocks(batch_norm)
    fixed, x = fix_model(model), numbers(5, 4, 8)
    private = tfdp.DPModel(fixed)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), LOSS
    )
    private.fit(x, np.arange(5) % 2, batch_size=5, verbose=0)
    fixed.save_weights(tmp_path / "fixed.weights.h5")
    again = fix_model(model)
    again.load_weights(tmp_path / "fixed.weights.h5")
    assert_same(outputs(again, x), outputs(fixed, x))


@pytest.mark.parametrize("groups", [0, -1, 1.5, float("nan")])
def test_wrong_numbers_of_groups_are_refused(groups):
    with pytest.raises(ValueError, match="`groups` must be a whole number of at"):
        fix_model(None, groups)


@pytest.mark.parametrize("groups", [True, "32", None])
def test_groups_that_are_no_numbers_are_refused(groups):
    with pytest.raises(TypeError, match="`groups` must be a whole number"):
        fix_model(None, groups)


def test_only_models_are_taken():
    with pytest.raises(TypeError, match=r"Keras model\. Received: model=None"):
        fix_model(None)
    with pytest.raises(TypeError, match=r"fix_model\(private\.model\)"):
        fix_model(tfdp.DPModel(sequential(batch_norm)))


@pytest.mark.parametrize(
    "make", [lambda: keras.Sequential([batch_norm("norm")]), OwnModel]
)
def test_a_model_must_be_built(make):
    model = make()
    with pytest.raises(ValueError, match=r"must be built.*`model\(x\[:1\]\)`"):
        fix_model(model)
    # What it advises.
    model(np.ones((1, 8, 8, 3)))
    fix_model(model)


@pytest.mark.filterwarnings("ignore:`build..` was called on layer")
def test_a_class_that_only_says_that_it_is_built_is_not():
    model = OwnModel()
    model.norm.trainable = True
    model.build((None, 8, 8, 3))
    with pytest.raises(ValueError, match="must be built"):
        fix_model(model)


# ------------------------------------------------------------- nothing else is changed


def test_nothing_random_is_used_up():
    model = residual(batch_norm)

    def draws(fixes):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        found = [fix_model(model).get_weights() for _ in range(fixes)]
        return found, [random.random(), *keras.random.normal((3,)).numpy()]

    none, twice = draws(0), draws(2)
    assert none[1] == twice[1]
    assert_same(*twice[0])


def test_a_compiled_model_stays_compiled_and_the_new_one_is_not():
    def loss_of_ones_own(y, y_pred):
        return ops.mean(ops.square(y - y_pred), axis=-1)

    model = sequential(batch_norm)
    model.compile("sgd", loss_of_ones_own, run_eagerly=True)
    fixed = fix_model(model)
    assert model.compiled
    assert not fixed.compiled
    model.fit(images(), numbers(5, 2), verbose=0)


# ------------------------------------------------------------------- private training


LOSS = "sparse_categorical_crossentropy"


def classifier():
    model = residual(batch_norm)
    return keras.Sequential([keras.Input((8, 8, 3)), model, layers.Softmax()])


def clipped(model, x, y, clip, engine):
    with precision("float64"):
        return tfdp.clipped_gradients(
            model, LOSS, x.astype("float64"), y, l2_norm_clip=clip, engine=engine
        )


def check_clipping(make, x, y, tolerance, engines):
    """Engines clip as one example at a time; no example exceeds the clip norm."""
    with precision("float64"):
        wide = fix_model(make())
    gradients = per_example_gradients(
        wide, keras.losses.get(LOSS), x.astype("float64"), y
    )
    _, norms = clipped_sum(gradients, 1.0)
    clip = float(np.median(norms))
    expected, _ = clipped_sum(gradients, clip)
    longest = np.argsort(norms)[-1:]
    others = np.delete(np.arange(len(x)), longest)
    for engine in engines:
        found = clipped(wide, x, y, clip, engine)
        np.testing.assert_allclose(found.norms, norms, rtol=tolerance)
        assert_all_close(found.gradients, expected, rtol=0, atol=tolerance * clip)
        alone = clipped(wide, x[longest], y[longest], clip, engine)
        assert length(alone.gradients) <= clip * (1 + 1e-7)
        without = clipped(wide, x[others], y[others], clip, engine)
        change = [
            np.asarray(a) - np.asarray(b)
            for a, b in zip(found.gradients, without.gradients, strict=True)
        ]
        assert length(change) <= clip * (1 + tolerance)


def check_training(make, x, y):
    model = fix_model(make())
    private = tfdp.DPModel(model, engine="bookkeeping")
    table = private.explain()
    assert "generic" not in table
    assert "vectorized" not in table
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), LOSS
    )
    before = model.get_weights()
    private.fit(x, y, batch_size=len(x), verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert np.any(old != new)


@pytest.mark.slow
def test_small_network_is_clipped_as_one_example_at_a_time():
    engines = ("bookkeeping", "vectorized")
    check_clipping(classifier, images(), np.arange(5) % 3, 1e-9, engines)


@pytest.mark.slow
def test_small_network_trains_privately(caplog):
    check_training(classifier, images(), np.arange(5) % 3)
    assert not [record for record in caplog.records if record.name == "absl"]


class BatchNormalizationAndRelu(layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return ops.relu(super().call(inputs, training=training, mask=mask))


def test_code_of_a_derived_class_is_not_dropped():
    model = keras.Sequential([
        keras.Input((4, 4, 8)),
        BatchNormalizationAndRelu(name="norm"),
    ])
    with pytest.raises(UnsupportedLayerError, match=r"`norm`.*code of its own.*lost"):
        tfdp.fix_model(model)


@pytest.mark.slow
def test_a_copy_of_private_weights_has_their_ledger():
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(4),
        layers.BatchNormalization(trainable=False),
        layers.Dense(1),
    ])
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1), "mse"
    )
    private.fit(np.ones((40, 3)), np.ones((40, 1)), batch_size=10, verbose=0)
    model.layers[1].trainable = True
    assert tfdp.DPModel(tfdp.fix_model(model)).ledger == private.ledger


def doubled(x):
    return 2 * x


class Unregistered(keras.Regularizer):
    def __call__(self, x):
        return keras.ops.sum(x)


class Taking(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def around(*stack):
    return keras.Sequential([
        keras.Input((3,)),
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
        *stack,
    ])


@pytest.mark.parametrize(
    "stack",
    [
        lambda: [keras.layers.Lambda(doubled)],
        lambda: [keras.layers.Lambda(tf.nn.l2_normalize)],
        lambda: [keras.layers.Dense(2, activation=lambda x: 2 * x)],
        lambda: [keras.layers.Dense(2, kernel_regularizer=Unregistered())],
        lambda: [
            keras.layers.Reshape((2, 2)),
            keras.layers.GRU(
                2, activation=lambda x: 2 * x, kernel_regularizer=Unregistered()
            ),
        ],
    ],
    ids=["named function", "TensorFlow", "activation", "regularizer", "recurrent"],
)
def test_what_no_config_holds_is_in_the_copy(stack, rng):
    model = around(*stack())
    fixed = tfdp.fix_model(model)
    old, new = model.layers[-1], fixed.layers[-1]
    x = rng.normal(size=(2, *old.input.shape[1:]))
    assert old is not new
    np.testing.assert_array_equal(new(x), old(x))
    regularizer = getattr(old, "kernel_regularizer", None)
    assert getattr(new, "kernel_regularizer", None) is regularizer


class Leaving(keras.layers.Layer):
    """Leaves most of its arguments out of its config."""

    def __init__(self, units, scale=1.0, depth=1, table=None, **kwargs):
        super().__init__(**kwargs)
        self.units, self.scale, self.table = units, scale, table
        self.dense = [keras.layers.Dense(units) for _ in range(depth)]

    def build(self, shape):
        for dense in self.dense:
            dense.build(shape)

    def call(self, x):
        for dense in self.dense:
            x = dense(x)
        return self.scale * x

    def get_config(self):
        return super().get_config() | {"units": self.units}


def test_what_a_config_leaves_out_is_in_the_copy(rng):
    model = around(Leaving(4, scale=50.0, depth=3))
    fixed = tfdp.fix_model(model)
    old, new = model.layers[-1], fixed.layers[-1]
    x = rng.normal(size=(2, 4))
    np.testing.assert_array_equal(new(x), old(x))
    assert old is not new


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        ({"scale": 50.0}, r"copy has scale=1\.0, for 50\.0"),
        ({"depth": 3}, "copy has 1 layers in it, for 3"),
        ({}, "copy has table=None, for array"),
    ],
)
def test_a_copy_that_would_be_another_layer_is_refused(arguments, received):
    """Of a layer that was made with an array Keras does not note with what else."""
    table = np.ones(3)
    with pytest.raises(UnsupportedLayerError, match=f"Leaving.*{received}"):
        tfdp.fix_model(around(Leaving(4, table=table, **arguments)))


def test_a_layer_that_cannot_be_copied_is_named():
    with pytest.raises(
        UnsupportedLayerError, match="Received: layer=<Taking name=taking"
    ):
        tfdp.fix_model(around(Taking(doubled)))
