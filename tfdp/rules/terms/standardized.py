"""The gradient of a kernel whose columns are centred and then divided by their length.

With P for taking the mean away, the columns o of the kernel W act as ``P W_o`` divided
by a number. What an example adds to the gradient of W is then

    P D_o - k_o P W_o,    D = sum_t a_t (x) g_t:

the gradient D of a matrix in that place, projected. Along ``P W_o`` the outputs of a
standardised layer do not change, which makes k what it is.
"""

import tensorflow as tf

from tfdp._types import Tensor
from tfdp.layers import centred
from tfdp.rules.products import of_factors, roundoff
from tfdp.rules.terms.convolution import Convolution
from tfdp.rules.terms.outer_products import OuterProducts
from tfdp.rules.terms.term import Jvp, Kept, Movable, Term, Units, moved_tensor


class Standardized(Movable):
    """``P D - P W diag(k)`` for the gradient D of a matrix.

    Args:
        products: What D is made of.
        kernel: ``P W``, in the shape of the variable.
        along: ``<P W_o, D_o>`` for each row, shape ``(R, O)``.
        taken: k for each row, shape ``(R, O)``.
    """

    def __init__(
        self,
        products: OuterProducts | Convolution,
        kernel: Tensor,
        along: Tensor,
        taken: Tensor,
    ) -> None:
        self.variable = products.variable
        self.products = products
        self.kernel = kernel
        self.uses = [(along, taken)]

    @property
    def repeats(self) -> int | None:
        """Rows for each row of the batch."""
        return self.products.repeats

    @repeats.setter
    def repeats(self, repeats: int | None) -> None:
        self.products.repeats = repeats

    def merged(self, other: Term) -> "Standardized | None":
        """Take the uses of both."""
        if not isinstance(other, Standardized):
            return None
        products = self.products.merged(other.products)
        if products is None:
            return None
        return self.copy_with(products=products, uses=self.uses + other.uses)

    def how(self, norms: str, units: Units) -> str:
        """As for the matrix."""
        return self.products.how(norms, units)

    def numbers(self, how: str, units: Units) -> int | None:
        """As for the matrix."""
        return self.products.numbers(how, units)

    def of_units(self, units: Units) -> tuple[Tensor, Tensor]:
        """Add up ``<P W, D>`` and k over the rows of each unit, shapes ``(U, O)``."""
        along, taken = (
            tf.add_n([
                tf.reduce_sum(units.view(rows, [rows.shape[-1]]), 1) for rows in tensors
            ])
            for tensors in zip(*self.uses, strict=True)
        )
        return along, taken

    @property
    def _columns(self) -> Tensor:
        """``P W``, shape ``(K, O)``."""
        return tf.reshape(self.kernel, [-1, self.kernel.shape[-1]])

    def instantiate(self, units: Units) -> Tensor:
        """Compute D, and project it."""
        _, taken = self.of_units(units)
        columns = self._columns
        gradients = units.view(self.products.instantiate(units), [columns.shape[1]])
        gradients -= tf.reduce_mean(gradients, 1, keepdims=True)
        gradients -= columns * taken[:, None]
        return tf.reshape(gradients, [units.number, tf.size(columns)])

    def squares_by_gram(self, units: Units) -> Tensor:
        """``|D|^2``, less what the projection takes away."""
        taken_away = tf.reduce_sum(self._taken_away(units), 1)
        squares = self.products.squares_by_gram(units) - taken_away
        dtype = self.kernel.dtype
        size = self._columns.shape[0]
        # Each sum is over the numbers of a column, of a position or of both.
        error = of_factors(dtype) + roundoff(size, dtype) + roundoff(1, dtype)
        error = 4 * (error + self.roundoff_of_positions(units, dtype))
        return tf.maximum(squares, 0) + error * tf.square(self.lengths(units))

    def _taken_away(self, units: Units) -> Tensor:
        """``|D_o|^2`` minus the squared length of the projection, ``(U, O)``."""
        along, taken = self.of_units(units)
        along, taken = (tf.cast(each, tf.float64) for each in (along, taken))
        sums = tf.cast(self.products.column_sums(units), tf.float64)
        columns = tf.cast(self._columns, tf.float64)
        lengths = tf.reduce_sum(tf.square(columns), 0)
        of_mean = tf.square(sums) / columns.shape[0]
        return of_mean + taken * (2 * along - taken * lengths)

    def column_squares(self, units: Units) -> Tensor:
        """Return the squared lengths of the columns, float64, shape ``(U, O)``."""
        ones = tf.ones([units.number, self.kernel.shape[-1]], self.kernel.dtype)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(ones)
            scaled = self.products.by_column(ones, units)
            product = self.products.inner_products(scaled, units)
        squares = tf.cast(tape.gradient(product, ones), tf.float64)
        return squares - self._taken_away(units)

    def column_products(self, units: Units) -> Tensor:
        """Multiply the columns with those of ``P W``, float64, shape ``(U, O)``."""
        along, taken = (tf.cast(each, tf.float64) for each in self.of_units(units))
        columns = tf.cast(self._columns, tf.float64)
        return along - taken * tf.reduce_sum(tf.square(columns), 0)

    def lengths(self, units: Units) -> Tensor:
        """Of the factors of D, and of what is taken away."""
        _, taken = self.of_units(units)
        columns = tf.norm(self._columns, axis=0)
        of_taken = tf.linalg.matvec(tf.abs(taken), columns)
        return self.products.lengths(units) + tf.cast(of_taken, tf.float64)

    def factors(self, units: Units) -> list[Tensor]:
        """Those of D, then k."""
        return [*self.products.factors(units), self.of_units(units)[1]]

    def weighted_sum(self, factors: list[Tensor], weights: Tensor | None) -> Tensor:
        """Project the sum of the D."""
        *of_products, taken = factors
        if weights is not None:
            taken *= tf.cast(weights, taken.dtype)[:, None]
        total = centred(self.products.weighted_sum(of_products, weights))
        return total - self.kernel * tf.reduce_sum(taken, 0)

    def inner_products(self, other: Movable, units: Units) -> Tensor:
        """As those of the D, less what the projections take away."""
        along, taken = self.of_units(units)
        columns = self._columns
        if isinstance(other, Standardized):
            product = self.products.inner_products(other.products, units)
            sums = self.products.column_sums(units)
            sums *= other.products.column_sums(units)
            other_along, other_taken = other.of_units(units)
            less = sums / columns.shape[0] + taken * other_along + along * other_taken
            less -= taken * other_taken * tf.reduce_sum(tf.square(columns), 0)
            return product - tf.reduce_sum(less, 1)
        gradients = units.view(other.instantiate(units), [columns.shape[1]])
        gradients -= tf.reduce_mean(gradients, 1, keepdims=True)
        flat = tf.reshape(gradients, [units.number, tf.size(columns)])
        product = self.products.inner_products(Kept(self.variable, flat), units)
        less = tf.reduce_sum(gradients * columns, 1) * taken
        return product - tf.reduce_sum(less, 1)

    def by_column(self, factors: Tensor, units: Units) -> "Standardized":
        """Multiply the D and k."""
        uses = [
            (
                along * units.for_rows(factors, along),
                taken * units.for_rows(factors, taken),
            )
            for along, taken in self.uses
        ]
        products = self.products.by_column(factors, units)
        return self.copy_with(products=products, uses=uses)

    def tensors(self) -> list[Tensor]:
        """The factors of D, and the numbers."""
        return [*self.products.tensors(), *(each for use in self.uses for each in use)]

    def read(self) -> list[Tensor]:
        """The factors of D, and the numbers."""
        return [*self.products.read(), *(each for use in self.uses for each in use)]

    def moved(self, jvp: Jvp, rate: Tensor) -> "Standardized":
        """Move D, and the numbers."""
        uses = [
            (moved_tensor(along, jvp, rate), moved_tensor(taken, jvp, rate))
            for along, taken in self.uses
        ]
        return self.copy_with(products=self.products.moved(jvp, rate), uses=uses)
