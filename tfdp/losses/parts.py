"""What each row has of a loss that was made of all rows."""

from collections.abc import Callable

import tensorflow as tf

from tfdp import _tree
from tfdp._types import Nest, Tensor


class NotOfRowsError(Exception):
    """A loss is not made of a part for each row."""


class RowsOf:
    """Finds what rows have of a loss, on the graph that it was made in.

    Args:
        rows: How many there are.
        inputs: What a model made the loss of.
        is_divided: Whether Keras divides it by the length of the leading axis.
        takes_lengths: Whether it may be divided by a number of rows. Where that is static
            for some of the graph it could not be told from other numbers.
    """

    def __init__(
        self,
        rows: int | Tensor,
        inputs: Nest,
        *,
        is_divided: bool = False,
        takes_lengths: bool = False,
    ) -> None:
        self._rows = rows
        self._is_divided = is_divided
        self._takes_lengths = takes_lengths
        self._is_free = {
            each.op.name: False
            for each in _tree.tensors(inputs)
            if tf.is_symbolic_tensor(each)
        }

    def of(self, loss: Tensor) -> Tensor:
        """Return a tensor of shape ``(N,)``, of which `loss` is the sum or the mean.

        Only what is linear may follow the sum over the rows. So each row has the loss
        that it would have alone, if it has the values alone which are added up.

        Args:
            loss: Scalar, or with the rows on its leading axis.

        Raises:
            NotOfRowsError: If it is not made so.
        """
        if loss.shape.rank != 0:
            return self._reduced(loss, tf.reduce_sum)
        if loss.graph is not tf.compat.v1.get_default_graph():
            raise NotOfRowsError("was made inside of a loop or a branch")
        if self.is_free(loss):
            return tf.broadcast_to(loss, [self._rows])
        return self._made_by(loss.op)

    def _made_by(self, op: tf.Operation) -> Tensor:
        """Return the parts of what an operation makes, a scalar."""
        inputs = list(op.inputs)
        if op.type in _REDUCTIONS:
            values, reduce = inputs[0], _REDUCTIONS[op.type]
            if values.shape.rank == 0:
                return self.of(values)
            if values.op.type == "Pack" and values.shape.rank == 1:
                return reduce(tf.stack(list(map(self.of, values.op.inputs)), 1), axis=1)
            return self._reduced(values, reduce)
        if op.type == "Mul" and self.is_free(inputs[0]):
            inputs.reverse()
        if op.type in _PRODUCTS:
            return _PRODUCTS[op.type](self.of(inputs[0]), self._of_one_row(inputs[1]))
        if op.type in _LINEAR:
            return _LINEAR[op.type](*map(self.of, inputs))
        if op.type == "Cast":
            return tf.cast(self.of(inputs[0]), op.outputs[0].dtype)
        raise NotOfRowsError(f"operation {op.type} `{op.name}` makes of all rows")

    def _reduced(self, values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
        """Reduce each row by itself."""
        length = values.shape[0] if values.shape.rank else None
        known = self._rows if isinstance(self._rows, int) else None
        # An axis of a length that is known is none of rows whose number is not.
        if values.shape.rank is None or (
            length is not None and (known is None or length % known)
        ):
            raise NotOfRowsError(
                f"is made of a tensor of shape {values.shape} in place of (N, ...)"
            )
        parts = reduce(values, axis=list(range(1, values.shape.rank)))
        if length is not None and length == known:
            return parts
        # Each row may have several entries, its positions for example.
        parts = tf.reshape(parts, [self._rows, -1])
        of_rows = reduce(parts, axis=1)
        if self._is_divided:
            of_rows /= tf.cast(tf.shape(parts)[1], of_rows.dtype)
        return of_rows

    def _of_one_row(self, number: Tensor) -> Tensor:
        """Return what a number that is made of lengths, and of no data, is for one row."""
        if self.is_free(number):
            return number
        op = number.op
        inputs = list(op.inputs)
        if not self._takes_lengths:
            raise NotOfRowsError(f"is divided by what operation {op.type} makes")
        has_rows = bool(inputs[0].shape.rank) and inputs[0].shape[0] is None
        if op.type in {"Shape", "Size"} and has_rows:
            # That the first is a multiple of the rows' is for the proof.
            lengths = tf.shape(inputs[0], op.outputs[0].dtype)
            of_row = lengths[:1] // tf.cast(tf.maximum(self._rows, 1), lengths.dtype)
            lengths = tf.concat([of_row, lengths[1:]], 0)
            return lengths if op.type == "Shape" else tf.reduce_prod(lengths)
        if op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") == 1:
            # An entry of a shape.
            place = tf.get_static_value(inputs[1])
            if inputs[0].shape.rank == 1 and place is not None:
                return self._of_one_row(inputs[0])[int(place[0])]
        if op.type not in _OF_LENGTHS:
            raise NotOfRowsError(f"is divided by what operation {op.type} makes")
        made = _OF_LENGTHS[op.type](*map(self._of_one_row, inputs))
        return tf.cast(made, op.outputs[0].dtype)

    def is_free(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is made of constants and variables, and no data."""
        stack = [(tensor.op, False)]
        while stack:
            op, is_ready = stack.pop()
            if op.name in self._is_free:
                continue
            if is_ready:
                self._is_free[op.name] = all(
                    self._is_free[each.op.name] for each in op.inputs
                )
            elif any(each.dtype == tf.resource for each in op.inputs):
                # Other resources bring data, such as iterators.
                self._is_free[op.name] = op.type == "ReadVariableOp"
            elif not op.inputs:
                self._is_free[op.name] = op.type == "Const"
            else:
                stack.append((op, True))
                stack.extend((each.op, False) for each in op.inputs)
        return self._is_free[tensor.op.name]


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "Sum": tf.reduce_sum,
    "Mean": tf.reduce_mean,
}
_PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "Mul": tf.multiply,
    "RealDiv": tf.divide,
    "DivNoNan": tf.math.divide_no_nan,
}
_LINEAR: dict[str, Callable[..., Tensor]] = {
    "Add": tf.add,
    "AddV2": tf.add,
    "AddN": lambda *parts: tf.add_n(parts),
    "Sub": tf.subtract,
    "Neg": tf.negative,
    "Identity": tf.identity,
    "StopGradient": tf.stop_gradient,
}


# What numbers are made of lengths by.
_OF_LENGTHS: dict[str, Callable[..., Tensor]] = {
    "Cast": tf.identity,
    "Identity": tf.identity,
    "Mul": tf.multiply,
    "Pack": lambda *parts: tf.stack(parts),
    "Prod": tf.reduce_prod,
}
