"""Book-keeping with each unit by itself, where rows are not proven to stay apart."""

import dataclasses
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdp import _tree
from tfdp._types import Nest, Tensor
from tfdp.clipping import norms_of_squares
from tfdp.engines.bookkeeping import (
    BookkeepingEngine,
    RecordedForward,
    clipped_sums,
    squares_and_joined,
)
from tfdp.engines.engine import Clipped
from tfdp.engines.explanation import Explanation, explained
from tfdp.engines.units import of_each_unit, stacked
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective
from tfdp.rules.terms import Term, Units


@dataclasses.dataclass(frozen=True)
class ApartEngine(BookkeepingEngine):
    """Book-keeping in which each unit goes forward and back by itself.

    The passes of the units are one vectorized map: no unit can see another, whatever
    the model computes, and layers may be called on axes that are not those of the
    examples. What the passes leave are the factors of `BookkeepingEngine`, and norms
    and sums come from these. Variables that no rule answers for, such as those that a
    layer with layers in it uses itself, have their whole gradient taken for each unit,
    as in `VectorizedEngine`.

    Args:
        norms: See `BookkeepingEngine`.
    """

    name = "apart"
    notes_what_it_reads = False

    def clip_and_sum(
        self,
        objective: Objective,
        batch: Batch,
        *,
        l2_norm_clip: Tensor,
        rows_per_unit: int | Tensor,
    ) -> Clipped:
        """Sum the clipped gradients from the factors that the map returns."""
        if objective.ascent is not None:
            raise UnsupportedLayerError(
                "Units that go uphill are not taken apart. Received: a loss with an "
                "ascent. Use `engine='vectorized'`."
            )
        units = _tree.map_tensors(lambda rows: stacked(rows, rows_per_unit), batch)
        known = rows_per_unit if isinstance(rows_per_unit, int) else None
        # Known as soon as one unit is traced: a map returns nothing but tensors.
        of_one: list[list[list[Term]]] = []

        def of_unit(unit: Batch) -> tuple[list[Tensor], Nest]:
            forward = RecordedForward(
                objective, unit, rows_per_unit, norms=self.norms, is_of_one_unit=True
            )
            found = [
                [_stackable(term, forward.units) for term in terms]
                for terms in forward.terms_by_variable()
            ]
            of_one[:] = [found]
            tensors = [t for terms in found for term in terms for t in _tensors(term)]
            return tensors, forward.y_pred

        tensors, y_pred = of_each_unit(of_unit, units, objective.model)
        is_empty = tf.reduce_all(units.is_padding, axis=1)
        remaining = iter(tensors)
        terms_by_variable = [
            [_of_all_units(term, remaining, known) for term in terms]
            for terms in of_one[0]
        ]
        of_batch = Units(tf.shape(is_empty)[0], known)
        squares, terms = squares_and_joined(
            terms_by_variable, of_batch, self.norms, keeps=True
        )
        norms = norms_of_squares(squares)
        sums = clipped_sums(
            list(zip(objective.variables, terms, strict=True)),
            of_batch,
            norms,
            is_empty=is_empty,
            l2_norm_clip=l2_norm_clip,
        )
        return sums, tf.cast(norms, l2_norm_clip.dtype), y_pred

    def read(self, objective: Objective, batch: Batch) -> list[Tensor]:
        """Nothing: each unit is evaluated alone."""
        del objective, batch
        return []

    def explain(self, model: keras.Model, signature: Nest) -> list[Explanation]:
        """Say how each layer's norm is computed; see `DPModel.explain`."""
        one = _tree.signature_of(signature, 1)
        return explained(model, one, self.norms, is_of_one_unit=True)


def _tensors(term: Term) -> list[Tensor]:
    """List the tensors that a term is made of."""
    return [
        leaf for leaf in keras.tree.flatten(_attributes(term)) if tf.is_tensor(leaf)
    ]


def _attributes(term: Term) -> dict[str, Nest]:
    """Return what a term has that may be of tensors, or hold some."""
    return {
        name: value
        for name, value in vars(term).items()
        if name != "variable"
        and (isinstance(value, list | tuple) or tf.is_tensor(value))
    }


def _stackable(term: Term, units: Units) -> Term:
    """Return a term whose tensors all have one static leading axis, that of positions."""
    lengths = {t.shape[0] if t.shape.rank else None for t in _tensors(term)}
    has_terms = any(isinstance(value, Term) for value in vars(term).values())
    if len(lengths) == 1 and None not in lengths and not has_terms:
        return term
    # What is for all rows of a unit would not be so for the rows of all units.
    kept = term.kept(units)
    # Whatever was called with it, the unit has one gradient.
    gradient = tf.ensure_shape(kept.gradients, [1, None])
    return kept.copy_with(gradients=gradient)


def _of_all_units(
    term: Term, remaining: Iterator[Tensor], rows_per_unit: int | None
) -> Term:
    """Return the term of one unit as that of all, with the tensors that the map made.

    Args:
        term: Of one unit, in the graph of the map.
        remaining: What the map returned for the tensors of this term and those after it.
        rows_per_unit: Rows of a unit, None where that is not static.
    """

    def stacked_tensor(leaf: Nest) -> Nest:
        if not tf.is_tensor(leaf):
            return leaf
        tensor = next(remaining)
        # (U, rows of one, ...) -> (U rows of one, ...)
        shape = tf.concat([[-1], tf.shape(tensor)[2:]], 0)
        return tf.ensure_shape(tf.reshape(tensor, shape), [None, *leaf.shape[1:]])

    length = _tensors(term)[0].shape[0]
    is_whole = length is not None and rows_per_unit and length % rows_per_unit == 0
    attributes = keras.tree.map_structure(stacked_tensor, _attributes(term))
    repeats = length // rows_per_unit if is_whole else None
    return term.copy_with(**attributes, repeats=repeats)
