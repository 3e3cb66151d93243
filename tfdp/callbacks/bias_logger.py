"""Shows what clipping does to the gradient."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree, _validate
from tfdp._types import Nest, Tensor
from tfdp.clipping import ClippedSum
from tfdp.data.training_data import number_of_examples
from tfdp.losses import SAT
from tfdp.optimizers import DPOptimizer
from tfdp.training.callback import NonprivateStep, StepCallback

_NAMES = (
    "bias_magnitude",
    "bias_scale",
    "bias_direction",
    "clip_cosine",
    "clipped_fraction",
    "norm_q10",
    "norm_q50",
    "norm_q90",
)
_QUANTILES = (0.1, 0.5, 0.9)
_OF_ASCENT = "ascent_cosine"
_NOTHING = np.full(len(_NAMES) + 1, math.nan)

# Shorter than any gradient that counts.
_SHORT = 1e-12


class BiasLogger(StepCallback):
    """Logs how far clipping moves the mean gradient, and in which direction.

    With D the expected number of units, g the sum of the units' gradients over D and
    g_clip that of the clipped ones, the bias is ``g_clip - g``: noise has a mean of
    zero, so it comes from clipping alone. It has two parts,
    ``g_clip = a g + c`` with c orthogonal to g [1]_. Every logged step adds to the
    logs, which keep them until the next one,

    * `bias_magnitude`, ``||g_clip - g||``,
    * `bias_scale`, a: 1 if the length is kept,
    * `bias_direction`, ``||c||``: 0 if the direction is kept,
    * `clip_cosine`, the cosine between g_clip and g,
    * `clipped_fraction`, the share of units whose norm exceeds C,
    * `norm_q10`, `norm_q50` and `norm_q90`, quantiles of the units' norms,
    * under `tfdp.losses.SAT` and `BAM`, `ascent_cosine`: the cosine between g and the
      gradient that was released last, or the mean of those between g and each unit's
      own,

    each with the prefix `nonprivate_`, because no noise covers them: do not publish
    them, nor choose C by them. With `public_data` they are those of public rows, with
    the prefix `public_`, and nothing private leaves.

    Units' gradients are those of the plain loss at the weights, under `SAT` and `BAM`
    too. A logged step clips its batch once more, under the same dropout masks, twice
    under `SAT` and three times under `BAM`; the others cost nothing. Steps without a row
    are not logged.

    Args:
        every: Steps from one logged step to the next; the first step of `fit` is
            logged.
        public_data: ``(x, y)`` or ``(x, y, sample_weight)``, arrays that are not
            private; None to look at the private batches.

    Raises:
        TypeError: If `every` is no whole number.
        ValueError: If `every` is not positive or `public_data` is no such tuple.

    Example:
        >>> logger = tfdp.callbacks.BiasLogger(every=50)

    References:
        .. [1] Knolle et al., "Bias-Aware Minimisation: Understanding and Mitigating
           Estimator Bias in Private SGD", 2023. https://arxiv.org/abs/2308.12018
    """

    def __init__(self, every: int = 50, public_data: Nest = None) -> None:
        super().__init__()
        self.every = _validate.positive_int("every", every)
        self.public_data = _checked_public_data(public_data)
        self.prefix = "nonprivate_" if public_data is None else "public_"
        self._names: tuple[str, ...] = _NAMES
        with tf.init_scope(), _keras.unmirrored_variables():
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._values = tf.Variable(_NOTHING, trainable=False)

    def before_training(
        self, optimizer: DPOptimizer, planned_steps: int | None
    ) -> None:
        """Log the first step again."""
        self._steps.assign(0)
        self._values.assign(_NOTHING)

    def nonprivate_step(self, step: NonprivateStep) -> None:
        """Measure if it is the step's turn, in the training graph."""
        self._names = _NAMES if step.ascent is None else (*_NAMES, _OF_ASCENT)
        is_due = self._steps % self.every == 0
        self._steps.assign_add(1)

        def measure() -> bool:
            clipped, units = step.clipped_sum, step.expected_units
            clip, data = clipped.l2_norm_clip, self.public_data
            if data is not None or step.ascent is not None:
                clipped = step.clip(clip, data)
            if data is not None:
                units = tf.size(clipped.norms)
            whole = step.clip(tf.constant(math.inf, clip.dtype), data)
            measured = _measured(clipped, whole, tf.cast(units, tf.float64))
            cosine = tf.constant(math.nan, tf.float64)
            if isinstance(step.ascent, SAT):
                cosine = step.released.cosine_with(whole.gradients)
            elif step.ascent is not None:
                short = step.clip(tf.constant(_SHORT, clip.dtype), data)
                cosine = _mean_cosine(short, whole)
            self._values.assign(tf.concat([measured, cosine[None]], 0))
            return True

        has_rows = tf.size(step.clipped_sum.norms) > 0
        if self.public_data is not None:
            has_rows = tf.constant(True)
        tf.cond(is_due & has_rows, measure, lambda: False)

    def _log(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            for name, value in zip(self._names, self._values.numpy(), strict=False):
                logs[self.prefix + name] = float(value)


def _measured(clipped: ClippedSum, whole: ClippedSum, units: Tensor) -> Tensor:
    """Compute what is logged, in the order of `_NAMES`."""
    g_clip, g = _vector(clipped) / units, _vector(whole) / units
    square = tf.reduce_sum(tf.square(g))
    is_zero, zero, one = square == 0, tf.zeros_like(square), tf.ones_like(square)
    scale = tf.where(is_zero, one, tf.reduce_sum(g_clip * g) / square)
    norms = tf.cast(clipped.norms, tf.float64)
    clip = tf.cast(clipped.l2_norm_clip, tf.float64)
    exceeds = (norms > clip) | tf.math.is_nan(norms)
    return tf.stack([
        tf.norm(g_clip - g),
        scale,
        tf.where(is_zero, zero, tf.norm(g_clip - scale * g)),
        tf.where(is_zero, one, _cosine(g_clip, g)),
        tf.reduce_mean(tf.cast(exceeds, tf.float64)),
        *(_quantile(norms, share) for share in _QUANTILES),
    ])


def _vector(clipped_sum: ClippedSum) -> Tensor:
    """Return the sums of all variables as one vector."""
    sums = [tf.cast(each, tf.float64) for each in clipped_sum.gradients]
    return tf.concat([tf.reshape(each, [-1]) for each in sums], 0)


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine between two vectors, 0 where one is zero."""
    product = tf.reduce_sum(one * other)
    return tf.math.divide_no_nan(product, tf.norm(one) * tf.norm(other))


def _mean_cosine(short: ClippedSum, whole: ClippedSum) -> Tensor:
    """Return the mean cosine between units' gradients and their sum.

    Args:
        short: The units' gradients, all clipped: all have the same length.
        whole: The same gradients, none clipped.
    """
    total = _vector(whole)
    units = tf.cast(tf.size(short.norms), tf.float64)
    lengths = units * tf.cast(short.l2_norm_clip, tf.float64) * tf.norm(total)
    return tf.math.divide_no_nan(tf.reduce_sum(_vector(short) * total), lengths)


def _quantile(norms: Tensor, share: float) -> Tensor:
    """Return the least norm that at least this share of the norms does not exceed."""
    infinity = tf.constant(math.inf, norms.dtype)
    rising = tf.sort(tf.where(tf.math.is_nan(norms), infinity, norms))
    place = tf.math.ceil(share * tf.cast(tf.size(norms), tf.float64))
    return rising[tf.maximum(tf.cast(place, tf.int32) - 1, 0)]


def _checked_public_data(public_data: Nest) -> Any:
    """Return ``(x, y, sample_weight)`` as tensors, None for None."""
    if public_data is None:
        return None
    if not isinstance(public_data, tuple) or len(public_data) not in {2, 3}:
        raise ValueError(
            "`public_data` must be a tuple of arrays. Received: public_data of type "
            f"{type(public_data).__name__}. Use `BiasLogger(public_data=(x, y))`."
        )
    data = keras.utils.unpack_x_y_sample_weight(public_data)
    data = _tree.map_tensors(tf.convert_to_tensor, data)
    if not all(tensor.shape.rank for tensor in _tree.tensors(data)):
        raise ValueError(
            "`public_data` must hold arrays with rows. Received: numbers. Use "
            "`BiasLogger(public_data=(np.array(x), np.array(y)))`."
        )
    if number_of_examples(data) < 1:
        raise ValueError(
            "`public_data` must have rows. Received: arrays of 0 rows. Use "
            "`BiasLogger()` to look at the private batches."
        )
    return data
