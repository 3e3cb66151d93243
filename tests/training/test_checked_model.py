"""Models are checked before they train, anew where something else would run."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.small import data, logits_loss, network, noiseless, optimizer, private
from tfdp.distribute.replicas import ALONE
from tfdp.training.checked_model import CheckedModel, rows_to_check
from tfdp.training.step import BatchClipper


def weights_of(model):
    return [variable.numpy() for variable in model.trainable_variables]


def segments(model):
    return model.ledger.segments


def test_batch_normalization_is_refused_before_training():
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(2),
        layers.BatchNormalization(),
    ])
    before = weights_of(model)
    wrapped = private(model)
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="GroupNormalization"):
        wrapped.fit(*data())
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="GroupNormalization"):
        private(model, optimizer(expected_batch_size=4)).train_on_batch(*data())
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert segments(wrapped) == ()


@pytest.mark.slow
def test_a_layer_unfrozen_after_the_check_is_checked_again():
    x, y = data(20)
    norm = layers.BatchNormalization(center=False, scale=False, trainable=False)
    model = private(
        keras.Sequential([keras.Input((3,)), norm, layers.Dense(2)]), run_eagerly=True
    )
    model.fit(x, y, batch_size=5, verbose=0)
    norm.trainable = True
    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        model.fit(x, y, batch_size=5, verbose=0)


def test_layers_are_checked_though_the_first_batch_is_empty():
    x, y = data(20)
    model = private(
        keras.Sequential([
            keras.Input((3,)),
            layers.BatchNormalization(),
            layers.Dense(2),
        ]),
        optimizer(expected_batch_size=5),
    )

    def batches():
        yield x[:0], y[:0]
        yield x, y

    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        model.fit(batches(), verbose=0)


def test_a_compute_loss_that_keeps_data_is_refused():
    class Keeps(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(2)
            self.seen = self.add_weight(shape=(), trainable=False)

        def call(self, x):
            return self.head(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            self.seen.assign_add(keras.ops.sum(keras.ops.cast(y, "float32")))
            return super().compute_loss(x, y, y_pred, sample_weight)

    model = Keeps()
    wrapped = private(model)
    with pytest.raises(tfdp.errors.UnsupportedLossError, match="keep no data"):
        wrapped.fit(*data(), verbose=0)


def test_a_loss_that_couples_examples_is_refused():
    def coupled(y_true, y_pred):
        return keras.ops.sum(keras.ops.square(y_pred - keras.ops.mean(y_pred, 0)), -1)

    with pytest.raises(tfdp.errors.UnsupportedLossError):
        private(loss=coupled).fit(*data())


@pytest.mark.parametrize("traced", [False, True])
def test_a_step_of_ones_own_is_checked_first(traced):
    inner = keras.Sequential([
        keras.Input((3,)),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(2),
    ])
    model = private(inner, noiseless(expected_batch_size=4))
    step = tf.function(model.train_step) if traced else model.train_step
    before = model.get_weights()
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="BatchNormalization"):
        step((tf.ones([4, 3]), tf.zeros([4], tf.int32)))
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


# ---------------------------------------------------------------------- what is known


def checked_model(model):
    made = CheckedModel(model, "auto", None, ALONE)
    made.compile(logits_loss(), None, None)
    return made


def test_a_size_is_checked_once():
    model = network()
    checked = checked_model(model)
    clipper = BatchClipper(model, checked.engine)
    of_passes = BatchClipper(model, checked.engine, 1, physical_batch_size=8)
    assert checked.unchecked(None, clipper) == [None]
    assert checked.unchecked(5, clipper) == [None, 5]
    assert checked.unchecked(5, of_passes) == [8]
    checked.check((*data(), None), [None, 5], tf.constant(0))
    assert checked.signature.shape.as_list() == [None, 3]
    assert checked.unchecked(5, clipper) == []
    assert checked.unchecked(6, clipper) == [6]
    assert checked.unchecked(5, of_passes) == [8]
    model.layers[0].trainable = False
    assert checked.unchecked(5, clipper) == [None, 5]


def test_another_loss_is_checked_again():
    model = network()
    checked = checked_model(model)
    clipper = BatchClipper(model, checked.engine)
    checked.check((*data(), None), [None], tf.constant(0))
    first = checked.objective()
    assert checked.objective() is first
    checked.compile("mse", None, None)
    assert checked.unchecked(None, clipper) == [None]
    assert checked.objective() is not first


def test_the_rows_that_are_looked_at_are_few_and_there_may_be_none():
    x, y = data()
    for given in ((x, y, None), (tf.constant(x), tf.constant(y), None)):
        rows = rows_to_check(given)
        np.testing.assert_array_equal(rows[0], x[:4])
        np.testing.assert_array_equal(rows[1], y[:4])
        assert rows[2] is None
    made_up = rows_to_check((x[:0], y[:0], None))
    assert made_up[0].shape == (4, 3)

    @tf.function
    def in_graph(x):
        made_up = rows_to_check((x, None, None))[0]
        assert isinstance(made_up, np.ndarray)
        assert made_up.shape == (4, 3)

    in_graph(tf.constant(x))
