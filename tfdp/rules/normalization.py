"""Layers with a scale, an offset or a slope for each channel.

Each row gets a copy of these variables, or of what is made of them: the ordinary backward
pass then leaves the gradients of the rows apart, where it would have added them up.
"""

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdp._types import Nest, Tensor, Variable
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call
from tfdp.rules.registry import rule
from tfdp.rules.terms import PerRow, Term


@rule(keras.layers.LayerNormalization)
def layer_normalization(call: Call) -> Nest:
    """Rule of `keras.layers.LayerNormalization`."""
    layer, x = call.layer, call.inputs
    axes = _axes(call)
    if layer.rms_scaling or not _are_of_rows(axes, x):
        shape = [x.shape[i] if i in axes else 1 for i in range(1, x.shape.rank)]
        return _run_with_copies(call, {"gamma": shape, "beta": shape})
    return _normalized_by_row(call, axes, layer.gamma, layer.beta)


@rule(keras.layers.RMSNormalization)
def rms_normalization(call: Call) -> Nest:
    """Rule of `keras.layers.RMSNormalization`."""
    own, x = call.layer.scale.shape, call.inputs
    missing = x.shape.rank - 1 - len(own)
    axes = _axes(call)
    # Keras multiplies by the scale along the last axes, whichever are normalized.
    is_along_last = axes == list(range(missing + 1, x.shape.rank))
    if not (is_along_last and _are_of_rows(axes, x) and own == x.shape[missing + 1 :]):
        return _run_with_copies(call, {"scale": [1] * missing + list(own)})
    return _normalized_by_row(call, axes, call.layer.scale, None, is_centered=False)


@rule(keras.layers.PReLU)
def prelu(call: Call) -> Nest:
    """Rule of `keras.layers.PReLU`."""
    return _run_with_copies(call, {"alpha": call.layer.alpha.shape})


@rule(keras.layers.GroupNormalization)
def group_normalization(call: Call) -> Nest:
    """Rule of `keras.layers.GroupNormalization`."""
    # Each row has factors and offsets of its own in any case, by its mean and variance.
    layer, x = call.layer, call.inputs
    axis, groups = layer.axis % x.shape.rank, layer.groups
    of_group = x.shape[axis] // groups
    is_static = x.shape[1:].is_fully_defined() and x.shape[1:].num_elements()
    # -1 takes no operation, but is one length, and does not follow from no numbers.
    shape = [-1, *x.shape[1:]] if is_static else tf.shape(x)
    grouped_shape = [shape[i] if n is None else n for i, n in enumerate(x.shape)]
    grouped_shape[axis : axis + 1] = [groups, of_group]
    # Half precision overflows here.
    grouped = tf.reshape(x, grouped_shape)
    grouped = tf.cast(grouped, tf.float32 if x.dtype.size < 4 else x.dtype)
    over = [i for i in range(1, grouped.shape.rank) if i != axis]
    mean, rate = _mean_and_rate(grouped, over, layer.epsilon)
    of_channels = [1] * grouped.shape.rank
    of_channels[axis : axis + 2] = [groups, of_group]

    def channels(variable: Variable) -> Tensor:
        value = tf.reshape(tf.convert_to_tensor(variable), of_channels)
        return tf.cast(value, grouped.dtype)

    factor = rate
    if layer.scale:
        factor = call.watch(
            rate * channels(layer.gamma),
            lambda g: [_of_channels(layer.gamma, g * tf.cast(rate, g.dtype))],
            is_linear=True,
        )
    offset = -mean * factor
    if layer.center:
        offset = call.watch(
            offset + channels(layer.beta),
            lambda g: [_of_channels(layer.beta, g)],
            is_linear=True,
        )
    outputs = tf.reshape(_scaled(grouped, factor, offset), shape)
    return tf.cast(tf.ensure_shape(outputs, x.shape), layer.compute_dtype)


# TensorFlow's own gradients of means, and of products of different shapes, find out in the
# graph what to divide by and to sum over where it is not known how many rows there are: in
# some twenty operations each.


def _normalized_by_row(
    call: Call,
    axes: list[int],
    scale: Variable | None,
    offset: Variable | None,
    *,
    is_centered: bool = True,
) -> Nest:
    """Normalize over axes of each row, then scale and shift along them."""
    layer, x = call.layer, call.inputs
    wide = tf.cast(x, keras.backend.result_type(x.dtype, "float32"))
    along = [n if i in axes else 1 for i, n in enumerate(x.shape)]
    others = [i for i in range(1, x.shape.rank) if i not in axes]

    def numbers(variable: Variable | None, default: float) -> Tensor | float:
        if variable is None:
            return default
        return tf.reshape(tf.cast(variable.value, wide.dtype), along)

    def term(variable: Variable, gradients: Tensor) -> PerRow:
        sums = tf.reduce_sum(gradients, others) if others else gradients
        return PerRow(variable, tf.reshape(sums, [-1, *variable.shape]))

    normalized = _normalized(wide, axes, layer.epsilon, is_centered=is_centered)
    factors, offsets = numbers(scale, 1.0), numbers(offset, 0.0)

    @tf.custom_gradient
    def moved(normalized: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        return normalized * factors + offsets, lambda g: g * factors

    def terms(g: Tensor) -> list[Term]:
        of_both = [
            (scale, lambda: g * tf.cast(normalized, g.dtype)),
            (offset, lambda: g),
        ]
        return [term(v, gradients()) for v, gradients in of_both if v is not None]

    outputs = call.watch(moved(normalized), terms, is_linear=True)
    return tf.cast(outputs, layer.compute_dtype)


def _normalized(
    x: Tensor, axes: Sequence[int], epsilon: float, *, is_centered: bool
) -> Tensor:
    """Divide by the root of the mean square over axes, with or without the mean."""

    def mean(x: Tensor) -> Tensor:
        return tf.reduce_mean(x, axes, keepdims=True)

    @tf.custom_gradient
    def of(x: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        centered = x - mean(x) if is_centered else x
        rate = tf.math.rsqrt(mean(tf.square(centered)) + epsilon)
        normalized = centered * rate

        def gradient(g: Tensor) -> Tensor:
            away = normalized * mean(g * normalized)
            return rate * (g - mean(g) - away if is_centered else g - away)

        return normalized, gradient

    normalized: Tensor = of(x)
    return normalized


def _mean_and_rate(
    x: Tensor, axes: Sequence[int], epsilon: float
) -> tuple[Tensor, Tensor]:
    """Compute mean and ``1 / sqrt(variance + epsilon)``; axes keep one number each."""
    lengths = [x.shape[axis] for axis in axes]
    if not all(lengths):
        mean, variance = keras.ops.moments(x, axes=axes, keepdims=True)
        return mean, tf.math.rsqrt(variance + epsilon)
    share = 1 / math.prod(lengths)

    @tf.custom_gradient
    def of(x: Tensor) -> tuple[tuple[Tensor, Tensor], Callable[..., Tensor]]:
        mean = tf.reduce_mean(x, axes, keepdims=True)
        squares = tf.math.squared_difference(x, mean)
        variance = tf.reduce_mean(squares, axes, keepdims=True)
        rate = tf.math.rsqrt(variance + epsilon)

        def gradient(of_mean: Tensor, of_rate: Tensor) -> Tensor:
            of_square = -share * of_rate * rate * tf.square(rate)
            # Not before it is needed: it would be held until then.
            with tf.control_dependencies([of_square]):
                centered = x - mean
            return centered * of_square + share * of_mean

        return (mean, rate), gradient

    moments: tuple[Tensor, Tensor] = of(x)
    return moments


@tf.custom_gradient
def _scaled(
    x: Tensor, factor: Tensor, offset: Tensor
) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor, Tensor]]]:
    """Compute ``x factor + offset``, which have one number along some axes of x's."""

    def gradient(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_factor, of_offset = (
            tf.reduce_sum(
                products,
                [axis for axis, length in enumerate(other.shape) if length == 1],
                keepdims=True,
            )
            for products, other in ((g * x, factor), (g, offset))
        )
        return g * factor, of_factor, of_offset

    return x * factor + offset, gradient


def _axes(call: Call) -> list[int]:
    """Return the axes that a layer normalizes, ascending."""
    axes, rank = call.layer.axis, call.inputs.shape.rank
    return sorted(axis % rank for axis in ([axes] if isinstance(axes, int) else axes))


def _are_of_rows(axes: list[int], x: Tensor) -> bool:
    """Tell whether axes of known lengths are normalized, of what is no whole numbers."""
    # Keras makes whole numbers of what it has made of those.
    is_known = all(x.shape[axis] for axis in axes)
    return x.dtype.is_floating and axes[0] > 0 and is_known


def _of_channels(variable: Variable, gradients: Tensor) -> PerRow:
    return PerRow(variable, tf.reshape(gradients, [-1, *variable.shape]))


def _run_with_copies(call: Call, shapes: dict[str, Sequence[int]]) -> Nest:
    """Run the layer's own code with copies of its variables for each row."""
    outputs = call.run_with(**{
        name: call.per_row(getattr(call.layer, name), shape)
        for name, shape in shapes.items()
        if getattr(call.layer, name) is not None
    })
    if not call.inputs.shape.is_compatible_with(outputs.shape):
        raise UnsupportedLayerError(
            "A copy of a variable for each row must not change what a layer computes. "
            f"Received: `{call.path}`, outputs of shape {outputs.shape} for inputs of "
            f"shape {call.inputs.shape}."
        )
    return outputs
