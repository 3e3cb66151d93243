"""Convolutions in which oneDNN reads, on CPUs, memory that other rows may have left."""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor
from tfdp.errors import UnsupportedLayerError


def fault_of_onednn(
    inputs: Tensor, kernel: Tensor, outputs: Tensor, *, strides: Sequence[int]
) -> str | None:
    """Say in which case a convolution reads memory of other rows.

    Args:
        inputs: Shape ``(R, *spatial, C)``, or with several axes of rows.
        kernel: Shape ``(*kernel size, C / groups, O)``.
        outputs: What it makes of them.
        strides: One for each axis of the inputs.

    Returns:
        Words to go behind the name of an operation; None if no fault is known.
    """
    if None in (inputs.shape.rank, kernel.shape.rank, outputs.shape.rank):
        return (
            "of tensors of unknown rank may read memory of other rows (say what shape they "
            "have: `tf.ensure_shape(x, (None, 28, 28, 3))`)"
        )
    if inputs.dtype == tf.bfloat16 and not _keras.has_gpus():
        # Seen in so many cases that no list of them is to be trusted.
        if all(size == 1 for size in kernel.shape[:-2]):
            return None
        return (
            "in bfloat16 may read memory of other rows (in float32 it does not; those of "
            "Keras and of `tf.nn` are made so)"
        )
    *_, along_rows, along_columns, _ = strides
    *_, rows, columns, _ = outputs.shape
    *_, of_columns, channels, _ = kernel.shape
    # Seen in batches of two rows and more, whatever there is along the depth.
    is_uneven = along_rows == 1 < along_columns and of_columns != 1
    if channels in (None, 1) and is_uneven and rows != 1 and columns in (None, 1):
        return (
            "of one channel, to one column, by different strides reads memory of other rows "
            f"(by the same stride along rows and columns it does not: `strides={along_columns}`)"
        )
    return None


def convolutions_of_rows() -> contextlib.AbstractContextManager[None]:
    """Return a context in which convolutions do not read memory of other rows.

    Also where each row goes through a model by itself: TensorFlow's vectorized map puts all
    rows into one convolution.

    Returns:
        Within it those of Keras and of `tf.nn` are made in float32, where in bfloat16 they
        would, and raise `UnsupportedLayerError` where nothing else helps.
    """
    return _keras.convolutions_replaced(_refuse)


def _refuse(
    inputs: Tensor, kernel: Tensor, outputs: Tensor, strides: Sequence[int]
) -> None:
    fault = fault_of_onednn(inputs, kernel, outputs, strides=strides)
    if fault is not None:
        raise UnsupportedLayerError(
            "A convolution must read nothing but its own row. Received: inputs of shape "
            f"{inputs.shape}, a kernel of shape {kernel.shape}, strides={list(strides)}, "
            f"which {fault}, by a fault of oneDNN on CPUs."
        )
