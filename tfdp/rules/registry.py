"""Which class of layers has which rule, those of one's own among them."""

import enum
import operator
import sys
from collections.abc import Callable
from typing import TypeAlias

import keras

from tfdp import _keras
from tfdp._types import Nest, Variable
from tfdp.rules.call import Call

# A rule runs a call of a layer and watches what the terms need the gradients of.
Rule: TypeAlias = Callable[[Call], Nest]


class Leaves(enum.Enum):
    """Layers whose class has no rule, with variables and no layers in them."""

    VECTORS = "each variable has one axis at most that is longer than 1"
    OTHERS = "some have several"


# By the class; by its name, where the installed packages may lack it; and two for all
# others without layers in them.
RULES: dict[type[keras.layers.Layer] | str | Leaves, Rule] = {}


def rule(
    *layer_classes: type[keras.layers.Layer] | str | Leaves,
) -> Callable[[Rule], Rule]:
    """Make a function the rule of classes of layers, of no others.

    Args:
        *layer_classes: See `RULES`; a name is ``"keras_hub.layers.MaskedLMHead"``.

    Returns:
        A decorator that returns the function as it is.
    """

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(layer_classes, function))
        return function

    return add


def find(layer: keras.layers.Layer) -> Rule | None:
    """Return the rule of a layer; None if it is only looked into.

    A layer without a rule that has variables of its own, and no layers in it, gets
    one of those for `Leaves`.
    """
    layer_class = type(layer)
    if layer_class in RULES:
        return RULES[layer_class]
    for name, function in RULES.items():
        if isinstance(name, str) and imported(name) is layer_class:
            return function
    if len(_keras.flatten_layers(layer)) > 1:
        return None
    shapes = [variable.shape for variable in layer.trainable_variables]
    are_vectors = all(sum(length > 1 for length in shape) <= 1 for shape in shapes)
    return RULES[Leaves.VECTORS if are_vectors else Leaves.OTHERS]


def imported(name: str) -> object:
    """Return what a name stands for, if its package was imported and has it."""
    package, _, path = name.partition(".")
    # Importing it here would take seconds, for layers that nobody uses.
    try:
        return operator.attrgetter(path)(sys.modules.get(package))
    except AttributeError:
        return None


def register(layer_class: type[keras.layers.Layer], rule: Rule) -> None:
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
    RULES[layer_class] = rule


def is_own(layer: keras.layers.Layer) -> bool:
    """Tell whether the rule of a layer is tfdp's and for its class, not registered."""
    found = find(layer)
    if found is None or is_for_leaves(found):
        return True
    # A subclass may compute something else than the rule that was registered for it.
    return _is_of_a_library(layer) and found.__module__.startswith("tfdp.")


def takes_entries_alone(layer: keras.layers.Layer) -> bool:
    """Tell whether a layer is known to do to each entry of the first axis the same."""
    is_unknown = is_for_leaves(find(layer)) and layer.trainable_variables
    return _is_of_a_library(layer) and not is_unknown


def _is_of_a_library(layer: keras.layers.Layer) -> bool:
    package = type(layer).__module__.partition(".")[0]
    return package in {"keras", "keras_hub", "tfdp"}


def is_for_leaves(rule: Rule | None) -> bool:
    """Tell whether a rule is one for `Leaves`."""
    return any(rule is RULES[leaves] for leaves in Leaves)


def has_leaves(model: keras.Model) -> bool:
    """Tell whether the rule of some layer, or of its cell, is one of `Leaves`."""
    return any(
        is_leaf(layer)
        for layer in _keras.flatten_layers(model)
        if layer.trainable_variables
    )


def is_leaf(layer: keras.layers.Layer) -> bool:
    """Tell whether the rule of a layer, or of its cell, is one for `Leaves`."""
    of = layer.cell if type(layer) is keras.layers.RNN else layer
    return is_for_leaves(find(of))


def loops_over_a_cell(layer: keras.layers.Layer) -> bool:
    """Tell whether a layer is Keras's `RNN`, not unrolled, over a cell without a rule."""
    is_loop = type(layer) is keras.layers.RNN and not layer.unroll
    return is_loop and find(layer.cell) is None


def own_variables(layer: keras.layers.Layer) -> list[Variable]:
    """List the variables that a layer's rule covers, not those of layers in it."""
    cell = layer.cell if isinstance(layer, keras.layers.RNN) else layer
    inner = ids_of_inner_variables(cell)
    return [v for v in layer.trainable_variables if id(v) not in inner]


def ids_of_inner_variables(layer: keras.layers.Layer) -> set[int]:
    """Identify the trainable variables of layers in a layer."""
    return {
        id(variable)
        for sublayer in _keras.flatten_layers(layer)
        if sublayer is not layer
        for variable in sublayer.trainable_variables
    }
