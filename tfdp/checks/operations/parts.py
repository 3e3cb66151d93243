"""Operations that take tensors apart, or put them together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdp.checks.operations.elementwise import joined
from tfdp.checks.sizes import (
    Length,
    Size,
    constant,
    is_fixed,
)
from tfdp.checks.step import (
    Step,
    broadcast,
    is_same_length,
    length_at,
    lengths_from,
    of_numbers,
    rule,
    static_lengths,
)
from tfdp.checks.values import PLAIN, Cause, Value


@rule("Pack")
def _pack(step: Step) -> Value:
    first = next((v for v in step.inputs if v.lengths is not None), None)
    if first is None or first.lengths is None:
        return step.unknown()
    axis = step.attr("axis") % (len(first.lengths) + 1)
    value = joined(step, step.inputs)
    lengths = broadcast([each.lengths for each in step.inputs])
    with_rows = [each for each in step.inputs if each.axis is not None]
    if len({(each.axis, each.layout) for each in with_rows}) > 1:
        return value
    if lengths is not None:
        lengths = [*lengths[:axis], len(step.inputs), *lengths[axis:]]
    if not with_rows:
        return step.output(None, lengths=lengths)
    rows = with_rows[0].axis
    assert rows is not None  # noqa: S101
    return step.output(rows + (rows >= axis), with_rows[0].layout, lengths=lengths)


@rule("Unpack")
def _unpack(step: Step) -> list[Value]:
    value = step.inputs[0]
    outputs = range(len(step.op.outputs))
    if value.lengths is None:
        return [step.unknown(n) for n in outputs]
    axis = step.attr("axis") % len(value.lengths)
    if value.numbers is not None:
        parts = np.moveaxis(value.numbers, axis, 0)
        return [of_numbers(step, np.asarray(parts[n], object), n) for n in outputs]
    if value.axis == axis:
        why = "takes the rows of a batch apart"
        return [step.mixed(why, number=n) for n in outputs]
    rows = value.axis
    if rows is not None and rows > axis:
        rows -= 1
    lengths = [*value.lengths[:axis], *value.lengths[axis + 1 :]]
    return [step.output(rows, value.layout, lengths=lengths, number=n) for n in outputs]


@rule("ConcatV2")
def _concat(step: Step) -> Value:
    *values, along = step.inputs
    causes = frozenset[Cause]().union(*(each.causes for each in values))
    if along.numbers is None or values[0].lengths is None:
        return step.unknown()
    axis = int(along.numbers.ravel()[0]) % len(values[0].lengths)
    with_rows = [each for each in values if each.axis is not None]
    lengths = None
    if all(each.lengths is not None for each in values):
        lengths = list(values[0].lengths)
        parts = [(each.lengths or ())[axis] for each in values]
        total: Any = 0
        for part in parts:
            total = None if total is None or part is None else total + part
        lengths[axis] = total
        for position in range(len(lengths)):
            if position != axis and lengths[position] is None:
                known = [(v.lengths or ())[position] for v in values]
                lengths[position] = next((n for n in known if n is not None), None)
    if not with_rows:
        return step.output(None, lengths=lengths, causes=causes)
    if len({(each.axis, each.layout) for each in with_rows}) > 1:
        return step.mixed("joins tensors whose rows are on different axes")
    if with_rows[0].axis == axis:
        others = [each for each in values if length_at(each, axis) != 0]
        if len(others) == 1:
            only = others[0]
            return step.output(only.axis, only.layout, lengths=lengths, causes=causes)
        return step.mixed("puts other entries between or behind the rows")
    return step.output(
        with_rows[0].axis, with_rows[0].layout, lengths=lengths, causes=causes
    )


@rule("ConcatOffset")
def _concat_offset(step: Step) -> list[Value]:
    along, *shapes = step.inputs
    outputs = range(len(step.op.outputs))
    numbers = [each.numbers for each in shapes if each.numbers is not None]
    if along.numbers is None or len(numbers) < len(shapes):
        return [step.output(None, number=n) for n in outputs]
    axis = int(along.numbers.item())
    offsets, total = [], 0
    for each in numbers:
        offset = constant(np.zeros(each.shape, int))
        offset[axis] = total
        offsets.append(offset)
        total = total + each[axis]
    return [of_numbers(step, each, n) for n, each in enumerate(offsets)]


@rule("Split", "SplitV")
def _split(step: Step) -> list[Value]:
    if step.op.type == "Split":
        along, value = step.inputs
    else:
        value, _, along = step.inputs
    outputs = range(len(step.op.outputs))
    if along.numbers is None or value.lengths is None:
        return [step.unknown(n) for n in outputs]
    axis = int(along.numbers.ravel()[0]) % len(value.lengths)
    if value.axis == axis and len(outputs) > 1:
        why = "takes the rows of a batch apart"
        return [step.mixed(why, number=n) for n in outputs]
    lengths: list[Any] = list(value.lengths)
    lengths[axis] = None
    if step.op.type == "Split" and value.lengths[axis] is not None:
        lengths[axis] = value.lengths[axis] // len(outputs)  # type: ignore[operator]
    return [
        step.output(value.axis, value.layout, lengths=lengths, number=n)
        for n in outputs
    ]


@rule("Slice")
def _slice(step: Step) -> Value:
    value, begin, size = step.inputs
    if begin.axis is not None or size.axis is not None:
        return step.mixed("takes a part that depends on rows")
    if value.lengths is None:
        return step.unknown()
    if begin.numbers is None or size.numbers is None:
        if value.axis is not None:
            return step.mixed("takes a part that is not known", is_certain=False)
        return step.output(None)
    lengths = [
        _sliced(*each)
        for each in zip(
            value.lengths, begin.numbers.ravel(), size.numbers.ravel(), strict=True
        )
    ]
    if value.axis is None:
        # Which part is taken may count rows.
        return step.output(None, lengths=lengths)
    if not is_same_length(lengths[value.axis], value.lengths[value.axis]):
        return step.mixed("takes some of the rows")
    elsewhere = [
        np.delete(numbers.ravel(), value.axis)
        for numbers in (begin.numbers, size.numbers)
    ]
    causes = value.causes if all(map(is_fixed, elsewhere)) else step.causes
    return step.output(value.axis, value.layout, lengths=lengths, causes=causes)


def _sliced(length: Length | None, begin: Any, size: Any) -> Any:
    """Return the length of a part."""
    if isinstance(size, Size) or size != -1:
        return size
    return None if length is None else length - begin


class _Index(NamedTuple):
    """One entry of a strided slice.

    Attributes:
        axis: The first axis of the tensor that it is about.
        number: How many axes it keeps as they are; None if it takes a part of one.
        is_new: Whether it makes a new axis.
        is_dropped: Whether it drops the axis.
        takes_all: Whether it takes all of the axis; None if that is not known.
        length: Of the part; None if that is not known.
    """

    axis: int
    number: int | None = None
    is_new: bool = False
    is_dropped: bool = False
    takes_all: bool | None = True
    length: Length | None = None


def _indices(
    step: Step, lengths: Sequence[Length | None], indices: Sequence[Value]
) -> list[_Index] | None:
    """Describe the entries of a strided slice; None if their number is not known."""
    masks = {
        name: step.attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    shape = step.op.inputs[1].shape
    if shape.rank != 1 or shape[0] is None:
        return None
    entries = range(shape[0])
    given = sum(
        not (masks["ellipsis"] | masks["new_axis"]) >> entry & 1 for entry in entries
    )
    found: list[_Index] = []
    axis = 0
    for entry in entries:
        has = {name: bool(mask >> entry & 1) for name, mask in masks.items()}
        if has["ellipsis"]:
            found.append(_Index(axis, len(lengths) - given))
            axis += len(lengths) - given
        elif has["new_axis"]:
            found.append(_Index(axis, is_new=True))
        else:
            part = _part(lengths[axis], [_at(each, entry) for each in indices], has)
            found.append(part._replace(axis=axis))
            axis += 1
    return [*found, _Index(axis, len(lengths) - axis)]


def _at(value: Value, entry: int) -> Any:
    return None if value.numbers is None else value.numbers.ravel()[entry]


def _part(length: Length | None, bounds: list[Any], has: dict[str, bool]) -> _Index:
    """Describe what is taken of one axis, from begin, end and stride."""
    begin, end, stride = bounds
    if has["shrink_axis"]:
        return _Index(0, is_dropped=True, takes_all=False)
    if stride is None or (begin is None and not has["begin"]):
        return _Index(0, takes_all=None)
    if end is None and not has["end"]:
        return _Index(0, takes_all=None)
    from_begin = has["begin"] or is_same_length(begin, 0)
    to_end = has["end"] or is_same_length(end, length)
    if from_begin and to_end and is_same_length(stride, 1):
        return _Index(0, length=length)
    numbers = (length, 0 if has["begin"] else begin, 0 if has["end"] else end, stride)
    if any(number is None or isinstance(number, Size) for number in numbers):
        return _Index(0, takes_all=False)
    part = slice(
        None if has["begin"] else int(begin), None if has["end"] else int(end), stride
    )
    assert isinstance(length, int)  # noqa: S101
    return _Index(0, takes_all=False, length=len(range(*part.indices(length))))


def _origins(found: list[_Index]) -> list[tuple[int | None, _Index]]:
    """Return for each axis of a part the one that it comes from; None for new ones."""
    origins: list[tuple[int | None, _Index]] = []
    for index in found:
        if index.is_new:
            origins.append((None, index))
        elif index.number is not None:
            origins += [(index.axis + n, index) for n in range(index.number)]
        elif not index.is_dropped:
            origins.append((index.axis, index))
    return origins


def _about(found: list[_Index], axis: int) -> _Index:
    """Return the entry that says what happens to an axis."""
    return next(
        index
        for index in found
        if not index.is_new
        and index.axis <= axis < index.axis + (index.number or index.number is None)
    )


def _are_fixed(found: list[_Index], indices: Sequence[Value], axis: int) -> bool:
    """Tell whether no number counts rows but those for the axis of the rows."""
    for each in indices:
        if each.numbers is None:
            return False
        for number, index in zip(each.numbers.ravel(), found, strict=False):
            if isinstance(number, Size) and (
                index.is_new or index.number is not None or index.axis != axis
            ):
                return False
    return True


@rule("StridedSlice")
def _strided_slice(step: Step) -> Value:
    value, *indices = step.inputs
    if any(each.axis is not None for each in indices):
        return step.mixed("takes a part that depends on rows")
    found = None
    if value.lengths is not None:
        found = _indices(step, value.lengths, indices)
    if value.lengths is None or found is None:
        return step.unknown()
    origins = _origins(found)
    if value.axis is not None and not (about := _about(found, value.axis)).takes_all:
        is_certain = about.takes_all is not None
        return step.mixed("takes some of the rows", is_certain=is_certain)
    axes = [axis for axis, _ in origins]
    rows = None if value.axis is None else axes.index(value.axis)
    lengths = [
        1
        if axis is None
        else (index.length if index.number is None else value.lengths[axis])
        for axis, index in origins
    ]
    # Of other axes than that of the rows, which part is taken may count rows.
    is_fixed_part = value.axis is not None and _are_fixed(found, indices, value.axis)
    causes = value.causes if is_fixed_part else step.causes
    return step.output(rows, value.layout, lengths=lengths, causes=causes)


@rule("StridedSliceGrad")
def _strided_slice_grad(step: Step) -> Value:
    shape, *indices, value = step.inputs
    lengths = lengths_from(shape)
    if lengths is None or any(each.axis is not None for each in indices):
        return step.unknown()
    found = _indices(step, lengths, indices)
    if found is None:
        return step.unknown()
    if value.axis is None:
        for counted, length in enumerate(lengths):
            if isinstance(length, Size) and not _about(found, counted).takes_all:
                return step.mixed("puts entries to some of the rows")
        return step.output(None, lengths=lengths)
    origins = _origins(found)
    axis, index = origins[value.axis]
    if axis is None or not index.takes_all:
        is_certain = index.takes_all is not None
        return step.mixed("puts rows to others", is_certain=is_certain)
    causes = value.causes if _are_fixed(found, indices, axis) else step.causes
    return step.output(axis, value.layout, lengths=lengths, causes=causes)


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad(step: Step) -> Value:
    value, paddings, *filler = step.inputs
    if any(each.axis is not None for each in (paddings, *filler)):
        return step.unknown()
    if value.lengths is None:
        return step.unknown()
    if value.axis is not None and (
        paddings.numbers is None
        or any(n != 0 for n in paddings.numbers[value.axis].ravel())
    ):
        return step.mixed(
            "puts other entries before or behind the rows",
            is_certain=paddings.numbers is not None,
        )
    lengths: list[Any] = [None] * len(value.lengths)
    if paddings.numbers is not None and step.op.type != "MirrorPadGrad":
        lengths = [
            None if n is None else n + both[0] + both[1]
            for n, both in zip(value.lengths, paddings.numbers, strict=True)
        ]
    return step.output(value.axis, value.layout, lengths=lengths)


@rule("OneHot")
def _one_hot(step: Step) -> Value:
    indices, *others = step.inputs
    if any(each.axis is not None for each in others) or indices.lengths is None:
        return step.unknown()
    rank = len(indices.lengths)
    axis = step.attr("axis")
    axis = rank if axis == -1 else axis
    depth = others[0].numbers
    lengths = [
        *indices.lengths[:axis],
        None if depth is None else depth.item(),
        *indices.lengths[axis:],
    ]
    rows = indices.axis
    if rows is not None and rows >= axis:
        rows += 1
    return step.output(rows, indices.layout, lengths=lengths)


@rule("ResourceGather")
def _gather_of_variable(step: Step) -> Value:
    _, indices = step.inputs
    rest = static_lengths(step.op.outputs[0])
    if step.attr("batch_dims") or indices.lengths is None or rest is None:
        return step.unknown()
    lengths = [*indices.lengths, *rest[len(indices.lengths) :]]
    return step.output(indices.axis, indices.layout, lengths=lengths)


@rule("GatherV2", "Gather")
def _gather(step: Step) -> Value:
    params, indices, *along = step.inputs
    batch_dims = 0 if step.op.type == "Gather" else step.attr("batch_dims")
    axis = 0
    if along:
        if along[0].numbers is None:
            return step.unknown()
        axis = int(along[0].numbers.ravel()[0])
    if params.lengths is None or indices.lengths is None:
        return step.unknown()
    axis %= len(params.lengths)
    if batch_dims < 0:
        batch_dims += len(indices.lengths)
    lengths = [
        *params.lengths[:axis],
        *indices.lengths[batch_dims:],
        *params.lengths[axis + 1 :],
    ]
    # Where the rows of both are in the result; None where they are picked.
    places = {
        (place, each.layout)
        for each, place in (
            (params, _place_of_params(params, axis, indices, batch_dims)),
            (indices, _place_of_indices(indices, axis, batch_dims)),
        )
        if each.axis is not None
    }
    if params.axis == axis:
        return step.mixed("picks some rows by their numbers")
    if len(places) > 1:
        return step.mixed("lets each row pick entries of all others")
    place, layout = next(iter(places), (None, PLAIN))
    return step.output(place, layout, lengths=lengths)


def _place_of_params(
    params: Value, axis: int, indices: Value, batch_dims: int
) -> int | None:
    if params.axis is None or params.axis < axis:
        return params.axis
    assert indices.lengths is not None  # noqa: S101
    return params.axis + len(indices.lengths) - batch_dims - 1


def _place_of_indices(indices: Value, axis: int, batch_dims: int) -> int | None:
    if indices.axis is None or indices.axis < batch_dims:
        return indices.axis
    return axis + indices.axis - batch_dims


@rule("GatherNd", "ResourceGatherNd")
def _gather_nd(step: Step) -> Value:
    params, indices = step.inputs
    if params.axis is not None:
        if params.lengths is not None and indices.axis is None:
            depth = (indices.lengths or (None,))[-1]
            if isinstance(depth, int) and params.axis >= depth:
                rows = params.axis - depth + len(indices.lengths or ()) - 1
                return step.output(rows, params.layout)
        return step.mixed("picks some rows by their numbers", is_certain=False)
    if indices.axis is not None and (indices.from_end in {None, -1}):
        return step.unknown()
    lengths = None
    rest = static_lengths(step.op.outputs[0])
    if indices.lengths is not None and rest is not None:
        own = indices.lengths[:-1]
        lengths = [*own, *rest[len(own) :]]
    return step.output(indices.axis, indices.layout, lengths=lengths)


def _is_one(diagonals: Value) -> bool:
    return diagonals.numbers is not None and diagonals.numbers.size == 1


@rule("MatrixDiagV3", "MatrixDiag", "MatrixDiagV2")
def _matrix_diag(step: Step) -> Value:
    value, *others = step.inputs
    # Several diagonals make an axis of them.
    number = 1 if not others or _is_one(others[0]) else 2
    is_along = value.from_end is not None and value.from_end >= -number
    if is_along or any(each.axis is not None for each in others):
        return step.unknown()
    return step.output(value.axis, value.layout)
