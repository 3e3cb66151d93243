"""Operations that put tensors together, or take them apart."""

from collections.abc import Sequence

import numpy as np

from tfdp._types import Array
from tfdp.checks.node import (
    ANY,
    NONE,
    Node,
    axis_from,
    broadcast,
    of_numbers,
    rule,
)
from tfdp.checks.open_lengths import Open
from tfdp.checks.operations.elementwise import joined
from tfdp.checks.sizes import Length, Lengths, constant
from tfdp.checks.values import Value, causes_of, known


@rule("Pack", rows_in=ANY)
def _pack(node: Node) -> Value:
    with_rows = [each for each in node.inputs if each.axis is not None]
    if len({(each.axis, each.layout) for each in with_rows}) > 1:
        return joined(node, node.inputs)
    shapes = (each.lengths for each in node.inputs if each.lengths is not None)
    axis = node.attr("axis") % (len(known(next(shapes, None))) + 1)
    one = (with_rows or node.inputs)[0]._replace(lengths=broadcast(node.inputs))
    return node.like(one.inserted(axis, len(node.inputs)))


@rule("Unpack")
def _unpack(node: Node) -> Value:
    value = node.inputs[0]
    axis = node.attr("axis") % len(value.shape)
    if value.numbers is not None:
        part = np.moveaxis(value.numbers, axis, 0)[node.number]
        return of_numbers(node, np.asarray(part, object))
    if value.axis == axis:
        return node.mixed("takes the rows of a batch apart")
    return node.like(value.dropped([axis]))


@rule("ConcatV2", rows_in=ANY)
def _concat(node: Node) -> Value:
    *values, along = node.inputs
    # Numbers that are known have no rows.
    axis = axis_from(along, len(values[0].shape))
    lengths = _concatenated([each.lengths for each in values], axis)
    # Which axis it is says nothing of the rows.
    causes = causes_of(values)
    with_rows = [each for each in values if each.axis is not None]
    if not with_rows:
        return node.free(lengths, causes)
    if len({(each.axis, each.layout) for each in with_rows}) > 1:
        return node.mixed("joins tensors whose rows are on different axes")
    one = with_rows[0]
    if one.axis == axis:
        # With nothing but empty tensors beside them, the rows stay what they are.
        others = [v for v in values if v.lengths is None or v.lengths[axis] != 0]
        has_others = not others or any(each.axis is None for each in others)
        if has_others or one.layout.words:
            return node.mixed("puts other entries between or behind the rows")
        # All rows, and all rows again: views of them, or pairs.
        if len(others) > 1:
            times = one.layout.times * len(others)
            layout = one.layout._replace(times=times, is_alike=False)
            one = one._replace(layout=layout)
    return node.like(one._replace(lengths=lengths), causes)


def _concatenated(shapes: Sequence[Lengths | None], axis: int) -> Lengths | None:
    """Return the lengths of tensors one behind the other; None if not known."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    # Those of other axes are equal, or this fails.
    lengths = [
        min(each, key=lambda length: (length is None, isinstance(length, Open)))
        for each in zip(*known, strict=True)
    ]
    total: Length | None = 0
    for shape in known:
        part = shape[axis]
        total = None if total is None or part is None else total + part
    lengths[axis] = total
    return tuple(lengths)


@rule("ConcatOffset", rows_in=NONE)
def _concat_offset(node: Node) -> Value:
    numbers = [each.numbers for each in node.inputs if each.numbers is not None]
    if len(numbers) < len(node.inputs):
        return node.free()
    along, *shapes = numbers
    axis = int(along.item())
    offset = constant([0] * shapes[node.number].size)
    offset[axis] = sum((each[axis] for each in shapes[: node.number]), 0)
    return of_numbers(node, offset)


@rule("Split", rows_in=[1])
def _split(node: Node) -> Value:
    along, value = node.inputs
    axis = axis_from(along, len(value.shape))
    length = value.shape[axis]
    parts = len(node.op.outputs)
    if value.numbers is not None:
        part = np.split(value.numbers, parts, axis)[node.number]
        return of_numbers(node, part)
    if value.axis == axis and value.layout.times % parts == 0:
        times = value.layout.times // parts
        layout = value.layout._replace(times=times)
        lengths = (*value.shape[:axis], node.of_rows(layout), *value.shape[axis + 1 :])
        return node.like(Value(axis, layout, lengths))
    return _part(node, value, axis, None if length is None else length // parts)


@rule("SplitV")
def _split_by_sizes(node: Node) -> Value:
    value, sizes, along = node.inputs
    axis = axis_from(along, len(value.shape))
    if value.numbers is not None and sizes.numbers is not None:
        return of_numbers(node, _numbers_of_part(node, value, sizes, axis))
    return _part(node, value, axis, None)


def _numbers_of_part(node: Node, value: Value, sizes: Value, axis: int) -> Array:
    """Return what is in one part of a small tensor, given how long the parts are."""
    numbers = known(value.numbers)
    lengths = [int(n) for n in known(sizes.numbers).ravel()]
    if -1 in lengths:
        lengths[lengths.index(-1)] += numbers.shape[axis] - sum(lengths)
    first = sum(lengths[: node.number])
    return numbers.take(range(first, first + lengths[node.number]), axis)


def _part(node: Node, value: Value, axis: int, length: Length | None) -> Value:
    if value.axis == axis and len(node.op.outputs) > 1:
        return node.mixed("takes the rows of a batch apart")
    lengths = list(value.shape)
    lengths[axis] = length
    return node.like(value.with_lengths(lengths))


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad(node: Node) -> Value:
    value, paddings, *_ = node.inputs
    lengths, numbers = value.shape, paddings.numbers
    if value.axis is not None and (
        numbers is None or any(n != 0 for n in numbers[value.axis].ravel())
    ):
        why = "puts other entries before or behind the rows"
        return node.mixed(why, is_certain=numbers is not None)
    if numbers is None or node.op.type == "MirrorPadGrad":
        return node.rows_of(value)
    padded = [
        None if n is None else n + before + behind
        for n, (before, behind) in zip(lengths, numbers, strict=True)
    ]
    return node.like(value.with_lengths(padded))


@rule("OneHot")
def _one_hot(node: Node) -> Value:
    indices, depth, *_ = node.inputs
    axis = node.attr("axis") % (len(indices.shape) + 1)
    length = None if depth.numbers is None else depth.numbers.item()
    return node.like(indices.inserted(axis, length))


@rule("MatrixDiagV3", "MatrixDiag", "MatrixDiagV2")
def _matrix_diag(node: Node) -> Value:
    value, *others = node.inputs
    diagonals = others[0].numbers if others else None
    # Several diagonals make an axis of them.
    is_one = not others or (diagonals is not None and diagonals.size == 1)
    if value.from_end is not None and value.from_end >= (-1 if is_one else -2):
        return node.unknown()
    return node.rows_of(value)


@rule("DenseBincount", rows_in=[0, 2])
def _dense_bincount(node: Node) -> Value:
    value, size, weights = node.inputs
    if len(value.shape) != 2:
        return node.mixed("counts over the rows")
    # Weights are those of each entry, or none.
    with_rows = [each for each in (value, weights) if each.axis is not None]
    if any(each[:2] != with_rows[0][:2] or each.axis != 0 for each in with_rows):
        return node.mixed("counts over the rows")
    lengths = (value.shape[0], None if size.numbers is None else size.numbers.item())
    return node.like((with_rows or node.inputs)[0]._replace(lengths=lengths))
