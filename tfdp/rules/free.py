"""Tells what is made without rows in the graph of a pass, and of which lengths."""

from collections.abc import Iterable

import tensorflow as tf

from tfdp._types import Tensor

# What makes copies, perhaps one for each row.
COPIES = frozenset({"Tile", "BroadcastTo"})


class Free:
    """Tells which tensors of a graph are made without rows, and not of their number.

    Args:
        number: Of rows, None where it is not static.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number
        self._known: dict[str, bool] = {}
        # Whether what a graph captures may be rows.
        self._has_rows_outside = False

    def add(self, rows: Iterable[Tensor]) -> None:
        """Note tensors that are rows, whatever made them: they may be constants."""
        rows = list(rows)
        self._has_rows_outside |= not all(map(tf.is_symbolic_tensor, rows))
        self.note(rows, is_free=False)

    def note(self, tensors: Iterable[Tensor], *, is_free: bool) -> None:
        """Note whether tensors are made without rows, where operations do not tell."""
        self._known |= {
            each.op.name: is_free for each in tensors if tf.is_symbolic_tensor(each)
        }

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is made of variables, constants and lengths alone."""
        if not tf.is_symbolic_tensor(tensor):
            return True
        stack = [(tensor.op, False)]
        while stack:
            op, is_ready = stack.pop()
            if op.name in self._known:
                continue
            before = [each.op.name for each in op.inputs]
            if is_ready:
                self._known[op.name] = all(self._known[name] for name in before)
            elif any(each.dtype == tf.resource for each in op.inputs):
                # Other resources bring data, such as iterators.
                self._known[op.name] = op.type in {"ReadVariableOp", "VariableShape"}
            elif not before:
                is_outside = _is_made_outside(op) and not self._has_rows_outside
                self._known[op.name] = op.type == "Const" or is_outside
            elif _copies_for_rows(op, self.number):
                self._known[op.name] = False
            elif "Random" in op.type:
                # As many numbers however many rows there are: one draw for all of them.
                shape = op.outputs[0].shape
                self._known[op.name] = (
                    shape.is_fully_defined() and self.number not in shape.as_list()
                )
            elif _is_length(op):
                self._known[op.name] = True
            else:
                stack.append((op, True))
                stack.extend((each.op, False) for each in op.inputs)
        return self._known[tensor.op.name]


def _is_made_outside(op: tf.Operation) -> bool:
    """Tell whether it stands for a tensor that was made before the graph."""
    return any(
        inner.op.name == op.name
        and not tf.is_symbolic_tensor(outer)
        and outer.dtype not in (tf.resource, tf.variant)
        for outer, inner in getattr(op.graph, "captures", ())
    )


def _copies_for_rows(op: tf.Operation, number: int | None) -> bool:
    return op.type in COPIES and rows_of_copies(op, number) is not None


def _is_length(op: tf.Operation) -> bool:
    """Tell whether an operation takes lengths that are static, or not of the first axis."""
    if op.type == "Shape":
        return bool(op.inputs[0].shape.is_fully_defined())
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    rank = op.inputs[0].op.inputs[0].shape.rank
    begin, step = (tf.get_static_value(op.inputs[place]) for place in (1, 3))
    if not rank or begin is None or step != 1 or op.get_attr("begin_mask"):
        return False
    return bool(begin[0] % rank != 0)


def static_length(op: tf.Operation) -> int | None:
    """Return the length of an axis that an operation takes from a shape, if it is known."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return None
    begin = tf.get_static_value(op.inputs[1])
    shape = op.inputs[0].op.inputs[0].shape
    if not shape.rank or begin is None or op.get_attr("shrink_axis_mask") != 1:
        return None
    length: int | None = shape[int(begin[0])]
    return length


def rows_of_copies(op: tf.Operation, rows: int | None) -> int | None:
    """Return the axis on which an operation makes one copy for each row.

    Args:
        op: One of `COPIES`.
        rows: How many rows there are, None where that is not static.

    Returns:
        An axis of its output; None if there is none.
    """
    given, made = op.inputs[0].shape, op.outputs[0].shape
    if made.rank is None or given.rank is None:
        return None
    lengths = [1] * (made.rank - given.rank) + given.as_list()
    return next(
        (
            axis
            for axis, (length, copies) in enumerate(zip(lengths, made, strict=True))
            if length == 1 and copies == rows and (length, copies) != (1, 1)
        ),
        None,
    )
