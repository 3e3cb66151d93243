"""A vectorized map that keeps rows apart where TensorFlow's own does not."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest, Tensor

# An operation and its converted inputs; TensorFlow has no public name for the class.
PforInput: TypeAlias = Any


def vectorized_map(function: Any, elements: Nest) -> Nest:
    """Apply a function to every element, as `tf.vectorized_map` is meant to.

    TensorFlow converts some operations such that elements meet: a roll along an axis
    that is counted from the end runs along the elements; entries whose number of a
    segment is out of range, as in the gradient of a gather on GPUs and under XLA, go
    to the segments of other elements; and under XLA what is as long as its data say
    has the same length for all elements.

    Args:
        function: Takes a nest of tensors, one element of each.
        elements: The tensors, with the elements on their leading axes.

    Returns:
        What the function returns, stacked.

    Raises:
        Exception: Of any kind, if the function cannot be vectorized.
    """
    converters = {
        "Roll": _convert_roll,
        **dict.fromkeys(_SEGMENTS, _convert_segments),
        **dict.fromkeys(_SPARSE_SEGMENTS + _AS_LONG_AS_DATA_SAY, _refuse),
    }
    with _keras.pfor_converters(converters), _without_messages():
        return tf.vectorized_map(function, elements, warn=False)  # noqa: TID251


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Keep TensorFlow from logging pages about what it cannot vectorize: one line does."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("CRITICAL")
    try:
        yield
    finally:
        logger.setLevel(level)


_SEGMENTS = tuple(f"UnsortedSegment{name}" for name in ("Sum", "Max", "Min", "Prod"))
_SPARSE_SEGMENTS = tuple(
    f"SparseSegment{name}{more}"
    for name in ("Sum", "Mean", "SqrtN")
    for more in ("", "WithNumSegments", "Grad")
)
_AS_LONG_AS_DATA_SAY = (
    *("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"),
    "DynamicPartition",
)


def _convert_roll(pfor_input: PforInput) -> Tensor:
    pfor_input.stack_inputs([0])
    rows = pfor_input.stacked_input(0)
    shift, is_stacked, _ = pfor_input.input(1)
    axis = pfor_input.unstacked_input(2)
    if is_stacked:
        return tf.map_fn(
            lambda row: tf.roll(*row, axis),
            (rows, shift),
            fn_output_signature=tf.TensorSpec(rows.shape[1:], rows.dtype),
        )
    return tf.roll(rows, shift, tf.where(axis < 0, axis, axis + 1))


def _convert_segments(pfor_input: PforInput) -> Tensor:
    pfor_input.stack_inputs([0, 1])
    data, places = pfor_input.stacked_input(0), pfor_input.stacked_input(1)
    # In int64: the product with the number of elements may be long.
    number = tf.cast(pfor_input.unstacked_input(2), tf.int64)
    places = tf.cast(places, tf.int64)
    of_each = tf.range(tf.shape(places, tf.int64)[0]) * number
    moved = places + tf.reshape(of_each, [-1] + [1] * (places.shape.rank - 1))
    # What belongs to no segment of its element belongs to none of another.
    is_known = (places >= 0) & (places < number)
    reduced = getattr(tf.raw_ops, pfor_input.op_type)(
        data=data,
        segment_ids=tf.where(is_known, moved, -1),
        num_segments=number * tf.shape(places, tf.int64)[0],
    )
    lengths = tf.concat([[-1, number], tf.shape(reduced, tf.int64)[1:]], 0)
    return tf.reshape(reduced, lengths)


def _refuse(pfor_input: PforInput) -> Tensor:
    raise NotImplementedError(f"{pfor_input.op_type} may let elements meet")
