"""Copies operations of one graph into another."""

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor
from tfdp.rules.uses import NotFollowedError, has_functions, named


class Copies:
    """Copies operations of another graph into the one that is being made.

    Args:
        known: What to take in place of tensors of the other graph, by their names.

    Attributes:
        known: Likewise, with all copies.
    """

    def __init__(self, known: dict[str, Tensor]) -> None:
        self.known = known
        self._operations: dict[str, tf.Operation] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's copy; what it is made of is copied too, where it is not yet.

        Raises:
            NotFollowedError: See `copy`.
        """
        stack = [tensor]
        while stack:
            missing = [
                each for each in stack[-1].op.inputs if each.name not in self.known
            ]
            if stack[-1].name in self.known:
                stack.pop()
            elif missing:
                stack += missing
            else:
                self.copy(stack.pop().op)
        return self.known[tensor.name]

    def copy(self, op: tf.Operation) -> tf.Operation:
        """Copy an operation that is made of what is known.

        Returns:
            The copy.

        Raises:
            NotFollowedError: If it has functions or a gradient of its own, which may hold
                tensors of the other graph, or is an input that is not known.
        """
        if has_functions(op) or _keras.has_own_gradient(op) or op.type == "Placeholder":
            raise NotFollowedError(named(op), is_in_function=True)
        before = [
            self._operations[each.name]
            for each in op.control_inputs
            if each.name in self._operations
        ]
        attributes = op.node_def.attr
        with tf.control_dependencies(before):
            made = tf.compat.v1.get_default_graph().create_op(
                op.type,
                [self.known[each.name] for each in op.inputs],
                [each.dtype for each in op.outputs],
                name=op.name,
                attrs={
                    name: attributes[name]
                    for name in attributes
                    if not name.startswith("_")
                },
                op_def=op.op_def,
            )
        self._operations[op.name] = made
        pairs = zip(op.outputs, made.outputs, strict=True)
        self.known |= {old.name: new for old, new in pairs}
        return made
