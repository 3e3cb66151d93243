"""Operations that ask for shapes, or give tensors other ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdp.checks.sizes import (
    UNKNOWN,
    Length,
    Size,
    constant,
    is_fixed,
    product,
    reduced_axes,
    settled,
)
from tfdp.checks.step import (
    Step,
    counting,
    is_same_length,
    known_product,
    lengths_from,
    of_numbers,
    rule,
    static_lengths,
    times_length,
)
from tfdp.checks.values import PLAIN, Layout, Value


@rule("Shape", "ShapeN")
def _shape(step: Step) -> list[Value]:
    return [_shape_of(step, value, n) for n, value in enumerate(step.inputs)]


def _shape_of(step: Step, value: Value, number: int) -> Value:
    lengths = value.lengths
    if lengths is None or any(length is None for length in lengths):
        causes = value.causes | counting(step)
        return Value(None, PLAIN, _lengths_of(step, number), None, causes)
    numbers = constant(list(lengths)) if lengths else _EMPTY
    if value.causes and not is_fixed(numbers):
        # Where something is the matter, what looks like the number of rows may not be.
        return Value(None, PLAIN, _lengths_of(step, number), None, value.causes)
    return of_numbers(step, numbers, number)


_EMPTY = np.empty([0], object)


def _lengths_of(step: Step, number: int) -> Any:
    known = static_lengths(step.op.outputs[number])
    return None if known is None else tuple(known)


@rule("Size")
def _size(step: Step) -> Value:
    lengths = step.inputs[0].lengths
    if lengths is None or any(length is None for length in lengths):
        return Value(None, PLAIN, (), None, step.causes | counting(step))
    if step.causes and not is_fixed(constant(list(lengths))):
        return Value(None, PLAIN, (), None, step.causes)
    size = np.empty([], object)
    size[()] = product([length for length in lengths if length is not None])
    return of_numbers(step, size)


@rule("Rank")
def _rank(step: Step) -> Value:
    lengths = step.inputs[0].lengths
    if lengths is None:
        return step.unknown()
    return of_numbers(step, constant(len(lengths)))


@rule("BroadcastGradientArgs")
def _broadcast_gradient_args(step: Step) -> list[Value]:
    first, second = (each.numbers for each in step.inputs)
    axes: list[Any] = [None, None]
    if first is not None and second is not None:
        axes = reduced_axes(first, second)
    return [
        step.output(None, number=n, numbers=each, causes=frozenset())
        if each is not None
        else step.output(None, number=n)
        for n, each in enumerate(axes)
    ]


def reshaped(step: Step, value: Value, lengths: Sequence[Length]) -> Value:
    """Describe a tensor that is given other lengths, in the same order."""
    causes = value.causes
    if value.axis is None:
        return step.output(None, lengths=lengths, causes=causes)
    # Flat, the entries are: before, times, rows, entries, after.
    times, entries = value.layout
    own = value.lengths or ()
    ahead = times_length(known_product(own[: value.axis]), times)
    behind = times_length(known_product(own[value.axis + 1 :]), entries)
    for axis, length in enumerate(lengths):
        of_row = step.entries_of(length)
        new_behind = product(lengths[axis + 1 :])
        if (
            not of_row
            or isinstance(behind, Size | None)
            or isinstance(new_behind, Size)
        ):
            continue
        if not new_behind or behind % new_behind or of_row % (behind // new_behind):
            continue
        layout = Layout(of_row // (behind // new_behind), behind // new_behind)
        if is_same_length(times_length(product(lengths[:axis]), layout.times), ahead):
            return step.output(axis, layout, lengths=lengths, causes=causes)
    # With whole rows somewhere they may only be in another order.
    has_rows = any(step.entries_of(length) for length in lengths)
    why = "puts parts of different rows together"
    return step.mixed(why, is_certain=not has_rows, causes=causes)


@rule("Reshape")
def _reshape(step: Step) -> Value:
    value, shape = step.inputs
    lengths = value.lengths
    if lengths is None or any(length is None for length in lengths):
        return step.mixed("has a shape that is not known", is_certain=False)
    numbers = shape.numbers
    if numbers is None:
        known = static_lengths(step.op.outputs[0])
        if known is None or known.count(None) > 1 or shape.axis is not None:
            return step.mixed("has a shape that is not known", is_certain=False)
        numbers = np.array([-1 if n is None else n for n in known] + [None], object)
        numbers = numbers[:-1]
    return reshaped(
        step, value, settled(numbers, [n for n in lengths if n is not None])
    )


@rule("ExpandDims")
def _expand_dims(step: Step) -> Value:
    value, axis = step.inputs
    if value.lengths is None or axis.numbers is None:
        return step.unknown()
    position = int(axis.numbers.ravel()[0]) % (len(value.lengths) + 1)
    lengths = [*value.lengths[:position], 1, *value.lengths[position:]]
    rows = value.axis
    if rows is not None and rows >= position:
        rows += 1
    return step.output(rows, value.layout, lengths=lengths, causes=value.causes)


@rule("Squeeze")
def _squeeze(step: Step) -> Value:
    value = step.inputs[0]
    if value.lengths is None:
        return step.unknown()
    rank = len(value.lengths)
    gone = [axis % rank for axis in step.attr("squeeze_dims")]
    if not gone:
        if any(n is None for n in value.lengths):
            return step.mixed("has a shape that is not known", is_certain=False)
        gone = [
            axis
            for axis, n in enumerate(value.lengths)
            if not isinstance(n, Size) and n == 1
        ]
        if step.rows is None and any(isinstance(n, Size) for n in value.lengths):
            known = static_lengths(step.op.outputs[0])
            if known is None:
                # With one row the row axis would be gone, too.
                return step.mixed("drops the axis of the rows if there is one row")
    if value.axis in gone:
        return step.mixed("drops the axis of the rows")
    kept = [axis for axis in range(rank) if axis not in gone]
    rows = None if value.axis is None else kept.index(value.axis)
    lengths = [value.lengths[axis] for axis in kept]
    return step.output(rows, value.layout, lengths=lengths)


@rule("Transpose", "ConjugateTranspose")
def _transpose(step: Step) -> Value:
    value, order = step.inputs
    if value.lengths is None or order.numbers is None:
        return step.unknown()
    permutation = [int(n) % len(value.lengths) for n in order.numbers.ravel()]
    rows = None if value.axis is None else permutation.index(value.axis)
    lengths = [value.lengths[axis] for axis in permutation]
    return step.output(rows, value.layout, lengths=lengths, causes=value.causes)


@rule("BroadcastTo")
def _broadcast_to(step: Step) -> Value:
    value, shape = step.inputs
    lengths = lengths_from(shape)
    if lengths is None or value.lengths is None or shape.axis is not None:
        return step.unknown()
    if value.axis is None:
        return step.output(None, lengths=lengths, causes=value.causes)
    place = len(lengths) + value.axis - len(value.lengths)
    return step.output(place, value.layout, lengths=lengths, causes=value.causes)


@rule("Fill")
def _fill(step: Step) -> Value:
    shape, value = step.inputs
    if value.axis is not None or shape.axis is not None:
        return step.mixed("spreads what depends on rows over a whole tensor")
    if shape.numbers is None:
        return step.output(None)
    return step.output(None, lengths=lengths_from(shape), causes=value.causes)


@rule("Empty")
def _empty(step: Step) -> Value:
    return step.output(None, lengths=lengths_from(step.inputs[0]))


@rule("Tile")
def _tile(step: Step) -> Value:
    value, multiples = step.inputs
    times = lengths_from(multiples)
    if value.lengths is None or times is None:
        return step.unknown()
    lengths = [_times(n, m) for n, m in zip(value.lengths, times, strict=True)]
    if value.axis is not None and times[value.axis] != 1:
        return step.mixed("repeats all rows one after the other")
    if value.axis is not None and any(isinstance(m, Size) for m in times):
        return step.mixed("repeats rows as often as there are rows")
    return step.output(value.axis, value.layout, lengths=lengths, causes=value.causes)


def _times(length: Length | None, times: Length) -> Length | None:
    """Multiply a length, which counts rows if `times` does, also if it is not known."""
    if length is None:
        return UNKNOWN if isinstance(times, Size) else None
    return product([length, times])
