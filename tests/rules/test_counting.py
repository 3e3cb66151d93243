"""How many steps a loop has, if that does not depend on the data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.rules.free import Free
from tfdp.rules.loops import NotTakenWholeError, taken_whole

COUNTED = (
    (lambda i: i < 3, lambda i: i + 1, 0, None, 3),
    (lambda t: t < 1, lambda t: t + 0.25, 0.0, None, 4),
    (lambda i: (i < 10) & (i % 7 < 6), lambda i: i * 2, 1, None, 4),
    (lambda i: i < 100, lambda i: i + 1, 0, 5, 5),
)


@pytest.mark.parametrize(("cond", "body", "start", "most", "steps"), COUNTED)
def test_it_counts_as_a_loop_does(cond, body, start, most, steps):
    own = keras.Variable([2.0, -3.0])

    @tf.function(autograph=False)
    def both(x):
        loop = (
            lambda number, _: cond(number),
            lambda number, h: (body(number), h * own + tf.cast(number, tf.float32)),
            (tf.constant(start), x),
        )
        free = Free(3)
        free.add([x])
        with tf.GradientTape(persistent=True) as tape:
            taken = taken_whole([own], 3, free, [tape], *loop, maximum_iterations=most)
        assert [tap.steps for tap in taken.taps.values()] == [steps]
        return taken.results, tf.while_loop(*loop, maximum_iterations=most)

    found, expected = both(tf.constant([[1.0, 2.0], [3.0, 4.0], [-5.0, 6.0]]))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_loops_without_an_end_are_not_counted():
    own = keras.Variable([2.0, -3.0])

    @tf.function(autograph=False)
    def run(x):
        loop = (lambda *_: True, lambda n, h: (n, h * own), (tf.constant(0), x))
        with tf.GradientTape() as tape:
            taken_whole([own], 3, Free(3), [tape], *loop)

    with pytest.raises(NotTakenWholeError, match="more steps than are counted"):
        run.get_concrete_function(tf.ones([3, 2]))
