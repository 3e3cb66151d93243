"""How replicas divide batches among themselves."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdp.distribute.replicas import ONE_DEVICE, Replicas, share_bounds

pytestmark = pytest.mark.keras_private


@given(
    rows=st.integers(0, 200),
    replicas=st.integers(1, 20),
    rows_per_unit=st.integers(1, 7),
)
def test_shares_are_disjoint_complete_and_even(rows, replicas, rows_per_unit):
    bounds = [
        share_bounds(
            rows, replica=replica, replicas=replicas, rows_per_unit=rows_per_unit
        )
        for replica in range(replicas)
    ]
    assert [first for first, _ in bounds] == [0, *(behind for _, behind in bounds[:-1])]
    assert bounds[-1][1] == rows
    assert all(first % rows_per_unit == 0 or first == rows for first, _ in bounds)
    units = [-(-(behind - first) // rows_per_unit) for first, behind in bounds]
    assert max(units) - min(units) <= 1


def test_bounds_of_tensors():
    first, behind = share_bounds(
        tf.constant(7, tf.int64), replica=tf.constant(1, tf.int64), replicas=2
    )
    assert (int(first), int(behind)) == (3, 7)


def test_alone_nothing_is_run_elsewhere():
    assert ONE_DEVICE.number == ONE_DEVICE.processes == 1
    assert ONE_DEVICE.run(lambda *args: args, 1, 2) == (1, 2)
    assert ONE_DEVICE.first("value") == ONE_DEVICE.concatenated("value") == "value"
    assert ONE_DEVICE.share_of("rows", rows_per_unit=1) == "rows"
    np.testing.assert_array_equal(ONE_DEVICE.of_all([3, 4]), [[3, 4]])
    assert ONE_DEVICE.texts_of_all("text") == ["text"]


def test_other_strategies_are_refused():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    with pytest.raises(ValueError, match="MultiWorkerMirroredStrategy"):
        Replicas(strategy)
