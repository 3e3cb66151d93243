"""One operation of a graph, and what is known of its inputs and outputs."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._types import Array, Tensor
from tfdp.checks.effects import has_effect, is_of_data
from tfdp.checks.open_lengths import Open
from tfdp.checks.sizes import UNKNOWN, Length, Lengths, Size, is_fixed, product
from tfdp.checks.values import (
    PLAIN,
    WITHIN,
    Cause,
    Layout,
    NotKnownError,
    Value,
    causes_of,
    have_rows,
    known,
    laid_out,
)


@dataclasses.dataclass
class Node:
    """One operation, and what is known of its inputs.

    Attributes:
        op: The `tf.Operation`.
        inputs: What is known of its inputs.
        rows: How many rows a batch has; None if that is not static.
        outer: The operation of the outermost graph that this is part of.
        value_of: Tells what is known of a tensor that comes before it in its graph.
        number: Which output is to be described.
        causes: What is the matter with any of the inputs.
    """

    op: tf.Operation
    inputs: Sequence[Value]
    rows: int | None
    outer: tf.Operation
    value_of: Callable[[Tensor], Value]
    number: int = 0
    causes: frozenset[Cause] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Collect what is the matter, and lay rows in what has equal entries."""
        self.inputs = laid_out(self.inputs)
        self.causes = causes_of(self.inputs)

    @property
    def tensor(self) -> Tensor:
        """The output that is to be described."""
        return self.op.outputs[self.number]

    def attr(self, name: str) -> Any:
        """Return an attribute of the operation."""
        return self.op.get_attr(name)

    def of_rows(self, layout: Layout) -> Length:
        """Return the length of an axis along which rows lie."""
        if layout.words:
            return UNKNOWN
        block = layout.times * layout.entries
        return Size(block) if self.rows is None else block * self.rows

    def entries_of(self, length: Length | None) -> int | Open | None:
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
        # Where rows are after an operation of which nothing is known is a guess. How many
        # there are, and what they draw, say nothing about where.
        is_certain = is_certain and all(
            each.is_certain or each.why in (COUNTS, BY_PLACE) for each in self.causes
        )
        return Cause(self.op, self.outer, is_certain, why, variable)

    def mixed(
        self,
        why: str,
        *,
        is_certain: bool = True,
        causes: frozenset[Cause] | None = None,
    ) -> Value:
        """Note that rows meet here; what follows is looked at as if they had not."""
        causes = self.causes if causes is None else causes
        if have_rows(self.inputs) and not is_of_data(self.op):
            # Their places do, or what was drawn for them. That depends on how many there
            # are, whatever is made of it.
            return self.free(causes=causes | {self.cause(COUNTS, is_certain=False)})
        value = Value(causes=causes | {self.cause(why, is_certain=is_certain)})
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

    def unknown_outputs(self) -> list[Value]:
        """Note that of all its outputs."""
        return [
            dataclasses.replace(self, number=number).unknown()
            for number in range(len(self.op.outputs))
        ]

    def free(
        self, lengths: Lengths | None = None, causes: frozenset[Cause] | None = None
    ) -> Value:
        """Describe an output that depends on no data."""
        return self.like(Value(lengths=lengths), causes)

    def rows_of(self, value: Value) -> Value:
        """Describe an output with the rows of a tensor, and lengths of its own."""
        return self.like(value._replace(lengths=None))

    def like(self, value: Value, causes: frozenset[Cause] | None = None) -> Value:
        """Describe an output whose rows lie where those of a tensor are.

        Args:
            value: Says where, and the lengths of axes, where the graph does not have
                them.
            causes: What is the matter with the output; default that of all inputs.

        Returns:
            The description. What has one entry for each row has rows, though they be
            all alike.
        """
        axis, layout, hints, *_ = value
        lengths = static_lengths(self.tensor)
        if lengths is None:
            lengths = None if hints is None else list(hints)
        elif hints is not None and len(hints) == len(lengths):
            pairs = zip(lengths, hints, strict=True)
            lengths = [hint if own is None else own for own, hint in pairs]
        causes = self.causes if causes is None else causes
        if lengths is None:
            return Value(axis, layout, None, None, causes)
        if axis is not None and axis != WITHIN:
            lengths[axis] = self.of_rows(layout)
        output = Value(axis, layout, tuple(lengths), None, causes)
        counted = {
            position: length.block
            for position, length in enumerate(lengths)
            if isinstance(length, Size) and position != axis
        }
        if not counted or axis == WITHIN:
            return output
        position, block = next(iter(counted.items()))
        if axis is None and len(counted) == 1 and block is not None:
            # As many entries as there are rows: one for each.
            return output._replace(axis=position, layout=Layout(1, block))
        why = "has a shape that depends on how many rows there are"
        return output._replace(causes=causes | {self.cause(why)})


def static_lengths(tensor: Tensor) -> list[Length | None] | None:
    """Return the lengths of a tensor that the graph has."""
    shape = tensor.shape
    return None if shape.rank is None else list(shape.as_list())


Describe = Callable[[Node], Value]


class Rule(NamedTuple):
    """What an operation does to the rows of its inputs.

    Attributes:
        describe: Describes output `node.number` of a `Node`.
        rows_in: Which inputs may have rows; None if the rule looks at all of them.
        otherwise: What the operation does with rows in others, if that is certain.
    """

    describe: Describe
    rows_in: Collection[int] | None
    otherwise: str | None


RULES: dict[str, Rule] = {}

# Of the inputs of an operation: all, or none.
ANY = None
NONE = ()


def rule(
    *types: str,
    rows_in: Collection[int] | None = (0,),
    otherwise: str | None = None,
) -> Callable[[Describe], Describe]:
    """Set what operations do to the rows of their inputs.

    Args:
        *types: Names of the operations.
        rows_in: As in `Rule`. What else an operation takes, sizes above all, decides
            about all rows: if there are rows in it, they meet.
        otherwise: As in `Rule`.

    Returns:
        A decorator of a function that describes output `node.number` of a `Node`.
    """

    def register(describe: Describe) -> Describe:
        RULES.update(dict.fromkeys(types, Rule(describe, rows_in, otherwise)))
        return describe

    return register


def apply(node: Node) -> list[Value]:
    """Return what is known of the outputs of an operation.

    Args:
        node: The operation, with what is known of its inputs.

    Returns:
        One description for each output.
    """
    describe = _description(node)
    outputs = []
    for number in range(len(node.op.outputs)):
        node.number = number
        try:
            outputs.append(describe(node))
        except (NotKnownError, IndexError, TypeError, ValueError, ZeroDivisionError):
            # Or numbers that count rows are where an axis or a length should be.
            outputs.append(node.unknown())
    return outputs


def _description(node: Node) -> Describe:
    with_rows = [n for n, each in enumerate(node.inputs) if each.axis is not None]
    if any(node.inputs[n].axis == WITHIN for n in with_rows):
        return _within
    rule = RULES.get(node.op.type)
    if not _keeps_lists(node.op) and any(
        tensor.dtype == tf.variant for tensor in node.op.inputs
    ):
        # What may be in the lists that it moves would be forgotten.
        return Node.unknown
    if rule is None:
        # What is made of nothing but what is free of data, whatever it does.
        is_free = not with_rows and not has_effect(node.op)
        return Node.free if is_free else Node.unknown
    if rule.rows_in is None or all(n in rule.rows_in for n in with_rows):
        return rule.describe
    if rule.otherwise is None:
        return Node.unknown
    return functools.partial(Node.mixed, why=rule.otherwise)


# What hands lists on as they are, or makes one of the same kind.
_ON_LISTS = frozenset({
    *("AddN", "Identity", "IdentityN", "PreventGradient", "StopGradient", "ZerosLike"),
    "EmptyTensorList",
})


def _keeps_lists(op: tf.Operation) -> bool:
    of_lists = op.type.startswith("TensorList") and op.type in RULES
    return of_lists or op.type in _ON_LISTS


def _within(node: Node) -> Value:
    return node.like(Value(WITHIN))


COUNTS = "counts the rows of a batch"

BY_PLACE = "draws for each row what its place in the batch and a known seed give"
# In place of a variable's name: the state of a seed generator; one that all rows share.
SEEDS = "seeds"
SHARED_SEEDS = "shared seeds"


def broadcast(values: Sequence[Value]) -> Lengths | None:
    """Return the lengths of what tensors are broadcast to; None if not known."""
    shapes = [each.lengths for each in values if each.lengths is not None]
    if len(shapes) < len(values):
        return None
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Length | None] = []
    for position in range(-rank, 0):
        here = [shape[position] for shape in shapes if len(shape) >= -position]
        result.append(broadcast_length(here))
    return tuple(result)


def broadcast_length(lengths: Sequence[Length | None]) -> Length | None:
    """Return the length of an axis along which tensors are broadcast; None if not known."""
    longer = [length for length in lengths if length != 1]
    sure = [length for length in longer if length is not None]
    if not sure:
        return None if longer else 1
    fixed = [length for length in sure if not isinstance(length, Open)]
    if fixed:
        # Others are equal to it, or 1.
        return fixed[0]
    if len(sure) < len(longer):
        return None
    different = dict.fromkeys(sure)
    return sure[0] if len(different) == 1 else Open.unknown("longest", *different)


def has_fixed_rest(shape: Value) -> bool:
    """Tell whether a shape counts rows on its first axis at most."""
    return shape.numbers is not None and is_fixed(shape.numbers.ravel()[1:])


def counting(node: Node) -> frozenset[Cause]:
    """Say that an operation counts rows, which must not enter a value."""
    # No row has a part in that, and it may only serve to find one's own: where each runs
    # by itself, there is one.
    return frozenset({node.cause(COUNTS, is_certain=False)})


def counts_rows(value: Value) -> bool:
    """Tell whether how many rows there are has entered a value."""
    return any(each.why == COUNTS for each in value.causes)


def of_numbers(node: Node, numbers: Array) -> Value:
    """Describe a small tensor whose numbers are known."""
    causes = frozenset[Cause]() if is_fixed(numbers) else counting(node)
    return Value(None, PLAIN, tuple(numbers.shape), numbers, causes)


def known_product(lengths: Sequence[Length | None]) -> Length | None:
    """Multiply lengths; None where one is not known."""
    sure = [length for length in lengths if length is not None]
    return product(sure) if len(sure) == len(lengths) else None


def is_same_length(first: Length | None, second: Length | None) -> bool:
    """Tell whether two lengths are known and equal."""
    return first is not None and first == second


def lengths_from(shape: Value) -> tuple[Length, ...]:
    """Read lengths from the numbers of a tensor."""
    numbers = known(shape.numbers).ravel()
    return tuple(n if isinstance(n, Open | Size) else int(n) for n in numbers)


def axis_from(along: Value, rank: int) -> int:
    """Read an axis from a tensor, counted from the first of `rank`."""
    return int(known(along.numbers).ravel()[0]) % rank


def depth_of(indices: Value) -> int:
    """Return how many of the first axes numbers are about, which lie on the last axis."""
    depth = indices.shape[-1]
    if not isinstance(depth, int):
        raise NotKnownError
    return depth
