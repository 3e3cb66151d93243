"""What layers and losses decide by when a graph of them is traced, beside weights and rows."""

import enum
import functools
import types
from collections.abc import Collection, Hashable
from typing import Any

import keras
import numpy as np

from tfdp import _keras
from tfdp._types import Nest

# Told apart by what they are called, as NaN equals nothing, itself included.
_BY_NAME = (float, complex, slice, enum.Enum)
_PLAIN = (bool, int, str, bytes, type(None))
_NESTS = (list, tuple, set, frozenset, dict)

# What has more entries is told apart as an object alone, and so is what is deeper inside
# of others.
_MOST_ENTRIES = 1024
_DEEPEST = 6

# Public attributes that Keras sets by itself.
_SET_BY_KERAS = {
    *("build", "built", "call_signature_parameters", "compiled", "quantize"),
    *("predict_function", "test_function", "train_function"),
}


def python_state(model: keras.Model, *others: Nest) -> tuple[Hashable, ...]:
    """Describe what a traced graph keeps as it is: attributes, TensorFlow's seed.

    What is proven of a graph holds for others that are traced with the same. Numbers,
    texts, small arrays, lists and dictionaries of them, functions, layers, and what can be
    called, such as losses and regularizers, are seen; what a layer keeps in other objects
    of its own is not.

    Args:
        model: The model.
        *others: Losses, functions, and models beside it, in any nest.

    Returns:
        Equal for equal attributes.
    """
    leaves = [model, *keras.tree.flatten(others)]
    are_layers = [isinstance(leaf, keras.layers.Layer) for leaf in leaves]
    layers = [
        layer
        for leaf, is_layer in zip(leaves, are_layers, strict=True)
        if is_layer
        for layer in _keras.flatten_layers(leaf)
    ]
    seen = set(map(id, layers))
    of_layers = [
        (id(layer), layer.trainable, _attributes(layer, seen, 0)) for layer in layers
    ]
    of_others = [
        _described(leaf, seen, 0)
        for leaf, is_layer in zip(leaves, are_layers, strict=True)
        if not is_layer
    ]
    # Operations that are made later draw by it.
    return (_keras.tensorflow_seed(), *of_layers, *of_others)


def _attributes(owner: object, seen: set[int], depth: int) -> Hashable:
    is_layer = isinstance(owner, keras.layers.Layer)
    hidden = _of_keras_alone() if is_layer else frozenset()
    found = {
        str(name): value
        for name, value in getattr(owner, "__dict__", {}).items()
        if name not in hidden
    }
    described = [(name, _described(found[name], seen, depth)) for name in sorted(found)]
    return tuple(each for each in described if each[1] is not None)


def _described(value: object, seen: set[int], depth: int) -> Hashable:
    """Return what tells a value from others; None if nothing does.

    Args:
        value: May be anything.
        seen: Of objects that are described elsewhere, which cycles may lead back to.
        depth: How many objects it is inside of.
    """
    if isinstance(value, _BY_NAME):
        return repr(value)
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, np.ndarray | np.generic):
        is_known = value.size <= _MOST_ENTRIES and not value.dtype.hasobject
        numbers = value.tobytes() if is_known else id(value)
        return value.dtype.str, value.shape, numbers
    if isinstance(value, types.MethodType):
        owner = value.__self__
        # A new object each time that it is asked for.
        return id(value.__func__), id(owner), _attributes_once(owner, seen, depth)
    if not (isinstance(value, _NESTS) or callable(value)):
        return None
    if id(value) in seen or isinstance(value, type) or depth == _DEEPEST:
        return id(value)
    if not isinstance(value, _NESTS):
        return id(value), _attributes_once(value, seen, depth)
    seen.add(id(value))
    return _entries(value, seen, depth)


def _attributes_once(owner: object, seen: set[int], depth: int) -> Hashable:
    if id(owner) in seen or depth == _DEEPEST:
        return None
    seen.add(id(owner))
    return _attributes(owner, seen, depth + 1)


def _entries(nest: Collection[Any], seen: set[int], depth: int) -> Hashable:
    if len(nest) > _MOST_ENTRIES:
        return id(nest)
    if isinstance(nest, set | frozenset):
        return tuple(sorted(map(repr, nest)))
    if isinstance(nest, dict):
        nest = [each for item in nest.items() for each in item]
    return tuple(_described(each, seen, depth + 1) for each in nest)


@functools.cache
def _of_keras_alone() -> frozenset[str]:
    """Return the names of what Keras keeps in models and layers for itself."""
    private = {name for name in vars(keras.Model()) if name.startswith("_")}
    return frozenset(private | _SET_BY_KERAS)
