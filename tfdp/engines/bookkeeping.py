"""Clipped sums from one forward and one backward pass, without per-example gradients."""

import dataclasses
import math
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdp import _keras, _validate, rules
from tfdp._tracing import part_of_trace
from tfdp._types import Nest, Tensor
from tfdp.clipping import norms_of_squares
from tfdp.engines.engine import Clipped, Engine
from tfdp.engines.explanation import Explanation
from tfdp.engines.passes import number_of_rows
from tfdp.engines.recorded import RecordedForward, joined
from tfdp.engines.uphill import RecordedUphill
from tfdp.losses.objective import Batch, Objective
from tfdp.rules.recording import Recording
from tfdp.rules.terms import Term, Units


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
        l2_norm_clip: Tensor,
        rows_per_unit: int | Tensor,
    ) -> Clipped:
        """Sum the clipped gradients from the factors that the norms came from."""
        forward = _recorded(objective, batch, rows_per_unit, norms=self.norms)
        squares, terms = forward.squares_and_terms(keeps=True)
        return forward.clipped(terms, norms_of_squares(squares), l2_norm_clip)

    def read(self, objective: Objective, batch: Batch) -> list[Tensor]:
        """List the losses, and the factors of all gradients."""
        forward = _recorded(objective, batch, 1, norms=self.norms)
        found = [forward.losses]
        for terms in forward.terms_by_variable():
            for term in terms:
                with part_of_trace(term.variable.path):
                    # Terms that have moved do not know their repeats any more.
                    repeats = term.repeats if objective.ascent is None else -1
                    units = forward.units
                    found.extend([
                        _by_rows(each, units, repeats) for each in term.read()
                    ])
        return found

    def explain(self, model: keras.Model, signature: Nest) -> list[Explanation]:
        """Say how each layer's norm is computed; see `DPModel.explain`."""
        rows: list[Explanation] = []

        def run(x: Nest) -> None:
            tape = tf.GradientTape(watch_accessed_variables=False)
            recording = Recording(model, tape, number_of_rows(x), rules.find)
            with tape, recording.observing():
                _keras.run_model(model, x, training=True)
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
        l2_norm_clip: Tensor,
        rows_per_unit: int | Tensor,
    ) -> Clipped:
        """Sum the clipped gradients from factors that are computed once more."""
        forward = _recorded(objective, batch, rows_per_unit, norms=self.norms)
        squares, _ = forward.squares_and_terms(keeps=False)
        norms = norms_of_squares(squares)
        # The same numbers again: with weights on the losses half precision would round
        # them otherwise than when their norms were taken. What is one here, compilers
        # do not know to be one, or they would merge the two passes.
        ones = tf.cast(tf.math.is_finite(norms), norms.dtype)
        terms = [
            joined(each, forward.units) for each in forward.terms_by_variable(ones)
        ]
        return forward.clipped(terms, norms, l2_norm_clip)


def _by_rows(tensor: Tensor, units: Units, repeats: int | None) -> Tensor:
    """(rows of the calls, ...) -> (rows of the batch, those of each, ...)."""
    if tensor.shape[0] == 1:
        return tensor  # The same for all rows, which must not depend on them.
    lengths = [
        tf.shape(tensor)[axis] if length is None else length
        for axis, length in enumerate(tensor.shape)
    ]
    shape = [units.number, repeats, *lengths[1:]]
    return tf.reshape(tensor, shape)


def _recorded(
    objective: Objective, batch: Batch, rows_per_unit: int | Tensor, *, norms: str
) -> RecordedForward:
    """Record a forward pass, uphill if the objective asks for that."""
    if objective.ascent is None:
        return RecordedForward(objective, batch, rows_per_unit, norms=norms)
    return RecordedUphill(
        objective, batch, rows_per_unit, norms=norms, ascent=objective.ascent
    )
