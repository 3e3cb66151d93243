"""How many rows of a batch are views of one example."""

import contextlib
import contextvars
from collections.abc import Iterator

_views = contextvars.ContextVar("views", default=1)


@contextlib.contextmanager
def views_of_each_row(views: int) -> Iterator[None]:
    """Tell layers how many rows in a row are views of one example.

    Args:
        views: At least 1; the rows of every call inside are a multiple of it.
    """
    token = _views.set(views)
    try:
        yield
    finally:
        _views.reset(token)


def number_of_views() -> int:
    """Return how many rows in a row are views of one example."""
    return _views.get()
