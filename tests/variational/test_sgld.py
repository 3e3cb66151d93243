"""Langevin dynamics is private SGD at a temperature."""

import keras
import numpy as np
import pytest

import tfdp
from tfdp.variational import dp_sgld

OPTIONS = {"number_of_examples": 100, "expected_batch_size": 100, "l2_norm_clip": 50.0}


def test_the_noise_is_that_of_the_temperature():
    optimizer = dp_sgld(
        1e-3,
        number_of_examples=500,
        expected_batch_size=50,
        l2_norm_clip=2.0,
        temperature=0.5,
    )
    assert isinstance(optimizer, tfdp.optimizers.DPSGD)
    expected = np.sqrt(2 * 0.5 / 1e-3) * 50 / (500 * 2.0)
    assert float(optimizer.noise_multiplier) == pytest.approx(expected)
    assert float(optimizer.learning_rate) == pytest.approx(1e-3 * 500)
    # What the weights move by: sqrt(2 eta T).
    step = 0.5 * expected * 2.0 / 50
    assert step == pytest.approx(np.sqrt(2 * 1e-3 * 0.5))


@pytest.mark.slow
def test_it_samples_a_gaussian_posterior(rng):
    """Many chains at once: each column of y has a mean of its own to find."""
    y = rng.normal(size=(100, 400)).astype("float32")
    model = keras.Sequential([
        keras.Input((1,)),
        keras.layers.Dense(
            400, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.5 / 100)
        ),
    ])
    private = tfdp.DPModel(model)

    def half_squares(y, outputs):
        return keras.ops.sum(keras.ops.square(y - outputs), axis=-1) / 2

    private.compile(
        dp_sgld(5e-4, temperature=0.25, **OPTIONS),
        loss=half_squares,
        steps_per_execution=50,
    )
    private.fit(np.ones((100, 1)), y, batch_size=100, steps_per_epoch=150, verbose=0)
    kernel = model.get_weights()[0][0]
    # A precision of one for each row and of one for the prior.
    difference = kernel - y.sum(0) / 101
    # Of the steps as they are, which are not infinitely small.
    variance = 0.25 / 101 / (1 - 5e-4 * 101 / 2)
    np.testing.assert_allclose(np.mean(np.square(difference)), variance, rtol=0.25)
    assert abs(difference.mean()) < 5 * np.sqrt(variance / 400)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("step_size", 0.0, ValueError),
        ("step_size", np.nan, ValueError),
        ("temperature", -1.0, ValueError),
        ("temperature", np.inf, ValueError),
        ("l2_norm_clip", 0, ValueError),
        ("number_of_examples", 0, ValueError),
        ("expected_batch_size", 1.5, ValueError),
        ("temperature", None, TypeError),
    ],
)
def test_arguments_out_of_range_are_refused(argument, value, error):
    options = {"step_size": 1e-3, **OPTIONS} | {argument: value}
    with pytest.raises(error, match=f"`{argument}` must be"):
        dp_sgld(**options)
