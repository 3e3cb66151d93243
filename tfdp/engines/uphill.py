"""The way uphill of each unit: weights moved along its own gradient."""

import contextlib
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor
from tfdp.ascent.losses import Ascent
from tfdp.clipping import norms_of_squares, zeros_of_finite
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Objective
from tfdp.rules.moves import Moves
from tfdp.rules.terms import Jvp, Movable, Term, Units

# From the weights of the units' losses to what each variable's gradients are made of.
_TermsByVariable = Callable[[Tensor | None], list[list[Term]]]


class Uphill:
    """Takes units a step uphill, and puts together what gradients say here and there.

    Args:
        objective: What is differentiated.
        ascent: The step.
        units: How the rows are grouped.
        squares: Bounds of the units' squared norms here, one for each variable.
        terms: What the gradients of each variable are made of here.

    Attributes:
        lost: Added to squared norms: 0, but no finite number for a unit that has no
            finite way uphill.

    Raises:
        UnsupportedLayerError: If some unit cannot go uphill.
    """

    def __init__(
        self,
        objective: Objective,
        ascent: Ascent,
        units: Units,
        squares: list[Tensor],
        terms: list[Term | None],
    ) -> None:
        if objective.penalties():
            names = ", ".join(f"`{v.path}`" for v, _ in objective.penalties())
            raise UnsupportedLayerError(
                "Away from the weights each unit has another divergence from the "
                f"prior. Received: a loss with an ascent, and {names}. Use "
                "`kl='outside'`."
            )
        self._ascent = ascent
        self._units = units
        self._directions = {
            id(variable): term.movable(units)
            for variable, term in zip(objective.variables, terms, strict=True)
            if term is not None
        }
        self._norms = norms_of_squares(squares)
        self.lost = zeros_of_finite(self._norms)
        # Along an exact ascent the step is 0: it is there to be differentiated by.
        self._step = tf.zeros([], tf.float64) if self._ascent.is_exact else None
        self._step_tape = tf.GradientTape(
            persistent=True, watch_accessed_variables=False
        )

    @contextlib.contextmanager
    def recording_step(self) -> Iterator[None]:
        """Record what the step does, if there is one to differentiate by."""
        if self._step is None:
            yield
            return
        with self._step_tape as tape:
            tape.watch(self._step)
            yield

    def moves(self) -> Moves:
        """Return how the units move the variables, while the step is recorded."""
        ascent = self._ascent
        return Moves(
            self._directions,
            (1 if ascent.is_exact else ascent.read_radius()) / self._norms,
            self._units,
            step=self._step,
        )

    def terms_by_variable(
        self, weights: Tensor | None, here: _TermsByVariable, there: _TermsByVariable
    ) -> list[list[Term]]:
        """Go back through both passes.

        Args:
            weights: What each unit's loss is multiplied by; None for 1.
            here: Goes back through the pass at the model's weights.
            there: Goes back through that of the moved ones.

        Returns:
            For each variable, what its gradients are made of.
        """
        ascent = self._ascent
        if ascent.is_exact:
            rate = ascent.mix * ascent.read_radius()
            with self.recording_step():
                terms = [[_checked(term) for term in each] for each in there(weights)]
            jvp = self._jvp(terms)
            return [[term.moved(jvp, rate) for term in each] for each in terms]
        if ascent.mix == 1:
            return there(weights)
        if weights is None:
            weights = tf.ones([self._units.number], tf.float64)
        weights = tf.cast(weights, tf.float64)
        parts = here(weights * (1 - ascent.mix)), there(weights * ascent.mix)
        return [[*at_first, *at_last] for at_first, at_last in zip(*parts, strict=True)]

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
            with _keras.gradients_of_rows():
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


@contextlib.contextmanager
def states_put_back(model: keras.Model) -> Iterator[None]:
    """Leave what a pass through a model changes as it was."""
    states = _keras.states(model)
    at_begin = [tf.identity(state.value) for state in states]
    yield
    for state, value in zip(states, at_begin, strict=True):
        state.assign(value)
