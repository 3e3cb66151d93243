"""Changed batches."""

from typing import Any

import keras
import numpy as np

from tests.problems.problem import Batch


def take(batch: Batch, rows: Any) -> Batch:
    """The examples ``rows`` (a slice or indices): of every leaf that is not None."""
    return Batch(
        *keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[rows], tuple(batch)
        )
    )


def drop(batch: Batch, row: int) -> Batch:
    """All examples but one."""
    return take(batch, np.arange(size(batch)) != row)


def size(batch: Batch) -> int:
    """Number of examples."""
    return len(keras.tree.flatten(batch.x)[0])


def scale_outlier(batch: Batch, row: int, factor: float = 1e6) -> Batch:
    """Multiply one example's float inputs, or its sample weight if there are none."""

    def scaled(leaf: Any) -> Any:
        if not _is_float(leaf):
            return leaf
        leaf = leaf.copy()
        leaf[row] *= factor
        return leaf

    if any(map(_is_float, keras.tree.flatten(batch.x))):
        return batch._replace(x=keras.tree.map_structure(scaled, batch.x))
    weight = batch.sample_weight
    if weight is None:
        weight = np.ones(size(batch), "float32")
    return batch._replace(sample_weight=keras.tree.map_structure(scaled, weight))


def blank_row(batch: Batch, row: int) -> Batch:
    """Make one example's inputs zero; of masked token ids nothing is left."""

    def blanked(leaf: np.ndarray) -> np.ndarray:
        leaf = leaf.copy()
        leaf[row] = 0
        return leaf

    return batch._replace(x=keras.tree.map_structure(blanked, batch.x))


def nan_row(batch: Batch, row: int) -> Batch:
    """Make one example's float inputs, or else its sample weight, NaN."""
    return scale_outlier(batch, row, np.nan)


def _is_float(leaf: Any) -> bool:
    return leaf is not None and leaf.dtype.kind == "f"
