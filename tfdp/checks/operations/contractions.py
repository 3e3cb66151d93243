"""Sums of products."""

import string

from tfdp.checks.step import Step, rule
from tfdp.checks.values import Value, have_rows


@rule("MatMul", "SparseMatMul")
def _matmul(step: Step) -> Value:
    transposed = [step.attr("transpose_a"), step.attr("transpose_b")]
    return _products(step, transposed)


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _batch_matmul(step: Step) -> Value:
    return _products(step, [step.attr("adj_x"), step.attr("adj_y")])


def _products(step: Step, transposed: list[bool]) -> Value:
    labels = []
    for value, is_transposed, own in zip(
        step.inputs, transposed, ("ik", "kj"), strict=True
    ):
        if value.rank is None:
            return step.unknown()
        outer = string.ascii_uppercase[: value.rank - 2][::-1]
        labels.append(outer + (own[::-1] if is_transposed else own))
    return _contracted(step, labels, max(labels, key=len)[:-2] + "ij")


@rule("Einsum")
def _einsum(step: Step) -> Value:
    inputs, output = step.attr("equation").decode().replace(" ", "").split("->")
    labels, longest = [], ""
    for term, value in zip(inputs.split(","), step.inputs, strict=True):
        if value.rank is None:
            return step.unknown()
        hidden = value.rank - len(term) + 3 if "..." in term else 0
        # What an ellipsis stands for is aligned from the right, under other letters.
        letters = "".join(chr(0x100 + n) for n in range(hidden))[::-1]
        longest = max(longest, letters, key=len)
        labels.append(term.replace("...", letters))
    return _contracted(step, labels, output.replace("...", longest))


def _contracted(step: Step, labels: list[str], output: str) -> Value:
    """Describe a sum of products, whose axes have labels."""
    places = set()
    lengths = {}
    for value, own in zip(step.inputs, labels, strict=True):
        for label, length in zip(own, value.lengths or (), strict=True):
            if length != 1 or label not in lengths:
                lengths[label] = length
        if value.axis is not None:
            # Rows that meet under one label are multiplied row by row.
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
    return step.like(value, value.lengths)


_ADD_UP = {
    "BiasAddGrad": "adds up over the rows",
    "Conv2DBackpropFilter": "adds up products over the rows",
    "Conv3DBackpropFilterV2": "adds up products over the rows",
    "DepthwiseConv2dNativeBackpropFilter": "adds up products over the rows",
}


@rule(*_ADD_UP)
def _gradient_of_weights(step: Step) -> Value:
    if have_rows(step.inputs):
        return step.mixed(_ADD_UP[step.op.type])
    return step.output(None)
