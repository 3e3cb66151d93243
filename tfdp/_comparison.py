"""Batches that have one row in common, and whether results agree in that row."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from tfdp import _tree

# Halves of the batch, and every second row of it, are still two rows each.
ROWS = 4

# Equal rows are computed alike in batches of one shape, up to rounding at most.
_TOLERANCES = {"float16": 1e-2, "bfloat16": 5e-2}
_TOLERANCE = 1e-4


def probe_rows(name: str, tree: Any) -> Any:
    """Take the rows that are compared.

    Args:
        name: Of the argument that `tree` is, for the error.
        tree: An array, or a nest of arrays.

    Returns:
        `ROWS` rows of every array, repeated if there are fewer.

    Raises:
        ValueError: If an array has no rows.
    """

    def take(leaf: Any) -> Any:
        if not np.ndim(leaf) or not leaf.shape[0]:
            raise ValueError(
                f"Every array of `{name}` must have examples on its leading axis. "
                f"Received: an array of shape {tuple(np.shape(leaf))} in `{name}`."
            )
        rows = keras.ops.convert_to_numpy(leaf[:ROWS])
        return rows[np.arange(ROWS) % len(rows)]

    return _tree.map_tensors(take, tree)


def with_others_changed(tree: Any, row: int) -> Any:
    """Change all rows but one, to values that a vocabulary of theirs has.

    Args:
        tree: From `probe_rows`.
        row: The row that stays.

    Returns:
        A batch of the same shape.
    """
    rng = np.random.default_rng(row)

    def change(leaf: Any) -> Any:
        own = leaf[row]
        if is_float(leaf):
            # Truncated or rounded, this lies between 0 and the row's own number.
            scale, offset = rng.uniform(size=leaf.shape), rng.uniform(size=leaf.shape)
            others = np.asarray(own, np.float64) * scale + 0.49 * offset
        elif leaf.dtype.kind in "biu":
            half = np.trunc(own / 2).astype(leaf.dtype)
            others = np.where(leaf != own, own, half)
        else:
            others = np.broadcast_to(own, leaf.shape)
        others = others.astype(leaf.dtype)
        others[row] = own
        return others

    return _tree.map_tensors(change, tree)


def span(array: Any, row: int | None) -> Any:
    """Return the index of one row of the batch: all, where there are no rows.

    Several entries of the leading axis are one row where it holds positions as well.
    """
    if row is None or not array.ndim or len(array) % ROWS:
        return ...
    positions = len(array) // ROWS
    return slice(row * positions, (row + 1) * positions)


def agree(
    tensors: list[Any], known: list[Any], row: int | None, tolerance: float
) -> bool:
    """Tell whether tensors are equal in one row, up to rounding; NaN equals NaN.

    Args:
        tensors: Results.
        known: What they are compared with, one for each.
        row: The row of the batch to compare; None for all of them.
        tolerance: From `tolerance_of`.

    Returns:
        False also where numbers of tensors or their shapes differ.
    """
    if len(tensors) != len(known):
        return False
    for pair in zip(tensors, known, strict=True):
        left, right = (keras.ops.convert_to_numpy(tensor) for tensor in pair)
        left, right = left[span(left, row)], right[span(right, row)]
        if left.shape != right.shape or not _close(left, right, tolerance):
            return False
    return True


def _close(left: Any, right: Any, tolerance: float) -> bool:
    if not is_float(left):
        return np.array_equal(left, right)
    left, right = left.astype(np.float64), right.astype(np.float64)
    scale = np.max(np.abs(left), where=np.isfinite(left), initial=0.0)
    atol = 1e-2 * tolerance * scale
    return np.allclose(left, right, rtol=tolerance, atol=atol, equal_nan=True)


def moved_from_zero(value: Any, rng: np.random.Generator) -> Any:
    """Add some noise of the same sign to a variable's value, small for its shape."""
    if not is_float(value):
        return value
    # In place: there may be hardly room for a second copy of the weights.
    wide = np.float64 if value.dtype == np.float64 else np.float32
    noise = np.atleast_1d(rng.standard_normal(value.shape, wide))
    np.abs(noise, out=noise)
    noise *= 0.1 / max(1.0, float(np.prod(value.shape[:-1]))) ** 0.5
    np.copysign(noise, value.astype(wide, copy=False), out=noise)
    noise += value.astype(wide, copy=False)
    return noise.astype(value.dtype, copy=False).reshape(value.shape)


def is_float(array: Any) -> bool:
    """Tell whether an array holds floating point numbers."""
    return "float" in array.dtype.name  # NumPy does not count bfloat16.


def tolerance_of(dtypes: Iterable[str]) -> float:
    """Return the relative difference that counts as none, for the coarsest dtype."""
    return max(_TOLERANCES.get(dtype, _TOLERANCE) for dtype in dtypes)
