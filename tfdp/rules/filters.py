"""Filter gradients of convolutions, of all examples together and of each alone."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp.rules.products import inner_products

# Above this many numbers of patches per example other ways are faster and need far
# less memory; below it their overhead dominates.
_LARGEST_PATCHES = 1 << 16

# From this many channels on, products of shifted inputs take the time of the ordinary
# gradient; with fewer a loop over the examples is faster.
_MANY_CHANNELS = 64

# Times of a number that is moved, in those of a multiplication in a matrix product:
# in slices of Gram matrices, and in patches.
SLICED, PATCHED = 100, 40


def has_few_patches(positions: Sequence[int], kernel_shape: Sequence[int]) -> bool:
    """Tell whether to write out what a 2-D kernel sees at each position."""
    return math.prod(positions) * math.prod(kernel_shape[:-1]) <= _LARGEST_PATCHES


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How a kernel slides over its inputs, channels last.

    Attributes:
        strides: Steps along each spatial axis.
        dilations: Distances between the kernel's numbers along each.
        padding: ``"SAME"`` or ``"VALID"``.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: str

    def groups(self, inputs: Sequence[int], kernel: Sequence[int]) -> int:
        """Count the groups of channels that do not meet."""
        return int(inputs[-1] // kernel[-2])

    def pads(
        self, inputs: Sequence[int], kernel: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return the zeros before and after each axis of (spatial, C) inputs."""
        if self.padding == "VALID":
            return [(0, 0)] * len(self.strides)
        pads = []
        for size, extent, stride, dilation in zip(
            inputs, kernel, self.strides, self.dilations, strict=False
        ):
            outputs = -(-size // stride)
            total = max((outputs - 1) * stride + (extent - 1) * dilation + 1 - size, 0)
            pads.append((total // 2, total - total // 2))
        return pads

    def with_flat_axis(self) -> "Geometry":
        """Describe the same convolution with an axis of one position in front."""
        return Geometry((1, *self.strides), (1, *self.dilations), self.padding)


def filter_gradients(
    inputs: tf.Tensor,
    output_gradients: tf.Tensor,
    *,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> tf.Tensor:
    """Compute the gradient of a convolution's kernel for each unit alone.

    Args:
        inputs: Inputs of the convolution, shape ``(U, K, *spatial, C)`` where the K
            rows of a unit are summed over; static but for ``U`` and ``K``.
        output_gradients: Gradient of the loss with respect to the outputs, shape
            ``(U, K, *spatial', O)``; static likewise.
        kernel_shape: ``(*kernel size, C / groups, O)``.
        geometry: Strides, dilations and padding.

    Returns:
        Gradients of shape ``(U, *kernel_shape)`` and the dtype of the inputs.
    """
    if len(geometry.strides) == 1:
        gradients = filter_gradients(
            inputs[:, :, None],
            output_gradients[:, :, None],
            kernel_shape=(1, *kernel_shape),
            geometry=geometry.with_flat_axis(),
        )
        return gradients[:, 0]
    groups = geometry.groups(inputs.shape, kernel_shape)
    if len(geometry.strides) == 2 and groups == 1:
        if has_few_patches(output_gradients.shape[2:-1], kernel_shape):
            return _by_patches(inputs, output_gradients, kernel_shape, geometry)
        by_offsets = (
            _keras.inside_xla()
            or set(geometry.dilations) != {1}
            or (set(geometry.strides) == {1} and kernel_shape[-2] >= _MANY_CHANNELS)
        )
        if not by_offsets:
            # Units are taken by number: given as elements, all would be copied.
            return tf.map_fn(
                lambda unit: filter_gradient(
                    inputs[unit],
                    output_gradients[unit],
                    kernel_shape=kernel_shape,
                    geometry=geometry,
                ),
                tf.range(tf.shape(inputs)[0]),
                fn_output_signature=tf.TensorSpec(kernel_shape, inputs.dtype),
            )
    return _by_offsets(inputs, output_gradients, kernel_shape, geometry, groups)


def filter_gradient(
    inputs: tf.Tensor,
    output_gradients: tf.Tensor,
    *,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> tf.Tensor:
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
    operation = {
        "filter_sizes": kernel_shape,
        "out_backprop": output_gradients,
        "strides": [1, *geometry.strides, 1],
        "dilations": [1, *geometry.dilations, 1],
        "padding": geometry.padding,
    }
    groups = geometry.groups(inputs.shape, kernel_shape)
    # The operations know no groups, and on CPUs no dilations.
    if groups == 1 and set(geometry.dilations) == {1}:
        if rank == 2:
            return tf.raw_ops.Conv2DBackpropFilter(input=inputs, **operation)
        return tf.raw_ops.Conv3DBackpropFilterV2(input=inputs, **operation)
    return _by_offsets(
        inputs[None], output_gradients[None], kernel_shape, geometry, groups
    )[0]


def patch_gram(
    inputs: tf.Tensor,
    others: tf.Tensor,
    *,
    positions: Sequence[int],
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> tf.Tensor:
    """Compute the inner products of all pairs of patches that a kernel sees.

    They are sums of inner products of pixels, which are fewer and shorter: for each
    number of the kernel one shifted part of the pixels' Gram matrix.

    Args:
        inputs: Shape ``(U, K, *spatial, C)``, static but for ``U`` and ``K``; one
            group.
        others: Shape ``(U, L, *spatial, C)``.
        positions: ``spatial'`` of the outputs.
        kernel_shape: ``(*kernel size, C, O)``.
        geometry: Strides, dilations and padding.

    Returns:
        Shape ``(U, K T, L T)`` for the T positions of the outputs.
    """
    sides = [_padded(side, kernel_shape, geometry) for side in (inputs, others)]
    spatial = sides[0].shape[2:-1].as_list()
    patches, pixels = (math.prod(sizes) for sizes in (positions, spatial))
    seen = math.prod(kernel_shape[:-1])
    of_pixels = pixels**2 * kernel_shape[-2]
    of_pixels += SLICED * math.prod(kernel_shape[:-2]) * patches**2
    windows = list(_windows(positions, kernel_shape, geometry))
    units = tf.shape(inputs)[0]
    if patches**2 * seen + PATCHED * patches * seen < of_pixels:
        rows = [
            tf.reshape(
                tf.concat([side[:, :, *window] for window in windows], -1),
                [units, tf.shape(side)[1] * patches, seen],
            )
            for side in sides
        ]
        return inner_products(*rows)
    lengths = [tf.shape(side)[1] for side in sides]
    rows = [
        tf.reshape(side, [units, length * pixels, side.shape[-1]])
        for side, length in zip(sides, lengths, strict=True)
    ]
    shape = [[units, lengths[0]], spatial, [lengths[1]], spatial]
    gram = tf.reshape(inner_products(*rows), tf.concat(shape, 0))
    every = slice(None)
    parts = [gram[:, :, *window, every, *window] for window in windows]
    return tf.reshape(
        tf.add_n(parts), [units, lengths[0] * patches, lengths[1] * patches]
    )


def convolved(
    inputs: tf.Tensor,
    kernels: tf.Tensor,
    *,
    positions: Sequence[int],
    geometry: Geometry,
) -> tf.Tensor:
    """Convolve each unit with a kernel of its own.

    Args:
        inputs: Shape ``(U, K, *spatial, C)``, static but for ``U`` and ``K``.
        kernels: Shape ``(U, *kernel size, C / groups, O)``.
        positions: ``spatial'`` of the outputs.
        geometry: Strides, dilations and padding.

    Returns:
        Shape ``(U, K, *spatial', O)``.
    """
    kernel_shape = tuple(kernels.shape[1:].as_list())
    depth, filters = kernel_shape[-2:]
    groups = geometry.groups(inputs.shape, kernel_shape)
    padded = _padded(inputs, kernel_shape, geometry)
    units, rows = tf.unstack(tf.shape(inputs)[:2])
    seen = rows * math.prod(positions)
    places = itertools.product(*map(range, kernel_shape[:-2]))
    parts: list[tf.Tensor] = []
    for place, window in zip(
        places, _windows(positions, kernel_shape, geometry), strict=True
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


def patch_sums(
    inputs: tf.Tensor,
    positions: Sequence[int],
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> tf.Tensor:
    """Add up what a kernel sees at each position.

    Args:
        inputs: Shape ``(U, K, *spatial, C)``, static but for ``U`` and ``K``.
        positions: ``spatial'`` of the outputs.
        kernel_shape: ``(*kernel size, C / groups, O)``.
        geometry: Strides, dilations and padding.

    Returns:
        Shape ``(U, K, *spatial', groups)``.
    """
    groups = geometry.groups(inputs.shape, kernel_shape)
    shape = tf.concat([tf.shape(inputs)[:-1], [groups, kernel_shape[-2]]], 0)
    sums = tf.reduce_sum(tf.reshape(inputs, shape), -1)
    sums = tf.ensure_shape(sums, [*inputs.shape[:-1], groups])
    padded = _padded(sums, (*kernel_shape[:-2], 1, groups), geometry)
    windows = _windows(positions, kernel_shape, geometry)
    return tf.add_n([padded[:, :, *window] for window in windows])


def depthwise_gradients(
    inputs: tf.Tensor,
    output_gradients: tf.Tensor,
    *,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> tf.Tensor:
    """Compute the gradient of a depthwise convolution's kernel for each row alone.

    Args:
        inputs: Shape ``(R, *spatial, C)``; static but for ``R``.
        output_gradients: Shape ``(R, *spatial', C * multiplier)``.
        kernel_shape: ``(*kernel size, C, multiplier)``.
        geometry: Strides, dilations and padding.

    Returns:
        Gradients of shape ``(R, *kernel_shape)``.
    """
    spatial = output_gradients.shape[1:-1].as_list()
    g = tf.reshape(output_gradients, [-1, *spatial, *kernel_shape[-2:]])
    padded = _padded(inputs[:, None], kernel_shape, geometry)[:, 0]
    axes = list(range(1, 1 + len(spatial)))
    parts = [
        tf.reduce_sum(padded[(slice(None), *window)][..., None] * g, axes)
        for window in _windows(spatial, kernel_shape, geometry)
    ]
    return tf.reshape(tf.stack(parts, 1), [-1, *kernel_shape])


def _by_patches(
    inputs: tf.Tensor,
    output_gradients: tf.Tensor,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> tf.Tensor:
    rows = tf.reshape(inputs, [-1, *inputs.shape[2:]])
    a = patches(rows, kernel_shape, geometry)
    # Without units the number of positions would not follow from the others.
    units, rows_of_unit = tf.unstack(tf.shape(inputs)[:2])
    positions = rows_of_unit * math.prod(output_gradients.shape[2:-1])
    a = tf.reshape(a, [units, positions, math.prod(kernel_shape[:-1])])
    g = tf.reshape(output_gradients, [units, positions, kernel_shape[-1]])
    return tf.reshape(tf.matmul(a, g, transpose_a=True), [-1, *kernel_shape])


def _by_offsets(
    inputs: tf.Tensor,
    output_gradients: tf.Tensor,
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
    groups: int,
) -> tf.Tensor:
    """Take one product for each number of the kernel, with the inputs shifted."""
    depth, filters = kernel_shape[-2:]
    spatial = output_gradients.shape[2:-1].as_list()
    units = tf.shape(inputs)[0]
    padded = _padded(inputs, kernel_shape, geometry)
    g = tf.reshape(output_gradients, [units, -1, groups, filters // groups])
    parts: list[tf.Tensor] = []
    for window in _windows(spatial, kernel_shape, geometry):
        # One after the other, or all the shifted inputs are held at once.
        with tf.control_dependencies(parts[-1:]):
            a = padded[(slice(None), slice(None), *window)]
        a = tf.reshape(a, [units, -1, groups, depth])
        if groups == 1:
            parts.append(tf.matmul(a[:, :, 0], g[:, :, 0], transpose_a=True))
        else:
            part = tf.einsum("ntgc,ntgo->ncgo", a, g)
            parts.append(tf.reshape(part, [units, depth, filters]))
    return tf.reshape(tf.stack(parts, 1), [-1, *kernel_shape])


def _padded(
    inputs: tf.Tensor, kernel_shape: tuple[int, ...], geometry: Geometry
) -> tf.Tensor:
    """Write out the padding of ``(U, K, *spatial, C)``."""
    pads = geometry.pads(inputs.shape[2:].as_list(), kernel_shape)
    if not any(map(any, pads)):
        return inputs
    return tf.pad(inputs, [(0, 0), (0, 0), *pads, (0, 0)])


def _windows(
    spatial: Sequence[int], kernel_shape: tuple[int, ...], geometry: Geometry
) -> Iterator[tuple[slice, ...]]:
    """Yield, for each place in the kernel, what it sees of the padded inputs."""
    for place in itertools.product(*map(range, kernel_shape[:-2])):
        window = tuple(
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, size, stride, dilation in zip(
                place, spatial, geometry.strides, geometry.dilations, strict=True
            )
        )
        yield window


def patches(
    inputs: tf.Tensor, kernel_shape: tuple[int, ...], geometry: Geometry
) -> tf.Tensor:
    """Lay out what a 2-D kernel sees at each position.

    Args:
        inputs: Shape ``(R, H, W, C)``; static but for ``R``.
        kernel_shape: ``(height, width, C, O)``; one group.
        geometry: Strides, dilations and padding.

    Returns:
        Shape ``(R, H', W', height * width * C)``.
    """
    height, width, channels, _ = kernel_shape
    size = height * width * channels
    if channels == 1 and size <= 128 and not _keras.inside_xla():
        # A convolution with the identity is three times faster than the patch
        # operation here, which copies one number at a time.
        identity = tf.reshape(
            tf.eye(size, dtype=inputs.dtype), [height, width, channels, size]
        )
        return tf.nn.conv2d(
            inputs,
            identity,
            geometry.strides,
            geometry.padding,
            dilations=geometry.dilations,
        )
    if _keras.inside_xla():
        return tf.image.extract_patches(
            inputs,
            [1, height, width, 1],
            [1, *geometry.strides, 1],
            [1, *geometry.dilations, 1],
            geometry.padding,
        )
    # Whole pixels are copied, which is 2-8 times faster.
    padded = _padded(inputs[:, None], kernel_shape, geometry)[:, 0]
    spatial = padded.shape[1:-1].as_list()
    rows, columns = (
        np.arange(0, size - dilation * (extent - 1), stride)[:, None]
        + dilation * np.arange(extent)
        for size, extent, stride, dilation in zip(
            spatial,
            (height, width),
            geometry.strides,
            geometry.dilations,
            strict=True,
        )
    )
    seen = rows[:, None, :, None] * spatial[1] + columns[None, :, None, :]
    pixels = tf.reshape(padded, [-1, math.prod(spatial), channels])
    found = _taken(pixels, seen.ravel())
    return tf.reshape(found, [-1, len(rows), len(columns), size])


def _taken(pixels: tf.Tensor, places: np.ndarray) -> tf.Tensor:
    """Gather along axis 1; unlike that of `tf.gather`, its gradient gathers too.

    Args:
        pixels: Shape ``(R, P, C)``, static P.
        places: Numbers in ``[0, P)``, shape ``(S,)``.

    Returns:
        Shape ``(R, S, C)``.
    """
    # For each pixel all the places that name it, one by one.
    count = pixels.shape[1]
    order = np.argsort(places, kind="stable")
    uses = np.bincount(places, minlength=count)
    before = np.cumsum(uses) - uses

    @tf.custom_gradient
    def take(pixels: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tf.gather(pixels, places, axis=1), give_back

    @tf.custom_gradient
    def give_back(taken: tf.Tensor) -> tuple[tf.Tensor, Any]:
        parts = []
        for use in range(uses.max()):
            is_used = use < uses
            at = order[np.where(is_used, before + use, 0)]
            part = tf.gather(taken, at, axis=1)
            if not is_used.all():
                part *= tf.constant(is_used[:, None], part.dtype)
            parts.append(part)
        return tf.add_n(parts), take

    return take(pixels)
