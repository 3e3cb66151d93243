"""Sums of products, and how far rounding can take them from the truth."""

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from tfdp._types import Tensor
from tfdp.clipping import machine_epsilon, matmul_roundoff

# Features are summed in parts of so many, for a sum of n alike numbers was seen to be off
# by n / 4 units of roundoff. Not where hardware rounds the factors to more than that.
_PART = 256

# More numbers than a factor ever has.
_MOST_NUMBERS = 2.0**24


def matmul_by_unit(
    a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    """Multiply the matrices of each unit, ``(U, m, k)`` and ``(U, k, n)``."""
    # Not `tf.matmul`: it may broadcast, and where U is not known the gradient of what may
    # takes a dozen operations.
    return tf.raw_ops.BatchMatMul(x=a, y=b, adj_x=transpose_a, adj_y=transpose_b)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Sum the products of two tensors of one shape over all axes but the first.

    Args:
        a: Shape ``(U, ...)``.
        b: Likewise.

    Returns:
        Shape ``(U,)``.
    """
    size = a.shape[1:].num_elements()
    # -1 stands for one length only, and for none where there are no numbers.
    shape = [-1, 1, size] if size else [tf.shape(a)[0], 1, -1 if size is None else 0]
    rows = [tf.reshape(each, shape) for each in (a, b)]
    return tf.reshape(matmul_by_unit(*rows, transpose_b=True), [-1])


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Multiply each row of `a` with each row of `b`.

    Args:
        a: Shape ``(U, T, d)``, static d.
        b: Shape ``(U, S, d)``.

    Returns:
        Shape ``(U, T, S)``, each off by `roundoff(d)` of the product of the rows'
        lengths at most.
    """
    size = a.shape[-1]
    part = _part(size, a.dtype)
    if size <= part:
        return matmul_by_unit(a, b, transpose_b=True)
    sizes = [min(part, size - first) for first in range(0, size, part)]
    (first, *others) = zip(*(tf.split(each, sizes, -1) for each in (a, b)), strict=True)
    total = matmul_by_unit(*first, transpose_b=True)
    for parts in others:
        # One after the other, or all the products are held at once.
        with tf.control_dependencies([total]):
            total = tf.add_n([total, matmul_by_unit(*parts, transpose_b=True)])
    return total


def of_factors(dtype: tf.DType) -> float:
    """Bound the error of inner products that hardware makes by rounding factors."""
    return 4 * matmul_roundoff(dtype)


def roundoff(size: int, dtype: tf.DType) -> float:
    """Bound the error of an inner product of `size` numbers, relative to lengths."""
    # GPUs may round the factors first.
    rounded = 2 * matmul_roundoff(dtype)
    part = _part(size, dtype)
    return (min(size, part) / 4 + size / part) * _unit(dtype) + rounded


def _part(size: int, dtype: tf.DType) -> int:
    """Return how many of `size` features are summed at once."""
    is_lost_anyway = size / 4 * _unit(dtype) <= matmul_roundoff(dtype) / 2
    return size if is_lost_anyway else _PART


def summed_products(a: Tensor, g: Tensor, axes: Iterable[int]) -> Tensor:
    """Sum products over axes, in float64."""
    return tf.reduce_sum(tf.cast(a * g, tf.float64), list(axes))


def squares_from_grams(gram_a: Tensor, gram_g: Tensor, *, error: float) -> Tensor:
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
    # In float64 only from here on: the products themselves are bounded by the guard.
    of_rows = tf.reduce_sum(gram_a * gram_g, 2)
    squares = tf.reduce_sum(tf.cast(of_rows, tf.float64), 1)
    # What a sum of products can lose because each was too small for the dtype.
    tiny = float(np.finfo(gram_a.dtype.as_numpy_dtype).tiny)
    lost = _MOST_NUMBERS * tiny
    # Lengths of the rows, from the diagonals. A diagonal that rounded to zero still
    # counts as the largest that can have done so.
    diagonals = tf.stack([tf.linalg.diag_part(gram) for gram in (gram_a, gram_g)])
    lengths = tf.sqrt(tf.cast(diagonals, tf.float64) + lost)
    without_signs = tf.square(tf.reduce_sum(tf.reduce_prod(lengths, 0), 1))
    positions = gram_a.shape[1]
    if positions is None:
        positions = tf.cast(tf.shape(gram_a)[1], tf.float64)
    guard = error + positions * (_unit(gram_a.dtype) / 4)
    # Products too small for the dtype count as nothing, however large the other
    # factor may be.
    of_small = lost * tf.reduce_sum(tf.square(tf.reduce_sum(lengths, 2)), 0)
    # So may each product of the two sides.
    of_small += positions**2 * tiny
    return tf.maximum(squares, 0) + guard * without_signs + of_small


def _unit(dtype: tf.DType) -> float:
    return machine_epsilon(dtype) / 2
