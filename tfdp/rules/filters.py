"""Filter gradients of convolutions, of all examples together and of each alone."""

import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp import _keras
from tfdp._tracing import made_of_rows
from tfdp._types import Tensor
from tfdp.rules.geometry import Geometry
from tfdp.rules.patches import has_few_patches, patches

# From this many channels on, products of shifted inputs take the time of the ordinary
# gradient; with fewer a loop over the examples is faster.
_MANY_CHANNELS = 64

# oneDNN has fast depthwise gradients for kernels of so many numbers along each axis, that
# the inputs hold. Those of others take it 150 ns and more for each number of the kernel,
# where TensorFlow's own, which it leaves to float64, take 20.
_SMALL = 3

# For fewer positions products of shifted inputs are faster than a loop over units.
_MANY_POSITIONS = 16


def filter_gradients(
    inputs: Tensor,
    output_gradients: Tensor,
    *,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> Tensor:
    """Compute the gradient of a convolution's kernel for each unit alone.

    Args:
        inputs: Inputs of the convolution, shape ``(U, K, *spatial, C)`` where the K
            rows of a unit are summed over; static but for ``U`` and ``K``, or of one
            group without dilations.
        output_gradients: Gradient of the loss with respect to the outputs, shape
            ``(U, K, *spatial', O)``; static likewise.
        kernel_shape: ``(*kernel size, C / groups, O)``.
        geometry: Strides, dilations and padding.

    Returns:
        Gradients of shape ``(U, *kernel_shape)`` and the dtype of the inputs.
    """
    # TensorFlow has no filter gradient in one dimension: an axis of one is put in front.
    if len(geometry.strides) == 1:
        gradients = filter_gradients(
            inputs[:, :, None],
            output_gradients[:, :, None],
            kernel_shape=(1, *kernel_shape),
            geometry=geometry.with_flat_axis(),
        )
        return gradients[:, 0]
    groups = geometry.groups(inputs.shape, kernel_shape)
    of_unit = functools.partial(
        filter_gradient, kernel_shape=kernel_shape, geometry=geometry
    )
    if not inputs.shape[2:].is_fully_defined():
        return unit_by_unit(of_unit, inputs, output_gradients, kernel_shape)
    if groups > 1 and kernel_shape[-2] == 1:
        return _one_channel_each(inputs, output_gradients, kernel_shape, geometry)
    if len(geometry.strides) == 2 and groups == 1:
        if has_few_patches(output_gradients.shape[2:-1], kernel_shape):
            return _by_patches(inputs, output_gradients, kernel_shape, geometry)
        by_offsets = (
            _keras.inside_xla()
            or set(geometry.dilations) != {1}
            or (set(geometry.strides) == {1} and kernel_shape[-2] >= _MANY_CHANNELS)
        )
        if not by_offsets:
            return unit_by_unit(of_unit, inputs, output_gradients, kernel_shape)
    return _by_offsets(inputs, output_gradients, kernel_shape, geometry)


def filter_gradient(
    inputs: Tensor,
    output_gradients: Tensor,
    *,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> Tensor:
    """Compute the ordinary gradient of a convolution's kernel.

    Args:
        inputs: Inputs of the convolution, shape ``(R, *spatial, C)``.
        output_gradients: Gradient with respect to the outputs, shape
            ``(R, *spatial', O)``.
        kernel_shape: ``(*kernel size, C / groups, O)``.
        geometry: Strides, dilations and padding.

    Returns:
        The sum over the rows, of shape `kernel_shape`.
    """
    rank = len(geometry.strides)
    if rank == 1:
        gradient = filter_gradient(
            inputs[:, None],
            output_gradients[:, None],
            kernel_shape=(1, *kernel_shape),
            geometry=geometry.with_flat_axis(),
        )
        return gradient[0]
    groups = geometry.groups(inputs.shape, kernel_shape)
    if groups == 1 and all(size == 1 for size in kernel_shape[:-2]):
        # With different strides TensorFlow's own operation writes beyond its memory.
        seen = inputs[
            (slice(None), *(slice(None, None, by) for by in geometry.strides))
        ]
        a = tf.reshape(seen, [-1, kernel_shape[-2]])
        g = tf.reshape(output_gradients, [-1, kernel_shape[-1]])
        return tf.reshape(tf.matmul(a, g, transpose_a=True), kernel_shape)
    operation = {
        "filter_sizes": kernel_shape,
        "out_backprop": output_gradients,
        "strides": [1, *geometry.strides, 1],
        "dilations": [1, *geometry.dilations, 1],
        "padding": geometry.padding,
    }
    # The operations know no groups, and on CPUs no dilations.
    if groups == 1 and set(geometry.dilations) == {1}:
        if rank == 2:
            return tf.raw_ops.Conv2DBackpropFilter(input=inputs, **operation)
        return tf.raw_ops.Conv3DBackpropFilterV2(input=inputs, **operation)
    *kernel, depth, filters = kernel_shape
    if depth == 1 and _has_native(geometry):
        operation["filter_sizes"] = (*kernel, groups, filters // groups)
        gradient = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=inputs, **operation
        )
        return tf.reshape(gradient, kernel_shape)
    return _by_offsets(inputs[None], output_gradients[None], kernel_shape, geometry)[0]


def unit_by_unit(
    function: Callable[[Tensor, Tensor], Tensor],
    a: Tensor,
    b: Tensor,
    shape: Sequence[int | None],
) -> Tensor:
    """Loop over units, each of which has a part of its own of two tensors.

    Args:
        function: Takes the two parts of a unit.
        a: The parts, units on the first axis.
        b: Likewise.
        shape: Of what the function returns.

    Returns:
        Shape ``(U, *shape)`` and the dtype of `a`.
    """
    # Units are taken by number: given as elements, all would be copied.
    made = tf.map_fn(
        lambda unit: function(a[unit], b[unit]),
        tf.range(tf.shape(a)[0]),
        fn_output_signature=tf.TensorSpec(shape, a.dtype),
    )
    return made_of_rows([made], [a, b])[0]


def depthwise_gradients(
    inputs: Tensor,
    output_gradients: Tensor,
    *,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> Tensor:
    """Compute the gradient of a depthwise convolution's kernel for each unit alone.

    Args:
        inputs: Shape ``(U, K, *spatial, C)``; as for `filter_gradients`.
        output_gradients: Shape ``(U, K, *spatial', C * multiplier)``.
        kernel_shape: ``(*kernel size, C, multiplier)``.
        geometry: Strides, dilations and padding.

    Returns:
        Gradients of shape ``(U, *kernel_shape)``.
    """
    *kernel, channels, multiplier = kernel_shape
    gradients = filter_gradients(
        inputs,
        output_gradients,
        kernel_shape=(*kernel, 1, channels * multiplier),
        geometry=geometry,
    )
    return tf.reshape(gradients, [-1, *kernel_shape])


def _one_channel_each(
    inputs: Tensor,
    output_gradients: Tensor,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> Tensor:
    """Choose how filters are treated that see one of several channels each."""
    if not _has_native(geometry):
        return _by_offsets(inputs, output_gradients, kernel_shape, geometry)
    *kernel, _, filters = kernel_shape
    is_small = filters == inputs.shape[-1] and all(
        extent <= _SMALL and size >= extent + (stride - 1 if extent > 1 else 0)
        for extent, size, stride in zip(
            kernel, inputs.shape[2:-1], geometry.strides, strict=True
        )
    )
    if is_small:
        return _in_channels(inputs, output_gradients, kernel_shape, geometry)
    positions = math.prod(output_gradients.shape[2:-1])
    if positions < _MANY_POSITIONS and set(geometry.strides) == {1}:
        return _by_offsets(inputs, output_gradients, kernel_shape, geometry)

    def of_unit(x: Tensor, g: Tensor) -> Tensor:
        x, g = tf.cast(x, tf.float64), tf.cast(g, tf.float64)
        gradient = filter_gradient(x, g, kernel_shape=kernel_shape, geometry=geometry)
        return tf.cast(gradient, inputs.dtype)

    return unit_by_unit(of_unit, inputs, output_gradients, kernel_shape)


def _has_native(geometry: Geometry) -> bool:
    """Tell whether TensorFlow's depthwise gradient takes these, and is not slow."""
    return (
        not _keras.inside_xla()
        and len(geometry.strides) == 2
        and len(set(geometry.strides)) == 1
        and set(geometry.dilations) == {1}
    )


def _in_channels(
    inputs: Tensor,
    output_gradients: Tensor,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> Tensor:
    """Let each unit have channels of its own, with one filter each, which do not meet."""
    units, rows_of_unit = _lengths(inputs)

    def laid_out(rows: Tensor) -> Tensor:
        *spatial, _ = rows.shape[2:].as_list()
        last = tf.transpose(rows, [1, 2, 3, 0, 4])
        return tf.reshape(last, [rows_of_unit, *spatial, -1])

    *kernel, _, channels = kernel_shape
    laid_out_inputs = laid_out(inputs)
    gradients = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
        input=laid_out_inputs,
        filter_sizes=[*kernel, tf.shape(laid_out_inputs)[-1], 1],
        out_backprop=laid_out(output_gradients),
        strides=[1, *geometry.strides, 1],
        padding=geometry.padding,
    )
    apart = tf.reshape(gradients, [*kernel, units, 1, channels])
    made = tf.transpose(apart, [2, 0, 1, 3, 4])
    return made_of_rows([made], [inputs, output_gradients])[0]


def _by_patches(
    inputs: Tensor,
    output_gradients: Tensor,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> Tensor:
    rows = tf.reshape(inputs, [-1, *inputs.shape[2:]])
    a = patches(rows, kernel_shape, geometry)
    units, rows_of_unit = _lengths(inputs)
    positions = rows_of_unit * math.prod(output_gradients.shape[2:-1])
    a = tf.reshape(a, [units, positions, math.prod(kernel_shape[:-1])])
    g = tf.reshape(output_gradients, [units, positions, kernel_shape[-1]])
    return tf.reshape(tf.matmul(a, g, transpose_a=True), [-1, *kernel_shape])


def _lengths(inputs: Tensor) -> tuple[int | Tensor, int | Tensor]:
    """Return units and rows of each; -1 units where these follow, without operations."""
    rows_of_unit = inputs.shape[1]
    if rows_of_unit and 0 not in inputs.shape[2:]:
        return -1, rows_of_unit
    units, rows_of_unit = tf.unstack(tf.shape(inputs)[:2])
    return units, rows_of_unit


def _by_offsets(
    inputs: Tensor,
    output_gradients: Tensor,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> Tensor:
    """Take one product for each number of the kernel, with the inputs shifted."""
    groups = geometry.groups(inputs.shape, kernel_shape)
    depth, filters = kernel_shape[-2:]
    spatial = output_gradients.shape[2:-1].as_list()
    units, rows_of_unit = _lengths(inputs)
    positions = rows_of_unit * math.prod(spatial)
    padded = geometry.padded(inputs, kernel_shape)
    g = tf.reshape(output_gradients, [units, positions, groups, filters // groups])
    parts: list[Tensor] = []
    for window in geometry.windows(spatial, kernel_shape):
        if not geometry.sees_inputs(window, inputs.shape[2:-1], kernel_shape):
            parts.append(tf.zeros([tf.shape(inputs)[0], depth, filters], g.dtype))
            continue
        # One after the other, or all the shifted inputs are held at once.
        with tf.control_dependencies(parts[-1:]):
            a = padded[(slice(None), slice(None), *window)]
        a = tf.reshape(a, [units, positions, groups, depth])
        if groups == 1:
            parts.append(tf.matmul(a[:, :, 0], g[:, :, 0], transpose_a=True))
        else:
            part = (
                tf.reduce_sum(a * g, 1)
                if depth == 1
                else tf.einsum("ntgc,ntgo->ncgo", a, g)
            )
            parts.append(tf.reshape(part, [units, depth, filters]))
    return tf.reshape(tf.stack(parts, 1), [-1, *kernel_shape])
