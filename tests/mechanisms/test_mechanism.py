"""A new kind of noise is one class, which optimizer, ledger and files then know."""

import copy
import math
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp import _keras
from tfdp.accounting import Segment
from tfdp.clipping import ClippedSum
from tfdp.mechanisms import Gaussian, Mechanism
from tfdp.mechanisms.mechanism import add_noise
from tfdp.sampling import Poisson, Shuffled, Unknown

ROWS, BATCH = 24, 6


@keras.saving.register_keras_serializable("tests")
class Banded(Mechanism):
    """Noise of which each step takes back a part of that of the step before.

    Of a pass, with x_t the clipped sums and C the matrix with ones on the diagonal and
    b below it, ``C x + z`` is released: an example is in one x_t, and moves C x by at
    most ``sqrt(1 + b**2)`` times its own norm.
    """

    correlates_steps = True

    def __init__(self, b=0.5, noise_seed=None):
        super().__init__(noise_seed)
        self.b = b

    def build(self, variables):
        self._before = [
            tf.Variable(tf.zeros(v.shape), trainable=False) for v in variables
        ]

    def counted(self, noise_multiplier):
        return noise_multiplier / math.sqrt(1 + self.b**2)

    def noised(self, clipped_sum, *, noise_multiplier, stream, begins=True):
        nothing = [tf.zeros_like(each) for each in clipped_sum.gradients]
        fresh = add_noise(
            clipped_sum._replace(gradients=nothing),
            noise_multiplier=noise_multiplier,
            stream=stream,
        )
        noised = []
        for gradient, new, held in zip(
            clipped_sum.gradients, fresh, self._before, strict=True
        ):
            noise = tf.where(begins, new, new - self.b * held)
            held.assign(noise)
            noised.append(gradient + noise)
        return noised

    def get_config(self):
        return {"b": self.b, **super().get_config()}


def private(mechanism, sampling="shuffle", **options):
    inner = keras.Sequential([
        keras.Input((2,)),
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])
    model = tfdp.DPModel(inner, sampling=sampling)
    model.compile(
        tfdp.optimizers.DPSGD(
            1.0, l2_norm_clip=2.0, noise_multiplier=3.0, mechanism=mechanism
        ),
        "mse",
        **options,
    )
    return model


def fit(model, epochs=2, callbacks=()):
    """Rows without a gradient: what moves the weights is noise."""
    x, y = np.zeros((ROWS, 2)), np.zeros((ROWS, 1))
    model.fit(
        x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=list(callbacks)
    )


class Weights(keras.callbacks.Callback):
    """Keeps the weights after every step."""

    def on_train_begin(self, logs=None):
        self.seen = [np.zeros(2)]

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.get_weights()[0].ravel())


@pytest.mark.filterwarnings("ignore:The privacy noise is reproducible")
def test_noise_that_steps_share_begins_anew_with_every_pass():
    model, weights = private(Banded(0.5, noise_seed=7)), Weights()
    fit(model, callbacks=[weights])
    added = -np.diff(weights.seen, axis=0) * BATCH
    mechanism = Gaussian(7)
    for step in range(8):
        nothing = ClippedSum([tf.zeros([2, 1])], tf.zeros([0]), tf.constant(2.0), 1)
        stream = mechanism.stream(tf.constant(step, tf.int64))
        (fresh,) = mechanism.noised(nothing, noise_multiplier=3.0, stream=stream)
        before = 0 if step % 4 == 0 else 0.5 * added[step - 1]
        np.testing.assert_allclose(
            added[step], fresh.numpy().ravel() - before, rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The privacy noise is reproducible")
@pytest.mark.parametrize(
    "kind", [Gaussian, pytest.param(Banded, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_xla_compiles_the_noise_on_gpus(kind, is_on_gpu, monkeypatch):
    monkeypatch.setattr(kind, "is_on_gpu", is_on_gpu)
    noised, compiled = kind.noised, []

    def watched(*args, **options):
        compiled.append(_keras.inside_xla())
        return noised(*args, **options)

    monkeypatch.setattr(kind, "noised", watched)
    models = [
        private(kind(noise_seed=7), jit_compile=jit_compile)
        for jit_compile in (False, True)
    ]
    for model in models:
        fit(model)
    assert compiled == [False, is_on_gpu]
    weights, of_xla = (model.get_weights()[0] for model in models)
    assert np.abs(weights).min() > 0
    np.testing.assert_allclose(of_xla, weights, rtol=1e-4)
    assert models[1].ledger.segments == models[0].ledger.segments


def test_a_pass_of_shared_noise_is_one_release_that_costs_more():
    model = private(Banded(0.5))
    fit(model, epochs=3)
    expected = Segment(Shuffled(ROWS, BATCH), 3, 3.0 / math.sqrt(1.25))
    (found,) = model.ledger.segments
    assert (found.scheme, found.count) == (expected.scheme, expected.count)
    assert found.noise_multiplier == pytest.approx(expected.noise_multiplier)


@pytest.mark.slow
def test_a_budget_counts_shared_noise_as_it_costs():
    model = private(Banded(0.5))
    target = tfdp.accounting.Ledger((
        Segment(Shuffled(ROWS, BATCH), 2, 2.9999 / math.sqrt(1.25)),
    )).epsilon(1e-3)
    fit(model, 5, [tfdp.callbacks.PrivacyBudget(1e-3, target)])
    assert model.ledger.passes == 2


@pytest.mark.parametrize("sampling", ["poisson", "balls_in_bins", "unknown"])
def test_shared_noise_needs_passes(sampling):
    """Of which each counts in full: amplification needs noise of each step."""
    if sampling != "unknown":
        model = private(Banded(), sampling)
        with pytest.raises(
            ValueError, match=r"`Banded` shares noise.*sampling='shuffle'"
        ):
            fit(model)
        assert not model.ledger.steps
    model = private(Banded())
    model.optimizer.expect_batch_size(BATCH)
    with pytest.raises(ValueError, match="must occur at most once"):
        model.train_on_batch(np.zeros((BATCH, 2)), np.zeros((BATCH, 1)))
    optimizer = tfdp.optimizers.DPSGD(
        1.0,
        l2_norm_clip=2.0,
        noise_multiplier=3.0,
        expected_batch_size=BATCH,
        mechanism=Banded(),
    )
    inner = model.model
    clipped = tfdp.clipped_gradients(
        inner, "mse", np.zeros((2, 2)), np.zeros((2, 1)), l2_norm_clip=2.0
    )
    with pytest.raises(ValueError, match="must occur at most once"):
        optimizer.apply_clipped_sum(clipped, inner.trainable_variables)
    assert not optimizer.ledger.steps


@pytest.mark.slow
def test_a_mechanism_is_saved_and_loaded(tmp_path):
    model = private(Banded(0.25))
    fit(model, 1)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer.mechanism) is Banded
    assert loaded.optimizer.mechanism.b == 0.25
    assert loaded.ledger == model.ledger
    plain = private(None)
    assert "mechanism" not in plain.optimizer.get_config()


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_draw_noise_of_their_own(copied):
    settings = {"mechanism": tfdp.mechanisms.Gaussian(), "noise_multiplier": 2.0}
    noises = []
    for each in (settings["mechanism"], copied(settings["mechanism"])):
        variable = keras.Variable(np.zeros(100, "float32"))
        zeros = ClippedSum([tf.zeros(100)], tf.zeros(1), tf.constant(1.0), 1)
        optimizer = tfdp.optimizers.DPSGD(
            1.0,
            l2_norm_clip=1.0,
            expected_batch_size=1,
            **settings | {"mechanism": each},
        )
        optimizer.apply_clipped_sum(zeros, [variable])
        noises.append(variable.numpy())
    assert np.abs(noises).min(axis=1).max() > 0
    assert np.abs(noises[0] - noises[1]).min() > 0


@pytest.mark.slow
def test_what_is_remembered_leaves_in_no_file(tmp_path):
    model = private(Banded())
    fit(model, 1)
    held = model.optimizer.mechanism._before[0].numpy().ravel()
    assert held.any()
    saved = [v.numpy() for v in model.optimizer.variables] + model.get_weights()
    assert not any(held[0] in np.ravel(each) for each in saved)


def test_gaussian_noise_costs_what_it_is():
    mechanism = Gaussian()
    assert mechanism.counted(1.5) == 1.5
    for scheme in (Poisson(10, 2), Shuffled(10, 2), Unknown()):
        mechanism.check(scheme)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mechanism": "gaussian"}, TypeError, "must be a `tfdp.mechanisms.Mech"),
        (
            {"mechanism": Gaussian(), "noise_seed": 3},
            ValueError,
            r"`noise_seed` belongs.*Use `mechanism=Gaussian\(noise_seed=3\)`",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, **arguments)


def test_shared_noise_needs_one_clip_norm_in_a_pass():
    model = private(Banded())
    halved = tfdp.callbacks.ClipNormScheduler(lambda step: 1.0 if step < 2 else 0.1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="one clip norm for all"):
        fit(model, 1, [halved])
    model = private(Banded())
    halved = tfdp.callbacks.ClipNormScheduler(lambda step: 1.0 if step < 4 else 0.1)
    fit(model, 2, [halved])
    assert model.ledger.passes == 2


@pytest.mark.slow
def test_a_budget_binds_loops_by_what_the_noise_costs():
    class Dearer(Gaussian):
        def counted(self, noise_multiplier):
            return noise_multiplier / 2

    model = private(Dearer(), sampling="poisson")
    model.fit(
        np.zeros((ROWS, 2)),
        np.zeros((ROWS, 1)),
        batch_size=ROWS,
        verbose=0,
        callbacks=[tfdp.callbacks.PrivacyBudget(1e-3, target_epsilon=6.0)],
    )
    optimizer = tfdp.optimizers.DPSGD(
        1.0,
        l2_norm_clip=2.0,
        noise_multiplier=3.0,
        expected_batch_size=ROWS,
        mechanism=Dearer(),
    )
    inner = model.model
    clipped = tfdp.clipped_gradients(
        inner, "mse", np.zeros((2, 2)), np.zeros((2, 1)), l2_norm_clip=2.0
    )

    def loop():
        for _ in range(100):
            optimizer.apply_clipped_sum(clipped, inner.trainable_variables)

    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        loop()
    assert 5.0 < model.epsilon(1e-3) <= 6.0


def test_threads_take_no_number_twice():
    """One operation reads it and goes on: between two another thread would read it."""
    mechanism = tfdp.mechanisms.Gaussian()
    graph = tf.function(mechanism.take_stream).get_concrete_function().graph
    on_number = [
        op.type
        for op in graph.get_operations()
        for given in op.inputs
        if any(o is mechanism._number.handle and i is given for o, i in graph.captures)
    ]
    assert on_number == ["RngReadAndSkip"]


def test_a_seed_gives_no_noise_twice_after_steps_that_failed():
    """Another process goes on with it where the ledger ends."""
    model = keras.Sequential([
        keras.Input((1,), dtype="int32"),
        keras.layers.Embedding(3, 50),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ])
    wrapped = tfdp.DPModel(model)
    y = np.zeros((1, 1))
    moved = []
    for fails in (True, False):
        with pytest.warns(UserWarning, match="reproducible"):
            optimizer = tfdp.optimizers.DPSGD(
                1.0,
                l2_norm_clip=1e-9,
                noise_multiplier=1e9,
                noise_seed=7,
                expected_batch_size=1,
            )
        wrapped.compile(optimizer, "mse")
        if fails:
            with pytest.raises(tf.errors.InvalidArgumentError, match="indices"):
                wrapped.train_on_batch(np.full((1, 1), 9), y)
        before = model.get_weights()[0]
        wrapped.train_on_batch(np.zeros((1, 1), int), y)
        moved.append(model.get_weights()[0] - before)
    assert np.abs(moved[0] - moved[1]).max() > 0.1
