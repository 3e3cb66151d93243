"""The reference against numbers by hand, plain Keras and finite differences."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.problems import (
    PROBLEMS,
    TAGS,
    blank_row,
    cases,
    drop,
    nan_row,
    precision,
    scale_outlier,
    sequential,
    size,
    take,
)
from tests.reference import (
    assert_all_close,
    clipped_sum,
    number_of_penalties,
    per_example_gradients,
    per_example_losses,
    problem_gradients,
)


class Point(layers.Layer):
    """A vector of parameters, the same whatever the input."""

    def build(self, input_shape):
        self.point = self.add_weight(shape=input_shape[1:], initializer="zeros")

    def call(self, x):
        return ops.zeros_like(x) + self.point


def half_squares(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred), axis=-1) / 2


def inner_product(y_true, y_pred):
    return ops.sum(y_true * y_pred, axis=(1, 2))


def batch_gradients(problem, batch):
    """What `fit` would descend along, without the regularisers."""
    model = problem.build("float64")
    with precision("float64"):
        model.compile(
            optimizer=None,
            loss=problem.loss("float64"),
            loss_weights=problem.loss_weights,
        )
        with tf.GradientTape() as tape:
            loss = model.compute_loss(
                y=batch.y,
                y_pred=model(batch.x, training=True),
                sample_weight=batch.sample_weight,
            ) - sum(model.losses[len(model.losses) - number_of_penalties(model) :])
        gradients = tape.gradient(loss, model.trainable_variables)
    return [
        np.zeros(variable.shape) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, variable in zip(gradients, model.trainable_variables, strict=True)
    ]


def losses_at(problem, batch, move):
    """Losses of the examples with the trained variables moved."""
    model = problem.build("float64")
    for variable, part in zip(model.trainable_variables, move, strict=True):
        variable.assign_add(part)
    return per_example_losses(
        model, problem.loss("float64"), *batch, loss_weights=problem.loss_weights
    )


# ------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("x", "unit_size", "expected"),
    [
        ([[3, 4], [6, 8]], 1, [-1.2, -1.6]),
        ([[3, 4], [-6, -8]], 1, [0, 0]),
        ([[3, 4], [-6, -8]], 2, [0.6, 0.8]),
    ],
)
def test_clipped_sum_of_distances(x, unit_size, expected):
    with precision("float64"):
        model = sequential((2,), Point())
    gradients = per_example_gradients(model, half_squares, *2 * [np.array(x, "f8")])
    np.testing.assert_allclose(gradients[0], -np.array(x))
    (total,), norms = clipped_sum(gradients, 1, unit_size)
    np.testing.assert_allclose(total, expected, atol=1e-15)
    np.testing.assert_allclose(norms, [5, 10] if unit_size == 1 else [2.5])


def test_dense_from_zero():
    with precision("float64"):
        model = sequential((2,), layers.Dense(1, kernel_initializer="zeros"))
    x, y = np.array([[3.0, 4.0]]), np.array([[15.0]])
    total, _ = clipped_sum(per_example_gradients(model, "mse", x, y), 1e9)
    weights = [-0.01 * gradient for gradient in total]
    assert_all_close(weights, [[[0.9], [1.2]], [0.3]])
    np.testing.assert_allclose(per_example_losses(model, "mse", x, y), [225])


def test_embedding_adds_repeated_ids_before_squaring():
    with precision("float64"):
        model = sequential((None,), layers.Embedding(3, 1), dtype="int32")
    ids = np.array([[1, 1], [2, 0], [2, 0]])
    slopes = np.array([[[0.2], [0.2]], [[0.3], [0.1]], [[0.3], [0.1]]])
    gradients = per_example_gradients(model, inner_product, ids, slopes)
    np.testing.assert_allclose(gradients[0][0], [[0], [0.4], [0]])
    _, norms = clipped_sum(gradients, 1)
    np.testing.assert_allclose(norms, [0.4, 0.1**0.5, 0.1**0.5])


def test_mask_is_normalised_within_the_example():
    """Keras averages over the positions that the mask leaves, here 1 and 2 of 2."""
    with precision("float64"):
        model = sequential((2, 1), layers.Masking(), layers.Dense(1, use_bias=False))
    model.layers[-1].kernel.assign([[0.0]])
    x, y = np.array([[[1.0], [0.0]], [[1.0], [1.0]]]), np.ones((2, 2, 1))
    gradients = per_example_gradients(model, "mse", x, y)
    np.testing.assert_allclose(np.ravel(gradients[0]), [-2, -2], rtol=1e-6)


def test_weight_and_loss_weight_scale_the_gradient():
    problem = PROBLEMS["linear_regression"]
    model, (x, y, _) = problem.build("float64"), problem.batch(2, "float64")
    plain = per_example_gradients(model, "mse", x, y)
    scaled = per_example_gradients(
        model, "mse", x, y, np.array([2.0, 0.0]), loss_weights=[3.0]
    )
    for left, right in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(6 * left[0], right[0])
        np.testing.assert_array_equal(right[1], np.zeros_like(right[1]))


# --------------------------------------------------------------------- clipped sums


def test_clip_norm_is_over_all_variables():
    total, norms = clipped_sum([np.array([[3.0]]), np.array([[[4.0]]])], 1)
    assert_all_close(total, [[0.6], [[0.8]]])
    np.testing.assert_allclose(norms, [5])


def test_short_gradients_stay_and_zero_gradients_are_no_division():
    rows = np.array([[0.3, 0.4], [0.0, 0.0]])
    total, norms = clipped_sum([rows], 1)
    np.testing.assert_allclose(total[0], [0.3, 0.4])
    np.testing.assert_allclose(norms, [0.5, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_unit_that_is_not_finite_adds_nothing(bad):
    rows = np.array([[1.0, 1.0], [1.0, bad], [2.0, 2.0]])
    total, norms = clipped_sum([rows], 1e9)
    np.testing.assert_allclose(total[0], [3, 3])
    np.testing.assert_array_equal(np.isfinite(norms), [True, False, True])
    total, _ = clipped_sum([rows], 1e9, unit_size=2)
    np.testing.assert_allclose(total[0], [2, 2])


def test_last_unit_is_the_mean_of_what_is_left():
    total, norms = clipped_sum([np.array([[1.0], [3.0], [5.0]])], 1e9, unit_size=2)
    np.testing.assert_allclose(total[0], [2 + 5])
    np.testing.assert_allclose(norms, [2, 5])


def test_sum_of_no_units():
    total, norms = clipped_sum([np.zeros((0, 2, 3)), np.zeros((0, 1))], 1)
    assert_all_close(total, [np.zeros((2, 3)), np.zeros(1)])
    assert norms.shape == (0,)


# -------------------------------------------------------------------- every problem


@pytest.mark.slow
@pytest.mark.parametrize("problem", cases(lacking={"coupled", "random"}, is_few=True))
def test_unclipped_sum_is_the_gradient_of_the_batch(problem):
    batch = problem.batch(5, "float64")
    total, _ = clipped_sum(problem_gradients(problem, batch), 1e9)
    scale = 1 if "sum" in problem.tags else size(batch)
    expected = [scale * np.array(part) for part in batch_gradients(problem, batch)]
    assert_all_close(total, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("problem", cases({"coupled"}))
def test_coupled_losses_need_the_reference(problem):
    batch = problem.batch(5, "float64")
    total, _ = clipped_sum(problem_gradients(problem, batch), 1e9)
    if problem.name == "positions_example_weighted":
        with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible"):
            batch_gradients(problem, take(batch, slice(3)))
        return
    for scale in (1, size(batch)):
        plain = [scale * np.array(part) for part in batch_gradients(problem, batch)]
        assert not all(map(np.allclose, plain, total))


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", cases(lacking={"lora", "random"}, is_few=True))
def test_gradients_are_slopes_of_the_losses(problem, rng):
    batch, step = problem.batch(3, "float64"), 1e-6
    gradients = problem_gradients(problem, batch)
    move = [rng.normal(size=rows.shape[1:]) for rows in gradients]
    slopes = sum(
        np.tensordot(rows, part, part.ndim)
        for rows, part in zip(gradients, move, strict=True)
    )
    up = losses_at(problem, batch, [step * part for part in move])
    down = losses_at(problem, batch, [-step * part for part in move])
    np.testing.assert_allclose((up - down) / (2 * step), slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("problem", cases(lacking={"random"}, is_few=True))
def test_changed_row_changes_alone(problem):
    batch = problem.batch(2)
    plain = problem_gradients(problem, batch)
    for change in (scale_outlier, nan_row, blank_row):
        rows = problem_gradients(problem, change(batch, 1))
        assert_all_close([part[0] for part in rows], [part[0] for part in plain])
        _, norms = clipped_sum(rows, 1)
        np.testing.assert_array_equal(np.isfinite(norms), [True, change != nan_row])


@pytest.mark.slow
@pytest.mark.parametrize("problem", cases(is_few=True))
def test_empty_batch_has_empty_gradients(problem):
    batch = problem.batch(0)
    assert size(batch) == 0
    shapes = [(0, *variable.shape) for variable in problem.build().trainable_variables]
    assert [part.shape for part in problem_gradients(problem, batch)] == shapes


# ------------------------------------------------------------------------- problems


@pytest.mark.slow
@pytest.mark.parametrize("problem", cases(is_few=True))
def test_problems_are_deterministic(problem):
    first, second = problem.build().get_weights(), problem.build().get_weights()
    assert_all_close(first, second, rtol=0)
    wide = problem.build("float64").get_weights()
    if "lora" not in problem.tags:  # Keras 3.15 keeps adapters in float32.
        assert {weight.dtype.name for weight in wide} == {"float64"}
    assert_all_close(first, wide, rtol=0)
    short, long = problem.batch(1), take(problem.batch(7), slice(1))
    for left, right in zip(*map(keras.tree.flatten, (short, long)), strict=True):
        if left is not None:
            np.testing.assert_array_equal(left, right)
            assert left.dtype in {np.dtype("float32"), np.dtype("int32")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", cases(is_few=True))
def test_tags_are_true(problem):
    model, batch = problem.build("float64"), problem.batch(5)
    assert problem.tags <= TAGS.keys()
    outputs = [
        np.concatenate([np.ravel(part) for part in keras.tree.flatten(output)])
        for output in (model(batch.x, training=True), model(batch.x, training=True))
    ]
    assert ("random" in problem.tags) != np.array_equal(*outputs)
    assert ("frozen" in problem.tags) == bool(model.non_trainable_weights)
    penalties = number_of_penalties(model)
    assert ("regularized" in problem.tags) == bool(penalties)
    assert ("added" in problem.tags) == (len(model.losses) > penalties)
    structured = any(map(keras.tree.is_nested, (batch.x, batch.y)))
    assert ("structure" in problem.tags) == structured
    gradients = problem_gradients(problem, batch)
    assert ("unused" in problem.tags) == any(not np.any(part) for part in gradients)
    with tf.GradientTape() as tape:
        total = sum(map(tf.reduce_sum, keras.tree.flatten(model(batch.x))))
    slices = [
        isinstance(gradient, tf.IndexedSlices)
        for gradient in tape.gradient(total, model.trainable_variables)
    ]
    assert ("embedding" in problem.tags) == any(slices)


def test_changed_batches():
    floats = PROBLEMS["list_losses"].batch(3)
    scaled = scale_outlier(floats, 1, 10)
    rows = np.array([[1], [10], [1]], "float32")
    assert_all_close(scaled.x, [rows * part for part in floats.x])
    assert scaled.sample_weight is None
    ids = PROBLEMS["embedding_mean"].batch(3)
    scaled = scale_outlier(ids, 1, 10)
    np.testing.assert_array_equal(scaled.x, ids.x)
    np.testing.assert_array_equal(scaled.sample_weight, [1, 10, 1])
    weighted = scale_outlier(PROBLEMS["positions_weighted"].batch(3), 1, 10)
    expected = PROBLEMS["positions_weighted"].batch(3).sample_weight * rows
    np.testing.assert_array_equal(weighted.sample_weight, expected)
    assert not np.any(blank_row(ids, 2).x[2])
    assert np.any(ids.x[2])
    np.testing.assert_array_equal(drop(ids, 1).x, ids.x[[0, 2]])
    assert size(take(floats, slice(2))) == 2


def test_cases_select_by_tags():
    names = {parameter.id for parameter in cases({"mask", "rnn"}, {"shared"})}
    assert {"embedding_lstm", "simple_rnn_masked"} <= names
    assert not {"reversible_masked", "attention_padded"} & names
    assert len(cases()) == len(PROBLEMS)
    slow = [parameter.id for parameter in cases(is_slow=True) if parameter.marks]
    assert len(cases(is_few=True)) == len(cases()) - len(slow)
    assert "mlp_softmax" in slow
    assert not {"linear_regression", "cnn", "lstm_bidirectional"} & set(slow)


def test_precision_is_restored():
    with precision("float64"):
        assert layers.Dense(1).compute_dtype == keras.config.floatx() == "float64"
        with precision("mixed_float16"):
            assert layers.Dense(1).compute_dtype == "float16"
            assert layers.Dense(1).variable_dtype == keras.config.floatx() == "float32"
    assert layers.Dense(1).compute_dtype == keras.config.floatx() == "float32"


def test_global_state_is_left_behind_here():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("mixed_bfloat16")


def test_global_state_is_reset_before_here():
    assert keras.config.floatx() == "float32"
    assert keras.config.dtype_policy().name == "float32"
