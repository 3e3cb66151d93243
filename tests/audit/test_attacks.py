"""Attacks with a canary on steps: what they prove stays below what is claimed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tfdp import clipping
from tfdp.accounting import Ledger, UnamplifiedSteps
from tfdp.engines import bookkeeping
from tfdp.mechanisms import mechanism
from tfdp.mechanisms.mechanism import add_noise

DELTA = 1e-5
TRIALS = 2000
# Enough for what is nearly always guessed right.
FEW_TRIALS = 500
ROWS = 4
NOISE_MULTIPLIER = 1.0
CLAIMED = Ledger((UnamplifiedSteps(1, NOISE_MULTIPLIER),)).epsilon(DELTA)


def releases(has_canary, engine, trials):
    """What one private step adds to the weight that the canary pushes, many times."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False)])
    private = tfdp.DPModel(model, engine=engine)
    private.compile(
        tfdp.optimizers.DPSGD(
            1.0,
            l2_norm_clip=1.0,
            noise_multiplier=NOISE_MULTIPLIER,
            expected_batch_size=ROWS,
        ),
        loss=lambda y_true, y_pred: keras.ops.sum(y_true * y_pred, axis=-1),
    )
    x = np.zeros((ROWS, 2), "float32")
    x[0, 0] = 30.0 * has_canary
    y = np.ones((ROWS, 1), "float32")
    seen = np.empty(trials)
    for trial in range(trials):
        before = model.get_weights()[0][0, 0]
        private.train_on_batch(x, y)
        seen[trial] = (before - model.get_weights()[0][0, 0]) * ROWS
    return seen


def proven_epsilon(trials, engine="auto"):
    """A lower bound of epsilon that holds with 95 % confidence, by coins for releases."""
    inserted = np.random.default_rng(0).integers(0, 2, trials) == 1
    seen = np.where(
        inserted, releases(True, engine, trials), releases(False, engine, trials)
    )
    return tfdp.audit.epsilon_lower_bound(seen, inserted, DELTA)


@pytest.mark.slow
@pytest.mark.statistical
def test_no_more_is_proven_than_claimed():
    assert 0.2 < proven_epsilon(TRIALS) < CLAIMED


@pytest.mark.slow
@pytest.mark.statistical
def test_too_little_noise_is_found_out(monkeypatch):
    monkeypatch.setattr(
        mechanism,
        "add_noise",
        lambda clipped_sum, *, noise_multiplier, stream: add_noise(
            clipped_sum, noise_multiplier=noise_multiplier / 20, stream=stream
        ),
    )
    assert proven_epsilon(FEW_TRIALS) > CLAIMED


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(
    ("engine", "module"), [("bookkeeping", bookkeeping), ("vectorized", clipping)]
)
def test_missing_clipping_is_found_out(engine, module, monkeypatch):
    monkeypatch.setattr(
        module,
        "clip_factors",
        lambda norms, *, l2_norm_clip: tf.ones_like(norms, l2_norm_clip.dtype),
    )
    assert proven_epsilon(FEW_TRIALS, engine) > CLAIMED
