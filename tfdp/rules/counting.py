"""Counts the steps of loops whose number of steps does not depend on the data."""

from collections.abc import Mapping
from types import MappingProxyType

import tensorflow as tf

from tfdp._types import Nest, Tensor
from tfdp.rules.copies import Copies
from tfdp.rules.free import static_length
from tfdp.rules.made import again_on
from tfdp.rules.uses import NotFollowedError

# A loop with as many steps is taken to be without end.
_MOST_COUNTED = 4096

# What counts steps, and compares the count.
_COUNTING = frozenset({
    "AddV2", "Cast", "Equal", "FloorDiv", "FloorMod", "Greater", "GreaterEqual",
    "Identity", "Less", "LessEqual", "LogicalAnd", "LogicalNot", "LogicalOr", "Max", "Maximum",
    "Minimum", "Mul", "Neg", "NotEqual", "StridedSlice", "Sub",
})  # fmt: skip


def known_scalar(value: Nest, given: Mapping[str, Nest] = MappingProxyType({})) -> Nest:
    """Return the value of a scalar that is the same for all data.

    Args:
        value: The scalar.
        given: Values of what it is made of, by the names of operations.

    Returns:
        None if it is not the same, or that is not known.
    """
    tensor = tf.convert_to_tensor(value)
    if tf.is_symbolic_tensor(tensor) and tensor.op.name in given:
        return given[tensor.op.name]
    known = tf.get_static_value(tensor)
    if known is None:
        known = static_length(tensor.op)
    if known is not None or tensor.op.type not in _COUNTING:
        return known
    inputs = [known_scalar(each, given) for each in tensor.op.inputs]
    if any(each is None for each in inputs):
        return None
    dtypes = [each.dtype for each in tensor.op.inputs]
    precision = next((dtype for dtype in dtypes if dtype.is_floating), tf.float32)
    with tf.init_scope():
        made: Tensor = again_on(
            tensor.op, list(map(tf.constant, inputs, dtypes)), precision
        )
        return made.numpy()


def count_steps(cond: tf.Graph, body: tf.Graph, start: list[Tensor]) -> int:
    """Count the steps of a loop of TensorFlow's.

    Args:
        cond: Graph of the function that tells whether it goes on.
        body: Graph of a step.
        start: What the first step is given.

    Returns:
        The number of steps.

    Raises:
        NotFollowedError: If it depends on the data, or may be larger than is counted.
    """
    counts = _counts(body, start)
    if known_scalar(cond.outputs[0], _given(cond, counts)) is None:
        raise NotFollowedError("how many steps there are")

    def goes_on(steps: Tensor, values: list[Tensor]) -> Tensor:
        copies = _copies(cond, dict(zip(counts, values, strict=True)))
        return tf.logical_and(steps < _MOST_COUNTED, copies.of(cond.outputs[0]))

    def step(steps: Tensor, values: list[Tensor]) -> Nest:
        copies = _copies(body, dict(zip(counts, values, strict=True)))
        return steps + 1, [copies.of(body.outputs[place]) for place in counts]

    def run() -> Tensor:
        values = [tf.constant(n, start[place].dtype) for place, n in counts.items()]
        return tf.while_loop(goes_on, step, (tf.constant(0), values))[0]

    # TensorFlow does not take a millisecond for each step, as Python would.
    with tf.init_scope():
        steps = int(tf.function(run, autograph=False).get_concrete_function()())
    if steps == _MOST_COUNTED:
        raise NotFollowedError("a loop with more steps than are counted")
    return steps


def _counts(body: tf.Graph, start: list[Tensor]) -> dict[int, Nest]:
    """Find the scalars that a step makes of nothing but such scalars.

    Returns:
        Their values before the first step, by their places.
    """
    counts = {
        place: known_scalar(each)
        for place, each in enumerate(start)
        if each.shape.rank == 0
    }
    while True:
        known = {place: value for place, value in counts.items() if value is not None}
        given = _given(body, known)
        after = {place: known_scalar(body.outputs[place], given) for place in known}
        if None not in after.values():
            return known
        counts = {place: known[place] for place in known if after[place] is not None}


def _given(graph: tf.Graph, counts: dict[int, Nest]) -> dict[str, Nest]:
    return {graph.inputs[place].op.name: value for place, value in counts.items()}


def _copies(graph: tf.Graph, counts: dict[int, Tensor]) -> Copies:
    """Prepare to copy what is made of counts, and of lengths that are static."""
    lengths = {
        op.outputs[0].name: tf.constant(length, op.outputs[0].dtype)
        for op in graph.get_operations()
        if (length := static_length(op)) is not None
    }
    given = {graph.inputs[place].name: value for place, value in counts.items()}
    return Copies(lengths | given)
