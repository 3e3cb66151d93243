"""What layers decide by when a graph of them is traced, beside weights and rows."""

import functools
from collections.abc import Hashable

import keras

from tfdp import _keras

_PLAIN = (bool, int, float, str, bytes, type(None))


def python_state(model: keras.Model) -> tuple[Hashable, ...]:
    """Describe what a traced graph keeps as it is: layers' attributes, TensorFlow's seed.

    What is proven of a graph holds for others that are traced with the same. Numbers,
    texts, lists of them, functions and layers are seen; what a layer keeps in objects of
    its own is not.

    Args:
        model: The model.

    Returns:
        Equal for equal attributes.
    """
    of_layers = (
        (id(layer), layer.trainable, *_own_attributes(layer))
        for layer in _keras.flatten_layers(model)
    )
    # Operations that are made later draw by it.
    return (_keras.tensorflow_seed(), *of_layers)


def _own_attributes(layer: keras.layers.Layer) -> list[tuple[str, Hashable]]:
    described = [
        (name, _described(value))
        for name, value in sorted(vars(layer).items())
        if name not in _of_all_models()
    ]
    return [each for each in described if each[1] is not None]


def _described(value: object) -> Hashable:
    """Return what tells a value from others; None if nothing does."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return id(value) if callable(value) else None


@functools.cache
def _of_all_models() -> frozenset[str]:
    """Return what Keras keeps in models and layers, and changes by itself."""
    return frozenset(vars(keras.Model()))
