"""Operations that ask for shapes, or give tensors other ones."""

from collections.abc import Sequence

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
    axis_from,
    counting,
    is_same_length,
    known_product,
    lengths_from,
    of_numbers,
    rule,
    static_lengths,
)
from tfdp.checks.values import Layout, Value, have_rows


@rule("Shape", "ShapeN", "Size")
def _shape(step: Step) -> Value:
    value = step.inputs[step.number]
    lengths = value.lengths
    causes = value.causes
    if lengths is None or None in lengths:
        causes |= counting(step)
    elif not causes or is_fixed(lengths):
        numbers = constant(lengths)
        if step.op.type == "Size":
            numbers = constant(product(list(numbers)))
        return of_numbers(step, numbers)
    # Where something is the matter, what looks like the number of rows may not be.
    known = static_lengths(step.tensor)
    return Value(lengths=None if known is None else tuple(known), causes=causes)


@rule("Rank")
def _rank(step: Step) -> Value:
    rank = step.inputs[0].rank
    return step.unknown() if rank is None else of_numbers(step, constant(rank))


@rule("BroadcastGradientArgs")
def _broadcast_gradient_args(step: Step) -> Value:
    first, second = (each.numbers for each in step.inputs)
    if first is None or second is None:
        return step.output(None)
    axes = reduced_axes(first, second)[step.number]
    if axes is None:
        return step.output(None)
    return step.output(None, numbers=axes, causes=frozenset())


def reshaped(step: Step, value: Value, lengths: Sequence[Length]) -> Value:
    """Describe a tensor that is given other lengths, in the same order."""
    causes = value.causes
    if value.axis is None:
        return step.output(None, lengths=lengths, causes=causes)
    # Flat, the entries are: before, times, rows, entries, after.
    times, entries = value.layout
    own = value.lengths or ()
    ahead = known_product([*own[: value.axis], times])
    behind = known_product([*own[value.axis + 1 :], entries])
    # The rows go to an axis whose length is a multiple of theirs, if as many entries
    # come before and behind as before: then each row has the same ones as it had.
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
        if is_same_length(product([*lengths[:axis], layout.times]), ahead):
            return step.output(axis, layout, lengths=lengths, causes=causes)
    # With whole rows somewhere they may only be in another order.
    has_rows = any(step.entries_of(length) for length in lengths)
    why = "puts parts of different rows together"
    return step.mixed(why, is_certain=not has_rows, causes=causes)


@rule("Reshape")
def _reshape(step: Step) -> Value:
    value, shape = step.inputs
    lengths = value.lengths
    if lengths is None or None in lengths:
        return step.mixed("has a shape that is not known", is_certain=False)
    numbers = shape.numbers
    if numbers is None:
        known = static_lengths(step.tensor)
        if known is None or known.count(None) > 1 or shape.axis is not None:
            return step.mixed("has a shape that is not known", is_certain=False)
        numbers = np.array([-1 if n is None else n for n in known] + [None], object)
        numbers = numbers[:-1]
    return reshaped(
        step, value, settled(numbers, [n for n in lengths if n is not None])
    )


@rule("ExpandDims")
def _expand_dims(step: Step) -> Value:
    value, along = step.inputs
    axis = None if value.rank is None else axis_from(along, value.rank + 1)
    if value.lengths is None or axis is None:
        return step.unknown()
    lengths = [*value.lengths[:axis], 1, *value.lengths[axis:]]
    rows = value.axis
    if rows is not None and rows >= axis:
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
        if None in value.lengths:
            return step.mixed("has a shape that is not known", is_certain=False)
        gone = [axis for axis, n in enumerate(value.lengths) if n == 1]
        if (
            step.rows is None
            and not is_fixed(value.lengths)
            and static_lengths(step.tensor) is None
        ):
            # With one row the row axis would be gone, too.
            return step.mixed("drops the axis of the rows if there is one row")
    if value.axis in gone:
        return step.mixed("drops the axis of the rows")
    kept = [axis for axis in range(rank) if axis not in gone]
    rows = None if value.axis is None else kept.index(value.axis)
    return step.output(
        rows, value.layout, lengths=[value.lengths[axis] for axis in kept]
    )


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
    if have_rows(step.inputs):
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
    lengths = [
        # A length that nobody knows counts rows if it is taken as often as they are.
        known_product([n, m]) if n is not None or isinstance(m, int) else UNKNOWN
        for n, m in zip(value.lengths, times, strict=True)
    ]
    if value.axis is not None and times[value.axis] != 1:
        return step.mixed("repeats all rows one after the other")
    if value.axis is not None and not is_fixed(times):
        return step.mixed("repeats rows as often as there are rows")
    return step.output(value.axis, value.layout, lengths=lengths, causes=value.causes)
