"""Metrics that keep data in their own variables alone, which no model has in it."""

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor, Variable
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.uses import has_functions

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

_BRANCHES = {"Case", "If", "StatelessCase", "StatelessIf"}


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
            its value from before again.
    """
    if tf.executing_eagerly():
        with _values_compared(model):
            yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    _check_assigned(model, graph.get_operations()[before:])


@contextlib.contextmanager
def only_metrics_reset(model: keras.Model) -> Iterator[None]:
    """As `only_metrics_assigned`, while Keras resets metrics, which it does eagerly."""
    found = [(metric, *getattr(metric, "metrics", ())) for metric in model.metrics]
    are_kerass = all(
        each.reset_state.__module__.startswith("keras.")
        for parts in found
        for each in parts
    )
    with contextlib.nullcontext() if are_kerass else _values_compared(model):
        yield


def _check_assigned(model: keras.Model, operations: list[tf.Operation]) -> None:
    own = _own(model)
    for op in operations:
        for handle in _changed(op):
            known = _outermost(handle)
            if id(known) not in own:
                _refuse(model, _name_of(model, known, op))


def _own(model: keras.Model) -> set[int]:
    """Identify the handles that metrics may assign to, and draw random numbers with."""
    _keras.note_metrics(model)
    of_global = _keras.handles_of(_keras.global_seed_state())
    return {id(each) for each in (*_keras.metrics_handles(model), *of_global)}


def _variables(model: keras.Model) -> list[Variable]:
    optimizer = getattr(model, "optimizer", None)
    return [*model.variables, *(optimizer.variables if optimizer else ())]


def _changed(op: tf.Operation) -> list[Tensor]:
    """List those of an operation's inputs that it may change, or what it calls."""
    handles = [each for each in op.inputs if each.dtype == tf.resource]
    # What replicas add up together takes a resource that orders it.
    if not handles or op.type in _ONLY_READ or op.type.startswith("Collective"):
        return []
    if not has_functions(op):
        return handles
    # The first input of a branch tells which one is taken.
    arguments = list(op.inputs)[op.type in _BRANCHES :]
    changed: list[Tensor] = []
    for body in _bodies(op):
        if len(body.inputs) != len(arguments):
            return handles
        outer = dict(zip(map(id, body.inputs), arguments, strict=True))
        for inner in body.get_operations():
            found = [outer.get(id(each)) for each in _changed(inner)]
            if any(each is None for each in found):
                return handles
            changed += found
    return changed


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


def _name_of(model: keras.Model, handle: Tensor, op: tf.Operation) -> str:
    for variable in _variables(model):
        if any(each is handle for each in _keras.handles_of(variable)):
            return f"`{variable.path}`"
    return f"what operation `{op.name}` ({op.type}) changes"


@contextlib.contextmanager
def _values_compared(model: keras.Model) -> Iterator[None]:
    own = _own(model)
    variables = [
        each
        for each in _variables(model)
        if own.isdisjoint(map(id, _keras.handles_of(each)))
    ]
    before = [np.array(each.numpy()) for each in variables]
    yield
    changed = [
        (variable, value)
        for variable, value in zip(variables, before, strict=True)
        # Bytes: no NaN equals another.
        if variable.numpy().tobytes() != value.tobytes()
    ]
    for variable, value in changed:
        variable.assign(value)
    for variable, _ in changed:
        _refuse(model, f"`{variable.path}`")


def _refuse(model: keras.Model, what: str) -> NoReturn:
    raise UnsupportedLayerError(
        f"Metrics of model `{model.name}` must keep what they see of rows, without noise, in "
        f"their own variables alone. Received: {what}, assigned by one. Make the variables "
        "of a metric with `self.add_variable(...)` in its `__init__`, and assign no others."
    )
