"""Sentences."""

import keras
import numpy as np
from keras import layers, ops

from tests.zoo.entry import CLASSES, YES_OR_NO, Entry, words

LENGTH, IDS, DIM = 6, 12, 8
SENTENCES = 3


class TokenAndPosition(layers.Layer):
    """Embeds words, and where they stand."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(IDS, DIM)
        self.positions = layers.Embedding(LENGTH, DIM)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(0, ops.shape(x)[-1]))


class TransformerBlock(layers.Layer):
    """Attention and a perceptron; a word sees those before it only, if causal."""

    def __init__(self, chance, *, is_causal=False, **kwargs):
        super().__init__(**kwargs)
        self.is_causal = is_causal
        self.attention = layers.MultiHeadAttention(2, DIM // 2)
        self.perceptron = keras.Sequential([
            layers.Dense(2 * DIM, "relu"),
            layers.Dense(DIM),
        ])
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.dropouts = [layers.Dropout(0.1 * chance) for _ in range(2)]

    def call(self, x, training=None):
        y = self.attention(x, x, use_causal_mask=self.is_causal)
        x = self.norms[0](x + self.dropouts[0](y, training=training))
        y = self.dropouts[1](self.perceptron(x), training=training)
        return self.norms[1](x + y)


def transformer_classifier(chance):
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = TransformerBlock(chance)(TokenAndPosition()(inputs))
    x = layers.Dropout(0.1 * chance)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, layers.Dense(3)(x))


def miniature_gpt(chance):
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = TransformerBlock(chance, is_causal=True)(TokenAndPosition()(inputs))
    return keras.Model(inputs, layers.Dense(IDS)(x))


class SinePositions(layers.Layer):
    """Adds positions that are no weights."""

    def call(self, x):
        at = np.arange(LENGTH)[:, None] / 10 ** (np.arange(DIM) / DIM)
        return x + ops.cast(np.sin(at), x.dtype)


def masked_language_model(chance):
    """Learns words that are hidden, its output tied to its embedding."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    tokens = layers.Embedding(IDS, DIM)
    x = TransformerBlock(chance)(SinePositions()(tokens(inputs)))
    x = layers.LayerNormalization()(layers.Dense(DIM, "gelu")(x))
    return keras.Model(inputs, layers.Dense(IDS)(x))


def hidden_words(rng, rows):
    """Draw sentences of which one word is hidden; others have no target."""
    y = rng.integers(2, IDS, (rows, LENGTH))
    x = np.where(rng.random(y.shape) < 0.3, 1, y)
    return x, np.where(x == 1, y, -1)


def hidden_word_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)


def entity_recognition(chance):
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(IDS, DIM, mask_zero=True)(inputs)
    x = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.Dropout(0.1 * chance)(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(4)(x))


def bidirectional_lstm(_):
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(IDS, DIM)(inputs)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(4))(x)
    return keras.Model(inputs, layers.Dense(1)(x))


class LastOfEach(layers.Layer):
    """Takes the output at the last word of each sentence, however long it is."""

    def call(self, ids, outputs):
        last = ops.sum(ops.cast(ids != 0, "int32"), axis=1, keepdims=True) - 1
        return ops.squeeze(ops.take_along_axis(outputs, last[..., None], axis=1), 1)


def last_word(_):
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.GRU(5, return_sequences=True)(layers.Embedding(IDS, DIM)(inputs))
    return keras.Model(inputs, layers.Dense(3)(LastOfEach()(inputs, x)))


def seq2seq_lstm(_):
    source = keras.Input((None, IDS))
    target = keras.Input((None, IDS))
    _, *states = layers.LSTM(5, return_state=True)(source)
    x, *_ = layers.LSTM(5, return_sequences=True, return_state=True)(
        target, initial_state=states
    )
    return keras.Model([source, target], layers.Dense(IDS)(x))


def letters(rng, rows):
    """Draw pairs of words, letter by letter as vectors."""
    letters = np.eye(IDS)[rng.integers(IDS, size=(2, rows, LENGTH))]
    return [*letters], rng.integers(IDS, size=(rows, LENGTH))


class Decoder(layers.Layer):
    """Reads what it has written, then what it translates."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.own = layers.MultiHeadAttention(2, 4)
        self.other = layers.MultiHeadAttention(2, 4)
        self.dense = layers.Dense(DIM, "relu")
        self.norms = [layers.LayerNormalization() for _ in range(3)]

    def call(self, x, encoded):
        x = self.norms[0](x + self.own(x, x, use_causal_mask=True))
        x = self.norms[1](x + self.other(query=x, value=encoded, key=encoded))
        return self.norms[2](x + self.dense(x))


def seq2seq_transformer(chance):
    source = keras.Input((LENGTH,), dtype="int32", name="source")
    target = keras.Input((LENGTH,), dtype="int32", name="target")
    encoded = TransformerBlock(chance)(TokenAndPosition()(source))
    x = Decoder()(TokenAndPosition()(target), encoded)
    inputs = {"source": source, "target": target}
    return keras.Model(inputs, layers.Dense(IDS)(x))


def translations(rng, rows):
    """Draw pairs of sentences."""
    source, target = rng.integers(1, IDS, (2, rows, LENGTH))
    x = {"source": source, "target": target}
    return x, rng.integers(IDS, size=(rows, LENGTH))


class FourierBlock(layers.Layer):
    """Mixes words by their Fourier transform."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(DIM, "gelu")
        self.norm = layers.LayerNormalization()

    def call(self, x):
        mixed, _ = ops.fft2((x, ops.zeros_like(x)))
        return self.norm(x + self.dense(mixed))


def fourier(_):
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = FourierBlock()(layers.Embedding(IDS, DIM)(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def text_cnn(chance):
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Dropout(0.5 * chance)(layers.Embedding(IDS, DIM)(inputs))
    x = layers.Conv1D(4, 3, padding="valid", activation="relu")(x)
    x = layers.Dense(4, "relu")(layers.GlobalMaxPooling1D()(x))
    return keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.5 * chance)(x)))


class Attention(layers.Layer):
    """Adds up what is said, each part by how near it is to a vector of its own."""

    def build(self, shape):
        self.dense = layers.Dense(shape[-1], "tanh")
        self.dense.build(shape)
        self.context = self.add_weight(shape=(shape[-1],), name="context")

    def call(self, x, mask=None):
        scores = ops.tensordot(self.dense(x), self.context, axes=1)
        if mask is not None:
            scores = ops.where(mask, scores, -1e9)
        return ops.sum(x * ops.softmax(scores, axis=1)[..., None], axis=1)

    def compute_mask(self, inputs, mask=None):
        return None


def hierarchical_attention(_):
    """Attends to the words of each sentence, then to the sentences."""
    sentence = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(IDS, DIM, mask_zero=True)(sentence)
    sentences = keras.Model(sentence, Attention()(layers.Dense(DIM, "tanh")(x)))
    text = keras.Input((SENTENCES, LENGTH), dtype="int32")
    x = layers.GRU(4, return_sequences=True)(layers.TimeDistributed(sentences)(text))
    return keras.Model(text, layers.Dense(3)(Attention()(x)))


def texts(rng, rows):
    """Draw sentences of several lengths, some of them for each text."""
    x, _ = words(LENGTH, IDS)(rng, rows * SENTENCES)
    return x.reshape(rows, SENTENCES, LENGTH), rng.integers(3, size=rows)


def raw_text(_):
    """Cuts sentences into words in the model itself."""
    vectorized = layers.TextVectorization(
        IDS, output_sequence_length=LENGTH, vocabulary=["a", "bird", "sings", "again"]
    )
    inputs = keras.Input((1,), dtype="string")
    x = layers.Embedding(IDS, DIM)(vectorized(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def raw_sentences(rng, rows):
    """Draw sentences as strings."""
    known = np.array(["a", "Bird", "sings,", "never", "again!", ""])
    x = [" ".join(known[rng.integers(6, size=5)]) for _ in range(rows)]
    return np.array(x)[:, None], rng.integers(3, size=rows)


WORDS = words(LENGTH, IDS)
NEXT_WORDS = words(LENGTH, IDS, LENGTH, classes=IDS)
ENTITIES = words(LENGTH, IDS, LENGTH, classes=4)
OPINIONS = words(LENGTH, IDS, 1, classes=2)

ENTRIES = [
    Entry(
        "transformer_classifier", transformer_classifier, WORDS, CLASSES, "bookkeeping"
    ),
    Entry("miniature_gpt", miniature_gpt, NEXT_WORDS, CLASSES, "bookkeeping"),
    Entry(
        "masked_language_model",
        masked_language_model,
        hidden_words,
        hidden_word_loss,
        "bookkeeping",
    ),
    Entry("last_word", last_word, words(LENGTH, IDS), CLASSES, "bookkeeping"),
    Entry("entity_recognition", entity_recognition, ENTITIES, CLASSES, "bookkeeping"),
    Entry("bidirectional_lstm", bidirectional_lstm, OPINIONS, YES_OR_NO, "bookkeeping"),
    Entry("seq2seq_lstm", seq2seq_lstm, letters, CLASSES, "bookkeeping"),
    Entry(
        "seq2seq_transformer",
        seq2seq_transformer,
        translations,
        CLASSES,
        "bookkeeping",
    ),
    Entry("fourier", fourier, WORDS, CLASSES, "bookkeeping"),
    Entry("text_cnn", text_cnn, OPINIONS, YES_OR_NO, "bookkeeping"),
    Entry(
        "hierarchical_attention",
        hierarchical_attention,
        texts,
        CLASSES,
        "bookkeeping",
    ),
    Entry("raw_text", raw_text, raw_sentences, CLASSES, "bookkeeping"),
]
