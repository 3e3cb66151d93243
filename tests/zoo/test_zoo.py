"""Every model of the zoo trains, clipped as a loop over single rows would."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.problems import precision
from tests.reference import clipped_sum
from tests.zoo import ZOO, Entry
from tests.zoo.entry import OUTLIER, ROWS, engine_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TRAINED = {name: entry for name, entry in ZOO.items() if entry.engine != "refused"}
CASES = [
    pytest.param(entry, id=name, marks=[] if entry.is_quick else pytest.mark.slow)
    for name, entry in TRAINED.items()
]


def single_rows(
    model: keras.Model, loss, x, y, weights, rows: int = ROWS
) -> list[np.ndarray]:
    """Return the gradient of each row by itself, in a loop."""
    if loss is not None:
        model.compile(None, loss)
    variables = model.trainable_variables

    @tf.function(autograph=False, reduce_retracing=True)
    def gradients(x, y, weights):
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            value = tf.reduce_sum(model.compute_loss(x, y, y_pred, weights))
        found = tape.gradient(value, variables, unconnected_gradients="zero")
        return [tf.convert_to_tensor(gradient) for gradient in found]

    found = [gradients(*_row((x, y, weights), row)) for row in range(rows)]
    return [np.stack(of_variable) for of_variable in zip(*found, strict=True)]


def _row(batch, row):
    return keras.tree.map_structure(
        lambda array: (
            None if array is None else tf.convert_to_tensor(array[row : row + 1])
        ),
        batch,
    )


def trained(entry: Entry, model: keras.Model, batch, clip: float) -> tfdp.DPModel:
    """Take one step without noise, of length 1, on the whole batch."""
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPOptimizer(
            keras.optimizers.SGD(1.0), l2_norm_clip=clip, noise_multiplier=0.0
        ),
        entry.make_loss(),
    )
    x, y, weights = batch
    if isinstance(x, list):
        # Which a dataset would put together.
        x = tuple(x)
    batch = (x, y) if weights is None else (x, y, weights)
    rows = tf.data.Dataset.from_tensors(batch)
    declared = tfdp.data.declare(
        rows, number_of_examples=ROWS, expected_batch_size=ROWS, sampling="shuffle"
    )
    private.fit(declared, verbose=0)
    return private


@pytest.mark.parametrize("entry", CASES)
def test_clipped_as_single_rows(entry):
    with precision(entry.dtype):
        model = entry.build(0.0)
        x, *_ = batch = entry.batch()
        model(keras.tree.map_structure(tf.convert_to_tensor, x))
        gradients = single_rows(model, entry.make_loss(), *batch)
        _, norms = clipped_sum(gradients, 1.0)
        clip = 0.9 * float(np.median(norms))
        assert norms[OUTLIER] > 5 * clip
        expected, _ = clipped_sum(gradients, clip)
        tolerance = 1e-8 if entry.dtype == "float64" else 1e-4
        before = [variable.numpy() for variable in model.trainable_variables]
        private = trained(entry, model, batch, clip)
        assert engine_of(private) == entry.engine
        for variable, start, total in zip(
            model.trainable_variables, before, expected, strict=True
        ):
            moved = (start - variable.numpy()) * ROWS
            np.testing.assert_allclose(
                moved, total, rtol=0, atol=tolerance * clip * ROWS
            )


@pytest.mark.slow
@pytest.mark.parametrize("entry", TRAINED.values(), ids=TRAINED)
def test_engine_with_chance(entry):
    """What a model draws does not change which engine clips it."""
    private = trained(entry, entry.build(1.0), entry.batch(), 1.0)
    assert engine_of(private) == entry.engine
    assert all(np.isfinite(v).all() for v in private.model.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO.keys() - TRAINED.keys()))
def test_refused(name):
    """With a reason, before anything is trained."""
    model = ZOO[name].build(1.0)
    before = model.get_weights()
    with pytest.raises((
        tfdp.errors.UnsupportedLayerError,
        tfdp.errors.UnsupportedLossError,
    )):
        trained(ZOO[name], model, ZOO[name].batch(), 1.0)
    for weight, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, start)
