"""What was proven of layers holds while they decide by the same attributes."""

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import sys
import threading
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.small import data, logits_loss, optimizer, private
from tfdp.training.python_state import python_state

pytestmark = pytest.mark.keras_private


class Centred(layers.Layer):
    """Lets rows meet if an attribute says so."""

    is_on = False

    def call(self, x):
        return x - keras.ops.mean(x, 0, keepdims=True) if self.is_on else x


@pytest.mark.slow
@pytest.mark.parametrize("is_eager", [True, False])
def test_a_layer_with_another_attribute_is_checked_again(is_eager):
    x, y = data(20)
    centred = Centred()
    model = keras.Sequential([keras.Input((3,)), centred, layers.Dense(2)])
    # What is traced for a proof is not what runs uphill.
    wrapped = private(
        model, loss=tfdp.losses.BAM(logits_loss(), radius=0.1), run_eagerly=is_eager
    )
    wrapped.fit(x, y, batch_size=5, verbose=0)
    centred.is_on = True
    # Other callbacks, another graph.
    logger = tfdp.callbacks.BiasLogger(every=1)
    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        wrapped.fit(x, y, batch_size=5, verbose=0, callbacks=[logger])


@pytest.mark.slow
def test_such_a_layer_is_checked_again_for_other_rows():
    x, y = data(20)
    centred = Centred()
    model = keras.Sequential([keras.Input((3,)), centred, layers.Dense(2)])
    wrapped = private(model, optimizer(expected_batch_size=5))
    wrapped.train_on_batch(x[:5], y[:5])
    centred.is_on = True
    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        wrapped.train_on_batch(x[:6], y[:6])


def test_loops_check_such_a_layer_again():
    x, y = data(20)
    centred = Centred()
    model = keras.Sequential([keras.Input((3,)), centred, layers.Dense(2)])
    loss, options = logits_loss(), {"l2_norm_clip": 1.0}
    tfdp.clipped_gradients(model, loss, x, y, **options)
    centred.is_on = True
    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        tfdp.clipped_gradients(model, loss, x, y, **options)


class OverTheBatch(keras.losses.Loss):
    """Compares examples if an attribute says so."""

    is_on = False

    def call(self, y_true, y_pred):
        losses = keras.ops.mean(keras.ops.square(y_true - y_pred), -1)
        return losses * keras.ops.sign(keras.ops.sum(y_true)) if self.is_on else losses


def of_two():
    return keras.Sequential([keras.Input((3,)), layers.Dense(2)])


def test_a_loss_with_another_attribute_is_checked_again():
    x, _ = data(20)
    y, loss = x[:, :2], OverTheBatch()
    opt, model = optimizer(expected_batch_size=5), of_two()
    wrapped = private(of_two(), opt, loss, jit_compile=True)
    wrapped.train_on_batch(x[:5], y[:5])
    tfdp.clipped_gradients(model, loss, x, y, l2_norm_clip=1.0)
    loss.is_on = True
    with pytest.raises(tfdp.errors.UnsupportedLossError):
        # Another number of rows: another graph.
        wrapped.train_on_batch(x[:6], y[:6])
    with pytest.raises(tfdp.errors.UnsupportedLossError):
        tfdp.clipped_gradients(model, loss, x, y, l2_norm_clip=1.0)


def test_an_augmentation_with_another_attribute_is_checked_again():
    x, y = data(20)
    centred = Centred()
    wrapped = private(
        opt=optimizer(expected_batch_size=5),
        wrap={"augmentation": centred, "augmentation_multiplicity": 2},
    )
    wrapped.train_on_batch(x[:5], y[:5])
    centred.is_on = True
    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        wrapped.train_on_batch(x[:6], y[:6])


class ByNames(keras.Model):
    """Lets rows meet that come by names."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs):
        if isinstance(inputs, dict):
            inputs = [each - keras.ops.mean(each, 0) for each in inputs.values()]
        return self.dense(keras.ops.concatenate(inputs, axis=1))


def test_loops_check_inputs_in_another_nest_again():
    x, y = data(20)
    model, loss = ByNames(), logits_loss()
    model((x, x))

    def clip(x):
        tfdp.clipped_gradients(model, loss, x, y, l2_norm_clip=1.0)

    clip((x, x))
    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        clip({"a": x, "b": x})


class Many(layers.Layer):
    """Has attributes of many kinds."""

    def __init__(self):
        super().__init__()
        self.rate, self.axes, self.function = 0.5, [1, 2], keras.ops.tanh
        self.settings, self.table = {"rate": 0.5}, np.arange(3)
        self.regularizer, self.loss = keras.regularizers.L2(0.1), "own"

    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate", 0.25),
        ("axes", [1, 3]),
        ("function", keras.ops.exp),
        ("new", "text"),
        ("settings", {"rate": 0.25}),
        ("table", np.arange(3) * 2),
        ("loss", "another"),
        ("activity_regularizer", keras.regularizers.L2(0.1)),
    ],
)
def test_another_attribute_is_seen(name, value):
    model = keras.Sequential([keras.Input((3,)), Many()])
    before = python_state(model)
    model(keras.ops.ones((2, 3)))
    assert python_state(model) == before
    setattr(model.layers[0], name, value)
    assert python_state(model) != before


def test_odd_attributes_stay_equal():
    model = keras.Sequential([keras.Input((3,)), Many()])
    (layer,) = model.layers
    layer.settings = {1: float("nan"), "itself": {}, "many": list(range(5000))}
    layer.settings["itself"]["again"] = layer.settings
    layer.table = np.array([None, "text"], object)
    layer.kind, layer.names = Many, {"b", "a"}
    loss = OverTheBatch()
    loss.shared = functools.reduce(lambda inner, _: [inner, inner], range(99), [1])
    loss.cycle = [loss]
    loss.__dict__[1] = "no text"
    assert python_state(model, loss) == python_state(model, loss)
    hash(python_state(model, loss))


class Kind(enum.Enum):
    """One of two."""

    PLAIN, MIXED = range(2)


@dataclasses.dataclass
class Settings:
    """An object of a user's own."""

    is_on: bool = False


class Name(str):
    """A text of a user's own."""

    __slots__ = ()


class Slots:
    """Keeps what it has without a dictionary."""

    __slots__ = ("is_on",)

    def __init__(self, is_on):
        self.is_on = is_on


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (np.bool_(0), np.bool_(1)),
        (Kind.PLAIN, Kind.MIXED),
        (frozenset({1}), frozenset({2})),
        (1j, 2j),
        (range(1), range(2)),
        (tf.constant([0]), tf.constant([1])),
        (tf.constant("a"), tf.constant("b")),
        (np.array(["a", None], object), np.array(["b", None], object)),
        (collections.deque([1]), collections.deque([2])),
        (types.MappingProxyType({1: 1}), types.MappingProxyType({1: 2})),
        (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
        (tf.TensorShape([1]), tf.TensorShape([2])),
        (np.dtype("int32"), np.dtype("int64")),
        (decimal.Decimal(1), decimal.Decimal(2)),
        (bytearray(b"a"), bytearray(b"b")),
        (Settings(), Settings(is_on=True)),
        (Settings(), Slots(is_on=False)),
        (Slots(is_on=False), Slots(is_on=True)),
        (Name("a"), Name("b")),
        (argparse.Namespace(a=1), argparse.Namespace(a=2)),
        (list(range(2000)), list(range(2001))),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_other_kinds_of_values_are_seen(value, other):
    model = keras.Sequential([keras.Input((3,)), Many()])
    (layer,) = model.layers
    layer.flag = None
    found = {python_state(model)}
    layer.flag = value
    found.add(python_state(model))
    layer.flag = other
    found.add(python_state(model))
    assert len(found) == 3


def test_methods_of_one_object_differ():
    model, loss = of_two(), OverTheBatch()
    methods = loss.call, loss.get_config
    assert len({python_state(model, each) for each in methods}) == 2
    assert python_state(model, loss.call) == python_state(model, loss.call)


def test_what_losses_are_made_of_is_seen():
    model, loss, layer = of_two(), OverTheBatch(), Many()
    loss.inner = OverTheBatch()
    loss.inner.inner = OverTheBatch()
    loss.layer = layer
    others = [loss, loss.inner.inner.call, layer]
    before = [python_state(model, each) for each in others]
    loss.inner.inner.is_on = True
    layer.rate = 0.125
    after = [python_state(model, each) for each in others]
    assert all(a != b for a, b in zip(after, before, strict=True))


def test_changes_inside_of_attributes_are_seen():
    model = keras.Sequential([keras.Input((3,)), Many()])
    (layer,) = model.layers
    found = [python_state(model)]
    layer.settings["rate"] = 0.25
    found.append(python_state(model))
    layer.table[0] = 7
    found.append(python_state(model))
    layer.regularizer.l2 = 0.2
    found.append(python_state(model))
    assert len(set(found)) == 4


def function(x, is_on=False, *, settings=None):
    """Depends on what it is not called with."""
    return x if is_on or settings or MODULE["is_on"] else -x


MODULE = {"is_on": False}
CLOSED_OVER = Settings()
PARTIAL = functools.partial(function, settings={})


def closing(own):
    return lambda x: x if own.is_on else -x


def calling(x):
    return function(x)


def calling_inside(x):
    return keras.ops.map(lambda row: function(-row), x)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (closing(CLOSED_OVER), lambda: setattr(CLOSED_OVER, "is_on", True)),
        (PARTIAL, lambda: PARTIAL.keywords["settings"].update(is_on=True)),
        (function, lambda: setattr(function, "__defaults__", (True,))),
        (function, lambda: function.__kwdefaults__.update(settings=1)),
        (function, lambda: MODULE.update(is_on=True)),
        (calling, lambda: setattr(function, "__code__", calling.__code__)),
        (calling_inside, lambda: setattr(function, "__code__", calling.__code__)),
        (OverTheBatch(), lambda: setattr(OverTheBatch, "is_on", True)),
        (OverTheBatch(), lambda: setattr(OverTheBatch, "call", function)),
    ],
    ids=[
        "closed over",
        "of a partial",
        "defaults",
        "defaults by name",
        "of the module",
        "called by others",
        "called by others inside",
        "of a class",
        "method of a class",
    ],
)
def test_what_functions_and_classes_rest_on_is_seen(value, change, monkeypatch):
    for owner, name in [
        (function, "__defaults__"),
        (function, "__code__"),
        (OverTheBatch, "call"),
        (OverTheBatch, "is_on"),
        (CLOSED_OVER, "is_on"),
    ]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setitem(function.__kwdefaults__, "settings", None)
    monkeypatch.setitem(PARTIAL.keywords["settings"], "is_on", False)
    monkeypatch.setitem(MODULE, "is_on", False)
    model = of_two()
    before = python_state(model, value)
    assert python_state(model, value) == before
    change()
    assert python_state(model, value) != before


class Wrapped(tf.Module):
    """Has nests that TensorFlow makes its own."""

    def __init__(self):
        super().__init__()
        self.list, self.dict = [False], {"is_on": False}

    def __call__(self, x):
        return x


class OwnKind(type):
    """Makes classes that share a setting."""

    is_on = False


class OfOwnKind(metaclass=OwnKind):
    """One of these."""


class OwnArray(np.ndarray):
    """Has a setting."""

    is_on = False


def with_a_module():
    module = types.ModuleType("settings")
    module.is_on = False
    return module


def masked():
    return np.ma.array([1.0, 2.0], mask=[True, False])


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Wrapped, lambda of: of.list.__setitem__(0, True)),
        (Wrapped, lambda of: of.dict.update(is_on=True)),
        (with_a_module, lambda of: setattr(of, "is_on", True)),
        (OfOwnKind, lambda _: setattr(OwnKind, "is_on", True)),
        (lambda: np.zeros(2).view(OwnArray), lambda of: setattr(of, "is_on", True)),
        (masked, lambda of: of.mask.__setitem__(1, True)),
        (
            dataclasses.make_dataclass("Made", ["is_on"], namespace={"is_on": False}),
            lambda of: setattr(of, "is_on", True),
        ),
        (lambda: {"is_on": False}, lambda of: of.update(is_on=True)),
    ],
    ids=[
        *("list of a module", "dictionary of a module", "module", "kind of class"),
        *("kind of array", "mask", "class that was made", "dictionary of a method"),
    ],
)
def test_changes_inside_of_other_objects_are_seen(make, change, monkeypatch):
    monkeypatch.setattr(OwnKind, "is_on", False)
    model, loss = of_two(), OverTheBatch()
    value = loss.value = make()
    loss.method = getattr(value, "get", None)
    before = python_state(model, loss.method or loss)
    assert python_state(model, loss.method or loss) == before
    change(value)
    assert python_state(model, loss.method or loss) != before


@pytest.mark.parametrize(
    "wrap",
    [
        keras.remat,
        tf.recompute_grad,
        functools.wraps(keras.losses.mean_squared_error),
        functools.lru_cache,
        tf.function,
    ],
)
def test_what_functions_are_wrapped_in_hides_nothing(wrap):
    own = Settings()
    wrapped = wrap(lambda x: x if own.is_on else -x)
    before = python_state(of_two(), wrapped)
    own.is_on = True
    assert python_state(of_two(), wrapped)[-1] != before[-1]


def test_which_of_two_equal_objects_is_meant_is_seen():
    model, loss = of_two(), OverTheBatch()
    one, other = [1], [1]
    loss.a_table, loss.mode = [[one, other]], one
    before = python_state(model, loss)
    loss.mode = other
    assert python_state(model, loss) != before


def test_a_penalty_of_a_variable_is_seen():
    model = of_two()
    before = python_state(model)
    model.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
    assert python_state(model) != before


def test_what_is_found_far_inside_is_looked_at_where_it_is_near():
    model, loss, inner = of_two(), OverTheBatch(), Settings([False])
    loss.a, loss.b = [[[[[[[[inner]]]]]]]], inner
    before = python_state(model, loss)
    inner.is_on[0] = True
    assert python_state(model, loss) != before


def test_layers_of_losses_are_seen():
    model, loss = of_two(), OverTheBatch()
    loss.features = keras.Sequential([keras.Input((3,)), Many()])
    found = {python_state(model, loss)}
    loss.features.layers[0].rate = 0.125
    found.add(python_state(model, loss))
    loss.features.trainable = False
    found.add(python_state(model, loss))
    assert len(found) == 3


def module_of(name, package=None, **values):
    module = types.ModuleType(name)
    module.__package__ = package or name.rpartition(".")[0]
    vars(module).update(values)
    return module


class OwnModule(types.ModuleType):
    """Has a setting that all modules of its kind share."""

    is_on = False


CONFIG = module_of("own_pkg.config", is_on=False, __flag__=False, Settings=Settings)
CONFIG.decide = lambda: False
PACKAGE = module_of("own_pkg", "own_pkg", config=CONFIG)
OF_OWN_KIND = OwnModule("own_kind")


def deciding_there():
    return CONFIG.decide()


def deciding_by_another():
    return deciding_there()


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda: PACKAGE.config.is_on, ("is_on", True)),
        (lambda: PACKAGE.config.Settings.is_on, ("Settings", OverTheBatch)),
        (deciding_there, ("decide", lambda: True)),
        (lambda: CONFIG.__flag__, ("__flag__", True)),
        (deciding_by_another, ("decide", lambda: True)),
    ],
    ids=["in a module", "class", "function", "underscores", "by another function"],
)
def test_what_functions_read_of_modules_is_seen(read, change, monkeypatch):
    model = of_two()
    before = python_state(model, read)
    assert python_state(model, read) == before
    monkeypatch.setattr(CONFIG, *change)
    assert python_state(model, read) != before


def test_what_is_imported_in_a_call_is_seen(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_pkg", PACKAGE)
    monkeypatch.setitem(sys.modules, "own_pkg.config", CONFIG)

    def plain():
        import own_pkg.config  # noqa: PLC0415

        return own_pkg.config.is_on

    def by_name():
        from own_pkg.config import is_on  # noqa: PLC0415

        return is_on

    def relative():
        from . import config  # noqa: PLC0415, TID252

        return config.is_on

    relative = types.FunctionType(relative.__code__, vars(PACKAGE))
    model, functions = of_two(), [plain, by_name, relative]
    before = [python_state(model, each) for each in functions]
    monkeypatch.setattr(CONFIG, "is_on", True)
    after = [python_state(model, each) for each in functions]
    assert all(a != b for a, b in zip(after, before, strict=True))


def test_a_global_with_the_name_of_a_module_is_seen(monkeypatch):
    monkeypatch.setitem(sys.modules, "MODULE", CONFIG)
    model = of_two()
    before = python_state(model, function)
    monkeypatch.setitem(MODULE, "is_on", True)
    assert python_state(model, function) != before


def test_kinds_of_modules_are_seen(monkeypatch):
    model, read = of_two(), lambda: OF_OWN_KIND.is_on
    before = python_state(model, read)
    monkeypatch.setattr(OwnModule, "is_on", True)
    assert python_state(model, read) != before


@pytest.mark.parametrize(
    "name",
    ["quantize", "train_function", "run_eagerly", "supports_masking", "compiled"],
)
def test_attributes_that_keras_has_too_are_seen(name):
    model = of_two()
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    owner = model.layers[0] if name == "compiled" else inner
    setattr(owner, name, False)
    before = python_state(model, inner)
    setattr(owner, name, True)
    assert python_state(model, inner) != before


class OwnFraction(fractions.Fraction):
    """Has a value that no attribute shows."""


class OwnDay(dt.date):
    """Another one."""


# A proxy of what is gone would answer others with errors.
ANOTHER = OverTheBatch()


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (OwnFraction(1, 2), OwnFraction(1, 3)),
        (OwnDay(2026, 1, 1), OwnDay(2026, 1, 2)),
        (weakref.proxy(CLOSED_OVER), weakref.proxy(ANOTHER)),
    ],
    ids=["fraction", "day", "proxy"],
)
def test_kinds_of_what_is_not_made_in_python_are_seen(value, other):
    model, loss = of_two(), OverTheBatch()
    loss.value = value
    before = python_state(model, loss)
    assert python_state(model, loss) == before
    loss.value = other
    assert python_state(model, loss) != before


def test_what_a_proxy_stands_for_is_looked_into():
    model, loss, settings = of_two(), OverTheBatch(), Settings()
    loss.value = weakref.proxy(settings)
    before = python_state(model, loss)
    settings.is_on = True
    assert python_state(model, loss) != before


def test_what_is_cut_off_in_one_layer_is_whole_in_the_next():
    model = keras.Sequential([keras.Input((3,)), Many(), Many()])
    first, second = model.layers
    # After the axes, by name.
    first.z = second.z = argparse.Namespace(inner=Settings())
    for left in range(70):
        first.z.inner.is_on = False
        lengths = [*[1000] * 19, 930 + left]
        first.axes = [list(range(length)) for length in lengths]
        before = python_state(model)
        first.z.inner.is_on = True
        assert python_state(model) != before


def test_much_in_one_layer_hides_nothing_of_the_next():
    model = keras.Sequential([keras.Input((3,)), Many(), Many()])
    first, second = model.layers
    first.settings = {str(n): list(range(1000)) for n in range(30)}
    second.axes = [[1]]
    before = python_state(model)
    second.axes[0][0] = 2
    assert python_state(model) != before


def test_an_object_in_the_place_of_one_that_is_gone_is_seen():
    """It may have the `id` that the other had."""
    model, loss = of_two(), OverTheBatch()
    found = set()
    for _ in range(10):
        loss.table = None
        loss.table = np.zeros(5000)
        found.add(python_state(model, loss))
    assert len(found) == 10


def test_what_only_begins_like_tensorflows_is_seen():
    model, loss = of_two(), OverTheBatch()
    before = python_state(model, loss)
    loss._self_attention = True
    assert python_state(model, loss) != before


def test_a_variable_that_trains_from_now_on_is_seen():
    model = of_two()
    kernel = model.layers[0].kernel
    kernel.trainable = False
    before = python_state(model)
    kernel.trainable = True
    assert python_state(model) != before


class Raising:
    """Answers nothing."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError

    def __call__(self):
        raise RuntimeError


class RaisingNest(dict):
    """Answers nothing, either."""

    def __len__(self):
        raise RuntimeError

    def items(self):
        raise RuntimeError


def test_objects_are_not_asked():
    loss = OverTheBatch()
    gone = Settings()
    loss.a, loss.b, loss.c = Raising(), weakref.proxy(gone), weakref.ref(gone)
    loss.d, loss.e = threading.Lock(), (number for number in range(3))
    loss.f, loss.h = {Name("a"), 1}, RaisingNest({"a": 1})
    loss.g = tf.function(lambda x: x)
    del gone
    model = of_two()
    before = python_state(model, loss)
    hash(before)
    loss.g(1)
    assert python_state(model, loss) == before


def test_what_is_made_anew_with_each_graph_is_the_same():
    model = keras.Sequential([keras.Input((3,)), Many()])
    (layer,) = model.layers
    found = set()
    for _ in range(2):
        x = keras.ops.ones((2, 3))
        layer.rate = tf.function(lambda x: x).get_concrete_function(x).outputs[0]
        layer.settings = {"made": Settings(), "by": closing(CLOSED_OVER)}
        found.add(python_state(model))
    assert len(found) == 1


def test_a_layer_in_place_of_another_is_seen():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3)])
    before = python_state(model)
    model.pop()
    model.add(layers.Dense(3))
    assert python_state(model) != before
