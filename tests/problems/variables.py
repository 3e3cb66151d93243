"""Which variables train, where they are used, and what is random."""

import keras
from keras import layers, ops

from tests.problems.building import (
    floats,
    floats_of,
    frozen,
    labelled,
    logits,
    sequential,
)
from tests.problems.problem import problem, register


@register
class Scale(layers.Layer):
    """A leaf that no rule knows: ``tanh(x * scale)``."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), name="scale")

    def call(self, x):
        return ops.tanh(x * self.scale)


@register
class WideDense(layers.Dense):
    """A subclass of a known layer that computes something else: twice Dense."""

    def call(self, x, training=None):
        return 2 * super().call(x, training=training)


@register
class Subclassed(keras.Model):
    """Layers joined in Python."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hidden = layers.Dense(4, activation="tanh")
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(ops.concatenate([self.hidden(x), x], axis=-1))


@register
class WithUnused(keras.Model):
    """A layer and a weight that the loss does not depend on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.spare = self.add_weight(shape=(3, 2), name="spare")
        self.idle = layers.Dense(2)
        self.head = layers.Dense(2)

    def call(self, x):
        self.idle(x)
        return self.head(x)


def frozen_kernel():
    model = sequential((3,), layers.Dense(4, activation="tanh"), layers.Dense(2))
    for layer in model.layers:
        layer.kernel.trainable = False
    return model


def low_rank():
    model = sequential((4,), layers.Dense(5, activation="tanh"), layers.Dense(3))
    for layer in model.layers:
        layer.enable_lora(2)
    return model


def called_twice():
    inputs = keras.Input((3,))
    shared = layers.Dense(3, activation="tanh", name="shared")
    return keras.Model(inputs, layers.Dense(2)(shared(shared(inputs))))


def called_on_many_shapes():
    """One matrix for vectors and for positions."""
    vector, positions = keras.Input((3,)), keras.Input((4, 3))
    shared = layers.Dense(2, activation="tanh")
    outputs = shared(vector) * layers.GlobalAveragePooling1D()(shared(positions))
    return keras.Model([vector, positions], outputs)


def nested():
    inputs = keras.Input((3,))
    block = sequential((3,), layers.Dense(4, activation="tanh"), layers.Dense(3))
    outer = sequential((3,), block, layers.LayerNormalization())
    return keras.Model(inputs, layers.Dense(2)(inputs + outer(inputs)))


PROBLEMS = (
    problem(
        "frozen_layer",
        lambda: sequential(
            (3,),
            layers.Dense(4, "tanh"),
            frozen(layers.Dense(4, "tanh")),
            layers.Dense(2),
        ),
        floats(3, 2),
        "mse",
        tags="frozen",
    ),
    problem("frozen_kernel", frozen_kernel, floats(3, 2), "mse", tags="frozen"),
    problem("lora", low_rank, labelled(4, 3), logits, tags="frozen lora"),
    problem("unused", WithUnused, floats(3, 2), "mse", tags="unused"),
    problem("called_twice", called_twice, floats(3, 2), "mse", tags="shared"),
    problem(
        "called_on_many_shapes",
        called_on_many_shapes,
        floats_of(3, (4, 3), targets=2),
        "mse",
        tags="shared structure",
    ),
    problem("subclassed", Subclassed, floats(3, 2), "mse"),
    problem("nested", nested, floats(3, 2), "mse", tags="norm"),
    problem(
        "custom_layer",
        lambda: sequential((3,), layers.Dense(4), Scale(), layers.Dense(2)),
        floats(3, 2),
        "mse",
        tags="custom",
    ),
    problem(
        "dense_subclass",
        lambda: sequential((3,), WideDense(4, "tanh"), layers.Dense(2)),
        floats(3, 2),
        "mse",
        tags="custom",
    ),
    problem(
        "regularized",
        lambda: sequential(
            (3,),
            layers.Dense(4, "tanh", kernel_regularizer="l2"),
            layers.Dense(2, bias_regularizer="l2"),
        ),
        floats(3, 2),
        "mse",
        tags="regularized",
    ),
    problem(
        "dropout",
        lambda: sequential(
            (6,), layers.Dense(8, "tanh"), layers.Dropout(0.5, seed=3), layers.Dense(2)
        ),
        floats(6, 2),
        "mse",
        tags="random",
    ),
    problem(
        "gaussian_noise",
        lambda: sequential((3,), layers.GaussianNoise(1.0, seed=3), layers.Dense(2)),
        floats(3, 2),
        "mse",
        tags="random",
    ),
)
