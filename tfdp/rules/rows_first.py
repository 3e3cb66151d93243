"""Calls a layer by its rule where rows do not lie on the first axis alone."""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest, Tensor
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call
from tfdp.rules.places import Place
from tfdp.rules.registry import Rule, takes_entries_alone


def called_rows_first(call: Call, rule: Rule, place: Place) -> Nest:
    """Call a layer by its rule, on rows that are brought into order before.

    Args:
        call: The call.
        rule: The rule.
        place: Where rows lie in what the layer is called on.

    Returns:
        What the layer returns, rows where they were.

    Raises:
        UnsupportedLayerError: If they are on another axis, or the layer may do something
            else to each of their pieces.
    """
    if place.axis:
        raise UnsupportedLayerError(
            "A rule takes the leading axis for that of the rows. Received: "
            f"`{call.path}`, called on rows on axis {place.axis}."
        )
    if not all(map(takes_entries_alone, _keras.flatten_layers(call.layer))):
        # That rows do not meet says nothing of what a row has on the first axis.
        raise UnsupportedLayerError(
            "Only a layer of Keras's that has a rule may be called on pieces of rows "
            f"as rows. Received: `{call.path}` ({type(call.layer).__name__})."
        )

    def mapped(function: Callable[[Tensor], Tensor], nest: Nest) -> Nest:
        return keras.tree.map_structure(
            lambda leaf: function(leaf) if tf.is_tensor(leaf) else leaf, nest
        )

    args, kwargs = mapped(place.rows_first, (call.args, call.kwargs))
    call = dataclasses.replace(call, args=args, kwargs=kwargs)
    with call.repeated(place.of_row):
        return mapped(place.put_back, rule(call))
