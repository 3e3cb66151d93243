"""Rule of the convolution with a standardised kernel."""

import keras
import tensorflow as tf

from tfdp._types import Nest, Tensor
from tfdp.clipping import at_least_float32
from tfdp.errors import UnsupportedLayerError
from tfdp.layers import WSConv2D, centred
from tfdp.rules import convolutional
from tfdp.rules.call import Call
from tfdp.rules.kernels import kernel_term
from tfdp.rules.moves import Move
from tfdp.rules.registry import rule
from tfdp.rules.terms import Standardized, Term


@rule(WSConv2D)
def ws_conv(call: Call) -> Nest:
    """Rule of `tfdp.layers.WSConv2D`.

    With ``y = x * P W / length``, where the length stays that of the model's own W, the
    outputs are ``gain y + bias``. Linear in W, y is what units move.

    Args:
        call: The call.

    Returns:
        The layer's outputs.

    Raises:
        UnsupportedLayerError: If the kernel is the sum of two variables, or a spatial axis
            is not static.
    """
    layer = call.layer
    if layer.lora_enabled:
        raise UnsupportedLayerError(
            "The rule of a standardised kernel knows one variable, not the factors of "
            f"LoRA beside it. Received: `{call.path}` with LoRA. Use `engine='auto'`."
        )
    x, geometry = call.inputs, convolutional.geometry_of(layer)
    x = convolutional.channels_last(layer, x)
    if not x.shape[1:].is_fully_defined():
        raise UnsupportedLayerError(
            "The rule of a standardised kernel needs inputs of a known shape. Received: "
            f"`{call.path}` with inputs of shape {x.shape}. Use "
            "`keras.Input((height, width, channels))`."
        )
    kernel = centred(tf.convert_to_tensor(layer.kernel))
    epsilon = tf.constant(layer.epsilon, kernel.dtype)
    squares = tf.reduce_sum(tf.square(kernel), [0, 1, 2])[None]
    scale = tf.math.rsqrt(tf.maximum(squares, epsilon))
    move = call.move(layer.kernel)

    def convolved(x: Tensor, dtype: str | tf.DType) -> Tensor:
        return keras.ops.conv(
            x,
            # Half precision overflows where the kernel is not divided first.
            tf.cast(kernel * scale, dtype),
            strides=geometry.strides,
            padding=geometry.padding.lower(),
            dilation_rate=geometry.dilations,
            data_format="channels_last",
        )

    at_first = convolved(x, layer.compute_dtype)

    def standardized(g: Tensor, taken: Tensor | None = None) -> Standardized:
        products = kernel_term(layer.kernel, x, g * scale, geometry)
        exact = at_first
        if exact.dtype.size < 4:
            # Half precision would be too coarse for a norm.
            exact = convolved(at_least_float32(x), tf.float32)
        along = tf.reduce_sum(exact * g, [1, 2])
        taken = tf.zeros_like(along) if taken is None else taken
        return Standardized(products, kernel, along, taken)

    def terms(g: Tensor) -> list[Term]:
        along = tf.reduce_sum(at_least_float32(seen[0]) * g, [1, 2])
        of_rows = squares if move is None else move.units.for_rows(moved, along)
        # Below epsilon the kernel is not divided by its length.
        is_divided = of_rows > epsilon
        taken = tf.where(is_divided, along / of_rows, tf.zeros_like(along))
        found: list[Term] = [standardized(g, taken)]
        if move is not None:
            taken = -tf.reduce_sum(move.units.view(taken, [taken.shape[-1]]), 1)
            taken *= tf.cast(move.lengths, taken.dtype)[:, None]
            found.append(move.direction.by_column(taken, move.units))
        return found

    (y,) = call.watch_all([at_first], terms, linear_terms=lambda g: [standardized(g)])
    seen = [y]
    factor = tf.cast(call.per_row(layer.gain), scale.dtype)
    if move is not None:
        # A unit that has moved its kernel divides by a length of its own.
        moved = _moved_squares(move, kernel, squares, path=call.path)
        of_move = tf.math.rsqrt(tf.maximum(moved, epsilon)) / scale
        factor *= move.units.for_rows(of_move, factor)
    outputs = y * tf.cast(factor, y.dtype)[:, None, None]
    return convolutional.with_bias_and_activation(call, outputs)


def _moved_squares(move: Move, kernel: Tensor, squares: Tensor, *, path: str) -> Tensor:
    """Return the squared lengths of each unit's columns, shape ``(U, O)``."""
    direction, lengths, units = move
    if isinstance(direction, Standardized):
        if direction.repeats is None:
            raise UnsupportedLayerError(
                "A standardised layer that moves must see as many rows in each call. "
                f"Received: `{path}`."
            )
        along, of_move = (
            direction.column_products(units),
            direction.column_squares(units),
        )
    else:
        columns = tf.reshape(kernel, [-1, kernel.shape[-1]])
        gradients = units.view(direction.instantiate(units), [columns.shape[1]])
        along = tf.reduce_sum(gradients * columns, 1)
        of_move = tf.reduce_sum(tf.square(gradients), 1)
    lengths = tf.cast(lengths, tf.float64)[:, None]
    along, of_move = (tf.cast(each, tf.float64) for each in (along, of_move))
    moved = tf.cast(squares, tf.float64) + lengths * (2 * along + lengths * of_move)
    return tf.cast(moved, squares.dtype)
