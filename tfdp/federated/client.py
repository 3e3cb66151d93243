"""What a client does before anything leaves it: clip its gradient, and noise it."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdp._types import Array, Loss, Nest, Tensor
from tfdp.clipping import ClippedSum, clip_and_sum
from tfdp.errors import NotPrivateError
from tfdp.mechanisms import Gaussian
from tfdp.mechanisms.local import add_reply_noise
from tfdp.optimizers.arguments import checked_clip, checked_noise_multiplier
from tfdp.training.loops import clipped_gradients


def client_update(
    model: keras.Model,
    loss: Loss,
    x: Nest,
    y: Nest,
    sample_weight: Nest = None,
    *,
    l2_norm_clip: float,
    noise_multiplier: float,
) -> list[tf.Tensor]:
    """Compute what a client sends: the noised gradient of its own examples.

    The gradient of the mean loss over all its examples, clipped to C, plus Gaussian
    noise of standard deviation ``noise_multiplier * C``. A server averages what
    clients send, each with the same weight.

    Guarantees:
        The reply is (epsilon, delta)-locally private for the noise multiplier that
        `calibrate_local_noise_multiplier` returns for them, and costs what
        `local_epsilon` says, to the last bit: gradient and noise lie on one public
        grid, so that no number of the reply tells whether the gradient's was zero.
        Every call draws noise from a fresh secret key of the operating system. A
        gradient that is not finite counts as zero.

    Args:
        model: A Keras model with the server's weights.
        loss: See `tfdp.clipped_gradients`.
        x: The client's inputs, leading axis N; at least one row.
        y: Targets likewise.
        sample_weight: None, or weights of the examples' losses.
        l2_norm_clip: Radius C of the clip ball, from the server.
        noise_multiplier: Standard deviation of the noise over C, at least 0; 0 is no
            privacy, and warns.

    Returns:
        One tensor for each of ``model.trainable_variables``.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a number is out of its range, the client has no example, or the
            model or the loss is refused by `tfdp.clipped_gradients`.
        NotPrivateError: Inside a `tf.function`, which would repeat the noise.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> update = tfdp.federated.client_update(
        ...     model,
        ...     "mse",
        ...     np.ones((5, 2), "float32"),
        ...     np.ones((5, 1), "float32"),
        ...     l2_norm_clip=0.05,
        ...     noise_multiplier=1.404227,
        ... )
        >>> [gradient.shape.as_list() for gradient in update]
        [[2, 1], [1]]
    """
    clip = checked_clip(l2_norm_clip)
    noise = checked_local_noise(noise_multiplier)
    clipped_sum = clipped_gradients(
        model, loss, x, y, sample_weight, l2_norm_clip=clip, num_microbatches=1
    )
    if not clipped_sum.norms.shape[0]:
        raise ValueError(
            "A client needs an example to compute a gradient from. Received: x with "
            "0 rows. Let a client without examples send "
            "`privatize([np.zeros(v.shape) for v in model.trainable_variables], ...)`."
        )
    return _noised(clipped_sum, noise)


def privatize(
    update: Sequence[Array | Tensor], *, l2_norm_clip: float, noise_multiplier: float
) -> list[tf.Tensor]:
    """Clip an update as a whole, and noise it.

    For clients whose update is no plain gradient, such as the difference that some
    steps of their own have made. See `client_update`, also for the guarantees.

    Args:
        update: Arrays of floating point numbers, of any shapes.
        l2_norm_clip: Radius C of the clip ball of all arrays together.
        noise_multiplier: Standard deviation of the noise over C, at least 0; 0 is no
            privacy, and warns.

    Returns:
        One tensor for each array, float64 where it is, and float32 otherwise.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a number is out of its range.
        NotPrivateError: Inside a `tf.function`, which would repeat the noise.

    Example:
        >>> private = tfdp.federated.privatize(
        ...     [np.ones((3, 2)), np.zeros(2)], l2_norm_clip=0.05, noise_multiplier=1.4
        ... )
        >>> [array.shape.as_list() for array in private]
        [[3, 2], [2]]
    """
    clip = checked_clip(l2_norm_clip)
    noise = checked_local_noise(noise_multiplier)
    if not isinstance(update, (list, tuple)) or not update:
        raise TypeError(
            "`update` must be a list of arrays, of one at least. Received: update of "
            f"type {type(update).__name__}. Use `privatize([array], ...)`."
        )
    arrays = [tf.convert_to_tensor(array) for array in update]
    for place, array in enumerate(arrays):
        if not array.dtype.is_floating:
            raise TypeError(
                "`update` must hold floating point numbers, which can be noised. "
                f"Received: update[{place}] of dtype {array.dtype.name}. Leave it out."
            )
    is_wide = any(array.dtype == tf.float64 for array in arrays)
    radius = tf.constant(clip, tf.float64 if is_wide else tf.float32)
    sums, norms = clip_and_sum(
        [array[tf.newaxis] for array in arrays],
        is_empty=tf.constant([False]),
        l2_norm_clip=radius,
    )
    return _noised(ClippedSum(sums, norms, radius, 1), noise)


def checked_local_noise(noise_multiplier: float) -> float:
    """Return a client's noise multiplier, with a warning if it is 0.

    Args:
        noise_multiplier: A number.

    Raises:
        ValueError: If it is negative or not finite.
    """
    return checked_noise_multiplier(
        noise_multiplier,
        "tfdp.federated.calibrate_local_noise_multiplier(8.0, delta=1e-7)",
    )


def _noised(clipped_sum: ClippedSum, noise_multiplier: float) -> list[tf.Tensor]:
    """Add noise that nobody else can draw."""
    if not tf.executing_eagerly():
        raise NotPrivateError(
            "A client's noise is drawn with a key of its own for every reply, and a "
            "`tf.function` would keep the first one. Received: a call inside of one. "
            "Call `client_update` or `privatize` outside of `tf.function`."
        )
    # A key of its own, which nobody else has and no other reply gets.
    stream = Gaussian().stream(tf.constant(0, tf.int64))
    return add_reply_noise(
        clipped_sum,
        noise_multiplier=tf.constant(noise_multiplier, tf.float64),
        stream=stream,
    )
