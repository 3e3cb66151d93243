"""Batches of any size, whole or in passes: each row counts once, in its unit."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.engines.passes import run as run_batch

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


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("rows_per_unit", [1, 3])
@pytest.mark.parametrize("number", SIZES)
def test_passes_add_up(number, rows_per_unit, in_graph):
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
            on_outputs=on_outputs,
        )

    if in_graph:
        run = in_graph_of_any_size(run)
    (total,), norms = run(rows(number))
    np.testing.assert_allclose(total, np.sum(rows(number)[0]["numbers"], axis=0))
    np.testing.assert_allclose(norms, expected_norms(number, rows_per_unit))
    assert all(batch.is_padding.shape == [6] for batch in batches)
    real = [size for size in sizes.numpy() if size]
    assert real == [6] * (number // 6) + [number % 6] * (number % 6 > 0)
    assert int(passes) == max(-(-number // 6), 1)


def test_padding_repeats_the_last_row():
    seen = []
    run_batch(sums_of_units(4, seen), rows(2), rows_per_unit=4)
    np.testing.assert_array_equal(seen[0].y, [0, 1, 1, 1])
