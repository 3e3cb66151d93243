"""Texts that are cut into words, of which each row has any number; crossed columns too.

What is made of single words keeps the name of the operation that has cut them. Where they
become rows again, it is looked up that the numbers of the rows come from there as well.
"""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfdp._types import Tensor
from tfdp.checks.node import ANY, Node, rule
from tfdp.checks.sizes import UNKNOWN
from tfdp.checks.values import (
    PLAIN,
    Cause,
    Layout,
    Value,
    causes_of,
    have_rows,
    known,
)

# What is the matter with words, until they are rows again.
_CUT = "cuts rows into words, of which nobody knows what becomes"

AS_LONG_AS_THE_LONGEST = "makes each row as long as the longest"

# What words may go through: each by itself.
_OF_EACH_WORD = frozenset([
    "AddV2",
    "AsString",
    "Cast",
    "Equal",
    "Greater",
    "GreaterEqual",
    "Identity",
    "Less",
    "LessEqual",
    "LookupTableFindV2",
    "Maximum",
    "Minimum",
    "Mul",
    "NotEqual",
    "RegexReplace",
    "SelectV2",
    "StaticRegexFullMatch",
    "StaticRegexReplace",
    "StringLength",
    "StringLower",
    "StringStrip",
    "StringToHashBucketFast",
    "StringToHashBucketStrong",
    "StringToNumber",
    "StringUpper",
    "Sub",
    "Substr",
])

# What hands numbers on, one after the other.
_PASSED_ON = ("Identity", "Cast", "Reshape")
# By the operation: which output has the words.
_OUTPUTS = {"StringSplitV2": 1, "SparseCross": 1, "StringNGrams": 0}

# Narrower ones would wrap around.
_WIDE = (tf.int32, tf.int64)


@rule("StringSplitV2")
def _cut(node: Node) -> Value:
    return _words(node, node.inputs[:1])


@rule("SparseCross", rows_in=ANY)
def _crossed(node: Node) -> Value:
    # Dense columns alone: those of sparse ones come with numbers of rows.
    return _words(node, [] if node.attr("N") else node.inputs)


def _words(node: Node, texts: Sequence[Value]) -> Value:
    """Describe what an operation cuts: numbers of rows and words, words, and a shape."""
    are_rows = bool(texts) and all(each[:2] == (0, PLAIN) for each in texts)
    if node.number != 1 or not are_rows:
        return node.unknown()
    return _of_words(node, node.causes)


def _of_words(node: Node, causes: frozenset[Cause]) -> Value:
    value = node.unknown()
    # A function may be called twice, and its names would stand for two cuts.
    if node.outer is not node.op:
        return value
    # Until they are rows again, nobody knows what becomes of them.
    causes |= {node.cause(_CUT, is_certain=False)}
    return Value(0, Layout(words=node.op.name), (UNKNOWN,), causes=causes)


@rule("StringNGrams", rows_in=ANY)
def _n_grams(node: Node) -> Value:
    words = node.inputs[0]
    cut = _cut_of(node, words, node.op.inputs[0])
    if node.number or cut is None or not _are_row_splits(node.op.inputs[1], cut):
        return node.unknown()
    return _of_words(node, _without_cause_of(words.causes, cut))


@rule("RaggedTensorToTensor", rows_in=ANY)
def _padded(node: Node) -> Value:
    # `RaggedTensor.to_tensor`.
    shape, words, default, *_ = node.inputs
    cut = _cut_of(node, words, node.op.inputs[1])
    parts = list(node.op.inputs[3:])
    kinds = [bytes(kind) for kind in node.attr("row_partition_types")]
    are_rows = False
    if cut is not None and kinds == [b"FIRST_DIM_SIZE", b"VALUE_ROWIDS"]:
        are_rows = _is_number_of_rows(parts[0], cut) and _are_row_ids(parts[1], cut)
    elif cut is not None and kinds == [b"ROW_SPLITS"]:
        are_rows = _are_row_splits(parts[0], cut)
    if cut is None or not are_rows:
        return node.unknown()
    # The scalar -1 leaves every length open.
    rows, *lengths = map(int, known(shape.numbers).ravel())
    if not lengths or -1 in lengths:
        return node.mixed(AS_LONG_AS_THE_LONGEST, is_certain=False)
    if rows != -1 or have_rows([default]):
        return node.unknown()
    return _rows_again(node, [words, shape, default], cut, lengths)


@rule("RaggedBincount", rows_in=ANY)
def _counted(node: Node) -> Value:
    # `tf.math.bincount` of ragged numbers.
    _, words, size, weights = node.inputs
    cut = _cut_of(node, words, node.op.inputs[1])
    if cut is None or not _are_row_splits(node.op.inputs[0], cut):
        return node.unknown()
    if weights.lengths != (0,):
        return node.unknown()
    number = int(known(size.numbers).item())
    return _rows_again(node, [words, size, weights], cut, [number])


@rule("SparseToDense", rows_in=ANY)
def _dense(node: Node) -> Value:
    _, _, words, default = node.inputs
    cut = _cut_of(node, words, node.op.inputs[2])
    places, shape, *_ = node.op.inputs
    # Of crossed columns each row has as many: a text would be as long as the longest.
    if cut is None or cut.type != "SparseCross" or have_rows([default]):
        return node.unknown()
    if not (_is_output(places, cut, 0) and _is_output(shape, cut, 2)):
        return node.unknown()
    return _rows_again(node, [words, default], cut, [None])


def _cut_of(node: Node, words: Value, tensor: Tensor) -> tf.Operation | None:
    """Return what has cut the words, if they come from one operation, of this graph.

    What is made of them is to be made of each by itself, and of constants.
    """
    if words.axis != 0 or not words.layout.words or node.outer is not node.op:
        return None
    cut = node.op.graph.get_operation_by_name(words.layout.words)
    stack, seen = [tensor], set()
    while stack:
        each = stack.pop()
        op = each.op
        if op.name in seen or _is_output(each, cut, _OUTPUTS[cut.type]):
            continue
        seen.add(op.name)
        is_constant = op.type == "Const" and each.shape.rank == 0
        if each.dtype == tf.resource or is_constant:
            continue
        if op.type not in _OF_EACH_WORD:
            return None
        stack += op.inputs
    return cut


def _rows_again(
    node: Node, values: list[Value], cut: tf.Operation, lengths: Iterable[int | None]
) -> Value:
    words, *others = values
    causes = _without_cause_of(words.causes, cut) | causes_of(others)
    return node.like(Value(0, PLAIN, (None, *lengths)), causes)


def _without_cause_of(causes: frozenset[Cause], cut: tf.Operation) -> frozenset[Cause]:
    """Leave out that nobody knew what would become of the words."""
    return frozenset(c for c in causes if c.op is not cut or c.why != _CUT)


def _through(tensor: Tensor) -> Tensor:
    while tensor.op.type in _PASSED_ON and tensor.dtype in _WIDE:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_output(tensor: Tensor, cut: tf.Operation, number: int) -> bool:
    is_of_cut: bool = tensor.op.name == cut.name
    return is_of_cut and tensor.value_index == number


def _are_row_ids(tensor: Tensor, cut: tf.Operation) -> bool:
    """Tell whether a tensor has the number of its row for each word."""
    op = _through(tensor).op
    if op.type != "StridedSlice" or not _is_output(op.inputs[0], cut, 0):
        return False
    begin = tf.get_static_value(op.inputs[1])
    # `[:, 0]`
    is_column = begin is not None and list(begin) == [0, 0]
    masks = {"begin_mask": 1, "end_mask": 1, "shrink_axis_mask": 2}
    masks |= {"ellipsis_mask": 0, "new_axis_mask": 0}
    step = tf.get_static_value(op.inputs[3])
    return (
        is_column
        and step is not None
        and list(step) == [1, 1]
        and all(op.get_attr(name) == mask for name, mask in masks.items())
    )


def _is_number_of_rows(tensor: Tensor, cut: tf.Operation) -> bool:
    """Tell whether a number is that of the rows."""
    op = _through(tensor).op
    if op.type == "Minimum":
        # At most n of at least n.
        pairs = [(0, 1), (1, 0)]
        return any(
            _is_number_of_rows(op.inputs[one], cut)
            and op.inputs[other].op.type == "Maximum"
            and any(
                _is_number_of_rows(each, cut) for each in op.inputs[other].op.inputs
            )
            for one, other in pairs
        )
    if op.type != "StridedSlice" or not _is_output(op.inputs[0], cut, 2):
        return False
    begin = tf.get_static_value(op.inputs[1])
    return (
        begin is not None
        and list(begin) == [0]
        and op.get_attr("shrink_axis_mask") == 1
    )


def _are_row_splits(tensor: Tensor, cut: tf.Operation) -> bool:
    """Tell whether numbers say where the words of each row begin and end."""
    if cut.type == "StringNGrams":
        return _is_output(_through(tensor), cut, 1)
    both = _through(tensor).op
    if both.type != "ConcatV2" or len(both.inputs) != 3:
        return False
    start = tf.get_static_value(both.inputs[0])
    ends = _through(both.inputs[1]).op
    if start is None or list(start.ravel()) != [0] or ends.type != "Cumsum":
        return False
    lengths = _through(ends.inputs[0]).op
    return (
        not (ends.get_attr("exclusive") or ends.get_attr("reverse"))
        and lengths.type == "DenseBincount"
        and not lengths.get_attr("binary_output")
        and lengths.inputs[2].shape == [0]
        and _are_row_ids(lengths.inputs[0], cut)
        and _is_number_of_rows(lengths.inputs[1], cut)
    )
