"""Models that are trained privately, exported and served: problems as data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdp


class Export(NamedTuple):
    """A model, its data, and the names that its signature must have."""

    model: Callable[[], keras.Model]
    x: Callable[[np.random.Generator, int], Any]
    y: Callable[[np.random.Generator, int], Any]
    loss: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Scores(keras.Model):
    """A model of a class of its own, with a dictionary of outputs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(4, activation="tanh")
        self.score = layers.Dense(1)

    def call(self, inputs):
        hidden = self.hidden(inputs["features"])
        return {"score": self.score(hidden)}


class TableLookup(layers.Layer):
    """A table that Keras knows nothing of."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        words, values = tf.constant(["good", "bad"]), tf.constant([1.0, -1.0])
        entries = tf.lookup.KeyValueTensorInitializer(words, values)
        self.table = tf.lookup.StaticHashTable(entries, 0.0)

    def call(self, words):
        return self.table.lookup(words)


def digits():
    return keras.Sequential([
        keras.Input((8, 8, 1), name="image"),
        layers.Conv2D(4, 3, activation="relu"),
        layers.Dropout(0.5),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10, activation="softmax", name="digit"),
    ])


def tokens():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = layers.Embedding(20, 4, mask_zero=True)(ids)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(ids, layers.Dense(2, name="label")(x))


def two_heads():
    age = keras.Input((1,), name="age")
    region = keras.Input((3,), name="region")
    hidden = layers.Dense(4, activation="relu")(layers.Concatenate()([age, region]))
    dose, risk = layers.Dense(1, name="dose"), layers.Dense(2, name="risk")
    return keras.Model([age, region], [dose(hidden), risk(hidden)])


def words():
    text = keras.Input((3,), dtype="string", name="words")
    looked_up = layers.StringLookup(vocabulary=["good", "film"])(text)
    both = [TableLookup()(text), keras.ops.cast(looked_up, "float32")]
    return keras.Model(
        text, layers.Dense(1, name="opinion")(layers.Concatenate()(both))
    )


def called_twice():
    x = keras.Input((4,), name="my input-1")
    shared = layers.Dense(4, name="shared")
    return keras.Model(x, [shared(x), shared(shared(x))])


def normal(*shape):
    return lambda rng, n: rng.normal(size=(n, *shape)).astype("float32")


def whole(high, *shape):
    return lambda rng, n: rng.integers(0, high, (n, *shape))


EXPORTS = {
    "digits": Export(
        digits,
        normal(8, 8, 1),
        whole(10),
        "sparse_categorical_crossentropy",
        ("image",),
        ("digit",),
    ),
    "tokens": Export(
        tokens,
        whole(20, 6),
        whole(2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ("token_ids",),
        ("label",),
    ),
    "two_heads": Export(
        two_heads,
        lambda rng, n: [normal(1)(rng, n), normal(3)(rng, n)],
        lambda rng, n: [normal(1)(rng, n), normal(2)(rng, n)],
        ["mse", "mse"],
        ("age", "region"),
        ("dose", "risk"),
    ),
    "words": Export(
        words,
        lambda rng, n: rng.choice(["good", "bad", "film"], (n, 3)),
        normal(1),
        "mse",
        ("words",),
        ("opinion",),
    ),
    "scores": Export(
        Scores,
        lambda rng, n: {"features": normal(3)(rng, n)},
        lambda rng, n: {"score": normal(1)(rng, n)},
        {"score": "mse"},
        ("features",),
        ("score",),
    ),
    "called_twice": Export(
        called_twice,
        normal(4),
        lambda rng, n: [normal(4)(rng, n), normal(4)(rng, n)],
        ["mse", "mse"],
        ("my_input_1",),
        ("shared", "shared_1"),
    ),
}


def trained(name, *, sampling="poisson", rows=20, **options):
    """Return a private model after two epochs, and the inputs that it saw."""
    export, rng = EXPORTS[name], np.random.default_rng(0)
    private = tfdp.DPModel(export.model(), sampling=sampling, engine="bookkeeping")
    private.compile(
        tfdp.optimizers.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, **options),
        loss=export.loss,
        run_eagerly=True,
    )
    x, y = export.x(rng, rows), export.y(rng, rows)
    private.fit(x, y, batch_size=10, epochs=2, verbose=0)
    return private, x


def predictions(model, name, x):
    """Return what `predict` gives, by the names of the outputs."""
    if isinstance(x, np.ndarray) and x.dtype.kind == "U":
        x = tf.data.Dataset.from_tensors(x)
    predicted = model.predict(x, verbose=0)
    if isinstance(predicted, dict):
        return predicted
    return dict(zip(EXPORTS[name].outputs, keras.tree.flatten(predicted), strict=True))


def by_name(name, x):
    """Return inputs by their names."""
    return dict(zip(EXPORTS[name].inputs, keras.tree.flatten(x), strict=True))
