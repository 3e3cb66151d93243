"""Gaussian noise, independent in every step. No other module draws any."""

import math

import keras
import tensorflow as tf

from tfdp._types import Tensor
from tfdp.clipping import ClippedSum, at_least_float32
from tfdp.mechanisms.mechanism import Mechanism


@keras.saving.register_keras_serializable("tfdp")
class Gaussian(Mechanism):
    """Independent Gaussian noise in every step [1]_.

    Args:
        noise_seed: See `Mechanism`.

    Example:
        >>> optimizer = tfdp.optimizers.DPSGD(
        ...     0.1,
        ...     l2_norm_clip=1.0,
        ...     noise_multiplier=1.1,
        ...     mechanism=tfdp.mechanisms.Gaussian(),
        ... )

    References:
        .. [1] Abadi et al., "Deep Learning with Differential Privacy", CCS 2016,
           Algorithm 1. https://arxiv.org/abs/1607.00133
    """

    def noised(
        self,
        clipped_sum: ClippedSum,
        *,
        noise_multiplier: Tensor,
        stream: Tensor,
        begins: Tensor | bool = True,
    ) -> list[Tensor]:
        """Add to each sum noise of standard deviation ``noise_multiplier * C``."""
        del begins
        return add_noise(clipped_sum, noise_multiplier=noise_multiplier, stream=stream)


def add_noise(
    clipped_sum: ClippedSum, *, noise_multiplier: Tensor, stream: Tensor
) -> list[Tensor]:
    """Add to each sum Gaussian noise of ``noise_multiplier * C``.

    Args:
        clipped_sum: What to noise; its own C is the one that counts.
        noise_multiplier: Scalar tensor; 0 adds nothing.
        stream: Of the step.

    Returns:
        The noised sums, in order, of the sums' shapes; float64 where the sum
        is, float32 otherwise.
    """
    clip = clipped_sum.l2_norm_clip
    stddev = tf.cast(noise_multiplier, clip.dtype) * clip
    noised = []
    for number, gradient in enumerate(map(at_least_float32, clipped_sum.gradients)):
        noise = standard_normal(gradient.shape, _seed(stream, number))
        noised.append(
            gradient + tf.cast(noise, gradient.dtype) * tf.cast(stddev, gradient.dtype)
        )
    return noised


# Grid of replies: its spacing in standard deviations is 2**-18 or half of that.
_GRID_BITS = 18


def add_reply_noise(
    clipped_sum: ClippedSum, *, noise_multiplier: Tensor, stream: Tensor
) -> list[Tensor]:
    """Add noise to what others will see in full, number by number.

    Sum and noise are first brought on one grid, which depends on C and the noise
    multiplier alone, the sum towards zero, so that it stays clipped. Noise on a
    grid plus a number off it would show which numbers were zero [1]_. The noise
    reaches to 12 standard deviations.

    Args:
        clipped_sum: See `add_noise`.
        noise_multiplier: See `add_noise`.
        stream: See `add_noise`; not to be used there.

    Returns:
        See `add_noise`.

    References:
        .. [1] Mironov, "On Significance of the Least Significant Bits for
           Differential Privacy", CCS 2012.
           https://doi.org/10.1145/2382196.2382264
    """
    stddev = tf.cast(noise_multiplier, tf.float64) * tf.cast(
        clipped_sum.l2_norm_clip, tf.float64
    )
    exponent = tf.math.ceil(tf.math.log(stddev) / math.log(2.0))
    grid = tf.pow(tf.constant(2.0, tf.float64), exponent - _GRID_BITS)
    noised = []
    for number, gradient in enumerate(map(at_least_float32, clipped_sum.gradients)):
        noise = long_normal(gradient.shape, _seed(stream, number))
        steps = tf.round(noise * (stddev / grid))
        wide = tf.cast(gradient, tf.float64)
        towards_zero = tf.sign(wide) * tf.floor(tf.abs(wide) / grid)
        # Without noise there is no grid.
        reply = tf.where(stddev > 0, (towards_zero + steps) * grid, wide)
        noised.append(tf.cast(reply, gradient.dtype))
    return noised


def noise_of_query(
    shape: tuple[int, ...], *, stream: Tensor, number: int = 0
) -> Tensor:
    """Draw noise for what a step releases beside its gradients.

    Args:
        shape: Of the release.
        stream: See `add_noise`.
        number: Of the query, from 0; another one for each query of a step.

    Returns:
        Standard normal numbers, float32, independent of the gradients' noise.
    """
    return standard_normal(tf.TensorShape(shape), _seed(stream, -1 - number))


def _seed(stream: Tensor, number: int) -> Tensor:
    """Return the seed of one variable's noise, or of a query's, in a step."""
    return stream + tf.constant([0, number], tf.int64)


def long_normal(shape: tf.TensorShape, seed: Tensor) -> Tensor:
    """Draw standard normal numbers with tails that reach past 12 sigma.

    As `standard_normal`, from 106 random bits for the radius and 53 for the angle.

    Args:
        shape: A fully defined shape.
        seed: int64, shape ``(2,)``. Distinct seeds give independent streams.

    Returns:
        float64 tensor of that shape.
    """
    half = (shape.num_elements() + 1) // 2
    bits = tf.random.stateless_uniform(
        [3, half], seed, minval=None, maxval=None, dtype=tf.int64, alg="philox"
    )
    # The sign bit and ten others stay unused.
    coarse, fine, angle = tf.unstack(tf.cast(bits & (2**53 - 1), tf.float64) * 2.0**-53)
    uniform = tf.minimum(coarse + (fine * 2.0**-53 + 2.0**-106), 1.0)
    radius = tf.sqrt(-2.0 * tf.math.log(uniform))
    return _normals(radius, angle * (2.0 * math.pi), shape)


def standard_normal(shape: tf.TensorShape, seed: Tensor) -> Tensor:
    """Draw standard normal numbers with tails that reach past 7 sigma.

    Box and Muller's method on Philox bits. The radius gets 39 random bits: on a
    float32 uniform it would end at 5.65 sigma, which alone is worth more than a
    delta of 1e-5 over a long training.

    Args:
        shape: A fully defined shape.
        seed: int64, shape ``(2,)``. Distinct seeds give independent streams.

    Returns:
        float32 tensor of that shape.
    """
    half = (shape.num_elements() + 1) // 2
    bits = tf.random.stateless_uniform(
        [2, half], seed, minval=None, maxval=None, dtype=tf.int32, alg="philox"
    )
    coarse = tf.cast(bits[0] & 0x7FFFFFFF, tf.float32) * 2.0**-31
    fine = tf.cast((bits[1] & 255) + 1, tf.float32) * 2.0**-39
    radius = tf.sqrt(-2.0 * tf.math.log(tf.minimum(coarse + fine, 1.0)))
    angle = tf.cast(bits[1] & ~255, tf.float32) * (math.pi * 2.0**-31)
    return _normals(radius, angle, shape)


def _normals(radius: Tensor, angle: Tensor, shape: tf.TensorShape) -> Tensor:
    """Take Box and Muller's two numbers from each radius and angle."""
    pairs = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 0)
    return tf.reshape(pairs[: shape.num_elements()], shape)
