"""The losses of single examples: Keras's, and any that is asked for each row alone."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._tracing import tracing
from tfdp._types import Loss, Nest, Tensor
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError
from tfdp.losses.batch import number_of_rows
from tfdp.losses.parts import RowsOf


class PerExampleLoss:
    """What Keras's compiled loss gives for each example of a batch alone.

    Keras aligns outputs, targets, weights and masks; the losses stay unreduced
    and each example's own elements are reduced here. So an example's loss never
    depends on its batch mates, as it does under `sum_over_batch_size` with a mask.

    Args:
        loss: As in `keras.Model.compile`: name, `keras.losses.Loss`, function
            ``(y_true, y_pred) -> losses``, or a list or dict of them.
        loss_weights: As in `keras.Model.compile`.
        output_names: The model's `output_names`, which dict losses refer to.
    """

    def __init__(
        self,
        loss: Loss,
        loss_weights: Nest = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        """Wrap each leaf of `loss`."""
        rowwise = keras.tree.map_structure(
            lambda leaf: None if leaf is None else _RowwiseLoss(leaf), loss
        )
        self._compiled = _keras.PerExampleCompileLoss(
            rowwise, loss_weights, output_names=output_names
        )

    def __call__(self, y: Nest, y_pred: Nest, sample_weight: Nest = None) -> Tensor:
        """Compute the losses.

        Args:
            y: Targets, tensors with leading axis N, nested as the outputs are.
            y_pred: Outputs of the model for the same N examples.
            sample_weight: None, or weights of shape ``(N,)`` or ``(N, T)``, or
                one of them for each output.

        Returns:
            The weighted total loss of each example, shape ``(N,)``.

        Raises:
            UnsupportedLossError: If weights of shape ``(N,)`` meet the reduction
                "mean_with_sample_weight", under which they cancel.
        """
        return self._compiled(y, y_pred, sample_weight)


class _RowwiseLoss(keras.losses.Loss):
    """One loss of one output, reduced over each example's own elements."""

    def __init__(self, identifier: Loss) -> None:
        super().__init__(name=getattr(identifier, "name", None))
        self._identifier = identifier

    def __call__(
        self, y_true: Nest, y_pred: Nest, sample_weight: Nest = None
    ) -> Tensor:
        loss = _keras.resolve_loss(self._identifier, y_true, y_pred)
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            rows = (y_true, y_pred, sample_weight)
            return each_row_alone(lambda *row: tf.reduce_sum(loss(*row)), rows)
        # Read before the conversion, which may drop what Keras has attached.
        mask = _keras.keras_mask(y_pred)
        given = y_true
        y_true, y_pred = keras.tree.map_structure(
            lambda tensor: keras.ops.convert_to_tensor(tensor, dtype=loss.dtype),
            (y_true, y_pred),
        )
        try:
            values = loss.call(y_true, y_pred)
        except (TypeError, tf.errors.InvalidArgumentError):
            # TensorFlow's own losses take whole numbers as such.
            values = loss.call(given, y_pred)
        values = keras.ops.convert_to_tensor(values)
        of_values = _keras.keras_mask(values)
        if of_values is not None:
            mask = of_values if mask is None else mask & of_values
        if values.shape.rank == 0:
            values, mask = each_row_alone(loss.call, (y_true, y_pred)), None
        elif getattr(loss, "fn", None) in _HINGES:
            values = _HINGES[loss.fn](_margins(y_true, y_pred))
        return _reduce_rows(
            tf.cast(values, loss.dtype), sample_weight, mask, loss.reduction
        )


# Of all labels together Keras's ask whether they are 0 and 1.
_HINGES: dict[Callable[..., Tensor], Callable[[Tensor], Tensor]] = {
    keras.losses.hinge: lambda margins: tf.reduce_mean(margins, -1),
    keras.losses.squared_hinge: lambda margins: tf.reduce_mean(margins**2, -1),
}


def _margins(y_true: Tensor, y_pred: Tensor) -> Tensor:
    """Return what hinge losses take the mean of, with the labels of each row by itself."""
    if y_true.shape.rank != y_pred.shape.rank:
        y_true = tf.reshape(y_true, tf.shape(y_pred))
    is_binary = tf.reduce_all(
        (y_true == 0) | (y_true == 1),
        list(range(1, y_true.shape.rank)),
        keepdims=True,
    )
    return tf.nn.relu(1 - tf.where(is_binary, 2 * y_true - 1, y_true) * y_pred)


_splits_losses: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "splits_losses", default=False
)


@contextlib.contextmanager
def splitting_losses(splits: bool) -> Iterator[None]:
    """Let `each_row_alone` take apart what is asked for all rows, inside."""
    token = _splits_losses.set(splits)
    try:
        yield
    finally:
        _splits_losses.reset(token)


def each_row_alone(function: Callable[..., Tensor], rows: tuple[Nest, ...]) -> Tensor:
    """Evaluate a function that returns a scalar on one row after the other.

    Where losses may be split, it is evaluated on all rows at once, if it returns a sum or a
    mean over them. Then each row's part is what it has alone, if that is proven to depend
    on no other row and on no number of rows.

    Args:
        function: Takes what `rows` has, with a leading axis.
        rows: Nests of tensors with leading axis N.

    Returns:
        Shape ``(N,)``.
    """
    leaves = _tree.tensors(rows)
    # What is exact for probabilities that a layer has made goes by what they were made of.
    logits = [_keras.keras_logits(leaf) for leaf in leaves]
    given = [*leaves, *(each for each in logits if each is not None)]

    def packed(given: list[Tensor]) -> tuple[Nest, ...]:
        remaining = iter(given[len(leaves) :])
        with_logits = [
            each
            if of_leaf is None
            else _keras.with_logits(each, next(remaining), like=leaf)
            for each, leaf, of_leaf in zip(
                given[: len(leaves)], leaves, logits, strict=True
            )
        ]
        nest: tuple[Nest, ...] = _tree.pack(with_logits, like=rows)
        return nest

    trace = tracing()
    if leaves[0].shape[0] == 1 and trace is None:
        return tf.reshape(function(*rows), [1])
    if _splits_losses.get():
        parts = _split(lambda *given: function(*packed(list(given))), given)
        if parts is not None:
            return parts

    def of_one(row_leaves: list[Tensor]) -> Tensor:
        row = packed([leaf[None] for leaf in row_leaves])
        return tf.reshape(tf.cast(function(*row), keras.config.floatx()), [])

    if trace is not None:
        losses: Tensor = trace.alone(
            of_one,
            given,
            in_loop=True,
            of_batch=lambda given: function(*packed(given)),
        )
        return losses
    return tf.map_fn(
        of_one, given, fn_output_signature=tf.as_dtype(keras.config.floatx())
    )


def _split(function: Callable[..., Tensor], rows: list[Tensor]) -> Tensor | None:
    """Return each row's part of what a function makes of all rows.

    Args:
        function: Takes them, one by one.
        rows: Tensors with leading axis N.

    Returns:
        Shape ``(N,)``; None where N is static: it could not be told from other numbers.

    Raises:
        UnsupportedLayerError: If it has no parts. What it left in the graph must not run.
    """
    number = number_of_rows(rows)
    if isinstance(number, int):
        return None
    graph = tf.compat.v1.get_default_graph()
    first, trace = len(graph.get_operations()), tracing()
    if trace is not None:
        trace.note_split()
    # Masks are not seen by a row alone, either.
    rows = list(map(tf.identity, rows))
    failure: Exception | None = None
    try:
        parts = RowsOf(number, rows, takes_lengths=True).of(function(*rows))
    # Whatever it is: not all that can be asked for a row can be asked for several.
    except Exception as error:  # noqa: BLE001
        failure = error
    else:
        # What asserts something may assert that there is one row.
        if not any(map(_may_ask_for_one_row, graph.get_operations()[first:])):
            return tf.cast(parts, keras.config.floatx())
    raise UnsupportedLayerError(
        "A loss that is asked for all rows must be a sum or a mean over them. Received: "
        f"{function!r}. Use `engine='auto'`, which asks for each row alone."
    ) from failure


def _may_ask_for_one_row(operation: tf.Operation) -> bool:
    """Tell whether an operation asserts anything but that labels go with logits."""
    # TensorFlow asserts that these have equally many rows, however many there are.
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits.__name__
    return operation.type == "Assert" and not any(
        frame.name == cross_entropy for frame in operation.traceback
    )


def _reduce_rows(
    values: Tensor,
    sample_weight: Tensor | None,
    mask: Tensor | None,
    reduction: str | None,
) -> Tensor:
    """Do to each row of (N, ...) what Keras's reduction does to a batch of one."""
    is_mean = reduction in {"sum_over_batch_size", "mean"}
    by_weight = reduction == "mean_with_sample_weight"
    weights = None
    if sample_weight is not None:
        weights = tf.cast(sample_weight, values.dtype)
        if by_weight and weights.shape.rank == 1:
            raise UnsupportedLossError(
                "`sample_weight` of shape (N,) has no effect under the reduction "
                "'mean_with_sample_weight', where an example's weight cancels. "
                f"Received: reduction={reduction!r}, sample_weight of rank 1. Use "
                "`reduction='sum_over_batch_size'`, or weights of shape (N, T)."
            )
    if mask is not None:
        kept = tf.cast(mask, values.dtype)
        if is_mean:
            # Keras weighs what is kept so that a mean over all is one over the kept.
            elements = tf.cast(tf.reduce_prod(tf.shape(kept)[1:]), values.dtype)
            kept = _product(kept, tf.math.divide_no_nan(elements, _sum_rows(kept)))
        weights = kept if weights is None else _product(weights, kept)
    if weights is not None:
        values = _product(values, weights)
    total = _sum_rows(values)
    if by_weight and weights is not None:
        return tf.math.divide_no_nan(total, _sum_rows(weights))
    if is_mean or by_weight:
        elements = tf.reduce_prod(tf.shape(values)[1:])
        return tf.math.divide_no_nan(total, tf.cast(elements, total.dtype))
    return total


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply tensors whose leading axes correspond."""
    while left.shape.rank < right.shape.rank:
        left = left[..., None]
    while right.shape.rank < left.shape.rank:
        right = right[..., None]
    return left * right


def _sum_rows(values: Tensor) -> Tensor:
    return tf.reduce_sum(values, axis=list(range(1, values.shape.rank)))
