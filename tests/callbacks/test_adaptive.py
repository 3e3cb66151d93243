"""Adaptive clip norms: where they go, what they cost, and what they clip."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tfdp.accounting import (
    Ledger,
    PoissonSteps,
    ShuffledPasses,
    UnamplifiedSteps,
)
from tfdp.accounting.levels import folded
from tfdp.callbacks import AdaptiveMedianClip, AdaptiveQuantileClip, PrivacyBudget
from tfdp.sampling import Unknown

ROWS = 40
NORMS = np.linspace(0.2, 8.0, ROWS)
EDGES = [0, 0.5, 1.0, 2.0, 4.0]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Training without noise", "ignore:The privacy noise is reproducible"
)


def private(
    l2_norm_clip=1.0,
    noise_multiplier=1.0,
    *,
    num_microbatches=None,
    sampling="shuffle",
    **options,
):
    """A model of which row i has a gradient of norm ``x[i]``, whatever its weights."""
    model = keras.Sequential([
        keras.Input((1,)),
        layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])
    wrapped = tfdp.DPModel(model, sampling=sampling, **options)
    wrapped.compile(
        tfdp.optimizers.DPSGD(
            1.0,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            noise_seed=5,
        ),
        total,
    )
    return wrapped


@keras.saving.register_keras_serializable("tests")
def total(y_true, y_pred):
    return ops.sum(y_pred, axis=-1)


def rows(norms=NORMS):
    norms = np.asarray(norms, "float32")[:, None]
    return norms, np.zeros_like(norms)


class Clips(keras.callbacks.Callback):
    """Notes C after every batch that Keras sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        assert logs["l2_norm_clip"] == float(self.model.optimizer.l2_norm_clip)
        self.seen.append(logs["l2_norm_clip"])


def fit(model, *callbacks, norms=NORMS, batch_size=ROWS, epochs=1):
    clips = Clips()
    model.fit(
        *rows(norms),
        batch_size=batch_size,
        epochs=epochs,
        callbacks=[*callbacks, clips],
        verbose=0,
    )
    return clips.seen


def next_clip(callback, clip, norms, noise=0.0):
    """Where the clip norm goes, with noise of so many standard deviations."""
    query = callback.query
    clip = tf.constant(clip, tf.float64)
    drawn = tf.broadcast_to(tf.constant(noise), query.shape)
    answer = query.answer(tf.constant(norms, tf.float32), clip, drawn)
    units = tf.constant(len(norms), tf.float64)
    return float(callback.next_clip(clip, answer, expected_units=units))


class TestAdaptiveQuantileClip:
    @pytest.mark.parametrize(
        ("quantile", "factor"),
        [
            pytest.param(0.25, 100.0, marks=pytest.mark.slow),
            pytest.param(0.5, 0.01, marks=pytest.mark.slow),
            pytest.param(0.9, 100.0, marks=pytest.mark.slow),
        ],
    )
    def test_reaches_the_true_quantile_from_far_away(self, quantile, factor):
        true = clip = np.quantile(NORMS, quantile)
        clip *= factor
        callback = AdaptiveQuantileClip(quantile, learning_rate=1.0)
        for _ in range(100):
            clip = next_clip(callback, clip, NORMS)
        np.testing.assert_allclose(clip, true, rtol=0.1)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [
            {"engine": "vectorized"},
            {"engine": "ghost", "physical_batch_size": 7},
        ],
        ids=str,
    )
    def test_every_pass_is_looked_at(self, options):
        """Most batches are full, so noise alone keeps C from the exact value."""
        model = private(0.05, **options)
        fit(
            model,
            AdaptiveQuantileClip(0.5, 0.4, count_noise_multiplier=1e-3),
            batch_size=10,
            epochs=12,
        )
        assert 2.5 < float(model.optimizer.l2_norm_clip) < 6.5

    @pytest.mark.slow
    def test_the_divisor_is_public(self):
        """A batch of 10 rows of which 30 were expected counts 20 as half a share."""
        quantile = AdaptiveQuantileClip(0.5, 1.0, count_noise_multiplier=1e-9)
        seen = fit(private(100.0), quantile, batch_size=30, epochs=1)
        np.testing.assert_allclose(seen[0], 100 * math.exp(-0.5), rtol=1e-5)
        share = 0.5 + 10 * 0.5 / 30
        np.testing.assert_allclose(
            seen[1], seen[0] * math.exp(-(share - 0.5)), rtol=1e-5
        )

    @pytest.mark.slow
    def test_norms_that_are_not_finite_are_above_any_clip_norm(self):
        quantile = AdaptiveQuantileClip(0.5, 1.0, count_noise_multiplier=1e-9)
        norms = [np.nan] * 15 + [np.inf] * 15 + [1.0] * 10
        seen = fit(private(2.0), quantile, norms=norms)
        np.testing.assert_allclose(seen, [2 * math.exp(0.25)], rtol=1e-5)

    @pytest.mark.parametrize(("target", "norm"), [(1e-9, 1.0), (1 - 1e-9, 1e30)])
    def test_the_clip_norm_stays_where_noise_is_exact(self, target, norm):
        quantile, clip = AdaptiveQuantileClip(target, 100.0), 2.0
        for _ in range(3):
            clip = next_clip(quantile, clip, np.full(ROWS, norm))
            assert 1e-20 <= clip <= 1e20

    @pytest.mark.slow
    def test_groups_of_examples_move_a_count_by_a_whole(self):
        model = private(noise_multiplier=1.5, num_microbatches=5)
        fit(model, AdaptiveQuantileClip(0.5, count_noise_multiplier=3.0), batch_size=10)
        (segment,) = model.ledger.segments
        assert segment.examples_per_unit == 2
        np.testing.assert_allclose(segment.noise_multiplier, folded(1.5, 3.0) / 2)

    def test_the_log_says_what_keeps_epsilon(self, caplog):
        with caplog.at_level("INFO", "absl"):
            AdaptiveQuantileClip(0.5).before_training(private().optimizer, None)
        (message,) = (text for text in caplog.messages if "AdaptiveQuantile" in text)
        assert "noise_multiplier=1 counts" in message
        assert "counts as 0.995037" in message
        assert "noise_multiplier=1.00504 would" in message
        np.testing.assert_allclose(folded(1.00504, 10.0), 1.0, rtol=1e-5)

    @pytest.mark.slow
    def test_the_clip_norm_stays_afterwards(self, tmp_path):
        """No count is made, or paid for, and C is saved."""
        model = private(noise_multiplier=2.0)
        clip = fit(model, AdaptiveQuantileClip(0.5))[-1]
        model.train_on_batch(*rows())
        assert model.ledger.segments[-1] == UnamplifiedSteps(1, 2.0)
        assert float(model.optimizer.l2_norm_clip) == clip != 1.0
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert float(loaded.optimizer.l2_norm_clip) == clip

    @pytest.mark.parametrize(
        "arguments",
        [{"target_quantile": bad} for bad in (0, 1, -1, math.nan)]
        + [
            {"target_quantile": 0.5, name: bad}
            for name in ("learning_rate", "count_noise_multiplier")
            for bad in (0, -1, math.nan, math.inf)
        ],
    )
    def test_bad_arguments_are_refused(self, arguments):
        with pytest.raises(ValueError, match=r"must .* Received: "):
            AdaptiveQuantileClip(**arguments)


def median(every=1, noise=1e-9, edges=EDGES):
    return AdaptiveMedianClip(edges, histogram_noise_multiplier=noise, every=every)


class TestAdaptiveMedianClip:
    @pytest.mark.parametrize(
        ("norms", "expected"),
        [
            ([0.1] * 30 + [3.0] * 10, 0.25),
            ([0.1] * 10 + [0.7] * 30, 0.75),
            ([0.1] * 19 + [1.5] * 21, 1.5),
            ([0.1] * 10 + [3.0] * 30, 3.0),
            ([0.1] * 10 + [1e9] * 30, 3.0),  # The last bin holds all above it.
            ([math.nan] * 30 + [0.1] * 10, 3.0),
            ([math.inf] * 30 + [0.1] * 10, 3.0),
        ],
    )
    def test_is_the_middle_of_the_bin_of_the_median(self, norms, expected):
        assert next_clip(median(), 77.0, norms) == pytest.approx(expected)

    @pytest.mark.parametrize(("noise", "expected"), [(-0.49, 0.5), (-0.51, 1.5)])
    def test_the_noise_of_a_count_is_its_multiplier(self, noise, expected):
        """10 more in the first bin than in the second, of which noise takes 20 z."""
        callback, norms = median(noise=20.0, edges=[0, 1, 2]), [0.5] * 55 + [1.5] * 45
        found = next_clip(callback, 77.0, norms, noise=[noise, 0.0])
        assert found == expected

    @pytest.mark.slow
    def test_a_pass_with_a_histogram_counts_with_it(self):
        model = private(noise_multiplier=1.5)
        fit(model, median(every=10, noise=3.0), batch_size=10, epochs=3)
        paid = {s.noise_multiplier: s.passes for s in model.ledger.segments}
        assert all(isinstance(s, ShuffledPasses) for s in model.ledger.segments)
        # Steps 0 and 10 of the 12 are in the first and the third pass.
        assert paid[min(paid)] == 2
        assert paid[max(paid)] == 1

    @pytest.mark.slow
    def test_data_of_unknown_length(self):
        def generate():
            while True:
                yield rows()

        model = private(noise_multiplier=1.5)
        model.compile(
            tfdp.optimizers.DPSGD(
                1.0, l2_norm_clip=1.0, noise_multiplier=1.5, expected_batch_size=ROWS
            ),
            model.loss,
        )
        model.fit(
            generate(),
            steps_per_epoch=3,
            callbacks=[median(every=5, noise=2.0)],
            verbose=0,
        )
        assert {segment.scheme for segment in model.ledger.segments} == {Unknown()}
        assert model.ledger.steps == 3

    @pytest.mark.parametrize(
        "edges",
        [[], [1.0], [0, 1, 1], [1, 0], [-1, 0, 1], [0, math.nan], [0, math.inf]],
    )
    def test_bad_edges_are_refused(self, edges):
        with pytest.raises(ValueError, match="`bin_edges` must"):
            median(edges=edges)

    @pytest.mark.parametrize(
        "arguments",
        [{"every": bad} for bad in (0, -1, 1.5)]
        + [{"noise": bad} for bad in (0, -1, math.nan, math.inf)],
    )
    def test_bad_arguments_are_refused(self, arguments):
        with pytest.raises(ValueError, match=r"must .* Received: "):
            median(**arguments)


@pytest.mark.slow
def test_noise_set_by_a_callback_is_planned_for():
    """Beside what a query costs: the budget and every step know of it."""
    model = private(noise_multiplier=64.0, sampling="poisson")
    lower = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(
            model.optimizer, "noise_multiplier", 32.0
        )
    )
    steps = PoissonSteps(20, folded(32.0, 160.0), ROWS, ROWS)
    target = 1.0001 * Ledger((steps,)).epsilon(1e-3)
    fit(
        model,
        AdaptiveQuantileClip(0.5, count_noise_multiplier=160.0),
        PrivacyBudget(1e-3, target),
        lower,
        epochs=40,
    )
    assert model.ledger.steps == 20
    assert model.epsilon(1e-3) <= target


@pytest.mark.parametrize("units", [0, 1, 3])
def test_a_graph_for_any_number_of_units_asks_of_few(units):
    """Poisson draws may be empty."""
    query = AdaptiveMedianClip(
        [0.0, 0.5, 1.0, 2.0], histogram_noise_multiplier=10.0
    ).query

    @tf.function(input_signature=[tf.TensorSpec([None])], autograph=False)
    def answer(norms):
        one, no_noise = tf.constant(1.0, tf.float64), tf.zeros(query.shape)
        return query.answer(norms, one, no_noise)

    np.testing.assert_array_equal(answer(tf.ones([units])), [0, 0, units])
