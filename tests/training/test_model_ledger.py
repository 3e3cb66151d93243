"""What counts in the ledger of a model, whoever takes the steps."""

import keras
import numpy as np
import pytest

import tfdp
from tests.small import (
    ROWS,
    data,
    logits_loss,
    network,
    noiseless,
    optimizer,
    private,
)
from tfdp.accounting import PoissonSteps
from tfdp.runs import histories


def test_an_optimizer_serves_one_model_only():
    opt = optimizer()
    private(opt=opt)
    with pytest.raises(ValueError, match="another private model"):
        private(opt=opt)


@pytest.mark.slow
def test_a_replaced_optimizer_counts_in_the_models_ledger():
    x, y = data(20)
    model = private(run_eagerly=True)
    first = model.optimizer
    model.fit(x, y, batch_size=5, verbose=0)
    other = optimizer()
    model.optimizer = other
    model.fit(x, y, batch_size=5, verbose=0)
    assert model.ledger.steps == other.ledger.steps == 8
    model.train_on_batch(x, y)
    assert int(other.iterations) == 5
    assert int(first.iterations) == 4
    model.optimizer = first
    model.fit(x, y, batch_size=5, verbose=0)
    assert int(other.iterations) == 5
    assert int(first.iterations) == 8
    assert model.ledger.steps == 13


def test_a_file_has_the_ledger(tmp_path):
    model = private(run_eagerly=True)
    x, y = data(20)
    model.fit(x, y, batch_size=5, verbose=0)
    model.save(tmp_path / "model.keras")
    # Another process knows no weights that could tell.
    histories._known_values.clear()
    histories._variables.clear()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.ledger == model.ledger
    assert loaded.ledger.steps == 4


@pytest.mark.slow
def test_other_models_with_the_same_weights_share_the_ledger():
    x, y = data(20)
    model = private(run_eagerly=True)
    model.fit(x, y, batch_size=5, verbose=0)
    inner = model.model
    alias = private(keras.Model(inner.inputs[0], inner.outputs[0]), run_eagerly=True)
    assert alias.ledger.steps == 4
    alias.fit(x, y, batch_size=5, verbose=0)
    assert model.ledger.steps == 8


def test_values_assigned_past_the_setters_are_refused():
    model = private()
    for name, value in (
        ("noise_multiplier", -1.0),
        ("noise_multiplier", np.nan),
        ("l2_norm_clip", np.inf),
    ):
        variable = getattr(model.optimizer, name)
        before = float(variable)
        variable.assign(value)
        with pytest.raises(ValueError, match="Received"):
            model.fit(*data(), batch_size=4, verbose=0)
        variable.assign(before)
    assert model.ledger.steps == 0


@pytest.mark.slow
def test_seeds_are_remembered():
    x, y = data(20)
    with pytest.warns(UserWarning, match="noise_seed=1"):
        opt = optimizer(noise_seed=1, num_microbatches=5)
    model = private(opt=opt, run_eagerly=True)
    model.fit(x, y, batch_size=5, verbose=0)
    # Microbatches of one example keep the row of Poisson draws.
    assert model.ledger.segments == (PoissonSteps(4, 1.0, 20, 5),)
    assert model.ledger.noise_seed_fixed
    assert not model.ledger.sampling_seed_fixed


@pytest.mark.slow
def test_a_seeded_sampler_goes_on_after_a_restart(tmp_path):
    x, y = data(20)

    class Spy(tfdp.data.PoissonDataset):
        drawn: list

        def __getitem__(self, index):
            batch = super().__getitem__(index)
            self.drawn.append(batch[0].tobytes())
            return batch

    def sampler():
        with pytest.warns(UserWarning, match="seed"):
            spy = Spy(x, y, expected_batch_size=10, seed=4)
        spy.drawn = []
        return spy

    model = private(run_eagerly=True)
    first = sampler()
    model.fit(first, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    second = sampler()
    loaded.fit(second, verbose=0)
    # The adapter looks at two batches of the epoch it starts in.
    assert not set(second.drawn[2:]) & set(first.drawn[2:])


@pytest.mark.slow
def test_epochs_of_secret_draws_are_not_remembered():
    dataset = tfdp.data.PoissonDataset(*data(20), expected_batch_size=10)
    model = private(run_eagerly=True)
    model.fit(dataset, verbose=0)
    assert dataset.epoch > 1
    assert model.recorder.all_sampled_epochs == 0


def test_a_step_of_ones_own_inside_of_fit_is_no_draw():
    x, y = data()

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.train_step((x[:1], y[:1]))

    model = private(network(), noiseless())
    options = {"batch_size": ROWS, "steps_per_epoch": 2, "verbose": 0}
    model.fit(x, y, callbacks=[Steps()], **options)
    found = {type(s.scheme).__name__: s.count for s in model.ledger.segments}
    assert found == {"Poisson": 2, "Unknown": 2}


class Twice(tfdp.DPModel):
    """Takes two steps of each batch."""

    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


def test_steps_of_a_subclass_are_no_draws():
    x, y = data()
    model = Twice(network())
    model.compile(noiseless(), logits_loss())
    model.fit(x, y, batch_size=ROWS, steps_per_epoch=2, verbose=0)
    found = {type(s.scheme).__name__: s.count for s in model.ledger.segments}
    assert found == {"Unknown": 4}


@pytest.mark.slow
def test_the_statement_begins_with_what_plain_keras_has_trained():
    x, y = data()
    model = private()
    model.fit(x, y, batch_size=4, verbose=0)
    assert model.privacy_statement(1e-3).startswith("This training is")
    model.model.compile("sgd", "mse")
    assert model.privacy_statement(1e-3).startswith("This training is")
    model.model.fit(x, np.zeros((len(x), 2)), batch_size=len(x), epochs=3, verbose=0)
    text = model.privacy_statement(1e-3)
    assert text.startswith("Warning: plain Keras has taken 3 steps")
    assert "\n\nThis training is" in text


def trained_by_plain_keras(model=None):
    """A private model, and three plain steps on top."""
    x, y = data()
    model = model or private()
    model.fit(x, y, batch_size=4, verbose=0)
    model.model.compile("sgd", "mse")
    model.model.fit(x, np.zeros((len(x), 2)), batch_size=len(x), epochs=3, verbose=0)
    return model


def plain_steps(model):
    return model.privacy_report(1e-3)["plain_keras_steps"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_plain_steps_are_saved(tmp_path):
    model = trained_by_plain_keras()
    model.save(tmp_path / "model.keras")
    assert plain_steps(keras.saving.load_model(tmp_path / "model.keras")) == 3
    model.save_weights(tmp_path / "model.weights.h5")
    model.load_weights(tmp_path / "model.weights.h5")
    assert plain_steps(model) == 3


def test_plain_steps_are_known_to_another_private_model():
    model = trained_by_plain_keras()
    again = tfdp.DPModel(model.model)
    assert plain_steps(model) == plain_steps(again) == 3


class WithOwnLoss(keras.Sequential):
    """Has a loss of its own, which Keras asks a compiled model for."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return keras.ops.mean(y_pred**2)


def test_compile_remembers_plain_steps():
    inner = WithOwnLoss([keras.Input((3,)), keras.layers.Dense(2)])
    model = tfdp.DPModel(inner)
    model.compile(optimizer())
    trained_by_plain_keras(model)
    model.compile(optimizer())
    assert plain_steps(model) == 3


def test_plain_steps_before_private_ones_are_a_pre_training():
    x, _ = data()
    public = network()
    public.compile("sgd", "mse")
    public.fit(x, np.zeros((len(x), 2)), verbose=0)
    assert plain_steps(tfdp.DPModel(public)) == 0
