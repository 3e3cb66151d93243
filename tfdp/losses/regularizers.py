"""Weight regularizers: their gradients, and how far a posterior is from its prior."""

import contextlib
import math
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf
from keras import ops

from tfdp import _keras, _validate
from tfdp._types import Config, Tensor, Variable
from tfdp.clipping import at_least_float32


def gradient_of(
    regularizer: keras.regularizers.Regularizer, variable: Variable
) -> Tensor:
    """Differentiate a regularizer by its variable, which no data enter.

    Args:
        regularizer: A Keras regularizer.
        variable: A Keras variable.

    Returns:
        At least float32, of the variable's shape.
    """
    value = at_least_float32(tf.convert_to_tensor(variable))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(value)
        penalty = regularizer(value)
    gradient: Tensor = tape.gradient(
        penalty, value, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return gradient


@keras.saving.register_keras_serializable(package="tfdp")
class GaussianDivergence(keras.regularizers.Regularizer):
    """One part of a Kullback-Leibler divergence, divided by the number of examples.

    From a prior ``N(0, s^2)`` the divergence of ``N(mu, sigma^2)`` is the sum of a
    part of the means and of one of the scales::

        mu^2 / (2 s^2)    and    (sigma^2 / s^2 - 1 - ln(sigma^2 / s^2)) / 2

    so that each variable has its part as a weight regularizer, and Keras adds them up to
    the whole. Weights of these means and scales that vary together, by factors v as in
    `tfdp.variational.VariationalDense(rank=r)`, add what they tell about each other,
    minus half the logarithm of their correlation matrix's determinant::

        (sum_i ln(1 + |v_i|^2) - ln det(I_r + V^T V)) / 2

    by the matrix determinant lemma: the whole is the exact divergence again. The loss of a batch is then minus the evidence lower bound, divided by N.
    That takes a `weight` of 1, so that the divergence counts 1 / N: with less of it the
    posterior is too narrow, or has no width at all.

    Args:
        part: `"mean"` for a variable of mu; `"scale"` for one of
            ``ln(exp(sigma) - 1)``; `"factors"` for one of v, of shape ``(..., r)``.
        prior_scale: s, positive.
        number_of_examples: N, a public number of at least 2.
        kl: `"outside"`: it is added after the noise, as no data enter it.
            `"inside"`: it is part of the loss of each example, and clipped with it.
        weight: What the divergence is multiplied by. A variable may change from step to
            step; it is saved by the layer that has made it.
    """

    def __init__(
        self,
        part: str,
        *,
        prior_scale: float,
        number_of_examples: int,
        kl: str = "outside",
        weight: float | Variable = 1.0,
    ) -> None:
        self.part = _validate.one_of("part", part, ("mean", "scale", "factors"))
        self.prior_scale = _validate.positive("prior_scale", prior_scale)
        self.number_of_examples = checked_number(number_of_examples)
        self.kl = _validate.one_of("kl", kl, ("outside", "inside"))
        self.weight = weight

    @property
    def is_of_each_example(self) -> bool:
        """Whether it is part of what is clipped."""
        return self.kl == "inside"

    def __call__(self, x: Variable | Tensor) -> Tensor:
        """Return the part for a variable, times the weight, divided by N."""
        if self.part == "mean":
            total = ops.sum(ops.square(x)) / (2 * self.prior_scale**2)
        elif self.part == "factors":
            total = _told_about_each_other(x)
        else:
            scale = ops.softplus(x)
            # Far below zero the scale is exp(x), and then too small for a logarithm.
            log_scale = ops.log(ops.softplus(ops.maximum(x, -15.0)))
            log_scale = ops.where(x < -15.0, ops.convert_to_tensor(x), log_scale)
            log_ratio = log_scale - math.log(self.prior_scale)
            ratio = ops.square(scale / self.prior_scale)
            total = ops.sum(ratio - 1 - 2 * log_ratio) / 2
        return ops.cast(self.weight, total.dtype) * total / self.number_of_examples

    def get_config(self) -> Config:
        """Return the arguments."""
        return {
            "part": self.part,
            "prior_scale": self.prior_scale,
            "number_of_examples": self.number_of_examples,
            "kl": self.kl,
        }


def _told_about_each_other(factors: Variable | Tensor) -> Tensor:
    """Return minus half the log-determinant of the correlation matrix of weights."""
    # Sums over all weights almost cancel.
    v = ops.cast(ops.reshape(factors, (-1, factors.shape[-1])), "float64")
    gram = ops.matmul(ops.transpose(v), v) + ops.eye(v.shape[-1], dtype="float64")
    # Of a Cholesky factor, the determinant is the square of the diagonal's product.
    half = ops.sum(ops.log(ops.diagonal(ops.cholesky(gram))))
    total = ops.sum(ops.log1p(ops.sum(ops.square(v), axis=-1))) / 2 - half
    return ops.cast(total, factors.dtype)


def checked_number(number_of_examples: object) -> int:
    """Return a number of examples over which a divergence is divided, or raise."""
    fix = "Use `number_of_examples=len(x_train)`."
    number = _validate.positive_int("number_of_examples", number_of_examples, fix)
    if number == 1:
        raise ValueError(
            "`number_of_examples` must be at least 2: divided by 1, the loss of each "
            f"example would have the whole divergence. Received: number_of_examples=1. "
            f"{fix}"
        )
    return number


def check_number_of_examples(
    variables: Iterable[Variable], number: int | None, *, rows: int = 0
) -> None:
    """Refuse divergences that are divided by another number than that of the data.

    Args:
        variables: Trainable variables.
        number: Examples of the data; None if not known.
        rows: How many there are at least.

    Raises:
        ValueError: If one is. The whole divergence would be in each example's loss if
            it were divided by 1.
    """
    found = {
        variable.path: variable.regularizer.number_of_examples
        for variable in variables
        if isinstance(variable.regularizer, GaussianDivergence)
    }
    wrong = [
        f"`{path}` (number_of_examples={of_variable})"
        for path, of_variable in found.items()
        if of_variable < rows or number not in (None, of_variable)
    ]
    if wrong:
        raise ValueError(
            "`number_of_examples` must be that of the training data: an example's "
            "share of the divergence from the prior is KL / number_of_examples. "
            f"Received: {', '.join(wrong)}, and data of {number or rows} examples"
            f"{'' if number else ' or more'}. Use `number_of_examples="
            f"{number or 'len(x_train)'}`."
        )


@contextlib.contextmanager
def unread(variables: Iterable[Variable], subject: str) -> Iterator[None]:
    """Refuse a loss that reads the posterior of weights by itself.

    Args:
        variables: Trainable variables.
        subject: What the error is about; it is evaluated inside.

    Raises:
        ValueError: If a variable was read that has a `GaussianDivergence`.
    """
    with tf.GradientTape() as tape:
        yield
    read = {id(variable) for variable in tape.watched_variables()}
    found = [
        f"`{variable.path}`"
        for variable in variables
        if isinstance(variable.regularizer, GaussianDivergence)
        and any(id(known) in read for known in _keras.tensorflow_variables(variable))
    ]
    if found:
        raise ValueError(
            f"{subject} must depend on outputs and targets only: variational layers "
            "add their divergence from the prior themselves, KL / N for an example, "
            "and with all of it in the loss of each example it would count N times. "
            f"Received: a loss that reads {', '.join(found)}. Use "
            "`loss='binary_crossentropy'`, without the divergence."
        )
