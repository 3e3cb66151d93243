"""Inference: values that are proven to be of each row alone; no weight is assigned."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import keras
import tensorflow as tf
from absl import logging

from tfdp import _keras, _tree
from tfdp._types import Nest, Tensor, Variable
from tfdp.checks.changes import changes_inside
from tfdp.checks.convolutions import convolutions_of_rows
from tfdp.checks.found import Found
from tfdp.checks.problems import layer_problems, raise_if
from tfdp.checks.tracing import Trace
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.added import Predicted
from tfdp.losses.batch import Batch
from tfdp.losses.metrics import RowMetric
from tfdp.losses.objective import Objective
from tfdp.losses.per_example import each_row_alone


def evaluation_function(
    objective: Objective, metrics: Sequence[RowMetric | None], signature: Nest
) -> Callable[..., Tensor]:
    """Return what computes values of each row alone, in a graph.

    Where rows are not proven to stay apart when they go through the model together,
    each goes through it by itself.

    Args:
        objective: The model, and the loss of each row. It is run in inference mode.
        metrics: Functions of targets and predictions; None for the loss.
        signature: ``(x, y, sample_weight)`` of `tf.TensorSpec`, None for what is
            missing. Weights scale the loss alone.

    Returns:
        Of three nests like the signature to float64 values, shape ``(N, k)``. No row
        has a part in the values of another one, and nothing is kept of the data.

    Raises:
        UnsupportedLayerError: If layers keep data, or are not known not to.
    """
    objective = dataclasses.replace(objective, training=False)

    def together(x: Nest, y: Nest, sample_weight: Nest) -> Tensor:
        batch = Batch(x, y, sample_weight)
        y_pred, losses = objective.forward(batch, skips_unknown=None not in metrics)
        y_pred = y_pred.y_pred if isinstance(y_pred, Predicted) else y_pred
        values = [losses if metric is None else metric(y, y_pred) for metric in metrics]
        return tf.stack([tf.cast(each, tf.float64) for each in values], -1)

    def alone(*rows: Nest) -> Tensor:
        values = [
            each_row_alone(lambda *row, place=place: together(*row)[0, place], rows)
            for place in range(len(metrics))
        ]
        return tf.stack([tf.cast(each, tf.float64) for each in values], -1)

    model = objective.model
    run: Callable[..., Tensor] = together
    trace, found = _followed(objective, together, signature)
    if found:
        run = alone
        trace, of_alone = _followed(objective, alone, signature)
        raise_if(model, layer_problems(model, trace.calls, of_alone))
        logging.info(
            "tfdp evaluates each row of model `%s` by itself: %s %s",
            model.name,
            found[0].operation,
            found[0].cause.why,
        )
    specs = _tree.tensors(signature)

    @tf.function(input_signature=specs, autograph=False)
    def values(*leaves: Tensor) -> Tensor:
        with convolutions_of_rows():
            return run(*_tree.pack(leaves, like=signature))

    values.get_concrete_function()
    return lambda *rows: values(*_tree.tensors(rows))


@contextlib.contextmanager
def no_weight_assigned(model: keras.Model) -> Iterator[None]:
    """Refuse that a model assigns one of its weights while it predicts.

    `tfdp.checks.engine` proves that training keeps nothing of the data. What is kept of
    rows in `evaluate` or `predict` would be in the weights without noise. TensorFlow's own
    variables, tables and metrics of layers are not looked at.

    In a graph every operation inside is looked at, and what it calls. Eagerly the values of
    the weights are compared.

    Args:
        model: The model.

    Raises:
        UnsupportedLayerError: Inside, if a weight is assigned by its methods; else
            afterwards. Eagerly it has its value from before again.
    """

    def refuse(weight: Variable, *args: object, **kwargs: object) -> NoReturn:
        del args, kwargs
        raise UnsupportedLayerError(
            f"Model `{model.name}` must assign none of its weights while it predicts: they "
            f"would keep rows without noise. Received: `{weight.path}`, assigned in a call "
            "for inference. Assign no variable in `call`; compute it before training from "
            "public data, as `keras.layers.Normalization.adapt` does; and mask a weight where "
            "it is used, `keras.ops.conv(x, self.kernel * self.mask)`. For public rows the "
            "model predicts by itself: `private.model.predict(x)`, and leave "
            "`validation_data` out of `fit`."
        )

    with changes_inside(model.weights) as changes, contextlib.ExitStack() as replaced:
        for weight in model.weights:
            refused = functools.partial(refuse, weight)
            methods = dict.fromkeys(("assign", "assign_add", "assign_sub"), refused)
            # Layers may assign what Keras keeps in a weight, too.
            for variable in (weight, *_keras.tensorflow_variables(weight)):
                replaced.enter_context(_keras.attributes_replaced(variable, **methods))
        yield
    changes.undo()
    for weight in model.weights:
        if changes.has(weight):
            refuse(weight)


def check_assigns_no_weight(model: keras.Model, signature: Nest) -> None:
    """Refuse a model that would assign a weight while it predicts, before it does.

    Args:
        model: A `tfdp.DPModel`, built.
        signature: Nest of `tf.TensorSpec` of its inputs; None if it is not known.

    Raises:
        UnsupportedLayerError: If it would.
    """
    # What is assigned is none of the trainable ones, but for a mistake.
    if signature is not None and model.non_trainable_weights:

        def predict(x: Nest) -> Nest:
            return model(x, training=False)

        tf.function(predict, autograph=False).get_concrete_function(signature)


def _followed(
    objective: Objective, run: Callable[..., Tensor], signature: Nest
) -> tuple[Trace, list[Found]]:
    trace = Trace(objective.model)
    with convolutions_of_rows():
        return trace, trace.found(run, signature)
