"""What is found in the graph of a pass, and words for where it was made."""

import os
import sysconfig
from pathlib import Path
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfdp.checks.node import COUNTS
from tfdp.checks.values import Cause

# In place of a layer: the loss.
LOSS = "loss"

_LIBRARIES = tuple(f"{Path(module.__file__).parent}{os.sep}" for module in (keras, tf))
_STANDARD = sysconfig.get_path("stdlib")
_OWN = f"{Path(__file__).parents[1]}{os.sep}"


# Where the operations of a backward pass are.
GRADIENTS = "gradient_tape/"

# Whose operations they are: a layer's; `LOSS`, or the path of a variable; or nobody's.
Owner: TypeAlias = keras.layers.Layer | str | None


class Found(NamedTuple):
    """Something that lets rows meet, or keeps what they hold.

    Attributes:
        layer: The innermost layer whose call does it; `LOSS`, or the path of the
            variable whose gradient is in question; None elsewhere.
        cause: What does it.
    """

    layer: Owner
    cause: Cause

    @property
    def counts_rows(self) -> bool:
        """Whether the matter is how many rows there are."""
        return self.cause.why == COUNTS

    @property
    def is_of_gradient(self) -> bool:
        """Whether it is part of a backward pass."""
        return bool(self.cause.outer.name.startswith(GRADIENTS))

    @property
    def operation(self) -> str:
        """What does what, and where: words for a message."""
        op = self.cause.op
        line = _line_of(op)
        where = f" ({line})" if line else ""
        return f"operation {op.type} `{op.name}`{where}"


def _line_of(op: tf.Operation) -> str | None:
    """Return the line of somebody's own code that made an operation, if one did."""
    # No code but that of libraries makes gradients: of what it is one says more.
    of_gradient = differentiated(op) if op.name.startswith(GRADIENTS) else []
    for each in [op, *of_gradient]:
        line = None
        is_called = False
        for frame in each.traceback or ():
            if frame.filename.startswith(_OWN):
                is_called = True
            elif is_called and not _is_of_library(frame.filename):
                line = f"{frame.filename}:{frame.lineno}"
        if line is not None:
            return line
    return None


def _is_of_library(filename: str) -> bool:
    # What is installed may be in a folder of the standard library.
    is_standard = filename.startswith(_STANDARD) and "-packages" not in filename
    return is_standard or filename.startswith(_LIBRARIES)


def differentiated(op: tf.Operation) -> list[tf.Operation]:
    """List operations that one of a backward pass is the gradient of, or near it."""
    scope = op.name
    while scope.startswith(GRADIENTS):
        scope = scope.removeprefix(GRADIENTS)
    operations = op.graph.get_operations()
    near: list[tf.Operation] = []
    while "/" in scope and not near:
        scope = scope.rpartition("/")[0]
        near = [each for each in operations if f"{each.name}/".startswith(f"{scope}/")]
    return near
