"""Units of any size are clipped and added up, in passes that are filled up or not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.problems import PROBLEMS
from tests.reference import assert_all_close, clipped_sum
from tests.small import CLIP as SMALL_CLIP
from tests.small import RATE, data, logits_loss, noiseless, private
from tests.training.ragged import CLIP, LARGEST, SIZES, ragged
from tfdp.engines import BookkeepingEngine, GhostEngine, VectorizedEngine
from tfdp.losses.objective import Objective
from tfdp.training import batch_clipper
from tfdp.training.batch_clipper import BatchClipper


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
    run = batch_clipper.passes.run

    def spied(*args, **options):
        asked.append(options["physical_batch_size"])
        return run(*args, **options)

    monkeypatch.setattr(batch_clipper.passes, "run", spied)
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
