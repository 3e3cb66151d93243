"""What layers and losses decide by when a graph of them is traced, beside weights and rows."""

import functools
from collections.abc import Hashable

import keras
import numpy as np

from tfdp import _keras
from tfdp._types import Nest

_PLAIN = (bool, int, str, bytes, type(None))

# What has more entries is told apart as an object alone, and so is what is deeper inside
# of others.
_MOST_ENTRIES = 1024
_DEEPEST = 6

# Public attributes that Keras changes by itself.
_CHANGED_BY_KERAS = {
    *("built", "compiled", "predict_function", "test_function", "train_function"),
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
    models = [model, *(each for each in others if isinstance(each, keras.Model))]
    of_layers = (
        (id(layer), layer.trainable, _attributes(layer, 0))
        for each in models
        for layer in _keras.flatten_layers(each)
    )
    of_others = (
        _described(leaf, 0)
        for each in others
        if not isinstance(each, keras.Model)
        for leaf in keras.tree.flatten(each)
    )
    # Operations that are made later draw by it.
    return (_keras.tensorflow_seed(), *of_layers, *of_others)


def _attributes(owner: object, depth: int) -> Hashable:
    described = [
        (name, _described(value, depth))
        for name, value in sorted(getattr(owner, "__dict__", {}).items())
        if name not in _of_keras_alone()
    ]
    return tuple(each for each in described if each[1] is not None)


def _described(value: object, depth: int) -> Hashable:
    """Return what tells a value from others; None if nothing does."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, float):
        return repr(value)  # NaN equals nothing, itself included.
    if isinstance(value, list | tuple | set | dict):
        if len(value) > _MOST_ENTRIES or depth == _DEEPEST:
            return id(value)
        if isinstance(value, set):
            return tuple(sorted(map(repr, value)))
        if isinstance(value, dict):
            value = sorted(value.items(), key=lambda item: repr(item[0]))
        return tuple(_described(each, depth + 1) for each in value)
    if isinstance(value, np.ndarray | np.generic):
        is_known = value.size <= _MOST_ENTRIES and not value.dtype.hasobject
        numbers = value.tobytes() if is_known else id(value)
        return value.dtype.str, value.shape, numbers
    if not callable(value):
        return None
    if isinstance(value, keras.layers.Layer | type) or depth == _DEEPEST:
        return id(value)
    return id(value), _attributes(value, depth + 1)


@functools.cache
def _of_keras_alone() -> frozenset[str]:
    """Return what Keras keeps in models and layers, and changes by itself."""
    private = {name for name in vars(keras.Model()) if name.startswith("_")}
    return frozenset(private | _CHANGED_BY_KERAS)
