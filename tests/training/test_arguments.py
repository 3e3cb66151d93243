"""What `DPModel` and its methods refuse to be given."""

import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.reference import clipped_sum
from tests.small import data, logits_loss, network, optimizer, private
from tests.zoo.generative import Sampling


def test_a_plain_optimizer_is_refused():
    with pytest.raises(tfdp.errors.NotPrivateError, match="DPOptimizer"):
        tfdp.DPModel(network()).compile("sgd", "mse")


def test_fit_before_compile_is_refused():
    with pytest.raises(tfdp.errors.NotPrivateError, match="compile"):
        tfdp.DPModel(network()).fit(*data())


@pytest.mark.parametrize("name", ["test_step", "compute_metrics"])
def test_a_model_with_its_own_evaluation_is_told_to_leave_it_out(name):
    def own(self, *data):
        raise AssertionError

    kind = type("Own", (keras.Sequential,), {name: own})
    with pytest.raises(ValueError, match=f"Leave `{name}` out of `Own`") as caught:
        tfdp.DPModel(kind([keras.Input((2,)), keras.layers.Dense(1)]))
    assert "autoencoder" not in str(caught.value)


def test_a_model_with_its_own_train_step_is_refused():
    class Own(keras.Sequential):
        def train_step(self, data):
            return {}

    inside = [keras.Input((3,)), layers.Dense(2)]
    with pytest.raises(ValueError, match="overrides `train_step`") as refused:
        tfdp.DPModel(Own(inside))
    assert "autoencoder" not in str(refused.value)
    # What it advises trains.
    code = str(refused.value).partition("\n\n")[2].partition("    tfdp.DPModel")[0]
    code = code.replace("keras.Model", "keras.Sequential")
    names = {"keras": keras}
    exec(textwrap.dedent(code), names)
    private = tfdp.DPModel(names["Own"](inside))
    private.compile(tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0))
    x = np.ones((6, 3), "float32")
    losses = private.fit(x, x[:, :2], batch_size=2, verbose=0).history["loss"]
    assert np.isfinite(losses).all()


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


def halves_of_a_vae():
    inputs = keras.Input((4, 4, 1))
    x = layers.Dense(6, "relu")(layers.Flatten()(inputs))
    mean, log_variance = layers.Dense(2)(x), layers.Dense(2)(x)
    code = Sampling(chance=0.0)([mean, log_variance])
    decoder = [
        keras.Input((2,)),
        layers.Dense(16, "sigmoid"),
        layers.Reshape((4, 4, 1)),
    ]
    return keras.Model(inputs, [mean, log_variance, code]), keras.Sequential(decoder)


class Halves:
    """What people make beside the step."""

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker]


class VAE(Halves, keras.Model):
    """As people write it, with a step of its own."""

    def loss_of(self, data):
        mean, log_variance, code = self.encoder(data)
        away = keras.losses.binary_crossentropy(data, self.decoder(code))
        kl = -0.5 * (1 + log_variance - tf.square(mean) - tf.exp(log_variance))
        return tf.reduce_mean(tf.reduce_sum(away, axis=(1, 2))) + tf.reduce_mean(
            tf.reduce_sum(kl, axis=1)
        )

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        self.total_loss_tracker.update_state(loss)
        return {"loss": self.total_loss_tracker.result()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Training without noise")
def test_the_advice_for_a_step_of_its_own_trains():
    keras.utils.set_random_seed(0)
    given = VAE(*halves_of_a_vae())
    with pytest.raises(
        ValueError, match=r"overrides `train_step`.* Received: "
    ) as raised:
        tfdp.DPModel(given)
    code = str(raised.value).partition("\n\n")[2].partition("    tfdp.DPModel")[0]
    names = {"keras": keras}
    exec(textwrap.dedent(code), names)

    class Advised(Halves, names["VAE"]):
        """As the error says."""

    model = Advised(given.encoder, given.decoder)
    x = np.random.default_rng(0).uniform(size=(6, 4, 4, 1)).astype("float32")
    x[2] *= 30
    gradients = []
    for row in range(6):
        with tf.GradientTape() as tape:
            loss = given.loss_of(x[row : row + 1])
        gradients.append(tape.gradient(loss, given.trainable_variables))
    gradients = [np.stack(each) for each in zip(*gradients, strict=True)]
    _, norms = clipped_sum(gradients, 1.0)
    clip = float(np.median(norms))
    expected, _ = clipped_sum(gradients, clip)
    loss = float(given.loss_of(x))
    before = [variable.numpy() for variable in given.trainable_variables]
    private = tfdp.DPModel(model, sampling="shuffle")
    private.compile(
        tfdp.optimizers.DPOptimizer(
            keras.optimizers.SGD(1.0), l2_norm_clip=clip, noise_multiplier=0.0
        )
    )
    history = private.fit(x, batch_size=6, verbose=0)
    np.testing.assert_allclose(history.history["loss"], [loss], rtol=1e-5)
    for variable, start, total in zip(
        given.trainable_variables, before, expected, strict=True
    ):
        moved = (start - variable.numpy()) * 6
        np.testing.assert_allclose(moved, total, rtol=0, atol=1e-4 * clip)
    assert np.isfinite(private.evaluate(x, verbose=0))


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (keras.metrics.MeanSquaredError(name="val_mse"), "val_mse"),
        (
            {"dense": ["mae", keras.metrics.Accuracy(name="private_accuracy")]},
            "private_",
        ),
    ],
)
def test_exact_metrics_are_not_named_as_others(metric, name):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=f"must not begin.*name='{name}"):
        tfdp.DPModel(model).compile(optimizer, "mse", metrics=metric)


def test_outputs_are_not_named_as_logs_of_others():
    x = keras.Input((2,))
    outputs = [keras.layers.Dense(1, name=name)(x) for name in ("mean", "val_spread")]
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="name='exact_val_spread'"):
        tfdp.DPModel(keras.Model(x, outputs)).compile(optimizer, "mse")
