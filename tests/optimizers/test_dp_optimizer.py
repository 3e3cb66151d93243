"""The optimizer takes clipped sums only, and makes one private step of each."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.problems import PROBLEMS
from tfdp.clipping import ClippedSum
from tfdp.errors import NotPrivateError
from tfdp.optimizers import DPSGD, DPAdam, DPAdamW, DPOptimizer

pytestmark = pytest.mark.keras_private

PRIVATE = {"l2_norm_clip": 1.0, "noise_multiplier": 1.1}


def quiet(make, *args, **kwargs):
    """Call without the warnings about what is meant for tests only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **kwargs)


def noiseless(*args, make=DPSGD, clip=1.0, batch=1, **kwargs):
    return quiet(
        make,
        *args,
        l2_norm_clip=clip,
        noise_multiplier=0.0,
        expected_batch_size=batch,
        **kwargs,
    )


def given(*gradients, clip=1.0, examples_per_unit=1):
    """A clipped sum of these gradients."""
    return ClippedSum(
        [tf.constant(gradient, tf.float32) for gradient in gradients],
        tf.ones([1]),
        tf.constant(clip),
        examples_per_unit,
    )


def variable(value, **options):
    return keras.Variable(np.asarray(value, "float32"), **options)


def linear(**options):
    """A model of two weights and a bias, all zero."""
    return keras.Sequential([
        keras.Input((2,)),
        keras.layers.Dense(1, kernel_initializer="zeros", **options),
    ])


class Point(keras.Model):
    """Its output is its weight, whatever comes in."""

    def build(self, input_shape):
        self.point = self.add_weight(shape=(2,), initializer="zeros")

    def call(self, x):
        return self.point + 0.0 * x


def half_squared_distance(y_true, y_pred):
    return 0.5 * tf.reduce_sum(tf.square(y_pred - y_true), axis=-1)


# ----------------------------------------------------------- steps computed by hand


def test_one_step_of_a_linear_model():
    model = linear()
    clipped_sum = tfdp.clipped_gradients(
        model, "mse", np.array([[3.0, 4.0]]), np.array([[15.0]]), l2_norm_clip=1e6
    )
    noiseless(0.01, clip=1e6).apply_clipped_sum(clipped_sum, model.trainable_variables)
    kernel, bias = model.get_weights()
    np.testing.assert_allclose(kernel.ravel(), [0.9, 1.2], rtol=1e-5)
    np.testing.assert_allclose(bias, [0.3], rtol=1e-5)


@pytest.mark.parametrize(
    ("x", "num_microbatches", "mean_gradient"),
    [
        ([[3, 4], [6, 8]], None, [-0.6, -0.8]),
        ([[3, 4], [6, 8]], 2, [-0.6, -0.8]),
        ([[3, 4], [-6, -8]], 1, [0.6, 0.8]),
        ([[0.3, 0.4], [0, 0.5]], None, [-0.15, -0.45]),
        ([[3, 4], [0.3, 0.4], [6, 8], [0, 0]], 2, [-0.6, -0.8]),
    ],
)
@pytest.mark.parametrize(
    "is_traced", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_clipped_mean_of_examples_and_of_microbatches(
    x, num_microbatches, mean_gradient, is_traced
):
    model = Point()
    optimizer = noiseless(1.0, batch=len(x), num_microbatches=num_microbatches)

    def step(x):
        clipped_sum = tfdp.clipped_gradients(
            model,
            half_squared_distance,
            x,
            x,
            l2_norm_clip=optimizer.l2_norm_clip,
            num_microbatches=num_microbatches,
        )
        optimizer.apply_clipped_sum(clipped_sum, model.trainable_variables)

    x = tf.constant(x, tf.float32)
    model(x)
    (tf.function(step) if is_traced else step)(x)
    np.testing.assert_allclose(-model.point.numpy(), mean_gradient, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 1, 3, 7, 100])
def test_divisor_is_the_expected_batch_size_whatever_the_batch(rows):
    model = Point()
    x = np.tile([[0.3, 0.4]], [rows, 1]).astype("float32")
    model(np.zeros([1, 2], "float32"))
    clipped_sum = tfdp.clipped_gradients(
        model, half_squared_distance, x, x, l2_norm_clip=1.0
    )
    optimizer = noiseless(1.0, batch=7)
    optimizer.apply_clipped_sum(clipped_sum, model.trainable_variables)
    expected = np.array([0.3, 0.4]) * rows / 7
    np.testing.assert_allclose(model.point, expected, rtol=1e-5)


def test_divisor_is_the_expected_number_of_units():
    weight = variable([0.0])
    noiseless(1.0, batch=12).apply_clipped_sum(
        given([3.0], examples_per_unit=4), [weight]
    )
    np.testing.assert_allclose(weight, [-1.0], rtol=1e-6)


def test_a_changed_expected_batch_size_acts_on_a_traced_step():
    weight = variable([0.0])
    optimizer = quiet(DPSGD, 1.0, l2_norm_clip=1.0, noise_multiplier=0.0)
    optimizer.build([weight])
    optimizer.expect_batch_size(2)
    step = tf.function(lambda: optimizer.apply_clipped_sum(given([1.0]), [weight]))
    step()
    optimizer.expect_batch_size(8)
    step()
    np.testing.assert_allclose(weight, [-0.5 - 0.125], rtol=1e-6)


def test_noise_is_divided_like_the_sum():
    weight = variable(np.zeros(100_000))
    optimizer = quiet(DPSGD, 0.5, **PRIVATE, expected_batch_size=20, noise_seed=1)
    optimizer.apply_clipped_sum(given(np.zeros(100_000)), [weight])
    assert np.std(weight) == pytest.approx(0.5 * 1.1 / 20, rel=0.01)


# ------------------------------------------------------- regularizers and averages


class Cubes(keras.regularizers.Regularizer):
    def __call__(self, x):
        return keras.ops.sum(x**3)


class Constant(keras.regularizers.Regularizer):
    def __call__(self, x):
        return tf.constant(7.0)


@pytest.mark.parametrize(
    ("regularizer", "gradient"),
    [
        (keras.regularizers.L2(0.5), lambda w: w),
        (keras.regularizers.L1(0.5), lambda w: 0.5 * np.sign(w)),
        (Cubes(), lambda w: 3 * w**2),
        (Constant(), np.zeros_like),
    ],
)
def test_regularizer_is_added_behind_clipping_and_division(regularizer, gradient):
    start = np.array([100.0, -200.0, 50.0], "float32")
    weight = variable(start)
    weight.regularizer = regularizer
    optimizer = noiseless(0.25, clip=1e-3, batch=1000)
    step = tf.function(
        lambda: optimizer.apply_clipped_sum(given(np.zeros(3), clip=1e-3), [weight])
    )
    optimizer.build([weight])
    step()
    np.testing.assert_allclose(weight, start - 0.25 * gradient(start), rtol=1e-6)


@pytest.mark.slow
def test_regularizer_of_a_model_is_no_part_of_the_clipped_gradient(rng):
    problem = PROBLEMS["regularized"]
    model, plain = problem.build(), problem.build()
    for layer in plain.layers:
        layer.kernel.regularizer = layer.bias.regularizer = None
    sums = [
        tfdp.clipped_gradients(m, "mse", *problem.batch(), l2_norm_clip=0.1)
        for m in (model, plain)
    ]
    for regularized, expected in zip(*(s.gradients for s in sums), strict=True):
        np.testing.assert_array_equal(regularized, expected)


def test_moving_averages_of_the_weights_are_the_inner_optimizer_s():
    weight = variable([0.0])
    optimizer = noiseless(1.0, use_ema=True, ema_momentum=0.5)
    for _ in range(3):
        optimizer.apply_clipped_sum(given([-1.0]), [weight])
    np.testing.assert_allclose(weight, [3.0])
    expected = 0.0
    for value in (1.0, 2.0, 3.0):
        expected = 0.5 * expected + 0.5 * value
    optimizer.finalize_variable_values([weight])
    # Keras starts the average at the first value.
    assert 0 < float(weight[0]) < 3
    assert float(weight[0]) == pytest.approx(expected, abs=0.2)


@pytest.mark.slow
def test_swap_ema_weights_finds_the_inner_optimizer(rng):
    private = tfdp.DPModel(linear())
    optimizer = DPSGD(0.1, use_ema=True, ema_momentum=0.9, **PRIVATE)
    private.compile(optimizer, loss="mse")
    x, y = rng.normal(size=[20, 2]), rng.normal(size=[20, 1])
    private.fit(
        x,
        y,
        batch_size=5,
        epochs=2,
        verbose=0,
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    )
    inner = optimizer.inner_optimizer
    assert optimizer.inner_optimizer.use_ema
    for weight, average in zip(
        private.trainable_variables, inner._model_variables_moving_average, strict=True
    ):
        assert np.isfinite(average).all()
        np.testing.assert_array_equal(weight, average)


def test_excluded_variables_do_not_decay():
    decaying, kept = variable([1.0], name="kernel"), variable([1.0], name="bias")
    optimizer = noiseless(0.1, make=DPAdamW, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply_clipped_sum(given([0.0], [0.0]), [decaying, kept])
    np.testing.assert_allclose(decaying, [0.95], rtol=1e-6)
    np.testing.assert_array_equal(kept, [1.0])


def test_learning_rate_and_iterations_are_the_inner_optimizer_s():
    optimizer = noiseless(0.25)
    weight = variable([0.0])
    assert float(optimizer.learning_rate) == 0.25
    optimizer.apply_clipped_sum(given([-1.0]), [weight])
    optimizer.learning_rate = 0.5
    optimizer.apply_clipped_sum(given([-1.0]), [weight])
    np.testing.assert_allclose(weight, [0.75])
    assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations) == 2
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5


# ------------------------------------------------------ clip norm, noise multiplier


@pytest.mark.slow
def test_a_changed_clip_norm_acts_on_the_next_traced_step():
    model = Point()
    optimizer = noiseless(1.0, clip=1.0)
    traces = []

    @tf.function
    def step(x):
        traces.append(1)
        clipped_sum = tfdp.clipped_gradients(
            model, half_squared_distance, x, x, l2_norm_clip=optimizer.l2_norm_clip
        )
        optimizer.apply_clipped_sum(clipped_sum, model.trainable_variables)
        return clipped_sum

    x = tf.constant([[300.0, 400.0]])
    model(x)
    optimizer.build(model.trainable_variables)
    step(x)
    model.point.assign([0.0, 0.0])
    traced, moved = len(traces), [0.0]
    for clip in (1.0, 0.25, 4.0):
        optimizer.l2_norm_clip = clip
        assert float(step(x).l2_norm_clip) == clip
        moved.append(np.linalg.norm(model.point.numpy()))
    np.testing.assert_allclose(np.diff(moved), [1.0, 0.25, 4.0], rtol=1e-5)
    assert len(traces) == traced


def test_clipping_noise_and_ledger_agree_when_the_clip_norm_changes():
    weight = variable(np.zeros(100_000))
    optimizer = quiet(
        DPSGD, 1.0, **PRIVATE, expected_batch_size=1, noise_seed=1, name="changing"
    )
    optimizer.build([weight])

    @tf.function
    def step(x):
        clip = tf.cast(optimizer.l2_norm_clip.value, tf.float32)
        clipped_sum = ClippedSum([tf.zeros([100_000])], x, clip, 1)
        before = tf.identity(weight.value)
        optimizer.apply_clipped_sum(clipped_sum, [weight])
        return weight.value - before

    for clip in (1.0, 1e-3, 50.0):
        optimizer.l2_norm_clip = clip
        assert np.std(step(tf.ones([1]))) == pytest.approx(1.1 * clip, rel=0.01)
    assert optimizer.ledger.segments == (tfdp.accounting.UnamplifiedSteps(3, 1.1),)


def test_a_changed_noise_multiplier_acts_on_the_next_traced_step_and_the_ledger():
    weight = variable(np.zeros(100_000))
    optimizer = quiet(DPSGD, 1.0, **PRIVATE, expected_batch_size=1, noise_seed=1)
    optimizer.build([weight])

    @tf.function
    def step():
        before = tf.identity(weight.value)
        optimizer.apply_clipped_sum(given(np.zeros(100_000)), [weight])
        return weight.value - before

    for noise_multiplier in (1.1, 3.0, 0.5):
        optimizer.noise_multiplier = noise_multiplier
        assert np.std(step()) == pytest.approx(noise_multiplier, rel=0.01)
    assert [s.noise_multiplier for s in optimizer.ledger.segments] == [1.1, 3.0, 0.5]


@pytest.mark.parametrize(("examples_per_unit", "recorded"), [(1, 1.1), (4, 0.55)])
def test_ledger_takes_noise_over_sensitivity(examples_per_unit, recorded):
    optimizer = DPSGD(1.0, **PRIVATE, expected_batch_size=8)
    optimizer.apply_clipped_sum(
        given([0.0], examples_per_unit=examples_per_unit), [variable([0.0])]
    )
    (segment,) = optimizer.ledger.segments
    assert segment.noise_multiplier == pytest.approx(recorded)
    assert segment.steps == 1


def test_numbers_may_be_of_any_kind():
    optimizer = DPSGD(
        0.1,
        l2_norm_clip=np.float32(0.5),
        noise_multiplier=np.int64(2),
        num_microbatches=4.0,
        expected_batch_size=np.int32(8),
    )
    assert float(optimizer.l2_norm_clip) == 0.5
    assert float(optimizer.noise_multiplier) == 2.0
    assert optimizer.num_microbatches == 4
    assert optimizer.expected_batch_size == 8.0


# ------------------------------------------------------------------- expected sizes


def test_expected_batch_size_is_unknown_at_first():
    optimizer = DPSGD(0.1, **PRIVATE)
    assert optimizer.expected_batch_size is None
    optimizer.expect_batch_size(32)
    assert optimizer.expected_batch_size == 32


def test_data_of_another_size_than_the_optimizer_was_made_for_are_refused():
    optimizer = DPSGD(0.1, **PRIVATE, expected_batch_size=32)
    optimizer.expect_batch_size(32)
    with pytest.raises(ValueError, match=r"expected_batch_size=32.*64.*batch_size=32"):
        optimizer.expect_batch_size(64)
    assert optimizer.expected_batch_size == 32


@pytest.mark.parametrize(
    ("num_microbatches", "batch_size", "examples_per_unit"),
    [(None, 10, 1), (10, 10, 1), (5, 10, 2), (4, 10, 3), (1, 10, 10)],
)
def test_examples_in_a_unit(num_microbatches, batch_size, examples_per_unit):
    optimizer = DPSGD(0.1, **PRIVATE, num_microbatches=num_microbatches)
    assert optimizer.examples_per_unit(batch_size) == examples_per_unit


def test_more_microbatches_than_examples_are_refused():
    optimizer = DPSGD(0.1, **PRIVATE, num_microbatches=11)
    with pytest.raises(ValueError, match=r"num_microbatches=11, batch_size=10\. Use"):
        optimizer.examples_per_unit(10)


# -------------------------------------------------------------- what is not private


def plain_fit(run_eagerly=False, policy="float32", jit_compile=False):
    keras.config.set_dtype_policy(policy)
    model = linear()
    model.compile(
        DPSGD(0.1, **PRIVATE, expected_batch_size=4),
        loss="mse",
        run_eagerly=run_eagerly,
        jit_compile=jit_compile,
    )
    # The eager loss-scale optimizer skips a step or two before it asks for one.
    x, y = np.ones([4, 2]), np.ones([4, 1])
    return model, lambda: model.fit(x, y, epochs=5, verbose=0)


def own_loop(apply):
    model = linear()
    optimizer = DPSGD(0.1, **PRIVATE, expected_batch_size=4)
    return model, lambda: apply(optimizer, model.trainable_variables)


def ones_like(variables):
    return [tf.ones(variable.shape) for variable in variables]


NOT_PRIVATE = {
    "fit": plain_fit,
    "fit_eagerly": lambda: plain_fit(run_eagerly=True),
    "fit_xla": lambda: plain_fit(jit_compile=True),
    "fit_float16": lambda: plain_fit(policy="mixed_float16"),
    "fit_float16_eagerly": lambda: plain_fit(policy="mixed_float16", run_eagerly=True),
    "apply": lambda: own_loop(lambda opt, v: opt.apply(ones_like(v), v)),
    "apply_without_variables": lambda: own_loop(
        lambda opt, v: (opt.build(v), opt.apply(ones_like(v)))
    ),
    "apply_gradients": lambda: own_loop(
        lambda opt, v: opt.apply_gradients(zip(ones_like(v), v, strict=True))
    ),
    "traced_apply_gradients": lambda: own_loop(
        lambda opt, v: tf.function(
            lambda: opt.apply_gradients(zip(ones_like(v), v, strict=True))
        )()
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", NOT_PRIVATE)
def test_training_without_privacy_is_refused_before_any_weight_moves(case):
    model, train = NOT_PRIVATE[case]()
    model.set_weights([np.full([2, 1], 0.3), np.full([1], -0.7)])
    before = [weight.copy() for weight in model.get_weights()]
    with pytest.raises(NotPrivateError, match=r"never trains without privacy") as error:
        train()
    for fix in ("Received: ", "tfdp.DPModel(model)", "apply_clipped_sum"):
        assert fix in str(error.value)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert old.tobytes() == new.tobytes()


# ----------------------------------------------------------------- wrong arguments


def test_an_inner_optimizer_may_be_named():
    optimizer = DPOptimizer("adam", **PRIVATE)
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.Adam)
    assert optimizer.name == "dp_adam"


@pytest.mark.parametrize(
    "wrong",
    [[tf.zeros([1])], (tf.zeros([1]),), {"gradients": []}, tf.zeros([1]), None],
    ids=["list", "tuple", "dict", "tensor", "none"],
)
def test_only_clipped_sums_are_applied(wrong):
    optimizer, weight = noiseless(1.0), variable([1.0])
    with pytest.raises(TypeError, match=r"`tfdp\.clipped_gradients`.*Received: .*type"):
        optimizer.apply_clipped_sum(wrong, [weight])
    np.testing.assert_array_equal(weight, [1.0])


def test_a_gradient_for_each_variable_is_needed():
    optimizer, weight = noiseless(1.0), variable([1.0])
    with pytest.raises(ValueError, match=r"Received: 2 gradients, 1 variables\. Pass"):
        optimizer.apply_clipped_sum(given([1.0], [1.0]), [weight])
    np.testing.assert_array_equal(weight, [1.0])
    assert optimizer.ledger.steps == 0


@pytest.mark.parametrize("is_traced", [False, True])
def test_an_unknown_divisor_is_refused(is_traced):
    optimizer, weight = DPSGD(1.0, **PRIVATE), variable([1.0])

    def step():
        optimizer.apply_clipped_sum(given([1.0]), [weight])

    with pytest.raises(ValueError, match=r"expected_batch_size=None\. Use `DPSGD\("):
        (tf.function(step) if is_traced else step)()
    np.testing.assert_array_equal(weight, [1.0])
    assert optimizer.ledger.steps == 0


# --------------------------------------------------------------- configuration, state


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)


CONFIGURED = {
    "plain": lambda: DPOptimizer(keras.optimizers.SGD(0.25, momentum=0.5), **PRIVATE),
    "scheduled": lambda: DPOptimizer(keras.optimizers.Adam(schedule()), **PRIVATE),
    "averaged": lambda: DPOptimizer(
        keras.optimizers.AdamW(0.1, weight_decay=0.01, use_ema=True), **PRIVATE
    ),
    "all": lambda: DPOptimizer(
        keras.optimizers.Lion(0.1),
        l2_norm_clip=0.3,
        noise_multiplier=2.5,
        num_microbatches=4,
        expected_batch_size=32.0,
        name="mine",
    ),
    "family": lambda: DPSGD(0.1, momentum=0.9, nesterov=True, **PRIVATE),
    "family_scheduled": lambda: DPAdam(schedule(), beta_1=0.8, **PRIVATE),
}


@pytest.mark.parametrize("case", CONFIGURED)
@pytest.mark.parametrize("package", ["saving", "optimizers"])
def test_configuration_round_trip(case, package):
    optimizer = CONFIGURED[case]()
    if package == "saving":
        serialized = keras.saving.serialize_keras_object(optimizer)
        again = keras.saving.deserialize_keras_object(serialized)
    else:
        serialized = keras.optimizers.serialize(optimizer)
        again = keras.optimizers.deserialize(serialized)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert type(again.inner_optimizer) is type(optimizer.inner_optimizer)
    assert (
        again.inner_optimizer.get_config()["learning_rate"]
        == (optimizer.inner_optimizer.get_config()["learning_rate"])
    )


def test_a_configuration_can_be_used_twice():
    serialized = keras.saving.serialize_keras_object(CONFIGURED["all"]())
    first, second = (
        keras.saving.deserialize_keras_object(serialized) for _ in range(2)
    )
    assert first.get_config() == second.get_config()


def test_configuration_has_the_present_numbers():
    optimizer = DPSGD(0.1, **PRIVATE)
    optimizer.l2_norm_clip, optimizer.noise_multiplier = 0.25, 3.0
    again = DPSGD.from_config(optimizer.get_config())
    assert float(again.l2_norm_clip) == 0.25
    assert float(again.noise_multiplier) == 3.0


def test_the_batch_size_of_one_training_is_no_part_of_the_configuration():
    optimizer = DPSGD(0.1, **PRIVATE)
    optimizer.expect_batch_size(32)
    assert optimizer.get_config()["expected_batch_size"] is None


def test_a_seed_is_part_of_the_configuration_and_warns_again():
    optimizer = quiet(DPSGD, 0.1, **PRIVATE, noise_seed=3)
    config = optimizer.get_config()
    with pytest.warns(UserWarning, match="noise_seed=3"):
        assert DPSGD.from_config(config).noise_is_seeded
    assert not DPSGD(0.1, **PRIVATE).noise_is_seeded


@pytest.mark.parametrize("make", [DPSGD, DPAdam])
def test_state_round_trip(make):
    weight = variable([1.0, 2.0])
    optimizer = noiseless(0.1, make=make)
    optimizer.apply_clipped_sum(given([1.0, -1.0]), [weight])
    optimizer.l2_norm_clip = 0.25
    store = {}
    optimizer.save_own_variables(store)
    again = noiseless(0.7, make=make)
    again.build([weight])
    again.load_own_variables(store)
    assert len(again.variables) == len(optimizer.variables) == len(store)
    for old, new in zip(optimizer.variables, again.variables, strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(again.l2_norm_clip) == 0.25
    assert int(again.iterations) == 1


def test_each_variable_is_listed_once():
    optimizer = DPAdam(0.1, **PRIVATE)
    optimizer.build([variable([1.0])])
    assert len({id(v) for v in optimizer.variables}) == len(optimizer.variables)
    assert any(v is optimizer.l2_norm_clip for v in optimizer.variables)
    assert any(v is optimizer.noise_multiplier for v in optimizer.variables)


@pytest.mark.parametrize("is_built", [False, True])
def test_a_state_of_another_shape_is_refused(is_built):
    weight = variable([1.0])
    saved, loading = DPAdam(0.1, **PRIVATE), DPSGD(0.1, **PRIVATE)
    saved.build([weight])
    if is_built:
        loading.build([weight])
    store = {}
    saved.save_own_variables(store)
    with pytest.raises(ValueError, match=r"Received: \d+ saved variables for \d+\. B"):
        loading.load_own_variables(store)


def test_restored_weights_meet_no_noise_twice():
    weight = variable(np.zeros(1000))
    optimizer = DPSGD(1.0, **PRIVATE, expected_batch_size=1)
    optimizer.build([weight])
    store = {}
    optimizer.save_own_variables(store)
    moves = []
    for _ in range(2):
        weight.assign(np.zeros(1000))
        optimizer.load_own_variables(store)
        optimizer.apply_clipped_sum(given(np.zeros(1000)), [weight])
        moves.append(weight.numpy())
    assert not np.isin(moves[0], moves[1]).all()
    assert np.std(moves[0] - moves[1]) > 1


def seeded(**options):
    return quiet(DPSGD, 1.0, **PRIVATE, expected_batch_size=1, noise_seed=1, **options)


def moved(optimizer, weight):
    """How the noise alone moves a weight."""
    before = weight.numpy()
    optimizer.apply_clipped_sum(given(np.zeros(50)), [weight])
    return weight.numpy() - before


@pytest.mark.parametrize("is_graph", [False, True])
def test_steps_of_a_seed_have_the_streams_from_0_on(is_graph):
    """As those of `fit` do: own steps and those of a model never share noise."""
    weight, optimizer = variable(np.zeros(50)), seeded()
    optimizer.build([weight])
    mechanism = quiet(tfdp.mechanisms.Gaussian, noise_seed=1)
    step = functools.partial(optimizer.apply_clipped_sum, given(np.zeros(50)), [weight])
    step = tf.function(step) if is_graph else step
    for number in range(3):
        (noise,) = mechanism.noised(
            given(np.zeros(50)),
            noise_multiplier=tf.constant(1.1),
            stream=mechanism.stream(tf.constant(number, tf.int64)),
        )
        before = weight.numpy()
        step()
        np.testing.assert_allclose(before - weight.numpy(), noise, rtol=1e-5, atol=1e-5)


def test_weights_of_another_history_meet_no_noise_twice():
    """With one seed: steps of both histories count before the next one."""
    first, second = variable(np.zeros(50)), variable(np.zeros(50))
    optimizer = seeded()
    optimizer.build([first, second])
    other = DPSGD(1.0, **PRIVATE, expected_batch_size=1)
    other.apply_clipped_sum(given(np.zeros(50)), [second])
    moves = [
        moved(optimizer, weight) for weight in (first, first, first, second, second)
    ]
    assert len(np.unique(np.round(moves, 4), axis=0)) == len(moves)
    assert optimizer.ledger.steps == 6
    # Of another optimizer with the seed, too.
    moves += [moved(seeded(), second) for _ in range(3)]
    assert len(np.unique(np.round(moves, 4), axis=0)) == len(moves)


def test_a_seed_goes_on_behind_the_steps_that_were_loaded():
    weight, optimizer = variable(np.zeros(50)), seeded()
    moves = [moved(optimizer, weight) for _ in range(4)]
    first = seeded()
    weight = variable(np.zeros(50))
    np.testing.assert_allclose(moved(first, weight), moves[0], rtol=1e-5, atol=1e-5)
    moved(first, weight)
    again, weight = seeded(), variable(np.zeros(50))
    again.recorder.restore(first.recorder.state())
    np.testing.assert_allclose(moved(again, weight), moves[2], rtol=1e-5, atol=1e-5)
