"""Fixtures of every test; TensorFlow is not imported before a test imports it."""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def keras_defaults():
    """Undo what a test did to Keras's global state: floatx, dtype policy, names.

    The same weights each time: a failure that depends on them can be repeated.
    """
    keras = sys.modules.get("keras")
    if keras is not None:
        keras.utils.set_random_seed(0)
    yield
    keras = sys.modules.get("keras")
    if keras is not None:
        keras.config.set_floatx("float32")
        keras.utils.clear_session(free_memory=False)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
