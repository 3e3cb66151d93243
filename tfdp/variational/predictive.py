"""What a posterior predicts. All of it is post-processing, and costs nothing."""

import math
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdp import _tree, _validate
from tfdp._types import Nest, Tensor
from tfdp.variational.posterior import posterior_samples, unwrapped, weights_by_name


def predictive_mean(
    model: keras.Model,
    x: Nest,
    *,
    draws: int = 100,
    activation: Callable[[Tensor], Tensor] | None = None,
    seed: int | None = None,
) -> np.ndarray:
    """Average a model's outputs over weights drawn from the posterior.

    Args:
        model: A model with one output.
        x: Inputs, arrays with leading axis N.
        draws: How many draws of the weights.
        activation: Applied to the outputs before they are averaged: for logits
            `keras.activations.sigmoid` or `softmax`.
        seed: None for one of the operating system's.

    Returns:
        Of the outputs' shape.

    Raises:
        TypeError: If `draws` is not a number.
        ValueError: If it is less than 1, or there is no variational layer.
    """
    draws = _validate.positive_int("draws", draws)
    # One at a time: all of them may not fit.
    return np.asarray(sum(_drawn(model, x, draws, activation, seed)) / draws)


def predictive_samples(
    model: keras.Model,
    x: Nest,
    *,
    draws: int = 100,
    activation: Callable[[Tensor], Tensor] | None = None,
    seed: int | None = None,
) -> np.ndarray:
    """Compute a model's outputs with weights drawn from the posterior.

    All rows of a draw have the same weights, so that what several rows say together
    can be computed of each draw. The error of an observation is not in them: what is
    drawn is the output, for instance a mean or a logit.

    Args:
        model: A model with one output.
        x: See `predictive_mean`.
        draws: Likewise.
        activation: Applied to the outputs.
        seed: See `predictive_mean`.

    Returns:
        Of the outputs' shape, with a leading axis of length `draws`.

    Raises:
        TypeError: If `draws` is not a number.
        ValueError: If it is less than 1, or there is no variational layer.
    """
    draws = _validate.positive_int("draws", draws)
    return np.stack(list(_drawn(model, x, draws, activation, seed)))


def predictive_intervals(
    model: keras.Model,
    x: Nest,
    level: float = 0.95,
    *,
    draws: int = 1000,
    activation: Callable[[Tensor], Tensor] | None = None,
    seed: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the central interval in which each output lies.

    They are quantiles of `predictive_samples`, and know as little as the posterior of
    the noise of private training, or of weights that depend on each other.

    Args:
        model: A model with one output.
        x: See `predictive_mean`.
        level: Probability under the posterior, between 0 and 1.
        draws: How many draws of the weights, at least ``2 / (1 - level)``.
        activation: See `predictive_samples`.
        seed: See `predictive_mean`.

    Returns:
        Lower and upper ends, of the outputs' shape.

    Raises:
        TypeError: If `level` or `draws` is not a number.
        ValueError: If `level` is out of its range, `draws` is too small for it, or
            there is no variational layer.

    Example:
        >>> model = keras.Sequential([
        ...     keras.Input((2,)),
        ...     tfdp.variational.VariationalDense(1, number_of_examples=100),
        ... ])
        >>> low, high = predictive_intervals(model, np.ones((3, 2)), 0.9)
        >>> bool(np.all(low < high)), low.shape
        (True, (3, 1))
    """
    level = _validate.probability("level", level)
    draws = _validate.positive_int("draws", draws)
    outside = (1 - level) / 2
    # But for rounding: 20 draws are enough for 0.9.
    least = math.ceil(1 / outside - 1e-6)
    if draws < least:
        raise ValueError(
            "`draws` must be at least 2 / (1 - level): of fewer, none is expected "
            f"beyond an end. Received: draws={draws}, level={level}. Use "
            f"`draws={least}` or more."
        )
    samples = predictive_samples(
        model, x, draws=draws, activation=activation, seed=seed
    )
    low, high = np.quantile(samples, (outside, 1 - outside), axis=0)
    return low, high


def _drawn(
    model: keras.Model,
    x: Nest,
    draws: int,
    activation: Callable[[Tensor], Tensor] | None,
    seed: int | None,
) -> Iterator[np.ndarray]:
    """Yield the outputs of one draw of the weights after the other."""
    model = unwrapped(model)
    x = _tree.map_tensors(tf.convert_to_tensor, x)
    if not model.built:
        model(x)
    samples = posterior_samples(model, draws, seed=seed)
    posteriors = dict(weights_by_name(model))

    @tf.function
    def outputs(drawn: dict[str, Tensor]) -> Tensor:
        values = []
        for name, (mean, rho) in posteriors.items():
            # A posterior of no width at what was drawn.
            certain = tf.fill(rho.shape, tf.constant(-np.inf, rho.dtype))
            values += [(mean, drawn[name]), (rho, certain)]
        with keras.StatelessScope(state_mapping=values):
            y = model(x, training=False)
        return y if activation is None else activation(y)

    for n in range(draws):
        drawn = {name: tf.constant(of[n]) for name, of in samples.items()}
        yield np.asarray(outputs(drawn))
