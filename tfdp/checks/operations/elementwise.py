"""Operations that treat each entry alone, on tensors that are broadcast together."""

from collections.abc import Sequence

import tensorflow as tf

from tfdp.checks.sizes import constant, is_fixed
from tfdp.checks.step import Step, broadcast, of_numbers, rule
from tfdp.checks.values import Cause, Value


def joined(step: Step, values: Sequence[Value]) -> Value:
    """Describe an elementwise function of tensors that are broadcast together."""
    if step.op.outputs[0].dtype == tf.variant:
        return _joined_lists(step, values)
    with_rows = [each for each in values if each.axis is not None]
    lengths = broadcast([each.lengths for each in values])
    causes = frozenset[Cause]().union(*(each.causes for each in values))
    if not with_rows:
        return step.output(None, lengths=lengths, causes=causes)
    if len(values) == 1:
        axis, layout, own, *_ = with_rows[0]
        return step.output(axis, layout, lengths=own, causes=causes)
    places = {(each.from_end, each.layout) for each in with_rows}
    rank = len(lengths) if lengths is not None else step.op.outputs[0].shape.rank
    if len(places) > 1 or rank is None or with_rows[0].from_end is None:
        return step.mixed("joins tensors whose rows are on different axes")
    (place, layout), *_ = places
    assert place is not None  # noqa: S101
    return step.output(rank + place, layout, lengths=lengths, causes=causes)


def _joined_lists(step: Step, values: Sequence[Value]) -> Value:
    """Describe a list that is made of lists, element by element."""
    first = next((each for each in values if each.axis is not None), values[0])
    places = {(e.axis, e.layout) for e in values if e.axis is not None}
    if len(places) > 1:
        return step.mixed("joins tensors whose rows are on different axes")
    numbers = first.numbers if len(values) == 1 else None
    return first._replace(numbers=numbers, causes=step.causes)


_ELEMENTWISE = [
    "Abs",
    "Acos",
    "Acosh",
    "Add",
    "AddN",
    "AddV2",
    "Angle",
    "ApproximateEqual",
    "Asin",
    "Asinh",
    "Atan",
    "Atan2",
    "Atanh",
    "Betainc",
    "Bitcast",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "Cast",
    "Ceil",
    "CheckNumerics",
    "CheckNumericsV2",
    "ClipByValue",
    "Complex",
    "ComplexAbs",
    "Conj",
    "Cos",
    "Cosh",
    "DebugIdentityV2",
    "Digamma",
    "Div",
    "DivNoNan",
    "Elu",
    "EluGrad",
    "EnsureShape",
    "Equal",
    "Erf",
    "Erfc",
    "Erfcinv",
    "Erfinv",
    "Exp",
    "Expm1",
    "Floor",
    "FloorDiv",
    "FloorMod",
    "Greater",
    "GreaterEqual",
    "Identity",
    "Igamma",
    "Igammac",
    "Imag",
    "Inv",
    "InvGrad",
    "Invert",
    "IsFinite",
    "IsInf",
    "IsNan",
    "LeakyRelu",
    "LeakyReluGrad",
    "LeftShift",
    "Less",
    "LessEqual",
    "Lgamma",
    "Log",
    "Log1p",
    "LogicalAnd",
    "LogicalNot",
    "LogicalOr",
    "Maximum",
    "Minimum",
    "Mod",
    "Mul",
    "MulNoNan",
    "Ndtri",
    "Neg",
    "NextAfter",
    "NotEqual",
    "OnesLike",
    "Polygamma",
    "PopulationCount",
    "Pow",
    "PreventGradient",
    "Real",
    "RealDiv",
    "Reciprocal",
    "ReciprocalGrad",
    "Relu",
    "Relu6",
    "Relu6Grad",
    "ReluGrad",
    "RightShift",
    "Rint",
    "Round",
    "Rsqrt",
    "RsqrtGrad",
    "Selu",
    "SeluGrad",
    "SelectV2",
    "Sigmoid",
    "SigmoidGrad",
    "Sign",
    "Sin",
    "Sinh",
    "Snapshot",
    "Softplus",
    "SoftplusGrad",
    "Softsign",
    "SoftsignGrad",
    "Sqrt",
    "SqrtGrad",
    "Square",
    "SquaredDifference",
    "Sub",
    "Tan",
    "Tanh",
    "TanhGrad",
    "TruncateDiv",
    "TruncateMod",
    "Xdivy",
    "Xlog1py",
    "Xlogy",
    "Zeta",
    "BesselI0e",
    "BesselI1e",
    "StringLower",
    "StringUpper",
    "StringStrip",
    "StringLength",
    "StringJoin",
    "AsString",
    "RegexReplace",
    "StaticRegexReplace",
    "StaticRegexFullMatch",
    "RegexFullMatch",
    "StringToNumber",
    "StringToHashBucketFast",
    "StringToHashBucketStrong",
    "StringToHashBucket",
    "DecodeBase64",
    "EncodeBase64",
    "Substr",
    "AccumulateNV2",
    "StopGradient",
    "DeepCopy",
    "CopyHost",
    "Copy",
    "FakeQuantWithMinMaxVars",
    "FakeQuantWithMinMaxArgs",
    "Bucketize",
    "ComplexAbs",
    "TopKUnique",
]
_ELEMENTWISE.remove("TopKUnique")


@rule(*_ELEMENTWISE)
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
        and others[0].lengths is not None
        and len(condition.lengths) == 1 < len(others[0].lengths)
    ):
        # One condition for each entry of the first axis.
        more = [1] * (len(others[0].lengths) - 1)
        condition = condition._replace(lengths=(*condition.lengths, *more))
    return joined(step, [condition, *others])


@rule("ZerosLike", "OnesLike", "ImmutableConst")
def _like(step: Step) -> Value:
    like = step.inputs[0]
    # Where something is the matter, its shape may depend on it.
    is_known = like.lengths is not None and is_fixed(list(like.lengths))
    causes = frozenset[Cause]() if is_known else like.causes
    if step.op.outputs[0].dtype == tf.variant:
        return like._replace(numbers=None, causes=like.causes)
    return step.output(like.axis, like.layout, lengths=like.lengths, causes=causes)


@rule("IdentityN")
def _identities(step: Step) -> list[Value]:
    return list(step.inputs)


@rule("LookupTableFindV2")
def _looked_up(step: Step) -> Value:
    keys, default = step.inputs[1:]
    if keys.axis is None:
        return joined(step, [keys, default])
    # Of some tables a key is a whole vector, along the last axis.
    is_vector = keys.lengths is None or (keys.from_end == -1 and len(keys.lengths) > 1)
    if is_vector or default.axis is not None:
        return step.unknown()
    return step.output(keys.axis, keys.layout)
