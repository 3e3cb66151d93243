"""Proves that rows do not meet in a model, and chooses the engine that clips for it."""

import dataclasses
import math
from collections.abc import Sequence

import keras
import tensorflow as tf
from absl import logging

from tfdp import _keras, _tree, engines, rules
from tfdp._tree import signature_of
from tfdp._types import Nest, Tensor
from tfdp.checks.alone import SEED_AS_NUMBER
from tfdp.checks.following import check_objective, problems_of_pass, traced_pass
from tfdp.checks.proof import proven_engine
from tfdp.checks.registered_rules import compare_on_rows
from tfdp.checks.tracing import Trace
from tfdp.engines.traced import TracedPass
from tfdp.engines.vectorized import VectorizedEngine
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.added import AddedLossError
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective
from tfdp.rules.generic import generic
from tfdp.rules.own_gradients import OwnGradientsError
from tfdp.rules.registry import has_leaves


def choose(
    engine: str | engines.Engine,
    objective: Objective,
    data: Nest,
    static_rows: int | None = None,
    *,
    sample: Nest = None,
    passes: list[TracedPass] | None = None,
) -> engines.Engine:
    """Prove that rows do not meet in a model, and return the engine to use for it.

    The graph of a pass is followed through model, losses, and the backward pass up to
    what the engine reads. What is proven any engine may clip. What is not runs row by
    row.

    Args:
        engine: As in `tfdp.DPModel`.
        objective: What will be differentiated.
        data: ``(x, y, sample_weight)``, nested arrays of a few rows, or tensors or
            `tf.TensorSpec`: only shapes and dtypes matter. Lengths that are unknown may
            be any.
        static_rows: How many rows layers see, if they see it. What is right for that
            number may be wrong for another, which it is the divisor of, or the length of
            a table with an entry for each place in the batch: any number is proven as
            well.
        sample: Rows on which rules that somebody has registered are compared with
            gradients taken one by one; by default `data`, if these are arrays.
        passes: Where to put what was traced whole for units of one row, and for as many
            rows as layers will see (mostly any number), and can be run.

    Returns:
        `engine`; if that is `"auto"` and rows are not proven to stay apart in
        book-keeping, book-keeping with each unit by itself; and the vectorized engine
        where no rule reaches anything, or where a model takes gradients itself. A log line
        says so.

    Raises:
        UnsupportedLayerError: If the model mixes rows for certain or keeps data, or if
            the engine was asked for and cannot be used.
        UnsupportedLossError: If the losses do so.
    """
    moved: set[str] = set()
    sample = data if sample is None else sample
    chosen = engines.get(engine)
    sizes = [None] if static_rows is None else [None, static_rows]
    if not chosen.notes_what_it_reads:
        # It may prove nothing, as it does whose units are each evaluated alone. What is
        # kept of the data outlives them all the same.
        check_objective(objective, data, sizes, moved)
    if type(chosen) is VectorizedEngine:
        return _without_numbers_of_seeds(chosen, moved)
    try:
        is_here = objective.ascent is None
        if is_here and isinstance(chosen, engines.BookkeepingEngine):
            # Uphill layers without a rule need those of leaves.
            follows_leaves = has_leaves(objective.model)
            chosen = dataclasses.replace(chosen, follows_leaves=follows_leaves)
        chosen = proven_engine(chosen, objective, data, sizes, passes)
        _compare_if_foreign(chosen, objective, sample)
    except Exception as failure:  # noqa: BLE001
        error = _as_unsupported(failure)
        # An error of the model itself, or of the losses, comes again here.
        # What is refused for any number of rows is not tried row by row, either.
        is_said = check_objective(objective, data, sizes, moved)
        if engine != "auto":
            raise UnsupportedLayerError(
                f"Engine '{chosen.name}' cannot clip the gradients of model "
                f"`{objective.model.name}`. {error} Or use `engine='auto'`."
            ) from error
        apart = engines.ApartEngine()
        takes_gradients = isinstance(error, OwnGradientsError)
        if not takes_gradients and _can_take_apart(
            apart, objective, data, sizes, sample, passes, moved
        ):
            is_said &= not isinstance(error, AddedLossError)
            logging.log(
                logging.INFO if is_said else logging.WARNING,
                "tfdp takes each example of model `%s` through it by itself: %s",
                objective.model.name,
                error,
            )
            return _without_numbers_of_seeds(apart, moved)
        logging.warning(
            "tfdp takes whole gradients of each example of model `%s`, which needs "
            "more time and memory: %s",
            objective.model.name,
            error,
        )
        return _without_numbers_of_seeds(VectorizedEngine(), moved)
    if not (isinstance(chosen, engines.BookkeepingEngine) and chosen.follows_leaves):
        _log_layers_without_rule(objective.model)
    if isinstance(chosen, engines.ApartEngine):
        return _without_numbers_of_seeds(chosen, moved)
    return chosen


def _without_numbers_of_seeds(
    engine: engines.Engine, moved: set[str]
) -> engines.Engine:
    """Return an engine that takes each example by itself, unless seeds are numbers there.

    Seeds of rows are known steps apart: as numbers they tell places in the batch.

    Raises:
        UnsupportedLayerError: If they are.
    """
    if SEED_AS_NUMBER in moved:
        raise UnsupportedLayerError(
            "A seed must serve to draw alone where each example is taken through a model "
            f"by itself. Received: {SEED_AS_NUMBER}, and engine={engine.name!r}. Use "
            "`keras.random.uniform((), seed=seed_generator)`."
        )
    return engine


def _as_unsupported(error: Exception) -> UnsupportedLayerError:
    if isinstance(error, UnsupportedLayerError):
        return error
    return UnsupportedLayerError(f"A rule fails for a call of its layer: {error!r}.")


def _compare_if_foreign(
    engine: engines.Engine, objective: Objective, rows: Nest
) -> None:
    """Compare an engine, or rules, that are not tfdp's with single rows, if there are any."""
    is_own = type(engine).__module__.startswith("tfdp.")
    if is_own and _has_only_own_rules(objective.model):
        return
    leaves = _tree.tensors(rows)
    if not any(
        isinstance(each, tf.TensorSpec) or tf.is_symbolic_tensor(each)
        for each in leaves
    ):
        compare_on_rows(engine, objective, rows, clips=not is_own)


def _can_take_apart(
    engine: engines.ApartEngine,
    objective: Objective,
    data: Nest,
    sizes: Sequence[int | None],
    sample: Nest,
    passes: list[TracedPass] | None,
    moved: set[str],
) -> bool:
    """Tell whether each unit can go through a model by itself, by rules of some layers."""
    if objective.ascent is not None:
        return False
    try:
        explained = engine.explain(objective.model, signature_of(data)[0])
        if all(each.rule == VectorizedEngine.name for each in explained):
            return False
        traced = [
            traced_pass(engine, objective, Batch(*data).signature(rows), 1)
            for rows in sizes
        ]
        _compare_if_foreign(engine, objective, sample)
    # Whatever it is, the vectorized engine does without, or says it.
    except Exception:  # noqa: BLE001
        return False
    if passes is not None:
        left = frozenset(moved)
        passes += [dataclasses.replace(each, moved=left) for each in traced]
    return True


def proven_pass(
    engine: engines.Engine,
    objective: Objective,
    batch: Batch,
    rows_per_unit: int | Tensor,
) -> TracedPass:
    """Trace what an engine does with rows, and prove that they do not meet there.

    Of units of one row the graph that is looked into is the graph that runs. Of others,
    and where a loss is asked for each row alone, it is traced once more right after that,
    before anything else could change what the code does.

    Args:
        engine: That `choose` has returned.
        objective: What will be differentiated.
        batch: Rows, or `tf.TensorSpec` of them; how many they are is open, or all that
            this pass is for.
        rows_per_unit: Consecutive rows that are one unit.

    Returns:
        The pass, to be run as it is.

    Raises:
        UnsupportedLayerError: If it is not proven.
        UnsupportedLossError: If the losses mix rows for certain.
    """
    data, rows = tuple(batch[:3]), batch.is_padding.shape[0]
    sizes = [None] if rows is None else [None, rows]
    # Proven is that no row meets another, so neither do examples of several views. What
    # views share, draws of tfdp's own variational layers, is none of the data's.
    each_alone = dataclasses.replace(objective, views=1)
    moved: set[str] = set()
    if not engine.notes_what_it_reads:
        check_objective(each_alone, data, sizes, moved)
        _without_numbers_of_seeds(engine, moved)
    passes: list[TracedPass] = []
    is_of_rows = isinstance(rows_per_unit, int) and rows_per_unit == 1
    for size in sizes:
        trace = Trace(objective.model)
        whole = passes if is_of_rows and size == rows else None
        problems = problems_of_pass(engine, each_alone, data, size, whole, trace=trace)
        if problems:
            raise UnsupportedLayerError(
                f"Engine '{engine.name}' cannot clip the gradients of model "
                f"`{objective.model.name}`. {problems[0]}"
            )
        moved |= trace.moved
    if passes:
        return dataclasses.replace(passes[0], objective=objective)
    traced = traced_pass(engine, objective, batch.signature(rows), rows_per_unit)
    return dataclasses.replace(traced, moved=frozenset(moved))


def _has_only_own_rules(model: keras.Model) -> bool:
    """Tell whether all rules that a model needs are tfdp's, for the layers' own code."""
    return all(
        rules.is_own(layer) and "call" not in vars(layer)
        for layer in _keras.flatten_layers(model)
        if layer.trainable_variables
    )


def _log_layers_without_rule(model: keras.Model) -> None:
    layers = _keras.layers_by_path(model)
    # The rules of layers with a cell of their own are those of their cells.
    cells = [
        layer.cell
        for _, layer in layers
        if isinstance(layer, keras.layers.RNN) and type(layer) is not keras.layers.RNN
    ]
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
        "tfdp has no rule for %s of model `%s`, and does not follow its weights here: "
        "each is run once more, and takes the whole gradient of each example, together "
        "%d numbers. "
        "`tfdp.rules.register(%s, rule)` would save that.",
        ", ".join(f"`{path}` ({type(layer).__name__})" for path, layer in found),
        model.name,
        numbers,
        type(found[0][1]).__name__,
    )
