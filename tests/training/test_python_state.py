"""What was proven of layers holds while they decide by the same attributes."""

import keras
import pytest
from keras import layers

import tfdp
from tests.small import data, logits_loss, private
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


def test_loops_check_such_a_layer_again():
    x, y = data(20)
    centred = Centred()
    model = keras.Sequential([keras.Input((3,)), centred, layers.Dense(2)])
    options = {"l2_norm_clip": 1.0}
    tfdp.clipped_gradients(model, logits_loss(), x, y, **options)
    centred.is_on = True
    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        tfdp.clipped_gradients(model, logits_loss(), x, y, **options)


class Many(layers.Layer):
    """Has attributes of many kinds."""

    def __init__(self):
        super().__init__()
        self.rate, self.axes, self.function = 0.5, [1, 2], keras.ops.tanh

    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("name", "value"),
    [("rate", 0.25), ("axes", [1, 3]), ("function", keras.ops.exp), ("new", "text")],
)
def test_another_attribute_is_seen(name, value):
    model = keras.Sequential([keras.Input((3,)), Many()])
    before = python_state(model)
    model(keras.ops.ones((2, 3)))
    assert python_state(model) == before
    setattr(model.layers[0], name, value)
    assert python_state(model) != before


def test_a_layer_in_place_of_another_is_seen():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3)])
    before = python_state(model)
    model.pop()
    model.add(layers.Dense(3))
    assert python_state(model) != before
