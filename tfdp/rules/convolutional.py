"""Keras's convolution layers: plain, transposed, depthwise and separable."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdp._types import Nest, Tensor
from tfdp.rules.call import Call
from tfdp.rules.dense import lora_factors
from tfdp.rules.generic import generic
from tfdp.rules.geometry import Geometry
from tfdp.rules.kernels import depthwise_term, kernel_term
from tfdp.rules.preactivations import watch_preactivation, watch_sum
from tfdp.rules.registry import rule
from tfdp.rules.terms import Convolution, OuterProducts, Term


@rule(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
def conv(call: Call) -> Nest:
    """Rule of `Conv1D`, `Conv2D` and `Conv3D`."""
    layer = call.layer
    x, geometry = channels_last(layer, call.inputs), geometry_of(layer)
    if _needs_lengths(x, geometry, by_shifts=layer.groups > 1):
        return generic(call)
    if layer.lora_enabled and layer.groups > 1:
        # Each group of inputs meets all of the second factor.
        return generic(call)
    x = _causal(layer, x)

    def terms(g: Tensor) -> list[Term]:
        g = channels_last(layer, g)
        if not layer.lora_enabled:
            return [kernel_term(layer.kernel, x, g, geometry)]
        scaled, low = lora_factors(layer, layer.lora_kernel_b, g)
        # The second factor is a convolution with windows of one number.
        a = tf.cast(layer.lora_kernel_a, x.dtype)
        seen = tf.nn.convolution(
            x, a, geometry.strides, geometry.padding, dilations=geometry.dilations
        )
        return [
            Convolution(layer.lora_kernel_a, x, low, geometry),
            OuterProducts(layer.lora_kernel_b, seen, scaled),
        ]

    return watch_preactivation(call, terms, layer.bias)


@rule(
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)
def conv_transpose(call: Call) -> Nest:
    """Rule of `Conv1DTranspose`, `Conv2DTranspose` and `Conv3DTranspose`."""
    # Transposed, inputs and outputs change places in the kernel's gradient.
    layer = call.layer
    x, geometry = channels_last(layer, call.inputs), geometry_of(layer)
    if _needs_lengths(x, geometry):
        return generic(call)

    def terms(g: Tensor) -> list[Term]:
        g = channels_last(layer, g)
        return [Convolution(layer.kernel, g, x, geometry)]

    return watch_preactivation(call, terms, layer.bias)


@rule(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
def depthwise_conv(call: Call) -> Nest:
    """Rule of `DepthwiseConv1D` and `DepthwiseConv2D`."""
    layer = call.layer
    x, geometry = channels_last(layer, call.inputs), geometry_of(layer)
    if _needs_lengths(x, geometry, by_shifts=True):
        return generic(call)

    def terms(g: Tensor) -> list[Term]:
        g = channels_last(layer, g)
        return [depthwise_term(layer.kernel, x, g, geometry)]

    return watch_preactivation(call, terms, layer.bias)


@rule(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
def separable_conv(call: Call) -> Nest:
    """Rule of `SeparableConv1D` and `SeparableConv2D`: two convolutions in a row."""
    layer = call.layer
    x, geometry = channels_last(layer, call.inputs), geometry_of(layer)
    if _needs_lengths(x, geometry, by_shifts=True):
        return generic(call)
    x = _causal(layer, x)
    places = {"data_format": "channels_last"}
    between = call.watch(
        keras.ops.depthwise_conv(
            x,
            tf.cast(layer.depthwise_kernel, x.dtype),
            strides=geometry.strides,
            padding=geometry.padding.lower(),
            dilation_rate=geometry.dilations,
            **places,
        ),
        lambda g: [depthwise_term(layer.depthwise_kernel, x, g, geometry)],
        is_linear=True,
    )
    pointwise = tf.cast(layer.pointwise_kernel, x.dtype)
    outputs = keras.ops.conv(between, pointwise, strides=1, padding="valid", **places)

    def terms(g: Tensor) -> list[Term]:
        return [OuterProducts(layer.pointwise_kernel, between, channels_last(layer, g))]

    return with_bias_and_activation(call, outputs, terms)


def geometry_of(layer: keras.layers.Layer) -> Geometry:
    """Say how a layer's kernel slides, but for padding on the left alone."""
    padding = "valid" if layer.padding == "causal" else layer.padding
    rank = layer.rank

    def of_each_axis(value: int | Sequence[int]) -> tuple[int, ...]:
        return (value,) * rank if isinstance(value, int) else tuple(value)

    return Geometry(
        of_each_axis(layer.strides), of_each_axis(layer.dilation_rate), padding.upper()
    )


def _needs_lengths(x: Tensor, geometry: Geometry, *, by_shifts: bool = False) -> bool:
    """Tell whether a kernel's gradient needs lengths that the inputs do not have."""
    # TensorFlow's own operation needs none; products of shifted inputs do, as those of
    # dilated kernels.
    is_open = not x.shape[1:].is_fully_defined()
    return is_open and (by_shifts or {*geometry.dilations} != {1})


def _causal(layer: keras.layers.Layer, x: Tensor) -> Tensor:
    if layer.padding != "causal":
        return x
    # Written out, so that the kernel may slide as under "valid" padding.
    left = layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
    return tf.pad(x, [(0, 0), (left, 0), (0, 0)])


def channels_last(layer: keras.layers.Layer, tensor: Tensor) -> Tensor:
    """Put the channels of a layer's inputs or outputs behind the other axes."""
    if layer.data_format == "channels_last":
        return tensor
    return tf.transpose(tensor, [0, *range(2, tensor.shape.rank), 1])


def with_bias_and_activation(
    call: Call,
    outputs: Tensor,
    terms: Callable[[Tensor], list[Term]] | None = None,
) -> Tensor:
    """Put the channels where a layer has them, add its bias, and apply its activation.

    Args:
        call: The call.
        outputs: What the bias is to be added to, channels last.
        terms: From the gradients of the sum to all terms but the bias's, if any.

    Returns:
        The layer's outputs.
    """
    layer, rank = call.layer, outputs.shape.rank
    shape = [1] * (rank - 1) + [-1]
    if layer.data_format == "channels_first":
        outputs = tf.transpose(outputs, [0, rank - 1, *range(1, rank - 1)])
        shape = [1, -1] + [1] * (rank - 2)
    if layer.bias is not None:
        # By Keras's own addition: where lengths are equal it may add along another axis.
        bias = tf.reshape(tf.cast(layer.bias, outputs.dtype), shape)
        outputs = keras.ops.add(outputs, bias)
    if terms is not None or layer.bias is not None:
        outputs = watch_sum(call, outputs, terms or (lambda g: []), layer.bias)
    return layer.activation(outputs) if layer.activation is not None else outputs
