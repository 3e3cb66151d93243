"""Builds the graph of a model's pass, and says what lets its rows meet."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdp import _keras, _seeds
from tfdp._tracing import traced_by, units_checked_by
from tfdp._types import Nest, Tensor, Variable
from tfdp.checks.comparisons import OWN_COMPARISONS, Comparisons, warn_of_change
from tfdp.checks.found import GRADIENTS, LOSS, Found, Owner, differentiated
from tfdp.checks.graph import LOOPS, METRIC, Analysis
from tfdp.checks.node import BY_PLACE, SEEDS, SHARED_SEEDS
from tfdp.checks.operations.chance import READ
from tfdp.checks.sizes import Length, Size
from tfdp.checks.values import FREE, PLAIN, WITHIN, Cause, Layout, Value, causes_of
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError
from tfdp.rules.places import ROWS_FIRST, Place, Where

# Where the rows of losses are: one entry each on the first axis. Losses may be the same
# for all.
_ROWS = {(0, PLAIN), (None, PLAIN)}

# Lengths for axes 1 to 5 where they are open, the same in all inputs: short ones that are
# equal, and longer ones that are not, odd and even. Code may do something else from some
# length on, or where two are equal. Of axes behind these nothing is said.
_LENGTHS = (
    (11, 11, 11, 11, 11),
    (13, 13, 13, 13, 13),
    (1031, 2053, 37, 613, 29),
    (131_072, 96, 20, 14, 6),
)

# A number of rows, where one must be known: no likely length of another axis.
_MANY = 97

# What moves on if a seed is taken for more than to draw.
SEED_AS_NUMBER = "the state of a seed generator, read as a number"

# What is the matter with some loops inside of a loop over rows.
NO_GRADIENT = "has no gradient in a loop over rows"
# What is the matter where rows come in turn: each finds what those before have left, which
# follows.
LEAVES_TO_THE_NEXT = "leaves to the next row"

READS_METRIC = "reads a metric, which holds data without noise"


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


class Trace:
    """A pass through a model as a graph.

    Args:
        model: The model; None for a loss alone.

    Attributes:
        layers: The model and all layers in it, with the paths that lead to them.
        training: `id`s of the layers that were called with ``training=True``.
        adding_losses: `id`s of the layers that called `add_loss`.
        stateful: `id`s of recurrent layers that keep their states for the next batch.
        has_split: Whether a loss is asked for all rows, and taken apart.
        has_loop: Whether something is out of reach in what may be a loop.
        moved: What the pass moves on, so that the next one finds it moved: variables that
            it assigns, and other state; see `Analysis`.
    """

    def __init__(self, model: keras.Model | None) -> None:
        """Begin with nothing."""
        self.layers = [] if model is None else _keras.layers_by_path(model)
        self.training: set[int] = set()
        self.adding_losses: set[int] = set()
        self.stateful: set[int] = set()
        self.has_split = False
        self.has_loop = False
        self.moved: set[str] = set()
        # Handles of the states that seeds are drawn from.
        self._seeds: dict[int, str] = {}
        self._model = model
        # Where the operations of each call are: graph, first, past the last, layer.
        self._calls: list[tuple[tf.Graph, int, int, Owner]] = []
        # What gets one row at a time.
        self._alone: list[_Alone] = []
        self._owners: list[Owner] = [None]
        # What an engine reads, and how many operations there were by then.
        self._read: tuple[list[Tensor], int | None] | None = None
        # What losses do that are asked for each row alone, but cannot be.
        self._of_losses: list[Found] = []
        # What is made of the same rows as what, for certain.
        self._made_of: list[tuple[Tensor, list[Tensor]]] = []
        self._noted: dict[Where, list[Tensor]] = {}
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
        function = tf.function(run, autograph=False)
        with _keras.own_global_seed(), traced_by(self), self._observing():
            graph = function.get_concrete_function(*signature).graph
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
        function = tf.function(run, autograph=False)
        # It may run: what is drawn then comes from the generators that the model has.
        _keras.make_global_seed()
        with traced_by(self), self._observing():
            traced = function.get_concrete_function(*signature)
        found = self._found(traced.graph, signature[:-1], rows, 1, ends_in_rows=True)
        return found, None if self._alone else traced

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
        function = tf.function(run, autograph=False)
        with _keras.own_global_seed(), traced_by(self), self._observing():
            graph = function.get_concrete_function(*signature).graph
        wanted = [tensor for tensors in self._noted.values() for tensor in tensors]
        different: dict[Where, set[Place | None]] = {
            where: set() for where in self._noted
        }
        for given in _all_given(signature, None, 1):
            known = self._known(graph, given)
            analysis = Analysis(
                None,
                made_of=self._made_of_in(graph),
                has_open_lengths=_are_open(signature),
            )
            values = iter(analysis.values(graph, known, wanted))
            for where, tensors in self._noted.items():
                different[where].add(_common_place([next(values) for _ in tensors]))
        return {
            where: place
            for where, (place, *others) in different.items()
            if not others
            and place is not None
            and (place != ROWS_FIRST or where in self._unrecorded)
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

    def note_read(self, tensors: list[Tensor]) -> None:
        """Note what an engine has made up to now, of which its norms and sums are."""
        graph = tf.compat.v1.get_default_graph()
        self._read = tensors, len(graph.get_operations())

    def _found(
        self,
        graph: tf.Graph,
        signature: Sequence[Nest],
        rows: int | None,
        views: int,
        ends_in_rows: bool,
    ) -> list[Found]:
        found: dict[Cause, Found] = {}
        for given in _all_given(signature, rows, views):
            analysis = Analysis(
                rows,
                made_of=self._made_of_in(graph),
                has_open_lengths=_are_open(signature),
            )
            for each in self._found_in(graph, given, analysis, ends_in_rows):
                found.setdefault(each.cause, each)
        return list(found.values())

    def _found_in(
        self,
        graph: tf.Graph,
        given: list[Value],
        analysis: Analysis,
        ends_in_rows: bool,
    ) -> list[Found]:
        read, past = self._read or (graph.outputs, None)
        known = self._known(graph, given)
        captures = [each for alone in self._alone for each, _ in _outer(alone.graph)]
        wanted = [*read, *captures]
        values = analysis.values(graph, known, wanted, past)
        by_tensor = {
            id(tensor): value for tensor, value in zip(wanted, values, strict=True)
        }
        # What is kept is at fault even if nothing that is returned depends on it.
        causes = set(analysis.effects)
        self._note_moves(analysis)
        for tensor in read:
            value = by_tensor[id(tensor)]
            causes |= value.causes
            if READ in value.chance:
                self.moved.add(SEED_AS_NUMBER)
            is_alone = value.axis == WITHIN and tensor.shape[:1].as_list() == [1]
            if ends_in_rows and not is_alone and value[:2] not in _ROWS:
                why = "ends in rows that are not on the first axis"
                made = tensor.op
                while made.type == "Identity":  # A graph returns copies of nobody's.
                    made = made.inputs[0].op
                causes.add(Cause(made, made, False, why))
        order = {op.name: n for n, op in enumerate(graph.get_operations())}
        return (
            [
                Found(self._layer_of(cause, order), cause)
                for cause in sorted(causes, key=lambda c: order[c.outer.name])
            ]
            + [
                Found(alone.owner, cause)
                for alone in self._alone
                for cause in self._causes_alone(alone, by_tensor)
            ]
            + self._of_losses
        )

    def _known(self, graph: tf.Graph, given: list[Value]) -> dict[str, Value]:
        """Say what is known of the inputs of a graph, by the names of their operations."""
        inputs = zip(graph.inputs, given, strict=False)
        known = {tensor.op.name: value for tensor, value in inputs}
        return known | self._captured(graph)

    def _made_of_in(self, graph: tf.Graph) -> dict[str, list[Tensor]]:
        return {
            tensor.op.name: inputs
            for tensor, inputs in self._made_of
            if tensor.graph is graph
        }

    def _captured(self, graph: tf.Graph) -> dict[str, Value]:
        """Name the variables that a graph reads."""
        names = {id(v.handle): v.name.removesuffix(":0") for v in graph.variables}
        metrics: set[int] = set()
        if self._model is not None:
            metrics = {id(handle) for handle in _keras.metrics_handles(self._model)}
            for variable in self._model.variables:
                for each in _keras.tensorflow_variables(variable):
                    names[id(each.handle)] = variable.path
        known = {}
        for outer, inner in graph.captures:
            if outer.dtype != tf.resource:
                continue
            value = FREE._replace(variable=names.get(id(outer), "of an unknown name"))
            if id(outer) in self._seeds:
                value = value._replace(variable=self._seeds[id(outer)])
            if id(outer) in metrics:
                cause = Cause(inner.op, inner.op, True, READS_METRIC)
                value = value._replace(variable=METRIC, causes=frozenset({cause}))
            known[inner.op.name] = value
        return known

    def _causes_alone(self, alone: _Alone, outer: dict[int, Value]) -> set[Cause]:
        """Look at a function that gets one row at a time."""
        causes: set[Cause] = set()
        graph, free = alone.graph, {}
        for tensor, inner in _outer(graph):
            value = outer[id(tensor)]
            causes |= value.causes
            if value.axis is not None:
                why = "is read as a whole where only one row is to be seen"
                causes.add(Cause(tensor.op, tensor.op, True, why))
            free[inner.op.name] = FREE
        analysis, outputs = self._look_alone(
            graph, alone.arguments, graph.outputs, free
        )
        left = analysis.assigned | analysis.moved
        if any(READ in value.chance for value in outputs):
            left.add(SEED_AS_NUMBER)
            self.moved.add(SEED_AS_NUMBER)
        # A row meets no other here, but what others have left, and its own place.
        found = causes_of(outputs)
        causes |= {each for each in found if each.why in (READS_METRIC, BY_PLACE)}
        if alone.in_loop and left:
            last, names = graph.outputs[0].op, ", ".join(f"`{n}`" for n in sorted(left))
            causes.add(Cause(last, last, False, f"{LEAVES_TO_THE_NEXT} {names}"))
        return causes | analysis.effects

    def _look_alone(
        self,
        graph: tf.Graph,
        arguments: int,
        wanted: Sequence[Tensor],
        free: Mapping[str, Value] = types.MappingProxyType({}),
    ) -> tuple[Analysis, list[Value]]:
        """Look at the graph of a function that gets one row; see `Analysis.values`."""
        known = self._captured(graph)
        for tensor in graph.inputs[:arguments]:
            known[tensor.op.name] = Value(WITHIN)
        analysis = Analysis(None)
        values = analysis.values(graph, {**known, **free}, wanted)
        self._note_moves(analysis)
        return analysis, values

    def alone(
        self,
        function: Callable[[list[Tensor]], Nest],
        rows: list[Tensor],
        *,
        in_loop: bool = False,
        of_batch: Callable[[list[Tensor]], Tensor] | None = None,
    ) -> Nest:
        """Look at what a function does to one row; used in place of a map over rows.

        Args:
            function: Takes a list with one row of each tensor.
            rows: The tensors.
            in_loop: Whether the map is a loop over rows.
            of_batch: Computes the same of all rows, if that is a loss: takes the tensors.

        Returns:
            For each output of the function, a tensor with as many rows, each of which
            depends on the same row of all tensors.

        Raises:
            UnsupportedLossError: If a loss can be asked for a batch, and not for a row.
        """
        takes_batches = False
        if of_batch is not None and self._owners[-1] == LOSS:
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
        self._alone.append(
            _Alone(traced.graph, len(rows), self._owners[-1], in_loop=in_loop)
        )
        if in_loop and any(op.type in LOOPS for op in traced.graph.get_operations()):
            self._find_in_loop(function, rows, traced)
        numbers = [
            tf.reduce_sum(
                tf.cast(each, tf.float32), axis=list(range(1, each.shape.rank))
            )
            for each in rows
            if each.dtype not in (tf.string, tf.variant)
        ]
        of_row = tf.add_n(numbers)

        def stand_in(output: Tensor) -> Tensor:
            column = tf.reshape(of_row, [-1] + [1] * output.shape.rank)
            return tf.cast(column, output.dtype) + tf.zeros(output.shape, output.dtype)

        return keras.tree.map_structure(stand_in, traced.structured_outputs)

    def reads_alone(self, variable: Variable) -> bool:
        """Tell whether a function that sees one row reads a variable by itself."""
        handles = {id(each.handle) for each in _keras.tensorflow_variables(variable)}
        return any(
            id(outer) in handles
            for alone in self._alone
            for outer, _ in alone.graph.captures
        )

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
                name = "" if self._model is None else self._model.name
                warn_of_change(name, f"{found.operation} {found.cause.why}")
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
        known = self._captured(graph)
        for spec, tensor in zip(specs, graph.inputs, strict=False):
            known[tensor.op.name] = _given(spec, length, 1, _LENGTHS[0])
        known |= {inner.op.name: FREE for _, inner in _outer(graph)}
        comparisons = Comparisons()
        analysis = Analysis(
            length, comparisons.look_at, has_open_lengths=_are_open(specs)
        )
        analysis.values(graph, known, graph.outputs)
        return comparisons

    def _find_in_loop(
        self,
        function: Callable[[list[Tensor]], Nest],
        rows: list[Tensor],
        traced: Nest,
    ) -> None:
        """Note if what has a loop in it cannot be differentiated in a loop over rows."""
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
            loops = [op for op in traced.graph.get_operations() if op.type in LOOPS]
            cause = Cause(loops[0], loops[0], False, NO_GRADIENT)
            self._of_losses.append(Found(self._owners[-1], cause))

    def check_alone(self, graph: tf.Graph, arguments: int, *, in_turn: bool) -> None:
        """Refuse a function of one example alone that leaves something for others.

        Args:
            graph: Of the function, or of a vectorized map of it.
            arguments: How many inputs of the graph are data.
            in_turn: Whether examples are taken one after the other: then they see what
                those before have assigned.

        Raises:
            UnsupportedLayerError: If it does.
        """
        left = self.left_by(graph, arguments, in_turn=in_turn)
        if left:
            name = "A model" if self._model is None else f"Model `{self._model.name}`"
            raise UnsupportedLayerError(
                f"{name} must leave nothing for other examples where each is taken "
                f"through it by itself. Received: {', '.join(left)}. Keep nothing of the "
                "data; change variables and tables in a callback; and draw with "
                "`keras.random.SeedGenerator` in place of `tf.random`."
            )

    def left_by(self, graph: tf.Graph, arguments: int, *, in_turn: bool) -> list[str]:
        """Say what a function of one example leaves behind; see `check_alone`."""
        self._note_seeds()
        # What it returns was looked at before, with the losses.
        analysis, _ = self._look_alone(graph, arguments, [])
        causes = [Found(None, each) for each in analysis.effects]
        left = [f"{each.operation} {each.cause.why}" for each in causes]
        return left + sorted(analysis.moved | (analysis.assigned if in_turn else set()))

    def _note_moves(self, analysis: Analysis) -> None:
        self.moved |= analysis.assigned | analysis.moved

    def _note_seeds(self) -> None:
        """Note the states that seeds are drawn from, while they are known."""
        model = self._model
        states = _seeds.states_of_drawing()
        states += [] if model is None else _keras.seed_states(model)
        shared = [] if model is None else _keras.shared_seed_states(model)
        for name, of in ((SEEDS, states), (SHARED_SEEDS, shared)):
            for state in of:
                for each in _keras.tensorflow_variables(state):
                    self._seeds[id(each.handle)] = name

    @contextlib.contextmanager
    def _observing(self) -> Iterator[None]:
        """Note what layers are called, and which operations they make."""
        with contextlib.ExitStack() as replaced:
            for _, layer in self.layers:
                call = functools.partial(self._call, layer, layer.call)
                replaced.enter_context(
                    _keras.attributes_replaced(
                        layer,
                        call=functools.wraps(layer.call)(call),
                        add_loss=functools.partial(
                            self._add_loss, id(layer), layer.add_loss
                        ),
                    )
                )
            yield
        self._note_seeds()

    def _add_loss(
        self, layer: int, add_loss: Callable[[Nest], None], loss: Nest
    ) -> None:
        self.adding_losses.add(layer)
        add_loss(loss)

    def _call(
        self,
        layer: keras.layers.Layer,
        function: Callable[..., Nest],
        *args: Nest,
        **kwargs: Nest,
    ) -> Nest:
        training = kwargs.get("training")
        if tf.is_tensor(training) or training:
            self.training.add(id(layer))
        with self.part(layer), contextlib.ExitStack() as replaced:
            if isinstance(layer, keras.layers.RNN) and layer.stateful:
                self.stateful.add(id(layer))
                # Batches of any size cannot be traced through some of Keras's versions.
                stateless = _keras.attributes_replaced(layer, stateful=False)
                replaced.enter_context(stateless)
            return function(*args, **kwargs)

    @contextlib.contextmanager
    def part(self, owner: Owner) -> Iterator[None]:
        """Note that the operations that are made inside belong to a layer, or loss."""
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        self._owners.append(owner)
        try:
            yield
        finally:
            self._owners.pop()
            self._calls.append((graph, first, len(graph.get_operations()), owner))

    def _layer_of(self, cause: Cause, order: dict[str, int]) -> Owner:
        op = cause.outer
        graph, place = op.graph, order[op.name]
        if op.name.startswith(GRADIENTS):
            near = differentiated(op)
            place = order[near[0].name] if near else place
        spans = [
            (past - first, layer)
            for of_graph, first, past, layer in self._calls
            if of_graph is graph and first <= place < past
        ]
        return min(spans, key=lambda span: span[0])[1] if spans else None


def units_checked(
    model: keras.Model,
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no unit of a model leaves anything for others.

    What takes each unit through the model by itself raises `UnsupportedLayerError`
    otherwise, before it runs.
    """
    return units_checked_by(Trace(model).check_alone)


def _outer(graph: tf.Graph) -> list[tuple[Tensor, Tensor]]:
    """List the tensors of the outer graph that a graph reads, with its own for them."""
    return [
        (outer, inner)
        for outer, inner in graph.captures
        if outer.dtype != tf.resource and tf.is_symbolic_tensor(outer)
    ]


def _all_given(
    signature: Sequence[Nest], rows: int | None, views: int
) -> Iterator[list[Value]]:
    """Say of the arguments of a function what is known, for some lengths that are open."""
    # They must not be mistaken for that of the batch, and what holds for two of them by
    # chance is not counted on.
    for lengths in _LENGTHS if _are_open(signature) else _LENGTHS[:1]:
        yield [_given(spec, rows, views, lengths) for spec in _specs(signature)]


def _are_open(signature: Sequence[Nest]) -> bool:
    """Tell whether lengths of other axes than the first are not known."""
    return any(None in spec.shape.as_list()[1:] for spec in _specs(signature))


def _specs(signature: Sequence[Nest]) -> list[tf.TensorSpec]:
    return [spec for spec in tf.nest.flatten(signature) if spec is not None]


def _common_place(values: list[Value]) -> Place | None:
    """Return where rows lie in all of some tensors, if it is known."""
    places = {
        Place(each.axis, each.layout.times, each.layout.entries)
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


def _given(
    spec: tf.TensorSpec, rows: int | None, views: int, open_lengths: Sequence[int]
) -> Value:
    lengths: list[Length | None] = [*spec.shape.as_list()]
    for axis, open_length in enumerate(open_lengths, 1):
        if axis < len(lengths) and lengths[axis] is None:
            lengths[axis] = open_length
    lengths[0] = Size(views) if rows is None else rows * views
    if lengths[0] == 1:
        # It meets no other, wherever its entries go.
        return Value(WITHIN, lengths=tuple(lengths))
    return Value(0, Layout(1, views), tuple(lengths))
