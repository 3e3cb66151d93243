"""Texts are cut into words, and become rows again: each from its own words alone."""

import pytest
import tensorflow as tf

from tests.checks.test_rows import found, is_proven


def words_of(x, column=0):
    """Cut numbers at their points, which makes two words of each."""
    return tf.strings.split(tf.strings.as_string(x[:, column]), ".")


def numbered(words):
    return words.with_values(tf.strings.to_hash_bucket_fast(words.values, 100))


def padded(words, **options):
    return numbered(words).to_tensor(shape=[None, 3], **options)


def counts(words, **options):
    options = {"minlength": 4, "maxlength": 4, **options}
    return tf.math.bincount(numbered(words), axis=-1, **options)


def in_pairs(words):
    return tf.strings.ngrams(words, 2)


def crossed(x):
    columns = [tf.strings.as_string(x[:, :2]), tf.strings.as_string(x[:, 2:])]
    return tf.sparse.cross_hashed(columns, 7)


def dense(cross):
    made = tf.sparse.to_dense(cross)
    made.set_shape([None, 2])
    return made


PROVEN = {
    "padded": lambda x: padded(words_of(x)),
    "counted": lambda x: counts(words_of(x)),
    "counted once": lambda x: counts(words_of(x), binary_output=True),
    "pairs": lambda x: padded(in_pairs(words_of(x))),
    "counted pairs": lambda x: counts(in_pairs(words_of(x))),
    "two texts": lambda x: padded(words_of(x)) + padded(words_of(x, 1)),
    "crossed": lambda x: dense(crossed(x)),
    "a sum of each text": lambda x: tf.reduce_sum(padded(words_of(x)), 1),
}


def reversed_words(words):
    return words.with_values(tf.reverse(words.values, [0]))


def of_another(x):
    return words_of(x).with_values(words_of(x, 1).values)


def moved_on(words):
    return words.with_values(tf.roll(words.values, 1, 0))


def cut_by_function(x):
    @tf.function(autograph=False)
    def cut(texts):
        return tf.strings.split(texts, ".").values

    one, other = (cut(tf.strings.as_string(x[:, n])) for n in (0, 1))
    hashed = [tf.strings.to_hash_bucket_fast(each, 9) for each in (one, other)]
    return words_of(x).with_values(hashed[0] + hashed[1]).to_tensor(shape=[None, 2])


def with_values_of(cross, function):
    return tf.SparseTensor(cross.indices, function(cross.values), cross.dense_shape)


def later_rows(words):
    """Take the words for those of the next row."""
    ids = tf.maximum(words.value_rowids() - 1, 0)
    return tf.RaggedTensor.from_value_rowids(words.values, ids, words.nrows())


def wrapped_rows(words):
    """Row 256 is taken for row 0."""
    ids = tf.cast(tf.cast(words.value_rowids(), tf.uint8), tf.int64)
    parts = {"value_rowids": ids, "nrows": words.nrows(), "validate": False}
    return tf.RaggedTensor.from_value_rowids(words.values, **parts)


def changed(x, change, values=tf.strings.length):
    """Pad what is made of the words, and of something else."""
    words = words_of(x)
    return words.with_values(change(values(words.values))).to_tensor(shape=[None, 3])


def longest(x):
    """How many words the longest text has."""
    return tf.strings.split(tf.strings.as_string(x[:, 0]), ".").bounding_shape()[1]


def longest_of_a_cut(x):
    cut = tf.raw_ops.StringSplitV2(input=tf.strings.as_string(x[:, 0]), sep=".")
    return tf.cast(cut.shape[1], tf.int32), cut


def with_the_longest(x):
    length, cut = longest_of_a_cut(x)
    return tf.raw_ops.RaggedTensorToTensor(
        shape=tf.constant([-1, 3], tf.int64),
        values=tf.strings.length(cut.values) + length,
        default_value=0,
        row_partition_tensors=[cut.shape[0], cut.indices[:, 0]],
        row_partition_types=["FIRST_DIM_SIZE", "VALUE_ROWIDS"],
    )


NOT_PROVEN = {
    "places among all words": lambda x: changed(x, lambda v: v + tf.range(tf.size(v))),
    "how many words there are": lambda x: changed(x, lambda v: v + tf.size(v)),
    "how many, by shape": lambda x: changed(x, lambda v: v + tf.shape(v)[0]),
    "the longest text": with_the_longest,
    "the longest text, bounded": lambda x: changed(
        x, lambda v: v + tf.cast(longest(x), tf.int32)
    ),
    "crossed, and the number of rows": lambda x: dense(
        with_values_of(crossed(x), lambda v: v + tf.reduce_sum(crossed(x).dense_shape))
    ),
    "a table as long as there are words": lambda x: changed(
        x, lambda v: v + tf.constant([1, 2])
    ),
    "row numbers that wrap around": lambda x: padded(wrapped_rows(words_of(x))),
    "as long as the longest": lambda x: numbered(words_of(x)).to_tensor(),
    "reversed": lambda x: padded(reversed_words(words_of(x))),
    "reversed and counted": lambda x: counts(reversed_words(words_of(x))),
    "moved on": lambda x: padded(moved_on(words_of(x))),
    "words of another text": lambda x: padded(of_another(x)),
    "counted words of another text": lambda x: counts(of_another(x)),
    "of the row before": lambda x: padded(later_rows(words_of(x))),
    "the largest of all words": lambda x: (
        padded(words_of(x)) * tf.reduce_max(numbered(words_of(x)).values)
    ),
    "how many words": lambda x: (
        padded(words_of(x)) * tf.size(words_of(x).values, tf.int64)
    ),
    "which row": lambda x: (
        words_of(x).with_values(words_of(x).value_rowids()).to_tensor(shape=[None, 3])
    ),
    "words themselves": lambda x: tf.strings.length(words_of(x).values),
    "as many words as counted": lambda x: counts(
        words_of(x), minlength=None, maxlength=None
    ),
    "a default of all": lambda x: padded(
        words_of(x), default_value=tf.cast(tf.reduce_max(x), tf.int64)
    ),
    "two calls of one function": cut_by_function,
    "crossed columns reversed": lambda x: dense(
        with_values_of(crossed(x), lambda values: tf.reverse(values, [0]))
    ),
    "crossed and added up": lambda x: dense(
        with_values_of(crossed(x), lambda values: values + tf.reduce_sum(values))
    ),
    "pairs over the rows": lambda x: padded(in_pairs(reversed_words(words_of(x)))),
}


@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("rows", [None, 5])
def test_rows_keep_their_words(name, rows):
    causes = found(PROVEN[name], (4,), rows=rows)
    assert [str(each.operation) for each in causes] == []


@pytest.mark.parametrize("name", NOT_PROVEN)
@pytest.mark.parametrize("rows", [None, 5])
def test_what_else_becomes_of_words_is_not_known(name, rows):
    assert not is_proven(NOT_PROVEN[name], (4,), rows=rows)
