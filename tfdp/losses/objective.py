"""What an engine differentiates: a model, its losses per example, its variables."""

import contextlib
import dataclasses
import inspect
import operator
from collections.abc import Callable
from typing import NoReturn, Self

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._tracing import tracing
from tfdp._types import Loss, Nest, Tensor, Variable
from tfdp._views_per_example import views_per_example
from tfdp.ascent.losses import Ascent
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.added import AddedLosses, Predicted, added_now, adding
from tfdp.losses.batch import Batch, number_of_rows
from tfdp.losses.per_example import PerExampleLoss, each_row_alone, splitting_losses

# A public constant. The loss of one example is not divided by the batch size, so
# it needs less scaling than the mean of a batch does.
_FLOAT16_LOSS_SCALE = 128.0


# Each equals itself alone: variables compare their values.
@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """A model and the loss of each of its examples.

    Attributes:
        model: The Keras model, built.
        losses: ``(x, y, y_pred, sample_weight) -> (N,)``.
        variables: The trainable Keras variables, in the model's order.
        has_own_loss: Whether the losses have in them what layers add, as far as they
            are to.
        training: Whether the model runs in training mode.
        ascent: How far uphill from the weights gradients are taken; None for here.
        views: How many consecutive rows are views of one example.
    """

    model: keras.Model
    losses: Callable[[Nest, Nest, Nest, Nest], Tensor]
    variables: list[Variable]
    has_own_loss: bool = False
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
            loss: Name, object or function, or a list or dict of them; None for what
                layers add alone.
            loss_weights: Weights of the outputs' losses.

        Returns:
            The objective that trains all trainable variables.

        Raises:
            ValueError: If the model has no trainable variable, or one whose gradient is
                its new value, or the loss takes its logits for probabilities.
        """
        check_takes_logits(model, loss)
        if loss is None:
            return cls(model, _nothing_but_added, trainable_variables(model))
        per_example = PerExampleLoss(
            loss, loss_weights, getattr(model, "output_names", None)
        )

        def losses(x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest) -> Tensor:
            del x
            return per_example(y, y_pred, sample_weight)

        return cls(model, losses, trainable_variables(model))

    @classmethod
    def of_compute_loss(cls, model: keras.Model) -> Self:
        """Take the losses from the model's own `compute_loss`, as of each row alone.

        The model must have been compiled with what its `compute_loss` uses. What its
        `losses` are there is what layers add for the row. Weight regularizers are left
        out of it: their gradient is added after the noise.

        Args:
            model: The Keras model, built.

        Returns:
            The objective that trains all trainable variables.

        Raises:
            ValueError: If the model has no trainable variable, or one whose gradient is
                its new value.
        """
        variables = trainable_variables(model)

        def loss_of_row(added: Tensor | None, *row: Nest) -> Tensor:
            with contextlib.ExitStack() as entered:
                entered.enter_context(_keras.without_regularizers(variables))
                if added is not None:
                    of_row = [tf.reduce_sum(added)]
                    entered.enter_context(_keras.with_losses(model, of_row))
                return tf.reduce_sum(_keras.compute_loss(model, *row))

        def losses(*rows: Nest) -> Tensor:
            return each_row_alone(loss_of_row, (added_now(), *rows))

        return cls(model, losses, variables, has_own_loss=True)

    def predict(self, x: Nest) -> Nest:
        """Run the model."""
        with (
            views_per_example(self.views)
            if self.views > 1
            else contextlib.nullcontext()
        ):
            return _keras.run_model(self.model, x, training=self.training)

    def forward(
        self,
        batch: Batch,
        *,
        is_of_one_unit: bool = False,
        skips_unknown: bool = False,
        splits_losses: bool = False,
    ) -> tuple[Nest, Tensor]:
        """Run the model, and compute the loss of each row, what layers add included.

        Args:
            batch: The rows.
            is_of_one_unit: Whether the rows are those of one unit. Then, if layers add
                losses, each row goes through the model by itself.
            skips_unknown: Whether added losses that cannot be taken apart are left out.
            splits_losses: Whether a loss that is asked for a scalar may be asked for all
                rows, and taken apart, where it is asked for each row alone otherwise.

        Returns:
            The outputs, as `Predicted` if layers add losses or attach masks; and losses
            of shape ``(N,)``.

        Raises:
            UnsupportedLayerError: If it is not known what a row has of an added loss, or
                an output is not one of each row.
        """
        rows = number_of_rows(tuple(batch))
        noted = AddedLosses(self.model, batch.x)
        with noted.observing(), _keras.models_run_plainly():
            y_pred = self.predict(noted.inputs)
            _check_outputs(y_pred, rows)
            if (
                noted.found
                and is_of_one_unit
                and not (isinstance(rows, int) and rows == 1)
            ):
                return self._forward_of_each(batch, rows)
            added = noted.of_rows(rows, skips_unknown=skips_unknown)
            with adding(added), splitting_losses(splits_losses):
                losses = self.losses(batch.x, batch.y, y_pred, batch.sample_weight)
        masks = {
            str(place): mask
            for place, leaf in enumerate(keras.tree.flatten(y_pred))
            if (mask := _keras.keras_mask(leaf)) is not None
        }
        if added is None and not masks:
            return y_pred, losses
        if added is not None and not self.has_own_loss:
            losses += tf.cast(added, losses.dtype)
        return Predicted(y_pred, () if added is None else (added,), masks), losses

    def _forward_of_each(self, batch: Batch, rows: int | Tensor) -> tuple[Nest, Tensor]:
        """Let every row go through the model by itself."""
        if not isinstance(rows, int):
            raise UnsupportedLayerError(
                "Units of several rows must have a number of rows that is known, if "
                f"layers add losses. Received: model={self.model!r}, units of an "
                "unknown number of rows. Give `x` a static number of rows, or leave "
                "`num_microbatches` out."
            )
        alone = dataclasses.replace(self, views=1)
        of_each = [
            alone.forward(
                _tree.map_tensors(operator.itemgetter(slice(row, row + 1)), batch)
            )
            for row in range(rows)
        ]
        joined: tuple[Nest, Tensor] = keras.tree.map_structure(
            lambda *parts: tf.concat(parts, 0), *of_each
        )
        return joined

    def losses_of_rows(self, data: Batch, rows: int, batch_size: int) -> np.ndarray:
        """Compute the loss of each row, so many at a time.

        Args:
            data: The rows, tensors.
            rows: How many they are.
            batch_size: Rows that go through the model at once.

        Returns:
            As `forward` has them, shape ``(N,)``.
        """

        @tf.function(autograph=False, reduce_retracing=True)
        def losses(batch: Batch) -> Tensor:
            return self.forward(batch)[1]

        found = [
            losses(
                _tree.map_tensors(
                    operator.itemgetter(slice(first, first + batch_size)), data
                )
            ).numpy()
            for first in range(0, rows, batch_size)
        ]
        return np.concatenate(found)

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


def _check_outputs(y_pred: Nest, rows: int | Tensor) -> None:
    """Refuse outputs that are known to have another number of entries than there are rows.

    Entries of padding, the last ones, are left out, and of each row alone a loss sees its own
    entry: they would be those of others.
    """
    outputs = [leaf for leaf in keras.tree.flatten(y_pred) if tf.is_tensor(leaf)]
    trace = tracing()
    if trace is not None:
        # It knows more of them, and whether rows meet in them.
        trace.note_outputs(outputs)
    number = rows if isinstance(rows, int) else None
    for shape in (output.shape for output in outputs):
        of_others = trace is None and shape.rank and shape[0] not in (None, number)
        if shape.rank == 0 or of_others:
            refuse_output(f"shape {tuple(shape)}")


def refuse_output(received: str) -> NoReturn:
    """Say that an output has not one entry for each row, but what was received.

    Raises:
        UnsupportedLayerError: Always.
    """
    raise UnsupportedLayerError(
        "A model must return one entry of each output for each row. Received: an output "
        f"of {received}. What belongs to no row leave out, and read it in `compute_loss` "
        "where it is kept (`self.codes`). Return several things of a row on another "
        "axis: `keras.ops.stack([a, b], axis=1)`."
    )


def _nothing_but_added(x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest) -> Tensor:
    """Return the losses of rows for which nothing was compiled."""
    del x, y, y_pred, sample_weight
    added = added_now()
    if added is None:
        raise ValueError(
            "`loss` is missing, and no layer adds one. Received: loss=None. Give a "
            "loss, `'mse'`, or let a layer call `self.add_loss`."
        )
    return tf.zeros_like(added)


def trainable_variables(model: keras.Model) -> list[Variable]:
    """List a model's trainable variables, of which there must be some."""
    if not model.trainable_variables:
        raise ValueError(
            f"Model `{model.name}` has nothing to train. Received: no trainable "
            "variables. Set `model.trainable = True`, or that of some layers."
        )
    overwritten = [
        variable.path
        for variable in model.trainable_variables
        if variable.overwrite_with_gradient
    ]
    if overwritten:
        # Scales of float8: clipped, summed and noised they would be none.
        raise ValueError(
            f"Model `{model.name}` has variables whose gradients are their new values, "
            "which cannot be private. Received: overwrite_with_gradient=True of "
            f"{len(overwritten)} variables, the first of them `{overwritten[0]}`. Leave "
            "`model.quantize('float8')` out until the model is trained; for speed, build "
            "it after `keras.config.set_dtype_policy('mixed_bfloat16')`."
        )
    return list(model.trainable_variables)


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
