"""What code tells the trace of a pass that it runs in, if one is being made."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Protocol

import tensorflow as tf

from tfdp._types import Nest, Tensor, Variable


class Tracing(Protocol):
    """A pass that is traced to find out whether its rows meet."""

    def part(self, owner: object) -> contextlib.AbstractContextManager[None]:
        """Note that the operations that are made inside belong to a layer, or loss."""

    def alone(
        self,
        function: Callable[[list[Tensor]], Nest],
        rows: list[Tensor],
        *,
        in_loop: bool = False,
        of_batch: Callable[[list[Tensor]], Tensor] | None = None,
    ) -> Nest:
        """Look at what a function does to one row; used in place of a map over rows."""

    def reads_alone(self, variable: Variable) -> bool:
        """Tell whether a function that sees one row reads a variable by itself."""

    def note_rows(
        self, where: tuple[str, int], tensors: list[Tensor], *, is_recorded: bool = True
    ) -> None:
        """Note tensors of which is to be known where their rows lie.

        Args:
            where: Path of a layer or a variable, and which of its calls or uses.
            tensors: Those that have rows have them in the same place.
            is_recorded: Whether a tape has recorded them. Otherwise it will next time.
        """

    def note_made_of_rows(
        self, outputs: list[Tensor], inputs: list[Tensor]
    ) -> list[Tensor]:
        """Note that rows of outputs are made of the same rows; see `made_of_rows`."""

    def note_split(self) -> None:
        """Note that a loss is asked for all rows, and taken apart."""

    def note_loop(self) -> None:
        """Note that a layer or a variable is out of reach in what may be a loop."""

    def note_outputs(self, outputs: list[Tensor]) -> None:
        """Note what a model returns, which must have one entry for each row."""

    def note_read(self, tensors: list[Tensor]) -> None:
        """Note what an engine has made up to now, of which its norms and sums are."""


_tracing: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar(
    "tracing", default=None
)


def tracing() -> Tracing | None:
    """Return the trace that is being made, if one is."""
    return _tracing.get()


def made_of_rows(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Say that each row of these outputs is made of the same row of the inputs.

    It is for what tfdp computes in a way that cannot be followed: whoever says so has to
    know it, as nothing checks it.

    Args:
        outputs: Rows, or units of one row, on the first axis.
        inputs: Likewise. If a trace finds rows elsewhere, what is said is not heard.

    Returns:
        The outputs.
    """
    trace = tracing()
    return outputs if trace is None else trace.note_made_of_rows(outputs, inputs)


def note_loop() -> None:
    """Note, if a trace is being made, that taking loops step by step may help."""
    trace = tracing()
    if trace is not None:
        trace.note_loop()


@contextlib.contextmanager
def traced_by(trace: Tracing) -> Iterator[None]:
    """Let what runs inside be part of a trace."""
    token = _tracing.set(trace)
    try:
        yield
    finally:
        _tracing.reset(token)


class UnitCheck(Protocol):
    """Refuses a function of one unit alone that leaves something for others."""

    def __call__(self, graph: tf.Graph, arguments: int, *, in_turn: bool) -> None:
        """Look into the graph of the function, or of a vectorized map of it.

        Args:
            graph: The graph.
            arguments: How many of its inputs are data.
            in_turn: Whether units are taken one after the other.

        Raises:
            UnsupportedLayerError: If it leaves something.
        """


_unit_check: contextvars.ContextVar[UnitCheck | None] = contextvars.ContextVar(
    "unit_check", default=None
)


def unit_check() -> UnitCheck | None:
    """Return what looks into functions of one unit alone, if anything does."""
    return _unit_check.get()


@contextlib.contextmanager
def units_checked_by(check: UnitCheck) -> Iterator[None]:
    """Let functions of one unit alone be looked into before they run."""
    token = _unit_check.set(check)
    try:
        yield
    finally:
        _unit_check.reset(token)


def part_of_trace(owner: object) -> contextlib.AbstractContextManager[None]:
    """Note, if a trace is being made, whose operations are made inside."""
    trace = tracing()
    return contextlib.nullcontext() if trace is None else trace.part(owner)
