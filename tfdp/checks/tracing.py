"""Builds the graph of a model's pass, and says what lets its rows meet."""

import contextlib
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._tracing import traced_by
from tfdp._types import Nest, Tensor, Variable
from tfdp.checks.alone import SEED_AS_NUMBER, FunctionsOfRows
from tfdp.checks.calls import Calls
from tfdp.checks.captures import Captures
from tfdp.checks.found import Found, Owner
from tfdp.checks.given import given
from tfdp.checks.graph import Analysis
from tfdp.checks.open_lengths import Open
from tfdp.checks.operations.chance import READ
from tfdp.checks.sizes import Length, Size
from tfdp.checks.values import PLAIN, WITHIN, Cause, Value, fixed
from tfdp.losses.objective import refuse_output
from tfdp.rules.places import ROWS_FIRST, Place, Where
from tfdp.rules.uses import made_as

# Where the rows of losses are: one entry each on the first axis. Losses may be the same
# for all.
_ROWS = {(0, PLAIN), (None, PLAIN)}


class Trace:
    """A pass through a model as a graph.

    Args:
        model: The model; None for a loss alone.

    Attributes:
        calls: Of its layers.
        has_split: Whether a loss is asked for all rows, and taken apart.
        has_loop: Whether something is out of reach in what may be a loop.
        moved: What the pass moves on, so that the next one finds it moved: variables that
            it assigns, and other state; see `Analysis`.
    """

    def __init__(self, model: keras.Model | None) -> None:
        """Begin with nothing."""
        self.calls = Calls(model)
        self.has_split = False
        self.has_loop = False
        self.moved: set[str] = set()
        self._captures = Captures(model)
        self._of_rows = FunctionsOfRows(
            self._captures, self.moved, "" if model is None else model.name
        )
        # What an engine reads, and how many operations there were by then.
        self._read: tuple[list[Tensor], int | None] | None = None
        # What is made of the same rows as what, for certain.
        self._made_of: list[tuple[Tensor, list[Tensor]]] = []
        self._noted: dict[Where, list[Tensor]] = {}
        self._outputs: list[Tensor] = []
        self._unrecorded: set[Where] = set()

    def found(
        self,
        run: Callable[..., Nest],
        signature: Sequence[Nest],
        rows: int | None = None,
        *,
        views: int = 1,
        ends_in_rows: bool = True,
    ) -> list[Found]:
        """Trace a function, and look for what lets rows meet in it.

        Args:
            run: Runs the model; returns a nest of tensors with one entry for each row.
            signature: Nests of `tf.TensorSpec`, its arguments, with leading axis N.
            rows: N, if that is static.
            views: How many entries of the first axis belong to one row.
            ends_in_rows: Whether what is returned must have one entry of the first
                axis for each row. Otherwise rows may be anywhere in it.

        Returns:
            What was found, in the order of the operations. None means that no row has
            a part in what is returned for another, for every batch and any data in it,
            and that nothing is kept of the data.
        """
        with _keras.own_global_seed():
            graph = self._traced(run, signature).graph
        self._read = graph.outputs, None
        return self._found(graph, signature, rows, views, ends_in_rows)

    def found_in_pass(
        self, run: Callable[..., Nest], signature: Sequence[Nest], rows: int | None
    ) -> tuple[list[Found], Callable[..., Nest] | None]:
        """Trace the pass of an engine that notes what it reads, and look into it.

        Args:
            run: See `found`; its last argument is a scalar that is not data.
            signature: See `found`.
            rows: See `found`.

        Returns:
            What was found, and the function that was traced; None if its graph is good for
            the proof alone.
        """
        # It may run: what is drawn then comes from the generators that the model has.
        _keras.make_global_seed()
        traced = self._traced(run, signature)
        found = self._found(traced.graph, signature[:-1], rows, 1, ends_in_rows=True)
        return found, None if self._of_rows.are_some else traced

    def places(
        self, run: Callable[..., Nest], signature: Sequence[Nest]
    ) -> dict[Where, Place]:
        """Trace a function, and tell where rows lie in what is noted meanwhile.

        Args:
            run: See `found`.
            signature: See `found`.

        Returns:
            Places that are known, the same for all tensors that were noted together, and
            others than the first axis alone; or that, where no tape has recorded them.
        """
        with _keras.own_global_seed():
            graph = self._traced(run, signature).graph
        wanted = [tensor for tensors in self._noted.values() for tensor in tensors]
        # What is found there is proven where it is used.
        known = self._captures.known(graph, given(signature, None))
        values = iter(self._analysis(graph, None).values(graph, known, wanted))
        places = {
            where: _common_place([next(values) for _ in tensors])
            for where, tensors in self._noted.items()
        }
        return {
            where: place
            for where, place in places.items()
            if place is not None and (place != ROWS_FIRST or where in self._unrecorded)
        }

    def note_rows(
        self, where: Where, tensors: list[Tensor], *, is_recorded: bool = True
    ) -> None:
        """Note tensors of which is to be known where their rows lie; see `Tracing`."""
        self._noted[where] = tensors
        if not is_recorded:
            self._unrecorded.add(where)

    def note_made_of_rows(
        self, outputs: list[Tensor], inputs: list[Tensor]
    ) -> list[Tensor]:
        """Note that rows of outputs are made of the same rows; see `made_of_rows`."""
        returned = [tf.identity(each) for each in outputs]
        self._made_of += [(output, inputs) for output in returned]
        return returned

    def note_split(self) -> None:
        """Note that a loss is asked for all rows, and taken apart."""
        self.has_split = True

    def note_loop(self) -> None:
        """Note that something is out of reach; see `Tracing`."""
        self.has_loop = True

    def note_outputs(self, outputs: list[Tensor]) -> None:
        """Note what the model returns, which must have one entry for each row."""
        self._outputs += outputs

    def note_read(self, tensors: list[Tensor]) -> None:
        """Note what an engine has made up to now, of which its norms and sums are."""
        graph = tf.compat.v1.get_default_graph()
        self._read = tensors, len(graph.get_operations())

    def alone(
        self,
        function: Callable[[list[Tensor]], Nest],
        rows: list[Tensor],
        *,
        in_loop: bool = False,
        of_batch: Callable[[list[Tensor]], Tensor] | None = None,
    ) -> Nest:
        """Look at what a function does to one row; see `FunctionsOfRows.stand_in`."""
        return self._of_rows.stand_in(
            function, rows, self.calls.owner, in_loop=in_loop, of_batch=of_batch
        )

    def reads_alone(self, variable: Variable) -> bool:
        """Tell whether a function that sees one row reads a variable by itself."""
        return self._of_rows.read(variable)

    def part(self, owner: Owner) -> contextlib.AbstractContextManager[None]:
        """Note that the operations that are made inside belong to a layer, or loss."""
        return self.calls.part(owner)

    def _traced(self, run: Callable[..., Nest], signature: Sequence[Nest]) -> Nest:
        """Trace a function, and note what happens meanwhile."""
        function = tf.function(run, autograph=False)
        with traced_by(self), self.calls.observing():
            traced = function.get_concrete_function(*signature)
        self._captures.note_seeds()
        return traced

    def _found(
        self,
        graph: tf.Graph,
        signature: Sequence[Nest],
        rows: int | None,
        views: int,
        ends_in_rows: bool,
    ) -> list[Found]:
        arguments = given(signature, rows, views)
        analysis = self._analysis(graph, rows)
        read, past = self._read or (graph.outputs, None)
        known = self._captures.known(graph, arguments)
        outputs = [each for each in self._outputs if each.graph is graph]
        wanted = [*read, *self._of_rows.outer_tensors(), *outputs]
        values = analysis.values(graph, known, wanted, past)
        by_tensor = {
            id(tensor): value for tensor, value in zip(wanted, values, strict=True)
        }
        for output in outputs:
            _check_output(by_tensor[id(output)], arguments[0].shape[0])
        # What is kept is at fault even if nothing that is returned depends on it.
        causes = set(analysis.effects)
        self.moved |= analysis.assigned | analysis.moved
        for tensor in read:
            value = by_tensor[id(tensor)]
            causes |= value.causes
            if READ in value.chance:
                self.moved.add(SEED_AS_NUMBER)
            is_alone = value.axis == WITHIN and tensor.shape[:1].as_list() == [1]
            if ends_in_rows and not is_alone and value[:2] not in _ROWS:
                why = "ends in rows that are not on the first axis"
                # A graph returns copies of nobody's.
                made = made_as(tensor).op
                causes.add(Cause(made, made, False, why))
        return self._with_owners(graph, causes) + self._of_rows.found(by_tensor)

    def _with_owners(self, graph: tf.Graph, causes: Iterable[Cause]) -> list[Found]:
        """Say whose operations they are, in the order of the graph."""
        order = {op.name: n for n, op in enumerate(graph.get_operations())}
        return [
            Found(self.calls.owner_of(cause, order), cause)
            for cause in sorted(causes, key=lambda c: order[c.outer.name])
        ]

    def _analysis(self, graph: tf.Graph, rows: int | None) -> Analysis:
        made_of = {
            tensor.op.name: inputs
            for tensor, inputs in self._made_of
            if tensor.graph is graph
        }
        return Analysis(rows, made_of=made_of)


def _check_output(value: Value, rows: Length | None) -> None:
    """Refuse an output in which rows stay apart, and have not one entry each."""
    if value.lengths is None or value.causes:
        return
    length = value.lengths[0] if value.lengths else 0
    if isinstance(length, Size):
        if length.block is not None and length != rows:
            refuse_output(f"{length.block} entries for each row")
    elif length is not None and length != rows:
        refuse_output(f"shape {value.lengths}")


def _common_place(values: list[Value]) -> Place | None:
    """Return where rows lie in all of some tensors, if it is known."""
    if any(isinstance(number, Open) for each in values for number in each.layout[:2]):
        # How many entries each row has is seen when the graph runs.
        return None
    places = {
        Place(each.axis, fixed(each.layout.times), fixed(each.layout.entries))
        for each in values
        if each.axis is not None
    }
    # Of what is the same for all rows nobody knows how it lies.
    is_mixed = any(each.axis is None for each in values)
    if len(places) != 1 or (is_mixed and any(place.times > 1 for place in places)):
        return None
    (place,) = places
    is_known = place.axis != WITHIN and not any(each.layout.words for each in values)
    return place if is_known else None
