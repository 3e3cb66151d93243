"""Follows rows through the graph of a function, and through the functions it calls."""

import functools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Array, Tensor
from tfdp.checks.constants import constant_value, evaluated
from tfdp.checks.effects import MEMORY, has_effect
from tfdp.checks.node import (
    RULES,
    SEEDS,
    SHARED_SEEDS,
    Node,
    counting,
    static_lengths,
)
from tfdp.checks.operations import apply
from tfdp.checks.operations.chance import has_known_seed, with_chance
from tfdp.checks.operations.words import AS_LONG_AS_THE_LONGEST
from tfdp.checks.sizes import Lengths, is_fixed, same
from tfdp.checks.values import (
    NEW_LIST,
    NO_NUMBERS,
    OF_LISTS,
    PERHAPS_NEW,
    PLAIN,
    WITHIN,
    Cause,
    Value,
    causes_of,
    chance_of,
    have_rows,
    is_open,
    laid_out,
    with_shape,
)
from tfdp.rules.uses import made_as

_MOST_ROUNDS = 12

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")

# In place of a variable's name: that of a metric, whose numbers nobody calls private.
METRIC = "metric"

# What passes may leave behind for others.
_MAY_MOVE = frozenset({METRIC, SEEDS, SHARED_SEEDS})

# What only stops the step.
_MESSAGES = ("Assert", "CheckNumerics", "CheckNumericsV2")


class Analysis:
    """What is known of the tensors of a graph, and of what it does.

    Args:
        rows: How many rows a batch has; None if that is not static.
        look_at: Called for each operation, with what becomes of its outputs.
        made_of: For identities in the outermost graph, by their names, what their rows
            are known to be made of; see `made_of_rows`.

    Attributes:
        effects: What changes state that outlives the step by what rows hold.
        assigned: Names of variables that get another value, whatever that is made of.
        moved: What other state moves on, so that the next pass finds another; but for
            the states of seed generators, whose seeds are secret, and metrics.
    """

    def __init__(
        self,
        rows: int | None,
        look_at: Callable[[Node, Sequence[Value]], None] | None = None,
        *,
        made_of: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        """Begin with nothing."""
        self._made_of = made_of or {}
        self.effects: set[Cause] = set()
        self.assigned: set[str] = set()
        self.moved: set[str] = set()
        self._rows = rows
        self._look_at = look_at
        self._outer: tf.Operation | None = None
        # Of the outputs of the operations of the graph that is looked at.
        self._values_here: dict[str, list[Value]] = {}
        # Whether what is looked at runs or not by what is in the rows.
        self._is_hidden = False

    def values(
        self,
        graph: tf.Graph,
        known: Mapping[str, Value],
        wanted: Sequence[Tensor],
        past: int | None = None,
    ) -> list[Value]:
        """Return what is known of tensors of a graph.

        Args:
            graph: The `tf.Graph`.
            known: What is known of its inputs, by the names of their operations.
            wanted: The tensors to tell of.
            past: How many of its operations to look at, by default all.
        """
        values: dict[str, list[Value]] = {}
        around, self._values_here = self._values_here, values
        for op in _needed(graph, wanted, past):
            name = op.name
            if name in known:
                values[name] = [known[name]]
                continue
            inputs = [values[t.op.name][t.value_index] for t in op.inputs]
            # What happens in a function is told of the operation that calls it.
            is_outermost = self._outer is None
            if is_outermost and name in self._made_of:
                inputs = [self._value_made_of(op, self._made_of[name]) or inputs[0]]
            if is_outermost:
                self._outer = op
            outputs = self._outputs(op, inputs)
            if has_known_seed(op):
                self.moved.add(
                    f"operation {op.type} `{name}` with a seed that is known"
                )
            values[name] = with_chance(self._node(op, inputs), outputs)
            if self._look_at is not None:
                self._look_at(self._node(op, inputs), values[name])
            if is_outermost:
                self._outer = None
        self._values_here = around
        return [values[tensor.op.name][tensor.value_index] for tensor in wanted]

    def _value_made_of(
        self, op: tf.Operation, tensors: Sequence[Tensor]
    ) -> Value | None:
        """Return what is said of a tensor, None unless its rows are on the first axis."""
        made_of = [*map(self._node(op, []).value_of, tensors)]
        of_rows = [each for each in made_of if each.axis is not None]
        if {each[:2] for each in of_rows} != {(0, PLAIN)}:
            return None
        lengths = static_lengths(op.outputs[0])
        return Value(
            0,
            lengths=(of_rows[0].shape[0], *lengths[1:]) if lengths else None,
            causes=causes_of(made_of),
            chance=chance_of(made_of),
        )

    def _outputs(self, op: tf.Operation, inputs: list[Value]) -> list[Value]:
        kind = op.type
        if kind == "Const":
            return [constant_value(op)]
        try:
            if kind in CALLS:
                return self._called(op, op.get_attr("f").name, inputs)
            if kind in BRANCHES:
                return self._branches(op, inputs)
            if kind in LOOPS:
                return self._loop(op, inputs)
            if kind not in RULES and _keras.is_function(op.graph, kind):
                return self._called(op, kind, inputs)
        except LookupError:
            # Whatever a function does that nobody can look into.
            self._note_effect(self._node(op, inputs))
            return self._node(op, inputs).unknown_outputs()
        node = self._node(op, inputs)
        # Shapes are computed: whether a reshape keeps rows whole is in their numbers.
        result = evaluated(node)
        if result is not None:
            return [result]
        if has_effect(op):
            self._note_effect(node)
        return apply(node)

    def _node(self, op: tf.Operation, inputs: Sequence[Value]) -> Node:
        here = self._values_here
        return Node(
            op=op,
            inputs=inputs,
            rows=self._rows,
            outer=self._outer,
            value_of=lambda tensor: here[tensor.op.name][tensor.value_index],
        )

    def _note_effect(self, node: Node) -> None:
        """Note what an operation keeps, if that depends on data."""
        if node.op.type in _MESSAGES:
            return
        causes = node.causes
        names = [each.variable for each in node.inputs if each.variable]
        if _keras.assigns(node.op) and names:
            self.assigned.update({names[0]} - _MAY_MOVE)
        elif not _MAY_MOVE & set(names) and node.op.type != "PrintV2":
            self.moved.add(f"operation {node.op.type} `{node.op.name}`")
        # Where data decide whether it runs, even a constant that is kept tells of them.
        if not (have_rows(node.inputs) or causes or self._is_hidden):
            return
        if METRIC in names:
            return
        if names:
            why = "keeps what depends on the data"
            cause = node.cause(why, variable=names[0])
        else:
            # Rows that run one by one would still read what others left there.
            cause = node.cause(MEMORY)
        # Wherever the rows are: something of them is kept.
        self.effects.add(cause._replace(is_certain=True))

    def _called(
        self,
        op: tf.Operation,
        function: str,
        inputs: Sequence[Value],
        *,
        is_hidden: bool = False,
    ) -> list[Value]:
        """Follow rows through a function, which runs or not by data if it is hidden."""
        graph = _keras.function_graph(op.graph, function)
        known = {
            tensor.op.name: value
            for tensor, value in zip(graph.inputs, inputs, strict=True)
        }
        was_hidden, self._is_hidden = self._is_hidden, self._is_hidden or is_hidden
        values = self.values(graph, known, graph.outputs)
        self._is_hidden = was_hidden
        return values

    def _branches(self, op: tf.Operation, inputs: list[Value]) -> list[Value]:
        predicate, *arguments = inputs
        functions = (
            op.get_attr("branches")
            if "Case" in op.type
            else [op.get_attr("then_branch"), op.get_attr("else_branch")]
        )
        depends = _depends(predicate)
        results = [
            self._called(op, function.name, arguments, is_hidden=depends)
            for function in functions
        ]
        joined: list[Value] = []
        for tensor, values in zip(op.outputs, zip(*results, strict=True), strict=True):
            value = functools.reduce(functools.partial(self._join, op), values)
            if predicate.axis == WITHIN:
                value = value._replace(axis=WITHIN)
            elif depends and (value.numbers is None or tensor.dtype == tf.variant):
                # Numbers that both branches have are chosen by nobody.
                value = self._decided(op, value, predicate, "chooses")
            joined.append(value)
        return joined

    def _decided(
        self, op: tf.Operation, value: Value, predicate: Value, does: str
    ) -> Value:
        """Note that all rows, or how many there are, decide about a tensor."""
        what = "how many there are" if predicate.axis is None else "what is in them"
        if any(each.why == AS_LONG_AS_THE_LONGEST for each in predicate.causes):
            what = (
                "the length of the longest (all have the same by "
                "`TextVectorization(..., output_sequence_length=200)`)"
            )
        cause = self._node(op, []).cause(f"{does} for all rows by {what}")
        return value._replace(causes=value.causes | predicate.causes | {cause})

    def _loop(self, op: tf.Operation, inputs: list[Value]) -> list[Value]:
        body, condition = op.get_attr("body").name, op.get_attr("cond").name
        state = list(inputs)
        effects = set(self.effects)
        # Until another round adds nothing to what is known of the loop's variables.
        for _ in range(_MOST_ROUNDS):
            # Only the last round sees all that may meet in the body.
            self.effects = set(effects)
            after = self._called(op, body, state)
            joined = [
                self._join(op, before, result)
                for before, result in zip(state, after, strict=True)
            ]
            is_settled = all(_equal(*pair) for pair in zip(joined, state, strict=True))
            state = joined
            if is_settled:
                break
        else:
            why = "is a loop of which nothing is known"
            cause = self._node(op, inputs).cause(why, is_certain=False)
            state = [each._replace(causes=each.causes | {cause}) for each in state]
        [goes_on] = self._called(op, condition, state)
        if not _depends(goes_on):
            return state
        # Once more, to see what the last round changes, which data decide about.
        self._called(op, body, state, is_hidden=True)
        if goes_on.axis == WITHIN:
            return [each._replace(axis=WITHIN) for each in state]
        passed_on = _passed_on(_keras.function_graph(op.graph, body))
        return [
            value if n in passed_on else self._decided(op, value, goes_on, "goes on")
            for n, value in enumerate(state)
        ]

    def _join(self, op: tf.Operation, first: Value, second: Value) -> Value:
        """Return what holds for a tensor that is one or the other."""
        first, second = laid_out([first, second])
        # What has rows says where they are; what is filled, what is in a list.
        leads = second.axis is not None or second.variable != NEW_LIST
        main, other = (
            (second, first) if first.axis is None and leads else (first, second)
        )
        causes = first.causes | second.causes
        main = main._replace(chance=first.chance | second.chance)
        if WITHIN in (first.axis, second.axis):
            return main._replace(axis=WITHIN, numbers=None, causes=causes)
        node = self._node(op, [])
        # After what is not known, rows may be elsewhere than they are looked for.
        is_certain = all(each.is_certain for each in causes)
        if other.axis is not None and main[:2] != other[:2]:
            why = "has rows on another axis from one time to the next"
            causes |= {node.cause(why, is_certain=is_certain)}
        lengths = _joined_lengths(main, other)
        if main.axis is not None and not _has_rows(lengths, main.axis):
            known = [each.lengths for each in (main, other) if each.axis is not None]
            if all(_has_rows(each, main.axis) for each in known):
                why = "has another shape from one time to the next"
                causes |= {node.cause(why, is_certain=is_certain)}
        numbers = _joined_numbers(first.numbers, second.numbers)
        name = main.variable
        if is_open(first) or is_open(second):
            # After a loop without a round there still is nothing in a list.
            is_new = first.variable == second.variable == NEW_LIST
            name = NEW_LIST if is_new else PERHAPS_NEW
            if OF_LISTS in (first.variable, second.variable):
                name = OF_LISTS
            if _loses_count(first, lengths) or _loses_count(second, lengths):
                causes |= counting(node)
        return main._replace(
            lengths=lengths, numbers=numbers, causes=causes, variable=name
        )


def _joined_lengths(main: Value, other: Value) -> Lengths | None:
    """Return the lengths of what is one tensor or the other; None if not known."""
    lengths, others = main.lengths, other.lengths
    if lengths is not None and is_open(other):
        others = with_shape(others, lengths[1:])
    if lengths is None or others is None or len(lengths) != len(others):
        return None
    return tuple(a if a == b else None for a, b in zip(lengths, others, strict=True))


def _loses_count(value: Value, lengths: Lengths | None) -> bool:
    """Tell whether of these lengths nobody knows any more that one counts rows."""
    return not is_fixed(value.lengths or ()) and (
        lengths is None or None in lengths[1:]
    )


def _depends(predicate: Value) -> bool:
    """Tell whether data, or how many rows there are, decide."""
    return predicate.axis is not None or bool(predicate.causes)


def _has_rows(lengths: Lengths | None, axis: int) -> bool:
    return lengths is not None and axis < len(lengths) and lengths[axis] is not None


def _joined_numbers(first: Array | None, second: Array | None) -> Array | None:
    if first is NO_NUMBERS or second is NO_NUMBERS:
        return second if first is NO_NUMBERS else first
    return first if same(first, second) else None


def _passed_on(body: tf.Graph) -> set[int]:
    """Return which variables of a loop its body hands on as they are."""
    pairs = zip(body.inputs, body.outputs, strict=True)
    return {n for n, (before, after) in enumerate(pairs) if made_as(after) is before}


def _needed(
    graph: tf.Graph, wanted: Sequence[Tensor], past: int | None
) -> list[tf.Operation]:
    """List what tensors are computed from, and all that has an effect, in order."""
    ends = [
        op
        for op in graph.get_operations()[:past]
        if has_effect(op) or has_known_seed(op) or op.type in CALLS + BRANCHES + LOOPS
    ]
    ordered: list[tf.Operation] = []
    seen: set[str] = set()
    # Operations do not always come after those that they take their inputs from.
    stack = [(op, False) for op in [*(tensor.op for tensor in wanted), *ends[::-1]]]
    while stack:
        op, is_ready = stack.pop()
        if is_ready:
            ordered.append(op)
        elif op.name not in seen:
            seen.add(op.name)
            stack.append((op, True))
            stack.extend((t.op, False) for t in op.inputs if t.op.name not in seen)
    return ordered


def _equal(first: Value, second: Value) -> bool:
    if first[:3] != second[:3] or first[4:] != second[4:]:
        return False
    # Sizes that are not known equal nothing, but may stay what they are.
    return first.numbers is second.numbers or same(first.numbers, second.numbers)
