"""Callbacks of `fit`: their order, and whom it warns of."""

import keras
import pytest
import tensorflow as tf

import tfdp
from tests.small import data, private
from tfdp.accounting import ShuffledPasses
from tfdp.training.fit_callbacks import sorted_callbacks


def segments(model):
    return model.ledger.segments


@pytest.mark.slow
def test_a_callback_that_monitors_private_metrics_is_named():
    callback = keras.callbacks.EarlyStopping(monitor="loss")
    with pytest.warns(UserWarning, match="EarlyStopping"):
        private(run_eagerly=True).fit(*data(), callbacks=[callback], verbose=0)


@pytest.mark.slow
def test_short_epochs_share_a_pass():
    x, y = data(20)
    model = private(wrap={"sampling": "shuffle"}, run_eagerly=True)
    model.fit(x, y, batch_size=4, epochs=2, steps_per_epoch=2, verbose=0)
    assert segments(model) == (ShuffledPasses(1, 1.0, 20, 4),)
    # A pass counts as soon as it has begun.
    for passes in (2, 3):
        model.fit(x, y, batch_size=4, steps_per_epoch=1, verbose=0)
        assert segments(model) == (ShuffledPasses(passes, 1.0, 20, 4),)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("stops_after", [1, 2])
def test_of_data_that_do_not_tell_how_long_they_are_epochs_do(stops_after):
    x, y = data(20)
    rows = tf.data.Dataset.from_generator(
        lambda: zip(x, y, strict=True),
        output_signature=(
            tf.TensorSpec(x[0].shape, x.dtype),
            tf.TensorSpec(y[0].shape),
        ),
    )
    declared = tfdp.data.declare(
        rows.batch(4), number_of_examples=20, expected_batch_size=4, sampling="poisson"
    )
    model = private(run_eagerly=True)

    def stop(epoch, logs):
        model.stop_training = epoch + 1 == stops_after

    stops = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    model.fit(declared, epochs=2, callbacks=[stops], verbose=0)
    (ran,) = segments(model)
    assert ran.count == 5 * stops_after
    assert [each.count for each in model.ledger.cut_short] == [5] * (2 - stops_after)


def test_callbacks_that_act_in_steps_come_first():
    stop = keras.callbacks.History()
    budget = tfdp.callbacks.PrivacyBudget(1e-5)
    logger = tfdp.callbacks.BiasLogger()
    nested = keras.callbacks.CallbackList([stop, budget])
    assert sorted_callbacks([[nested], logger]) == [budget, logger, stop]
    assert sorted_callbacks(None) == []
    assert sorted_callbacks(stop) == [stop]


def test_who_stops_at_a_private_loss_is_warned_and_told_what_to_do():
    stop = keras.callbacks.TerminateOnNaN()
    with pytest.warns(
        UserWarning, match=r"decides.*with `TerminateOnNaN`. Leave it out"
    ):
        assert sorted_callbacks(stop) == [stop]


@pytest.mark.slow
def test_validation_of_rows_that_are_trained_on_decides_nothing(tmp_path):
    x, y = data(20)
    stop = keras.callbacks.EarlyStopping("val_loss")
    for rows in ((x, y), (x[5:], y[5:])):
        with pytest.warns(
            UserWarning, match=r"'val_loss'. The rows of `validation_data`"
        ):
            private(run_eagerly=True).fit(
                x, y, batch_size=4, callbacks=stop, validation_data=rows, verbose=0
            )
    saves = keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")
    for callback, rows in ((stop, (x.copy(), y)), (saves, (x, y))):
        private(run_eagerly=True).fit(
            x, y, batch_size=4, callbacks=callback, validation_data=rows, verbose=0
        )


def test_public_metrics_may_decide():
    for name in ("val_loss", "public_norm_q50", "epsilon", "l2_norm_clip"):
        callback = keras.callbacks.EarlyStopping(monitor=name)
        assert sorted_callbacks(callback) == [callback]
