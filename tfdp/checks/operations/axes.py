"""Reductions, and what else goes along axes."""

from tfdp.checks.node import ANY, Node, axis_from, rule
from tfdp.checks.operations.elementwise import with_equal_blocks
from tfdp.checks.sizes import is_fixed
from tfdp.checks.values import Value, causes_of, have_rows, known


def _axes_of(value: Value, axes: Value) -> list[int] | None:
    if axes.numbers is None or value.lengths is None or not is_fixed(axes.numbers):
        return None
    return [int(n) % max(len(value.lengths), 1) for n in axes.numbers.ravel()]


# What reductions compute, in words.
_NAMES = {
    "Sum": "sum",
    "Mean": "mean",
    "Prod": "product",
    "Max": "maximum",
    "Min": "minimum",
    "Any": "logical or",
    "All": "logical and",
    "EuclideanNorm": "norm",
    "ReduceJoin": "joined text",
}


@rule(*_NAMES, rows_in=ANY)
def _reduction(node: Node) -> Value:
    value, along = node.inputs
    axes = _axes_of(value, along)
    if axes is None:
        if not have_rows(node.inputs):
            return node.free()
        return node.mixed("reduces over axes that are not known", is_certain=False)
    causes = value.causes
    if value.axis in axes:
        causes |= {node.cause(f"computes the {_NAMES[node.op.type]} over the rows")}
        value = value._replace(axis=None)
    if not node.attr("keep_dims"):
        return node.like(value.dropped(axes), causes)
    lengths = [1 if axis in axes else n for axis, n in enumerate(value.shape)]
    return node.like(value.with_lengths(lengths), causes)


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
def _along_axes(node: Node) -> Value:
    value, *_, along = node.inputs
    axes = _axes_of(value, along)
    if value.axis is not None and (axes is None or value.axis in axes):
        why = (
            "moves rows to others" if node.op.type == "Roll" else "goes along the rows"
        )
        return node.mixed(why, is_certain=axes is not None)
    return node.like(value)


@rule("ArgMax", "ArgMin")
def _arg(node: Node) -> Value:
    value, along = node.inputs
    axis = axis_from(along, max(len(value.shape), 1))
    if value.axis == axis:
        return node.mixed("compares the rows")
    return node.like(value.dropped([axis]))


# What computes something of each vector along the last axis, and of each matrix along
# the last two; first those whose outputs have the shape of their inputs.
_OF_VECTORS = ("Softmax", "LogSoftmax", "FFT", "IFFT")
_FROM_VECTORS = (
    *("RFFT", "IRFFT", "InTopKV2", "StatelessMultinomial", "Multinomial", "NthElement"),
)
_OF_MATRICES = (
    *("FFT2D", "IFFT2D", "MatrixInverse", "Cholesky", "MatrixBandPart"),
    *("MatrixExponential", "MatrixLogarithm", "MatrixSquareRoot"),
)
_FROM_MATRICES = (
    *("MatrixDeterminant", "MatrixDiagPart", "MatrixDiagPartV3"),
    *("LogMatrixDeterminant", "SelfAdjointEigV2", "Eig", "Svd", "Qr"),
    *("RFFT2D", "IRFFT2D"),
)


@rule(*_OF_VECTORS, *_FROM_VECTORS, *_OF_MATRICES, *_FROM_MATRICES)
def _within_last(node: Node) -> Value:
    value = node.inputs[0]
    axes = 2 if node.op.type in _OF_MATRICES + _FROM_MATRICES else 1
    if value.from_end is not None and value.from_end >= -axes:
        return node.mixed("goes along the rows")
    has_its_shape = node.op.type in _OF_VECTORS + _OF_MATRICES
    return node.like(value) if has_its_shape else node.rows_of(value)


@rule(
    *("MatrixSolve", "MatrixTriangularSolve", "BandedTriangularSolve", "CholeskyGrad"),
    "TridiagonalSolve",
    rows_in=ANY,
)
def _solved(node: Node) -> Value:
    rows = [each for each in node.inputs if each.axis is not None]
    places = {(each.from_end, each.layout) for each in rows}
    if any(from_end is None or from_end >= -2 for from_end, _ in places):
        return node.mixed("goes along the rows")
    rank = node.tensor.shape.rank
    # Matrices that are the same for all rows may have fewer axes, or more.
    if len(places) > 1 or rank is None:
        return node.unknown()
    if not rows:
        return node.free()
    return node.rows_of(rows[0]._replace(axis=rank + known(rows[0].from_end)))


@rule("LowerBound", "UpperBound", rows_in=ANY)
def _searched(node: Node) -> Value:
    rows = [each for each in node.inputs if each.axis is not None]
    if any(each[:2] != rows[0][:2] or each.axis != 0 for each in rows):
        return node.mixed("goes along the rows")
    return node.rows_of(rows[0]) if rows else node.free()


@rule("MatrixSetDiagV3", rows_in=ANY)
def _with_diagonal(node: Node) -> Value:
    matrix, diagonal, which = node.inputs
    if have_rows([which]):
        return node.unknown()
    rows = [each for each in (matrix, diagonal) if each.axis is not None]
    past = len(matrix.shape) - 2
    if any(each[:2] != rows[0][:2] or known(each.axis) >= past for each in rows):
        return node.mixed("goes along the rows")
    return node.rows_of(rows[0]) if rows else node.free()


@rule("ReverseSequence", rows_in=ANY)
def _reversed_in_part(node: Node) -> Value:
    value, lengths = node.inputs
    axis, along = node.attr("batch_dim"), node.attr("seq_dim")
    if value.axis == along or (
        lengths.axis is not None
        and (value.axis, value.layout) != (axis, lengths.layout)
    ):
        return node.mixed("turns the rows around")
    return node.like(value)


@rule("TopKV2", "TopK")
def _top_k(node: Node) -> Value:
    value = node.inputs[0]
    if value.from_end == -1:
        return node.mixed("sorts the rows")
    return node.rows_of(value)


@rule(
    *("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"),
    rows_in=ANY,
)
def _cross_entropy(node: Node) -> Value:
    rows = [each for each in node.inputs if each.axis is not None]
    layouts = set(with_equal_blocks([each.layout for each in rows]))
    if any(each.axis != 0 for each in rows) or len(layouts) > 1:
        return node.mixed("goes along the rows")
    lengths = node.inputs[0].lengths
    if lengths is not None and node.number == 0:
        # One loss for each; what comes second has the shape of the logits.
        lengths = lengths[:1]
    return node.like((rows or node.inputs)[0]._replace(lengths=lengths))


@rule(
    *("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
    *("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"),
    rows_in=ANY,
)
def _batch_norm(node: Node) -> Value:
    if not have_rows(node.inputs):
        return node.free()
    if node.attr("is_training"):
        return node.mixed("normalizes by statistics of the batch")
    value = node.inputs[0]
    is_gradient = "Grad" in node.op.type
    # Of a gradient, the first two are what comes back, and what was normalized.
    others = node.inputs[2:] if is_gradient else node.inputs[1:]
    if value.axis != 0 or have_rows(others):
        return node.unknown()
    if node.number == 0:
        return node.like(value)
    if is_gradient:
        return node.mixed("adds up over the rows")
    # Means and variances are handed on.
    return node.free(causes=causes_of(others))
