"""The rule of layers that have none: the gradients of each row, by vectorizing."""

from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import UnsupportedLayerError
from tfdp.rules.recording import Call
from tfdp.rules.terms import PerRow, Term


def generic(call: Call) -> Any:
    """Rule of any layer that is deterministic and treats rows separately.

    Each row goes through the layer's own code once more, in a vectorized map: Fast
    Gradient Clipping, layer by layer [1]_.

    Args:
        call: The call.

    Returns:
        The layer's outputs.

    Raises:
        UnsupportedLayerError: If the layer keeps state, random seeds included.

    References:
        .. [1] Yousefpour et al., "Opacus: User-Friendly Differential Privacy Library
           in PyTorch", 2021. https://arxiv.org/abs/2109.12298
    """
    layer = call.layer
    if layer.non_trainable_variables:
        raise UnsupportedLayerError(
            "A layer without a rule must be deterministic and keep no state. Received: "
            f"`{call.path}` ({type(layer).__name__}). Register a rule for it: "
            f"`tfdp.rules.register({type(layer).__name__}, rule)`."
        )
    arguments = (call.args, call.kwargs)
    inputs = [leaf for leaf in keras.tree.flatten(arguments) if tf.is_tensor(leaf)]

    def run(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        remaining = iter(tensors)
        args, kwargs = keras.tree.map_structure(
            lambda leaf: next(remaining) if tf.is_tensor(leaf) else leaf, arguments
        )
        outputs: list[tf.Tensor] = keras.tree.flatten(call.run(*args, **kwargs))
        return outputs

    variables = layer.trainable_variables
    outputs = call.run(*call.args, **call.kwargs)
    flat = keras.tree.flatten(outputs)

    def terms(*gradients: tf.Tensor) -> list[Term]:
        def of_row(row: tuple[list[tf.Tensor], list[tf.Tensor]]) -> list[tf.Tensor]:
            row_inputs, row_gradients = row
            values = [variable.value for variable in variables]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(values)
                results = run([tensor[None] for tensor in row_inputs])
            found = tape.gradient(
                results,
                values,
                output_gradients=[g[None] for g in row_gradients],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return [tf.convert_to_tensor(gradient) for gradient in found]

        rows = tf.vectorized_map(of_row, (inputs, list(gradients)), warn=False)
        return [
            PerRow(variable, gradient)
            for variable, gradient in zip(variables, rows, strict=True)
        ]

    watched = call.watch_all(flat, terms)
    return keras.tree.pack_sequence_as(outputs, watched)
