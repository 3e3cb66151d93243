"""Engines on problems, compared with one example at a time in float64."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tests.problems import Batch, Problem, nan_row, precision, scale_outlier, take
from tests.reference import (
    TOLERANCE,
    assert_all_close,
    clipped_sum,
    problem_gradients,
    uphill_gradients,
)
from tfdp import _tree
from tfdp.ascent.losses import Ascent
from tfdp.clipping import clip_as_tensor
from tfdp.engines import passes
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.losses.batch import Batch as Rows
from tfdp.losses.objective import Objective

MODES = ("graph", "xla")

# Rows of a pool: five examples, one of them scaled, one of them NaN.
OUTLIER = (0, 1, 5, 3, 4)
NAN = (0, 6, 2, 3, 4)
BATCHES = (OUTLIER, NAN, (0,), ())


class Pool(NamedTuple):
    """Examples to make batches of, and the gradients of each.

    Attributes:
        batch: The examples.
        gradients: From `tests.reference.per_example_gradients`.
    """

    batch: Batch
    gradients: list[np.ndarray]


class Uphill(NamedTuple):
    """Where gradients are taken; see `tests.reference.uphill_gradients`."""

    radius: float
    mix: float
    is_exact: bool


@functools.cache
def pool(problem: Problem) -> Pool:
    """Five examples of a problem, the third one scaled, the second one with NaN."""
    batch = problem.batch(5)
    others = scale_outlier(batch, 2), nan_row(batch, 1)
    parts = [tuple(with_weights(batch, others[0])), *_rows(others, (2, 1))]
    rows = keras.tree.map_structure(
        lambda *leaves: None if leaves[0] is None else np.concatenate(leaves), *parts
    )
    batch = Batch(*rows)
    return Pool(batch, problem_gradients(problem, batch))


def with_weights(batch: Batch, like: Batch) -> Batch:
    """Give a batch weights of one, if another one has weights."""
    if batch.sample_weight is None and like.sample_weight is not None:
        return batch._replace(sample_weight=np.ones_like(like.sample_weight))
    return batch


def _rows(batches: Sequence[Batch], rows: Sequence[int]) -> list[Any]:
    return [tuple(take(batch, [row])) for batch, row in zip(batches, rows, strict=True)]


def runner(
    problem: Problem,
    engines: Sequence[Any],
    mode: str = "graph",
    dtype: str = "float64",
    *,
    unit_size: int = 1,
    ascent: Uphill | None = None,
) -> Callable[[Batch, float], list[Any]]:
    """Make a function that clips a batch with each of the engines.

    In graph mode one graph takes batches of every size.

    Args:
        problem: The problem.
        engines: Engines, which all run in one graph.
        mode: One of `MODES`.
        dtype: Policy of the model.
        unit_size: Examples in a unit.
        ascent: Where gradients are taken.

    Returns:
        From a batch and the clip norm to ``(clipped sums, norms)`` of each engine.
    """
    with precision(dtype):
        objective = Objective.of(
            problem.build(dtype), problem.loss(dtype), problem.loss_weights
        )
    if ascent is not None:
        radius = tf.constant(ascent.radius, tf.float64)
        step = Ascent(lambda: radius, ascent.mix, ascent.is_exact)
        objective = dataclasses.replace(objective, ascent=step)
    wide = clip_as_tensor(1.0, objective.variables).dtype
    signature = tuple(problem.batch(1))
    if any(leaf.dtype.kind == "f" for leaf in keras.tree.flatten(signature[0])):
        like = signature
    else:
        like = tuple(with_weights(problem.batch(1), pool(problem).batch))

    def run(tensors: list[tf.Tensor], clip: tf.Tensor) -> list[Any]:
        data = _tree.pack(tensors, like)
        return [
            passes.run(
                functools.partial(_pass, engine, objective, clip, unit_size),
                data,
                rows_per_unit=unit_size,
            )
            for engine in engines
        ]

    specs = None
    if mode == "graph":
        specs = [
            [
                tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
                for leaf in _tree.tensors(like)
            ],
            tf.TensorSpec([], wide),
        ]
    run = tf.function(
        run, jit_compile=mode == "xla", autograph=False, input_signature=specs
    )

    def clip_batch(batch: Batch, clip: float) -> list[Any]:
        tensors = [tf.convert_to_tensor(leaf) for leaf in _tree.tensors(tuple(batch))]
        with precision(dtype):
            return run(tensors, tf.constant(clip, wide))

    return clip_batch


def _pass(engine, objective, clip, unit_size, batch):
    return engine.clip_and_sum(
        objective, batch, l2_norm_clip=clip, rows_per_unit=unit_size
    )


def clipped(
    engine: Any, objective: Objective, x: Any, y: Any, clip: float, *, like: Any = None
) -> Any:
    """Clip a batch of arrays, in a graph for such; return the clipped sums and the norms."""
    data = tf.convert_to_tensor(x), tf.convert_to_tensor(y), None
    step = functools.partial(_pass, engine, objective, tf.constant(clip), 1)
    signature = Rows(*_tree.signature_of(data) if like is None else like)
    signature = signature._replace(is_padding=tf.TensorSpec([None], tf.bool))
    in_graph = tf.function(step, autograph=False).get_concrete_function(signature)
    return passes.run(in_graph, data, rows_per_unit=1)


def ghost_like(engine: BookkeepingEngine) -> GhostEngine:
    """Return a ghost engine that knows of a model what was found out for another one."""
    found = {
        field.name: getattr(engine, field.name)
        for field in dataclasses.fields(engine)
        if field.kw_only
    }
    return GhostEngine(**found)


def check(
    problem: Problem,
    run: Callable[[Batch, float], list[Any]],
    rows: Sequence[int],
    tolerance: float | None = None,
    *,
    unit_size: int = 1,
    ascent: Uphill | None = None,
) -> None:
    """Compare norms and clipped sums with the reference, half of the units clipped.

    Args:
        problem: The problem.
        run: From `runner`.
        rows: Which rows of the pool make the batch.
        tolerance: Relative to norms and to the clip norm; default, of float64.
        unit_size: Examples in a unit.
        ascent: Where gradients are taken.
    """
    if tolerance is None:
        # Keras keeps the adapters of LoRA in float32.
        tolerance = 2e-5 if "lora" in problem.tags else TOLERANCE
    rows = list(rows)
    examples = pool(problem)
    rows_per_gradient = unit_size
    if ascent is None:
        gradients = [of_variable[rows] for of_variable in examples.gradients]
    else:
        gradients, rows_per_gradient = _uphill(problem, rows, ascent, unit_size), 1
    _, norms = clipped_sum(gradients, 1.0, rows_per_gradient)
    finite = norms[np.isfinite(norms)]
    clip = float(np.median(finite)) * 0.9 if finite.any() else 1.0
    expected, norms = clipped_sum(gradients, clip, rows_per_gradient)
    at = np.isfinite(norms)
    for sums, found in run(take(examples.batch, rows), clip):
        np.testing.assert_array_equal(np.isfinite(found), at)
        np.testing.assert_allclose(
            np.asarray(found)[at], norms[at], rtol=tolerance, atol=tolerance * clip
        )
        assert_all_close(
            sums, expected, rtol=0, atol=tolerance * clip * max(len(norms), 1)
        )


def check_clipped(
    problem: Problem, run: Callable[..., Any], clips: Sequence[float]
) -> None:
    """One unit's clipped sum is as long as its norm allows, and no longer."""
    for row in range(5):
        batch = take(pool(problem).batch, [row])
        for clip in clips:
            for sums, (norm,) in run(batch, clip):
                assert np.isfinite(norm)
                assert length(sums) <= clip * (1 + 1e-7)
                assert length(sums) >= min(norm, clip) * (1 - 2e-5)


def _uphill(
    problem: Problem, rows: list[int], ascent: Uphill, unit_size: int
) -> list[np.ndarray]:
    batch = take(pool(problem).batch, rows)
    return uphill_gradients(problem, batch, unit_size=unit_size, **ascent._asdict())


def length(tensors: Sequence[Any]) -> float:
    """Return the l2 norm over all numbers of some tensors, in float64."""
    squares = [np.sum(np.square(np.asarray(tensor, np.float64))) for tensor in tensors]
    return float(np.sqrt(sum(squares)))
