"""Entries that are put into tensors by their numbers."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfdp._types import Array, Tensor
from tfdp.checks.node import ANY, Node, lengths_from, rule
from tfdp.checks.values import PLAIN, NotKnownError, Value, causes_of, have_rows
from tfdp.rules.made import again_on


@rule(
    *("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub"),
    *("TensorScatterMax", "TensorScatterMin"),
    rows_in=ANY,
)
def _put_into(node: Node) -> Value:
    tensor, indices, updates = node.inputs
    if have_rows([indices]):
        return node.unknown()
    # Each index is about so many of the first axes, in place of which updates have those
    # of the indices.
    depth, more = _depth(indices), len(indices.shape) - 1
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
    are_rows = all(each[:2] in {(0, PLAIN), (None, PLAIN)} for each in node.inputs)
    if are_rows and lengths[0] == node.of_rows(PLAIN) and _are_own(node.op):
        # The numbers of the rows say nothing but where they are.
        return node.like(Value(0, PLAIN, lengths), updates.causes)
    if have_rows([indices]):
        return node.unknown()
    # A shape has no part in what is put.
    causes = causes_of([indices, updates])
    if updates.axis is None:
        return node.free(lengths, causes)
    more = len(indices.shape) - 1
    if updates.axis < more:
        return node.mixed("puts rows where numbers say", is_certain=False)
    axis = updates.axis - more + _depth(indices)
    return node.like(Value(axis, updates.layout, lengths), causes)


def _depth(indices: Value) -> int:
    depth = indices.shape[-1]
    if not isinstance(depth, int):
        raise NotKnownError
    return depth


def _are_own(op: tf.Operation) -> bool:
    # `tf.range(rows)[:, None] * [1, 0, 0] + [0, i, j]`: each row puts entries into itself
    # alone, all in the same places.
    indices, _, shape = op.inputs
    found = None
    if shape.op.type == "Pack":
        found = _of_own_place(indices, shape.op.inputs[0])
    if found is None:
        return False
    times, plus = found
    is_own_row = np.all(times[..., 0] == 1) and np.all(plus[..., 0] == 0)
    return bool(is_own_row and np.all(times[..., 1:] == 0))


# Row r of a tensor is `times * r + plus`: two arrays of the shape of a row.
_OfPlace: TypeAlias = tuple[Array, Array]


def _of_own_place(tensor: Tensor, rows: Tensor) -> _OfPlace | None:
    """Say what a tensor with rows on its first axis makes of their places, if it is known.

    Args:
        tensor: Of whole numbers.
        rows: How many rows there are.

    Returns:
        See `_OfPlace`; None if it is not known.
    """
    op = tensor.op
    describe = _OF_PLACES.get(op.type)
    if describe is None or tensor.dtype not in {tf.int32, tf.int64}:
        return None
    return describe(op, rows)


def _range(op: tf.Operation, rows: Tensor) -> _OfPlace | None:
    start, limit, step = op.inputs
    is_own = limit is rows and _constant(start) == 0 and _constant(step) == 1
    return (np.array(1), np.array(0)) if is_own else None


def _expanded(op: tf.Operation, rows: Tensor) -> _OfPlace | None:
    found, axis = _of_own_place(op.inputs[0], rows), _constant(op.inputs[1])
    if found is None or axis is None or axis < 1:
        return None
    times, plus = (np.expand_dims(each, int(axis) - 1) for each in found)
    return times, plus


def _multiplied(op: tf.Operation, rows: Tensor) -> _OfPlace | None:
    found, factor = _of_own_place(op.inputs[0], rows), _constant(op.inputs[1])
    if found is None or factor is None or factor.ndim > found[0].ndim:
        return None
    return found[0] * factor, found[1] * factor


def _added(op: tf.Operation, rows: Tensor) -> _OfPlace | None:
    first, second = (_of_own_place(each, rows) for each in op.inputs)
    if first is None or second is None or first[0].ndim != second[0].ndim:
        return None
    return first[0] + second[0], first[1] + second[1]


def _tiled(op: tf.Operation, rows: Tensor) -> _OfPlace | None:
    value, times = _constant(op.inputs[0]), op.inputs[1].op
    is_of_rows = times.type == "Pack" and times.inputs[0] is rows
    if value is None or not is_of_rows or value.shape[0] != 1:
        return None
    if any(_constant(each) != 1 for each in times.inputs[1:]):
        return None
    return np.zeros_like(value[0]), value[0]


_OF_PLACES: dict[str, Callable[[tf.Operation, Tensor], _OfPlace | None]] = {
    "AddV2": _added,
    "Cast": lambda op, rows: _of_own_place(op.inputs[0], rows),
    "ExpandDims": _expanded,
    "Identity": lambda op, rows: _of_own_place(op.inputs[0], rows),
    "Mul": _multiplied,
    "Range": _range,
    "Tile": _tiled,
}


def _constant(tensor: Tensor) -> Array | None:
    """Compute what is made of constants alone; None of others."""
    op = tensor.op
    if op.type == "Const":
        value: Array = tf.make_ndarray(op.get_attr("value"))
        return value
    if not op.inputs or op.op_def.is_stateful or len(op.outputs) != 1:
        return None
    before = [_constant(each) for each in op.inputs]
    if any(each is None for each in before):
        return None
    with tf.init_scope():
        return np.asarray(again_on(op, list(map(tf.constant, before)), tf.float64))
