"""Nested structures whose leaves may be None."""

from collections.abc import Callable, Iterable
from typing import Any

import keras


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
