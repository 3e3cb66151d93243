"""Parts of tensors that are cut out by where they begin and end."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfdp.checks.node import (
    Node,
    is_same_length,
    lengths_from,
    rule,
)
from tfdp.checks.open_lengths import Open, may_be_negative
from tfdp.checks.sizes import Length, Size, is_fixed, slice_masks
from tfdp.checks.values import Layout, Value, fixed, known

_PART_BY_ROWS = "takes a part that depends on rows"


class _Taken(NamedTuple):
    """What a strided slice takes of one axis.

    Attributes:
        axis: The axis of the tensor; None for one that the slice makes.
        length: Of what is taken; None if not known.
        takes_all: Whether that is all of the axis; None if not known.
        is_dropped: Whether the part does not have the axis any more.
        entry: Which entry of the slice says so; None if none names this axis.
        begin: Where a part begins that has all that lies behind, up to its end.
    """

    axis: int | None
    length: Length | None = None
    takes_all: bool | None = True
    is_dropped: bool = False
    entry: int | None = None
    begin: Length | None = None


@rule("Slice", otherwise=_PART_BY_ROWS)
def _slice(node: Node) -> Value:
    value, begin, size = node.inputs
    lengths = value.shape
    if begin.numbers is None or size.numbers is None:
        if value.axis is not None:
            return node.mixed("takes a part that is not known", is_certain=False)
        return node.free()
    firsts = begin.numbers.ravel()
    numbers = zip(firsts, size.numbers.ravel(), strict=True)
    parts = [_sliced(n, *each) for n, each in zip(lengths, numbers, strict=True)]
    found = [
        _Taken(
            axis,
            part,
            is_same_length(part, lengths[axis]),
            entry=axis,
            begin=firsts[axis],
        )
        for axis, part in enumerate(parts)
    ]
    return _cut(node, value, found, [begin, size])


def _sliced(length: Length | None, begin: Length, size: Length) -> Length | None:
    """Return the length of a part."""
    if may_be_negative(size):
        # It may be -1, which stands for all that is left.
        return None
    if size != -1:
        return size
    return None if length is None else length - begin


def _taken(
    node: Node, lengths: Sequence[Length | None], indices: Sequence[Value]
) -> list[_Taken]:
    """Say what is taken of each axis."""
    masks = slice_masks(node.op, known(node.op.inputs[1].shape[0]))
    whole = [_Taken(axis, length) for axis, length in enumerate(lengths)]
    # An ellipsis stands for all axes that no entry names.
    named = sum(not (has["ellipsis"] or has["new_axis"]) for has in masks)
    found: list[_Taken] = []
    axis = 0
    for entry, has in enumerate(masks):
        if has["ellipsis"]:
            past = axis + len(lengths) - named
            found += whole[axis:past]
            axis = past
        elif has["new_axis"]:
            found.append(_Taken(None, 1))
        else:
            part = _part(lengths[axis], [_at(each, entry) for each in indices], has)
            found.append(part._replace(axis=axis, entry=entry))
            axis += 1
    return found + whole[axis:]


def _at(value: Value, entry: int) -> Length | None:
    return None if value.numbers is None else value.numbers.ravel()[entry]


def _part(
    length: Length | None, given: list[Length | None], has: dict[str, bool]
) -> _Taken:
    """Say what is taken of one axis, from begin, end and stride."""
    if has["shrink_axis"]:
        return _Taken(None, takes_all=False, is_dropped=True)
    begin = 0 if has["begin"] else given[0]
    end = length if has["end"] else given[1]
    stride = given[2]
    if begin is None or stride is None or (end is None and not has["end"]):
        return _Taken(None, takes_all=None)
    to_end = has["end"] or is_same_length(end, length)
    if begin == 0 and to_end and stride == 1:
        return _Taken(None, length)
    bounds = [length, begin, end, stride]
    numbers = [number for number in bounds if isinstance(number, int)]
    if len(numbers) == len(bounds):
        own, first, stop, step = numbers
        part = slice(
            None if has["begin"] else first, None if has["end"] else stop, step
        )
        places = range(*part.indices(own))
        at = places.start if step == 1 else None
        return _Taken(None, len(places), takes_all=False, begin=at)
    if any(isinstance(number, Open) for number in bounds):
        shown = (None if has["begin"] else begin, None if has["end"] else end, stride)
        return _Taken(None, _of_open(length, *shown), takes_all=False)
    if stride != 1:
        return _Taken(None, takes_all=False)
    past = length if to_end else end
    between = None if past is None else past - begin
    return _Taken(None, between, takes_all=False, begin=begin)


def _of_open(
    length: Length | None, begin: Length | None, end: Length | None, stride: Length
) -> Length | None:
    """Return the length of a part where it depends on how long the axis is.

    Args:
        length: Of the axis.
        begin: Where the part begins, None for the first entry, by the stride.
        end: Where it ends, None behind the last.
        stride: Between two entries.
    """
    if length is None or any(isinstance(n, Size) for n in (length, begin, end, stride)):
        return None
    if begin is None and end is None and stride in (1, -1):
        return length
    if stride == 1 and isinstance(length, Open):
        if begin in (None, 0) and isinstance(end, int):
            return _first(length, end) if end >= 0 else _rest(length, -end)
        if end is None and isinstance(begin, int):
            return _rest(length, begin) if begin >= 0 else _first(length, -begin)
    return Open.unknown("part", length, begin, end, stride)


def _first(length: Open, number: int) -> int | Open:
    """Return how many of the first, or last, entries there are, if an axis has so many."""
    more = length - number
    has_all = more.is_length if isinstance(more, Open) else more >= 0
    return number if has_all else Open.unknown("part", length, number)


def _rest(length: Open, number: int) -> int | Open:
    """Return how many entries there are without so many, if an axis has them."""
    rest = length - _first(length, number)
    return rest.as_length() if isinstance(rest, Open) else rest


@rule("StridedSlice", otherwise=_PART_BY_ROWS)
def _strided_slice(node: Node) -> Value:
    value, *indices = node.inputs
    return _cut(node, value, _taken(node, value.shape, indices), indices)


def _cut(
    node: Node, value: Value, found: Sequence[_Taken], indices: Sequence[Value]
) -> Value:
    """Describe a part of a tensor, from what is taken of each axis."""
    kept = [taken for taken in found if not taken.is_dropped]
    lengths = tuple(taken.length for taken in kept)
    if value.axis is None:
        # Which part is taken may count rows.
        return node.free(lengths)
    of_rows = next(taken for taken in found if taken.axis == value.axis)
    layout = value.layout
    if not of_rows.takes_all:
        times = _times(node, fixed(layout.entries), of_rows)
        if times is None or layout.words or times[1] > fixed(layout.times):
            is_certain = of_rows.takes_all is not None
            return node.mixed("takes some of the rows", is_certain=is_certain)
        layout = layout._replace(times=times[1] - times[0])
    causes = value.causes if _are_fixed(indices, of_rows.entry) else node.causes
    return node.like(Value(kept.index(of_rows), layout, lengths), causes)


def _times(node: Node, entries: int, taken: _Taken) -> tuple[int, int] | None:
    """Say which of several times that all rows come a part has: from the first to before."""
    if taken.begin is None or taken.length is None:
        return None
    first = 0 if taken.begin == 0 else node.entries_of(taken.begin)
    number = node.entries_of(taken.length)
    if first is None or not number:
        return None
    first, number = fixed(first), fixed(number)
    if first < 0 or number < 0:
        return None
    if first % entries or number % entries:
        return None
    return first // entries, (first + number) // entries


def _are_of(layout: Layout, times: tuple[int, int], whole: int) -> bool:
    """Tell whether so many entries of each row are those of `layout`, and more of these."""
    first, past = times
    entries = fixed(layout.entries)
    is_part = past - first == layout.times and past * entries <= whole
    return is_part and not whole % entries and not layout.words


@rule("StridedSliceGrad", rows_in=[4])
def _strided_slice_grad(node: Node) -> Value:
    shape, *indices, value = node.inputs
    lengths = lengths_from(shape)
    found = _taken(node, lengths, indices)
    if value.axis is None:
        counted = [n for n, length in enumerate(lengths) if isinstance(length, Size)]
        if any(taken.axis in counted and not taken.takes_all for taken in found):
            return node.mixed("puts entries to some of the rows")
        return node.free(lengths)
    of_rows = [taken for taken in found if not taken.is_dropped][value.axis]
    layout = value.layout
    if of_rows.axis is None or not of_rows.takes_all:
        times = _times(node, fixed(layout.entries), of_rows)
        whole = None if times is None else node.entries_of(lengths[known(of_rows.axis)])
        if times is None or not whole or not _are_of(layout, times, fixed(whole)):
            is_certain = of_rows.takes_all is not None
            return node.mixed("puts rows to others", is_certain=is_certain)
        # There are zeros beside what is put in.
        layout = layout._replace(times=whole // layout.entries, is_alike=False)
    causes = value.causes if _are_fixed(indices, of_rows.entry) else node.causes
    return node.like(Value(of_rows.axis, layout, lengths), causes)


def _are_fixed(indices: Sequence[Value], entry: int | None) -> bool:
    """Tell whether no number but entry `entry`, that of the row axis, counts rows."""
    about_rows = [] if entry is None else [entry]
    return all(
        each.numbers is not None
        and is_fixed(np.delete(each.numbers.ravel(), about_rows))
        for each in indices
    )
