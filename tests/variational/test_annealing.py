"""The weight of the divergence: what steps are taken with it, and that it is kept."""

import itertools

import keras
import numpy as np
import pytest
from keras.optimizers import schedules

import tfdp
from tfdp.losses.regularizers import gradient_of
from tfdp.variational import KLAnnealing, VariationalDense

ROWS, BATCH = 40, 10


def plain(model):
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def private(model, **options):
    """Examples add nothing, and the noise is as good as none."""
    model = tfdp.DPModel(model, sampling="shuffle")
    model.compile(
        tfdp.optimizers.DPSGD(0.5, l2_norm_clip=1e-9, noise_multiplier=1.0),
        "mse",
        **options,
    )
    return model


def network(**options):
    options = {"number_of_examples": ROWS, "prior_scale": 0.5} | options
    return keras.Sequential([
        keras.Input((2,)),
        VariationalDense(3, name="one", **options),
        VariationalDense(1, name="two", use_bias=False, **options),
    ])


def data():
    """Rows of zeros teach the first layer nothing but its bias."""
    return np.zeros((ROWS, 2), "float32"), np.zeros((ROWS, 1), "float32")


def fit(model, *callbacks, **options):
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0} | options
    return model.fit(*data(), callbacks=callbacks, **options)


class Kernels(keras.callbacks.Callback):
    """Keeps the first layer's kernel before and after each step."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.seen = layer, [layer.kernel_mean.numpy()]

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.layer.kernel_mean.numpy())


SCHEDULES = {
    "steps": (4, [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]),
    "keras": (schedules.PiecewiseConstantDecay([2], [0.5, 1.0]), [0.5] * 3 + [1] * 5),
    "function": (lambda step: min(1.0, 0.4 * step), [0, 0.4, 0.8, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("steps", plain),
        ("steps", private),
        pytest.param("keras", private, marks=pytest.mark.slow),
        pytest.param("function", plain, marks=pytest.mark.slow),
    ],
)
def test_each_step_has_the_pull_of_the_prior_times_its_weight(wrap, name):
    schedule, weights = SCHEDULES[name]
    model = network()
    layer = model.layers[0]
    kernels = Kernels(layer)
    model = wrap(model)
    history = fit(model, KLAnnealing(schedule), kernels).history
    steps = zip(itertools.pairwise(kernels.seen), weights, strict=True)
    for (before, after), weight in steps:
        # Of mu^2 / (2 prior_scale^2 N), at a learning rate of 0.5.
        expected = before * (1 - 0.5 * weight / 0.5**2 / ROWS)
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-7)
    assert history["kl_weight"] == pytest.approx([weights[3], weights[7]])
    assert layer.kl_weight.numpy() == 1


@pytest.mark.slow
def test_divergences_that_are_clipped_rise_too():
    """Alone in an example's loss, each counts in full, or what is clipped of it."""
    model = network(kl="inside", draws="shared")
    model.layers[1].trainable = False
    x, y = data()
    x[:] = 1.0
    for variable in model.layers[1].weights:
        variable.assign(0 * variable - (20 if "rho" in variable.path else 0))
    options = {"l2_norm_clip": 0.02, "engine": "bookkeeping"}
    norms = {}
    for weight in (0.0, 0.25, 1.0):
        model.layers[0].kl_weight.assign(weight)
        found = tfdp.clipped_gradients(model, "mse", x[:4], y[:4], **options)
        norms[weight] = found.norms.numpy()
        length = np.sqrt(sum(np.sum(np.square(g)) for g in found.gradients))
        assert length <= 4 * 0.02 * (1 + 1e-6)
        vectorized = tfdp.clipped_gradients(
            model, "mse", x[:4], y[:4], **(options | {"engine": "vectorized"})
        )
        np.testing.assert_allclose(
            vectorized.norms, norms[weight], rtol=1e-4, atol=1e-6
        )
    np.testing.assert_allclose(norms[0.0], 0, atol=1e-6)
    np.testing.assert_allclose(norms[0.25], norms[1.0] / 4, rtol=1e-4)
    assert norms[1.0][0] > 0.02


@pytest.mark.slow
def test_the_logged_loss_has_the_weight_in_it():
    model = plain(network(initial_scale=1e-6))
    fit(model, KLAnnealing(lambda _: 0.5), epochs=1)
    full = sum(float(v.regularizer(v)) for v in model.trainable_variables) / 0.5
    for weight in (0.0, 0.5, 1.0):
        for layer in model.layers:
            layer.kl_weight.assign(weight)
        of_rows = float(np.mean(np.square(model(data()[0]))))
        loss = model.evaluate(*data(), verbose=0)
        np.testing.assert_allclose(loss, of_rows + weight * full, rtol=1e-5)


@pytest.mark.slow
def test_it_costs_no_privacy():
    with_it, without = (private(network()) for _ in range(2))
    fit(with_it, KLAnnealing(4))
    fit(without)
    assert with_it.epsilon(1e-3) == without.epsilon(1e-3)
    assert with_it.ledger.segments == without.ledger.segments
    assert len(with_it.model.weights) == len(with_it.model.trainable_weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights_only", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_the_weight_is_saved_and_a_training_goes_on(tmp_path, weights_only):
    model = private(network())
    fit(model, KLAnnealing(16))
    assert model.model.layers[0].kl_weight.numpy() == pytest.approx(7 / 16)
    if weights_only:
        model.save_weights(tmp_path / "saved.weights.h5")
        again = private(network())
        again.load_weights(tmp_path / "saved.weights.h5")
    else:
        model.save(tmp_path / "saved.keras")
        again = keras.saving.load_model(tmp_path / "saved.keras")
    layer = again.model.layers[0]
    assert layer.kl_weight.numpy() == pytest.approx(7 / 16)
    expected = gradient_of(
        model.model.layers[0].kernel_mean.regularizer, layer.kernel_mean
    )
    found = gradient_of(layer.kernel_mean.regularizer, layer.kernel_mean)
    np.testing.assert_allclose(found, expected)
    history = fit(again, KLAnnealing(16)).history
    assert history["kl_weight"] == pytest.approx([11 / 16, 15 / 16])


def test_files_without_a_weight_are_of_a_whole_divergence():
    layer = network().layers[0]
    store = {}
    layer.save_own_variables(store)
    del store["kl_weight"]
    layer.kl_weight.assign(0.5)
    layer.load_own_variables(store)
    assert layer.kl_weight.numpy() == 1


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [plain, private])
def test_a_model_that_is_built_by_its_first_batch(wrap):
    model = keras.Sequential([VariationalDense(1, number_of_examples=ROWS)])
    history = fit(wrap(model), KLAnnealing(8)).history
    assert history["kl_weight"] == pytest.approx([3 / 8, 7 / 8])


@pytest.mark.slow
def test_several_steps_at_once_have_the_weight_of_the_first():
    history = fit(private(network(), steps_per_execution=2), KLAnnealing(8)).history
    assert history["kl_weight"] == pytest.approx([2 / 8, 6 / 8])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "is_said"), [(8, True), (4, False)])
def test_a_training_that_ends_with_another_weight_says_so(schedule, is_said, caplog):
    fit(plain(network()), KLAnnealing(schedule))
    assert ("must count 1 / N in the end" in caplog.text) == is_said


@pytest.mark.parametrize("value", [0, -3, 2.5, np.nan, np.inf])
def test_numbers_of_steps_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match=r"`schedule` must be.*KLAnnealing\(1000\)"):
        KLAnnealing(value)


@pytest.mark.parametrize("value", [None, True, "linear", [1]])
def test_what_is_no_schedule_is_refused(value):
    with pytest.raises(TypeError, match="`schedule` must be"):
        KLAnnealing(value)


@pytest.mark.parametrize("wrap", [plain, private])
@pytest.mark.parametrize("value", [-0.1, np.nan, np.inf])
def test_weights_out_of_range_are_refused_before_the_first_step(wrap, value):
    model = network()
    before = model.get_weights()
    trained = wrap(model)
    with pytest.raises(ValueError, match=r"`schedule\(7\)` must be at least 0"):
        fit(trained, KLAnnealing(lambda step: value if step == 7 else 1.0))
    for left, right in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)
    assert model.layers[0].kl_weight.numpy() == 1


def test_a_weight_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="`schedule` must be a number"):
        fit(plain(network()), KLAnnealing(lambda _: "half"))


def test_models_without_a_posterior_are_refused():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="must have a variational layer"):
        fit(plain(model), KLAnnealing(4))


def test_data_of_unknown_length_are_refused():
    def rows():
        while True:
            yield data()

    with pytest.raises(ValueError, match="how many steps"):
        plain(network()).fit(
            rows(), shuffle=False, verbose=0, callbacks=[KLAnnealing(4)]
        )


class BringsWeight(keras.callbacks.Callback):
    """Sets the weight after `KLAnnealing` began, as a backup does."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.seen = layer, []

    def on_train_begin(self, logs=None):
        self.layer.kl_weight.assign(0.25)

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.layer.kl_weight.numpy()))


@pytest.mark.slow
def test_a_weight_that_a_backup_brings_is_replaced():
    model = plain(network())
    brings = BringsWeight(model.layers[0])
    fit(model, KLAnnealing(lambda step: 1.0), brings)
    assert set(brings.seen) == {1.0}


@pytest.mark.slow
def test_a_fit_without_steps_leaves_the_weight():
    model = plain(network())
    fit(model, KLAnnealing(4))
    fit(model, KLAnnealing(4), initial_epoch=2)
    assert model.layers[0].kl_weight.numpy() == 1.0
