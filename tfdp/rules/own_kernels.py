"""Convolutions in which each unit has a kernel of its own."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest, Tensor
from tfdp.rules.filters import filter_gradients, unit_by_unit
from tfdp.rules.geometry import Geometry
from tfdp.rules.patches import has_few_patches


def convolved(
    inputs: Tensor, kernels: Tensor, *, positions: Sequence[int], geometry: Geometry
) -> Tensor:
    """Convolve each unit with its kernel.

    Args:
        inputs: Shape ``(U, K, *spatial, C)``, static but for ``U`` and ``K``.
        kernels: Shape ``(U, *kernel size, C / groups, O)``.
        positions: ``spatial'`` of the outputs.
        geometry: Strides, dilations and padding.

    Returns:
        Shape ``(U, K, *spatial', O)``.
    """
    if len(geometry.strides) == 1:
        outputs = convolved(
            inputs[:, :, None],
            kernels[:, None],
            positions=[1, *positions],
            geometry=geometry.with_flat_axis(),
        )
        return outputs[:, :, 0]
    kernel_shape = tuple(kernels.shape[1:].as_list())
    shape = inputs.shape[2:].as_list()
    # The operations of one unit know no groups, and on CPUs no dilations.
    goes_one_by_one = (
        len(positions) == 2
        and geometry.groups(shape, kernel_shape) == 1
        and set(geometry.dilations) == {1}
        and not has_few_patches(positions, kernel_shape)
        and not _keras.inside_xla()
    )
    if not goes_one_by_one and set(geometry.strides) != {1}:
        return _by_windows(inputs, kernels, positions, geometry)
    forward, back = (
        (_one_by_one, _one_by_one_back)
        if goes_one_by_one
        else (_by_windows, _by_windows_back)
    )
    # Uphill they are given, and nobody asks how they came about.
    is_recorded = _keras.is_recorded(kernels)

    def of_kernels(x: Tensor, g: Tensor) -> Tensor | None:
        if not is_recorded:
            return None
        return filter_gradients(x, g, kernel_shape=kernel_shape, geometry=geometry)

    # TensorFlow's gradient of each window would begin with a tensor full of zeros, and that
    # of a loop with lists of what its steps have used.
    @tf.custom_gradient
    def run(inputs: Tensor, kernels: Tensor) -> tuple[Tensor, Callable[..., Nest]]:
        outputs = forward(inputs, kernels, positions, geometry)
        return outputs, lambda g: (run_back(g, kernels), of_kernels(inputs, g))

    @tf.custom_gradient
    def run_back(g: Tensor, kernels: Tensor) -> tuple[Tensor, Callable[..., Nest]]:
        of_inputs = back(g, kernels, shape, geometry)
        return of_inputs, lambda x: (run(x, kernels), of_kernels(x, g))

    return run(inputs, kernels)


def _one_by_one(
    inputs: Tensor, kernels: Tensor, positions: Sequence[int], geometry: Geometry
) -> Tensor:
    """Take an ordinary convolution for each unit."""

    def of_unit(x: Tensor, kernel: Tensor) -> Tensor:
        return tf.nn.conv2d(x, kernel, geometry.strides, geometry.padding)

    shape = [inputs.shape[1], *positions, kernels.shape[-1]]
    return unit_by_unit(of_unit, inputs, kernels, shape)


def _one_by_one_back(
    g: Tensor, kernels: Tensor, shape: Sequence[int], geometry: Geometry
) -> Tensor:
    """Take gradients of `_one_by_one` back to inputs of shape ``(U, K, *shape)``."""

    def of_unit(g: Tensor, kernel: Tensor) -> Tensor:
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=[tf.shape(g)[0], *shape],
            filter=kernel,
            out_backprop=g,
            strides=[1, *geometry.strides, 1],
            padding=geometry.padding,
        )

    return unit_by_unit(of_unit, g, kernels, [g.shape[1], *shape])


def _by_windows(
    inputs: Tensor, kernels: Tensor, positions: Sequence[int], geometry: Geometry
) -> Tensor:
    """Take one product for each number of the kernels, with the inputs shifted."""
    kernel_shape = tuple(kernels.shape[1:].as_list())
    depth, filters = kernel_shape[-2:]
    groups = geometry.groups(inputs.shape, kernel_shape)
    padded = geometry.padded(inputs, kernel_shape)
    units, rows = tf.unstack(tf.shape(inputs)[:2])
    seen = rows * math.prod(positions)
    places = itertools.product(*map(range, kernel_shape[:-2]))
    parts: list[Tensor] = []
    for place, window in zip(
        places, geometry.windows(positions, kernel_shape), strict=True
    ):
        kernel = kernels[:, *place]
        a = padded[:, :, *window]
        if groups == 1:
            parts.append(tf.matmul(tf.reshape(a, [units, seen, depth]), kernel))
        else:
            a = tf.reshape(a, [units, seen, groups, depth])
            kernel = tf.reshape(kernel, [units, depth, groups, filters // groups])
            part = tf.einsum("ntgc,ncgo->ntgo", a, kernel)
            parts.append(tf.reshape(part, [units, seen, filters]))
    shape = [units, rows, *positions, filters]
    return tf.ensure_shape(
        tf.reshape(tf.add_n(parts), shape), [None, None, *positions, filters]
    )


def _by_windows_back(
    g: Tensor, kernels: Tensor, shape: Sequence[int], geometry: Geometry
) -> Tensor:
    """Take gradients of `_by_windows` back, where strides are 1; `_one_by_one_back`."""
    # A convolution with the kernels turned around; inputs and outputs change places.
    *size, depth, filters = kernels.shape[1:].as_list()
    *spatial, channels = shape
    groups = channels // depth
    pads = [
        [dilation * (extent - 1) - pad for pad in of_axis]
        for dilation, extent, of_axis in zip(
            geometry.dilations, size, geometry.pads(spatial, size), strict=True
        )
    ]
    turned = tf.reverse(kernels, range(1, 1 + len(size)))
    turned = tf.reshape(turned, [-1, *size, depth, groups, filters // groups])
    rank = turned.shape.rank
    turned = tf.transpose(turned, [*range(rank - 3), rank - 1, rank - 2, rank - 3])
    return _by_windows(
        tf.pad(g, [(0, 0), (0, 0), *pads, (0, 0)]),
        tf.reshape(turned, [-1, *size, filters // groups, channels]),
        spatial,
        dataclasses.replace(geometry, padding="VALID"),
    )
