"""Recorded passes in which each unit has moved the weights along its own gradient."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor
from tfdp.ascent.losses import Ascent
from tfdp.clipping import norms_of_squares, zeros_of_finite
from tfdp.engines.recorded import RecordedForward
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Batch, Objective
from tfdp.rules.moves import Moves
from tfdp.rules.terms import Jvp, Movable, Term


class RecordedUphill(RecordedForward):
    """A forward pass whose units have gone a step uphill, each along its own gradient.

    Two passes are recorded: one here, which says where uphill is, and one there.

    Args:
        objective: See `RecordedForward`, as for the rest.
        batch: Its rows.
        rows_per_unit: Rows of a unit.
        norms: How norms are computed.
        ascent: The step.

    Raises:
        UnsupportedLayerError: If some unit cannot go uphill.
    """

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        rows_per_unit: int | Tensor,
        *,
        norms: str,
        ascent: Ascent,
    ) -> None:
        if objective.penalties():
            names = ", ".join(f"`{v.path}`" for v, _ in objective.penalties())
            raise UnsupportedLayerError(
                "Away from the weights each unit has another divergence from the "
                f"prior. Received: a loss with an ascent, and {names}. Use "
                "`kl='outside'`."
            )
        self._ascent = ascent
        states = _keras.states(objective.model)
        at_begin = [tf.identity(state.value) for state in states]
        here = self._here = RecordedForward(
            objective, batch, rows_per_unit, norms=norms
        )
        squares, terms = here.squares_and_terms(keeps=True)
        directions = {
            id(variable): term.movable(here.units)
            for variable, term in zip(objective.variables, terms, strict=True)
            if term is not None
        }
        norms_here = self._norms_here = norms_of_squares(squares)
        # Both passes draw the same masks.
        for state, value in zip(states, at_begin, strict=True):
            state.assign(value)
        self._step = tf.zeros([], tf.float64) if ascent.is_exact else None
        self._step_tape = tf.GradientTape(
            persistent=True, watch_accessed_variables=False
        )
        with self._recording_step():
            moves = Moves(
                directions,
                (1 if ascent.is_exact else ascent.radius) / norms_here,
                here.units,
                step=self._step,
            )
            super().__init__(objective, batch, rows_per_unit, norms=norms, moves=moves)
        self.y_pred = here.y_pred

    @contextlib.contextmanager
    def _recording_step(self) -> Iterator[None]:
        """Record what the step does, if there is one to differentiate by."""
        if self._step is None:
            yield
            return
        with self._step_tape as tape:
            tape.watch(self._step)
            yield

    def squares_and_terms(
        self, *, keeps: bool
    ) -> tuple[list[Tensor], list[Term | None]]:
        """Bound squared norms; not finite where there is no finite way uphill."""
        squares, terms = super().squares_and_terms(keeps=keeps)
        return [*squares, zeros_of_finite(self._norms_here)], terms

    def terms_by_variable(self, weights: Tensor | None = None) -> list[list[Term]]:
        """Go back through both passes; see `RecordedForward.terms_by_variable`."""
        ascent = self._ascent
        if ascent.is_exact:
            rate = ascent.mix * ascent.radius
            with self._recording_step():
                terms = [
                    [_checked(term) for term in each]
                    for each in super().terms_by_variable(weights)
                ]
            jvp = self._jvp(terms)
            return [[term.moved(jvp, rate) for term in each] for each in terms]
        if ascent.mix == 1:
            return super().terms_by_variable(weights)
        if weights is None:
            weights = tf.ones([self.units.number], tf.float64)
        weights = tf.cast(weights, tf.float64)
        return [
            [*here, *there]
            for here, there in zip(
                self._here.terms_by_variable(weights * (1 - ascent.mix)),
                super().terms_by_variable(weights * ascent.mix),
                strict=True,
            )
        ]

    def _jvp(self, terms: list[list[Movable]]) -> Jvp:
        """Return the derivatives of what the terms are made of, by the step.

        What reverse mode makes of some weights is linear in them: its derivative by the
        weights is forward mode.

        Raises:
            UnsupportedLayerError: If some operation has no such derivative.
        """
        found = {
            id(tensor): tensor
            for each in terms
            for term in each
            for tensor in term.tensors()
        }
        tensors = list(found.values())
        weights = [tf.zeros_like(tensor) for tensor in tensors]
        try:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights)
                weighted = self._step_tape.gradient(
                    tensors,
                    self._step,
                    output_gradients=weights,
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )
            derivatives = tape.gradient(weighted, weights)
        except LookupError as error:
            raise UnsupportedLayerError(
                "`ascent='exact'` differentiates gradients. Received: an operation "
                f"without a gradient of its gradient. {error} Use `ascent='sam'`."
            ) from error
        by_id = dict(zip(found, derivatives, strict=True))
        return lambda tensor: by_id[id(tensor)]


def _checked(term: Term) -> Movable:
    """Refuse a term that has no derivative."""
    if isinstance(term, Movable):
        return term
    raise UnsupportedLayerError(
        "Units can only have weights of their own in layers that are linear in them. "
        f"Received: `{term.variable.path}`, which is not."
    )
