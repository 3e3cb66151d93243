"""Clipped sums from one forward and one backward pass, without per-example gradients."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp import _keras, _validate, rules
from tfdp._tracing import part_of_trace
from tfdp.clipping import (
    at_least_float32,
    clip_factors,
    norms_of_squares,
    squares_rounded_up,
    zeros_of_finite,
)
from tfdp.engines.explanation import Explanation
from tfdp.engines.passes import number_of_rows
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.ascent import Ascent
from tfdp.losses.objective import Batch, Objective
from tfdp.losses.regularizers import gradient_of
from tfdp.rules.moves import Moves
from tfdp.rules.recording import Recording
from tfdp.rules.terms import Jvp, Kept, Term, Units


@dataclasses.dataclass(frozen=True)
class BookkeepingEngine:
    """Computes norms and clipped sums from the factors of the gradients.

    A layer's gradient is a product of its inputs and of the gradients of what it
    computes from them; one backward pass gives the latter for all layers. Norms come
    from the factors, layer by layer, and so does the clipped sum once the norms are
    known [1]_.

    Args:
        norms: How the norms of products are computed: `"gram"` from inner products
            of the factors [2]_, `"instantiate"` from each unit's gradient, layer by
            layer, or `"auto"`, for each layer what its shapes make cheapest.

    References:
        .. [1] Bu et al., "Differentially Private Optimization on Large Model at Small
           Cost", ICML 2023. https://arxiv.org/abs/2210.00038
        .. [2] Li et al., "Large Language Models Can Be Strong Differentially Private
           Learners", ICLR 2022, section 4. https://arxiv.org/abs/2110.05679
    """

    norms: str = "auto"
    name = "bookkeeping"

    def __post_init__(self) -> None:
        """Check the arguments."""
        _validate.one_of("norms", self.norms, ("auto", "gram", "instantiate"))

    def clip_and_sum(
        self,
        objective: Objective,
        batch: Batch,
        *,
        l2_norm_clip: tf.Tensor,
        rows_per_unit: int | tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor, Any]:
        """Sum the clipped gradients of the units of a batch.

        Args:
            objective: What to differentiate.
            batch: Its number of rows is a multiple of `rows_per_unit`.
            l2_norm_clip: Radius of the clip ball, a positive scalar tensor.
            rows_per_unit: Consecutive rows whose mean loss is one unit's loss. A
                unit without a real row contributes nothing.

        Returns:
            The clipped sums in the order of the variables, the units' norms
            before clipping with shape ``(U,)``, and the model's outputs for all
            rows.

        Raises:
            UnsupportedLayerError: If some layer's gradients are out of reach.
        """
        step = _recorded(objective, batch, rows_per_unit, norms=self.norms)
        squares, terms = step.norms_and_terms(keeps=True)
        norms = norms_of_squares(squares)
        weights = step.clip_weights(norms, l2_norm_clip)
        return (
            step.sums(terms, weights, norms),
            tf.cast(norms, l2_norm_clip.dtype),
            step.y_pred,
        )

    def read(self, objective: Objective, batch: Batch) -> list[tf.Tensor]:
        """Compute all that norms and sums are made of, each example a unit.

        Args:
            objective: What to differentiate.
            batch: Its rows.

        Returns:
            The losses, and tensors with one entry on the first axis for each row. That
            the entry depends on its row alone is what the engine believes.
        """
        step = _recorded(objective, batch, 1, norms=self.norms)
        found = [step.losses]
        for terms in step.terms_by_variable():
            for term in terms:
                with part_of_trace(term.variable.path):
                    # Terms that have moved do not know their repeats any more.
                    repeats = term.repeats if objective.ascent is None else -1
                    for each in term.read():
                        found.append(_by_rows(each, step.units, repeats))  # noqa: PERF401
        return found

    def explain(self, model: keras.Model, signature: Any) -> list[Explanation]:
        """Say how each layer's norm is computed; see `DPModel.explain`."""
        rows: list[Explanation] = []

        def run(x: Any) -> None:
            tape = tf.GradientTape(watch_accessed_variables=False)
            recording = Recording(model, tape, number_of_rows(x), rules.find)
            with tape, recording.observing():
                if _keras.takes_training(model):
                    model(x, training=True)
                else:
                    model(x)
            for watched in recording.watched:
                zeros = [tf.zeros_like(tensor) for tensor in watched.tensors]
                rows.extend(
                    self._explained(watched.path, watched.rule, watched.terms_of(zeros))
                )

        tf.function(run, autograph=False).get_concrete_function(signature)
        return rows

    def _explained(
        self, path: str, rule: str, terms: list[Term]
    ) -> Iterator[Explanation]:
        units = Units(number=1, rows=1)
        ways = {"gram": "Gram", "keep": "instantiated", "drop": "instantiated"}
        by_way: dict[str, list[float]] = {}
        for term in terms:
            if not term.variable.trainable:
                continue
            how = term.how(self.norms, units)
            known = term.numbers(how, units)
            by_way.setdefault(ways[how], []).append(
                math.inf if known is None else known
            )
        for way, numbers in by_way.items():
            total = 4 * sum(numbers)
            size = None if math.isinf(total) else int(total)
            yield Explanation(path, rule, way, size)


@dataclasses.dataclass(frozen=True)
class GhostEngine(BookkeepingEngine):
    """Computes norms first, and then the clipped sum in a second backward pass.

    The gradients of what the layers compute are not held until the norms are known:
    least memory, for the time of one more backward pass through the same forward
    pass, dropout masks included. (Under `tfdp.losses.BAM` those that lead uphill are.)

    Args:
        norms: See `BookkeepingEngine`; what is instantiated is not kept.
    """

    name = "ghost"

    def clip_and_sum(
        self,
        objective: Objective,
        batch: Batch,
        *,
        l2_norm_clip: tf.Tensor,
        rows_per_unit: int | tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor, Any]:
        """Sum the clipped gradients; see `BookkeepingEngine.clip_and_sum`."""
        step = _recorded(objective, batch, rows_per_unit, norms=self.norms)
        squares, _ = step.norms_and_terms(keeps=False)
        norms = norms_of_squares(squares)
        weights = step.clip_weights(norms, l2_norm_clip)
        # The same numbers again: with weights on the losses half precision would round
        # them otherwise than when their norms were taken. What is one here, compilers
        # do not know to be one, or they would merge the two passes.
        ones = tf.cast(tf.math.is_finite(norms), norms.dtype)
        terms = [_joined(terms, step.units) for terms in step.terms_by_variable(ones)]
        return (
            step.sums(terms, weights, norms),
            tf.cast(norms, l2_norm_clip.dtype),
            step.y_pred,
        )


class _Pass:
    """One recorded forward pass, and backward passes through it."""

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        rows_per_unit: int | tf.Tensor,
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
        # A unit's loss is the mean over its real rows.
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

    def terms_by_variable(self, weights: tf.Tensor | None = None) -> list[list[Term]]:
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
            self.losses,
            tensors,
            output_gradients=tf.cast(of_rows, self.losses.dtype),
        )
        found: dict[int, list[Term]] = {id(v): [] for v in self._objective.variables}
        for watched, of_call in zip(self._watched, gradients, strict=True):
            if all(gradient is None for gradient in of_call):
                continue
            unscaled = [
                _unscaled(tensor, gradient, scale)
                for tensor, gradient in zip(watched.tensors, of_call, strict=True)
            ]
            for term in watched.terms_of(unscaled):
                if id(term.variable) in found:
                    found[id(term.variable)].append(term)
        for variable, penalty in self._objective.penalties():
            found[id(variable)].append(self._same_for_all(variable, penalty, weights))
        return list(found.values())

    def _same_for_all(
        self,
        variable: Any,
        penalty: Callable[[Any], tf.Tensor],
        weights: tf.Tensor | None,
    ) -> Kept:
        """Return the gradient of what each unit's loss has of a variable alone."""
        gradient = tf.reshape(gradient_of(penalty, variable), [1, -1])
        if weights is None:
            weights = tf.ones([self.units.number], gradient.dtype)
        gradients = tf.cast(weights, gradient.dtype)[:, None] * gradient
        return Kept(variable, tf.ensure_shape(gradients, [None, *gradient.shape[1:]]))

    def norms_and_terms(
        self, *, keeps: bool
    ) -> tuple[list[tf.Tensor], list[Term | None]]:
        """Bound each variable's squared norms, and keep what the sums need."""
        squares, ready = [], []
        for terms in self.terms_by_variable():
            term = _joined(terms, self.units)
            if term is not None:
                of_variable, term = _squares(term, self._norms, self.units, keeps=keeps)
                squares.append(of_variable)
            ready.append(term)
        if not squares:
            squares.append(tf.zeros([self.units.number], tf.float64))
        return squares, ready

    def clip_weights(self, norms: tf.Tensor, l2_norm_clip: tf.Tensor) -> tf.Tensor:
        """Return the units' clip factors, 0 for those without a real row."""
        factors = clip_factors(norms, l2_norm_clip=l2_norm_clip)
        return tf.where(self._is_empty, tf.zeros_like(factors), factors)

    def sums(
        self, terms: list[Term | None], weights: tf.Tensor | None, norms: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sum over the units, of which those without a finite norm are left out."""
        finite = tf.math.is_finite(norms)
        clean = tf.reduce_all(finite)

        def selected(factors: list[tf.Tensor]) -> list[tf.Tensor]:
            return [_selected(part, finite) for part in factors]

        def sum_of(variable: Any, term: Term | None) -> tf.Tensor:
            if term is None:
                return tf.zeros(variable.shape, at_least_float32(variable.value).dtype)
            factors = term.factors(self.units)
            if _keras.inside_xla():
                factors = selected(factors)
            else:
                # Each term by itself: one choice for all would hold all factors.
                factors = tf.cond(clean, lambda: factors, lambda: selected(factors))
            return term.weighted_sum(factors, weights)

        variables = self._objective.variables
        return [sum_of(*pair) for pair in zip(variables, terms, strict=True)]


class _PassUphill(_Pass):
    """A pass whose units have gone a step uphill, each along its own gradient."""

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        rows_per_unit: int | tf.Tensor,
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
        here = self._here = _Pass(objective, batch, rows_per_unit, norms=norms)
        squares, terms = here.norms_and_terms(keeps=True)
        directions = {
            id(variable): term
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

    def norms_and_terms(
        self, *, keeps: bool
    ) -> tuple[list[tf.Tensor], list[Term | None]]:
        """Bound squared norms; not finite where there is no finite way uphill."""
        squares, terms = super().norms_and_terms(keeps=keeps)
        return [*squares, zeros_of_finite(self._norms_here)], terms

    def terms_by_variable(self, weights: tf.Tensor | None = None) -> list[list[Term]]:
        """Go back through both passes; see `_Pass.terms_by_variable`."""
        ascent = self._ascent
        if ascent.is_exact:
            rate = ascent.mix * ascent.radius
            with self._recording_step():
                terms = super().terms_by_variable(weights)
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

    def _jvp(self, terms: list[list[Term]]) -> Jvp:
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


def _recorded(
    objective: Objective, batch: Batch, rows_per_unit: int | tf.Tensor, *, norms: str
) -> _Pass:
    if objective.ascent is None:
        return _Pass(objective, batch, rows_per_unit, norms=norms)
    return _PassUphill(
        objective, batch, rows_per_unit, norms=norms, ascent=objective.ascent
    )


def _unscaled(tensor: tf.Tensor, gradient: Any, scale: float) -> tf.Tensor:
    """Return a tensor's gradient, of at least float32, zero if there is none."""
    if gradient is None:
        return at_least_float32(tf.zeros_like(tensor))
    gradient = at_least_float32(tf.convert_to_tensor(gradient))
    # Loops forget how many steps they take.
    gradient = tf.ensure_shape(gradient, tensor.shape)
    return gradient if scale == 1.0 else gradient / scale


def _joined(terms: list[Term], units: Units) -> Term | None:
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
    variable = different[0].variable
    return Kept(variable, tf.add_n([term.instantiate(units) for term in different]))


def _squares(
    term: Term, norms: str, units: Units, *, keeps: bool
) -> tuple[tf.Tensor, Term]:
    """Bound the units' squared norms; return the term to sum with them."""
    how = term.how(norms, units)
    if how == "gram":
        return term.squares_by_gram(units), term
    if how == "keep" and keeps:
        kept = term.kept(units)
        return squares_rounded_up(kept.gradients), kept
    return term.squares_of_dropped(units), term


def _by_rows(tensor: tf.Tensor, units: Units, repeats: int | None) -> tf.Tensor:
    """(rows of the calls, ...) -> (rows of the batch, those of each, ...)."""
    if tensor.shape[0] == 1:
        return tensor  # The same for all rows, which must not depend on them.
    lengths = [
        tf.shape(tensor)[axis] if length is None else length
        for axis, length in enumerate(tensor.shape)
    ]
    shape = [units.number, repeats, *lengths[1:]]
    return tf.reshape(tensor, shape)


def _selected(units: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
    """Replace the units that are not chosen by zeros."""
    chosen = tf.reshape(chosen, [-1] + [1] * (units.shape.rank - 1))
    return tf.where(chosen, units, tf.zeros_like(units))
