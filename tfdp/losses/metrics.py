"""Metrics of each example alone, as Keras averages them over a batch."""

from collections.abc import Callable
from typing import TypeAlias

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest, Tensor
from tfdp.losses.per_example import PerExampleLoss

# From targets and predictions to a value for each row, shape ``(N,)``.
RowMetric: TypeAlias = Callable[[Nest, Nest], Tensor]

# What "accuracy" is depends on targets and predictions.
_RESOLVED_LATER = ("accuracy", "acc")

_FROM_ZERO_TO_ONE = (
    keras.metrics.Accuracy,
    keras.metrics.BinaryAccuracy,
    keras.metrics.CategoricalAccuracy,
    keras.metrics.SparseCategoricalAccuracy,
    keras.metrics.SparseTopKCategoricalAccuracy,
    keras.metrics.TopKCategoricalAccuracy,
)


class MeanMetric:
    """A metric that is a mean over examples: what one example adds to it.

    Args:
        identifier: The name of a Keras metric, a `keras.metrics.MeanMetricWrapper`, or
            a function ``(y_true, y_pred) -> (N,)``.

    Attributes:
        name: That of the metric.
        is_accuracy: Whether its values are known to lie between 0 and 1, the larger
            the better.

    Raises:
        TypeError: If it is none of these.
        ValueError: If Keras knows no metric of that name, it is no mean over examples,
            or it has no name.
    """

    def __init__(self, identifier: Nest) -> None:
        self._identifier = identifier
        if isinstance(identifier, str) and identifier.lower() in _RESOLVED_LATER:
            self.name, self.is_accuracy = identifier, True
            return
        if not (isinstance(identifier, str) or callable(identifier)):
            raise TypeError(
                "A metric must be a name, a metric of Keras, or a function of "
                f"(y_true, y_pred). Received: {identifier!r}. Use "
                "`metrics=['accuracy']`."
            )
        metric = _keras.resolve_metric(identifier)
        if not _keras.is_mean_over_examples(metric):
            raise ValueError(
                f"`{type(metric).__name__}` is not a mean over examples, so no range "
                "bounds what one of them does to it. Received: metrics="
                f"[{identifier!r}]. Use a mean, 'accuracy' or 'loss' or a function "
                "`(y_true, y_pred) -> (N,)`, or compute it on rows that are public."
            )
        self.name = metric.name
        self.is_accuracy = isinstance(metric, _FROM_ZERO_TO_ONE)
        if not self.name.isidentifier():
            raise ValueError(
                "A metric must have a name, which is that of its log. Received: "
                f"{identifier!r}, named {self.name!r}. Define it by `def`."
            )

    def of_rows(self, y: Nest, y_pred: Nest) -> RowMetric:
        """Return the function of rows, as Keras resolves it for such ones.

        Args:
            y: Targets, of which shapes are read.
            y_pred: Predictions, likewise.

        Returns:
            Of tensors with leading axis N to float64 values of shape ``(N,)``. Where an
            example has several elements, their mean, those masked left out.

        Raises:
            ValueError: If a metric of Keras is to compare several outputs, or nothing.
        """
        is_single = not (keras.tree.is_nested(y) or keras.tree.is_nested(y_pred))
        is_function = callable(self._identifier) and not isinstance(
            self._identifier, keras.metrics.Metric | type
        )
        if y is None or not is_single:
            if not is_function:
                raise ValueError(
                    f"Metric {self.name!r} compares one output with its targets. "
                    f"Received: targets {_described(y)}, outputs {_described(y_pred)}. "
                    "Use a function of all of them: `def accuracy_of_a(y_true, y_pred): "
                    "return keras.metrics.sparse_categorical_accuracy(y_true['a'], "
                    "y_pred['a'])`."
                )
            return _of_nests(self._identifier, self.name)
        function = _keras.function_of_metric(
            _keras.resolve_metric(self._identifier, y, y_pred)
        )
        per_example = PerExampleLoss(function)
        return lambda y, y_pred: tf.cast(per_example(y, y_pred), tf.float64)


def _of_nests(function: Callable[[Nest, Nest], Tensor], name: str) -> RowMetric:
    def of_rows(y: Nest, y_pred: Nest) -> Tensor:
        values = tf.cast(function(y, y_pred), tf.float64)
        if not values.shape.rank:
            raise ValueError(
                f"Metric {name!r} must have a value for every example. Received: a "
                f"function that returned shape {tuple(values.shape)}. Return shape (N,)."
            )
        return tf.reduce_mean(values, list(range(1, values.shape.rank)))

    return of_rows


def _described(nest: Nest) -> str:
    shapes = keras.tree.map_structure(
        lambda leaf: None if leaf is None else tuple(leaf.shape), nest
    )
    return f"of shape {shapes}"
