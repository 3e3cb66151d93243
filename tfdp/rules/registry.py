"""Which class of layers has which rule."""

import operator
import sys
from collections.abc import Callable

import keras

from tfdp import _keras
from tfdp._types import Nest
from tfdp.rules.generic import generic
from tfdp.rules.recording import Call, Rule

# By the class; by its name, where the installed packages may lack it.
_RULES: dict[type[keras.layers.Layer] | str, Rule] = {}


def rule(*layer_classes: type[keras.layers.Layer] | str) -> Callable[[Rule], Rule]:
    """Make a function the rule of classes of layers, of no others.

    Args:
        *layer_classes: The classes; or names, as ``"keras_hub.layers.MaskedLMHead"``,
            of those that some installation may lack.

    Returns:
        A decorator that returns the function as it is.
    """

    def add(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(layer_classes, function))
        return function

    return add


def register(
    layer_class: type[keras.layers.Layer], rule: Callable[[Call], Nest]
) -> None:
    """Set the rule of a class of layers, of no other class, subclasses included.

    A rule that is wrong would clip wrongly: before the first step the norms and sums
    that it leads to are compared with those of single examples.

    Args:
        layer_class: The class.
        rule: Takes a `tfdp.rules.Call` and returns the outputs of the layer. It
            watches what it computes from variables and inputs, and says what the
            gradient of that means for the variables: terms, `OuterProducts`,
            `Convolution`, `ScaledProducts` or `PerRow`. All of the layer's variables
            must be covered.

    Raises:
        TypeError: If `layer_class` is no class of layers, or `rule` cannot be called.
    """
    is_class: bool = isinstance(layer_class, type)
    if not is_class or not issubclass(layer_class, keras.layers.Layer):
        raise TypeError(
            "`layer_class` must be a class of Keras layers. Received: layer_class="
            f"{layer_class!r}. Use `tfdp.rules.register(MyLayer, rule)`."
        )
    if not callable(rule):
        raise TypeError(
            "`rule` must be a function of a `tfdp.rules.Call`. Received: rule="
            f"{rule!r}. Use `tfdp.rules.register({layer_class.__name__}, rule)`."
        )
    _RULES[layer_class] = rule


def find(layer: keras.layers.Layer) -> Rule | None:
    """Return the rule of a layer; None if it is only looked into.

    A layer without a rule that has variables of its own, and no layers in it, gets
    the generic one.
    """
    layer_class = type(layer)
    if layer_class in _RULES:
        return _RULES[layer_class]
    for name, function in _RULES.items():
        if isinstance(name, str) and imported(name) is layer_class:
            return function
    is_leaf = len(_keras.flatten_layers(layer)) == 1
    return generic if is_leaf else None


def imported(name: str) -> object:
    """Return what a name stands for, if its package was imported and has it."""
    package, _, path = name.partition(".")
    # Importing it here would take seconds, for layers that nobody uses.
    try:
        return operator.attrgetter(path)(sys.modules.get(package))
    except AttributeError:
        return None


def is_own(layer: keras.layers.Layer) -> bool:
    """Tell whether the rule of a layer is tfdp's, not one that somebody registered."""
    found = find(layer)
    return found is None or found.__module__.startswith("tfdp.")
