"""Steps of tfdp and of Keras that end after one of their stages.

What such a step holds when it ends is what the rest of a whole step would read. For
that a whole step is traced, by the functions that train, and cut where the stage ends:
what comes after it does not run.
"""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import keras
import steps
import tensorflow as tf
import tfdp_steps

import tfdp
from tfdp import engines
from tfdp.clipping import ClippedSum, clip_as_tensor
from tfdp.engines import passes, units, vectorized
from tfdp.engines.bookkeeping import RecordedForward
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective

_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Whole(NamedTuple):
    """A step whose graph has been made, up to its update.

    Attributes:
        ends: For each stage before the update what it ends with, in their order.
        update: Makes the graph of the update.
    """

    ends: dict[str, list[tf.Tensor]]
    update: Callable[[], None]


def stepper(options: argparse.Namespace, row: str) -> steps.Step:
    """Return the step of an engine up to a stage, such as ``"ghost:norms"``."""
    engine, _, stage = row.partition(":")
    model = tfdp_steps.build(options.model)
    batch = map(tf.constant, tfdp_steps.examples(options))
    # Traced here: the graph is the same, wherever the step is to end.
    return until(stage, whole_of(engine, model, options.batch_size), *batch)


def until(
    stage: str, whole: Callable[[tf.Tensor, tf.Tensor], Whole], *batch: tf.Tensor
) -> Callable[[], list[tf.Tensor]]:
    """Return a function that runs a step up to the end of a stage.

    Args:
        stage: Its name.
        whole: Makes the graph of a step.
        *batch: The inputs and labels of its batch.

    Returns:
        The function. It returns what the rest of the step would read; nothing where
        the stage is the update, which is the last one.
    """

    def run(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        step = whole(x, y)
        if stage == "update":
            step.update()
            return []
        return _cut(stage, step.ends)

    function = tf.function(run, autograph=False).get_concrete_function(*batch)
    return lambda: function(*batch)


def whole_of(
    engine: str, model: keras.Model, batch_size: int
) -> Callable[[tf.Tensor, tf.Tensor], Whole]:
    """Return what makes the graph of a step: of an engine, or the ordinary one."""
    variables = model.trainable_variables
    inner = keras.optimizers.SGD(steps.LEARNING_RATE)
    inner.build(variables)
    if engine == "ordinary":
        return lambda x, y: _ordinary(model, inner, x, y)
    optimizer = tfdp.optimizers.DPSGD(
        steps.LEARNING_RATE,
        l2_norm_clip=steps.L2_NORM_CLIP,
        noise_multiplier=steps.NOISE_MULTIPLIER,
        expected_batch_size=batch_size,
    )
    optimizer.build(variables)
    clips = engines.get(tfdp_steps.OPTIONS[engine]["engine"])
    return lambda x, y: _private(model, clips, optimizer, x, y)


def _ordinary(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, x: Any, y: Any
) -> Whole:
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = _LOSS(y, outputs)
    gradients = tape.gradient(loss, [variable.value for variable in variables])
    # Those of embeddings are slices.
    tensors = tf.nest.flatten(gradients, expand_composites=True)
    return Whole(
        {"forward": [outputs, loss], "backward": tensors},
        lambda: optimizer.apply(gradients, variables),
    )


def _private(
    model: keras.Model,
    engine: engines.Engine,
    optimizer: tfdp.optimizers.DPOptimizer,
    x: Any,
    y: Any,
) -> Whole:
    outputs: list[tf.Tensor] = []

    def on_outputs(data: Any, rows: Any, of_rows: Any) -> None:
        del data, rows
        outputs.append(of_rows)

    objective = Objective.of(model, _LOSS)
    clip = clip_as_tensor(optimizer.l2_norm_clip, objective.variables)
    clip_batch = functools.partial(
        engine.clip_and_sum, objective, l2_norm_clip=clip, rows_per_unit=1
    )
    with _gradients_noted() as noted:
        sums, norms = passes.run(
            clip_batch, Batch(x, y), rows_per_unit=1, on_outputs=on_outputs
        )
    clipped_sum = ClippedSum(sums, norms, clip, 1)
    ends = {
        "forward": outputs,
        # Ghost clipping goes back once more, when it has the norms.
        "backward": noted[0],
        "norms": [clipped_sum.norms],
        "sums": clipped_sum.gradients,
    }
    return Whole(
        ends, lambda: optimizer.apply_clipped_sum(clipped_sum, objective.variables)
    )


@contextlib.contextmanager
def _gradients_noted() -> Iterator[list[list[tf.Tensor]]]:
    """Note what each backward pass ends with: gradients of units, or factors of them."""
    notes: list[list[tf.Tensor]] = []
    terms_by_variable = RecordedForward.terms_by_variable
    clip_and_sum = vectorized.clip_and_sum
    make_function = tf.function

    def terms_noted(*args: Any) -> Any:
        found = terms_by_variable(*args)
        notes.append([t for terms in found for term in terms for t in term.read()])
        return found

    def gradients_noted(gradients: list[tf.Tensor], **options: Any) -> Any:
        notes.append(gradients)
        return clip_and_sum(gradients, **options)

    def in_same_graph(function: Any = None, **options: Any) -> Any:
        made = make_function(function, **options)
        if getattr(function, "__module__", "") != units.__name__:
            return made
        # The map over units: looked into as ever, but run where it can be cut.
        trace = made.get_concrete_function
        return mock.Mock(side_effect=function, get_concrete_function=trace)

    with (
        mock.patch.object(RecordedForward, "terms_by_variable", terms_noted),
        mock.patch.object(vectorized, "clip_and_sum", gradients_noted),
        mock.patch.object(tf, "function", in_same_graph),
    ):
        yield notes


def _cut(stage: str, ends: dict[str, list[tf.Tensor]]) -> list[tf.Tensor]:
    """Run a graph up to a stage, and hold what the rest of it would read.

    What the backward pass makes for the norms alone need not be held until all of it
    is there: it is computed, and let go.

    Args:
        stage: The stage.
        ends: See `Whole`.

    Returns:
        What is held, in the order of the graph; and a number of each of what the
        stage ends with.
    """
    stages = list(ends)
    to_here = [end for each in stages[: stages.index(stage) + 1] for end in ends[each]]
    run, forward = _needed(to_here), _needed(ends["forward"])
    with_norms = _needed([*to_here, *ends.get("norms", [])])
    everything = _needed(end for each in stages for end in ends[each])
    # What metrics and the update read.
    read = {
        id(end)
        for each in stages
        for end in ends[each]
        if each != "backward" or each == stages[-1]
    }
    held = [
        tensor
        for op in tf.compat.v1.get_default_graph().get_operations()
        if op in run and op.type != "Placeholder"
        for tensor in op.outputs
        if id(tensor) in read
        or everything.intersection(tensor.consumers())
        - (with_norms if stage == "backward" and op not in forward else run)
    ]
    # A number of each: TensorFlow leaves out what nothing reads the numbers of.
    return held + [tf.reshape(end, [-1])[:1] for end in ends[stage]]


def _needed(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Return the operations that tensors depend on."""
    found: set[tf.Operation] = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [*(each.op for each in op.inputs), *op.control_inputs]
    return found


if __name__ == "__main__":
    # One operation after the other: what a stage takes shall not depend on which of
    # them happen to run beside each other.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tfdp_steps.main(stepper)
