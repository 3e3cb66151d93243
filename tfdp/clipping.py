"""Clipped sums of per-example gradients, and the factors that clip them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _validate
from tfdp._types import Tensor, Variable


class ClippedSum(NamedTuple):
    """The sum over all units of their clipped gradients, not yet noised.

    It knows its own sensitivity: noise and accounting ask it and never a second
    copy of the clip norm. It is a nest of tensors, so a `tf.function` may return
    it.

    Guarantees:
        Replacing one record by an empty one changes `gradients`, all together,
        by at most `l2_sensitivity` in the l2 norm.

    Attributes:
        gradients: One tensor for each trainable variable, in their order, of the
            variable's shape and at least float32: ``sum_u f_u g_u``. Neither
            divided nor noised.
        norms: Norms of the units' gradients before clipping, rounded up, shape
            ``(U,)``. They are not noised: what is made of them is not private.
        l2_norm_clip: The C that clipped, a scalar tensor.
        examples_per_unit: How many examples a unit averages, a scalar.
    """

    gradients: list[tf.Tensor]
    norms: tf.Tensor
    l2_norm_clip: tf.Tensor
    examples_per_unit: int | tf.Tensor

    @property
    def sensitivity_in_clips(self) -> tf.Tensor:
        """`l2_sensitivity` as a multiple of `l2_norm_clip`, a float64 scalar.

        1 for units of one example. 2 for units of several: their mean moves from
        one point of the clip ball to any other when one of them is emptied.
        """
        return tf.where(
            tf.convert_to_tensor(self.examples_per_unit) > 1,
            tf.constant(2.0, tf.float64),
            tf.constant(1.0, tf.float64),
        )

    @property
    def l2_sensitivity(self) -> tf.Tensor:
        """The l2 sensitivity of `gradients` under zero-out, a scalar tensor."""
        clip = self.l2_norm_clip
        return clip * tf.cast(self.sensitivity_in_clips, clip.dtype)


class ClippedSumOfUsers(ClippedSum):
    """A clipped sum each unit of which has all rows of a user.

    Its sensitivity is that of a user who goes with all rows; one row alone can move the
    mean gradient of its user by twice as much. It is a type, and no field, as a
    `tf.function` makes tensors of fields; `_replace` keeps it.
    """


def clip_as_tensor(l2_norm_clip: Tensor, variables: list[Variable]) -> tf.Tensor:
    """Return the clip norm in the widest dtype of the variables' gradients.

    Args:
        l2_norm_clip: A positive number, variable or scalar tensor.
        variables: Trainable variables.

    Raises:
        ValueError: If it is a number that is not positive and finite.
    """
    is_wide = any(variable.dtype == "float64" for variable in variables)
    dtype = tf.float64 if is_wide else tf.float32
    if not isinstance(l2_norm_clip, (tf.Tensor, tf.Variable, keras.Variable)):
        # A cast of a Python number would go through float32.
        return tf.constant(_validate.positive("l2_norm_clip", l2_norm_clip), dtype)
    # A cast to its own dtype would return the variable, and what it is later.
    return tf.identity(tf.cast(l2_norm_clip, dtype))


def norms_rounded_up(per_unit_gradients: list[tf.Tensor]) -> tf.Tensor:
    """Compute the l2 norm of each unit over all its gradients, never too small.

    Squares are summed in blocks, the blocks in float64; then the norm grows by the
    largest error that this can have, in whatever order the hardware adds, and by
    what squares too small for the dtype can be worth. Summed in float32 throughout,
    many small squares can vanish beside a large one.

    Args:
        per_unit_gradients: float32 or float64 tensors of shape ``(U, ...)``, static
            but for ``U``; at least one.

    Returns:
        Upper bounds of the norms, float64, shape ``(U,)``; not finite where a
        gradient is not finite.
    """
    return norms_of_squares([squares_rounded_up(*per_unit_gradients)])


def squares_rounded_up(*gradients: tf.Tensor) -> tf.Tensor:
    """Compute the squared l2 norm of each row, never too small.

    Args:
        *gradients: float32 or float64 tensors of shape ``(U, ...)``, static but for
            ``U``; at least one. The rows of all of them make one row.

    Returns:
        Upper bounds of the squared norms, float64, shape ``(U,)``; not finite where
        a number is not finite.
    """
    of_blocks, error, tiny, number = [], 0.0, 0.0, 0
    for numbers, sizes in zip(*side_by_side(gradients), strict=True):
        size = sum(sizes.values())
        epsilon = machine_epsilon(numbers.dtype)
        # Squares below the smallest normal number may have become zero.
        tiny += size * float(np.finfo(numbers.dtype.as_numpy_dtype).tiny)
        blocks = _in_blocks(numbers, size)
        number_of_blocks, block = blocks.shape[1:]
        of_blocks.append(tf.cast(_norms(blocks), tf.float64))
        # Each square, each addition of the block, the root and its square round once,
        # by half an epsilon at most; then the sum of the blocks does, in float64.
        error = max(error, (block + 4) * epsilon / 2)
        number += number_of_blocks
    # Blocks are few: one sum for all variables, where each would take ten operations.
    block_norms = of_blocks[0] if len(of_blocks) == 1 else tf.concat(of_blocks, 1)
    error += number * machine_epsilon(tf.float64) / 2
    return tf.reduce_sum(tf.square(block_norms), 1) * (1 + error) + tiny


def norms_of_squares(squares: list[tf.Tensor]) -> tf.Tensor:
    """Combine squared norms of the variables' gradients, rounded up once more.

    Args:
        squares: One float64 tensor for each variable, shape ``(U,)``.

    Returns:
        The norms over all variables, float64, shape ``(U,)``.
    """
    error = len(squares) * machine_epsilon(tf.float64)
    return tf.sqrt(tf.add_n(squares) * (1 + error))


def clip_factors(norms: tf.Tensor, *, l2_norm_clip: tf.Tensor) -> tf.Tensor:
    """Compute the weight that brings each unit's gradient inside the clip ball.

    A unit keeps its gradient when its norm is at most `l2_norm_clip` and is
    otherwise scaled onto the sphere of that radius [1]_.

    Guarantees:
        ``norms[u] * result[u] <= l2_norm_clip`` for every finite norm, also after
        a matrix product has rounded gradients and factors on the way to their
        sum. A norm that is not finite gives 0; the caller must drop that unit by
        selection, because ``0 * nan`` is ``nan``.

    Args:
        norms: Upper bounds of the units' norms, floating point, shape ``(U,)``;
            ``U`` may be 0.
        l2_norm_clip: Radius of the clip ball, a positive scalar tensor whose
            dtype is the gradients'.

    Returns:
        Weights in ``[0, 1]``, shape ``(U,)``, dtype of `l2_norm_clip`.

    Example:
        >>> norms = tf.constant([0.0, 0.5, 4.0])
        >>> clip_factors(norms, l2_norm_clip=tf.constant(1.0)).numpy().round(4)
        array([1.  , 1.  , 0.25], dtype=float32)

    References:
        .. [1] Abadi et al., "Deep Learning with Differential Privacy", CCS 2016,
           Algorithm 1. https://arxiv.org/abs/1607.00133
    """
    # Twice: both the gradients and the factors may be rounded on their way into the
    # product that sums them.
    rounded_up = tf.cast(norms, tf.float64) * (
        1.0 + 2.0 * matmul_roundoff(l2_norm_clip.dtype)
    )
    factors = tf.minimum(
        tf.ones([], tf.float64), tf.cast(l2_norm_clip, tf.float64) / rounded_up
    )
    factors = tf.where(tf.math.is_finite(norms), factors, tf.zeros_like(factors))
    return tf.cast(factors, l2_norm_clip.dtype)


def without_empty(factors: Tensor, is_empty: Tensor) -> Tensor:
    """Let units that are not there weigh nothing.

    Args:
        factors: Of the units, shape ``(U,)``.
        is_empty: bool of the same shape. This is checked: where terms had more rows than
            there are units, pieces of a unit would be clipped each by itself.

    Returns:
        The factors, 0 where a unit is empty.
    """
    # Not `tf.where`, which takes the mark of one unit for those of all.
    return tf.raw_ops.Select(condition=is_empty, x=tf.zeros_like(factors), y=factors)


def clip_and_sum(
    per_unit_gradients: list[tf.Tensor],
    *,
    is_empty: tf.Tensor,
    l2_norm_clip: tf.Tensor,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Clip each unit's gradient and add the units up.

    Args:
        per_unit_gradients: Tensors of shape ``(U, ...)``, static but for ``U``.
        is_empty: bool, shape ``(U,)``, marks units that contribute nothing.
        l2_norm_clip: Radius of the clip ball, a positive scalar tensor.

    Returns:
        The clipped sums, without the leading axis and at least float32, and the
        norms before clipping rounded up, shape ``(U,)`` and dtype of `l2_norm_clip`. A unit whose norm
        is not finite contributes nothing.
    """
    per_unit_gradients = [at_least_float32(g) for g in per_unit_gradients]
    norms = norms_rounded_up(per_unit_gradients)
    factors = clip_factors(norms, l2_norm_clip=l2_norm_clip)
    factors = without_empty(factors, is_empty)
    finite = tf.math.is_finite(norms)
    together, sizes = side_by_side(per_unit_gradients)
    together = tf.cond(
        tf.reduce_all(finite), lambda: together, lambda: selected(together, finite)
    )
    flat = weighted_sums(together, sizes, factors)
    sums = [
        tf.reshape(total, gradients.shape[1:])
        for total, gradients in zip(flat, per_unit_gradients, strict=True)
    ]
    return sums, tf.cast(norms, l2_norm_clip.dtype)


def side_by_side(
    gradients: Sequence[Tensor],
) -> tuple[list[Tensor], list[dict[int, int]]]:
    """Put gradients of few numbers into one tensor, where each would take operations.

    Args:
        gradients: Of each unit, shape ``(U, ...)``, static but for ``U``.

    Returns:
        Tensors, and for each the positions of the gradients that it holds, in order, with
        their sizes. Gradients of few numbers share a tensor of shape ``(U, n)``, one for
        each dtype; others are as they were.
    """
    groups: list[dict[int, int]] = []
    shared: dict[tf.DType, dict[int, int]] = {}
    for position, gradient in enumerate(gradients):
        size = gradient.shape[1:].num_elements()
        group = shared.get(gradient.dtype) if size < _MANY else None
        if group is None:
            groups.append(group := {})
            if size < _MANY:
                shared[gradient.dtype] = group
        group[position] = size
    together = []
    for group in groups:
        held = [gradients[position] for position in group]
        one = held[0] if len(held) == 1 else tf.concat([_flat(g) for g in held], 1)
        together.append(one)
    return together, groups


def weighted_sums(
    together: list[Tensor], groups: list[dict[int, int]], weights: Tensor
) -> list[Tensor]:
    """Sum gradients of units times their weights.

    Args:
        together: See `side_by_side`, some units perhaps set to zero.
        groups: Likewise.
        weights: Shape ``(U,)``.

    Returns:
        The sums, in the order of the gradients that were put together, each with one
        axis.
    """
    row = tf.expand_dims(weights, 0)
    sums: dict[int, Tensor] = {}
    for tensor, sizes in zip(together, groups, strict=True):
        total = tf.matmul(tf.cast(row, tensor.dtype), _flat(tensor))
        parts = tf.split(total, list(sizes.values()), 1) if len(sizes) > 1 else [total]
        sums.update(zip(sizes, parts, strict=True))
    return [sums[position] for position in sorted(sums)]


def _in_blocks(gradients: Tensor, size: int) -> Tensor:
    """``(U, ...)`` -> ``(U, blocks, block)``, of as many numbers, or zeros behind them."""
    block = _largest_divisor(size, _LARGEST_BLOCK)
    if 2 * block < min(size, _LARGEST_BLOCK):
        # A size of few divisors would make many blocks.
        block = _LARGEST_BLOCK
        gradients = tf.pad(_flat(gradients), [[0, 0], [0, -size % block]])
    # -1 cannot stand for the rows of nothing.
    rows = -1 if size else tf.shape(gradients)[0]
    return tf.reshape(gradients, [rows, -(-size // block), block])


def _flat(gradients: Tensor) -> Tensor:
    if gradients.shape.rank == 2:
        return gradients
    size = gradients.shape[1:].num_elements()
    # -1 cannot stand for the rows of nothing.
    return tf.reshape(gradients, [-1 if size else tf.shape(gradients)[0], size])


def zeros_of_finite(tensor: tf.Tensor) -> tf.Tensor:
    """Return zeros, and NaN where a number is not finite."""
    nan = tf.fill(tf.shape(tensor), tf.constant(math.nan, tensor.dtype))
    return tf.where(tf.math.is_finite(tensor), tf.zeros_like(tensor), nan)


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """Widen half precision, in which sums and noise would be rounded too coarsely."""
    return tensor if tensor.dtype.size >= 4 else tf.cast(tensor, tf.float32)


# The sum of a float32 block is off by less than 8e-6 of itself.
_LARGEST_BLOCK = 128

# From so many numbers on it takes longer to copy a gradient than what it shares would.
_MANY = 1000


def _norms(blocks: tf.Tensor) -> tf.Tensor:
    """Norms over the last axis: in one pass where XLA does not fuse by itself."""
    if _keras.inside_xla():
        return tf.sqrt(tf.reduce_sum(tf.square(blocks), axis=-1))
    return tf.math.reduce_euclidean_norm(blocks, axis=-1)


def _largest_divisor(number: int, limit: int) -> int:
    divisors = (d for d in range(1, min(number, limit) + 1) if number % d == 0)
    return max(divisors, default=1)


def selected(parts: list[tf.Tensor], chosen: tf.Tensor) -> list[tf.Tensor]:
    """Replace the units that are not chosen by zeros, in tensors of leading axis U."""
    # Chosen, not multiplied with a weight of zero: 0 * nan is nan. What parts of one
    # rank and dtype need is made once.
    zeros = {dtype: tf.zeros([], dtype) for dtype in {part.dtype for part in parts}}
    of_rank = {
        rank: tf.reshape(chosen, [-1] + [1] * (rank - 1))
        for rank in {part.shape.rank for part in parts}
    }
    return [
        tf.where(of_rank[part.shape.rank], part, zeros[part.dtype]) for part in parts
    ]


def machine_epsilon(dtype: tf.DType) -> float:
    """Return the distance from 1 to the next number, twice the unit roundoff."""
    return float(np.finfo(dtype.as_numpy_dtype).eps)


def matmul_roundoff(dtype: tf.DType) -> float:
    """Relative error of a matrix product's inputs, for what hardware may use."""
    tensor_float_32 = (
        dtype == tf.float32
        and tf.config.experimental.tensor_float_32_execution_enabled()
        and bool(tf.config.list_physical_devices("GPU"))
    )
    # TensorFloat-32 keeps ten bits after the point, of which the last is rounded.
    return 2.0**-11 if tensor_float_32 else machine_epsilon(dtype)
