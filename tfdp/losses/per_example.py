"""The loss of each example alone, out of any loss that Keras can compile."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._tracing import tracing
from tfdp._types import Loss, Nest, Tensor
from tfdp.errors import UnsupportedLossError


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
        mask = _both(mask, _keras.keras_mask(values))
        if values.shape.rank == 0:
            values, mask = each_row_alone(loss.call, (y_true, y_pred)), None
        return _reduce_rows(
            tf.cast(values, loss.dtype), sample_weight, mask, loss.reduction
        )


def each_row_alone(function: Callable[..., Tensor], rows: tuple[Nest, ...]) -> Tensor:
    """Evaluate a function that returns a scalar on one row after the other."""
    leaves = _tree.tensors(rows)
    trace = tracing()
    if leaves[0].shape[0] == 1 and trace is None:
        return tf.reshape(function(*rows), [1])

    def of_one(row_leaves: list[Tensor]) -> Tensor:
        row = _tree.pack([leaf[None] for leaf in row_leaves], like=rows)
        return tf.reshape(tf.cast(function(*row), keras.config.floatx()), [])

    if trace is not None:
        losses: Tensor = trace.alone(of_one, leaves)
        return losses
    return tf.map_fn(
        of_one, leaves, fn_output_signature=tf.as_dtype(keras.config.floatx())
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
            elements = tf.cast(tf.reduce_prod(tf.shape(kept)[1:]), values.dtype)
            kept *= _column(
                tf.math.divide_no_nan(elements, _sum_rows(kept)), kept.shape.rank
            )
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


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _column(per_row: Tensor, rank: int) -> Tensor:
    return tf.reshape(per_row, [-1] + [1] * (rank - 1))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply tensors whose leading axes correspond."""
    while left.shape.rank < right.shape.rank:
        left = left[..., None]
    while right.shape.rank < left.shape.rank:
        right = right[..., None]
    return left * right


def _sum_rows(values: Tensor) -> Tensor:
    return tf.reduce_sum(values, axis=list(range(1, values.shape.rank)))
