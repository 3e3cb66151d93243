"""TimeDistributed, which calls a layer at every time step."""

import inspect

import keras
import tensorflow as tf

from tfdp._types import Nest, Tensor
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call
from tfdp.rules.registry import rule


@rule(keras.layers.TimeDistributed)
def time_distributed(call: Call) -> Nest:
    """Rule of `keras.layers.TimeDistributed`: all time steps as rows of one call."""
    arguments = call.bound()
    inputs, mask = arguments["inputs"], arguments["mask"]
    steps = inputs.shape[1]
    if steps is None:
        raise UnsupportedLayerError(
            "TimeDistributed needs a known number of time steps. Received: "
            f"`{call.path}` with inputs of shape {inputs.shape}. Use "
            "`keras.Input((steps, ...))`."
        )
    layer = call.layer.layer
    taken, options = inspect.signature(layer.call).parameters, {}
    if mask is not None and "mask" in taken:
        options["mask"] = joined(mask, steps)
    if "training" in taken:
        options["training"] = arguments["training"]
    with call.repeated(steps):
        outputs = layer.call(joined(inputs, steps), **options)
    rows = tf.shape(inputs)[0]
    shape = tf.concat([[rows, steps], tf.shape(outputs)[1:]], 0)
    return tf.ensure_shape(
        tf.reshape(outputs, shape), [inputs.shape[0], steps, *outputs.shape[1:]]
    )


def joined(tensor: Tensor, steps: int) -> Tensor:
    """``(R, steps, ...)`` -> ``(R * steps, ...)``."""
    joined = tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))
    rows = tensor.shape[0]
    return tf.ensure_shape(
        joined, [None if rows is None else rows * steps, *tensor.shape[2:]]
    )
