"""Keras's preprocessing inside of a model, of a table of words and numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.zoo.entry import engine_of
from tfdp.checks.engine import choose
from tfdp.engines import BookkeepingEngine
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Objective

ROWS = 12
WORDS = ["bread", "milk", "tea"]


def indexed(name, dtype, index, width=1):
    """A column whose numbers of categories are embedded."""
    column = keras.Input((width,), name=name, dtype=dtype)
    return column, layers.Flatten()(layers.Embedding(9, 2)(index(column)))


def encoded(name, dtype, encode, width=1):
    """A column that becomes numbers."""
    column = keras.Input((width,), name=name, dtype=dtype)
    return column, encode(column)


def columns():
    """Pairs of an input and what is made of it."""
    yield indexed("lookup", "string", layers.StringLookup(vocabulary=WORDS))
    yield indexed("numbers", "int64", layers.IntegerLookup(vocabulary=[3, 5, 7]))
    yield indexed("hashed", "string", layers.Hashing(5, salt=3), 2)
    yield indexed("hashed_number", "int64", layers.Hashing(5))
    yield indexed("bucket", "float32", layers.Discretization([-0.5, 0.5]))
    for mode in ("one_hot", "multi_hot", "count"):
        width = 1 if mode == "one_hot" else 3
        lookup = layers.StringLookup(vocabulary=WORDS, output_mode=mode)
        yield encoded(f"lookup_{mode}", "string", lookup, width)
        encoding = layers.CategoryEncoding(9, output_mode=mode)
        yield encoded(f"category_{mode}", "int64", encoding, width)
    lookup = layers.StringLookup(
        vocabulary=WORDS, idf_weights=[1.0, 2.0, 3.0], output_mode="tf_idf"
    )
    yield encoded("lookup_tf_idf", "string", lookup, 3)
    normalization = layers.Normalization(mean=1.0, variance=2.0)
    yield encoded("normalized", "float32", normalization, 2)


def sentences():
    """Words of a text, and what two columns have in common."""
    text = keras.Input((), name="text", dtype="string")
    vectorize = layers.TextVectorization(vocabulary=WORDS, output_sequence_length=4)
    embedded = layers.Embedding(9, 2, mask_zero=True)(vectorize(text))
    yield text, layers.GlobalAveragePooling1D()(embedded)
    counted = keras.Input((), name="counted", dtype="string")
    count = layers.TextVectorization(
        vocabulary=[*WORDS, "milk tea"], ngrams=2, output_mode="count"
    )
    yield counted, count(counted)
    one = keras.Input((1,), name="one", dtype="string")
    crossed = layers.HashedCrossing(7, output_mode="one_hot")
    yield one, crossed([one, keras.ops.copy(one)])


def table(inputs):
    """Rows of the inputs, as NumPy arrays by their names."""
    rng = np.random.default_rng(0)

    def draw(tensor):
        shape = (ROWS, *tensor.shape[1:])
        if tensor.dtype == "string":
            words = np.array([*WORDS, "?", "milk tea"])
            return words[rng.integers(len(words), size=shape)]
        if tensor.dtype == "int64":
            return rng.integers(9, size=shape)
        return rng.normal(size=shape).astype("float32")

    return {tensor.name: draw(tensor) for tensor in inputs}, rng.normal(size=(ROWS, 1))


def check(pairs, engine):
    inputs, parts = zip(*pairs, strict=True)
    named = {tensor.name: tensor for tensor in inputs}
    x, y = table(inputs)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(6)
    declared = tfdp.data.declare(
        rows, number_of_examples=ROWS, expected_batch_size=6, sampling="shuffle"
    )
    model = keras.Model(named, layers.Dense(1)(layers.concatenate(parts)))
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    private.fit(x, y, batch_size=6, verbose=0)
    assert engine_of(private) == engine
    private.fit(declared, verbose=0)
    assert engine_of(private) == engine

    tensors = {name: tf.constant(column) for name, column in x.items()}
    found = tfdp.clipped_gradients(model, "mse", tensors, y, l2_norm_clip=0.1).norms
    for row, norm in enumerate(found):
        one = {name: column[row : row + 1] for name, column in tensors.items()}
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(one) - y[row]))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        np.testing.assert_allclose(norm, tf.linalg.global_norm(gradients), rtol=1e-4)


@pytest.mark.slow
def test_a_table_trains_by_book_keeping():
    check(columns(), "bookkeeping")


@pytest.mark.slow
def test_words_of_a_text_train_by_book_keeping():
    check(sentences(), "bookkeeping")


@pytest.mark.slow
def test_texts_as_long_as_the_longest_are_taken_row_by_row():
    """How many positions a mean is taken over is up to the other rows otherwise."""
    text = keras.Input((), name="text", dtype="string")
    ids = layers.TextVectorization(vocabulary=WORDS)(text)
    mean = layers.GlobalAveragePooling1D()(layers.Embedding(9, 2)(ids))
    check([(text, mean)], "apart")


def test_loops_over_the_words_of_the_longest_are_told_of_a_length():
    """Of a text without words no such loop has a last state, in plain Keras either."""
    text = keras.Input((), name="text", dtype="string")
    ids = layers.TextVectorization(vocabulary=WORDS)(text)
    words = layers.Embedding(9, 2, mask_zero=True)(ids)
    with pytest.raises(UnsupportedLayerError, match="output_sequence_length=200"):
        check([(text, layers.Bidirectional(layers.LSTM(2))(words))], "apart")


@keras.saving.register_keras_serializable("tests")
class Remembering(layers.Layer):
    """Keeps how many words there were, where they were cut."""

    def build(self, _):
        self.words = self.add_weight(shape=(), trainable=False, name="words")

    def call(self, x):
        words = tf.strings.split(x).values
        self.words.assign_add(
            tf.cast(tf.reduce_max(tf.strings.length(words)), "float32")
        )
        return tf.cast(tf.strings.length(x), "float32")[:, None]


@keras.saving.register_keras_serializable("tests")
class Listing(layers.Layer):
    """Keeps the words, in no variable."""

    def build(self, _):
        self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int32, 0)

    def call(self, x):
        words = tf.strings.split(x).values
        self.table.insert(words, tf.strings.length(words))
        return tf.cast(tf.strings.length(x), "float32")[:, None]


def text_model(*stack):
    return keras.Sequential([keras.Input((), dtype="string"), *stack, layers.Dense(1)])


def chosen(model):
    batch = tf.constant(["milk tea", "tea"]), np.zeros((2, 1)), None
    return choose("auto", Objective.of(model, "mse"), batch)


def test_words_that_are_counted_are_not_refused():
    count = layers.TextVectorization(vocabulary=WORDS, output_mode="count")
    assert chosen(text_model(count)) == BookkeepingEngine()


@pytest.mark.parametrize(
    ("layer", "named"), [(Remembering, "words"), (Listing, "keeps them")]
)
def test_what_keeps_something_of_words_is_refused(layer, named):
    """Rows by themselves would still read it."""
    with pytest.raises(UnsupportedLayerError, match=named):
        chosen(text_model(layer()))
