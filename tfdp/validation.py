"""Checks that a model, and a loss, treat every example of a batch by itself.

A clipped gradient bounds what one example can do only if no other example's
gradient depends on it. The checks run the model, or the loss, on a few rows,
change all rows but one, and see whether anything changes in the row that stayed.
"""

import collections
import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError

# Halves of the batch, and every second row of it, are still two rows each.
_ROWS = 4

# Equal rows are computed alike in batches of one shape, up to rounding at most.
_TOLERANCES = {"float16": 1e-2, "bfloat16": 5e-2}
_TOLERANCE = 1e-4


class _Flaw(NamedTuple):
    reason: str
    fix: str


_BATCH_STATISTICS = _Flaw(
    "its batch statistics mix the examples, and its moving statistics keep data "
    "without noise",
    "Replace it by `keras.layers.GroupNormalization(groups=...)`, or freeze it: "
    "`layer.trainable = False`.",
)
_SPECTRAL = _Flaw(
    "it overwrites the kernel in every forward pass, also between the passes of one "
    "private step",
    "Use the layer that it wraps, with "
    "`kernel_constraint=keras.constraints.MaxNorm(...)`.",
)
_ACTIVITY = _Flaw(
    "its `activity_regularizer` is a loss of the activations of the whole batch",
    "Remove it, or regularize weights: `kernel_regularizer=...`.",
)
_ADDED_LOSS = _Flaw(
    "it calls `add_loss`, which takes one number for the whole batch",
    "Return what the loss needs as an output of the model, with a loss for it in "
    "`compile`; if it needs weights only, use `kernel_regularizer=...`.",
)
_UNREPEATABLE = _Flaw(
    "its output differs from call to call on the same inputs, so that nothing can be "
    "said about how it treats the rows of a batch",
    "Draw its random numbers by `keras.random` with `seed=self.seed_generator`, set "
    "in `__init__`: `self.seed_generator = keras.random.SeedGenerator()`.",
)
_MIXING = _Flaw(
    "its output for one row of the batch changes with the other rows",
    "Compute every row from itself alone: reduce over `axis=-1`, never over axis 0.",
)
_MEMORY = _Flaw(
    "its state {} changes with the data that pass through, and keeps them without "
    "noise",
    "Assign no variable from data in `call`; compute it before training from public "
    "data, as `keras.layers.Normalization.adapt` does.",
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A layer that breaks per-example privacy.

    Attributes:
        path: Names of the layers that lead to it from the model, joined by ``/``;
            the name of the model if it is the model itself.
        layer_class: Name of its class.
        reason: What it does.
        fix: What to do instead.
    """

    path: str
    layer_class: str
    reason: str
    fix: str

    def __str__(self) -> str:
        """Return all of it in one line."""
        return f"`{self.path}` ({self.layer_class}): {self.reason}. {self.fix}"


def validate_model(model: keras.Model, x: Any) -> list[Problem]:
    """Find what breaks per-example privacy in a model.

    Four rows of `x` pass through the model in training mode a few times. Found are
    layers that mix the rows of a batch, among them every BatchNormalization that is
    not frozen; state that keeps data; losses of activations; and layers whose random
    numbers cannot be repeated, since nothing can be said about them.

    Afterwards weights, random seeds, metrics and all other variables are what they
    were. A model that was not built is built.

    What is compared are true rows of `x`; only the rows beside them are made up. In
    those, whole numbers are those of another row or smaller, and strings those of
    another row, so that they are not outside of any vocabulary.

    Args:
        model: Any Keras model.
        x: Inputs of the model as for `fit`: an array or a nest of arrays, with one
            row or more. If all rows have the same strings, or are zeros in an array
            of integers, mixing of these cannot be seen.

    Returns:
        The problems in the order of the layers; empty if there are none.

    Raises:
        ValueError: If an array of `x` has no rows.

    Example:
        >>> model = keras.Sequential([
        ...     keras.layers.BatchNormalization(name="norm"),
        ...     keras.layers.Dense(1),
        ... ])
        >>> [problem.path for problem in validate_model(model, np.ones((8, 3)))]
        ['norm']
    """
    rows = _first_rows("x", x)
    _build(model, rows)
    layers = _keras.layers_by_path(model)
    with _probe(model, layers) as forward:
        plain = forward(rows)
        again = forward(rows, plain)
        changed = [
            forward(_with_others_changed(rows, row), plain, row) for row in range(_ROWS)
        ]
        fewer = forward(_tree.map_tensors(lambda leaf: leaf[: _ROWS // 2], rows))
    mixing = set[int]().union(*(run.differing for run in changed)) - again.differing
    memory = _data_dependent(layers, [plain, again, *changed, fewer])

    def flaws(layer: keras.layers.Layer) -> Iterator[_Flaw]:
        if id(layer) in plain.training:
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
                yield _BATCH_STATISTICS
                return
            if isinstance(layer, keras.layers.SpectralNormalization):
                yield _SPECTRAL
        if layer.activity_regularizer is not None:
            yield _ACTIVITY
        elif id(layer) in plain.adding_loss:
            yield _ADDED_LOSS
        if id(layer) in again.differing:
            yield _UNREPEATABLE
        if id(layer) in mixing:
            yield _MIXING
        if id(layer) in memory:
            names = ", ".join(f"`{name}`" for name in memory[id(layer)])
            yield _MEMORY._replace(reason=_MEMORY.reason.format(names))

    return [
        Problem(path, type(layer).__name__, *flaw)
        for path, layer in layers
        for flaw in flaws(layer)
    ]


def check_model(model: keras.Model, x: Any) -> None:
    """Raise one error that names all that breaks per-example privacy in a model.

    Args:
        model: Any Keras model.
        x: Inputs of the model, as for `validate_model`.

    Raises:
        UnsupportedLayerError: If there is any problem.
    """
    problems = validate_model(model, x)
    if problems:
        found = "".join(f"\n  * {problem}" for problem in problems)
        raise UnsupportedLayerError(
            f"Model `{model.name}` must treat every example of a batch alone and keep "
            f"no data. Received: model={model!r} with{found}"
        )


def check_loss(
    per_example_losses: Callable[[Any, Any, Any], Any],
    y: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> None:
    """Raise an error if the loss of one example depends on other examples.

    Args:
        per_example_losses: Function of targets, predictions and weights, each with
            examples on its leading axis, that returns the losses, shape ``(N,)``.
        y: Targets: an array, a nest of arrays, or None; one row or more.
        y_pred: Predictions for these rows.
        sample_weight: Weights of these rows, as `y`.

    Raises:
        UnsupportedLossError: If a loss changes with the other rows, or if there is
            not one loss for every row.
    """
    rows = (
        _first_rows("y", y),
        _first_rows("y_pred", y_pred),
        _first_rows("sample_weight", sample_weight),
    )
    tolerance = _tolerance(leaf.dtype.name for leaf in _tree.tensors(rows))

    def losses(batch: tuple[Any, Any, Any]) -> Any:
        return per_example_losses(*_tree.map_tensors(tf.convert_to_tensor, batch))

    plain = losses(rows)
    if tuple(plain.shape) != (_ROWS,):
        raise UnsupportedLossError(
            "A loss must have one value for every example. Received: "
            f"per_example_losses={per_example_losses!r}, which returned shape "
            f"{tuple(plain.shape)} for {_ROWS} examples. Return unreduced losses, of "
            "shape (N,)."
        )
    for row in range(_ROWS):
        changed = losses(_with_others_changed(rows, row))
        if not _agree([plain], [changed], row, tolerance):
            raise UnsupportedLossError(
                "The loss of an example must not depend on other examples. Received: "
                f"per_example_losses={per_example_losses!r}, whose value for row {row} "
                "changed with the other rows. `keras.losses.Circle` compares the rows "
                "of a batch, and a loss that is normalized over the batch shares its "
                "divisor. Use a loss that compares each example with its own target, "
                "e.g. `keras.losses.CategoricalCrossentropy()`."
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
        return _agree(tensors, known, self._row, self._tolerance)

    def _corrected(self, tensor: Any, known: Any) -> Any:
        """Return `tensor` with the known rows where rows are compared."""
        if not isinstance(tensor, tf.Tensor) or tensor.shape != known.shape:
            return tensor
        compared = np.zeros(tensor.shape, bool)
        compared[_span(compared, self._row)] = True
        return tf.where(compared, known, tensor)


@contextlib.contextmanager
def _probe(
    model: keras.Model, layers: list[tuple[str, keras.layers.Layer]]
) -> Iterator[Callable[..., _Pass]]:
    """Yield a function that runs passes of the model, each from the same state.

    Trainable variables are moved away from zero, because a gate or a head that
    starts at zero would hide what it will let through later.
    """
    tolerance = _tolerance(layer.compute_dtype for _, layer in layers)
    rng = np.random.default_rng(0)
    with _keras.own_global_seed() as seed:
        own = [variable for _, variable in _variables(layers)]
        held = [*own, *model.metrics_variables, seed.state]
        originals = [variable.numpy() for variable in held]
        chance = random.getstate()
        trainable = {id(variable) for variable in model.trainable_variables}
        start = [
            _moved_from_zero(value, rng) if id(variable) in trainable else value
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
                now = variable.numpy().tobytes()
                if now != value.tobytes():
                    run.moved[id(variable)] = now
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


def _assign(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _moved_from_zero(value: Any, rng: np.random.Generator) -> Any:
    """Return `value` with some noise of the same sign added, small for its shape."""
    if not _is_float(value):
        return value
    noise = np.abs(rng.normal(size=value.shape)) * 0.1
    noise /= max(1.0, float(np.prod(value.shape[:-1]))) ** 0.5
    return (value + np.copysign(noise, value)).astype(value.dtype)


def _first_rows(name: str, tree: Any) -> Any:
    """Return `_ROWS` rows of every array, repeated if there are fewer."""

    def take(leaf: Any) -> Any:
        if not np.ndim(leaf) or not leaf.shape[0]:
            raise ValueError(
                f"Every array of `{name}` must have examples on its leading axis. "
                f"Received: an array of shape {tuple(np.shape(leaf))} in `{name}`."
            )
        rows = keras.ops.convert_to_numpy(leaf[:_ROWS])
        return rows[np.arange(_ROWS) % len(rows)]

    return _tree.map_tensors(take, tree)


def _with_others_changed(tree: Any, row: int) -> Any:
    """Return all rows but one changed, to values that a vocabulary of theirs has."""
    rng = np.random.default_rng(row)

    def change(leaf: Any) -> Any:
        own = leaf[row]
        if _is_float(leaf):
            # Truncated or rounded, this lies between 0 and the row's own number.
            scale, offset = rng.uniform(size=leaf.shape), rng.uniform(size=leaf.shape)
            others = np.asarray(own, np.float64) * scale + 0.49 * offset
        elif leaf.dtype.kind in "biu":
            half = np.trunc(own / 2).astype(leaf.dtype)
            others = np.where(leaf != own, own, half)
        else:
            others = np.broadcast_to(own, leaf.shape)
        others = others.astype(leaf.dtype)
        others[row] = own
        return others

    return _tree.map_tensors(change, tree)


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(tree) if tf.is_tensor(leaf)]


def _span(array: Any, row: int | None) -> Any:
    """Return the index of one row of the batch: all, where there are no rows.

    Several entries of the leading axis are one row where it holds positions as well.
    """
    if row is None or not array.ndim or len(array) % _ROWS:
        return ...
    positions = len(array) // _ROWS
    return slice(row * positions, (row + 1) * positions)


def _agree(
    tensors: list[Any], known: list[Any], row: int | None, tolerance: float
) -> bool:
    """Return whether tensors are equal in one row, up to rounding; NaN equals NaN."""
    if len(tensors) != len(known):
        return False
    for pair in zip(tensors, known, strict=True):
        left, right = (keras.ops.convert_to_numpy(tensor) for tensor in pair)
        left, right = left[_span(left, row)], right[_span(right, row)]
        if left.shape != right.shape or not _close(left, right, tolerance):
            return False
    return True


def _close(left: Any, right: Any, tolerance: float) -> bool:
    if not _is_float(left):
        return np.array_equal(left, right)
    left, right = left.astype(np.float64), right.astype(np.float64)
    scale = np.max(np.abs(left), where=np.isfinite(left), initial=0.0)
    atol = 1e-2 * tolerance * scale
    return np.allclose(left, right, rtol=tolerance, atol=atol, equal_nan=True)


def _is_float(array: Any) -> bool:
    return "float" in array.dtype.name  # NumPy does not count bfloat16.


def _tolerance(dtypes: Iterable[str]) -> float:
    return max(_TOLERANCES.get(dtype, _TOLERANCE) for dtype in dtypes)


def check_state(model: keras.Model, evaluate: Callable[[], Any]) -> None:
    """Refuse a loss that keeps data in the model's variables.

    Args:
        model: The model; its variables are put back.
        evaluate: Evaluates the loss on a few rows.

    Raises:
        UnsupportedLossError: If that changes a variable, random seeds apart.
    """
    before = [variable.numpy() for variable in model.variables]
    evaluate()
    changed = []
    for variable, value in zip(model.variables, before, strict=True):
        if not np.array_equal(variable.numpy(), value):
            variable.assign(value)
            if "seed_generator" not in variable.path:
                changed.append(f"`{variable.path}`")
    if changed:
        raise UnsupportedLossError(
            f"`compute_loss` of model `{model.name}` must keep no data: what it assigns "
            f"is not noised. Received: changed {', '.join(changed)}. Use metrics "
            "(`compile(metrics=...)`) to count things."
        )
