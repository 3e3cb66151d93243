"""Reductions, and what else goes along axes."""

from tfdp.checks.sizes import is_fixed
from tfdp.checks.step import Step, rule
from tfdp.checks.values import Value


def _axes_of(step: Step, value: Value, axes: Value) -> list[int] | None:
    if axes.numbers is None or value.lengths is None or not is_fixed(axes.numbers):
        return None
    return [int(n) % max(len(value.lengths), 1) for n in axes.numbers.ravel()]


@rule("Sum", "Mean", "Prod", "Max", "Min", "Any", "All", "EuclideanNorm", "ReduceJoin")
def _reduction(step: Step) -> Value:
    value, along = step.inputs
    axes = _axes_of(step, value, along)
    if axes is None:
        if value.axis is None and along.axis is None:
            return step.output(None)
        return step.mixed("reduces over axes that are not known", is_certain=False)
    assert value.lengths is not None  # noqa: S101
    keeps = step.attr("keep_dims")
    lengths = [
        1 if axis in axes else n
        for axis, n in enumerate(value.lengths)
        if keeps or axis not in axes
    ]
    causes = value.causes
    if value.axis is None:
        return step.output(None, lengths=lengths, causes=causes)
    if value.axis in axes:
        cause = step.cause(f"computes a {step.op.type.lower()} over the rows")
        return step.output(None, lengths=lengths, causes=causes | {cause})
    rows = value.axis
    if not keeps:
        rows -= sum(axis < rows for axis in axes)
    return step.output(rows, value.layout, lengths=lengths, causes=causes)


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Reverse")
def _along_axes(step: Step) -> Value:
    value, along = step.inputs
    axes = _axes_of(step, value, along)
    if value.axis is not None and (axes is None or value.axis in axes):
        return step.mixed("goes along the rows", is_certain=axes is not None)
    return step.output(value.axis, value.layout, lengths=value.lengths)


@rule("Roll")
def _roll(step: Step) -> Value:
    value, _, along = step.inputs
    axes = _axes_of(step, value, along)
    if any(each.axis is not None for each in step.inputs[1:]):
        return step.unknown()
    if value.axis is not None and (axes is None or value.axis in axes):
        return step.mixed("moves rows to others", is_certain=axes is not None)
    return step.output(value.axis, value.layout, lengths=value.lengths)


@rule("ArgMax", "ArgMin")
def _arg(step: Step) -> Value:
    value, along = step.inputs
    axes = _axes_of(step, value, along)
    if axes is None or value.lengths is None:
        return step.unknown()
    if value.axis in axes:
        return step.mixed("compares the rows")
    rows = value.axis
    lengths = [n for axis, n in enumerate(value.lengths) if axis not in axes]
    if rows is not None and rows > axes[0]:
        rows -= 1
    return step.output(rows, value.layout, lengths=lengths)


@rule("Softmax", "LogSoftmax", "FFT", "IFFT", "RFFT", "IRFFT", "InTopKV2", "LowerBound")
def _last_axis(step: Step) -> Value:
    return within_last(step, 1)


@rule(
    "MatrixInverse",
    "MatrixDeterminant",
    "Cholesky",
    "FFT2D",
    "IFFT2D",
    "MatrixBandPart",
    "MatrixDiagPart",
    "MatrixDiagPartV3",
)
def _last_two_axes(step: Step) -> Value:
    return within_last(step, 2)


def within_last(step: Step, number: int) -> Value:
    """Describe what computes each vector, or matrix, of the last axes alone."""
    value, *others = step.inputs
    if any(each.axis is not None for each in others):
        return step.unknown()
    if value.from_end is not None and value.from_end >= -number:
        return step.mixed("goes along the rows")
    lengths = value.lengths if step.op.type in _OF_ONE_SHAPE else None
    return step.output(value.axis, value.layout, lengths=lengths)


# Operations whose outputs have the shape of their inputs.
_OF_ONE_SHAPE = {
    *("Softmax", "LogSoftmax", "FFT", "IFFT", "FFT2D", "IFFT2D"),
    *("MatrixInverse", "Cholesky", "MatrixBandPart"),
}


@rule("TopKV2", "TopK")
def _top_k(step: Step) -> list[Value]:
    value, *others = step.inputs
    if any(each.axis is not None for each in others):
        return [step.unknown(0), step.unknown(1)]
    if value.from_end == -1:
        return [step.mixed("sorts the rows", number=n) for n in range(2)]
    return [step.output(value.axis, value.layout, number=n) for n in range(2)]


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def _cross_entropy(step: Step) -> list[Value]:
    rows = [each for each in step.inputs if each.axis is not None]
    if any(each.axis != 0 or each.layout != rows[0].layout for each in rows):
        return [step.mixed("goes along the rows", number=n) for n in range(2)]
    first = rows[0] if rows else step.inputs[0]
    lengths = step.inputs[0].lengths
    shapes = [None if lengths is None else lengths[:1], lengths]
    return [
        step.output(first.axis, first.layout, number=n, lengths=shape)
        for n, shape in enumerate(shapes)
    ]


@rule(
    "FusedBatchNorm",
    "FusedBatchNormV2",
    "FusedBatchNormV3",
    "FusedBatchNormGrad",
    "FusedBatchNormGradV2",
    "FusedBatchNormGradV3",
)
def _batch_norm(step: Step) -> list[Value]:
    outputs = range(len(step.op.outputs))
    if all(each.axis is None for each in step.inputs):
        return [step.output(None, number=n) for n in outputs]
    if step.attr("is_training"):
        why = "normalizes by statistics of the batch"
        return [step.mixed(why, number=n) for n in outputs]
    value = step.inputs[0]
    is_gradient = "Grad" in step.op.type
    others = step.inputs[2:] if is_gradient else step.inputs[1:]
    if value.axis != 0 or any(each.axis is not None for each in others):
        return [step.unknown(n) for n in outputs]
    first = step.output(0, value.layout, lengths=value.lengths)
    if is_gradient:
        why = "adds up over the rows"
        return [first, *(step.mixed(why, number=n) for n in outputs[1:])]
    return [
        first,
        *(step.output(None, number=n, causes=frozenset()) for n in outputs[1:]),
    ]
