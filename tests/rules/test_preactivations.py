"""Biases count along the axes where Keras adds them, whichever these are."""

import dataclasses

import pytest
import tensorflow as tf

from tests.engine_checks import OUTLIER, check, runner
from tests.problems import PROBLEMS
from tfdp.engines.bookkeeping import BookkeepingEngine

pytestmark = pytest.mark.keras_private

ADDITIONS = {
    "of Keras": None,
    "broadcast": tf.add,
    # Which axes these are, no operation tells: the layer is followed without its rule.
    "hidden": lambda x, bias: tf.identity(tf.add(x, bias)),
}


@pytest.mark.parametrize("add", ADDITIONS.values(), ids=ADDITIONS)
def test_a_bias_counts_along_the_axis_of_its_addition(add, monkeypatch):
    if add is not None:
        monkeypatch.setattr("keras.src.backend.tensorflow.numpy.add", add)
    # Known by identity: the gradients of the other addition are not taken.
    problem = dataclasses.replace(PROBLEMS["einsum_bias_along_another_axis"])
    check(problem, runner(problem, [BookkeepingEngine()]), OUTLIER)
