"""What an engine differentiates: a model, its losses per example, its variables."""

import dataclasses
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, Self

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Loss, Nest, Tensor, Variable
from tfdp._views_per_example import views_per_example
from tfdp.ascent.losses import Ascent
from tfdp.losses.per_example import PerExampleLoss, each_row_alone

# A public constant. The loss of one example is not divided by the batch size, so
# it needs less scaling than the mean of a batch does.
_FLOAT16_LOSS_SCALE = 128.0


class Batch(NamedTuple):
    """Rows of data on their way through an engine.

    Attributes:
        x: Inputs, tensors with leading axis N, nested as the model takes them.
        y: Targets likewise, or None.
        sample_weight: Weights likewise, or None.
        is_padding: bool, shape ``(N,)``, marks rows that only fill up: units whose
            rows are not all there. None until an engine's pass is filled up: all rows are real.
    """

    x: Nest
    y: Nest = None
    sample_weight: Nest = None
    is_padding: Tensor = None

    @classmethod
    def of(cls, data: Nest) -> Self:
        """Return data in the forms that Keras takes, or a batch, as a batch."""
        if isinstance(data, cls):
            return data
        return cls(*keras.utils.unpack_x_y_sample_weight(data))


def check_takes_logits(model: keras.Model, loss: Loss) -> None:
    """Refuse losses that would take the logits of a model for probabilities.

    Args:
        model: A Keras model; it says that it has logits by an attribute
            ``outputs_are_logits = True``.
        loss: As in `keras.Model.compile`.

    Raises:
        ValueError: If one does.
    """
    if not getattr(model, "outputs_are_logits", False):
        return
    for leaf in keras.tree.flatten(loss):
        if leaf is None:
            continue
        named = keras.losses.get(leaf) if isinstance(leaf, str) else leaf
        if isinstance(named, keras.losses.Loss):
            takes_logits = named.get_config().get("from_logits", True)
        else:
            default = inspect.signature(named).parameters.get("from_logits")
            takes_logits = default is None or default.default
        if not takes_logits:
            raise ValueError(
                f"The outputs of `{type(model).__name__}` are logits, which the loss "
                f"would take for probabilities. Received: loss={leaf!r}. Use "
                "`loss=keras.losses.BinaryCrossentropy(from_logits=True)`."
            )


# Each equals itself alone: variables compare their values.
@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """A model and the loss of each of its examples.

    Attributes:
        model: The Keras model, built.
        losses: ``(x, y, y_pred, sample_weight) -> (N,)``.
        variables: The trainable Keras variables, in the model's order.
        training: Whether the model runs in training mode.
        ascent: How far uphill from the weights gradients are taken; None for here.
        views: How many consecutive rows are views of one example.
    """

    model: keras.Model
    losses: Callable[[Nest, Nest, Nest, Nest], Tensor]
    variables: list[Variable]
    training: bool = True
    ascent: Ascent | None = None
    views: int = 1

    def __post_init__(self) -> None:
        """Let nothing that is random have to make its state inside a graph."""
        _keras.make_global_seed()

    @classmethod
    def of(cls, model: keras.Model, loss: Loss, loss_weights: Nest = None) -> Self:
        """Pair a model with a Keras loss, as `compile` takes it.

        Args:
            model: The Keras model, built.
            loss: Name, object or function, or a list or dict of them.
            loss_weights: Weights of the outputs' losses.

        Returns:
            The objective that trains all trainable variables.

        Raises:
            ValueError: If the model has no trainable variable, or the loss takes its
                logits for probabilities.
        """
        check_takes_logits(model, loss)
        per_example = PerExampleLoss(
            loss, loss_weights, getattr(model, "output_names", None)
        )

        def losses(x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest) -> Tensor:
            del x
            return per_example(y, y_pred, sample_weight)

        return cls(model, losses, trainable_variables(model))

    @classmethod
    def of_compute_loss(cls, model: keras.Model) -> Self:
        """Take the losses from the model's own `compute_loss`, row by row.

        The model must have been compiled with what its `compute_loss` uses. Weight
        regularizers are left out of it: their gradient is added after the noise.

        Args:
            model: The Keras model, built.

        Returns:
            The objective that trains all trainable variables.

        Raises:
            ValueError: If the model has no trainable variable.
        """
        variables = trainable_variables(model)

        def loss_of_row(*row: Nest) -> Tensor:
            with _keras.without_regularizers(variables):
                return tf.reduce_sum(_keras.compute_loss(model, *row))

        def losses(*rows: Nest) -> Tensor:
            return each_row_alone(loss_of_row, rows)

        return cls(model, losses, variables)

    def predict(self, x: Nest) -> Nest:
        """Run the model."""
        with views_per_example(self.views) if self.views > 1 else nullcontext():
            return _keras.run_model(self.model, x, training=self.training)

    def penalties(self) -> list[tuple[Variable, Callable[[Variable], Tensor]]]:
        """List what is part of each example's loss beside `losses`.

        Returns:
            Variables, and what is added for their values.
        """
        return [
            (variable, variable.regularizer)
            for variable in self.variables
            if getattr(variable.regularizer, "is_of_each_example", False)
        ]

    @property
    def loss_scale(self) -> float:
        """The constant that keeps float16 gradients from underflowing."""
        uses_float16 = any(
            layer.compute_dtype == "float16"
            for layer in _keras.flatten_layers(self.model)
        )
        return _FLOAT16_LOSS_SCALE if uses_float16 else 1.0


def trainable_variables(model: keras.Model) -> list[Variable]:
    """List a model's trainable variables, of which there must be some."""
    if not model.trainable_variables:
        raise ValueError(
            f"Model `{model.name}` has nothing to train. Received: no trainable "
            "variables. Set `model.trainable = True`, or that of some layers."
        )
    return list(model.trainable_variables)
