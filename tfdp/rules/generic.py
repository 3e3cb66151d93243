"""The rule of layers that have none: the gradients of each row, by vectorizing."""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdp import _seeds
from tfdp._tracing import tracing
from tfdp._types import Nest, Tensor
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.recording import Call, rule
from tfdp.rules.terms import PerRow, Term


@rule(None)
def generic(call: Call) -> Nest:
    """Rule of any layer that is deterministic and treats rows separately.

    Each row goes through the layer's own code once more, in a vectorized map: Fast
    Gradient Clipping, layer by layer [1]_.

    Args:
        call: The call.

    Returns:
        The layer's outputs.

    Raises:
        UnsupportedLayerError: If the layer keeps state, is random, or cannot be
            vectorized.

    References:
        .. [1] Yousefpour et al., "Opacus: User-Friendly Differential Privacy Library
           in PyTorch", 2021. https://arxiv.org/abs/2109.12298
    """
    layer = call.layer
    advice = (
        f"Received: `{call.path}` ({type(layer).__name__}). Register a rule for it: "
        f"`tfdp.rules.register({type(layer).__name__}, rule)`."
    )
    if layer.non_trainable_variables:
        raise UnsupportedLayerError(
            f"A layer without a rule must keep no state. {advice}"
        )
    try:
        # Run once more for the gradients, it would draw other numbers.
        with _seeds.without_chance():
            outputs = call.run(*call.args, **call.kwargs)
    except _seeds.RandomError as error:
        raise UnsupportedLayerError(
            f"A layer without a rule must not be random. {advice}"
        ) from error
    arguments = (call.args, call.kwargs)
    rows = keras.tree.flatten(call.inputs)[0].shape[0]

    def has_rows(leaf: Nest) -> bool:
        is_tensor: bool = tf.is_tensor(leaf)
        return is_tensor and bool(leaf.shape.rank)

    inputs = [leaf for leaf in keras.tree.flatten(arguments) if has_rows(leaf)]
    # With as many rows as another axis has numbers, nobody could tell them apart.
    if any(leaf.shape[0] != rows for leaf in inputs):
        raise UnsupportedLayerError(
            f"A layer without a rule must take tensors of which each row is one "
            f"example's. {advice}"
        )
    variables = layer.trainable_variables

    def of_row(row: list[Tensor]) -> list[Tensor]:
        row_gradients = row[len(inputs) :]
        remaining = iter(row)
        args, kwargs = keras.tree.map_structure(
            lambda leaf: next(remaining)[None] if has_rows(leaf) else leaf, arguments
        )
        values = [variable.value for variable in variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            results = keras.tree.flatten(call.run(*args, **kwargs))
        found = tape.gradient(
            results,
            values,
            output_gradients=[g[None] for g in row_gradients],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.convert_to_tensor(gradient) for gradient in found]

    def terms(*gradients: Tensor) -> list[Term]:
        trace = tracing()
        rows = [*inputs, *gradients]
        try:
            if trace is not None:
                _check_that_it_can_be_vectorized(of_row, rows)
                of_rows = trace.alone(of_row, rows)
            else:
                of_rows = tf.vectorized_map(of_row, rows, warn=False)
        # Whatever stops the tracing: an error of the layer itself came before.
        except Exception as error:
            raise UnsupportedLayerError(
                f"A layer without a rule must be one that can be vectorized. {advice}"
            ) from error
        return [
            PerRow(variable, gradient)
            for variable, gradient in zip(variables, of_rows, strict=True)
        ]

    watched = call.watch_all(keras.tree.flatten(outputs), terms, linear_terms=None)
    return keras.tree.pack_sequence_as(outputs, watched)


def _check_that_it_can_be_vectorized(
    function: Callable[[list[Tensor]], Nest], rows: list[Tensor]
) -> None:
    """Raise whatever a vectorized map raises while it is traced."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in rows]
    tf.function(
        lambda rows: tf.vectorized_map(function, rows, warn=False), autograph=False
    ).get_concrete_function(specs)
