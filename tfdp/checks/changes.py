"""What operations change: variables, and how often generators are drawn with."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor, Variable
from tfdp.checks.captures import outermost
from tfdp.checks.graph import BRANCHES, CALLS, LOOPS
from tfdp.rules.counting import count_steps
from tfdp.rules.uses import NotFollowedError

# What leaves a variable, or a table, as it is. All else that takes one may change it.
_ONLY_READ = {
    "Identity",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarIsInitializedOp",
    "VariableShape",
}


@dataclasses.dataclass(frozen=True)
class Changes:
    """What was assigned inside of `changes_inside`, once that has ended.

    Attributes:
        words: What has changed, in words, by the `id` of its handle.
        drawn: Handles of what is like the state of a generator, and was only drawn with.
        before: Eagerly, variables and what they were before.
    """

    words: dict[int, str] = dataclasses.field(default_factory=dict)
    drawn: set[int] = dataclasses.field(default_factory=set)
    before: list[tuple[Variable, Tensor]] = dataclasses.field(default_factory=list)

    def has(self, variable: Variable) -> bool:
        """Tell whether a variable has changed."""
        return not self.words.keys().isdisjoint(paths_by_handle([variable]))

    def undo(self) -> None:
        """Give variables that changed eagerly what they had before."""
        for variable, value in self.before:
            variable.assign(value)


@contextlib.contextmanager
def changes_inside(variables: list[Variable]) -> Iterator[Changes]:
    """Find what is assigned inside: anything in a graph, eagerly of these variables."""
    changes = Changes()
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        yield changes
        assigned = set()
        for op in graph.get_operations()[first:]:
            words = f"what operation `{op.name}` ({op.type}) changes"
            for inner, is_drawn in _changed(op):
                handle = outermost(inner)
                changes.words[id(handle)] = words
                if not (is_drawn and _keras.is_of_seed(handle)):
                    assigned.add(id(handle))
        changes.drawn.update(changes.words.keys() - assigned)
        return
    # What is read is no copy, until something is assigned.
    before = [tf.convert_to_tensor(each.value) for each in variables]
    yield changes
    for variable, value in zip(variables, before, strict=True):
        if _is_same(tf.convert_to_tensor(variable.value), value):
            continue
        if any(map(_keras.is_of_seed, _keras.handles_of(variable))):
            # As one draw leaves it: nobody sees what else was assigned.
            variable.assign(value + tf.constant([0, 1], value.dtype))
            changes.drawn.update(paths_by_handle([variable]))
        else:
            changes.before.append((variable, value))
        changes.words.update(paths_by_handle([variable]))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Tell whether tensors have the same bits: no NaN equals another."""
    if one.dtype.is_floating or one.dtype.is_complex:
        one, other = (tf.bitcast(each, tf.uint8) for each in (one, other))
    return bool(tf.reduce_all(tf.equal(one, other)))


def paths_by_handle(variables: Iterable[Variable]) -> dict[int, str]:
    """Return the paths of variables by the `id` of their handles."""
    return {
        id(handle): f"`{variable.path}`"
        for variable in variables
        for handle in _keras.handles_of(variable)
    }


class _Scope(NamedTuple):
    """What the placeholders of a function stand for where it is called.

    Attributes:
        inputs: By the `id` of a placeholder.
        outer: Of the function that calls it; None for the graph that is looked at.
    """

    inputs: dict[int, Tensor]
    outer: "_Scope | None"


def _changed(
    op: tf.Operation, scope: _Scope | None = None
) -> list[tuple[Tensor, bool]]:
    """List those of an operation's inputs that it may change, or what it calls.

    Args:
        op: The operation.
        scope: Of the function that has it.

    Returns:
        Handles, and whether what they get follows from what they had alone, as where
        random numbers are drawn.
    """
    handles = [each for each in op.inputs if each.dtype == tf.resource]
    # What replicas add up together takes a resource that orders it.
    if not handles or op.type in _ONLY_READ or op.type.startswith("Collective"):
        return []
    anything = [(each, False) for each in handles]
    bodies = list(_bodies(op))
    if not bodies:
        return [(handles[0], True)] if _is_draw(op, scope) else anything
    # The first input of a branch tells which one is taken.
    arguments = list(op.inputs)[op.type in BRANCHES :]
    # How often it is drawn may be in the data.
    has_choice = _has_choice(op)
    changed: list[tuple[Tensor, bool]] = []
    for body in bodies:
        if len(body.inputs) != len(arguments):
            return anything
        outer = dict(zip(map(id, body.inputs), arguments, strict=True))
        inside = [
            each
            for inner in body.get_operations()
            for each in _changed(inner, _Scope(outer, scope))
        ]
        if any(id(handle) not in outer for handle, _ in inside):
            return anything
        changed += [
            (outer[id(handle)], is_drawn and not has_choice)
            for handle, is_drawn in inside
        ]
    return changed


def _has_choice(op: tf.Operation) -> bool:
    """Tell whether it is not known which function of an operation runs, or how often."""
    if op.type in BRANCHES:
        which = op.inputs[0]
        # TensorFlow has a branch where it gives a variable its first value.
        begins = which.op.type == "VarIsInitializedOp"
        return not begins and tf.get_static_value(which) is None
    if op.type not in LOOPS:
        return op.type not in CALLS
    cond, body = (
        _keras.function_graph(op.graph, op.get_attr(name).name)
        for name in ("cond", "body")
    )
    try:
        count_steps(cond, body, list(op.inputs))
    except NotFollowedError:
        return True
    return False


def _is_draw(op: tf.Operation, scope: _Scope | None) -> bool:
    """Tell whether all that is assigned is made of what was there, and of constants."""
    if op.type != "AssignVariableOp":
        return False
    handle, value = op.inputs
    stack, seen = [(value, scope)], set()
    while stack:
        tensor, where = stack.pop()
        if tensor.op.type == "Placeholder":
            outside = _outside(tensor, where)
            if outside is None:
                return False
            # What is no tensor of a graph was the same when it was made.
            stack += [outside] if tf.is_symbolic_tensor(outside[0]) else []
        elif tensor.op.type == "ReadVariableOp":
            if _first(tensor.op.inputs[0], where) is not _first(handle, scope):
                return False
        elif tensor.op.op_def.is_stateful:
            return False
        elif (tensor.op.graph, tensor.op.name) not in seen:
            seen.add((tensor.op.graph, tensor.op.name))
            stack += [(each, where) for each in tensor.op.inputs]
    return True


def _outside(
    tensor: Tensor, scope: _Scope | None
) -> tuple[Tensor, _Scope | None] | None:
    """Return what a placeholder stands for, and the scope of that; None if nobody knows."""
    if scope is not None:
        known = scope.inputs.get(id(tensor))
        return None if known is None else (known, scope.outer)
    outer = outermost(tensor)
    return None if outer is tensor else (outer, None)


def _first(tensor: Tensor, scope: _Scope | None) -> Tensor:
    """Return what a handle is where it was made."""
    while (outside := _outside(tensor, scope)) is not None:
        tensor, scope = outside
    return tensor


def _bodies(op: tf.Operation) -> Iterator[tf.Graph]:
    for attribute in op.op_def.attr:
        if "func" in attribute.type:
            found = op.get_attr(attribute.name)
            for function in found if isinstance(found, list) else [found]:
                yield _keras.function_graph(op.graph, function.name)
