"""Checks that leading axes are those of the batch, in the graph or when it runs."""

from typing import NamedTuple

import tensorflow as tf

from tfdp._types import Nest, Tensor
from tfdp.errors import UnsupportedLayerError


class _Open(NamedTuple):
    """What a graph has to check of a tensor when it runs.

    Attributes:
        path: Path of the layer whose call it is of.
        tensor: The tensor.
        of_each_row: Numbers that there must be for each row of the batch.
        is_rows_first: Whether its first axis must be that of the batch.
    """

    path: str
    tensor: Tensor
    of_each_row: int | Tensor
    is_rows_first: bool


class Lengths:
    """Knows what is watched, and whether its leading axes are those of the batch.

    Norms are taken along them: an axis of something else would be clipped instead.

    Args:
        rows: Length of the leading axis of the model's inputs.

    Attributes:
        open: What is left to check when the graph runs.
    """

    def __init__(self, rows: int | Tensor) -> None:
        self.open: list[_Open] = []
        self._rows = rows
        # Numbers in the gradients of what is open, by the ids of the tensors.
        self._of_gradients: dict[int, Tensor] = {}

    def check(self, path: str, tensor: Tensor, of_row: int = 1, axis: int = 0) -> None:
        """Refuse a leading axis, or another, that is known not to hold the batch's rows.

        Where only the data tell, `checked` does.

        Args:
            path: Of the layer, or of the variable.
            tensor: What is watched.
            of_row: How many entries of the axis each row has.
            axis: Which one.

        Raises:
            UnsupportedLayerError: If it holds something else.
        """
        length = tensor.shape[axis] if tensor.shape.rank else 0
        rows = self._rows if isinstance(self._rows, int) else None
        if length is not None:
            if rows is not None and length == rows * of_row:
                return
            which = f"axis {axis}" if axis else "leading axis"
            raise UnsupportedLayerError(
                f"The {which} of what a layer computes must be that of the batch. Received: "
                f"`{path}` with {which} of length {length} in a batch of "
                f"{'any number of' if rows is None else rows} rows."
            )
        others = [n for place, n in enumerate(tensor.shape) if place != axis]
        numbers = tf.TensorShape(others).num_elements()
        if numbers is None:
            shape = tf.shape(tensor, tf.int64)
            numbers = tf.reduce_prod(shape[:axis]) * tf.reduce_prod(shape[axis + 1 :])
        is_rows_first = axis == 0 and of_row == 1
        self.open.append(_Open(path, tensor, of_row * numbers, is_rows_first))

    @property
    def rows_first(self) -> list[Tensor]:
        """What is watched and must have the batch's rows on its first axis.

        Where lengths are known they have been compared, and nothing is left to prove.
        """
        return [each.tensor for each in self.open if each.is_rows_first]

    def note_gradients(self, tensors: Nest, gradients: Nest) -> None:
        """Note the gradients that were taken of what is watched, for their sizes."""
        watched = {id(each.tensor) for each in self.open}
        for tensor, gradient in zip(
            tf.nest.flatten(tensors), tf.nest.flatten(gradients), strict=True
        ):
            if id(tensor) in watched and isinstance(gradient, tf.Tensor):
                self._of_gradients[id(tensor)] = tf.size(gradient, tf.int64)

    def checked(self, tensor: Tensor) -> Tensor:
        """Return a tensor, once the leading axis of all that is watched is the batch's.

        Of gradients that were noted, which is what norms are made of; of what is watched
        itself where there is none. TensorFlow computes a layer and its activation in one
        operation only if nothing else, like its size, is asked of what lies between.
        """
        if not self.open:
            return tensor
        # One check for all. Its message shows no sizes: each would take operations.
        sizes = tf.stack([
            self._of_gradients[id(each.tensor)]
            if id(each.tensor) in self._of_gradients
            else tf.size(each.tensor, tf.int64)
            for each in self.open
        ])
        of_each_row = tf.stack([each.of_each_row for each in self.open])
        expected = tf.cast(self._rows, tf.int64) * tf.cast(of_each_row, tf.int64)
        paths = "`, `".join(each.path for each in self.open)
        check = tf.debugging.Assert(
            tf.reduce_all(tf.equal(sizes, expected)),
            [f"The leading axes in `{paths}` must be those of the batch."],
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(tensor)
