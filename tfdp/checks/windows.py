"""Windows that slide over axes of open lengths, and what they leave of these lengths."""

import itertools
import math
from typing import NamedTuple

import tensorflow as tf

from tfdp.checks.values import Cause


class _Slide(NamedTuple):
    """What a window has made of a length.

    Attributes:
        length: Of the axis.
        positions: How many the window has along it.
        stride: Between two of them.
    """

    length: int
    positions: int
    stride: int


# Of seven lengths so many may be too short for a window.
_MOST_LEFT_OUT = 3


class NoPlaceError(Exception):
    """A length that was tried is shorter than a window.

    Attributes:
        cause: The window.
    """

    def __init__(self, cause: Cause) -> None:
        """Say which window it is."""
        super().__init__()
        self.cause = cause


class Windows(dict[tuple[str, int], tuple[tf.Operation, list[_Slide]]]):
    """Windows of the outermost graph and axes, and their slides over each length.

    Lengths that stand for open ones must differ as much as these may: where all that a
    window makes of them happen to be even, nothing would show that pairs of positions are of
    two rows where there is an odd number of them.
    """

    def note(
        self, op: tf.Operation, axis: int, *, length: int, positions: int, stride: int
    ) -> None:
        """Note that a window slides over an axis.

        Raises:
            NoPlaceError: If there is no place for it: of such a length nothing is found out.
        """
        if positions <= 0:
            raise NoPlaceError(
                Cause(
                    op, op, False, f"has no place in most lengths that were tried{_FIX}"
                )
            )
        _, slides = self.setdefault((op.name, axis), (op, []))
        slides.append(_Slide(length, positions, stride))

    def causes(self, left_out: list[Cause]) -> list[Cause]:
        """List the windows that leave too little to prove anything for all lengths.

        Args:
            left_out: Of each length of which nothing was found out, its `NoPlaceError`.

        Returns:
            A cause for each.
        """
        if len(left_out) > _MOST_LEFT_OUT:
            return left_out[-1:]
        why = f"makes of the open lengths that were tried some that are too much alike{_FIX}"
        return [
            Cause(op, op, False, why)
            for op, slides in self.values()
            if not _differ_as_before(slides)
        ]


_FIX = " (give the axis a length: `keras.Input((128, 3))`)"


def _differ_as_before(slides: list[_Slide]) -> bool:
    """Tell whether a number divides all differences only where it must."""
    before = _divisor([slide.length for slide in slides])
    if before == 0:
        # All are equal: the axis is not open.
        return True
    stride = slides[0].stride
    # Of lengths that differ by multiples of a number positions do by that over the stride.
    least = before // stride if before % stride == 0 else 1
    after = _divisor([slide.positions for slide in slides])
    return after > 0 and least % after == 0


def _divisor(lengths: list[int]) -> int:
    """Return the greatest number by which all lengths have the same remainder."""
    return math.gcd(*(after - one for one, after in itertools.pairwise(lengths)))
