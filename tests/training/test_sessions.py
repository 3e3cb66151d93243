"""Steps are taken with what they were settled for, in `fit` and in the midst of it."""

import keras
import pytest
import tensorflow as tf

import tfdp
from tests.small import data, optimizer, private


class OneMore(keras.callbacks.Callback):
    """Takes a step of its own, so many times."""

    def __init__(self, method, times):
        super().__init__()
        self.times = times
        setattr(self, method, self.step)

    def step(self, *_, **__):
        if self.times:
            self.times -= 1
            x, y = data(20)
            self.model.train_on_batch(x[:5], y[:5])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("on_epoch_begin", "poisson"),
        ("on_train_batch_end", "shuffle"),
        pytest.param("on_train_begin", "poisson", marks=pytest.mark.slow),
        pytest.param("on_train_begin", "shuffle", marks=pytest.mark.slow),
        pytest.param("on_epoch_begin", "shuffle", marks=pytest.mark.slow),
        pytest.param("on_train_batch_begin", "shuffle", marks=pytest.mark.slow),
        pytest.param("on_train_batch_end", "poisson", marks=pytest.mark.slow),
    ],
)
def test_a_step_of_a_callback_takes_no_plan_away(method, sampling):
    """What is stopped on exact values owes what it would have run."""

    def epsilon(epochs_run):
        x, y = data(20)
        model = private(
            opt=optimizer(8.0), wrap={"sampling": sampling}, run_eagerly=True
        )
        stop = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: setattr(
                model, "stop_training", epoch + 1 >= epochs_run
            )
        )
        callbacks = [OneMore(method, times=2), stop]
        model.fit(x, y, batch_size=5, epochs=5, callbacks=callbacks, verbose=0)
        assert bool(model.ledger.cut_short) == (epochs_run < 5)
        return model.ledger.planned().epsilon(1e-3)

    assert epsilon(2) == pytest.approx(epsilon(5), rel=1e-6)


def test_a_step_of_a_callback_leaves_the_noise_of_the_plan():
    """What is owed has the least noise that was to come, not that of the last step."""
    x, y = data(20)
    model = private(opt=optimizer(8.0), run_eagerly=True)

    def noise(step):
        return 8.0 / (1 + step // 4)

    callbacks = [
        tfdp.callbacks.NoiseMultiplierScheduler(noise),
        OneMore("on_epoch_begin", times=1),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", epoch > 0)
        ),
    ]
    model.fit(x, y, batch_size=5, epochs=5, callbacks=callbacks, verbose=0)
    assert [each.noise_multiplier for each in model.ledger.cut_short] == [8.0 / 5]


def test_steps_before_an_undeclared_fit_are_beside_its_plan():
    x, y = data(20)
    pipeline = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)

    def planned(epochs_run):
        model = private(opt=optimizer(8.0, expected_batch_size=5), run_eagerly=True)
        stop = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: setattr(
                model, "stop_training", epoch + 1 >= epochs_run
            )
        )
        callbacks = [OneMore("on_train_begin", times=1), stop]
        model.fit(
            pipeline.repeat(),
            steps_per_epoch=4,
            epochs=3,
            callbacks=callbacks,
            verbose=0,
        )
        ledger = model.ledger
        return sum(each.count for each in (*ledger.segments, *ledger.cut_short))

    assert planned(2) == planned(3) == 13


def test_a_graph_of_steps_takes_any_number_of_rows():
    model = private(opt=optimizer(expected_batch_size=4))
    x, y = data(5)
    specs = [tf.TensorSpec([None, 3]), tf.TensorSpec([None], "int32")]
    step = tf.function(
        lambda *rows: model.train_step(rows), input_signature=specs, autograph=False
    )
    step(x[:3], y[:3])
    step(x, y)
    assert model.ledger.steps == 2
