"""Batches that tfdp draws, as a pipeline each iteration of which is one pass."""

from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdp._types import Nest
from tfdp.data.drawn_dataset import DrawnDataset


def in_passes(data: DrawnDataset) -> tf.data.Dataset:
    """Return the batches of an epoch as one stream.

    Keras asks a `keras.utils.PyDataset` for single batches: ahead, in threads, twice
    for the first ones, and again for those of an epoch that has ended early. Where the
    batches of an epoch are parts of one draw, it must not mix those of two.

    Guarantees:
        Each iterator has the batches of an epoch of its own, in order and each once.

    Args:
        data: Draws them.

    Returns:
        A dataset of ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``.
    """

    def batches() -> Iterator[Nest]:
        for indices in data.draws_of_an_epoch():
            yield data.batch_of(indices)

    def spec(rows: Nest) -> tf.TensorSpec:
        return tf.TensorSpec([None, *rows.shape[1:]], rows.dtype)

    nothing = data.batch_of(np.array([], np.int64))
    stream = tf.data.Dataset.from_generator(
        batches, output_signature=keras.tree.map_structure(spec, nothing)
    )
    length = tf.data.experimental.assert_cardinality(len(data))
    return stream.apply(length).prefetch(tf.data.AUTOTUNE)
