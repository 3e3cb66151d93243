"""Sums of products."""

import string
from collections import defaultdict

from tfdp.checks.node import ANY, NONE, Node, broadcast_length, rule
from tfdp.checks.values import Value


@rule("MatMul", "SparseMatMul", rows_in=ANY)
def _matmul(node: Node) -> Value:
    transposed = [node.attr("transpose_a"), node.attr("transpose_b")]
    return _products(node, transposed)


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", rows_in=ANY)
def _batch_matmul(node: Node) -> Value:
    return _products(node, [node.attr("adj_x"), node.attr("adj_y")])


def _products(node: Node, transposed: list[bool]) -> Value:
    labels = []
    for value, is_transposed, own in zip(
        node.inputs, transposed, ("ik", "kj"), strict=True
    ):
        outer = string.ascii_uppercase[: len(value.shape) - 2][::-1]
        labels.append(outer + (own[::-1] if is_transposed else own))
    return _contracted(node, labels, max(labels, key=len)[:-2] + "ij")


@rule("Einsum", rows_in=ANY)
def _einsum(node: Node) -> Value:
    inputs, output = node.attr("equation").decode().replace(" ", "").split("->")
    labels, longest = [], ""
    for term, value in zip(inputs.split(","), node.inputs, strict=True):
        hidden = len(value.shape) - len(term) + 3 if "..." in term else 0
        # What an ellipsis stands for is aligned from the right, under other letters.
        letters = "".join(chr(0x100 + n) for n in range(hidden))[::-1]
        longest = max(longest, letters, key=len)
        labels.append(term.replace("...", letters))
    return _contracted(node, labels, output.replace("...", longest))


def _contracted(node: Node, labels: list[str], output: str) -> Value:
    """Describe a sum of products, whose axes have labels."""
    places = set()
    lengths = defaultdict(list)
    for value, own in zip(node.inputs, labels, strict=True):
        for label, length in zip(own, value.shape, strict=True):
            lengths[label].append(length)
        if value.axis is not None:
            # Rows that meet under one label are multiplied row by row.
            places.add((own[value.axis], value.layout))
            if own.count(own[value.axis]) > 1:
                return node.mixed("takes the diagonal of the rows")
    shape = tuple(broadcast_length(lengths[label]) for label in output)
    if not places:
        return node.free(shape)
    if len(places) > 1:
        return node.mixed("multiplies each row with all others")
    (label, layout), *_ = places
    if label not in output:
        return node.mixed("adds up products over the rows")
    return node.like(Value(output.index(label), layout, shape))


@rule("BiasAdd", otherwise="adds rows as a bias")
def _bias_add(node: Node) -> Value:
    return node.like(node.inputs[0])


_PRODUCTS = (
    *("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"),
    "DepthwiseConv2dNativeBackpropFilter",
)


@rule("BiasAddGrad", rows_in=NONE, otherwise="adds up over the rows")
@rule(*_PRODUCTS, rows_in=NONE, otherwise="adds up products over the rows")
def _gradient_of_weights(node: Node) -> Value:
    return node.free()
