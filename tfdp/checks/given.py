"""What is known of what a function is given: where its rows lie, and how long axes are."""

from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdp._types import Nest
from tfdp.checks.sizes import Length, Size
from tfdp.checks.values import WITHIN, Layout, Value
from tfdp.checks.windows import Windows

# Lengths for axes 1 to 5 where they are open, the same in all inputs: short ones that are
# equal, and longer ones that are not, odd and even. Code may do something else from some
# length on, or where two are equal. Of axes behind these nothing is said.
_LENGTHS = (
    (11, 11, 11, 11, 11),
    (13, 13, 13, 13, 13),
    (1031, 2053, 37, 613, 29),
    (131_072, 96, 20, 14, 6),
)
# And more where windows slide over them, which make few positions of a length.
_LENGTHS_FOR_WINDOWS = (
    (99_991, 1511, 101, 53, 31),
    (150_001, 3004, 211, 71, 43),
    (200_002, 5009, 307, 94, 58),
)


def all_given(
    signature: Sequence[Nest],
    rows: int | None,
    views: int = 1,
    *,
    windows: Windows | None = None,
) -> Iterator[list[Value]]:
    """Say of the arguments of a function what is known, for some lengths that are open.

    Args:
        signature: Nests of `tf.TensorSpec`, with leading axis N.
        rows: N, if that is static.
        views: How many entries of the first axis belong to one row.
        windows: Notes those that slide over open axes, in what is looked at meanwhile.

    Yields:
        What is known of each tensor.
    """
    # They must not be mistaken for that of the batch, and what holds for two of them by
    # chance is not counted on.
    for lengths in _LENGTHS if are_open(signature) else _LENGTHS[:1]:
        yield [_given(spec, rows, views, lengths) for spec in _specs(signature)]
    for lengths in _LENGTHS_FOR_WINDOWS if windows else ():
        yield [_given(spec, rows, views, lengths) for spec in _specs(signature)]


def are_open(signature: Sequence[Nest]) -> bool:
    """Tell whether lengths of other axes than the first are not known."""
    return any(None in spec.shape.as_list()[1:] for spec in _specs(signature))


def _specs(signature: Sequence[Nest]) -> list[tf.TensorSpec]:
    return [spec for spec in tf.nest.flatten(signature) if spec is not None]


def _given(
    spec: tf.TensorSpec, rows: int | None, views: int, open_lengths: Sequence[int]
) -> Value:
    lengths: list[Length | None] = [*spec.shape.as_list()]
    for axis, open_length in enumerate(open_lengths, 1):
        if axis < len(lengths) and lengths[axis] is None:
            lengths[axis] = open_length
    lengths[0] = Size(views) if rows is None else rows * views
    if lengths[0] == 1:
        # It meets no other, wherever its entries go.
        return Value(WITHIN, lengths=tuple(lengths))
    return Value(0, Layout(1, views), tuple(lengths))
