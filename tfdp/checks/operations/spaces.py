"""Convolutions, pooling and what else goes along spaces, row by row."""

import math

import tensorflow as tf

from tfdp import _keras
from tfdp.checks.convolutions import fault_of_onednn
from tfdp.checks.node import ANY, Node, has_fixed_rest, lengths_from, rule
from tfdp.checks.open_lengths import Open
from tfdp.checks.sizes import Length, Lengths
from tfdp.checks.values import Layout, Value, known

# What takes one tensor of rows, and others that have none: kernels, sizes, amounts.
_SPATIAL = """
    AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D Conv Conv2D
    Conv3D DepthToSpace DepthwiseConv2dNative Dilation2D ExtractImagePatches
    HSVToRGB LRN MaxPool MaxPool3D MaxPoolV2 RGBToHSV ResizeArea ResizeBicubic
    ResizeBilinear ResizeNearestNeighbor ScaleAndTranslate SpaceToDepth
"""

# What takes several tensors of rows, as gradients take inputs, outputs and theirs.
_OF_SEVERAL = """
    AvgPool3DGrad AvgPoolGrad ImageProjectiveTransformV2
    ImageProjectiveTransformV3 LRNGrad MaxPool3DGrad MaxPoolGrad MaxPoolGradGrad
    Dilation2DBackpropInput MaxPoolGradWithArgmax ResizeBicubicGrad
    ResizeBilinearGrad ResizeNearestNeighborGrad ScaleAndTranslateGrad
"""


@rule(*_SPATIAL.split(), otherwise="takes rows for a kernel")
def _spatial(node: Node) -> Value:
    value = node.inputs[0]
    # How many of its leading axes are the batch is an attribute.
    if node.op.type == "Conv" and node.attr("batch_dims") != 1:
        return node.unknown()
    if node.op.type in ("Conv", "Conv2D", "Conv3D"):
        (inputs, kernel), outputs = node.op.inputs, node.op.outputs[0]
        fault = fault_of_onednn(inputs, kernel, outputs, strides=node.attr("strides"))
        if fault is not None:
            return node.mixed(f"{fault}, by a fault of oneDNN on CPUs")
    if node.op.type in _CONVOLUTIONS and not _has_a_place(node.op):
        why = (
            "may find no place in an open length, and reads memory of other rows then, by a "
            "fault of oneDNN on CPUs (those of Keras and of `tf.nn` fail)"
        )
        return node.mixed(why, is_certain=False)
    # Of tensors of other ranks nobody knows which axis is that of the batch.
    has_batch = value.axis == 0 and node.op.inputs[0].shape.rank in (4, 5)
    if value.axis is not None and not has_batch:
        return node.mixed("takes the rows for a space")
    lengths = _slid_over(node) if node.op.type in _SLIDING and has_batch else None
    return node.like(value._replace(lengths=lengths))


_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative")


def _has_a_place(op: tf.Operation) -> bool:
    """Tell whether a convolution is known to have a position, or to fail."""
    inputs, kernel = op.inputs
    if op.get_attr("padding") == b"SAME" or _keras.has_gpus():
        return True
    is_last = op.get_attr("data_format") in (b"NHWC", b"NDHWC")
    spatial = inputs.shape[1:-1] if is_last else inputs.shape[2:]
    is_open = any(
        None in (length, size) and size != 1
        for length, size in zip(spatial, kernel.shape[:-2], strict=True)
    )
    return not is_open or _keras.fails_without_a_place(op)


# Where a window slides over a space, of as many positions as fit.
_SLIDING = (
    *("AvgPool", "AvgPool3D", "Conv2D", "Conv3D", "DepthwiseConv2dNative"),
    *("MaxPool", "MaxPool3D"),
)


def _slid_over(node: Node) -> Lengths | None:
    """Return how many positions there are along each axis, where the graph lacks them."""
    value, *kernel = node.inputs
    is_last = node.attr("data_format") in (b"NHWC", b"NDHWC")
    if not is_last or any(each.lengths is None for each in node.inputs):
        return None
    rank = len(value.shape) - 2
    window = kernel[0].shape[:rank] if kernel else node.attr("ksize")[1:-1]
    dilations = node.attr("dilations")[1:-1] if kernel else [1] * rank
    positions: list[Length | None] = []
    for axis, length in enumerate(value.shape[1:-1]):
        extent, pads = window[axis], (0, 0)
        if not (isinstance(length, int | Open) and isinstance(extent, int)):
            return None
        stride = node.attr("strides")[1 + axis]
        reach = dilations[axis] * (extent - 1) + 1
        if node.attr("padding") == b"SAME":
            reach = 1
        elif node.attr("padding") == b"EXPLICIT":
            pads = node.attr("explicit_paddings")[2 + 2 * axis :][:2]
        positions.append(_positions(length + sum(pads), reach, stride))
    return (value.shape[0], *positions, None)


def _positions(length: int | Open, reach: int, stride: int) -> int | Open:
    """Return how many positions a window has."""
    if isinstance(length, int):
        return max(length - reach + stride, 0) // stride
    if reach == stride == 1:
        return length
    # None where the axis is shorter than the window.
    return Open.unknown("window", length, reach, stride)


@rule(*_OF_SEVERAL.split(), rows_in=ANY)
def _of_several(node: Node) -> Value:
    rows = [each for each in node.inputs if each.axis is not None]
    if not rows:
        return node.free()
    if any(each.axis != 0 or each.layout != rows[0].layout for each in rows):
        return node.mixed("takes the rows for a space")
    if node.op.type == "Dilation2DBackpropInput" and node.inputs[1].axis is not None:
        return node.mixed("takes rows for a kernel")
    if "Argmax" in node.op.type and not _has_own_places(node):
        return node.mixed("may put numbers where other rows are")
    # Along their only axis there are no rows, but sizes: they decide for all rows.
    if any(len(each.shape) == 1 for each in rows):
        return node.unknown()
    first, causes = node.inputs[0], node.causes
    is_of_inputs = node.op.type in ("MaxPoolGrad", "MaxPool3DGrad")
    lengths = first.lengths if is_of_inputs else None
    if "AvgPool" in node.op.type and has_fixed_rest(first):
        # It takes the shape of the inputs, which counts the rows on the first axis.
        lengths, causes = lengths_from(first), node.inputs[1].causes
    return node.like(Value(0, rows[0].layout, lengths), causes)


def _has_own_places(node: Node) -> bool:
    """Tell whether an operation puts numbers where maxima of its own inputs were."""
    images, _, places = node.op.inputs
    pool = places.op
    return (
        pool.type == "MaxPoolWithArgmax"
        and places.value_index == 1
        and pool.inputs[0] is images
        and not pool.get_attr("include_batch_in_index")
        and not node.attr("include_batch_in_index")
    )


@rule("SpaceToBatchND", "BatchToSpaceND")
def _space_and_batch(node: Node) -> Value:
    value, block, _ = node.inputs
    number = math.prod(int(n) for n in known(block.numbers).ravel())
    if value.axis is None:
        return node.free()
    times, entries = value.layout.times, value.layout.entries
    is_into_batch = node.op.type == "SpaceToBatchND"
    if value.axis != 0 or (times % number and not is_into_batch):
        return node.mixed("takes the rows for a space")
    times = times * number if is_into_batch else times // number
    return node.like(Value(0, Layout(times, entries), _blocked(node, is_into_batch)))


def _blocked(node: Node, is_into_batch: bool) -> Lengths | None:
    """Return the lengths of spaces that were cut into blocks, or are put together again."""
    value, block, rims = node.inputs
    if rims.numbers is None or value.lengths is None:
        return None
    sizes = lengths_from(block)
    lengths = list(value.lengths)
    for axis, (size, rim) in enumerate(zip(sizes, rims.numbers, strict=True), 1):
        length, more = lengths[axis], sum(rim.tolist())
        if length is not None:
            lengths[axis] = (
                (length + more) // size if is_into_batch else length * size - more
            )
    return tuple(lengths)


@rule("MaxPoolWithArgmax")
def _pool_with_places(node: Node) -> Value:
    value = node.inputs[0]
    if value.axis not in (None, 0) or node.attr("include_batch_in_index"):
        return node.mixed("takes the rows for a space")
    return node.rows_of(value)


_INPUT_GRADIENTS = (
    *("Conv2DBackpropInput", "Conv3DBackpropInputV2"),
    "DepthwiseConv2dNativeBackpropInput",
)


@rule(*_INPUT_GRADIENTS, rows_in=[2], otherwise="takes rows for a kernel")
def _input_gradient(node: Node) -> Value:
    sizes, kernel, value = node.inputs
    if value.axis not in (None, 0):
        return node.mixed("takes the rows for a space")
    # The sizes count the rows on the first axis.
    causes = kernel.causes | value.causes if has_fixed_rest(sizes) else node.causes
    own = None if sizes.numbers is None else lengths_from(sizes)
    has_all = own is not None and len(own) == len(value.shape)
    return node.like(value._replace(lengths=own if has_all else None), causes)
