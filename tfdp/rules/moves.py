"""Weights of each unit's own, a little off the model's, that nobody has to hold."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfdp._types import Nest, Tensor, Variable
from tfdp.clipping import at_least_float32
from tfdp.rules.terms import Movable, Term, Units


class Move(NamedTuple):
    """How the units move one variable.

    Attributes:
        direction: The term along whose gradients they move it.
        lengths: What these are multiplied by, shape ``(U,)``.
        units: How rows are grouped.
    """

    direction: Movable
    lengths: Tensor
    units: Units

    def times(self, rows: Tensor) -> Tensor:
        """Return what products with a matrix gain, ``(R, d) -> (R, p)``."""
        return self._multiplied(rows, self.direction.applied)

    def times_transposed(self, rows: Tensor) -> Tensor:
        """Return what those with its transpose gain, ``(R, p) -> (R, d)``."""
        return self._multiplied(rows, self.direction.applied_back)

    def _multiplied(self, rows: Tensor, times: Callable[..., Tensor]) -> Tensor:
        units = self.units.view(at_least_float32(rows), [rows.shape[-1]])
        products = times(units, self.units)
        products *= tf.cast(self.lengths, products.dtype)[:, None, None]
        products = tf.reshape(products, [-1, products.shape[-1]])
        return tf.cast(products, rows.dtype)


class Moves:
    """Where each unit has moved the variables: along a gradient that has factors.

    What a layer adds to ``h W`` for a unit that moved W by ``sum_t a_t (x) g_t`` is
    ``sum_t <h, a_t> g_t``: no unit needs a copy of W.

    Args:
        directions: What each variable moves along, by its `id`; the others stay.
        lengths: How far each unit moves, shape ``(U,)``.
        units: How rows are grouped.
        step: What the lengths are multiplied by: a scalar 0, by which gradients will
            be differentiated; None for 1.
    """

    def __init__(
        self,
        directions: dict[int, Movable],
        lengths: Tensor,
        units: Units,
        *,
        step: Tensor | None,
    ) -> None:
        self._directions = directions
        self._lengths = lengths
        self._stepped = lengths if step is None else step * lengths
        self._units = units
        self._step = step

    @property
    def are_differentiated(self) -> bool:
        """Whether gradients will be differentiated by the step."""
        return self._step is not None

    def moved(self, tensor: Tensor, shift: Tensor) -> Tensor:
        """Add to a tensor what it gains.

        Args:
            tensor: What a layer computes with the model's weights.
            shift: What `shifts` returns for it.

        Returns:
            What it computes with the weights of the units. At a step of 0, which is
            there to differentiate by, the numbers are the same.
        """
        shift = tf.cast(shift, tensor.dtype)
        if self._step is None:
            # It does not broadcast; see `matmul_by_unit`.
            return tf.add_n([tensor, shift])
        return _along(tensor, shift, self._step)

    def shifts(
        self, tensors: list[Tensor], terms: Callable[[list[Tensor]], list[Term]]
    ) -> list[Tensor | None]:
        """Return what tensors gain, by a step of 1, that are linear in the variables.

        The terms say how gradients of the tensors become those of the variables. That
        is a linear map, and its transpose takes a change of the variables to that of
        the tensors.

        Args:
            tensors: The tensors.
            terms: From their gradients to the terms.

        Returns:
            One for each tensor, for `moved`; None for zeros.
        """
        zeros = [at_least_float32(tf.zeros_like(tensor)) for tensor in tensors]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(zeros)
            products = [
                term.movable(self._units).inner_products(direction, self._units)
                for term in terms(zeros)
                if (direction := self._directions.get(id(term.variable))) is not None
            ]
        lengths = [tf.cast(self._lengths, product.dtype) for product in products]
        shifts: list[Tensor | None] = tape.gradient(
            products, zeros, output_gradients=lengths
        )
        return shifts

    def of(self, variable: Variable) -> Move | None:
        """Return how a variable moves; None if it stays."""
        direction = self._directions.get(id(variable))
        if direction is None:
            return None
        return Move(direction, self._stepped, self._units)


# A product with a step of 0 would be computed to its end, and so would all that its
# derivatives multiply by 0. These leave out what is known to be 0.


@tf.custom_gradient
def _along(
    tensor: Tensor, shift: Tensor, step: Tensor
) -> tuple[Tensor, Callable[..., Nest]]:
    """Compute ``tensor + step shift`` for a step of 0."""

    def gradient(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Slices, where rows are taken out of the tensor.
        g = tf.convert_to_tensor(g)
        by_step = tf.cast(tf.reduce_sum(g * shift), step.dtype)
        return g, _nothing(g, step), by_step

    return tf.identity(tensor), gradient


@tf.custom_gradient
def _nothing(tensor: Tensor, step: Tensor) -> tuple[Tensor, Callable[..., Nest]]:
    """Compute ``step tensor`` for a step of 0, to be differentiated by it, once."""

    def gradient(g: Tensor) -> tuple[None, Tensor]:
        return None, tf.cast(tf.reduce_sum(g * tensor), step.dtype)

    return tf.zeros_like(tensor), gradient
