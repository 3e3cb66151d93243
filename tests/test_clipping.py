"""Clipped sums stay within their sensitivity, whatever the gradients are."""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdp import clipping
from tfdp.clipping import (
    ClippedSum,
    clip_and_sum,
    clip_as_tensor,
    clip_factors,
    norms_rounded_up,
    side_by_side,
    squares_rounded_up,
    weighted_sums,
)

# Relative slack of sums: float32 adds up to ten units of norm C.
ROUNDING = {"float32": 1e-5, "float64": 1e-14}

MODES = ("eager", "graph", "xla")
LARGEST = float(np.finfo("float32").max)


def run(function, mode):
    if mode == "eager":
        return function
    return tf.function(function, jit_compile=mode == "xla", autograph=False)


def true_norms(gradients):
    """Norms in a precision and range in which nothing is lost."""
    squares = [
        np.square(np.reshape(part, [len(part), -1]).astype(np.longdouble))
        for part in gradients
    ]
    return np.sqrt(sum(part.sum(axis=1) for part in squares))


def clipped(gradients, clip, dtype="float32", is_empty=None):
    is_empty = np.zeros(len(gradients[0]), bool) if is_empty is None else is_empty
    sums, norms = clip_and_sum(
        [tf.constant(part, dtype) for part in gradients],
        is_empty=tf.constant(is_empty),
        l2_norm_clip=tf.constant(clip, dtype),
    )
    return np.concatenate([np.ravel(part) for part in sums]), norms.numpy()


def one_big_and_many_tiny(rng, units, size):
    """Squares of the tiny entries vanish in float32 beside the big one's."""
    gradients = rng.choice([-1.0, 1.0], [units, size]) * 2.0**-13
    gradients[np.arange(units), rng.integers(size, size=units)] = 1.0
    return gradients


def of_all_sizes(rng, units, size):
    return rng.normal(size=[units, size]) * 10.0 ** rng.uniform(-30, 15, [units, size])


def subnormal(rng, units, size):
    return rng.normal(size=[units, size]) * 1e-40


def squares_underflow(rng, units, size):
    return rng.normal(size=[units, size]) * 1e-21


def huge(rng, units, size):
    return rng.normal(size=[units, size]) * 1e17


def equal(rng, units, size):
    return np.full([units, size], rng.uniform(0.1, 1))


def ordinary(rng, units, size):
    return rng.normal(size=[units, size])


def zero(rng, units, size):
    return np.zeros([units, size])


ADVERSARIES = (
    one_big_and_many_tiny,
    of_all_sizes,
    subnormal,
    squares_underflow,
    huge,
    equal,
    ordinary,
    zero,
)

# 128 is a whole block; primes and their doubles cannot be divided into blocks.
SIZES = (1, 2, 127, 128, 131, 262, 1024, 4099)


@st.composite
def units_of_gradients(draw, adversaries=ADVERSARIES, most_units=6):
    """Gradients of up to three variables, float32 numbers, one adversary a unit."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    units = draw(st.integers(1, most_units))
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
    kinds = [draw(st.sampled_from(adversaries)) for _ in range(units)]
    return [
        np.concatenate([kind(rng, 1, size) for kind in kinds]).astype("float32")
        for size in sizes
    ]


clips = st.floats(-12, 12).map(lambda exponent: 10.0**exponent)
# ------------------------------------------------------------------------- norms


@given(units_of_gradients())
def test_norm_is_never_too_small_and_hardly_too_large(gradients):
    norms = norms_rounded_up([tf.constant(part) for part in gradients]).numpy()
    expected = true_norms(gradients)
    assert norms.dtype == "float64"
    assert (norms >= expected).all()
    # What squares below the smallest float32 can be worth.
    lost = math.sqrt(sum(part[0].size for part in gradients) * 1.2e-38)
    assert (norms <= expected * (1 + 3e-5) + lost).all()


@given(units_of_gradients([ordinary, equal, zero, squares_underflow]), clips)
def test_norm_of_float64_gradients_is_never_too_small(gradients, scale):
    wide = [part.astype("float64") * scale for part in gradients]
    norms = norms_rounded_up([tf.constant(part) for part in wide]).numpy()
    expected = true_norms(wide)
    assert (norms >= expected).all()
    assert (norms <= expected * (1 + 1e-12) + 1e-150).all()


@functools.cache
def norms_in(mode):
    return run(lambda part: norms_rounded_up([part]), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda kind: kind.__name__)
def test_norm_is_never_too_small_in_any_mode(adversary, mode, rng):
    gradients = adversary(rng, 5, 2**16).astype("float32")
    norms = norms_in(mode)(tf.constant(gradients)).numpy()
    expected = true_norms([gradients])
    assert (norms >= expected).all()
    assert (norms <= expected * (1 + 3e-5) + 1e-16).all()


@pytest.mark.slow
def test_small_squares_do_not_vanish_beside_a_large_one(rng):
    gradients = one_big_and_many_tiny(rng, 1, 2**22).astype("float32")
    assert true_norms([gradients])[0] > 1.03
    assert norms_rounded_up([tf.constant(gradients)]).numpy()[0] > 1.03


@given(units_of_gradients(most_units=8), st.randoms())
def test_order_and_mates_do_not_change_a_norm(gradients, random):
    norms = norms_rounded_up([tf.constant(part) for part in gradients]).numpy()
    order = list(range(len(norms)))
    random.shuffle(order)
    kept = order[: random.randint(1, len(order))]
    alone = norms_rounded_up([tf.constant(part[kept]) for part in gradients]).numpy()
    np.testing.assert_allclose(alone, norms[kept], rtol=1e-14)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 130])
def test_norm_of_a_gradient_that_is_not_finite_is_not_finite(bad, place, rng):
    gradients = rng.normal(size=[3, 131]).astype("float32")
    gradients[1, place] = bad
    norms = norms_rounded_up([tf.constant(gradients)]).numpy()
    np.testing.assert_array_equal(np.isfinite(norms), [True, False, True])


# ----------------------------------------------------------------------- factors


@pytest.mark.smoke
@given(units_of_gradients(), clips, st.sampled_from(["float32", "float64"]))
def test_clipped_unit_is_inside_the_ball(gradients, clip, dtype):
    gradients = [part.astype(dtype) for part in gradients]
    clip = float(np.dtype(dtype).type(clip))
    norms = norms_rounded_up([tf.constant(part) for part in gradients])
    factors = clip_factors(norms, l2_norm_clip=tf.constant(clip, dtype)).numpy()
    assert ((factors >= 0) & (factors <= 1)).all()
    # Also of norms that are exact, after a matrix product has rounded the products.
    unit_roundoff = np.finfo(dtype).eps / 2
    inside = factors.astype(np.longdouble) * norms.numpy() * (1 + unit_roundoff)
    assert (inside <= clip).all()
    assert (true_norms(gradients) <= norms.numpy()).all()


def in_tensor_float_32(values):
    """Round as a matrix product on a GPU may round its inputs: to eleven bits."""
    bits = np.asarray(values, "float32").view("uint32")
    return ((bits + 0x1000) & 0xFFFFE000).view("float32").astype("float64")


@pytest.mark.parametrize("gradient", [1.0, 1 + 2.0**-11, 3.0])
@pytest.mark.parametrize("factor", [1 / 8, (1 + 2.0**-11) / 8, (1 + 2.0**-10) / 8])
def test_a_product_in_tensor_float_32_is_inside_the_ball(
    gradient, factor, rng, monkeypatch
):
    """Just above half a unit of the last place both are rounded up the furthest."""
    roundoff = 2.0**-11
    monkeypatch.setattr(clipping, "matmul_roundoff", lambda dtype: roundoff)
    for gradients in (
        np.full([1, 1], gradient, "float32"),
        np.full([1, 131], gradient, "float32"),
        np.concatenate([[[gradient]], rng.normal(size=[1, 6])], 1).astype("float32"),
    ):
        norms = norms_rounded_up([tf.constant(gradients)])
        for shift in (-1e-6, -1e-7, 0, 1e-7, 3e-7, 1e-6, 1e-3):
            clip = float(norms[0]) * (1 + 2 * roundoff) * factor * (1 + shift)
            clip = tf.constant(clip, tf.float32)
            factors = clip_factors(norms, l2_norm_clip=clip)
            product = in_tensor_float_32(factors) * in_tensor_float_32(gradients)
            assert 0.99 * float(clip) < np.linalg.norm(product) <= float(clip)


@given(units_of_gradients([ordinary, equal, one_big_and_many_tiny]), clips)
def test_clipping_takes_hardly_more_than_it_must(gradients, clip):
    norms = norms_rounded_up([tf.constant(part) for part in gradients])
    factors = clip_factors(norms, l2_norm_clip=tf.constant(clip, tf.float32)).numpy()
    np.testing.assert_allclose(
        factors,
        np.minimum(1, clip / true_norms(gradients)).astype("float64"),
        rtol=3e-5,
        atol=1e-37,
    )


def test_unit_inside_the_ball_keeps_its_gradient(rng):
    gradients = rng.normal(size=[4, 10]).astype("float32")
    total, _ = clipped([gradients], clip=100.0)
    np.testing.assert_allclose(total, gradients.sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize("clip", [1e-30, 1e-6, 1.0, 1e30])
def test_factor_of_a_zero_gradient_is_one(clip):
    # By its norm as it is and as it is rounded up.
    tiny = norms_rounded_up([tf.zeros([1, 5])]) if clip > 1e-18 else tf.zeros([1])
    for norms in (tf.zeros([1]), tiny):
        factor = clip_factors(norms, l2_norm_clip=tf.constant(clip))
        np.testing.assert_array_equal(factor, [1.0])


def test_no_units_have_no_factors():
    assert clip_factors(tf.zeros([0]), l2_norm_clip=tf.constant(1.0)).shape == [0]


@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_factor_of_a_norm_that_is_not_finite_is_zero(norm):
    norms = tf.constant([1.0, norm, 4.0])
    factors = clip_factors(norms, l2_norm_clip=tf.constant(1.0)).numpy()
    np.testing.assert_allclose(factors, [1, 0, 0.25], rtol=1e-6)


@pytest.mark.parametrize("clip", [1e-38, 1e-30, 1e-10])
def test_a_clip_norm_near_zero_leaves_nothing_and_divides_nothing_by_zero(clip, rng):
    gradients = np.concatenate([
        rng.normal(size=[3, 50]) * 1e6,
        np.zeros([1, 50]),
        squares_underflow(rng, 3, 50),
    ]).astype("float32")
    total, _ = clipped([gradients], clip)
    assert np.isfinite(total).all()
    assert np.linalg.norm(total.astype("float64")) <= 7 * clip * (1 + 1e-6)


def test_a_clip_norm_that_vanishes_in_float32_lets_nothing_through(rng):
    gradients = np.concatenate([rng.normal(size=[2, 9]), np.zeros([1, 9])])
    total, _ = clipped([gradients.astype("float32")], clip=1e-60)
    np.testing.assert_array_equal(total, 0)


# -------------------------------------------------------------------------- sums


@pytest.mark.slow
@given(units_of_gradients(most_units=8), clips, st.data())
def test_emptying_one_unit_moves_the_sum_by_at_most_the_sensitivity(
    gradients, clip, data
):
    units = len(gradients[0])
    is_empty = np.arange(units) == data.draw(st.integers(0, units - 1))
    total, norms = clipped(gradients, clip)
    without, norms_without = clipped(gradients, clip, is_empty=is_empty)
    moved = np.linalg.norm(total.astype("float64") - without)
    assert moved <= clip * (1 + ROUNDING["float32"])
    np.testing.assert_array_equal(norms, norms_without)


@pytest.mark.slow
@given(units_of_gradients(most_units=8), clips, st.data())
def test_an_empty_unit_counts_as_one_that_is_not_there(gradients, clip, data):
    units = len(gradients[0])
    is_empty = np.array(data.draw(st.lists(st.booleans(), min_size=units)))[:units]
    total, _ = clipped(gradients, clip, is_empty=is_empty)
    rest = [part[~is_empty] for part in gradients]
    expected, _ = clipped(rest, clip)
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=clip * 1e-5)


@pytest.mark.slow
@given(
    units_of_gradients([ordinary, huge, zero], most_units=8),
    clips,
    st.data(),
    st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_a_unit_that_is_not_finite_adds_zero_and_spoils_no_other(
    gradients, clip, data, bad
):
    units = len(gradients[0])
    row = data.draw(st.integers(0, units - 1))
    part = data.draw(st.sampled_from(gradients))
    part[row, data.draw(st.integers(0, part.shape[1] - 1))] = bad
    total, norms = clipped(gradients, clip)
    others = np.arange(units) != row
    expected, _ = clipped([part[others] for part in gradients], clip)
    assert not np.isfinite(norms[row])
    assert np.isfinite(norms[others]).all()
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=clip * 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode_what_is_not_finite_is_left_out_by_selection(mode, rng):
    gradients = rng.normal(size=[5, 6]).astype("float32")
    spoilt = gradients.copy()
    # Times a factor of zero these would still be NaN.
    spoilt[2], spoilt[3] = np.nan, np.inf

    def total(part):
        return clip_and_sum(
            [part], is_empty=tf.zeros([5], tf.bool), l2_norm_clip=tf.constant(0.5)
        )[0][0]

    expected, _ = clipped([np.delete(gradients, [2, 3], axis=0)], 0.5)
    np.testing.assert_allclose(
        run(total, mode)(tf.constant(spoilt)), expected, rtol=1e-5
    )


def test_units_that_are_all_not_finite_add_up_to_zero():
    total, norms = clipped([np.full([3, 4], np.nan, "float32")], 1.0)
    np.testing.assert_array_equal(total, 0)
    assert np.isnan(norms).all()


def test_a_norm_beyond_float32_counts_as_not_finite(rng):
    gradients = np.stack([np.full(9, LARGEST), np.ones(9)]).astype("float32")
    total, _ = clipped([gradients], 1.0)
    np.testing.assert_allclose(total, 1 / 3, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_sums_have_the_shapes_of_the_variables(mode, rng):
    shapes = [(), (3,), (2, 3), (1, 2, 2, 3), (0,), (4, 0)]
    gradients = [rng.normal(size=(5, *shape)).astype("float32") for shape in shapes]

    def total(parts):
        return clip_and_sum(
            parts,
            is_empty=tf.zeros([5], tf.bool),
            l2_norm_clip=tf.constant(1e6),
        )

    sums, norms = run(total, mode)([tf.constant(part) for part in gradients])
    for found, part in zip(sums, gradients, strict=True):
        assert found.shape == part.shape[1:]
        np.testing.assert_allclose(found, part.sum(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norms, true_norms(gradients), rtol=3e-5)


def test_no_units_add_up_to_zero():
    total, norms = clipped([np.zeros([0, 3]), np.zeros([0, 2, 2])], 1.0)
    np.testing.assert_array_equal(total, np.zeros(7))
    assert norms.shape == (0,)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_summed_in_float32(dtype):
    gradients = tf.cast(tf.concat([tf.fill([1, 3], 3e4), tf.ones([1000, 3])], 0), dtype)
    (total,), norms = clip_and_sum(
        [gradients], is_empty=tf.zeros([1001], tf.bool), l2_norm_clip=tf.constant(1e5)
    )
    assert total.dtype == "float32"
    np.testing.assert_allclose(total, float(gradients[0, 0]) + 1000, rtol=1e-6)
    np.testing.assert_allclose(norms[1], math.sqrt(3), rtol=1e-5)


# -------------------------------------------------------------------- ClippedSum


def clipped_sum_of(examples_per_unit, clip=0.5):
    return ClippedSum(
        [tf.zeros([2])], tf.zeros([1]), tf.constant(clip), examples_per_unit
    )


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(("examples_per_unit", "clips_"), [(1, 1), (2, 2), (64, 2)])
def test_units_of_several_examples_double_the_sensitivity(
    examples_per_unit, clips_, as_tensor
):
    if as_tensor:
        examples_per_unit = tf.constant(examples_per_unit)
    clipped_sum = clipped_sum_of(examples_per_unit)
    assert float(clipped_sum.sensitivity_in_clips) == clips_
    assert float(clipped_sum.l2_sensitivity) == clips_ * 0.5


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("examples_per_unit", [1, 3])
def test_a_traced_function_returns_a_whole_clipped_sum(examples_per_unit, jit_compile):
    @tf.function(jit_compile=jit_compile)
    def traced(clip):
        return ClippedSum([tf.ones([2])], tf.ones([4]), clip, examples_per_unit)

    result = traced(tf.constant(0.5))
    assert isinstance(result, ClippedSum)
    assert float(result.l2_norm_clip) == 0.5
    assert float(result.l2_sensitivity) == (0.5 if examples_per_unit == 1 else 1.0)


def test_the_mean_of_a_unit_moves_by_two_clips_at_most_and_can_come_near(rng):
    # Emptying the second example turns the unit's mean round.
    with_both = np.array([[10.0, 0.0], [-30.0, 0.0]]).mean(axis=0)
    with_one = np.array([[10.0, 0.0], [0.0, 0.0]]).mean(axis=0)
    totals = [
        clipped([unit[None].astype("float32")], clip=1.0)[0]
        for unit in (with_both, with_one)
    ]
    moved = np.linalg.norm(totals[0] - totals[1])
    assert float(clipped_sum_of(2, clip=1.0).l2_sensitivity) >= moved > 1.9


# ---------------------------------------------------------------- clip_as_tensor


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["float32"], "float32"),
        (["float16", "bfloat16"], "float32"),
        (["float32", "float64"], "float64"),
    ],
)
@pytest.mark.parametrize(
    "make", [float, np.float64, tf.constant, tf.Variable, keras.Variable]
)
def test_clip_norm_takes_the_widest_dtype(make, dtypes, expected):
    variables = [keras.Variable(0.0, dtype=dtype) for dtype in dtypes]
    clip = clip_as_tensor(make(0.5), variables)
    assert clip.dtype == expected
    assert float(clip) == 0.5


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_clip_norm_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match=r"`l2_norm_clip` must be positive.*Received"):
        clip_as_tensor(value, [])


@pytest.mark.parametrize("value", [None, True, "1", [1.0, 2.0]])
def test_clip_norm_must_be_a_number(value):
    with pytest.raises(TypeError, match=r"`l2_norm_clip` must be a number\. Received"):
        clip_as_tensor(value, [])


def test_units_that_are_not_chosen_are_zeros_in_all_parts():
    parts = [
        tf.constant([1.0, math.nan, 3.0]),
        tf.constant([[1.0], [math.inf], [3.0]], tf.float64),
        tf.constant([[1], [2], [3]]),
    ]
    chosen = clipping.selected(parts, tf.constant([True, False, True]))
    for part, found in zip(parts, chosen, strict=True):
        assert found.dtype == part.dtype
        expected = part.numpy()
        expected[1] = 0
        np.testing.assert_array_equal(found, expected)


def test_norms_of_more_units_than_there_are_marks_are_refused():
    """Else two pieces of one unit would be clipped each by itself."""
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"[Ss]hape"):
        clip_and_sum(
            [tf.ones([2, 3])],
            is_empty=tf.constant([False]),
            l2_norm_clip=tf.constant(1.0),
        )


# ------------------------------------------------------------------ side by side


def test_short_gradients_of_a_dtype_share_a_tensor(rng):
    shapes = [(4, 3), (4, 1000), (4, 2, 5), (4, 1), (4, 0), (4, 999)]
    arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
    arrays[3] = arrays[3].astype("float64")
    together, sizes = side_by_side([tf.constant(array) for array in arrays])
    assert sizes == [
        {0: 3, 2: 10, 4: 0, 5: 999},
        {1: 1000},
        {3: 1},
    ]
    flat = [arrays[0], arrays[2].reshape(4, 10), arrays[4], arrays[5]]
    np.testing.assert_array_equal(together[0], np.concatenate(flat, axis=1))
    weights = rng.uniform(size=4).astype("float32")
    sums = weighted_sums(together, sizes, tf.constant(weights))
    for total, array in zip(sums, arrays, strict=True):
        expected = np.tensordot(weights, array.astype("float64"), 1).ravel()
        np.testing.assert_allclose(tf.reshape(total, [-1]), expected, atol=1e-6)


@pytest.mark.parametrize("size", [131, 10_007, 2 * 131])
def test_norms_over_a_size_of_few_divisors_take_few_blocks(size, rng):
    gradients = tf.constant(rng.normal(size=(3, size)), tf.float32)
    graph = tf.function(squares_rounded_up, autograph=False)
    squares = graph.get_concrete_function(gradients).graph
    widened = [op for op in squares.get_operations() if op.type == "Cast"]
    assert [op.outputs[0].shape[1] for op in widened] == [-(-size // 128)]
    expected = np.square(gradients.numpy().astype("float64")).sum(1)
    assert np.all(graph(gradients) >= expected)
    np.testing.assert_allclose(graph(gradients), expected, rtol=2e-5)
