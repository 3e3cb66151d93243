"""Takes loops step by step, so that what is in them can be recorded."""

from collections.abc import Callable

import tensorflow as tf

from tfdp._types import Nest, Tensor
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.made import again_on
from tfdp.rules.uses import static_length

# Each takes its operations once more in the graph.
MOST_UNROLLED = 64

# What counts steps, and compares the count.
_COUNTING = frozenset({
    "AddV2", "Cast", "Equal", "FloorDiv", "FloorMod", "Greater", "GreaterEqual",
    "Identity", "Less", "LessEqual", "LogicalAnd", "LogicalNot", "LogicalOr", "Max", "Maximum",
    "Minimum", "Mul", "Neg", "NotEqual", "Sub",
})  # fmt: skip


def unrolled(
    loop: Callable[..., Nest],
    cond: Callable[..., Nest],
    body: Callable[..., Nest],
    loop_vars: Nest,
    *args: Nest,
    maximum_iterations: Nest = None,
    **kwargs: Nest,
) -> Nest:
    """Do what `tf.while_loop` does, in as many steps in the graph.

    Args:
        loop: `tf.while_loop`, which runs if nobody knows how many steps there are.
        cond: Its argument.
        body: Its argument.
        loop_vars: Its argument.
        *args: Its other arguments.
        maximum_iterations: Its argument.
        **kwargs: Its other arguments.

    Returns:
        What `loop` would.

    Raises:
        UnsupportedLayerError: If there are more than `MOST_UNROLLED` steps, or the data
            decide after how many it ends.
    """
    values = [_counted(each) for each in tf.nest.flatten(loop_vars)]
    most = None if maximum_iterations is None else _known(maximum_iterations)
    is_limited = maximum_iterations is not None
    for steps in range(MOST_UNROLLED + 1):
        if is_limited and most is not None and steps >= most:
            return tf.nest.pack_sequence_as(loop_vars, values)
        goes_on = _known(cond(*tf.nest.pack_sequence_as(loop_vars, values)))
        if goes_on is None or (is_limited and most is None):
            if steps:
                break
            options = {"maximum_iterations": maximum_iterations, **kwargs}
            return loop(cond, body, loop_vars, *args, **options)
        if not goes_on:
            return tf.nest.pack_sequence_as(loop_vars, values)
        if steps == MOST_UNROLLED:
            break
        made = body(*tf.nest.pack_sequence_as(loop_vars, values))
        values = [_counted(each) for each in tf.nest.flatten(made)]
    raise UnsupportedLayerError(
        "A loop is taken step by step if it has a known number of steps, "
        f"{MOST_UNROLLED} at most. Received: one with more, or that data end. Use "
        "`keras.ops.fori_loop(0, 8, body, x)`."
    )


def _counted(value: Nest) -> Nest:
    """Return a tensor, as a constant if it counts."""
    if isinstance(value, tf.TensorArray):
        return value
    tensor = tf.convert_to_tensor(value)
    known = _known(tensor) if tensor.shape.rank == 0 else None
    return tensor if known is None else tf.constant(known, tensor.dtype)


def _known(value: Nest) -> Nest:
    """Return the value of a scalar that is the same for all data; None if it is not."""
    tensor = tf.convert_to_tensor(value)
    known = tf.get_static_value(tensor)
    if known is None:
        known = static_length(tensor.op)
    if known is not None or tensor.op.type not in _COUNTING:
        return known
    inputs = [_known(each) for each in tensor.op.inputs]
    if any(each is None for each in inputs):
        return None
    dtypes = [each.dtype for each in tensor.op.inputs]
    precision = next((dtype for dtype in dtypes if dtype.is_floating), tf.float32)
    with tf.init_scope():
        made: Tensor = again_on(
            tensor.op, list(map(tf.constant, inputs, dtypes)), precision
        )
        return made.numpy()
