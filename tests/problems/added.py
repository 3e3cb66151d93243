"""Losses that layers and models add while they are called."""

import keras
from keras import layers, ops

from tests.problems.building import floats, logits, sequential, words
from tests.problems.problem import problem, register


@register
class Divergence(layers.Layer):
    """Adds how far a distribution is from a normal one, and passes its mean on."""

    def call(self, inputs):
        mean, log_variance = inputs
        apart = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
        self.add_loss(0.5 * ops.mean(ops.sum(apart, axis=1)))
        return mean


@register
class Bottleneck(keras.Model):
    """Adds a mean, a sum, a value for each row, and what a layer in it adds."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hidden = layers.Dense(4, activation="tanh")
        self.heads = [layers.Dense(2), layers.Dense(2)]
        self.divergence = Divergence()
        self.out = layers.Dense(2)

    def call(self, x):
        hidden = self.hidden(x)
        self.add_loss(-0.3 * ops.mean(ops.square(hidden)) + ops.sum(hidden) / 7)
        code = self.divergence([head(hidden) for head in self.heads])
        self.add_loss(ops.sum(ops.square(code), axis=1))
        return self.out(code)


PROBLEMS = (
    problem(
        "activity",
        lambda: sequential(
            (3,),
            layers.Dense(
                4, "tanh", activity_regularizer=keras.regularizers.L1L2(0.1, 0.2)
            ),
            layers.Dense(2, activity_regularizer="l2", kernel_regularizer="l2"),
        ),
        floats(3, 2),
        "mse",
        tags="added regularized",
    ),
    problem(
        "activity_of_positions",
        lambda: sequential(
            (None,),
            layers.Embedding(6, 3, activity_regularizer="l1"),
            layers.Conv1D(4, 2, activation="tanh", activity_regularizer="l2"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3),
            dtype="int32",
        ),
        words(5, 3),
        logits,
        tags="added conv embedding",
    ),
    problem("bottleneck", Bottleneck, floats(3, 2), "mse", tags="added coupled"),
)
