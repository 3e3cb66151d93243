"""Checks that a model, and a loss, treat every example of a batch by itself.

A clipped gradient bounds what one example can do only if no other example's
gradient depends on it. The checks run the model, or the loss, on a few rows,
change all rows but one, and see whether anything changes in the row that stayed.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdp import _tree
from tfdp._comparison import (
    ROWS,
    agree,
    probe_rows,
    tolerance_of,
    with_others_changed,
)
from tfdp._probe import probe
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
    found = probe(model, x)

    def flaws(layer: keras.layers.Layer) -> Iterator[_Flaw]:
        if id(layer) in found.training:
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
                yield _BATCH_STATISTICS
                return
            if isinstance(layer, keras.layers.SpectralNormalization):
                yield _SPECTRAL
        if layer.activity_regularizer is not None:
            yield _ACTIVITY
        elif id(layer) in found.adding_loss:
            yield _ADDED_LOSS
        if id(layer) in found.unrepeatable:
            yield _UNREPEATABLE
        if id(layer) in found.mixing:
            yield _MIXING
        if id(layer) in found.memory:
            names = ", ".join(f"`{name}`" for name in found.memory[id(layer)])
            yield _MEMORY._replace(reason=_MEMORY.reason.format(names))

    return [
        Problem(path, type(layer).__name__, *flaw)
        for path, layer in found.layers
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
        probe_rows("y", y),
        probe_rows("y_pred", y_pred),
        probe_rows("sample_weight", sample_weight),
    )
    tolerance = tolerance_of(leaf.dtype.name for leaf in _tree.tensors(rows))

    def losses(batch: tuple[Any, Any, Any]) -> Any:
        return per_example_losses(*_tree.map_tensors(tf.convert_to_tensor, batch))

    plain = losses(rows)
    if tuple(plain.shape) != (ROWS,):
        raise UnsupportedLossError(
            "A loss must have one value for every example. Received: "
            f"per_example_losses={per_example_losses!r}, which returned shape "
            f"{tuple(plain.shape)} for {ROWS} examples. Return unreduced losses, of "
            "shape (N,)."
        )
    for row in range(ROWS):
        changed = losses(with_others_changed(rows, row))
        if not agree([plain], [changed], row, tolerance):
            raise UnsupportedLossError(
                "The loss of an example must not depend on other examples. Received: "
                f"per_example_losses={per_example_losses!r}, whose value for row {row} "
                "changed with the other rows. `keras.losses.Circle` compares the rows "
                "of a batch, and a loss that is normalized over the batch shares its "
                "divisor. Use a loss that compares each example with its own target, "
                "e.g. `keras.losses.CategoricalCrossentropy()`."
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


def check_state(model: keras.Model, evaluate: Callable[[], Any]) -> None:
    """Refuse a loss that keeps data in the model's variables.

    Args:
        model: The model; its variables are put back.
        evaluate: Evaluates the loss on a few rows.

    Raises:
        UnsupportedLossError: If that changes a variable, random seeds apart.
    """
    changed = changed_variables(model, evaluate)
    if changed:
        raise UnsupportedLossError(
            f"`compute_loss` of model `{model.name}` must keep no data: what it assigns "
            f"is not noised. Received: changed {', '.join(changed)}. Use metrics "
            "(`compile(metrics=...)`) to count things."
        )
