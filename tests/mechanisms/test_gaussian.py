"""The noise has the right size and shape, covers everything and never repeats."""

import math
import secrets
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tests import forks
from tests.problems import PROBLEMS
from tfdp import clipped_gradients
from tfdp.clipping import ClippedSum
from tfdp.mechanisms import local, mechanism
from tfdp.mechanisms.local import long_normal
from tfdp.mechanisms.mechanism import (
    Gaussian,
    add_noise,
    noise_of_query,
    standard_normal,
)
from tfdp.optimizers import DPSGD

pytestmark = pytest.mark.keras_private

MODES = ("eager", "graph", "xla")
KEY = tf.constant([0x0123456789ABCDEF, -0x0FEDCBA987654321], tf.int64)
LARGEST_RADIUS = math.sqrt(-2 * math.log(2.0**-39))


def source(seed=7):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Gaussian(seed)


def zeros(*shapes, clip=1.0, dtypes=("float32",), examples_per_unit=1):
    """A clipped sum in which nothing but noise can show."""
    dtypes = dtypes * len(shapes) if len(dtypes) == 1 else dtypes
    return ClippedSum(
        [tf.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)],
        tf.zeros([1]),
        tf.constant(clip, "float64" if "float64" in dtypes else "float32"),
        examples_per_unit,
    )


def draw(noise, clipped_sum, step=0, noise_multiplier=1.0):
    noised = add_noise(
        clipped_sum,
        noise_multiplier=tf.constant(noise_multiplier, tf.float64),
        stream=noise.stream(tf.constant(step, tf.int64)),
    )
    return [gradient.numpy() for gradient in noised]


def run(function, mode):
    if mode == "eager":
        return function
    return tf.function(function, jit_compile=mode == "xla", autograph=False)


def normals(size, key=KEY):
    return standard_normal(tf.TensorShape(size), key).numpy().astype("float64")


@pytest.fixture
def fixed_entropy(monkeypatch):
    """Replace the operating system's entropy by a known sequence of bytes."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(secrets, "token_bytes", rng.bytes)


# --------------------------------------------------------- one number: how it falls


def test_distribution_is_standard_normal():
    numbers = normals(1_000_000)
    assert stats.kstest(numbers, "norm").pvalue > 1e-3
    edges = stats.norm.ppf(np.linspace(0, 1, 257))
    counts, _ = np.histogram(numbers, edges)
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.slow
def test_moments_are_those_of_a_standard_normal():
    numbers = normals(4_000_000)
    root = math.sqrt(numbers.size)
    assert abs(numbers.mean()) < 4 / root
    assert abs(numbers.var() - 1) < 4 * math.sqrt(2) / root
    assert abs(stats.skew(numbers)) < 4 * math.sqrt(6) / root
    assert abs(stats.kurtosis(numbers)) < 4 * math.sqrt(24) / root


@pytest.mark.parametrize("sigmas", [3.0, 3.5, 4.0, 4.5])
def test_tails_are_as_heavy_as_a_normal_distribution_s(sigmas):
    numbers = normals(8_000_000)
    expected = numbers.size * stats.norm.sf(sigmas)
    for beyond in (np.sum(numbers > sigmas), np.sum(numbers < -sigmas)):
        assert abs(beyond - expected) < 4 * math.sqrt(expected)


def test_radii_and_angles_share_no_block():
    one_draw = mechanism.philox_bits([64], KEY, tf.int32)
    later = mechanism.philox_bits([32], KEY, tf.int32, first_block=8)
    np.testing.assert_array_equal(one_draw[32:], later)
    # Four numbers in a block, and no tensor has more than 2^63.
    assert 4 * mechanism._BLOCK_OF_ANGLES > 2**63


def test_squared_radius_is_exponential():
    cosine_part, sine_part = np.split(normals(2_000_000), 2)
    uniform = np.exp(-(cosine_part**2 + sine_part**2) / 2)
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    # Of the smallest values there are as many as there should be: at the resolution
    # of float32 below one, 6e-8, they would clump.
    expected = uniform.size * 1e-4
    assert abs(np.sum(uniform < 1e-4) - expected) < 4 * math.sqrt(expected)


def numbers_from_bits(monkeypatch, coarse, other):
    bits = tf.constant([coarse, other], tf.int64)
    bits = tf.bitcast(tf.cast(bits, tf.uint32), tf.int32)
    of_blocks = dict(
        zip((0, mechanism._BLOCK_OF_ANGLES), tf.unstack(bits), strict=True)
    )
    monkeypatch.setattr(
        mechanism, "philox_bits", lambda *_, first_block=0: of_blocks[first_block]
    )
    cosine_part, sine_part = np.split(normals(2 * len(coarse)), 2)
    return cosine_part, sine_part


ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize("sign_bit", [0, 0x80000000])
def test_smallest_uniform_gives_more_than_seven_sigma(monkeypatch, sign_bit):
    (cosine_part,), (sine_part,) = numbers_from_bits(monkeypatch, [sign_bit], [0])
    assert math.hypot(cosine_part, sine_part) == pytest.approx(LARGEST_RADIUS, 1e-6)
    assert LARGEST_RADIUS > 7


@pytest.mark.parametrize("coarse", [0, 1, 0x7FFFFFFF, 0x80000000, ALL_ONES])
@pytest.mark.parametrize("other", [0, 255, 256, 0x7FFFFFFF, 0x80000000, ALL_ONES])
def test_extreme_bits_give_finite_numbers(monkeypatch, coarse, other):
    pair = np.ravel(numbers_from_bits(monkeypatch, [coarse], [other]))
    assert np.isfinite(pair).all()
    assert np.linalg.norm(pair) <= LARGEST_RADIUS + 1e-5


def test_radius_resolves_thirty_nine_bits(monkeypatch):
    fine = np.arange(256)
    radius = np.hypot(*numbers_from_bits(monkeypatch, np.zeros(256, int), fine))
    expected = np.sqrt(-2 * np.log((fine + 1) * 2.0**-39))
    np.testing.assert_allclose(radius, expected, rtol=1e-6)
    assert (np.diff(radius) < 0).all()


def test_angle_covers_the_circle_and_does_not_use_the_radius_s_bits(monkeypatch):
    turns = np.arange(8) * 2**29
    for low in (0, 255):
        cosine_part, sine_part = numbers_from_bits(
            monkeypatch, np.full(8, 2**28), turns + low
        )
        angle = np.arctan2(sine_part, cosine_part) / (2 * math.pi) * 8
        np.testing.assert_allclose(angle % 8, np.arange(8), atol=1e-4)


# ------------------------------------------------------------ how much of it there is


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 7.0])
@pytest.mark.parametrize("clip", [1e-3, 1.0, 30.0])
def test_standard_deviation_is_noise_multiplier_times_clip(noise_multiplier, clip):
    (noise,) = draw(
        source(), zeros([150_000], clip=clip), noise_multiplier=noise_multiplier
    )
    assert noise.std() / clip / noise_multiplier == pytest.approx(1, abs=0.01)


def apply_noise(optimizer, *clipped_sums):
    """Return how far each variable moves when these sums are applied in turn."""
    shapes = [gradient.shape for gradient in clipped_sums[0].gradients]
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    for clipped_sum in clipped_sums:
        optimizer.apply_clipped_sum(clipped_sum, variables)
    return [variable.numpy() for variable in variables]


def optimizer(learning_rate=1.0, **arguments):
    arguments = {
        "l2_norm_clip": 1.0,
        "noise_multiplier": 1.0,
        "expected_batch_size": 1,
        "noise_seed": 7,
    } | arguments
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DPSGD(learning_rate, **arguments)


def test_update_of_a_model_without_gradient_is_one_draw_of_noise():
    clip, noise_multiplier, rate, batch = 3.0, 1.7, 0.25, 64
    moved = np.concatenate([
        update.ravel()
        for update in apply_noise(
            optimizer(
                rate,
                l2_norm_clip=clip,
                noise_multiplier=noise_multiplier,
                expected_batch_size=batch,
            ),
            zeros([300, 400], [100_000], clip=clip),
        )
    ])
    scale = moved.std() * batch / (rate * clip) / noise_multiplier
    assert scale == pytest.approx(1, abs=0.01)


@pytest.mark.smoke
def test_steps_add_independent_noise():
    once = zeros([200_000])
    (moved,) = apply_noise(optimizer(), once, once, once, once)
    assert moved.std() == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("examples_per_unit", [1, 2, 16])
def test_units_of_several_examples_get_no_other_noise(examples_per_unit):
    clipped_sum = zeros([150_000], clip=2.0, examples_per_unit=examples_per_unit)
    (noise,) = draw(source(), clipped_sum)
    assert noise.std() == pytest.approx(2.0, rel=0.01)


def test_noise_follows_the_clip_that_clipped():
    changed = optimizer(l2_norm_clip=1.0)
    clipped_sum = zeros([150_000], clip=float(changed.l2_norm_clip))
    changed.l2_norm_clip = 100.0
    (moved,) = apply_noise(changed, clipped_sum)
    assert moved.std() == pytest.approx(1.0, rel=0.01)


def test_no_noise_multiplier_adds_nothing(rng):
    gradient = tf.constant(rng.normal(size=[7, 3]), tf.float32)
    clipped_sum = zeros([7, 3])._replace(gradients=[gradient])
    (noised,) = draw(source(), clipped_sum, noise_multiplier=0.0)
    np.testing.assert_array_equal(noised, gradient)


def test_noise_is_added_to_the_gradient(rng):
    gradient = tf.constant(rng.normal(size=[7, 3]), tf.float32)
    (noise,) = draw(source(), zeros([7, 3]))
    (noised,) = draw(source(), zeros([7, 3])._replace(gradients=[gradient]))
    np.testing.assert_allclose(noised, gradient + noise, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.statistical
def test_long_normals_are_standard_normal():
    numbers = long_normal(tf.TensorShape([400_001]), KEY).numpy()
    assert numbers.dtype == np.float64
    assert stats.kstest(numbers, "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(numbers[:200_000], numbers[200_000:-1])[0, 1]) < 0.01


def test_long_normals_reach_past_12_sigma(monkeypatch):
    monkeypatch.setattr(
        local, "philox_bits", lambda shape, *_: tf.zeros(shape, tf.int64)
    )
    (largest,) = long_normal(tf.TensorShape([1]), KEY).numpy()
    assert largest == pytest.approx(math.sqrt(2 * 106 * math.log(2)))
    assert largest > 12.1


# ------------------------------------------------------------- it never comes twice


def correlations(streams):
    streams = np.array(streams, "float64")
    matrix = np.corrcoef(streams)
    return matrix[np.triu_indices(len(streams), 1)]


def assert_unrelated(streams):
    """No two streams correlate, and no two numbers in a row occur in two of them."""
    assert np.abs(correlations(streams)).max() < 4 / math.sqrt(len(streams[0]))
    pairs = [
        np.ascontiguousarray(stream).view(np.int64)
        for row in streams
        for stream in (row[: len(row) // 2 * 2], row[1 : (len(row) - 1) // 2 * 2 + 1])
    ]
    together = np.concatenate(pairs)
    assert len(np.unique(together)) > len(together) - 20


@pytest.mark.parametrize("together", [1, 45_000, 1 << 20])
def test_steps_and_variables_have_streams_of_their_own(together, monkeypatch):
    monkeypatch.setattr(mechanism, "_MOST_DRAWN_TOGETHER", together)
    clipped_sum = zeros(*[[20_000]] * 3)
    steps = [0, 1, 2, 3, 1000, 2**40]
    assert_unrelated([
        stream for step in steps for stream in draw(source(), clipped_sum, step)
    ])


def test_xla_compiles_one_draw_for_all_variables(monkeypatch):
    monkeypatch.setattr(mechanism, "_MOST_DRAWN_TOGETHER", 1)
    shapes = [[20_000], [3, 5], [20_000]]
    stream = source().stream(tf.constant(3, tf.int64))

    def noised():
        return add_noise(zeros(*shapes), noise_multiplier=1.0, stream=stream)

    found = [each.numpy().ravel() for each in run(noised, "xla")()]
    one_draw = standard_normal(tf.TensorShape([40_015]), stream)
    np.testing.assert_allclose(np.concatenate(found), one_draw, rtol=2e-5, atol=2e-6)


def test_queries_have_streams_of_their_own(monkeypatch):
    monkeypatch.setattr(mechanism, "_MOST_DRAWN_TOGETHER", 1)
    noise = source()
    stream = noise.stream(tf.constant(3, tf.int64))
    assert_unrelated([
        *draw(noise, zeros([20_000], [20_000]), 3),
        *(
            noise_of_query((20_000,), stream=stream, number=number).numpy()
            for number in range(2)
        ),
    ])


def test_variables_of_different_sizes_share_no_numbers():
    small, large = draw(source(), zeros([5_001], [20_000]))
    padded = np.tile(small, 4)[:20_000]
    assert abs(np.corrcoef(padded, large)[0, 1]) < 4 / math.sqrt(5_001)
    assert not np.isin(
        small[:5_000].view(np.int64), np.ascontiguousarray(large).view(np.int64)
    ).any()


def test_keys_have_streams_of_their_own(fixed_entropy):
    streams = []
    for seed in (None, None, 1, 2, 3):
        noise = source(seed)
        streams += draw(noise, zeros([20_000]))
        if seed is None:
            noise.renew_key()
            streams += draw(noise, zeros([20_000]))
    assert_unrelated(streams)


def test_halves_of_a_stream_are_unrelated():
    assert_unrelated(np.split(normals(200_000).astype("float32"), 2))


def test_every_call_of_a_traced_step_draws_anew():
    noise, step = source(), tf.Variable(0, dtype=tf.int64)

    @tf.function
    def one_step():
        noised = add_noise(
            zeros([20_000]),
            noise_multiplier=tf.constant(1.0),
            stream=noise.stream(step.read_value()),
        )
        step.assign_add(1)
        return noised[0]

    assert_unrelated([one_step().numpy() for _ in range(4)])


def test_steps_in_a_loop_of_the_graph_draw_anew():
    shared = optimizer()
    variable = keras.Variable(np.zeros(20_000, "float32"))
    shared.build([variable])

    @tf.function
    def three_steps():
        weights = tf.TensorArray(tf.float32, 3)
        for number in tf.range(3):
            shared.apply_clipped_sum(zeros([20_000]), [variable])
            weights = weights.write(number, variable.value)
        return weights.stack()

    moves = np.diff(np.concatenate([np.zeros([1, 20_000]), three_steps()]), axis=0)
    assert np.abs(correlations(moves)).max() < 4 / math.sqrt(20_000)
    np.testing.assert_allclose(moves.std(axis=1), 1, rtol=0.03)


def test_a_new_key_acts_on_a_traced_step(fixed_entropy):
    noise = source(None)
    step = tf.function(
        lambda: add_noise(
            zeros([20_000]),
            noise_multiplier=tf.constant(1.0),
            stream=noise.stream(tf.constant(0, tf.int64)),
        )[0]
    )
    before = step().numpy()
    noise.renew_key()
    assert_unrelated([before, step().numpy()])


# ---------------------------------------------------------- nobody can know the key


def seed_everything():
    keras.utils.set_random_seed(1)
    tf.random.set_seed(1)  # noqa: TID251 (the noise must not depend on it)
    np.random.seed(1)  # noqa: NPY002, TID251


def test_global_seeds_do_not_make_the_noise_predictable():
    streams = []
    for _ in range(2):
        seed_everything()
        noise = source(None)
        streams += draw(noise, zeros([1000]))
        seed_everything()
        noise.renew_key()
        streams += draw(noise, zeros([1000]))
    assert len({stream.tobytes() for stream in streams}) == 4


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_global_seeds_do_not_change_seeded_noise(mode):
    streams = []
    for seeded in (False, True):
        if seeded:
            seed_everything()
        noise = source(3)
        noised = run(
            lambda noise=noise: add_noise(
                zeros([1000]),
                noise_multiplier=tf.constant(1.0),
                stream=noise.stream(tf.constant(5, tf.int64)),
            ),
            mode,
        )()
        streams.append(noised[0].numpy())
    np.testing.assert_array_equal(*streams)


def test_key_is_sixteen_bytes_of_the_operating_system(monkeypatch):
    asked = []

    def token_bytes(size):
        asked.append(size)
        return bytes(range(size))

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    source(None).renew_key()
    assert asked == [16, 16]


def test_key_is_no_constant_of_the_graph(monkeypatch):
    key = bytes(range(100, 116))
    monkeypatch.setattr(secrets, "token_bytes", lambda _: key)
    noise = source(None)
    step = tf.function(
        lambda: add_noise(
            zeros([4]),
            noise_multiplier=tf.constant(1.0),
            stream=noise.stream(tf.constant(0, tf.int64)),
        )
    )
    graph = step.get_concrete_function().graph.as_graph_def().SerializeToString()
    assert key not in graph
    assert key[:8] not in graph


def test_key_is_in_no_checkpoint_and_no_saved_optimizer(tmp_path, monkeypatch):
    key = bytes(range(100, 116))
    monkeypatch.setattr(secrets, "token_bytes", lambda _: key)
    private = optimizer(noise_seed=None)
    apply_noise(private, zeros([3]))
    tf.train.Checkpoint(optimizer=private).write(str(tmp_path / "checkpoint"))
    store = {}
    private.save_own_variables(store)
    saved = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    saved += b"".join(np.asarray(value).tobytes() for value in store.values())
    assert len(saved) > 100
    assert key[:8] not in saved


def test_a_seed_reproduces_the_noise_and_warns():
    with pytest.warns(UserWarning, match=r"noise_seed=3.*leave `noise_seed` out"):
        first = Gaussian(3)
    second = source(3)
    second.renew_key()
    np.testing.assert_array_equal(draw(first, zeros([9])), draw(second, zeros([9])))


@pytest.mark.parametrize("seed", [0, 2**63, 2**200])
def test_seeds_may_be_of_any_size(seed):
    assert np.isfinite(draw(source(seed), zeros([9]))).all()


def test_a_negative_seed_is_refused():
    message = r"at least 0\. Received: noise_seed=-1\. Use `noise_seed=1`\."
    with pytest.raises(ValueError, match=message):
        source(-1)


@pytest.mark.parametrize("seed", [True, 1.0, "1"])
def test_what_is_no_integer_is_no_seed(seed):
    with pytest.raises(
        TypeError, match=r"`noise_seed` must be a whole number\. Received"
    ):
        Gaussian(seed)


# ------------------------------------------------------- shapes, dtypes, places, modes


@pytest.mark.parametrize("shape", [[], [1], [2], [3], [0], [0, 4], [5, 7], [2, 3, 5]])
def test_every_shape_is_filled(shape):
    noised = draw(source(), zeros(shape))[0]
    assert noised.shape == tuple(shape)
    assert np.count_nonzero(noised) == math.prod(shape)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_noise_is_never_narrower_than_float32(dtype, expected):
    # Multiples of the spacing of half precision would tell noise from gradient.
    (noise,) = draw(source(), zeros([1000], dtypes=(dtype,)))
    assert noise.dtype == expected
    assert len(np.unique(noise)) > 990


def test_dtypes_may_differ_between_variables():
    wide, narrow = draw(
        source(), zeros([100_000], [100_000], clip=0.1, dtypes=("float64", "float32"))
    )
    assert (wide.dtype, narrow.dtype) == ("float64", "float32")
    np.testing.assert_allclose([wide.std(), narrow.std()], 0.1, rtol=0.01)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_low_precision_models_get_noise_of_full_precision(policy, rng):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(50)])
    x, y = rng.normal(size=[4, 3]), rng.normal(size=[4, 50])
    clipped_sum = clipped_gradients(
        model, "mse", x.astype("float32"), y.astype("float32"), l2_norm_clip=1.0
    )
    for noised in draw(source(), clipped_sum):
        assert noised.dtype == "float32"
        assert len(np.unique(noised)) == noised.size


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("shape", [[1], [7], [100, 33]])
def test_graph_and_xla_draw_the_eager_numbers(mode, shape):
    def numbers(key):
        return standard_normal(tf.TensorShape(shape), key)

    eager = numbers(KEY)
    np.testing.assert_allclose(run(numbers, mode)(KEY), eager, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("problem", ["embedding_mean", "unused", "frozen_layer"])
def test_every_entry_of_every_trainable_variable_gets_noise(problem):
    # Rows that were never looked up and variables without gradient included.
    problem = PROBLEMS[problem]
    model = problem.build()
    before = [variable.numpy() for variable in model.trainable_variables]
    clipped_sum = clipped_gradients(
        model, problem.loss(), *problem.batch(1), l2_norm_clip=1.0
    )
    optimizer(noise_multiplier=10.0).apply_clipped_sum(
        clipped_sum, model.trainable_variables
    )
    for old, variable in zip(before, model.trainable_variables, strict=True):
        assert (variable.numpy() != old).all(), variable.path


@pytest.mark.slow
def test_rows_that_were_looked_up_get_no_other_noise_than_the_rest():
    model = keras.Sequential([
        keras.Input((4,), dtype="int32"),
        keras.layers.Embedding(20_000, 8),
        keras.layers.GlobalAveragePooling1D(),
    ])
    ids = np.arange(400, dtype="int32").reshape(100, 4) * 50
    clipped_sum = clipped_gradients(
        model, "mse", ids, np.zeros([100, 8], "float32"), l2_norm_clip=1e-6
    )
    clipped_sum = clipped_sum._replace(l2_norm_clip=tf.constant(1.0))
    before = model.trainable_variables[0].numpy()
    optimizer().apply_clipped_sum(clipped_sum, model.trainable_variables)
    moved = model.trainable_variables[0].numpy() - before
    is_used = np.isin(np.arange(20_000), ids)
    assert moved[is_used].std() == pytest.approx(1, rel=0.05)
    assert moved[~is_used].std() == pytest.approx(1, rel=0.01)


@pytest.mark.filterwarnings("ignore:The privacy noise is reproducible")
def test_queries_have_noise_of_their_own():
    """Independent of that of the gradients, of other steps, and of other queries."""
    source, shape = Gaussian(3), (4000,)
    zeros = ClippedSum([tf.zeros(shape)] * 3, tf.zeros([0]), tf.constant(1.0), 1)
    draws = []
    for number in range(3):
        stream = source.stream(tf.constant(number, tf.int64))
        draws += add_noise(
            zeros, noise_multiplier=tf.constant(1.0, tf.float64), stream=stream
        )
        draws.append(noise_of_query(shape, stream=stream))
    correlations = np.corrcoef(np.stack(draws))
    assert np.abs(correlations - np.eye(len(draws))).max() < 0.1


FORKED = """
import os
import sys
import numpy as np
import tensorflow as tf
import tfdp

seeded = sys.argv[1] == "seeded"
variable = tf.keras.Variable(np.zeros(4), trainable=True)
optimizer = tfdp.optimizers.DPSGD(
    1.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=1,
    noise_seed=1 if seeded else None,
)


def step():
    nothing = tfdp.ClippedSum([tf.zeros(4)], tf.zeros(1), tf.constant(1.0), 1)
    optimizer.apply_clipped_sum(nothing, [variable])
    return variable.numpy().tolist()


step()
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.write(writer, repr(step()).encode())
    os._exit(0)
os.waitpid(child, 0)
print(os.read(reader, 4096).decode())
print(step())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["secret", "seeded"])
def test_a_forked_process_draws_noise_of_its_own(kind):
    run = forks.run(FORKED, kind)
    assert run.returncode == 0, run.stderr
    of_child, of_parent = run.stdout.splitlines()
    # Who gives a seed wants the same noise everywhere.
    assert (of_child == of_parent) == (kind == "seeded")
