"""Finds losses that compare the rows of a batch, which alone have nothing to compare."""

import contextlib
import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from tfdp._types import Tensor
from tfdp.checks.node import BY_PLACE, COUNTS, Node, static_lengths
from tfdp.checks.values import Cause, NotKnownError, Value, known

WITH_OTHERS = "compares rows of the batch with each other"
WITH_MEAN = "takes from each row the mean over the batch"
OF_PRODUCTS = "is a function of products that are summed over the batch"
_OF_SUMS = "is a function of a mean or a sum over the batch"
_WEIGHS = "multiplies or divides by a sum over the batch"
_OF_ONE_EACH = "adds up one number of each row"
_EXTREME = "takes the largest, the smallest or the product over the batch"

COMPARISONS = (WITH_OTHERS, WITH_MEAN, OF_PRODUCTS)

# What a loss may be in place of one that compares the rows of a batch.
OWN_COMPARISONS = (
    "Compare what is in one row: give each its own negatives, `x = {'query': (N, d), "
    "'items': (N, 1 + k, d)}` with the positive one first, `scores = "
    "keras.ops.einsum('nd,nkd->nk', query, items)`, and labels `zeros(N)`; or score all "
    "items that are public, `scores = query @ keras.ops.transpose(table)`. In the "
    "place of a mean over the batch take a public number. Where two tensors are to meet "
    "row by row, give both one shape: `y[:, None]`."
)

# What operations are found to do in which rows meet others, not only add up.
MEETING = (
    "multiplies each row with all others",
    "lets each row pick entries of all others",
    "goes along the rows",
    "moves rows to others",
    "puts rows to others",
    "repeats rows as often as there are rows",
    "compares the rows",
    "sorts the rows",
    "normalizes by statistics of the batch",
)
# These only if they do what is said below.
_JOINING = "joins tensors whose rows are on different axes"
_PICKING = "picks some rows by their numbers"
_TAKING = "takes some of the rows"
# Behind these, rows still are where they are looked for.
_KEEPING = (BY_PLACE, COUNTS, "puts other entries between or behind the rows")

_EXTREMES = ("Max", "Min", "Prod")
_REDUCTIONS = ("Sum", "Mean", "EuclideanNorm")
_PRODUCTS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
_QUOTIENTS = ("RealDiv", "DivNoNan")
# Functions that make no sum of a sum.
_BENDING = (
    *("Abs", "Cos", "Elu", "Erf", "Exp", "Expm1", "LeakyRelu", "Log", "Log1p"),
    *("LogSoftmax", "Pow", "Reciprocal", "Relu", "Relu6", "Rsqrt", "Selu", "Sigmoid"),
    *("Sin", "Softmax", "Softplus", "Sqrt", "Square", "SquaredDifference", "Tanh"),
    "Xlogy",
)
# Likewise, but ``max(x, 0)``, by which losses guard a sum that is never below.
_BOUNDS = ("Maximum", "Minimum")
# What may lie between a mean and what is taken from the rows.
_MOVING = (
    *("BroadcastTo", "Cast", "ExpandDims", "Identity", "Reshape", "Squeeze"),
    *("StopGradient", *_QUOTIENTS),
)


class Comparisons:
    """Looks at the loss of a whole batch, operation by operation.

    A loss is asked for each row alone, which is the same thing for a sum or a mean over
    the rows. What compares one number of each row with those of others is nothing in one
    row: 0, or the same whatever it is. Where a row has several numbers, these are then
    compared with each other, which may be meant.

    Attributes:
        certain: What compares rows that alone have nothing to compare.
        changed: What is another thing in one row than in a batch.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.certain: list[Cause] = []
        self.changed: list[Cause] = []
        # What was found already.
        self._noted: set[tf.Operation] = set()
        # What adds up the rows: `OF_PRODUCTS`, `_OF_ONE_EACH` or `_OF_SUMS`.
        self._sums: dict[tf.Operation, str] = {}

    def look_at(self, node: Node, outputs: Sequence[Value]) -> None:
        """Look at an operation.

        Args:
            node: With what is known of its inputs.
            outputs: What that makes of its outputs.
        """
        is_sure = all(map(self._is_sure, node.inputs))
        if node.op in self._noted or not outputs or not is_sure:
            return
        # Where not even shapes are known, nothing is for certain.
        with contextlib.suppress(NotKnownError):
            new = next((c for c in outputs[0].causes if c.op is node.op), None)
            with_rows = [each for each in node.inputs if each.axis is not None]
            if new is None or not with_rows:
                self._look_at_function(node)
            elif _meets(node, new, with_rows):
                is_certain = _have_one_each(with_rows) and not _is_broadcast(node)
                self._note(node, WITH_OTHERS, is_certain=is_certain)
            elif outputs[0].axis is None:
                self._note_sum(node, with_rows)

    def _look_at_function(self, node: Node) -> None:
        """Look at what changes no place of a row, and may make of sums what is none."""
        kind, sums = node.op.type, self._sums_in(node.inputs)
        if kind in ("Sub", "SquaredDifference") and self._centres(node):
            self._note(node, WITH_MEAN, is_certain=True)
        elif (
            (kind in _BENDING or (kind in _BOUNDS and not _has_zero(node)))
            and sums
            and any(v.axis is None for v in node.inputs)
        ):
            is_certain = OF_PRODUCTS in sums
            why = OF_PRODUCTS if is_certain else _OF_SUMS
            self._note(node, why, is_certain=is_certain)
        elif self._weighs(node):
            self._note(node, _WEIGHS, is_certain=False)

    def _weighs(self, node: Node) -> bool:
        """Tell whether sums over the rows divide, or those of one number each multiply."""
        sums = [self._sums_in([each]) for each in node.inputs]
        if node.op.type in _QUOTIENTS:
            return bool(sums[1])
        of_one_each = [bool(each - {_OF_SUMS}) for each in sums]
        are_data = [
            each.axis is not None or bool(of_it)
            for each, of_it in zip(node.inputs, sums, strict=True)
        ]
        return node.op.type == "Mul" and any(of_one_each) and all(are_data)

    def _note(self, node: Node, why: str, *, is_certain: bool) -> None:
        self._noted.add(node.op)
        (self.certain if is_certain else self.changed).append(node.cause(why))

    def _is_sure(self, value: Value) -> bool:
        """Tell whether rows are for certain where they are said to be."""
        return all(
            cause.why in _KEEPING or cause.op in self._noted or cause.op in self._sums
            for cause in value.causes
        )

    def _sums_in(self, values: Sequence[Value]) -> set[str]:
        """List what sums over the rows there are in tensors."""
        return {
            self._sums[cause.op]
            for value in values
            for cause in value.causes
            if cause.op in self._sums
        }

    def _note_sum(self, node: Node, with_rows: Sequence[Value]) -> None:
        """Note what adds up the rows."""
        kind = node.op.type
        has_one = _have_one_each(with_rows)
        if kind in _EXTREMES:
            # Of whole numbers it may be how long a mask is to be.
            if node.tensor.dtype.is_floating:
                self._note(node, _EXTREME, is_certain=False)
        elif kind in _REDUCTIONS and node.inputs[1].numbers is not None:
            value, along = node.inputs
            axes = {int(n) % len(value.shape) for n in known(along.numbers).ravel()}
            others = [value.shape[axis] for axis in axes - {value.axis}]
            self._sums[node.op] = (
                _OF_ONE_EACH if has_one and set(others) <= {1} else _OF_SUMS
            )
        elif kind in _PRODUCTS:
            is_table = sum(n != 1 for n in static_lengths(node.tensor) or ()) > 1
            has_one = has_one and all(len(each.shape) == 2 for each in with_rows)
            self._sums[node.op] = OF_PRODUCTS if has_one and is_table else _OF_SUMS

    def _centres(self, node: Node) -> bool:
        """Tell whether an operation takes from rows their own mean over the batch."""
        for rows, mean in (node.op.inputs, list(node.op.inputs)[::-1]):
            op = _before_moving(mean).op
            if (
                op.type in ("Mean", "Sum")
                and self._sums.get(op) == _OF_ONE_EACH
                and _before_moving(op.inputs[0]) is _before_moving(rows)
            ):
                return True
        return False


def _have_one_each(values: Sequence[Value]) -> bool:
    """Tell whether each row has one entry on the axis of the rows, or in each view."""
    return all(each.layout.entries == 1 for each in values)


def _meets(node: Node, cause: Cause, with_rows: Sequence[Value]) -> bool:
    """Tell whether rows meet others where an operation does something to them."""
    why = cause.why
    if not cause.is_certain or _takes_diagonal(node.op):
        return False
    if why == _JOINING:
        # Not if they only are in another order there.
        return len({each.from_end for each in with_rows}) > 1
    if why == _PICKING:
        # By numbers of the rows, or drawn ones. With several entries of its own a row may
        # pick among these.
        is_any = node.inputs[1].axis is not None or _are_drawn(node.op.inputs[1])
        return is_any and _have_one_each(with_rows)
    return why in MEETING or (why == _TAKING and _leaves_out_first(node))


def _is_broadcast(node: Node) -> bool:
    """Tell whether targets of shape (N,) meet (N, 1): by mistake, and not in one row."""
    if len(node.inputs) != 2:
        return False
    for place, other in ((0, 1), (1, 0)):
        value, given = node.inputs[place], _before_moving(node.op.inputs[place]).op
        is_flat = value.axis is not None and len(value.shape) == 1
        if is_flat and given.type == "Placeholder":
            return given not in _ancestors(node.op.inputs[other])
    return False


def _are_drawn(tensor: Tensor) -> bool:
    """Tell whether random numbers have a part in a tensor."""
    drawing = ("Random", "StatelessRandom")
    return any(op.type.startswith(drawing) for op in _ancestors(tensor))


def _ancestors(tensor: Tensor) -> set[tf.Operation]:
    """Return the operation that makes a tensor, and all that it is computed from."""
    found, waiting = {tensor.op}, [tensor.op]
    while waiting:
        new = {each.op for each in waiting.pop().inputs} - found
        found |= new
        waiting += new
    return found


def _takes_diagonal(op: tf.Operation) -> bool:
    """Tell whether of a table of rows and others only each with itself is read."""
    readers = op.outputs[0].consumers()
    return bool(readers) and all(r.type.startswith("MatrixDiagPart") for r in readers)


def _leaves_out_first(node: Node) -> bool:
    """Tell whether a part of the rows begins behind the first one, or at the last."""
    value, *bounds = node.inputs
    if node.op.type != "StridedSlice" or value.axis != 0:
        return False
    masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    numbers = [each.numbers for each in bounds]
    if any(node.attr(mask) & 1 for mask in masks) or any(n is None for n in numbers):
        return False
    begin, _, stride = (known(each).ravel()[0] for each in numbers)
    begins = not node.attr("begin_mask") & 1 and isinstance(begin, int) and begin > 0
    return begins or (isinstance(stride, int) and stride < 0)


def _before_moving(tensor: Tensor) -> Tensor:
    """Return what a tensor is but for its shape and type, and what it is divided by."""
    while tensor.op.type in _MOVING:
        tensor = tensor.op.inputs[0]
    return tensor


def _has_zero(node: Node) -> bool:
    """Tell whether one of the inputs is 0."""
    known = [each.numbers for each in node.inputs if each.numbers is not None]
    return any(not np.any(numbers) for numbers in known)


@functools.cache
def warn_of_change(model: str, what: str) -> None:
    """Say once, in the log, what of a loss is another thing in one row.

    Args:
        model: Name of the model.
        what: What does what, and where.
    """
    logging.warning(
        "tfdp asks for the loss of model `%s` for each example alone, where it may be "
        "another one than for a batch: %s. The mean that trains is taken last, of such "
        "functions of one row each, which can be written so: `keras.losses.Dice(axis=(1, "
        "2, 3))`, or `ops.mean(ops.sum(losses, 1) / ops.sum(mask, 1))`. Where these are "
        "constant, only noise trains: weights that balance classes by the numbers in a "
        "batch leave nothing of a row alone. Weigh by public numbers: "
        "`private.fit(..., class_weight={0: 1.0, 1: 9.0})`.",
        model,
        what,
    )
