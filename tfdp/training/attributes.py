"""What users set of layers and losses, so that what was traced with it is traced anew."""

import functools
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
_DEEPEST = 5

# Set by Keras while it trains, and nothing that a call asks for.
_OF_KERAS = {
    *("build", "quantize", "built", "compiled", "history", "optimizer"),
    *("predict_function", "test_function", "train_function", "stop_training"),
}
# What Keras and TensorFlow set on layers begins like this.
_OF_TRACKING = ("_self_", "_checked_by_tfdp")


def attributes_of(model: keras.Model, *others: Nest) -> Hashable:
    """Describe what users set of layers, losses and functions.

    Like a `tf.function`, what was traced does not heed what is set later. No guarantee rests
    on this: what runs is what was proven. It is for users who set ``layer.rate = 0.2``
    between two steps, and expect another rate.

    Args:
        model: The model.
        *others: Losses, functions, and models beside it, in any nest.

    Returns:
        Another value where one of them has another attribute, or a function another
        default, or another value that it closes over or reads of its module: a number or
        text; a small list, dictionary or array of them; or another object.
    """
    leaves = [model, *keras.tree.flatten(others)]
    layers = [
        layer
        for leaf in leaves
        if isinstance(leaf, keras.layers.Layer)
        for layer in _keras.flatten_layers(leaf)
    ]
    return (
        # Operations that are made later draw by it.
        _keras.tensorflow_seed(),
        *((layer.trainable, layer.dtype_policy.name) for layer in layers),
        *(_described_object(layer, 0) for layer in layers),
        *(
            _described(leaf, 0)
            for leaf in leaves
            if not isinstance(leaf, keras.layers.Layer)
        ),
    )


def _described(value: Any, depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, np.ndarray | np.generic) and value.size <= _MOST_ENTRIES:
        return value.dtype.str, value.shape, value.tobytes()
    if depth == _DEEPEST:
        return id(value)
    if isinstance(value, dict | list | tuple | set | frozenset):
        if len(value) > _MOST_ENTRIES:
            return id(value)
        entries = value.values() if isinstance(value, dict) else value
        found = [_described(each, depth + 1) for each in entries]
        if isinstance(value, set | frozenset):
            return frozenset(found)
        names = tuple(value) if isinstance(value, dict) else ()
        return type(value), names, tuple(found)
    if isinstance(value, types.MethodType):
        # Made anew each time it is asked for.
        return id(value.__func__), _described(value.__self__, depth + 1)
    if isinstance(value, types.FunctionType):
        return id(value), _read_by(value, depth + 1)
    is_looked_into = isinstance(value, keras.losses.Loss | functools.partial)
    if is_looked_into or not _is_of_library(type(value)):
        return _described_object(value, depth)
    return id(value)


def _described_object(owner: object, depth: int) -> Hashable:
    ignored = _OF_KERAS
    if isinstance(owner, keras.layers.Layer):
        ignored = ignored | _names_in_layers()
    # In one order: what is set for a while comes back as the last.
    found = sorted(
        (name, value)
        for name, value in getattr(owner, "__dict__", {}).items()
        if name not in ignored and not name.startswith(_OF_TRACKING)
    )
    return id(owner), tuple(
        (name, _described(value, depth + 1)) for name, value in found
    )


@functools.cache
def _names_in_layers() -> set[str]:
    """Name the private attributes of layers that are Keras's own."""
    inputs = keras.Input((1,))
    dense = keras.layers.Dense(1)
    made = [keras.layers.Layer(), dense, keras.Model(inputs, dense(inputs))]
    return {name for each in made for name in vars(each) if name.startswith("_")}


def _read_by(function: types.FunctionType, depth: int) -> Hashable:
    """Describe what a function closes over, has by default, and reads of its module."""
    if _is_of_library(function):
        return ()
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # Nothing is in it yet.
            cells.append(None)
    read = {
        name: function.__globals__[name]
        for name in sorted(function.__code__.co_names)
        if name in function.__globals__
    }
    nests = (*_PLAIN, dict, list, tuple, set, np.ndarray)
    values = {name: value for name, value in read.items() if isinstance(value, nests)}
    defaults = function.__defaults__, function.__kwdefaults__
    return _described((cells, defaults, values), depth)


def _is_of_library(made: Any) -> bool:
    module = getattr(made, "__module__", None) or ""
    return module.partition(".")[0] in _LIBRARIES


_LIBRARIES = {
    "builtins",
    "functools",
    "keras",
    "keras_hub",
    "numpy",
    "tensorflow",
    "tfdp",
}
