"""What is known of what a function is given: where its rows lie, and how long axes are."""

from collections.abc import Sequence

import tensorflow as tf

from tfdp._types import Nest
from tfdp.checks.open_lengths import Open
from tfdp.checks.sizes import Length, Size
from tfdp.checks.values import WITHIN, Layout, Value


def given(signature: Sequence[Nest], rows: int | None, views: int = 1) -> list[Value]:
    """Say of the arguments of a function what is known.

    Args:
        signature: Nests of `tf.TensorSpec`, with leading axis N. Lengths of other axes that
            are open may be any, and differ from argument to argument.
        rows: N, if that is static.
        views: How many entries of the first axis belong to one row.

    Returns:
        What is known of each tensor.
    """
    return [
        _given(number, spec, rows, views)
        for number, spec in enumerate(_specs(signature))
    ]


def _specs(signature: Sequence[Nest]) -> list[tf.TensorSpec]:
    return [spec for spec in tf.nest.flatten(signature) if spec is not None]


def _given(number: int, spec: tf.TensorSpec, rows: int | None, views: int) -> Value:
    lengths: list[Length | None] = [
        Open.unknown("given", number, axis) if length is None else length
        for axis, length in enumerate(spec.shape.as_list())
    ]
    lengths[0] = Size(views) if rows is None else rows * views
    if lengths[0] == 1:
        # It meets no other, wherever its entries go.
        return Value(WITHIN, lengths=tuple(lengths))
    return Value(0, Layout(1, views), tuple(lengths))
