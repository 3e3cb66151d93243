"""Where whole numbers lie for each row of a batch: what it picks by them, or puts where."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfdp._types import Array, Tensor
from tfdp.checks.node import COUNTS, Node
from tfdp.checks.sizes import Length, is_fixed
from tfdp.checks.values import Cause, Layout, Value

_WHOLE = (tf.int32, tf.int64)
# Floats have all whole numbers up to that.
_MOST = 2.0**52
# How many operations to go back.
_DEEPEST = 50


class Bounds(NamedTuple):
    """Row r of a tensor has numbers from ``times * r + low`` to ``times * r + high``.

    Attributes:
        times: Of each entry; an array with the tensor's axes, each of its length, or of
            length 1 for what holds all along it, as along that of the rows.
        low: Likewise.
        high: Likewise.
        causes: What is the matter with how far they are from ``times * r``. That a row
            knows its own place is nothing, as long as it does no more than point to it.
        farthest: The largest number in `times`, or beside it, of anything that was
            compared on the way, or given another type: if it wraps around in the last
            rows, sums do not make that good.
    """

    times: Array
    low: Array
    high: Array
    causes: frozenset[Cause]
    farthest: float = 0.0

    def are_in_own(self, block: int) -> bool:
        """Tell whether row r points to ``block * r`` and what follows, so many in all."""
        is_own = (self.times == block) & (self.low >= 0) & (self.high < block)
        # Operations refuse numbers of a type that does not have those of all entries.
        return self.farthest <= block and bool(np.all(is_own))


# Times, low and high.
_Arrays: TypeAlias = tuple[Array, Array, Array]


def bounds_of_rows(node: Node, number: int) -> Bounds | None:
    """Say where the numbers of an input lie that has rows, or numbers for them, first.

    Args:
        node: An operation.
        number: Of the input.

    Returns:
        None if it is not known.
    """
    tensor, value = node.op.inputs[number], node.inputs[number]
    if node.has_open_lengths:
        # What is below a length that stands for any may be above others.
        return None
    found = _Bounding(node.rows, node.value_of).of(tensor)
    if found is None or value.axis is not None:
        return found
    # Of rows whose number is static, numbers for them may be free of data.
    entries = node.entries_of(value.shape[0])
    if not entries:
        return None
    arrays = _by_row(found[:3], 0, Layout(1, entries), node.rows)
    return None if arrays is None else Bounds(*arrays, found.causes, found.farthest)


def causes_in_own(node: Node, number: int, layout: Layout) -> frozenset[Cause] | None:
    """Say what is the matter with where rows point to along an axis, if to themselves.

    Args:
        node: An operation that picks entries by numbers, or puts them there.
        number: Of the input that has the numbers.
        layout: How rows lie along the axis that they count.

    Returns:
        None if it is not known that each row points to nothing but its own entries.
    """
    if layout != Layout(1, layout.entries):
        return None
    bounds = bounds_of_rows(node, number)
    if bounds is None or not bounds.are_in_own(layout.entries):
        return None
    return bounds.causes


def causes_in_own_row(node: Node, number: int) -> frozenset[Cause] | None:
    """Say the same of lists of numbers, each for an axis, of which rows are the first."""
    bounds = bounds_of_rows(node, number)
    if bounds is None:
        return None
    times, low, high = np.broadcast_arrays(*bounds[:3])
    ends = np.stack([low, high])[..., 0]
    is_own = np.all(times[..., 0] == 1) and not np.any(ends) and bounds.farthest <= 1
    return bounds.causes if is_own and not np.any(times[..., 1:]) else None


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
        if found is not None and found.times.ndim == rank:
            arrays = _with_rows(found[:3], value, self._rows)
            if arrays is not None and _fit(arrays, tensor.dtype):
                causes = _kept(value, found.causes)
                return Bounds(*arrays, causes, found.farthest)
        ends = (0.0, 1.0) if tensor.dtype == tf.bool else (-np.inf, np.inf)
        return Bounds(*_everywhere(rank, *ends), value.causes)

    def _found(self, tensor: Tensor, value: Value) -> Bounds | None:
        op = tensor.op
        numbers = _numbers(op, value)
        if numbers is not None:
            return Bounds(np.zeros_like(numbers), numbers, numbers, frozenset())
        places = _of_places(op, value)
        if places is not None:
            return Bounds(*places, frozenset())
        rule = _RULES.get(op.type)
        inputs = [found for each in op.inputs if (found := self.of(each)) is not None]
        before = [self._value_of(each) for each in op.inputs]
        if rule is None or len(inputs) < len(before):
            return None
        farthest = max(each.farthest for each in inputs)
        if not rule.is_linear or op.type == "Cast":
            farthest = max(farthest, *map(_extent, inputs))
        if op.type == "SelectV2" and np.all(inputs[0].high == 0):
            # Never the first: negative numbers, say, which count from the end.
            is_third = value[:3] == before[2][:3]
            return inputs[2]._replace(farthest=farthest) if is_third else None
        arrays = rule.describe(_Step(tensor, value, before), *inputs)
        if arrays is None:
            return None
        causes = rule.causes(inputs, before)
        if np.all(arrays[1] == arrays[2]) and not np.any(arrays[0]):
            # It is the same however many rows there are.
            causes = frozenset()
        return Bounds(*arrays, causes, farthest)


def _kept(value: Value, causes: frozenset[Cause]) -> frozenset[Cause]:
    """Of what is the matter with a tensor, leave out that there are so many rows.

    Args:
        value: What is known of the tensor.
        causes: What is the matter with its numbers. Its shape says nothing else.

    Returns:
        The rest of what is known to be the matter.
    """
    if value.lengths is None or None in value.lengths:
        return value.causes
    return frozenset(
        each for each in value.causes if each.why != COUNTS or each in causes
    )


def _extent(bounds: Bounds) -> float:
    """Return how far from zero numbers are that depend on a place, but for the place."""
    if not np.any(bounds.times):
        return 0.0
    return max(float(np.max(np.abs(each))) for each in bounds[:3])


def _with_rows(arrays: _Arrays, value: Value, rows: int | None) -> _Arrays | None:
    """Make sure that what depends on a place has rows, and is the same for all of them."""
    if value.axis is None:
        return None if np.any(arrays[0]) else arrays
    return _by_row(arrays, value.axis, value.layout, rows)


def _by_row(
    arrays: _Arrays, axis: int, layout: Layout, rows: int | None
) -> _Arrays | None:
    """Make of numbers that are written out for all rows what they are of a place."""
    lengths = {each.shape[axis] for each in arrays}
    if lengths == {1}:
        return arrays
    if rows is None or layout.times > 1 or lengths - {1} != {rows * layout.entries}:
        return None
    first = [np.moveaxis(each, axis, 0) for each in np.broadcast_arrays(*arrays)]
    of_rows = [each.reshape([rows, layout.entries, *each.shape[1:]]) for each in first]
    one = _along(of_rows, (1,))
    if one is None:
        return None
    times, low, high = (each[:, 0] for each in one)
    is_known = np.isfinite(low[:1]) & np.isfinite(low[1:2])
    step = np.subtract(low[1:2], low[:1], out=np.zeros_like(low[:1]), where=is_known)
    places = np.arange(rows).reshape([-1] + [1] * (low.ndim - 1))
    arrays = times + step, low - step * places, high - step * places
    if any(np.any(each != each[:1]) for each in arrays):
        return None
    times, low, high = (np.moveaxis(each[:1], 0, axis) for each in arrays)
    return times, low, high


def _along(arrays: Sequence[Array], axes: Iterable[int]) -> _Arrays | None:
    """Say what holds all along some axes."""
    times, low, high = arrays
    along = tuple(axes)
    first = times.min(along, keepdims=True) if times.size else times
    if not times.size or np.any(times != first):
        return None
    return first, low.min(along, keepdims=True), high.max(along, keepdims=True)


def _numbers(op: tf.Operation, value: Value) -> Array | None:
    if value.numbers is not None and is_fixed(value.numbers):
        return np.asarray(value.numbers, float)
    if op.type != "Const":
        return None
    return np.asarray(tf.make_ndarray(op.get_attr("value")), float)


def _of_places(op: tf.Operation, value: Value) -> _Arrays | None:
    """Say what is known of 0, 1, 2 ..., if these are as many as there are rows, or entries."""
    entries = value.layout.entries
    # Of a range that begins elsewhere nobody knows how long it is.
    if op.type != "Range" or value[:2] != (0, Layout(1, entries)):
        return None
    return np.full(1, float(entries)), np.zeros(1), np.full(1, entries - 1.0)


def _fit(arrays: _Arrays, dtype: tf.DType) -> bool:
    """Tell whether a type has all these numbers, so that none is another one by now."""
    most = 1 if dtype == tf.bool else min(_MOST, dtype.max)
    return all(np.all((np.abs(each) <= most) | np.isinf(each)) for each in arrays)


def _everywhere(rank: int, low: float, high: float) -> _Arrays:
    one = np.ones([1] * rank)
    return 0 * one, np.full_like(one, low), np.full_like(one, high)


# ------------------------------------------------- what operations make of bounds


class _Step(NamedTuple):
    """An operation: one output, what is known of it, and of the inputs."""

    tensor: Tensor
    value: Value
    inputs: list[Value]

    @property
    def rank(self) -> int:
        """How many axes the output has."""
        rank: int = self.tensor.shape.rank
        return rank


_Describe: TypeAlias = Callable[..., _Arrays | None]


class _Rule(NamedTuple):
    """What an operation makes of bounds.

    Attributes:
        describe: A function of a `_Step`, and of the bounds of all inputs.
        is_linear: Whether numbers are moved, or added up. They point as far from a place
            then as their parts do. What else is made of a place depends on where in the
            batch a row is.
        numbers: How many inputs have a part in the numbers, and not in the shape alone.
    """

    describe: _Describe
    is_linear: bool
    numbers: int | None

    def causes(self, inputs: list[Bounds], values: list[Value]) -> frozenset[Cause]:
        """Collect what is the matter with the inputs."""
        pairs = list(zip(inputs, values, strict=True))[: self.numbers]
        return frozenset[Cause]().union(
            *(
                bounds.causes
                if self.is_linear or not np.any(bounds.times)
                else value.causes
                for bounds, value in pairs
            )
        )


_RULES: dict[str, _Rule] = {}


def _rule(
    *types: str, is_linear: bool = False, numbers: int | None = None
) -> Callable[[_Describe], _Describe]:
    def register(describe: _Describe) -> _Describe:
        _RULES.update(dict.fromkeys(types, _Rule(describe, is_linear, numbers)))
        return describe

    return register


@_rule("Identity", "StopGradient", "PreventGradient", is_linear=True)
def _same(_: _Step, value: Bounds) -> _Arrays:
    return value[:3]


@_rule("Cast", is_linear=True)
def _cast(step: _Step, value: Bounds) -> _Arrays | None:
    # All that is not zero is one truth.
    is_number = step.tensor.dtype != tf.bool
    return value[:3] if is_number and _is_finite(value) else None


@_rule("Squeeze", "Slice", "StridedSlice", "Transpose", is_linear=True)
def _somewhere(step: _Step, value: Bounds, *_: Bounds) -> _Arrays | None:
    one = _along(value[:3], range(value.low.ndim))
    if one is None:
        return None
    times, low, high = (each.reshape([1] * step.rank) for each in one)
    return times, low, high


@_rule("Reshape", is_linear=True, numbers=1)
def _reshaped(step: _Step, value: Bounds, shape: Bounds) -> _Arrays | None:
    lengths = [n for n in step.value.lengths or () if isinstance(n, int)]
    arrays = np.broadcast_arrays(*value[:3])
    first = arrays[0].shape[:1]
    if first in ((), (1,)) or len(lengths) < step.rank:
        return _somewhere(step, value)
    if arrays[0].size == math.prod(lengths):
        times, low, high = (each.reshape(lengths) for each in arrays)
        return times, low, high
    # What is written out for all rows stays so.
    one = _along(arrays, range(1, arrays[0].ndim))
    if one is None or lengths[0] % first[0]:
        return _somewhere(step, value)
    of_each = lengths[0] // first[0]
    more = [1] * (step.rank - 1)
    times, low, high = (np.repeat(each, of_each).reshape([-1, *more]) for each in one)
    return times, low, high


@_rule("ExpandDims", is_linear=True)
def _expanded(_: _Step, value: Bounds, along: Bounds) -> _Arrays | None:
    if not _is_exact(along):
        return None
    axis = int(along.low.item())
    times, low, high = (np.expand_dims(each, axis) for each in value[:3])
    return times, low, high


@_rule("Tile", is_linear=True)
def _tiled(step: _Step, value: Bounds, _: Bounds) -> _Arrays | None:
    multiples = step.inputs[1].numbers
    axes = [
        axis
        for axis, length in enumerate(value.low.shape)
        if length > 1 and (multiples is None or multiples[axis] != 1)
    ]
    return _along(value[:3], axes)


@_rule("BroadcastTo", is_linear=True)
def _broadcast(step: _Step, value: Bounds, _: Bounds) -> _Arrays:
    more = [1] * (step.rank - value.low.ndim)
    times, low, high = (each.reshape([*more, *each.shape]) for each in value[:3])
    return times, low, high


@_rule("Pack", is_linear=True)
def _packed(step: _Step, *values: Bounds) -> _Arrays:
    axis = step.tensor.op.get_attr("axis")
    arrays = np.broadcast_arrays(*(each for value in values for each in value[:3]))
    times, low, high = (np.stack(arrays[n::3], axis) for n in range(3))
    return times, low, high


@_rule("Add", "AddV2", is_linear=True)
def _added(_: _Step, a: Bounds, b: Bounds) -> _Arrays | None:
    if not (_is_finite(a) and _is_finite(b)):
        return None
    return a.times + b.times, a.low + b.low, a.high + b.high


@_rule("Sub", is_linear=True)
def _subtracted(step: _Step, a: Bounds, b: Bounds) -> _Arrays | None:
    return _added(step, a, Bounds(-b.times, -b.high, -b.low, b.causes))


@_rule("Mul", is_linear=True)
def _multiplied(_: _Step, a: Bounds, b: Bounds) -> _Arrays | None:
    if _is_exact(a):
        a, b = b, a
    if not _is_exact(b) or not _is_finite(a):
        return None
    ends = a.low * b.low, a.high * b.low
    return a.times * b.low, np.minimum(*ends), np.maximum(*ends)


@_rule("Range")
def _range(_: _Step, start: Bounds, limit: Bounds, step: Bounds) -> _Arrays | None:
    if not (_is_exact(start) and _is_exact(step)) or step.low <= 0:
        return None
    if np.any(limit.times):
        return None
    if _is_exact(limit):
        numbers = np.arange(start.low.item(), limit.low.item(), step.low.item())
        return np.zeros_like(numbers), numbers, numbers
    return _everywhere(1, start.low.item(), limit.high.item() - 1)


@_rule("Minimum")
def _smaller(_: _Step, a: Bounds, b: Bounds) -> _Arrays | None:
    return _combined(np.minimum, np.minimum, a, b)


@_rule("Maximum")
def _larger(_: _Step, a: Bounds, b: Bounds) -> _Arrays | None:
    return _combined(np.maximum, np.maximum, a, b)


@_rule("FloorMod")
def _remainder(step: _Step, _: Bounds, divisor: Bounds) -> _Arrays | None:
    if not _is_exact(divisor) or np.any(divisor.low <= 0):
        return None
    return _everywhere(step.rank, 0, divisor.high.max() - 1)


@_rule("Less")
def _less(_: _Step, a: Bounds, b: Bounds) -> _Arrays | None:
    if np.any(b.times) or np.any(a.times < 0):
        return None
    # The farther down a row is, the larger are its numbers.
    always, perhaps = (a.high < b.low) & (a.times == 0), a.low < b.high
    return np.zeros(always.shape), 1.0 * always, 1.0 * perhaps


@_rule("Sum")
def _summed(step: _Step, value: Bounds, along: Bounds) -> _Arrays | None:
    lengths = step.inputs[0].lengths
    if lengths is None or not _is_exact(along) or np.any(value.times):
        return None
    axes = [int(axis) % len(lengths) for axis in along.low.ravel()]
    number = math.prod(n for axis in axes if isinstance(n := lengths[axis], int))
    if not all(isinstance(lengths[axis], int) for axis in axes):
        return None
    low, high = number * value.low.min(), number * value.high.max()
    return _everywhere(step.rank, low, high) if _is_finite(value) else None


@_rule("SelectV2")
def _selected(step: _Step, condition: Bounds, a: Bounds, b: Bounds) -> _Arrays | None:
    moved = _counted_from_the_end(step, b)
    if moved is not None:
        return moved
    combined = _combined(np.minimum, np.maximum, a, b)
    if combined is None:
        return None
    arrays = np.broadcast_arrays(*combined, condition.low)
    return arrays[0], arrays[1], arrays[2]


def _counted_from_the_end(step: _Step, value: Bounds) -> _Arrays | None:
    """Say what ``where(x < 0, x + length, x)`` is, if that is what is chosen."""
    condition, other, _ = (each.op for each in step.tensor.op.inputs)
    if condition.type != "Less" or other.type not in ("Add", "AddV2"):
        return None
    asked, limit = condition.inputs
    first, more = other.inputs
    is_one = asked.name == first.name == step.tensor.op.inputs[2].name
    zero, length = tf.get_static_value(limit), tf.get_static_value(more)
    if not is_one or zero is None or length is None or np.any(value.times):
        return None
    if np.any(zero) or np.any(value.low < -length) or np.any(value.high >= length):
        return None
    return _everywhere(step.rank, 0, float(np.max(length)) - 1)


@_rule("ArgMax", "ArgMin")
def _index_along(step: _Step, _: Bounds, along: Bounds) -> _Arrays | None:
    lengths = step.inputs[0].lengths
    if lengths is None or not _is_exact(along):
        return None
    return _indices(step, lengths[int(along.low.item())])


@_rule("TopKV2")
def _indices_of_largest(step: _Step, *_: Bounds) -> _Arrays | None:
    lengths = step.inputs[0].lengths
    is_of_values = step.tensor.value_index == 0
    return None if lengths is None or is_of_values else _indices(step, lengths[-1])


def _indices(step: _Step, length: Length | None) -> _Arrays | None:
    if not isinstance(length, int):
        return None
    return _everywhere(step.rank, 0, length - 1)


def _combined(
    of_low: np.ufunc, of_high: np.ufunc, a: Bounds, b: Bounds
) -> _Arrays | None:
    """Combine bounds of numbers in which rows have no place."""
    if np.any(a.times) or np.any(b.times):
        return None
    low, high = of_low(a.low, b.low), of_high(a.high, b.high)
    return np.zeros_like(low), low, high


def _is_exact(value: Bounds) -> bool:
    return bool(np.all(value.low == value.high) and not np.any(value.times))


def _is_finite(value: Bounds) -> bool:
    """Tell whether sums are known not to be beyond what numbers of a type can be."""
    return bool(np.all(np.isfinite(value.low) & np.isfinite(value.high)))
