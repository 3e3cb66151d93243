"""Maps over units, and how often what they map is traced."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.engines.units import map_units


@pytest.mark.parametrize("must_rehearse", [False, True])
def test_a_map_is_traced_once(must_rehearse):
    traces = []

    def twice(element):
        if not tf.executing_eagerly():
            traces.append(element)
        return [2 * element], element

    def run(rows):
        return map_units(twice, rows, must_rehearse=must_rehearse)

    rows = np.arange(6.0).reshape(3, 2)
    graph = tf.function(run, autograph=False).get_concrete_function(
        tf.TensorSpec([None, 2], tf.float64)
    )
    [doubled], same = graph(tf.constant(rows))
    np.testing.assert_array_equal(doubled, 2 * rows)
    np.testing.assert_array_equal(same, rows)
    assert len(traces) == 1
