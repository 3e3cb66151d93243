"""The private step: how far it moves, and how long the way of rows is."""

import contextlib
import os
import sys
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest

import tfdp
from tests.problems import PROBLEMS
from tests.training.ragged import CLIP, LARGEST, SIZES, ragged


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Training without noise")
def test_a_step_of_ragged_units_moves_by_the_clip_norm_at_most():
    batch, _, model, _ = ragged(PROBLEMS["mlp_logits"])
    private = tfdp.DPModel(model, sampling="shuffle")
    optimizer = tfdp.optimizers.DPOptimizer(
        keras.optimizers.SGD(1.0),
        l2_norm_clip=CLIP,
        noise_multiplier=0.0,
        num_microbatches=len(SIZES),
        expected_batch_size=len(SIZES) * LARGEST,
    )
    private.compile(optimizer, PROBLEMS["mlp_logits"].loss("float64"))
    before = model.get_weights()
    private.train_step(batch)
    after = model.get_weights()
    moved = np.sqrt(
        sum(np.sum((a - b) ** 2) for a, b in zip(after, before, strict=True))
    )
    # Of five units, each moves the weights by a fifth of C at most; one has no row.
    assert 0 < moved <= CLIP * 4 / 5
    assert private.ledger.segments[0].examples_per_unit == LARGEST


# --------------------------------------------------------------------- the way of rows


@contextlib.contextmanager
def files_entered(found):
    """Note which functions of tfdp run, from a training step to the drawing of noise."""
    folder = f"{Path(tfdp.__file__).parent}{os.sep}"
    is_on = False

    def note(frame, event, _):
        nonlocal is_on
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(folder):
            return
        is_on |= code.co_qualname == "DPModel.train_step"
        if is_on:
            found[code.co_filename.removeprefix(folder)] += 1
        if code.co_qualname == "standard_normal":
            is_on = False
            sys.setprofile(None)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.slow
def test_from_rows_to_noise_there_are_few_files(capsys):
    inner = keras.Sequential([
        keras.Input((3,)),
        keras.layers.Dense(4, activation="relu"),
        keras.layers.Dense(1),
    ])
    model = tfdp.DPModel(inner)
    model.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        "mse",
        run_eagerly=True,
    )
    x = np.random.default_rng(0).normal(size=(8, 3))
    options = {"batch_size": 8, "steps_per_epoch": 1, "verbose": 0}
    model.fit(x, x[:, :1], **options)
    found = Counter()
    with files_entered(found):
        model.fit(x, x[:, :1], **options)
    with capsys.disabled():
        calls = ", ".join(f"{name} {n}" for name, n in found.most_common())
        print(f"\nFrom rows to noise, {len(found)} files: {calls}")  # noqa: T201
    # Two of them ask whether rows of these shapes were checked, in these layers, and two
    # would look into what engines leave that take each example by itself. A layer's rule,
    # its call and what is recorded of it are three.
    assert len(found) <= 24
