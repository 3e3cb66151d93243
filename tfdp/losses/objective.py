"""What an engine differentiates: a model, its losses per example, its variables."""

import contextlib
import contextvars
import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._tracing import tracing
from tfdp._types import Loss, Nest, Padded, Tensor, Variable
from tfdp._views_per_example import views_per_example
from tfdp.ascent.losses import Ascent
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError
from tfdp.losses.added import AddedLosses, Predicted, added_now, adding
from tfdp.losses.parts import RowsOf

# A public constant. The loss of one example is not divided by the batch size, so
# it needs less scaling than the mean of a batch does.
_FLOAT16_LOSS_SCALE = 128.0

_EQUAL_ROWS = (
    "`x`, `y` and `sample_weight` must have the same number of rows, one for each "
    "example."
)


class Batch(NamedTuple):
    """Rows of data on their way through an engine.

    Attributes:
        x: Inputs, tensors with leading axis N, nested as the model takes them.
        y: Targets likewise, or None.
        sample_weight: Weights likewise, or None.
        is_padding: bool, shape ``(N,)``, marks rows that only fill up: units whose
            rows are not all there. None until an engine's pass is filled up: all rows are real.
    """

    x: Nest
    y: Nest = None
    sample_weight: Nest = None
    is_padding: Tensor = None

    @classmethod
    def of(cls, data: Nest) -> Self:
        """Return data in the forms that Keras takes, or a batch, as a batch."""
        if isinstance(data, cls):
            return data
        if isinstance(data, Padded):
            return cls.of(data.rows)._replace(is_padding=data.is_padding)
        return cls(*keras.utils.unpack_x_y_sample_weight(data))

    def signature(self, rows: int | None = None) -> Self:
        """Describe a batch that is filled up.

        Args:
            rows: How many it has; None for any number.

        Returns:
            A batch of `tf.TensorSpec`.
        """
        described: Self = _tree.signature_of(self, rows)
        return described._replace(is_padding=tf.TensorSpec([rows], tf.bool))


def number_of_rows(data: Nest) -> int | Tensor:
    """Return the length of the leading axis, as an int where it is static."""
    leaves = keras.tree.flatten(data)
    first = next(leaf for leaf in leaves if leaf is not None)
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]


def with_equal_rows(data: Batch) -> Batch:
    """Return a batch in which all tensors are made to have the same number of rows.

    One row of a target beside many inputs would be broadcast: it would be part of every
    unit's loss, and no clipping bounds that.

    Args:
        data: The batch.

    Returns:
        The same rows. Lengths that the graph does not know are compared when it runs, by
        an operation that the returned tensors depend on.

    Raises:
        ValueError: If lengths are known and differ.
        tf.errors.InvalidArgumentError: If others differ when the graph runs.
    """
    check_equal_rows(data)
    first, *others = _tree.tensors(tuple(data))
    rows = number_of_rows(first)
    if not others or all(each.shape[0] is not None for each in (first, *others)):
        return data
    if _keras.inside_xla():
        # XLA leaves assertions out. It knows lengths when it compiles, and keeps what
        # TensorFlow's graph optimizer would take for superfluous.
        equal = [_reshaped_to(rows, each) for each in others]
    else:
        lengths = tf.stack([tf.shape(each)[0] for each in others])
        # The message shows no lengths: of a drawn batch they are not public.
        check = tf.debugging.Assert(
            tf.reduce_all(tf.equal(lengths, rows)), [_EQUAL_ROWS]
        )
        with tf.control_dependencies([check]):
            equal = [tf.identity(each) for each in others]
    checked: Batch = _tree.pack([first, *equal], data)
    return checked


def _reshaped_to(rows: int | Tensor, tensor: Tensor) -> Tensor:
    """Reshape a tensor to so many rows, which fails if it has not as many."""
    shape = tf.concat([[rows], tf.shape(tensor)[1:]], 0)
    return tf.ensure_shape(tf.reshape(tensor, shape), [None, *tensor.shape[1:]])


def check_equal_rows(data: Batch) -> None:
    """Refuse inputs, targets and weights whose known numbers of rows differ.

    Args:
        data: The batch, of arrays or tensors.

    Raises:
        ValueError: If they differ, or one of them is a scalar.
    """
    shapes = {
        name: [tf.TensorShape(_shape_of(tensor)) for tensor in _tree.tensors(tree)]
        for name, tree in zip(Batch._fields, data, strict=True)
    }
    lengths = {
        name: {"no" if shape.rank == 0 else shape[0] for shape in each} - {None}
        for name, each in shapes.items()
    }
    known = set().union(*lengths.values())
    if len(known) > 1 or "no" in known:
        received = ", ".join(
            f"{name} with {' and '.join(sorted(map(str, found)))} rows"
            for name, found in lengths.items()
            if found
        )
        raise ValueError(
            f"{_EQUAL_ROWS} Received: {received}. Use `y[:len(x)]` if there are more; one "
            "target, or weight, for all is repeated: `np.repeat([weight], len(x))`."
        )


def _shape_of(leaf: Nest) -> Nest:
    return leaf.shape if hasattr(leaf, "shape") else np.shape(leaf)


def check_takes_logits(model: keras.Model, loss: Loss) -> None:
    """Refuse losses that would take the logits of a model for probabilities.

    Args:
        model: A Keras model; it says that it has logits by an attribute
            ``outputs_are_logits = True``.
        loss: As in `keras.Model.compile`.

    Raises:
        ValueError: If one does.
    """
    if not getattr(model, "outputs_are_logits", False):
        return
    for leaf in keras.tree.flatten(loss):
        if leaf is None:
            continue
        named = keras.losses.get(leaf) if isinstance(leaf, str) else leaf
        if isinstance(named, keras.losses.Loss):
            takes_logits = named.get_config().get("from_logits", True)
        else:
            default = inspect.signature(named).parameters.get("from_logits")
            takes_logits = default is None or default.default
        if not takes_logits:
            raise ValueError(
                f"The outputs of `{type(model).__name__}` are logits, which the loss "
                f"would take for probabilities. Received: loss={leaf!r}. Use "
                "`loss=keras.losses.BinaryCrossentropy(from_logits=True)`."
            )


# Each equals itself alone: variables compare their values.
@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """A model and the loss of each of its examples.

    Attributes:
        model: The Keras model, built.
        losses: ``(x, y, y_pred, sample_weight) -> (N,)``.
        variables: The trainable Keras variables, in the model's order.
        has_own_loss: Whether the losses have in them what layers add, as far as they
            are to.
        training: Whether the model runs in training mode.
        ascent: How far uphill from the weights gradients are taken; None for here.
        views: How many consecutive rows are views of one example.
    """

    model: keras.Model
    losses: Callable[[Nest, Nest, Nest, Nest], Tensor]
    variables: list[Variable]
    has_own_loss: bool = False
    training: bool = True
    ascent: Ascent | None = None
    views: int = 1

    def __post_init__(self) -> None:
        """Let nothing that is random have to make its state inside a graph."""
        _keras.make_global_seed()

    @classmethod
    def of(cls, model: keras.Model, loss: Loss, loss_weights: Nest = None) -> Self:
        """Pair a model with a Keras loss, as `compile` takes it.

        Args:
            model: The Keras model, built.
            loss: Name, object or function, or a list or dict of them; None for what
                layers add alone.
            loss_weights: Weights of the outputs' losses.

        Returns:
            The objective that trains all trainable variables.

        Raises:
            ValueError: If the model has no trainable variable, or the loss takes its
                logits for probabilities.
        """
        check_takes_logits(model, loss)
        if loss is None:
            return cls(model, _nothing_but_added, trainable_variables(model))
        per_example = PerExampleLoss(
            loss, loss_weights, getattr(model, "output_names", None)
        )

        def losses(x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest) -> Tensor:
            del x
            return per_example(y, y_pred, sample_weight)

        return cls(model, losses, trainable_variables(model))

    @classmethod
    def of_compute_loss(cls, model: keras.Model) -> Self:
        """Take the losses from the model's own `compute_loss`, as of each row alone.

        The model must have been compiled with what its `compute_loss` uses. What its
        `losses` are there is what layers add for the row. Weight regularizers are left
        out of it: their gradient is added after the noise.

        Args:
            model: The Keras model, built.

        Returns:
            The objective that trains all trainable variables.

        Raises:
            ValueError: If the model has no trainable variable.
        """
        variables = trainable_variables(model)

        def loss_of_row(added: Tensor | None, *row: Nest) -> Tensor:
            with contextlib.ExitStack() as entered:
                entered.enter_context(_keras.without_regularizers(variables))
                if added is not None:
                    of_row = [tf.reduce_sum(added)]
                    entered.enter_context(_keras.with_losses(model, of_row))
                return tf.reduce_sum(_keras.compute_loss(model, *row))

        def losses(*rows: Nest) -> Tensor:
            return each_row_alone(loss_of_row, (added_now(), *rows))

        return cls(model, losses, variables, has_own_loss=True)

    def predict(self, x: Nest) -> Nest:
        """Run the model."""
        with (
            views_per_example(self.views)
            if self.views > 1
            else contextlib.nullcontext()
        ):
            return _keras.run_model(self.model, x, training=self.training)

    def forward(
        self,
        batch: Batch,
        *,
        is_of_one_unit: bool = False,
        skips_unknown: bool = False,
        splits_losses: bool = False,
    ) -> tuple[Nest, Tensor]:
        """Run the model, and compute the loss of each row, what layers add included.

        Args:
            batch: The rows.
            is_of_one_unit: Whether the rows are those of one unit. Then, if layers add
                losses, each row goes through the model by itself.
            skips_unknown: Whether added losses that cannot be taken apart are left out.
            splits_losses: Whether a loss that is asked for a scalar may be asked for all
                rows, and taken apart, where it is asked for each row alone otherwise.

        Returns:
            The outputs, as `Predicted` if layers add losses or attach masks; and losses
            of shape ``(N,)``.

        Raises:
            UnsupportedLayerError: If it is not known what a row has of an added loss.
        """
        rows = number_of_rows(tuple(batch))
        noted = AddedLosses(self.model, batch.x)
        with noted.observing():
            y_pred = self.predict(noted.inputs)
            if (
                noted.found
                and is_of_one_unit
                and not (isinstance(rows, int) and rows == 1)
            ):
                return self._forward_of_each(batch, rows)
            added = noted.of_rows(rows, skips_unknown=skips_unknown)
            with adding(added), _splitting_losses(splits_losses):
                losses = self.losses(batch.x, batch.y, y_pred, batch.sample_weight)
        masks = {
            str(place): mask
            for place, leaf in enumerate(keras.tree.flatten(y_pred))
            if (mask := _keras.keras_mask(leaf)) is not None
        }
        if added is None and not masks:
            return y_pred, losses
        if added is not None and not self.has_own_loss:
            losses += tf.cast(added, losses.dtype)
        return Predicted(y_pred, () if added is None else (added,), masks), losses

    def _forward_of_each(self, batch: Batch, rows: int | Tensor) -> tuple[Nest, Tensor]:
        """Let every row go through the model by itself."""
        if not isinstance(rows, int):
            raise UnsupportedLayerError(
                "Units of several rows must have a number of rows that is known, if "
                f"layers add losses. Received: model={self.model!r}, units of an "
                "unknown number of rows. Give `x` a static number of rows, or leave "
                "`num_microbatches` out."
            )
        alone = dataclasses.replace(self, views=1)
        of_each = [
            alone.forward(
                _tree.map_tensors(operator.itemgetter(slice(row, row + 1)), batch)
            )
            for row in range(rows)
        ]
        joined: tuple[Nest, Tensor] = keras.tree.map_structure(
            lambda *parts: tf.concat(parts, 0), *of_each
        )
        return joined

    def penalties(self) -> list[tuple[Variable, Callable[[Variable], Tensor]]]:
        """List what is part of each example's loss beside `losses`.

        Returns:
            Variables, and what is added for their values.
        """
        return [
            (variable, variable.regularizer)
            for variable in self.variables
            if getattr(variable.regularizer, "is_of_each_example", False)
        ]

    @property
    def loss_scale(self) -> float:
        """The constant that keeps float16 gradients from underflowing."""
        uses_float16 = any(
            layer.compute_dtype == "float16"
            for layer in _keras.flatten_layers(self.model)
        )
        return _FLOAT16_LOSS_SCALE if uses_float16 else 1.0


def _nothing_but_added(x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest) -> Tensor:
    """Return the losses of rows for which nothing was compiled."""
    del x, y, y_pred, sample_weight
    added = added_now()
    if added is None:
        raise ValueError(
            "`loss` is missing, and no layer adds one. Received: loss=None. Give a "
            "loss, `'mse'`, or let a layer call `self.add_loss`."
        )
    return tf.zeros_like(added)


def trainable_variables(model: keras.Model) -> list[Variable]:
    """List a model's trainable variables, of which there must be some."""
    if not model.trainable_variables:
        raise ValueError(
            f"Model `{model.name}` has nothing to train. Received: no trainable "
            "variables. Set `model.trainable = True`, or that of some layers."
        )
    return list(model.trainable_variables)


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
        return _reduce_rows(
            tf.cast(values, loss.dtype), sample_weight, mask, loss.reduction
        )


_splits_losses: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "splits_losses", default=False
)


@contextlib.contextmanager
def _splitting_losses(splits: bool) -> Iterator[None]:
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
        if all(op.type != "Assert" for op in graph.get_operations()[first:]):
            return tf.cast(parts, keras.config.floatx())
    raise UnsupportedLayerError(
        "A loss that is asked for all rows must be a sum or a mean over them. Received: "
        f"{function!r}. Use `engine='auto'`, which asks for each row alone."
    ) from failure


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
