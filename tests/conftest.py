"""Fixtures of every test; TensorFlow is not imported before a test imports it."""

import gc
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import hypothesis
import numpy as np
import pytest

# A failure is shown as it was found: to shrink it would take minutes of training.
hypothesis.settings.register_profile(
    "tfdp",
    max_examples=25,
    deadline=None,
    phases=[
        hypothesis.Phase.explicit,
        hypothesis.Phase.reuse,
        hypothesis.Phase.generate,
    ],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tfdp")

# Graphs are many objects, most of which stay: looking through them again and again took
# a tenth of the time.
gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Make exhaustive tests slow ones, before `-m` selects."""
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def pipelines_without_tuner():
    """Turn off the tuner of TensorFlow's input pipelines.

    An iterator sometimes waits for its tuner when it is freed, up to a minute (seen
    with TensorFlow 2.18 and 2.21), in whichever test that happens.
    """
    tf = sys.modules.get("tensorflow")
    if tf is None:
        yield
        return
    options = tf.data.Options()
    options.autotune.enabled = False
    iterate = tf.data.Dataset.__iter__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tf.data.Dataset,
            "__iter__",
            lambda self: iterate(self.with_options(options)),
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def kernels_are_kept():
    """Keep the kernels of eager operations where a global seed is set or names begin anew.

    TensorFlow drops them then, for those that draw from a seed of their own, and to make
    them again takes each test milliseconds for each kind: a tenth of the time of all.
    """
    private = sys.modules.get("tensorflow.python.pywrap_tfe")
    with pytest.MonkeyPatch.context() as patch:
        if private is not None:
            # Where TensorFlow calls it otherwise one day, tests are only slower.
            patch.setattr(
                private, "TFE_ContextClearCaches", lambda _: None, raising=False
            )
        yield


@pytest.fixture(autouse=True)
def keras_defaults():
    """Undo what a test did to Keras's global state: floatx, dtype policy, names.

    The same weights each time: a failure that depends on them can be repeated. What
    trains from them without noise equals what another test trained, and is no copy.
    """
    keras = sys.modules.get("keras")
    if keras is not None:
        keras.utils.set_random_seed(0)
    histories = sys.modules.get("tfdp.runs.histories")
    if histories is not None:
        histories._known_values.clear()
        histories._variables.clear()
    yield
    keras = sys.modules.get("keras")
    if keras is not None:
        keras.config.set_floatx("float32")
        keras.utils.clear_session(free_memory=False)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
