"""Batches of any size, whole or in passes: each row counts once, in its unit."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.engines.passes import run as run_batch
from tfdp.losses.batch import Batch as RowsOfBatch

pytestmark = pytest.mark.keras_private

SIZES = (0, 1, 5, 6, 13)


def rows(number):
    """Inputs nested in a dict, targets, and no weights."""
    x = tf.reshape(tf.range(1.0, 2 * number + 1), [number, 2])
    return {"numbers": x}, tf.range(number), None


def sums_of_units(rows_per_unit, seen):
    """A pass that sums the real rows; a unit's norm is the sum of its rows."""

    def run_pass(batch):
        real = tf.where(batch.is_padding[:, None], 0.0, batch.x["numbers"])
        seen.append(batch)
        norms = tf.reshape(tf.reduce_sum(real, 1), [-1, rows_per_unit])
        return [tf.reduce_sum(real, 0)], tf.reduce_sum(norms, 1), batch.y

    return run_pass


def expected_norms(number, rows_per_unit):
    of_rows = np.sum(rows(number)[0]["numbers"], axis=1)
    starts = range(0, number, rows_per_unit)
    return [of_rows[start : start + rows_per_unit].sum() for start in starts]


@pytest.mark.parametrize("rows_per_unit", [1, 3])
@pytest.mark.parametrize("number", SIZES)
def test_a_whole_batch_is_filled_up_to_units(number, rows_per_unit):
    seen = []
    shown = []
    (total,), norms = run_batch(
        sums_of_units(rows_per_unit, seen),
        rows(number),
        rows_per_unit=rows_per_unit,
        on_outputs=lambda data, real, outputs: shown.append((real, outputs)),
    )
    ((real, outputs),) = shown
    assert real == number
    np.testing.assert_allclose(total, np.sum(rows(number)[0]["numbers"], axis=0))
    np.testing.assert_allclose(norms, expected_norms(number, rows_per_unit))
    np.testing.assert_array_equal(outputs, range(number))
    padding = seen[0].is_padding.numpy()
    assert len(padding) == max(-(-number // rows_per_unit), 1) * rows_per_unit
    assert not padding[:number].any()
    assert padding[number:].all()


def in_graph_of_any_size(run):
    """A function of the same data whose graph does not know how many rows come."""
    specs = {"numbers": tf.TensorSpec([None, 2])}, tf.TensorSpec([None], tf.int32)
    traced = tf.function(
        lambda x, y: run((x, y, None)), input_signature=specs, autograph=False
    )
    return lambda data: traced(*data[:2])


@pytest.mark.parametrize("has_fixed_size", [False, True], ids=["even", "fixed"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("rows_per_unit", [1, 3])
@pytest.mark.parametrize("number", SIZES)
def test_passes_add_up(number, rows_per_unit, in_graph, has_fixed_size):
    sizes = tf.Variable(tf.zeros([4], tf.int32))
    passes = tf.Variable(0)
    batches = []

    def on_outputs(data, real, outputs):
        sizes.scatter_nd_add([[passes]], [real])
        passes.assign_add(1)
        tf.debugging.assert_equal(data[1], outputs)

    def run(data):
        return run_batch(
            sums_of_units(rows_per_unit, batches),
            data,
            rows_per_unit=rows_per_unit,
            physical_batch_size=6,
            has_fixed_size=has_fixed_size,
            on_outputs=on_outputs,
        )

    if in_graph:
        run = in_graph_of_any_size(run)
    (total,), norms = run(rows(number))
    np.testing.assert_allclose(total, np.sum(rows(number)[0]["numbers"], axis=0))
    np.testing.assert_allclose(norms, expected_norms(number, rows_per_unit))
    assert int(passes) == max(-(-number // 6), 1)
    size = 6
    if not has_fixed_size:
        units = max(-(-number // rows_per_unit), 1)
        size = -(-units // int(passes)) * rows_per_unit
    known = None if in_graph and not has_fixed_size else size
    assert {batch.is_padding.shape[0] for batch in batches} == {known}
    real = [size for size in sizes.numpy() if size]
    assert real == [size] * (number // size) + [number % size] * (number % size > 0)


@pytest.mark.parametrize("size", [None, 6])
@pytest.mark.parametrize("rows_per_unit", [1, 3])
def test_units_of_padding_do_not_reach_the_model(rows_per_unit, size):
    marks = np.isin(np.arange(13), [1, 3, 4, 5, 9, 10, 11, 12])
    seen, shown = [], []
    x, y, _ = rows(13)
    (total,), norms = run_batch(
        sums_of_units(rows_per_unit, seen),
        RowsOfBatch(x, y, None, tf.constant(marks)),
        rows_per_unit=rows_per_unit,
        physical_batch_size=size,
        on_outputs=lambda data, real, outputs: shown.extend(outputs.numpy()),
    )
    of_rows = np.where(marks, 0, np.sum(x["numbers"], axis=1))
    units = np.split(of_rows, range(rows_per_unit, 13, rows_per_unit))
    is_empty = [
        each.all() for each in np.split(marks, range(rows_per_unit, 13, rows_per_unit))
    ]
    np.testing.assert_allclose(total, np.sum(x["numbers"][~marks], axis=0))
    np.testing.assert_allclose(
        norms, [u.sum() for u, empty in zip(units, is_empty, strict=True) if not empty]
    )
    assert shown == np.arange(13)[~marks].tolist()
    # Rows 0, 2, 6, 7, 8; units of three with one of these.
    assert sum(len(batch.is_padding) for batch in seen) == {1: 5, 3: 6}[rows_per_unit]


def test_padding_repeats_the_last_row():
    seen = []
    run_batch(sums_of_units(4, seen), rows(2), rows_per_unit=4)
    np.testing.assert_array_equal(seen[0].y, [0, 1, 1, 1])
