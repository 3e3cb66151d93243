"""Whole draws of an epoch, cut into batches that nobody mixes with another's."""

import itertools
import threading

import keras
import numpy as np
import pytest

import tfdp
from tfdp.accounting import Segment
from tfdp.data.drawn_dataset import DrawnDataset
from tfdp.data.pipeline import pipeline_of
from tfdp.data.rows import rows_of
from tfdp.sampling import BallsInBins

N, B, BINS = 600, 60, 10
X = np.arange(N, dtype="float32")[:, np.newaxis]
STEP = {"l2_norm_clip": 1.0, "noise_multiplier": 4.0}


def drawn(**options):
    return DrawnDataset(rows_of(X, X / N, None), BallsInBins(N, B), **options)


def rows(batch):
    return np.asarray(batch[0])[:, 0].astype(int).tolist()


def assert_once_each(batches):
    assert len(batches) == BINS
    assert sorted(itertools.chain(*batches)) == list(range(N))


def private(**options):
    inner = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model = tfdp.DPModel(inner, sampling="balls_in_bins", **options)
    model.compile(tfdp.optimizers.DPSGD(0.0, **STEP), "mse", run_eagerly=True)
    return model


@pytest.fixture
def trained(monkeypatch):
    """The rows of every step that any model takes, eagerly."""
    seen = []
    take = tfdp.DPModel.train_step

    def take_and_tell(self, data):
        seen.append(rows(keras.utils.unpack_x_y_sample_weight(data)))
        return take(self, data)

    monkeypatch.setattr(tfdp.DPModel, "train_step", take_and_tell)
    return seen


def epochs_of(trained):
    return [trained[i : i + BINS] for i in range(0, len(trained), BINS)]


def test_each_iteration_is_an_epoch_of_its_own():
    stream = pipeline_of(drawn())
    passes = [list(map(rows, stream)) for _ in range(3)]
    for batches in passes:
        assert_once_each(batches)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert len({len(batch) for batch in passes[0]}) > 1
    assert int(stream.cardinality()) == BINS


def test_iterators_side_by_side_do_not_mix():
    stream = pipeline_of(drawn())
    pairs = list(zip(stream, stream, strict=True))
    one, other = ([rows(pair[i]) for pair in pairs] for i in (0, 1))
    assert_once_each(one)
    assert_once_each(other)
    assert one != other


def test_requests_between_do_not_mix():
    data = drawn()
    asked = [rows(data[3])]
    stream = iter(pipeline_of(data))
    batches = [rows(next(stream))]
    thread = threading.Thread(
        target=lambda: asked.extend(rows(data[i]) for i in (0, 3))
    )
    thread.start()
    thread.join()
    batches += map(rows, stream)
    assert_once_each(batches)
    assert all(each not in batches for each in asked)


def test_an_iterator_that_is_dropped_is_not_gone_on_with():
    data = drawn()
    dropped = [rows(batch) for batch in pipeline_of(data).take(4)]
    batches = list(map(rows, pipeline_of(data)))
    assert_once_each(batches)
    assert not [each for each in dropped if each in batches]


@pytest.mark.slow
@pytest.mark.smoke
def test_fit_takes_every_row_once_an_epoch(trained):
    model = private()
    model.fit(X, X / N, batch_size=B, epochs=3, verbose=0, validation_data=(X, X / N))
    passes = epochs_of(trained)
    assert len(passes) == 3
    for batches in passes:
        assert_once_each(batches)
    assert passes[0] != passes[1]
    assert model.ledger.segments == (Segment(BallsInBins(N, B), 3, 4.0),)


@pytest.mark.slow
def test_the_divisor_is_the_mean_size_of_the_bins():
    model = private()
    model.fit(X[:110], X[:110], batch_size=100, verbose=0)
    assert model.optimizer.expected_batch_size == 55
    assert model.ledger.segments == (Segment(BallsInBins(110, 55), 1, 4.0),)


@pytest.mark.slow
def test_a_fit_that_ends_early_is_gone_on_with_in_an_epoch_of_its_own(trained):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch >= 3

    model = private()
    model.fit(X, X / N, batch_size=B, epochs=2, verbose=0, callbacks=[Stop()])
    model.fit(X, X / N, batch_size=B, verbose=0)
    assert len(trained) == 4 + BINS
    assert_once_each(trained[4:])
    [segment] = model.ledger.segments
    assert segment.count == 2  # The one that has begun counts whole.


@pytest.mark.slow
def test_a_budget_ends_training_before_an_epoch_that_it_has_no_room_for():
    model = private()
    run = Segment(BallsInBins(N, B), 5, 4.0)
    budget = tfdp.callbacks.PrivacyBudget(
        1e-4, target_epsilon=tfdp.accounting.Ledger((run,)).epsilon(1e-4)
    )
    model.fit(X, X / N, batch_size=B, epochs=50, verbose=0, callbacks=[budget])
    assert model.ledger.segments == (run,)
    assert int(model.optimizer.iterations.numpy()) == 5 * BINS
    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        model.fit(X, X / N, batch_size=B, verbose=0)


@pytest.mark.slow
def test_ledgers_are_saved_and_gone_on_with(tmp_path):
    model = private()
    model.fit(X, X / N, batch_size=B, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.sampling == "balls_in_bins"
    loaded.fit(X, X / N, batch_size=B, verbose=0)
    assert loaded.ledger.segments == (Segment(BallsInBins(N, B), 2, 4.0),)


@pytest.mark.parametrize("steps", [9, 11])
def test_another_number_of_batches_is_refused(steps):
    with pytest.raises(ValueError, match="every row once"):
        private().fit(X, X / N, batch_size=B, steps_per_epoch=steps)


@pytest.mark.slow
def test_seeded_epochs_are_not_drawn_again(trained):
    with pytest.warns(UserWarning, match="without secrecy"):
        first, second = drawn(seed=3), drawn(seed=3)
    model = private()
    for data in (first, second):
        model.fit(data, epochs=2, verbose=0)
    passes = epochs_of(trained)
    assert len(passes) == 4
    assert len({tuple(map(tuple, batches)) for batches in passes}) == 4


def test_draws_that_processes_share_are_whole_epochs():
    draw = drawn().numbered_draws(key=1, number_of_draws=2 * BINS)
    batches = [draw(number).tolist() for number in range(2 * BINS)]
    assert_once_each(batches[:BINS])
    assert_once_each(batches[BINS:])
    assert batches[:BINS] != batches[BINS:]
