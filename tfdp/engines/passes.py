"""Runs a batch of any size through an engine, whole or in passes of fixed size."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp import _tree
from tfdp._types import Nest, Tensor, Variable
from tfdp.losses.objective import Batch, number_of_rows

# (batch) -> clipped sums, norms of the units, outputs of the model.
ClipBatch = Callable[[Batch], tuple[list[Tensor], Tensor, Nest]]

# (rows of the data in the pass, their number, outputs of the model); rows that are
# padding are left out.
OnOutputs = Callable[[Nest, Tensor, Nest], None]


def run(
    run_pass: ClipBatch,
    data: Nest,
    *,
    rows_per_unit: int | Tensor,
    physical_batch_size: int | None = None,
    on_outputs: OnOutputs | None = None,
    shared_states: Sequence[Variable] = (),
) -> tuple[list[Tensor], Tensor]:
    """Run all rows in passes of `physical_batch_size`, adding the sums up.

    Memory is that of one pass. The first pass always runs, and outside of the loop
    of the others, where TensorFlow's graph optimizer reaches it: it was seen to run
    in two thirds of the time.

    Args:
        run_pass: What the engine does with a batch; sees batches of one static shape
            only, where there are several passes.
        data: A `Batch`, or ``(x, y, sample_weight)``, nested tensors of N rows; N may
            be 0.
        rows_per_unit: Consecutive rows that are clipped together.
        physical_batch_size: Rows in a pass, a multiple of `rows_per_unit`; None for all
            rows in one, filled up to whole units and to one unit at least.
        on_outputs: Sees the rows of each pass, how many they are, and the model's
            outputs.
        shared_states: Variables that are put back before each of several passes. What
            is shared by all rows must not depend on which of them are in a pass:
            without one row, others would be in other passes.

    Returns:
        Clipped sums, and the units' norms.
    """
    data = Batch.of(data)
    rows = number_of_rows(data)
    units = (rows + rows_per_unit - 1) // rows_per_unit
    size = physical_batch_size
    at_begin = [tf.identity(state.value) for state in shared_states]

    def one_pass(number: int | Tensor) -> tuple[list[Tensor], Tensor]:
        for state, value in zip(shared_states, at_begin, strict=True):
            state.assign(value)
        if size is None:
            batch = _whole(data, rows, rows_per_unit)
        else:
            first = number * size
            batch = _fill(data, first + tf.range(size), rows, rows_per_unit)
            batch = _tree.map_tensors(
                lambda tensor: tf.ensure_shape(tensor, [size, *tensor.shape[1:]]), batch
            )
        sums, norms, outputs = run_pass(batch)
        if on_outputs is not None:
            shown, real = data, tf.convert_to_tensor(rows)
            if size is not None:
                marks = None if data.is_padding is None else batch.is_padding
                real = tf.clip_by_value(rows - first, 0, size)
                shown = _first(batch._replace(is_padding=marks), real)
            if size is not None or not _is_of_whole_units(rows, rows_per_unit):
                outputs = _first(outputs, real)
            _show(on_outputs, shown, real, outputs)
        return sums, norms

    sums, norms = one_pass(0)
    if size is None:
        norms = tf.ensure_shape(norms[:units], [tf.get_static_value(units)])
        return sums, _of_real_units(norms, data, rows_per_unit)

    def body(
        number: Tensor, sums: list[Tensor], norms: tf.TensorArray
    ) -> tuple[Tensor, list[Tensor], tf.TensorArray]:
        parts, pass_norms = one_pass(number)
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
        return number + 1, sums, norms.write(number, pass_norms)

    passes = tf.maximum((rows + size - 1) // size, 1)
    found = tf.TensorArray(norms.dtype, passes, element_shape=norms.shape)
    _, sums, found = tf.while_loop(
        lambda number, *_: number < passes,
        body,
        (tf.constant(1), sums, found.write(0, norms)),
        parallel_iterations=1,  # Several at once take the memory of several.
    )
    return sums, _of_real_units(found.concat()[:units], data, rows_per_unit)


def _of_real_units(norms: Tensor, data: Batch, rows_per_unit: int | Tensor) -> Tensor:
    """Leave out the norms of units that are nothing but padding: they are nobody's."""
    if data.is_padding is None:
        return norms
    missing = tf.size(norms) * rows_per_unit - tf.size(data.is_padding)
    marks = tf.pad(data.is_padding, [[0, missing]], constant_values=True)
    is_empty = tf.reduce_all(tf.reshape(marks, [-1, rows_per_unit]), axis=1)
    return tf.boolean_mask(norms, ~is_empty)


def _first(nest: Nest, rows: int | Tensor) -> Nest:
    return _tree.map_tensors(lambda each: each[:rows], nest)


def _show(on_outputs: OnOutputs, data: Batch, rows: Tensor, outputs: Nest) -> None:
    """Show the rows of a pass, but not the padding among them."""
    shown = (*data[:3], outputs)
    if data.is_padding is not None:
        is_real = ~data.is_padding
        shown = _tree.map_tensors(lambda each: tf.boolean_mask(each, is_real), shown)
        rows = tf.math.count_nonzero(is_real, dtype=rows.dtype)
    on_outputs(shown[:3], rows, shown[3])


def _emptied(tensor: Tensor, marks: Tensor) -> Tensor:
    """Return a tensor with zeros, or empty strings, in the rows that are marked."""
    marks = tf.reshape(marks, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.where(marks, tf.zeros_like(tensor), tensor)


def _is_of_whole_units(rows: int | Tensor, rows_per_unit: int | Tensor) -> bool:
    """Tell whether it is known that so many rows are whole units, and one at least."""
    if not (isinstance(rows, int) and isinstance(rows_per_unit, int)):
        return False
    return rows > 0 and rows % rows_per_unit == 0


def _whole(data: Batch, rows: int | Tensor, rows_per_unit: int | Tensor) -> Batch:
    """Fill all rows up to whole units, and to one unit at least."""
    if data.is_padding is None:
        if _is_of_whole_units(rows, rows_per_unit):
            return data._replace(is_padding=tf.zeros([rows], tf.bool))
        if isinstance(rows_per_unit, int) and rows_per_unit == 1:
            # Nothing is missing but the one row of an empty batch.
            missing = tf.cast(tf.equal(rows, 0), tf.int32)
            filled: Batch = _tree.map_tensors(
                lambda tensor: tf.concat([tensor, _zeros(missing, tensor)], 0), data
            )
            return filled._replace(is_padding=tf.fill([rows + missing], missing > 0))
    units = (rows + rows_per_unit - 1) // rows_per_unit
    indices = tf.range(tf.maximum(units, 1) * rows_per_unit)
    return _fill(data, indices, rows, rows_per_unit)


def _zeros(rows: Tensor, like: Tensor) -> Tensor:
    """Return so many rows of zeros, or of empty strings, beside those of a tensor."""
    return tf.zeros(tf.concat([[rows], tf.shape(like)[1:]], 0), like.dtype)


def _fill(
    data: Batch, indices: Tensor, rows: int | Tensor, rows_per_unit: int | Tensor
) -> Batch:
    """Take rows of whole units by index; what lies past the last row repeats it."""
    # An empty batch has no row to repeat: it gets one of zeros.
    is_empty = tf.cast(tf.equal(rows, 0), tf.int32)
    existing = tf.minimum(indices, tf.maximum(rows, 1) - 1)

    def take(tensor: Tensor) -> Tensor:
        filled = tf.concat([tensor, _zeros(is_empty, tensor)], 0)
        return tf.gather(filled, existing)

    is_padding = indices >= rows
    if data.is_padding is None:
        filled: Batch = _tree.map_tensors(take, data)
        return filled._replace(is_padding=is_padding)
    is_padding |= take(data.is_padding)
    # Whatever is in padding, NaN for example, must not reach the rows beside it: it
    # becomes a row of its unit. Of zeros a model may make NaN, too.
    of_units = tf.reshape(is_padding, [-1, rows_per_unit])
    places = tf.reshape(tf.range(tf.size(indices)), [-1, rows_per_unit])
    first_real = tf.argmin(of_units, axis=1, output_type=tf.int32)[:, tf.newaxis]
    own = tf.where(of_units, places[:, :1] + first_real, places)
    existing = tf.gather(existing, tf.reshape(own, [-1]))
    nobodys = tf.reshape(of_units & tf.reduce_all(of_units, 1, keepdims=True), [-1])
    filled = _tree.map_tensors(lambda tensor: _emptied(take(tensor), nobodys), data)
    return filled._replace(is_padding=is_padding)
