"""Entries that are put into tensors by their numbers."""

from tfdp.checks.bounds import own_entries, own_rows
from tfdp.checks.node import ANY, COUNTS, Node, depth_of, lengths_from, rule
from tfdp.checks.sizes import Size
from tfdp.checks.values import PLAIN, Layout, Value, causes_of, have_rows


@rule(
    *("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub"),
    *("TensorScatterMax", "TensorScatterMin"),
    rows_in=ANY,
)
def _put_into(node: Node) -> Value:
    tensor, indices, updates = node.inputs
    own = own_rows(node, 1) if tensor[:2] == (0, PLAIN) else None
    if own is not None and _are_all_or_in(updates, own[0]):
        causes = tensor.causes | updates.causes | own[1]
        return node.like(Value(0, PLAIN, tensor.lengths), causes)
    if have_rows([indices]):
        return node.unknown()
    # Each index is about so many of the first axes, in place of which updates have those
    # of the indices.
    depth, more = depth_of(indices), len(indices.shape) - 1
    places = set()
    if tensor.axis is not None:
        places.add((tensor.axis, tensor.layout))
    if updates.axis is not None:
        axis = updates.axis - more + depth if updates.axis >= more else -1
        places.add((axis, updates.layout))
    if not places:
        return node.free(tensor.lengths)
    (axis, layout), *others = places
    if others or axis < depth:
        return node.mixed("puts rows where numbers say", is_certain=False)
    return node.like(Value(axis, layout, tensor.lengths))


@rule("ScatterNd", rows_in=ANY)
def _put_into_zeros(node: Node) -> Value:
    indices, updates, shape = node.inputs
    if have_rows([shape]):
        return node.unknown()
    lengths = lengths_from(shape)
    own = own_rows(node, 0) if lengths[0] == node.of_rows(PLAIN) else None
    if own is not None and _are_all_or_in(updates, own[0]):
        return node.like(Value(0, PLAIN, lengths), updates.causes | own[1])
    flat = own_entries(node, 0, lengths[0]) if depth_of(indices) == 1 else None
    if flat is not None:
        layout, causes = flat
        return node.like(Value(0, layout, lengths), updates.causes | causes)
    if have_rows([indices]):
        return node.unknown()
    # A shape has no part in what is put.
    causes = causes_of([indices, updates])
    if updates.axis is None:
        # Whose place is among them depends on who else is in the batch.
        if any(isinstance(length, Size) for length in lengths[: depth_of(indices)]):
            causes |= {node.cause(COUNTS, is_certain=False)}
        return node.free(lengths, causes)
    more = len(indices.shape) - 1
    if updates.axis < more:
        return node.mixed("puts rows where numbers say", is_certain=False)
    axis = updates.axis - more + depth_of(indices)
    return node.like(Value(axis, updates.layout, lengths), causes)


def _are_all_or_in(updates: Value, layout: Layout) -> bool:
    """Tell whether entries are free of data, or those of rows that lie as numbers do."""
    return updates[:2] in {(0, layout), (None, PLAIN)}
