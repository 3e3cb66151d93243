"""Clipped sums from one forward and one backward pass, without per-example gradients."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp import _keras, _validate
from tfdp._tracing import part_of_trace, tracing
from tfdp._types import Nest, Tensor, Variable
from tfdp.clipping import (
    at_least_float32,
    clip_factors,
    norms_of_squares,
    selected,
    side_by_side,
    squares_rounded_up,
    weighted_sums,
    without_empty,
)
from tfdp.engines.engine import Clipped, Engine
from tfdp.engines.explanation import Explanation, explained
from tfdp.engines.uphill import Uphill, states_put_back
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.batch import Batch, number_of_rows
from tfdp.losses.objective import Objective
from tfdp.losses.regularizers import gradient_of
from tfdp.rules.places import Place, Where
from tfdp.rules.recording import Recording
from tfdp.rules.terms import Kept, Term, Units


def _found_out(default: Any) -> Any:
    return dataclasses.field(default=default, kw_only=True, repr=False)


@dataclasses.dataclass(frozen=True)
class BookkeepingEngine(Engine):
    """Computes norms and clipped sums from the factors of the gradients.

    A layer's gradient is a product of its inputs and of the gradients of what it
    computes from them; one backward pass gives the latter for all layers. Norms come
    from the factors, layer by layer, and so does the clipped sum once the norms are
    known [1]_.

    Args:
        norms: How the norms of products are computed: `"gram"` from inner products
            of the factors [2]_, `"instantiate"` from each unit's gradient, layer by
            layer, or `"auto"`, for each layer what its shapes make cheapest.
        places: Found by tfdp when rows are proven to stay apart, not to be given: where
            rows lie otherwise than on the first axis, by the calls of layers and the
            uses of variables.
        splits_losses: Found likewise: whether losses that are made of all rows are taken
            apart, in place of asking for each row alone.
        follows_leaves: Found likewise: whether the variables of layers without a rule are
            followed; see `tfdp.rules.recording.Recording`.
        unrolls_loops: Found likewise: whether loops of layers are taken step by step, where
            they cannot be taken whole; None if that was not needed, False if it failed.

    References:
        .. [1] Bu et al., "Differentially Private Optimization on Large Model at Small
           Cost", ICML 2023. https://arxiv.org/abs/2210.00038
        .. [2] Li et al., "Large Language Models Can Be Strong Differentially Private
           Learners", ICLR 2022, section 4. https://arxiv.org/abs/2110.05679
    """

    norms: str = "auto"
    places: tuple[tuple[Where, Place], ...] = _found_out(())
    splits_losses: bool = _found_out(True)
    follows_leaves: bool = _found_out(False)
    unrolls_loops: bool | None = _found_out(None)
    name = "bookkeeping"
    notes_what_it_reads = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        _validate.one_of("norms", self.norms, ("auto", "gram", "instantiate"))

    def clip_and_sum(
        self,
        objective: Objective,
        batch: Batch,
        *,
        l2_norm_clip: Tensor,
        rows_per_unit: int | Tensor,
    ) -> Clipped:
        """Sum the clipped gradients from their factors."""
        forward = self.recorded(objective, batch, rows_per_unit)
        norms, terms = self._norms_and_terms(forward)
        return forward.clipped(terms, norms, l2_norm_clip)

    def recorded(
        self, objective: Objective, batch: Batch, rows_per_unit: int | Tensor
    ) -> "RecordedForward":
        """Run the model, and record what gradients are made of."""
        return RecordedForward(
            objective,
            batch,
            rows_per_unit,
            norms=self.norms,
            splits_losses=self.splits_losses,
            **self.found_out,
        )

    @property
    def found_out(self) -> dict[str, Any]:
        """What a `Recording` has to know of a model beforehand."""
        return {
            "places": dict(self.places),
            "follows_leaves": self.follows_leaves,
            "unrolls_loops": self.unrolls_loops,
        }

    def _norms_and_terms(
        self, forward: "RecordedForward"
    ) -> tuple[Tensor, list[Term | None]]:
        """Return the units' norms, and the factors that they came from."""
        squares, terms = forward.squares_and_terms(keeps=True)
        return norms_of_squares(squares), terms

    def read(self, objective: Objective, batch: Batch) -> list[Tensor]:
        """List the losses, and the factors of all gradients."""
        forward = self.recorded(objective, batch, 1)
        return forward.read(forward.terms_by_variable())

    def explain(self, model: keras.Model, signature: Nest) -> list[Explanation]:
        """Say how each layer's norm is computed; see `DPModel.explain`."""
        return explained(model, signature, self.norms, **self.found_out)


@dataclasses.dataclass(frozen=True)
class GhostEngine(BookkeepingEngine):
    """Computes norms first, and then the clipped sum in a second backward pass.

    The gradients of what the layers compute are not held until the norms are known,
    for the time of one more backward pass through the same forward pass, dropout masks
    included. Whether that takes less memory depends on the model. (Under
    `tfdp.losses.BAM` those that lead uphill are held.)

    Args:
        norms: See `BookkeepingEngine`; what is instantiated is not kept.
    """

    name = "ghost"

    def _norms_and_terms(
        self, forward: "RecordedForward"
    ) -> tuple[Tensor, list[Term | None]]:
        """Return the units' norms, and the factors, computed once more."""
        squares, _ = forward.squares_and_terms(keeps=False)
        norms = norms_of_squares(squares)
        # The same numbers again: with weights on the losses half precision would round
        # them otherwise than when their norms were taken. What is one here, compilers
        # do not know to be one, or they would merge the two passes.
        ones = tf.cast(tf.math.is_finite(norms), norms.dtype)
        again = forward.terms_by_variable(ones)
        return norms, [joined(terms, forward.units) for terms in again]


class RecordedForward:
    """One recorded forward pass, and backward passes through it.

    Where units go uphill there are two: one here, which says where uphill is, and one
    there.

    Args:
        objective: What to differentiate.
        batch: Its number of rows is a multiple of `rows_per_unit`.
        rows_per_unit: Consecutive rows whose mean loss is one unit's loss.
        norms: How norms are computed; see `BookkeepingEngine`.
        is_of_one_unit: Whether the batch is one unit; see `Recording`.
        splits_losses: See `Objective.forward`.
        **found_out: Other arguments of `Recording`.

    Attributes:
        units: How the rows are grouped.
        losses: One for each row.
        y_pred: The model's outputs; see `Objective.forward`.
        rows_first: See `Lengths`.

    Raises:
        UnsupportedLayerError: If some layer's gradients are out of reach, or some unit
            cannot go uphill.
    """

    def __init__(
        self,
        objective: Objective,
        batch: Batch,
        rows_per_unit: int | Tensor,
        *,
        norms: str,
        is_of_one_unit: bool = False,
        splits_losses: bool = False,
        **found_out: Any,
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
        # In float64, so that the shares of a unit add up to 1 in any dtype of losses.
        share = tf.cast(real, tf.float64)
        share = tf.math.divide_no_nan(share, tf.reduce_sum(share, 1, keepdims=True))
        self._shares = tf.reshape(share, [-1])
        self._here: RecordedForward | None = None
        self._uphill: Uphill | None = None
        if objective.ascent is not None:
            plain = dataclasses.replace(objective, ascent=None)
            # Both passes draw the same masks.
            with states_put_back(objective.model):
                self._here = RecordedForward(
                    plain,
                    batch,
                    rows_per_unit,
                    norms=norms,
                    splits_losses=splits_losses,
                    **(found_out | {"takes_loops_whole": False}),
                )
            # Not `squares_and_terms`: what a trace notes as read is listed by `read`.
            terms = self._here.terms_by_variable()
            squares, ready = squares_and_joined(terms, self.units, norms, keeps=True)
            bounds = self._here.squares_of_rows(squares), ready
            self._uphill = Uphill(objective, objective.ascent, self.units, *bounds)
        with contextlib.ExitStack() as entered:
            moves = None
            if self._uphill is not None:
                entered.enter_context(self._uphill.recording_step())
                moves = self._uphill.moves()
            self._recording = Recording(
                objective.model,
                rows,
                moves,
                is_of_one_unit=is_of_one_unit,
                **found_out,
            )
            entered.enter_context(self._recording.observing())
            self.y_pred, self.losses = objective.forward(
                batch, is_of_one_unit=is_of_one_unit, splits_losses=splits_losses
            )
            self._recording.note_losses(self.losses)
        self.rows_first = self._recording.lengths.rows_first
        if self._here is not None:
            # Metrics are those of the model, not of weights uphill from it.
            self.y_pred = self._here.y_pred

    def terms_by_variable(self, weights: Tensor | None = None) -> list[list[Term]]:
        """Go back through the pass, each unit's loss with a weight or with 1.

        Nothing checks here that what was watched has the rows of the batch: whoever
        makes norms of the terms does, see `squares_of_rows`. Weights that are made of
        such norms need no second check, and one unit alone has nothing to check.

        Returns:
            For each variable of the objective, what its gradients are made of.
        """
        if self._uphill is None or self._here is None:
            return self._terms_there(weights)
        return self._uphill.terms_by_variable(
            weights, self._here.terms_by_variable, self._terms_there
        )

    def _terms_there(self, weights: Tensor | None) -> list[list[Term]]:
        """Go back through the pass that was recorded last."""
        # Losses are scaled by way of their weights: the tape has recorded them as they
        # are, and what comes back is unscaled before it is squared.
        scale = self._objective.loss_scale
        of_rows = self._shares * scale
        if weights is not None:
            repeated = tf.repeat(tf.cast(weights, tf.float64), self._rows_per_unit)
            of_rows *= tf.ensure_shape(repeated, of_rows.shape)
        tensors = [watched.tensors for watched in self._recording.watched]
        elsewhere = self._recording.elsewhere
        values = [variable.value for variable in elsewhere.values()]
        with _keras.gradients_of_rows():
            gradients, of_values = self._recording.tape.gradient(
                self.losses,
                [tensors, values],
                output_gradients=tf.cast(of_rows, self.losses.dtype),
            )
        self._recording.lengths.note_gradients(tensors, gradients)
        found: dict[int, list[Term]] = {id(v): [] for v in self._objective.variables}
        for watched, of_call in zip(self._recording.watched, gradients, strict=True):
            if all(gradient is None for gradient in of_call):
                if watched.must_be_reached:
                    raise UnsupportedLayerError(
                        "A variable that is used elsewhere than in its layer must have "
                        f"a gradient. Received: `{watched.path}`, without one. Where none "
                        "is meant, say so: `keras.ops.stop_gradient(variable)`."
                    )
                # No loss depends on this call.
                continue
            unscaled = [
                _unscaled(tensor, gradient, scale)
                for tensor, gradient in zip(watched.tensors, of_call, strict=True)
            ]
            for term in watched.terms_of(unscaled):
                # Rules cover frozen variables too, and some uses of others.
                if id(term.variable) in found and id(term.variable) not in elsewhere:
                    found[id(term.variable)].append(term)
        for variable, gradient in zip(elsewhere.values(), of_values, strict=True):
            if id(variable) in found and gradient is not None:
                whole = _unscaled(tf.convert_to_tensor(variable), gradient, scale)
                found[id(variable)].append(Kept(variable, tf.reshape(whole, [1, -1])))
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

    def read(self, terms_by_variable: list[list[Term]]) -> list[Tensor]:
        """List the losses, and the factors of gradients, rows on the first axis."""
        found = [self.losses]
        if self._here is not None:
            # Factors of the way uphill are joined for each unit, where pieces of a row
            # would pass for rows.
            found += self._here.rows_first
        for terms in terms_by_variable:
            for term in terms:
                with part_of_trace(term.variable.path):
                    # Terms that have moved do not know their repeats any more.
                    repeats = -1 if self._objective.ascent else term.repeats
                    found += [_by_rows(t, self.units, repeats) for t in term.read()]
        return found

    def squares_and_terms(
        self, *, keeps: bool
    ) -> tuple[list[Tensor], list[Term | None]]:
        """Bound each variable's squared norms, and keep what the sums need."""
        terms = self.terms_by_variable()
        trace = tracing()
        if trace is not None:
            trace.note_read(self.read(terms))
        squares, ready = squares_and_joined(terms, self.units, self._norms, keeps=keeps)
        if self._uphill is not None:
            squares.append(self._uphill.lost)
        return self.squares_of_rows(squares), ready

    def squares_of_rows(self, squares: list[Tensor]) -> list[Tensor]:
        """Return squared norms, which wait for the check of what they are made of.

        That all that was watched has the rows of the batch, where only the data tell. One
        of the squares waits: norms are made of all of them, and sums of norms.

        Raises:
            tf.errors.InvalidArgumentError: If something has not, when it runs.
        """
        return [self._recording.lengths.checked(squares[0]), *squares[1:]]

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
        sums = clipped_sums(
            list(zip(self._objective.variables, terms, strict=True)),
            self.units,
            norms,
            is_empty=self._is_empty,
            l2_norm_clip=l2_norm_clip,
        )
        return sums, tf.cast(norms, l2_norm_clip.dtype), self.y_pred


def squares_and_joined(
    terms_by_variable: list[list[Term]], units: Units, norms: str, *, keeps: bool
) -> tuple[list[Tensor], list[Term | None]]:
    """Bound the units' squared norms, and return the term to sum for each variable.

    Args:
        terms_by_variable: For each variable, what its gradients are made of.
        units: How the rows are grouped.
        norms: How norms are computed; see `BookkeepingEngine`.
        keeps: Whether units' gradients may be held until the norms are known.

    Returns:
        Squares of shape ``(U,)`` that add up to all variables', at least one of them;
        and a term for each variable, None where no loss depends on it.
    """
    squares: list[Tensor] = []
    ready: list[Term | None] = []
    kept: list[Kept] = []
    for terms in terms_by_variable:
        term = joined(terms, units)
        if term is not None:
            how = term.how(norms, units)
            # Gradients that are kept save their product in the sum. Ghost clipping
            # computes the factors anew in any case, and is there to hold little until
            # the norms are known.
            if how == "keep" and keeps:
                term = term.kept(units)
                kept.append(term)
            elif how == "gram":
                squares.append(term.squares_by_gram(units))
            else:
                squares.append(term.squares_of_dropped(units))
        ready.append(term)
    if kept:
        squares.append(squares_rounded_up(*(term.gradients for term in kept)))
    if not squares:
        # No loss depends on a variable: every gradient is zero.
        squares.append(tf.zeros([units.number], tf.float64))
    return squares, ready


def clipped_sums(
    terms: list[tuple[Variable, Term | None]],
    units: Units,
    norms: Tensor,
    *,
    is_empty: Tensor,
    l2_norm_clip: Tensor,
) -> list[Tensor]:
    """Sum the units' clipped gradients of each variable.

    Args:
        terms: Variables, and what their gradients are made of.
        units: How the rows are grouped.
        norms: Of the units; those without a finite one are left out.
        is_empty: Marks units of nothing but padding, bool of shape ``(U,)``.
        l2_norm_clip: Radius of the clip ball.

    Returns:
        The sums, in the shapes of the variables.
    """
    weights = clip_factors(norms, l2_norm_clip=l2_norm_clip)
    # Padding has no loss, but it would have its share of a divergence.
    weights = without_empty(weights, is_empty)
    finite = tf.math.is_finite(norms)
    clean = tf.reduce_all(finite)

    # Gradients that are computed already are summed alike, whichever variable they are
    # of; terms of one's own may sum theirs otherwise.
    there = [(n, term) for n, (_, term) in enumerate(terms) if term is not None]
    kept = [
        (n, term)
        for n, term in there
        if isinstance(term, Kept) and type(term).weighted_sum is Kept.weighted_sum
    ]
    together, sizes = side_by_side([term.factors(units)[0] for _, term in kept])
    others = [(n, term) for n, term in there if (n, term) not in kept]
    factors = [together, *(term.factors(units) for _, term in others)]

    def finite_ones() -> list[list[Tensor]]:
        flat = iter(selected([part for parts in factors for part in parts], finite))
        return [[next(flat) for _ in parts] for parts in factors]

    if _keras.inside_xla():
        factors = finite_ones()
    else:
        # One choice for all: each function of a graph takes milliseconds to make.
        factors = tf.cond(clean, lambda: factors, finite_ones)
    clean_kept, *clean_others = factors
    flat = weighted_sums(clean_kept, sizes, weights)
    sums = {
        n: term.of_variable(total) for (n, term), total in zip(kept, flat, strict=True)
    } | {
        n: term.weighted_sum(parts, weights)
        for (n, term), parts in zip(others, clean_others, strict=True)
    }
    return [
        sums[n]
        if n in sums
        else tf.zeros(variable.shape, at_least_float32(variable.value).dtype)
        for n, (variable, _) in enumerate(terms)
    ]


def _unscaled(tensor: Tensor, gradient: Tensor | None, scale: float) -> Tensor:
    """Return a tensor's gradient, of at least float32, zero if there is none."""
    if gradient is None:
        return at_least_float32(tf.zeros_like(tensor))
    gradient = at_least_float32(tf.convert_to_tensor(gradient))
    known = None if gradient.shape.rank is None else gradient.shape.as_list()
    if known is None or known != tensor.shape.as_list():
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


def _by_rows(tensor: Tensor, units: Units, repeats: int | None) -> Tensor:
    """(rows of the calls, ...) -> (rows of the batch, those of each, ...)."""
    if tensor.shape[0] == 1:
        return tensor  # The same for all rows, which must not depend on them.
    if repeats == 1:
        return tf.stop_gradient(tensor)  # An operation of the variable's part.
    lengths = tensor.shape[1:]
    if lengths.is_fully_defined() and repeats != -1 and 0 not in lengths:
        return tf.reshape(tensor, [-1, repeats, *lengths])
    known = [
        tf.shape(tensor)[axis] if length is None else length
        for axis, length in enumerate(lengths, 1)
    ]
    return tf.reshape(tensor, [units.number, repeats, *known])
