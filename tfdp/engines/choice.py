"""Proves that rows do not meet in a model, and chooses its engine."""

import contextlib
import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdp import _keras, _tree, engines, rules
from tfdp.checks.tracing import LOSS, Trace, signature_of
from tfdp.engines.passes import number_of_rows, run_whole
from tfdp.engines.vectorized import VectorizedEngine, unit_gradients
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError
from tfdp.losses import regularizers
from tfdp.losses.objective import Batch, Objective
from tfdp.rules.generic import generic
from tfdp.validation import (
    Problem,
    layer_problems,
    loss_problems,
    of_each_row,
    raise_if,
)

# Relative differences that rounding explains, by what the layers compute in.
_TOLERANCES = {"float16": 5e-2, "bfloat16": 1e-1}
_TOLERANCE = 1e-2

# How far uphill gradients are compared, if they are to be taken there.
_RADIUS = 0.3


def choose(
    engine: Any,
    objective: Objective,
    data: Any,
    sizes: Sequence[int | None] = (None,),
) -> engines.Engine:
    """Prove that rows do not meet in a model, and return the engine to use for it.

    The graph of a pass is followed through model, losses, and the backward pass up to
    what the engine reads. What is proven any engine may clip. What is not, the
    vectorized engine runs row by row.

    Args:
        engine: As in `tfdp.DPModel`.
        objective: What will be differentiated.
        data: ``(x, y, sample_weight)``, nested arrays of a few rows. Only shapes and
            dtypes matter, but where somebody has registered a rule.
        sizes: How many rows the passes will have, each None for any number: where
            that is static, layers may do something else.

    Returns:
        `engine`, or the vectorized one if `engine` is `"auto"` and book-keeping is
        out of question, which a log line says.

    Raises:
        UnsupportedLayerError: If the model mixes rows for certain or keeps data, or if
            the engine was asked for and cannot be used.
        UnsupportedLossError: If the losses do so.
    """
    chosen = engines.get(engine)
    if isinstance(chosen, VectorizedEngine):
        _check_objective(objective, data, sizes)
        return chosen
    try:
        passes = [dataclasses.replace(objective, ascent=None)]
        if objective.ascent is not None:
            passes.append(objective)
        for rows, of_pass in itertools.product(sizes, passes):
            problems = _problems_of_pass(chosen, of_pass, data, rows)
            if problems:
                raise UnsupportedLayerError(str(problems[0]))
        is_own = type(chosen).__module__.startswith("tfdp.")
        if not (is_own and _has_only_own_rules(objective.model)):
            _compare_on_rows(chosen, objective, data)
    except UnsupportedLayerError as error:
        _check_objective(objective, data, sizes)
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


def _check_objective(
    objective: Objective, data: Any, sizes: Sequence[int | None]
) -> None:
    for rows in sizes:
        check_objective(objective, signature_of(data, rows), rows)


def check_objective(
    objective: Objective, signature: Any, rows: int | None = None
) -> None:
    """Refuse a model or losses that mix rows for certain, or that keep data.

    Args:
        objective: The model and its losses.
        signature: Nest of `tf.TensorSpec` of ``(x, y, sample_weight)``.
        rows: How many rows there are, if that is static.

    Raises:
        UnsupportedLayerError: If the model does.
        UnsupportedLossError: If the losses do.
    """
    trace = Trace(objective.model)

    objective = _with_checked_losses(objective, trace)

    def run(x: Any, y: Any, sample_weight: Any) -> Any:
        return objective.losses(x, y, objective.predict(x), sample_weight)

    found = trace.found(run, signature, rows)
    problems = layer_problems(objective.model, trace, found)
    raise_if(objective.model, [each for each in problems if each.is_certain])
    for problem in loss_problems(found):
        if problem.is_certain:
            raise UnsupportedLossError(problem.reason)


def _problems_of_pass(
    engine: engines.Engine, objective: Objective, data: Any, rows: int | None
) -> list[Problem]:
    """Follow the rows through all that an engine reads."""
    trace = Trace(objective.model)
    objective = _with_checked_losses(objective, trace)

    def run(x: Any, y: Any, sample_weight: Any, is_padding: tf.Tensor) -> Any:
        return engine.read(objective, Batch(x, y, sample_weight, is_padding))

    padding = tf.TensorSpec([rows], tf.bool)
    found = trace.found(run, (*signature_of(data, rows), padding), rows)
    problems = layer_problems(objective.model, trace, found) + loss_problems(found)
    if found:
        # What comes first in the graph is to blame for what follows.
        names = {id(layer): path for path, layer in trace.layers}
        first = names.get(id(found[0].layer))
        problems.sort(key=lambda problem: problem.path != first)
    return problems


def _with_checked_losses(objective: Objective, trace: Trace) -> Objective:
    """Return an objective whose losses are known as such in a trace."""

    def losses(*batch: Any) -> tf.Tensor:
        with trace.part(LOSS), regularizers.unread(objective.variables, "The loss"):
            return of_each_row(objective.losses(*batch), objective.losses)

    return dataclasses.replace(objective, losses=losses)


def _has_only_own_rules(model: keras.Model) -> bool:
    """Tell whether all rules that a model needs are tfdp's, for the layers' own code."""
    return all(
        rules.is_own(layer) and "call" not in vars(layer)
        for layer in _keras.flatten_layers(model)
        if layer.trainable_variables
    )


def _compare_on_rows(engine: engines.Engine, objective: Objective, data: Any) -> None:
    """Compare what rules lead to that nobody has proven, on a few rows."""
    data = _tree.map_tensors(tf.convert_to_tensor, data)
    if objective.ascent is not None:
        # Far enough uphill to tell a wrong way from rounding.
        radius = tf.constant(_RADIUS, tf.float64)
        ascent = objective.ascent._replace(radius=radius, mix=1.0)
        objective = dataclasses.replace(objective, ascent=ascent)
    _compare(engine, objective, data)


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


def moved_from_zero(value: Any, rng: np.random.Generator) -> Any:
    """Add some noise of the same sign to a variable's value, small for its shape."""
    if "float" not in value.dtype.name:  # NumPy does not count bfloat16.
        return value
    # In place: there may be hardly room for a second copy of the weights.
    wide = np.float64 if value.dtype == np.float64 else np.float32
    noise = np.atleast_1d(rng.standard_normal(value.shape, wide))
    np.abs(noise, out=noise)
    noise *= 0.1 / max(1.0, float(np.prod(value.shape[:-1]))) ** 0.5
    np.copysign(noise, value.astype(wide, copy=False), out=noise)
    noise += value.astype(wide, copy=False)
    return noise.astype(value.dtype, copy=False).reshape(value.shape)
