"""The divergence of a posterior from its prior, in two parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import integrate, stats

import tfdp
from tfdp.losses.regularizers import GaussianDivergence, check_number_of_examples
from tfdp.variational import BayesianLogisticRegression, VariationalDense

CROSSENTROPY = keras.losses.BinaryCrossentropy(from_logits=True)


def divergence(part, **options):
    options = {"prior_scale": 0.7, "number_of_examples": 10} | options
    return GaussianDivergence(part, **options)


def divergence_by_integration(mean, scale, prior_scale):
    posterior, prior = stats.norm(mean, scale), stats.norm(0, prior_scale)
    return integrate.quad(
        lambda w: posterior.pdf(w) * (posterior.logpdf(w) - prior.logpdf(w)),
        mean - 12 * scale,
        mean + 12 * scale,
    )[0]


@pytest.mark.parametrize(("mean", "scale"), [(0.0, 0.7), (1.3, 0.2), (-0.4, 2.5)])
def test_both_parts_make_up_the_whole(mean, scale):
    rho = np.log(np.expm1(scale))
    parts = divergence("mean")(np.array([mean])) + divergence("scale")(np.array([rho]))
    expected = divergence_by_integration(mean, scale, 0.7) / 10
    np.testing.assert_allclose(parts, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("rho", [-20.0, -120.0, -1000.0, 50.0])
def test_scales_of_all_sizes_have_a_finite_slope(rho):
    value = tf.constant([rho])
    with tf.GradientTape() as tape:
        tape.watch(value)
        result = divergence("scale", prior_scale=1.0)(value)
    slope = tape.gradient(result, value).numpy()
    # Minus one for the logarithm, and the square's.
    expected = (-1 if rho < 0 else rho - 1 / rho) / 10
    np.testing.assert_allclose(slope, [expected], rtol=1e-5)
    assert np.isfinite(result)


@pytest.mark.slow
def test_the_logged_loss_is_minus_the_bound_over_n(rng):
    """With a posterior of all but no width: the likelihood's part is known."""
    x = rng.normal(size=(50, 3)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    model = BayesianLogisticRegression(
        number_of_examples=50, prior_scale=2.0, initial_scale=1e-3
    )
    model.compile(loss=CROSSENTROPY)
    loss = model.evaluate(x, y, verbose=0)
    of_each = np.mean(CROSSENTROPY(y, model(x)))
    of_prior = 4 * divergence_by_integration(0, 1e-3, 2.0) / 50
    np.testing.assert_allclose(loss, of_each + of_prior, rtol=1e-5)


# ------------------------------------------------- what all of it in each loss would be


def private(model, loss=CROSSENTROPY, **options):
    model = tfdp.DPModel(model, **options)
    model.compile(
        tfdp.optimizers.DPSGD(
            0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=10
        ),
        loss=loss,
    )
    return model


@pytest.fixture
def rows(rng):
    x = rng.normal(size=(40, 3)).astype("float32")
    return x, (x[:, :1] > 0).astype("float32")


@pytest.mark.parametrize("kl", ["inside", "outside"])
@pytest.mark.parametrize("number", [2, 39, 41])
def test_another_number_than_that_of_the_data_is_refused(number, kl):
    model = BayesianLogisticRegression(number_of_examples=number, kl=kl)
    model.build((None, 3))
    with pytest.raises(ValueError, match="Use `number_of_examples=40`"):
        check_number_of_examples(model.trainable_variables, 40)


@pytest.mark.slow
def test_fit_refuses_another_number_before_the_first_step(rows):
    model = BayesianLogisticRegression(number_of_examples=39)
    model.build((None, 3))
    before = model.get_weights()
    model = private(model)
    with pytest.raises(ValueError, match="Use `number_of_examples=40`") as refusal:
        model.fit(*rows, batch_size=10, verbose=0)
    assert "logit/kernel_rho" in str(refusal.value)
    for left, right in zip(before, model.model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)
    assert model.ledger.segments == ()


def test_batches_of_more_examples_than_there_are_are_refused(rows):
    model = private(BayesianLogisticRegression(number_of_examples=39))
    model.build((None, 3))
    with pytest.raises(ValueError, match="40 examples or more"):
        model.train_on_batch(*rows)
    assert model.ledger.segments == ()


def test_all_of_it_for_each_example_is_refused():
    with pytest.raises(ValueError, match="would have the whole divergence"):
        BayesianLogisticRegression(number_of_examples=1)


def test_loops_of_ones_own_refuse_a_loss_with_the_divergence_in_it(rows):
    model = BayesianLogisticRegression(number_of_examples=40)
    model.build((None, 3))

    def loss(y, logits):
        likelihood = keras.losses.binary_crossentropy(y, logits, from_logits=True)
        return likelihood + sum(model.losses)

    with pytest.raises(ValueError, match="KL / N for an example"):
        tfdp.clipped_gradients(model, loss, *rows, l2_norm_clip=1.0)


def test_a_loss_with_the_divergence_in_it_is_refused(rows):
    model = BayesianLogisticRegression(number_of_examples=40)
    model.build((None, 3))

    def negative_bound(y, logits):
        return keras.losses.binary_crossentropy(y, logits, from_logits=True) + sum(
            variable.regularizer(variable) * 40 for variable in model.trainable_weights
        )

    with pytest.raises(ValueError, match="KL / N for an example") as refusal:
        private(model, negative_bound).fit(*rows, batch_size=10, verbose=0)
    assert "`bayesian_logistic_regression/logit/kernel_mean`" in str(refusal.value)


def test_a_compute_loss_with_the_divergence_in_it_is_refused(rows):
    class Bound(BayesianLogisticRegression):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            likelihood = CROSSENTROPY(y, y_pred)
            whole = divergence("mean", number_of_examples=2)
            return likelihood + whole(self.logit.kernel_mean)

    model = Bound(number_of_examples=40)
    with pytest.raises(ValueError, match="The loss must depend on outputs"):
        private(model, None).fit(*rows, batch_size=10, verbose=0)


@pytest.mark.slow
def test_losses_of_other_variables_are_not_refused(rows):
    """What has no posterior may be in a loss."""
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(2, name="hidden")
    outputs = VariationalDense(1, number_of_examples=40)(hidden(inputs))
    model = keras.Model(inputs, outputs)

    def loss(y, logits):
        penalty = keras.ops.sum(keras.ops.square(hidden.kernel))
        return keras.losses.binary_crossentropy(y, logits, from_logits=True) + penalty

    model = private(model, loss, engine="vectorized")
    model.run_eagerly = True
    model.fit(*rows, batch_size=10, steps_per_epoch=1, verbose=0)


@pytest.mark.parametrize("value", [0, -1.0, np.nan, np.inf])
def test_priors_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match="`prior_scale` must be positive"):
        divergence("mean", prior_scale=value)


def test_its_arguments_are_saved():
    original = divergence("scale", kl="inside")
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(original)
    )
    assert again.get_config() == original.get_config()
