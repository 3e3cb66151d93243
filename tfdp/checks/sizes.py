"""Arithmetic with sizes of tensors, of which some count the rows of a batch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


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

    def __mul__(self, other: Any) -> Any:
        """Multiply by a number."""
        if isinstance(other, Size) or self.block is None:
            return UNKNOWN
        return Size(self.block * int(other)) if other else 0

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        """Add what has no other rows."""
        if isinstance(other, Size):
            if self.block is None or other.block is None:
                return UNKNOWN
            return Size(self.block + other.block)
        return UNKNOWN if other else self

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        """Subtract what has no other rows."""
        if isinstance(other, Size):
            if self.block is None or other.block is None:
                return UNKNOWN
            rest = self.block - other.block
            return Size(rest) if rest else 0
        return UNKNOWN if other else self

    def __rsub__(self, other: Any) -> Any:
        """Subtract from a number, which is not a number of rows."""
        return UNKNOWN

    def __floordiv__(self, other: Any) -> Any:
        """Divide by what divides it."""
        if self.block is None:
            return UNKNOWN
        if isinstance(other, Size):
            if other.block and self.block % other.block == 0:
                return self.block // other.block
            return UNKNOWN
        return UNKNOWN if not other or self.block % other else Size(self.block // other)

    def __rfloordiv__(self, other: Any) -> Any:
        """Divide a number by the number of rows: only 0 stays."""
        return UNKNOWN


UNKNOWN = Size(None)

# The length of an axis.
Length = int | Size


def is_fixed(numbers: Any) -> bool:
    """Tell whether no number among these depends on how many rows there are."""
    return not any(isinstance(number, Size) for number in np.ravel(numbers))


def same(first: Any, second: Any) -> bool:
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


def settled(shape: Any, lengths: Sequence[Length]) -> list[Length]:
    """Resolve the -1 in the shape that a tensor is given.

    Args:
        shape: The new lengths, perhaps with one -1.
        lengths: Those of the tensor.

    Returns:
        The new lengths.
    """
    numbers = [n if isinstance(n, Size) else int(n) for n in np.ravel(shape)]
    for position, number in enumerate(numbers):
        if not isinstance(number, Size) and number == -1:
            rest = product(numbers[:position] + numbers[position + 1 :])
            total = product(lengths)
            if isinstance(rest, Size) and not isinstance(total, Size):
                numbers[position] = UNKNOWN
            elif not isinstance(rest, Size) and rest == 0:
                numbers[position] = 0
            else:
                numbers[position] = total // rest
    return numbers


def _plain(value: Any) -> Any:
    return value if isinstance(value, Size) else int(value)


def constant(values: Any) -> np.ndarray:
    """Return an array of sizes for a small array of whole numbers."""
    array = np.empty(np.shape(values), object)
    array[...] = np.vectorize(_plain, otypes=[object])(values) if array.size else 0
    return array


def _elementwise(function: Any) -> Any:
    def of_arrays(op: Any, *arrays: np.ndarray) -> Any:
        del op
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
        result = np.empty(shape, object)
        flat = [np.broadcast_to(a, shape).ravel() for a in arrays]
        values = [function(*each) for each in zip(*flat, strict=True)]
        result[...] = np.array([*values, None], object)[:-1].reshape(shape)
        return result

    return of_arrays


def _only_fixed(function: Any) -> Any:
    """Make a function of numbers that knows nothing of sizes."""

    def of_numbers(*numbers: Any) -> Any:
        if any(isinstance(number, Size) for number in numbers):
            return UNKNOWN
        return int(function(*numbers))

    return _elementwise(of_numbers)


def _compared(function: Any, *, if_equal: bool) -> Any:
    def of_numbers(a: Any, b: Any) -> Any:
        if isinstance(a, Size) or isinstance(b, Size):
            return int(if_equal) if a == b else UNKNOWN
        return int(function(a, b))

    return _elementwise(of_numbers)


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, Size) and isinstance(b, Size):
        return a if a == b else UNKNOWN
    for size, number in ((a, b), (b, a)):
        if isinstance(size, Size):
            # There is a row at least: without one there is nothing to tell.
            is_larger = size.block is not None and number <= size.block > 0
            return size if is_larger else UNKNOWN
    return max(a, b)


def _smaller(a: Any, b: Any) -> Any:
    if isinstance(a, Size) or isinstance(b, Size):
        return a if a == b else UNKNOWN
    return min(a, b)


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Size):
        return a if a == b else UNKNOWN
    return a if condition else b


def _axes(axes: np.ndarray, rank: int) -> tuple[int, ...]:
    return tuple(int(axis) % rank for axis in np.ravel(axes))


def _reduced(function: Any) -> Any:
    def of_array(op: Any, values: np.ndarray, axes: np.ndarray) -> Any:
        keeps = op.get_attr("keep_dims")
        wanted = _axes(axes, values.ndim) if values.ndim else ()
        kept = [axis for axis in range(values.ndim) if axis not in wanted]
        moved = values.transpose([*kept, *wanted])
        shape = [values.shape[axis] for axis in kept]
        rows = moved.reshape([*shape, -1])
        result = np.empty(shape, object)
        for index in np.ndindex(*shape):
            result[index] = function(list(rows[index]))
        if keeps:
            result = result.reshape([
                1 if axis in wanted else values.shape[axis]
                for axis in range(values.ndim)
            ])
        return result

    return of_array


def _extreme(pick: Any) -> Any:
    def of_list(numbers: list[Any]) -> Any:
        if any(isinstance(n, Size) for n in numbers):
            return numbers[0] if len(numbers) == 1 else UNKNOWN
        return pick(numbers) if numbers else UNKNOWN

    return of_list


def _strided(op: Any, values: np.ndarray, *indices: np.ndarray) -> Any:
    begin, end, strides = ([int(n) for n in np.ravel(each)] for each in indices)
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    index: list[Any] = []
    for position in range(len(begin)):
        bit = 1 << position
        if masks["ellipsis"] & bit:
            index.append(Ellipsis)
        elif masks["new_axis"] & bit:
            index.append(None)
        elif masks["shrink_axis"] & bit:
            index.append(begin[position])
        else:
            index.append(
                slice(
                    None if masks["begin"] & bit else begin[position],
                    None if masks["end"] & bit else end[position],
                    strides[position],
                )
            )
    return values[tuple(index)]


def _packed(op: Any, *values: np.ndarray) -> Any:
    return np.stack(values, axis=op.get_attr("axis"))


def _range(op: Any, *numbers: np.ndarray) -> Any:
    del op
    start, limit, delta = (number.item() for number in numbers)
    if any(isinstance(each, Size) for each in (start, limit, delta)) or not delta:
        return None
    result = range(start, limit, delta)
    return constant(list(result)) if len(result) <= _MOST else None


def _filled(op: Any, dims: np.ndarray, value: np.ndarray) -> Any:
    del op
    if not is_fixed(dims) or math.prod(int(n) for n in np.ravel(dims)) > _MOST:
        return None
    result = np.empty([int(n) for n in np.ravel(dims)], object)
    result[...] = value.item()
    return result


def _gathered(op: Any, values: np.ndarray, indices: np.ndarray, axis: Any) -> Any:
    if op.get_attr("batch_dims") or not is_fixed(indices):
        return None
    return np.take(values, np.asarray(indices, np.int64), axis=int(axis.item()))


def _reshaped(op: Any, values: np.ndarray, shape: np.ndarray) -> Any:
    del op
    return (
        values.reshape([int(n) for n in np.ravel(shape)]) if is_fixed(shape) else None
    )


def _squeezed(op: Any, values: np.ndarray) -> Any:
    axes = tuple(op.get_attr("squeeze_dims"))
    return np.squeeze(values, axis=axes or None)


def _inverted(op: Any, values: np.ndarray) -> Any:
    del op
    return constant(np.argsort(np.asarray(values, np.int64)))


def _reversed(op: Any, values: np.ndarray, axes: np.ndarray) -> Any:
    del op
    return np.flip(values, _axes(axes, values.ndim))


def _sliced(op: Any, values: np.ndarray, begin: np.ndarray, size: np.ndarray) -> Any:
    del op
    return values[
        tuple(
            slice(int(b), None if int(s) == -1 else int(b) + int(s))
            for b, s in zip(np.ravel(begin), np.ravel(size), strict=True)
        )
    ]


def _stitched(op: Any, *arrays: np.ndarray) -> Any:
    number = op.get_attr("N")
    places, values = arrays[:number], arrays[number:]
    if not all(is_fixed(each) for each in places):
        return None
    length = 1 + max(int(n) for each in places for n in each.ravel())
    result = np.empty([length], object)
    for where, what in zip(places, values, strict=True):
        for place, value in zip(where.ravel(), what.ravel(), strict=True):
            result[int(place)] = value
    return result


def _cast(op: Any, values: np.ndarray) -> Any:
    # Other numbers come out of narrower ones, and of truths.
    return values if op.outputs[0].dtype.name in {"int32", "int64"} else None


def _one_hot(op: Any, indices: np.ndarray, depth: Any, on: Any, off: Any) -> Any:
    if not is_fixed(indices) or op.get_attr("axis") not in (-1, indices.ndim):
        return None
    if any(not 0 <= int(n) < int(depth.item()) for n in indices.ravel()):
        return None
    table = np.where(np.eye(int(depth.item()), dtype=bool), on.item(), off.item())
    return constant(table[np.asarray(indices, np.int64)])


_MOST = 1024

# What operations do to small arrays of sizes; None where that is not worth knowing.
CONSTANTS: dict[str, Any] = {
    "Add": _elementwise(lambda a, b: a + b),
    "AddV2": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Mul": _elementwise(lambda a, b: a * b),
    "FloorDiv": _elementwise(lambda a, b: a // b if b != 0 else UNKNOWN),
    "FloorMod": _only_fixed(lambda a, b: a % b if b else 0),
    "Mod": _only_fixed(lambda a, b: int(math.fmod(a, b)) if b else 0),
    "TruncateDiv": _only_fixed(lambda a, b: int(a / b) if b else 0),
    "Neg": _only_fixed(lambda a: -a),
    "Abs": _only_fixed(abs),
    "Maximum": _elementwise(_larger),
    "Minimum": _elementwise(_smaller),
    "Equal": _compared(lambda a, b: a == b, if_equal=True),
    "NotEqual": _compared(lambda a, b: a != b, if_equal=False),
    "Less": _compared(lambda a, b: a < b, if_equal=False),
    "LessEqual": _compared(lambda a, b: a <= b, if_equal=True),
    "Greater": _compared(lambda a, b: a > b, if_equal=False),
    "GreaterEqual": _compared(lambda a, b: a >= b, if_equal=True),
    "LogicalAnd": _only_fixed(lambda a, b: a and b),
    "LogicalOr": _only_fixed(lambda a, b: a or b),
    "LogicalNot": _only_fixed(lambda a: not a),
    "Select": _elementwise(_chosen),
    "SelectV2": _elementwise(_chosen),
    "Identity": lambda op, values: values,
    "StopGradient": lambda op, values: values,
    "Cast": _cast,
    "Pack": _packed,
    "ConcatV2": lambda op, *values: np.concatenate(
        values[:-1], axis=int(values[-1].item())
    ),
    "StridedSlice": _strided,
    "Slice": _sliced,
    "GatherV2": _gathered,
    "ExpandDims": lambda op, values, axis: np.expand_dims(values, int(axis.item())),
    "Squeeze": _squeezed,
    "Reshape": _reshaped,
    "Prod": _reduced(product),
    "Sum": _reduced(lambda numbers: sum(numbers, 0)),
    "Max": _reduced(_extreme(max)),
    "Min": _reduced(_extreme(min)),
    "Range": _range,
    "Fill": _filled,
    "Transpose": lambda op, values, order: values.transpose([int(n) for n in order]),
    "InvertPermutation": _inverted,
    "DynamicStitch": _stitched,
    "ReverseV2": _reversed,
    "OneHot": _one_hot,
}


def reduced_axes(first: np.ndarray, second: np.ndarray) -> list[Any]:
    """Return over which axes gradients of broadcast operands are summed.

    Args:
        first: Shape of one operand.
        second: Shape of the other.

    Returns:
        The axes for each, None where they are not known.
    """
    rank = max(first.size, second.size)
    shapes = [[*([1] * (rank - each.size)), *each.tolist()] for each in (first, second)]
    axes: list[Any] = [[], []]
    for axis, (a, b) in enumerate(zip(*shapes, strict=True)):
        if any(isinstance(n, Size) and n.block is None for n in (a, b)):
            return [None, None]
        is_one = [not isinstance(n, Size) and n == 1 for n in (a, b)]
        if all(is_one):
            # Summing over one entry is nothing.
            axes[0].append(axis)
            axes[1].append(axis)
        else:
            for each in range(2):
                if is_one[each]:
                    axes[each].append(axis)
    return [constant(each) for each in axes]
