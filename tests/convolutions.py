"""Convolutions of all kinds, and what their kernels see."""

import itertools
import math

import numpy as np
import tensorflow as tf

from tfdp.rules.geometry import Geometry


def padding_of(size, kernel, stride, dilation, padding):
    """Zeros before, zeros behind, length of the output."""
    reach = (kernel - 1) * dilation + 1
    if padding == "VALID":
        return 0, 0, (size - reach) // stride + 1
    outputs = math.ceil(size / stride)
    missing = max((outputs - 1) * stride + reach - size, 0)
    return missing // 2, missing - missing // 2, outputs


def seen_by(x, kernel, geometry):
    """What each number of a kernel sees: pairs of its place and ``(..., *spatial, C)``."""
    axes = [
        padding_of(x.shape[2 + i], kernel[i], stride, dilation, geometry.padding)
        for i, (stride, dilation) in enumerate(
            zip(geometry.strides, geometry.dilations, strict=True)
        )
    ]
    x = np.pad(x, [(0, 0), (0, 0), *[axis[:2] for axis in axes], (0, 0)])
    for place in itertools.product(*map(range, kernel)):
        seen = x
        for i, (at, axis) in enumerate(zip(place, axes, strict=True)):
            first, step = at * geometry.dilations[i], geometry.strides[i]
            picked = first + step * np.arange(axis[2])
            seen = np.take(seen, picked, axis=2 + i)
        yield place, seen


# Spatial axes and channels; kernel; strides; dilations; padding; groups; filters.
CASES = {
    "valid": ((6, 5, 2), (3, 2), (1, 1), (1, 1), "VALID", 1, 4),
    "same": ((6, 5, 2), (3, 2), (1, 1), (1, 1), "SAME", 1, 4),
    "strided": ((7, 6, 2), (3, 3), (2, 2), (1, 1), "VALID", 1, 3),
    "strided_same": ((7, 6, 2), (3, 3), (2, 2), (1, 1), "SAME", 1, 3),
    "stride_beyond_kernel": ((8, 8, 2), (2, 1), (3, 3), (1, 1), "SAME", 1, 2),
    "dilated": ((7, 9, 2), (3, 3), (1, 1), (2, 2), "VALID", 1, 3),
    "dilated_same": ((7, 9, 2), (3, 2), (1, 1), (2, 2), "SAME", 1, 3),
    "grouped": ((5, 5, 4), (2, 2), (1, 1), (1, 1), "VALID", 2, 6),
    "depthwise": ((5, 4, 3), (3, 3), (1, 1), (1, 1), "SAME", 3, 3),
    "depthwise_strided": ((5, 4, 3), (3, 2), (2, 2), (1, 1), "SAME", 3, 3),
    "depthwise_tiny": ((2, 2, 3), (3, 3), (1, 1), (1, 1), "SAME", 3, 3),
    "depthwise_uneven": ((5, 4, 3), (3, 2), (2, 1), (1, 1), "SAME", 3, 3),
    "depthwise_large_kernel": ((3, 5, 3), (4, 4), (1, 1), (1, 1), "SAME", 3, 6),
    "depthwise_many_positions": ((5, 6, 3), (5, 4), (1, 1), (1, 1), "SAME", 3, 3),
    "depthwise_large_strided": ((7, 6, 3), (5, 5), (2, 2), (1, 1), "SAME", 3, 6),
    "depthwise_mostly_padding": ((2, 1, 3), (7, 7), (1, 1), (1, 1), "SAME", 3, 3),
    "grouped_strided": ((6, 7, 4), (3, 2), (2, 2), (1, 1), "SAME", 2, 4),
    "one_channel": ((6, 5, 1), (3, 2), (1, 1), (1, 1), "SAME", 1, 4),
    "one_channel_strided": ((7, 8, 1), (4, 4), (2, 2), (1, 1), "SAME", 1, 3),
    "one_channel_valid": ((7, 8, 1), (2, 3), (2, 2), (1, 1), "VALID", 1, 3),
    "one_channel_dilated": ((9, 8, 1), (3, 2), (1, 1), (2, 2), "VALID", 1, 3),
    "one_channel_large_kernel": ((13, 13, 1), (12, 12), (1, 1), (1, 1), "SAME", 1, 2),
    "colours": ((8, 9, 3), (3, 4), (1, 2), (1, 1), "SAME", 1, 2),
    "many_channels": ((4, 3, 64), (2, 2), (1, 1), (1, 1), "SAME", 1, 2),
    "whole_image": ((4, 3, 2), (4, 3), (1, 1), (1, 1), "VALID", 1, 5),
    "pointwise": ((4, 3, 5), (1, 1), (1, 1), (1, 1), "SAME", 1, 2),
    "one_row": ((1, 8, 2), (1, 3), (1, 1), (1, 1), "SAME", 1, 2),
    "line": ((8, 2), (3,), (1,), (1,), "SAME", 1, 3),
    "line_strided": ((9, 2), (4,), (3,), (1,), "SAME", 1, 3),
    "line_dilated": ((9, 2), (3,), (1,), (2,), "VALID", 1, 3),
    "line_grouped": ((6, 4), (3,), (2,), (1,), "SAME", 2, 4),
    "line_depthwise": ((9, 3), (3,), (2,), (1,), "SAME", 3, 3),
    "box": ((4, 3, 5, 2), (2, 1, 3), (1, 1, 1), (1, 1, 1), "VALID", 1, 3),
    "box_strided": ((4, 3, 5, 2), (2, 2, 3), (2, 1, 2), (1, 1, 1), "SAME", 1, 3),
    "box_dilated": ((4, 3, 5, 2), (2, 2, 2), (1, 1, 1), (2, 1, 2), "VALID", 1, 3),
    "box_grouped": ((3, 3, 2, 4), (2, 2, 2), (1, 1, 1), (1, 1, 1), "SAME", 2, 2),
}

# TensorFlow's own operation knows neither dilations nor groups on a CPU, except
# through XLA.
LIMITED = {name for name, case in CASES.items() if set(case[3]) != {1} or case[5] > 1}
ONE_GROUP = sorted(name for name, case in CASES.items() if case[5] == 1)
PLANE = {name for name, case in CASES.items() if len(case[1]) == 2}


def problem(case, rng, n=3, rows=1):
    image, kernel, strides, dilations, padding, groups, filters = CASES[case]
    outputs = [
        padding_of(image[i], kernel[i], strides[i], dilations[i], padding)[2]
        for i in range(len(kernel))
    ]
    x = rng.normal(size=[n, rows, *image]).astype("float32")
    g = rng.normal(size=[n, rows, *outputs, filters]).astype("float32")
    options = {
        "kernel_shape": (*kernel, image[-1] // groups, filters),
        "geometry": Geometry(strides, dilations, padding),
    }
    return x, g, options


def in_graph(function, *arrays):
    """Trace a function of arrays like these, whose leading axis is not known."""
    specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in arrays]
    return tf.function(function, input_signature=specs)


def in_mode(mode, function, *arrays):
    """Call a function of arrays; in a graph their leading axis is not known."""
    if mode == "xla":
        return tf.function(function, jit_compile=True)(*arrays)
    traced = in_graph(function, *arrays) if mode == "graph" else function
    return traced(*map(tf.constant, arrays))
