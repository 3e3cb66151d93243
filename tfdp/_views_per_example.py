"""How many consecutive rows are views of one example, while a model runs."""

import contextlib
import contextvars
from collections.abc import Iterator

_number_of_views = contextvars.ContextVar("number_of_views", default=1)


@contextlib.contextmanager
def views_per_example(views: int) -> Iterator[None]:
    """Tell layers how many consecutive rows are views of one example.

    Args:
        views: At least 1; the rows of every call inside are a multiple of it.
    """
    token = _number_of_views.set(views)
    try:
        yield
    finally:
        _number_of_views.reset(token)


def number_of_views() -> int:
    """Return how many consecutive rows are views of one example."""
    return _number_of_views.get()
