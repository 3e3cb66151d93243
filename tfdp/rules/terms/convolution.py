"""The gradient of a kernel that slides over inputs."""

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdp import _tree
from tfdp._types import Tensor, Variable
from tfdp.clipping import at_least_float32
from tfdp.rules import filters, own_kernels, patches
from tfdp.rules.geometry import Geometry
from tfdp.rules.products import (
    dots,
    inner_products,
    of_factors,
    roundoff,
    squares_from_grams,
    summed_products,
)
from tfdp.rules.terms.term import (
    FEW_NUMBERS,
    Jvp,
    Movable,
    Term,
    Units,
    in_pairs,
    moved_pairs,
    weighted,
)

# Gradients of units may take this many numbers for each number of the activations
# that they are made of, to be kept until the weights are known.
_KEPT_FOR_AN_ACTIVATION = 2


# Time to square and sum a kept number, in multiplications of a matrix product.
_SQUARED_AND_SUMMED = 30


class Convolution(Movable):
    """The gradient of a kernel that slides over `inputs`.

    Args:
        variable: The Keras variable, ``(*kernel size, C / groups, O)``.
        inputs: Shape ``(R, *spatial, C)``, channels last.
        g: Gradients of the outputs, shape ``(R, *spatial', O)``.
        geometry: Strides, dilations and padding.
    """

    def __init__(
        self, variable: Variable, inputs: Tensor, g: Tensor, geometry: Geometry
    ) -> None:
        self.variable = variable
        self.calls = [(inputs, g)]
        self.geometry = geometry

    def merged(self, other: Term) -> "Convolution | None":
        """Take the uses of both."""
        if not isinstance(other, Convolution) or other.geometry != self.geometry:
            return None
        repeats = self.repeats if self.repeats == other.repeats else None
        return self.copy_with(calls=self.calls + other.calls, repeats=repeats)

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
        self, units: Units, others: Sequence[tuple[Tensor, Tensor]] = ()
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
        # Without a static number of positions nothing says what either way takes.
        if norms == "instantiate" or known is None:
            return "drop" if norms == "instantiate" else "keep"
        if norms == "gram":
            return "gram" if can_gram else "drop"
        *kernel, channels, outer = self.variable.shape
        size = math.prod(self.variable.shape)
        outputs, inputs = known
        activations = inputs * channels + outputs * outer
        is_large = size > max(_KEPT_FOR_AN_ACTIVATION * activations, FEW_NUMBERS)
        if not can_gram:
            return "drop" if is_large else "keep"
        # In multiplications for a unit: Gram matrices of pixels (I x I over C channels)
        # and of outputs (T x T over O), and for each number of the kernel a slice of the
        # former.
        slices = patches.SLICED * math.prod(kernel) * outputs**2
        gram = inputs**2 * channels + outputs**2 * outer + slices
        # The sum takes one ordinary gradient more than where gradients are kept.
        kept = (_SQUARED_AND_SUMMED + 0.2 * outputs) * size
        return "gram" if is_large or gram < kept else "keep"

    def numbers(self, how: str, units: Units) -> int | None:
        """The gradient, or the Gram matrices of pixels, patches and outputs."""
        if how != "gram":
            return int(math.prod(self.variable.shape))
        known = self._numbers(units)
        return None if known is None else known[1] * known[1] + 2 * known[0] * known[0]

    def factors(self, units: Units) -> list[Tensor]:
        """``(U, K, *spatial, C)``, then ``(U, K, *spatial', O)``, for each use."""
        return [
            self._rows_of_units(at_least_float32(tensor), units)
            for call in self.calls
            for tensor in call
        ]

    def _rows_of_units(self, rows: Tensor, units: Units) -> Tensor:
        """``(R, ...)`` -> ``(U, K, ...)``."""
        # A reshape with an unknown length would lose what is static.
        if self.rows(units) == 1:
            return rows[:, None]
        shape = tf.concat([[units.number, -1], tf.shape(rows)[1:]], 0)
        return tf.ensure_shape(tf.reshape(rows, shape), [None, None, *rows.shape[1:]])

    def instantiate(self, units: Units) -> Tensor:
        """Compute the filter gradient of each unit."""
        shape = tuple(self.variable.shape)
        parts = [
            filters.filter_gradients(x, g, kernel_shape=shape, geometry=self.geometry)
            for x, g in in_pairs(self.factors(units))
        ]
        return units.reshape(tf.add_n(parts), [math.prod(shape)])

    def one_use(self, units: Units) -> tuple[Tensor, Tensor]:
        """Return the factors of all uses, of equal shapes, as rows of a single one."""
        factors = self.factors(units)
        return tf.concat(factors[::2], 1), tf.concat(factors[1::2], 1)

    def _gram(self, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
        return patches.patch_gram(
            x,
            y,
            positions=g.shape[2:-1],
            kernel_shape=tuple(self.variable.shape),
            geometry=self.geometry,
        )

    def squares_by_gram(self, units: Units) -> Tensor:
        """Gram matrices of the patches, from those of the pixels."""
        x, g = self.one_use(units)
        gram = self._gram(x, x, g)
        flat = tf.reshape(g, [units.number, -1, g.shape[-1]])
        *window, channels, outer = self.variable.shape
        places = math.prod(window)
        # A patch's inner product is a sum over the kernel's places of sums over channels.
        error = roundoff(places * channels, g.dtype) + roundoff(places, g.dtype)
        error += roundoff(outer, g.dtype) + of_factors(g.dtype)
        return squares_from_grams(gram, inner_products(flat, flat), error=error)

    def lengths(self, units: Units) -> Tensor:
        """Of what the kernel sees at each position, and of the gradients there."""
        # Groups see fewer channels each: as if all were one, the bound only grows.
        shape = (*self.variable.shape[:-2], 1, 1)
        if not all(x.shape[1:].is_fully_defined() for x, _ in self.calls):
            # By Cauchy-Schwarz, in each row: a pixel is seen from as many positions as the
            # kernel has numbers, at most.
            most_often = math.sqrt(math.prod(shape))
            return tf.add_n([
                most_often * tf.reduce_sum(_norms_of_rows(x) * _norms_of_rows(g), 1)
                for x, g in in_pairs(self.factors(units))
            ])
        return tf.add_n([
            summed_products(
                tf.sqrt(
                    patches.patch_sums(
                        tf.reduce_sum(tf.square(x), -1, keepdims=True),
                        g.shape[2:-1],
                        shape,
                        self.geometry,
                    )[..., 0]
                ),
                tf.norm(g, axis=-1),
                range(1, g.shape.rank - 1),
            )
            for x, g in in_pairs(self.factors(units))
        ])

    def weighted_sum(self, factors: list[Tensor], weights: Tensor | None) -> Tensor:
        """One ordinary filter gradient for each use."""
        parts = [
            filters.filter_gradient(
                _tree.joined(x),
                _tree.joined(weighted(g, weights)),
                kernel_shape=tuple(self.variable.shape),
                geometry=self.geometry,
            )
            for x, g in in_pairs(factors)
        ]
        return tf.reshape(tf.add_n(parts), self.variable.shape)

    def inner_products(self, other: Movable, units: Units) -> Tensor:
        """From Gram matrices of pixels, or with kernels of the units' own."""
        if isinstance(other, Convolution) and self._can_gram(units, other.calls):
            x, g = self.one_use(units)
            y, h = other.one_use(units)
            flat = [
                tf.reshape(each, [units.number, -1, each.shape[-1]]) for each in (g, h)
            ]
            return dots(self._gram(x, y, g), inner_products(*flat))
        shape = [units.number, *self.variable.shape]
        kernels = tf.reshape(other.instantiate(units), shape)
        return tf.add_n([
            dots(
                g,
                own_kernels.convolved(
                    x, kernels, positions=g.shape[2:-1], geometry=self.geometry
                ),
            )
            for x, g in in_pairs(self.factors(units))
        ])

    def column_sums(self, units: Units) -> Tensor:
        """Sum each unit's gradient over all axes but the last, shape ``(U, O)``."""
        shape = tuple(self.variable.shape)
        sums = []
        for x, g in in_pairs(self.factors(units)):
            seen = patches.patch_sums(x, g.shape[2:-1], shape, self.geometry)
            seen = units.view(seen, [seen.shape[-1], 1])
            grouped = units.view(g, [seen.shape[-2], g.shape[-1] // seen.shape[-2]])
            product = tf.reduce_sum(seen * grouped, 1)
            sums.append(units.reshape(product, [g.shape[-1]]))
        return tf.add_n(sums)

    def by_column(self, factors: Tensor, units: Units) -> "Convolution":
        """Multiply the gradients of the outputs."""
        calls = [(x, g * units.for_rows(factors, g)) for x, g in self.calls]
        return self.copy_with(calls=calls)

    def tensors(self) -> list[Tensor]:
        """Both factors of each use."""
        return [tensor for call in self.calls for tensor in call]

    def moved(self, jvp: Jvp, rate: Tensor) -> "Convolution":
        """Move the inputs, then the gradients."""
        return self.copy_with(calls=moved_pairs(self.calls, jvp, rate))


def _norms_of_rows(of_units: Tensor) -> Tensor:
    """``(U, K, ...)`` -> ``(U, K)``, float64."""
    axes = list(range(2, of_units.shape.rank))
    return tf.cast(tf.sqrt(tf.reduce_sum(tf.square(of_units), axes)), tf.float64)
