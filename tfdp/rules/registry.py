"""Rules of one's own."""

from collections.abc import Callable

import keras

from tfdp._types import Nest
from tfdp.rules import recording
from tfdp.rules.recording import Call, Leaves, find


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
    recording.RULES[layer_class] = rule


def is_own(layer: keras.layers.Layer) -> bool:
    """Tell whether the rule of a layer is tfdp's and for its class, not registered."""
    found = find(layer)
    if found is None or any(found is recording.RULES[each] for each in Leaves):
        return True
    # A subclass may compute something else than the rule that was registered for it.
    package = type(layer).__module__.partition(".")[0]
    is_for_class = package in ("keras", "keras_hub", "tfdp")
    return is_for_class and found.__module__.startswith("tfdp.")
