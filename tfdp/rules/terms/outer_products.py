"""The gradient of what multiplies a matrix."""

import math

import tensorflow as tf

from tfdp._tracing import made_of_rows
from tfdp._types import Tensor, Variable
from tfdp.clipping import at_least_float32, squares_rounded_up
from tfdp.rules.products import (
    dots,
    inner_products,
    matmul_by_unit,
    of_factors,
    roundoff,
    squares_from_grams,
    summed_products,
)
from tfdp.rules.terms.term import (
    FEW_NUMBERS,
    Jvp,
    Kept,
    Movable,
    Term,
    Units,
    in_pairs,
    in_rows,
    moved_pairs,
    weighted,
)


class OuterProducts(Movable):
    """``sum_t a_t (x) g_t``: what multiplies a matrix has this gradient.

    Args:
        variable: The Keras variable, of d p numbers, the d outermost.
        a: Inputs, floating point of shape ``(R, ..., d)``; or whole numbers of shape
            ``(R, ...)`` in ``[0, d)`` that stand for one-hot rows.
        g: Gradients of the outputs, shape ``(R, ..., p)`` with the same axes between.
    """

    def __init__(self, variable: Variable, a: Tensor, g: Tensor) -> None:
        self.variable = variable
        # Once, here: each way to ask for units would else do so.
        self.pairs = [(in_rows(a, has_features=a.dtype.is_floating), in_rows(g))]
        self._added_up: list[Tensor] | None = None
        self.p: int = g.shape[-1]
        self.d: int = math.prod(variable.shape) // self.p

    def merged(self, other: Term) -> "OuterProducts | None":
        """Take the uses of both."""
        if not isinstance(other, OuterProducts) or other.p != self.p:
            return None
        repeats = self.repeats if self.repeats == other.repeats else None
        return self._of(self.pairs + other.pairs).copy_with(repeats=repeats)

    def _of(self, pairs: list[tuple[Tensor, Tensor]]) -> "OuterProducts":
        return self.copy_with(pairs=pairs, _added_up=None)

    def _positions(self, units: Units) -> int | None:
        """Count the positions of a unit, if their number is static."""
        rows, total = self.rows(units), 0
        for _, g in self.pairs:
            between = g.shape[1:-1]
            if rows is None or not between.is_fully_defined():
                return None
            total += rows * math.prod(between)
        return total

    def _has_ids(self) -> bool:
        return any(not a.dtype.is_floating for a, _ in self.pairs)

    def _has_only_ids(self) -> bool:
        return all(not a.dtype.is_floating for a, _ in self.pairs)

    def how(self, norms: str, units: Units) -> str:
        """Gram matrices where few positions meet a large matrix."""
        positions = self._positions(units)
        # Added up by ids, the factors are the gradient: there is nothing to keep.
        if self._has_only_ids():
            return "drop"
        # One position needs two lengths; beside ids a dense gradient would have a row for
        # every word of the vocabulary.
        if norms == "gram" or (positions == 1 and norms == "auto") or self._has_ids():
            return "gram"
        if norms == "instantiate":
            return "drop"
        if positions is None:
            return "keep" if self.d * self.p <= FEW_NUMBERS else "gram"
        # From here on the gradient takes no more numbers than its factors, and the
        # time of the ordinary gradient, which it replaces.
        keeps = self.d * self.p <= positions * (self.d + self.p)
        return "keep" if keeps else "gram"

    def numbers(self, how: str, units: Units) -> int | None:
        """Two Gram matrices, or the gradient, of ids only the rows that they name."""
        positions = self._positions(units)
        if how != "gram" and not self._has_only_ids():
            return self.d * self.p
        if positions is None:
            return None
        if how != "gram":
            return positions * self.p
        return 1 if positions == 1 else 2 * positions * positions

    def _views(self, units: Units) -> list[Tensor]:
        """Group the positions of each use by units."""
        views = []
        for a, g in self.pairs:
            if a.dtype.is_floating:
                views.append(units.view(at_least_float32(a), [self.d], self.repeats))
            else:
                views.append(units.view(a, [], self.repeats))
            views.append(units.view(at_least_float32(g), [self.p], self.repeats))
        return views

    def factors(self, units: Units) -> list[Tensor]:
        """``(U, T, d)`` or ids ``(U, T)``, then ``(U, T, p)``, for each use."""
        if self._added_up is not None:
            return self._added_up
        views = self._views(units)
        if self._has_only_ids():
            # One pair for all uses, in which each id of a unit occurs once.
            ids, rows = tf.concat(views[::2], 1), tf.concat(views[1::2], 1)
            views = self._added_up = _added_up(ids, rows)
        return views

    def instantiate(self, units: Units) -> Tensor:
        """Multiply the factors out."""
        parts = []
        for a, g in in_pairs(self.factors(units)):
            product = tf.matmul(self._dense(a, g.dtype), g, transpose_a=True)
            parts.append(units.reshape(product, [self.d * self.p]))
        return tf.add_n(parts)

    def kept(self, units: Units) -> Kept:
        """Let the side with fewer numbers be the rows."""
        if self.p >= self.d or len(self.pairs) > 1 or self._has_ids():
            return super().kept(units)
        a, g = self.factors(units)
        # (p, T) (T, d) in place of (d, T) (T, p): products with few, long rows are faster.
        product = tf.matmul(g, a, transpose_a=True)
        flat = units.reshape(product, [self.p * self.d])
        return Kept(self.variable, flat, transposed=(self.p, self.d))

    def squares_of_dropped(self, units: Units) -> Tensor:
        """Of ids, the factors are all there is."""
        if not self._has_only_ids():
            return super().squares_of_dropped(units)
        _, rows = self.factors(units)
        squares = squares_rounded_up(tf.reshape(rows, [-1, self.p]))
        return tf.reduce_sum(tf.reshape(squares, tf.shape(rows)[:2]), 1)

    def squares_by_gram(self, units: Units) -> Tensor:
        """``sum_{t,s} <a_t, a_s> <g_t, g_s>``, with what rounding can have lost."""
        pairs = in_pairs(self.factors(units))
        if self._positions(units) == 1:
            ((a, g),) = pairs
            # |a (x) g| = |a| |g|, and a one-hot row has length one.
            squares = squares_rounded_up(g)
            return squares * squares_rounded_up(a) if a.dtype.is_floating else squares
        # All uses along one axis of positions: so cross terms between calls count.
        g = _side_by_side([g for _, g in pairs], axis=1)
        rows = [
            _side_by_side([_inner_products(a, b, g.dtype) for b, _ in pairs], axis=2)
            for a, _ in pairs
        ]
        # Inner products of ids are 0 or 1, and exact.
        error = roundoff(self.p, g.dtype) + of_factors(g.dtype)
        if any(a.dtype.is_floating for a, _ in pairs):
            error += roundoff(self.d, g.dtype)
        return squares_from_grams(
            _side_by_side(rows, axis=1), inner_products(g, g), error=error
        )

    def lengths(self, units: Units) -> Tensor:
        """The rows of a matrix of ids have length one."""
        return tf.add_n([
            summed_products(tf.norm(a, axis=-1), tf.norm(g, axis=-1), [1])
            if a.dtype.is_floating
            else tf.reduce_sum(tf.cast(tf.norm(g, axis=-1), tf.float64), 1)
            for a, g in in_pairs(self.factors(units))
        ])

    def weighted_sum(self, factors: list[Tensor], weights: Tensor | None) -> Tensor:
        """One ordinary product for each use: ``a^T diag(weights) g``."""
        parts = []
        for a, g in in_pairs(factors):
            right = tf.reshape(weighted(g, weights), [-1, self.p])
            # Ids are summed by row of the variable: a one-hot matrix is never made.
            if a.dtype.is_floating:
                left = tf.reshape(a, [-1, self.d])
                parts.append(tf.matmul(left, right, transpose_a=True))
            else:
                ids = tf.reshape(a, [-1])
                parts.append(tf.math.unsorted_segment_sum(right, ids, self.d))
        return tf.reshape(tf.add_n(parts), self.variable.shape)

    def inner_products(self, other: Movable, units: Units) -> Tensor:
        """Multiply one factor by what the other term has, then the other."""
        # <sum_t a_t (x) g_t, B> = sum_t <a_t B, g_t>: no gradient is multiplied out.
        return tf.add_n([
            dots(other.applied(a, units), g) for a, g in in_pairs(self._views(units))
        ])

    def applied(self, a: Tensor, units: Units) -> Tensor:
        """``sum_t <a, a_t> g_t``."""
        return tf.add_n([
            matmul_by_unit(_inner_products(a, b, g.dtype), g)
            for b, g in in_pairs(self.factors(units))
        ])

    def applied_back(self, g: Tensor, units: Units) -> Tensor:
        """``sum_t <g, g_t> a_t``."""
        # No norm is made of it: sums need no parts, which loops would make in each step.
        return tf.add_n([
            matmul_by_unit(
                matmul_by_unit(g, h, transpose_b=True), self._dense(a, h.dtype)
            )
            for a, h in in_pairs(self.factors(units))
        ])

    def _dense(self, a: Tensor, dtype: tf.DType) -> Tensor:
        return a if a.dtype.is_floating else tf.one_hot(a, self.d, dtype=dtype)

    def column_sums(self, units: Units) -> Tensor:
        """Sum each unit's gradient over all axes but the last, shape ``(U, p)``."""
        return tf.add_n([
            tf.einsum("ut,utp->up", tf.reduce_sum(self._dense(a, g.dtype), 2), g)
            for a, g in in_pairs(self._views(units))
        ])

    def by_column(self, factors: Tensor, units: Units) -> "OuterProducts":
        """Multiply the second factors."""
        return self._of([(a, g * units.for_rows(factors, g)) for a, g in self.pairs])

    def tensors(self) -> list[Tensor]:
        """Both factors of each use, but for ids."""
        return [each for pair in self.pairs for each in pair if each.dtype.is_floating]

    def read(self) -> list[Tensor]:
        """Both factors of each use."""
        return [each for pair in self.pairs for each in pair]

    def moved(self, jvp: Jvp, rate: Tensor) -> "OuterProducts":
        """Move one factor, then the other."""
        return self._of(moved_pairs(self.pairs, jvp, rate))


def _side_by_side(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis)


def _inner_products(a: Tensor, b: Tensor, dtype: tf.DType) -> Tensor:
    """``(U, T, S)`` from rows ``(U, T, d)`` and ``(U, S, d)``, or ids in their place."""
    if a.dtype.is_floating and b.dtype.is_floating:
        return inner_products(a, b)
    if a.dtype.is_floating:
        return tf.gather(a, b, axis=2, batch_dims=1)
    if b.dtype.is_floating:
        return tf.linalg.matrix_transpose(_inner_products(b, a, dtype))
    return tf.cast(a[:, :, None] == b[:, None, :], dtype)


def _added_up(ids: Tensor, g: Tensor) -> list[Tensor]:
    """Add up the gradients of equal ids.

    The norm of a unit is then that of the very rows that are weighted and summed: of
    thousands of equal gradients two sums in turn can differ by more than rounding up
    makes good.

    Args:
        ids: Shape ``(U, T)``.
        g: Shape ``(U, T, p)``.

    Returns:
        Different ids of each unit and the sums of their gradients, of the same shapes;
        what is left over is zeros.
    """
    units, positions = tf.unstack(tf.shape(ids))
    # Equal ids are neighbours once sorted: whatever is new starts a sum.
    order = tf.argsort(ids, axis=1, stable=True)
    in_order = tf.gather(ids, order, batch_dims=1)
    is_new = tf.cast(in_order[:, 1:] != in_order[:, :-1], tf.int32)
    sums = tf.pad(tf.cumsum(is_new, axis=1), [(0, 0), (tf.minimum(positions, 1), 0)])
    sums = tf.gather(sums, tf.argsort(order, axis=1), batch_dims=1)
    sums = tf.reshape(sums + tf.range(units)[:, None] * positions, [-1])
    count = units * positions
    # Sums of all units in one operation: unit u has the numbers from u T on.
    flat = tf.reshape(g, [-1, g.shape[-1]])
    rows = tf.math.unsorted_segment_sum(flat, sums, count)
    names = tf.math.unsorted_segment_max(tf.reshape(ids, [-1]), sums, count)
    # Where no id is left the largest of none is negative; its sum is zeros.
    added_up = [
        tf.reshape(tf.maximum(names, 0), [units, positions]),
        tf.reshape(rows, [units, positions, g.shape[-1]]),
    ]
    # A unit's sums have numbers of its own: those from ``u T`` to ``(u + 1) T - 1``.
    return made_of_rows(added_up, [ids, g])
