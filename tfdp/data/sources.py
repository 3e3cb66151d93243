"""Where rows are read from, and whether others are read from there, too."""

import itertools
from typing import Any

import keras
import numpy as np

from tfdp._types import Nest
from tfdp.data.declared import DeclaredDataset
from tfdp.data.drawn_dataset import DrawnDataset

# Arrays are compared for so long: whether they overlap may take very long to tell.
_MOST_WORK: Any = 10_000


def have_common_rows(x: Nest, other: Nest) -> bool:
    """Tell whether inputs have rows in common, if that is quickly known.

    Args:
        x: Inputs, in a form that `fit` takes.
        other: Others.

    Returns:
        Whether they are known to: arrays that share memory, or one source of both.
    """
    pairs = itertools.product(_sources(x), _sources(other))
    return any(itertools.starmap(_share_memory, pairs))


def _sources(x: Nest) -> list[Nest]:
    """Return the arrays, or other objects, that inputs are read from."""
    if isinstance(x, DeclaredDataset):
        x = x.dataset
    if isinstance(x, DrawnDataset):
        x = [each.source for each in keras.tree.flatten(x.rows[0])]
    # Single numbers, which `fit` refuses, are no sources.
    arrays = [each for each in keras.tree.flatten(x) if hasattr(each, "__len__")]
    return [each for each in arrays if not _is_one_row(each)]


def _is_one_row(array: Nest) -> bool:
    """Tell whether all rows are a single one in memory, as of a mask that is broadcast."""
    return isinstance(array, np.ndarray) and len(array) > 1 and array.strides[0] == 0


def _share_memory(one: Nest, other: Nest) -> bool:
    if one is other:
        return True
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return False
    try:
        return bool(np.shares_memory(one, other, max_work=_MOST_WORK))
    except np.exceptions.TooHardError:
        return False
