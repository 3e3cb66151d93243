"""Adaptive clip norms: where they go, what they cost, and what they clip."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tfdp.accounting import PoissonSteps, ShuffledPasses, UnamplifiedSteps
from tfdp.accounting.levels import folded
from tfdp.callbacks import AdaptiveMedianClip, AdaptiveQuantileClip, PrivacyBudget

ROWS = 40
NORMS = np.linspace(0.2, 8.0, ROWS)
OPTIONS = [
    {},
    {"steps_per_execution": 3},
    {"run_eagerly": True},
    {"jit_compile": True},
]
EDGES = [0, 0.5, 1.0, 2.0, 4.0]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Training without noise", "ignore:The privacy noise is reproducible"
)


def private(
    l2_norm_clip=1.0,
    noise_multiplier=1.0,
    *,
    num_microbatches=None,
    learning_rate=1.0,
    model_options=None,
    **options,
):
    """A model of which row i has a gradient of norm ``x[i]``, whatever its weights."""
    model = keras.Sequential([
        keras.Input((1,)),
        layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])
    if model_options is None:
        model_options = {"sampling": "shuffle"}
    wrapped = tfdp.DPModel(model, **model_options)
    wrapped.compile(
        tfdp.optimizers.DPSGD(
            learning_rate,
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
            noise_seed=5,
        ),
        total,
        **options,
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


class TestAdaptiveQuantileClip:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("quantile", "factor"), [(0.25, 100.0), (0.5, 0.01), (0.9, 100.0)]
    )
    def test_reaches_the_true_quantile_from_far_away(self, quantile, factor):
        true = np.quantile(NORMS, quantile)
        seen = fit(
            private(factor * true),
            AdaptiveQuantileClip(quantile, count_noise_multiplier=0.1),
            norms=np.tile(NORMS, 40),
            epochs=10,
        )
        np.testing.assert_allclose(np.mean(seen[-50:]), true, rtol=0.1)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("options", "model_options"),
        [
            *((options, {"physical_batch_size": 7}) for options in OPTIONS),
            ({}, {"engine": "vectorized"}),
            ({}, {"engine": "ghost", "physical_batch_size": 7}),
        ],
        ids=str,
    )
    def test_however_steps_are_run(self, options, model_options):
        """Most batches are full, so noise alone keeps C from the exact value."""
        model = private(
            0.05, model_options={"sampling": "shuffle", **model_options}, **options
        )
        fit(
            model,
            AdaptiveQuantileClip(0.5, 0.4, count_noise_multiplier=1e-3),
            batch_size=10,
            epochs=12,
        )
        assert 2.5 < float(model.optimizer.l2_norm_clip) < 6.5

    def test_follows_the_formula(self):
        clip, expected = 1.07, []
        for _ in range(20):
            share = np.mean(np.float32(clip) >= NORMS.astype("float32"))
            clip *= math.exp(-0.3 * (share - 0.4))
            expected.append(clip)
        quantile = AdaptiveQuantileClip(0.4, 0.3, count_noise_multiplier=1e-9)
        np.testing.assert_allclose(
            fit(private(1.07), quantile, epochs=20), expected, rtol=1e-5
        )

    @pytest.mark.slow
    def test_the_divisor_is_public(self):
        """A batch of 10 rows of which 20 were expected counts 10 as half a share."""
        quantile = AdaptiveQuantileClip(0.5, 1.0, count_noise_multiplier=1e-9)
        seen = fit(private(100.0), quantile, batch_size=30, epochs=1)
        np.testing.assert_allclose(seen[0], 100 * math.exp(-0.5), rtol=1e-5)
        share = 0.5 + 10 * 0.5 / 30
        np.testing.assert_allclose(
            seen[1], seen[0] * math.exp(-(share - 0.5)), rtol=1e-5
        )

    @pytest.mark.slow
    def test_the_noise_of_the_count_is_half_its_multiplier(self):
        """C far above all norms: the sum of the halves is known, the rest is noise."""
        model = private(1e10)
        quantile = AdaptiveQuantileClip(0.5, 1e-3, count_noise_multiplier=8.0)
        seen = fit(model, quantile, norms=np.zeros(6000), batch_size=100, epochs=10)
        shares = 0.5 - np.diff(np.log([1e10, *seen])) / 1e-3
        noise = (shares - 1.0) * 100
        # Half of the draws would exceed a share of 1 and are cut off there.
        noise = noise[noise < -1e-6]
        assert 200 < len(noise) < 400
        np.testing.assert_allclose(np.sqrt(np.mean(noise**2)), 4.0, rtol=0.15)

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_noise_is_that_of_the_norm_that_clipped(self, options, dtype):
        """Without slopes weights move by noise alone, of one seed."""
        keras.config.set_floatx(dtype)
        quantile = AdaptiveQuantileClip(0.01, 5.0, count_noise_multiplier=1e-9)
        model, fixed = private(3.0, **options), private(3.0, **options)
        fit(model, quantile, norms=np.zeros(ROWS))
        fixed.fit(*rows(np.zeros(ROWS)), batch_size=ROWS, verbose=0)
        np.testing.assert_array_equal(model.get_weights(), fixed.get_weights())
        assert float(model.optimizer.l2_norm_clip) < 0.1

    def test_every_count_has_noise_of_its_own(self):
        quantile = AdaptiveQuantileClip(0.5, 1e-3, count_noise_multiplier=0.01)
        seen = fit(private(), quantile, norms=np.tile(NORMS, 50))
        of_counts = np.diff(np.log([1.0, *seen]))
        assert len(np.unique(of_counts.round(12))) > 45

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_norms_that_are_not_finite_are_above_any_clip_norm(self, bad):
        quantile = AdaptiveQuantileClip(0.5, 1.0, count_noise_multiplier=1e-9)
        norms = [bad] * 30 + [1.0] * 10
        seen = fit(private(2.0), quantile, norms=norms)
        np.testing.assert_allclose(seen, [2 * math.exp(0.25)], rtol=1e-5)

    @pytest.mark.parametrize("target", [1e-9, 1 - 1e-9])
    def test_the_clip_norm_stays_where_noise_is_exact(self, target):
        quantile = AdaptiveQuantileClip(target, 100.0, count_noise_multiplier=1e-9)
        norms = np.full(ROWS, 1.0 if target < 0.5 else 1e30)
        seen = fit(private(2.0), quantile, norms=norms, epochs=3)
        assert 1e-20 <= min(seen) <= max(seen) <= 1e20

    def test_the_count_is_paid_for(self):
        quantile = AdaptiveQuantileClip(0.5, count_noise_multiplier=3.0)
        model = private(noise_multiplier=1.5, model_options={})
        fit(model, quantile, batch_size=10, epochs=2)
        (segment,) = model.ledger.segments
        assert segment.steps == 8
        np.testing.assert_allclose(segment.noise_multiplier, folded(1.5, 3.0))
        assert segment.noise_multiplier <= folded(1.5, 3.0)
        without = model.ledger.__class__((PoissonSteps(8, 1.5, ROWS, 10),))
        assert model.epsilon(1e-3) > without.epsilon(1e-3)

    def test_groups_of_examples_move_a_count_by_a_whole(self):
        model = private(noise_multiplier=1.5, num_microbatches=5)
        fit(model, AdaptiveQuantileClip(0.5, count_noise_multiplier=3.0), batch_size=10)
        (segment,) = model.ledger.segments
        assert segment.examples_per_unit == 2
        np.testing.assert_allclose(segment.noise_multiplier, folded(1.5, 3.0) / 2)

    def test_a_budget_pays_for_it_too(self):
        model = private(noise_multiplier=1.5, model_options={})
        fit(
            model,
            AdaptiveQuantileClip(0.5, count_noise_multiplier=2.0),
            PrivacyBudget(1e-3, 2.0),
            batch_size=10,
            epochs=50,
        )
        assert model.epsilon(1e-3) <= 2.0
        z = model.ledger.segments[0].noise_multiplier
        one_more = model.ledger.add(PoissonSteps(1, z, ROWS, 10))
        assert one_more.epsilon(1e-3) > 2.0

    def test_the_log_says_what_keeps_epsilon(self, caplog):
        with caplog.at_level("INFO", "absl"):
            fit(private(noise_multiplier=1.0), AdaptiveQuantileClip(0.5))
        (message,) = (text for text in caplog.messages if "AdaptiveQuantile" in text)
        assert "noise_multiplier=1 counts" in message
        assert "counts as 0.995037" in message
        assert "noise_multiplier=1.00504 would" in message
        np.testing.assert_allclose(folded(1.00504, 10.0), 1.0, rtol=1e-5)

    def test_the_clip_norm_is_saved(self, tmp_path):
        model = private()
        last = fit(model, AdaptiveQuantileClip(0.5), epochs=5)[-1]
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert float(loaded.optimizer.l2_norm_clip) == last

    def test_train_on_batch_afterwards_costs_no_count(self):
        model = private(noise_multiplier=2.0)
        fit(model, AdaptiveQuantileClip(0.5))
        clip = float(model.optimizer.l2_norm_clip)
        model.train_on_batch(*rows())
        assert model.ledger.segments[-1] == UnamplifiedSteps(1, 2.0)
        assert float(model.optimizer.l2_norm_clip) == clip

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
        model = private(77.0)
        fit(model, median(), norms=norms)
        assert float(model.optimizer.l2_norm_clip) == pytest.approx(expected)

    @pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
    def test_however_steps_are_run(self, options):
        model = private(77.0, **options)
        fit(model, median(), norms=[0.1] * 10 + [0.7] * 30)
        assert float(model.optimizer.l2_norm_clip) == pytest.approx(0.75)

    def test_releases_now_and_then(self):
        model = private(77.0, model_options={})
        seen = fit(model, median(every=4), batch_size=4, epochs=1)
        changes = np.flatnonzero(np.diff([77.0, *seen]))
        assert set(changes) <= {0, 4, 8}
        assert 0 in changes
        assert seen[0] == seen[3]

    def test_the_histogram_is_paid_for_where_there_is_one(self):
        model = private(noise_multiplier=1.5, model_options={})
        fit(model, median(every=4, noise=6.304), batch_size=4)
        costly, plain = model.ledger.segments
        assert (costly.steps, plain.steps) == (3, 7)
        np.testing.assert_allclose(costly.noise_multiplier, folded(1.5, 6.304))
        np.testing.assert_allclose(plain.noise_multiplier, 1.5, rtol=1e-9)
        assert costly.noise_multiplier <= folded(1.5, 6.304)
        assert plain.noise_multiplier <= 1.5

    def test_a_pass_with_a_histogram_counts_with_it(self):
        model = private(noise_multiplier=1.5)
        fit(model, median(every=10, noise=3.0), batch_size=10, epochs=3)
        paid = {s.noise_multiplier: s.passes for s in model.ledger.segments}
        assert all(isinstance(s, ShuffledPasses) for s in model.ledger.segments)
        # Steps 0 and 10 of the 12 are in the first and the third pass.
        assert paid[min(paid)] == 2
        assert paid[max(paid)] == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("epochs", [1, 40])
    def test_a_budget_pays_for_it_too(self, epochs):
        model = private(noise_multiplier=1.5, model_options={})
        fit(
            model,
            median(every=5, noise=2.0),
            PrivacyBudget(1e-3, 2.0),
            batch_size=10,
            epochs=epochs,
        )
        assert model.epsilon(1e-3) <= 2.0
        if epochs > 1:
            one_more = model.ledger.add(PoissonSteps(1, folded(1.5, 2.0), ROWS, 10))
            assert one_more.epsilon(1e-3) > 2.0

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
        assert {type(segment) for segment in model.ledger.segments} == {
            UnamplifiedSteps
        }
        assert model.ledger.steps == 3

    def test_the_noise_of_the_counts_is_what_was_asked_for(self):
        """Two far away bins of nearly equal counts: noise decides between them."""
        callback = median(noise=20.0, edges=[0, 1.0, 2.0])
        norms = [0.5] * 55 + [1.5] * 45
        # All of the steps see the same rows.
        data, clips, model = (
            tf.data.Dataset.from_tensors(rows(norms)),
            Clips(),
            private(),
        )
        model.optimizer.expect_batch_size(100)
        model.fit(
            data.repeat(), steps_per_epoch=600, callbacks=[callback, clips], verbose=0
        )
        # The lower bin loses if Normal(10, 2 * 20**2) is negative.
        lost = np.mean(np.array(clips.seen) == 1.5)
        np.testing.assert_allclose(lost, 0.362, atol=0.08)

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
    model = private(noise_multiplier=8.0, model_options={})
    lower = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(
            model.optimizer, "noise_multiplier", 2.0
        )
    )
    fit(
        model,
        AdaptiveQuantileClip(0.5, count_noise_multiplier=20.0),
        PrivacyBudget(1e-3, 1.5),
        lower,
        batch_size=10,
        epochs=10,
    )
    assert 5 < model.ledger.steps < 40
    assert model.epsilon(1e-3) <= 1.5
    one_more = model.ledger.add(PoissonSteps(1, folded(2.0, 20.0), ROWS, 10))
    assert one_more.epsilon(1e-3) > 1.5
