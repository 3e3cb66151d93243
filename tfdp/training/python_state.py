"""What layers and losses decide by when a graph of them is traced, beside weights and rows."""

import collections
import contextlib
import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest

_PLAIN = frozenset({bool, int, str, bytes, type(None)})
# What users' numbers and texts are derived from.
_NUMBERS_AND_TEXTS = (int, float, complex, str, bytes)
# What has more entries is told apart as an object alone, and so is what is deeper inside
# of others, and all that comes after so many values.
_MOST_ENTRIES = 1024
_DEEPEST = 6
_MOST_VALUES = 100_000

# Objects of their classes change by themselves, or never: they are not looked into.
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {
    *("keras", "keras_hub", "numpy", "tensorflow", "tfdp")
}

# Public attributes that Keras sets by itself.
_SET_BY_KERAS = {
    *("build", "built", "call_signature_parameters", "compiled", "quantize"),
    *("predict_function", "test_function", "train_function"),
}


def python_state(model: keras.Model, *others: Nest) -> tuple[Hashable, ...]:
    """Describe what a traced graph keeps as it is: attributes, TensorFlow's seed.

    What is proven of a graph holds for others that are traced with the same. Seen are
    attributes of layers and of what can be called, of objects of users' own, and of their
    classes; numbers, texts, small arrays and tensors, lists and dictionaries of them; what
    functions close over, have by default, and read of their module. Other objects of
    libraries are told from each other, but not looked into.

    Args:
        model: The model.
        *others: Losses, functions, and models beside it, in any nest.

    Returns:
        Equal for equal attributes.
    """
    leaves = [model, *keras.tree.flatten(others)]
    models = [leaf for leaf in leaves if isinstance(leaf, keras.layers.Layer)]
    layers = [layer for leaf in models for layer in _keras.flatten_layers(leaf)]
    description = _Description(layers)
    return (
        # Operations that are made later draw by it.
        _keras.tensorflow_seed(),
        *(id(variable) for leaf in models for variable in leaf.trainable_variables),
        *map(description.of_layer, layers),
        *(
            description.of(leaf)
            for leaf in leaves
            if not isinstance(leaf, keras.layers.Layer)
        ),
    )


class _Description:
    """Describes values: each object once, where it is inside of the fewest others.

    Nothing is asked of the values themselves, but of their types: what an object answers
    may be an error. What is equal in all its parts has an equal description, since some
    objects are made anew with each graph.
    """

    def __init__(self, layers: list[keras.layers.Layer]) -> None:
        # By the ids of objects: which one it is, and how many others it was found inside.
        self._met = {id(layer): (n, 0) for n, layer in enumerate(layers)}
        self._left = _MOST_VALUES

    def of_layer(self, layer: keras.layers.Layer) -> Hashable:
        """Describe a layer, and not those in it."""
        decided = layer.trainable, layer.dtype_policy.name
        return id(layer), decided, self.attributes(layer, 1), self.of(type(layer), 1)

    def of(self, value: Any, depth: int = 0) -> Hashable:
        """Return what tells a value, inside of so many others, from other values."""
        kind: Any = type(value)
        if kind in _PLAIN:
            return kind.__name__, value
        self._left -= 1
        if depth == _DEEPEST or self._left < 0:
            return kind.__name__, id(value)
        number, before = self._met.get(id(value), (len(self._met), _DEEPEST))
        if before <= depth:
            return "as before", number
        self._met[id(value)] = number, depth
        # Not by the class that an object says that it has.
        return kind.__name__, _way(kind)(value, self, depth + 1)

    def of_each(self, values: Iterable[Any], depth: int) -> tuple[Hashable, ...]:
        """Describe several values."""
        return tuple(self.of(each, depth) for each in values)

    def attributes(self, owner: object, depth: int) -> tuple[Hashable, ...]:
        """Describe what an object has, but for what Keras and TensorFlow gave to it."""
        found = _in_slots(owner)
        with contextlib.suppress(AttributeError):
            # A copy, which no other thread changes.
            of_instance = dict(object.__getattribute__(owner, "__dict__"))
            found |= {str(name): value for name, value in of_instance.items()}
        if issubclass(type(owner), keras.layers.Layer):
            for name in found.keys() & _of_keras_alone():
                del found[name]
        return tuple(
            (name, self.of(found[name], depth))
            for name in sorted(found)
            if not name.startswith("_self_")
        )


@functools.singledispatch
def _parts(value: Any, description: _Description, depth: int) -> Hashable:
    """Return what a value is made of; its identity, if nobody may change it."""
    kind = type(value)
    if not _is_of_library(kind):
        return _own(value, description, depth)
    if callable(value) and not kind.__module__.startswith("tensorflow"):
        # Such as a regularizer, whose numbers users may change.
        return id(value), description.attributes(value, depth)
    return id(value)


def _own(value: Any, description: _Description, depth: int) -> Hashable:
    kind = type(value)
    plain = [
        each.__repr__(value) for each in _NUMBERS_AND_TEXTS if issubclass(kind, each)
    ]
    own = description.attributes(value, depth), description.of(kind, depth)
    return tuple(plain), own


@_parts.register(enum.Enum)
def _identity(value: Any, description: _Description, depth: int) -> Hashable:
    del description, depth
    return id(value)


@_parts.register(float)
@_parts.register(complex)
@_parts.register(range)
@_parts.register(slice)
@_parts.register(tf.DType)
@_parts.register(tf.TensorShape)
def _by_name(value: Any, description: _Description, depth: int) -> Hashable:
    # NaN equals nothing, itself included.
    of_class = (
        () if _is_of_library(type(value)) else description.attributes(value, depth)
    )
    return repr(value), of_class


@_parts.register(list)
@_parts.register(tuple)
@_parts.register(set)
@_parts.register(frozenset)
@_parts.register(dict)
@_parts.register(collections.deque)
@_parts.register(types.MappingProxyType)
def _entries(nest: Any, description: _Description, depth: int) -> Hashable:
    own = () if _is_of_library(type(nest)) else _own(nest, description, depth)
    if len(nest) > _MOST_ENTRIES:
        return own, len(nest), id(nest)
    if isinstance(nest, set | frozenset):
        return own, frozenset(description.of_each(nest, depth))
    if isinstance(nest, dict | types.MappingProxyType):
        nest = [each for item in nest.items() for each in item]
    return own, description.of_each(nest, depth)


@_parts.register(np.ndarray)
@_parts.register(np.generic)
def _array(array: Any, description: _Description, depth: int) -> Hashable:
    if array.size > _MOST_ENTRIES:
        return id(array)
    numbers = None if array.dtype.hasobject else array.tobytes()
    objects = () if numbers else description.of_each(array.ravel(), depth)
    return array.dtype.str, array.shape, numbers, objects


@_parts.register(tf.Tensor)
def _tensor(tensor: Any, description: _Description, depth: int) -> Hashable:
    if tf.is_symbolic_tensor(tensor):
        # Of a graph, and another in the next one.
        return None
    is_opaque = tensor.dtype in (tf.resource, tf.variant)
    if is_opaque or tensor.shape.num_elements() > _MOST_ENTRIES:
        return id(tensor)
    return _array(np.asarray(tensor.numpy()), description, depth)


@_parts.register(types.FunctionType)
def _function(function: Any, description: _Description, depth: int) -> Hashable:
    code: types.CodeType = function.__code__
    if _is_of_library(function):
        return code
    # Some have no value yet.
    cells = [c for c in function.__closure__ or () if c != types.CellType()]
    module = function.__globals__
    read = [module[name] for name in code.co_names if name in module]
    read = [each for each in read if type(each) is not types.ModuleType]
    return (
        code,
        description.of_each((function.__defaults__, function.__kwdefaults__), depth),
        description.of_each((cell.cell_contents for cell in cells), depth),
        description.of_each(read, depth),
        description.attributes(function, depth),
    )


@_parts.register(type)
def _class(of: Any, description: _Description, depth: int) -> Hashable:
    """Describe what users gave to a class and to those that it is derived from."""
    found: list[Hashable] = [id(of)]
    for each in of.__mro__:
        if _is_of_library(each):
            continue
        for name, value in sorted(vars(each).items()):
            is_of_python = name.startswith("__") and name.endswith("__")
            if not is_of_python or type(value) is types.FunctionType:
                found += [name, description.of(value, depth)]
    return tuple(found)


# What is in some objects of Python's and TensorFlow's.
_TAKEN_APART: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    types.MethodType: lambda method: (method.__func__, method.__self__),
    functools.partial: lambda f: (f.func, f.args, f.keywords),
    property: lambda found: (found.fget, found.fset),
    functools.cached_property: lambda found: (found.func,),
    staticmethod: lambda method: (method.__func__,),
    classmethod: lambda method: (method.__func__,),
    weakref.ReferenceType: lambda reference: (reference(),),
    bytearray: lambda found: (bytes(found),),
    types.SimpleNamespace: lambda found: (vars(found),),
    collections.UserDict: lambda found: (found.data,),
    collections.UserList: lambda found: (found.data,),
    tf.types.experimental.PolymorphicFunction: lambda f: (f.python_function,),
}


def _taken_apart(value: Any, description: _Description, depth: int) -> Hashable:
    take = next(f for kind, f in _TAKEN_APART.items() if issubclass(type(value), kind))
    own = () if _is_of_library(type(value)) else _own(value, description, depth)
    return own, description.of_each(take(value), depth)


for _kind in _TAKEN_APART:
    _parts.register(_kind, _taken_apart)


@functools.lru_cache(maxsize=10_000)
def _way(kind: type) -> Callable[[Any, _Description, int], Hashable]:
    return _parts.dispatch(kind)


def _in_slots(owner: object) -> dict[str, Any]:
    found = {}
    for each in type(owner).__mro__:
        if "__slots__" not in vars(each) or _is_of_library(each):
            continue
        for name, slot in vars(each).items():
            if type(slot) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):
                    found[name] = slot.__get__(owner)
    return found


def _is_of_library(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _LIBRARIES


@functools.cache
def _of_keras_alone() -> frozenset[str]:
    """Return the names of what Keras keeps in models and layers for itself."""
    private = {name for name in vars(keras.Model()) if name.startswith("_")}
    return frozenset(private | _SET_BY_KERAS)
