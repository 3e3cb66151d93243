"""Small tensors whose numbers are known, and what operations make of them: shapes above all."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdp._types import Array
from tfdp.checks.node import Node, of_numbers, static_lengths
from tfdp.checks.open_lengths import Open
from tfdp.checks.sizes import UNKNOWN, Length, Size, constant, is_fixed, slice_masks
from tfdp.checks.values import PLAIN, Value

# What an operation does to arrays of numbers and sizes; None where nobody knows.
_Function: TypeAlias = Callable[..., Array | Length | None]

_MOST_NUMBERS = 256

# What numbers are worked out for: narrower ones wrap around.
_WIDE = (tf.int32, tf.int64, tf.bool)
# Positions are whole numbers, also where they are floats that angles are made of.
_FLOATS, _OF_POSITIONS, _MOST_EXACT = (tf.float32, tf.float64), ("Cast", "Range"), 2**24


def constant_value(op: tf.Operation) -> Value:
    """Describe a constant."""
    tensor = op.outputs[0]
    lengths = static_lengths(tensor) or []
    numbers = None
    if tensor.dtype.is_integer or tensor.dtype.is_bool or tensor.dtype in _FLOATS:
        values = tf.make_ndarray(op.get_attr("value"))
        if values.size <= _MOST_NUMBERS and _are_whole(values):
            numbers = constant(values)
    return Value(None, PLAIN, tuple(lengths), numbers)


def evaluated(node: Node) -> Value | None:
    """Compute a small tensor of sizes; None if its numbers are not known."""
    evaluate = _FUNCTIONS.get(node.op.type)
    if evaluate is None or not node.inputs:
        return None
    arrays = [each.numbers for each in node.inputs]
    dtype = node.tensor.dtype
    is_float = dtype in _FLOATS and node.op.type in _OF_POSITIONS
    if any(each is None for each in arrays) or not (is_float or dtype in _WIDE):
        return None
    try:
        result = evaluate(node.op, *arrays)
    except (IndexError, TypeError, ValueError):
        return None
    if result is None:
        return None
    result = np.asarray(result, object)
    if result.size > _MOST_NUMBERS or _may_overflow(result):
        return None
    if is_float and not (is_fixed(result) and _are_whole(result)):
        return None
    return of_numbers(node, result)


def _are_whole(values: Array) -> bool:
    """Tell whether there are only whole numbers that floats have, too, if any are."""
    if values.dtype.kind in "iub":
        return True
    return all(
        n.is_one if isinstance(n, Open) else abs(n) <= _MOST_EXACT and n == int(n)
        for n in values.ravel()
    )


def _may_overflow(numbers: Array) -> bool:
    sizes = (n.block if isinstance(n, Size) else n for n in numbers.ravel())
    return any(
        not size.is_small if isinstance(size, Open) else abs(size) >= 2**31
        for size in sizes
        if size is not None
    )


# ------------------------------------------------------- entry by entry


def _elementwise(function: Callable[..., Length]) -> _Function:
    def of_arrays(_: tf.Operation, *arrays: Array) -> Array:
        result: Array = np.frompyfunc(function, len(arrays), 1)(*arrays)
        return result

    return of_arrays


def _of_numbers(
    function: Callable[..., float], *, if_equal: Length | None = None
) -> _Function:
    """Make a function of numbers that knows of sizes at most what equal ones give."""

    def of_entries(*entries: Length) -> Length:
        if if_equal is not None and entries[0] == entries[1]:
            return if_equal
        if any(isinstance(entry, Size) for entry in entries):
            return UNKNOWN
        if any(isinstance(entry, Open) for entry in entries):
            return Open.unknown(function, *entries)
        return int(function(*entries))

    return _elementwise(of_entries)


def _truncated(a: int, b: int) -> int:
    """Divide towards zero; not by way of floats, which large numbers do not fit."""
    quotient = abs(a) // abs(b) if b else 0
    return quotient if (a < 0) == (b < 0) else -quotient


def _floor_divided(dtype: str, a: Length, b: Length) -> Length:
    if b in (0, 1):
        return a if b == 1 else UNKNOWN
    if isinstance(a, Size) or isinstance(b, Size):
        blocks = [each.block if isinstance(each, Size) else each for each in (a, b)]
        return UNKNOWN if any(isinstance(n, Open) for n in blocks) else a // b
    if isinstance(a, Open) or isinstance(b, Open):
        # What was multiplied may have overflown, and of 0 over 0 nobody knows.
        return Open.unknown("//", a, b, dtype)
    return a // b


def _floor_division(op: tf.Operation, *arrays: Array) -> Array | Length | None:
    dtype = op.outputs[0].dtype.name
    return _elementwise(functools.partial(_floor_divided, dtype))(op, *arrays)


def _larger(a: Length, b: Length) -> Length:
    if a == b:
        return a
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if not (isinstance(a, Size) or isinstance(b, Size)):
        return Open.unknown("larger", frozenset({a, b}))
    if isinstance(b, Size):
        a, b = b, a
    if not (isinstance(a, Size) and isinstance(a.block, int) and isinstance(b, int)):
        return UNKNOWN
    # There is a row at least: without one there is nothing to tell.
    return a if b <= a.block > 0 else UNKNOWN


def _smaller(a: Length, b: Length) -> Length:
    if a == b:
        return a
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if isinstance(a, Size) or isinstance(b, Size):
        return UNKNOWN
    return Open.unknown("smaller", frozenset({a, b}))


def _chosen(condition: Length, a: Length, b: Length) -> Length:
    if a == b or isinstance(condition, int):
        return a if condition else b
    if any(isinstance(each, Size) for each in (condition, a, b)):
        return UNKNOWN
    return Open.unknown("chosen", condition, a, b)


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


def _reduced(function: np.ufunc) -> _Function:
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
    if any(isinstance(n, Open) for n in values.ravel()):
        # Of floats and wider numbers only lengths stay what they are.
        is_same = op.inputs[0].dtype == op.outputs[0].dtype
        are_lengths = all(not isinstance(n, Open) or n.is_one for n in values.ravel())
        is_of_floats = op.inputs[0].dtype.is_floating
        if not is_same and (is_of_floats or not are_lengths):
            return None
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
        longer = [n for n in (a, b) if n != 1]
        if len(longer) == 2 and a != b:
            return None
        shape.append(longer[0] if longer else 1)
    return constant(shape)


_MOST = 1024

# What operations do to small arrays of sizes; None where that is not worth knowing.
_FUNCTIONS: dict[str, _Function] = {
    "Add": _elementwise(operator.add),
    "AddV2": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "FloorDiv": _floor_division,
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
