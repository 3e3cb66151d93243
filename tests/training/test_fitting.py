"""What a call of `fit` owes where it is stopped, and that it is the only one."""

import keras
import pytest
import tensorflow as tf

from tests.small import data, optimizer, private
from tfdp.accounting import PoissonSteps
from tfdp.errors import NotPrivateError


@pytest.mark.slow
def test_a_run_stopped_by_hand_states_its_plan():
    x, y = data(20)
    model = private(run_eagerly=True)
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True)
    )
    model.fit(x, y, batch_size=5, epochs=3, callbacks=[stop], verbose=0)
    assert model.ledger.segments == (PoissonSteps(4, 1.0, 20, 5),)
    assert model.ledger.cut_short == (PoissonSteps(8, 1.0, 20, 5),)


def test_a_run_of_microbatches_owes_the_passes_of_its_plan():
    x, y = data(20)
    model = private(opt=optimizer(num_microbatches=2), wrap={"sampling": "shuffle"})
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True)
    )
    model.fit(x, y, batch_size=4, epochs=3, callbacks=[stop], verbose=0)
    assert [each.count for each in model.ledger.segments] == [1]
    assert [each.count for each in model.ledger.cut_short] == [2]


def test_undeclared_data_that_tell_their_length_owe_all_of_it():
    """An epoch that was cut says nothing of how long it would have been."""
    x, y = data(20)
    pipeline = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    model = private(opt=optimizer(8.0, expected_batch_size=5), run_eagerly=True)
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(
            model, "stop_training", batch == 1
        )
    )
    model.fit(pipeline, epochs=3, callbacks=[stop], verbose=0)
    assert [each.count for each in model.ledger.segments] == [2]
    assert [each.count for each in model.ledger.cut_short] == [10]


def test_no_fit_begins_inside_of_another():
    """The steps that follow would be clipped as those of the inner one."""
    model, (x, y) = private(), data(8)

    class Refits(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with pytest.raises(NotPrivateError, match="Only one `fit`"):
                model.fit(x, y, batch_size=2, verbose=0)

    for _ in range(2):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[Refits()])
    (segment,) = model.ledger.segments
    assert (segment.count, segment.scheme.expected_batch_size) == (4, 4)
