"""Operations that treat each entry alone, on tensors that are broadcast together."""

from collections.abc import Sequence

import tensorflow as tf

from tfdp.checks.sizes import constant, is_fixed
from tfdp.checks.step import Step, broadcast, of_numbers, rule
from tfdp.checks.values import Value, causes_of, have_rows


def joined(step: Step, values: Sequence[Value]) -> Value:
    """Describe an elementwise function of tensors that are broadcast together."""
    if step.op.outputs[0].dtype == tf.variant:
        return _joined_lists(step, values)
    with_rows = [each for each in values if each.axis is not None]
    lengths = broadcast(values)
    causes = causes_of(values)
    if not with_rows:
        return step.output(None, lengths=lengths, causes=causes)
    if len(values) == 1:
        axis, layout, own, *_ = with_rows[0]
        return step.output(axis, layout, lengths=own, causes=causes)
    (place, layout), *others = {(each.from_end, each.layout) for each in with_rows}
    rank = len(lengths) if lengths is not None else step.op.outputs[0].shape.rank
    if others or rank is None or place is None:
        return step.mixed("joins tensors whose rows are on different axes")
    return step.output(rank + place, layout, lengths=lengths, causes=causes)


def _joined_lists(step: Step, values: Sequence[Value]) -> Value:
    """Describe a list that is made of lists, element by element."""
    with_rows = [each for each in values if each.axis is not None]
    if len({(each.axis, each.layout) for each in with_rows}) > 1:
        return step.mixed("joins tensors whose rows are on different axes")
    first = (with_rows or values)[0]
    numbers = first.numbers if len(values) == 1 else None
    return first._replace(numbers=numbers, causes=step.causes)


# What treats each entry alone: copies, casts, functions, their gradients, strings.
_ELEMENTWISE = """
    CheckNumerics CheckNumericsV2 Copy CopyHost DebugIdentityV2 DeepCopy
    EnsureShape Identity PreventGradient Snapshot StopGradient

    Bitcast Bucketize Cast FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars

    Abs AccumulateNV2 Acos Acosh Add AddN AddV2 Angle ApproximateEqual Asin Asinh
    Atan Atan2 Atanh BesselI0e BesselI1e Betainc BitwiseAnd BitwiseOr BitwiseXor
    Ceil ClipByValue Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan Elu Erf
    Erfc Erfcinv Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual
    Igamma Igammac Imag Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less
    LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod
    Mul MulNoNan Ndtri Neg NextAfter NotEqual Polygamma PopulationCount Pow Real
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


@rule(*_ELEMENTWISE.split())
def _elementwise(step: Step) -> Value:
    return joined(step, step.inputs)


@rule("Equal")
def _equal(step: Step) -> Value:
    first, second = step.op.inputs
    if first is second and first.dtype == tf.bool and first.shape.rank == 0:
        # So TensorFlow makes one tensor wait for another.
        return of_numbers(step, constant(1))
    return joined(step, step.inputs)


@rule("Select", "SelectV2")
def _select(step: Step) -> Value:
    condition, *others = step.inputs
    numbers = condition.numbers
    if numbers is not None and condition.lengths == () and is_fixed(numbers):
        return joined(step, [others[0] if numbers.item() else others[1]])
    if (
        step.op.type == "Select"
        and condition.lengths is not None
        and others[0].rank is not None
        and len(condition.lengths) == 1 < others[0].rank
    ):
        # One condition for each entry of the first axis.
        more = [1] * (others[0].rank - 1)
        condition = condition._replace(lengths=(*condition.lengths, *more))
    return joined(step, [condition, *others])


@rule("ZerosLike", "OnesLike", "ImmutableConst")
def _like(step: Step) -> Value:
    like = step.inputs[0]
    if step.op.outputs[0].dtype == tf.variant:
        return like._replace(numbers=None)
    # Where something is the matter, its shape may depend on it.
    lengths = like.lengths
    is_known = lengths is not None and None not in lengths and is_fixed(lengths)
    causes = causes_of([] if is_known else [like])
    return step.output(like.axis, like.layout, lengths=lengths, causes=causes)


@rule("IdentityN")
def _identities(step: Step) -> Value:
    return step.inputs[step.number]


@rule("LookupTableFindV2")
def _looked_up(step: Step) -> Value:
    keys, default = step.inputs[1:]
    if keys.axis is None:
        return joined(step, [keys, default])
    # Of some tables a key is a whole vector, along the last axis.
    is_vector = keys.rank is None or (keys.from_end == -1 and keys.rank > 1)
    if is_vector or have_rows([default]):
        return step.unknown()
    return step.like(keys)
