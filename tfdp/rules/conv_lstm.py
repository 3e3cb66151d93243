"""Convolutional recurrent layers, whose kernels slide over the frame of each step.

As in other recurrent layers, what the inputs give is computed for all time steps at
once. Its gradient is that of the sum which the gates see, so it says what both kernels
get: from the frames, and from the states before each step.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdp._types import Nest, Tensor, Variable
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call
from tfdp.rules.convolutional import channels_last, geometry_of
from tfdp.rules.geometry import Geometry
from tfdp.rules.kernels import kernel_term
from tfdp.rules.recurrent import dropout_masks, outputs_where_unmasked, swapped
from tfdp.rules.registry import rule
from tfdp.rules.terms import Columns, PerRow, Term
from tfdp.rules.time_distributed import joined


@rule(keras.layers.ConvLSTM1D, keras.layers.ConvLSTM2D, keras.layers.ConvLSTM3D)
def conv_lstm(call: Call) -> Nest:
    """Rule of `ConvLSTM1D`, `ConvLSTM2D` and `ConvLSTM3D`."""
    layer = call.layer

    def loop(
        sequences: Tensor, initial_state: Nest, mask: Nest, training: bool = False
    ) -> Nest:
        steps = sequences.shape[1]
        if steps is None:
            raise UnsupportedLayerError(
                "A ConvLSTM needs a known number of time steps. Received: "
                f"`{call.path}` with inputs of shape {sequences.shape}. Use "
                "`keras.Input((steps, ...))`."
            )
        states = keras.tree.flatten(initial_state)
        dropped, kept = dropout_masks(call, sequences[:, 0], states[0], training)
        before: list[Tensor] = []

        def states_seen() -> list[Tensor]:
            return [joined(each, steps) for each in _under(kept, before[0])]

        x = _watched(call, _under(dropped, sequences), states_seen)
        over_time = [swapped(x)]
        if mask is not None:
            mask = mask[0] if keras.tree.is_nested(mask) else mask
            over_time.append(_over_frames(mask, over_time[0].shape.rank))
        if layer.go_backwards:
            over_time = [tf.reverse(each, [0]) for each in over_time]
        step = _step_of(layer.cell, states[0].dtype, kept)
        found = tf.scan(step, over_time, states, parallel_iterations=1)
        h = tf.concat([states[0][None], found[0][:-1]], 0)
        # In the order of the inputs again.
        h = tf.reverse(h, [0]) if layer.go_backwards else h
        before.append(swapped(h, steps))
        outputs = outputs_where_unmasked(layer, found[0], *over_time[1:])
        outputs = tf.ensure_shape(outputs, [steps, *states[0].shape])
        return outputs[-1], swapped(outputs, steps), [each[-1] for each in found]

    return call.run_with(inner_loop=loop)


def _under(masks: list[Tensor], frames: Tensor) -> list[Tensor]:
    """Return frames ``(R, T, ...)`` under masks of the rows; themselves without any."""
    return [frames * mask[:, None] for mask in masks] or [frames]


def _watched(
    call: Call, sequences: list[Tensor], states_seen: Callable[[], list[Tensor]]
) -> Tensor:
    """Convolve the inputs, and watch what that gives.

    Args:
        call: The call.
        sequences: Shape ``(R, T, ...)``, for each block of filters.
        states_seen: What blocks of filters see of the states before each step, of
            shape ``(R T, ...)``. It is asked for when gradients are there.

    Returns:
        Shape ``(R, T, ...)``.
    """
    cell, (rows, steps) = call.layer.cell, sequences[0].shape[:2]
    frames = [joined(each, steps) for each in sequences]
    once = (1,) * cell.rank
    within = Geometry(once, once, "SAME")

    def term(variable: Variable, seen: list[Tensor], g: Tensor, of: Geometry) -> Term:
        seen = [channels_last(cell, each) for each in seen]
        make = functools.partial(kernel_term, geometry=of)
        return Columns.of(variable, seen, tf.split(g, len(seen), -1), make)

    def terms(g: Tensor) -> list[Term]:
        g = channels_last(cell, g)
        bias = [] if cell.bias is None else [PerRow(cell.bias, g)]
        of_inputs = term(cell.kernel, frames, g, geometry_of(cell))
        return [of_inputs, term(cell.recurrent_kernel, states_seen(), g, within), *bias]

    convolve = functools.partial(cell.input_conv, padding=cell.padding)
    kernels = tf.split(tf.cast(cell.kernel, frames[0].dtype), len(frames), -1)
    x = _convolved(cell, convolve, frames, kernels)
    if cell.bias is not None:
        shape = [1] * x.shape.rank
        shape[_channels(cell)] = -1
        x += tf.reshape(tf.cast(cell.bias, x.dtype), shape)
    with call.repeated(steps):
        x = call.watch(x, terms)
    shape = tf.concat([tf.shape(sequences[0])[:2], tf.shape(x)[1:]], 0)
    return tf.ensure_shape(tf.reshape(x, shape), [rows, steps, *x.shape[1:]])


def _step_of(
    cell: keras.layers.Layer, dtype: tf.DType, kept: list[Tensor]
) -> Callable[..., list[Tensor]]:
    """Return what computes the states after a step, of those before it."""
    kernels = tf.split(tf.cast(cell.recurrent_kernel, dtype), max(len(kept), 1), -1)

    def step(states: list[Tensor], element: list[Tensor]) -> list[Tensor]:
        (h, c), (x, *is_there) = states, element
        seen = [h * mask for mask in kept] or [h]
        gates = x + _convolved(cell, cell.recurrent_conv, seen, kernels)
        i, f, candidate, o = tf.split(gates, 4, axis=_channels(cell))
        gate = cell.recurrent_activation
        c = gate(f) * c + gate(i) * cell.activation(candidate)
        new = [gate(o) * cell.activation(c), c]
        if not is_there:
            return new
        return [tf.where(*is_there, a, b) for a, b in zip(new, states, strict=True)]

    return step


def _convolved(
    cell: keras.layers.Layer,
    convolve: Callable[[Tensor, Tensor], Tensor],
    seen: list[Tensor],
    kernels: list[Tensor],
) -> Tensor:
    """Convolve what each block of filters sees with its kernel."""
    blocks = [convolve(*each) for each in zip(seen, kernels, strict=True)]
    return blocks[0] if len(blocks) == 1 else tf.concat(blocks, _channels(cell))


def _channels(cell: keras.layers.Layer) -> int:
    return 1 if cell.data_format == "channels_first" else -1


def _over_frames(mask: Tensor, rank: int) -> Tensor:
    """``(R, T)`` -> ``(T, R, 1, ...)`` of a rank."""
    mask = tf.transpose(tf.cast(mask, tf.bool))
    shape = tf.concat([tf.shape(mask), [1] * (rank - 2)], 0)
    return tf.reshape(mask, shape)
