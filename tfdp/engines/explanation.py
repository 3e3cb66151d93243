"""A table of what the clipping of each layer takes."""

import collections
import math
from collections.abc import Container
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest, Tensor, Variable
from tfdp.clipping import at_least_float32
from tfdp.losses.batch import number_of_rows
from tfdp.rules.recording import Recording
from tfdp.rules.terms import Units
from tfdp.rules.watched import Watched

# What is said of the ways to a norm that `Term.how` names.
_WAYS = {"gram": "Gram", "keep": "instantiated", "drop": "instantiated"}

# So many lines that are alike are one.
_MANY = 4


class Explanation(NamedTuple):
    """How the gradients of one call of a layer are clipped.

    Attributes:
        path: Names of the layers that lead to it, joined by ``/``.
        rule: How its gradients are reached.
        norm: How its norm is computed.
        bytes: What the norm of one example takes; None if that depends on the data.
    """

    path: str
    rule: str
    norm: str
    bytes: int | None


def table(rows: list[Explanation]) -> str:
    """Lay explanations out as text, with a heading; many that are alike in one line."""
    cells = [("layer", "rule", "norm", "bytes per example")]
    alike = collections.Counter(rows)
    merged: set[Explanation] = set()
    for row in rows:
        path, rule, norm, size = row
        if row in merged:
            continue
        # A loop over time that is taken step by step has one for each step.
        if alike[row] >= _MANY:
            merged.add(row)
            path = f"{path}, {alike[row]} times"
        cells.append((path, rule, norm, "unknown" if size is None else f"{size:,}"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )


def explained(
    model: keras.Model,
    signature: Nest,
    norms: str,
    **options: Any,
) -> list[Explanation]:
    """Say how the norm of each layer's gradients is computed from their factors.

    Args:
        model: The model.
        signature: Nest of `tf.TensorSpec` of its inputs.
        norms: See `tfdp.engines.BookkeepingEngine`.
        **options: Other arguments of `Recording`.

    Returns:
        One for each way to a norm of each call of a layer; of one unit alone also one for
        each variable that no rule answers for.
    """
    found: list[Explanation] = []

    def run(x: Nest) -> None:
        recording = Recording(model, number_of_rows(x), **options)
        with recording.observing():
            outputs = keras.tree.flatten(_keras.run_model(model, x, training=True))
            # No penalties on weights, which are no row's: what they read is not to be seen.
            outputs += _keras.added_losses(model)
            reached = [each for each in outputs if each.dtype.is_floating]
            recording.note_losses(tf.add_n([tf.zeros([]), *map(_total, reached)]))
        for watched in recording.watched:
            found.extend(_explained(watched, norms, recording.elsewhere))
        found.extend(
            Explanation(variable.path, "vectorized", "instantiated", _bytes(variable))
            for variable in recording.elsewhere.values()
        )

    tf.function(run, autograph=False).get_concrete_function(signature)
    return found


def _total(tensor: Tensor) -> Tensor:
    return tf.reduce_sum(tf.cast(tensor, tf.float32))


def _bytes(variable: Variable) -> int:
    return int(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size)


def _explained(
    watched: Watched, norms: str, leaves_out: Container[int]
) -> list[Explanation]:
    units = Units(number=1, rows=1)
    numbers: dict[tuple[str, str], float] = {}
    gradients = [at_least_float32(tf.zeros_like(each)) for each in watched.tensors]
    for term in watched.terms_of(gradients):
        if term.variable.trainable and id(term.variable) not in leaves_out:
            how = term.how(norms, units)
            known = term.numbers(how, units)
            # Several variables may be used together elsewhere than in their layers.
            path = term.variable.path if watched.must_be_reached else watched.path
            way = path, _WAYS[how]
            numbers[way] = numbers.get(way, 0) + (math.inf if known is None else known)
    return [
        Explanation(
            path,
            watched.rule,
            way,
            None if math.isinf(total) else 4 * int(total),
        )
        for (path, way), total in numbers.items()
    ]
