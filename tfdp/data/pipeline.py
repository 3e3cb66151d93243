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


def pipeline_of(data: DrawnDataset) -> tf.data.Dataset | None:
    """Return the batches of an epoch for TensorFlow to read ahead.

    A `keras.utils.PyDataset` costs a third of a millisecond for each batch, whatever is
    in it: each one comes from Python by itself. Here some draws come together, and
    TensorFlow takes them apart. Every iteration has draws that none had before.

    Args:
        data: What is drawn from.

    Returns:
        Batches as `data[0]`, of any size; as many as an epoch has. None where rows are
        read from files, by several threads, or by `__getitem__` of a subclass.
    """
    is_plain = type(data).__getitem__ is DrawnDataset.__getitem__
    sources = keras.tree.flatten(data.rows)
    if not is_plain or data.workers > 1 or not all(s.is_in_memory for s in sources):
        return None
    nothing = data.batch_of(np.array([], np.int64))
    leaves = keras.tree.flatten(nothing)
    draws = _draws_at_once(data, leaves)
    reader = _Blocks(data, draws)
    dtypes = [tf.int64, *(tf.as_dtype(leaf.dtype) for leaf in leaves)]
    shapes = [[None], *([None, *leaf.shape[1:]] for leaf in leaves)]

    def block(number: Tensor) -> list[Tensor]:
        read = tf.numpy_function(reader.read, [number], dtypes)
        return [tf.ensure_shape(*pair) for pair in zip(read, shapes, strict=True)]

    def batches(ends: Tensor, *rows: Tensor) -> tf.data.Dataset:
        def batch(place: Tensor) -> Nest:
            first, past = ends[place], ends[place + 1]
            return keras.tree.pack_sequence_as(nothing, [r[first:past] for r in rows])

        return tf.data.Dataset.range(tf.size(ends, tf.int64) - 1).map(batch)

    numbers = tf.data.Dataset.range(-(-len(data) // draws))
    # One after the other: the first block of an iteration begins an epoch.
    blocks = numbers.map(block)
    if draws == 1:
        alone = blocks.map(lambda _, *rows: keras.tree.pack_sequence_as(nothing, rows))
        return alone.prefetch(tf.data.AUTOTUNE)
    known = tf.data.experimental.assert_cardinality(len(data))
    return blocks.flat_map(batches).apply(known).prefetch(tf.data.AUTOTUNE)


class _Blocks:
    """Reads the draws of an epoch, some at a time.

    Args:
        data: What is drawn from.
        draws: How many at a time.
    """

    def __init__(self, data: DrawnDataset, draws: int) -> None:
        self._data = data
        self._draws = draws
        self._remaining: Iterator[NDArray[np.int64]] = iter(())
        self._lock = threading.Lock()

    def read(self, number: Array) -> list[Array]:
        """Return where each draw of a block ends, from 0 on, and the rows of all."""
        with self._lock:
            if number == 0:
                self._remaining = self._data.draws_of_next_epoch()
            draws = list(itertools.islice(self._remaining, self._draws))
        ends = np.cumsum([0, *map(len, draws)], dtype=np.int64)
        rows = self._data.batch_of(np.concatenate([np.array([], np.int64), *draws]))
        return [ends, *map(np.asarray, keras.tree.flatten(rows))]


def _draws_at_once(data: DrawnDataset, leaves: list[Array]) -> int:
    of_row = sum(
        np.prod(leaf.shape[1:]) * tf.as_dtype(leaf.dtype).size for leaf in leaves
    )
    rows = data.expected_batch_size or data.number_of_examples
    rows *= data.scheme.rows_per_example
    return int(np.clip(_MOST_BYTES // max(1, of_row * rows), 1, _MOST_DRAWS))
