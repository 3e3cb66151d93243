"""What processes must agree on before they train together, and errors on the way."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.distribute.cases import network, one_device_scope, optimizer
from tfdp.accounting import Ledger
from tfdp.data.training_data import training_data
from tfdp.distribute.replicas import ONE_DEVICE, Replicas
from tfdp.distribute.shares import DIFFERENT_STEPS
from tfdp.distribute.workers import agree_on_training, check_same_model, lost_workers

pytestmark = pytest.mark.keras_private


class Two(Replicas):
    """This process and another one, which says the same but for some words."""

    number = processes = 2

    def __init__(self, **instead):
        super().__init__()
        object.__setattr__(self, "instead", instead)

    def texts_of_all(self, text):
        other = text
        for words, others in self.instead.items():
            other = other.replace(words, others)
        return [text, other]


def agree(replicas, journals=(), epochs=2):
    private = tfdp.DPModel(network())
    private.compile(optimizer(), "mse")
    data = training_data(
        np.zeros((10, 2)), np.zeros(10), None, batch_size=5, steps_per_epoch=None,
        shuffle=True, sampling="poisson",
    )  # fmt: skip
    recorder = private.recorder
    agree_on_training(
        replicas, recorder, private.optimizer, data, range(epochs), list(journals)
    )
    return recorder


# ---------------------------------------------------------------------- agreements


def test_processes_that_do_the_same_may_train():
    agree(Two())
    agree(ONE_DEVICE)
    check_same_model(Two(), [keras.Variable(1.0)], {"first epoch": 0}, Ledger())


def test_another_number_of_epochs_is_refused():
    with pytest.raises(ValueError, match=r"epochs=\['0 to 2', '0 to 3'\]\. Where"):
        agree(Two(**{"0 to 2": "0 to 3"}))


def test_one_folder_for_two_backups_is_refused(tmp_path):
    with pytest.raises(ValueError, match="directory of its own"):
        agree(Two(), [tmp_path / "worker_0"])
    agree(Two(worker_0="worker_1"), [tmp_path / "worker_0"])


def test_the_run_of_processes_gets_one_name():
    private = tfdp.DPModel(network())
    before = private.recorder.run
    assert agree(Two()).run != before
    # As when the other process has counted on its own.
    recorder = agree(Two(**{'"runs": {}': '"runs":  {}'}))
    assert len(recorder.run) == len(before)


@pytest.mark.parametrize(
    ("facts", "other", "message"),
    [
        ({"first epoch": 7}, {"7": "8"}, r"first epoch=\[7, 8\]"),
        ({"steps": 1}, {"checksum of the ledger": "x"}, None),
    ],
)
def test_other_facts_of_the_model_are_refused(facts, other, message):
    error = KeyError if message is None else ValueError
    with pytest.raises(error, match=message):
        check_same_model(Two(**other), [], facts, Ledger())


def test_other_weights_are_refused():
    class Other(Two):
        def texts_of_all(self, text):
            facts = json.loads(text)
            facts["checksum of the weights and the optimizer"] += 1
            return [text, json.dumps(facts)]

    with pytest.raises(ValueError, match="checksum of the weights and the optimizer="):
        check_same_model(Other(), [keras.Variable(1.0)], {}, Ledger())


# ------------------------------------------------------------------ errors on the way


def raised(replicas, error):
    with pytest.raises(Exception) as found, lost_workers(replicas):  # noqa: PT011
        raise error
    return found.value


def test_different_batches_are_explained():
    error = tf.errors.InvalidArgumentError(None, None, f"{DIFFERENT_STEPS}. [1] [2]")
    assert isinstance(raised(Two(), error), tfdp.errors.NotPrivateError)


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.UnavailableError(None, None, "connection reset"),
        tf.errors.InternalError(None, None, "Collective ops is aborted"),
    ],
)
def test_a_lost_process_is_explained_where_there_are_others(error):
    assert isinstance(raised(Two(), error), tfdp.errors.WorkerLostError)
    assert raised(ONE_DEVICE, error) is error


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InvalidArgumentError(None, None, "shapes"),
        tf.errors.InternalError(None, None, "out of luck"),
        KeyError("key"),
    ],
)
def test_other_errors_stay_what_they_are(error):
    assert raised(Two(), error) is error


# -------------------------------------------------------------------------- refusals


def test_a_model_from_outside_of_the_scope_is_refused():
    model = network()
    with one_device_scope(), pytest.raises(ValueError, match="made outside of the"):
        tfdp.DPModel(model)


def test_an_optimizer_from_outside_of_the_scope_is_refused():
    with one_device_scope():
        private = tfdp.DPModel(network())
    with pytest.raises(ValueError, match="scope of the same"):
        private.compile(optimizer(), "mse")


def test_several_steps_at_once_are_refused():
    with one_device_scope():
        private = tfdp.DPModel(network())
        with pytest.raises(ValueError, match="steps_per_execution=2"):
            private.compile(optimizer(), "mse", steps_per_execution=2)


def test_another_optimizer_is_refused_too():
    with one_device_scope():
        private = tfdp.DPModel(network())
        private.compile(optimizer(), "mse")
    private.optimizer = optimizer()
    with pytest.raises(ValueError, match="scope of the same"):
        private.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0)


def test_fit_in_the_scope_of_another_strategy_is_refused():
    private = tfdp.DPModel(network())
    private.compile(optimizer(), "mse")
    with one_device_scope(), pytest.raises(ValueError, match="a call in the scope"):
        private.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0)


def test_layers_from_outside_of_the_scope_are_refused():
    dense = keras.layers.Dense(1)
    dense.build((None, 2))
    with one_device_scope():
        model = keras.Sequential([keras.Input((2,)), dense])
        with pytest.raises(ValueError, match=r"All layers .* `dense\w*/kernel`"):
            tfdp.DPModel(model)


def test_averages_put_into_the_weights_on_the_way_are_refused():
    with one_device_scope():
        private = tfdp.DPModel(network())
        averaging = tfdp.optimizers.DPSGD(
            0.1,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            use_ema=True,
            ema_overwrite_frequency=2,
        )
    with pytest.raises(ValueError, match="ema_overwrite_frequency=2"):
        private.compile(averaging, "mse")


def test_other_strategies_are_refused():
    with (
        tf.distribute.experimental.CentralStorageStrategy(["CPU:0"]).scope(),
        pytest.raises(ValueError, match="MultiWorkerMirroredStrategy"),
    ):
        tfdp.DPModel(network())
