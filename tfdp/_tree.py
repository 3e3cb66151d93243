"""Nested structures whose leaves may be None."""

import functools
from collections.abc import Iterable

import keras
import tensorflow as tf

from tfdp._types import Nest, Tensor

# Applies a function to every leaf but None.
map_tensors = functools.partial(keras.tree.map_structure, none_is_leaf=False)


def tensors(tree: Nest) -> list[Nest]:
    """List every leaf but None."""
    return [leaf for leaf in keras.tree.flatten(tree) if leaf is not None]


def pack(leaves: Iterable[Nest], like: Nest) -> Nest:
    """Put leaves in the places of the leaves of `like` that are not None."""
    remaining = iter(leaves)
    return map_tensors(lambda _: next(remaining), like)


def joined(units: Tensor) -> Tensor:
    """``(U, K, ...)`` -> ``(U K, ...)``."""
    if units.shape[2:].is_fully_defined():
        return tf.reshape(units, [-1, *units.shape[2:]])
    rows = tf.reshape(units, tf.concat([[-1], tf.shape(units)[2:]], 0))
    return tf.ensure_shape(rows, [None, *units.shape[2:]])


def signature_of(tree: Nest, rows: int | None = None) -> Nest:
    """Describe arrays whose leading axis is that of the rows.

    Args:
        tree: Nested arrays.
        rows: How many rows a batch has; None for any number.

    Returns:
        The same nest of `tf.TensorSpec`.
    """
    return map_tensors(
        lambda leaf: tf.TensorSpec(
            [rows, *leaf.shape[1:]], tf.as_dtype(getattr(leaf, "dtype", None))
        ),
        tree,
    )
