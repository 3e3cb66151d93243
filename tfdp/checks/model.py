"""Checks that a model treats every example of a batch by itself.

A clipped gradient bounds what one example can do only if no other example's
gradient depends on it. The checks look at the graph of the model, and follow the rows
through every operation in it.
"""

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _seeds
from tfdp._tree import signature_of
from tfdp._types import Nest
from tfdp.checks.problems import Problem, layer_problems, raise_if
from tfdp.checks.tracing import Trace
from tfdp.losses.added import AddedLosses
from tfdp.losses.batch import number_of_rows


def validate_model(model: keras.Model, x: Nest) -> list[Problem]:
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
    return _problems_of(model, x, Trace(model))


def _problems_of(
    model: keras.Model, x: Nest, trace: Trace, *, views: int = 1
) -> list[Problem]:
    _check_rows(x)
    signature = signature_of(x)
    _build(model, signature)
    found = trace.found(
        lambda inputs: _outputs(model, inputs),
        (signature,),
        views=views,
        ends_in_rows=False,
    )
    return layer_problems(model, trace.calls, found)


def _outputs(model: keras.Model, inputs: Nest) -> Nest:
    """Return what a model returns, and what its layers add for each row."""
    added = AddedLosses(model, inputs)
    with _seeds.secret_seeds(model), added.observing():
        y_pred = _keras.run_model(model, added.inputs, training=True)
        return y_pred, added.of_rows(number_of_rows(inputs), skips_unknown=True)


def _check_rows(x: Nest) -> None:
    for leaf in keras.tree.flatten(x):
        if leaf is not None and list(getattr(leaf, "shape", []))[:1] in ([], [0]):
            raise ValueError(
                "Every array of `x` must have examples on its leading axis. "
                f"Received: an array of shape {tuple(np.shape(leaf))} in `x`."
            )


def _build(model: keras.Model, signature: Nest) -> None:
    """Create the variables of the model, if need be, without running it."""
    if all(layer.built for _, layer in _keras.layers_by_path(model)):
        return
    trace = tf.function(lambda x: model(x, training=False), autograph=False)
    trace.get_concrete_function(signature)


def check_model(model: keras.Model, x: Nest, *, views: int = 1) -> frozenset[str]:
    """Raise one error that names all that is in the way of a proof.

    Args:
        model: Any Keras model.
        x: Inputs of the model, as for `validate_model`.
        views: How many consecutive rows are views of one example.

    Returns:
        What the model moves on while it is called; see `choose`.

    Raises:
        UnsupportedLayerError: If there is any problem.
    """
    trace = Trace(model)
    raise_if(model, _problems_of(model, x, trace, views=views))
    return frozenset(trace.moved)
