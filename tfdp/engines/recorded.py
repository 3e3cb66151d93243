"""A forward pass by the layers' rules, and what its backward passes say of the units."""

from collections.abc import Callable

import tensorflow as tf

from tfdp import _keras, rules
from tfdp._types import Tensor, Variable
from tfdp.clipping import at_least_float32, clip_factors, squares_rounded_up
from tfdp.engines.engine import Clipped
from tfdp.engines.passes import number_of_rows
from tfdp.losses.objective import Batch, Objective
from tfdp.losses.regularizers import gradient_of
from tfdp.rules.moves import Moves
from tfdp.rules.recording import Recording
from tfdp.rules.terms import Kept, Term, Units


class RecordedForward:
    """One recorded forward pass, and backward passes through it.

    Args:
        objective: What to differentiate.
        batch: Its number of rows is a multiple of `rows_per_unit`.
        rows_per_unit: Consecutive rows whose mean loss is one unit's loss.
        norms: How norms are computed; see `tfdp.engines.BookkeepingEngine`.
        moves: How the units have moved the variables, if they have.

    Attributes:
        units: How the rows are grouped.
        losses: One for each row.
        y_pred: The model's outputs.
    """

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        rows_per_unit: int | Tensor,
        *,
        norms: str,
        moves: Moves | None = None,
    ) -> None:
        rows = number_of_rows(batch.is_padding)
        known = rows_per_unit if isinstance(rows_per_unit, int) else None
        self.units = Units(rows // rows_per_unit, known)
        self._objective = objective
        self._norms = norms
        self._rows_per_unit = rows_per_unit
        real = tf.reshape(~batch.is_padding, [self.units.number, -1])
        self._is_empty = ~tf.reduce_any(real, axis=1)
        # A unit's loss is the mean over its real rows: padding weighs nothing.
        share = tf.cast(real, tf.float64)
        share = tf.math.divide_no_nan(share, tf.reduce_sum(share, 1, keepdims=True))
        self._shares = tf.reshape(share, [-1])
        self._tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        with self._tape:
            recording = Recording(objective.model, self._tape, rows, rules.find, moves)
            with recording.observing():
                self.y_pred = objective.predict(batch.x)
                losses = objective.losses(
                    batch.x, batch.y, self.y_pred, batch.sample_weight
                )
        self.losses = losses
        self._watched = recording.watched

    def terms_by_variable(self, weights: Tensor | None = None) -> list[list[Term]]:
        """Go back through the pass, each unit's loss with a weight or with 1.

        Returns:
            For each variable of the objective, what its gradients are made of.
        """
        scale = self._objective.loss_scale
        of_rows = self._shares * scale
        if weights is not None:
            repeated = tf.repeat(tf.cast(weights, tf.float64), self._rows_per_unit)
            of_rows *= tf.ensure_shape(repeated, of_rows.shape)
        tensors = [watched.tensors for watched in self._watched]
        gradients = self._tape.gradient(
            self.losses, tensors, output_gradients=tf.cast(of_rows, self.losses.dtype)
        )
        found: dict[int, list[Term]] = {id(v): [] for v in self._objective.variables}
        for watched, of_call in zip(self._watched, gradients, strict=True):
            # No loss depends on this call.
            if all(gradient is None for gradient in of_call):
                continue
            unscaled = [
                _unscaled(tensor, gradient, scale)
                for tensor, gradient in zip(watched.tensors, of_call, strict=True)
            ]
            for term in watched.terms_of(unscaled):
                # Rules cover frozen variables too.
                if id(term.variable) in found:
                    found[id(term.variable)].append(term)
        for variable, penalty in self._objective.penalties():
            found[id(variable)].append(self._same_for_all(variable, penalty, weights))
        return list(found.values())

    def _same_for_all(
        self,
        variable: Variable,
        penalty: Callable[[Variable], Tensor],
        weights: Tensor | None,
    ) -> Kept:
        """Return the gradient of what each unit's loss has of a variable alone."""
        gradient = tf.reshape(gradient_of(penalty, variable), [1, -1])
        if weights is None:
            weights = tf.ones([self.units.number], gradient.dtype)
        gradients = tf.cast(weights, gradient.dtype)[:, None] * gradient
        return Kept(variable, tf.ensure_shape(gradients, [None, *gradient.shape[1:]]))

    def squares_and_terms(
        self, *, keeps: bool
    ) -> tuple[list[Tensor], list[Term | None]]:
        """Bound each variable's squared norms, and keep what the sums need."""
        squares, ready = [], []
        for terms in self.terms_by_variable():
            term = joined(terms, self.units)
            if term is not None:
                of_variable, term = _squares(term, self._norms, self.units, keeps=keeps)
                squares.append(of_variable)
            ready.append(term)
        if not squares:
            squares.append(tf.zeros([self.units.number], tf.float64))
        return squares, ready

    def clipped(
        self, terms: list[Term | None], norms: Tensor, l2_norm_clip: Tensor
    ) -> Clipped:
        """Sum the units' clipped gradients.

        Args:
            terms: What the gradients of each variable are made of.
            norms: Of the units; those without a finite one are left out.
            l2_norm_clip: Radius of the clip ball.

        Returns:
            See `tfdp.engines.Engine.clip_and_sum`.
        """
        weights = clip_factors(norms, l2_norm_clip=l2_norm_clip)
        # Padding has no loss, but it would have its share of a divergence.
        weights = tf.where(self._is_empty, tf.zeros_like(weights), weights)
        finite = tf.math.is_finite(norms)
        clean = tf.reduce_all(finite)

        def selected(factors: list[Tensor]) -> list[Tensor]:
            # Chosen, not multiplied with a weight of zero: 0 * nan is nan.
            return [_selected(part, finite) for part in factors]

        def sum_of(variable: Variable, term: Term | None) -> Tensor:
            if term is None:
                return tf.zeros(variable.shape, at_least_float32(variable.value).dtype)
            factors = term.factors(self.units)
            if _keras.inside_xla():
                factors = selected(factors)
            else:
                # Each term by itself: one choice for all would hold all factors.
                factors = tf.cond(clean, lambda: factors, lambda: selected(factors))
            return term.weighted_sum(factors, weights)

        sums = [
            sum_of(variable, term)
            for variable, term in zip(self._objective.variables, terms, strict=True)
        ]
        return sums, tf.cast(norms, l2_norm_clip.dtype), self.y_pred


def _unscaled(tensor: Tensor, gradient: Tensor | None, scale: float) -> Tensor:
    """Return a tensor's gradient, of at least float32, zero if there is none."""
    if gradient is None:
        return at_least_float32(tf.zeros_like(tensor))
    gradient = at_least_float32(tf.convert_to_tensor(gradient))
    # Loops forget how many steps they take.
    gradient = tf.ensure_shape(gradient, tensor.shape)
    return gradient if scale == 1.0 else gradient / scale


def joined(terms: list[Term], units: Units) -> Term | None:
    """Return one term for all uses of a variable; None if there is none."""
    different: list[Term] = []
    for term in terms:
        for position, other in enumerate(different):
            merged = other.merged(term)
            if merged is not None:
                different[position] = merged
                break
        else:
            different.append(term)
    if len(different) <= 1:
        return different[0] if different else None
    # The norm of a sum: norms of its summands would say too little or too much.
    variable = different[0].variable
    return Kept(variable, tf.add_n([term.instantiate(units) for term in different]))


def _squares(
    term: Term, norms: str, units: Units, *, keeps: bool
) -> tuple[Tensor, Term]:
    """Bound the units' squared norms; return the term to sum with them."""
    how = term.how(norms, units)
    if how == "gram":
        return term.squares_by_gram(units), term
    if how == "keep" and keeps:
        kept = term.kept(units)
        return squares_rounded_up(kept.gradients), kept
    return term.squares_of_dropped(units), term


def _selected(units: Tensor, chosen: Tensor) -> Tensor:
    """Replace the units that are not chosen by zeros."""
    chosen = tf.reshape(chosen, [-1] + [1] * (units.shape.rank - 1))
    return tf.where(chosen, units, tf.zeros_like(units))
