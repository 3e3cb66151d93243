"""The batches that tfdp draws as a `tf.data` pipeline, several draws at a time."""

import itertools
import threading
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from tfdp._types import Array, Nest, Tensor
from tfdp.data.drawn_dataset import DrawnDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

# What one call of Python reads: so many draws, and bytes, unless one draw has more. To
# copy more takes longer than the call.
_MOST_DRAWS, _MOST_BYTES = 64, 1 << 18

# Iterators of one pipeline that are read at the same time.
_MOST_ITERATORS = 64


def is_read_by_one_thread(data: DrawnDataset) -> bool:
    """Tell whether nothing is lost if batches are read one after the other.

    Args:
        data: What is drawn from.

    Returns:
        False where rows are read from files, which takes several threads, or by
        `__getitem__` of a subclass.
    """
    return (
        type(data).__getitem__ is DrawnDataset.__getitem__
        and data.workers <= 1
        and all(rows.is_in_memory for rows in keras.tree.flatten(data.rows))
    )


def pipeline_of(data: DrawnDataset, *, is_endless: bool = False) -> tf.data.Dataset:
    """Return the batches of one epoch, or of all, as a stream that TensorFlow reads ahead.

    Keras asks a `keras.utils.PyDataset` for single batches: ahead, in threads, twice
    for the first ones, and again for those of an epoch that has ended early. Where the
    batches of an epoch are parts of one draw, it must not mix those of two. And each of
    them costs a third of a millisecond, whatever is in it: here some come together, and
    TensorFlow takes them apart.

    Guarantees:
        Each iterator has the batches of epochs of its own, in order and each once. What
        is read ahead and not asked for is never drawn again.

    Args:
        data: What is drawn from.
        is_endless: Whether epochs follow each other without an end, so that one iterator
            serves a whole `fit`: to make one, and to wait for its first batch, takes as
            long as some steps.

    Returns:
        Batches as `data[0]`, of any size; as many as an epoch has, or without an end.
    """
    nothing = data.batch_of(np.array([], np.int64))
    leaves = keras.tree.flatten(nothing)
    draws = _draws_at_once(data, leaves)
    reader = _Blocks(data, draws, is_endless=is_endless)
    number_of_blocks = np.iinfo(np.int64).max if is_endless else -(-len(data) // draws)
    dtypes = [tf.int64, *(tf.as_dtype(leaf.dtype) for leaf in leaves)]
    shapes = [[None], *([None, *leaf.shape[1:]] for leaf in leaves)]

    def blocks(iterator_number: Tensor) -> tf.data.Dataset:
        def block(number: Tensor) -> list[Tensor]:
            read = tf.numpy_function(reader.read, [iterator_number, number], dtypes)
            return [tf.ensure_shape(*pair) for pair in zip(read, shapes, strict=True)]

        # One after the other: they are in order.
        return tf.data.Dataset.range(number_of_blocks).map(block)

    def batches(ends: Tensor, *rows: Tensor) -> tf.data.Dataset:
        def batch(place: Tensor) -> Nest:
            first, past = ends[place], ends[place + 1]
            return keras.tree.pack_sequence_as(nothing, [r[first:past] for r in rows])

        return tf.data.Dataset.range(tf.size(ends, tf.int64) - 1).map(batch)

    # An iterator gets a number first, by which `_Blocks` knows its draws.
    begun = tf.data.Dataset.range(1).map(
        lambda _: tf.ensure_shape(tf.numpy_function(reader.begin, [], tf.int64), [])
    )
    stream = begun.flat_map(blocks)
    if draws == 1:
        stream = stream.map(lambda _, *rows: keras.tree.pack_sequence_as(nothing, rows))
    else:
        stream = stream.flat_map(batches)
    if not is_endless:
        stream = stream.apply(tf.data.experimental.assert_cardinality(len(data)))
    # Nothing here has a number of threads to be tuned, and an iterator that is freed
    # sometimes waits for its tuner, up to a minute.
    options = tf.data.Options()
    options.autotune.enabled = False
    return stream.prefetch(tf.data.AUTOTUNE).with_options(options)


class _Blocks:
    """Reads the draws of epochs, some at a time.

    Args:
        data: What is drawn from.
        draws: How many at a time.
        is_endless: Whether an iterator goes on with epoch after epoch.
    """

    def __init__(self, data: DrawnDataset, draws: int, *, is_endless: bool) -> None:
        self._data = data
        self._draws = draws
        self._is_endless = is_endless
        self._lock = threading.Lock()
        self._begun = itertools.count()
        # What is left of the epochs of each iterator, those of the last ones alone: who
        # has dropped an iterator does not say so.
        self._remaining: dict[int, Iterator[NDArray[np.int64]]] = {}

    def begin(self) -> Array:
        """Begin the epochs of an iterator, and return a number for it."""
        with self._lock:
            number = next(self._begun)
            epochs = itertools.count() if self._is_endless else range(1)
            self._remaining[number] = itertools.chain.from_iterable(
                self._data.draws_of_an_epoch() for _ in epochs
            )
            self._remaining.pop(number - _MOST_ITERATORS, None)
        return np.asarray(number)

    def read(self, iterator_number: Array, number: Array) -> list[Array]:
        """Return where each draw of a block ends, from 0 on, and the rows of all."""
        del number  # They come in order.
        with self._lock:
            draws = list(
                itertools.islice(self._remaining[int(iterator_number)], self._draws)
            )
        ends = np.cumsum([0, *map(len, draws)], dtype=np.int64)
        rows = [self._data.batch_of(indices) for indices in draws]
        leaves = zip(*map(keras.tree.flatten, rows), strict=True)
        return [ends, *(_joined(each) for each in leaves)]


def _joined(parts: tuple[Array, ...]) -> Array:
    arrays = [np.asarray(part) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _draws_at_once(data: DrawnDataset, leaves: list[Array]) -> int:
    of_row = sum(
        np.prod(leaf.shape[1:]) * tf.as_dtype(leaf.dtype).size for leaf in leaves
    )
    rows = data.expected_batch_size or data.number_of_rows
    rows *= data.scheme.rows_per_example
    return int(np.clip(_MOST_BYTES // max(1, of_row * rows), 1, _MOST_DRAWS))
