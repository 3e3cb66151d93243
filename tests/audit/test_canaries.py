import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tfdp.audit import GradientCanaries
from tfdp.mechanisms import mechanism
from tfdp.mechanisms.mechanism import add_noise

DELTA = 1e-5
ROWS = 40


def private(inputs=600, noise_multiplier=1.0, *, clip=0.5, **options):
    model = keras.Sequential([keras.Input((inputs,)), layers.Dense(3)])
    model = tfdp.DPModel(model, **options)
    optimizer = tfdp.optimizers.DPSGD(
        0.1, l2_norm_clip=clip, noise_multiplier=noise_multiplier
    )
    model.compile(optimizer, "mse")
    return model


def data(inputs=600):
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, inputs)).astype("float32"), np.zeros((ROWS, 3))


def audited(model, canaries=1000, inputs=600, **options):
    audit = GradientCanaries(canaries)
    options = {"batch_size": ROWS, "epochs": 1} | options
    model.fit(*data(inputs), callbacks=[audit], verbose=0, **options)
    return audit


@pytest.mark.slow
def test_a_single_release_proves_half_of_epsilon_and_no_more():
    model = private()
    found = [audited(private()).epsilon_lower_bound(DELTA) for _ in range(3)]
    audited(model)
    epsilon = model.epsilon(DELTA)
    assert epsilon == pytest.approx(4.377, abs=0.01)
    assert 0.4 * epsilon < np.mean(found)
    assert max(found) < epsilon


@pytest.mark.slow
@pytest.mark.statistical
def test_less_noise_than_is_counted_is_found_out(monkeypatch):
    monkeypatch.setattr(
        mechanism,
        "add_noise",
        lambda clipped_sum, *, noise_multiplier, stream: add_noise(
            clipped_sum, noise_multiplier=noise_multiplier / 4, stream=stream
        ),
    )
    model = private()
    report = audited(model).report(DELTA)
    assert report.nonprivate_epsilon_lower_bound > model.epsilon(DELTA)
    assert not report.nonprivate_passed
    assert "MORE than its ledger says" in str(report).replace("\n", " ")


@pytest.mark.slow
@pytest.mark.statistical
def test_poisson_steps_prove_less_than_their_epsilon():
    model = private(noise_multiplier=0.6)
    audit = audited(model, batch_size=8, epochs=4)
    report = audit.report(DELTA)
    assert report.steps == 20
    assert 0.2 < audit.epsilon_lower_bound(DELTA) < model.epsilon(DELTA)
    assert report.epsilon == model.epsilon(DELTA)
    assert report.nonprivate_passed


@pytest.mark.slow
def test_canaries_take_part_as_often_as_rows_do():
    """Without noise and without a gradient of the rows the sums show them."""
    with pytest.warns(UserWarning, match="not private"):
        model = private(noise_multiplier=0.0, clip=2.0)
    before = model.get_weights()
    audit = GradientCanaries(1000)
    zeros = np.zeros((ROWS, 600), "float32"), np.zeros((ROWS, 3))
    model.fit(*zeros, batch_size=10, epochs=5, callbacks=[audit], verbose=0)
    moved = [
        np.abs(new - old).ravel()
        for new, old in zip(model.get_weights(), before, strict=True)
    ]
    # Each time by the learning rate times C over the divisor.
    times = np.concatenate(moved) / (0.1 * 2.0 / 10)
    times = np.round(times[audit._places])
    assert not times[~audit.inserted].any()
    assert 4.4 < times[audit.inserted].mean() < 5.6  # Of 20 steps.
    # Those on the biases give the rows gradients.
    on_kernel = audit._places < 1800
    np.testing.assert_allclose(audit.scores[on_kernel], times[on_kernel], atol=1e-3)


@pytest.mark.slow
def test_the_gradients_of_the_rows_stay_as_they_are():
    """The sum of a step moves by the canaries alone, each by C."""
    audit, seen = GradientCanaries(50), []
    audit.set_model(model := private(20))

    class Look(tfdp.callbacks.StepCallback):
        def nonprivate_step(self, step):
            seen.append(step.clipped_sum.gradients)

    x, y = data(20)
    model.fit(x, y, batch_size=ROWS, callbacks=[audit, Look()], verbose=0)
    [added] = [audit.added_to_sum(tf.constant(0.5))]
    assert [each.shape for each in added] == [each.shape for each in seen[0]]
    total = np.concatenate([np.ravel(each) for each in added])
    assert sorted(set(np.abs(total))) == [0.0, 0.5]
    assert np.count_nonzero(total) == audit.inserted.sum()


@pytest.mark.slow
def test_several_fits_go_on_with_the_same_canaries():
    model, audit = private(), GradientCanaries(100)
    for _ in range(2):
        model.fit(*data(), batch_size=ROWS, callbacks=[audit], verbose=0)
    assert audit.report(DELTA).steps == 2
    with pytest.raises(ValueError, match="stay in one model"):
        private(30).fit(*data(30), batch_size=ROWS, callbacks=[audit], verbose=0)


@pytest.mark.slow
def test_a_report_prints_and_is_json():
    report = audited(private(), 100).report(1e-3, confidence=0.9)
    fields = json.loads(json.dumps(report.to_dict()))
    assert fields["audit"] == "gradient canaries"
    assert (fields["canaries"], fields["guesses"], fields["steps"]) == (100, 20, 1)
    bound = fields["nonprivate_epsilon_lower_bound"]
    assert f"above {bound:.3f}" in str(report).replace("\n", " ")
    assert fields["nonprivate_passed"] is report.nonprivate_passed
    text = str(report).replace("\n", " ")
    assert "not one to publish" in text
    assert "computed from private rows, and is private: not to be published" in text


@pytest.mark.parametrize("sampling", ["shuffle", "balls_in_bins", "cyclic_poisson"])
def test_passes_are_refused(sampling):
    model = private(sampling=sampling)
    with pytest.raises(ValueError, match="sampling='poisson'"):
        audited(model, batch_size=10)
    assert model.epsilon(DELTA) == 0


def test_a_small_model_and_replicas_are_refused():
    with pytest.raises(ValueError, match=r"GradientCanaries\(63\)"):
        audited(private(20), 64, 20)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = private()
    with pytest.raises(ValueError, match="one device"):
        audited(model)


@pytest.mark.parametrize(
    ("canaries", "error"), [(1, ValueError), (0, ValueError), ("many", TypeError)]
)
def test_bad_numbers_are_refused(canaries, error):
    with pytest.raises(error, match="canaries"):
        GradientCanaries(canaries)


def test_a_report_needs_a_training():
    with pytest.raises(RuntimeError, match="callbacks="):
        GradientCanaries(10).report(DELTA)
