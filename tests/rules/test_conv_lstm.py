"""Frames under dropout and of any number.

All others are in `tests/engines/test_bookkeeping.py`.
"""

import pytest
import tensorflow as tf
from keras import layers

from tests.masks import check_clipping_under_masks
from tests.problems import sequential
from tfdp.checks.engine import choose
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Objective

BOTH = {"dropout": 0.4, "recurrent_dropout": 0.4, "seed": 1}
UNDER_DROPOUT = {
    "frames_of_numbers": lambda: sequential(
        (2, 5, 2),
        layers.ConvLSTM1D(2, 2, return_sequences=True, **BOTH),
        layers.ConvLSTM1D(3, 1, use_bias=False, recurrent_dropout=0.4, seed=2),
    ),
    "images": lambda: sequential(
        (2, 4, 5, 2),
        layers.ConvLSTM2D(2, 2, return_sequences=True, dropout=0.4, seed=3),
        layers.Bidirectional(layers.ConvLSTM2D(2, (2, 3), padding="same", **BOTH)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["frames_of_numbers", pytest.param("images", marks=pytest.mark.exhaustive)],
)
def test_each_row_is_clipped_under_its_own_masks(name, rng):
    check_clipping_under_masks(UNDER_DROPOUT[name], rng)


@pytest.mark.slow
def test_frames_of_any_number_are_refused_by_name():
    model = sequential((None, 3, 1), layers.ConvLSTM1D(2, 2))
    specs = tf.TensorSpec([None, None, 3, 1]), tf.TensorSpec([None, 2, 2]), None
    with pytest.raises(UnsupportedLayerError, match=r"`keras.Input\(\(steps, ...\)\)`"):
        choose("bookkeeping", Objective.of(model, "mse"), specs)
