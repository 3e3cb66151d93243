"""A batch of units that have different numbers of rows."""

import keras
import numpy as np
import tensorflow as tf

from tests.problems import scale_outlier
from tests.reference import per_example_gradients
from tfdp.losses.batch import Batch

# Rows of a unit that are there: people have one to four rows.
SIZES, LARGEST, CLIP = (1, 4, 2, 3, 0), 4, 0.3


def ragged(problem):
    """A batch of units with padding wherever a unit has no row, and their gradients."""
    # One row a million times as large as the others, in a unit of four.
    batch = scale_outlier(problem.batch(sum(SIZES)), 2)
    model, loss = problem.build("float64"), problem.loss("float64")
    gradients = per_example_gradients(model, loss, *batch)
    starts = np.cumsum((0, *SIZES))
    chosen, is_padding, of_units = [], [], []
    for start, size in zip(starts, SIZES, strict=False):
        # What is in the padding must not matter: rows of others, also before real ones.
        padding = LARGEST - size
        chosen += [0] * padding + list(range(start, start + size))
        is_padding += [True] * padding + [False] * size
        rows = slice(start, start + size)
        of_units.append([
            each[rows].mean(0) if size else np.zeros(each.shape[1:])
            for each in gradients
        ])
    units = [np.stack(parts) for parts in zip(*of_units, strict=True)]
    x, y, sample_weight = keras.tree.map_structure(
        lambda leaf: None if leaf is None else leaf[chosen], tuple(batch)
    )
    # Not even what is no number may.
    x[np.array(is_padding)] = np.nan
    return Batch(x, y, sample_weight, tf.constant(is_padding)), units, model, loss
