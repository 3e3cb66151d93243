"""What every engine is compared with: one example at a time, in float64.

Nothing here is vectorised and nothing is shared with tfdp. The loss of an example is
what Keras's compiled loss gives for a batch that holds only that example, with what
layers add to that; weight regularisers are no part of it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.problems import Batch, Problem, precision, size, take


def _divisor_of_one() -> float:
    """What Keras divides by where a mask leaves one entry: older ones add 1e-7."""
    y_pred = keras.ops.zeros((1, 1), "float64")
    y_pred._keras_mask = keras.ops.ones((1,), "bool")
    loss = keras.losses.MeanSquaredError(dtype="float64")
    return 1 / float(loss(np.ones((1, 1)), y_pred))


# Relative error of a comparison in float64.
TOLERANCE = max(1e-9, 2 * (_divisor_of_one() - 1))


class _Objective(keras.Model):
    """A compiled loss without a model, so without the model's regularisers."""

    def __init__(self, model, loss, loss_weights):
        super().__init__()
        self.output_names = getattr(model, "output_names", None)
        self.compile(optimizer=None, loss=loss, loss_weights=loss_weights)


def per_example_losses(
    model, loss, x, y, sample_weight=None, *, loss_weights=None, training=True
) -> np.ndarray:
    """The loss of each example alone, summed where its reduction leaves a vector.

    Args:
        model: A built float64 model.
        loss: As in ``compile``; of ``Loss`` objects, float64 ones.
        x: Inputs.
        y: Targets.
        sample_weight: As in ``fit``.
        loss_weights: As in ``compile``.
        training: Passed to the model.

    Returns:
        Shape ``(N,)``.
    """
    batch = Batch(x, y, sample_weight)
    with precision("float64"):
        objective = _Objective(model, loss, loss_weights)
        results = [
            np.sum(_loss(model, objective, take(batch, [row]), training))
            for row in range(size(batch))
        ]
    return np.array(results, "float64")


def per_example_gradients(
    model, loss, x, y, sample_weight=None, *, loss_weights=None, training=True
) -> list[np.ndarray]:
    """The gradient of each example's loss, in the order of ``trainable_variables``.

    Args:
        model: A built float64 model.
        loss: As in ``compile``; of ``Loss`` objects, float64 ones.
        x: Inputs.
        y: Targets.
        sample_weight: As in ``fit``.
        loss_weights: As in ``compile``.
        training: Passed to the model.

    Returns:
        One array for each trainable variable, of its shape behind a leading axis of
        examples. Zero where the loss does not depend on the variable.
    """
    batch = Batch(x, y, sample_weight)
    variables = model.trainable_variables
    rows = [np.zeros((size(batch), *variable.shape)) for variable in variables]
    with precision("float64"):
        objective = _Objective(model, loss, loss_weights)
        for row in range(size(batch)):
            with tf.GradientTape() as tape:
                value = _loss(model, objective, take(batch, [row]), training)
            for array, gradient in zip(
                rows, tape.gradient(value, variables), strict=True
            ):
                if gradient is not None:
                    array[row] = tf.convert_to_tensor(gradient)
    return rows


def problem_gradients(problem: Problem, batch: Batch) -> list[np.ndarray]:
    """`per_example_gradients` of a problem built in float64.

    Args:
        problem: The model, with its initial weights, and the loss.
        batch: Its examples, changed or not, in any dtype.
    """
    return per_example_gradients(
        problem.build("float64"),
        problem.loss("float64"),
        *batch,
        loss_weights=problem.loss_weights,
    )


def _moments(x: Any, axes: Any, keepdims: bool = False) -> tuple[Any, Any]:
    mean = tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.reduce_mean((x - mean) ** 2, axes, keepdims=keepdims)
    return tf.reshape(mean, tf.shape(variance)), variance


@contextlib.contextmanager
def _means_that_move() -> Iterator[None]:
    """Let gradients of gradients know that a mean moves, which TensorFlow's leave out."""
    before, tf.nn.moments = tf.nn.moments, _moments
    try:
        yield
    finally:
        tf.nn.moments = before


def uphill_gradients(
    problem: Problem,
    batch: Batch,
    *,
    radius: float,
    mix: float,
    is_exact: bool,
    unit_size: int = 1,
    training: bool = True,
) -> list[np.ndarray]:
    """The gradient that BAM has for each unit, from weights that are really moved.

    Args:
        problem: The model, with its initial weights, and the loss.
        batch: Its examples.
        radius: Length of the step uphill.
        mix: Weight of the gradient found there.
        is_exact: Whether to add ``mix radius H v``, by differentiating twice.
        unit_size: Consecutive examples whose mean loss is one unit's.
        training: Passed to the model.

    Returns:
        One array for each trainable variable, behind a leading axis of units; NaN
        for those that have no finite gradient at the weights.
    """
    model = problem.build("float64")
    variables = model.trainable_variables
    starts = range(0, size(batch), unit_size)
    units = [np.zeros((len(starts), *variable.shape)) for variable in variables]

    with precision("float64"), _means_that_move():
        objective = _Objective(model, problem.loss("float64"), problem.loss_weights)

        def mean_loss(rows: list[int]) -> Any:
            values = [_loss(model, objective, take(batch, [r]), training) for r in rows]
            return tf.add_n(values) / len(rows)

        def gradients(rows: list[int]) -> list[Any]:
            with tf.GradientTape() as tape:
                value = mean_loss(rows)
            return tape.gradient(value, variables, unconnected_gradients="zero")

        for unit, start in enumerate(starts):
            rows = list(range(start, min(start + unit_size, size(batch))))
            with tf.GradientTape() as tape:
                here = [tf.convert_to_tensor(g) for g in gradients(rows)]
            norm = np.sqrt(sum(float(tf.reduce_sum(g**2)) for g in here))
            v = [g / norm if norm else g for g in here]
            if is_exact:
                curved = tape.gradient(
                    here, variables, output_gradients=v, unconnected_gradients="zero"
                )
                found = [
                    g + mix * radius * tf.convert_to_tensor(h)
                    for g, h in zip(here, curved, strict=True)
                ]
            else:
                original = [variable.numpy() for variable in variables]
                for variable, direction in zip(variables, v, strict=True):
                    variable.assign_add(radius * direction)
                there = gradients(rows)
                for variable, value in zip(variables, original, strict=True):
                    variable.assign(value)
                found = [
                    (1 - mix) * g + mix * tf.convert_to_tensor(h)
                    for g, h in zip(here, there, strict=True)
                ]
            for array, gradient in zip(units, found, strict=True):
                array[unit] = gradient if np.isfinite(norm) else np.nan
    return units


def clipped_sum(
    gradients: list[np.ndarray], l2_norm_clip: float, unit_size: int = 1
) -> tuple[list[np.ndarray], np.ndarray]:
    """Sum of the units' gradients, each scaled into the ball of radius C.

    Args:
        gradients: From `per_example_gradients`.
        l2_norm_clip: C.
        unit_size: Consecutive examples that make a unit, the last of which may be
            smaller; its gradient is the mean over its examples.

    Returns:
        The sum, one array for each variable, and the units' norms before clipping. A
        unit whose norm is not finite adds nothing.
    """
    total = [np.zeros(rows.shape[1:]) for rows in gradients]
    norms = []
    for start in range(0, len(gradients[0]), unit_size):
        unit = [rows[start : start + unit_size].mean(axis=0) for rows in gradients]
        norm = np.linalg.norm(np.concatenate([part.ravel() for part in unit]))
        norms.append(norm)
        if np.isfinite(norm):
            factor = l2_norm_clip / max(norm, l2_norm_clip)
            total = [add + factor * part for add, part in zip(total, unit, strict=True)]
    return total, np.array(norms)


def assert_all_close(actual: Any, expected: Any, **tolerances: float) -> None:
    """Compare two lists of arrays, one array for each variable."""
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, **tolerances)


def _loss(model, objective, batch: Batch, training: bool) -> Any:
    y_pred = model(batch.x, training=training)
    loss = objective.compute_loss(
        y=batch.y, y_pred=y_pred, sample_weight=batch.sample_weight
    )
    # Those of weights come last.
    added = model.losses[: len(model.losses) - number_of_penalties(model)]
    return tf.reduce_sum(loss) + sum(map(tf.reduce_sum, added)) if added else loss


def number_of_penalties(model) -> int:
    """How many variables have a regularizer."""
    return sum(v.regularizer is not None for v in model.trainable_variables)
