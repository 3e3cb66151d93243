"""Runs a model a few times on changed rows, and notes what its layers do."""

import collections
import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._comparison import (
    ROWS,
    agree,
    moved_from_zero,
    probe_rows,
    span,
    tolerance_of,
    with_others_changed,
)


@dataclasses.dataclass(frozen=True)
class Findings:
    """What the layers of a model did in training mode.

    Attributes:
        layers: The model and all layers in it, with the paths that lead to them;
            below they go by `id`.
        training: Layers that were called with ``training=True``.
        adding_loss: Layers that called `add_loss`.
        unrepeatable: Layers that gave something else for the same inputs.
        mixing: Layers whose output in one row changed with the other rows.
        memory: Names of the variables that changed with the data, by layer.
    """

    layers: list[tuple[str, keras.layers.Layer]]
    training: set[int]
    adding_loss: set[int]
    unrepeatable: set[int]
    mixing: set[int]
    memory: dict[int, list[str]]


def probe(model: keras.Model, x: Any) -> Findings:
    """Run a model in training mode a few times, and put everything back.

    Args:
        model: Built if it was not.
        x: Inputs as for `fit`, with one row or more.

    Returns:
        What its layers did.

    Raises:
        ValueError: If an array of `x` has no rows.
    """
    rows = probe_rows("x", x)
    _build(model, rows)
    layers = _keras.layers_by_path(model)
    with _passes(model, layers) as forward:
        plain = forward(rows)
        again = forward(rows, plain)
        changed = [
            forward(with_others_changed(rows, row), plain, row) for row in range(ROWS)
        ]
        fewer = forward(_tree.map_tensors(lambda leaf: leaf[: ROWS // 2], rows))
    return Findings(
        layers=layers,
        training=plain.training,
        adding_loss=plain.adding_loss,
        unrepeatable=again.differing,
        mixing=set[int]().union(*(run.differing for run in changed)) - again.differing,
        memory=_data_dependent(layers, [plain, again, *changed, fewer]),
    )


class _Call(NamedTuple):
    inputs: list[Any]
    outputs: list[Any]


class _Pass:
    """A forward pass in training mode, compared with an earlier one.

    A layer that was given what it was given before, in the rows that are compared,
    but returns something else there, is noted and its output corrected. So the
    layers after it are still probed, and a layer around it is not blamed for it.

    Args:
        tolerance: Relative difference that counts as none.
        reference: The earlier pass; None to compare with nothing.
        row: The row of the batch to compare; None for all of them.

    Attributes:
        differing: The layers that were noted; these and all below by `id`.
        training: The layers that were called with ``training=True``.
        adding_loss: The layers that called `add_loss`.
        calls: The eager calls of each layer.
        moved: Bytes of the variables that had changed at the end.
    """

    def __init__(
        self, tolerance: float, reference: "_Pass | None", row: int | None
    ) -> None:
        self.differing: set[int] = set()
        self.training: set[int] = set()
        self.adding_loss: set[int] = set()
        self.moved: dict[int, bytes] = {}
        self._tolerance = tolerance
        self._reference = reference
        self._row = row
        self.calls: dict[int, list[_Call]] = collections.defaultdict(list)

    @contextlib.contextmanager
    def observing(self, layers: list[tuple[str, keras.layers.Layer]]) -> Iterator[None]:
        """Put this pass between the layers and what calls them."""
        # Entries of the instances, which Keras does not track as attributes.
        replaced = []
        try:
            for _, layer in layers:
                call = functools.partial(self.call, layer, layer.call)
                for name, tap in (
                    ("call", functools.wraps(layer.call)(call)),
                    ("add_loss", functools.partial(self.add_loss, layer)),
                ):
                    replaced.append((vars(layer), name, vars(layer).get(name)))
                    vars(layer)[name] = tap
            yield
        finally:
            for attributes, name, original in replaced:
                del attributes[name]
                if original is not None:
                    attributes[name] = original

    def add_loss(self, layer: keras.layers.Layer, _: Any) -> None:
        """Note that the layer adds a loss, in place of adding it."""
        self.adding_loss.add(id(layer))

    def call(
        self,
        layer: keras.layers.Layer,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return what `function` does for the layer, compared with the earlier pass."""
        training = kwargs.get("training")
        if tf.is_tensor(training) or training:
            self.training.add(id(layer))
        outputs = function(*args, **kwargs)
        if not tf.executing_eagerly():
            return outputs  # What traces this is part of an eager call, compared too.
        call = _Call(_tensors((args, kwargs)), _tensors(outputs))
        known = self._known_call(layer)
        self.calls[id(layer)].append(call)
        if (
            known is None
            or not self._agree(call.inputs, known.inputs)
            or self._agree(call.outputs, known.outputs)
        ):
            return outputs
        self.differing.add(id(layer))
        if len(call.outputs) != len(known.outputs):
            return outputs
        corrected = map(self._corrected, call.outputs, known.outputs)
        return keras.tree.map_structure(
            lambda leaf: next(corrected) if tf.is_tensor(leaf) else leaf, outputs
        )

    def _known_call(self, layer: keras.layers.Layer) -> _Call | None:
        """Return the call of the earlier pass that corresponds to the next one."""
        if self._reference is None:
            return None
        known = self._reference.calls[id(layer)][len(self.calls[id(layer)]) :]
        return known[0] if known else None

    def _agree(self, tensors: list[Any], known: list[Any]) -> bool:
        return agree(tensors, known, self._row, self._tolerance)

    def _corrected(self, tensor: Any, known: Any) -> Any:
        """Return `tensor` with the known rows where rows are compared."""
        if not isinstance(tensor, tf.Tensor) or tensor.shape != known.shape:
            return tensor
        compared = np.zeros(tensor.shape, bool)
        compared[span(compared, self._row)] = True
        return tf.where(compared, known, tensor)


@contextlib.contextmanager
def _passes(
    model: keras.Model, layers: list[tuple[str, keras.layers.Layer]]
) -> Iterator[Callable[..., _Pass]]:
    """Yield a function that runs passes of the model, each from the same state.

    Trainable variables are moved away from zero, because a gate or a head that
    starts at zero would hide what it will let through later.
    """
    tolerance = tolerance_of(layer.compute_dtype for _, layer in layers)
    rng = np.random.default_rng(0)
    with _keras.own_global_seed() as seed:
        own = [variable for _, variable in _variables(layers)]
        held = [*own, *model.metrics_variables, seed.state]
        originals = [variable.numpy() for variable in held]
        chance = random.getstate()
        trainable = {id(variable) for variable in model.trainable_variables}
        start = [
            moved_from_zero(value, rng) if id(variable) in trainable else value
            for variable, value in zip(held, originals, strict=True)
        ]

        def forward(
            batch: Any, reference: _Pass | None = None, row: int | None = None
        ) -> _Pass:
            _assign(held, start)
            random.setstate(chance)
            run = _Pass(tolerance, reference, row)
            with run.observing(layers):
                x = _tree.map_tensors(tf.convert_to_tensor, batch)
                run.call(model, model, x, training=True)
            for variable, value in zip(own, start, strict=False):
                now = variable.numpy()
                if not np.array_equal(_bits(now), _bits(value)):
                    run.moved[id(variable)] = now.tobytes()
            if reference is not None:
                run.calls.clear()  # All activations; the reference keeps its own.
            return run

        try:
            yield forward
        finally:
            _assign(held, originals)
            random.setstate(chance)


def _build(model: keras.Model, rows: Any) -> None:
    """Create the variables of the model, if need be, without running it."""
    if all(layer.built for _, layer in _keras.layers_by_path(model)):
        return
    signature = _tree.map_tensors(
        lambda leaf: tf.TensorSpec(
            [None, *leaf.shape[1:]], tf.convert_to_tensor(leaf).dtype
        ),
        rows,
    )
    trace = tf.function(lambda x: model(x, training=False), autograph=False)
    trace.get_concrete_function(signature)


def _variables(
    layers: list[tuple[str, keras.layers.Layer]],
) -> list[tuple[keras.layers.Layer, Any]]:
    """Return all variables but those of metrics, each with its innermost layer."""
    owned = {}
    for _, layer in layers:  # Parents come before their children.
        nodes = tf.train.TrackableView(layer).descendants()
        tracked_by_tensorflow = [
            node for node in nodes if isinstance(node, tf.Variable)
        ]
        for variable in [*layer.variables, *tracked_by_tensorflow]:
            owned[id(variable)] = (layer, variable)
    return list(owned.values())


def _data_dependent(
    layers: list[tuple[str, keras.layers.Layer]], passes: list[_Pass]
) -> dict[int, list[str]]:
    """Return the names, by layer, of state that ended differently in some pass."""
    names: dict[int, list[str]] = collections.defaultdict(list)
    _, model = layers[0]
    seeds = {id(v) for v in model.variables} - {id(v) for v in model.weights}
    for layer, variable in _variables(layers):
        ends = {run.moved.get(id(variable)) for run in passes}
        if len(ends) > 1 and id(variable) not in seeds:
            names[id(layer)].append(variable.name.removesuffix(":0"))
    return names


def _bits(value: Any) -> Any:
    """Return a view of an array in which NaN equals NaN."""
    size = value.dtype.itemsize
    return np.ravel(value).view(f"u{size}" if size <= 8 else "u1")


def _assign(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(tree) if tf.is_tensor(leaf)]
