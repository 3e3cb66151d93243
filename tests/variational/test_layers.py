"""Variational layers: gradients of means and scales, and how models train."""

import dataclasses
import subprocess
import sys
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.problems import precision
from tests.reference import assert_all_close, clipped_sum
from tfdp._views_per_example import views_per_example
from tfdp.checks.engine import choose
from tfdp.clipping import clip_as_tensor
from tfdp.engines import BookkeepingEngine, GhostEngine, VectorizedEngine
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective
from tfdp.optimizers.dp_optimizer import with_regularizer
from tfdp.variational import BayesianLogisticRegression, VariationalDense
from tfdp.variational.base import VariationalLayer
from tfdp.variational.product import VariationalProduct

CROSSENTROPY = keras.losses.BinaryCrossentropy(from_logits=True)


def square(y, outputs):
    """Keras's own rounds its divisor to float32."""
    return tf.reduce_mean(tf.square(y - tf.cast(outputs, y.dtype)), -1)


DRAWS = ("local", "shared", "per_example", "flipout")
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
            numbers = (
                numbers[: shape[0]]
                if layer.shares_draws
                else self.of_rows(numbers, shape[0])
            )
            return tf.constant(numbers, layer.compute_dtype)

        def signs(self, layer, shape):
            rng = np.random.default_rng(zlib.crc32(layer.name.encode()))
            signs = rng.choice([-1, 1], size=(32, *shape[1:]))
            return tf.constant(self.of_rows(signs, shape[0]), layer.compute_dtype)

        def of_rows(self, numbers, count):
            if self.are_alike:
                return np.repeat(numbers[:1], count, 0)
            return numbers[self.rows][:count]

    chosen = Chosen()
    monkeypatch.setattr(VariationalLayer, "_normal", lambda *args: chosen.normal(*args))  # noqa: PLW0108
    monkeypatch.setattr(VariationalProduct, "_signs", lambda *args: chosen.signs(*args))  # noqa: PLW0108
    return chosen


def network(draws, dtype="float64", kl="outside", **options):
    options = {"number_of_examples": 40, "draws": draws, "kl": kl} | options
    return keras.Sequential([
        keras.Input((3,), dtype=dtype),
        VariationalDense(4, activation="softplus", name="one", dtype=dtype, **options),
        VariationalDense(1, use_bias=False, name="two", dtype=dtype, **options),
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
        with views_per_example(views), tf.GradientTape() as tape:
            logits = model(x[chosen.rows], training=True)
            loss = tf.reduce_mean(square(y[chosen.rows], logits))
            for variable in model.trainable_variables:
                if getattr(variable.regularizer, "kl", "") == "inside":
                    loss += tf.cast(variable.regularizer(variable.value), loss.dtype)
        values = [variable.value for variable in model.trainable_variables]
        found.append(tape.gradient(loss, values))
    chosen.rows = slice(None)
    return [np.stack(of_variable) for of_variable in zip(*found, strict=True)]


def run(engine, model, x, y, *, clip, views=1, mode="graph", loss=square):
    """Sums, and norms of the real units: one more only fills the pass up."""
    objective = Objective.of(model, loss)
    objective = dataclasses.replace(objective, views=views)
    is_padding = np.arange(len(x) + views) >= len(x)

    def clip_and_sum(x, y):
        sums, norms, _ = engine.clip_and_sum(
            objective,
            Batch(x, y, None, tf.constant(is_padding)),
            l2_norm_clip=clip_as_tensor(clip, objective.variables),
            rows_per_unit=views,
        )
        return sums, norms[:-1]

    clip_and_sum = tf.function(clip_and_sum, autograph=False, jit_compile=mode == "xla")
    return clip_and_sum(*(tf.concat([rows, rows[-views:]], 0) for rows in (x, y)))


def length_of(gradients):
    return np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients))


def check(model, data, views, engines, chosen, mode="graph", tolerance=1e-9):
    gradients = gradients_one_by_one(model, *data, views, chosen)
    norms = clipped_sum(gradients, 1.0)[1]
    clip = float(np.median(norms))
    expected, norms = clipped_sum(gradients, clip)
    assert np.max(norms) > 2 * clip
    for engine in engines:
        with precision(str(data[0].dtype)):
            sums, found = run(engine, model, *data, clip=clip, views=views, mode=mode)
        np.testing.assert_allclose(found, norms, rtol=tolerance)
        assert_all_close(sums, expected, rtol=0, atol=tolerance * clip * UNITS)


# ----------------------------------------------------------------- gradients, one by one


FACTORED = (
    BookkeepingEngine(),
    GhostEngine(),
    BookkeepingEngine(norms="instantiate"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draws", "views", "kl"),
    [
        ("local", 1, "inside"),
        ("local", 3, "outside"),
        ("shared", 3, "inside"),
        ("per_example", 3, "inside"),
        ("flipout", 1, "outside"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("shared", 1, "outside"),
                ("per_example", 1, "outside"),
                ("flipout", 3, "inside"),
            ]
        ),
    ],
)
def test_norms_and_sums_are_those_of_single_units(draws, views, kl, chosen, rng):
    model = moved(network(draws, kl=kl), rng)
    check(model, rows_of_data(rng, views), views, FACTORED, chosen)


@pytest.mark.parametrize(
    ("mode", "draws"),
    [
        ("graph", "shared"),
        pytest.param("xla", "local", marks=pytest.mark.slow),
        pytest.param("xla", "per_example", marks=pytest.mark.slow),
        pytest.param("xla", "flipout", marks=pytest.mark.slow),
    ],
)
def test_however_it_is_run(mode, draws, chosen, rng):
    model = moved(network(draws, "float32"), rng)
    data = rows_of_data(rng, 1, "float32")
    check(model, data, 1, FACTORED[:1], chosen, mode, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draws", "views", "kl"),
    [("local", 2, "inside"), ("shared", 2, "outside"), ("flipout", 2, "inside")],
)
def test_vectorized_engine(draws, views, kl, chosen, rng):
    chosen.are_alike = True
    model = moved(network(draws, kl=kl), rng)
    check(model, rows_of_data(rng, views), views, [VectorizedEngine()], chosen)


@pytest.mark.parametrize(
    ("draws", "views"),
    [("shared", 1), ("shared", 2), ("per_example", 2), ("flipout", 2)],
)
def test_positions_share_the_weights_of_their_row(draws, views, chosen, rng):
    options = {"number_of_examples": 40, "draws": draws, "dtype": "float64"}
    model = keras.Sequential([
        keras.Input((2, 3), dtype="float64"),
        VariationalDense(4, activation="relu", name="one", **options),
        VariationalDense(1, name="two", **options),
    ])
    data = rows_of_data(rng, views, between=(2,))
    check(moved(model, rng), data, views, FACTORED[:1], chosen)


def test_rows_that_fill_a_pass_up_have_no_divergence():
    """Each unit has the gradient of the divergence, whatever its rows."""
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(1, number_of_examples=40, kl="inside", use_bias=False),
    ])
    for rows in (3, 0):
        found = tfdp.clipped_gradients(
            *(model, CROSSENTROPY, np.zeros((rows, 3)), np.ones((rows, 1))),
            l2_norm_clip=0.01,
            engine="bookkeeping",
            physical_batch_size=2,
        )
        assert np.all(found.norms > 0.01)
        # Zeros have no gradient of the loss, so all units have the same.
        length = length_of(found.gradients)
        np.testing.assert_allclose(length, rows * 0.01, rtol=1e-5)


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
    check(model, data, 1, FACTORED[:1], chosen)


def test_inputs_of_zero_without_a_bias_have_a_gradient():
    """The root of a variance of zero has none; it must not empty the example."""
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(1, number_of_examples=40, use_bias=False),
    ])
    x, y = np.zeros((2, 3), "float32"), np.ones((2, 1), "float32")
    gradients, norms = run(
        BookkeepingEngine(), model, x, y, clip=1.0, loss=CROSSENTROPY
    )
    np.testing.assert_allclose(norms, 0, atol=1e-12)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


# ----------------------------------------------------------------------- one global norm


@pytest.mark.parametrize(
    ("engine", "draws"),
    [
        *((BookkeepingEngine(), draws) for draws in DRAWS),
        (GhostEngine(), "shared"),
        (VectorizedEngine(), "local"),
    ],
    ids=repr,
)
def test_means_and_scales_together_move_by_the_clip_norm(engine, draws, rng):
    """Clipped one by one, two variables would move by sqrt(2) of it."""
    model = BayesianLogisticRegression(
        number_of_examples=40, draws=draws, initial_scale=3.0
    )
    row = rng.normal(size=(1, 4)).astype("float32")
    model.build((None, 4))
    for scale in (1.0, 1e6):
        gradients, norms = run(
            *(engine, model, scale * row, np.zeros((1, 1), "float32")),
            clip=0.01,
            loss=CROSSENTROPY,
        )
        length = length_of(gradients)
        assert length <= 0.01 * (1 + 1e-6)
        if norms[0] > 0.01:
            assert length >= 0.0099


@pytest.mark.slow
def test_what_naive_noise_costs():
    """For "epsilon 10" in each of 500 steps."""
    naive = np.sqrt(2 * np.log(1.25 / 1e-3)) / 10
    run = tfdp.accounting.Ledger((tfdp.accounting.PoissonSteps(500, naive, 400, 20),))
    np.testing.assert_allclose(run.epsilon(1e-3), 67.6, rtol=2e-3)


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
    with views_per_example(4000):
        outputs = np.asarray(layer(x, training=True))
    mean, variance = layer.moments(x)
    scale = np.sqrt(variance[0])
    np.testing.assert_allclose(outputs.mean(0), mean[0], atol=4 * scale.max() / 63)
    np.testing.assert_allclose(outputs.std(0), scale, rtol=0.06)


@pytest.mark.parametrize("draws", ["shared", "per_example", "flipout"])
@pytest.mark.parametrize("shape", [(12, 5, 3), (16, 7, 8), (6, 4, 4), (4, 2, 3, 8)])
def test_positions_in_float32(draws, shape, rng):
    """Products that TensorFlow broadcasts were seen to write beside their memory."""
    layer = VariationalDense(2, number_of_examples=40, draws=draws, initial_scale=1e-9)
    x = rng.normal(size=shape).astype("float32")
    layer.build(shape)
    layer.kernel_mean.assign(rng.normal(size=(shape[-1], 2)))
    expected = x @ layer.kernel_mean.numpy()
    np.testing.assert_allclose(layer(x, training=True), expected, atol=1e-5)


@pytest.mark.slow
def test_all_passes_of_a_step_share_a_draw():
    """Without a row others would be in other passes, and must not draw otherwise."""
    model = keras.Sequential([
        keras.Input((2,)),
        VariationalDense(1, number_of_examples=40, draws="shared", initial_scale=2.0),
    ])
    x, y = np.ones((24, 2), "float32"), np.zeros((24, 1), "float32")
    options = {"l2_norm_clip": 1.0, "engine": "bookkeeping", "physical_batch_size": 6}
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
    with views_per_example(3):
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draws", "physical_batch_size", "different"),
    [("shared", 2, 1), ("per_example", None, 4)],
)
def test_vectorized_rows_share_draws_or_do_not(draws, physical_batch_size, different):
    """Equal rows have equal gradients if they share the weights, in all passes."""
    model = keras.Sequential([
        keras.Input((2,)),
        VariationalDense(1, number_of_examples=40, draws=draws, initial_scale=2.0),
    ])
    found = tfdp.clipped_gradients(
        model, "mse", np.ones((4, 2)), np.zeros((4, 1)), l2_norm_clip=1.0,
        engine="vectorized", physical_batch_size=physical_batch_size,
    )  # fmt: skip
    assert len(np.unique(found.norms.numpy().round(5))) == different


# --------------------------------------------------------------------------- training


@pytest.mark.smoke
def test_a_step_adds_the_divergence_after_the_noise():
    """Examples that add nothing leave the pull of the prior, unclipped."""
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(1, number_of_examples=40, draws="shared", prior_scale=0.01),
    ])
    before = [variable.numpy() for variable in model.trainable_variables]
    gradients = [
        with_regularizer(tf.zeros(variable.shape), variable).numpy()
        for variable in model.trainable_variables
    ]
    assert max(np.max(np.abs(gradient)) for gradient in gradients) > 20
    dp = tfdp.DPModel(
        model,
        engine="bookkeeping",
        augmentation_multiplicity=3,
        physical_batch_size=24,
    )
    dp.compile(
        tfdp.optimizers.DPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1e-6), "mse"
    )
    x = np.full((40, 3), np.nan, "float32")
    dp.fit(x, np.zeros((40, 1)), batch_size=40, verbose=0)
    assert dp.ledger.segments == (tfdp.accounting.PoissonSteps(1, 1e-6, 40, 40),)
    for variable, start, gradient in zip(
        model.trainable_variables, before, gradients, strict=True
    ):
        np.testing.assert_allclose(
            variable.numpy(), start - 0.5 * gradient, rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
def test_the_posterior_of_a_linear_model_is_the_exact_one(rng):
    """Means of a mean-field posterior of a Gaussian are its means."""
    x = rng.normal(size=(200, 2)).astype("float32") @ [[1, 0.5], [0, 1]]
    y = x @ [[1.0], [-2.0]] + rng.normal(size=(200, 1))

    def half_square(y, outputs):
        return keras.ops.sum(keras.ops.square(y - outputs), axis=-1) / 2

    model = keras.Sequential([
        keras.Input((2,)),
        VariationalDense(1, number_of_examples=200, use_bias=False, prior_scale=0.1),
    ])
    dp = tfdp.DPModel(model, augmentation_multiplicity=2)
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


def test_several_draws_need_something_that_is_drawn():
    with pytest.raises(ValueError, match="draws nothing itself"):
        tfdp.DPModel(
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
            augmentation_multiplicity=2,
        )


@pytest.mark.slow
def test_coefficients_that_vary_together_train_by_bookkeeping(rng):
    model = BayesianLogisticRegression(number_of_examples=40, rank=2, draws="shared")
    model.build((None, 3))
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 2, size=(40, 1))
    private = tfdp.DPModel(model, engine="bookkeeping")
    private.compile(
        tfdp.optimizers.DPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1e-6),
        CROSSENTROPY,
    )
    before = model.logit.factors.numpy()
    private.fit(x, y, batch_size=10, verbose=0)
    assert not np.allclose(model.logit.factors.numpy(), before, atol=1e-4)


@pytest.mark.slow
def test_coefficients_that_vary_together_have_all_gradients_at_inference(rng):
    class AtInference(BayesianLogisticRegression):
        def call(self, inputs, training=None):
            return super().call(inputs, training=False)

    model = AtInference(number_of_examples=40, rank=2, draws="shared")
    model.build((None, 3))
    x, y = rng.normal(size=(4, 3)), rng.integers(0, 2, size=(4, 1))
    found, expected = (
        tfdp.clipped_gradients(
            model, CROSSENTROPY, x, y, l2_norm_clip=0.1, engine=engine
        )
        for engine in ("bookkeeping", "vectorized")
    )
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)
    assert_all_close(found.gradients, expected.gradients, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_bam_takes_the_vectorized_engine(rng, caplog):
    x, y = rng.normal(size=(2, 3)), rng.integers(0, 2, size=(2, 1))
    model = BayesianLogisticRegression(number_of_examples=40)
    model.build((None, 3))
    ascent = tfdp.losses.BAM(CROSSENTROPY, radius=0.1).ascent_at(None)
    objective = Objective.of(model, CROSSENTROPY)
    objective = dataclasses.replace(objective, ascent=ascent)
    assert isinstance(choose("auto", objective, (x, y, None)), VectorizedEngine)
    assert "(rule `predictive_logit`)" in caplog.text


@pytest.mark.slow
def test_bam_refuses_a_divergence_inside_in_book_keeping(rng):
    x, y = rng.normal(size=(2, 3)), rng.integers(0, 2, size=(2, 1))
    loss = tfdp.losses.BAM(CROSSENTROPY, radius=0.1)
    model = BayesianLogisticRegression(number_of_examples=40, kl="inside")
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="kl='outside'"):
        tfdp.clipped_gradients(
            model, loss, x, y, l2_norm_clip=1.0, engine="bookkeeping"
        )


@pytest.mark.parametrize(
    ("draws", "policy"),
    [
        ("local", "mixed_float16"),
        ("shared", "mixed_bfloat16"),
        ("per_example", "mixed_float16"),
    ],
)
def test_half_precision_does_not_exceed_the_clip_norm(draws, policy, rng):
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(4, number_of_examples=40, draws=draws, dtype=policy),
        VariationalDense(1, number_of_examples=40, draws=draws, dtype=policy),
    ])
    # Squares of these are too large for float16.
    x = rng.normal(size=(1, 3), scale=500).astype("float32")
    gradients, _ = run(
        BookkeepingEngine(), model, x, np.ones((1, 1), "float32"), clip=0.1, loss="mse"
    )
    assert 0.098 < length_of(gradients) <= 0.1 * (1 + 1e-6)


# -------------------------------------------------------------------- saving, refusals


ARGUMENTS = {
    "number_of_examples": 40,
    "prior_scale": 2.0,
    "draws": "shared",
    "kl": "inside",
    "initial_scale": 0.2,
    "seed": 3,
}


@pytest.mark.parametrize(
    "original",
    [
        lambda: VariationalDense(
            2, use_bias=False, activation="tanh", bias_initializer="ones", **ARGUMENTS
        ),
        lambda: BayesianLogisticRegression(use_bias=False, rank=2, **ARGUMENTS),
    ],
)
def test_arguments_are_saved(original):
    original = original()
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(original)
    )
    assert type(again) is type(original)
    assert again.get_config() == original.get_config()
    assert (ARGUMENTS | {"use_bias": False}).items() <= again.get_config().items()


@pytest.mark.slow
def test_a_model_is_loaded_in_a_fresh_process(tmp_path, rng):
    model = keras.Sequential([
        keras.Input((3,)),
        VariationalDense(2, activation="tanh", **ARGUMENTS),
        BayesianLogisticRegression(**ARGUMENTS),
    ])
    dp = tfdp.DPModel(model)
    dp.compile(
        tfdp.optimizers.DPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0),
        loss=CROSSENTROPY,
    )
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    dp.save(tmp_path / "private.keras")
    x = rng.normal(size=(40, 3))
    np.savez(tmp_path / "rows.npz", x=x, y=model(x))
    program = (
        "import keras, numpy as np, sys, tfdp\n"
        "model = keras.saving.load_model(sys.argv[1] + '/private.keras')\n"
        "rows = np.load(sys.argv[1] + '/rows.npz')\n"
        "outputs = model(rows['x'])\n"
        "np.testing.assert_allclose(outputs, rows['y'], rtol=1e-5)\n"
        "for place in (1, -1):\n"
        "    variable = model.trainable_variables[place]\n"
        "    print(variable.regularizer.get_config())\n"
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
    assert done.stdout == f"{expected}\n" * 2


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
    with pytest.raises(ValueError, match="Use `draws='flipout'`"):
        VariationalDense(2, number_of_examples=40).build((None, 5, 3))


@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 100.0])
def test_the_scale_at_first(scale):
    layer = VariationalDense(2, number_of_examples=40, initial_scale=scale)
    layer.build((None, 3))
    np.testing.assert_allclose(layer.kernel_scale, scale, rtol=1e-4)
    np.testing.assert_allclose(layer.bias_scale, scale, rtol=1e-4)
