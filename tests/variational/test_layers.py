"""Variational layers: gradients of means and scales, and how models train."""

import dataclasses
import subprocess
import sys
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting.pld import privacy_loss_distribution

import tfdp
from tests.problems import precision
from tests.reference import assert_all_close, clipped_sum
from tfdp._views import views_of_each_row
from tfdp.clipping import clip_as_tensor
from tfdp.engines import BookkeepingEngine, GhostEngine, VectorizedEngine
from tfdp.losses.objective import Batch, Objective
from tfdp.optimizers.dp_optimizer import with_regularizer
from tfdp.variational import BayesianLogisticRegression, VariationalDense

CROSSENTROPY = keras.losses.BinaryCrossentropy(from_logits=True)


def square(y, outputs):
    """Keras's own rounds its divisor to float32."""
    return tf.reduce_mean(tf.square(y - tf.cast(outputs, y.dtype)), -1)


DRAWS = ("local", "shared", "per_example")
UNITS = 5

draws_of_all_kinds = pytest.mark.parametrize("draws", DRAWS)


@pytest.fixture
def chosen(monkeypatch):
    """What is drawn, so that single rows can be given the same."""

    class Chosen:
        """Attributes: rows of the batch that are run; whether all draw the same."""

        rows = slice(None)
        are_alike = False

        def __init__(self):
            self.calls = {}

        def normal(self, layer, shape):
            each = 2 if layer.draws != "local" and layer.use_bias else 1
            number = self.calls.get(layer.name, 0) % each
            self.calls[layer.name] = number + 1
            seed = [zlib.crc32(layer.name.encode()), number]
            numbers = np.random.default_rng(seed).normal(size=(32, *shape[1:]))
            if layer.draws == "shared":
                numbers = numbers[: shape[0]]
            elif self.are_alike:
                numbers = np.repeat(numbers[:1], shape[0], 0)
            else:
                numbers = numbers[self.rows][: shape[0]]
            return tf.constant(numbers, layer.compute_dtype)

    chosen = Chosen()
    monkeypatch.setattr(VariationalDense, "_normal", lambda *args: chosen.normal(*args))  # noqa: PLW0108
    return chosen


def network(draws, dtype="float64", kl="outside", **options):
    options = {"number_of_examples": 40, "draws": draws, "kl": kl} | options
    return keras.Sequential([
        keras.Input((3,), dtype=dtype),
        VariationalDense(4, activation="relu", name="one", dtype=dtype, **options),
        VariationalDense(2, use_bias=False, name="two", dtype=dtype, **options),
        VariationalDense(1, name="three", dtype=dtype, **options),
    ])


def moved(model, rng):
    for variable in model.trainable_variables:
        shift = rng.normal(size=variable.shape, scale=0.5)
        variable.assign(variable.numpy() + shift)
    return model


def rows_of_data(rng, views, dtype="float64", between=()):
    x = rng.normal(size=(UNITS * views, *between, 3)).astype(dtype)
    x[2 * views : 3 * views] *= 1e3
    y = rng.integers(0, 2, size=(UNITS * views, *between, 1)).astype(dtype)
    return x, y


def gradients_one_by_one(model, x, y, views, chosen):
    """Differentiate each unit's mean loss, with the noise of its rows."""
    found = []
    for unit in range(UNITS):
        chosen.rows = slice(unit * views, (unit + 1) * views)
        with views_of_each_row(views), tf.GradientTape() as tape:
            logits = model(x[chosen.rows], training=True)
            loss = tf.reduce_mean(square(y[chosen.rows], logits))
            for variable in model.trainable_variables:
                if getattr(variable.regularizer, "kl", "") == "inside":
                    loss += tf.cast(variable.regularizer(variable.value), loss.dtype)
        values = [variable.value for variable in model.trainable_variables]
        found.append(tape.gradient(loss, values))
    chosen.rows = slice(None)
    return [np.stack(of_variable) for of_variable in zip(*found, strict=True)]


def run(engine, model, x, y, views, clip, mode):
    objective = Objective.of(model, square)
    objective = dataclasses.replace(objective, views=views)

    def clip_and_sum(x, y):
        batch = Batch(x, y, None, tf.zeros([UNITS * views], tf.bool))
        return engine.clip_and_sum(
            objective,
            batch,
            l2_norm_clip=clip_as_tensor(clip, objective.variables),
            rows_per_unit=views,
        )[:2]

    if mode != "eager":
        clip_and_sum = tf.function(
            clip_and_sum, autograph=False, jit_compile=mode == "xla"
        )
    return clip_and_sum(tf.constant(x), tf.constant(y))


def check(model, data, views, engine, chosen, mode="graph", tolerance=1e-9):
    gradients = gradients_one_by_one(model, *data, views, chosen)
    norms = clipped_sum(gradients, 1.0)[1]
    clip = float(np.median(norms))
    expected, norms = clipped_sum(gradients, clip)
    assert np.max(norms) > 2 * clip
    with precision(str(data[0].dtype)):
        sums, found = run(engine, model, *data, views, clip, mode)
    np.testing.assert_allclose(found, norms, rtol=tolerance)
    assert_all_close(sums, expected, rtol=0, atol=tolerance * clip * UNITS)


# ----------------------------------------------------------------- gradients, one by one


@draws_of_all_kinds
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize(
    "engine",
    [BookkeepingEngine(), GhostEngine(), BookkeepingEngine(norms="instantiate")],
    ids=["bookkeeping", "ghost", "instantiate"],
)
def test_norms_and_sums_are_those_of_single_units(draws, views, engine, chosen, rng):
    model = moved(network(draws), rng)
    check(model, rows_of_data(rng, views), views, engine, chosen)


@draws_of_all_kinds
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_however_it_is_run(draws, mode, chosen, rng):
    model = moved(network(draws, "float32"), rng)
    data = rows_of_data(rng, 1, "float32")
    check(model, data, 1, BookkeepingEngine(), chosen, mode, 1e-4)


@draws_of_all_kinds
@pytest.mark.parametrize("views", [1, 2])
def test_vectorized_engine(draws, views, chosen, rng):
    chosen.are_alike = True
    model = moved(network(draws), rng)
    check(model, rows_of_data(rng, views), views, VectorizedEngine(), chosen)


@pytest.mark.parametrize("draws", ["shared", "per_example"])
@pytest.mark.parametrize("views", [1, 2])
def test_positions_share_the_weights_of_their_row(draws, views, chosen, rng):
    options = {"number_of_examples": 40, "draws": draws, "dtype": "float64"}
    model = keras.Sequential([
        keras.Input((2, 3), dtype="float64"),
        VariationalDense(4, activation="relu", name="one", **options),
        VariationalDense(1, name="two", **options),
    ])
    data = rows_of_data(rng, views, between=(2,))
    check(moved(model, rng), data, views, BookkeepingEngine(), chosen)


@pytest.mark.parametrize(
    "engine", [BookkeepingEngine(), GhostEngine(), VectorizedEngine()], ids=repr
)
@pytest.mark.parametrize("views", [1, 2])
def test_a_divergence_inside_is_clipped_with_the_loss(engine, views, chosen, rng):
    chosen.are_alike = isinstance(engine, VectorizedEngine)
    model = moved(network("local", kl="inside"), rng)
    check(model, rows_of_data(rng, views), views, engine, chosen)


def test_layers_called_twice_add_up(chosen, rng):
    layer = VariationalDense(
        3, number_of_examples=40, name="twice", dtype="float64", draws="shared"
    )
    inputs = keras.Input((3,), dtype="float64")
    outputs = keras.layers.Dense(1, dtype="float64")(layer(layer(inputs)))
    model = keras.Model(inputs, outputs)
    layer.kernel_mean.assign(rng.normal(size=(3, 3)))
    model.layers[-1].trainable = False
    data = rows_of_data(rng, 1)
    check(model, data, 1, BookkeepingEngine(), chosen)


def test_inputs_of_zero_without_a_bias_have_a_gradient(rng):
    """The root of a variance of zero has none; it must not empty the example."""
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(1, number_of_examples=40, use_bias=False),
    ])
    found = tfdp.clipped_gradients(
        model, CROSSENTROPY, np.zeros((2, 3)), np.ones((2, 1)), l2_norm_clip=1.0
    )
    np.testing.assert_allclose(found.norms, 0, atol=1e-12)
    assert all(np.all(np.isfinite(gradient)) for gradient in found.gradients)


# ----------------------------------------------------------------------- one global norm


@draws_of_all_kinds
@pytest.mark.parametrize("engine", ["bookkeeping", "ghost", "vectorized"])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_means_and_scales_together_move_by_the_clip_norm(draws, engine, scale, rng):
    """Clipped one by one, two variables would move by sqrt(2) of it."""
    model = BayesianLogisticRegression(
        number_of_examples=40, draws=draws, initial_scale=3.0
    )
    x = scale * rng.normal(size=(1, 4)).astype("float32")
    model.build((None, 4))
    for _ in range(5):
        found = tfdp.clipped_gradients(
            model, CROSSENTROPY, x, np.zeros((1, 1)), l2_norm_clip=0.01, engine=engine
        )
        length = np.sqrt(sum(np.sum(np.square(g)) for g in found.gradients))
        assert length <= 0.01 * (1 + 1e-6)
        if found.norms[0] > 0.01:
            assert length >= 0.0099


def test_what_naive_noise_costs():
    """For "epsilon 10" in each of 500 steps, alone or where two parts are clipped."""

    def epsilon(noise_multiplier):
        step = privacy_loss_distribution.from_gaussian_mechanism(
            noise_multiplier, value_discretization_interval=1e-3, sampling_prob=0.05
        )
        return step.self_compose(500).get_epsilon_for_delta(1e-3)

    naive = np.sqrt(2 * np.log(1.25 / 1e-3)) / 10
    np.testing.assert_allclose(epsilon(naive), 67.6, rtol=2e-3)
    run = tfdp.accounting.Ledger((tfdp.accounting.PoissonSteps(500, naive, 400, 20),))
    np.testing.assert_allclose(run.epsilon(1e-3), 67.6, rtol=2e-3)
    np.testing.assert_allclose(epsilon(naive / np.sqrt(2)), 183.7, rtol=2e-3)


# ------------------------------------------------------------------------------ draws


def outputs_of_draws(draws, rng, rows=4000, **options):
    layer = VariationalDense(
        2, number_of_examples=40, draws=draws, initial_scale=0.3, seed=1, **options
    )
    x = np.repeat(rng.normal(size=(1, 3)), rows, 0).astype("float32")
    layer.build(x.shape)
    layer.kernel_mean.assign(rng.normal(size=(3, 2)))
    return layer, x


@draws_of_all_kinds
def test_outputs_have_the_moments_of_the_posterior(draws, rng):
    layer, x = outputs_of_draws(draws, rng)
    # One draw for each row, of whatever kind.
    with views_of_each_row(4000):
        outputs = np.asarray(layer(x, training=True))
    mean, variance = layer.moments(x)
    scale = np.sqrt(variance[0])
    np.testing.assert_allclose(outputs.mean(0), mean[0], atol=4 * scale.max() / 63)
    np.testing.assert_allclose(outputs.std(0), scale, rtol=0.06)


@pytest.mark.parametrize("draws", ["shared", "per_example"])
@pytest.mark.parametrize("shape", [(12, 5, 3), (16, 7, 8), (6, 4, 4), (4, 2, 3, 8)])
def test_positions_in_float32(draws, shape, rng):
    """Products that TensorFlow broadcasts were seen to write beside their memory."""
    layer = VariationalDense(2, number_of_examples=40, draws=draws, initial_scale=1e-9)
    x = rng.normal(size=shape).astype("float32")
    layer.build(shape)
    layer.kernel_mean.assign(rng.normal(size=(shape[-1], 2)))
    expected = x @ layer.kernel_mean.numpy()
    np.testing.assert_allclose(layer(x, training=True), expected, atol=1e-5)


@pytest.mark.parametrize("engine", ["bookkeeping", "ghost", "vectorized"])
def test_all_passes_of_a_step_share_a_draw(engine):
    """Without a row others would be in other passes, and must not draw otherwise."""
    model = keras.Sequential([
        keras.Input((2,)),
        VariationalDense(1, number_of_examples=40, draws="shared", initial_scale=2.0),
    ])
    x, y = np.ones((24, 2), "float32"), np.zeros((24, 1), "float32")
    options = {"l2_norm_clip": 1.0, "engine": engine, "physical_batch_size": 6}
    first, second = (
        tfdp.clipped_gradients(model, "mse", x, y, **options).norms.numpy()
        for _ in range(2)
    )
    assert np.ptp(first) < 1e-5 * first[0]
    assert abs(first[0] - second[0]) > 1e-3


def test_who_shares_a_draw(rng):
    layer, x = outputs_of_draws("shared", rng, 6)
    outputs = np.asarray(layer(x, training=True))
    assert np.all(np.ptp(outputs, axis=0) < 1e-6)
    with views_of_each_row(3):
        outputs = np.asarray(layer(x, training=True)).reshape(2, 3, 2)
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-6)
    assert len(np.unique(outputs[0, :, 0])) == 3
    for draws in ("local", "per_example"):
        layer, x = outputs_of_draws(draws, rng, 6)
        assert len(np.unique(np.asarray(layer(x, training=True))[:, 0])) == 6


@draws_of_all_kinds
def test_each_call_draws_anew_and_inference_draws_nothing(draws, rng):
    layer, x = outputs_of_draws(draws, rng, 2)
    assert np.any(np.not_equal(layer(x, training=True), layer(x, training=True)))
    expected = x @ layer.kernel_mean.numpy() + layer.bias_mean.numpy()
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5)


@pytest.mark.parametrize("draws", ["shared", "per_example"])
def test_vectorized_rows_share_draws_or_do_not(draws):
    """Equal rows have equal gradients if they share the weights."""
    model = keras.Sequential([
        keras.Input((2,)),
        VariationalDense(1, number_of_examples=40, draws=draws, initial_scale=2.0),
    ])
    found = tfdp.clipped_gradients(
        model, "mse", np.ones((6, 2)), np.zeros((6, 1)), l2_norm_clip=1.0,
        engine="vectorized",
    )  # fmt: skip
    assert len(np.unique(found.norms.numpy().round(5))) == (
        1 if draws == "shared" else 6
    )


# --------------------------------------------------------------------------- training


def private(model, loss=CROSSENTROPY, noise_multiplier=1.0, **options):
    model = tfdp.DPModel(model, **options)
    model.compile(
        tfdp.optimizers.DPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=noise_multiplier),
        loss=loss,
    )
    return model


def test_a_step_adds_the_divergence_after_the_noise(rng):
    """An example that adds nothing leaves the pull of the prior, unclipped."""
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(1, number_of_examples=40, prior_scale=0.01),
    ])
    before = [variable.numpy() for variable in model.trainable_variables]
    gradients = [
        with_regularizer(tf.zeros(variable.shape), variable).numpy()
        for variable in model.trainable_variables
    ]
    assert max(np.max(np.abs(gradient)) for gradient in gradients) > 20
    dp = private(model, "mse", noise_multiplier=1e-6)
    x = np.full((40, 3), np.nan, "float32")
    dp.fit(x, np.zeros((40, 1)), batch_size=40, verbose=0)
    for variable, start, gradient in zip(
        model.trainable_variables, before, gradients, strict=True
    ):
        np.testing.assert_allclose(
            variable.numpy(), start - 0.5 * gradient, rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draws", "options"),
    [
        ("local", {}),
        ("per_example", {}),
        ("shared", {"augmentation_multiplicity": 4}),
    ],
    ids=str,
)
def test_the_posterior_of_a_linear_model_is_the_exact_one(draws, options, rng):
    """Means of a mean-field posterior of a Gaussian are its means."""
    x = rng.normal(size=(200, 2)).astype("float32") @ [[1, 0.5], [0, 1]]
    y = x @ [[1.0], [-2.0]] + rng.normal(size=(200, 1))

    def half_square(y, outputs):
        return keras.ops.sum(keras.ops.square(y - outputs), axis=-1) / 2

    model = keras.Sequential([
        keras.Input((2,)),
        VariationalDense(
            1, number_of_examples=200, draws=draws, use_bias=False, prior_scale=0.1
        ),
    ])
    dp = tfdp.DPModel(model, **options)
    decay = keras.optimizers.schedules.PolynomialDecay(0.05, 1500, 1e-4)
    dp.compile(
        tfdp.optimizers.DPAdam(decay, l2_norm_clip=100.0, noise_multiplier=1e-3),
        loss=half_square,
        steps_per_execution=50,
    )
    dp.fit(x, y, batch_size=200, steps_per_epoch=1500, verbose=0)
    precision = x.T @ x + np.eye(2) / 0.1**2
    expected = np.linalg.solve(precision, x.T @ y)
    (layer,) = model.layers
    np.testing.assert_allclose(layer.kernel_mean, expected, atol=0.01)
    scales = 1 / np.sqrt(np.diag(precision))
    np.testing.assert_allclose(np.ravel(layer.kernel_scale), scales, rtol=0.1)


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("bookkeeping", {"augmentation_multiplicity": 3, "physical_batch_size": 8}),
        ("ghost", {"augmentation_multiplicity": 3}),
        ("vectorized", {"physical_batch_size": 8}),
    ],
    ids=str,
)
def test_it_trains_in_passes_and_with_several_draws(engine, options, rng):
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 2, size=(40, 1))
    dp = private(network("shared", "float32"), engine=engine, **options)
    dp.fit(x, y, batch_size=20, verbose=0)
    assert dp.ledger.segments == (tfdp.accounting.PoissonSteps(2, 1.0, 40, 20),)


def test_several_draws_need_something_that_is_drawn():
    with pytest.raises(ValueError, match="draws nothing itself"):
        tfdp.DPModel(
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
            augmentation_multiplicity=2,
        )


def test_bam_takes_the_vectorized_engine(rng, caplog):
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 2, size=(40, 1))
    loss = tfdp.losses.BAM(CROSSENTROPY, radius=0.1)
    dp = private(network("local", "float32"), loss)
    dp.fit(x, y, batch_size=20, verbose=0)
    assert "(rule `variational_dense`)" in caplog.text


def test_bam_refuses_a_divergence_inside_in_book_keeping(rng):
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 2, size=(40, 1))
    loss = tfdp.losses.BAM(CROSSENTROPY, radius=0.1)
    dp = private(network("local", "float32", "inside"), loss, engine="bookkeeping")
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="kl='outside'"):
        dp.fit(x, y, batch_size=20, verbose=0)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@draws_of_all_kinds
def test_half_precision_does_not_exceed_the_clip_norm(draws, policy, rng):
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(4, number_of_examples=40, draws=draws, dtype=policy),
        VariationalDense(1, number_of_examples=40, draws=draws, dtype=policy),
    ])
    x = rng.normal(size=(1, 3), scale=30).astype("float32")
    found = tfdp.clipped_gradients(model, "mse", x, np.ones((1, 1)), l2_norm_clip=0.1)
    length = np.sqrt(sum(np.sum(np.square(g)) for g in found.gradients))
    assert 0.098 < length <= 0.1 * (1 + 1e-6)


# -------------------------------------------------------------------- saving, refusals


@pytest.mark.parametrize("make", [BayesianLogisticRegression, VariationalDense])
def test_a_model_is_loaded_in_a_fresh_process(make, tmp_path, rng):
    options = {
        "number_of_examples": 40, "prior_scale": 2.0, "draws": "shared",
        "kl": "inside", "initial_scale": 0.2, "seed": 3,
    }  # fmt: skip
    if make is VariationalDense:
        layer = VariationalDense(1, activation="tanh", **options)
        model = keras.Sequential([keras.Input((3,)), layer])
    else:
        model = BayesianLogisticRegression(**options)
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 2, size=(40, 1))
    dp = private(model)
    dp.fit(x, y, batch_size=20, verbose=0)
    dp.save(tmp_path / "private.keras")
    np.savez(tmp_path / "rows.npz", x=x, y=model.predict(x, verbose=0))
    program = (
        "import keras, numpy as np, sys, tfdp\n"
        "model = keras.saving.load_model(sys.argv[1] + '/private.keras')\n"
        "rows = np.load(sys.argv[1] + '/rows.npz')\n"
        "outputs = model.predict(rows['x'], verbose=0)\n"
        "np.testing.assert_allclose(outputs, rows['y'], rtol=1e-5)\n"
        "variable = model.trainable_variables[1]\n"
        "print(variable.regularizer.get_config(), model.ledger.steps)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = {
        "part": "scale", "prior_scale": 2.0, "number_of_examples": 40,
        "kl": "inside",
    }  # fmt: skip
    assert done.stdout.startswith(f"{expected} 2")


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("units", 0, ValueError),
        ("units", "3", TypeError),
        ("number_of_examples", 0, ValueError),
        ("number_of_examples", np.nan, ValueError),
        ("prior_scale", 0.0, ValueError),
        ("prior_scale", np.inf, ValueError),
        ("initial_scale", -1.0, ValueError),
        ("initial_scale", None, TypeError),
        ("draws", "locally", ValueError),
        ("kl", "both", ValueError),
    ],
)
def test_arguments_out_of_range_are_refused(argument, value, error):
    options = {"units": 2, "number_of_examples": 40} | {argument: value}
    with pytest.raises(error, match=f"`{argument}` must be"):
        VariationalDense(**options)


def test_local_draws_of_positions_are_refused():
    with pytest.raises(ValueError, match="Use `draws='shared'`"):
        VariationalDense(2, number_of_examples=40).build((None, 5, 3))


@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 100.0])
def test_the_scale_at_first(scale):
    layer = VariationalDense(2, number_of_examples=40, initial_scale=scale)
    layer.build((None, 3))
    np.testing.assert_allclose(layer.kernel_scale, scale, rtol=1e-4)
    np.testing.assert_allclose(layer.bias_scale, scale, rtol=1e-4)
