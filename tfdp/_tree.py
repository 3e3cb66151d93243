"""Nested structures whose leaves may be None."""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf


def map_tensors(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf but None."""
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else function(leaf), tree
    )


def tensors(tree: Any) -> list[Any]:
    """List every leaf but None."""
    return [leaf for leaf in keras.tree.flatten(tree) if leaf is not None]


def pack(leaves: Iterable[Any], like: Any) -> Any:
    """Put leaves in the places of the leaves of `like` that are not None."""
    remaining = iter(leaves)
    return map_tensors(lambda _: next(remaining), like)


def signature_of(tree: Any, rows: int | None = None) -> Any:
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
