"""What a rule is given: one call of a layer."""

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Nest, Tensor, Variable
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.moves import Move, Moves
from tfdp.rules.terms import PerRow, Term

# From the gradients of what is watched to the terms of the variables' gradients.
Terms: TypeAlias = Callable[..., list[Term]]


class Recorder(Protocol):
    """The pass that a call is part of; see `tfdp.rules.recording.Recording`.

    Attributes:
        moves: How the units have moved the variables, if they have.
        repeats: Rows of the call that runs for each row of the batch.
    """

    moves: Moves | None
    repeats: int

    def watch(
        self,
        path: str,
        rule: str,
        tensors: list[Tensor],
        terms: Terms,
        linear_terms: Terms | None,
    ) -> list[Tensor]:
        """Watch tensors of a call; see `Call.watch_all`."""

    def hide(self, path: str, variable: Variable) -> None:
        """Note that the tape does not see a variable; see `Call.hide`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of a layer, as its rule sees it.

    Attributes:
        layer: The layer.
        args: Positional arguments of the call.
        kwargs: Keyword arguments.
        path: Names of the layers that lead to it, joined by ``/``.
    """

    layer: keras.layers.Layer
    args: tuple[Nest, ...]
    kwargs: dict[str, Nest]
    path: str
    _recording: Recorder
    _rule: str
    _function: Callable[..., Nest]

    @property
    def inputs(self) -> Nest:
        """The first argument of the call."""
        return next(iter(self.bound().values()))

    def bound(self) -> dict[str, Nest]:
        """Return all arguments by their names, defaults included."""
        signature = inspect.signature(inspect.unwrap(self._function))
        bound = signature.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def run(self, *args: Nest, **kwargs: Nest) -> Nest:
        """Run the layer's own code with these arguments."""
        return self._function(*args, **kwargs)

    def run_with(self, **attributes: object) -> Nest:
        """Run the layer's own code with other attributes of the layer.

        Args:
            **attributes: What to replace while it runs.

        Returns:
            The outputs for the arguments of the call.
        """
        with _keras.attributes_replaced(self.layer, **attributes):
            return self._function(*self.args, **self.kwargs)

    def watch(
        self,
        tensor: Tensor,
        terms: Terms,
        *,
        is_linear: bool = False,
    ) -> Tensor:
        """Ask for the gradient of a tensor that the call computes.

        Args:
            tensor: Shape ``(R, ...)`` for the R rows of the call.
            terms: From the gradient, of the same shape, to what it adds to the
                gradients of variables.
            is_linear: Whether the tensor is a linear function of the variables, a
                product with them or a sum. Only then can `tfdp.losses.BAM` move them
                for each unit; otherwise it takes the vectorized engine.

        Returns:
            The tensor; all that follows must be computed from this one.
        """
        linear_terms = terms if is_linear else None
        return self.watch_all([tensor], terms, linear_terms=linear_terms)[0]

    def watch_all(
        self,
        tensors: list[Tensor],
        terms: Terms,
        *,
        linear_terms: Terms | None,
    ) -> list[Tensor]:
        """As `watch`, for several tensors whose gradients belong together.

        Args:
            tensors: See `watch`.
            terms: See `watch`.
            linear_terms: Those of the variables that the tensors are linear in; the
                rule must move the others by `move`. None if it does not.

        Returns:
            The tensors.
        """
        return self._recording.watch(
            self.path, self._rule, tensors, terms, linear_terms
        )

    def move(self, variable: Variable) -> Move | None:
        """Return how the units move a variable; None if it stays."""
        moves = self._recording.moves
        return None if moves is None else moves.of(variable)

    def hide(self, variable: Variable) -> None:
        """Say that nothing but terms of this call tells a variable's gradient in it.

        Args:
            variable: That the rule uses where the ordinary backward pass does not see
                it.
        """
        self._recording.hide(self.path, variable)

    @property
    def differentiates_twice(self) -> bool:
        """Whether gradients of the call's gradients will be taken."""
        moves = self._recording.moves
        return moves is not None and moves.are_differentiated

    def per_row(self, variable: Variable, shape: Sequence[int] | None = None) -> Tensor:
        """Copy a variable for each row, so that each row has a gradient of its own.

        For variables with few numbers: scales, offsets, slopes.

        Args:
            variable: The Keras variable.
            shape: What to reshape it to; default its own shape.

        Returns:
            Shape ``(R, *shape)``.

        Raises:
            UnsupportedLayerError: If the inputs have no axis of rows.
        """
        of_rows = keras.tree.flatten(self.inputs)[0]
        own_axes = list(itertools.dropwhile(lambda n: n == 1, variable.shape))
        if of_rows.shape.rank <= len(own_axes):
            # The first of them would be taken for rows.
            raise UnsupportedLayerError(
                "A layer must be called on rows, which have the axes of its variables "
                f"and one before these. Received: `{self.path}` with inputs of shape "
                f"{of_rows.shape} and `{variable.path}` of shape "
                f"{tuple(variable.shape)}."
            )
        shape = list(variable.shape if shape is None else shape)
        value = tf.convert_to_tensor(variable)
        if shape != list(variable.shape):
            value = tf.reshape(value, shape)
        rows = of_rows.shape[0]
        rows = tf.shape(of_rows)[0] if rows is None else rows
        copies = tf.broadcast_to(value, [rows, *shape])

        def terms(g: Tensor) -> list[Term]:
            return [PerRow(variable, tf.reshape(g, [-1, *variable.shape]))]

        return self.watch(copies, terms, is_linear=True)

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Let layers inside see `times` consecutive rows for each row of this call."""
        self._recording.repeats *= times
        try:
            yield
        finally:
            self._recording.repeats //= times
