"""How the gradients of layers factorise: one rule for each class of layers.

A rule runs one call of a layer and says what the gradients of the layer's variables
are made of. That is enough to compute the norm of each example's gradient, and the
clipped sum, without any example's gradient. Keras's layers have rules, and those of
KerasHub that need one; other layers get one by `register`.

Example:
    A layer that multiplies by a matrix and then squares. What the matrix gives is
    watched; its gradient ``g`` and the inputs are the factors of the gradient.

    >>> @keras.saving.register_keras_serializable("example")
    ... class Squared(keras.layers.Layer):
    ...     def build(self, input_shape):
    ...         self.kernel = self.add_weight(shape=(input_shape[-1], 4))
    ...
    ...     def call(self, inputs):
    ...         return keras.ops.square(inputs @ self.kernel)
    >>> def squared_rule(call):
    ...     x, kernel = call.inputs, call.layer.kernel
    ...     z = call.watch(
    ...         x @ kernel,
    ...         lambda g: [tfdp.rules.OuterProducts(kernel, x, g)],
    ...         is_linear=True,
    ...     )
    ...     return keras.ops.square(z)
    >>> tfdp.rules.register(Squared, squared_rule)
"""

from collections.abc import Callable
from typing import Any

import keras

from tfdp import _keras
from tfdp.layers import WSConv2D
from tfdp.rules import convolutional, hub, recurrent
from tfdp.rules.dense import dense, einsum_dense
from tfdp.rules.embedding import embedding, reversible_embedding
from tfdp.rules.generic import generic
from tfdp.rules.normalization import (
    group_normalization,
    layer_normalization,
    prelu,
    rms_normalization,
)
from tfdp.rules.recording import Call as Call
from tfdp.rules.recording import Rule
from tfdp.rules.standardized import ws_conv
from tfdp.rules.terms import Convolution as Convolution
from tfdp.rules.terms import OuterProducts as OuterProducts
from tfdp.rules.terms import PerRow as PerRow
from tfdp.rules.terms import ScaledProducts as ScaledProducts
from tfdp.rules.terms import Term as Term
from tfdp.rules.time_distributed import time_distributed

_RULES: dict[type[keras.layers.Layer], Rule] = {
    keras.layers.Dense: dense,
    keras.layers.EinsumDense: einsum_dense,
    keras.layers.Embedding: embedding,
    keras.layers.LayerNormalization: layer_normalization,
    keras.layers.GroupNormalization: group_normalization,
    keras.layers.RMSNormalization: rms_normalization,
    keras.layers.PReLU: prelu,
    keras.layers.TimeDistributed: time_distributed,
    WSConv2D: ws_conv,
    **convolutional.RULES,
    **recurrent.RULES,
}
if hasattr(keras.layers, "ReversibleEmbedding"):
    _RULES[keras.layers.ReversibleEmbedding] = reversible_embedding


def register(
    layer_class: type[keras.layers.Layer], rule: Callable[[Call], Any]
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
    rule = _RULES.get(type(layer))
    if rule is None:
        rule = hub.find(layer)
    if rule is not None:
        return rule
    is_leaf = len(_keras.flatten_layers(layer)) == 1
    return generic if is_leaf else None


def is_own(layer: keras.layers.Layer) -> bool:
    """Tell whether the rule of a layer is tfdp's, not one that somebody registered."""
    rule = find(layer)
    return rule is None or rule.__module__.startswith("tfdp.")
