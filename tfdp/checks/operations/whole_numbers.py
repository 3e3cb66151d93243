"""What operations make of the bounds of whole numbers."""

import math

import numpy as np
import tensorflow as tf

from tfdp._types import Array
from tfdp.checks.bounds import (
    Arrays,
    Bounds,
    Step,
    bounds_rule,
    everywhere,
    hull,
    is_exact,
    is_finite,
)
from tfdp.checks.sizes import Length


@bounds_rule("Identity", "StopGradient", "PreventGradient", is_linear=True)
def _same(_: Step, value: Bounds) -> Arrays:
    return value[:3]


@bounds_rule("Cast", is_linear=True)
def _cast(step: Step, value: Bounds) -> Arrays | None:
    # All that is not zero is one truth.
    is_number = step.tensor.dtype != tf.bool
    return value[:3] if is_number and is_finite(value) else None


@bounds_rule("Squeeze", "Transpose", is_linear=True, value_inputs=1)
@bounds_rule("Slice", "StridedSlice", is_linear=True)
def _any_part(step: Step, value: Bounds, *_: Bounds) -> Arrays | None:
    one = hull(value[:3], range(value.low.ndim))
    if one is None:
        return None
    stride, low, high = (each.reshape([1] * step.rank) for each in one)
    return stride, low, high


@bounds_rule("Reshape", is_linear=True, value_inputs=1)
def _reshaped(step: Step, value: Bounds, shape: Bounds) -> Arrays | None:
    lengths = [n for n in step.value.lengths or () if isinstance(n, int)]
    arrays = np.broadcast_arrays(*value[:3])
    first = arrays[0].shape[:1]
    if first in ((), (1,)) or len(lengths) < step.rank:
        return _any_part(step, value)
    if arrays[0].size == math.prod(lengths):
        stride, low, high = (each.reshape(lengths) for each in arrays)
        return stride, low, high
    # What is written out for all rows stays so.
    one = hull(arrays, range(1, arrays[0].ndim))
    if one is None or lengths[0] % first[0]:
        return _any_part(step, value)
    of_each = lengths[0] // first[0]
    more = [1] * (step.rank - 1)
    stride, low, high = (np.repeat(each, of_each).reshape([-1, *more]) for each in one)
    return stride, low, high


@bounds_rule("ExpandDims", is_linear=True, value_inputs=1)
def _expanded(_: Step, value: Bounds, along: Bounds) -> Arrays | None:
    if not is_exact(along):
        return None
    axis = int(along.low.item())
    stride, low, high = (np.expand_dims(each, axis) for each in value[:3])
    return stride, low, high


@bounds_rule("Tile", is_linear=True, value_inputs=1)
def _tiled(step: Step, value: Bounds, _: Bounds) -> Arrays | None:
    multiples = step.inputs[1].numbers
    axes = [
        axis
        for axis, length in enumerate(value.low.shape)
        if length > 1 and (multiples is None or multiples[axis] != 1)
    ]
    return hull(value[:3], axes)


@bounds_rule("BroadcastTo", is_linear=True, value_inputs=1)
def _broadcast(step: Step, value: Bounds, _: Bounds) -> Arrays:
    more = [1] * (step.rank - value.low.ndim)
    stride, low, high = (each.reshape([*more, *each.shape]) for each in value[:3])
    return stride, low, high


@bounds_rule("Pack", is_linear=True)
def _packed(step: Step, *values: Bounds) -> Arrays:
    axis = step.tensor.op.get_attr("axis")
    arrays = np.broadcast_arrays(*(each for value in values for each in value[:3]))
    stride, low, high = (np.stack(arrays[n::3], axis) for n in range(3))
    return stride, low, high


@bounds_rule("ConcatV2", is_linear=True)
def _joined(step: Step, *values: Bounds) -> Arrays | None:
    *parts, along = values
    if not is_exact(along):
        return None
    axis = int(along.low.item()) % step.rank
    lengths = [each.shape[axis] for each in step.inputs[:-1]]
    others: list[Array] = []
    for part, length in zip(parts, lengths, strict=True):
        if not isinstance(length, int):
            return None
        others += [
            np.moveaxis(_along(each, axis, length), axis, 0) for each in part[:3]
        ]
    rest = np.broadcast_shapes(*(each.shape[1:] for each in others))
    whole = [np.broadcast_to(each, (len(each), *rest)) for each in others]
    stride, low, high = (
        np.moveaxis(np.concatenate(whole[n::3]), 0, axis) for n in range(3)
    )
    return stride, low, high


def _along(array: Array, axis: int, length: int) -> Array:
    """Write out what holds all along an axis, of so many entries."""
    return array if array.shape[axis] == length else np.repeat(array, length, axis)


@bounds_rule("Add", "AddV2", is_linear=True)
def _added(_: Step, a: Bounds, b: Bounds) -> Arrays | None:
    if not (is_finite(a) and is_finite(b)):
        return None
    return a.stride + b.stride, a.low + b.low, a.high + b.high


@bounds_rule("Sub", is_linear=True)
def _subtracted(step: Step, a: Bounds, b: Bounds) -> Arrays | None:
    return _added(step, a, Bounds(-b.stride, -b.high, -b.low, b.causes))


@bounds_rule("Mul", is_linear=True)
def _multiplied(_: Step, a: Bounds, b: Bounds) -> Arrays | None:
    if is_exact(a):
        a, b = b, a
    if not is_exact(b) or not is_finite(a):
        return None
    ends = a.low * b.low, a.high * b.low
    return a.stride * b.low, np.minimum(*ends), np.maximum(*ends)


@bounds_rule("Range")
def _range(_: Step, start: Bounds, limit: Bounds, step: Bounds) -> Arrays | None:
    if not (is_exact(start) and is_exact(step)) or step.low <= 0:
        return None
    if np.any(limit.stride):
        return None
    if is_exact(limit):
        numbers = np.arange(start.low.item(), limit.low.item(), step.low.item())
        return np.zeros_like(numbers), numbers, numbers
    return everywhere(1, start.low.item(), limit.high.item() - 1)


@bounds_rule("Minimum", "LogicalAnd")
def _smaller(_: Step, a: Bounds, b: Bounds) -> Arrays | None:
    return _combined(np.minimum, np.minimum, a, b)


@bounds_rule("Maximum")
def _larger(_: Step, a: Bounds, b: Bounds) -> Arrays | None:
    return _combined(np.maximum, np.maximum, a, b)


@bounds_rule("FloorMod")
def _remainder(step: Step, _: Bounds, divisor: Bounds) -> Arrays | None:
    if not is_exact(divisor) or np.any(divisor.low <= 0):
        return None
    return everywhere(step.rank, 0, divisor.high.max() - 1)


@bounds_rule("Less")
def _less(_: Step, a: Bounds, b: Bounds) -> Arrays | None:
    if np.any(b.stride) or np.any(a.stride < 0):
        return None
    # The farther down a row is, the larger are its numbers.
    always, perhaps = (a.high < b.low) & (a.stride == 0), a.low < b.high
    return np.zeros(always.shape), 1.0 * always, 1.0 * perhaps


@bounds_rule("GreaterEqual")
def _not_less(step: Step, a: Bounds, b: Bounds) -> Arrays | None:
    less = _less(step, a, b)
    return None if less is None else (less[0], 1.0 - less[2], 1.0 - less[1])


@bounds_rule("ZerosLike", "OnesLike", value_inputs=0)
def _constant(step: Step, _: Bounds) -> Arrays:
    number = int(step.tensor.op.type == "OnesLike")
    return everywhere(step.rank, number, number)


@bounds_rule("Fill")
def _filled(step: Step, _: Bounds, value: Bounds) -> Arrays | None:
    if not is_exact(value):
        return None
    return everywhere(step.rank, value.low.item(), value.high.item())


@bounds_rule("Sum")
def _summed(step: Step, value: Bounds, along: Bounds) -> Arrays | None:
    lengths = step.inputs[0].lengths
    if lengths is None or not is_exact(along) or np.any(value.stride):
        return None
    over = [lengths[int(axis) % len(lengths)] for axis in along.low.ravel()]
    fixed = [length for length in over if isinstance(length, int)]
    if not is_finite(value) or len(fixed) < len(over):
        return None
    number = math.prod(fixed)
    return everywhere(step.rank, number * value.low.min(), number * value.high.max())


@bounds_rule("SelectV2")
def _selected(step: Step, condition: Bounds, a: Bounds, b: Bounds) -> Arrays | None:
    moved = _counted_from_the_end(step, b)
    if moved is not None:
        return moved
    combined = _combined(np.minimum, np.maximum, a, b)
    if combined is None:
        return None
    arrays = np.broadcast_arrays(*combined, condition.low)
    return arrays[0], arrays[1], arrays[2]


def _counted_from_the_end(step: Step, value: Bounds) -> Arrays | None:
    """Say what ``where(x < 0, x + length, x)`` is, if that is what is chosen."""
    condition, other, _ = (each.op for each in step.tensor.op.inputs)
    if condition.type != "Less" or other.type not in ("Add", "AddV2"):
        return None
    asked, limit = condition.inputs
    first, more = other.inputs
    is_one = asked.name == first.name == step.tensor.op.inputs[2].name
    zero, length = tf.get_static_value(limit), tf.get_static_value(more)
    if not is_one or zero is None or length is None or np.any(value.stride):
        return None
    if np.any(zero) or np.any(value.low < -length) or np.any(value.high >= length):
        return None
    return everywhere(step.rank, 0, float(np.max(length)) - 1)


@bounds_rule("ArgMax", "ArgMin")
def _indexhull(step: Step, _: Bounds, along: Bounds) -> Arrays | None:
    lengths = step.inputs[0].lengths
    if lengths is None or not is_exact(along):
        return None
    return _indices(step, lengths[int(along.low.item())])


@bounds_rule("TopKV2")
def _indices_of_largest(step: Step, *_: Bounds) -> Arrays | None:
    lengths = step.inputs[0].lengths
    is_of_values = step.tensor.value_index == 0
    return None if lengths is None or is_of_values else _indices(step, lengths[-1])


def _indices(step: Step, length: Length | None) -> Arrays | None:
    if not isinstance(length, int):
        return None
    return everywhere(step.rank, 0, length - 1)


def _combined(
    of_low: np.ufunc, of_high: np.ufunc, a: Bounds, b: Bounds
) -> Arrays | None:
    """Combine bounds of numbers in which rows have no place."""
    if np.any(a.stride) or np.any(b.stride):
        return None
    low, high = of_low(a.low, b.low), of_high(a.high, b.high)
    return np.zeros_like(low), low, high
