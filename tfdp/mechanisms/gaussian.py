"""The privacy noise. No other module draws any."""

import math
import os
import secrets
import warnings
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import _keras, _validate
from tfdp.clipping import ClippedSum, at_least_float32

# A forked process has the keys of its parent, and must not draw the parent's noise.
_sources: weakref.WeakSet["NoiseSource"] = weakref.WeakSet()


def _renew_keys() -> None:
    for source in _sources:
        # A child cannot use its parent's GPU, nor draw with a key that lies there.
        if not source.is_on_gpu:
            source.renew_key()


os.register_at_fork(after_in_child=_renew_keys)


class NoiseSource:
    """A secret key, and the Gaussian noise that it gives.

    The generator is Philox, counter-based: the noise of a step is a function of
    the key, the number of the step and the number of the variable, so no two of
    them share a stream. The key lives in a variable that is never saved, exported
    or made a constant of a graph. `keras.utils.set_random_seed`, TensorFlow's
    global seed and NumPy's global generator have no influence.

    Philox is not certified as cryptographically secure, and Gaussian noise in
    floating point does not protect single released gradients against attacks on
    their low-order bits [1]_.

    Args:
        seed: None for a key from the operating system. An integer makes the
            noise reproducible, which is for tests: whoever knows it can subtract
            the noise, and a warning says so.

    References:
        .. [1] Mironov, "On Significance of the Least Significant Bits for
           Differential Privacy", CCS 2012. https://doi.org/10.1145/2382196.2382264
    """

    def __init__(self, seed: int | None = None) -> None:
        """Take a fresh key, or the one that `seed` stands for."""
        if seed is not None:
            seed = _validate.seed("noise_seed", seed)
            warnings.warn(
                "The privacy noise is reproducible: whoever knows the seed can "
                f"subtract it. Received: noise_seed={seed}. For a run that is to "
                "be private leave `noise_seed` out.",
                stacklevel=3,
            )
        self.seed = seed
        _sources.add(self)
        with tf.init_scope(), _keras.unmirrored_variables():
            self._key = tf.Variable(self._new_key(), trainable=False, name="noise_key")
            self._number = tf.Variable(
                0, trainable=False, dtype=tf.int64, name="noise_number"
            )

    @property
    def is_on_gpu(self) -> bool:
        """Whether the key lies in the memory of a GPU."""
        return "GPU" in str(self._key.device)

    def renew_key(self) -> None:
        """Take a fresh key from the operating system; a seeded key stays."""
        self._key.assign(self._new_key())

    def _new_key(self) -> np.ndarray:
        if self.seed is None:
            return np.frombuffer(secrets.token_bytes(16), np.int64)
        return (
            np.random
            .SeedSequence(self.seed)
            .generate_state(2, np.uint64)
            .view(np.int64)
        )

    @property
    def number(self) -> tf.Tensor:
        """Of the next step, a scalar int64 tensor."""
        return self._number.read_value()

    def count(self) -> None:
        """Count one step, as an operation of the graph."""
        self._number.assign_add(1)

    def skip_to(self, number: int) -> None:
        """Leave out the numbers before this one: a seeded key may have used them."""
        self._number.assign(max(int(self._number.numpy()), number))

    def stream(self, step: tf.Tensor) -> tf.Tensor:
        """Return what all the noise of a step is a function of, with this key.

        Who knows it can subtract the noise: it is as secret as the key.

        Args:
            step: Scalar int64 tensor, a number that never repeats for this key.

        Returns:
            int64, shape ``(2,)``.
        """
        return self._key + tf.stack([step, tf.zeros_like(step)])

    def add_noise_of_each(
        self,
        clipped_sum: ClippedSum,
        *,
        noise_multiplier: tf.Tensor,
        contributors: int,
        step: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Add the noise of each of several, who do not trust whoever adds up.

        The same distribution as one draw of ``sqrt(contributors)`` times the noise.

        Args:
            clipped_sum: See `add_noise`.
            noise_multiplier: Of each one's own noise, a scalar tensor.
            contributors: How many there are.
            step: As in `stream`; not to be used with the same key there.

        Returns:
            See `add_noise`.
        """

        def add_one(number: tf.Tensor, sums: list[tf.Tensor]) -> Any:
            noised = add_noise(
                clipped_sum._replace(gradients=sums),
                noise_multiplier=noise_multiplier,
                stream=self.stream(step * contributors + number),
            )
            return number + 1, noised

        sums: list[tf.Tensor] = list(map(at_least_float32, clipped_sum.gradients))
        _, sums = tf.while_loop(
            lambda number, _: number < contributors,
            add_one,
            (tf.constant(0, tf.int64), sums),
        )
        return sums


def add_noise(
    clipped_sum: ClippedSum, *, noise_multiplier: tf.Tensor, stream: tf.Tensor
) -> list[tf.Tensor]:
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
    clipped_sum: ClippedSum, *, noise_multiplier: tf.Tensor, stream: tf.Tensor
) -> list[tf.Tensor]:
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


def noise_of_query(shape: tuple[int, ...], *, stream: tf.Tensor) -> tf.Tensor:
    """Draw noise for what a step releases beside its gradients.

    Args:
        shape: Of the release.
        stream: See `add_noise`; asked once for each step.

    Returns:
        Standard normal numbers, float32, independent of the gradients' noise.
    """
    return standard_normal(tf.TensorShape(shape), _seed(stream, -1))


def _seed(stream: tf.Tensor, number: int) -> tf.Tensor:
    """Return the seed of one variable's noise, or of a query's, in a step."""
    return stream + tf.constant([0, number], tf.int64)


def long_normal(shape: tf.TensorShape, seed: tf.Tensor) -> tf.Tensor:
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


def standard_normal(shape: tf.TensorShape, seed: tf.Tensor) -> tf.Tensor:
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


def _normals(radius: tf.Tensor, angle: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Take Box and Muller's two numbers from each radius and angle."""
    pairs = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 0)
    return tf.reshape(pairs[: shape.num_elements()], shape)
