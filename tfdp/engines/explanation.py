"""A table of what the clipping of each layer takes."""

from typing import NamedTuple


class Explanation(NamedTuple):
    """How the gradients of one call of a layer are clipped.

    Attributes:
        path: Names of the layers that lead to it, joined by ``/``.
        rule: How its gradients are reached.
        norm: How its norm is computed.
        bytes: What the norm of one example takes; None if that depends on the data.
    """

    path: str
    rule: str
    norm: str
    bytes: int | None


def table(rows: list[Explanation]) -> str:
    """Lay explanations out as text, with a heading."""
    cells = [("layer", "rule", "norm", "bytes per example")]
    cells += [
        (path, rule, norm, "unknown" if size is None else f"{size:,}")
        for path, rule, norm, size in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
