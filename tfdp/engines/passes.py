"""Runs a batch of any size through an engine, whole or in passes of fixed size."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp import _tree
from tfdp._types import Nest, Tensor, Variable
from tfdp.losses.objective import Batch

# (batch) -> clipped sums, norms of the units, outputs of the model.
ClipBatch = Callable[[Batch], tuple[list[Tensor], Tensor, Nest]]

# (rows of the data in the pass, their number, outputs of the model).
OnOutputs = Callable[[Nest, Tensor, Nest], None]


def number_of_rows(data: Nest) -> int | Tensor:
    """Return the length of the leading axis, as an int where it is static."""
    first = _tree.tensors(data)[0]
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]


def run_whole(
    run_pass: ClipBatch, data: Nest, *, rows_per_unit: int | Tensor
) -> tuple[list[Tensor], Tensor, Nest]:
    """Run all rows in one pass, filled up to whole units and to one unit at least.

    Args:
        run_pass: What the engine does with a batch.
        data: ``(x, y, sample_weight)``, nested tensors of N rows; N may be 0.
        rows_per_unit: Consecutive rows that are clipped together.

    Returns:
        Clipped sums, the units' norms, and the model's outputs for the N rows.
    """
    rows = number_of_rows(data)
    units = (rows + rows_per_unit - 1) // rows_per_unit
    filled = tf.maximum(units, 1) * rows_per_unit
    sums, norms, outputs = run_pass(_fill(data, tf.range(filled), rows))
    return sums, norms[:units], _tree.map_tensors(lambda rows_: rows_[:rows], outputs)


def run_in_passes(
    run_pass: ClipBatch,
    data: Nest,
    *,
    rows_per_unit: int,
    physical_batch_size: int,
    on_outputs: OnOutputs | None,
    shared_states: Sequence[Variable] = (),
) -> tuple[list[Tensor], Tensor]:
    """Run the rows in passes of `physical_batch_size`, adding the sums up.

    Memory is that of one pass. The first pass always runs, and outside of the loop
    of the others, where TensorFlow's graph optimizer reaches it: it was seen to run
    in two thirds of the time.

    Args:
        run_pass: What the engine does with a batch; sees batches of one static shape only.
        data: ``(x, y, sample_weight)``, nested tensors of N rows; N may be 0.
        rows_per_unit: Consecutive rows that are clipped together; divides the
            rows of a pass.
        physical_batch_size: Rows in a pass.
        on_outputs: Sees each pass's rows, how many of them are real, and the
            model's outputs; may be None.
        shared_states: Variables that are put back before each pass. What is shared by
            all rows must not depend on which of them are in a pass: without one row,
            others would be in other passes.

    Returns:
        Clipped sums, and the units' norms.
    """
    rows = number_of_rows(data)
    units = (rows + rows_per_unit - 1) // rows_per_unit
    at_begin = [tf.identity(state.value) for state in shared_states]

    def one_pass(number: int | Tensor) -> tuple[list[Tensor], Tensor]:
        for state, value in zip(shared_states, at_begin, strict=True):
            state.assign(value)
        first = number * physical_batch_size
        batch = _fill(data, first + tf.range(physical_batch_size), rows)
        batch = _tree.map_tensors(
            lambda tensor: tf.ensure_shape(
                tensor, [physical_batch_size, *tensor.shape[1:]]
            ),
            batch,
        )
        sums, norms, outputs = run_pass(batch)
        real = tf.clip_by_value(rows - first, 0, physical_batch_size)
        if on_outputs is not None:
            on_outputs((batch.x, batch.y, batch.sample_weight), real, outputs)
        return sums, norms

    def body(
        number: Tensor, sums: list[Tensor], norms: tf.TensorArray
    ) -> tuple[Tensor, list[Tensor], tf.TensorArray]:
        parts, pass_norms = one_pass(number)
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
        return number + 1, sums, norms.write(number, pass_norms)

    passes = tf.maximum((rows + physical_batch_size - 1) // physical_batch_size, 1)
    sums, first_norms = one_pass(0)
    norms = tf.TensorArray(first_norms.dtype, passes, element_shape=first_norms.shape)
    _, sums, norms = tf.while_loop(
        lambda number, *_: number < passes,
        body,
        (tf.constant(1), sums, norms.write(0, first_norms)),
        parallel_iterations=1,
    )
    return sums, norms.concat()[:units]


def _fill(data: Nest, indices: Tensor, rows: int | Tensor) -> Batch:
    """Take rows by index; what lies past the last row repeats it, as padding."""
    # So the padding of a unit that is not full is a row of that unit.
    is_empty = tf.cast(tf.equal(rows, 0), tf.int32)
    existing = tf.minimum(indices, tf.maximum(rows, 1) - 1)

    def take(tensor: Tensor) -> Tensor:
        shape = tf.concat([[is_empty], tf.shape(tensor)[1:]], 0)
        filled = tf.concat([tensor, tf.zeros(shape, tensor.dtype)], 0)
        return tf.gather(filled, existing)

    x, y, sample_weight = _tree.map_tensors(take, data)
    return Batch(x, y, sample_weight, indices >= rows)
