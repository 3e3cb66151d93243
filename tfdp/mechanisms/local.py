"""Noise that each contributor adds, because nobody trusts who adds up."""

import math

import tensorflow as tf

from tfdp._types import Tensor
from tfdp.clipping import ClippedSum, at_least_float32
from tfdp.mechanisms.mechanism import box_muller, philox_bits, seed_of

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
        noise = long_normal(gradient.shape, seed_of(stream, number))
        steps = tf.round(noise * (stddev / grid))
        wide = tf.cast(gradient, tf.float64)
        towards_zero = tf.sign(wide) * tf.floor(tf.abs(wide) / grid)
        # Without noise there is no grid.
        reply = tf.where(stddev > 0, (towards_zero + steps) * grid, wide)
        noised.append(tf.cast(reply, gradient.dtype))
    return noised


def long_normal(shape: tf.TensorShape, seed: Tensor) -> Tensor:
    """Draw standard normal numbers with tails that reach past 12 sigma.

    As `standard_normal`, from 106 random bits for the radius and 53 for the angle.

    Args:
        shape: A fully defined shape.
        seed: int64, shape ``(2,)``. Distinct seeds give independent streams.

    Returns:
        float64 tensor of that shape.
    """
    numbers = shape.num_elements()
    half = (numbers + 1) // 2
    bits = philox_bits([3, half], seed, tf.int64)
    # The sign bit and ten others stay unused.
    coarse, fine, angle = tf.unstack(tf.cast(bits & (2**53 - 1), tf.float64) * 2.0**-53)
    uniform = tf.minimum(coarse + (fine * 2.0**-53 + 2.0**-106), 1.0)
    radius = tf.sqrt(-2.0 * tf.math.log(uniform))
    pairs = box_muller(radius, angle * (2.0 * math.pi))
    return tf.reshape(pairs[:numbers], shape)
