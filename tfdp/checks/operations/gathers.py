"""Entries of tensors that are picked by their numbers."""

import tensorflow as tf

from tfdp.checks.bounds import own_bounds, own_entries, own_rows
from tfdp.checks.effects import is_of_data
from tfdp.checks.node import (
    ANY,
    Node,
    axis_from,
    counts_rows,
    depth_of,
    rule,
    static_lengths,
)
from tfdp.checks.values import PLAIN, Layout, NotKnownError, Value, known


@rule("ResourceGather", rows_in=[1])
def _gather_of_variable(node: Node) -> Value:
    _, indices = node.inputs
    if node.attr("batch_dims"):
        return node.unknown()
    rest = known(static_lengths(node.tensor))[len(indices.shape) :]
    return node.like(indices.with_lengths([*indices.shape, *rest]))


@rule("GatherV2", "Gather", rows_in=[0, 1])
def _gather(node: Node) -> Value:
    params, indices, *along = node.inputs
    axis = axis_from(along[0], len(params.shape)) if along else 0
    batch_dims = 0 if node.op.type == "Gather" else node.attr("batch_dims")
    if batch_dims < 0:
        batch_dims += len(indices.shape)
    if params.axis == axis:
        own = None if batch_dims else own_bounds(node, 1, params.layout)
        if own is not None:
            lengths = (*params.shape[:axis], *indices.shape, *params.shape[axis + 1 :])
            rows, layout = indices[:2]
            if rows is None:
                entries = node.entries_of(indices.shape[0])
                if entries is None:
                    raise NotKnownError
                rows, layout = 0, Layout(1, entries)
            causes = params.causes | own.causes
            return node.like(Value(rows + axis, layout, lengths), causes)
        # Rows may pick entries of their own, by numbers that begin where theirs do, and
        # that data say, which may as well lead to others: each row runs by itself then,
        # which is right whatever it picks. Maps over rows take them one after the other.
        is_in_order = counts_rows(indices) and _may_be_of_a_map(node.op.inputs[1].op)
        is_certain = not is_in_order and not is_of_data(node.op.inputs[1].op)
        return node.mixed("picks some rows by their numbers", is_certain=is_certain)
    picked = indices.shape[batch_dims:]
    lengths = (*params.shape[:axis], *picked, *params.shape[axis + 1 :])
    # Where the rows of both are in the result, which must be the same place.
    places = set()
    if params.axis is not None:
        shift = len(picked) - 1 if params.axis > axis else 0
        places.add((params.axis + shift, params.layout))
    if indices.axis is not None:
        shift = axis - batch_dims if indices.axis >= batch_dims else 0
        places.add((indices.axis + shift, indices.layout))
    if len(places) > 1:
        return node.mixed("lets each row pick entries of all others", is_certain=False)
    place, layout = next(iter(places), (None, PLAIN))
    return node.like(Value(place, layout, lengths))


@rule("GatherNd", "ResourceGatherNd", rows_in=ANY)
def _gather_nd(node: Node) -> Value:
    params, indices = node.inputs
    own = own_rows(node, 1) if params[:2] == (0, PLAIN) else None
    if own is not None:
        layout, causes = own
        lengths = indices.shape[:-1] + params.shape[depth_of(indices) :]
        return node.like(Value(0, layout, lengths), params.causes | causes)
    if params.axis is not None:
        if params.lengths is not None and indices.axis is None and indices.lengths:
            depth = indices.lengths[-1]
            if isinstance(depth, int) and params.axis >= depth:
                rows = params.axis - depth + len(indices.lengths) - 1
                return node.like(Value(rows, params.layout))
        return node.mixed("picks some rows by their numbers", is_certain=False)
    if indices.from_end == -1:
        return node.unknown()
    rest = static_lengths(node.tensor)
    if indices.lengths is None or rest is None:
        return node.rows_of(indices)
    before = indices.lengths[:-1]
    return node.like(indices.with_lengths([*before, *rest[len(before) :]]))


@rule(
    *("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin"),
    *("UnsortedSegmentProd",),
    rows_in=[0, 1],
)
def _segments(node: Node) -> Value:
    value, places, number = node.inputs
    depth = len(places.shape)
    # The first axes become one, of which each segment has an entry.
    length = None if number.numbers is None else number.numbers.item()
    if places.axis is None and (value.axis is None or value.axis >= depth):
        return node.like(value.dropped(range(depth)).inserted(0, length))
    own = own_entries(node, 1, length)
    if own is None:
        # Of rows whose number is static, numbers for them may be free of data.
        is_certain = node.rows is None and places.axis is None
        return node.mixed("puts rows together by their numbers", is_certain=is_certain)
    layout, causes = own
    lengths = (length, *value.shape[depth:])
    return node.like(Value(0, layout, lengths), value.causes | causes)


def _may_be_of_a_map(op: tf.Operation) -> bool:
    """Tell whether numbers go on one by one, or are zero, as those of maps over rows."""
    # These are in loops, where nobody knows their bounds.
    while op.type in _PASSED_ON:
        op = op.inputs[_PASSED_ON[op.type]].op
    return str(op.type) == "Range"


# By the operation: which input it hands on, at least at times.
_PASSED_ON = {"Identity": 0, "Cast": 0, "SelectV2": 1}
