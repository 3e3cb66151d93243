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
# What TensorFlow sets on layers begins like this.
_OF_TENSORFLOW = "_self_"

# What tfdp sets on models: what loops of one's own have checked.
CHECKED = "_checked_by_tfdp"

# Objects of theirs are not looked into, but for these.
_LOOKED_INTO = (keras.losses.Loss, keras.regularizers.Regularizer, functools.partial)
_LIBRARIES = {
    "builtins",
    "functools",
    "keras",
    "keras_hub",
    "numpy",
    "tensorflow",
    "tfdp",
}


def attributes_of(model: keras.Model, *others: Nest) -> Hashable:
    """Describe what users set of layers, losses and functions.

    Like a `tf.function`, what was traced does not heed what is set later. No guarantee rests
    on this: what runs is what was proven. It is for users who set ``layer.rate = 0.2``
    between two steps, and expect another rate.

    Args:
        model: The model.
        *others: Losses, functions, and models beside it, in any nest.

    Returns:
        Another value where something else was set: a number or text, a small list,
        dictionary or array, or another object; as an attribute of a layer, a loss or an
        object of users' own, or as what a function closes over, has by default or reads
        of its module. Seen is neither what a layer's own `call` reads of its module, nor
        what changes inside of libraries' objects or of large nests. An object in the
        place of one that is gone may pass for it.
    """
    leaves = [model, *keras.tree.flatten(others)]
    layers = [
        layer
        for leaf in leaves
        if isinstance(leaf, keras.layers.Layer)
        for layer in _keras.flatten_layers(leaf)
    ]
    met: set[int] = set()
    return (
        # Operations that are made later draw by it.
        _keras.tensorflow_seed(),
        *((layer.trainable, layer.dtype_policy.name) for layer in layers),
        *(_object(layer, 0, met) for layer in layers),
        *(
            _described(leaf, 0, met)
            for leaf in leaves
            if not isinstance(leaf, keras.layers.Layer)
        ),
    )


def _described(value: Any, depth: int, met: set[int]) -> Hashable:
    """Describe a value, so many others deep in what users set."""
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
        found = [_described(each, depth + 1, met) for each in entries]
        if isinstance(value, set | frozenset):
            return frozenset(found)
        names = tuple(value) if isinstance(value, dict) else ()
        return type(value), names, tuple(found)
    if isinstance(value, types.MethodType):
        # Made anew each time it is asked for.
        return id(value.__func__), _described(value.__self__, depth + 1, met)
    if isinstance(value, types.FunctionType):
        return id(value), _read_by(value, depth + 1, met)
    if isinstance(value, _LOOKED_INTO) or not _is_of_library(type(value)):
        return _object(value, depth, met)
    return id(value)


def _object(owner: object, depth: int, met: set[int]) -> Hashable:
    """Describe what an object has, at the first place where it is met."""
    if id(owner) in met:
        return id(owner)
    met.add(id(owner))
    ignored = _OF_KERAS | {CHECKED}
    if isinstance(owner, keras.layers.Layer):
        ignored |= _names_in_layers()
    # In one order: what is set for a while comes back as the last.
    found = sorted(
        (name, value)
        for name, value in getattr(owner, "__dict__", {}).items()
        if name not in ignored and not name.startswith(_OF_TENSORFLOW)
        # Keras's cells keep no masks between calls, but a name for them.
        if not (name.startswith("_") and value is None)
    )
    return id(owner), tuple(
        (name, _described(value, depth + 1, met)) for name, value in found
    )


@functools.cache
def _names_in_layers() -> set[str]:
    """Name the private attributes of layers that are Keras's own."""
    inputs = keras.Input((1,))
    dense = keras.layers.Dense(1)
    made = [keras.layers.Layer(), dense, keras.Model(inputs, dense(inputs))]
    return {name for each in made for name in vars(each) if name.startswith("_")}


def _read_by(function: types.FunctionType, depth: int, met: set[int]) -> Hashable:
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
    return _described((cells, defaults, values), depth, met)


def _is_of_library(made: Any) -> bool:
    """Tell whether a class or a function is not of users' own."""
    module = getattr(made, "__module__", None) or ""
    return module.partition(".")[0] in _LIBRARIES
