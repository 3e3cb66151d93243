"""However steps are run, callbacks do in each what their formulas say.

The loss is linear in the weights, so the gradient of a row is the row itself, and
NumPy can take the same steps with the same noise.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.reference import clipped_sum
from tfdp.accounting import Ledger, PoissonSteps
from tfdp.accounting.levels import folded
from tfdp.callbacks import (
    AdaptiveMedianClip,
    AdaptiveQuantileClip,
    BiasLogger,
    ClipNormScheduler,
    NoiseMultiplierScheduler,
    PrivacyBudget,
)
from tfdp.clipping import ClippedSum
from tfdp.mechanisms.mechanism import Gaussian, add_noise, noise_of_query

DELTA = 1e-3
ROWS = 12
NORMS = np.linspace(0.3, 3.6, ROWS)
NORMS[5] *= 1e6

GRAPH, EAGER, SEVERAL, XLA = (
    {},
    {"run_eagerly": True},
    {"steps_per_execution": 3},
    {"jit_compile": True},
)

pytestmark = pytest.mark.filterwarnings("ignore:The privacy noise is reproducible")
every_way = pytest.mark.parametrize(
    "options",
    [
        pytest.param(GRAPH, marks=pytest.mark.smoke),
        pytest.param(EAGER, marks=pytest.mark.slow),
        pytest.param(SEVERAL, marks=pytest.mark.slow),
        pytest.param(XLA, marks=pytest.mark.slow),
    ],
    ids=str,
)


def rows():
    x = np.random.default_rng(0).normal(size=(ROWS, 3))
    return x * (NORMS / np.linalg.norm(x, axis=1))[:, None]


def trained(noise_multiplier, callbacks, options, **model_options):
    """A model after up to 9 steps, each on all rows, and what `fit` has logged."""
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])
    model = tfdp.DPModel(model, **model_options)
    optimizer = tfdp.optimizers.DPSGD(
        1.0, l2_norm_clip=77.0, noise_multiplier=noise_multiplier, noise_seed=5
    )
    model.compile(optimizer, lambda y_true, y_pred: ops.sum(y_pred, axis=-1), **options)
    history = model.fit(
        rows(),
        np.zeros((ROWS, 1)),
        batch_size=ROWS,
        steps_per_epoch=3,
        epochs=3,
        callbacks=callbacks,
        verbose=0,
    )
    return model, history.history


def stream(step):
    with pytest.warns(match="reproducible"):
        return Gaussian(5).stream(tf.constant(step, tf.int64))


def weights_after(clips, noise_multipliers):
    """Where steps with these clip norms and noise multipliers lead."""
    weights = np.zeros((3, 1))
    nothing = ClippedSum([tf.zeros([3, 1])], tf.zeros([0]), tf.constant(1.0), 1)
    for step, (clip, z) in enumerate(zip(clips, noise_multipliers, strict=True)):
        (total,), _ = clipped_sum([rows()[:, :, None]], clip)
        (noise,) = add_noise(nothing, noise_multiplier=1.0, stream=stream(step))
        weights -= (total + z * clip * noise.numpy()) / ROWS
    return [weights]


def poisson(steps, noise_multiplier):
    return PoissonSteps(steps, noise_multiplier, ROWS, ROWS)


@every_way
def test_schedules_and_what_clipping_does(options):
    clips = [2.0 / (1 + step) for step in range(7)]
    noise = [64.0] * 4 + [32.0] * 3
    segments = poisson(4, 64.0), poisson(3, 32.0)
    target = Ledger(segments).epsilon(DELTA)
    callbacks = [
        ClipNormScheduler(lambda step: 2.0 / (1 + step)),
        NoiseMultiplierScheduler(lambda step: 64.0 if step < 4 else 32.0),
        PrivacyBudget(DELTA, target),
        BiasLogger(every=1),
    ]
    model, logs = trained(77.0, callbacks, options)
    assert model.ledger.segments == segments
    assert not model.ledger.cut_short
    assert logs["epsilon"][1:] == [
        Ledger((segments[0], poisson(2, 32.0))).epsilon(DELTA),
        target,
    ]
    np.testing.assert_allclose(
        model.get_weights(), weights_after(clips, noise), rtol=1e-4, atol=1e-5
    )
    # The step that the budget refuses may have set its own already.
    np.testing.assert_allclose(logs["l2_norm_clip"][:2], [clips[2], clips[5]])
    assert logs["noise_multiplier"] == [64.0, 32.0, 32.0]
    whole = rows().sum(0)
    biases = [clipped_sum([rows()], clip)[0][0] - whole for clip in clips]
    expected = {
        "bias_magnitude": np.linalg.norm(biases, axis=1) / ROWS,
        "clipped_fraction": [np.mean(clip < NORMS) for clip in clips],
        "norm_q50": [np.quantile(NORMS, 0.5, method="inverted_cdf")] * 7,
    }
    for name, values in expected.items():
        np.testing.assert_allclose(
            logs[f"nonprivate_{name}"], np.take(values, [2, 5, 6]), rtol=1e-5
        )


@every_way
def test_a_quantile_of_the_norms(options):
    """In float64, in which nothing is cast: a reference to C would see the next one."""
    keras.config.set_floatx("float64")
    counted = folded(16.0, 8.0)
    target = 1.001 * Ledger((poisson(7, counted),)).epsilon(DELTA)
    callbacks = [AdaptiveQuantileClip(0.3, 2.0, 8.0), PrivacyBudget(DELTA, target)]
    model, logs = trained(16.0, callbacks, options, physical_batch_size=5)
    clips = [77.0]
    for step in range(7):
        halves = np.where(clips[-1] >= NORMS, 0.5, -0.5).sum()
        noise = 8.0 / 2 * float(noise_of_query((), stream=stream(step)))
        share = np.clip(0.5 + (halves + noise) / ROWS, 0, 1)
        clips.append(clips[-1] * np.exp(-2.0 * (share - 0.3)))
    np.testing.assert_allclose(
        logs["l2_norm_clip"], np.take(clips, [3, 6, 7]), rtol=1e-6
    )
    np.testing.assert_allclose(
        model.get_weights(), weights_after(clips[:-1], [16.0] * 7), rtol=1e-5
    )
    (segment,) = model.ledger.segments
    assert segment.steps == 7
    np.testing.assert_allclose(segment.noise_multiplier, counted, rtol=1e-9)
    assert segment.noise_multiplier <= counted


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        EAGER,
        pytest.param(SEVERAL, marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_median_of_the_norms_now_and_then(options):
    edges = np.array([0, 0.5, 1.0, 2.0, 4.0])
    median = AdaptiveMedianClip(edges, histogram_noise_multiplier=5.0, every=4)
    counted = folded(16.0, 5.0) * (1 - 1e-12)
    segments = poisson(2, counted), poisson(5, 16.0)
    target = 1.001 * Ledger(segments).epsilon(DELTA)
    model, logs = trained(16.0, [median, PrivacyBudget(DELTA, target)], options)
    middles = []
    for step in (0, 4):
        counts, _ = np.histogram(np.minimum(NORMS, 3.9), edges)
        counts = counts + 5.0 * noise_of_query((4,), stream=stream(step)).numpy()
        place = np.argmax([*(np.cumsum(counts)[:-1] >= counts.sum() / 2), True])
        middles.append((edges[place] + edges[place + 1]) / 2)
    clips = [77.0, *np.repeat(middles, 4)[:7]]
    np.testing.assert_allclose(logs["l2_norm_clip"], np.take(clips, [3, 6, 7]))
    np.testing.assert_allclose(
        model.get_weights(),
        weights_after(clips[:-1], [16.0] * 7),
        rtol=1e-4,
        atol=1e-4,
    )
    found = {s.steps: s.noise_multiplier for s in model.ledger.segments}
    assert sorted(found) == [2, 5]
    np.testing.assert_allclose([found[2], found[5]], [counted, 16.0], rtol=1e-9)
    assert found[2] <= folded(16.0, 5.0)
    assert found[5] <= 16.0
