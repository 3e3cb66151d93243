"""What is known of a tensor: where its rows are, and what mixed them."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tfdp._types import Array
from tfdp.checks.open_lengths import Open
from tfdp.checks.sizes import Length, Lengths

# In place of an axis: the tensor belongs to one row as a whole.
WITHIN = -1

_Known = TypeVar("_Known")


class NotKnownError(Exception):
    """What a tensor holds, or its shape, would have to be known, and is not."""


def known(what: _Known | None) -> _Known:
    """Return `what`, or raise `NotKnownError`: nobody knows then where rows are."""
    if what is None:
        raise NotKnownError
    return what


def fixed(number: int | Open) -> int:
    """Return a number, or raise `NotKnownError` if it is that of an open length."""
    if isinstance(number, Open):
        raise NotKnownError
    return number


class Cause(NamedTuple):
    """An operation that lets rows meet, or of which nobody knows whether it does.

    Attributes:
        op: The `tf.Operation`.
        outer: The operation of the outermost graph that it is part of: a loop, a
            branch; or itself.
        is_certain: Whether it does for certain.
        why: What it does, in words that follow "which".
        variable: Name of the variable that it changes, if that is the matter.
    """

    op: tf.Operation
    outer: tf.Operation
    is_certain: bool
    why: str
    variable: str | None = None


class Layout(NamedTuple):
    """How rows lie along an axis.

    Attributes:
        times: How often all rows come one after the other.
        entries: How many consecutive entries each has.
        is_alike: Whether all entries along the axis are equal, as zeros are: rows lie in
            them in whatever way they lie in other tensors.
        words: Name of the operation that has cut texts into words. Then each row has
            any number of entries.
    """

    times: int | Open = 1
    entries: int | Open = 1
    is_alike: bool = False
    words: str = ""

    @property
    def is_plain_blocks(self) -> bool:
        """Whether each row has its entries together, and all of them come once."""
        return self == Layout(1, self.entries)


PLAIN = Layout()


class Value(NamedTuple):
    """What is known of one tensor for every batch and all data in it.

    Attributes:
        axis: Along it, each entry depends on one row alone. None if nothing in it
            depends on the data. For a list of tensors the axes are those of its
            tensors, stacked.
        layout: On which one.
        lengths: Of its axes, each None where nobody knows; None altogether if not even
            the number of axes is known.
        numbers: What is in it, a small array of whole numbers and sizes; None if not
            known. Of a list: what is in each of its tensors.
        causes: What is the matter with it.
        variable: Name of the variable that it is the handle of.
        chance: Where random seeds in it come from; see `checks.operations.chance`.
    """

    axis: int | None = None
    layout: Layout = PLAIN
    lengths: Lengths | None = None
    numbers: Array | None = None
    causes: frozenset[Cause] = frozenset()
    variable: str | None = None
    chance: frozenset[str] = frozenset()

    @property
    def shape(self) -> Lengths:
        """The lengths of all axes, whose number is known at least."""
        return known(self.lengths)

    @property
    def from_end(self) -> int | None:
        """Where the rows are, counted from the last axis: -1 for that one."""
        return None if self.axis is None else self.axis - len(self.shape)

    def with_lengths(self, lengths: Iterable[Length | None]) -> "Value":
        """Return the same with other lengths."""
        return self._replace(lengths=tuple(lengths))

    def inserted(self, axis: int, length: Length | None) -> "Value":
        """Say where rows are when there is one more axis."""
        rows = self.axis
        if rows is not None and rows >= axis:
            rows += 1
        lengths = self.lengths
        if lengths is not None:
            lengths = (*lengths[:axis], length, *lengths[axis:])
        return self._replace(axis=rows, lengths=lengths)

    def dropped(self, axes: Collection[int]) -> "Value":
        """Say where rows are without some axes, none of which is theirs."""
        rows, lengths = self.axis, self.lengths
        if rows is not None:
            rows -= sum(axis < rows for axis in axes)
        if lengths is not None:
            lengths = tuple(n for axis, n in enumerate(lengths) if axis not in axes)
        return self._replace(axis=rows, lengths=lengths)


FREE = Value()


def have_rows(values: Iterable[Value]) -> bool:
    """Tell whether any of these tensors depends on data."""
    return any(each.axis is not None for each in values)


def causes_of(values: Iterable[Value]) -> frozenset[Cause]:
    """Collect all that is the matter with tensors."""
    return frozenset[Cause]().union(*(each.causes for each in values))


def chance_of(values: Iterable[Value]) -> frozenset[str]:
    """Collect where the random seeds in tensors come from."""
    return frozenset[str]().union(*(each.chance for each in values))


def laid_out(values: Sequence[Value]) -> list[Value]:
    """Lay the rows of what has equal entries as those of the others lie."""
    layouts = {each.layout for each in values if each.axis is not None}
    sure = {each for each in layouts if not each.is_alike}
    if len(sure) != 1 or layouts == sure:
        return list(values)
    [layout] = sure
    block = layout.times * layout.entries
    return [
        each._replace(layout=layout)
        if each.layout.is_alike and each.layout.times * each.layout.entries == block
        else each
        for each in values
    ]


# In place of a variable's name: a list that has no tensors yet, or perhaps none. What is
# taken from it are zeros then, of a shape that is asked for when they are taken. Of its
# lengths the first is its own; those of its tensors are there if their number is known.
NEW_LIST = "a new list"
PERHAPS_NEW = "a list that may be new"
# A list of lists, which may be new. Its axes are those of what is in them, stacked twice.
OF_LISTS = "a list of lists"

# The numbers of a list that has no tensors yet.
NO_NUMBERS = np.empty([0], object)


def is_open(value: Value) -> bool:
    """Tell whether a list may have no tensors."""
    return value.variable in (NEW_LIST, PERHAPS_NEW, OF_LISTS)


def with_shape(
    lengths: Lengths | None, shape: Sequence[Length | None]
) -> Lengths | None:
    """Add to the lengths of a list what else is known of its tensors.

    Args:
        lengths: Its own length, and those of its tensors; None if not known.
        shape: The lengths that its tensors have, as far as they are known.

    Returns:
        All lengths; None if they do not go together.
    """
    if lengths is None or len(lengths) not in (1, 1 + len(shape)):
        return None
    own = lengths[1:] or shape
    both = [b if a is None else a for a, b in zip(own, shape, strict=True)]
    return (lengths[0], *both)
