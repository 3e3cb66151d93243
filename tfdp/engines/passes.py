"""Runs a batch of any size through an engine, whole or in passes."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp import _tree
from tfdp._types import Nest, Tensor, Variable
from tfdp.losses.batch import Batch, number_of_rows, with_equal_rows

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
    has_fixed_size: bool = False,
    on_outputs: OnOutputs | None = None,
    shared_states: Sequence[Variable] = (),
) -> tuple[list[Tensor], Tensor]:
    """Run all rows in passes of at most `physical_batch_size`, adding the sums up.

    Memory is that of one pass. The first pass always runs, and outside of the loop
    of the others, where TensorFlow's graph optimizer reaches it: it was seen to run
    in two thirds of the time.

    Args:
        run_pass: What the engine does with a batch. All passes of a batch have one number
            of rows, of whole units.
        data: A `Batch`, or ``(x, y, sample_weight)``, nested tensors of N rows; N may
            be 0.
        rows_per_unit: Consecutive rows that are clipped together.
        physical_batch_size: Most rows in a pass, a multiple of `rows_per_unit`; None for
            all rows in one, filled up to whole units and to one unit at least.
        has_fixed_size: Whether every pass has exactly `physical_batch_size` rows, filled
            up with padding, for compilers and for layers that see their number. Otherwise
            there are as few passes as possible, as even as possible, and units that are
            nothing but padding are left out.
        on_outputs: Sees the rows of each pass, how many they are, and the model's
            outputs.
        shared_states: Variables that are put back before each of several passes. What
            is shared by all rows must not depend on which of them are in a pass:
            without one row, others would be in other passes.

    Returns:
        Clipped sums, and the norms of units that are not all padding, in order.
    """
    data = with_equal_rows(Batch.of(data))
    if not has_fixed_size:
        data = _without_empty_units(data, rows_per_unit)
    rows = number_of_rows(data)
    units = _divided(rows, rows_per_unit)
    number_of_passes, size = _cut(
        rows, rows_per_unit, physical_batch_size, has_fixed_size=has_fixed_size
    )
    # Here, since in the loop it would copy the batch in each pass.
    sources = _never_empty(data, rows)
    at_begin = [tf.identity(state.value) for state in shared_states]

    def one_pass(number: int | Tensor) -> tuple[list[Tensor], Tensor]:
        for state, value in zip(shared_states, at_begin, strict=True):
            state.assign(value)
        if size is None:
            batch = _whole(sources, rows, rows_per_unit)
        else:
            indices = number * size + tf.range(size)
            batch = _fill(sources, indices, rows, rows_per_unit)
        sums, norms, outputs = run_pass(batch)
        if on_outputs is not None:
            shown, real = data, rows
            if size is not None:
                marks = None if data.is_padding is None else batch.is_padding
                real = tf.clip_by_value(rows - number * size, 0, size)
                shown = _first(batch._replace(is_padding=marks), real)
            if real is not rows or not _is_of_whole_units(rows, rows_per_unit):
                outputs = _first(outputs, real)
            _show(on_outputs, shown, tf.convert_to_tensor(real), outputs)
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

    found = tf.TensorArray(norms.dtype, number_of_passes, element_shape=norms.shape)
    _, sums, found = tf.while_loop(
        lambda number, *_: number < number_of_passes,
        body,
        (tf.constant(1), sums, found.write(0, norms)),
        parallel_iterations=1,  # Several at once take the memory of several.
    )
    return sums, _of_real_units(found.concat()[:units], data, rows_per_unit)


def _cut(
    rows: int | Tensor,
    rows_per_unit: int | Tensor,
    most: int | None,
    *,
    has_fixed_size: bool,
) -> tuple[int | Tensor, int | Tensor | None]:
    """Return in how many passes rows go, and how many each of them has, None for all."""
    if most is None:
        return 1, None
    number = _at_least_one(_divided(rows, most))
    if has_fixed_size:
        return number, most
    units_of_pass = _divided(_divided(rows, rows_per_unit), number)
    return number, _at_least_one(units_of_pass) * rows_per_unit


def _divided(number: int | Tensor, by: int | Tensor) -> int | Tensor:
    """Divide, and round up."""
    return (number + by - 1) // by


def _at_least_one(number: int | Tensor) -> int | Tensor:
    return max(number, 1) if isinstance(number, int) else tf.maximum(number, 1)


def _of_real_units(norms: Tensor, data: Batch, rows_per_unit: int | Tensor) -> Tensor:
    """Leave out the norms of units that are nothing but padding: they are nobody's."""
    if data.is_padding is None:
        return norms
    return tf.boolean_mask(norms, ~_is_empty(data.is_padding, rows_per_unit))


def _is_empty(is_padding: Tensor, rows_per_unit: int | Tensor) -> Tensor:
    """Tell which units are nothing but padding; the last may lack rows."""
    missing = -tf.size(is_padding) % rows_per_unit
    marks = tf.pad(is_padding, [[0, missing]], constant_values=True)
    return tf.reduce_all(tf.reshape(marks, [-1, rows_per_unit]), axis=1)


def _without_empty_units(data: Batch, rows_per_unit: int | Tensor) -> Batch:
    """Leave out units that are nothing but padding."""
    if data.is_padding is None:
        return data
    is_empty = _is_empty(data.is_padding, rows_per_unit)
    is_real = ~tf.repeat(is_empty, rows_per_unit)[: tf.size(data.is_padding)]
    left: Batch = _tree.map_tensors(lambda each: tf.boolean_mask(each, is_real), data)
    if isinstance(rows_per_unit, int) and rows_per_unit == 1:
        # No padding is left.
        return left._replace(is_padding=None)
    return left


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
            padding = tf.fill([_at_least_one(rows)], tf.equal(rows, 0))
            return data._replace(is_padding=padding)
    units = _at_least_one(_divided(rows, rows_per_unit))
    indices = tf.range(units * rows_per_unit)
    return _fill(data, indices, rows, rows_per_unit)


def _never_empty(data: Batch, rows: int | Tensor) -> Batch:
    """Give an empty batch a row of zeros, or of empty strings."""
    if isinstance(rows, int) and rows > 0:
        return data
    missing = tf.cast(tf.equal(rows, 0), tf.int32)

    def with_row(tensor: Tensor) -> Tensor:
        shape = tf.concat([[missing], tf.shape(tensor)[1:]], 0)
        return tf.concat([tensor, tf.zeros(shape, tensor.dtype)], 0)

    existing: Batch = _tree.map_tensors(with_row, data)
    return existing


def _fill(
    data: Batch, indices: Tensor, rows: int | Tensor, rows_per_unit: int | Tensor
) -> Batch:
    """Take rows of whole units by index, of one at least; what lies past the last repeats it."""
    existing = tf.minimum(indices, _at_least_one(rows) - 1)

    def take(tensor: Tensor) -> Tensor:
        return tf.gather(tensor, existing)

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
