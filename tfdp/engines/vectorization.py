"""Better conversions of operations for `tf.vectorized_map`."""

import contextlib
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor
from tfdp.rules import filters
from tfdp.rules.geometry import Geometry

# An operation and its converted inputs; TensorFlow has no public name for the class.
PforInput: TypeAlias = Any


def efficient_vectorization() -> contextlib.AbstractContextManager[None]:
    """Let `tf.vectorized_map` convert some operations in better ways.

    By itself it takes the filter gradient of a convolution in a sequential loop
    over the examples. And it makes of a product with a matrix that all examples
    share a broadcasting `BatchMatMulV2`, whose oneDNN kernel was seen to corrupt
    memory when the ranks differ by two. And it leaves the sums of gradients over
    broadcast axes in place where there are no such axes, which copies every
    activation unless the graph optimizer folds them: in branches and loops it does
    not. Convolutions whose kernels differ between examples it takes in a loop too, and
    where oneDNN is off it has no input gradient for groups and dilations. Of a single
    example it squeezes away what holds the examples. And the gradient of max pooling
    is only fast beside its own forward pass.

    Returns:
        A context within which the better conversions are in force.
    """
    return _keras.pfor_converters({
        "Conv2D": _convert_convolution,
        "Conv2DBackpropInput": _convert_input_gradient,
        "Conv2DBackpropFilter": _convert_filter_gradient,
        "BatchMatMulV2": _convert_batch_matmul,
        "MaxPoolGrad": _convert_max_pool_gradient,
        "Squeeze": _convert_squeeze,
        "Sum": _convert_sum,
    })


def _convert_filter_gradient(pfor_input: PforInput) -> Tensor | None:
    inputs, is_stacked, _ = pfor_input.input(0)
    kernel_shape = pfor_input.op.outputs[0].shape
    pfor_input.stack_inputs([2])
    output_gradients = pfor_input.stacked_input(2)
    is_static = (
        inputs.shape[1:].is_fully_defined()
        and output_gradients.shape[1:].is_fully_defined()
    )
    if (
        not is_stacked
        or not is_static
        or not kernel_shape.is_fully_defined()
        or pfor_input.get_attr("padding") not in {b"SAME", b"VALID"}
        or pfor_input.get_attr("data_format") != b"NHWC"
    ):
        depth, channels = kernel_shape[-2], inputs.shape[-1]
        if None not in (depth, channels) and depth != channels:
            # TensorFlow's own conversion knows no groups, and fails when it runs.
            raise NotImplementedError("a convolution in groups")
        return None
    return filters.filter_gradients(
        inputs,
        output_gradients,
        kernel_shape=tuple(kernel_shape.as_list()),
        geometry=_geometry(pfor_input),
    )


def _convert_convolution(pfor_input: PforInput) -> Tensor | None:
    _, is_stacked, _ = pfor_input.input(1)
    if not is_stacked or not _is_known(pfor_input):
        return None
    pfor_input.stack_inputs([0, 1])
    inputs, kernels = (pfor_input.stacked_input(index) for index in range(2))
    return _convolved(inputs, kernels, pfor_input.op.outputs[0], pfor_input)


def _convert_input_gradient(pfor_input: PforInput) -> Tensor | None:
    kernels, is_stacked, _ = pfor_input.input(1)
    shape = pfor_input.op.outputs[0].shape[1:]
    # Where oneDNN is off, TensorFlow has no such gradient on CPUs.
    is_plain = shape[-1] == kernels.shape[-2] and set(
        pfor_input.get_attr("dilations")
    ) == {1}
    has_none = not (is_plain or _keras.inside_xla() or _has_gpu())
    if not (is_stacked or has_none) or not _is_known(pfor_input):
        return None
    pfor_input.stack_inputs([2])
    output_gradients = pfor_input.stacked_input(2)
    leading = tf.shape(output_gradients)[:2]
    if not is_stacked:
        # All examples are rows of one.
        kernels = kernels[None]
        output_gradients = tf.reshape(
            output_gradients, tf.concat([[1, -1], tf.shape(output_gradients)[2:]], 0)
        )
    # A linear map, of which this is the transpose.
    size = tf.concat([tf.shape(output_gradients)[:2], shape], 0)
    zeros = tf.zeros(size, output_gradients.dtype)
    zeros = tf.ensure_shape(zeros, [None, None, *shape])
    with tf.GradientTape() as tape:
        tape.watch(zeros)
        outputs = _convolved(zeros, kernels, pfor_input.op.inputs[2], pfor_input)
    gradients = tape.gradient(outputs, zeros, output_gradients=output_gradients)
    return tf.reshape(gradients, tf.concat([leading, shape], 0))


def _has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def _is_known(pfor_input: PforInput) -> bool:
    """Tell whether a convolution is one that can be written as matrix products."""
    tensors = [*pfor_input.op.inputs, *pfor_input.op.outputs]
    return (
        pfor_input.get_attr("padding") in {b"SAME", b"VALID"}
        and pfor_input.get_attr("data_format") == b"NHWC"
        and all(
            tensor.shape[1:].is_fully_defined()
            for tensor in tensors
            if tensor.dtype.is_floating
        )
    )


def _convolved(
    inputs: Tensor, kernels: Tensor, outputs: Tensor, pfor_input: PforInput
) -> Tensor:
    return filters.convolved(
        inputs,
        kernels,
        positions=outputs.shape[1:-1].as_list(),
        geometry=_geometry(pfor_input),
    )


def _geometry(pfor_input: PforInput) -> Geometry:
    return Geometry(
        strides=tuple(pfor_input.get_attr("strides")[1:3]),
        dilations=tuple(pfor_input.get_attr("dilations")[1:3]),
        padding=pfor_input.get_attr("padding").decode(),
    )


def _convert_batch_matmul(pfor_input: PforInput) -> Tensor:
    x, x_stacked, _ = pfor_input.input(0)
    y, y_stacked, _ = pfor_input.input(1)
    adj_x, adj_y = pfor_input.get_attr("adj_x"), pfor_input.get_attr("adj_y")
    if x_stacked and not y_stacked and y.shape.rank == 2 and not adj_x:
        shape = tf.shape(x)
        product = tf.matmul(tf.reshape(x, [-1, shape[-1]]), y, adjoint_b=adj_y)
        return tf.reshape(product, tf.concat([shape[:-1], tf.shape(product)[1:]], 0))
    pfor_input.expanddim_inputs_for_broadcast()
    x, y = pfor_input.input(0)[0], pfor_input.input(1)[0]
    batch = tf.broadcast_dynamic_shape(tf.shape(x)[:-2], tf.shape(y)[:-2])
    x, y = (
        tf.broadcast_to(factor, tf.concat([batch, tf.shape(factor)[-2:]], 0))
        for factor in (x, y)
    )
    return tf.matmul(x, y, adjoint_a=adj_x, adjoint_b=adj_y)


def _convert_max_pool_gradient(pfor_input: PforInput) -> Tensor:
    pfor_input.stack_inputs()
    inputs, outputs, output_gradients = (
        pfor_input.stacked_input(index) for index in range(3)
    )
    window = {
        "ksize": pfor_input.get_attr("ksize"),
        "strides": pfor_input.get_attr("strides"),
        "padding": pfor_input.get_attr("padding").decode(),
        "explicit_paddings": pfor_input.get_attr("explicit_paddings"),
        "data_format": pfor_input.get_attr("data_format").decode(),
    }
    rows, _, gradient_rows = (
        tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))
        for tensor in (inputs, outputs, output_gradients)
    )
    rows = tf.ensure_shape(rows, [None, *inputs.shape[2:]])
    gradients = tf.raw_ops.MaxPoolGrad(
        orig_input=rows,
        orig_output=tf.raw_ops.MaxPool(input=rows, **window),
        grad=gradient_rows,
        **window,
    )
    return tf.reshape(gradients, tf.shape(inputs))


def _convert_squeeze(pfor_input: PforInput) -> Tensor | None:
    shape = pfor_input.op.outputs[0].shape
    if not shape.is_fully_defined():
        return None
    stacked = pfor_input.stacked_input(0)
    return tf.reshape(stacked, tf.concat([tf.shape(stacked)[:1], shape], 0))


def _convert_sum(pfor_input: PforInput) -> Tensor | None:
    axes = _static_axes(pfor_input.unstacked_input(1))
    if axes is None:
        return None
    stacked = pfor_input.stacked_input(0)
    if not axes:
        return stacked
    return tf.reduce_sum(
        stacked,
        [axis + 1 if axis >= 0 else axis for axis in axes],
        keepdims=pfor_input.get_attr("keep_dims"),
    )


def _static_axes(axes: Tensor) -> list[int] | None:
    """Find the axes of a sum, also where they come from a gradient's broadcast."""
    known = tf.get_static_value(axes)
    if known is not None:
        return [int(axis) for axis in np.ravel(known)]
    if axes.op.type != "BroadcastGradientArgs":
        return None
    shapes = [tf.get_static_value(shape) for shape in axes.op.inputs]
    if any(shape is None for shape in shapes):
        return None
    rank = max(len(shape) for shape in shapes)
    own, other = (
        [1] * (rank - len(shape)) + shape.tolist()
        for shape in (shapes if axes.value_index == 0 else shapes[::-1])
    )
    missing = rank - len(shapes[axes.value_index])
    return [
        axis
        for axis in range(rank)
        if axis < missing or (own[axis] == 1 and other[axis] != 1)
    ]
