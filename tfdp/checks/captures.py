"""What graphs read beside their inputs: variables, and tensors of the graph around them."""

from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tfdp import _keras, _seeds
from tfdp._types import Tensor
from tfdp.checks.graph import METRIC
from tfdp.checks.node import SEEDS, SHARED_SEEDS
from tfdp.checks.values import FREE, Cause, Value

READS_METRIC = "reads a metric, which holds data without noise"


class Captures:
    """Knows the variables that the graphs of a pass read.

    Args:
        model: Whose pass it is; None for a loss alone.
    """

    def __init__(self, model: keras.Model | None) -> None:
        """Begin with nothing."""
        self._model = model
        # Handles of the states that seeds are drawn from.
        self._seeds: dict[int, str] = {}

    def note_seeds(self) -> None:
        """Note the states that seeds are drawn from, while they are known."""
        model = self._model
        states = _seeds.states_of_drawing()
        states += [] if model is None else _keras.seed_states(model)
        shared = [] if model is None else _keras.shared_seed_states(model)
        for name, of in ((SEEDS, states), (SHARED_SEEDS, shared)):
            for state in of:
                for each in _keras.tensorflow_variables(state):
                    self._seeds[id(each.handle)] = name

    def known(self, graph: tf.Graph, given: Sequence[Value]) -> dict[str, Value]:
        """Say what is known of the inputs of a graph.

        Args:
            graph: The graph.
            given: What is known of its first inputs. Behind these are what it captures.

        Returns:
            What is known, by the names of operations. Of the variables, their own names.
        """
        inputs = zip(graph.inputs, given, strict=False)
        known = {tensor.op.name: value for tensor, value in inputs}
        names = {id(v.handle): v.name.removesuffix(":0") for v in graph.variables}
        metrics: set[int] = set()
        if self._model is not None:
            metrics = {id(handle) for handle in _keras.metrics_handles(self._model)}
            for variable in self._model.variables:
                for each in _keras.tensorflow_variables(variable):
                    names[id(each.handle)] = variable.path
        for outer, inner in graph.captures:
            if outer.dtype != tf.resource:
                continue
            value = FREE._replace(variable=names.get(id(outer), "of an unknown name"))
            if id(outer) in self._seeds:
                value = value._replace(variable=self._seeds[id(outer)])
            if id(outer) in metrics:
                cause = Cause(inner.op, inner.op, True, READS_METRIC)
                value = value._replace(variable=METRIC, causes=frozenset({cause}))
            known[inner.op.name] = value
        return known


def outer_tensors(graph: tf.Graph) -> list[tuple[Tensor, Tensor]]:
    """List the tensors of the outer graph that a graph reads, with its own for them."""
    return [
        (outer, inner)
        for outer, inner in graph.captures
        if outer.dtype != tf.resource and tf.is_symbolic_tensor(outer)
    ]


def reads_metric(tensors: Iterable[Tensor], model: keras.Model) -> bool:
    """Tell whether tensors are made of what a metric keeps.

    Args:
        tensors: Of a graph. Of others nobody knows what they are made of.
        model: Whose metrics they are, and those of its callbacks.

    Returns:
        Whether any leads to a variable of one.
    """
    handles = {id(handle) for handle in _keras.metrics_handles(model)}
    stack, seen = list(tensors), set()
    while stack:
        tensor = stack.pop()
        if id(outermost(tensor)) in handles:
            return True
        if tf.is_symbolic_tensor(tensor) and tensor.op.name not in seen:
            seen.add(tensor.op.name)
            stack += tensor.op.inputs
    return False


def outermost(tensor: Tensor) -> Tensor:
    """Return what a tensor is where it was captured first."""
    while isinstance(getattr(tensor, "graph", None), tf.Graph):
        captures = getattr(tensor.graph, "captures", ())
        outer = next((out for out, inner in captures if inner is tensor), None)
        if outer is None:
            return tensor
        tensor = outer
    return tensor
