"""Convolutions, pooling and what else goes along spaces, row by row."""

import math

import tensorflow as tf

from tfdp.checks.node import ANY, Node, has_fixed_rest, rule
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
    fault = _fault_of_onednn(node) if node.op.type in _CONVOLUTIONS else None
    if fault is not None:
        return node.mixed(f"{fault}, by a fault of oneDNN on CPUs")
    # Of tensors of other ranks nobody knows which axis is that of the batch.
    has_batch = value.axis == 0 and node.op.inputs[0].shape.rank in (4, 5)
    if value.axis is not None and not has_batch:
        return node.mixed("takes the rows for a space")
    return node.rows_of(value)


_CONVOLUTIONS = ("Conv", "Conv2D", "Conv3D")


def _fault_of_onednn(node: Node) -> str | None:
    """Say in which case a convolution reads memory of other rows; None if in none known."""
    given, kernel = (each.shape for each in node.op.inputs)
    outputs = node.op.outputs[0].shape
    if None in (given.rank, kernel.rank, outputs.rank):
        return "of tensors of unknown rank may read memory of other rows"
    *_, along_rows, along_columns, _ = node.attr("strides")
    *_, rows, columns, _ = outputs
    *_, of_kernel, channels, _ = kernel
    if channels not in (None, 1):
        return None
    # Seen in batches of two rows and more, whatever there is along the depth.
    is_uneven = along_rows == 1 < along_columns and of_kernel != 1
    if is_uneven and rows != 1 and columns in (None, 1):
        return (
            "of one channel, to one column, by different strides reads memory of other rows "
            "(by the same stride along rows and columns it does not)"
        )
    # Seen with kernels of three layers and more.
    is_deep = kernel.rank == 5 and given[1] in (None, 1) and kernel[0] not in (1, 2)
    if is_deep and node.op.inputs[0].dtype == tf.bfloat16:
        return (
            "in bfloat16, of one channel and one layer, by a kernel of more reads memory of "
            "other rows (in float32 it does not)"
        )
    return None


@rule(*_OF_SEVERAL.split(), rows_in=ANY)
def _of_several(node: Node) -> Value:
    rows = [each for each in node.inputs if each.axis is not None]
    if not rows:
        return node.free()
    if any(each.axis != 0 or each.layout != rows[0].layout for each in rows):
        return node.mixed("takes the rows for a space")
    if node.op.type == "Dilation2DBackpropInput" and node.inputs[1].axis is not None:
        return node.mixed("takes rows for a kernel")
    if "Argmax" in node.op.type and node.attr("include_batch_in_index"):
        return node.mixed("takes the rows for a space")
    # Along their only axis there are no rows, but sizes: they decide for all rows.
    if any(len(each.shape) == 1 for each in rows):
        return node.unknown()
    causes = node.causes
    if "AvgPool" in node.op.type and has_fixed_rest(node.inputs[0]):
        # It takes the shape of the inputs, which counts the rows on the first axis.
        causes = node.inputs[1].causes
    return node.like(Value(0, rows[0].layout), causes)


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
    return node.like(Value(0, Layout(times, entries)))


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
    return node.like(value._replace(lengths=None), causes)
