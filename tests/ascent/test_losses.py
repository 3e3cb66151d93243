"""BAM and SAT: what they are as losses, and what training with them is."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import tfdp
from tests.problems import PROBLEMS
from tests.reference import (
    assert_all_close,
    clipped_sum,
    per_example_gradients,
    problem_gradients,
    uphill_gradients,
)
from tfdp.accounting import PoissonSteps, UnamplifiedSteps
from tfdp.clipping import ClippedSum
from tfdp.losses import BAM, SAT
from tfdp.mechanisms.mechanism import add_noise

pytestmark = pytest.mark.keras_private

CROSSENTROPY = "sparse_categorical_crossentropy"
LOSSES = {
    "sam": lambda loss: BAM(loss, radius=0.1),
    "mixed": lambda loss: BAM(loss, radius=0.1, mix=0.6),
    "exact": lambda loss: BAM(loss, radius=0.1, ascent="exact"),
    "sat": lambda loss: SAT(loss, radius=0.1),
}


def losses(*names):
    """The makers of these losses, as a parameter of tests."""
    return pytest.mark.parametrize(
        "make_loss", [LOSSES[name] for name in names], ids=names
    )


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def data(rows=24):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 5)).astype("float32"), rng.integers(0, 3, rows)


def private(loss, noise_multiplier=0.5, *, compiled=None, **options):
    model = keras.Sequential([
        keras.Input((5,)),
        layers.Dense(7, activation="tanh"),
        layers.Dense(3, activation="softmax"),
    ])
    for number, weight in enumerate(model.weights):
        weight.assign(np.random.default_rng(number).normal(size=weight.shape))
    model = tfdp.DPModel(model, **options)
    with pytest.warns():
        optimizer = tfdp.optimizers.DPSGD(
            0.5, l2_norm_clip=0.5, noise_multiplier=noise_multiplier, noise_seed=1
        )
    model.compile(optimizer, loss, **(compiled or {}))
    return model


def train(model, epochs=3, **options):
    return model.fit(*data(), batch_size=24, epochs=epochs, verbose=0, **options)


def values(model):
    return [variable.numpy() for variable in model.trainable_variables]


# ------------------------------------------------------------------------ as losses


@pytest.mark.parametrize("loss", [BAM, SAT])
@pytest.mark.parametrize("radius", [-1, math.nan, math.inf, -math.inf])
def test_a_radius_out_of_range_is_refused(loss, radius):
    with pytest.raises(ValueError, match=r"`radius` must .*Received: radius="):
        loss("mse", radius=radius)


@pytest.mark.parametrize("loss", [BAM, SAT])
@pytest.mark.parametrize("radius", [None, "0.1", True])
def test_a_radius_of_a_wrong_type_is_refused(loss, radius):
    with pytest.raises(TypeError, match="`radius` must be a number"):
        loss("mse", radius=radius)


@pytest.mark.parametrize("mix", [-0.1, 1.1, math.nan])
def test_a_mix_out_of_range_is_refused(mix):
    with pytest.raises(ValueError, match=r"`mix` must .*Received: mix="):
        BAM("mse", mix=mix)


def test_an_unknown_ascent_is_refused():
    with pytest.raises(ValueError, match="`ascent` must be one of 'sam', 'exact'"):
        BAM("mse", ascent="SAM")


def test_one_inside_the_other_is_refused():
    (x, y), model = data(), private("mse").model
    for use in (
        SAT,
        private,
        lambda loss: tfdp.clipped_gradients(model, loss, x, y, l2_norm_clip=1.0),
    ):
        with pytest.raises(ValueError, match="`BAM` must be around all losses"):
            use([BAM("mse")])
    with pytest.raises(ValueError, match="`BAM` must be around all losses"):
        SAT(BAM("mse"))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="msee"):
        BAM(["mse", "msee"])


@pytest.mark.parametrize("loss", [None, ["mse", "mse"], {"a": "mse"}])
def test_several_losses_are_for_private_models(loss):
    with pytest.raises(ValueError, match=r"is for `tfdp\.DPModel`"):
        BAM(loss)(np.ones((2, 1)), np.zeros((2, 1)))


def test_it_shows_what_it_was_made_by():
    assert repr(BAM("mse", 0.5)) == "BAM(loss='mse', radius=0.5, mix=1.0, ascent='sam')"


@pytest.mark.parametrize("radius", [-0.1, math.nan])
def test_a_schedule_never_leads_downhill(radius):
    schedule = optimizers.schedules.PiecewiseConstantDecay([1], [0.1, radius])
    assert float(SAT("mse", radius=schedule).radius_at(5)) == 0


@pytest.mark.slow
def test_an_unwrapped_model_has_the_plain_loss_and_is_not_trained():
    """With masks and weights."""
    model = keras.Sequential([
        keras.Input((4, 2)),
        layers.Masking(),
        layers.Dense(1),
    ])
    x = np.random.default_rng(0).normal(size=(3, 4, 2))
    x[1, 2:] = 0
    found = []
    for loss in ("mse", BAM("mse"), SAT("mse")):
        model.compile(loss=loss)
        weights = np.arange(12.0).reshape(3, 4)
        found.append(
            model.evaluate(x, np.ones((3, 4, 1)), sample_weight=weights, verbose=0)
        )
    assert found == [pytest.approx(found[0])] * 3
    before = model.get_weights()
    with pytest.raises(
        tfdp.errors.NotPrivateError, match=r"private\.compile\(optimizer"
    ):
        model.fit(x, np.ones((3, 4, 1)), verbose=0)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_evaluation_has_the_plain_loss():
    found = [
        private(loss).evaluate(*data(), verbose=0)
        for loss in (CROSSENTROPY, BAM(CROSSENTROPY), SAT(CROSSENTROPY))
    ]
    assert found == [found[0]] * 3


@pytest.mark.parametrize(
    "loss",
    [
        BAM("mse", radius=0.3, mix=0.5, ascent="exact"),
        SAT({"a": "mse", "b": keras.losses.Huber(2.0)}, radius=0.1),
        SAT("mse", radius=optimizers.schedules.PolynomialDecay(0.2, 5)),
    ],
)
def test_config_round_trip(loss):
    config = keras.saving.serialize_keras_object(loss)
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is type(loss)
    assert keras.saving.serialize_keras_object(again) == config
    assert float(again.radius_at(2)) == float(loss.radius_at(2))


# ------------------------------------------------------------------- clipped gradients


def bam_by_hand(ascent, unit_size=1):
    """A clip norm for six rows, the clipped sum and the norms."""
    problem = PROBLEMS["mlp_logits"]
    gradients = uphill_gradients(
        problem,
        problem.batch(6),
        radius=0.2,
        mix=0.7,
        is_exact=ascent == "exact",
        unit_size=unit_size,
    )
    clip = float(np.median(clipped_sum(gradients, 1.0)[1]))
    return clip, *clipped_sum(gradients, clip)


@pytest.mark.slow
def test_loops_of_ones_own_have_bam():
    problem = PROBLEMS["mlp_logits"]
    batch, model, loss = problem.batch(6), problem.build(), problem.loss()
    clip, expected, norms = bam_by_hand("exact")
    # The engine that was chosen for the plain loss is not taken for granted.
    tfdp.clipped_gradients(model, loss, *batch, l2_norm_clip=clip)
    found = tfdp.clipped_gradients(
        model,
        BAM(loss, radius=0.2, mix=0.7, ascent="exact"),
        *batch,
        l2_norm_clip=clip,
    )
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4)
    assert_all_close(found.gradients, expected, rtol=1e-4, atol=1e-5 * clip)


def test_loops_of_ones_own_refuse_what_they_cannot_know():
    model, (x, y) = private("mse").model, data()
    with pytest.raises(ValueError, match="`SAT` goes along the gradient"):
        tfdp.clipped_gradients(model, SAT(CROSSENTROPY), x, y, l2_norm_clip=1.0)
    schedule = optimizers.schedules.PolynomialDecay(0.2, 5)
    with pytest.raises(ValueError, match="schedule of the radius needs the steps"):
        tfdp.clipped_gradients(
            model, BAM(CROSSENTROPY, radius=schedule), x, y, l2_norm_clip=1.0
        )


# ----------------------------------------------------------------------------- training


@pytest.mark.slow
def test_without_radius_it_is_dp_sgd_bit_for_bit():
    models = [
        private(loss, compiled={"run_eagerly": True})
        for loss in (CROSSENTROPY, BAM(CROSSENTROPY, 0), SAT(CROSSENTROPY, 0))
    ]
    for model in models:
        train(model, epochs=2)
        for left, right in zip(values(model), values(models[0]), strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    ("ascent", "unit_size", "wrap", "compiled"),
    [
        pytest.param("sam", 2, {}, {}, marks=pytest.mark.smoke),
        slow("exact", 1, {"engine": "ghost"}, {}),
        slow("exact", 2, {"physical_batch_size": 4}, {"jit_compile": True}),
        slow("sam", 1, {"engine": "vectorized"}, {"run_eagerly": True}),
    ],
    ids=str,
)
def test_a_step_of_bam_without_noise(ascent, unit_size, wrap, compiled):
    """Against gradients of single units at weights really moved."""
    problem = PROBLEMS["mlp_logits"]
    clip, expected, _ = bam_by_hand(ascent, unit_size)
    model = tfdp.DPModel(problem.build(), **wrap)
    with pytest.warns():
        optimizer = tfdp.optimizers.DPSGD(
            1.0,
            l2_norm_clip=clip,
            noise_multiplier=0.0,
            num_microbatches=6 // unit_size,
            expected_batch_size=6,
        )
    loss = BAM(problem.loss(), radius=0.2, mix=0.7, ascent=ascent)
    model.compile(optimizer, loss, **compiled)
    before, batch = values(model), problem.batch(6)
    model.fit(tf.data.Dataset.from_tensors((batch.x, batch.y)), verbose=0)
    units = 6 // unit_size
    moves = [
        (old - new) * units for old, new in zip(before, values(model), strict=True)
    ]
    assert_all_close(moves, expected, rtol=1e-4, atol=1e-5 * clip)
    assert model.ledger.segments == (UnamplifiedSteps(1, 0.0, unit_size),)


@pytest.mark.parametrize(
    ("wrap", "compiled"),
    [
        ({}, {"steps_per_execution": 3}),
        slow({"physical_batch_size": 5}, {"jit_compile": True}),
        slow({"engine": "vectorized"}, {"run_eagerly": True}),
    ],
    ids=str,
)
def test_steps_of_sat(wrap, compiled):
    """Three steps against gradients of single examples at weights really moved.

    Uphill along the gradient with its noise, which alone was released.
    """
    problem, radius, rate, rows = PROBLEMS["mlp_logits"], 0.3, 0.25, 8
    batch = problem.batch(rows, "float64")
    reference, loss = problem.build("float64"), problem.loss("float64")
    _, norms = clipped_sum(problem_gradients(problem, batch), 1.0)
    clip = float(np.median(norms))
    model = tfdp.DPModel(problem.build(), **wrap)
    with pytest.warns():
        optimizer = tfdp.optimizers.DPSGD(
            rate, l2_norm_clip=clip, noise_multiplier=0.5, noise_seed=1
        )
    model.compile(optimizer, SAT(problem.loss(), radius=radius), **compiled)
    single = problem.batch(rows)
    model.fit(single.x, single.y, batch_size=rows, steps_per_epoch=3, verbose=0)

    released = [np.zeros(v.shape) for v in reference.trainable_variables]
    for step in range(3):
        start = values(reference)
        norm = np.sqrt(sum(np.sum(g**2) for g in released)) or 1.0
        for v, w, g in zip(reference.trainable_variables, start, released, strict=True):
            v.assign(w + radius * g / norm)
        gradients = per_example_gradients(reference, loss, *batch)
        total, norms = clipped_sum(gradients, clip)
        noised = add_noise(
            ClippedSum(
                list(map(tf.constant, total)), norms, tf.constant(clip, tf.float64), 1
            ),
            noise_multiplier=0.5,
            stream=optimizer.mechanism.stream(tf.constant(step, tf.int64)),
        )
        released = [part.numpy() / rows for part in noised]
        for v, w, g in zip(reference.trainable_variables, start, released, strict=True):
            v.assign(w - rate * g)
    assert_all_close(values(model), values(reference), rtol=1e-4, atol=1e-5)
    assert model.ledger.segments == (PoissonSteps(3, 0.5, rows, rows),)


@pytest.mark.slow
@losses("sam", "sat")
def test_a_saved_model_goes_on_as_if_nothing_had_happened(make_loss, tmp_path):
    whole, first = private(make_loss(CROSSENTROPY)), private(make_loss(CROSSENTROPY))
    train(whole, epochs=2)
    train(first, epochs=2)
    first.save(tmp_path / "m.keras")
    with pytest.warns():
        second = keras.models.load_model(tmp_path / "m.keras")
    for model in (whole, second):
        train(model, epochs=1)
    assert_all_close(values(second), values(whole), rtol=1e-6)


@pytest.mark.slow
def test_a_backup_holds_the_gradient_released_last(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError

    whole = private(SAT(CROSSENTROPY, 0.5))
    train(whole, epochs=5)
    parts = private(SAT(CROSSENTROPY, 0.5)), private(SAT(CROSSENTROPY, 0.5))
    with pytest.raises(RuntimeError):
        train(
            parts[0],
            epochs=5,
            callbacks=[keras.callbacks.BackupAndRestore(tmp_path), Stop()],
        )
    train(parts[1], epochs=5, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert_all_close(values(parts[1]), values(whole), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@losses("sam", "sat")
def test_a_schedule_of_the_radius_goes_by_steps(make_loss):
    schedule = optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.0])
    scheduled = private(type(make_loss("mse"))(CROSSENTROPY, radius=schedule))
    plain = private(type(make_loss("mse"))(CROSSENTROPY, radius=0.1))
    for model in (scheduled, plain):
        train(model, epochs=2)
    assert_all_close(values(scheduled), values(plain), rtol=1e-5, atol=1e-6)
    for model in (scheduled, plain):
        train(model, epochs=1)
    assert np.abs(values(scheduled)[0] - values(plain)[0]).max() > 1e-5


@pytest.mark.slow
@losses("sam", "sat")
def test_the_bias_logger_shows_the_ascent(make_loss):
    model = private(make_loss(CROSSENTROPY), 0.0)
    logger = tfdp.callbacks.BiasLogger(every=1)
    history = train(model, callbacks=[logger]).history
    cosines = history["nonprivate_ascent_cosine"]
    assert all(-1 <= cosine <= 1 for cosine in cosines)
    if isinstance(make_loss("mse"), SAT):
        assert cosines[0] == 0
    plain = train(private(CROSSENTROPY, 0.0), callbacks=[logger]).history
    assert "nonprivate_ascent_cosine" not in plain
    # What is logged is the plain gradient, of the same weights in the first step.
    for name in ("bias_magnitude", "norm_q50"):
        assert history[f"nonprivate_{name}"][0] == pytest.approx(
            plain[f"nonprivate_{name}"][0]
        )


@pytest.mark.slow
def test_bams_ascent_cosine_is_the_mean_over_the_examples():
    problem, rows = PROBLEMS["mlp_logits"], 6
    batch = problem.batch(rows)
    gradients = problem_gradients(problem, batch)
    flat = np.concatenate([g.reshape(rows, -1) for g in gradients], axis=1)
    mean = flat.mean(0) / np.linalg.norm(flat.mean(0))
    expected = np.mean(flat @ mean / np.linalg.norm(flat, axis=1))
    model = tfdp.DPModel(problem.build())
    with pytest.warns():
        optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=0.1, noise_multiplier=0)
    model.compile(optimizer, BAM(problem.loss()))
    history = model.fit(
        batch.x,
        batch.y,
        batch_size=rows,
        verbose=0,
        callbacks=[tfdp.callbacks.BiasLogger(every=1)],
    ).history
    assert history["nonprivate_ascent_cosine"] == [pytest.approx(expected, rel=1e-4)]


@pytest.mark.slow
def test_what_is_not_linear_is_vectorized_with_one_line(caplog):
    class Doubled(layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=(shape[-1], 5), initializer="ones")

        def call(self, x):
            return keras.ops.matmul(x, self.factor**2)

    model = tfdp.DPModel(keras.Sequential([keras.Input((5,)), Doubled()]))
    model.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        BAM("mse"),
        run_eagerly=True,
    )
    x, _ = data()
    with caplog.at_level("WARNING", "absl"):
        model.fit(x, x, batch_size=8, verbose=0)
    (message,) = [r.getMessage() for r in caplog.records if "whole grad" in r.message]
    assert "doubled" in message


@pytest.mark.slow
def test_weights_come_back_from_uphill_after_an_error():
    class Fails(layers.Layer):
        def call(self, x):
            check = tf.debugging.assert_less(tf.reduce_max(x), 50.0)
            with tf.control_dependencies([] if check is None else [check]):
                return tf.identity(x)

    model = tfdp.DPModel(
        keras.Sequential([keras.Input((5,)), Fails(), layers.Dense(3, "softmax")]),
        physical_batch_size=4,
    )
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    model.compile(optimizer, SAT(CROSSENTROPY, radius=1.0))
    train(model, epochs=1)
    before, (x, y) = values(model), data()
    x[-1] = 100.0
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(x, y, batch_size=24, verbose=0)
    for left, right in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(left, right)


def first_steps_loss(model):
    """The loss at the weights that the next step's gradients are taken at."""
    return train(model, epochs=1).history["loss"][0]


@pytest.mark.slow
def test_a_gradient_of_other_weights_is_forgotten(tmp_path):
    private(CROSSENTROPY).save_weights(tmp_path / "plain.weights.h5")
    model = private(SAT(CROSSENTROPY, radius=1.0))
    train(model)
    model.load_weights(tmp_path / "plain.weights.h5")
    expected = model.evaluate(*data(), verbose=0)
    assert first_steps_loss(model) == pytest.approx(expected, rel=1e-5)

    for loss in (CROSSENTROPY, SAT(CROSSENTROPY, radius=1.0)):
        config = model.optimizer.get_config()
        with pytest.warns():
            model.compile(type(model.optimizer).from_config(config), loss)
        expected = model.evaluate(*data(), verbose=0)
        assert first_steps_loss(model) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["bookkeeping", "vectorized"])
def test_state_moves_once_in_a_step(engine):
    class Counting(layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(
                shape=(), initializer="zeros", trainable=False, name="calls"
            )

        def call(self, x, training=False):
            if training:
                self.calls.assign_add(1.0)
            return x

    counts = []
    for loss in ("mse", BAM("mse"), BAM("mse", ascent="exact")):
        model = keras.Sequential([keras.Input((5,)), Counting(), layers.Dense(5)])
        model = tfdp.DPModel(model, engine=engine)
        optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
        model.compile(optimizer, loss)
        x, _ = data()
        model.fit(x, x, batch_size=24, epochs=2, verbose=0)
        counts.append(float(model.model.layers[0].calls))
    assert counts == [counts[0]] * 3


@pytest.mark.slow
def test_half_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        models = [private(make(CROSSENTROPY)) for make in LOSSES.values()]
    finally:
        keras.config.set_dtype_policy("float32")
    for model in models:
        train(model)
        assert all(np.isfinite(value).all() for value in values(model))
