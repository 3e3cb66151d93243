"""Metrics see rows without noise: what they keep of them stays in their own variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tfdp import _keras
from tfdp.errors import UnsupportedLayerError

D = 3


def in_branch(kernel, value):
    tf.cond(value > 0, lambda: kernel.assign_add(0 * kernel + value), lambda: kernel)


# What a metric does with a weight, or another variable, and the largest target.
KEEPS = {
    "assign": lambda kernel, value: kernel.assign(0 * kernel + value),
    "scatter": lambda kernel, value: kernel._value.scatter_nd_update(
        [[0, 0]], value[None]
    ),
    "raw": lambda kernel, value: tf.raw_ops.AssignVariableOp(
        resource=kernel._value.handle, value=0 * kernel + value
    ),
    "branch": in_branch,
    "function": lambda kernel, value: tf.function(
        lambda: kernel.assign(0 * kernel + value), autograph=False
    )(),
}


class Keeping(keras.metrics.Mean):
    """Keeps the largest target somewhere else."""

    def __init__(self, keep, of=None):
        super().__init__()
        self.keep, self.of = keep, of

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.of is not None:
            self.keep(self.of(), ops.max(y_true))
        super().update_state(ops.mean(y_pred, -1))


def private(metric, loss="mse", **options):
    model = keras.Sequential([
        keras.Input((D,)),
        layers.Dense(1, name="dense"),
        layers.Dropout(0.5),
    ])
    wrapped = tfdp.DPModel(model)
    optimizer = tfdp.optimizers.DPSGD(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4
    )
    wrapped.compile(optimizer, loss, metrics=[metric], **options)
    return wrapped


def data():
    return np.ones((8, D), "float32"), np.arange(8.0, dtype="float32")[:, None]


RUNS = {
    "fit": lambda model: model.fit(*data(), batch_size=4, verbose=0),
    "single": lambda model: model.train_on_batch(*data()),
    "evaluate": lambda model: model.evaluate(*data(), verbose=0),
}


CASES = [
    *(("single", keep) for keep in KEEPS),
    ("evaluate", "raw"),
    pytest.param("fit", "assign", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("run", "keep"), CASES)
def test_metrics_keep_nothing_in_a_weight(run, keep):
    model = private(Keeping(KEEPS[keep], lambda: model.model.layers[0].kernel))
    with pytest.raises(UnsupportedLayerError, match="in variables of metrics alone"):
        RUNS[run](model)


@pytest.mark.parametrize(
    "dial",
    [
        "l2_norm_clip",
        pytest.param("noise_multiplier", marks=pytest.mark.slow),
        pytest.param("learning_rate", marks=pytest.mark.slow),
    ],
)
def test_metrics_turn_no_dial(dial):
    def keep(_, value):
        getattr(model.optimizer, dial).assign(ops.cast(value, "float64"))

    metric = Keeping(keep, lambda: None)
    if dial == "learning_rate":
        metric.keep = lambda _, value: model.optimizer.learning_rate.assign(value)
    model = private(metric)
    with pytest.raises(UnsupportedLayerError, match=dial):
        RUNS["fit"](model)


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
def test_metrics_keep_nothing_where_a_later_step_could_find_it(make):
    seen = make(0.0)
    model = private(Keeping(lambda _, value: seen.assign(value), lambda: None))
    with pytest.raises(
        UnsupportedLayerError, match=r"of metrics alone.*AssignVariableOp"
    ):
        RUNS["fit"](model)


@pytest.mark.parametrize(
    "run", [RUNS["single"], RUNS["evaluate"]], ids=["single", "evaluate"]
)
def test_eagerly_what_a_metric_assigned_is_put_back(run):
    model = private(
        Keeping(KEEPS["scatter"], lambda: model.model.layers[0].kernel),
        run_eagerly=True,
    )
    before = model.model.get_weights()
    with pytest.raises(UnsupportedLayerError, match="dense/kernel`, assigned by one"):
        run(model)
    if run is RUNS["evaluate"]:
        np.testing.assert_array_equal(model.model.get_weights()[0], before[0])


@pytest.mark.parametrize("dial", ["noise_multiplier", "learning_rate"])
def test_what_keras_takes_for_a_metric_s_own_is_refused(dial):
    """It would be set to zero where metrics are reset."""
    metric = keras.metrics.MeanAbsoluteError()
    model = private(metric)
    metric.logged = getattr(model.optimizer, dial)
    before = float(metric.logged.numpy())
    for run in ("evaluate", "fit"):
        with pytest.raises(UnsupportedLayerError, match=f"`mean_.*` with .*{dial}`"):
            RUNS[run](model)
    assert float(metric.logged.numpy()) == before


class KeepingLoss(keras.losses.Loss):
    """Keeps the largest target in a variable, once that is asked for."""

    keep = None

    def call(self, y_true, y_pred):
        if self.keep is not None:
            self.keep(ops.max(y_true))
        return ops.mean((y_true - y_pred) ** 2, -1)


@pytest.mark.parametrize("run_eagerly", [True, False])
@pytest.mark.parametrize("way", ["assign", "scatter", "raw"])
def test_losses_keep_nothing_in_a_weight_in_evaluation(way, run_eagerly):
    loss = KeepingLoss()
    model = private("mae", loss=loss, run_eagerly=run_eagerly)
    kernel = model.model.layers[0].kernel
    loss.keep = lambda value: KEEPS[way](kernel, value)
    with pytest.raises(UnsupportedLayerError, match="dense/kernel`, assigned by one"):
        RUNS["evaluate"](model)


def test_losses_keep_nothing_of_evaluation_for_a_later_step():
    loss = KeepingLoss()
    loss.seen = keras.Variable(1.0)
    model = private("mae", loss=loss)
    RUNS["evaluate"](model)
    loss.keep = loss.seen.assign
    model.test_function = None
    with pytest.raises(UnsupportedLayerError, match=r"AssignVariableOp.*by one"):
        RUNS["evaluate"](model)


@pytest.mark.parametrize("is_global", [False, True])
def test_losses_and_metrics_may_draw_in_evaluation(is_global):
    seeds = [None if is_global else keras.random.SeedGenerator(1)]

    def drawing(y_true, y_pred):
        drawn = keras.random.normal((), seed=seeds[0])
        return ops.mean((y_true - y_pred) ** 2, -1) + drawn

    RUNS["evaluate"](private("mae", loss=drawing))
    RUNS["evaluate"](private(drawing))


def test_metrics_may_draw_a_fixed_number_of_times():
    seed = keras.random.SeedGenerator(1)

    def draw(*_):
        return keras.random.normal((), seed=seed)

    def drawing(y_true, y_pred):
        drawn = ops.fori_loop(0, 3, lambda _, total: total + draw(), 0.0)
        return ops.cond(True, lambda: drawn, draw) + ops.mean(y_pred - y_true, -1)

    RUNS["evaluate"](private(drawing))


def put_into(state, value):
    state.assign(ops.cast(ops.stack([value, value]), state.dtype))


def draw_where_large(state, value):
    tf.cond(value > 1, lambda: state.assign(1 + state), lambda: state)


def draw_as_often(state, value):
    def draw(steps):
        state.assign(1 + state)
        return (steps + 1.0,)

    tf.while_loop(lambda steps: steps < value, draw, [0.0])


def draw_as_often_by_data(state, value):
    def draw(steps, _):
        state.assign(1 + state)
        return steps

    tf.data.Dataset.range(tf.cast(value, tf.int64)).reduce(0, draw)


# What is like the state of a generator of random numbers.
SEEDS = {
    "own": lambda model: tf.Variable([0, 0], dtype=tf.int64),
    "of Keras": lambda model: _keras.global_seed_state(),
    "of a layer": lambda model: model.model.layers[-1].seed_generator.state,
}


@pytest.mark.parametrize(
    "keep",
    [
        put_into,
        draw_where_large,
        draw_as_often,
        draw_as_often_by_data,
    ],
)
@pytest.mark.parametrize("is_loss", [False, True])
@pytest.mark.parametrize("name", SEEDS)
def test_nothing_is_kept_in_what_looks_like_a_seed(name, is_loss, keep):
    loss, metric = KeepingLoss(), Keeping(keep)
    model = private("mae" if is_loss else metric, loss=loss if is_loss else "mse")
    state = SEEDS[name](model)
    if is_loss:
        loss.keep = lambda value: keep(state, value)
    else:
        metric.of = lambda: state
    with pytest.raises(UnsupportedLayerError, match="assigned by one"):
        RUNS["evaluate"](model)


def test_eagerly_a_seed_is_left_as_by_one_draw():
    loss = KeepingLoss()
    model = private("mae", loss=loss, run_eagerly=True)
    state = SEEDS["of a layer"](model)
    before = np.array(state)
    loss.keep = lambda value: put_into(state, value)
    RUNS["evaluate"](model)
    np.testing.assert_array_equal(state, before + np.array([0, 1], before.dtype))


class Choosing(keras.Model):
    """Has another loss for evaluation."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, *_, training=True, **__):
        loss = ops.mean(ops.sum((y_pred - y) ** 2, -1))
        return 10 * loss if training else loss


def test_evaluation_computes_the_loss_of_evaluation():
    model = Choosing()
    x, y = data()
    expected = np.mean((model(x) - y) ** 2)
    wrapped = tfdp.DPModel(model)
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    wrapped.compile(optimizer)
    np.testing.assert_allclose(wrapped.evaluate(x, y, verbose=0), expected, rtol=1e-5)


class Annealed(keras.Model):
    """Counts the batches that it has seen, in its own `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.seen = self.add_weight(name="seen", initializer="zeros", trainable=False)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
        self.seen.assign(self.seen + 1.0)
        return self.seen * ops.mean(ops.sum((y_pred - y) ** 2, -1))


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_what_a_loss_counts_it_counts_once_a_batch(run_eagerly):
    """It is computed for the logs, too, and not to train in evaluation."""
    model = Annealed()
    x, y = data()
    model(x)
    wrapped = tfdp.DPModel(model)
    optimizer = tfdp.optimizers.DPSGD(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8
    )
    wrapped.compile(optimizer, run_eagerly=run_eagerly)
    for _ in range(3):
        wrapped.train_on_batch(x, y)
    wrapped.evaluate(x, y, verbose=0)
    assert model.seen == 3


class Summing(keras.metrics.Sum):
    """Sums up the targets, and can put the sum into a weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true)

    def keep(self):
        self.weight().assign(ops.reshape(self.total, (1,)))


class KeepingAtTheEnd(Summing):
    """Keeps it when its result is asked for eagerly."""

    def result(self):
        if tf.executing_eagerly():
            self.keep()
        return super().result()


def test_metrics_keep_nothing_when_their_results_are_asked_for():
    model = private(KeepingAtTheEnd(lambda: model.model.layers[0].bias))
    with pytest.raises(UnsupportedLayerError, match="dense/bias`, assigned by one"):
        RUNS["fit"](model)


class KeepingWhenReset(Summing):
    """Keeps it when it is reset."""

    def reset_state(self):
        self.keep()
        super().reset_state()


@pytest.mark.parametrize("run", ["fit", "single", "evaluate"])
@pytest.mark.parametrize("run_eagerly", [True, False])
def test_metrics_keep_nothing_when_they_are_reset(run, run_eagerly):
    metric = KeepingWhenReset(lambda: model.model.layers[0].bias)
    model = private(metric, run_eagerly=run_eagerly)
    RUNS[run](model)
    before = model.model.layers[0].bias.numpy()
    with pytest.raises(UnsupportedLayerError, match="dense/bias`, assigned by one"):
        RUNS["evaluate" if run == "single" else run](model)
    assert metric.total == 0
    if run != "fit":
        np.testing.assert_array_equal(model.model.layers[0].bias, before)


class Remembering(keras.metrics.Sum):
    """Remembers its last value in Python, which takes no graph."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true)

    def reset_state(self):
        self.last = float(self.total.numpy())
        super().reset_state()


def test_metrics_may_be_reset_in_python():
    metric = Remembering()
    model = private(metric)
    RUNS["fit"](model)
    RUNS["evaluate"](model)
    RUNS["evaluate"](model)
    assert metric.last == np.sum(data()[1])


def test_weights_that_are_not_finite_are_not_taken_for_assigned_ones():
    model = private("mae", run_eagerly=True)
    model.model.layers[0].bias.assign([np.nan])
    RUNS["evaluate"](model)


class OwnGraph(keras.metrics.Metric):
    """Reads a weight, draws, and keeps the sum in functions and branches of its own."""

    def __init__(self, kernel):
        super().__init__()
        self.total = self.add_variable((), "zeros", name="total")
        self.kernel = kernel

    @tf.function(autograph=False)
    def add(self, value):
        self.total.assign_add(value + 0 * ops.sum(self.kernel()))

    def update_state(self, y_true, y_pred, sample_weight=None):
        value = ops.sum(self.kernel()) + keras.random.normal(())
        tf.cond(value > 0, lambda: self.add(value), lambda: self.add(-value))
        tf.while_loop(lambda n: n < 2, lambda n: (self.add(n), n + 1)[1:], [value * 0])

    def result(self):
        return self.total


@pytest.mark.parametrize(
    ("run", "run_eagerly"),
    [
        ("fit", False),
        ("single", True),
        pytest.param("evaluate", False, marks=pytest.mark.slow),
        pytest.param("evaluate", True, marks=pytest.mark.slow),
    ],
)
def test_metrics_keep_what_they_like_in_their_own_variables(run, run_eagerly):
    metric = OwnGraph(lambda: model.model.layers[0].kernel)
    model = private(metric, run_eagerly=run_eagerly)
    RUNS[run](model)
    assert metric.total.numpy() > 0
