"""Per-example gradients by vectorizing the gradient of one unit."""

import dataclasses
import math

import keras
import tensorflow as tf

from tfdp import _keras, _seeds, _tree
from tfdp._types import Nest, Tensor
from tfdp.clipping import clip_and_sum, zeros_of_finite
from tfdp.engines.engine import Clipped, Engine
from tfdp.engines.explanation import Explanation
from tfdp.engines.units import of_each_unit, stacked
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective
from tfdp.rules.registry import ids_of_inner_variables


@dataclasses.dataclass(frozen=True)
class VectorizedEngine(Engine):
    """Computes each unit's whole gradient, all units at once.

    Works for nearly every model and holds one gradient of the model's size for
    each unit. A unit is evaluated alone, so batch mates cannot influence it. What
    `tf.vectorized_map` cannot trace runs under `tf.map_fn`, one unit after the
    other, and one log line says so.
    """

    name = "vectorized"

    def clip_and_sum(
        self,
        objective: Objective,
        batch: Batch,
        *,
        l2_norm_clip: Tensor,
        rows_per_unit: int | Tensor,
    ) -> Clipped:
        """Sum the clipped gradients, which are all there at once."""
        units = _tree.map_tensors(lambda rows: stacked(rows, rows_per_unit), batch)
        # Known as soon as one unit is traced: a map returns nothing but tensors.
        has_path: list[bool] = []

        def of_unit(unit: Batch) -> tuple[list[Tensor], Nest]:
            gradients, y_pred = unit_gradients(objective, unit)
            has_path[:] = [gradient is not None for gradient in gradients]
            return _tree.tensors(gradients), y_pred

        gradients, y_pred = of_each_unit(of_unit, units, objective.model)
        trained = [
            v for path, v in zip(has_path, objective.variables, strict=True) if path
        ]
        # Norms are taken of static shapes, which loops forget.
        gradients = [
            tf.ensure_shape(gradient, [None, *variable.shape])
            for gradient, variable in zip(gradients, trained, strict=True)
        ]
        is_empty = tf.reduce_all(units.is_padding, axis=1)
        sums, norms = clip_and_sum(
            gradients, is_empty=is_empty, l2_norm_clip=l2_norm_clip
        )
        remaining = iter(sums)
        return (
            [
                next(remaining) if path else tf.zeros(variable.shape, variable.dtype)
                for path, variable in zip(has_path, objective.variables, strict=True)
            ],
            norms,
            y_pred,
        )

    def read(self, objective: Objective, batch: Batch) -> list[Tensor]:
        """Nothing: each unit is evaluated alone."""
        del objective, batch
        return []

    def explain(self, model: keras.Model, signature: Nest) -> list[Explanation]:
        """Say what each layer's gradients take; see `DPModel.explain`."""
        del signature
        return [
            Explanation(path, self.name, "instantiated", size)
            for path, layer in _keras.layers_by_path(model)
            if (size := _own_trainable_bytes(layer))
        ]


def _own_trainable_bytes(layer: keras.layers.Layer) -> int:
    inner = ids_of_inner_variables(layer)
    return sum(
        math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        for variable in layer.trainable_variables
        if id(variable) not in inner
    )


def unit_gradients(
    objective: Objective, unit: Batch
) -> tuple[list[Tensor | None], Nest]:
    """Differentiate the mean loss of a unit's real rows, uphill if so asked.

    Args:
        objective: What to differentiate.
        unit: The rows of one unit.

    Returns:
        For each variable its gradient, None where no path leads to it; and the
        model's outputs.
    """
    values = [variable.value for variable in objective.variables]
    ascent = objective.ascent
    if ascent is None:
        return _gradients_at(values, objective, unit)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        if ascent.is_exact:
            tape.watch(values)
        here, y_pred = _gradients_at(values, objective, unit)
    norm = tf.sqrt(
        tf.add_n([
            tf.constant(0.0, tf.float64),
            *(
                tf.reduce_sum(tf.square(tf.cast(gradient, tf.float64)))
                for gradient in here
                if gradient is not None
            ),
        ])
    )
    directions = [
        None
        if gradient is None
        else tf.math.divide_no_nan(gradient, tf.cast(norm, gradient.dtype))
        for gradient in here
    ]
    if ascent.is_exact:
        # To the tape the directions are constants: this is the Hessian times them.
        connected = [gradient for gradient in here if gradient is not None]
        change = tape.gradient(
            connected, values, output_gradients=[v for v in directions if v is not None]
        )
        weights = 1.0, ascent.mix * ascent.read_radius()
    else:
        radius = ascent.read_radius()
        moved = [
            value if v is None else value + tf.cast(radius, v.dtype) * v
            for value, v in zip(values, directions, strict=True)
        ]
        change = _gradients_elsewhere(moved, objective, unit)
        weights = 1.0 - ascent.mix, ascent.mix
    # Without a finite way uphill there is no gradient.
    offset = zeros_of_finite(norm)
    return [
        _weighted_sum(pair, weights, offset) for pair in zip(here, change, strict=True)
    ], y_pred


def _gradients_elsewhere(
    values: list[Tensor], objective: Objective, unit: Batch
) -> list[Tensor | None]:
    """Differentiate with other values of the variables, under the same masks."""
    mapping = list(zip(objective.variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping), _seeds.drawing_again():
        return _gradients_at(values, objective, unit)[0]


def _gradients_at(
    values: list[Tensor], objective: Objective, unit: Batch
) -> tuple[list[Tensor | None], Nest]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        y_pred, losses = objective.forward(unit, is_of_one_unit=True)
        # By selection: the loss of padding may be NaN.
        losses = tf.where(unit.is_padding, tf.zeros_like(losses), losses)
        rows = tf.reduce_sum(tf.cast(~unit.is_padding, losses.dtype))
        loss = tf.reduce_sum(losses) / tf.maximum(rows, 1)
        for variable, penalty in objective.penalties():
            loss += tf.cast(penalty(variable.value), loss.dtype)
        # In half precision small gradients would be flushed to zero on their way back.
        loss *= objective.loss_scale
    gradients = tape.gradient(loss, values)
    gradients = [
        None
        if gradient is None
        else tf.convert_to_tensor(gradient) / objective.loss_scale
        for gradient in gradients
    ]
    return gradients, y_pred


def _weighted_sum(
    pair: tuple[Tensor | None, Tensor | None],
    weights: tuple[float | Tensor, float | Tensor],
    offset: Tensor,
) -> Tensor | None:
    parts = [
        tf.cast(tf.convert_to_tensor(weight, tf.float64), tensor.dtype) * tensor
        for tensor, weight in zip(pair, weights, strict=True)
        if tensor is not None
    ]
    return tf.add_n(parts) + tf.cast(offset, parts[0].dtype) if parts else None
