"""What a use of variables does to the rows in one step of a loop."""

import itertools
from typing import NamedTuple

import tensorflow as tf

from tfdp._types import Tensor
from tfdp.rules.free import Free
from tfdp.rules.made import ELEMENTWISE, looks_up_rows
from tfdp.rules.uses import NotFollowedError, Use, check_is_plain, named


class Seen(NamedTuple):
    """What a use of variables in a step is made of, and makes.

    Attributes:
        op: Its operation.
        rows: What it is made of besides, with one entry of the first axis for each row.
        lengths: Of the other axes of what it makes.
        positions: How many consecutive entries of the first axis it makes of a row.
    """

    op: tf.Operation
    rows: list[Tensor]
    lengths: list[int]
    positions: int


def seen_by(use: Use, free: Free) -> Seen:
    """Say what a use does to each entry of the first axis, to all the same.

    Args:
        use: A use of variables, in the graph of a step.
        free: Knows what is made without rows there.

    Returns:
        What it is made of, and makes. Whether these are entries of the rows, their
        number tells in the end, and the proof.

    Raises:
        NotFollowedError: If that is not known.
    """
    op, made = use.op, use.output.shape
    check_is_plain(op)
    rows = [each for each in op.inputs if not free.holds(each)]
    if not _is_of_entries(use, rows):
        raise NotFollowedError(named(op))
    lengths, positions = made[1:].as_list(), 1
    before = rows[0].op
    if op.type == "MatMul":
        columns = use.tensor.shape[1 if op.get_attr("transpose_b") else 0]
        rows[0].set_shape([None, columns])
    if op.type == "MatMul" and before.type == "Reshape":
        whole = before.inputs[0]
        if (whole.shape.rank or 0) > 2 and whole.shape[-1] == columns is not None:
            between = whole.shape[1:-1]
            if between.num_elements() != 1:
                # Positions that became entries are positions again.
                rows, positions = [whole], between.num_elements() or 0
                lengths = [*between, made[-1]]
    firsts = {each.shape[0] for each in rows} | ({made[0]} if positions == 1 else set())
    others = [*itertools.chain(*(each.shape[1:] for each in rows)), *lengths]
    if not positions or not firsts <= {free.number, None} or None in others:
        raise NotFollowedError(f"the lengths of {named(op)}")
    return Seen(op, rows, lengths, positions)


def _is_of_entries(use: Use, rows: list[Tensor]) -> bool:
    """Tell whether entries of the first axis are known not to meet in a use."""
    op, given, made = use.op, use.tensor.shape, use.output.shape
    if not made.rank or given.rank is None or any(not t.shape.rank for t in rows):
        return False
    are_alike = all(each.shape.rank == made.rank for each in rows)
    is_of_all = given.rank < made.rank or given[0] == 1
    if op.type == "MatMul":
        return use.place == 1 and not op.get_attr("transpose_a")
    if op.type in {"BatchMatMulV2", "BatchMatMulV3"}:
        return use.place == 1 and are_alike and made.rank > 2 and is_of_all
    if op.type == "BiasAdd":
        return bool(op.get_attr("data_format") == b"NHWC")
    if op.type == "GatherV2":
        return use.place == 0 and looks_up_rows(op)
    return op.type in ELEMENTWISE and are_alike and is_of_all
