"""What the kernel of a convolution sees at each position."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor
from tfdp.rules.geometry import Geometry
from tfdp.rules.products import inner_products

# Above this many numbers of patches per example other ways are faster and need far
# less memory; below it their overhead dominates.
_LARGEST_PATCHES = 1 << 16

# Time of a pixel that is copied, in multiplications of a matrix product.
_COPIED = 250

# Times of a number that is moved, in those of a multiplication in a matrix product:
# in slices of Gram matrices, and in patches.
SLICED, PATCHED = 100, 40


def has_few_patches(positions: Sequence[int], kernel_shape: Sequence[int]) -> bool:
    """Tell whether to write out what a 2-D kernel sees at each position."""
    return math.prod(positions) * math.prod(kernel_shape[:-1]) <= _LARGEST_PATCHES


def patches(
    inputs: Tensor, kernel_shape: tuple[int, ...], geometry: Geometry
) -> Tensor:
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
    pads = geometry.pads(inputs.shape[1:-1], kernel_shape)
    # Along each axis: for each position the places that the kernel sees, from 0 on.
    rows, columns = (
        np.arange(0, sum(pad) + length - dilation * (extent - 1), stride)[:, None]
        + dilation * np.arange(extent)
        for pad, length, extent, stride, dilation in zip(
            pads,
            inputs.shape[1:-1],
            (height, width),
            geometry.strides,
            geometry.dilations,
            strict=True,
        )
    )
    way = _fastest(inputs, kernel_shape, geometry, positions=len(rows))
    if way == "identity":
        eye = np.eye(size).reshape([height, width, channels, size])
        identity = tf.constant(eye, inputs.dtype)
        return tf.nn.conv2d(inputs, identity, geometry.strides, geometry.padding)
    if way == "rows":
        inputs = _side_by_side(inputs, columns - pads[1][0])
        columns = np.arange(len(columns))[:, None]
        pads[1] = (0, 0)
    # The patch operation copies number by number, and XLA makes a convolution with the
    # identity of it.
    padded = tf.pad(inputs, [(0, 0), *pads, (0, 0)]) if any(map(any, pads)) else inputs
    _, high, wide, channels = padded.shape
    seen = rows[:, None, :, None] * wide + columns[None, :, None, :]
    pixels = tf.reshape(padded, [-1, high * wide, channels])
    found = _taken(pixels, seen.ravel())
    return tf.reshape(found, [-1, len(rows), len(columns), size])


def _fastest(
    inputs: Tensor, kernel_shape: tuple[int, ...], geometry: Geometry, *, positions: int
) -> str:
    """Choose how patches are laid out, by what a number of them takes.

    Args:
        inputs: See `patches`.
        kernel_shape: See `patches`.
        geometry: See `patches`.
        positions: Along the vertical axis.

    Returns:
        ``"pixels"``: each is copied. ``"rows"``: what the kernel sees of a row of pixels
        is put side by side, by a product, and copied. ``"identity"``: a convolution.
    """
    # XLA makes one operation of all copies. By products a GPU may round what it lays out,
    # to TensorFloat-32.
    if _keras.inside_xla() or _keras.has_gpus():
        return "pixels"
    height, width, channels, _ = kernel_shape
    # In multiplications; each row of pixels is multiplied once.
    copied = _COPIED / channels
    multiplied = inputs.shape[2] * channels * inputs.shape[1]
    ways = {
        "pixels": copied,
        "rows": copied / width + multiplied / max(positions * height, 1),
    }
    # With different strides such a convolution may read other rows. (Where oneDNN is off,
    # that of a dilated one has no gradient.)
    if channels == 1 and {*geometry.dilations} == {1} and len({*geometry.strides}) == 1:
        ways["identity"] = height * width
    return min(ways, key=lambda way: ways[way])


def _side_by_side(inputs: Tensor, columns: np.ndarray) -> Tensor:
    """Put the pixels of a row side by side that a kernel sees at each of its positions.

    Args:
        inputs: Shape ``(R, H, W, C)``, static but for ``R``.
        columns: Which pixels, shape ``(W', width)``; zeros for what is not in [0, W).

    Returns:
        Shape ``(R, H, W', width * C)``.
    """
    _, high, wide, channels = inputs.shape
    is_seen = np.arange(wide)[:, None] == columns.ravel()
    # Products with zeros and ones are exact.
    chosen = tf.constant(np.kron(is_seen, np.eye(channels)), inputs.dtype)
    products = tf.matmul(tf.reshape(inputs, [-1, wide * channels]), chosen)
    return tf.reshape(products, [-1, high, len(columns), columns.shape[1] * channels])


def _taken(pixels: Tensor, places: np.ndarray) -> Tensor:
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
    def take(pixels: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        return tf.gather(pixels, places, axis=1), give_back

    @tf.custom_gradient
    def give_back(taken: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
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


def patch_gram(
    inputs: Tensor,
    others: Tensor,
    *,
    positions: Sequence[int],
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> Tensor:
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
    sides = [geometry.padded(side, kernel_shape) for side in (inputs, others)]
    spatial = sides[0].shape[2:-1].as_list()
    patches, pixels = (math.prod(sizes) for sizes in (positions, spatial))
    seen = math.prod(kernel_shape[:-1])
    of_pixels = pixels**2 * kernel_shape[-2]
    of_pixels += SLICED * math.prod(kernel_shape[:-2]) * patches**2
    windows = list(geometry.windows(positions, kernel_shape))
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


def patch_sums(
    inputs: Tensor,
    positions: Sequence[int],
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
) -> Tensor:
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
    padded = geometry.padded(sums, (*kernel_shape[:-2], 1, groups))
    windows = geometry.windows(positions, kernel_shape)
    return tf.add_n([padded[:, :, *window] for window in windows])
