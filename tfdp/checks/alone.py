"""Looks at functions that get one row at a time: what they read, and leave for others."""

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._tracing import units_checked_by
from tfdp._types import Nest, Tensor, Variable
from tfdp.checks.captures import READS_METRIC, Captures, outer_tensors
from tfdp.checks.comparisons import OWN_COMPARISONS, Comparisons, warn_of_change
from tfdp.checks.found import LOSS, Found, Owner
from tfdp.checks.given import given
from tfdp.checks.graph import LOOPS, Analysis
from tfdp.checks.node import BY_PLACE
from tfdp.checks.operations.chance import READ
from tfdp.checks.values import FREE, WITHIN, Cause, Value, causes_of
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError

# A number of rows, where one must be known: no likely length of another axis.
_MANY = 97

# What moves on if a seed is taken for more than to draw.
SEED_AS_NUMBER = "the state of a seed generator, read as a number"

# What is the matter with some loops inside of a loop over rows.
NO_GRADIENT = "has no gradient in a loop over rows"
# What is the matter where rows come in turn: each finds what those before have left, which
# follows.
LEAVES_TO_THE_NEXT = "leaves to the next row"


class _Alone(NamedTuple):
    """A function that gets one row at a time.

    Attributes:
        graph: Its graph.
        arguments: How many inputs of that are data.
        owner: Whose it is.
        in_loop: Whether it gets one row after the other.
    """

    graph: tf.Graph
    arguments: int
    owner: Owner
    in_loop: bool


class FunctionsOfRows:
    """The functions of a pass that get one row at a time, in place of maps over rows.

    Args:
        captures: Knows the variables that they read.
        moved: Gains what they move on; see `Trace`.
        model_name: Of the model, for messages.
    """

    def __init__(self, captures: Captures, moved: set[str], model_name: str) -> None:
        """Begin with nothing."""
        self._captures = captures
        self._moved = moved
        self._model_name = model_name
        self._functions: list[_Alone] = []
        # What losses do that are asked for each row alone, but cannot be.
        self._of_losses: list[Found] = []

    @property
    def are_some(self) -> bool:
        """Whether there are any."""
        return bool(self._functions)

    def stand_in(
        self,
        function: Callable[[list[Tensor]], Nest],
        rows: list[Tensor],
        owner: Owner,
        *,
        in_loop: bool,
        of_batch: Callable[[list[Tensor]], Tensor] | None,
    ) -> Nest:
        """Note a function, and return what stands for what it makes of all rows.

        Args:
            function: Takes a list with one row of each tensor.
            rows: The tensors.
            owner: Whose function it is.
            in_loop: Whether the map is a loop over rows.
            of_batch: Computes the same of all rows, if that is a loss: takes the tensors.

        Returns:
            For each output of the function, a tensor with as many rows, each of which
            depends on the same row of all tensors.

        Raises:
            UnsupportedLossError: If a loss can be asked for a batch, and not for a row.
        """
        takes_batches = False
        if of_batch is not None and owner == LOSS:
            takes_batches = self._compare(of_batch, rows)
        specs = [tf.TensorSpec(tensor.shape[1:], tensor.dtype) for tensor in rows]
        try:
            traced = tf.function(function, autograph=False).get_concrete_function(specs)
        except Exception as error:
            if not takes_batches:
                raise
            raise UnsupportedLossError(
                "A loss is asked for each example alone: one that can be asked for a "
                f"batch only is refused. Received: {type(error).__name__} for one row, "
                f"{' '.join(str(error).split())}. {OWN_COMPARISONS}"
            ) from error
        self._functions.append(_Alone(traced.graph, len(rows), owner, in_loop))
        loops = [op for op in traced.graph.get_operations() if op.type in LOOPS]
        if in_loop and loops and not _has_gradient_in_loop(function, rows, traced):
            cause = Cause(loops[0], loops[0], False, NO_GRADIENT)
            self._of_losses.append(Found(owner, cause))
        numbers = [
            tf.reduce_sum(
                tf.cast(each, tf.float32), axis=list(range(1, each.shape.rank))
            )
            for each in rows
            if each.dtype not in (tf.string, tf.variant)
        ]
        of_row = tf.add_n(numbers)

        def like(output: Tensor) -> Tensor:
            column = tf.reshape(of_row, [-1] + [1] * output.shape.rank)
            return tf.cast(column, output.dtype) + tf.zeros(output.shape, output.dtype)

        return keras.tree.map_structure(like, traced.structured_outputs)

    def read(self, variable: Variable) -> bool:
        """Tell whether one of them reads a variable by itself."""
        handles = {id(each.handle) for each in _keras.tensorflow_variables(variable)}
        return any(
            id(outer) in handles
            for alone in self._functions
            for outer, _ in alone.graph.captures
        )

    def outer_tensors(self) -> list[Tensor]:
        """List the tensors of the graph of the pass that they read."""
        return [
            tensor
            for alone in self._functions
            for tensor, _ in outer_tensors(alone.graph)
        ]

    def found(self, outer: Mapping[int, Value]) -> list[Found]:
        """List what is the matter with them.

        Args:
            outer: What is known of `outer_tensors`, by their `id`s.

        Returns:
            What lets rows meet in them, or keeps what they hold.
        """
        return [
            *(
                Found(alone.owner, cause)
                for alone in self._functions
                for cause in self._causes(alone, outer)
            ),
            *self._of_losses,
        ]

    def _causes(self, alone: _Alone, outer: Mapping[int, Value]) -> set[Cause]:
        """Look at one of them."""
        causes: set[Cause] = set()
        graph = alone.graph
        for tensor, _ in outer_tensors(graph):
            value = outer[id(tensor)]
            causes |= value.causes
            if value.axis is not None:
                why = "is read as a whole where only one row is to be seen"
                causes.add(Cause(tensor.op, tensor.op, True, why))
        known = self._captures.known(graph, [Value(WITHIN)] * alone.arguments)
        analysis = Analysis(None)
        outputs = analysis.values(graph, known | _freely_read(graph), graph.outputs)
        left = analysis.assigned | analysis.moved
        if any(READ in value.chance for value in outputs):
            left.add(SEED_AS_NUMBER)
        self._moved |= left
        # A row meets no other here, but what others have left, and its own place.
        found = causes_of(outputs)
        causes |= {each for each in found if each.why in (READS_METRIC, BY_PLACE)}
        if alone.in_loop and left:
            last, names = graph.outputs[0].op, ", ".join(f"`{n}`" for n in sorted(left))
            causes.add(Cause(last, last, False, f"{LEAVES_TO_THE_NEXT} {names}"))
        return causes | analysis.effects

    def _compare(
        self, of_batch: Callable[[list[Tensor]], Tensor], rows: list[Tensor]
    ) -> bool:
        """Note whether a loss compares the rows of a batch; tell if it takes batches."""
        traced = tf.function(of_batch, autograph=False)
        for length in (None, _MANY):
            try:
                comparisons = self._compared(traced, rows, length)
            # Whatever it is: the loss is asked for rows, and of these it is known.
            except Exception:  # noqa: BLE001
                continue
            self._of_losses += [Found(LOSS, each) for each in comparisons.certain]
            if comparisons.changed and not comparisons.certain:
                found = Found(LOSS, comparisons.changed[0])
                warn_of_change(self._model_name, f"{found.operation} {found.cause.why}")
            return True
        return False

    def _compared(
        self, traced: Nest, rows: list[Tensor], length: int | None
    ) -> Comparisons:
        """Look at what a function makes of so many rows, which it alone gets."""
        specs = [
            tf.TensorSpec([length, *tensor.shape[1:]], tensor.dtype) for tensor in rows
        ]
        graph = traced.get_concrete_function(specs).graph
        known = self._captures.known(graph, given(specs, length))
        known |= _freely_read(graph)
        comparisons = Comparisons()
        analysis = Analysis(length, comparisons.look_at)
        analysis.values(graph, known, graph.outputs)
        return comparisons


def units_checked(
    model: keras.Model,
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no unit of a model leaves anything for others.

    What takes each unit through the model by itself raises `UnsupportedLayerError`
    otherwise, before it runs.
    """
    captures = Captures(model)

    def check(graph: tf.Graph, arguments: int, *, in_turn: bool) -> None:
        left = left_by(graph, arguments, captures, in_turn=in_turn)
        if left:
            raise UnsupportedLayerError(
                f"Model `{model.name}` must leave nothing for other examples where each "
                f"is taken through it by itself. Received: {', '.join(left)}. Keep "
                "nothing of the data; change variables and tables in a callback; and "
                "draw with `keras.random.SeedGenerator` in place of `tf.random`."
            )

    return units_checked_by(check)


def left_by(
    graph: tf.Graph, arguments: int, captures: Captures, *, in_turn: bool
) -> list[str]:
    """Say what a function of one example leaves behind for others.

    Args:
        graph: Of the function, or of a vectorized map of it.
        arguments: How many inputs of the graph are data.
        captures: Knows the variables that it reads.
        in_turn: Whether examples are taken one after the other: then they see what
            those before have assigned.

    Returns:
        Words for each thing.
    """
    captures.note_seeds()
    # What it returns is the caller's matter: losses of rows were looked at before.
    analysis = Analysis(None)
    analysis.values(graph, captures.known(graph, [Value(WITHIN)] * arguments), [])
    causes = [Found(None, each) for each in analysis.effects]
    left = [f"{each.operation} {each.cause.why}" for each in causes]
    return left + sorted(analysis.moved | (analysis.assigned if in_turn else set()))


def _freely_read(graph: tf.Graph) -> dict[str, Value]:
    """Take what a graph reads of tensors around it for free of data."""
    return {inner.op.name: FREE for _, inner in outer_tensors(graph)}


def _has_gradient_in_loop(
    function: Callable[[list[Tensor]], Nest], rows: list[Tensor], traced: Nest
) -> bool:
    """Tell whether what has a loop in it can be differentiated in a loop over rows."""
    signature = tf.nest.map_structure(
        lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype),
        traced.structured_outputs,
    )

    def run(rows: list[Tensor]) -> Nest:
        watched = [each for each in rows if each.dtype.is_floating]
        # Recordings have more tapes than one, and each asks for a gradient.
        with tf.GradientTape() as tape, tf.GradientTape() as other:
            tape.watch(watched)
            other.watch(watched)
            return tf.map_fn(function, rows, fn_output_signature=signature)

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in rows]
    try:
        tf.function(run, autograph=False).get_concrete_function(specs)
    except LookupError:
        return False
    return True
