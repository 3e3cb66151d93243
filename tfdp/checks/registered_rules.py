"""Compares what somebody's own rules lead to with the gradients of single rows."""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._types import Array, Nest, Tensor
from tfdp.engines import Engine, passes
from tfdp.engines.vectorized import unit_gradients
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.batch import Batch, number_of_rows
from tfdp.losses.objective import Objective

# Relative differences that rounding explains, by what the layers compute in.
_TOLERANCES = {"float16": 5e-2, "bfloat16": 1e-1}
_TOLERANCE = 1e-2

# How far uphill gradients are compared, if they are to be taken there.
_RADIUS = 0.3


def compare_on_rows(
    engine: Engine, objective: Objective, data: Nest, *, clips: bool = False
) -> None:
    """Compare what an engine computes without clipping with single rows' gradients.

    The proof of the graph holds for any rule as to which rows meet, but only a rule's
    author knows whether its terms are the whole gradient of its layer. On a few rows
    the sums and norms are those of rows that are taken one by one, or the rule is wrong.

    Args:
        engine: Runs the rules.
        objective: What will be differentiated.
        data: ``(x, y, sample_weight)``, nested arrays of a few rows.
        clips: Whether to look at what the engine makes of clip norms, too.

    Raises:
        UnsupportedLayerError: If they differ by more than rounding explains.
    """
    data = _tree.map_tensors(tf.convert_to_tensor, data)
    # Whatever is random draws otherwise for one row than for several.
    objective = dataclasses.replace(objective, training=False)
    if objective.ascent is not None:
        # Far enough uphill to tell a wrong way from rounding.
        ascent = objective.ascent._replace(
            read_radius=lambda: tf.constant(_RADIUS, tf.float64), mix=1.0
        )
        objective = dataclasses.replace(objective, ascent=ascent)
    rows = number_of_rows(data)
    with _away_from_zero(objective.model):
        lengths, expected_sums = _one_by_one(objective, data, rows)
        sums, norms = _unclipped(engine, objective, data)
        if rows > 1:
            # An axis that is as long as the batch passes for it, but not twice.
            fewer = operator.itemgetter(slice(rows - 1))
            _unclipped(engine, objective, _tree.map_tensors(fewer, data))
        too_long = _too_long(engine, objective, data, norms) if clips else []
    if too_long:
        raise UnsupportedLayerError(
            f"Engine '{engine.name}' must clip every unit. Received: a sum that is "
            f"longer than its units' clip norms together, with {', '.join(too_long)}."
        )
    differences = [
        _length(np.subtract(total, expected, out=expected))
        for total, expected in zip(sums, expected_sums, strict=True)
    ]
    wrong = _wrong(objective, lengths, differences, np.asarray(norms, np.float64))
    if wrong:
        raise UnsupportedLayerError(
            "On a few rows the sum of the gradients and their norms must be those of "
            f"the rows taken one by one. Received: other {wrong}. A layer with a "
            "registered rule may have variables that the rule leaves out, or a layer "
            "is called on a tensor whose leading axis is not that of the examples."
        )


def _one_by_one(
    objective: Objective, data: Nest, rows: int
) -> tuple[Array, list[Array]]:
    """Take the gradients of one row after the other.

    Returns:
        Their lengths, shape (rows, variables), and their sums.
    """
    lengths = np.zeros([rows, len(objective.variables)])
    # At least float32, as the gradients are.
    sums = [
        np.zeros(v.shape, "float64" if v.dtype == "float64" else "float32")
        for v in objective.variables
    ]
    for row in range(rows):
        x, y, weight = _tree.map_tensors(operator.itemgetter(slice(row, row + 1)), data)
        batch = Batch(x, y, weight, tf.zeros([1], tf.bool))
        gradients, _ = unit_gradients(objective, batch)
        lengths[row] = [0.0 if g is None else _length(g) for g in gradients]
        # What is not finite must not be so for the engine either, and is in no sum.
        if np.isfinite(lengths[row]).all():
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    np.add(total, gradient, out=total)
        # Before the next ones are made: there may be room for one set only.
        del gradients
    return lengths, sums


def _wrong(
    objective: Objective, lengths: Array, differences: list[float], norms: Array
) -> str:
    """Name what differs by more than rounding explains; nothing if all is well.

    Args:
        objective: What was differentiated.
        lengths: Those of single rows' gradients, shape (rows, variables).
        differences: How far the sums for each variable are apart.
        norms: The engine's for each row.

    Returns:
        Words for a message.
    """
    expected = np.array([math.hypot(*of_row) for of_row in lengths])
    finite = np.isfinite(expected)
    are_same = np.array_equal(np.isfinite(norms), finite)
    norms, expected = norms[finite], expected[finite]
    tolerance = max(
        _TOLERANCES.get(layer.compute_dtype, _TOLERANCE)
        for layer in _keras.flatten_layers(objective.model)
    )
    # Norms are rounded up by what numbers too small for their dtype can be worth.
    slack = tolerance * np.maximum(expected, 1e-6 * expected.max(initial=0)) + 1e-12
    are_same = are_same and bool(np.all(np.abs(norms - expected) <= slack))
    # Of each variable by itself: beside larger ones a wrong one would not be seen.
    allowed = tolerance * lengths[finite].sum(0) + 1e-3 * slack.sum()
    paths = [
        f"`{variable.path}`"
        for variable, difference, most in zip(
            objective.variables, differences, allowed, strict=True
        )
        if not difference <= most
    ]
    if paths:
        return f"sums for {', '.join(paths)}"
    return "" if are_same else "norms"


def _too_long(
    engine: Engine, objective: Objective, data: Nest, norms: Tensor
) -> list[str]:
    """Say which sums of clipped units are longer than their number of clip norms."""
    found = []
    lengths = np.asarray(norms)[np.isfinite(norms)]
    for rows_per_unit in (1, 2):
        clip = float(np.median(lengths)) / 4 if len(lengths) else 1.0
        clip_as = tf.constant(max(clip, 1e-6), norms.dtype)
        try:
            sums, of_units = _clipped(engine, objective, data, clip_as, rows_per_unit)
        except Exception:  # noqa: BLE001 (what raises does not train)
            continue
        most = len(np.asarray(of_units)) * float(clip_as) * 1.0001
        if not math.hypot(*map(_length, sums)) <= most:
            found.append(f"{rows_per_unit} rows to a unit")
    return found


def _unclipped(
    engine: Engine, objective: Objective, data: Nest
) -> tuple[list[Tensor], Tensor]:
    """Return sums and norms, with a clip norm that clips nothing."""
    is_wide = any(variable.dtype == "float64" for variable in objective.variables)
    no_clip = tf.constant(1e30, tf.float64 if is_wide else tf.float32)
    return _clipped(engine, objective, data, no_clip)


def _clipped(
    engine: Engine,
    objective: Objective,
    data: Nest,
    clip: Tensor,
    rows_per_unit: int = 1,
) -> tuple[list[Tensor], Tensor]:
    clip_and_sum = functools.partial(
        engine.clip_and_sum, objective, l2_norm_clip=clip, rows_per_unit=rows_per_unit
    )
    in_graph = tf.function(clip_and_sum, autograph=False)
    return passes.run(in_graph, data, rows_per_unit=rows_per_unit)


def _length(array: Array | Tensor) -> float:
    """Return the l2 norm of all numbers, in float64 without a copy of that size."""
    array = np.ravel(array)
    parts = np.array_split(array, max(1, array.size // 2**20))
    return math.hypot(*(np.linalg.norm(part.astype(np.float64)) for part in parts))


@contextlib.contextmanager
def _away_from_zero(model: keras.Model) -> Iterator[None]:
    """Move what trains away from zero, and put it back, as well as all other state.

    A gate or a head that starts at zero would hide what is before it.
    """
    held = [*model.trainable_variables, *model.non_trainable_variables]
    values = [variable.numpy() for variable in held]
    rng = np.random.default_rng(0)
    with _keras.own_global_seed():
        try:
            for variable, value in zip(model.trainable_variables, values, strict=False):
                variable.assign(_moved_from_zero(value, rng))
            yield
        finally:
            for variable, value in zip(held, values, strict=True):
                variable.assign(value)


def _moved_from_zero(value: Array, rng: np.random.Generator) -> Array:
    """Add some noise of the same sign to a variable's value, small for its shape."""
    if "float" not in value.dtype.name:  # NumPy does not count bfloat16.
        return value
    # In place: there may be hardly room for a second copy of the weights.
    wide = np.float64 if value.dtype == np.float64 else np.float32
    noise: Array = np.atleast_1d(rng.standard_normal(value.shape, wide))
    np.abs(noise, out=noise)
    noise *= 0.1 / max(1.0, float(np.prod(value.shape[:-1]))) ** 0.5
    np.copysign(noise, value.astype(wide, copy=False), out=noise)
    noise += value.astype(wide, copy=False)
    return noise.astype(value.dtype, copy=False).reshape(value.shape)
