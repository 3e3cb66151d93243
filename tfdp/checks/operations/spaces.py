"""Convolutions, pooling and what else goes along spaces, row by row."""

import math

from tfdp.checks.step import Step, has_fixed_rest, rule
from tfdp.checks.values import Layout, Value, have_rows

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
    ResizeBicubicGrad ResizeBilinearGrad ResizeNearestNeighborGrad
"""


@rule(*_SPATIAL.split())
def _spatial(step: Step) -> Value:
    value, *others = step.inputs
    if have_rows(others):
        return step.mixed("takes rows for a kernel")
    # Of tensors of other ranks nobody knows which axis is that of the batch.
    has_batch = value.axis == 0 and step.op.inputs[0].shape.rank in (4, 5)
    if value.axis is not None and not has_batch:
        return step.mixed("takes the rows for a space")
    return step.like(value)


@rule(*_OF_SEVERAL.split())
def _of_several(step: Step) -> Value:
    rows = [each for each in step.inputs if each.axis is not None]
    if not rows:
        return step.output(None)
    if any(each.axis != 0 or each.layout != rows[0].layout for each in rows):
        return step.mixed("takes the rows for a space")
    causes = step.causes
    if "AvgPool" in step.op.type and has_fixed_rest(step.inputs[0]):
        # It takes the shape of the inputs, which counts the rows on the first axis.
        causes = step.inputs[1].causes
    return step.output(0, rows[0].layout, causes=causes)


@rule("SpaceToBatchND", "BatchToSpaceND")
def _space_and_batch(step: Step) -> Value:
    value, block, rim = step.inputs
    if have_rows([block, rim]) or block.numbers is None:
        return step.unknown()
    if value.axis is None:
        return step.output(None)
    number = math.prod(int(n) for n in block.numbers.ravel())
    times, entries = value.layout
    is_into_batch = step.op.type == "SpaceToBatchND"
    if value.axis != 0 or (times % number and not is_into_batch):
        return step.mixed("takes the rows for a space")
    times = times * number if is_into_batch else times // number
    return step.output(0, Layout(times, entries))


@rule("MaxPoolWithArgmax")
def _pool_with_places(step: Step) -> Value:
    value = step.inputs[0]
    if value.axis not in (None, 0) or step.attr("include_batch_in_index"):
        return step.mixed("takes the rows for a space")
    return step.like(value)


@rule(
    *("Conv2DBackpropInput", "Conv3DBackpropInputV2"),
    "DepthwiseConv2dNativeBackpropInput",
)
def _input_gradient(step: Step) -> Value:
    sizes, kernel, value = step.inputs
    if kernel.axis is not None:
        return step.mixed("takes rows for a kernel")
    if value.axis not in (None, 0):
        return step.mixed("takes the rows for a space")
    causes = kernel.causes | value.causes
    if not has_fixed_rest(sizes):
        causes = step.causes
    return step.output(value.axis, value.layout, causes=causes)
