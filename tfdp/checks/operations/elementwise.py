"""Operations that treat each entry alone, on tensors that are broadcast together."""

from collections.abc import Sequence

import tensorflow as tf

from tfdp._types import Tensor
from tfdp.checks.bounds import are_never_negative
from tfdp.checks.node import (
    ANY,
    COUNTS,
    Node,
    broadcast,
    counts_rows,
    is_same_length,
    of_numbers,
    rule,
)
from tfdp.checks.open_lengths import Open
from tfdp.checks.sizes import constant, is_fixed
from tfdp.checks.values import Layout, Value, causes_of, fixed, have_rows


def joined(node: Node, values: Sequence[Value]) -> Value:
    """Describe an elementwise function of tensors that are broadcast together."""
    if node.op.outputs[0].dtype == tf.variant:
        return _joined_lists(node, values)
    with_rows = [each for each in values if each.axis is not None]
    causes = causes_of(values)
    if len(values) == 1:
        return node.like(values[0], causes)
    lengths = broadcast(values)
    if not with_rows:
        return node.free(lengths, causes)
    layouts = with_equal_blocks([each.layout for each in with_rows])
    (place, layout), *others = {
        (each.from_end, own) for each, own in zip(with_rows, layouts, strict=True)
    }
    rank = len(lengths) if lengths is not None else node.op.outputs[0].shape.rank
    if others or rank is None or place is None:
        return node.mixed("joins tensors whose rows are on different axes")
    return node.like(Value(rank + place, layout, lengths), causes)


def with_equal_blocks(layouts: Sequence[Layout]) -> list[Layout]:
    """Say of what goes together entry by entry that it has as many of each row.

    Args:
        layouts: Of tensors with the same number of rows. Where one of them is broadcast, it
            has one entry, and there is one row.

    Returns:
        The layouts, all with the entries of one of them, if rows lie in plain blocks.
    """
    if not all(each.is_plain_blocks for each in layouts):
        return list(layouts)
    entries = [each.entries for each in layouts]
    if not any(isinstance(number, Open) for number in entries):
        return list(layouts)
    one = min(entries, key=lambda number: isinstance(number, Open))
    return [Layout(1, one)] * len(layouts)


def _joined_lists(node: Node, values: Sequence[Value]) -> Value:
    """Describe a list that is made of lists, element by element."""
    with_rows = [each for each in values if each.axis is not None]
    if len({(each.axis, each.layout) for each in with_rows}) > 1:
        return node.mixed("joins tensors whose rows are on different axes")
    first = (with_rows or values)[0]
    numbers = first.numbers if len(values) == 1 else None
    return first._replace(numbers=numbers, causes=node.causes)


# What treats each entry alone: copies, casts, functions, their gradients, strings.
_ELEMENTWISE = """
    CheckNumerics CheckNumericsV2 Copy CopyHost DebugIdentityV2 DeepCopy
    EnsureShape Identity PreventGradient Snapshot StopGradient

    Bucketize Cast FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient
    FakeQuantWithMinMaxVars

    Abs AccumulateNV2 Acos Acosh Add AddN AddV2 Angle ApproximateEqual Asin Asinh
    Atan Atan2 Atanh BesselI0e BesselI1e Betainc BitwiseAnd BitwiseOr BitwiseXor
    Ceil ClipByValue Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan Elu Erf
    Erfc Erfcinv Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual
    Igamma Igammac Imag Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less
    LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Mod
    Mul MulNoNan Ndtri Neg NextAfter Polygamma PopulationCount Pow Real
    RealDiv Reciprocal Relu Relu6 RightShift Rint Round Rsqrt Selu Sigmoid Sign
    Sin Sinh Softplus Softsign Sqrt Square SquaredDifference Sub Tan Tanh
    TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta

    EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad
    SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad TanhGrad

    AsString DecodeBase64 EncodeBase64 RegexFullMatch RegexReplace
    StaticRegexFullMatch StaticRegexReplace StringJoin StringLength StringLower
    StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong
    StringToNumber StringUpper Substr
"""


@rule(*_ELEMENTWISE.split(), rows_in=ANY)
def _elementwise(node: Node) -> Value:
    return joined(node, node.inputs)


@rule("Minimum", "Maximum", rows_in=ANY)
def _bounded(node: Node) -> Value:
    bound = _bound(node.op)
    if bound is None:
        return joined(node, node.inputs)
    return of_numbers(node, constant(bound))


def _bound(op: tf.Operation) -> int | None:
    """Return what is smaller than one whole number and larger than another, if equal.

    At most 5 of at least 5, whatever that is, is 5: so sizes are asked for that data
    may not change.
    """
    other = {"Minimum": "Maximum", "Maximum": "Minimum"}[op.type]
    for outer, inner in (op.inputs, list(op.inputs)[::-1]):
        if inner.op.type != other or inner.shape.rank != 0:
            continue
        bound = _whole_number(outer)
        for limit in map(_whole_number, inner.op.inputs):
            if bound is None or limit is None:
                continue
            if limit >= bound if op.type == "Minimum" else limit <= bound:
                return bound
    return None


def _whole_number(tensor: Tensor) -> int | None:
    if not tensor.dtype.is_integer or tensor.shape.rank != 0:
        return None
    number = tf.get_static_value(tensor)
    return None if number is None else int(number)


@rule("Equal", "NotEqual", rows_in=ANY)
def _equal(node: Node) -> Value:
    first, second = node.op.inputs
    is_same = first is second and first.dtype == tf.bool and first.shape.rank == 0
    if is_same and node.op.type == "Equal":
        # So TensorFlow makes one tensor wait for another.
        return of_numbers(node, constant(1))
    # Python's `==` is one truth where shapes do not go together: a vector for one number
    # of rows, a single truth for all others.
    may_collapse = not node.attr("incompatible_shape_error")
    are_known = all(
        each.axis is None
        and each.lengths is not None
        and None not in each.lengths
        and is_fixed(each.lengths)
        for each in node.inputs
    )
    if may_collapse and not _go_together(node.inputs):
        return node.free() if are_known else node.unknown()
    return joined(node, node.inputs)


def _go_together(values: Sequence[Value]) -> bool:
    """Tell whether two shapes can be broadcast, however many rows there are."""
    first, second = (each.lengths for each in values)
    if first is None or second is None:
        return False
    # Axes that only one of them has go with anything.
    pairs = zip(first[::-1], second[::-1], strict=False)
    return all(a == 1 or b == 1 or is_same_length(a, b) for a, b in pairs)


@rule("Select", "SelectV2", rows_in=ANY)
def _select(node: Node) -> Value:
    condition, *others = node.inputs
    numbers = condition.numbers
    chosen = None if numbers is None or numbers.ndim else numbers.item()
    if isinstance(chosen, int):
        return joined(node, [others[0] if chosen else others[1]])
    if node.op.type == "Select" and condition.lengths and others[0].lengths:
        # A vector has one condition for each entry of the first axis.
        more = [1] * (len(others[0].lengths) - len(condition.lengths))
        condition = condition.with_lengths([*condition.lengths, *more])
    if counts_rows(condition) and _is_always_so(node):
        # Its shape has a part in the result, and the places that it asks for have none.
        causes = (each for each in condition.causes if each.why != COUNTS)
        condition = condition._replace(causes=frozenset(causes))
    return joined(node, [condition, *others])


def _is_always_so(node: Node) -> bool:
    """Tell whether rows ask if numbers are negative that are proven to be their own."""
    # So does TensorFlow's gradient of sums by numbers, `where(numbers >= 0,
    # gather(gradient, maximum(numbers, 0)), 0)`. In the last rows of a large batch numbers
    # may overflow, and are negative then; but not those by which entries are picked, of
    # which there would be too many for their type.
    asked, picked = (tensor.op for tensor in node.op.inputs[:2])
    while asked.type in _ON_WHAT_IS_ASKED:
        if asked.type == "LogicalAnd" and node.value_of(asked.inputs[1]).causes:
            return False
        asked = asked.inputs[0].op
    if asked.type != "GreaterEqual" or picked.type != "GatherV2":
        return False
    params, places, axis = picked.inputs
    numbers, least = asked.inputs
    is_by_those = places.op.type == "Maximum" and _is_one(places.op.inputs[0], numbers)
    of_params, along = node.value_of(params), node.value_of(axis).numbers
    return (
        is_by_those
        and not picked.get_attr("batch_dims")
        and (along is not None and along.tolist() == of_params.axis == 0)
        and of_params.layout.is_plain_blocks
        and are_never_negative(node, numbers, fixed(of_params.layout.entries))
        and tf.get_static_value(least) == 0
        # How long it is may be said by data.
        and None not in node.inputs[0].shape
    )


# What may lie between a question and a choice.
_ON_WHAT_IS_ASKED = ("Identity", "LogicalAnd", "Reshape")


def _is_one(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors of a graph are the same."""
    return bool(
        first.op.name == second.op.name and first.value_index == second.value_index
    )


@rule("ZerosLike", "OnesLike")
def _like(node: Node) -> Value:
    like = node.inputs[0]
    if node.op.outputs[0].dtype == tf.variant:
        return like._replace(numbers=None)
    # Where something is the matter, its shape may depend on it.
    lengths = like.lengths
    is_known = lengths is not None and None not in lengths and is_fixed(lengths)
    return node.like(like, frozenset() if is_known else like.causes)


@rule("IdentityN", rows_in=ANY)
def _identities(node: Node) -> Value:
    return node.inputs[node.number]


@rule("Bitcast")
def _bitcast(node: Node) -> Value:
    # Numbers of another width have one axis more, or the last one less.
    value = node.inputs[0]
    return node.unknown() if value.from_end == -1 else node.rows_of(value)


@rule("LookupTableFindV2", rows_in=ANY)
def _looked_up(node: Node) -> Value:
    keys, default = node.inputs[1:]
    if keys.axis is None:
        return joined(node, [keys, default])
    # Of some tables a key is a whole vector, along the last axis.
    is_vector = keys.from_end == -1 and len(keys.shape) > 1
    if is_vector or have_rows([default]):
        return node.unknown()
    return node.rows_of(keys)
