"""Losses that layers add while a model is called: what each row has of them."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._tracing import part_of_trace
from tfdp._types import Nest, Tensor
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.parts import NotOfRowsError, RowsOf


class Predicted(NamedTuple):
    """What a model makes of some rows, if that is more than its outputs.

    Attributes:
        y_pred: Its outputs.
        added: What layers add to the loss of each row, shape ``(N,)``, if one does. Maps
            over units return nothing but tensors.
        masks: Masks of outputs, by their places among these: graphs return tensors without
            what Keras attaches to them.
    """

    y_pred: Nest
    added: tuple[Tensor, ...]
    masks: dict[str, Tensor]

    def masked(self) -> Nest:
        """Return the outputs with their masks attached, for Keras."""
        leaves = keras.tree.flatten(self.y_pred)
        for place, mask in self.masks.items():
            leaf = tf.identity(leaves[int(place)])
            leaves[int(place)] = _keras.with_mask(leaf, mask)
        return keras.tree.pack_sequence_as(self.y_pred, leaves)


class _Added(NamedTuple):
    path: str
    layer: keras.layers.Layer
    loss: Tensor
    # Of an `activity_regularizer`: before Keras divides it by the leading axis.
    total: Tensor | None


class AddedLosses:
    """Notes the losses that the layers of a model add, by themselves or by `add_loss`.

    What a row has of a loss is what a batch of that row alone would have.

    Args:
        model: The model.
        inputs: What it is going to be given.

    Attributes:
        inputs: What to give it instead: the same, known as data.
        found: The losses, in the order of the calls.
    """

    def __init__(self, model: keras.Model, inputs: Nest) -> None:
        """Note nothing yet."""
        # In a graph rows may be constants, like weights of a loss.
        self.inputs: Nest = _tree.map_tensors(tf.identity, inputs)
        self.found: list[_Added] = []
        self._model = model
        self._totals: dict[int, Tensor] = {}
        # Whose own code runs: what it asks its regularizer for is its own affair.
        self._running: list[int] = []

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Note what is added; in the end Keras forgets it."""
        with contextlib.ExitStack() as replaced:
            replaced.callback(_keras.clear_losses, self._model)
            for path, layer in _keras.layers_by_path(self._model):
                add = functools.partial(self._add, path, layer, layer.add_loss)
                attributes: dict[str, Callable[..., Nest]] = {"add_loss": add}
                if layer.activity_regularizer is not None:
                    call = functools.partial(self._call, layer, layer.call)
                    attributes["call"] = functools.wraps(layer.call)(call)
                    attributes["activity_regularizer"] = functools.partial(
                        self._regularize, layer, layer.activity_regularizer
                    )
                replaced.enter_context(_keras.attributes_replaced(layer, **attributes))
            yield

    def _regularize(
        self,
        layer: keras.layers.Layer,
        regularizer: Callable[[Tensor], Tensor],
        output: Tensor,
    ) -> Tensor:
        total = regularizer(output)
        if id(layer) not in self._running:
            self._totals[id(layer)] = total
        return total

    def _call(
        self,
        layer: keras.layers.Layer,
        function: Callable[..., Nest],
        *args: Nest,
        **kwargs: Nest,
    ) -> Nest:
        self._running.append(id(layer))
        try:
            return function(*args, **kwargs)
        finally:
            self._running.pop()

    def _add(
        self,
        path: str,
        layer: keras.layers.Layer,
        add_loss: Callable[[Nest], None],
        losses: Nest,
    ) -> None:
        add_loss(losses)
        total = self._totals.pop(id(layer), None)
        for loss in keras.tree.flatten(losses):
            # Older Keras does not divide it.
            divided = None if loss is total else total
            self.found.append(_Added(path, layer, loss, divided))

    def of_rows(
        self, rows: int | Tensor, *, skips_unknown: bool = False
    ) -> Tensor | None:
        """Add up what each row has of all losses.

        Args:
            rows: How many there are.
            skips_unknown: Whether what cannot be taken apart is left out.

        Returns:
            Shape ``(N,)``; None if nothing was added. Whether each entry depends on its
            row alone remains to be proven, if there are several.

        Raises:
            UnsupportedLayerError: If a loss is no sum or mean over the rows.
        """
        if not self.found:
            return None
        parts = [tf.zeros([rows], tf.as_dtype(keras.config.floatx()))]
        for each in self.found:
            with part_of_trace(each.layer):
                try:
                    part = _of_added(each, rows, self.inputs)
                except UnsupportedLayerError:
                    if not skips_unknown:
                        raise
                    continue
                parts.append(tf.cast(part, parts[0].dtype))
        return tf.add_n(parts)


class AddedLossError(UnsupportedLayerError):
    """A loss that a layer adds is none of rows; of each row alone it may be another."""


def _of_added(added: _Added, rows: int | Tensor, inputs: Nest) -> Tensor:
    loss = tf.convert_to_tensor(added.loss)
    if isinstance(rows, int) and rows == 1:
        # As Keras adds up losses that are no scalars.
        return tf.reshape(tf.reduce_sum(loss), [1])
    try:
        divided = RowsOf(rows, inputs, is_divided=True)
        # Of a table of weights, or of positions, the leading axis is not one of rows.
        if added.total is None or divided.is_free(added.total):
            return RowsOf(rows, inputs).of(loss)
        return divided.of(added.total)
    except NotOfRowsError as error:
        raise AddedLossError(
            "A loss that a layer adds must be a sum or a mean over the rows, or have a "
            f"value for each. Received: `{added.path}` ({type(added.layer).__name__}), "
            f"which adds what {error}. What each row adds by itself may be another loss: "
            "of a balance over the batch, one within each row. Use `self.add_loss(...)` "
            "of a tensor of shape (N,), e.g. `ops.mean(values, axis=-1)`."
        ) from error


_added_now: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar(
    "added_now", default=None
)


def added_now() -> Tensor | None:
    """Return what layers have added for each row, while their losses are computed."""
    return _added_now.get()


@contextlib.contextmanager
def adding(added: Tensor | None) -> Iterator[None]:
    """Let `added_now` return this inside."""
    token = _added_now.set(added)
    try:
        yield
    finally:
        _added_now.reset(token)
