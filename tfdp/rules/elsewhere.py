"""Gradients of variables that are used elsewhere than in calls that have a rule.

A layer that has layers in it has weights of its own, a matrix is borrowed for logits,
positions are looked up once for all rows. On the graph of the pass such a variable is
followed to where it meets the rows: there, each row gets a copy of its own of what has
been made of the variable, and the gradient of that copy is the row's.
"""

import itertools
import math
import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdp._types import Tensor
from tfdp.rules.filters import depthwise_gradients, filter_gradients
from tfdp.rules.free import COPIES, rows_of_copies
from tfdp.rules.geometry import Geometry
from tfdp.rules.kernels import kernel_term
from tfdp.rules.made import (
    AS_IT_IS,
    ELEMENTWISE,
    again_on,
    lengths_of,
    looks_up_rows,
    term_of_lookup,
    through,
)
from tfdp.rules.places import ROWS_FIRST, Place
from tfdp.rules.terms import OuterProducts, Term
from tfdp.rules.terms.term import FEW_NUMBERS
from tfdp.rules.uses import Followed, NotFollowedError, Use, named

# From the gradients of what a use makes to those of what it has of the variable, each
# row's for itself: (N, ...) -> (N, *shape).
_OfRows = Callable[[Tensor], Tensor]

# What multiplies matrices, and names for which of the two are transposed.
_FLAGS = {
    "MatMul": ("transpose_a", "transpose_b"),
    "BatchMatMulV2": ("adj_x", "adj_y"),
    "BatchMatMulV3": ("adj_x", "adj_y"),
}

# What slides a kernel over rows: which of its inputs are the rows, and the kernel. Only in
# three dimensions a transposed one is left out, which nobody has asked for.
_SLIDING = {
    "Conv2D": (0, 1),
    "Conv3D": (0, 1),
    "Conv2DBackpropInput": (2, 1),
    "DepthwiseConv2dNative": (0, 1),
}


class Met(NamedTuple):
    """What to ask of a use.

    Attributes:
        terms: From the gradient of what the operation makes to terms of the variables.
        rows: A tensor that has the rows.
        place: Where in it.
    """

    terms: Callable[[Tensor], list[Term]]
    rows: Tensor
    place: Place


def met(
    together: Sequence[Followed],
    use: Use,
    rows: int | None,
    place: Place | None,
    *,
    is_recorded: bool,
) -> Met:
    """Say what the gradient of what a use makes adds to those of variables.

    Args:
        together: The variables of which something is used there, and what becomes of them.
        use: The use.
        rows: How many rows there are, None where that is not static.
        place: Where they lie in what it makes, None where that has to be guessed.
        is_recorded: Whether a tape, or a loop that was taken whole, has its gradient.

    Returns:
        What to ask of it.

    Raises:
        NotFollowedError: If nothing is known of the operation.
    """
    op = use.op
    # Of what it does not know, a tape may still tell a part of the gradient.
    if not is_recorded:
        raise NotFollowedError(f"{named(op)}, which no tape has recorded")
    if len(op.outputs) != 1 or use.tensor.shape.rank is None:
        raise NotFollowedError(named(op))
    if op.type == "GatherV2" and use.place == 0:
        return _met_by_lookup(together, use, place or ROWS_FIRST)
    if op.type == "GatherNd" and use.place == 0:
        return _met_by_entries(together, use, place or ROWS_FIRST)
    if op.type in _FLAGS and use.place == 1 and use.tensor.shape.rank == 2:
        return _met_by_matrix(together, use, place)
    if op.type in _SLIDING and use.place == _SLIDING[op.type][1]:
        return _met_by_sliding(together, use, place or ROWS_FIRST)
    of_rows, axis = _of_rows(use, rows, place)
    place = place or Place(axis)
    # These bring the axis to the front; what is left is the order along it.
    on_first = place._replace(axis=0)
    back = through(together, use.tensor)
    return Met(lambda g: back(on_first.rows_first(of_rows(g))), use.output, place)


def _line_of_one(together: Sequence[Followed], use: Use) -> list[tf.Operation] | None:
    """List what makes the tensor of a use of one variable alone; see `line_to`."""
    return together[0].line_to(use.tensor) if len(together) == 1 else None


def _is_own(together: Sequence[Followed], use: Use) -> bool:
    """Tell whether a use has the variable as it is."""
    line = _line_of_one(together, use)
    return line is not None and all(each.type in AS_IT_IS for each in line)


# ------------------------------------------------------------- where it meets the rows


def _of_rows(use: Use, rows: int | None, place: Place | None) -> tuple[_OfRows, int]:
    """Return what takes gradients to those of the rows' copies, and where rows are."""
    op = use.op
    axis = None if place is None else place.axis
    if op.type in COPIES and use.place == 0:
        return _of_copies(use, rows_of_copies(op, rows) if axis is None else axis)
    if op.type == "Einsum":
        return _of_einsum(use, rows, axis)
    # Rows are taken to be on the first axis if nobody knows; `Lengths` checks it.
    axis = axis or 0
    made, given = use.output.shape, use.tensor.shape
    # What is the same for all has no such axis, or 1 there.
    has_room = bool(made.rank and made.rank > axis) and (
        given.rank < made.rank - axis or given[axis - made.rank] == 1
    )
    is_known = op.type in ELEMENTWISE
    if op.type in _FLAGS and op.type != "MatMul":
        is_known = made.rank is not None and axis < made.rank - 2
    if op.type == "BiasAdd":
        is_known = op.get_attr("data_format") == b"NHWC"
    if not is_known or not has_room:
        raise NotFollowedError(named(op))
    return _of_broadcast(use, axis), axis


def _of_broadcast(use: Use, axis: int) -> _OfRows:
    """Do it once more, with a copy for each row in place of one for all."""
    op, tensor = use.op, use.tensor
    missing = use.output.shape.rank - tensor.shape.rank
    lengths = [*[1] * missing, *lengths_of(tensor)]
    before, after = lengths[:axis], lengths[axis + 1 :]

    def of_rows(g: Tensor) -> Tensor:
        copies = tf.reshape(tf.cast(tensor, g.dtype), [*before, 1, *after])
        copies = tf.broadcast_to(copies, [*before, tf.shape(g)[axis], *after])
        inputs = list(op.inputs)
        inputs[use.place] = copies
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(copies)
            made = again_on(op, inputs, g.dtype)
        found = tape.gradient(made, copies, output_gradients=g)
        found = Place(axis).rows_first(found)
        return tf.reshape(found, [-1, *lengths_of(tensor)])

    return of_rows


def _of_einsum(use: Use, rows: int | None, axis: int | None) -> tuple[_OfRows, int]:
    left, made = use.op.get_attr("equation").decode().split("->")
    labels = left.split(",")
    x, output = use.op.inputs[1 - use.place], use.output
    # What an ellipsis of its own stands for may be broadcast.
    if len(labels) != 2 or "." in labels[use.place] or x.shape.rank is None:
        raise NotFollowedError(named(use.op))
    own, other = labels[use.place], labels[1 - use.place]
    if "." in other:
        # Labels in place of the ellipsis, the same in what is made.
        number = x.shape.rank - len(other.replace("...", ""))
        unused = [label for label in string.ascii_letters if label not in left]
        other, made = (
            each.replace("...", "".join(unused[:number])) for each in (other, made)
        )
    row = [
        label
        for place, (label, length) in enumerate(zip(made, output.shape, strict=True))
        if (length == rows if axis is None else place == axis)
        and label in other
        and label not in own
    ]
    # Axes that are summed over alone, or diagonals, are not followed.
    if not row or not set(own) <= set(other + made) or len(set(own)) < len(own):
        raise NotFollowedError(named(use.op))
    equation = f"{other},{made}->{row[0]}{own}"

    def of_rows(g: Tensor) -> Tensor:
        return tf.einsum(equation, tf.cast(x, g.dtype), g)

    return of_rows, made.index(row[0])


def _of_copies(use: Use, axis: int | None) -> tuple[_OfRows, int]:
    """Add up, of each row, what was copied along other axes."""
    made, given = use.output.shape.as_list(), use.tensor.shape.as_list()
    if axis is None or None in made[:axis] + made[axis + 1 :]:
        raise NotFollowedError(named(use.op))
    lengths = [1] * (len(made) - len(given)) + given
    copied = [
        (copies // length, length)
        for place, (copies, length) in enumerate(zip(made, lengths, strict=True))
        if place != axis
    ]
    order = [axis, *(place for place in range(len(made)) if place != axis)]

    def of_rows(g: Tensor) -> Tensor:
        g = tf.reshape(tf.transpose(g, order), [-1, *itertools.chain(*copied)])
        g = tf.reduce_sum(g, list(range(1, 2 * len(copied), 2)))
        return tf.reshape(g, [-1, *given])

    return of_rows, axis


def _met_by_matrix(together: Sequence[Followed], use: Use, place: Place | None) -> Met:
    """Take factors, where the last axis of rows is multiplied by a matrix."""
    op = use.op
    is_transposed, of_matrix = map(op.get_attr, _FLAGS[op.type])
    if is_transposed:
        raise NotFollowedError(named(op))
    x = op.inputs[0]
    sizes = use.tensor.shape[::-1] if of_matrix else use.tensor.shape
    # Positions that became rows are positions again.
    is_flat = x.op.type == "Reshape" and x.op.inputs[0].shape[-1:] == sizes[:1]
    if is_flat and place is None:
        x = x.op.inputs[0]
    if x.shape.rank is None or not use.tensor.shape.is_fully_defined():
        raise NotFollowedError(named(op))
    place = place or ROWS_FIRST
    if place.axis >= x.shape.rank - 1:
        raise NotFollowedError(named(op))
    line = _line_of_one(together, use)
    back: Callable[[Tensor], list[Term]] | None = None
    if line is None or not all(
        each.type in AS_IT_IS or _transposes(each) for each in line
    ):
        back = through(together, use.tensor)
    elif sum(map(_transposes, line)) % 2 == 1:
        of_matrix = not of_matrix

    def terms(g: Tensor) -> list[Term]:
        g = place.rows_first(tf.reshape(g, [*lengths_of(x)[:-1], sizes[1]]))
        of_rows = place.rows_first(x)
        factors = (g, of_rows) if of_matrix else (of_rows, g)
        if back is None:
            return [OuterProducts(together[0].variable, *factors)]
        left, right = (
            tf.reshape(tf.cast(each, g.dtype), [tf.shape(of_rows)[0], -1, size])
            for each, size in zip(factors, use.tensor.shape, strict=True)
        )
        return back(tf.matmul(left, right, transpose_a=True))

    return Met(terms, x, place)


def _met_by_sliding(together: Sequence[Followed], use: Use, place: Place) -> Met:
    """Take a kernel's gradients, where it slides over rows."""
    op, shape = use.op, use.tensor.shape
    x = op.inputs[_SLIDING[op.type][0]]
    padding, layout = (
        op.get_attr(name).decode() for name in ("padding", "data_format")
    )
    shapes = (x.shape[1:], use.output.shape[1:], shape)
    if (
        place.axis
        or layout not in {"NHWC", "NDHWC"}
        or not all(each.is_fully_defined() for each in shapes)
    ):
        raise NotFollowedError(named(op))
    strides, dilations = (
        tuple(op.get_attr(name)[1:-1]) for name in ("strides", "dilations")
    )
    pads = None
    if padding == "EXPLICIT":
        pads, padding = np.reshape(op.get_attr("explicit_paddings"), [-1, 2]), "VALID"
    geometry = Geometry(strides, dilations, padding)
    is_depthwise = op.type == "DepthwiseConv2dNative"
    is_own = _is_own(together, use)
    back = through(together, use.tensor)

    def of_rows(seen: Tensor, g: Tensor) -> Tensor:
        gradients = depthwise_gradients if is_depthwise else filter_gradients
        seen, g = seen[:, None], g[:, None]
        return gradients(seen, g, kernel_shape=tuple(shape), geometry=geometry)

    def terms(g: Tensor) -> list[Term]:
        # Pieces of rows may have become rows: TensorFlow dilates so.
        seen, g = place.rows_first(tf.cast(x, g.dtype)), place.rows_first(g)
        if op.type == "Conv2DBackpropInput":
            # Turned around, inputs and outputs change places.
            seen, g = g, seen
        if pads is not None:
            seen = tf.pad(seen, pads)
        if is_own and not is_depthwise:
            return [kernel_term(together[0].variable, seen, g, geometry)]
        return back(of_rows(seen, g))

    return Met(terms, use.output, place)


def _transposes(op: tf.Operation) -> bool:
    if op.type != "Transpose" or op.inputs[0].shape.rank != 2:
        return False
    order = tf.get_static_value(op.inputs[1])
    return order is not None and list(order) == [1, 0]


def _met_by_lookup(together: Sequence[Followed], use: Use, place: Place) -> Met:
    """Take ids and gradients as factors; of what is made of variables, all of it."""
    ids, shape = use.op.inputs[1], use.tensor.shape
    if ids.shape.rank is None or place.axis >= ids.shape.rank:
        raise NotFollowedError(named(use.op))
    is_own = _is_own(together, use)
    # Of a large table, the whole gradient of each row would be much more than the rows.
    is_small = shape.is_fully_defined() and shape.num_elements() <= FEW_NUMBERS
    if not looks_up_rows(use.op) or not (is_own or is_small):
        raise NotFollowedError(named(use.op))

    def factors(g: Tensor) -> list[Term]:
        of_rows, g = place.rows_first(ids), place.rows_first(g)
        return [term_of_lookup(together[0].variable, of_rows, g)]

    if is_own:
        return Met(factors, use.output, place)
    return Met(_of_table(together, use, lambda: ids, shape, place), use.output, place)


def _met_by_entries(together: Sequence[Followed], use: Use, place: Place) -> Met:
    """Take numbers of several axes for one of all their entries."""
    ids, shape = use.op.inputs[1], use.tensor.shape
    depth = ids.shape[-1] if ids.shape.rank else None
    is_small = shape.is_fully_defined() and shape.num_elements() <= FEW_NUMBERS
    if not depth or not is_small or place.axis >= ids.shape.rank - 1:
        raise NotFollowedError(named(use.op))
    table = tf.TensorShape([math.prod(shape[:depth]), *shape[depth:]])

    def flat() -> Tensor:
        # (n, m, d) by pairs: the entry (i, k) is m i + k of (n m, d).
        strides = [math.prod(shape[axis + 1 : depth]) for axis in range(depth)]
        return tf.reduce_sum(ids * tf.constant(strides, ids.dtype), axis=-1)

    return Met(_of_table(together, use, flat, table, place), use.output, place)


def _of_table(
    together: Sequence[Followed],
    use: Use,
    ids: Callable[[], Tensor],
    table: tf.TensorShape,
    place: Place,
) -> Callable[[Tensor], list[Term]]:
    """Return what adds gradients up in the entries of a small table that rows look up."""
    back = through(together, use.tensor)
    entries, size = table[0], math.prod(table[1:])

    def whole(g: Tensor) -> list[Term]:
        of_rows, g = place.rows_first(ids()), place.rows_first(g)
        number = tf.shape(of_rows)[0]
        picked = tf.one_hot(
            tf.reshape(of_rows, [number, tf.size(of_rows) // tf.maximum(number, 1)]),
            entries,
            dtype=g.dtype,
        )
        g = tf.reshape(g, [number, tf.shape(picked)[1], size])
        found = tf.matmul(picked, g, transpose_a=True)
        return back(tf.reshape(found, [-1, *use.tensor.shape]))

    return whole


def has_recorded(tape: tf.GradientTape, tensor: Tensor) -> bool:
    """Tell whether a tape knows what a tensor comes from, without going back there."""
    asked: list[Tensor] = []

    # Its gradient is asked for only if the tape has recorded the tensor. It gives None, so
    # nothing further back is computed.
    @tf.custom_gradient
    def probe(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], None]]:
        return tf.identity(tensor), asked.append

    with tape:
        end = probe(tensor)
    tape.gradient(end, tensor, output_gradients=end)
    return bool(asked)
