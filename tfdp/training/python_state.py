"""What layers and losses decide by when a graph of them is traced, beside weights and rows."""

import functools
from collections.abc import Hashable

import keras
import numpy as np

from tfdp import _keras
from tfdp._types import Nest

_PLAIN = (bool, int, float, str, bytes, type(None))

# Larger arrays are told apart as objects alone.
_MOST_NUMBERS = 1024

# How far down: what a layer has, and what a regularizer or a loss in it has.
_DEEPEST = 2

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
    if isinstance(value, list | tuple):
        return tuple(_described(each, depth) for each in value)
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: repr(item[0]))
        return tuple((repr(key), _described(each, depth)) for key, each in items)
    if isinstance(value, np.ndarray):
        is_small = value.size <= _MOST_NUMBERS and not value.dtype.hasobject
        return (
            (value.dtype.str, value.shape, value.tobytes()) if is_small else id(value)
        )
    if not callable(value):
        return None
    if isinstance(value, keras.layers.Layer) or depth == _DEEPEST:
        return id(value)
    return id(value), _attributes(value, depth + 1)


@functools.cache
def _of_keras_alone() -> frozenset[str]:
    """Return what Keras keeps in models and layers, and changes by itself."""
    private = {name for name in vars(keras.Model()) if name.startswith("_")}
    return frozenset(private | _CHANGED_BY_KERAS)
