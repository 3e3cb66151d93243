"""The private step: units of any size, replicas alike, and how long the way is."""

import contextlib
import os
import sys
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.problems import PROBLEMS, scale_outlier
from tests.reference import assert_all_close, clipped_sum, per_example_gradients
from tests.small import CLIP as SMALL_CLIP
from tests.small import RATE, data, logits_loss, noiseless, private
from tfdp.engines import BookkeepingEngine, GhostEngine, VectorizedEngine
from tfdp.losses.objective import Batch, Objective
from tfdp.training import step
from tfdp.training.step import BatchClipper

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


@pytest.mark.parametrize("physical_batch_size", [None, 8])
@pytest.mark.parametrize(
    "engine",
    [BookkeepingEngine(), GhostEngine(), VectorizedEngine()],
    ids=lambda engine: engine.name,
)
@pytest.mark.parametrize("name", ["mlp_logits", "cnn"])
def test_units_may_have_any_number_of_rows(name, engine, physical_batch_size):
    batch, units, model, loss = ragged(PROBLEMS[name])
    expected, norms = clipped_sum(units, CLIP)
    shown = []
    clipper = BatchClipper(
        model,
        engine,
        examples_per_unit=LARGEST,
        physical_batch_size=physical_batch_size,
    )
    found = clipper.clip(
        batch,
        tf.constant(CLIP, tf.float64),
        Objective.of(model, loss),
        lambda data, rows, outputs: shown.append((len(data[1]), rows, len(outputs))),
    )
    assert np.any(norms > CLIP)
    # A unit without a row is nobody's: its norm is not there to be asked for.
    assert not SIZES[-1]
    np.testing.assert_allclose(found.norms, norms[:-1], rtol=1e-6, atol=1e-12)
    assert_all_close(found.gradients, expected, rtol=1e-6, atol=1e-9)
    # No padding is in the metrics.
    for shown_rows, rows, outputs in shown:
        assert shown_rows == rows == outputs
    if physical_batch_size is None:
        assert shown[0][0] == sum(SIZES)


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


LOSSES = {
    "plain": "mse",
    "exact": tfdp.losses.BAM("mse", radius=1e-6, ascent="exact"),
}


@pytest.mark.parametrize(
    ("loss", "known", "rows", "size"),
    [
        ("plain", True, 5, None),
        ("plain", True, 8, None),
        ("plain", True, 9, 8),
        ("plain", False, 5, 8),
        # Layers see how many rows there are.
        ("exact", True, 5, 8),
    ],
)
def test_passes_are_filled_up_only_where_that_is_of_use(
    monkeypatch, loss, known, rows, size
):
    asked = []
    run = step.passes.run

    def spied(*args, **options):
        asked.append(options["physical_batch_size"])
        return run(*args, **options)

    monkeypatch.setattr(step.passes, "run", spied)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    @tf.function(autograph=False)
    def gradients(x, y):
        return tfdp.clipped_gradients(
            model, LOSSES[loss], x, y, l2_norm_clip=1.0, physical_batch_size=8
        ).gradients

    specs = [tf.TensorSpec([rows if known else None, n]) for n in (2, 1)]
    gradients.get_concrete_function(*specs)
    assert set(asked) == {size}


class MixesSomeNumbersOfRows(keras.layers.Layer):
    """Lets rows meet in batches of five or six."""

    def call(self, x):
        return x + tf.reduce_sum(x, 0) if x.shape[0] in {5, 6} else x


@pytest.mark.parametrize(
    "jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_layers_see_the_number_of_rows_that_was_proven(jit_compile):
    x, y = data(6)
    model = private(
        keras.Sequential([
            keras.Input((3,)),
            MixesSomeNumbersOfRows(),
            keras.layers.Dense(2),
        ]),
        noiseless(expected_batch_size=5),
        tfdp.losses.BAM(logits_loss(), radius=1e-6, ascent="exact"),
        wrap={"physical_batch_size": 8},
        jit_compile=jit_compile,
    )
    weights = model.get_weights()
    updates = []
    for rows in (range(6), (0, 2, 3, 4, 5)):
        model.set_weights(weights)
        model.train_on_batch(x[list(rows)], y[list(rows)])
        updates.append([
            a - b for a, b in zip(weights, model.get_weights(), strict=True)
        ])
    change = [a - b for a, b in zip(*updates, strict=True)]
    norm = np.sqrt(sum(np.sum(each**2) for each in change)) * 5 / RATE
    assert norm <= SMALL_CLIP * (1 + 1e-5)
