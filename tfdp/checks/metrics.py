"""Metrics and losses that keep data in variables of metrics alone, which no model has in it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Array, Tensor, Variable
from tfdp.checks.graph import BRANCHES, LOOPS
from tfdp.errors import UnsupportedLayerError
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


# In place of the name of a variable that is neither the model's nor the optimizer's.
_UNKNOWN = ""


@contextlib.contextmanager
def only_metrics_assigned(model: keras.Model) -> Iterator[None]:
    """Refuse that metrics which are computed inside keep data in anything but themselves.

    They see rows without noise. In a weight these would be released, in an optimizer's
    dial they would steer it, and what a layer or a loss reads would let rows meet those of
    later steps.

    In a graph every operation inside is looked at, and what it calls. Eagerly the values of
    the model's and the optimizer's variables are compared: other variables are not seen.

    Args:
        model: A compiled `tfdp.DPModel`.

    Raises:
        UnsupportedLayerError: Afterwards, if anything else was assigned. Eagerly it has
            its value from before again. Also if a metric has a variable of the model or
            the optimizer as an attribute, which Keras takes for the metric's.
    """
    with _changes(_variables(model)) as changes:
        yield
    own, known = _own(model), _handles(_variables(model))
    changes.refuse(
        model, lambda handle: None if handle in own else known.get(handle, _UNKNOWN)
    )


@contextlib.contextmanager
def only_metrics_called(model: keras.Model, method: str) -> Iterator[None]:
    """As `only_metrics_assigned`, while Keras calls a method of all metrics eagerly."""
    _own(model)
    are_kerass = all(
        getattr(metric, method).__module__.startswith("keras.")
        for metric in _metrics(model)
    )
    is_known = are_kerass or not tf.executing_eagerly()
    with contextlib.nullcontext() if is_known else only_metrics_assigned(model):
        yield


@contextlib.contextmanager
def losses_keep_nothing(model: keras.Model, *, training: bool) -> Iterator[None]:
    """Refuse that a loss which is computed for logs keeps data in a weight or a dial.

    What it counts in other variables of the model has its value from before again: the
    step counts it, and what it keeps there is proven to be of no row. So are its own
    variables, in training.

    Args:
        model: See `only_metrics_assigned`.
        training: Whether it is computed after a step. In evaluation it may assign no
            variables of its own either, which a step may read; eagerly they are not seen.

    Raises:
        UnsupportedLayerError: Afterwards, if a weight or a dial was assigned.
    """
    seeds = _keras.seed_states(model)
    drawn = set(map(id, seeds))
    states = [v for v in model.non_trainable_variables if id(v) not in drawn]
    others = {id(each) for each in (*states, *seeds)}
    of_seeds = {
        *_handles(seeds),
        *map(id, _keras.handles_of(_keras.global_seed_state())),
    }
    before = [tf.identity(state.value) for state in states]
    with _changes(_variables(model)) as changes:
        yield
    known = _handles(each for each in _variables(model) if id(each) not in others)
    may_change = _own(model) | _handles(states).keys()

    def name_of(handle: int) -> str | None:
        if handle in of_seeds:
            return _UNKNOWN
        if handle in known or training or handle in may_change:
            return known.get(handle)
        return _UNKNOWN

    changes.refuse(model, name_of)
    for state, value in zip(states, before, strict=True):
        if not changes.handles.keys().isdisjoint(_handles([state])):
            state.assign(value)


@dataclasses.dataclass(frozen=True)
class _Changes:
    """What was assigned inside of `_changes`, once that has ended.

    Attributes:
        handles: What has changed, in words, by the `id` of its handle.
        drawn: Handles of what is like the state of a generator, and was only drawn with.
        values: Eagerly, variables and what they were before.
    """

    handles: dict[int, str] = dataclasses.field(default_factory=dict)
    drawn: set[int] = dataclasses.field(default_factory=set)
    values: list[tuple[Variable, Array]] = dataclasses.field(default_factory=list)

    def refuse(self, model: keras.Model, name_of: Callable[[int], str | None]) -> None:
        """Raise if something was assigned that may not be.

        Args:
            model: For the message.
            name_of: Takes a handle; returns None where it may be assigned, else its name,
                or `_UNKNOWN`, which may be drawn with.

        Raises:
            UnsupportedLayerError: If it was.
        """
        for handle, words in self.handles.items():
            name = name_of(handle)
            if name is None or (name == _UNKNOWN and handle in self.drawn):
                continue
            for variable, value in self.values:
                variable.assign(value)
            raise UnsupportedLayerError(
                f"Metrics and losses of model `{model.name}` must keep what they see of "
                "rows, without noise, in variables of metrics alone. Received: "
                f"{name or words}, assigned by one. Make variables with "
                "`self.add_variable(...)` in the `__init__` of a metric, and assign no "
                "others; keep in a loss nothing of what it is computed for; and draw random "
                "numbers as often as no data say."
            )


@contextlib.contextmanager
def _changes(variables: list[Variable]) -> Iterator[_Changes]:
    """Find what is assigned inside: anything in a graph, eagerly of these variables."""
    changes = _Changes()
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        yield changes
        assigned = set()
        for op in graph.get_operations()[first:]:
            words = f"what operation `{op.name}` ({op.type}) changes"
            for inner, is_drawn in _changed(op):
                handle = _outermost(inner)
                changes.handles[id(handle)] = words
                if not (is_drawn and _keras.is_of_seed(handle)):
                    assigned.add(id(handle))
        changes.drawn.update(changes.handles.keys() - assigned)
        return
    before = [np.array(each.numpy()) for each in variables]
    yield changes
    for variable, value in zip(variables, before, strict=True):
        # Bytes: no NaN equals another.
        if variable.numpy().tobytes() == value.tobytes():
            continue
        if any(map(_keras.is_of_seed, _keras.handles_of(variable))):
            # As one draw leaves it: nobody sees what else was assigned.
            variable.assign(value + np.array([0, 1], value.dtype))
            changes.drawn.update(_handles([variable]))
        else:
            changes.values.append((variable, value))
        changes.handles.update(_handles([variable]))


def _metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """List all metrics, those that Keras has put into one for `compile` behind it."""
    metrics = [*model.metrics, *_keras.metrics_of(model.model)]
    return [
        *metrics,
        *(part for each in metrics for part in getattr(each, "metrics", ())),
    ]


def _own(model: keras.Model) -> set[int]:
    """Identify the handles that metrics may assign to.

    Args:
        model: See `only_metrics_assigned`.

    Returns:
        The `id` of each.

    Raises:
        UnsupportedLayerError: If a metric has a variable that is not its own.
    """
    _keras.note_metrics(model)
    others = _handles(_variables(model))
    for metric in reversed(_metrics(model)):
        for variable in metric.variables:
            if not others.keys().isdisjoint(_handles([variable])):
                raise UnsupportedLayerError(
                    "A metric must not have a variable of the model or the optimizer as an "
                    "attribute: Keras takes it for the metric's own, and sets it to zero. "
                    f"Received: metric `{metric.name}` with `{variable.path}`. Hold it in "
                    "a function, `self.value = lambda: optimizer.learning_rate`."
                )
    return set(map(id, _keras.metrics_handles(model)))


def _variables(model: keras.Model) -> list[Variable]:
    optimizer = getattr(model, "optimizer", None)
    return [*model.variables, *(optimizer.variables if optimizer else ())]


def _handles(variables: Iterable[Variable]) -> dict[int, str]:
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
        return False
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
    outer = _outermost(tensor)
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


def _outermost(tensor: Tensor) -> Tensor:
    """Return what a tensor is where it was captured first."""
    while isinstance(getattr(tensor, "graph", None), tf.Graph):
        captures = getattr(tensor.graph, "captures", ())
        outer = next((out for out, inner in captures if inner is tensor), None)
        if outer is None:
            return tensor
        tensor = outer
    return tensor
