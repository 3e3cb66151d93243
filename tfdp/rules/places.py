"""Where the rows of a batch lie in a tensor, which is not always on the first axis."""

import collections
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tfdp import _keras
from tfdp._tracing import tracing
from tfdp._types import Tensor


class Place(NamedTuple):
    """Where rows lie in a tensor of shape ``(..., times * rows * entries, ...)``.

    Attributes:
        axis: On which axis.
        times: How often all rows come one after the other, as where nodes became rows:
            ``(nodes, rows, ...)`` -> ``(nodes * rows, ...)``.
        entries: How many consecutive entries each has, as where windows became rows:
            ``(rows, windows, ...)`` -> ``(rows * windows, ...)``.
    """

    axis: int = 0
    times: int = 1
    entries: int = 1

    @property
    def of_row(self) -> int:
        """How many entries each row has on the axis."""
        return self.times * self.entries

    def rows_first(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the rows on the first axis, all entries of each together.

        Args:
            tensor: Whose rows lie in this place. A mask comes along on the first axis.

        Returns:
            Shape ``(rows * of_row, ...)``, the other axes in their order.
        """
        if self.axis:
            others = [n for n in range(tensor.shape.rank) if n != self.axis]
            return self._swapped(tf.transpose(tensor, [self.axis, *others]), "times")
        return self._with_mask(tensor, "times")

    def put_back(self, tensor: Tensor) -> Tensor:
        """Undo `rows_first` for what was made of its result; for the first axis only."""
        return self._with_mask(tensor, "rows")

    def _with_mask(self, tensor: Tensor, outer: str) -> Tensor:
        swapped, mask = self._swapped(tensor, outer), _keras.keras_mask(tensor)
        if mask is None or swapped is tensor:
            return swapped
        return _keras.with_mask(swapped, self._swapped(mask, outer))

    def _swapped(self, tensor: Tensor, outer: str) -> Tensor:
        """Exchange rows and times on the first axis, of which `outer` comes first now."""
        if self.times == 1:
            return tensor
        others = [
            tf.shape(tensor)[axis] if length is None else length
            for axis, length in enumerate(tensor.shape)
        ][1:]
        both = [self.times, -1] if outer == "times" else [-1, self.times]
        parts = tf.reshape(tensor, [*both, self.entries, *others])
        order = [1, 0, *range(2, parts.shape.rank)]
        return tf.ensure_shape(
            tf.reshape(tf.transpose(parts, order), [-1, *others]), tensor.shape
        )


ROWS_FIRST = Place()

# A layer's path and the number of its call, or a variable's and the number of its use.
Where: TypeAlias = tuple[str, int]

# Places of rows that are elsewhere than on the first axis, in what a layer is called on
# and in what an operation makes of a variable. Also the first axis, for a use of a variable
# that a tape recorded only if it watched the variable.
Places: TypeAlias = Mapping[Where, Place]


class NotedPlaces:
    """Counts the calls and uses of a pass, and tells where rows lie in each.

    Args:
        places: What an earlier trace has told.

    Attributes:
        paths: Of the layers and variables that it has told of.
    """

    def __init__(self, places: Places) -> None:
        self.paths = {path for path, _ in places}
        self._places = places
        self._counts: collections.Counter[str] = collections.Counter()

    def next(
        self, path: str, tensors: list[Tensor], *, is_recorded: bool = True
    ) -> Place | None:
        """Return where the rows lie in the next call, or use, if it is known.

        If a trace is being made, it notes the tensors.

        Args:
            path: Of the layer, or of the variable.
            tensors: Those that have rows have them in the same place.
            is_recorded: Whether the tape has recorded them.
        """
        where = (path, self._counts[path])
        self._counts[path] += 1
        trace = tracing()
        if trace is not None:
            trace.note_rows(where, tensors, is_recorded=is_recorded)
        return self._places.get(where)
