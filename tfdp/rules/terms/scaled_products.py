"""The gradient of what is multiplied, number by number, before it is a matrix."""

import math

import tensorflow as tf

from tfdp._types import Tensor, Variable
from tfdp.clipping import at_least_float32
from tfdp.rules.products import roundoff, summed_products
from tfdp.rules.terms.term import Term, Units, weighted


class ScaledProducts(Term):
    """``sum_t (a_t (x) g_t) * scale``, for a matrix that is made by ``f(V)``.

    With ``scale = f'(V)`` this is the gradient of V where ``f(V)`` multiplies rows, be
    f some function of single numbers or of them and of random ones. Of a row with one
    position, the squared norm is ``sum_jk a_j^2 scale_jk^2 g_k^2``: a product with the
    matrix of squares, and no gradient of any example.

    Args:
        variable: The Keras variable, of d p numbers, the d outermost.
        a: Inputs, floating point of shape ``(R, ..., d)``.
        g: Gradients of the outputs, shape ``(R, ..., p)`` with the same axes between.
        scale: Shape ``(V, *variable.shape)``: row r has the one of number ``r % V``. It
            must not depend on data.
    """

    def __init__(self, variable: Variable, a: Tensor, g: Tensor, scale: Tensor) -> None:
        self.variable = variable
        self.a = at_least_float32(a)
        self.g = at_least_float32(g)
        self.p: int = g.shape[-1]
        self.d: int = math.prod(variable.shape) // self.p
        scale = tf.cast(scale, self.g.dtype)
        self.scale = tf.reshape(scale, [-1, self.d, self.p])

    def _is_single(self, units: Units) -> bool:
        """Whether each unit is one position: then it has one scale."""
        between = self.g.shape[1:-1]
        return (
            self.rows(units) == 1
            and between.is_fully_defined()
            and math.prod(between) == 1
        )

    def how(self, norms: str, units: Units) -> str:
        """By squares where there is one position, else by the units' gradients."""
        return "gram" if self._is_single(units) and norms != "instantiate" else "drop"

    def numbers(self, how: str, units: Units) -> int:
        """One number, or the gradient."""
        return 1 if how == "gram" else self.d * self.p

    def instantiate(self, units: Units) -> Tensor:
        """Multiply the factors out, row by row, and add them up."""
        # Rows of one unit have scales of their own: summed first, they would mix.
        d, p = self.d, self.p
        a, g = (self._rows(each) for each in (self.a, self.g))
        products = tf.einsum("mvtd,mvtp->mvdp", a, g) * self.scale
        return tf.reduce_sum(units.view(products, [d * p]), 1)

    def _rows(self, tensor: Tensor) -> Tensor:
        """``(R, ..., k)`` -> ``(R / V, V, T, k)``."""
        size = tensor.shape[-1]
        views = tf.shape(self.scale)[0]
        positions = tf.reduce_prod(tf.shape(self.g)[1:-1])
        return tf.reshape(tensor, [-1, views, positions, size])

    def squares_by_gram(self, units: Units) -> Tensor:
        """``sum_jk a_j^2 scale_jk^2 g_k^2``, in float64: squares have a wide range."""
        d, p = self.d, self.p
        a, g = (tf.reshape(self.a, [-1, d]), tf.reshape(self.g, [-1, p]))
        a, g, scale = (
            tf.square(tf.cast(each, tf.float64)) for each in (a, g, self.scale)
        )
        if self.scale.shape[0] == 1:
            products = tf.matmul(a, scale[0])
        else:
            # One for each row, or one for all in a number that is not static.
            products = tf.matmul(a[:, None], scale)[:, 0]
        squares = tf.reduce_sum(products * g, 1)
        error = roundoff(d, tf.float64) + roundoff(p, tf.float64)
        # The gradients themselves are products of three rounded numbers.
        return squares * (1 + error + 4 * roundoff(1, self.g.dtype))

    def lengths(self, units: Units) -> Tensor:
        """At most the largest scale times the lengths of both factors."""
        a, g = (
            units.view(tf.norm(each, axis=-1)[..., None], [1])[:, :, 0]
            for each in (self.a, self.g)
        )
        largest = tf.cast(tf.reduce_max(tf.abs(self.scale)), tf.float64)
        return summed_products(a, g, [1]) * largest

    def factors(self, units: Units) -> list[Tensor]:
        """``(U, T, d)``, then ``(U, T, p)``."""
        d, p = self.d, self.p
        return [units.view(self.a, [d]), units.view(self.g, [p])]

    def weighted_sum(self, factors: list[Tensor], weights: Tensor | None) -> Tensor:
        """One ordinary product for each scale."""
        a, g = factors
        a, g = self._rows(a), self._rows(weighted(g, weights))
        products = tf.einsum("mvtd,mvtp->vdp", a, g)
        total = tf.reduce_sum(products * self.scale, 0)
        return tf.reshape(total, self.variable.shape)

    def read(self) -> list[Tensor]:
        """All three factors."""
        return [self.a, self.g, self.scale]
