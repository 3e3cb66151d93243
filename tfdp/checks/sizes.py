"""Arithmetic with sizes of tensors, of which some count the rows of a batch."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp._types import Array
from tfdp.checks.open_lengths import Open


class Size:
    """A size that depends on how many rows a batch has.

    Attributes:
        block: The size is `block` times the number of rows; None where it is any
            other function of that number.
    """

    __slots__ = ("block",)

    def __init__(self, block: "int | Open | None") -> None:
        """Make a size."""
        self.block = block

    def __eq__(self, other: object) -> bool:
        """Compare; nothing equals a size that is not known."""
        if not isinstance(other, Size) or self.block is None:
            return False
        return self.block == other.block

    def __hash__(self) -> int:
        """Hash by the block."""
        return hash(("Size", self.block))

    def __repr__(self) -> str:
        """Show the block."""
        return "?" if self.block is None else f"{self.block}N"

    def __mul__(self, other: "Length") -> "Length":
        """Multiply by a number; a square of the number of rows is not known."""
        if isinstance(other, Size) or self.block is None:
            return UNKNOWN
        return Size(self.block * other) if other else 0

    __rmul__ = __mul__

    def __add__(self, other: "Length") -> "Length":
        """Add other rows; a sum of rows and a number is not known."""
        if not isinstance(other, Size):
            return UNKNOWN if other else self
        if self.block is None or other.block is None:
            return UNKNOWN
        block = self.block + other.block
        return Size(block) if block else 0

    __radd__ = __add__

    def __sub__(self, other: "Length") -> "Length":
        """Subtract other rows."""
        return self + -1 * other

    def __floordiv__(self, other: "Length") -> "Length":
        """Divide by what divides it."""
        divisor = other.block if isinstance(other, Size) else other
        if self.block is None or not divisor or self.block % divisor:
            return UNKNOWN
        block = self.block // divisor
        return block if isinstance(other, Size) else Size(block)

    def __rsub__(self, other: int) -> "Size":
        """Subtract from, or divide, a number: what comes out is not known."""
        return UNKNOWN

    __rfloordiv__ = __rsub__


UNKNOWN = Size(None)

# The length of an axis.
Length = int | Open | Size

# Of all axes of a tensor, each None where nobody knows.
Lengths = tuple[Length | None, ...]


def is_fixed(numbers: Array | Sequence[Length | None] | None) -> bool:
    """Tell whether no number among these depends on how many rows there are."""
    return not any(
        isinstance(number, Size) for number in np.asarray(numbers, object).ravel()
    )


def same(first: Array | None, second: Array | None) -> bool:
    """Tell whether two arrays of sizes are known and equal."""
    if first is None or second is None or first.shape != second.shape:
        return False
    return all(a == b for a, b in zip(np.ravel(first), np.ravel(second), strict=True))


def product(lengths: Sequence[Length]) -> Length:
    """Multiply lengths."""
    result: Length = 1
    for length in lengths:
        result *= length
    return result


def settled(shape: Array, lengths: Sequence[Length]) -> tuple[Length, ...]:
    """Resolve the -1 in the shape that a tensor is given.

    Args:
        shape: The new lengths, perhaps with one -1.
        lengths: Those of the tensor.

    Returns:
        The new lengths.
    """
    numbers = [_plain(number) for number in np.ravel(shape)]
    if -1 in numbers:
        position = numbers.index(-1)
        rest = product(numbers[:position] + numbers[position + 1 :])
        total = product(lengths)
        if isinstance(rest, Size) and not isinstance(total, Size):
            numbers[position] = UNKNOWN
        else:
            numbers[position] = 0 if rest == 0 else total // rest
    return tuple(numbers)


def reduced_axes(first: Array, second: Array) -> list[Array | None]:
    """Return over which axes gradients of broadcast operands are summed.

    Args:
        first: Shape of one operand.
        second: Shape of the other.

    Returns:
        The axes for each, None where they are not known.
    """
    rank = max(first.size, second.size)
    shapes = [[*([1] * (rank - each.size)), *each.tolist()] for each in (first, second)]
    if any(isinstance(n, Size) and n.block is None for n in shapes[0] + shapes[1]):
        return [None, None]
    # Where both have one entry, to sum over it is nothing.
    return [constant([n for n in range(rank) if shape[n] == 1]) for shape in shapes]


def constant(values: Array | Sequence[Length | None] | Length) -> Array:
    """Return an array of sizes for a small array of whole numbers."""
    plain = np.frompyfunc(_plain, 1, 1)
    return np.asarray(plain(np.asarray(values, object)), object)


def _plain(value: Length) -> Length:
    return value if isinstance(value, Open | Size) else int(value)


def slice_masks(op: tf.Operation, entries: int) -> list[dict[str, bool]]:
    """Read what a strided slice does in each of its entries."""
    masks = {name: op.get_attr(f"{name}_mask") for name in _SLICE_MASKS}
    return [
        {name: bool(mask >> entry & 1) for name, mask in masks.items()}
        for entry in range(entries)
    ]


_SLICE_MASKS = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
