"""Rows of data on their way to the losses, and how many there are."""

from typing import NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._types import Nest, Padded, Tensor

_EQUAL_ROWS = (
    "`x`, `y` and `sample_weight` must have the same number of rows, one for each "
    "example."
)


class Batch(NamedTuple):
    """Rows of data on their way through an engine.

    Attributes:
        x: Inputs, tensors with leading axis N, nested as the model takes them.
        y: Targets likewise, or None.
        sample_weight: Weights likewise, or None.
        is_padding: bool, shape ``(N,)``, marks rows that only fill up: units whose
            rows are not all there. None until an engine's pass is filled up: all rows are real.
    """

    x: Nest
    y: Nest = None
    sample_weight: Nest = None
    is_padding: Tensor = None

    @classmethod
    def of(cls, data: Nest) -> Self:
        """Return data in the forms that Keras takes, or a batch, as a batch."""
        if isinstance(data, cls):
            return data
        if isinstance(data, Padded):
            return cls.of(data.rows)._replace(is_padding=data.is_padding)
        return cls(*keras.utils.unpack_x_y_sample_weight(data))

    def signature(self, rows: int | None = None) -> Self:
        """Describe a batch that is filled up.

        Args:
            rows: How many it has; None for any number.

        Returns:
            A batch of `tf.TensorSpec`.
        """
        described: Self = _tree.signature_of(self, rows)
        return described._replace(is_padding=tf.TensorSpec([rows], tf.bool))


def number_of_rows(data: Nest) -> int | Tensor:
    """Return the length of the leading axis, as an int where it is static."""
    leaves = keras.tree.flatten(data)
    first = next(leaf for leaf in leaves if leaf is not None)
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]


def with_equal_rows(data: Batch) -> Batch:
    """Return a batch in which all tensors are made to have the same number of rows.

    One row of a target beside many inputs would be broadcast: it would be part of every
    unit's loss, and no clipping bounds that.

    Args:
        data: The batch.

    Returns:
        The same rows. Lengths that the graph does not know are compared when it runs, by
        an operation that the returned tensors depend on.

    Raises:
        ValueError: If lengths are known and differ.
        tf.errors.InvalidArgumentError: If others differ when the graph runs.
    """
    check_equal_rows(data)
    first, *others = _tree.tensors(tuple(data))
    rows = number_of_rows(first)
    if not others or all(each.shape[0] is not None for each in (first, *others)):
        return data
    if _keras.inside_xla():
        # XLA leaves assertions out. It knows lengths when it compiles, and keeps what
        # TensorFlow's graph optimizer would take for superfluous.
        equal = [_reshaped_to(rows, each) for each in others]
    else:
        lengths = tf.stack([tf.shape(each)[0] for each in others])
        # The message shows no lengths: of a drawn batch they are not public.
        check = tf.debugging.Assert(
            tf.reduce_all(tf.equal(lengths, rows)), [_EQUAL_ROWS]
        )
        with tf.control_dependencies([check]):
            equal = [tf.identity(each) for each in others]
    checked: Batch = _tree.pack([first, *equal], data)
    return checked


def _reshaped_to(rows: int | Tensor, tensor: Tensor) -> Tensor:
    """Reshape a tensor to so many rows, which fails if it has not as many."""
    shape = tf.concat([[rows], tf.shape(tensor)[1:]], 0)
    return tf.ensure_shape(tf.reshape(tensor, shape), [None, *tensor.shape[1:]])


def check_equal_rows(data: Batch) -> None:
    """Refuse inputs, targets and weights whose known numbers of rows differ.

    Args:
        data: The batch, of arrays or tensors.

    Raises:
        ValueError: If they differ, or one of them is a scalar.
    """
    shapes = {
        name: [tf.TensorShape(_shape_of(tensor)) for tensor in _tree.tensors(tree)]
        for name, tree in zip(Batch._fields, data, strict=True)
    }
    lengths = {
        name: {"no" if shape.rank == 0 else shape[0] for shape in each} - {None}
        for name, each in shapes.items()
    }
    known = set().union(*lengths.values())
    if len(known) > 1 or "no" in known:
        received = ", ".join(
            f"{name} with {' and '.join(sorted(map(str, found)))} rows"
            for name, found in lengths.items()
            if found
        )
        raise ValueError(
            f"{_EQUAL_ROWS} Received: {received}. Use `y[:len(x)]` if there are more; one "
            "target, or weight, for all is repeated: `np.repeat([weight], len(x))`."
        )


def _shape_of(leaf: Nest) -> Nest:
    return leaf.shape if hasattr(leaf, "shape") else np.shape(leaf)
