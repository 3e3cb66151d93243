"""Follows a variable through the graph of a pass to where it meets the rows."""

from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor, Variable
from tfdp.rules.free import Free

# What tells of a tensor no more than its shape.
_SIZES = frozenset({"Shape", "ShapeN", "Size", "Rank", "VariableShape"})

# What no gradient comes back through.
_ENDS = frozenset({"StopGradient", "ZerosLike", "OnesLike"})

# What gives a variable another value. The analysis of rows proves that it holds no data.
_ASSIGNS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})


class NotFollowedError(Exception):
    """A variable is used in a way of which nothing is known; the message says where.

    Attributes:
        is_in_function: Whether that may be the function of a loop.
    """

    def __init__(self, where: str, *, is_in_function: bool = False) -> None:
        super().__init__(where)
        self.is_in_function = is_in_function


class Use(NamedTuple):
    """Where something that is made of a variable alone meets the rows.

    Attributes:
        op: The operation in which it does.
        place: Which of its inputs it is.
    """

    op: tf.Operation
    place: int

    @property
    def tensor(self) -> Tensor:
        """What is made of the variable."""
        return self.op.inputs[self.place]

    @property
    def output(self) -> Tensor:
        """What the operation makes of it and of the rows."""
        return self.op.outputs[0]


class Followed(NamedTuple):
    """What becomes of a variable.

    Attributes:
        variable: The Keras variable.
        made: Operations that make something of it and of no data, by their names.
        uses: Where that meets the rows.
    """

    variable: Variable
    made: dict[str, tf.Operation]
    uses: list[Use]

    def line_to(self, tensor: Tensor) -> list[tf.Operation] | None:
        """List the operations between where the variable is read and a tensor.

        Args:
            tensor: Something that is made of it.

        Returns:
            None if they are not one after the other.
        """
        line: list[tf.Operation] = []
        op = tensor.op
        while op.type != "ReadVariableOp":
            line.append(op)
            before = [each.op for each in op.inputs if each.op.name in self.made]
            if len(before) != 1:
                return None
            op = before[0]
        return line[::-1]


class Pass:
    """The operations of a pass, in the graph that is being made.

    Args:
        first: How many operations the graph had before.
        free: What is made without rows.
        by_rules: Where operations are that rules answer for.
        dead: Where operations are that nobody uses.
        captures: The handles of variables, and what they are in the graph; those that
            the graph has captured if None.
    """

    def __init__(
        self,
        first: int,
        free: Free,
        by_rules: list[range],
        dead: list[range],
        captures: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        graph = tf.compat.v1.get_default_graph()
        operations = graph.get_operations()
        self._captures = graph.captures if captures is None else captures
        self._places = {op.name: place for place, op in enumerate(operations)}
        self._first = first
        self._by_rules = by_rules
        self._dead = dead
        self._free = free

    def follow(self, variable: Variable) -> Followed:
        """Find all that is made of a variable, except by rules.

        Args:
            variable: A Keras variable.

        Returns:
            All of it.

        Raises:
            NotFollowedError: If something is not known.
        """
        touched = self._touched(variable)
        reads = [op for op in touched if op.type == "ReadVariableOp"]
        assigns = [op for op in touched if op.type in _ASSIGNS]
        for op in touched:
            if op.type != "ReadVariableOp" and op.type not in _ASSIGNS:
                raise NotFollowedError(named(op), is_in_function=has_functions(op))
        if not reads:
            raise NotFollowedError("a graph of its own", is_in_function=True)
        made = {op.name: op for op in reads}
        uses = self.uses_of([tensor for op in reads for tensor in op.outputs], made)
        if assigns and uses:
            # Nobody knows which of its values that was.
            raise NotFollowedError(named(assigns[0]))
        return Followed(variable, made, uses)

    def uses_of(
        self, tensors: list[Tensor], made: dict[str, tf.Operation]
    ) -> list[Use]:
        """Find where something that is made of variables meets the rows.

        Args:
            tensors: What is followed.
            made: The operations that made them, by their names; gains those that make
                something of them and of no data.

        Returns:
            The uses.

        Raises:
            NotFollowedError: If something is not known.
        """
        uses: list[Use] = []
        stack = list(tensors)
        while stack:
            tensor = stack.pop()
            consumers = self._consumers(tensor)
            if not consumers and tensor.shape == [self._free.number]:
                # It may be the losses themselves.
                raise NotFollowedError(f"{named(tensor.op)}, which nothing follows")
            for op in consumers:
                if op.name in made:
                    continue
                check_is_plain(op)
                if self._meets_rows(op):
                    uses.extend(
                        Use(op, place)
                        for place, each in enumerate(op.inputs)
                        if each.name == tensor.name
                    )
                    continue
                made[op.name] = op
                stack += [each for each in op.outputs if each.dtype.is_floating]
        return uses

    def matters(self, use: Use, losses: Tensor | None) -> bool:
        """Tell whether a gradient may come back to a use: none does from an `argmin`.

        Args:
            use: The use.
            losses: Where gradients come from; None if that is not known.

        Returns:
            False if none can.
        """
        numbers = [each for each in use.op.outputs if not _has_no_gradient(each)]
        stack, seen = numbers, {use.op.name}
        while stack:
            tensor = stack.pop()
            if losses is not None:
                if tensor.name == losses.name:
                    return True
            elif not tensor.consumers() and tensor.shape.rank != 0:
                # It may be the losses. A scalar was one that has been taken apart.
                return True
            for op in self._consumers(tensor):
                if op.name in seen:
                    continue
                seen.add(op.name)
                numbers = [e for e in op.outputs if not _has_no_gradient(e)]
                if any(each.dtype in {tf.variant, tf.resource} for each in numbers):
                    # It is in a list.
                    return True
                stack += numbers
        return False

    def leak_of(self, variable: Variable) -> tf.Operation | None:
        """Find what uses, outside of a call, what the call's rule makes of a variable.

        Args:
            variable: A Keras variable.

        Returns:
            An operation; None if there is none. What has met the rows is the rule's.
        """
        for read in self._all_reads(variable):
            # Calls inside of others end before these.
            spans = [span for span in self._by_rules if self._places[read.name] in span]
            if not spans:
                continue
            stack, seen = list(read.outputs), {read.name}
            while stack:
                for op in self._consumers(stack.pop()):
                    if op.name in seen:
                        continue
                    seen.add(op.name)
                    if not self._is_in(spans, op):
                        return op
                    if not self._meets_rows(op):
                        stack += op.outputs
        return None

    def _touched(self, variable: Variable) -> list[tf.Operation]:
        """List what reads or changes a variable, but for rules."""
        spans = [*self._by_rules, *self._dead]
        return [op for op in self._all_reads(variable) if not self._is_in(spans, op)]

    def _all_reads(self, variable: Variable) -> list[tf.Operation]:
        handles = {id(each.handle) for each in _keras.tensorflow_variables(variable)}
        return [
            op
            for outer, inner in self._captures
            if id(outer) in handles
            for op in _different(inner.consumers())
            if self._places.get(op.name, -1) >= self._first and op.type not in _SIZES
        ]

    def _consumers(self, tensor: Tensor) -> list[tf.Operation]:
        """List the operations through which gradients come back to a tensor."""
        return [
            op
            for op in _different(tensor.consumers())
            if op.type not in _SIZES | _ENDS
            and op.name in self._places
            and not self._is_in(self._dead, op)
            and not all(map(_has_no_gradient, op.outputs))
        ]

    def _is_in(self, spans: list[range], op: tf.Operation) -> bool:
        return any(self._places[op.name] in span for span in spans)

    def _meets_rows(self, op: tf.Operation) -> bool:
        return not all(map(self._free.holds, [*op.inputs, *op.outputs]))


def named(op: tf.Operation) -> str:
    """Return words for an operation in a message."""
    return f"operation {op.type} `{op.name}`"


def check_is_plain(op: tf.Operation) -> None:
    """Refuse what has functions, a state, complex numbers, or a gradient of its own.

    Args:
        op: An operation.

    Raises:
        NotFollowedError: If it does.
    """
    if has_functions(op):
        raise NotFollowedError(named(op), is_in_function=True)
    if (
        op.op_def.is_stateful
        or not all(e.dtype.is_floating or _has_no_gradient(e) for e in op.outputs)
        or _keras.has_own_gradient(op)
    ):
        raise NotFollowedError(named(op))


def has_functions(op: tf.Operation) -> bool:
    """Tell whether an operation calls functions, as loops and branches do."""
    return any("func" in attribute.type for attribute in op.op_def.attr)


def made_as(tensor: Tensor) -> Tensor:
    """Return what a graph returns a copy of."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _has_no_gradient(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return bool(dtype.is_integer or dtype.is_bool or dtype == tf.string)


def _different(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """List operations, each once."""
    return list({op.name: op for op in operations}.values())
