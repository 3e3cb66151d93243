"""Sums of products, and what goes along spaces."""

import math
import string
from typing import Any

from tfdp.checks.step import Step, has_fixed_rest, rule
from tfdp.checks.values import Layout, Value


@rule("MatMul", "SparseMatMul")
def _matmul(step: Step) -> Value:
    transposed = [step.attr("transpose_a"), step.attr("transpose_b")]
    return _products(step, transposed)


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _batch_matmul(step: Step) -> Value:
    return _products(step, [step.attr("adj_x"), step.attr("adj_y")])


def _products(step: Step, transposed: list[bool]) -> Value:
    labels, shapes = [], []
    for value, is_transposed, own in zip(
        step.inputs, transposed, ("ik", "kj"), strict=True
    ):
        if value.lengths is None:
            return step.unknown()
        rank = len(value.lengths)
        outer = string.ascii_uppercase[: rank - 2][::-1]
        labels.append(outer + (own[::-1] if is_transposed else own))
        shapes.append(value.lengths)
    longest = max(labels, key=len)[:-2]
    return _contracted(step, labels, longest + "ij")


@rule("Einsum")
def _einsum(step: Step) -> Value:
    inputs, output = step.attr("equation").decode().replace(" ", "").split("->")
    labels = []
    ranks = [None if v.lengths is None else len(v.lengths) for v in step.inputs]
    longest = 0
    for term, rank in zip(inputs.split(","), ranks, strict=True):
        if rank is None:
            return step.unknown()
        if "..." in term:
            hidden = rank - len(term) + 3
            longest = max(longest, hidden)
            letters = "".join(chr(0x100 + n) for n in range(hidden))[::-1]
            term = term.replace("...", letters)  # noqa: PLW2901
        labels.append(term)
    letters = "".join(chr(0x100 + n) for n in range(longest))[::-1]
    return _contracted(step, labels, output.replace("...", letters))


def _contracted(step: Step, labels: list[str], output: str) -> Value:
    """Describe a sum of products, whose axes have labels."""
    places = set()
    lengths: dict[str, Any] = {}
    for value, own in zip(step.inputs, labels, strict=True):
        for label, length in zip(own, value.lengths or (), strict=True):
            if length != 1 or label not in lengths:
                lengths[label] = length
        if value.axis is not None:
            places.add((own[value.axis], value.layout))
            if own.count(own[value.axis]) > 1:
                return step.mixed("takes the diagonal of the rows")
    shape = [lengths.get(label) for label in output]
    if not places:
        return step.output(None, lengths=shape)
    if len(places) > 1:
        return step.mixed("multiplies each row with all others")
    (label, layout), *_ = places
    if label not in output:
        return step.mixed("adds up products over the rows")
    return step.output(output.index(label), layout, lengths=shape)


@rule("BiasAdd")
def _bias_add(step: Step) -> Value:
    value, bias = step.inputs
    if bias.axis is not None:
        return step.mixed("adds rows as a bias")
    return step.output(value.axis, value.layout, lengths=value.lengths)


@rule("BiasAddGrad")
def _bias_add_grad(step: Step) -> Value:
    return _if_along(step, "adds up over the rows")


def _if_along(step: Step, why: str) -> Value:
    if all(each.axis is None for each in step.inputs):
        return step.output(None)
    return step.mixed(why)


_SPATIAL = [
    "Conv2D",
    "Conv3D",
    "DepthwiseConv2dNative",
    "Conv",
    "MaxPool",
    "MaxPool3D",
    "AvgPool",
    "AvgPool3D",
    "MaxPoolV2",
    "LRN",
    "ResizeBilinear",
    "ResizeNearestNeighbor",
    "ResizeBicubic",
    "ResizeArea",
    "ExtractImagePatches",
    "Dilation2D",
    "SpaceToDepth",
    "DepthToSpace",
    "AdjustContrastv2",
    "AdjustHue",
    "AdjustSaturation",
    "RGBToHSV",
    "HSVToRGB",
    "ScaleAndTranslate",
]


_FIRST = {(0, 4), (0, 5)}


@rule(*_SPATIAL)
def _spatial(step: Step) -> Value:
    """Describe what treats entries of the first axis alone."""
    value, *others = step.inputs
    if any(each.axis is not None for each in others):
        return step.mixed("takes rows for a kernel")
    if (
        value.axis is not None
        and (value.axis, step.op.inputs[0].shape.rank) not in _FIRST
    ):
        return step.mixed("takes the rows for a space")
    return step.output(value.axis, value.layout)


@rule("SpaceToBatchND", "BatchToSpaceND")
def _space_and_batch(step: Step) -> Value:
    value, block, rim = step.inputs
    if any(each.axis is not None for each in (block, rim)) or block.numbers is None:
        return step.unknown()
    if value.axis is None:
        return step.output(None)
    number = math.prod(int(n) for n in block.numbers.ravel())
    times, entries = value.layout
    if step.op.type == "SpaceToBatchND":
        times *= number
    elif times % number == 0:
        times //= number
    else:
        return step.mixed("takes the rows for a space")
    if value.axis != 0:
        return step.mixed("takes the rows for a space")
    return step.output(0, Layout(times, entries))


@rule("MaxPoolWithArgmax")
def _pool_with_places(step: Step) -> list[Value]:
    value = step.inputs[0]
    if value.axis not in (None, 0) or step.attr("include_batch_in_index"):
        return [step.mixed("takes the rows for a space", number=n) for n in range(2)]
    return [step.output(value.axis, value.layout, number=n) for n in range(2)]


@rule(
    "MaxPoolGrad",
    "MaxPool3DGrad",
    "MaxPoolGradGrad",
    "LRNGrad",
    "ResizeBilinearGrad",
    "ResizeBicubicGrad",
    "ImageProjectiveTransformV2",
    "ImageProjectiveTransformV3",
    "ResizeNearestNeighborGrad",
    "AvgPoolGrad",
    "AvgPool3DGrad",
)
def _along_first(step: Step) -> Value:
    """Describe what treats entries of the first axis alone, in all its inputs."""
    rows = [each for each in step.inputs if each.axis is not None]
    if not rows:
        return step.output(None)
    if any(each.axis != 0 or each.layout != rows[0].layout for each in rows):
        return step.mixed("takes the rows for a space")
    causes = step.causes
    if "AvgPool" in step.op.type and has_fixed_rest(step.inputs[0]):
        causes = step.inputs[1].causes
    return step.output(0, rows[0].layout, causes=causes)


@rule(
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
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


@rule(
    "Conv2DBackpropFilter",
    "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNativeBackpropFilter",
)
def _filter_gradient(step: Step) -> Value:
    return _if_along(step, "adds up products over the rows")
