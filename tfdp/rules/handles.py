"""Finds variables in the graph that is being made, by their handles."""

from collections.abc import Iterable

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor, Variable
from tfdp.rules.free import Free


class Handles:
    """Knows variables in the graph that is being made.

    Args:
        variables: The variables.
        free: What is made without rows.
    """

    def __init__(self, variables: Iterable[Variable], free: Free) -> None:
        self._free = free
        known = {
            id(copy.handle): (variable, copy)
            for variable in variables
            for copy in _keras.tensorflow_variables(variable)
        }
        self._known = known
        # In a graph a handle may be a placeholder itself.
        self._placeholders = {
            inner.name: known[id(handle)]
            for handle, inner in tf.compat.v1.get_default_graph().captures
            if id(handle) in known
        }

    def of(self, tensor: Tensor) -> tuple[Variable, tf.Variable] | None:
        """Return the variable that a tensor is the handle of."""
        if tf.is_symbolic_tensor(tensor):
            return self._placeholders.get(tensor.name)
        return self._known.get(id(tensor))

    def paths_behind(self, tensor: Tensor) -> list[str]:
        """List the paths of variables that a tensor without rows is made of."""
        if not (tensor.dtype.is_floating and self._free.holds(tensor)):
            return []
        paths, seen, stack = set(), set(), [tensor]
        while stack:
            each = stack.pop()
            known = self.of(each)
            if known is not None:
                paths.add(known[0].path)
            if tf.is_symbolic_tensor(each) and each.op.name not in seen:
                seen.add(each.op.name)
                stack += each.op.inputs
        return sorted(paths)
