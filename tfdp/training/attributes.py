"""What users set of layers and losses, so that what was traced with it is traced anew."""

import types
from collections.abc import Hashable
from typing import Any

import keras
import numpy as np

from tfdp import _keras
from tfdp._types import Nest

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

# What has more entries is told apart as an object alone, and so is what is deeper inside.
_MOST_ENTRIES = 64
_DEEPEST = 3

# Set by Keras while it trains, and nothing that a call asks for.
_OF_KERAS = {
    *("built", "compiled", "history", "optimizer", "stop_training"),
    *("predict_function", "test_function", "train_function"),
}


def attributes_of(model: keras.Model, *others: Nest) -> Hashable:
    """Describe what users set of layers, losses and functions.

    Like a `tf.function`, what was traced does not heed what is set later. No guarantee rests
    on this: what runs is what was proven. It is for users who set ``layer.rate = 0.2``
    between two trainings, and expect another rate.

    Args:
        model: The model.
        *others: Losses, functions, and models beside it, in any nest.

    Returns:
        Another value where one of them has another attribute: a number or text; a small
        list, dictionary or array of them; or another object.
    """
    leaves = [model, *keras.tree.flatten(others)]
    layers = [
        layer
        for leaf in leaves
        if isinstance(leaf, keras.layers.Layer)
        for layer in _keras.flatten_layers(leaf)
    ]
    described = [*layers, *(leaf for leaf in leaves if hasattr(leaf, "__dict__"))]
    return (
        # Operations that are made later draw by it.
        _keras.tensorflow_seed(),
        *((id(each), _described(_public(each), 0)) for each in described),
        *(layer.trainable for layer in layers),
    )


def _public(owner: object) -> dict[str, Any]:
    # In one order: what is set for a while comes back as the last.
    return {
        name: value
        for name, value in sorted(vars(owner).items())
        if not name.startswith("_") and name not in _OF_KERAS
    }


def _described(value: Any, depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, np.ndarray | np.generic) and value.size <= _MOST_ENTRIES:
        return value.dtype.str, value.shape, value.tobytes()
    is_nest = isinstance(value, dict | list | tuple | set | frozenset)
    if is_nest and depth < _DEEPEST and len(value) <= _MOST_ENTRIES:
        entries = value.values() if isinstance(value, dict) else value
        found = [_described(each, depth + 1) for each in entries]
        if isinstance(value, set | frozenset):
            return frozenset(found)
        names = tuple(value) if isinstance(value, dict) else ()
        return type(value), names, tuple(found)
    if isinstance(value, types.MethodType):
        # Made anew each time it is asked for.
        return id(value.__self__), id(value.__func__)
    return id(value)
