"""What layers and losses decide by when a graph of them is traced, beside weights and rows."""

import argparse
import collections
import contextlib
import enum
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
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
# of others, and all that comes after so many values of a layer or of what is beside it.
_MOST_ENTRIES = 1024
_DEEPEST = 10
_MOST_VALUES = 20_000

# Much of what objects of their classes have changes by itself: it is not looked into.
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {
    *("keras", "keras_hub", "numpy", "tensorflow", "tfdp")
}

# Attributes that Keras sets by itself, and to what; TensorFlow's begin like this.
_SET_BY_KERAS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(["build", "quantize"], callable),
    **dict.fromkeys(["built", "compiled"], lambda value: isinstance(value, bool)),
    "call_signature_parameters": lambda value: isinstance(value, list | tuple),
    **dict.fromkeys(
        ["predict_function", "test_function", "train_function"],
        lambda value: value is None or callable(value),
    ),
}
_SET_IN_MODELS = {"compiled", "predict_function", "test_function", "train_function"}
# What begins with an underscore in models and is what users set.
_SET_BY_USERS = {"_run_eagerly", "_supports_masking"}
_SET_BY_TENSORFLOW = (
    *("_self_setattr_tracking", "_self_update_uid", "_self_unconditional"),
    *("_self_name_based", "_self_saveable"),
)


def python_state(model: keras.Model, *others: Nest) -> tuple[Hashable, ...]:
    """Describe what a traced graph keeps as it is: attributes, TensorFlow's seed.

    What is proven of a graph holds for others that are traced with the same. Seen are
    attributes of layers and of what can be called, of objects of users' own, and of their
    classes; numbers, texts, small arrays and tensors, lists and dictionaries of them; what
    functions close over, have by default, and read by name of their module, and of other
    modules of users' own, imported there or in the function. Other objects of libraries, and
    what is not written in Python, are told from each other, but not looked into.

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
        *(
            (
                _Same(each),
                description.of(each.regularizer),
                description.of(each.constraint),
            )
            for leaf in models
            for each in leaf.trainable_variables
        ),
        *map(description.of_layer, layers),
        *(
            description.of(leaf)
            for leaf in leaves
            if not isinstance(leaf, keras.layers.Layer)
        ),
    )


class _Same:
    """Equals what was made of the very same object, which it does not keep alive.

    An `id` would not do: once an object is gone, another may get it.
    """

    __slots__ = ("_id", "_object")

    def __init__(self, value: object) -> None:
        self._id = id(value)
        try:
            self._object: Callable[[], object] = weakref.ref(value)
        except TypeError:
            self._object = lambda: value

    def __eq__(self, other: object) -> bool:
        found = self._object()
        return (
            isinstance(other, _Same) and found is not None and found is other._object()
        )

    def __hash__(self) -> int:
        return self._id


class _Description:
    """Describes values, once each; once more where one is inside of fewer others.

    Objects of users' own are not asked: what they answer may be an error. What is equal in
    all its parts has an equal description, since some objects are made anew with each
    graph.
    """

    def __init__(self, layers: list[keras.layers.Layer]) -> None:
        # By the ids of objects: which one it is, how many others it was found inside, and
        # itself, so that no other gets its id.
        self._met: dict[int, tuple[int, int, object]] = {
            id(layer): (n, 0, layer) for n, layer in enumerate(layers)
        }
        self._numbers = itertools.count(len(layers))
        self._left = _MOST_VALUES
        # What was known before of what the present layer has.
        self._before: dict[int, tuple[int, int, object] | None] = {}

    def of_layer(self, layer: keras.layers.Layer) -> Hashable:
        """Describe a layer of the models, but for those in it."""
        self._begin()
        return _layer(layer, self, 1)

    def _begin(self) -> None:
        """Begin with what has a number of values of its own."""
        if self._left < 0:
            # Of some of it there was no more than the beginning.
            for key, known in self._before.items():
                if known is None:
                    del self._met[key]
                else:
                    self._met[key] = known
        self._left = _MOST_VALUES
        self._before = {}

    def of(self, value: Any, depth: int = 0) -> Hashable:
        """Return what tells a value, inside of so many others, from other values."""
        kind: Any = type(value)
        if depth == 0:
            self._begin()
        self._left -= 1
        if kind in _PLAIN:
            return kind.__name__, value
        if kind is float or kind is complex:
            # NaN equals nothing, itself included.
            return repr(value)
        if depth == _DEEPEST or self._left < 0:
            return kind.__name__, _Same(value)
        known = self._met.get(id(value))
        number, before, _ = known or (-1, _DEEPEST, None)
        if before <= depth:
            return "as before", number
        number = next(self._numbers) if known is None else number
        self._before.setdefault(id(value), known)
        self._met[id(value)] = number, depth, value
        try:
            # Not by the class that an object says that it has.
            parts = _parts.dispatch(kind)(value, self, depth + 1)
        # Some objects answer nothing but errors.
        except Exception:  # noqa: BLE001
            parts = _Same(value)
        return kind.__name__, number, parts

    def of_each(self, values: Iterable[Any], depth: int) -> tuple[Hashable, ...]:
        """Describe several values."""
        return tuple(self.of(each, depth) for each in values)

    def of_items(
        self, values: dict[str, Any], depth: int
    ) -> tuple[tuple[str, Hashable], ...]:
        """Describe several values that have names."""
        return tuple((name, self.of(value, depth)) for name, value in values.items())

    def attributes(self, owner: object, depth: int) -> tuple[Hashable, ...]:
        """Describe what an object has, but for what Keras and TensorFlow gave to it."""
        found = _in_slots(owner)
        with contextlib.suppress(AttributeError):
            # A copy, which no other thread changes.
            of_instance = dict(object.__getattribute__(owner, "__dict__"))
            found |= {str(name): value for name, value in of_instance.items()}
        if issubclass(type(owner), keras.layers.Layer):
            is_model = issubclass(type(owner), keras.Model)
            for name in found.keys() & _of_keras_alone(is_model):
                if _SET_BY_KERAS.get(name, _is_anything)(found[name]):
                    del found[name]
        names = [each for each in found if not each.startswith(_SET_BY_TENSORFLOW)]
        return self.of_items({name: found[name] for name in sorted(names)}, depth)

    def own(self, value: Any, depth: int) -> tuple[Hashable, ...]:
        """Describe what users made of a class, if it is theirs, beside its base."""
        kind = type(value)
        if _is_of_library(kind):
            return ()
        plain = [
            each.__repr__(value)
            for each in _NUMBERS_AND_TEXTS
            if issubclass(kind, each)
        ]
        return tuple(plain), self.attributes(value, depth), self.of(kind, depth)


@functools.singledispatch
def _parts(value: Any, description: _Description, depth: int) -> Hashable:
    """Return what a value is made of; its identity, if it is not looked into."""
    kind = type(value)
    if not _is_of_library(kind):
        # What is not made in Python may hold what no attribute shows.
        own = description.own(value, depth)
        return own if _is_made_in_python(kind) else (_Same(value), own)
    if kind.__module__.startswith(("keras.", "tensorflow.")):
        # Such as a nest that is tracked, or a function that was given a gradient.
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            return _Same(value), description.of(wrapped, depth)
    if callable(value) and not kind.__module__.startswith("tensorflow."):
        # Such as a regularizer, whose numbers users may change.
        return _Same(value), description.attributes(value, depth)
    return _Same(value)


@_parts.register(keras.layers.Layer)
def _other_layers(layer: Any, description: _Description, depth: int) -> Hashable:
    """Describe a layer that is in none of the models, and those in it."""
    inner = description.of_each(_keras.layers_in(layer), depth)
    return _layer(layer, description, depth), inner


def _layer(layer: Any, description: _Description, depth: int) -> Hashable:
    return (
        _Same(layer),
        (layer.trainable, layer.dtype_policy.name),
        description.own(layer.dtype_policy, depth),
        description.attributes(layer, depth),
        description.of(type(layer), depth),
    )


@_parts.register(enum.Enum)
def _member(member: Any, description: _Description, depth: int) -> Hashable:
    return _Same(member), description.attributes(member, depth)


@_parts.register(range)
@_parts.register(slice)
@_parts.register(tf.DType)
@_parts.register(tf.TensorShape)
def _by_name(value: Any, description: _Description, depth: int) -> Hashable:
    del description, depth
    return repr(value)


@_parts.register(list)
@_parts.register(tuple)
@_parts.register(set)
@_parts.register(frozenset)
@_parts.register(dict)
@_parts.register(collections.deque)
@_parts.register(types.MappingProxyType)
def _entries(nest: Any, description: _Description, depth: int) -> Hashable:
    own = description.own(nest, depth)
    # What Keras and TensorFlow made of lists looks elsewhere for its entries.
    base = (
        next(each for each in _NESTS if issubclass(type(nest), each))
        if own
        else type(nest)
    )
    number = base.__len__(nest)
    if number > _MOST_ENTRIES:
        return own, number, _Same(nest)
    if issubclass(base, dict | types.MappingProxyType):
        entries = [each for item in base.items(nest) for each in item]
    else:
        entries = list(base.__iter__(nest))
    described = description.of_each(entries, depth)
    is_set = issubclass(base, set | frozenset)
    return own, number, frozenset(described) if is_set else described


_NESTS: tuple[Any, ...] = (
    *(list, tuple, dict, set, frozenset),
    *(collections.deque, types.MappingProxyType),
)


@_parts.register(np.ndarray)
@_parts.register(np.generic)
def _array(array: Any, description: _Description, depth: int) -> Hashable:
    if array.size > _MOST_ENTRIES:
        return _Same(array)
    own = description.own(array, depth)
    if array.dtype.hasobject:
        return own, array.shape, description.of_each(array.ravel().tolist(), depth)
    numbers = array.tobytes()
    if issubclass(type(array), np.ma.MaskedArray):
        numbers += array.data.tobytes() + np.ma.getmaskarray(array).tobytes()
    return own, repr(array.dtype), array.shape, numbers


@_parts.register(tf.Tensor)
def _tensor(tensor: Any, description: _Description, depth: int) -> Hashable:
    if tf.is_symbolic_tensor(tensor):
        # Of a graph, and another in the next one.
        return None
    is_opaque = tensor.dtype in (tf.resource, tf.variant)
    if is_opaque or tensor.shape.num_elements() > _MOST_ENTRIES:
        return _Same(tensor)
    return _array(np.asarray(tensor.numpy()), description, depth)


@_parts.register(types.FunctionType)
def _function(function: Any, description: _Description, depth: int) -> Hashable:
    code: types.CodeType = function.__code__
    # Some have no value yet.
    cells = [c for c in function.__closure__ or () if c != types.CellType()]
    closed_over = description.of_each((cell.cell_contents for cell in cells), depth)
    module = function.__globals__
    # Not by the module that it says that it is of: `functools.wraps` copies that.
    if _is_library(module.get("__name__")):
        return code, closed_over
    names = _names_in(code)
    imported = _imported(names, module.get("__package__"))
    return (
        code,
        description.of_each((function.__defaults__, function.__kwdefaults__), depth),
        closed_over,
        _read_of(_named(names, module), names, description, depth),
        _read_of(imported, names, description, depth),
        description.attributes(function, depth),
    )


def _named(names: tuple[str, ...], module: dict[str, Any]) -> dict[str, Any]:
    return {name: module[name] for name in names if name in module}


def _imported(names: tuple[str, ...], package: str | None) -> dict[str, Any]:
    """Return modules of users' own that a function may import when it is called."""
    known = _named((*names, *(f"{package}.{name}" for name in names)), sys.modules)
    return {name: module for name, module in known.items() if _is_of_users(module)}


def _read_of(
    found: dict[str, Any], names: tuple[str, ...], description: _Description, depth: int
) -> Hashable:
    """Describe what functions read by name, and in the modules among that."""
    described: list[Hashable] = []
    for name, value in found.items():
        described += [name, description.of(value, depth)]
        # Such as a function of another module, which reads what is there by name.
        is_module = isinstance(value, types.ModuleType) and _is_of_users(value)
        if is_module and depth < _DEEPEST:
            inside = _named(names, vars(value))
            described.append(_read_of(inside, names, description, depth + 1))
    return tuple(described)


@_parts.register(types.ModuleType)
def _module(module: Any, description: _Description, depth: int) -> Hashable:
    """Describe what users keep in a module of their own, but for what it can do."""
    if not _is_of_users(module):
        return _Same(module)
    kept = {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
        and not isinstance(value, types.ModuleType | types.FunctionType | type)
    }
    own = description.of(type(module), depth)
    return _Same(module), own, description.of_items(kept, depth)


# What Python gives to modules, in part by itself.
_OF_EVERY_MODULE = {
    *("__builtins__", "__cached__", "__doc__", "__file__", "__loader__"),
    *("__name__", "__package__", "__path__", "__spec__"),
}


def _is_of_users(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return not (_is_library(module.__name__) or _is_installed(file))


@functools.lru_cache(maxsize=10_000)
def _is_installed(file: str | None) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file or "").parts)


@functools.lru_cache(maxsize=10_000)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """List what a function reads by name, with the functions that are made in it."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    found = [*code.co_names, *(name for each in inner for name in _names_in(each))]
    return tuple(dict.fromkeys(found))


@_parts.register(type)
def _class(of: Any, description: _Description, depth: int) -> Hashable:
    """Describe what users gave to a class and to those that it is derived from."""
    found: list[Hashable] = [_Same(of)]
    for each in of.__mro__:
        if _is_of_library(each):
            continue
        for name, value in sorted(vars(each).items()):
            if name not in {"__dict__", "__doc__", "__weakref__"}:
                found += [name, description.of(value, depth)]
    return tuple(found), description.of(type(of), depth)


# What is in some objects of Python's and TensorFlow's.
_TAKEN_APART: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    types.MethodType: lambda method: (method.__func__, method.__self__),
    types.BuiltinMethodType: lambda f: (f.__name__, f.__self__),
    types.MethodWrapperType: lambda f: (f.__name__, f.__self__),
    functools.partial: lambda f: (f.func, f.args, f.keywords),
    functools.partialmethod: lambda f: (f.func, f.args, f.keywords),
    functools.singledispatchmethod: lambda f: (f.dispatcher, f.func),
    property: lambda found: (found.fget, found.fset),
    functools.cached_property: lambda found: (found.func,),
    staticmethod: lambda method: (method.__func__,),
    classmethod: lambda method: (method.__func__,),
    weakref.ReferenceType: lambda reference: (reference(),),
    # The method is that of what it stands for.
    weakref.ProxyType: lambda proxy: (proxy.__repr__.__self__,),
    bytearray: lambda found: (bytes(found),),
    types.SimpleNamespace: lambda found: (vars(found),),
    argparse.Namespace: lambda found: (vars(found),),
    collections.UserDict: lambda found: (found.data,),
    collections.UserList: lambda found: (found.data,),
    tf.types.experimental.PolymorphicFunction: lambda f: (f.python_function,),
}


def _taken_apart(
    take: Callable[[Any], tuple[Any, ...]],
    value: Any,
    description: _Description,
    depth: int,
) -> Hashable:
    return description.own(value, depth), description.of_each(take(value), depth)


for _kind, _take in _TAKEN_APART.items():
    _parts.register(_kind, functools.partial(_taken_apart, _take))


def _in_slots(owner: object) -> dict[str, Any]:
    found = {}
    for each in type(owner).__mro__:
        if "__slots__" not in vars(each) or _is_of_library(each):
            continue
        for name, slot in vars(each).items():
            if type(slot) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):
                    found[f"{name} of {each.__qualname__}"] = slot.__get__(owner)
    return found


def _is_of_library(kind: type) -> bool:
    module = kind.__module__
    is_made_by_users = module in _MAKING_CLASSES and kind.__flags__ & _IS_MADE_IN_PYTHON
    if is_made_by_users and not hasattr(sys.modules[module], kind.__name__):
        return False
    return _is_library(module)


# What some classes of users' are said to be of, as they were made by a function.
_MAKING_CLASSES = frozenset({"abc", "builtins", "types"})
_IS_MADE_IN_PYTHON = 1 << 9


def _is_made_in_python(kind: type) -> bool:
    """Tell whether all that objects of a class hold is in attributes."""
    return all(
        each is object
        or (each.__flags__ & _IS_MADE_IN_PYTHON and not _is_of_library(each))
        for each in kind.__mro__
    )


def _is_library(module: str | None) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


@functools.cache
def _of_keras_alone(is_model: bool) -> frozenset[str]:
    """Return the names of what Keras keeps in models, or layers, for itself."""
    of = keras.Model() if is_model else keras.layers.Layer()
    private = {name for name in vars(of) if name.startswith("_")}
    set_by_keras = _SET_BY_KERAS.keys() - (set() if is_model else _SET_IN_MODELS)
    return frozenset(private - _SET_BY_USERS | set_by_keras)


def _is_anything(value: object) -> bool:
    del value
    return True
