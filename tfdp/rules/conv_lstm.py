"""Convolutional recurrent layers, whose kernels slide over the frame of each step.

As in other recurrent layers, what the inputs give is computed for all time steps at
once. Its gradient is that of the sum which the gates see, so it says what both kernels
get: from the frames, and from the states before each step.
"""

import keras
import tensorflow as tf

from tfdp._types import Nest, Tensor
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.convolutional import channels_last, geometry_of, kernel_term
from tfdp.rules.geometry import Geometry
from tfdp.rules.recording import Call, rule
from tfdp.rules.recurrent import outputs_where_unmasked, swapped
from tfdp.rules.terms import PerRow, Term
from tfdp.rules.time_distributed import joined


@rule(keras.layers.ConvLSTM1D, keras.layers.ConvLSTM2D, keras.layers.ConvLSTM3D)
def conv_lstm(call: Call) -> Nest:
    """Rule of `ConvLSTM1D`, `ConvLSTM2D` and `ConvLSTM3D`."""
    layer, cell = call.layer, call.layer.cell

    def step(states: list[Tensor], element: list[Tensor]) -> list[Tensor]:
        new = _step(cell, element[0], states)
        is_there = element[1:]
        if not is_there:
            return new
        return [tf.where(*is_there, a, b) for a, b in zip(new, states, strict=True)]

    def loop(
        sequences: Tensor, initial_state: Nest, mask: Nest, training: bool = False
    ) -> Nest:
        _check(call, sequences, training)
        steps = sequences.shape[1]
        states = keras.tree.flatten(initial_state)
        seen: list[Tensor] = []
        over_time = [swapped(_watched(call, sequences, seen))]
        if mask is not None:
            mask = mask[0] if keras.tree.is_nested(mask) else mask
            over_time.append(_over_frames(mask, over_time[0].shape.rank))
        if layer.go_backwards:
            over_time = [tf.reverse(each, [0]) for each in over_time]
        found = tf.scan(step, over_time, states, parallel_iterations=1)
        h = tf.concat([states[0][None], found[0][:-1]], 0)
        # In the order of the inputs again.
        h = tf.reverse(h, [0]) if layer.go_backwards else h
        seen.append(joined(swapped(h, steps), steps))
        outputs = outputs_where_unmasked(layer, found[0], *over_time[1:])
        outputs = tf.ensure_shape(outputs, [steps, *states[0].shape])
        return outputs[-1], swapped(outputs, steps), [each[-1] for each in found]

    return call.run_with(inner_loop=loop)


def _check(call: Call, sequences: Tensor, training: bool) -> None:
    """Refuse what one convolution of all frames does not give."""
    cell = call.layer.cell
    if sequences.shape[1] is None:
        raise UnsupportedLayerError(
            "A ConvLSTM needs a known number of time steps. Received: "
            f"`{call.path}` with inputs of shape {sequences.shape}. Use "
            "`keras.Input((steps, ...))`."
        )
    if training and (cell.dropout or cell.recurrent_dropout):
        raise UnsupportedLayerError(
            "A ConvLSTM needs the same numbers for all of its gates. Received: "
            f"`{call.path}` with dropout={cell.dropout}, recurrent_dropout="
            f"{cell.recurrent_dropout}, drawn for each gate. Use a layer before it: "
            "`keras.layers.Dropout(0.2)`."
        )


def _watched(call: Call, sequences: Tensor, seen: list[Tensor]) -> Tensor:
    """Convolve the inputs, and watch what that gives.

    Args:
        call: The call.
        sequences: Shape ``(R, T, ...)``.
        seen: Will hold h before each step, shape ``(R T, ...)``.

    Returns:
        Shape ``(R, T, ...)``.
    """
    cell, steps = call.layer.cell, sequences.shape[1]
    frames = joined(sequences, steps)
    once = (1,) * cell.rank
    within = Geometry(once, once, "SAME")

    def terms(g: Tensor) -> list[Term]:
        x, h, g = (channels_last(cell, each) for each in (frames, *seen, g))
        bias = [] if cell.bias is None else [PerRow(cell.bias, g)]
        of_inputs = kernel_term(cell.kernel, x, g, geometry_of(cell))
        return [of_inputs, kernel_term(cell.recurrent_kernel, h, g, within), *bias]

    kernel = tf.cast(cell.kernel, frames.dtype)
    x = cell.input_conv(frames, kernel, padding=cell.padding)
    if cell.bias is not None:
        shape = [1] * x.shape.rank
        shape[_channels(cell)] = -1
        x += tf.reshape(tf.cast(cell.bias, x.dtype), shape)
    with call.repeated(steps):
        x = call.watch(x, terms)
    shape = tf.concat([tf.shape(sequences)[:2], tf.shape(x)[1:]], 0)
    return tf.ensure_shape(tf.reshape(x, shape), [*sequences.shape[:2], *x.shape[1:]])


def _step(cell: keras.layers.Layer, x: Tensor, states: list[Tensor]) -> list[Tensor]:
    """Return the states after a step, of x that the inputs of all gates gave."""
    h, c = states
    gates = x + cell.recurrent_conv(h, tf.cast(cell.recurrent_kernel, h.dtype))
    i, f, candidate, o = tf.split(gates, 4, axis=_channels(cell))
    gate = cell.recurrent_activation
    c = gate(f) * c + gate(i) * cell.activation(candidate)
    return [gate(o) * cell.activation(c), c]


def _channels(cell: keras.layers.Layer) -> int:
    return 1 if cell.data_format == "channels_first" else -1


def _over_frames(mask: Tensor, rank: int) -> Tensor:
    """``(R, T)`` -> ``(T, R, 1, ...)`` of a rank."""
    mask = tf.transpose(tf.cast(mask, tf.bool))
    shape = tf.concat([tf.shape(mask), [1] * (rank - 2)], 0)
    return tf.reshape(mask, shape)
