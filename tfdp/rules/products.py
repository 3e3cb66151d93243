"""Sums of products, and how far rounding can take them from the truth."""

import numpy as np
import tensorflow as tf

# Features are summed in parts of so many: a sum of n alike numbers was seen to be off
# by n / 4 units of roundoff.
_PART = 256


def inner_products(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Multiply each row of `a` with each row of `b`.

    Args:
        a: Shape ``(U, T, d)``, static d.
        b: Shape ``(U, S, d)``.

    Returns:
        Shape ``(U, T, S)``, each off by `roundoff(d)` of the product of the rows'
        lengths at most.
    """
    size = a.shape[-1]
    if size <= _PART:
        return tf.matmul(a, b, transpose_b=True)
    total = tf.matmul(a[..., :_PART], b[..., :_PART], transpose_b=True)
    for first in range(_PART, size, _PART):
        part = slice(first, first + _PART)
        # One after the other, or all the products are held at once.
        with tf.control_dependencies([total]):
            total += tf.matmul(a[..., part], b[..., part], transpose_b=True)
    return total


def roundoff(size: int, dtype: tf.DType) -> float:
    """Bound the error of an inner product of `size` numbers."""
    return (min(size, _PART) / 4 + size / _PART) * _unit(dtype)


def squares_from_grams(
    gram_a: tf.Tensor, gram_g: tf.Tensor, *, error: float
) -> tf.Tensor:
    """Bound ``sum_{t,s} gram_a[t, s] gram_g[t, s]`` from above.

    A sum with cancelling summands can round to far too little, even below zero. What
    it can have lost is bounded by the same sum without signs, which the lengths of
    the factors bound: the diagonals hold their squares.

    Args:
        gram_a: Inner products, shape ``(U, T, T)``.
        gram_g: Likewise.
        error: How far both can be off, together, relative to the lengths.

    Returns:
        float64, shape ``(U,)``.
    """
    of_rows = tf.reduce_sum(gram_a * gram_g, 2)
    squares = tf.reduce_sum(tf.cast(of_rows, tf.float64), 1)
    lengths = tf.linalg.diag_part(gram_a) * tf.linalg.diag_part(gram_g)
    without_signs = tf.square(
        tf.reduce_sum(tf.cast(tf.sqrt(tf.maximum(lengths, 0)), tf.float64), 1)
    )
    positions = tf.cast(tf.shape(gram_a)[1], tf.float64)
    guard = error + positions * (_unit(gram_a.dtype) / 4)
    return tf.maximum(squares, 0) + guard * without_signs


def _unit(dtype: tf.DType) -> float:
    return float(np.finfo(dtype.as_numpy_dtype).eps) / 2
