"""DPModel under `fit`: weights, ledger, refusals, saving."""

import functools
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.problems import PROBLEMS, precision
from tests.reference import clipped_sum, per_example_gradients
from tests.small import (
    CLIP,
    RATE,
    ROWS,
    data,
    logits_loss,
    network,
    noiseless,
    optimizer,
    private,
)
from tfdp import _keras
from tfdp.accounting import PoissonSteps, ShuffledPasses, UnamplifiedSteps

pytestmark = pytest.mark.keras_private


@functools.cache
def gradients_of_reference(weights=None):
    """Gradients of the rows of `data()`, one example at a time."""
    x, y = data()
    start = network().get_weights()
    with precision("float64"):
        model = network()
        model.set_weights(start)
        weights = None if weights is None else np.array(weights, "float32")
        return per_example_gradients(model, logits_loss(), x, y, weights)


def step_of_reference(rows=slice(None), unit_size=1, weights=None):
    """Weights after one noiseless private step with some rows of `data()`."""
    gradients = [each[rows] for each in gradients_of_reference(weights)]
    total, _ = clipped_sum(gradients, CLIP, unit_size)
    return [
        weight - RATE * gradient / (ROWS / unit_size)
        for weight, gradient in zip(weights_of(network()), total, strict=True)
    ]


def weights_of(model):
    return [variable.numpy() for variable in model.trainable_variables]


def assert_weights(model, expected):
    for actual, wanted in zip(weights_of(model), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=2e-6)


def segments(model):
    return model.ledger.segments


# ------------------------------------------------------------------ one exact step


def as_arrays(x, y):
    # Every row is drawn with probability one.
    return {"x": x, "y": y, "batch_size": ROWS}


def as_dataset(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x))


class AsPyDataset(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.batch = x, y

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.batch


def as_generator(x, y):
    yield x, y


def with_nan(x, y):
    x[2] = np.nan
    return as_dataset(x, y)


def five_rows(x, y):
    return as_dataset(x[:5], y[:5])


@pytest.fixture(scope="module")
def noiseless_model():
    """A private model; each test gives it the weights of `network()`."""
    return private(opt=noiseless(expected_batch_size=ROWS))


@pytest.mark.parametrize(
    ("feed", "rows"),
    [
        pytest.param(as_arrays, slice(None), marks=pytest.mark.smoke),
        (as_generator, slice(None)),
        (AsPyDataset, slice(None)),
        # A row that is not finite contributes nothing.
        (with_nan, np.arange(ROWS) != 2),
        # The divisor is the expected size.
        (five_rows, slice(5)),
    ],
)
def test_one_step_of_fit_is_the_clipped_mean(noiseless_model, feed, rows):
    model = noiseless_model
    model.set_weights(network().get_weights())
    before, fed = model.ledger, feed(*data())
    if feed is as_arrays:
        step = PoissonSteps(1, 0.0, ROWS, ROWS)
        model.fit(**fed, verbose=0)
    else:
        # Of data in batches nothing is known: each step counts in full.
        step = UnamplifiedSteps(1, 0.0)
        model.fit(fed, steps_per_epoch=1, verbose=0)
    assert_weights(model.model, step_of_reference(rows))
    assert model.ledger == before.add(step).merged()


@pytest.mark.smoke
def test_a_step_in_passes_is_the_clipped_mean_and_may_have_no_rows():
    x, y = data()
    model = private(
        opt=noiseless(expected_batch_size=ROWS), wrap={"physical_batch_size": 5}
    )
    model.fit(x, y, batch_size=ROWS, verbose=0)
    assert_weights(model.model, step_of_reference())
    passes = PoissonSteps(1, 0.0, ROWS, ROWS)
    assert segments(model) == (passes,)
    before = weights_of(model)
    model.optimizer.noise_multiplier = 1.0
    empty = as_dataset(x, y).map(lambda a, b: (a[:0], b[:0]))
    history = model.fit(empty, verbose=0)
    assert segments(model) == (passes, UnamplifiedSteps(1, 1.0))
    assert all(np.any(a != b) for a, b in zip(before, weights_of(model), strict=True))
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.slow
def test_one_step_of_xla_is_the_clipped_mean():
    wrap = {"physical_batch_size": 5}
    model = private(opt=noiseless(), wrap=wrap, jit_compile=True)
    model.fit(*data(), batch_size=ROWS, verbose=0)
    assert_weights(model.model, step_of_reference())


@pytest.mark.slow
def test_class_weight_and_sample_weight_scale_before_clipping():
    x, y = data()
    weights = np.where(y == 1, 0.05, 2.0).astype("float32")
    expected = step_of_reference(weights=tuple(weights))
    # More rows in a pass than there are.
    model = private(opt=noiseless(), wrap={"physical_batch_size": 64}, run_eagerly=True)
    model.fit(x, y, batch_size=ROWS, class_weight={0: 2.0, 1: 0.05}, verbose=0)
    assert_weights(model.model, expected)
    model.set_weights(network().get_weights())
    model.fit(x, y, batch_size=ROWS, sample_weight=weights, verbose=0)
    assert_weights(model.model, expected)


@pytest.mark.slow
def test_microbatches_clip_the_mean_of_consecutive_examples():
    model = private(
        # Hardly any noise.
        opt=optimizer(1e-6, num_microbatches=5, expected_batch_size=ROWS),
        run_eagerly=True,
    )
    declared = tfdp.data.declare(
        as_dataset(*data()),
        number_of_examples=ROWS,
        expected_batch_size=ROWS,
        sampling="shuffle",
    )
    model.fit(declared, verbose=0)
    assert_weights(model.model, step_of_reference(unit_size=3))
    # The mean of a unit moves by two clip norms, so half of the noise counts.
    assert segments(model) == (
        ShuffledPasses(1, 5e-7, ROWS, ROWS, examples_per_unit=3),
    )


@pytest.mark.slow
def test_structures_train_under_fit():
    problem = PROBLEMS["nested_inputs"]
    batch = problem.batch(6)
    model = tfdp.DPModel(problem.build())
    model.compile(optimizer(), problem.loss(), run_eagerly=True)
    model.fit(batch.x, batch.y, batch_size=3, verbose=0)
    assert segments(model) == (PoissonSteps(2, 1.0, 6, 3),)


@pytest.mark.slow
def test_mixed_precision_trains():
    policy, problem = "mixed_float16", PROBLEMS["mlp_logits"]
    batch = problem.batch(8)
    reference = problem.build("float32")
    model = tfdp.DPModel(problem.build(policy))
    with precision(policy):
        model.compile(
            noiseless(expected_batch_size=8), problem.loss(policy), run_eagerly=True
        )
        assert isinstance(model.optimizer, tfdp.optimizers.DPOptimizer)
        model.fit(as_dataset(batch.x, batch.y), verbose=0)
    plain = tfdp.DPModel(reference)
    plain.compile(noiseless(expected_batch_size=8), problem.loss(), run_eagerly=True)
    plain.fit(as_dataset(batch.x, batch.y), verbose=0)
    for low, full in zip(weights_of(model), weights_of(plain), strict=True):
        np.testing.assert_allclose(low, full, atol=0.02)


@pytest.mark.slow
def test_weight_regularizers_are_neither_clipped_nor_divided():
    def build(strength):
        keras.utils.set_random_seed(0)
        return keras.Sequential([
            keras.Input((3,)),
            layers.Dense(2, kernel_regularizer=keras.regularizers.L2(strength)),
        ])

    x, y = data(outlier=False)
    weights = []
    for strength in (0.0, 7.0):
        model = private(build(strength), noiseless(), run_eagerly=True)
        start = weights_of(model)[0]
        model.fit(x, y, batch_size=ROWS, verbose=0)
        weights.append(weights_of(model)[0])
    np.testing.assert_allclose(
        weights[0] - weights[1], RATE * 2 * 7.0 * start, rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_frozen_layers_do_not_move():
    model = network()
    model.layers[0].trainable = False
    before = model.layers[0].get_weights()
    wrapped = private(model, run_eagerly=True)
    wrapped.fit(*data(), batch_size=4, verbose=0)
    for old, new in zip(before, model.layers[0].get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_a_compute_loss_of_the_model_is_taken_for_each_example():
    @keras.saving.register_keras_serializable("tests")
    class Halved(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = network()

        def call(self, x):
            return self.inner(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return 0.5 * super().compute_loss(x, y, y_pred, sample_weight)

    x, y = data()
    model = private(Halved(), noiseless(), run_eagerly=True)
    model.fit(x, y, batch_size=ROWS, verbose=0)
    assert_weights(model, step_of_reference(weights=(0.5,) * ROWS))


# ---------------------------------------------------------------- noise under fit


def silent_model(parameters=100_000):
    """A model whose per-example gradients are all zero."""
    return keras.Sequential([
        keras.Input((parameters,)),
        layers.Dense(1, use_bias=False),
    ])


def noise_of_fit(wrap=None, steps=1, **compile_options):
    z, clip, size = 1.7, 0.3, 4
    model = tfdp.DPModel(silent_model(), **(wrap or {}))
    model.compile(
        tfdp.optimizers.DPSGD(0.5, l2_norm_clip=clip, noise_multiplier=z),
        loss="mse",
        **compile_options,
    )
    before = weights_of(model)[0]
    zeros = np.zeros((size, 100_000), "float32")
    model.fit(zeros, np.zeros((size, 1)), batch_size=size, epochs=steps, verbose=0)
    update = (weights_of(model)[0] - before).ravel()
    return update * size / (0.5 * clip * z)


@pytest.mark.slow
def test_noise_is_drawn_once_a_logical_batch():
    noise = noise_of_fit({"physical_batch_size": 1})
    assert np.std(noise) == pytest.approx(1, rel=0.01)


@pytest.mark.slow
def test_noise_of_steps_is_independent():
    noise = noise_of_fit(
        {"physical_batch_size": 3}, steps=4, steps_per_execution=2, jit_compile=True
    )
    assert np.std(noise) == pytest.approx(2, rel=0.01)


def test_noise_does_not_replay(tmp_path):
    model = private(opt=optimizer(expected_batch_size=ROWS), run_eagerly=True)
    x, y = data()

    def stream():
        return tuple(model.optimizer.mechanism.stream(tf.constant(7, tf.int64)).numpy())

    # A key for each training and each loading, whatever counts the steps.
    streams = [stream()]
    model.fit(x, y, batch_size=ROWS, verbose=0)
    streams.append(stream())
    model.save_weights(tmp_path / "at.weights.h5")
    at = weights_of(model)
    updates = []
    for _ in range(2):
        model.load_weights(tmp_path / "at.weights.h5")
        streams.append(stream())
        model.train_on_batch(x, y)
        updates.append([b - a for a, b in zip(at, weights_of(model), strict=True)])
    assert len(set(streams)) == 4
    assert all(np.any(a != b) for a, b in zip(*updates, strict=True))
    assert segments(model) == (
        PoissonSteps(1, 1.0, ROWS, ROWS),
        UnamplifiedSteps(2, 1.0),
    )


# ------------------------------------------------------------------------- dropout


@pytest.mark.slow
def test_dropout_differs_between_examples_and_steps():
    model = keras.Sequential([keras.Input((64,)), layers.Dropout(0.5)])
    seen = []

    class Recorder(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return x * self.scale

    model.add(Recorder())

    def record(y_true, y_pred):
        seen.append(y_pred)
        return keras.ops.mean(y_pred, axis=-1)

    wrapped = private(model, loss=record, metrics=[OutputSum()])
    ones = np.ones((8, 64), "float32")
    sums = []
    for _ in range(2):
        wrapped.fit(ones, np.zeros(8), batch_size=8, verbose=0)
        sums.append(wrapped.metrics[1].metrics[0].rows.numpy())
    masks = np.concatenate(sums)
    assert len(np.unique(masks != 0, axis=0)) == len(masks)


class OutputSum(keras.metrics.Metric):
    """Keeps the outputs of the last batch."""

    def __init__(self):
        super().__init__(name="outputs")
        self.rows = self.add_weight(shape=(8, 64), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign(y_pred)

    def result(self):
        return keras.ops.sum(self.rows)

    def reset_state(self):
        pass


# -------------------------------------------------------------------------- ledger


@pytest.mark.smoke
def test_the_ledger_and_the_statement_have_what_ran():
    x, y = data(20)
    model = private()
    change = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: setattr(
            model.optimizer, "noise_multiplier", 1.0 + epoch
        )
    )
    model.fit(x, y, batch_size=5, epochs=2, callbacks=[change], verbose=0)
    ran = (PoissonSteps(4, 1.0, 20, 5), PoissonSteps(4, 2.0, 20, 5))
    assert segments(model) == ran
    assert model.epsilon(1e-3) == tfdp.accounting.Ledger(ran).epsilon(1e-3)
    statement = " ".join(model.privacy_statement(1e-3).split())
    assert "Poisson-sampled" in statement.split("Not covered")[0]
    assert "shuffled batches; this run's were not" in statement


@pytest.mark.slow
def test_poisson_steps_of_fit():
    x, y = data(50)
    model = private(run_eagerly=True)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    model.fit(x, y, batch_size=8, epochs=1, steps_per_epoch=3, verbose=0)
    assert segments(model) == (PoissonSteps(17, 1.0, 50, 8),)
    # Rows for validation are cut off first.
    history = model.fit(x, y, batch_size=8, validation_split=0.2, verbose=0)
    assert segments(model)[1:] == (PoissonSteps(5, 1.0, 40, 8),)
    assert "val_loss" in history.history


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.smoke
def test_shuffled_and_declared_data():
    x, y = data(20)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20)
    model = private(wrap={"sampling": "shuffle"}, run_eagerly=True)

    def fit(dataset, sampling):
        declared = tfdp.data.declare(
            dataset.batch(10),
            number_of_examples=20,
            expected_batch_size=10,
            sampling=sampling,
        )
        model.fit(declared, epochs=2, verbose=0)

    model.fit(x, y, batch_size=10, epochs=2, verbose=0)
    assert segments(model) == (ShuffledPasses(2, 1.0, 20, 10),)
    fit(rows, "shuffle")
    assert segments(model) == (ShuffledPasses(4, 1.0, 20, 10),)
    # Epochs of one step, not of two: each begins a pass nevertheless.
    fit(rows.filter(lambda x, y: y == 0), "shuffle")
    assert int(model.optimizer.iterations) == 4 + 4 + 2
    assert segments(model) == (ShuffledPasses(6, 1.0, 20, 10),)
    fit(rows, "poisson")
    assert segments(model)[1:] == (PoissonSteps(4, 1.0, 20, 10),)


@pytest.mark.slow
def test_the_ledger_only_grows(tmp_path):
    x, y = data(20)
    model = private(run_eagerly=True)
    model.fit(x, y, batch_size=5, steps_per_epoch=1, verbose=0)
    model.save_weights(tmp_path / "early.weights.h5")
    model.fit(x, y, batch_size=5, steps_per_epoch=1, verbose=0)
    # Nobody says how single batches are sampled.
    model.train_on_batch(x[:5], y[:5])
    spent = model.ledger
    assert spent.segments == (PoissonSteps(2, 1.0, 20, 5), UnamplifiedSteps(1, 1.0))
    model.load_weights(tmp_path / "early.weights.h5")
    assert model.ledger == spent
    model.optimizer.iterations.assign(0)
    assert model.ledger == spent
    model.compile(optimizer(), logits_loss())
    assert model.ledger == spent
    again = private(model.model, run_eagerly=True)
    assert again.ledger == spent
    again.fit(x, y, batch_size=5, steps_per_epoch=1, verbose=0)
    assert model.ledger.steps == spent.steps + 1


# ------------------------------------------------------------------- Keras's habits


def take_steps(way, model, x, y):
    """Take steps on batches of all rows, and return how many."""
    if way == "single":
        for _ in range(3):
            model.train_on_batch(x, y)
        return
    if way == "loop":
        step = tf.function(lambda: model.train_step((x, y)), autograph=False)
        for _ in range(3):
            step()
        return
    with pytest.warns(UserWarning, match="every batch will be all rows"):
        model.fit(x, y, batch_size=15, epochs=3, verbose=0)


@pytest.mark.parametrize(
    "way",
    ["loop", *(pytest.param(w, marks=pytest.mark.slow) for w in ("single", "fit"))],
)
def test_states_of_seeds_do_not_tell_how_many_passes_there_were(way):
    states = []
    for rows in (4, 5):
        inner = keras.Sequential([
            keras.Input((3,)),
            layers.Dropout(0.5, seed=1),
            layers.Dense(1),
        ])
        state = inner.layers[0].seed_generator.state
        model = tfdp.DPModel(inner, physical_batch_size=4)
        optimizer = tfdp.optimizers.DPSGD(
            0.1,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            expected_batch_size=None if way == "fit" else 15,
        )
        model.compile(optimizer, "mse")
        x = np.ones((rows, 3), "float32")
        take_steps(way, model, x, x[:, :1])
        states.append(state.numpy().tolist())
    assert states[0] == states[1]


def test_batches_of_other_sizes_come_after_an_evaluation():
    """Layers still have the losses that they added in another graph."""
    inner = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(2, activity_regularizer="l2"),
        layers.Dense(1),
    ])
    model = tfdp.DPModel(inner)
    model.compile(optimizer(), "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    model.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0)
    model.train_on_batch(x, y)


class Keeps(tfdp.optimizers.DPSGD):
    """Keeps the clipped sums of its steps, without noise."""

    def __init__(self, **options):
        super().__init__(0.1, l2_norm_clip=1e3, noise_multiplier=1.0, **options)
        self.sums = []

    def take_step(self, clipped_sum, *args, **options):
        self.sums += [gradient.numpy() for gradient in clipped_sum.gradients]
        return super().take_step(clipped_sum, *args, **options)


@pytest.mark.parametrize(
    "way",
    [
        "single",
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in ("fit", "both", "without passes")
        ),
    ],
)
def test_no_mask_of_dropout_comes_again(way):
    """A row has a mask by its place: what is drawn again adds up to more than C."""
    rows = 12
    inner = keras.Sequential([
        keras.Input((32,)),
        layers.Dropout(0.5),
        layers.Dense(rows, use_bias=False),
    ])
    model = tfdp.DPModel(inner, physical_batch_size=4)
    optimizer = Keeps(expected_batch_size=None if way == "fit" else rows)
    # Each row has a column of the kernel to itself: its gradient there is its mask.
    model.compile(
        optimizer,
        lambda y, y_pred: tf.reduce_sum(y * y_pred, -1),
        run_eagerly=True,
    )
    x, y = np.ones((rows, 32), "float32"), np.eye(rows, dtype="float32")
    if way == "without passes":
        take_steps("single", model, x, y)
        model.physical_batch_size = None
    for each in ["fit", "single"] if way == "both" else [way]:
        take_steps(each.replace("without passes", "single"), model, x, y)
    masks = np.concatenate(optimizer.sums, 1).T > 0
    assert len(masks) >= 3 * rows
    assert len(np.unique(masks, axis=0)) == len(masks)


def test_no_mask_of_a_layer_comes_again_in_another():
    """Seeds of layers may differ by as little as 1."""
    rows, seeds = 12, (1, 2)
    x = keras.Input((32,))
    outputs = [
        layers.Dense(rows, use_bias=False)(layers.Dropout(0.5, seed=seed)(x))
        for seed in seeds
    ]
    inner = keras.Model(x, layers.Concatenate()(outputs))
    model = tfdp.DPModel(inner, physical_batch_size=4)
    optimizer = Keeps(expected_batch_size=rows)
    model.compile(
        optimizer,
        lambda y, y_pred: tf.reduce_sum(y * y_pred, -1),
        run_eagerly=True,
    )
    y = np.concatenate([np.eye(rows, dtype="float32")] * len(seeds), 1)
    take_steps("single", model, np.ones((rows, 32), "float32"), y)
    masks = np.concatenate(optimizer.sums, 1).T > 0
    assert len(masks) == 3 * rows * len(seeds)
    assert len(np.unique(masks, axis=0)) == len(masks)


@pytest.mark.slow
def test_the_logs_are_those_of_keras():
    problem = PROBLEMS["dict_losses"]
    batch = problem.batch(8)
    plain = problem.build()
    plain.compile("sgd", problem.loss(), loss_weights=problem.loss_weights)
    wrapped = tfdp.DPModel(problem.build())
    wrapped.compile(optimizer(), problem.loss(), loss_weights=problem.loss_weights)
    wrapped.optimizer.learning_rate = 0.0
    logs = wrapped.fit(batch.x, batch.y, batch_size=8, verbose=0).history
    expected = plain.evaluate(batch.x, batch.y, return_dict=True, verbose=0)
    assert logs.keys() == expected.keys()
    for name, value in expected.items():
        assert logs[name][0] == pytest.approx(value, rel=1e-5), name
    evaluated = wrapped.evaluate(batch.x, batch.y, return_dict=True, verbose=0)
    assert evaluated == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_metrics_see_the_real_rows_only():
    x, y = data(outlier=False)
    model = private(
        wrap={"physical_batch_size": 5}, metrics=["accuracy"], run_eagerly=True
    )
    model.optimizer.learning_rate = 0.0
    logs = model.fit(x, y, batch_size=ROWS, verbose=0).history
    loss, accuracy = model.evaluate(x, y, verbose=0)
    assert logs["loss"][0] == pytest.approx(loss, rel=1e-5)
    assert logs["accuracy"][0] == pytest.approx(accuracy, rel=1e-5)


@pytest.mark.smoke
def test_a_saved_model_goes_on_and_forks_of_one_training_add_up(tmp_path):
    x, y = data(20)
    opt = tfdp.optimizers.DPSGD(0.01, l2_norm_clip=0.7, noise_multiplier=1.25)
    model = private(opt=opt, wrap={"physical_batch_size": 7}, run_eagerly=True)
    model.fit(x, y, batch_size=5, verbose=0)
    model.save(tmp_path / "start.keras")
    fork = keras.models.load_model(tmp_path / "start.keras")
    assert isinstance(fork, tfdp.DPModel)
    assert fork.physical_batch_size == 7
    assert float(fork.optimizer.l2_norm_clip) == 0.7
    assert float(fork.optimizer.noise_multiplier) == 1.25
    assert int(fork.optimizer.iterations) == 4
    assert fork.ledger == model.ledger
    fork.fit(x, y, batch_size=5, steps_per_epoch=1, verbose=0)
    assert segments(fork) == (PoissonSteps(5, 1.25, 20, 5),)
    fork.save_weights(tmp_path / "fork.weights.h5")
    fresh = private()
    fresh.load_weights(tmp_path / "fork.weights.h5")
    assert fresh.ledger == fork.ledger
    model.fit(x, y, batch_size=5, steps_per_epoch=1, verbose=0)
    model.load_weights(tmp_path / "fork.weights.h5")
    assert model.ledger.steps >= 6


@pytest.mark.slow
def test_saved_models_go_on_in_a_fresh_process(tmp_path):
    x, y = data(20)
    inner = network()
    inner.compile("adam", logits_loss(), run_eagerly=True)
    inner.fit(x, y, verbose=0)
    opt = tfdp.optimizers.DPAdam(0.01, l2_norm_clip=0.7, noise_multiplier=1.25)
    model = private(inner, opt, wrap={"physical_batch_size": 7}, run_eagerly=True)
    model.fit(x, y, batch_size=5, verbose=0)
    # The user's own model is trained, and plain.
    np.testing.assert_array_equal(
        inner.predict(x, verbose=0), model.predict(x, verbose=0)
    )
    assert type(inner) is keras.Sequential
    inner.save(tmp_path / "plain.keras")
    model.save(tmp_path / "private.keras")
    output = run_python(f"""
        import sys
        sys.modules["tfdp"] = None
        import keras, numpy as np
        model = keras.models.load_model({str(tmp_path / "plain.keras")!r})
        np.save({str(tmp_path / "y.npy")!r}, model.predict(np.ones((2, 3)), verbose=0))
        del sys.modules["tfdp"]
        import tfdp
        model = keras.models.load_model({str(tmp_path / "private.keras")!r})
        assert isinstance(model, tfdp.DPModel) and model.physical_batch_size == 7
        assert int(model.optimizer.iterations) == 4
        print(model.ledger.to_json())
        x, y = np.ones((20, 3), "float32"), np.ones(20, "int32")
        model.fit(x, y, batch_size=5, verbose=0)
        print(model.ledger.to_json())
    """)
    np.testing.assert_allclose(
        np.load(tmp_path / "y.npy"), inner.predict(np.ones((2, 3)), verbose=0), 1e-5
    )
    before, after = output.strip().splitlines()[-2:]
    assert tfdp.accounting.Ledger.from_json(before) == model.ledger
    longer = tfdp.accounting.Ledger.from_json(after)
    assert longer.segments == (PoissonSteps(8, 1.25, 20, 5),)
    # The slots of its own optimizer are not saved.
    model.save_weights(tmp_path / "m.weights.h5")
    import h5py  # noqa: PLC0415

    names = []
    with h5py.File(tmp_path / "m.weights.h5") as file:
        file.visit(names.append)
    assert not any("model/optimizer" in name for name in names)


def run_python(code):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_summary_and_explain_name_the_layers(capsys):
    model = private()
    model.summary()
    assert "Total params: 26" in capsys.readouterr().out
    table = model.explain()
    assert all(layer.name in table for layer in model.model.layers)


# ------------------------------------------------------------------------ refusals


def test_unshuffled_arrays_are_refused():
    with pytest.raises(ValueError, match="shuffle=False"):
        private().fit(*data(), shuffle=False)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "fast"},
        {"engine": None},
        {"physical_batch_size": 0},
        {"physical_batch_size": float("nan")},
        {"physical_batch_size": -3},
        {"physical_batch_size": 2.5},
        {"sampling": "random"},
        {"augmentation_multiplicity": 2},
    ],
    ids=str,
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="Received"):
        tfdp.DPModel(network(), **options)


# ------------------------------------------------------ what must not go uncounted


@pytest.mark.smoke
def test_steps_of_a_custom_loop_train_the_same_and_go_into_the_ledger():
    x, y = data()
    inner = network()
    opt = noiseless(expected_batch_size=ROWS)
    for step in range(2):
        clipped = tfdp.clipped_gradients(
            inner, logits_loss(), x, y, l2_norm_clip=opt.l2_norm_clip
        )
        opt.apply_clipped_sum(clipped, inner.trainable_variables)
        if not step:
            assert_weights(inner, step_of_reference())
    model = private(inner, opt)
    assert segments(model) == (UnamplifiedSteps(2, 0.0),)
    opt.apply_clipped_sum(clipped, inner.trainable_variables)
    assert model.ledger.steps == opt.ledger.steps == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "`x` is missing"),
        ({"x": data()[0], "y": data()[1], "batch_size": 0}, "batch_size=0"),
        ({"x": data()[0], "y": data()[1], "batch_size": -4}, "batch_size=-4"),
    ],
    ids=["no x", "zero", "negative"],
)
def test_bad_arguments_of_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        private().fit(**arguments)


def test_targets_beside_a_dataset_are_refused():
    x, y = data(20)
    dataset = tfdp.data.PoissonDataset(x, y, expected_batch_size=5)
    with pytest.raises(ValueError, match="belong into the dataset"):
        private().fit(dataset, y)


@pytest.mark.slow
def test_strings_train_beside_numbers():
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
    words = keras.Input((2,), dtype="string", name="words")
    numbers = keras.Input((3,), name="numbers")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(4, 2)(lookup(words)))
    both = keras.layers.Concatenate()([embedded, numbers])
    plain = keras.Model([words, numbers], keras.layers.Dense(1)(both))
    x = {
        "words": np.array([["a", "b"], ["b", "b"], ["a", "a"], ["b", "a"]], object),
        "numbers": np.ones((4, 3), "float32"),
    }
    model = tfdp.DPModel(plain)
    model.compile(optimizer(), "mse")
    for inputs in (x, x | {"words": tf.constant(x["words"])}):
        model.fit(inputs, np.ones((4, 1)), batch_size=2, epochs=1, verbose=0)
        assert model.ledger.steps


def on_a_gpu(layer, seen):
    """Let Keras see of a layer what it sees on a GPU, and note which loop is wanted."""

    def inner_loop(*args, **kwargs):
        seen.append(layer.use_cudnn)
        return type(layer).inner_loop(layer, *args, **kwargs)

    layer.supports_jit = False
    layer.inner_loop = inner_loop
    return layer


@pytest.mark.parametrize(
    "use_cudnn", ["auto", pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("engine", ["bookkeeping", "vectorized"])
@pytest.mark.slow
def test_training_does_without_cudnn_and_xla_compiles_it(engine, use_cudnn):
    seen = []
    layer = on_a_gpu(layers.LSTM(3), seen)
    layer.use_cudnn = use_cudnn
    model = keras.Sequential([keras.Input((4, 2)), layer, layers.Dense(2)])
    with pytest.warns(UserWarning, match="jit_compile"):
        trained = private(model, wrap={"engine": engine}, jit_compile=True)
    seen.clear()
    trained.fit(
        np.ones((8, 4, 2), "float32"), np.arange(8) % 2, batch_size=4, verbose=0
    )
    assert not trained.jit_compile
    assert trained.sessions.settled.clipper.jit_compile
    # Book-keeping has a loop of its own.
    assert set(seen) == ({False} if engine == "vectorized" else set())
    assert layer.use_cudnn == use_cudnn
    assert not layer.supports_jit
    if use_cudnn == "auto":  # Else there must be a GPU.
        seen.clear()
        trained.evaluate(np.ones((8, 4, 2), "float32"), np.arange(8) % 2, verbose=0)
        assert set(seen) == {"auto"}


@pytest.mark.parametrize("on_accelerator", [False, True])
def test_recurrent_layers_are_compiled_where_other_models_are(
    monkeypatch, on_accelerator
):
    model = keras.Sequential([keras.Input((4, 2)), on_a_gpu(layers.LSTM(3), [])])
    trained = private(model, jit_compile="auto")
    if on_accelerator:
        devices = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: devices)
    assert _keras.compiles_training(trained, "auto") == on_accelerator
    assert not trained.jit_compile


def test_eager_training_is_not_compiled_for_want_of_cudnn():
    model = keras.Sequential([keras.Input((4, 2)), on_a_gpu(layers.LSTM(3), [])])
    with pytest.warns(UserWarning, match="run_eagerly"):
        trained = private(model, run_eagerly=True, jit_compile=True)
    assert not _keras.compiles_training(trained, True)


def test_recurrent_layers_heed_a_later_word_about_xla():
    model = keras.Sequential([keras.Input((4, 2)), layers.LSTM(3)])
    trained = private(model, jit_compile=True)
    assert _keras.compiles_training(trained, True)
    trained.jit_compile = False
    assert not _keras.compiles_training(trained, True)


def test_layers_that_xla_cannot_compile_stay_uncompiled():
    layer = on_a_gpu(layers.LSTM(3), [])
    inputs = keras.Input((4,), dtype="string")
    numbers = layers.Hashing(5)(inputs)
    outputs = layers.Dense(2)(layer(layers.Embedding(5, 2)(numbers)))
    with pytest.warns(UserWarning, match="jit_compile"):
        trained = private(keras.Model(inputs, outputs), jit_compile=True)
    assert not _keras.compiles_training(trained, True)


WITH_MASKS = {
    "graph": ({}, {}),
    "eager": ({}, {"run_eagerly": True}),
    "passes": ({"physical_batch_size": 2}, {}),
    "xla": ({}, {"jit_compile": True}),
    "vectorized": ({"engine": "vectorized"}, {}),
    "apart": ({"engine": "apart"}, {}),
}


@pytest.mark.parametrize(
    "name",
    [
        each if each == "graph" else pytest.param(each, marks=pytest.mark.slow)
        for each in WITH_MASKS
    ],
)
@pytest.mark.filterwarnings("ignore:Training without noise")
def test_logs_leave_out_what_is_masked(name):
    """As those of plain Keras do, though graphs return tensors without masks."""
    wrap, compiled = WITH_MASKS[name]
    rng = np.random.default_rng(0)
    x = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4], [2, 2, 0, 0]])
    y = rng.normal(size=(4, 4, 2)).astype("float32")
    inner = keras.Sequential([
        keras.Input((4,), dtype="int32"),
        keras.layers.Embedding(5, 3, mask_zero=True),
        keras.layers.Dense(3, activation="tanh"),
        keras.layers.Dense(2),
    ])
    inner.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    expected = inner.fit(x, y, batch_size=4, verbose=0).history
    wrapped = tfdp.DPModel(inner, sampling="shuffle", **wrap)
    optimizer = tfdp.optimizers.DPSGD(1e-9, l2_norm_clip=1.0, noise_multiplier=0.0)
    wrapped.compile(optimizer, "mse", metrics=["mae"], **compiled)
    history = wrapped.fit(x, y, batch_size=4, verbose=0).history
    # Keras's loss is the mean over what is not masked, of all rows of a pass.
    if name != "passes":
        np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(history["mae"], expected["mae"], rtol=1e-5)
