"""Finds gradients that a model or a loss takes itself, on the way to its outputs."""

import contextlib
from collections.abc import Iterator

from tfdp._types import Tensor
from tfdp.errors import UnsupportedLayerError


class OwnGradientsError(UnsupportedLayerError):
    """A model or a loss takes gradients itself, of which no rule knows the terms."""

    def __init__(self, through: str) -> None:
        """Say what they go through."""
        super().__init__(
            "A model or a loss that takes gradients itself needs whole gradients of each "
            f"example. Received: a gradient through {through}."
        )


class OwnGradients:
    """Finds gradients that go back through calls of layers while a pass goes forward.

    They reach the loss by way of variables, of which the terms of rules know nothing.
    Tapes keep what watches for them, and would never be freed if that had a tape.
    """

    def __init__(self) -> None:
        self._is_forward = False
        self._found: dict[str, None] = {}

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Look for them.

        Raises:
            OwnGradientsError: At the end, if there was one.
        """
        self._is_forward = True
        try:
            yield
        finally:
            self._is_forward = False
        if self._found:
            raise OwnGradientsError(f"`{'`, `'.join(self._found)}`")

    def see(self, path: str, gradient: Tensor) -> Tensor:
        """Look at a gradient that goes back through a call of a layer, and return it."""
        if self._is_forward:
            self._found[path] = None
        return gradient
