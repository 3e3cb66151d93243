"""Tables, and who likes what."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.zoo.entry import CLASSES, YES_OR_NO, Entry, images, numbers

NUMBERS = ("age", "hours")
WORDS = {"work": ["private", "state", "none"], "school": ["some", "all"]}


def table(rng, rows):
    """Draw rows of numbers and words, known and unknown, by the names of columns."""
    x = {name: rng.normal(size=(rows, 1)) for name in NUMBERS}
    for name, words in WORDS.items():
        x[name] = np.array([*words, "?"])[rng.integers(len(words) + 1, size=(rows, 1))]
    return x, rng.integers(2, size=(rows, 1))


def inputs_of_table():
    inputs = {name: keras.Input((1,), name=name) for name in NUMBERS}
    for name in WORDS:
        inputs[name] = keras.Input((1,), name=name, dtype="string")
    return inputs


def encoded(inputs, *, is_embedded):
    """Make vectors of words, and put them beside the numbers."""
    parts = [inputs[name] for name in NUMBERS]
    for name, words in WORDS.items():
        if is_embedded:
            index = layers.StringLookup(vocabulary=words)(inputs[name])
            part = layers.Embedding(len(words) + 1, 3)(index)
            parts.append(layers.Reshape((3,))(part))
        else:
            lookup = layers.StringLookup(vocabulary=words, output_mode="multi_hot")
            parts.append(lookup(inputs[name]))
    return layers.concatenate(parts)


def wide_and_deep(chance):
    inputs = inputs_of_table()
    wide = encoded(inputs, is_embedded=False)
    deep = layers.Dense(6, "relu")(encoded(inputs, is_embedded=True))
    deep = layers.Dropout(0.2 * chance)(deep)
    return keras.Model(inputs, layers.Dense(1)(layers.concatenate([wide, deep])))


def deep_and_cross(_):
    inputs = inputs_of_table()
    start = cross = encoded(inputs, is_embedded=True)
    for _ in range(2):
        cross = start * layers.Dense(cross.shape[-1])(cross) + cross
    deep = layers.Dense(6, "relu")(start)
    return keras.Model(inputs, layers.Dense(1)(layers.concatenate([cross, deep])))


def tab_transformer(chance):
    inputs = inputs_of_table()
    columns = []
    for name, words in WORDS.items():
        index = layers.StringLookup(vocabulary=words)(inputs[name])
        columns.append(layers.Embedding(len(words) + 1, 4)(index))
    x = layers.concatenate(columns, axis=1)
    column = layers.Embedding(len(WORDS), 4)
    x = x + column(ops.arange(len(WORDS)))
    y = layers.MultiHeadAttention(2, 2, dropout=0.1 * chance)(x, x)
    x = layers.LayerNormalization(epsilon=1e-6)(x + y)
    both = layers.concatenate([inputs[name] for name in NUMBERS])
    x = layers.concatenate([
        layers.Flatten()(x),
        layers.LayerNormalization(epsilon=1e-6)(both),
    ])
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(6, "selu")(x)))


class GatedResidual(layers.Layer):
    """A perceptron that may leave its inputs as they are."""

    def __init__(self, units, chance, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.elu = layers.Dense(units, "elu")
        self.linear = layers.Dense(units)
        self.value, self.gate = layers.Dense(units), layers.Dense(units, "sigmoid")
        self.norm = layers.LayerNormalization()
        self.project = layers.Dense(units)
        self.dropout = layers.Dropout(0.1 * chance)

    def call(self, inputs):
        x = self.dropout(self.linear(self.elu(inputs)))
        if inputs.shape[-1] != self.units:
            inputs = self.project(inputs)
        return self.norm(inputs + self.value(x) * self.gate(x))


class VariableSelection(layers.Layer):
    """Weighs columns by what is in all of them."""

    def __init__(self, columns, units, chance, **kwargs):
        super().__init__(**kwargs)
        self.each = [GatedResidual(units, chance) for _ in range(columns)]
        self.all = GatedResidual(units, chance)
        self.softmax = layers.Dense(columns, "softmax")

    def call(self, inputs):
        weights = ops.expand_dims(
            self.softmax(self.all(layers.concatenate(inputs))), -1
        )
        x = ops.stack([one(x) for one, x in zip(self.each, inputs, strict=True)], 1)
        return ops.squeeze(ops.matmul(ops.transpose(weights, (0, 2, 1)), x), 1)


def gated_residual(chance):
    inputs = inputs_of_table()
    columns = [layers.Dense(4)(inputs[name]) for name in NUMBERS]
    for name, words in WORDS.items():
        index = layers.StringLookup(vocabulary=words)(inputs[name])
        columns.append(layers.Flatten()(layers.Embedding(len(words) + 1, 3)(index)))
    x = VariableSelection(len(columns), 4, chance)(columns)
    return keras.Model(inputs, layers.Dense(1)(x))


class Tree(layers.Layer):
    """A decision tree whose decisions are probabilities."""

    def __init__(self, depth, features, classes, **kwargs):
        super().__init__(**kwargs)
        self.depth, self.leaves = depth, 2**depth
        self.used = np.eye(features)[np.random.default_rng(0).permutation(features)[:3]]
        self.decide = layers.Dense(self.leaves, "sigmoid")
        self.classes = classes

    def build(self, shape):
        self.outcomes = self.add_weight(
            shape=(self.leaves, self.classes), name="outcomes"
        )
        self.decide.build((None, len(self.used)))

    def call(self, x):
        rows = ops.shape(x)[0]
        used = ops.cast(self.used, x.dtype)
        right = ops.expand_dims(self.decide(ops.matmul(x, ops.transpose(used))), 2)
        both = ops.concatenate([right, 1 - right], axis=2)
        reached = ops.ones([rows, 1, 1], x.dtype)
        begin, end = 1, 2
        for level in range(self.depth):
            reached = ops.reshape(reached, (-1, 2**level, 1))
            reached = ops.tile(reached, (1, 1, 2)) * both[:, begin:end, :]
            begin, end = end, end + 2 ** (level + 1)
        reached = ops.reshape(reached, (rows, self.leaves))
        return ops.matmul(reached, self.outcomes)


def decision_forest(_):
    inputs = keras.Input((6,))
    x = layers.LayerNormalization()(inputs)
    trees = [Tree(3, 6, 3)(x) for _ in range(2)]
    return keras.Model(inputs, layers.average(trees))


def features(rng, rows):
    """Draw vectors and classes."""
    return rng.normal(size=(rows, 6)), rng.integers(3, size=rows)


def preprocessing(_):
    """Every layer that makes numbers of what is in a table."""
    inputs = inputs_of_table()
    one_hot = layers.StringLookup(vocabulary=WORDS["work"])(inputs["work"])
    bucket = layers.Discretization([-0.5, 0.5])(inputs["age"])
    parts = [
        layers.Normalization(mean=0.5, variance=2.0)(inputs["hours"]),
        layers.CategoryEncoding(4, output_mode="one_hot")(one_hot),
        layers.CategoryEncoding(3, output_mode="multi_hot")(bucket),
        layers.Flatten()(
            layers.Embedding(5, 3)(layers.Hashing(num_bins=5)(inputs["school"]))
        ),
    ]
    x = layers.Dense(6, "relu")(layers.concatenate(parts))
    return keras.Model(inputs, layers.Dense(1)(x))


def crossed_features(_):
    inputs = inputs_of_table()
    words = inputs["work"], inputs["school"]
    crossed = layers.HashedCrossing(7, output_mode="one_hot")(words)
    x = layers.concatenate([crossed, inputs["age"]])
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(6, "relu")(x)))


def multi_hot(_):
    """Several answers to one question, of which the order says nothing."""
    inputs = keras.Input((4,), dtype="int32")
    many = layers.CategoryEncoding(8, output_mode="multi_hot")(inputs)
    counts = layers.CategoryEncoding(8, output_mode="count")(inputs)
    x = layers.Dense(5, "relu")(layers.concatenate([many, counts]))
    return keras.Model(inputs, layers.Dense(3)(x))


def answers(rng, rows):
    """Draw several answers each."""
    return rng.integers(8, size=(rows, 4)), rng.integers(3, size=rows)


class Recommender(keras.Model):
    """Multiplies vectors of who and what."""

    def __init__(self):
        super().__init__()
        self.users, self.films = layers.Embedding(9, 4), layers.Embedding(7, 4)
        self.user_bias, self.film_bias = layers.Embedding(9, 1), layers.Embedding(7, 1)

    def call(self, x):
        user, film = x[:, 0], x[:, 1]
        likes = ops.sum(self.users(user) * self.films(film), -1, keepdims=True)
        return likes + self.user_bias(user) + self.film_bias(film)


def recommender(_):
    return Recommender()


def ratings(rng, rows):
    """Draw who rates what."""
    x = np.stack([rng.integers(9, size=rows), rng.integers(7, size=rows)], 1)
    return x, rng.random((rows, 1))


def imbalanced(chance):
    return keras.Sequential([
        keras.Input((6,)),
        layers.Dense(8, "relu"),
        layers.Dropout(0.3 * chance),
        layers.Dense(8, "relu"),
        layers.Dense(1),
    ])


class Experts(layers.Layer):
    """Mixes the two of some experts that a gate likes most, for each position."""

    def __init__(self, experts, **kwargs):
        super().__init__(**kwargs)
        self.experts = experts
        self.gate = layers.Dense(experts)

    def build(self, shape):
        self.gate.build(shape)
        of_each = (self.experts, shape[-1], shape[-1])
        self.kernels = self.add_weight(shape=of_each, name="kernels")
        self.offsets = self.add_weight(shape=of_each[:2], name="offsets")

    def call(self, x):
        best, places = ops.top_k(self.gate(x), 2)
        chosen = ops.one_hot(places, self.experts, dtype=x.dtype)
        shares = ops.sum(chosen * ops.softmax(best)[..., None], -2)
        made = ops.relu(ops.einsum("btd,edf->btef", x, self.kernels) + self.offsets)
        return ops.einsum("bte,btef->btf", shares, made)


def experts(_):
    inputs = keras.Input((5, 4))
    x = inputs + Experts(4)(layers.LayerNormalization()(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


class Bonds(layers.Layer):
    """Sends what atoms know along bonds, whose kinds say how."""

    def build(self, shape):
        self.width = shape[0][-1]
        self.kernel = self.add_weight(
            shape=(shape[1][-1], self.width * self.width), name="kernel"
        )
        self.bias = self.add_weight(shape=(self.width * self.width,), name="bias")

    def call(self, inputs):
        atoms, bonds, pairs = inputs
        matrices = ops.matmul(bonds, self.kernel) + self.bias
        square = (-1, bonds.shape[1], self.width, self.width)
        matrices = ops.reshape(matrices, square)
        others = tf.gather(atoms, pairs[:, :, 1], batch_dims=1)
        sent = ops.squeeze(ops.matmul(matrices, others[..., None]), -1)
        goes_to = ops.one_hot(pairs[:, :, 0], atoms.shape[1], dtype=sent.dtype)
        return ops.einsum("ben,bed->bnd", goes_to, sent)


def molecules(_):
    atoms, bonds = keras.Input((5, 3)), keras.Input((6, 2))
    pairs = keras.Input((6, 2), dtype="int32")
    x, send = layers.Dense(4)(atoms), Bonds()
    for _ in range(2):
        x = x + layers.Dense(4, "tanh")(send([x, bonds, pairs]))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model([atoms, bonds, pairs], layers.Dense(1)(x))


def molecules_of(rng, rows):
    x = [
        rng.normal(size=(rows, 5, 3)),
        rng.normal(size=(rows, 6, 2)),
        rng.integers(0, 5, (rows, 6, 2)),
    ]
    return tuple(x), rng.integers(2, size=(rows, 1))


ENTRIES = [
    Entry("experts", experts, images(5, 4), CLASSES, "bookkeeping"),
    Entry("molecules", molecules, molecules_of, YES_OR_NO, "bookkeeping"),
    Entry("wide_and_deep", wide_and_deep, table, YES_OR_NO, "bookkeeping", True),
    Entry("deep_and_cross", deep_and_cross, table, YES_OR_NO, "bookkeeping"),
    Entry("tab_transformer", tab_transformer, table, YES_OR_NO, "bookkeeping"),
    Entry("gated_residual", gated_residual, table, YES_OR_NO, "bookkeeping"),
    Entry("decision_forest", decision_forest, features, CLASSES, "bookkeeping"),
    Entry("preprocessing", preprocessing, table, YES_OR_NO, "bookkeeping"),
    Entry("crossed_features", crossed_features, table, YES_OR_NO, "bookkeeping"),
    Entry("multi_hot", multi_hot, answers, CLASSES, "bookkeeping"),
    Entry("recommender", recommender, ratings, "mse", "bookkeeping"),
    Entry("imbalanced", imbalanced, numbers(6), "huber", "bookkeeping"),
]
