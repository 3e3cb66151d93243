"""Interval analysis of whole numbers: which entries each row of a batch points to.

In ``gather(reshape(x, [-1, d]), idx + range(rows)[:, None] * n)`` row r points to its own n
entries if `idx` is from 0 to ``n - 1``. So numbers of row r are looked at as ``stride * r``
and something in an interval, from operation to operation: here the stride is n, and the
interval that of `idx`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfdp._types import Array, Tensor
from tfdp.checks.node import COUNTS, Node, depth_of
from tfdp.checks.open_lengths import Open
from tfdp.checks.sizes import Length, Size, is_fixed
from tfdp.checks.values import (
    PLAIN,
    Cause,
    Layout,
    Value,
    causes_of,
    fixed,
    known,
)

_WHOLE = (tf.int32, tf.int64)
# Floats have all whole numbers up to that.
_LARGEST_EXACT = 2.0**52
# How many operations to go back.
_DEEPEST = 50


class Bounds(NamedTuple):
    """Row r of a tensor has numbers from ``stride * r + low`` to ``stride * r + high``.

    Attributes:
        stride: Of each entry; an array with the tensor's axes, each of its length, or of
            length 1 for what holds all along it, as along that of the rows.
        low: Likewise.
        high: Likewise.
        causes: What is the matter with how far they are from ``stride * r``. That a row
            knows its own place is nothing, as long as it does no more than point to it.
        largest_compared: The largest stride, or end of an interval beside a stride, of
            anything that was compared or cast on the way. In the last rows of a large batch
            ``stride * r`` may overflow. Sums and products are right all the same once the
            result fits; comparisons and casts are not.
    """

    stride: Array
    low: Array
    high: Array
    causes: frozenset[Cause]
    largest_compared: float = 0.0

    def are_in_own(self, block: int) -> bool:
        """Tell whether row r points to ``block * r`` and what follows, so many in all."""
        is_own = (self.stride == block) & (self.low >= 0) & (self.high < block)
        # Operations that point refuse a type that does not have the numbers of all entries:
        # what is no farther apart than these has not overflown.
        return self.largest_compared <= block and bool(np.all(is_own))

    def with_arrays(self, arrays: "Arrays") -> "Bounds":
        """Return the same with another stride, low and high."""
        stride, low, high = arrays
        return self._replace(stride=stride, low=low, high=high)


# Stride, low and high.
Arrays: TypeAlias = tuple[Array, Array, Array]


def own_bounds(node: Node, number: int, layout: Layout) -> Bounds | None:
    """Say where rows point to along an axis, if it is proven that to their own entries.

    Args:
        node: An operation that picks entries by numbers, or puts them there.
        number: Of the input that has the numbers: with rows, or with numbers for all
            rows on the first axis.
        layout: How rows lie along the axis that they count.

    Returns:
        Bounds, of which the causes are still the matter; None if it is not proven.
    """
    if not layout.is_plain_blocks or isinstance(layout.entries, Open):
        return None
    bounds = _bounds_of_rows(node, number)
    is_own = bounds is not None and bounds.are_in_own(layout.entries)
    return bounds if is_own else None


def own_entries(
    node: Node, number: int, length: Length | None
) -> tuple[Layout, frozenset[Cause]] | None:
    """Say how rows lie in a tensor to which each adds to entries of its own.

    Args:
        node: An operation of which the first two inputs are what is added, and where.
        number: Of the input that says where.
        length: Of the first axis of the tensor.

    Returns:
        Their layout on that axis, and what is the matter with it; None if it is not
        proven.
    """
    rows = {each[:2] for each in node.inputs[:2] if each.axis is not None}
    are_in_order = len(rows) == 1 and all(
        axis == 0 and layout.is_plain_blocks for axis, layout in rows
    )
    entries = node.entries_of(length)
    if not are_in_order or not entries:
        return None
    bounds = own_bounds(node, number, Layout(1, entries))
    return None if bounds is None else (Layout(1, entries), bounds.causes)


def own_rows(node: Node, number: int) -> tuple[Layout, frozenset[Cause]] | None:
    """Say how rows lie in numbers of which several point to an entry, one for each axis.

    Args:
        node: An operation such as `GatherNd`, which has a row in each entry of the first
            axis that is pointed to.
        number: Of the input that has the numbers, on its last axis.

    Returns:
        Their layout on the first axis, and what is the matter with it, if the first number
        is proven to be the row's own and nothing is known of the others but that they do
        not depend on its place; None otherwise.
    """
    value = node.inputs[number]
    entries = node.entries_of(value.shape[0])
    layout = Layout(1, entries or 1)
    if not entries or value[:2] not in {(0, layout), (None, PLAIN)}:
        return None
    bounds = _bounds_of_rows(node, number)
    if bounds is None or bounds.largest_compared > 1:
        return None
    # What holds all along the last axis holds for the numbers of all axes.
    depth = depth_of(value)
    stride, low, high = (
        np.broadcast_to(each, (*each.shape[:-1], depth))
        for each in np.broadcast_arrays(*bounds[:3])
    )
    ends = np.stack([low, high])[..., 0]
    is_own = np.all(stride[..., 0] == 1) and not np.any(ends)
    return (layout, bounds.causes) if is_own and not np.any(stride[..., 1:]) else None


def are_never_negative(node: Node, numbers: Tensor, block: int) -> bool:
    """Tell whether numbers are of own entries, and would be too many if they overflow."""
    found = _found_of(node, numbers)
    return found is not None and not _was_compared(found) and found.are_in_own(block)


def _bounds_of_rows(node: Node, number: int) -> Bounds | None:
    tensor, value = node.op.inputs[number], node.inputs[number]
    found = _found_of(node, tensor)
    if found is None or value.axis is not None:
        return found
    # Of rows whose number is static, numbers for them may be free of data.
    entries = node.entries_of(value.shape[0]) if value.shape else None
    if not entries:
        return None
    arrays = _by_row(found[:3], 0, Layout(1, entries), node.rows)
    return None if arrays is None else found.with_arrays(arrays)


def _found_of(node: Node, tensor: Tensor) -> Bounds | None:
    """Return bounds of numbers, None where they depend on a length that is open."""
    try:
        return _Bounding(node.rows, node.value_of).of(tensor)
    except TypeError:
        # It has no order, and is no number.
        return None


class _Bounding:
    """Goes back from tensors to what their numbers are made of.

    Args:
        rows: How many rows a batch has; None if that is not static.
        value_of: What is known of the tensors.
    """

    def __init__(self, rows: int | None, value_of: Callable[[Tensor], Value]) -> None:
        """Begin with nothing."""
        self._rows = rows
        self._value_of = value_of
        self._known: dict[tuple[str, int], Bounds | None] = {}
        self._depth = 0

    def of(self, tensor: Tensor) -> Bounds | None:
        """Say where the numbers of a tensor lie; None if not even its rank is known."""
        key = tensor.op.name, tensor.value_index
        if key not in self._known:
            self._depth += 1
            self._known[key] = self._of(tensor)
            self._depth -= 1
        return self._known[key]

    def _of(self, tensor: Tensor) -> Bounds | None:
        value, rank = self._value_of(tensor), tensor.shape.rank
        if rank is None:
            return None
        found = None
        if tensor.dtype in (*_WHOLE, tf.bool) and self._depth <= _DEEPEST:
            found = self._found(tensor, value)
        if found is not None and found.stride.ndim == rank:
            arrays = _with_rows(found[:3], value, self._rows)
            if arrays is not None and _fit(arrays, tensor.dtype):
                found = found.with_arrays(arrays)
                return found._replace(causes=found.causes | self._others(tensor, value))
        ends = (0.0, 1.0) if tensor.dtype == tf.bool else (-np.inf, np.inf)
        return Bounds(*everywhere(rank, *ends), value.causes)

    def _others(self, tensor: Tensor, value: Value) -> frozenset[Cause]:
        """Collect what is the matter with a tensor, but that its inputs count the rows."""
        before = causes_of(map(self._value_of, tensor.op.inputs))
        if value.lengths is None or None in value.lengths:
            # How many numbers there are may depend on how many rows there are.
            return value.causes
        return frozenset(
            each for each in value.causes if each.why != COUNTS or each not in before
        )

    def _found(self, tensor: Tensor, value: Value) -> Bounds | None:
        op = tensor.op
        numbers = _numbers(op, value)
        if numbers is not None:
            return Bounds(np.zeros_like(numbers), numbers, numbers, frozenset())
        places = _of_places(op, value, list(map(self._value_of, op.inputs)))
        if places is not None:
            return Bounds(*places, frozenset())
        rule = BOUNDS_RULES.get(op.type)
        inputs = [found for each in op.inputs if (found := self.of(each)) is not None]
        before = [self._value_of(each) for each in op.inputs]
        if rule is None or len(inputs) < len(before):
            return None
        largest = max(each.largest_compared for each in inputs)
        if not rule.is_linear or op.type == "Cast":
            largest = max(largest, *map(_extent, inputs))
        if op.type == "SelectV2" and np.all(inputs[0].high == 0):
            # Never the first: no number is negative, and counts from the end.
            is_third = value[:3] == before[2][:3]
            return inputs[2]._replace(largest_compared=largest) if is_third else None
        if op.type == "SelectV2" and self._is_for_one_row(op, *inputs[1:]):
            return inputs[1]
        if op.type == "Maximum" and _is_never_less(*inputs):
            return inputs[0]._replace(largest_compared=largest)
        if op.type == "Cast" and any(map(_was_compared, inputs)):
            # A wider type has the numbers of all entries, but what was compared before may
            # have overflown.
            largest = np.inf
        arrays = rule.describe(Step(tensor, value, before), *inputs)
        if arrays is None:
            return None
        found = Bounds(*arrays, rule.causes(inputs, before), largest)
        # What is one number is the same however many rows there are.
        return found._replace(causes=frozenset()) if is_exact(found) else found

    def _is_for_one_row(self, select: tf.Operation, many: Bounds, one: Bounds) -> bool:
        """Tell whether `one` is chosen for a single row, and is what `many` has there."""
        # TensorFlow's maps over rows pick each by `where(rows > 1, range(rows), 0)`.
        more = select.inputs[0].op
        if more.type != "Greater" or not is_exact(one):
            return False
        rows, least = (self._value_of(each).numbers for each in more.inputs)
        return (
            (rows is not None and rows.tolist() == Size(1))
            and (least is not None and least.tolist() == 1)
            and bool(np.all((many.low == one.low) & (many.high == one.low)))
        )


def _is_never_less(value: Bounds, other: Bounds) -> bool:
    """Tell whether numbers are never less than those of another tensor."""
    if np.any(other.stride) or _was_compared(value):
        return False
    return bool(np.all((value.stride >= 0) & (value.low >= other.high)))


def _was_compared(bounds: Bounds) -> bool:
    """Tell whether numbers that depend on a place were compared or cast on the way."""
    return bool(np.any(bounds.stride)) and bounds.largest_compared > 0


def _extent(bounds: Bounds) -> float:
    """Return how large stride and interval are, of numbers that depend on a place."""
    if not np.any(bounds.stride):
        return 0.0
    return max(float(np.max(np.abs(each))) for each in bounds[:3])


def _with_rows(arrays: Arrays, value: Value, rows: int | None) -> Arrays | None:
    """Make sure that what depends on a place has rows, and is the same for all of them."""
    if value.axis is None:
        return None if np.any(arrays[0]) else arrays
    return _by_row(arrays, value.axis, value.layout, rows)


def _by_row(
    arrays: Arrays, axis: int, layout: Layout, rows: int | None
) -> Arrays | None:
    """Make of numbers that are written out for all rows what they are of a place."""
    lengths = {each.shape[axis] for each in arrays}
    if lengths == {1}:
        return arrays
    entries = fixed(layout.entries)
    if rows is None or layout.times != 1 or lengths - {1} != {rows * entries}:
        return None
    first = [np.moveaxis(each, axis, 0) for each in np.broadcast_arrays(*arrays)]
    of_rows = [each.reshape([rows, entries, *each.shape[1:]]) for each in first]
    one = hull(of_rows, (1,))
    if one is None:
        return None
    stride, low, high = (each[:, 0] for each in one)
    is_known = np.isfinite(low[:1]) & np.isfinite(low[1:2])
    step = np.subtract(low[1:2], low[:1], out=np.zeros_like(low[:1]), where=is_known)
    places = np.arange(rows).reshape([-1] + [1] * (low.ndim - 1))
    arrays = stride + step, low - step * places, high - step * places
    if any(np.any(each != each[:1]) for each in arrays):
        return None
    stride, low, high = (np.moveaxis(each[:1], 0, axis) for each in arrays)
    return stride, low, high


def hull(arrays: Sequence[Array], axes: Iterable[int]) -> Arrays | None:
    """Say what holds all along some axes; None if the stride is not the same."""
    stride, low, high = arrays
    along = tuple(axes)
    first = stride.min(along, keepdims=True) if stride.size else stride
    if not stride.size or np.any(stride != first):
        return None
    return first, low.min(along, keepdims=True), high.max(along, keepdims=True)


def _numbers(op: tf.Operation, value: Value) -> Array | None:
    if value.numbers is not None and is_fixed(value.numbers):
        return np.asarray(value.numbers, float)
    if op.type != "Const":
        return None
    return np.asarray(tf.make_ndarray(op.get_attr("value")), float)


def _of_places(op: tf.Operation, value: Value, inputs: list[Value]) -> Arrays | None:
    """Say what is known of 0, s, 2s ..., if these are as many as there are rows, or entries."""
    entries = value.layout.entries
    # Of a range that begins elsewhere nobody knows how long it is.
    if op.type != "Range" or value[:2] != (0, Layout(1, entries)):
        return None
    step = float(known(inputs[2].numbers).item())
    return (
        np.full(1, entries * step),
        np.zeros(1),
        np.full(1, (entries - 1.0) * step),
    )


def _fit(arrays: Arrays, dtype: tf.DType) -> bool:
    """Tell whether a type has all these numbers, so that none is another one by now."""
    most = 1 if dtype == tf.bool else min(_LARGEST_EXACT, dtype.max)
    return all(np.all((np.abs(each) <= most) | np.isinf(each)) for each in arrays)


def everywhere(rank: int, low: float, high: float) -> Arrays:
    """Say that all numbers of a tensor lie in an interval, whatever the row is."""
    one = np.ones([1] * rank)
    return 0 * one, np.full_like(one, low), np.full_like(one, high)


# ------------------------------------------------- what operations make of bounds


class Step(NamedTuple):
    """An operation: one output, what is known of it, and of the inputs."""

    tensor: Tensor
    value: Value
    inputs: list[Value]

    @property
    def rank(self) -> int:
        """How many axes the output has."""
        rank: int = self.tensor.shape.rank
        return rank


Describe: TypeAlias = Callable[..., Arrays | None]


class BoundsRule(NamedTuple):
    """What an operation makes of bounds.

    Attributes:
        describe: A function of a `Step`, and of the bounds of all inputs.
        is_linear: Whether numbers are moved, or added up. They are as far from a place then
            as their parts are. What else is made of a place depends on where in the batch a
            row is.
        value_inputs: How many inputs have a part in the numbers, and not in the shape
            alone; None for all.
    """

    describe: Describe
    is_linear: bool
    value_inputs: int | None

    def causes(self, inputs: list[Bounds], values: list[Value]) -> frozenset[Cause]:
        """Collect what is the matter with the inputs."""
        pairs = list(zip(inputs, values, strict=True))[: self.value_inputs]
        return frozenset[Cause]().union(
            *(
                bounds.causes
                if self.is_linear or not np.any(bounds.stride)
                else value.causes
                for bounds, value in pairs
            )
        )


BOUNDS_RULES: dict[str, BoundsRule] = {}


def bounds_rule(
    *types: str, is_linear: bool = False, value_inputs: int | None = None
) -> Callable[[Describe], Describe]:
    """Set what operations make of bounds; see `BoundsRule`."""

    def register(describe: Describe) -> Describe:
        rule = BoundsRule(describe, is_linear, value_inputs)
        BOUNDS_RULES.update(dict.fromkeys(types, rule))
        return describe

    return register


def is_exact(value: Bounds) -> bool:
    """Tell whether there is one number, whatever the row is, or one for each entry."""
    return bool(np.all(value.low == value.high) and not np.any(value.stride))


def is_finite(value: Bounds) -> bool:
    """Tell whether sums are known not to be beyond what numbers of a type can be."""
    return bool(np.all(np.isfinite(value.low) & np.isfinite(value.high)))
