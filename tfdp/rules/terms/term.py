"""What a term can do, and gradients that are computed already."""

import abc
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

import tensorflow as tf

from tfdp._types import Tensor, Variable
from tfdp.clipping import (
    at_least_float32,
    machine_epsilon,
    side_by_side,
    squares_rounded_up,
    weighted_sums,
)
from tfdp.rules.products import dots, matmul_by_unit, of_factors

# From a tensor to its derivative along something, None for zeros.
Jvp: TypeAlias = Callable[[Tensor], Tensor | None]

# Where the number of positions is not known, gradients of at most this many numbers
# are instantiated.
FEW_NUMBERS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Units:
    """How the rows of a pass are grouped.

    Attributes:
        number: How many units there are, a scalar tensor or an int.
        rows: Consecutive rows in a unit, None where that is not static.
    """

    number: int | Tensor
    rows: int | None

    def view(
        self, tensor: Tensor, trailing: Sequence[int], repeats: int | None = None
    ) -> Tensor:
        """``(R, ..., *trailing)`` -> ``(U, positions, *trailing)``.

        Args:
            tensor: Rows of a call.
            trailing: Lengths of the last axes.
            repeats: `Term.repeats`, if that is known: no length is left to find out.

        Returns:
            The rows of each unit along one axis.
        """
        if self.rows and repeats:
            between = tensor.shape[1 : tensor.shape.rank - len(trailing)]
            if between.is_fully_defined():
                positions = self.rows * repeats * math.prod(between)
                return self.reshape(tensor, [positions, *trailing])
        return tf.reshape(tensor, [self.number, -1, *trailing])

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """``(...)`` -> ``(U, *shape)``."""
        if tensor.shape.rank and tensor.shape[1:] == shape and 0 not in shape:
            return tensor
        # -1 needs no operation, but does not follow where there are no numbers.
        return tf.reshape(tensor, [self.number if 0 in shape else -1, *shape])

    def for_rows(self, of_units: Tensor, rows: Tensor) -> Tensor:
        """``(U, p)`` -> ``(R, ..., p)``, to be multiplied with `rows`."""
        # A call may have several rows for each row of the batch.
        repeats = tf.shape(rows)[0] // tf.maximum(self.number, 1)
        of_units = tf.repeat(of_units, repeats, axis=0)
        between = [1] * (rows.shape.rank - 2)
        shape = [tf.shape(rows)[0], *between, of_units.shape[-1]]
        return tf.cast(tf.reshape(of_units, shape), rows.dtype)


class Term(abc.ABC):
    """One summand of the gradient of a variable.

    A term of one's own needs the five methods that are abstract. The others say of a
    gradient that is never cheaper than by instantiating it what there is to say.

    Attributes:
        variable: The Keras variable.
        repeats: Rows for each row of the batch; None if not the same in all uses.
    """

    variable: Variable
    repeats: int | None = 1

    @abc.abstractmethod
    def factors(self, units: Units) -> list[Tensor]:
        """Return what the gradients are made of, each with leading axis ``U``.

        What is multiplied and summed over positions comes in pairs, the gradients of
        the outputs second: their positions are counted, for what rounding can lose.
        """

    @abc.abstractmethod
    def instantiate(self, units: Units) -> Tensor:
        """Compute each unit's gradient, shape ``(U, size of the variable)``."""

    @abc.abstractmethod
    def lengths(self, units: Units) -> Tensor:
        """Sum the products of the lengths of the factors, float64, shape ``(U,)``."""

    @abc.abstractmethod
    def weighted_sum(self, factors: list[Tensor], weights: Tensor | None) -> Tensor:
        """Sum the units' gradients times their weights.

        Args:
            factors: As `factors` returns them, some units perhaps set to zero.
            weights: Shape ``(U,)``; None for ones.

        Returns:
            Shape of the variable.
        """

    @abc.abstractmethod
    def read(self) -> list[Tensor]:
        """List all tensors that the gradients are made of, rows on the first axis.

        That each entry depends on its row alone is proven before the first step. One
        entry on that axis is for all rows, and must depend on none.
        """

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
        del norms, units
        return "drop"

    def numbers(self, how: str, units: Units) -> int | None:
        """Count the numbers that the norm of one unit takes; None if unknown."""
        del how, units
        return int(math.prod(self.variable.shape))

    def squares_by_gram(self, units: Units) -> Tensor:
        """Bound the squared norms without instantiating, float64, shape ``(U,)``."""
        return self.squares_of_dropped(units)

    def squares_of_dropped(self, units: Units) -> Tensor:
        """Bound the squared norms of gradients that are computed again for the sum.

        Where they cancel, the sum may round otherwise: by what the lengths of the
        factors bound.

        Args:
            units: How rows are grouped.

        Returns:
            float64, shape ``(U,)``.
        """
        # The sum is made of the factors, in another order than these gradients: where
        # large numbers cancel, the two differ by roundoff of the large ones.
        kept = self.kept(units).gradients
        lengths = self.lengths(units)
        guard = of_factors(kept.dtype) + self.roundoff_of_positions(units, kept.dtype)
        return squares_rounded_up(kept) + guard * tf.square(lengths)

    def roundoff_of_positions(self, units: Units, dtype: tf.DType) -> Tensor:
        """Bound the error of sums over the positions of a unit, relative to lengths."""
        # Gradients of outputs are the second of each pair: (U, T, p) has T positions.
        products = [
            tf.cast(
                tf.size(g) // g.shape[-1] // tf.maximum(units.number, 1), tf.float64
            )
            for g in self.factors(units)[1::2]
        ]
        # A sum of n alike numbers was seen to be off by n / 4 units of roundoff.
        positions = tf.add_n([tf.constant(0.0, tf.float64), *products])
        return positions * machine_epsilon(dtype) / 8

    def kept(self, units: Units) -> "Kept":
        """Instantiate in whatever order of numbers is fastest."""
        return Kept(self.variable, self.instantiate(units))

    def merged(self, other: "Term") -> "Term | None":
        """Return one term for both, of one variable, or None if there is none."""
        del other
        return None

    def movable(self, units: Units) -> "Movable":
        """Return these gradients as what units can move the variable along."""
        return self.kept(units)

    def rows(self, units: Units) -> int | None:
        """Count the rows of a unit, None where that is not static."""
        # Uses with other numbers of rows have no common one.
        if units.rows is None or self.repeats is None:
            return None
        return units.rows * self.repeats

    def copy_with(self, **attributes: object) -> Self:
        """Return a copy with other attributes."""
        new = copy.copy(self)
        vars(new).update(attributes)
        return new


class Movable(Term):
    """A term along which each unit can move the variable, for `tfdp.losses.BAM`.

    What moved layers compute needs products with each unit's gradient. Terms with
    factors have shorter ways to them than the gradients themselves.
    """

    @abc.abstractmethod
    def tensors(self) -> list[Tensor]:
        """List the floating-point tensors that `moved` needs the derivatives of."""

    @abc.abstractmethod
    def moved(self, jvp: Jvp, rate: Tensor) -> "Movable":
        """Return the term with its derivative added.

        Args:
            jvp: Returns the derivative of a tensor, None for zeros.
            rate: What the derivative is multiplied by, a scalar tensor.
        """

    def read(self) -> list[Tensor]:
        """List what can move, unless there is more."""
        return self.tensors()

    def movable(self, units: Units) -> "Movable":
        """Return the term itself."""
        del units
        return self

    def inner_products(self, other: "Movable", units: Units) -> Tensor:
        """Multiply each unit's gradient with what another term has for the variable.

        Args:
            other: The other term.
            units: How rows are grouped, in both.

        Returns:
            Shape ``(U,)``, not rounded up.
        """
        return dots(self.instantiate(units), other.instantiate(units))

    def applied(self, a: Tensor, units: Units) -> Tensor:
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
            return matmul_by_unit(a, units.reshape(gradients, [d, size // d]))
        p = self.variable.shape[-1]
        matrices = units.reshape(gradients, [size // p, p])
        return tf.gather(matrices, a, batch_dims=1)

    def applied_back(self, g: Tensor, units: Units) -> Tensor:
        """Multiply by the transpose of each unit's gradient, as a matrix.

        Args:
            g: Rows to multiply, floating point, shape ``(U, T, p)``.
            units: How rows are grouped.

        Returns:
            Shape ``(U, T, d)``.
        """
        p = g.shape[-1]
        shape = [math.prod(self.variable.shape) // p, p]
        matrices = units.reshape(self.instantiate(units), shape)
        return matmul_by_unit(g, matrices, transpose_b=True)

    def by_column(self, factors: Tensor, units: Units) -> "Movable":
        """Return the term whose gradients are those of this, times factors.

        Args:
            factors: One for each index of the variable's last axis, shape ``(U, p)``.
            units: How rows are grouped.
        """
        gradients = self.instantiate(units)
        columns = units.view(gradients, [factors.shape[-1]])
        scaled = columns * tf.cast(factors, columns.dtype)[:, None]
        return Kept(self.variable, tf.reshape(scaled, tf.shape(gradients)))


class Kept(Movable):
    """Gradients of whole units, computed already.

    Args:
        variable: The Keras variable.
        gradients: Shape ``(U, size of the variable)``.
        transposed: Numbers of rows and columns, if these gradients are matrices that
            are transposed in the variable.
    """

    def __init__(
        self,
        variable: Variable,
        gradients: Tensor,
        transposed: tuple[int, int] | None = None,
    ) -> None:
        self.variable = variable
        self.gradients = gradients
        self._transposed = transposed

    def how(self, norms: str, units: Units) -> str:
        """Keep them."""
        del norms, units
        return "keep"

    def instantiate(self, units: Units) -> Tensor:
        """Return them, as the variable has them."""
        if self._transposed is None:
            return self.gradients
        matrices = units.reshape(self.gradients, self._transposed)
        size = math.prod(self.variable.shape)
        return units.reshape(tf.linalg.matrix_transpose(matrices), [size])

    def squares_by_gram(self, units: Units) -> Tensor:
        """From the gradients themselves."""
        return squares_rounded_up(self.instantiate(units))

    def lengths(self, units: Units) -> Tensor:
        """Zero: these gradients are what is summed."""
        return tf.zeros([units.number], tf.float64)

    def factors(self, units: Units) -> list[Tensor]:
        """The gradients are the only factor."""
        del units
        return [self.gradients]

    def weighted_sum(self, factors: list[Tensor], weights: Tensor | None) -> Tensor:
        """One product of a matrix and a vector."""
        (gradients,) = factors
        if weights is None:
            total = tf.reduce_sum(gradients, 0)
        else:
            (total,) = weighted_sums(*side_by_side([gradients]), weights)
        return self.of_variable(total)

    def of_variable(self, total: Tensor) -> Tensor:
        """Return a sum of these gradients in the shape of the variable."""
        # Summed first: one matrix is transposed, not one for each unit.
        if self._transposed is not None:
            total = tf.transpose(tf.reshape(total, self._transposed))
        return tf.reshape(total, self.variable.shape)

    def tensors(self) -> list[Tensor]:
        """The gradients."""
        return [self.gradients]

    def moved(self, jvp: Jvp, rate: Tensor) -> "Kept":
        """Move the gradients."""
        return self.copy_with(gradients=moved_tensor(self.gradients, jvp, rate))


class PerRow(Kept):
    """Gradients of the rows themselves, for variables with few numbers.

    Args:
        variable: The Keras variable.
        gradients: Shape ``(R, ..., *variable.shape)``; what is between is summed.
    """

    def instantiate(self, units: Units) -> Tensor:
        """Add up the rows of each unit."""
        # Half precision would be too coarse for a norm.
        rows = at_least_float32(self.gradients)
        size = math.prod(self.variable.shape)
        between = rows.shape.rank - len(self.variable.shape)
        if between == 1 and self.rows(units) == 1:
            return units.reshape(rows, [size])
        shape = self.variable.shape
        of_units = tf.reduce_sum(units.view(rows, shape, self.repeats), axis=1)
        return of_units if len(shape) == 1 else units.reshape(of_units, [size])

    def factors(self, units: Units) -> list[Tensor]:
        """The units' gradients are the only factor."""
        return [self.instantiate(units)]


def in_rows(tensor: Tensor, *, has_features: bool = True) -> Tensor:
    """Put what is between rows and features along one axis of positions, if known.

    Args:
        tensor: Shape ``(R, ..., d)``, or ``(R, ...)`` without features.
        has_features: Whether there are some.

    Returns:
        Shape ``(R, T, d)`` or ``(R, T)``; the tensor where that does not follow.
    """
    end = tensor.shape.rank - has_features
    between = tensor.shape[1:end]
    if not tensor.shape[1:].is_fully_defined() or not tensor.shape[1:].num_elements():
        return tensor
    shape = [math.prod(between), *tensor.shape[end:]]
    return tensor if tensor.shape[1:] == shape else tf.reshape(tensor, [-1, *shape])


def weighted(units: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply each unit's part by its weight."""
    if weights is None:
        return units
    shape = [-1] + [1] * (units.shape.rank - 1)
    return units * tf.reshape(tf.cast(weights, units.dtype), shape)


def in_pairs(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return neighbours as pairs."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))


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
