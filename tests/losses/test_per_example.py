"""The loss of each example is what Keras gives for that example alone."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, ops

import tfdp
from tests.engine_checks import OUTLIER, check, runner
from tests.problems import PROBLEMS, Batch, Problem, cases, precision, take
from tests.reference import per_example_losses
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.errors import UnsupportedLossError
from tfdp.losses import PerExampleLoss
from tfdp.losses.per_example import each_row_alone

pytestmark = pytest.mark.keras_private

REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", None)


@pytest.fixture
def float64():
    """Keras in float64, with masks rescaled without the usual 1e-7."""
    epsilon = keras.config.epsilon()
    keras.config.set_epsilon(1e-30)
    with precision("float64"):
        yield
    keras.config.set_epsilon(epsilon)


def tensors(tree):
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), tree
    )


def of_problem(problem, batch, run_in_graph=False):
    """The losses of a batch, all examples at once."""
    model = problem.build("float64")
    per_example = PerExampleLoss(
        problem.loss("float64"),
        problem.loss_weights,
        getattr(model, "output_names", None),
    )

    def run(batch):
        return per_example(batch.y, model(batch.x, training=False), batch.sample_weight)

    if run_in_graph:
        run = tf.function(run, autograph=False)
    return run(Batch(*tensors(tuple(batch))))


def expected_of(problem, batch):
    return per_example_losses(
        problem.build("float64"),
        problem.loss("float64"),
        *batch,
        loss_weights=problem.loss_weights,
        training=False,
    )


SPECIAL = {"coupled", "mask", "scalar", "structure", "sum"}


def special_cases(**options):
    """Problems in which the loss is more than a mean."""
    found = cases(lacking={"added", "conv", "lora", "rnn"}, **options)
    return [case for case in found if case.values[0].tags & SPECIAL]


@pytest.mark.parametrize("problem", special_cases(is_slow=True))
def test_equals_each_example_alone(problem, float64):
    batch = problem.batch(4, "float64")
    values = of_problem(problem, batch)
    assert values.shape == [4]
    np.testing.assert_allclose(values, expected_of(problem, batch), rtol=1e-9)


@pytest.mark.parametrize("problem", special_cases(is_few=True))
def test_equals_each_example_alone_in_the_graph(problem, float64):
    batch = problem.batch(3, "float64")
    values = of_problem(problem, batch, run_in_graph=True)
    np.testing.assert_allclose(values, expected_of(problem, batch), rtol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("masked", marks=pytest.mark.smoke),
        "ignored_class",
        "weighted_mean",
        "dice",
        "positions_weighted",
    ],
)
def test_mates_do_not_change_a_loss(name, float64):
    problem = PROBLEMS[name]
    batch = problem.batch(6, "float64")
    together = of_problem(problem, batch)
    for rows in ([0], [5, 2], [1, 0, 3]):
        some = of_problem(problem, take(batch, rows))
        np.testing.assert_allclose(some, np.array(together)[rows], rtol=1e-12)


# ------------------------------------------ every reduction, weight and mask there is


class Masked(keras.Model):
    """Gives its input back, with a mask where the input's first number is negative."""

    def __init__(self, has_mask):
        super().__init__()
        self.has_mask = has_mask
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        outputs = x * self.scale
        if self.has_mask:
            outputs._keras_mask = x[..., 0] > 0
        return outputs


LOSSES = {
    "mse": (losses.MeanSquaredError, "float"),
    "huber": (losses.Huber, "float"),
    "cosine": (losses.CosineSimilarity, "float"),
    "labels": (
        lambda **kw: losses.SparseCategoricalCrossentropy(from_logits=True, **kw),
        "label",
    ),
    "ignored": (
        lambda **kw: losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=1, **kw
        ),
        "label",
    ),
}


WEIGHTS = (None, "example", "position", "column")


@pytest.mark.parametrize(
    ("loss", "reduction", "has_mask", "weights"),
    [
        *itertools.product(["mse"], REDUCTIONS, [False, True], WEIGHTS),
        *itertools.product(["ignored"], REDUCTIONS, [True], WEIGHTS),
        *itertools.product(
            ["huber", "cosine", "labels"], REDUCTIONS[:1], [True], ["position"]
        ),
    ],
)
def test_masks_weights_and_reductions(loss, reduction, has_mask, weights, float64, rng):
    make, kind = LOSSES[loss]
    n, positions, classes = 4, 3, 3
    x = rng.normal(size=[n, positions, classes])
    x[:, 0, 0] = np.abs(x[:, 0, 0])  # Something is left of every example.
    y = rng.normal(size=x.shape)
    if kind == "label":
        y = rng.integers(classes, size=[n, positions])
        y[:, 0] = 2
    shape = {"example": [n], "position": [n, positions], "column": [n, 1]}.get(weights)
    sample_weight = None if weights is None else rng.uniform(0.5, 2, size=shape)
    model = Masked(has_mask)
    y_pred = model(tf.constant(x))
    arguments = tensors(y), y_pred, tensors(sample_weight)
    per_example = PerExampleLoss(make(reduction=reduction))
    if reduction == "mean_with_sample_weight" and weights == "example":
        with pytest.raises(UnsupportedLossError, match=r"cancels\. Received: .*Use"):
            per_example(*arguments)
        return
    expected = per_example_losses(
        model, make(reduction=reduction), x, y, sample_weight, training=False
    )
    np.testing.assert_allclose(per_example(*arguments), expected, rtol=1e-9)


def test_an_example_that_is_all_masked_has_no_loss(float64):
    x = -np.ones([2, 3, 3])
    x[1] = 1
    model = Masked(has_mask=True)
    values = PerExampleLoss("mse")(tf.zeros([2, 3, 3]), model(tf.constant(x)))
    np.testing.assert_allclose(values, [0, 1], rtol=1e-9)


def test_an_example_that_is_all_masked_has_a_zero_gradient(float64):
    x = tf.constant(-np.ones([1, 3, 3]))
    model = Masked(has_mask=True)
    model(x)
    with tf.GradientTape() as tape:
        value = PerExampleLoss("mse")(tf.zeros([1, 3, 3]), model(x))
    assert float(tape.gradient(value, model.trainable_variables[0].value)) == 0


# ------------------------------------------------------------------- kinds of losses


class OwnCall(losses.Loss):
    """Overrides what reduces a batch: the root of the mean square over the batch."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        squares = ops.square(ops.cast(y_true, y_pred.dtype) - y_pred)
        if sample_weight is not None:
            squares *= ops.cast(sample_weight, squares.dtype)[:, None]
        return ops.sqrt(ops.mean(squares))


class PlainCall(losses.Loss):
    """One value for each example."""

    def call(self, y_true, y_pred):
        return ops.max(ops.abs(y_true - y_pred), axis=-1)


def root_mean_square(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


@pytest.mark.parametrize(
    "loss",
    [OwnCall, PlainCall, lambda: root_mean_square, losses.Dice, losses.Tversky],
    ids=["own_call", "plain_call", "scalar", "dice", "tversky"],
)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("run_in_graph", [False, True])
def test_losses_of_every_kind(loss, is_weighted, run_in_graph, float64, rng):
    y_true, y_pred = rng.uniform(0.1, 1, size=[2, 5, 3])
    sample_weight = rng.uniform(0.5, 2, size=5) if is_weighted else None
    model = Masked(has_mask=False)
    model(y_pred)
    expected = per_example_losses(model, loss(), y_pred, y_true, sample_weight)
    run = PerExampleLoss(loss())
    if run_in_graph:
        run = tf.function(run, autograph=False)
    actual = run(*tensors((y_true, y_pred, sample_weight)))
    np.testing.assert_allclose(actual, expected, rtol=1e-9)
    assert actual.shape == [5]


@pytest.mark.parametrize("name", ["crossentropy", "ce"])
@pytest.mark.parametrize(
    ("make_target", "full_name"),
    [
        (lambda labels: labels, "sparse_categorical_crossentropy"),
        (lambda labels: np.eye(3)[labels], "categorical_crossentropy"),
    ],
)
def test_short_names_resolve_by_the_shape_of_the_target(
    name, make_target, full_name, float64, rng
):
    y_pred = rng.dirichlet(np.ones(3), size=4)
    target = make_target(rng.integers(3, size=4))
    short, full = (
        PerExampleLoss(loss)(*tensors((target, y_pred))) for loss in (name, full_name)
    )
    np.testing.assert_array_equal(short, full)
    labels = target if target.ndim == 1 else target.argmax(axis=-1)
    expected = -np.log(y_pred[np.arange(4), labels])
    np.testing.assert_allclose(short, expected, rtol=1e-6)


def test_binary_targets_make_crossentropy_binary(float64, rng):
    y_pred = rng.uniform(0.1, 0.9, size=[4, 1])
    target = rng.integers(2, size=[4, 1])
    short, full = (
        PerExampleLoss(loss)(*tensors((target, y_pred)))
        for loss in ("crossentropy", "binary_crossentropy")
    )
    np.testing.assert_array_equal(short, full)


def test_an_ignored_class_adds_nothing(float64, rng):
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    logits = rng.normal(size=[2, 3, 4])
    y = np.array([[0, -1, -1], [-1, 2, 3]])
    log_probability = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = [-log_probability[0, 0, 0], -np.mean(log_probability[1, [1, 2], [2, 3]])]
    actual = PerExampleLoss(loss)(*tensors((y, logits)))
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


# ------------------------------------------------------------------ structure, refusals


def test_outputs_without_loss_are_left_out(float64, rng):
    outputs = [tf.constant(rng.normal(size=[3, 2])) for _ in range(2)]
    targets = [tf.zeros([3, 2], tf.float64)] * 2
    both = PerExampleLoss(["mse", None])(targets, outputs)
    first = PerExampleLoss("mse")(targets[0], outputs[0])
    np.testing.assert_array_equal(both, first)


def test_loss_weights_scale_the_outputs_losses(float64, rng):
    outputs = {name: tf.constant(rng.normal(size=[3, 2])) for name in ("a", "b")}
    targets = {name: tf.zeros([3, 2], tf.float64) for name in outputs}
    total = PerExampleLoss({"b": "mse", "a": "mae"}, {"a": 0.5, "b": 3.0}, ["a", "b"])(
        targets, outputs
    )
    expected = 0.5 * np.abs(outputs["a"]).mean(1) + 3 * np.square(outputs["b"]).mean(1)
    np.testing.assert_allclose(total, expected, rtol=1e-9)


@pytest.mark.parametrize("run_in_graph", [False, True])
def test_weights_of_examples_are_refused_where_they_cancel(run_in_graph):
    run = PerExampleLoss(losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    if run_in_graph:
        run = tf.function(run, autograph=False)
    with pytest.raises(UnsupportedLossError, match="weights of shape"):
        run(tf.zeros([3, 2]), tf.ones([3, 2]), tf.ones([3]))


def test_a_batch_without_examples_has_no_losses(float64):
    values = PerExampleLoss("mse")(tf.zeros([0, 2]), tf.zeros([0, 2]))
    assert values.shape == [0]


def test_rows_are_given_one_by_one():
    shapes = []

    def function(a, b, c):
        shapes.append((a["x"].shape, b, c.shape))
        return tf.reduce_sum(a["x"]) + tf.reduce_sum(c)

    rows = ({"x": tf.ones([3, 2])}, None, tf.constant([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(each_row_alone(function, rows), [3, 4, 5])
    assert set(shapes) == {((1, 2), None, (1,))}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_losses_have_keras_s_float_dtype(dtype):
    with precision(dtype):
        values = PerExampleLoss("mse")(tf.zeros([2, 2]), tf.zeros([2, 2]))
    assert values.dtype == dtype


@pytest.mark.parametrize("loss", ["hinge", losses.SquaredHinge(), losses.hinge])
@pytest.mark.parametrize("labels", [(0, 1), (-1, 1), (0, -1)])
@pytest.mark.parametrize("lengths", [(1,), (4, 2)])
def test_the_labels_of_a_hinge_are_those_of_a_row(loss, labels, lengths, rng):
    """Keras asks of all together whether they are 0 and 1."""
    y = rng.choice(labels, size=(6, *lengths)).astype("float64")
    y_pred = rng.normal(size=(6, *lengths))
    of_rows = PerExampleLoss(loss)(*tensors((y, y_pred)))
    loss = losses.get(loss)
    expected = [np.mean(loss(y[i : i + 1], y_pred[i : i + 1])) for i in range(6)]
    np.testing.assert_allclose(of_rows, expected, rtol=1e-6)


def test_hinges_leave_out_what_is_masked(rng):
    y = rng.choice((0.0, 1.0), size=(6, 4, 2))
    y_pred = tf.constant(rng.normal(size=(6, 4, 2)))
    mask = rng.integers(2, size=(6, 4)).astype(bool)
    mask[:, 0] = True
    values = PerExampleLoss("hinge")(tf.constant(y), y_pred).numpy()
    assert values.shape == (6,)
    y_pred._keras_mask = tf.constant(mask)
    found = PerExampleLoss("hinge")(tf.constant(y), y_pred)
    expected = [
        np.mean(losses.hinge(y[i, mask[i]], y_pred.numpy()[i, mask[i]]))
        for i in range(6)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [losses.Hinge(), "squared_hinge"])
def test_a_hinge_clips_as_single_rows_and_trains(loss, rng):
    problem = Problem(
        "hinge",
        lambda: keras.Sequential([
            keras.Input((3,)),
            layers.Dense(4, "tanh"),
            layers.Dense(1),
        ]),
        lambda rng: (rng.normal(size=3), rng.integers(2, size=1)),
        loss,
    )
    engine = BookkeepingEngine()
    check(problem, runner(problem, [engine]), OUTLIER)
    model = tfdp.DPModel(problem.build())
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    model.compile(optimizer, loss)
    x, y = rng.normal(size=(8, 3)), rng.integers(2, size=(8, 1))
    model.fit(x, y, batch_size=4, verbose=0)
