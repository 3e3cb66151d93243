"""Recurrent layers, whose matrices meet every time step.

The inputs are multiplied by their matrix for all time steps at once, before the loop
over time. What the gradient of that product says about a step is what both matrices
of a step see.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.recording import Call
from tfdp.rules.terms import OuterProducts, PerRow, Term

# (projected inputs of a step, masked h, states) -> (new states, what to collect)
Step = Callable[..., tuple[list[tf.Tensor], list[tf.Tensor]]]

# (gradient of the projected inputs, h that each step saw, collected) -> terms
RecurrentTerms = Callable[..., list[Term]]


def simple_rnn(call: Call) -> Any:
    """Rule of `keras.layers.SimpleRNN`."""
    cell = call.layer.cell

    def step(x: tf.Tensor, h: tf.Tensor, states: list[tf.Tensor]) -> Any:
        del states
        z = x + tf.matmul(h, _constant(cell.recurrent_kernel, h))
        return [_activated(cell.activation, z)], []

    return _run(call, step, _plain_terms(cell), cell.bias)


def lstm(call: Call) -> Any:
    """Rule of `keras.layers.LSTM`."""
    cell = call.layer.cell

    def step(x: tf.Tensor, h: tf.Tensor, states: list[tf.Tensor]) -> Any:
        z = x + tf.matmul(h, _constant(cell.recurrent_kernel, h))
        i, f, candidate, o = tf.split(z, 4, axis=-1)
        gate = cell.recurrent_activation
        c = gate(f) * states[1] + gate(i) * _activated(cell.activation, candidate)
        return [gate(o) * _activated(cell.activation, c), c], []

    return _run(call, step, _plain_terms(cell), cell.bias)


def gru(call: Call) -> Any:
    """Rule of `keras.layers.GRU`, with the reset gate before or after the matrix."""
    cell = call.layer.cell
    units, reset_after = cell.units, cell.reset_after

    def step(x: tf.Tensor, h: tf.Tensor, states: list[tf.Tensor]) -> Any:
        kernel = _constant(cell.recurrent_kernel, h)
        x_z, x_r, x_h = tf.split(x, 3, axis=-1)
        if reset_after:
            inner = tf.matmul(h, kernel)
            if cell.bias is not None:
                inner += _constant(cell.bias, h)[1]
            inner_z, inner_r, inner_h = tf.split(inner, 3, axis=-1)
        else:
            inner = tf.matmul(h, kernel[:, : 2 * units])
            inner_z, inner_r = tf.split(inner, 2, axis=-1)
        z = cell.recurrent_activation(x_z + inner_z)
        r = cell.recurrent_activation(x_r + inner_r)
        if reset_after:
            inner_h = r * inner_h
        else:
            inner_h = tf.matmul(r * h, kernel[:, 2 * units :])
        candidate = _activated(cell.activation, x_h + inner_h)
        return [z * states[0] + (1 - z) * candidate], [r]

    def terms(g: tf.Tensor, seen: tf.Tensor, collected: list[tf.Tensor]) -> list[Term]:
        (r,) = collected
        gates, candidate = g[..., : 2 * units], g[..., 2 * units :]
        if not reset_after:
            # The columns of the candidate see another input: each use leaves the
            # other's columns zero.
            zeros = tf.zeros_like(candidate)
            of_gates = tf.concat([gates, zeros], -1)
            of_candidate = tf.concat([tf.zeros_like(gates), candidate], -1)
            terms: list[Term] = [
                OuterProducts(cell.recurrent_kernel, seen, of_gates),
                OuterProducts(cell.recurrent_kernel, r * seen, of_candidate),
            ]
            return terms if cell.bias is None else [*terms, PerRow(cell.bias, g)]
        inner = tf.concat([gates, r * candidate], -1)
        terms = [OuterProducts(cell.recurrent_kernel, seen, inner)]
        if cell.bias is not None:
            terms.append(PerRow(cell.bias, tf.stack([g, inner], axis=-2)))
        return terms

    bias = None if cell.bias is None else cell.bias[0] if reset_after else cell.bias
    return _run(call, step, terms, bias)


def _plain_terms(cell: Any) -> RecurrentTerms:
    def terms(g: tf.Tensor, seen: tf.Tensor, collected: list[tf.Tensor]) -> list[Term]:
        del collected
        of_matrix = OuterProducts(cell.recurrent_kernel, seen, g)
        return [of_matrix] if cell.bias is None else [of_matrix, PerRow(cell.bias, g)]

    return terms


def _run(call: Call, step: Step, terms: RecurrentTerms, bias: Any) -> Any:
    """Run the layer's own code around a loop over projected inputs."""
    layer = call.layer
    cell = layer.cell

    def loop(
        sequences: Any, initial_state: Any, mask: Any, training: Any = False
    ) -> Any:
        mask = mask[0] if keras.tree.is_nested(mask) else mask
        initial_state = keras.tree.flatten(initial_state)
        dropped, kept_h = _dropout_masks(call, sequences, initial_state[0], training)
        inputs = sequences if dropped is None else sequences * dropped[:, None]
        projected = tf.matmul(inputs, tf.cast(cell.kernel, inputs.dtype))
        if bias is not None:
            projected += tf.cast(bias, projected.dtype)
        found: dict[str, Any] = {}

        def all_terms(g: tf.Tensor) -> list[Term]:
            of_inputs = OuterProducts(cell.kernel, inputs, g)
            return [of_inputs, *terms(g, found["seen"], found["collected"])]

        projected = call.watch(projected, all_terms)

        def one_step(x: tf.Tensor, states: Any) -> Any:
            states = list(states)
            h = states[0] if kept_h is None else states[0] * kept_h
            new_states, collected = step(x, h, states)
            seen = [] if mask is None else [states[0]]
            return [new_states[0], *seen, *collected], new_states

        last, outputs, states = _keras.rnn(
            one_step,
            projected,
            initial_state,
            go_backwards=layer.go_backwards,
            mask=mask,
            unroll=layer.unroll and mask is None,
            input_length=sequences.shape[1],
            zero_output_for_mask=layer.zero_output_for_mask,
            return_all_outputs=True,
        )
        outputs, *collected = outputs
        if mask is None:
            first = initial_state[0][:, None]
            seen = tf.concat([first, outputs[:, :-1]], axis=1)
        else:
            # After a masked step the state is not the output before.
            seen, *collected = collected
        if kept_h is not None:
            seen *= kept_h[:, None]
        if layer.go_backwards:
            seen, *collected = (tf.reverse(t, [1]) for t in (seen, *collected))
        found.update(seen=seen, collected=collected)
        return last[0], outputs, states

    return call.run_with(inner_loop=loop)


def _dropout_masks(
    call: Call, sequences: tf.Tensor, h: tf.Tensor, training: Any
) -> tuple[Any, Any]:
    """Return the masks of the inputs and of the states, None where there is none.

    Raises:
        UnsupportedLayerError: If the gates have masks of their own.
    """
    cell = call.layer.cell
    if not training:
        return None, None
    masks = (
        cell.get_dropout_mask(sequences[:, 0]),
        cell.get_recurrent_dropout_mask(h),
    )
    if any(isinstance(mask, list) for mask in masks):
        raise UnsupportedLayerError(
            "A recurrent layer needs one dropout mask for all of its gates. Received: "
            f"`{call.path}` with a mask for each gate. Use `implementation=2` and no "
            "`recurrent_dropout`."
        )
    return masks


def _constant(variable: Any, like: tf.Tensor) -> tf.Tensor:
    """Return a variable's value, whose gradient nobody needs inside of the loop."""
    return tf.stop_gradient(tf.cast(variable, like.dtype))


def _activated(activation: Any, tensor: tf.Tensor) -> tf.Tensor:
    return tensor if activation is None else activation(tensor)


RULES = {
    keras.layers.SimpleRNN: simple_rnn,
    keras.layers.LSTM: lstm,
    keras.layers.GRU: gru,
}
