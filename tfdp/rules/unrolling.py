"""Takes loops step by step, so that what is in them can be recorded."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdp._types import Nest
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.counting import known_scalar

# Each takes its operations once more in the graph.
MOST_UNROLLED = 64

while_loop = tf.while_loop


class NotUnrolledError(UnsupportedLayerError):
    """A loop has too many steps, or nobody knows how many."""


class _Running(threading.local):
    """What runs loops in this thread, if it is not TensorFlow."""

    run: Callable[..., Nest] | None = None


_running = _Running()


@functools.wraps(while_loop)
def _while_loop(*args: Nest, **kwargs: Nest) -> Nest:
    return (_running.run or while_loop)(*args, **kwargs)


@contextlib.contextmanager
def loops_run_by(run: Callable[..., Nest]) -> Iterator[None]:
    """Let a function run in the place of `tf.while_loop`, in this thread."""
    # Outside of these contexts the replacement does what the original does.
    tf.while_loop = _while_loop
    before, _running.run = _running.run, run
    try:
        yield
    finally:
        _running.run = before


def unrolled(
    cond: Callable[..., Nest],
    body: Callable[..., Nest],
    loop_vars: Nest,
    *args: Nest,
    maximum_iterations: Nest = None,
    **kwargs: Nest,
) -> Nest:
    """Do what `tf.while_loop` does, in as many steps in the graph.

    Args:
        cond: As in `tf.while_loop`, which runs if nobody knows how many steps there are.
        body: Likewise.
        loop_vars: Likewise.
        *args: Its other arguments.
        maximum_iterations: Likewise.
        **kwargs: Its other arguments.

    Returns:
        What `tf.while_loop` would.

    Raises:
        NotUnrolledError: If there are more than `MOST_UNROLLED` steps, or the data
            decide after how many it ends.
    """
    options = {"maximum_iterations": maximum_iterations, **kwargs}
    if args or not kwargs.get("back_prop", True):
        # It may be that no gradient is to come back through it.
        return while_loop(cond, body, loop_vars, *args, **options)
    values = [_counted(each) for each in tf.nest.flatten(loop_vars)]
    most = None if maximum_iterations is None else known_scalar(maximum_iterations)
    is_limited = maximum_iterations is not None
    for steps in range(MOST_UNROLLED + 1):
        if is_limited and most is not None and steps >= most:
            return tf.nest.pack_sequence_as(loop_vars, values)
        goes_on = known_scalar(cond(*tf.nest.pack_sequence_as(loop_vars, values)))
        if goes_on is None or (is_limited and most is None):
            if steps:
                break
            return while_loop(cond, body, loop_vars, **options)
        if not goes_on:
            return tf.nest.pack_sequence_as(loop_vars, values)
        if steps == MOST_UNROLLED:
            break
        made = body(*tf.nest.pack_sequence_as(loop_vars, values))
        values = [_counted(each) for each in tf.nest.flatten(made)]
    raise NotUnrolledError(
        f"A loop is taken step by step if it has {MOST_UNROLLED} steps at most, and their "
        "number does not depend on the data. Received: a loop with more, or with an end "
        "by the data. Use `keras.ops.fori_loop(0, 8, body, x)`."
    )


def _counted(value: Nest) -> Nest:
    """Return a tensor, as a constant if it counts."""
    if isinstance(value, tf.TensorArray):
        return value
    tensor = tf.convert_to_tensor(value)
    known = known_scalar(tensor) if tensor.shape.rank == 0 else None
    return tensor if known is None else tf.constant(known, tensor.dtype)
