"""Layers that have weights of their own beside the layers in them."""

import keras
from keras import layers, ops

from tests.zoo.entry import CLASSES, Entry, images, words

LENGTH, IDS, DIM = 6, 12, 8


class LayerScale(layers.Layer):
    """A block beside a shortcut, with a factor for each channel."""

    def __init__(self, *stack, **kwargs):
        super().__init__(**kwargs)
        self.stack = list(stack)

    def build(self, shape):
        self.gamma = self.add_weight(shape=shape[-1:], initializer="ones", name="gamma")

    def call(self, x):
        y = x
        for layer in self.stack:
            y = layer(y)
        return x + y * self.gamma


class ClassAttention(layers.Layer):
    """Attention from a class token, which it has itself, to the patches."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, DIM // 2)

    def build(self, shape):
        start = keras.initializers.RandomNormal(seed=1)
        self.token = self.add_weight(shape=(1, 1, DIM), initializer=start, name="token")

    def call(self, x):
        token = ops.tile(self.token, (ops.shape(x)[0], 1, 1))
        seen = self.norm(ops.concatenate([token, x], axis=1))
        return ops.squeeze(token + self.attention(seen[:, :1], seen), 1)


class LocalityAttention(layers.MultiHeadAttention):
    """Attention with a learned temperature, for small data sets."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        start = keras.initializers.Constant(1.5)
        self.tau = self.add_weight(shape=(), initializer=start, name="tau")

    def _compute_attention(self, query, *args, **options):
        return super()._compute_attention(query * (1.0 / self.tau), *args, **options)


def patches(chance):
    x = keras.Input((8, 8, 3))
    return x, layers.Reshape((4, DIM))(layers.Conv2D(DIM, 4, 4)(x))


def cait(chance):
    inputs, x = patches(chance)
    for _ in range(2):
        x = LayerScale(
            layers.LayerNormalization(),
            layers.Dense(2 * DIM, "gelu"),
            layers.Dropout(0.1 * chance),
            layers.Dense(DIM),
        )(x)
    return keras.Model(inputs, layers.Dense(3)(ClassAttention()(x)))


def vit_for_small_data(chance):
    inputs, x = patches(chance)
    mask = 1 - ops.eye(4, dtype="int8")[None]
    attention = LocalityAttention(
        num_heads=2, key_dim=DIM // 2, dropout=0.1 * chance, flash_attention=False
    )
    x = layers.Add()([x, attention(x, x, attention_mask=mask)])
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


class MaskedAutoencoder(keras.Model):
    """Puts a learned token in the place of patches, which it has to draw."""

    def __init__(self, chance):
        super().__init__()
        self.chance = chance
        self.encode, self.decode = layers.Dense(DIM), layers.Dense(5)
        self.positions = layers.Embedding(LENGTH, DIM)
        self.attention = layers.MultiHeadAttention(2, DIM // 2)
        self.seed_generator = keras.random.SeedGenerator(1)
        start = keras.initializers.RandomNormal(seed=1)
        self.token = self.add_weight(shape=(1, DIM), initializer=start, name="token")

    def call(self, x):
        shape = (ops.shape(x)[0], LENGTH)
        order = keras.random.uniform(shape, seed=self.seed_generator) * self.chance
        order = ops.cast(order, x.dtype) + ops.cast(ops.arange(LENGTH), x.dtype) * (
            1 - self.chance
        )
        is_hidden = order[..., None] > ops.sort(order, axis=-1)[:, 2:3, None]
        positions = self.positions(ops.arange(LENGTH))
        h = ops.where(is_hidden, self.token, self.encode(x)) + positions
        drawn = self.decode(h + self.attention(h, h))
        return ops.where(is_hidden, drawn - x, 0)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return ops.mean(ops.square(y_pred))


class TiedModel(keras.Model):
    """A language model whose logits are products with its embeddings."""

    def __init__(self, chance):
        super().__init__()
        self.words = layers.Embedding(IDS, DIM)
        self.over_time = layers.GRU(DIM, return_sequences=True)
        self.dropout = layers.Dropout(0.1 * chance)
        self.bias = self.add_weight(shape=(IDS,), initializer="zeros", name="bias")

    def call(self, x, training=None):
        h = self.dropout(self.over_time(self.words(x)), training=training)
        return ops.matmul(h, ops.transpose(self.words.embeddings)) + self.bias


IMAGES = images(8, 8, 3)

ENTRIES = [
    Entry("cait", cait, IMAGES, CLASSES, "bookkeeping"),
    Entry("vit_for_small_data", vit_for_small_data, IMAGES, CLASSES, "bookkeeping"),
    Entry(
        "masked_autoencoder",
        MaskedAutoencoder,
        images(LENGTH, 5, classes=None),
        None,
        "bookkeeping",
    ),
    Entry(
        "tied_language_model",
        TiedModel,
        words(LENGTH, IDS, LENGTH, classes=IDS),
        CLASSES,
        "bookkeeping",
        is_quick=True,
    ),
]
