"""Operations that put tensors together, or take them apart."""

from collections.abc import Sequence

import numpy as np

from tfdp.checks.operations.elementwise import joined
from tfdp.checks.sizes import Length, constant
from tfdp.checks.step import Step, axis_from, broadcast, of_numbers, rule
from tfdp.checks.values import Value, causes_of, have_rows


@rule("Pack")
def _pack(step: Step) -> Value:
    rank = next((v.rank for v in step.inputs if v.rank is not None), None)
    if rank is None:
        return step.unknown()
    with_rows = [each for each in step.inputs if each.axis is not None]
    if len({(each.axis, each.layout) for each in with_rows}) > 1:
        return joined(step, step.inputs)
    axis = step.attr("axis") % (rank + 1)
    lengths = broadcast(step.inputs)
    if lengths is not None:
        lengths.insert(axis, len(step.inputs))
    if not with_rows:
        return step.output(None, lengths=lengths)
    rows, layout, *_ = with_rows[0]
    rows += rows >= axis
    return step.output(rows, layout, lengths=lengths)


@rule("Unpack")
def _unpack(step: Step) -> Value:
    value = step.inputs[0]
    if value.lengths is None:
        return step.unknown()
    axis = step.attr("axis") % len(value.lengths)
    if value.numbers is not None:
        part = np.moveaxis(value.numbers, axis, 0)[step.number]
        return of_numbers(step, np.asarray(part, object))
    if value.axis == axis:
        return step.mixed("takes the rows of a batch apart")
    rows = value.axis
    if rows is not None and rows > axis:
        rows -= 1
    lengths = [*value.lengths[:axis], *value.lengths[axis + 1 :]]
    return step.output(rows, value.layout, lengths=lengths)


@rule("ConcatV2")
def _concat(step: Step) -> Value:
    *values, along = step.inputs
    if values[0].lengths is None:
        return step.unknown()
    axis = axis_from(along, len(values[0].lengths))
    if axis is None:
        return step.unknown()
    lengths = _concatenated([each.lengths for each in values], axis)
    # Which axis it is says nothing of the rows.
    causes = causes_of(values)
    with_rows = [each for each in values if each.axis is not None]
    if not with_rows:
        return step.output(None, lengths=lengths, causes=causes)
    if len({(each.axis, each.layout) for each in with_rows}) > 1:
        return step.mixed("joins tensors whose rows are on different axes")
    rows, layout, *_ = with_rows[0]
    if rows == axis:
        # With nothing but empty tensors beside them, the rows stay what they are.
        others = [v for v in values if v.lengths is None or v.lengths[axis] != 0]
        if len(others) != 1:
            return step.mixed("puts other entries between or behind the rows")
        rows, layout, *_ = others[0]
    return step.output(rows, layout, lengths=lengths, causes=causes)


def _concatenated(
    shapes: Sequence[Sequence[Length | None] | None], axis: int
) -> list[Length | None] | None:
    """Return the lengths of tensors one behind the other; None if not known."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    lengths = [
        next((length for length in each if length is not None), None)
        for each in zip(*known, strict=True)
    ]
    total: Length | None = 0
    for shape in known:
        part = shape[axis]
        total = None if total is None or part is None else total + part
    lengths[axis] = total
    return lengths


@rule("ConcatOffset")
def _concat_offset(step: Step) -> Value:
    numbers = [each.numbers for each in step.inputs if each.numbers is not None]
    if len(numbers) < len(step.inputs):
        return step.output(None)
    along, *shapes = numbers
    axis = int(along.item())
    offset = constant([0] * shapes[step.number].size)
    offset[axis] = sum((each[axis] for each in shapes[: step.number]), 0)
    return of_numbers(step, offset)


@rule("Split", "SplitV")
def _split(step: Step) -> Value:
    is_even = step.op.type == "Split"
    value, along = step.inputs[is_even], step.inputs[0 if is_even else 2]
    if value.lengths is None:
        return step.unknown()
    axis = axis_from(along, len(value.lengths))
    if axis is None:
        return step.unknown()
    parts = len(step.op.outputs)
    if value.axis == axis and parts > 1:
        return step.mixed("takes the rows of a batch apart")
    lengths = list(value.lengths)
    length = lengths[axis]
    lengths[axis] = length // parts if is_even and length is not None else None
    return step.like(value, lengths)


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad(step: Step) -> Value:
    value, paddings, *filler = step.inputs
    if have_rows([paddings, *filler]) or value.lengths is None:
        return step.unknown()
    numbers = paddings.numbers
    if value.axis is not None and (
        numbers is None or any(n != 0 for n in numbers[value.axis].ravel())
    ):
        why = "puts other entries before or behind the rows"
        return step.mixed(why, is_certain=numbers is not None)
    if numbers is None or step.op.type == "MirrorPadGrad":
        return step.like(value, [None] * len(value.lengths))
    lengths = [
        None if n is None else n + before + behind
        for n, (before, behind) in zip(value.lengths, numbers, strict=True)
    ]
    return step.like(value, lengths)


@rule("OneHot")
def _one_hot(step: Step) -> Value:
    indices, depth, *others = step.inputs
    if have_rows([depth, *others]) or indices.lengths is None:
        return step.unknown()
    axis = step.attr("axis") % (len(indices.lengths) + 1)
    lengths = list(indices.lengths)
    lengths.insert(axis, None if depth.numbers is None else depth.numbers.item())
    rows = indices.axis
    if rows is not None and rows >= axis:
        rows += 1
    return step.output(rows, indices.layout, lengths=lengths)


@rule("MatrixDiagV3", "MatrixDiag", "MatrixDiagV2")
def _matrix_diag(step: Step) -> Value:
    value, *others = step.inputs
    diagonals = others[0].numbers if others else None
    # Several diagonals make an axis of them.
    is_one = not others or (diagonals is not None and diagonals.size == 1)
    is_along = value.from_end is not None and value.from_end >= (-1 if is_one else -2)
    if is_along or have_rows(others):
        return step.unknown()
    return step.like(value)
