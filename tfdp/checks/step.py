"""One operation of a graph, and what is known of its inputs and outputs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._types import Array, Tensor
from tfdp.checks.sizes import Length, Size, is_fixed, product
from tfdp.checks.values import (
    PLAIN,
    WITHIN,
    Cause,
    Layout,
    Value,
    causes_of,
)


class Step:
    """One operation, and what is known of its inputs.

    Attributes:
        op: The `tf.Operation`.
        inputs: What is known of its inputs.
        rows: How many rows a batch has; None if that is not static.
        outer: The operation of the outermost graph that this is part of.
        causes: What is the matter with any of the inputs.
        number: Which output is to be described.
    """

    def __init__(
        self,
        op: tf.Operation,
        inputs: Sequence[Value],
        rows: int | None,
        outer: tf.Operation,
    ) -> None:
        self.op = op
        self.outer = outer
        self.inputs = inputs
        self.rows = rows
        self.causes = causes_of(inputs)
        self.number = 0

    @property
    def tensor(self) -> Tensor:
        """The output that is to be described."""
        return self.op.outputs[self.number]

    def attr(self, name: str) -> Any:
        """Return an attribute of the operation."""
        return self.op.get_attr(name)

    def of_rows(self, layout: Layout) -> Length:
        """Return the length of an axis along which rows lie."""
        block = layout.times * layout.entries
        return Size(block) if self.rows is None else block * self.rows

    def entries_of(self, length: Length | None) -> int | None:
        """Return how many entries of an axis belong to a row; None if not whole."""
        if self.rows is None:
            return length.block if isinstance(length, Size) else None
        if length is None or isinstance(length, Size) or length % self.rows:
            return None
        return length // self.rows

    def cause(
        self, why: str, *, is_certain: bool = True, variable: str | None = None
    ) -> Cause:
        """Say what is the matter with this operation."""
        return Cause(self.op, self.outer, is_certain, why, variable)

    def mixed(
        self,
        why: str,
        *,
        is_certain: bool = True,
        causes: frozenset[Cause] | None = None,
    ) -> Value:
        """Note that rows meet here; what follows is looked at as if they had not."""
        known = self.causes if causes is None else causes
        value = Value(causes=known | {self.cause(why, is_certain=is_certain)})
        lengths = static_lengths(self.tensor)
        if lengths is None:
            return value
        axis = None
        if self.rows is None and None in lengths:
            # As if what has a length that is not static were rows.
            axis = lengths.index(None)
            lengths[axis] = self.of_rows(PLAIN)
        return value._replace(axis=axis, lengths=tuple(lengths))

    def unknown(self) -> Value:
        """Note that nothing is known of this operation."""
        why = "is not known to keep the rows of a batch apart"
        return self.mixed(why, is_certain=False)

    def like(
        self, value: Value, lengths: Iterable[Length | None] | None = None
    ) -> Value:
        """Describe an output whose rows lie where those of another tensor are."""
        return self.output(value.axis, value.layout, lengths=lengths)

    def output(
        self,
        axis: int | None,
        layout: Layout = PLAIN,
        *,
        lengths: Iterable[Length | None] | None = None,
        numbers: Array | None = None,
        causes: frozenset[Cause] | None = None,
    ) -> Value:
        """Describe an output.

        Args:
            axis: Where its rows are; None if it has none.
            layout: How they lie along it.
            lengths: Of its axes, where the graph does not have them.
            numbers: What is in it.
            causes: What is the matter with it; default that of all inputs.

        Returns:
            The description. What has one entry for each row has rows, though they be
            all alike.
        """
        known = static_lengths(self.tensor)
        hints = None if lengths is None else list(lengths)
        if known is None:
            known = hints
        elif hints is not None and len(hints) == len(known):
            known = [
                hint if length is None else length
                for length, hint in zip(known, hints, strict=True)
            ]
        causes = self.causes if causes is None else causes
        if known is None:
            return Value(axis, layout, None, numbers, causes)
        if axis is not None and axis != WITHIN:
            known[axis] = self.of_rows(layout)
        value = Value(axis, layout, tuple(known), numbers, causes)
        counted = {
            position: length.block
            for position, length in enumerate(known)
            if isinstance(length, Size) and position != axis
        }
        if not counted or axis == WITHIN:
            return value
        position, block = next(iter(counted.items()))
        if axis is None and len(counted) == 1 and block is not None:
            # As many entries as there are rows: one for each.
            return value._replace(axis=position, layout=Layout(1, block))
        why = "has a shape that depends on how many rows there are"
        return value._replace(causes=causes | {self.cause(why)})


def static_lengths(tensor: Tensor) -> list[Length | None] | None:
    """Return the lengths of a tensor that the graph has."""
    shape = tensor.shape
    return None if shape.rank is None else list(shape.as_list())


Rule = Callable[[Step], Value]
RULES: dict[str, Rule] = {}


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Set what operations do to the rows of their inputs.

    Args:
        *types: Names of the operations.

    Returns:
        A decorator of a function that describes output `step.number` of a `Step`.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(types, function))
        return function

    return register


def apply(step: Step) -> list[Value]:
    """Return what is known of the outputs of an operation.

    Args:
        step: The operation, with what is known of its inputs.

    Returns:
        One description for each output.
    """
    axes = {each.axis for each in step.inputs}
    rule = RULES.get(step.op.type, Step.unknown)
    if WITHIN in axes:
        rule = _within
    elif rule is Step.unknown and axes <= {None} and not has_effect(step.op):
        # What is made of nothing but what is free of data, whatever it does.
        rule = _free
    outputs = []
    for number in range(len(step.op.outputs)):
        step.number = number
        try:
            outputs.append(rule(step))
        except (IndexError, TypeError, ValueError, ZeroDivisionError):
            # Numbers that count rows where an axis or a length should be.
            outputs.append(step.unknown())
    return outputs


def _within(step: Step) -> Value:
    return step.output(WITHIN)


def _free(step: Step) -> Value:
    return step.output(None)


def has_effect(op: tf.Operation) -> bool:
    """Tell whether an operation may do more than compute its outputs."""
    known = _effects.get(op.type)
    if known is None:
        definition = op.op_def
        changes = any(argument.is_ref for argument in definition.input_arg)
        # What a function in it does is not known: those of calls, branches and loops
        # are looked at before.
        calls = any("func" in attribute.type for attribute in definition.attr)
        keeps = definition.is_stateful and not op.type.startswith(_HARMLESS)
        known = changes or calls or keeps or op.type.startswith(_ON_HANDLES)
        _effects[op.type] = known
    return known


# By the type of operation: to ask TensorFlow takes long.
_effects: dict[str, bool] = {}


COUNTS = "counts the rows of a batch"

# Operations that TensorFlow counts as stateful, but that keep nothing of their inputs.
_HARMLESS = (
    "Random",
    "Truncated",
    "VarHandle",
    "ReadVariable",
    "Placeholder",
    "VarIsInitialized",
    "TensorList",
    "EmptyTensorList",
    "Parameterized",
    "Anonymous",
    "HashTable",
    "MutableHashTable",
    "LookupTableFind",
    "LookupTableSize",
    "ResourceGather",
)


# Operations that TensorFlow does not count as stateful, but that change what a handle
# leads to.
_ON_HANDLES = ("TensorArray", "Queue", "Stack", "Barrier")


def broadcast(values: Sequence[Value]) -> list[Length | None] | None:
    """Return the lengths of what tensors are broadcast to; None if not known."""
    shapes = [each.lengths for each in values if each.lengths is not None]
    if len(shapes) < len(values):
        return None
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Length | None] = []
    for position in range(-rank, 0):
        here = [shape[position] for shape in shapes if len(shape) >= -position]
        longer = [n for n in here if n != 1]
        known = [n for n in longer if n is not None]
        result.append(known[0] if known else (None if longer else 1))
    return result


def has_fixed_rest(shape: Value) -> bool:
    """Tell whether a shape counts rows on its first axis at most."""
    return shape.numbers is not None and is_fixed(shape.numbers.ravel()[1:])


def counting(step: Step) -> frozenset[Cause]:
    """Say that an operation counts rows, which must not enter a value."""
    return frozenset({step.cause(COUNTS)})


def of_numbers(step: Step, numbers: Array) -> Value:
    """Describe a small tensor whose numbers are known."""
    causes = frozenset[Cause]() if is_fixed(numbers) else counting(step)
    return Value(None, PLAIN, tuple(numbers.shape), numbers, causes)


def known_product(lengths: Sequence[Length | None]) -> Length | None:
    """Multiply lengths; None where one is not known."""
    known = [length for length in lengths if length is not None]
    return product(known) if len(known) == len(lengths) else None


def is_same_length(first: Length | None, second: Length | None) -> bool:
    """Tell whether two lengths are known and equal."""
    return first is not None and first == second


def lengths_from(shape: Value) -> list[Length] | None:
    """Read lengths from the numbers of a tensor; None if not known."""
    if shape.numbers is None:
        return None
    return [n if isinstance(n, Size) else int(n) for n in shape.numbers.ravel()]


def axis_from(along: Value, rank: int) -> int | None:
    """Read an axis from a tensor, counted from the first of `rank`; None if not known."""
    if along.numbers is None:
        return None
    return int(along.numbers.ravel()[0]) % rank
