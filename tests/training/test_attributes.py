"""What users set of layers and losses is heeded from then on."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfdp
from tests.small import data, logits_loss, noiseless, private
from tfdp.training.attributes import attributes_of

pytestmark = pytest.mark.keras_private


class Many(layers.Layer):
    """Has attributes of many kinds."""

    def __init__(self):
        super().__init__()
        self.number = 1.0
        self.array = np.zeros(3)
        self.nested = {"list": [1, (2, 3)]}
        self.names = {"a"}
        self.function = keras.ops.relu
        self.inner = layers.Dropout(0.5)
        self.penalty = keras.regularizers.L2(0.1)

    def call(self, x):
        return self.inner(x)


CHANGES = {
    "number": lambda each: setattr(each, "number", 2.0),
    "type": lambda each: setattr(each, "number", 1),
    "array": lambda each: each.array.__setitem__(0, 1.0),
    "nested": lambda each: each.nested["list"].append(4),
    "set": lambda each: setattr(each, "names", {"b"}),
    "function": lambda each: setattr(each, "function", keras.ops.tanh),
    "method": lambda each: setattr(each, "function", each.get_config),
    "inner": lambda each: setattr(each.inner, "rate", 0.25),
    "new": lambda each: setattr(each, "other", None),
    "penalty": lambda each: setattr(each.penalty, "l2", 0.2),
    "private": lambda each: setattr(each, "_own", 2.0),
    "policy": lambda each: setattr(each.inner, "dtype_policy", "mixed_bfloat16"),
    "frozen": lambda each: setattr(each.inner, "trainable", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change):
    many = Many()
    model = keras.Sequential([keras.Input((3,)), many, layers.Dense(1)])
    before = attributes_of(model)
    assert attributes_of(model) == before
    CHANGES[change](many)
    assert attributes_of(model) != before


def test_what_keras_sets_while_it_trains_is_no_change():
    model = private()
    model.fit(*data(), batch_size=4, verbose=0)
    before = attributes_of(model.model)
    model.fit(*data(), batch_size=4, verbose=0)
    model.predict(data()[0], verbose=0)
    assert attributes_of(model.model) == before


WEIGHT = {"of the divergence": 1.0}


class Weighted:
    """A loss of one's own class."""

    def __init__(self):
        self._weight = 1.0

    def __call__(self, y, y_pred):
        return self._weight * keras.ops.mean((y - y_pred) ** 2, -1)


def with_closure():
    annealed = {"weight": 1.0}

    def loss(y, y_pred):
        return annealed["weight"] * keras.ops.mean((y - y_pred) ** 2, -1)

    return loss, lambda: annealed.update(weight=3.0)


def with_global():
    def loss(y, y_pred):
        return WEIGHT["of the divergence"] * keras.ops.mean((y - y_pred) ** 2, -1)

    return loss, lambda: WEIGHT.update({"of the divergence": 3.0})


def with_default():
    def loss(y, y_pred, weight=1.0):
        return weight * keras.ops.mean((y - y_pred) ** 2, -1)

    return loss, lambda: setattr(loss, "__defaults__", (3.0,))


def with_private_attribute():
    loss = Weighted()
    return loss, lambda: setattr(loss, "_weight", 3.0)


@pytest.mark.parametrize(
    "make", [with_closure, with_global, with_default, with_private_attribute]
)
def test_loops_heed_another_weight_of_a_loss(make):
    WEIGHT["of the divergence"] = 1.0
    loss, change = make()
    x, _ = data(outlier=False)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3)])

    def norms():
        return tfdp.clipped_gradients(model, loss, x, x, l2_norm_clip=1.0).norms

    before = norms()
    assert len(vars(model)["_checked_by_tfdp"]) == 1
    np.testing.assert_array_equal(norms(), before)
    assert len(vars(model)["_checked_by_tfdp"]) == 1
    change()
    np.testing.assert_allclose(norms(), 3 * before, rtol=1e-5)


def test_losses_and_functions_are_looked_at():
    model, loss = private().model, keras.losses.Huber(delta=1.0)
    function = functools.partial(keras.losses.huber, delta=1.0)
    before = attributes_of(model, loss, {"a": function})
    loss.note = 2.0
    assert attributes_of(model, loss, {"a": function}) != before
    keras.utils.set_random_seed(1)
    seeded = attributes_of(model)
    keras.utils.set_random_seed(2)
    assert attributes_of(model) != seeded


class Scaled(layers.Layer):
    """Multiplies by a number that users set."""

    factor = 1.0

    def call(self, x):
        return x * self.factor


def test_loops_heed_another_number():
    x, y = data(outlier=False)
    scaled = Scaled()
    model = keras.Sequential([keras.Input((3,)), scaled, layers.Dense(2)])

    def norms():
        options = {"l2_norm_clip": 1.0}
        return tfdp.clipped_gradients(model, logits_loss_once, x, y, **options).norms

    logits_loss_once = logits_loss()
    before = norms()
    scaled.factor = 3.0
    assert np.all(np.abs(norms() - before) > 1e-3)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_layer_that_lets_rows_meet_from_now_on_is_refused_before_a_step(run_eagerly):
    class Centred(layers.Layer):
        is_on = False

        def call(self, x):
            return x - keras.ops.mean(x, 0, keepdims=True) if self.is_on else x

    x, y = data(20)
    centred = Centred()
    model = keras.Sequential([keras.Input((3,)), centred, layers.Dense(2)])
    wrapped = private(model, noiseless(), run_eagerly=run_eagerly)
    wrapped.fit(x, y, batch_size=5, verbose=0)
    before = model.get_weights()
    centred.is_on = True
    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        wrapped.fit(x, y, batch_size=5, verbose=0)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
