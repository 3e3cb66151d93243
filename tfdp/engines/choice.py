"""Chooses the engine of a model, and tries it on a few rows before it is trusted."""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdp import _keras, _tree, engines, rules
from tfdp._comparison import moved_from_zero
from tfdp.engines.passes import number_of_rows, run_whole
from tfdp.engines.vectorized import VectorizedEngine, unit_gradients
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Batch, Objective
from tfdp.rules.generic import generic

# Relative differences that rounding explains, by what the layers compute in.
_TOLERANCES = {"float16": 5e-2, "bfloat16": 1e-1}
_TOLERANCE = 1e-2

# How far uphill gradients are compared, if they are to be taken there.
_RADIUS = 0.3


def choose(engine: Any, objective: Objective, data: Any) -> engines.Engine:
    """Return the engine to use for a model.

    Book-keeping is compared with the ordinary gradients of single rows: a layer that
    puts examples elsewhere than on the leading axis, or a registered rule that is
    wrong, would lead to wrong norms.

    Args:
        engine: As in `tfdp.DPModel`.
        objective: What will be differentiated.
        data: ``(x, y, sample_weight)``, nested arrays of a few rows.

    Returns:
        `engine`, or the vectorized one if `engine` is `"auto"` and book-keeping is
        out of question, which a log line says.

    Raises:
        UnsupportedLayerError: If the engine was asked for and cannot be used.
    """
    chosen = engines.get(engine)
    if isinstance(chosen, VectorizedEngine):
        return chosen
    data = _tree.map_tensors(tf.convert_to_tensor, data)
    if objective.ascent is not None:
        # Far enough uphill to tell a wrong way from rounding.
        radius = tf.constant(_RADIUS, tf.float64)
        ascent = objective.ascent._replace(radius=radius, mix=1.0)
        objective = dataclasses.replace(objective, ascent=ascent)
    try:
        _compare(chosen, objective, data)
        _trace(chosen, objective, data)
    except UnsupportedLayerError as error:
        if engine != "auto":
            raise UnsupportedLayerError(
                f"Engine '{chosen.name}' cannot clip the gradients of model "
                f"`{objective.model.name}`. {error} Or use `engine='vectorized'`."
            ) from error
        logging.warning(
            "tfdp takes whole gradients of each example of model `%s`, which needs "
            "more time and memory: %s",
            objective.model.name,
            error,
        )
        return VectorizedEngine()
    _log_layers_without_rule(objective.model)
    return chosen


def _log_layers_without_rule(model: keras.Model) -> None:
    layers = _keras.layers_by_path(model)
    # The rule of a recurrent layer is that of its cell.
    cells = [layer.cell for _, layer in layers if isinstance(layer, keras.layers.RNN)]
    found = [
        (path, layer)
        for path, layer in layers
        if layer.trainable_variables
        and rules.find(layer) is generic
        and not any(layer is cell for cell in cells)
    ]
    if not found:
        return
    numbers = sum(
        math.prod(variable.shape)
        for _, layer in found
        for variable in layer.trainable_variables
    )
    logging.warning(
        "tfdp has no rule for %s of model `%s`: each is run once more, and takes the "
        "whole gradient of each example, together %d numbers. "
        "`tfdp.rules.register(%s, rule)` would save that.",
        ", ".join(f"`{path}` ({type(layer).__name__})" for path, layer in found),
        model.name,
        numbers,
        type(found[0][1]).__name__,
    )


def _trace(engine: engines.Engine, objective: Objective, data: Any) -> None:
    """Trace a pass as training will, to see whether all layers can be recorded."""
    signature = _tree.map_tensors(
        lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), data
    )
    run = tf.function(functools.partial(_run, engine, objective), autograph=False)
    run.get_concrete_function(signature)


def _run(engine: engines.Engine, objective: Objective, data: Any) -> Any:
    is_wide = any(variable.dtype == "float64" for variable in objective.variables)
    no_clip = tf.constant(1e30, tf.float64 if is_wide else tf.float32)
    sums, norms, _ = run_whole(
        lambda batch: engine.clip_and_sum(
            objective, batch, l2_norm_clip=no_clip, rows_per_unit=1
        ),
        data,
        rows_per_unit=1,
    )
    return sums, norms


def _compare(engine: engines.Engine, objective: Objective, data: Any) -> None:
    """Compare unclipped sums and norms with those of single rows."""
    # Whatever is random draws otherwise for one row than for several.
    objective = dataclasses.replace(objective, training=False)
    rows = number_of_rows(data)
    lengths: list[list[float]] = []
    # At least float32, as the gradients are.
    expected_sums = [
        np.zeros(v.shape, "float64" if v.dtype == "float64" else "float32")
        for v in objective.variables
    ]
    with _away_from_zero(objective.model):
        for row in range(rows):
            x, y, weight = _tree.map_tensors(
                operator.itemgetter(slice(row, row + 1)), data
            )
            batch = Batch(x, y, weight, tf.zeros([1], tf.bool))
            gradients, _ = unit_gradients(objective, batch)
            lengths.append([0.0 if g is None else _length(g) for g in gradients])
            # What is not finite must not be so for the engine either, and is in no sum.
            if np.isfinite(lengths[-1]).all():
                for total, gradient in zip(expected_sums, gradients, strict=True):
                    if gradient is not None:
                        np.add(total, gradient, out=total)
            del gradients
        sums, norms = _run(engine, objective, data)
        if rows > 1:
            # An axis that is as long as the batch passes for it, but not twice.
            fewer = operator.itemgetter(slice(rows - 1))
            _run(engine, objective, _tree.map_tensors(fewer, data))
    expected = np.array([math.hypot(*of_row) for of_row in lengths])
    finite = np.isfinite(expected)
    norms = np.asarray(norms, np.float64)
    same = np.array_equal(np.isfinite(norms), finite)
    norms, expected = norms[finite], expected[finite]
    tolerance = max(
        _TOLERANCES.get(layer.compute_dtype, _TOLERANCE)
        for layer in _keras.flatten_layers(objective.model)
    )
    # Norms are rounded up by what numbers too small for their dtype can be worth.
    slack = tolerance * np.maximum(expected, 1e-6 * expected.max(initial=0)) + 1e-12
    differences = [
        _length(np.subtract(total, expected_sum, out=expected_sum))
        for total, expected_sum in zip(sums, expected_sums, strict=True)
    ]
    # Of each variable by itself: beside larger ones a wrong one would not be seen.
    of_variables = np.array(lengths)[finite].sum(0)
    allowed = tolerance * of_variables + 1e-3 * slack.sum()
    wrong = [
        f"`{variable.path}`"
        for variable, difference, most in zip(
            objective.variables, differences, allowed, strict=True
        )
        if not difference <= most
    ]
    same = same and bool(np.all(np.abs(norms - expected) <= slack))
    if wrong or not same:
        raise UnsupportedLayerError(
            "On a few rows the sum of the gradients and their norms must be those of "
            "the rows taken one by one. Received: other "
            f"{'sums for ' + ', '.join(wrong) if wrong else 'norms'}. A layer with a "
            "registered rule may have variables that the rule leaves out, or a layer "
            "is called on a tensor whose leading axis is not that of the examples."
        )


def _length(array: Any) -> float:
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
                variable.assign(moved_from_zero(value, rng))
            yield
        finally:
            for variable, value in zip(held, values, strict=True):
                variable.assign(value)
