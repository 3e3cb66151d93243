"""Factors of gradients: tensors with an axis of units in front."""

from collections.abc import Callable, Iterable

import tensorflow as tf

from tfdp._types import Tensor
from tfdp.clipping import matmul_roundoff

# From a tensor to its derivative along something, None for zeros.
Jvp = Callable[[Tensor], Tensor | None]

# Where the number of positions is not known, gradients of at most this many numbers
# are instantiated.
FEW_NUMBERS = 1 << 16


def moved_tensor(tensor: Tensor, jvp: Jvp, rate: Tensor) -> Tensor:
    """Return ``tensor + rate d tensor``."""
    derivative = jvp(tensor) if tensor.dtype.is_floating else None
    if derivative is None:
        return tensor
    return tensor + tf.cast(rate, tensor.dtype) * derivative


def moved_pairs(
    pairs: list[tuple[Tensor, Tensor]], jvp: Jvp, rate: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return ``a (x) (g + rate dg)`` and ``da (x) (rate g)``, for each pair."""
    moved = [(a, moved_tensor(g, jvp, rate)) for a, g in pairs]
    for a, g in pairs:
        derivative = jvp(a) if a.dtype.is_floating else None
        if derivative is not None:
            moved.append((derivative, tf.cast(rate, g.dtype) * g))
    return moved


def of_factors(dtype: tf.DType) -> float:
    """Bound the error of inner products that hardware makes by rounding factors."""
    return 4 * matmul_roundoff(dtype)


def summed_products(a: Tensor, g: Tensor, axes: Iterable[int]) -> Tensor:
    """Sum products over axes, in float64."""
    return tf.reduce_sum(tf.cast(a * g, tf.float64), list(axes))


def weighted(units: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply each unit's part by its weight."""
    if weights is None:
        return units
    shape = [-1] + [1] * (units.shape.rank - 1)
    return units * tf.reshape(tf.cast(weights, units.dtype), shape)


def in_pairs(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return neighbours as pairs."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))
