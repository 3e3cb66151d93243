"""Finds gradients that a model or a loss takes itself, on the way to its outputs."""

import contextlib
from collections.abc import Iterator

from tfdp._types import Tensor
from tfdp.errors import UnsupportedLayerError


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
            UnsupportedLayerError: At the end, if there was one.
        """
        self._is_forward = True
        try:
            yield
        finally:
            self._is_forward = False
        if self._found:
            raise UnsupportedLayerError(refusal(f"`{'`, `'.join(self._found)}`"))

    def see(self, path: str, gradient: Tensor) -> Tensor:
        """Look at a gradient that goes back through a call of a layer, and return it."""
        if self._is_forward:
            self._found[path] = None
        return gradient


def refusal(through: str) -> str:
    """Say why a model or a loss that takes gradients itself is refused."""
    return (
        "A model or a loss that takes gradients itself needs whole gradients of each "
        f"example. Received: a gradient through {through}."
    )
