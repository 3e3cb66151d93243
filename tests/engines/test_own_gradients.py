"""Models that take gradients on the way to their outputs, against single examples."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.engine_checks import BATCHES, check, runner
from tests.problems import Problem, floats, precision
from tests.reference import assert_all_close, clipped_sum
from tfdp.checks.engine import choose
from tfdp.engines import ApartEngine, BookkeepingEngine, GhostEngine, VectorizedEngine
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

WIDTH = 3


def of_sum(network, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = ops.sum(network(x))
    return tape.gradient(y, x)


def jacobian(network, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = network(x)
    return tape.batch_jacobian(y, x)


def forward(network, x):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        y = network(x)
    return accumulator.jvp(y)


def symbolic(network, x):
    if tf.executing_eagerly():
        return of_sum(network, x)
    return tf.compat.v1.gradients(network(x), x)[0]


class OfNetwork(layers.Layer):
    """What a function makes of a network and its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.network = keras.Sequential([
            keras.Input((WIDTH,)),
            layers.Dense(6, "tanh"),
            layers.Dense(2),
        ])

    def call(self, x):
        found = self.function(self.network, x)
        return ops.reshape(found, (-1, np.prod(found.shape[1:])))[:, :2]

    def compute_output_shape(self, shape):
        return (shape[0], 2)


def problem(name, function):
    def build():
        return keras.Sequential([
            keras.Input((WIDTH,)),
            OfNetwork(function),
            layers.Dense(1),
        ])

    return Problem(name, build, floats((WIDTH,), 1), "mse")


PROBLEMS = {
    function.__name__: problem(function.__name__, function)
    for function in (of_sum, jacobian, forward, symbolic)
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_whole_gradients_are_taken_and_right(name):
    of_name = PROBLEMS[name]
    objective = Objective.of(of_name.build(), of_name.loss())
    batch = of_name.batch(3)
    assert choose("auto", objective, tuple(batch)) == VectorizedEngine()
    run = runner(of_name, [VectorizedEngine()])
    for rows in BATCHES:
        check(of_name, run, rows)


def test_the_log_says_once_why_whole_gradients_are_taken(caplog):
    problem = PROBLEMS["of_sum"]
    objective = Objective.of(problem.build(), problem.loss())
    with caplog.at_level(logging.WARNING, "absl"):
        choose("auto", objective, tuple(problem.batch(3)))
    (said,) = caplog.messages
    assert said.count("Received: ") == 1
    assert "Received: a gradient through `" in said


@pytest.mark.parametrize(
    "engine",
    [
        BookkeepingEngine(),
        pytest.param(GhostEngine(), marks=pytest.mark.slow),
        pytest.param(ApartEngine(), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", PROBLEMS)
def test_rules_refuse_what_they_do_not_see(name, engine):
    of_name = PROBLEMS[name]
    model = of_name.build()
    x, y, _ = of_name.batch(3)

    @tf.function(autograph=False)
    def clip():
        return tfdp.clipped_gradients(
            model, "mse", x, y, l2_norm_clip=1.0, engine=engine
        )

    # Inside of a map TensorFlow may wrap the `UnsupportedLayerError`.
    with pytest.raises(Exception, match="takes gradients itself"):
        clip()


class Critic(keras.Model):
    """Has a penalty on its gradients between real and made rows."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(1)])

    def call(self, x):
        return self.network(x)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        between = 0.5 * (x + y)
        slopes = of_sum(self.network, between)
        lengths = ops.sqrt(ops.sum(slopes**2, axis=1) + 1e-12)
        difference = self.network(y) - y_pred
        return ops.mean(difference[:, 0] + 10.0 * (lengths - 1.0) ** 2)


@pytest.mark.slow
def test_a_penalty_of_gradients_in_the_loss():
    rng = np.random.default_rng(0)
    with precision("float64"):
        model = Critic()
        x, y = rng.normal(size=(2, 4, WIDTH))
        x[2] *= 30
        model(x)
        gradients = []
        for row in range(len(x)):
            one, other = (tf.constant(each[row : row + 1]) for each in (x, y))
            with tf.GradientTape() as tape:
                loss = model.compute_loss(one, other, model(one))
            values = [variable.value for variable in model.trainable_variables]
            gradients.append(
                tape.gradient(
                    loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO
                )
            )
        gradients = [np.stack(each) for each in zip(*gradients, strict=True)]
        clip = float(np.median(clipped_sum(gradients, 1.0)[1]))
        expected, _ = clipped_sum(gradients, clip)
        before = [variable.numpy() for variable in model.trainable_variables]
        private = tfdp.DPModel(model)
        with pytest.warns(match="without noise"):
            optimizer = tfdp.optimizers.DPSGD(
                1.0, l2_norm_clip=clip, noise_multiplier=0.0
            )
        private.compile(optimizer)
        data = tf.data.Dataset.from_tensors((x, y))
        private.fit(
            tfdp.data.declare(
                data, number_of_examples=4, expected_batch_size=4, sampling="shuffle"
            ),
            verbose=0,
        )
    moved = [
        4 * (old - variable.numpy())
        for old, variable in zip(before, model.trainable_variables, strict=True)
    ]
    assert_all_close(moved, expected, rtol=1e-9, atol=1e-12)
