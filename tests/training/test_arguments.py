"""What `DPModel` and its methods refuse to be given."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.small import data, logits_loss, network, optimizer, private


def test_a_plain_optimizer_is_refused():
    with pytest.raises(tfdp.errors.NotPrivateError, match="DPOptimizer"):
        tfdp.DPModel(network()).compile("sgd", "mse")


def test_fit_before_compile_is_refused():
    with pytest.raises(tfdp.errors.NotPrivateError, match="compile"):
        tfdp.DPModel(network()).fit(*data())


def test_a_model_with_its_own_train_step_is_refused():
    class Own(keras.Sequential):
        def train_step(self, data):
            return {}

    with pytest.raises(ValueError, match="train_step"):
        tfdp.DPModel(Own([keras.Input((3,)), layers.Dense(2)]))


@pytest.mark.parametrize("model", [None, "model", layers.Dense(1)])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match="Received"):
        tfdp.DPModel(model)


def test_a_frozen_model_is_refused():
    model = network()
    model.trainable = False
    with pytest.raises(ValueError, match="nothing to train"):
        private(model).fit(*data())


@pytest.mark.slow
def test_class_weights_are_for_one_target_without_weights():
    x, y = data(20)
    inputs = keras.Input((3,))
    outputs = [layers.Dense(2, name=name)(inputs) for name in "ab"]
    model = private(keras.Model(inputs, outputs), loss=[logits_loss(), logits_loss()])
    dataset = tf.data.Dataset.from_tensor_slices((x, (y, y))).batch(5)
    weights = {0: 1.0, 1: 2.0}
    trains = [
        lambda: model.fit(x, [y, y], batch_size=5, class_weight=weights),
        lambda: model.fit(dataset, class_weight=weights),
        lambda: model.train_on_batch(x, [y, y], class_weight=weights),
        lambda: private().fit(x, y, sample_weight=np.ones(20), class_weight=weights),
    ]
    for train in trains:
        with pytest.raises(ValueError, match=r"`class_weight` weighs .* Received: cl"):
            train()
    # What it advises works.
    weight_of_class = np.array([1.0, 2.0])
    of_rows = [weight_of_class[y]] * 2
    model.fit(x, [y, y], sample_weight=of_rows, batch_size=5, verbose=0)


def test_an_optimizer_without_privacy_is_refused_however_it_comes():
    model = private()
    model.optimizer = keras.optimizers.SGD(0.1)
    for train in (model.fit, model.train_on_batch):
        with pytest.raises(tfdp.errors.NotPrivateError, match="without privacy"):
            train(*data())


@pytest.mark.parametrize("is_dataset", [False, True])
def test_targets_that_are_missing_are_asked_for(is_dataset):
    x, _ = data()
    if is_dataset:
        x = tf.data.Dataset.from_tensor_slices(x).batch(4)
    options = {"expected_batch_size": 4} if is_dataset else {}
    model = private(opt=optimizer(**options))
    with pytest.raises(ValueError, match=r"`y` is missing.*private\.fit\(x, y"):
        model.fit(x, verbose=0)
    assert not model.ledger.segments
