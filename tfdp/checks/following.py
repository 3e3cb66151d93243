"""Traces what engines do with rows, and follows the rows through it."""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf
from absl import logging

from tfdp import _keras, _seeds, engines
from tfdp._types import Nest, Tensor
from tfdp.checks.alone import units_checked
from tfdp.checks.convolutions import convolutions_of_rows
from tfdp.checks.found import LOSS, Found
from tfdp.checks.problems import Problem, layer_problems, loss_problems, raise_if
from tfdp.checks.tracing import Trace
from tfdp.clipping import clip_as_tensor
from tfdp.engines.engine import Clipped
from tfdp.engines.traced import TracedPass
from tfdp.errors import UnsupportedLossError
from tfdp.losses import regularizers
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective


def traced_pass(
    engine: engines.Engine,
    objective: Objective,
    signature: Batch,
    rows_per_unit: int | Tensor,
) -> TracedPass:
    """Trace what an engine does, and prove no more than what it does to units alone.

    Args:
        engine: For which `tfdp.checks.engine.proven_pass` has just proven that rows stay
            apart.
        objective: What will be differentiated.
        signature: `tf.TensorSpec` of the rows.
        rows_per_unit: Consecutive rows that are one unit.

    Returns:
        The pass.

    Raises:
        UnsupportedLayerError: If units that are taken by themselves leave something for
            others, or gradients are out of reach.
    """
    # What is traced may run; see `Trace.found_in_pass`.
    _keras.make_global_seed()
    rows = signature.is_padding.shape[0]
    run, specs = _whole_pass(engine, objective, signature[:3], rows, rows_per_unit)
    with units_checked(objective.model):
        function = tf.function(run, autograph=False).get_concrete_function(*specs)
    return TracedPass(engine, objective, signature, rows_per_unit, function)


def check_objective(
    objective: Objective,
    data: Nest,
    sizes: Sequence[int | None] = (None,),
    moved: set[str] | None = None,
) -> bool:
    """Refuse a model or losses that mix rows for certain, or that keep data.

    What asks how many rows there are is warned of: where each runs by itself, there is
    one.

    Args:
        objective: The model and its losses.
        data: ``(x, y, sample_weight)``, of which shapes and dtypes are read.
        sizes: How many rows to follow, each None for any number.
        moved: Where to put what the model moves on while it is called, such as variables
            that it assigns: the next pass would find it moved.

    Returns:
        Whether it has warned.

    Raises:
        UnsupportedLayerError: If the model does.
        UnsupportedLossError: If the losses do.
    """
    counting: dict[Problem, None] = {}
    for rows in sizes:
        trace = Trace(objective.model)
        found = _followed(objective, data, rows, _losses, trace)
        if moved is not None:
            moved |= trace.moved
        problems = layer_problems(objective.model, trace.calls, found)
        raise_if(objective.model, [each for each in problems if each.is_certain])
        of_losses = loss_problems(found)
        for problem in of_losses:
            if problem.is_certain:
                raise UnsupportedLossError(problem.reason)
        problems += of_losses
        counting |= dict.fromkeys(each for each in problems if each.counts_rows)
    for problem in counting:
        logging.warning(
            "Model `%s` asks how many rows there are. %s", objective.model.name, problem
        )
    return bool(counting)


def _losses(objective: Objective, batch: Batch) -> Tensor:
    # What cannot be taken apart is that of each unit alone.
    return objective.forward(batch, skips_unknown=True)[1]


def problems_of_pass(
    engine: engines.Engine,
    objective: Objective,
    data: Nest,
    rows: int | None,
    passes: list[TracedPass] | None = None,
    *,
    trace: Trace,
) -> list[Problem]:
    """Follow the rows through all that an engine reads.

    Args:
        engine: The engine.
        objective: What will be differentiated.
        data: ``(x, y, sample_weight)``, of which shapes and dtypes are read.
        rows: How many to follow, None for any number.
        passes: Where to put what was traced whole, and can be run; None if that is not
            wanted.
        trace: Takes notes of what is seen.

    Returns:
        What lets rows meet, the first cause first; empty if it is proven that nothing does.
    """
    if passes is not None and engine.notes_what_it_reads:
        traced = with_known_losses(objective, trace)
        run, specs = _whole_pass(engine, traced, data, rows)
        # The very graph that the engine will run.
        found, function = trace.found_in_pass(run, specs, rows)
        if function is not None:
            signature = Batch(*data).signature(rows)
            moved = frozenset(trace.moved)
            passes.append(TracedPass(engine, objective, signature, 1, function, moved))
    else:
        found = _followed(objective, data, rows, engine.read, trace)
    problems = layer_problems(objective.model, trace.calls, found)
    problems += loss_problems(found)
    if found:
        # What comes first in the graph is to blame for what follows.
        names = {id(layer): path for path, layer in trace.calls.layers}
        first = names.get(id(found[0].layer))
        problems.sort(key=lambda problem: problem.path != first)
    return problems


def _followed(
    objective: Objective,
    data: Nest,
    rows: int | None,
    read: Callable[[Objective, Batch], Nest],
    trace: Trace,
) -> list[Found]:
    """Follow the rows of batches like these, through losses that are known as such."""
    traced = with_known_losses(objective, trace)

    def run(x: Nest, y: Nest, sample_weight: Nest, is_padding: Tensor) -> Nest:
        with _seeds.secret_seeds(objective.model), convolutions_of_rows():
            return read(traced, Batch(x, y, sample_weight, is_padding))

    return trace.found(run, Batch(*data).signature(rows), rows)


def _whole_pass(
    engine: engines.Engine,
    objective: Objective,
    data: Nest,
    rows: int | None,
    rows_per_unit: int | Tensor = 1,
) -> tuple[Callable[..., Clipped], Sequence[Nest]]:
    """Return the pass of an engine as a function, and its signature; see `TracedPass`."""

    def run(
        x: Nest, y: Nest, sample_weight: Nest, is_padding: Tensor, clip: Tensor
    ) -> Clipped:
        batch = Batch(x, y, sample_weight, is_padding)
        with (
            _seeds.secret_seeds(objective.model),
            convolutions_of_rows(),
        ):
            return engine.clip_and_sum(
                objective, batch, l2_norm_clip=clip, rows_per_unit=rows_per_unit
            )

    clip = tf.TensorSpec([], clip_as_tensor(1.0, objective.variables).dtype)
    return run, (*Batch(*data).signature(rows), clip)


def with_known_losses(objective: Objective, trace: Trace) -> Objective:
    """Return an objective whose losses `trace` knows as such, one for each row."""

    def losses(*batch: Nest) -> Tensor:
        with trace.part(LOSS), regularizers.unread(objective.variables, "The loss"):
            return _of_each_row(objective.losses(*batch), objective.losses)

    return dataclasses.replace(objective, losses=losses)


def _of_each_row(losses: Tensor, function: object) -> Tensor:
    """Return losses if there is one for each row."""
    if losses.shape.rank != 1:
        raise UnsupportedLossError(
            "A loss must have one value for every example. Received: "
            f"per_example_losses={function!r}, which returned shape "
            f"{tuple(losses.shape)}. Return unreduced losses, of shape (N,)."
        )
    return losses
