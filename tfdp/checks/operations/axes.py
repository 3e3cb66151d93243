"""Reductions, and what else goes along axes."""

from tfdp.checks.sizes import is_fixed
from tfdp.checks.step import Step, rule
from tfdp.checks.values import Value, have_rows


def _axes_of(value: Value, axes: Value) -> list[int] | None:
    if axes.numbers is None or value.rank is None or not is_fixed(axes.numbers):
        return None
    return [int(n) % max(value.rank, 1) for n in axes.numbers.ravel()]


@rule("Sum", "Mean", "Prod", "Max", "Min", "Any", "All", "EuclideanNorm", "ReduceJoin")
def _reduction(step: Step) -> Value:
    value, along = step.inputs
    axes = _axes_of(value, along)
    if axes is None or value.lengths is None:
        if not have_rows(step.inputs):
            return step.output(None)
        return step.mixed("reduces over axes that are not known", is_certain=False)
    keeps = step.attr("keep_dims")
    lengths = [
        1 if axis in axes else n
        for axis, n in enumerate(value.lengths)
        if keeps or axis not in axes
    ]
    causes, rows = value.causes, value.axis
    if rows in axes:
        causes |= {step.cause(f"computes a {step.op.type.lower()} over the rows")}
        return step.output(None, lengths=lengths, causes=causes)
    if rows is not None and not keeps:
        rows -= sum(axis < rows for axis in axes)
    return step.output(rows, value.layout, lengths=lengths, causes=causes)


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Reverse", "Roll")
def _along_axes(step: Step) -> Value:
    value, *_, along = step.inputs
    rolls = step.op.type == "Roll"
    if rolls and have_rows(step.inputs[1:]):
        return step.unknown()
    axes = _axes_of(value, along)
    if value.axis is not None and (axes is None or value.axis in axes):
        why = "moves rows to others" if rolls else "goes along the rows"
        return step.mixed(why, is_certain=axes is not None)
    return step.like(value, value.lengths)


@rule("ArgMax", "ArgMin")
def _arg(step: Step) -> Value:
    value, along = step.inputs
    axes = _axes_of(value, along)
    if axes is None or value.lengths is None:
        return step.unknown()
    rows = value.axis
    if rows in axes:
        return step.mixed("compares the rows")
    if rows is not None and rows > axes[0]:
        rows -= 1
    lengths = [n for axis, n in enumerate(value.lengths) if axis not in axes]
    return step.output(rows, value.layout, lengths=lengths)


# What computes something of each vector along the last axis, and of each matrix along
# the last two; first those whose outputs have the shape of their inputs.
_OF_VECTORS = ("Softmax", "LogSoftmax", "FFT", "IFFT")
_FROM_VECTORS = (
    *("RFFT", "IRFFT", "InTopKV2", "LowerBound", "StatelessMultinomial", "Multinomial"),
)
_OF_MATRICES = ("FFT2D", "IFFT2D", "MatrixInverse", "Cholesky", "MatrixBandPart")
_FROM_MATRICES = ("MatrixDeterminant", "MatrixDiagPart", "MatrixDiagPartV3")


@rule(*_OF_VECTORS, *_FROM_VECTORS, *_OF_MATRICES, *_FROM_MATRICES)
def _within_last(step: Step) -> Value:
    value, *others = step.inputs
    if have_rows(others):
        return step.unknown()
    axes = 2 if step.op.type in _OF_MATRICES + _FROM_MATRICES else 1
    if value.from_end is not None and value.from_end >= -axes:
        return step.mixed("goes along the rows")
    has_its_shape = step.op.type in _OF_VECTORS + _OF_MATRICES
    return step.like(value, value.lengths if has_its_shape else None)


@rule("TopKV2", "TopK")
def _top_k(step: Step) -> Value:
    value, *others = step.inputs
    if have_rows(others):
        return step.unknown()
    if value.from_end == -1:
        return step.mixed("sorts the rows")
    return step.like(value)


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def _cross_entropy(step: Step) -> Value:
    rows = [each for each in step.inputs if each.axis is not None]
    if any(each.axis != 0 or each.layout != rows[0].layout for each in rows):
        return step.mixed("goes along the rows")
    lengths = step.inputs[0].lengths
    if lengths is not None and step.number == 0:
        # One loss for each; what comes second has the shape of the logits.
        lengths = lengths[:1]
    return step.like((rows or step.inputs)[0], lengths)


@rule(
    *("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
    *("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"),
)
def _batch_norm(step: Step) -> Value:
    if not have_rows(step.inputs):
        return step.output(None)
    if step.attr("is_training"):
        return step.mixed("normalizes by statistics of the batch")
    value = step.inputs[0]
    is_gradient = "Grad" in step.op.type
    # Of a gradient, the first two are what comes back, and what was normalized.
    others = step.inputs[2:] if is_gradient else step.inputs[1:]
    if value.axis != 0 or have_rows(others):
        return step.unknown()
    if step.number == 0:
        return step.like(value, value.lengths)
    if is_gradient:
        return step.mixed("adds up over the rows")
    return step.output(None, causes=frozenset())
