"""The posterior that averages those of the steps before."""

import keras
import numpy as np
import pytest

import tfdp
from tfdp.variational import (
    AveragedPosterior,
    BayesianLogisticRegression,
    VariationalDense,
    posterior,
)

ROWS, STEPS = 40, 10


class Seen(keras.callbacks.Callback):
    """Keeps the posterior after each step."""

    def __init__(self, name):
        super().__init__()
        self.name, self.found = name, []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(posterior(self.model)[self.name])


def fitted(rng, *callbacks, wrap=tfdp.DPModel, steps_per_execution=1, **options):
    x = rng.normal(size=(ROWS, 3)).astype("float32")
    model = BayesianLogisticRegression(number_of_examples=ROWS, initial_scale=1.0)
    trained = wrap(model)
    optimizer = keras.optimizers.Adam(0.1)
    if isinstance(trained, tfdp.DPModel):
        optimizer = tfdp.optimizers.DPOptimizer(
            optimizer, l2_norm_clip=1.0, noise_multiplier=1.0
        )
    trained.compile(
        optimizer,
        keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
    )
    options = {"batch_size": 8, "epochs": 2, "verbose": 0} | options
    trained.fit(x, (x[:, :1] > 0).astype("float32"), callbacks=callbacks, **options)
    return trained


@pytest.mark.parametrize(
    "wrap", [tfdp.DPModel, pytest.param(lambda model: model, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("share", "first"),
    [
        (0.5, 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 0), (0.2, 8)]),
    ],
)
def test_moments_are_those_of_the_mixture_of_the_last_steps(rng, share, first, wrap):
    seen = Seen("logit/kernel")
    trained = fitted(rng, seen, AveragedPosterior(share), wrap=wrap)
    assert len(seen.found) == STEPS
    means, scales = (
        np.array([getattr(each, part) for each in seen.found[first:]], float)
        for part in ("mean", "scale")
    )
    found = posterior(trained)["logit/kernel"]
    np.testing.assert_allclose(found.mean, means.mean(0), rtol=1e-5)
    variance = (scales**2).mean(0) + means.var(0)
    np.testing.assert_allclose(found.scale, np.sqrt(variance), rtol=1e-5)


@pytest.mark.slow
def test_each_fit_begins_anew(rng):
    averaged, seen = AveragedPosterior(), Seen("logit/bias")
    trained = fitted(rng, averaged)
    x = rng.normal(size=(ROWS, 3)).astype("float32")
    trained.fit(
        *(x, np.ones((ROWS, 1), "float32")),
        batch_size=8,
        verbose=0,
        callbacks=[seen, averaged],
    )
    # Of five steps the last three: half is rounded up.
    means = np.array([each.mean for each in seen.found[2:]])
    found = posterior(trained)["logit/bias"]
    np.testing.assert_allclose(found.mean, means.mean(0), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"initial_epoch": 1, "epochs": 3}, {}])
@pytest.mark.parametrize(
    "steps_per_execution", [pytest.param(1, marks=pytest.mark.slow), 5]
)
def test_steps_are_those_that_are_trained(rng, options, steps_per_execution):
    seen = Seen("logit/kernel")
    trained = fitted(
        *(rng, seen, AveragedPosterior()),
        steps_per_execution=steps_per_execution,
        **options,
    )
    # The second half of two epochs, of each execution its last step.
    counted = np.array([each.mean for each in seen.found[5 // steps_per_execution :]])
    found = posterior(trained)["logit/kernel"]
    np.testing.assert_allclose(found.mean, counted.mean(0), rtol=1e-5)


@pytest.mark.slow
def test_a_training_that_ends_early_keeps_its_last_posterior(rng, caplog):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    seen = Seen("logit/kernel")
    trained = fitted(rng, seen, Stop(), AveragedPosterior(0.1))
    found = posterior(trained)["logit/kernel"]
    np.testing.assert_array_equal(found.mean, seen.found[-1].mean)
    assert "ended before the last 0.1 of its planned steps" in caplog.text


@pytest.mark.slow
def test_the_ledger_is_that_of_the_training(rng):
    with_it, without = (
        fitted(rng, *callbacks) for callbacks in ([AveragedPosterior()], [])
    )
    assert with_it.ledger.steps == STEPS
    assert with_it.epsilon(1e-3) == without.epsilon(1e-3)


@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 30.0, 200.0])
def test_scales_of_any_size_are_kept(scale):
    model = keras.Sequential([
        keras.Input((2,)),
        VariationalDense(1, number_of_examples=10, initial_scale=scale, name="one"),
    ])
    averaged = AveragedPosterior(1)
    averaged.set_model(model)
    averaged.set_params({"steps": 1, "epochs": 1})
    averaged.on_train_begin()
    averaged.on_train_batch_end(0)
    averaged.on_train_end()
    np.testing.assert_allclose(posterior(model)["one/kernel"].scale, scale, rtol=1e-4)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, np.nan, np.inf])
def test_a_share_is_positive_and_at_most_one(share):
    with pytest.raises(ValueError, match="share"):
        AveragedPosterior(share)


def test_a_share_is_a_number():
    with pytest.raises(TypeError, match="share"):
        AveragedPosterior("half")


def test_a_model_without_posterior_is_refused_before_training(rng):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    before = model.get_weights()
    model.compile("sgd", "mse")
    x = rng.normal(size=(8, 3))
    with pytest.raises(ValueError, match="variational layer"):
        model.fit(x, x[:, :1], verbose=0, callbacks=[AveragedPosterior()])
    for left, right in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)
