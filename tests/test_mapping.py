"""A vectorized map equals one element after the other, which never see each other."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp._mapping import vectorized_map

N = 3


def rolled(axis):
    return lambda x, _: tf.roll(x, 1, axis)


def rolled_by_data(axis):
    return lambda x, places: tf.roll(x, places[1], axis)


def gradient_of_gather(x, places):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.gather(x, places) ** 3)
    return tf.convert_to_tensor(tape.gradient(loss, x))


def gradient_of_batched_gather(x, places):
    with tf.GradientTape() as tape:
        tape.watch(x)
        picked = tf.gather(x, tf.tile(places[:, None], [1, 2]), axis=1, batch_dims=1)
        loss = tf.reduce_sum(picked**3)
    return tape.gradient(loss, x)


SEGMENTS = {
    f"segments_{name}": lambda x, places, name=name: getattr(
        tf.math, f"unsorted_segment_{name}"
    )(x, places, 3)
    for name in ("sum", "max", "min", "prod")
}
# Of an element of shape (3, 4), and three numbers.
FUNCTIONS = {
    **{f"roll_{axis}": rolled(axis) for axis in (-2, -1, 0, 1)},
    **{f"roll_by_data_{axis}": rolled_by_data(axis) for axis in (-2, -1, 0, 1)},
    "rolls": lambda x, _: tf.roll(x, [1, 2], [-1, 0]),
    "roll_for_all": lambda x, places: (
        x + tf.roll(tf.eye(3, 4, dtype=x.dtype), places[1], 1)
    ),
    "gather": gradient_of_gather,
    "batched_gather": gradient_of_batched_gather,
    "segments_of_two_axes": lambda x, places: tf.math.unsorted_segment_sum(
        x, tf.tile(places[:, None], [1, 4]), 3
    ),
    "fixed_segments": lambda x, _: tf.math.unsorted_segment_sum(x, [1, -1, 1], 3),
    **SEGMENTS,
}


def elements(rng, places):
    x = rng.normal(size=(N, 3, 4))
    x[1] *= 1e6
    return x, np.array(places, "int32")


def mapped(function, jit_compile):
    return tf.function(
        lambda *rows: vectorized_map(lambda row: function(*row), rows),
        autograph=False,
        jit_compile=jit_compile,
    )


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_equals_one_element_at_a_time(name, jit_compile):
    function = FUNCTIONS[name]
    x, places = elements(np.random.default_rng(0), [[0, 2, 1], [1, 1, 0], [2, 2, 2]])
    found = mapped(function, jit_compile)(x, places)
    rows = zip(tf.constant(x), tf.constant(places), strict=True)
    expected = [function(*row) for row in rows]
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_out_of_range_lead_to_no_other_element(name, jit_compile):
    if not jit_compile and "gather" in name:
        pytest.skip("TensorFlow stops")
    run = mapped(FUNCTIONS[name], jit_compile)
    x, places = elements(np.random.default_rng(0), [[0, 4, -7], [1, 0, -1], [7, -2, 3]])
    before = run(x, places).numpy()
    other = 3.0 * x, places[[2, 1, 0]]
    for row in range(N):
        changed = [
            np.where(np.arange(N).reshape(-1, *[1] * (a.ndim - 1)) == row, a, b)
            for a, b in zip((x, places), other, strict=True)
        ]
        np.testing.assert_array_equal(run(*changed)[row], before[row])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.reduce_sum(tf.boolean_mask(x, x > 0)),
        lambda x: tf.reduce_sum(tf.unique(x)[0]),
        lambda x: tf.reduce_sum(tf.dynamic_partition(x, [0, 1, 1], 2)[1]),
        lambda x: tf.reduce_sum(
            tf.sparse.segment_sum(x, tf.cast(x, tf.int32), [0] * 3)
        ),
    ],
    ids=["mask", "unique", "partition", "sparse"],
)
def test_what_lets_elements_meet_is_not_vectorized(function):
    with pytest.raises(NotImplementedError, match="may let elements meet"):
        vectorized_map(function, tf.ones([N, 3]))


def test_conversions_are_those_of_tensorflow_afterwards():
    x = tf.constant([[-1.0, 2.0], [-3.0, 4.0]])
    vectorized_map(tf.abs, x)
    kept = tf.vectorized_map(lambda x: tf.boolean_mask(x, x > 0), x)  # noqa: TID251
    np.testing.assert_array_equal(kept, [[2.0], [4.0]])
