"""Notes what layers a pass calls, and which operations of its graph are theirs."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest
from tfdp.checks.found import GRADIENTS, Owner, differentiated
from tfdp.checks.values import Cause


class Calls:
    """The calls of layers in a pass that is traced.

    Args:
        model: The model; None for a loss alone.

    Attributes:
        layers: The model and all layers in it, with the paths that lead to them.
        training: `id`s of the layers that were called with ``training=True``.
        adding_losses: `id`s of the layers that called `add_loss`.
        stateful: `id`s of recurrent layers that keep their states for the next batch.
        owner: Whose call runs now.
    """

    def __init__(self, model: keras.Model | None) -> None:
        """Begin with nothing."""
        self.layers = [] if model is None else _keras.layers_by_path(model)
        self.training: set[int] = set()
        self.adding_losses: set[int] = set()
        self.stateful: set[int] = set()
        self.owner: Owner = None
        # Where the operations of each call are: graph, first, past the last, layer.
        self._spans: list[tuple[tf.Graph, int, int, Owner]] = []

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Note what layers are called, and which operations they make."""
        with contextlib.ExitStack() as replaced:
            for _, layer in self.layers:
                call = functools.partial(self._call, layer, layer.call)
                add_loss = functools.partial(self._add_loss, id(layer), layer.add_loss)
                replaced.enter_context(
                    _keras.attributes_replaced(
                        layer,
                        call=functools.wraps(layer.call)(call),
                        add_loss=add_loss,
                    )
                )
            yield

    @contextlib.contextmanager
    def part(self, owner: Owner) -> Iterator[None]:
        """Note that the operations that are made inside belong to a layer, or loss."""
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        around, self.owner = self.owner, owner
        try:
            yield
        finally:
            self.owner = around
            self._spans.append((graph, first, len(graph.get_operations()), owner))

    def owner_of(self, cause: Cause, order: dict[str, int]) -> Owner:
        """Return whose innermost call has made an operation.

        Args:
            cause: Says which.
            order: Places of the operations of its graph, by their names.
        """
        op = cause.outer
        graph, place = op.graph, order[op.name]
        if op.name.startswith(GRADIENTS):
            near = differentiated(op)
            place = order[near[0].name] if near else place
        spans = [
            (past - first, owner)
            for of_graph, first, past, owner in self._spans
            if of_graph is graph and first <= place < past
        ]
        return min(spans, key=lambda span: span[0])[1] if spans else None

    def _add_loss(
        self, layer: int, add_loss: Callable[[Nest], None], loss: Nest
    ) -> None:
        self.adding_losses.add(layer)
        add_loss(loss)

    def _call(
        self,
        layer: keras.layers.Layer,
        function: Callable[..., Nest],
        *args: Nest,
        **kwargs: Nest,
    ) -> Nest:
        training = kwargs.get("training")
        if tf.is_tensor(training) or training:
            self.training.add(id(layer))
        with self.part(layer), contextlib.ExitStack() as replaced:
            if isinstance(layer, keras.layers.RNN) and layer.stateful:
                self.stateful.add(id(layer))
                # Batches of any size cannot be traced through some of Keras's versions.
                stateless = _keras.attributes_replaced(layer, stateful=False)
                replaced.enter_context(stateless)
            return function(*args, **kwargs)
