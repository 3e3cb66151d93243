"""What an engine differentiates: the losses, in training mode, and what they train."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "float32")
Y = np.array([[1.0], [0.0], [2.0]], "float32")


class OwnLoss(keras.Model):
    """Weighs the squared error by the first input, and has a regularizer."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.5))

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = keras.ops.mean(x[:, :1] * keras.ops.square(y - y_pred))
        return loss + sum(self.losses)


def linear(dtype=None):
    return keras.Sequential([keras.Input((2,)), layers.Dense(1, dtype=dtype)])


def test_losses_and_variables_of_a_keras_loss():
    model = linear()
    objective = Objective.of(model, "mse")
    y_pred = objective.predict(X)
    losses = objective.losses(X, Y, y_pred, np.array([1.0, 2.0, 0.0]))
    np.testing.assert_allclose(
        losses, [1, 2, 0] * np.square(Y - y_pred)[:, 0], rtol=1e-6
    )
    assert [id(v) for v in objective.variables] == [
        id(v) for v in model.trainable_variables
    ]


@pytest.mark.slow
def test_own_losses_come_row_by_row_without_regularizers():
    model = OwnLoss()
    model.compile()
    model(X)
    objective = Objective.of_compute_loss(model)
    y_pred = objective.predict(X)
    losses = objective.losses(X, Y, y_pred, None)
    np.testing.assert_allclose(losses, X[:, 0] * np.square(Y - y_pred)[:, 0], rtol=1e-6)
    assert model.losses  # The regularizer is back.


def test_predictions_are_those_of_training():
    model = keras.Sequential([
        keras.Input((100,)),
        layers.Dropout(0.5),
        layers.Dense(1),
    ])
    predictions = [Objective.of(model, "mse").predict(tf.ones([1, 100])) for _ in "ab"]
    assert predictions[0] != predictions[1]


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (None, 1.0),
        ("mixed_bfloat16", 1.0),
        ("mixed_float16", 128.0),
        ("float16", 128.0),
    ],
)
def test_only_float16_scales_the_loss(dtype, scale):
    assert Objective.of(linear(dtype), "mse").loss_scale == scale


@pytest.mark.parametrize(
    "make", [lambda m: Objective.of(m, "mse"), Objective.of_compute_loss]
)
def test_there_must_be_something_to_train(make):
    model = linear()
    model.trainable = False
    with pytest.raises(ValueError, match="nothing to train"):
        make(model)


def test_no_gradient_is_a_new_value():
    model = linear()
    model.layers[0].quantize("float8")
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    private = tfdp.DPModel(model)
    private.compile(optimizer, "mse")
    trains = [
        lambda: private.fit(X, Y, batch_size=2, verbose=0),
        lambda: tfdp.clipped_gradients(model, "mse", X, Y, l2_norm_clip=1.0),
        lambda: Objective.of_compute_loss(model),
    ]
    for train in trains:
        with pytest.raises(ValueError, match=r"new values.*inputs_scale.*float8"):
            train()
    assert optimizer.iterations == 0


@pytest.mark.parametrize(
    ("loss", "is_refused"),
    [
        ("binary_crossentropy", True),
        (keras.losses.BinaryCrossentropy(), True),
        (keras.losses.binary_crossentropy, True),
        (tfdp.losses.BAM(keras.losses.BinaryFocalCrossentropy(), 0.1), True),
        (keras.losses.BinaryCrossentropy(from_logits=True), False),
        (lambda y, logits: keras.ops.softplus(-y * logits)[:, 0], False),
    ],
)
def test_logits_are_not_taken_for_probabilities(loss, is_refused):
    model = tfdp.variational.BayesianLogisticRegression(number_of_examples=4)
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    trains = [
        lambda: tfdp.DPModel(model).compile(
            tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), loss
        ),
        lambda: tfdp.clipped_gradients(model, loss, x, y, l2_norm_clip=1.0),
    ]
    for train in trains:
        if is_refused:
            with pytest.raises(ValueError, match=r"are logits.*Received: loss=.*Use "):
                train()
        else:
            train()


class Classifier(keras.Model):
    """Computes its loss of probabilities itself."""

    def __init__(self, activation, loss):
        super().__init__()
        self.dense = layers.Dense(2, activation=activation)
        self.loss_of = loss

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean(self.loss_of(y, y_pred))


@pytest.mark.parametrize(
    ("activation", "loss", "y"),
    [
        *(
            (softmax, keras.losses.sparse_categorical_crossentropy, np.array([0, 1, 1]))
            for softmax in ("softmax", tf.nn.softmax)
        ),
        (
            "sigmoid",
            keras.losses.binary_crossentropy,
            np.array([[0, 1], [1, 0], [1, 1]], "float32"),
        ),
    ],
)
def test_losses_of_probabilities_are_those_of_logits(activation, loss, y):
    """Where a row is certain, and wrong, its gradient is not lost."""
    model = Classifier(activation, loss)
    x = 100 * X
    model(x)
    objective = Objective.of_compute_loss(model)

    def gradients(x, y):
        batch = Batch(x, y, None, tf.zeros([3], tf.bool))
        return BookkeepingEngine().clip_and_sum(
            objective, batch, l2_norm_clip=tf.constant(1e6), rows_per_unit=1
        )[0]

    @tf.function(autograph=False)
    def plain(x, y):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    run = tf.function(gradients, autograph=False)
    found = run(tf.constant(x), tf.constant(y))
    expected = plain(tf.constant(x), tf.constant(y))
    assert np.max(np.abs(expected[0])) > 1
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine / 3, theirs, rtol=1e-5, atol=1e-5)


class Returning(keras.Model):
    """Returns what is made of its hidden rows and its codes."""

    def __init__(self, makes):
        super().__init__()
        self.makes = makes
        self.dense = layers.Dense(2)
        self.codes = self.add_weight(shape=(5, 2), name="codes")

    def call(self, x):
        return self.makes(self.dense(x) * self.codes[0], self.codes)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        hidden = keras.tree.flatten(y_pred)[0]
        return keras.ops.mean(keras.ops.square(hidden))


# By what they have where a row should have one entry.
OUTPUTS = {
    r"an output of shape \(5, 2\)": lambda hidden, codes: (hidden, codes + 0.0),
    r"an output of shape \(\)": lambda hidden, codes: (
        hidden,
        keras.ops.sum(codes),
    ),
    "an output of 2 entries for each row": lambda hidden, codes: keras.ops.concatenate(
        [hidden, -hidden], axis=0
    ),
    "an output of 3 entries for each row": lambda hidden, codes: keras.ops.repeat(
        hidden, 3, axis=0
    ),
}


@pytest.mark.parametrize("received", OUTPUTS)
def test_outputs_that_are_not_of_each_row_are_refused(received):
    model = Returning(OUTPUTS[received])
    model(X)
    private = tfdp.DPModel(model)
    private.compile(tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0))
    before = model.get_weights()
    with pytest.raises(UnsupportedLayerError, match=received):
        private.fit(X, Y, batch_size=2, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert private.ledger.steps == 0


def test_several_things_of_a_row_are_on_another_axis():
    # What the error tells.
    model = Returning(lambda hidden, codes: keras.ops.stack([hidden, -hidden], axis=1))
    model(X)
    private = tfdp.DPModel(model)
    private.compile(tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0))
    history = private.fit(X, Y, batch_size=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
