"""Checks that a model, and a loss, treat every example of a batch by itself.

A clipped gradient bounds what one example can do only if no other example's
gradient depends on it. The checks look at the graph of the model, or of the loss, and
follow the rows through every operation in it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp.checks.tracing import LOSS, Found, Trace, signature_of
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError


class _Flaw(NamedTuple):
    reason: str
    fix: str


_BATCH_STATISTICS = _Flaw(
    "its batch statistics mix the examples, and its moving statistics keep data "
    "without noise",
    "`tfdp.fix_model(model)` replaces it by GroupNormalization, or freeze it: "
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
_MIXING = _Flaw(
    "in it, rows of a batch meet: {}",
    "Compute every row from itself alone: reduce over `axis=-1`, never over axis 0.",
)
_MEMORY = _Flaw(
    "its state {} changes with the data that pass through, and keeps them without "
    "noise",
    "Assign no variable from data in `call`; compute it before training from public "
    "data, as `keras.layers.Normalization.adapt` does.",
)
_UNPROVEN = _Flaw(
    "nobody knows whether rows of a batch meet in it: {}",
    "`engine='vectorized'`, which `'auto'` takes then, runs every row by itself.",
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
        is_certain: False where the matter is only that nothing is proven: such a
            model trains with the engine that runs every row by itself.
    """

    path: str
    layer_class: str
    reason: str
    fix: str
    is_certain: bool = True

    def __str__(self) -> str:
        """Return all of it in one line."""
        return f"`{self.path}` ({self.layer_class}): {self.reason}. {self.fix}"


def validate_model(model: keras.Model, x: Any) -> list[Problem]:
    """Find what breaks per-example privacy in a model, or prove that nothing does.

    The model's graph in training mode is followed from operation to operation: where
    the rows of a batch are in each tensor, and whether they meet. That holds for every
    batch and all data. Found are layers that mix rows, among them every
    BatchNormalization that is not frozen; state that keeps data; losses of
    activations; and operations of which nothing is known.

    Nothing runs: weights, random seeds, metrics and all other variables stay what they
    are. A model that was not built is built.

    Args:
        model: Any Keras model.
        x: Inputs of the model as for `fit`: an array or a nest of arrays, with one
            row or more. Only shapes and dtypes are read.

    Returns:
        The problems in the order of the layers. Empty: it is proven that no row has a
        part in what the model computes for another. A gradient of a layer's own
        (`tf.custom_gradient`) may still mix them: gradients are followed when a
        training begins, which chooses the engine by that.

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
    return problems_of(model, x)


def problems_of(model: keras.Model, x: Any, *, views: int = 1) -> list[Problem]:
    """Find what `validate_model` finds.

    Args:
        model: See there.
        x: See there.
        views: How many rows in a row belong to one example.

    Returns:
        See there.
    """
    _check_rows(x)
    signature = signature_of(x)
    _build(model, signature)
    trace = Trace(model)
    takes_training = _keras.takes_training(model)

    def run(inputs: Any) -> Any:
        return model(inputs, training=True) if takes_training else model(inputs)

    found = trace.found(run, (signature,), views=views, ends_in_rows=False)
    return layer_problems(model, trace, found)


def _check_rows(x: Any) -> None:
    for leaf in keras.tree.flatten(x):
        if leaf is not None and (not np.ndim(leaf) or not leaf.shape[0]):
            raise ValueError(
                "Every array of `x` must have examples on its leading axis. "
                f"Received: an array of shape {tuple(np.shape(leaf))} in `x`."
            )


def _build(model: keras.Model, signature: Any) -> None:
    """Create the variables of the model, if need be, without running it."""
    if all(layer.built for _, layer in _keras.layers_by_path(model)):
        return
    trace = tf.function(lambda x: model(x, training=False), autograph=False)
    trace.get_concrete_function(signature)


def layer_problems(
    model: keras.Model, trace: Trace, found: list[Found]
) -> list[Problem]:
    """Say of each layer what is the matter with it."""
    by_layer: dict[int, list[Found]] = {}
    of_variables = []
    for each in found:
        if isinstance(each.layer, str):
            of_variables += [each] * (each.layer != LOSS)
            continue
        by_layer.setdefault(id(each.layer or model), []).append(each)

    return [
        Problem(path, type(layer).__name__, *flaw, is_certain)
        for path, layer in trace.layers
        for flaw, is_certain in _flaws(layer, trace, by_layer.get(id(layer), []))
    ] + [
        Problem(
            each.layer,
            "variable",
            f"what its gradients are made of is no row's: {each.operation} "
            f"{each.cause.why}",
            _UNPROVEN.fix,
            is_certain=False,
        )
        for each in of_variables
    ]


def _flaws(
    layer: keras.layers.Layer, trace: Trace, found: list[Found]
) -> Iterator[tuple[_Flaw, bool]]:
    """Say what is the matter with one layer, and whether it is for certain."""
    if id(layer) in trace.training:
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            yield _BATCH_STATISTICS, True
            return
        if isinstance(layer, keras.layers.SpectralNormalization):
            yield _SPECTRAL, True
    if layer.activity_regularizer is not None:
        yield _ACTIVITY, True
    elif id(layer) in trace.adding_loss:
        yield _ADDED_LOSS, True
    names = dict.fromkeys(each.cause.variable for each in found if each.cause.variable)
    others = [each for each in found if not each.cause.variable]
    if others:
        # What is certain first.
        worst = max(others, key=lambda each: each.cause.is_certain)
        is_certain = worst.cause.is_certain
        flaw = _MIXING if is_certain else _UNPROVEN
        what = f"{worst.operation} {worst.cause.why}"
        yield flaw._replace(reason=flaw.reason.format(what)), is_certain
    if names:
        listed = ", ".join(f"`{name}`" for name in names)
        yield _MEMORY._replace(reason=_MEMORY.reason.format(listed)), True


def check_model(model: keras.Model, x: Any, *, views: int = 1) -> None:
    """Raise one error that names all that is in the way of a proof.

    Args:
        model: Any Keras model.
        x: Inputs of the model, as for `validate_model`.
        views: How many rows in a row belong to one example.

    Raises:
        UnsupportedLayerError: If there is any problem.
    """
    raise_if(model, problems_of(model, x, views=views))


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
        y: Targets: an array, a nest of arrays, or None. Only shapes and dtypes are
            read.
        y_pred: Predictions likewise.
        sample_weight: Weights likewise.

    Raises:
        UnsupportedLossError: If the loss of a row depends on other rows, if nobody
            knows, or if there is not one loss for every row.
    """
    trace = Trace(None)
    signature = tuple(signature_of(tree) for tree in (y, y_pred, sample_weight))

    def run(*batch: Any) -> Any:
        with trace.part(LOSS):
            return of_each_row(per_example_losses(*batch), per_example_losses)

    problems = loss_problems(trace.found(run, signature))
    if problems:
        raise UnsupportedLossError(problems[0].reason)


def of_each_row(losses: Any, function: Any) -> Any:
    """Return losses if there is one for each row."""
    if losses.shape.rank != 1:
        raise UnsupportedLossError(
            "A loss must have one value for every example. Received: "
            f"per_example_losses={function!r}, which returned shape "
            f"{tuple(losses.shape)}. Return unreduced losses, of shape (N,)."
        )
    return losses


def loss_problems(found: list[Found]) -> list[Problem]:
    """Say what lets the loss of one row depend on others, or keeps data."""
    problems = []
    for each in found:
        if each.layer != LOSS and each.layer is not None:
            continue
        cause = each.cause
        if cause.variable:
            reason = (
                "A loss must keep no data: what it assigns is not noised. Received: "
                f"changed `{cause.variable}` in {each.operation}. Use metrics "
                "(`compile(metrics=...)`) to count things."
            )
        else:
            reason = (
                "The loss of an example must not depend on other examples. Received: "
                f"{each.operation}, which {cause.why}. `keras.losses.Circle` compares "
                "the rows of a batch, and a loss that is normalized over the batch "
                "shares its divisor. Use a loss that compares each example with its "
                "own target, e.g. `keras.losses.CategoricalCrossentropy()`."
            )
        problems.append(Problem(LOSS, "loss", reason, "", cause.is_certain))
    return problems


def raise_if(model: keras.Model, problems: list[Problem]) -> None:
    """Raise one error that names all problems of a model, if there are some."""
    if problems:
        found = "".join(f"\n  * {problem}" for problem in problems)
        raise UnsupportedLayerError(
            f"Model `{model.name}` must treat every example of a batch alone and keep "
            f"no data. Received: model={model!r} with{found}"
        )


def changed_variables(model: keras.Model, run: Callable[[], Any]) -> list[str]:
    """Find out what in a model keeps data when something runs.

    Args:
        model: The model; its variables are put back.
        run: Runs it on a few rows.

    Returns:
        Paths of the variables that it changed, random seeds apart.
    """
    before = [variable.numpy() for variable in model.variables]
    run()
    changed = []
    for variable, value in zip(model.variables, before, strict=True):
        if not np.array_equal(variable.numpy(), value):
            variable.assign(value)
            if "seed_generator" not in variable.path:
                changed.append(f"`{variable.path}`")
    return changed
