"""Arithmetic with sizes of tensors, of which some count the rows of a batch."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._types import Array


class Size:
    """A size that depends on how many rows a batch has.

    Attributes:
        block: The size is `block` times the number of rows; None where it is any
            other function of that number.
    """

    __slots__ = ("block",)

    def __init__(self, block: int | None) -> None:
        """Make a size."""
        self.block = block

    def __eq__(self, other: object) -> bool:
        """Compare; nothing equals a size that is not known."""
        if not isinstance(other, Size) or self.block is None:
            return False
        return self.block == other.block

    def __hash__(self) -> int:
        """Hash by the block."""
        return hash(("Size", self.block))

    def __repr__(self) -> str:
        """Show the block."""
        return "?" if self.block is None else f"{self.block}N"

    def __mul__(self, other: "Length") -> "Length":
        """Multiply by a number; a square of the number of rows is not known."""
        if isinstance(other, Size) or self.block is None:
            return UNKNOWN
        return Size(self.block * int(other)) if other else 0

    __rmul__ = __mul__

    def __add__(self, other: "Length") -> "Length":
        """Add other rows; a sum of rows and a number is not known."""
        if not isinstance(other, Size):
            return UNKNOWN if other else self
        if self.block is None or other.block is None:
            return UNKNOWN
        block = self.block + other.block
        return Size(block) if block else 0

    __radd__ = __add__

    def __sub__(self, other: "Length") -> "Length":
        """Subtract other rows."""
        return self + -1 * other

    def __floordiv__(self, other: "Length") -> "Length":
        """Divide by what divides it."""
        divisor = other.block if isinstance(other, Size) else other
        if self.block is None or not divisor or self.block % divisor:
            return UNKNOWN
        block = self.block // divisor
        return block if isinstance(other, Size) else Size(block)

    def __rsub__(self, other: int) -> "Size":
        """Subtract from, or divide, a number: what comes out is not known."""
        return UNKNOWN

    __rfloordiv__ = __rsub__


UNKNOWN = Size(None)

# The length of an axis.
Length = int | Size

# Of all axes of a tensor, each None where nobody knows.
Lengths = tuple[Length | None, ...]

# What an operation does to arrays of numbers and sizes; None where nobody knows.
Evaluate = Callable[..., Array | Length | None]


def is_fixed(numbers: Array | Sequence[Length | None] | None) -> bool:
    """Tell whether no number among these depends on how many rows there are."""
    return not any(
        isinstance(number, Size) for number in np.asarray(numbers, object).ravel()
    )


def same(first: Array | None, second: Array | None) -> bool:
    """Tell whether two arrays of sizes are known and equal."""
    if first is None or second is None or first.shape != second.shape:
        return False
    return all(a == b for a, b in zip(np.ravel(first), np.ravel(second), strict=True))


def product(lengths: Sequence[Length]) -> Length:
    """Multiply lengths."""
    result: Length = 1
    for length in lengths:
        result *= length
    return result


def settled(shape: Array, lengths: Sequence[Length]) -> tuple[Length, ...]:
    """Resolve the -1 in the shape that a tensor is given.

    Args:
        shape: The new lengths, perhaps with one -1.
        lengths: Those of the tensor.

    Returns:
        The new lengths.
    """
    numbers = [_plain(number) for number in np.ravel(shape)]
    if -1 in numbers:
        position = numbers.index(-1)
        rest = product(numbers[:position] + numbers[position + 1 :])
        total = product(lengths)
        if isinstance(rest, Size) and not isinstance(total, Size):
            numbers[position] = UNKNOWN
        else:
            numbers[position] = 0 if rest == 0 else total // rest
    return tuple(numbers)


def reduced_axes(first: Array, second: Array) -> list[Array | None]:
    """Return over which axes gradients of broadcast operands are summed.

    Args:
        first: Shape of one operand.
        second: Shape of the other.

    Returns:
        The axes for each, None where they are not known.
    """
    rank = max(first.size, second.size)
    shapes = [[*([1] * (rank - each.size)), *each.tolist()] for each in (first, second)]
    if any(isinstance(n, Size) and n.block is None for n in shapes[0] + shapes[1]):
        return [None, None]
    # Where both have one entry, to sum over it is nothing.
    return [constant([n for n in range(rank) if shape[n] == 1]) for shape in shapes]


def constant(values: Array | Sequence[Length | None] | Length) -> Array:
    """Return an array of sizes for a small array of whole numbers."""
    plain = np.frompyfunc(_plain, 1, 1)
    return np.asarray(plain(np.asarray(values, object)), object)


def _plain(value: Length) -> Length:
    return value if isinstance(value, Size) else int(value)


def slice_masks(op: tf.Operation, entries: int) -> list[dict[str, bool]]:
    """Read what a strided slice does in each of its entries."""
    masks = {name: op.get_attr(f"{name}_mask") for name in _SLICE_MASKS}
    return [
        {name: bool(mask >> entry & 1) for name, mask in masks.items()}
        for entry in range(entries)
    ]


_SLICE_MASKS = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")


# ------------------------------------------------------- entry by entry


def _elementwise(function: Callable[..., Length]) -> Evaluate:
    def of_arrays(_: tf.Operation, *arrays: Array) -> Array:
        result: Array = np.frompyfunc(function, len(arrays), 1)(*arrays)
        return result

    return of_arrays


def _of_numbers(
    function: Callable[..., float], *, if_equal: Length | None = None
) -> Evaluate:
    """Make a function of numbers that knows of sizes at most what equal ones give."""

    def of_entries(*entries: Length) -> Length:
        if not any(isinstance(entry, Size) for entry in entries):
            return int(function(*entries))
        if if_equal is None or entries[0] != entries[1]:
            return UNKNOWN
        return if_equal

    return _elementwise(of_entries)


def _truncated(a: int, b: int) -> int:
    """Divide towards zero; not by way of floats, which large numbers do not fit."""
    quotient = abs(a) // abs(b) if b else 0
    return quotient if (a < 0) == (b < 0) else -quotient


def _larger(a: Length, b: Length) -> Length:
    if not (isinstance(a, Size) or isinstance(b, Size)):
        return max(a, b)
    if isinstance(b, Size):
        a, b = b, a
    if isinstance(b, Size):
        return a if a == b else UNKNOWN
    # There is a row at least: without one there is nothing to tell.
    is_larger = isinstance(a, Size) and a.block is not None and b <= a.block > 0
    return a if is_larger else UNKNOWN


def _smaller(a: Length, b: Length) -> Length:
    if isinstance(a, Size) or isinstance(b, Size):
        return a if a == b else UNKNOWN
    return min(a, b)


def _chosen(condition: Length, a: Length, b: Length) -> Length:
    if isinstance(condition, Size):
        return a if a == b else UNKNOWN
    return a if condition else b


# ------------------------------------------------------- whole arrays


def _select_of_version_1(
    op: tf.Operation, condition: Array, *arrays: Array
) -> Array | Length | None:
    # A vector has one condition for each entry of the first axis.
    if condition.shape not in {(), arrays[0].shape}:
        return None
    return _elementwise(_chosen)(op, condition, *arrays)


def _axes(axes: Array, rank: int) -> tuple[int, ...]:
    return tuple(int(axis) % max(rank, 1) for axis in np.ravel(axes))


def _reduced(function: np.ufunc) -> Evaluate:
    def of_array(op: tf.Operation, values: Array, axes: Array) -> Array:
        keeps = op.get_attr("keep_dims")
        reduced: Array = function.reduce(
            values, axis=_axes(axes, values.ndim), keepdims=keeps
        )
        return reduced

    return of_array


def _strided(op: tf.Operation, values: Array, *indices: Array) -> Array:
    begin, end, strides = ([int(n) for n in np.ravel(each)] for each in indices)
    index: list[Any] = []
    for entry, has in enumerate(slice_masks(op, len(begin))):
        if has["ellipsis"]:
            index.append(Ellipsis)
        elif has["new_axis"]:
            index.append(None)
        elif has["shrink_axis"]:
            index.append(begin[entry])
        else:
            first = None if has["begin"] else begin[entry]
            past = None if has["end"] else end[entry]
            index.append(slice(first, past, strides[entry]))
    part: Array = values[tuple(index)]
    return part


def _range(_: tf.Operation, *numbers: Array) -> Array | None:
    start, limit, delta = (number.item() for number in numbers)
    if not is_fixed([start, limit, delta]) or not delta:
        return None
    result = range(start, limit, delta)
    return constant(result) if len(result) <= _MOST else None


def _filled(_: tf.Operation, dims: Array, value: Array) -> Array | None:
    shape = [int(n) for n in dims.ravel()] if is_fixed(dims) else [_MOST + 1]
    return np.full(shape, value.item(), object) if math.prod(shape) <= _MOST else None


def _gathered(
    op: tf.Operation, values: Array, indices: Array, axis: Array
) -> Array | None:
    if op.get_attr("batch_dims") or not is_fixed(indices):
        return None
    return np.take(values, np.asarray(indices, np.int64), axis=int(axis.item()))


def _reshaped(_: tf.Operation, values: Array, shape: Array) -> Array | None:
    return values.reshape([int(n) for n in shape.ravel()]) if is_fixed(shape) else None


def _sliced(_: tf.Operation, values: Array, begin: Array, size: Array) -> Array:
    part: Array = values[
        tuple(
            slice(int(b), None if int(s) == -1 else int(b) + int(s))
            for b, s in zip(begin.ravel(), size.ravel(), strict=True)
        )
    ]
    return part


def _stitched(op: tf.Operation, *arrays: Array) -> Array | None:
    number = op.get_attr("N")
    places, values = arrays[:number], arrays[number:]
    if not all(is_fixed(each) for each in places):
        return None
    where = np.concatenate([each.ravel() for each in places])
    result = np.empty([1 + max(where)], object)
    # Of what goes to one place twice, the last stays.
    for place, value in zip(
        where, np.concatenate([each.ravel() for each in values]), strict=True
    ):
        result[place] = value
    return result


def _padded(
    _: tf.Operation, values: Array, widths: Array, number: Array | None = None
) -> Array | None:
    if not is_fixed(widths):
        return None
    number = constant(0) if number is None else number
    padded: Array = np.pad(
        values, np.asarray(widths, np.int64), constant_values=number.item()
    )
    return padded


def _cast(op: tf.Operation, values: Array) -> Array | None:
    # Other numbers come out of narrower ones, and of truths.
    return values if op.outputs[0].dtype.name in _CAST_TO else None


_CAST_TO = {"int32", "int64", "float32", "float64"}


def _one_hot(
    op: tf.Operation, indices: Array, depth: Array, on: Array, off: Array
) -> Array | None:
    if not is_fixed(indices) or op.get_attr("axis") not in (-1, indices.ndim):
        return None
    if any(not 0 <= int(n) < int(depth.item()) for n in indices.ravel()):
        return None
    table = np.where(np.eye(int(depth.item()), dtype=bool), on.item(), off.item())
    return constant(table[np.asarray(indices, np.int64)])


def _broadcast_shape(_: tf.Operation, first: Array, second: Array) -> Array | None:
    rank = max(first.size, second.size)
    pairs = zip(
        *([1] * (rank - each.size) + list(each) for each in (first, second)),
        strict=True,
    )
    shape: list[Length | None] = []
    for a, b in pairs:
        is_one = isinstance(a, int) and a == 1
        if not (is_one or a == b or (isinstance(b, int) and b == 1)):
            return None
        shape.append(b if is_one else a)
    return constant(shape)


_MOST = 1024

# What operations do to small arrays of sizes; None where that is not worth knowing.
CONSTANTS: dict[str, Evaluate] = {
    "Add": _elementwise(operator.add),
    "AddV2": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "FloorDiv": _elementwise(lambda a, b: a // b if b != 0 else UNKNOWN),
    "FloorMod": _of_numbers(lambda a, b: a % b if b else 0),
    "Mod": _of_numbers(lambda a, b: a - b * _truncated(a, b)),
    "TruncateDiv": _of_numbers(_truncated),
    "Neg": _of_numbers(operator.neg),
    "Abs": _of_numbers(abs),
    "Maximum": _elementwise(_larger),
    "Minimum": _elementwise(_smaller),
    "Equal": _of_numbers(operator.eq, if_equal=1),
    "NotEqual": _of_numbers(operator.ne, if_equal=0),
    "Less": _of_numbers(operator.lt, if_equal=0),
    "LessEqual": _of_numbers(operator.le, if_equal=1),
    "Greater": _of_numbers(operator.gt, if_equal=0),
    "GreaterEqual": _of_numbers(operator.ge, if_equal=1),
    "LogicalAnd": _of_numbers(lambda a, b: a and b),
    "LogicalOr": _of_numbers(lambda a, b: a or b),
    "LogicalNot": _of_numbers(operator.not_),
    "Select": _select_of_version_1,
    "SelectV2": _elementwise(_chosen),
    "Identity": lambda op, values: values,
    "StopGradient": lambda op, values: values,
    "Cast": _cast,
    "Pack": lambda op, *values: np.stack(values, axis=op.get_attr("axis")),
    "ConcatV2": lambda op, *values: np.concatenate(
        values[:-1], axis=int(values[-1].item())
    ),
    "StridedSlice": _strided,
    "Slice": _sliced,
    "GatherV2": _gathered,
    "ExpandDims": lambda op, values, axis: np.expand_dims(values, int(axis.item())),
    "Squeeze": lambda op, values: np.squeeze(
        values, tuple(op.get_attr("squeeze_dims")) or None
    ),
    "Reshape": _reshaped,
    "Pad": _padded,
    "PadV2": _padded,
    "Prod": _reduced(np.multiply),
    "Sum": _reduced(np.add),
    "Max": _reduced(np.frompyfunc(_larger, 2, 1, identity=None)),
    "Min": _reduced(np.frompyfunc(_smaller, 2, 1, identity=None)),
    "Range": _range,
    "Fill": _filled,
    "Transpose": lambda op, values, order: values.transpose([int(n) for n in order]),
    "InvertPermutation": lambda op, values: constant(
        np.argsort(np.asarray(values, np.int64))
    ),
    "DynamicStitch": _stitched,
    "ReverseV2": lambda op, values, axes: np.flip(values, _axes(axes, values.ndim)),
    "OneHot": _one_hot,
    "BroadcastArgs": _broadcast_shape,
}
