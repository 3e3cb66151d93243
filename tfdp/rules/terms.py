"""What a layer's call adds to the gradient of each row, in factors not yet multiplied.

A term belongs to one variable. All terms of a variable, from all calls of all layers,
add up to its gradient; a norm is only right over their sum. Leading axes hold whole
units one after the other: ``(R, ...)`` with the same number of rows for each unit.
"""

import abc
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.clipping import at_least_float32, matmul_roundoff, squares_rounded_up
from tfdp.rules import convolution
from tfdp.rules.products import inner_products, roundoff, squares_from_grams

# Gradients of units may take this many numbers for each number of the activations
# that they are made of, to be kept until the weights are known.
_KEPT_FOR_AN_ACTIVATION = 2

# Time to square and sum a kept number, in multiplications of a matrix product.
_SQUARED_AND_SUMMED = 30


# From a tensor to its derivative along something, None for zeros.
Jvp = Callable[[tf.Tensor], tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Units:
    """How the rows of a pass are grouped.

    Attributes:
        number: How many units there are, a scalar tensor or an int.
        rows: Consecutive rows in a unit, None where that is not static.
    """

    number: int | tf.Tensor
    rows: int | None

    def view(self, tensor: tf.Tensor, trailing: Sequence[int]) -> tf.Tensor:
        """``(R, ..., *trailing)`` -> ``(U, positions, *trailing)``."""
        return tf.reshape(tensor, [self.number, -1, *trailing])


class Term(abc.ABC):
    """One summand of the gradient of a variable.

    Attributes:
        variable: The Keras variable.
        repeats: Rows for each row of the batch; None if not the same in all uses.
    """

    variable: Any
    repeats: int | None = 1

    def rows(self, units: Units) -> int | None:
        """Count the rows of a unit, None where that is not static."""
        if units.rows is None or self.repeats is None:
            return None
        return units.rows * self.repeats

    @abc.abstractmethod
    def how(self, norms: str, units: Units) -> str:
        """Name the way to the norm.

        Args:
            norms: ``"auto"``, ``"gram"`` or ``"instantiate"``.
            units: How rows are grouped.

        Returns:
            ``"gram"``: from inner products of the factors. ``"keep"``: from the
            units' gradients, which are then summed. ``"drop"``: from the units'
            gradients, and the sum from the factors again.
        """

    @abc.abstractmethod
    def numbers(self, how: str, units: Units) -> int | None:
        """Count the numbers that the norm of one unit takes; None if unknown."""

    @abc.abstractmethod
    def instantiate(self, units: Units) -> tf.Tensor:
        """Compute each unit's gradient, shape ``(U, size of the variable)``."""

    def kept(self, units: Units) -> "Kept":
        """Instantiate in whatever order of numbers is fastest."""
        return Kept(self.variable, self.instantiate(units))

    @abc.abstractmethod
    def squares_by_gram(self, units: Units) -> tf.Tensor:
        """Bound the squared norms without instantiating, float64, shape ``(U,)``."""

    def squares_of_dropped(self, units: Units) -> tf.Tensor:
        """Bound the squared norms of gradients that are computed again for the sum.

        Where they cancel, the sum may round otherwise: by what the lengths of the
        factors bound.

        Args:
            units: How rows are grouped.

        Returns:
            float64, shape ``(U,)``.
        """
        kept = self.kept(units).gradients
        lengths = self.lengths(units)
        # So many products are added up, once for the norm and once for the sum.
        products = [
            tf.cast(
                tf.size(g) // g.shape[-1] // tf.maximum(units.number, 1), tf.float64
            )
            for g in self.factors(units)[1::2]
        ]
        positions = tf.add_n([tf.constant(0.0, tf.float64), *products])
        guard = _of_factors(kept.dtype)
        guard += positions * float(np.finfo(kept.dtype.as_numpy_dtype).eps) / 8
        return squares_rounded_up(kept) + guard * tf.square(lengths)

    @abc.abstractmethod
    def lengths(self, units: Units) -> tf.Tensor:
        """Sum the products of the lengths of the factors, float64, shape ``(U,)``."""

    @abc.abstractmethod
    def factors(self, units: Units) -> list[tf.Tensor]:
        """Return what the gradients are made of, each with leading axis ``U``."""

    @abc.abstractmethod
    def weighted_sum(
        self, factors: list[tf.Tensor], weights: tf.Tensor | None
    ) -> tf.Tensor:
        """Sum the units' gradients times their weights.

        Args:
            factors: As `factors` returns them, some units perhaps set to zero.
            weights: Shape ``(U,)``; None for ones.

        Returns:
            Shape of the variable.
        """

    def merged(self, other: "Term") -> "Term | None":
        """Return one term for both, of one variable, or None if there is none."""
        return None

    @abc.abstractmethod
    def inner_products(self, other: "Term", units: Units) -> tf.Tensor:
        """Multiply each unit's gradient with what another term has for the variable.

        Args:
            other: The other term.
            units: How rows are grouped, in both.

        Returns:
            Shape ``(U,)``, not rounded up.
        """

    def applied(self, a: tf.Tensor, units: Units) -> tf.Tensor:
        """Multiply by each unit's gradient, as a matrix.

        Args:
            a: Rows to multiply, shape ``(U, T, d)``; or ids, shape ``(U, T)``.
            units: How rows are grouped.

        Returns:
            Shape ``(U, T, p)`` for a variable of d p numbers.
        """
        size = math.prod(self.variable.shape)
        gradients = self.instantiate(units)
        if a.dtype.is_floating:
            d = a.shape[-1]
            return tf.matmul(a, tf.reshape(gradients, [units.number, d, size // d]))
        p = self.variable.shape[-1]
        matrices = tf.reshape(gradients, [units.number, size // p, p])
        return tf.gather(matrices, a, batch_dims=1)

    def applied_back(self, g: tf.Tensor, units: Units) -> tf.Tensor:
        """Multiply by the transpose of each unit's gradient, as a matrix.

        Args:
            g: Rows to multiply, floating point, shape ``(U, T, p)``.
            units: How rows are grouped.

        Returns:
            Shape ``(U, T, d)``.
        """
        p = g.shape[-1]
        shape = [units.number, math.prod(self.variable.shape) // p, p]
        matrices = tf.reshape(self.instantiate(units), shape)
        return tf.matmul(g, matrices, transpose_b=True)

    @abc.abstractmethod
    def tensors(self) -> list[tf.Tensor]:
        """List the floating-point tensors that `moved` needs the derivatives of."""

    @abc.abstractmethod
    def moved(self, jvp: Jvp, rate: tf.Tensor) -> "Term":
        """Return the term with its derivative added.

        Args:
            jvp: Returns the derivative of a tensor, None for zeros.
            rate: What the derivative is multiplied by, a scalar tensor.
        """


class Kept(Term):
    """Gradients of whole units, computed already.

    Args:
        variable: The Keras variable.
        gradients: Shape ``(U, size of the variable)``.
        transposed: Numbers of rows and columns, if these gradients are matrices that
            are transposed in the variable.
    """

    def __init__(
        self,
        variable: Any,
        gradients: tf.Tensor,
        transposed: tuple[int, int] | None = None,
    ) -> None:
        self.variable = variable
        self.gradients = gradients
        self._transposed = transposed

    def how(self, norms: str, units: Units) -> str:
        """Keep them."""
        return "keep"

    def numbers(self, how: str, units: Units) -> int:
        """One gradient."""
        return math.prod(self.variable.shape)

    def instantiate(self, units: Units) -> tf.Tensor:
        """Return them, as the variable has them."""
        if self._transposed is None:
            return self.gradients
        matrices = tf.reshape(self.gradients, [units.number, *self._transposed])
        size = math.prod(self.variable.shape)
        return tf.reshape(tf.linalg.matrix_transpose(matrices), [units.number, size])

    def squares_by_gram(self, units: Units) -> tf.Tensor:
        """From the gradients themselves."""
        return squares_rounded_up(self.instantiate(units))

    def lengths(self, units: Units) -> tf.Tensor:
        """Zero: these gradients are what is summed."""
        return tf.zeros([units.number], tf.float64)

    def factors(self, units: Units) -> list[tf.Tensor]:
        """The gradients are the only factor."""
        return [self.gradients]

    def weighted_sum(
        self, factors: list[tf.Tensor], weights: tf.Tensor | None
    ) -> tf.Tensor:
        """One product of a matrix and a vector."""
        (gradients,) = factors
        if weights is None:
            total = tf.reduce_sum(gradients, 0)
        else:
            weights = tf.cast(weights, gradients.dtype)
            total = tf.linalg.matvec(gradients, weights, transpose_a=True)
        if self._transposed is not None:
            total = tf.transpose(tf.reshape(total, self._transposed))
        return tf.reshape(total, self.variable.shape)

    def inner_products(self, other: Term, units: Units) -> tf.Tensor:
        """Of the gradients themselves."""
        return tf.reduce_sum(self.instantiate(units) * other.instantiate(units), 1)

    def tensors(self) -> list[tf.Tensor]:
        """The gradients."""
        return [self.gradients]

    def moved(self, jvp: Jvp, rate: tf.Tensor) -> "Kept":
        """Move the gradients."""
        moved = copy.copy(self)
        moved.gradients = _moved(self.gradients, jvp, rate)
        return moved


class PerRow(Kept):
    """Gradients of the rows themselves, for variables with few numbers.

    Args:
        variable: The Keras variable.
        gradients: Shape ``(R, ..., *variable.shape)``; what is between is summed.
    """

    def instantiate(self, units: Units) -> tf.Tensor:
        """Add up the rows of each unit."""
        rows = at_least_float32(self.gradients)
        size = math.prod(self.variable.shape)
        between = rows.shape.rank - len(self.variable.shape)
        if between == 1 and self.rows(units) == 1:
            return tf.reshape(rows, [units.number, size])
        return tf.reduce_sum(units.view(rows, [size]), axis=1)

    def factors(self, units: Units) -> list[tf.Tensor]:
        """The units' gradients are the only factor."""
        return [self.instantiate(units)]


class OuterProducts(Term):
    """``sum_t a_t (x) g_t``: what multiplies a matrix has this gradient.

    Args:
        variable: The Keras variable, of d p numbers, the d outermost.
        a: Inputs, floating point of shape ``(R, ..., d)``; or whole numbers of shape
            ``(R, ...)`` in ``[0, d)`` that stand for one-hot rows.
        g: Gradients of the outputs, shape ``(R, ..., p)`` with the same axes between.
    """

    def __init__(self, variable: Any, a: tf.Tensor, g: tf.Tensor) -> None:
        self.variable = variable
        self.pairs = [(a, g)]
        self._added_up: list[tf.Tensor] | None = None
        self.p: int = g.shape[-1]
        self.d: int = math.prod(variable.shape) // self.p

    def merged(self, other: Term) -> "OuterProducts | None":
        """Take the uses of both."""
        if not isinstance(other, OuterProducts) or other.p != self.p:
            return None
        merged = OuterProducts(self.variable, *self.pairs[0])
        merged.pairs = self.pairs + other.pairs
        merged.repeats = self.repeats if self.repeats == other.repeats else None
        return merged

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
        if self._has_only_ids():
            return "drop"
        if norms == "gram" or (positions == 1 and norms == "auto") or self._has_ids():
            return "gram"
        if norms == "instantiate":
            return "drop"
        if positions is None:
            return "keep" if self.d * self.p <= _FEW_NUMBERS else "gram"
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

    def _views(self, units: Units) -> list[tf.Tensor]:
        """Group the positions of each use by units."""
        views = []
        for a, g in self.pairs:
            if a.dtype.is_floating:
                views.append(units.view(at_least_float32(a), [self.d]))
            else:
                views.append(units.view(a, []))
            views.append(units.view(at_least_float32(g), [self.p]))
        return views

    def factors(self, units: Units) -> list[tf.Tensor]:
        """``(U, T, d)`` or ids ``(U, T)``, then ``(U, T, p)``, for each use."""
        if self._added_up is not None:
            return self._added_up
        views = self._views(units)
        if self._has_only_ids():
            # One pair for all uses, in which each id of a unit occurs once.
            ids, rows = tf.concat(views[::2], 1), tf.concat(views[1::2], 1)
            views = self._added_up = _added_up(ids, rows)
        return views

    def instantiate(self, units: Units) -> tf.Tensor:
        """Multiply the factors out."""
        parts = []
        for a, g in _pairs(self.factors(units)):
            product = tf.matmul(self._dense(a, g.dtype), g, transpose_a=True)
            parts.append(tf.reshape(product, [units.number, self.d * self.p]))
        return tf.add_n(parts)

    def kept(self, units: Units) -> Kept:
        """Let the side with fewer numbers be the rows."""
        if self.p >= self.d or len(self.pairs) > 1 or self._has_ids():
            return super().kept(units)
        a, g = self.factors(units)
        product = tf.matmul(g, a, transpose_a=True)
        flat = tf.reshape(product, [units.number, self.p * self.d])
        return Kept(self.variable, flat, transposed=(self.p, self.d))

    def squares_of_dropped(self, units: Units) -> tf.Tensor:
        """Of ids, the factors are all there is."""
        if not self._has_only_ids():
            return super().squares_of_dropped(units)
        _, rows = self.factors(units)
        squares = squares_rounded_up(tf.reshape(rows, [-1, self.p]))
        return tf.reduce_sum(tf.reshape(squares, tf.shape(rows)[:2]), 1)

    def squares_by_gram(self, units: Units) -> tf.Tensor:
        """``sum_{t,s} <a_t, a_s> <g_t, g_s>``, with what rounding can have lost."""
        pairs = _pairs(self.factors(units))
        if self._positions(units) == 1:
            ((a, g),) = pairs
            squares = squares_rounded_up(g[:, 0])
            return (
                squares * squares_rounded_up(a[:, 0])
                if a.dtype.is_floating
                else squares
            )
        g = tf.concat([g for _, g in pairs], axis=1)
        rows = [
            tf.concat([_inner_products(a, b, g.dtype) for b, _ in pairs], axis=2)
            for a, _ in pairs
        ]
        error = roundoff(self.p, g.dtype) + _of_factors(g.dtype)
        if any(a.dtype.is_floating for a, _ in pairs):
            error += roundoff(self.d, g.dtype)
        return squares_from_grams(
            tf.concat(rows, axis=1), inner_products(g, g), error=error
        )

    def lengths(self, units: Units) -> tf.Tensor:
        """The rows of a matrix of ids have length one."""
        return tf.add_n([
            _summed_products(tf.norm(a, axis=-1), tf.norm(g, axis=-1), [1])
            if a.dtype.is_floating
            else tf.reduce_sum(tf.cast(tf.norm(g, axis=-1), tf.float64), 1)
            for a, g in _pairs(self.factors(units))
        ])

    def weighted_sum(
        self, factors: list[tf.Tensor], weights: tf.Tensor | None
    ) -> tf.Tensor:
        """One ordinary product for each use: ``a^T diag(weights) g``."""
        parts = []
        for a, g in _pairs(factors):
            right = tf.reshape(_weighted(g, weights), [-1, self.p])
            if a.dtype.is_floating:
                left = tf.reshape(a, [-1, self.d])
                parts.append(tf.matmul(left, right, transpose_a=True))
            else:
                ids = tf.reshape(a, [-1])
                parts.append(tf.math.unsorted_segment_sum(right, ids, self.d))
        return tf.reshape(tf.add_n(parts), self.variable.shape)

    def inner_products(self, other: Term, units: Units) -> tf.Tensor:
        """Multiply one factor by what the other term has, then the other."""
        return tf.add_n([
            tf.reduce_sum(other.applied(a, units) * g, [1, 2])
            for a, g in _pairs(self._views(units))
        ])

    def applied(self, a: tf.Tensor, units: Units) -> tf.Tensor:
        """``sum_t <a, a_t> g_t``."""
        return tf.add_n([
            tf.matmul(_inner_products(a, b, g.dtype), g)
            for b, g in _pairs(self.factors(units))
        ])

    def applied_back(self, g: tf.Tensor, units: Units) -> tf.Tensor:
        """``sum_t <g, g_t> a_t``."""
        return tf.add_n([
            tf.matmul(inner_products(g, h), self._dense(a, h.dtype))
            for a, h in _pairs(self.factors(units))
        ])

    def _dense(self, a: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return a if a.dtype.is_floating else tf.one_hot(a, self.d, dtype=dtype)

    def tensors(self) -> list[tf.Tensor]:
        """Both factors of each use, but for ids."""
        return [each for pair in self.pairs for each in pair if each.dtype.is_floating]

    def moved(self, jvp: Jvp, rate: tf.Tensor) -> "OuterProducts":
        """Move one factor, then the other."""
        moved = OuterProducts(self.variable, *self.pairs[0])
        moved.pairs = _moved_pairs(self.pairs, jvp, rate)
        moved.repeats = self.repeats
        return moved


# Where the number of positions is not known, gradients of at most this many numbers
# are instantiated.
_FEW_NUMBERS = 1 << 16


class Convolution(Term):
    """The gradient of a kernel that slides over `inputs`.

    Args:
        variable: The Keras variable, ``(*kernel size, C / groups, O)``.
        inputs: Shape ``(R, *spatial, C)``, channels last.
        g: Gradients of the outputs, shape ``(R, *spatial', O)``.
        geometry: Strides, dilations and padding.
    """

    def __init__(
        self,
        variable: Any,
        inputs: tf.Tensor,
        g: tf.Tensor,
        geometry: convolution.Geometry,
    ) -> None:
        self.variable = variable
        self.calls = [(inputs, g)]
        self.geometry = geometry

    def merged(self, other: Term) -> "Convolution | None":
        """Take the uses of both."""
        if not isinstance(other, Convolution) or other.geometry != self.geometry:
            return None
        merged = Convolution(self.variable, *self.calls[0], self.geometry)
        merged.calls = self.calls + other.calls
        merged.repeats = self.repeats if self.repeats == other.repeats else None
        return merged

    def _numbers(self, units: Units) -> tuple[int, int] | None:
        """Count positions of the outputs and of the padded inputs in a unit."""
        rows = self.rows(units)
        if rows is None:
            return None
        outputs = inputs = 0
        for x, g in self.calls:
            if not (x.shape[1:].is_fully_defined() and g.shape[1:].is_fully_defined()):
                return None
            outputs += math.prod(g.shape[1:-1])
            spatial = x.shape[1:-1].as_list()
            pads = self.geometry.pads(spatial, self.variable.shape)
            inputs += math.prod(
                size + sum(pad) for size, pad in zip(spatial, pads, strict=True)
            )
        return rows * outputs, rows * inputs

    def _can_gram(
        self, units: Units, others: Sequence[tuple[tf.Tensor, tf.Tensor]] = ()
    ) -> bool:
        """Tell whether patches of these calls, and of others, can meet each other."""
        shapes = {
            tuple(tuple(tensor.shape[1:].as_list()) for tensor in call)
            for call in [*self.calls, *others]
        }
        return (
            self._numbers(units) is not None
            and len(shapes) == 1
            and self.geometry.groups(self.calls[0][0].shape, self.variable.shape) == 1
        )

    def how(self, norms: str, units: Units) -> str:
        """Gram matrices of pixels where few positions meet many channels."""
        known = self._numbers(units)
        can_gram = self._can_gram(units)
        if norms == "instantiate" or known is None:
            return "drop" if norms == "instantiate" else "keep"
        if norms == "gram":
            return "gram" if can_gram else "drop"
        *kernel, channels, filters = self.variable.shape
        size = math.prod(self.variable.shape)
        outputs, inputs = known
        activations = inputs * channels + outputs * filters
        is_large = size > max(_KEPT_FOR_AN_ACTIVATION * activations, _FEW_NUMBERS)
        if not can_gram:
            return "drop" if is_large else "keep"
        slices = convolution.SLICED * math.prod(kernel) * outputs**2
        gram = inputs**2 * channels + outputs**2 * filters + slices
        # The sum takes one ordinary gradient more than where gradients are kept.
        kept = (_SQUARED_AND_SUMMED + 0.2 * outputs) * size
        return "gram" if is_large or gram < kept else "keep"

    def numbers(self, how: str, units: Units) -> int | None:
        """The gradient, or the Gram matrices of pixels, patches and outputs."""
        if how != "gram":
            return int(math.prod(self.variable.shape))
        known = self._numbers(units)
        return None if known is None else known[1] * known[1] + 2 * known[0] * known[0]

    def factors(self, units: Units) -> list[tf.Tensor]:
        """``(U, K, *spatial, C)``, then ``(U, K, *spatial', O)``, for each use."""
        return [
            self._rows_of_units(at_least_float32(tensor), units)
            for call in self.calls
            for tensor in call
        ]

    def _rows_of_units(self, rows: tf.Tensor, units: Units) -> tf.Tensor:
        """``(R, ...)`` -> ``(U, K, ...)``."""
        if self.rows(units) == 1:
            return rows[:, None]
        shape = tf.concat([[units.number, -1], tf.shape(rows)[1:]], 0)
        return tf.ensure_shape(tf.reshape(rows, shape), [None, None, *rows.shape[1:]])

    def instantiate(self, units: Units) -> tf.Tensor:
        """Compute the filter gradient of each unit."""
        shape = tuple(self.variable.shape)
        parts = [
            convolution.filter_gradients(
                x, g, kernel_shape=shape, geometry=self.geometry
            )
            for x, g in _pairs(self.factors(units))
        ]
        return tf.reshape(tf.add_n(parts), [units.number, math.prod(shape)])

    def one_use(self, units: Units) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the factors of all uses, of equal shapes, as rows of a single one."""
        factors = self.factors(units)
        return tf.concat(factors[::2], 1), tf.concat(factors[1::2], 1)

    def _gram(self, x: tf.Tensor, y: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        return convolution.patch_gram(
            x,
            y,
            positions=g.shape[2:-1],
            kernel_shape=tuple(self.variable.shape),
            geometry=self.geometry,
        )

    def squares_by_gram(self, units: Units) -> tf.Tensor:
        """Gram matrices of the patches, from those of the pixels."""
        x, g = self.one_use(units)
        gram = self._gram(x, x, g)
        flat = tf.reshape(g, [units.number, -1, g.shape[-1]])
        *window, channels, filters = self.variable.shape
        places = math.prod(window)
        error = roundoff(places * channels, g.dtype) + roundoff(places, g.dtype)
        error += roundoff(filters, g.dtype) + _of_factors(g.dtype)
        return squares_from_grams(gram, inner_products(flat, flat), error=error)

    def lengths(self, units: Units) -> tf.Tensor:
        """Of what the kernel sees at each position, and of the gradients there."""
        return tf.add_n([
            _summed_products(
                convolution.patch_lengths(
                    x, g.shape[2:-1], tuple(self.variable.shape), self.geometry
                ),
                tf.norm(g, axis=-1),
                range(1, g.shape.rank - 1),
            )
            for x, g in _pairs(self.factors(units))
        ])

    def weighted_sum(
        self, factors: list[tf.Tensor], weights: tf.Tensor | None
    ) -> tf.Tensor:
        """One ordinary filter gradient for each use."""
        parts = [
            convolution.filter_gradient(
                tf.reshape(x, [-1, *x.shape[2:]]),
                tf.reshape(_weighted(g, weights), [-1, *g.shape[2:]]),
                kernel_shape=tuple(self.variable.shape),
                geometry=self.geometry,
            )
            for x, g in _pairs(factors)
        ]
        return tf.reshape(tf.add_n(parts), self.variable.shape)

    def inner_products(self, other: Term, units: Units) -> tf.Tensor:
        """From Gram matrices of pixels, or with kernels of the units' own."""
        if isinstance(other, Convolution) and self._can_gram(units, other.calls):
            x, g = self.one_use(units)
            y, h = other.one_use(units)
            flat = [
                tf.reshape(each, [units.number, -1, each.shape[-1]]) for each in (g, h)
            ]
            return tf.reduce_sum(self._gram(x, y, g) * inner_products(*flat), [1, 2])
        shape = [units.number, *self.variable.shape]
        kernels = tf.reshape(other.instantiate(units), shape)
        return tf.add_n([
            tf.reduce_sum(
                g
                * convolution.convolved(
                    x, kernels, positions=g.shape[2:-1], geometry=self.geometry
                ),
                list(range(1, g.shape.rank)),
            )
            for x, g in _pairs(self.factors(units))
        ])

    def tensors(self) -> list[tf.Tensor]:
        """Both factors of each use."""
        return [tensor for call in self.calls for tensor in call]

    def moved(self, jvp: Jvp, rate: tf.Tensor) -> "Convolution":
        """Move the inputs, then the gradients."""
        moved = Convolution(self.variable, *self.calls[0], self.geometry)
        moved.calls = _moved_pairs(self.calls, jvp, rate)
        moved.repeats = self.repeats
        return moved


def _moved(tensor: tf.Tensor, jvp: Jvp, rate: tf.Tensor) -> tf.Tensor:
    derivative = jvp(tensor) if tensor.dtype.is_floating else None
    if derivative is None:
        return tensor
    return tensor + tf.cast(rate, tensor.dtype) * derivative


def _moved_pairs(
    pairs: list[tuple[tf.Tensor, tf.Tensor]], jvp: Jvp, rate: tf.Tensor
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return ``a (x) (g + rate dg)`` and ``da (x) (rate g)``, for each pair."""
    moved = [(a, _moved(g, jvp, rate)) for a, g in pairs]
    for a, g in pairs:
        derivative = jvp(a) if a.dtype.is_floating else None
        if derivative is not None:
            moved.append((derivative, tf.cast(rate, g.dtype) * g))
    return moved


def _inner_products(a: tf.Tensor, b: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """``(U, T, S)`` from rows ``(U, T, d)`` and ``(U, S, d)``, or ids in their place."""
    if a.dtype.is_floating and b.dtype.is_floating:
        return inner_products(a, b)
    if a.dtype.is_floating:
        return tf.gather(a, b, axis=2, batch_dims=1)
    if b.dtype.is_floating:
        return tf.linalg.matrix_transpose(_inner_products(b, a, dtype))
    return tf.cast(a[:, :, None] == b[:, None, :], dtype)


def _added_up(ids: tf.Tensor, g: tf.Tensor) -> list[tf.Tensor]:
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
    flat = tf.reshape(g, [-1, g.shape[-1]])
    rows = tf.math.unsorted_segment_sum(flat, sums, count)
    names = tf.math.unsorted_segment_max(tf.reshape(ids, [-1]), sums, count)
    return [
        tf.reshape(tf.maximum(names, 0), [units, positions]),
        tf.reshape(rows, [units, positions, g.shape[-1]]),
    ]


def _of_factors(dtype: tf.DType) -> float:
    """Bound the error of inner products that hardware makes by rounding factors."""
    return 4 * matmul_roundoff(dtype)


def _summed_products(a: tf.Tensor, g: tf.Tensor, axes: Iterable[int]) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(a * g, tf.float64), list(axes))


def _weighted(units: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    if weights is None:
        return units
    shape = [-1] + [1] * (units.shape.rank - 1)
    return units * tf.reshape(tf.cast(weights, units.dtype), shape)


def _pairs(tensors: list[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))
