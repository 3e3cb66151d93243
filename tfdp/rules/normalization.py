"""Layers with a scale, an offset or a slope for each channel.

Each row gets a copy of these variables: the ordinary backward pass then leaves the
gradients of the rows apart, where it would have added them up.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdp._types import Nest
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call
from tfdp.rules.registry import rule


@rule(keras.layers.LayerNormalization)
def layer_normalization(call: Call) -> Nest:
    """Rule of `keras.layers.LayerNormalization`."""
    layer, x = call.layer, call.inputs
    axes = [layer.axis] if isinstance(layer.axis, int) else layer.axis
    normalized = {axis % x.shape.rank for axis in axes}
    shape = [x.shape[i] if i in normalized else 1 for i in range(1, x.shape.rank)]
    return _run_with_copies(call, {"gamma": shape, "beta": shape})


@rule(keras.layers.RMSNormalization)
def rms_normalization(call: Call) -> Nest:
    """Rule of `keras.layers.RMSNormalization`."""
    own = call.layer.scale.shape
    missing = call.inputs.shape.rank - 1 - len(own)
    return _run_with_copies(call, {"scale": [1] * missing + list(own)})


@rule(keras.layers.PReLU)
def prelu(call: Call) -> Nest:
    """Rule of `keras.layers.PReLU`."""
    return _run_with_copies(call, {"alpha": call.layer.alpha.shape})


@rule(keras.layers.GroupNormalization)
def group_normalization(call: Call) -> Nest:
    """Rule of `keras.layers.GroupNormalization`."""
    layer, x = call.layer, call.inputs
    axis, groups = layer.axis % x.shape.rank, layer.groups
    of_group = x.shape[axis] // groups
    dynamic = tf.shape(x)
    grouped_shape = [dynamic[i] if n is None else n for i, n in enumerate(x.shape)]
    grouped_shape[axis : axis + 1] = [groups, of_group]
    # Half precision overflows here.
    grouped = tf.reshape(x, grouped_shape)
    grouped = tf.cast(grouped, tf.float32 if x.dtype.size < 4 else x.dtype)
    over = [i for i in range(1, len(grouped_shape)) if i != axis]
    mean, variance = keras.ops.moments(grouped, axes=over, keepdims=True)
    copy_shape = [1] * (len(grouped_shape) - 1)
    copy_shape[axis - 1 : axis + 1] = [groups, of_group]
    factor = tf.math.rsqrt(variance + layer.epsilon)
    if layer.scale:
        factor *= tf.cast(call.per_row(layer.gamma, copy_shape), factor.dtype)
    offset = -mean * factor
    if layer.center:
        offset += tf.cast(call.per_row(layer.beta, copy_shape), factor.dtype)
    outputs = tf.reshape(grouped * factor + offset, dynamic)
    return tf.cast(tf.ensure_shape(outputs, x.shape), layer.compute_dtype)


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
