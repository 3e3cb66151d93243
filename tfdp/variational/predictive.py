"""What a posterior predicts: outputs under weights that are drawn from it."""

from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdp import _tree, _validate
from tfdp._types import Nest, Tensor
from tfdp.variational.posterior import posterior_samples, posteriors_of, unwrapped


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
    return np.asarray(sum(_outputs(model, x, draws, activation, seed)) / draws)


def predictive_samples(
    model: keras.Model,
    x: Nest,
    *,
    draws: int = 100,
    activation: Callable[[Tensor], Tensor] | None = None,
    seed: int | None = None,
) -> np.ndarray:
    """Return a model's outputs under weights drawn from the posterior.

    One draw of all weights serves all inputs, so that the samples of two inputs may be
    compared draw by draw. It is post-processing of the posterior, and costs no privacy
    beyond that of `x`, if `x` is private.

    Args:
        model: See `predictive_mean`.
        x: Likewise.
        draws: Likewise.
        activation: Applied to the outputs.
        seed: None for one of the operating system's.

    Returns:
        The outputs, with a leading axis of length `draws`.

    Raises:
        TypeError: If `draws` is not a number.
        ValueError: If it is less than 1, or there is no variational layer.

    Example:
        >>> model = keras.Sequential([
        ...     keras.Input((2,)),
        ...     tfdp.variational.VariationalDense(1, number_of_examples=100),
        ... ])
        >>> predictive_samples(model, np.ones((3, 2)), draws=10).shape
        (10, 3, 1)
    """
    draws = _validate.positive_int("draws", draws)
    return np.stack([*_outputs(model, x, draws, activation, seed)])


def predictive_intervals(
    model: keras.Model,
    x: Nest,
    level: float = 0.95,
    *,
    draws: int = 1000,
    activation: Callable[[Tensor], Tensor] | None = None,
    seed: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the central interval in which each output lies under the posterior.

    They are intervals of what the model says, such as a mean or a probability: what an
    observation scatters around that is not in them. Like
    `tfdp.variational.credible_intervals` they know nothing of the noise of private
    training.

    Args:
        model: See `predictive_mean`.
        x: Likewise.
        level: Probability under the posterior, between 0 and 1.
        draws: How many draws of the weights; all outputs are held in memory.
        activation: Applied to the outputs.
        seed: None for one of the operating system's.

    Returns:
        Lower and upper ends, each of the outputs' shape.

    Raises:
        TypeError: If `level` or `draws` is not a number.
        ValueError: If one is out of its range, or there is no variational layer.

    Example:
        >>> model = keras.Sequential([
        ...     keras.Input((2,)),
        ...     tfdp.variational.VariationalDense(1, number_of_examples=100),
        ... ])
        >>> low, high = predictive_intervals(model, np.ones((3, 2)), 0.9)
        >>> bool(np.all(low < high))
        True
    """
    level = _validate.probability("level", level)
    samples = predictive_samples(
        model, x, draws=draws, activation=activation, seed=seed
    )
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def _outputs(
    model: keras.Model,
    x: Nest,
    draws: int,
    activation: Callable[[Tensor], Tensor] | None,
    seed: int | None,
) -> Iterator[np.ndarray]:
    """Yield the outputs under one draw of all weights after the other."""
    model = unwrapped(model)
    x = _tree.map_tensors(tf.convert_to_tensor, x)
    if not model.built:
        model(x)
    samples = posterior_samples(model, draws, seed=seed)
    posteriors = dict(posteriors_of(model))

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
