"""Recurrent layers, whose matrices meet every time step.

The inputs are multiplied by their matrix for all time steps at once, before the loop
over time. What the gradient of that product says about a step is what both matrices
of a step see.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest, Tensor, Variable
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call
from tfdp.rules.registry import find, own_variables, rule
from tfdp.rules.scan import Cell, Matrices, Scan
from tfdp.rules.terms import Columns, PerRow, Term
from tfdp.rules.unrolling import MOST_UNROLLED


@rule(keras.layers.RNN)
def rnn(call: Call) -> Nest:
    """Rule of `keras.layers.RNN`: that of its cell, at once or step by step.

    Loops over cells with layers in them come here only where they are not taken whole.

    Args:
        call: The call.

    Returns:
        The layer's outputs.

    Raises:
        UnsupportedLayerError: If a cell that is not one of Keras's would take too many
            steps.
    """
    of_cell = find(call.layer.cell)
    if of_cell in (simple_rnn, lstm, gru):
        return of_cell(call)
    steps = call.inputs.shape[1]
    if steps is None or steps > MOST_UNROLLED:
        raise UnsupportedLayerError(
            f"Cells of one's own can be taken step by step up to {MOST_UNROLLED} steps. "
            f"Received: `{call.path}` with inputs of shape {call.inputs.shape}. Use "
            "`keras.Input((steps, features))` with fewer, or one of Keras's layers for "
            "each cell, such as `keras.layers.LSTM(8)`."
        )
    if of_cell is None and own_variables(call.layer.cell):
        raise UnsupportedLayerError(
            "A cell with layers in it must have no variables of its own. Received: "
            f"`{call.path}` with cell={call.layer.cell!r}. Let a layer of the cell have "
            "them: `self.kept = keras.layers.Dense(units, use_bias=False)`."
        )
    # Each step is a call of the cell, outside of loops: the cell's rule takes it, or
    # those of the layers in it.
    return call.run_with(unroll=True)


@rule(keras.layers.SimpleRNN, keras.layers.SimpleRNNCell)
def simple_rnn(call: Call) -> Nest:
    """Rule of `keras.layers.SimpleRNN` and its cell."""
    cell = _cell_of(call)

    def make(like: Tensor, kept: list[Tensor]) -> Cell:
        matrices = _recurrent_matrices(call, like, kept)

        def step(z: Tensor, states: list[Tensor]) -> list[Tensor]:
            del states
            return [_activated(cell.activation, z)]

        return Cell(matrices, step, *_terms(cell, matrices))

    return _run(call, make, cell.bias)


@rule(keras.layers.LSTM, keras.layers.LSTMCell)
def lstm(call: Call) -> Nest:
    """Rule of `keras.layers.LSTM` and its cell."""
    cell = _cell_of(call)

    def make(like: Tensor, kept: list[Tensor]) -> Cell:
        matrices = _recurrent_matrices(call, like, kept)

        def step(z: Tensor, states: list[Tensor]) -> list[Tensor]:
            i, f, candidate, o = tf.split(z, 4, axis=-1)
            gate = cell.recurrent_activation
            c = gate(f) * states[1] + gate(i) * _activated(cell.activation, candidate)
            return [gate(o) * _activated(cell.activation, c), c]

        return Cell(matrices, step, *_terms(cell, matrices))

    return _run(call, make, cell.bias)


@rule(keras.layers.GRU, keras.layers.GRUCell)
def gru(call: Call) -> Nest:
    """Rule of `keras.layers.GRU` and its cell, the reset gate before or after."""
    cell = _cell_of(call)
    make = _reset_after if cell.reset_after else _reset_before
    bias = cell.bias
    if bias is not None and cell.reset_after:
        bias = bias[0]
    return _run(call, lambda like, kept: make(call, like, kept), bias)


def _reset_after(call: Call, like: Tensor, kept: list[Tensor]) -> Cell:
    cell = _cell_of(call)
    matrices = _recurrent_matrices(call, like, kept)
    offset = 0.0
    if cell.bias is not None:
        call.hide(cell.bias)
        offset = tf.cast(cell.bias[1], like.dtype)

    def step(x: Tensor, inner: Tensor, states: list[Tensor]) -> list[Tensor]:
        x_z, x_r, x_h = tf.split(x, 3, axis=-1)
        inner_z, inner_r, inner_h = tf.split(inner + offset, 3, axis=-1)
        z = cell.recurrent_activation(x_z + inner_z)
        r = cell.recurrent_activation(x_r + inner_r)
        candidate = _activated(cell.activation, x_h + r * inner_h)
        return [z * states[0] + (1 - z) * candidate]

    def terms(g: Tensor, g_inner: Tensor, h: Tensor) -> list[Term]:
        del g
        return [_products(cell.recurrent_kernel, matrices.seen(h), g_inner)]

    def bias_terms(g: Tensor, g_inner: Tensor) -> list[Term]:
        if cell.bias is None:
            return []
        # The bias has two rows: one beside the inputs, one beside the inner products.
        return [PerRow(cell.bias, tf.stack([g, g_inner], axis=-2))]

    return Cell(matrices, step, terms, bias_terms, inner_differs=True)


def _reset_before(call: Call, like: Tensor, kept: list[Tensor]) -> Cell:
    cell = _cell_of(call)
    # The candidate's columns see another input.
    widths = [cell.units] * 3 if kept else [2 * cell.units, cell.units]
    of_gates, of_candidate = _recurrent_matrices(call, like, kept, widths).split(-1)

    def step(projected: Tensor, states: list[Tensor]) -> list[Tensor]:
        z, r, x = tf.split(projected, 3, axis=-1)
        z, r = cell.recurrent_activation(z), cell.recurrent_activation(r)
        reset = of_candidate.times(r * states[0])
        candidate = _activated(cell.activation, x + reset)
        return [z * states[0] + (1 - z) * candidate]

    def terms(g: Tensor, x: Tensor, h: Tensor) -> list[Term]:
        # The reset gate once more, for all steps at once: the loop does not hold it.
        seen = of_gates.seen(h)
        of_reset = slice(cell.units, 2 * cell.units)
        inner = _over_time(of_gates.products, seen)
        r = cell.recurrent_activation(x[..., of_reset] + inner[..., of_reset])
        seen = [*seen, *of_candidate.seen(r * h)]
        return [_products(cell.recurrent_kernel, seen, g, widths)]

    return Cell(of_gates, step, terms, _terms(cell, of_gates)[1])


def _terms(
    cell: keras.layers.Layer, matrices: Matrices
) -> tuple[Callable[..., list[Term]], Callable[..., list[Term]]]:
    """Return what `g` says about the recurrent matrix, and about the bias."""

    def terms(g: Tensor, g_inner: Tensor, h: Tensor) -> list[Term]:
        del g_inner
        return [_products(cell.recurrent_kernel, matrices.seen(h), g)]

    def bias_terms(g: Tensor, g_inner: Tensor) -> list[Term]:
        del g_inner
        return [] if cell.bias is None else [PerRow(cell.bias, g)]

    return terms, bias_terms


def _products(
    variable: Variable, seen: list[Tensor], g: Tensor, widths: list[int] | None = None
) -> Term:
    """Return the term of a matrix whose blocks of columns multiply what they see."""
    return Columns.of(variable, seen, tf.split(g, widths or len(seen), -1))


def _run(
    call: Call,
    make: Callable[[Tensor, list[Tensor]], Cell],
    bias: Variable | Tensor | None,
) -> Nest:
    """Run a layer, or one step of a cell."""
    layer = call.layer
    if len(_keras.flatten_layers(_cell_of(call))) > 1:
        raise UnsupportedLayerError(
            "A recurrent layer needs activations without variables. Received: "
            f"`{call.path}` with a layer in its cell. Use a function: "
            "`activation='relu'`."
        )
    if not isinstance(layer, keras.layers.RNN):
        return _run_step(call, make, bias)

    def loop(
        sequences: Tensor, initial_state: Nest, mask: Nest, training: bool = False
    ) -> Nest:
        mask = mask[0] if keras.tree.is_nested(mask) else mask
        states = keras.tree.flatten(initial_state)
        dropped, kept = dropout_masks(call, sequences[:, 0], states[0], training)
        inputs = [sequences * mask[:, None] for mask in dropped] or [sequences]
        x = _projected(call, bias, inputs)
        cell = make(x, kept)
        seen: list[Tensor] = []

        # Zeros are added to the inner products where these have gradients of their own:
        # what is watched must be a tensor of all time steps, outside of the loop.
        watched = [x]
        if cell.inner_differs:
            shape = [*tf.unstack(tf.shape(x)[:2]), sum(cell.matrices.widths)]
            watched.append(tf.zeros(shape, x.dtype))
        watched = _watch(call, cell, inputs, watched, seen)
        in_order = tf.reverse if layer.go_backwards else lambda tensor, axes: tensor
        over_time = [in_order(swapped(tensor), [0]) for tensor in watched]
        if mask is not None:
            mask = in_order(tf.transpose(tf.cast(mask, tf.bool))[..., None], [0])
        # The custom gradient of a scan has none itself.
        scan = Scan(cell, mask)
        run = scan.run_plainly if call.differentiates_twice else scan.run
        before, outputs, states = run(over_time, states)
        outputs = outputs_where_unmasked(layer, outputs, mask)
        # In the order of the inputs again, as the gradients of x are.
        seen.append(swapped(in_order(before, [0]), sequences.shape[1]))
        # As Keras's own loop does: the layers that follow may need the length.
        outputs = tf.ensure_shape(outputs, [sequences.shape[1], None, None])
        return outputs[-1], swapped(outputs), states

    return call.run_with(inner_loop=loop)


def _run_step(
    call: Call,
    make: Callable[[Tensor, list[Tensor]], Cell],
    bias: Variable | Tensor | None,
) -> Nest:
    """Run a cell as a loop over one step."""
    arguments = call.bound()
    x, of_before = call.inputs, arguments["states"]
    states = keras.tree.flatten(of_before)
    dropped, kept = dropout_masks(call, x, states[0], arguments["training"])
    inputs = [(x * mask)[:, None] for mask in dropped] or [x[:, None]]
    x = _projected(call, bias, inputs)
    cell = make(x, kept)
    inner = cell.matrices.times(states[0])
    watched = [x, inner[:, None]] if cell.inner_differs else [x]
    # States that are zeros at first do not say whose rows they are: nothing is moved.
    seen = [states[0][:, None]]
    x, *others = _watch(call, cell, inputs, watched, seen, is_moved=False)
    inner = others[0][:, 0] if others else inner
    new = cell.step(*cell.projected(x[:, 0], inner), states)
    return new[0], keras.tree.pack_sequence_as(of_before, new)


def _projected(
    call: Call, bias: Variable | Tensor | None, inputs: list[Tensor]
) -> Tensor:
    """Multiply the inputs of all steps, ``(R, T, d)`` for each block of columns."""
    kernel = tf.cast(_cell_of(call).kernel, inputs[0].dtype)
    blocks = tf.split(kernel, len(inputs), 1)
    products = [tf.matmul(*each) for each in zip(inputs, blocks, strict=True)]
    x = tf.concat(products, -1)
    return x if bias is None else x + tf.cast(bias, x.dtype)


def _watch(
    call: Call,
    cell: Cell,
    inputs: list[Tensor],
    tensors: list[Tensor],
    seen: list[Tensor],
    *,
    is_moved: bool = True,
) -> list[Tensor]:
    """Watch the projected inputs, and the inner products if their gradients differ.

    Args:
        call: The call.
        cell: The cell.
        inputs: What was projected, for each block of columns.
        tensors: The projected inputs, and perhaps what the inner products are sums of.
        seen: Will hold h before each step, shape ``(R, T, units)``.
        is_moved: Whether units may have weights of their own here.

    Returns:
        The tensors.
    """
    watched: list[Tensor] = []

    def linear_terms(*gradients: Tensor) -> list[Term]:
        of_inputs = _products(_cell_of(call).kernel, inputs, gradients[0])
        return [of_inputs, *cell.bias_terms(gradients[0], gradients[-1])]

    def terms(*gradients: Tensor) -> list[Term]:
        other = gradients[1] if cell.inner_differs else watched[0]
        of_matrix = cell.terms(gradients[0], other, *seen)
        return [*of_matrix, *linear_terms(*gradients)]

    moved = linear_terms if is_moved else None
    watched += call.watch_all(tensors, terms, linear_terms=moved)
    return watched


def _recurrent_matrices(
    call: Call, like: Tensor, kept: list[Tensor], widths: list[int] | None = None
) -> Matrices:
    """Return the recurrent matrix of a layer, in the dtype of a tensor.

    Args:
        call: The call.
        like: The tensor.
        kept: Masks of the state, one for each block of columns, or none.
        widths: Columns of the blocks; by default as many in each.
    """
    matrix = _cell_of(call).recurrent_kernel
    call.hide(matrix)
    if widths is None:
        blocks = max(len(kept), 1)
        widths = [matrix.shape[1] // blocks] * blocks
    value = tf.cast(matrix, like.dtype)
    return Matrices.of(value, call.move(matrix), widths, kept)


def _cell_of(call: Call) -> keras.layers.Layer:
    """Return the cell of a recurrent layer, or the one that is called by itself."""
    layer = call.layer
    return layer.cell if isinstance(layer, keras.layers.RNN) else layer


def dropout_masks(
    call: Call, x: Tensor, h: Tensor, training: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the masks of the inputs and of the states: none, one, or for each gate."""
    cell = _cell_of(call)
    if not training:
        return [], []
    masks = cell.get_dropout_mask(x), cell.get_recurrent_dropout_mask(h)
    dropped, kept = ([] if m is None else keras.tree.flatten(m) for m in masks)
    return dropped, kept


def _over_time(
    function: Callable[[list[Tensor]], Tensor], seen: list[Tensor]
) -> Tensor:
    """Apply a function of ``(R, units)``, one or several, to ``(R, T, units)``."""
    rows, steps = tf.unstack(tf.shape(seen[0])[:2])
    flat = function([tf.reshape(h, [-1, h.shape[-1]]) for h in seen])
    return tf.reshape(flat, [rows, steps, flat.shape[-1]])


def outputs_where_unmasked(
    layer: keras.layers.RNN, outputs: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return what a layer puts out, of what its cell does: ``(T, R, ...)``."""
    if mask is None:
        return outputs
    if not layer.zero_output_for_mask:
        # Before the first step that counts there is no output.
        mask = tf.cumsum(tf.cast(mask, tf.int32)) > 0
    return tf.where(mask, outputs, tf.zeros_like(outputs))


def swapped(tensor: Tensor, steps: int | None = None) -> Tensor:
    """Swap the axes of rows and of time; loops forget how many steps they take."""
    swapped = tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])
    return tf.ensure_shape(swapped, [None, steps, *[None] * (tensor.shape.rank - 2)])


def _activated(activation: Callable[[Tensor], Tensor] | None, tensor: Tensor) -> Tensor:
    return tensor if activation is None else activation(tensor)
