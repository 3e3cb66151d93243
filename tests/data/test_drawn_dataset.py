"""Batches that tfdp draws: none twice, and none by anybody else."""

import copy
import gc
import math
import os
import pickle
import threading

import keras
import numpy as np
import pytest

from tfdp.data.drawn_dataset import DrawnDataset
from tfdp.data.rows import rows_of
from tfdp.errors import NotPrivateError
from tfdp.sampling import Poisson

N, B = 600, 60
IDS = np.arange(N, dtype="float32")[:, np.newaxis]


class Recording(DrawnDataset):
    """Remembers the rows of every batch that anyone asked for."""

    def __init__(self, **kwargs):
        super().__init__(rows_of(IDS, IDS / N, None), Poisson(N, B), **kwargs)
        self.drawn = []

    def __getitem__(self, index):
        batch = super().__getitem__(index)
        self.drawn.append(ids(batch))
        return batch


class Watching(keras.Model):
    """Remembers the rows that it is trained on; run eagerly."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.compile(run_eagerly=True)

    def train_step(self, data):
        self.seen.append(ids(data))
        return {"loss": 0.0}


def ids(batch):
    return tuple(np.asarray(batch[0])[:, 0].astype(int).tolist())


def seeded(**kwargs):
    with pytest.warns(UserWarning, match="without secrecy"):
        return Recording(seed=3, **kwargs)


def regression(**kwargs):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **kwargs)
    return model


def assert_no_draw_repeats(batches):
    """Two draws of 60 among 600 agree with probability 1e-80."""
    assert len(set(batches)) == len(batches)


@pytest.mark.parametrize(
    ("compile_kwargs", "fit_kwargs", "steps"),
    [
        ({}, {"epochs": 3}, 30),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({}, {"epochs": 3, "steps_per_epoch": 4}, None),
                ({}, {"epochs": 1}, 10),
                ({}, {"epochs": 3, "shuffle": False}, 30),
                ({}, {"epochs": 3, "steps_per_epoch": 10}, 30),
                ({"steps_per_execution": 5}, {"epochs": 3}, 30),
                ({"steps_per_execution": 4}, {"epochs": 3}, None),
                ({"run_eagerly": True}, {"epochs": 3}, 30),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", [3])
# Keras says so when `steps_per_epoch` does not divide the number of batches.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_fit_never_sees_a_draw_twice(compile_kwargs, fit_kwargs, steps, workers):
    model, data = regression(**compile_kwargs), Recording()
    data.workers = workers
    model.fit(data, verbose=0, **fit_kwargs)
    model.fit(data, verbose=0, **fit_kwargs)
    model.evaluate(data, verbose=0)
    if steps is not None:
        assert int(model.optimizer.iterations) == 2 * steps
    assert len(data.drawn) >= int(model.optimizer.iterations)
    assert_no_draw_repeats(data.drawn)


@pytest.mark.slow
@pytest.mark.statistical
def test_the_batches_that_train_the_model_are_all_different_poisson_draws():
    model, data = Watching(), Recording()
    model.fit(data, epochs=20, verbose=0)
    assert len(model.seen) == 20 * 10
    assert_no_draw_repeats(model.seen)
    sizes = np.array([len(rows) for rows in model.seen])
    assert abs(sizes.mean() - B) < 5 * math.sqrt(B / len(sizes))
    assert 0.5 < sizes.var() / (B * (1 - B / N)) < 1.6


def test_replaying_the_draws_of_an_epoch_is_detected(monkeypatch):
    monkeypatch.setattr(DrawnDataset, "_next_draw", lambda _, index: (1, index, 0))
    data = Recording()
    regression().fit(data, epochs=3, verbose=0)
    with pytest.raises(AssertionError):
        assert_no_draw_repeats(data.drawn)


def test_every_request_gives_another_draw():
    data = Recording()
    for _ in range(50):
        data[0]
    list(data)
    list(data)
    assert len(data.drawn) == 70
    assert_no_draw_repeats(data.drawn)


def test_requests_from_many_threads_give_different_draws():
    data = Recording()
    threads = [
        threading.Thread(target=lambda: [data[0] for _ in range(50)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(data.drawn) == 400
    assert_no_draw_repeats(data.drawn)


def test_an_interrupted_epoch_is_not_replayed():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch >= 3

    model, data = regression(), Recording()
    for _ in range(3):
        model.fit(data, epochs=2, verbose=0, callbacks=[Stop()])
    assert int(model.optimizer.iterations) == 12
    assert_no_draw_repeats(data.drawn)


def test_global_seeds_have_no_influence():
    def draw():
        keras.utils.set_random_seed(0)
        return ids(Recording()[0])

    assert draw() != draw()


@pytest.mark.slow
def test_same_seed_gives_the_same_training_whatever_the_threads():
    def train(workers):
        model, data = Watching(), seeded()
        data.workers = workers
        model.fit(data, epochs=3, shuffle=False, verbose=0)
        model.fit(data, epochs=2, shuffle=False, verbose=0)
        return model.seen

    first = train(workers=1)
    assert len(first) == 50
    assert_no_draw_repeats(first)
    assert first == train(workers=1)
    assert first == train(workers=3)


def test_seeded_draws_do_not_depend_on_the_order_of_requests():
    forward, backward = seeded(), seeded()
    first = {index: ids(forward[index]) for index in range(10)}
    second = {index: ids(backward[index]) for index in reversed(range(10))}
    assert first == second


def test_seeds_give_different_draws():
    with pytest.warns(UserWarning, match=r"Received: seed=4. Use `seed=None`"):
        other = Recording(seed=4)
    assert ids(other[0]) != ids(seeded()[0])


@pytest.mark.slow
def test_advancing_a_remade_dataset_passes_the_draws_of_the_first():
    first, second = seeded(), seeded()
    regression().fit(first, epochs=3, verbose=0)
    second.advance_to(first.epoch + 1)
    regression().fit(second, epochs=3, verbose=0)
    assert_no_draw_repeats(first.drawn + second.drawn)


def test_advancing_to_the_current_epoch_keeps_its_draws_apart():
    data = seeded()
    data[0]
    data.advance_to(data.epoch)
    data[0]
    assert_no_draw_repeats(data.drawn)


def test_seeded_draws_depend_on_the_epoch_and_not_on_the_way_to_it():
    first, second = seeded(), seeded()
    first[0]
    first.advance_to(5)
    second.on_epoch_end()
    second.advance_to(5)
    assert ids(first[0]) == ids(second[0])


def test_a_seed_is_told():
    assert seeded().seeded
    assert not Recording().seeded


def test_first_rows_are_no_draw():
    data, untouched = seeded(), seeded()
    assert ids(data.first_rows(3)) == (0, 1, 2)
    assert len(ids(data.first_rows(2 * N))) == N
    assert ids(data[0]) == ids(untouched[0])


def test_numbered_draws_are_those_of_the_next_epochs():
    """As one device would have them."""
    shared, alone = seeded(steps_per_epoch=2), seeded(steps_per_epoch=2)
    draw = shared.numbered_draws(key=1, number_of_draws=3)
    expected = [ids(alone[0]), ids(alone[1])]
    alone.on_epoch_end()
    expected += [ids(alone[0])]
    assert [tuple(draw(number).tolist()) for number in range(3)] == expected
    assert shared.epoch > 2


def test_numbered_draws_of_unseeded_data_go_by_the_common_key():
    first, second = (Recording().numbered_draws(key, 2) for key in (1, 1))
    other = Recording().numbered_draws(2, 2)
    assert first(0).tolist() == second(0).tolist() != other(0).tolist()


def test_epoch_counts_ends_of_epochs():
    data = Recording()
    assert data.epoch == 1
    data.on_epoch_end()
    assert data.epoch == 2
    data.advance_to(7)
    data.on_epoch_begin()
    assert data.epoch == 7


def test_epoch_does_not_go_back():
    data = Recording()
    data.advance_to(5)
    with pytest.raises(ValueError, match=r"Received: epoch=4, current epoch=5"):
        data.advance_to(4)
    assert data.epoch == 5


@pytest.mark.parametrize("epoch", [0, -1, 2.5, math.nan, math.inf])
def test_epoch_out_of_range_is_refused(epoch):
    with pytest.raises(ValueError, match="`epoch` must be a whole number"):
        Recording().advance_to(epoch)


def test_worker_processes_are_refused():
    data = Recording()
    data.use_multiprocessing = False
    with pytest.raises(NotPrivateError, match=r"use_multiprocessing=True.*workers = 4"):
        data.use_multiprocessing = True
    assert data.use_multiprocessing is False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
def test_a_forked_process_cannot_draw():
    data = Recording()
    # What the child would free of other tests has threads that it does not have.
    gc.disable()
    child = os.fork()
    if child == 0:
        try:
            data[0]
        except NotPrivateError:
            os._exit(42)
        finally:
            os._exit(1)
    gc.enable()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(duplicate):
    with pytest.raises(
        NotPrivateError, match=r"copied or pickled.*from the same data\.$"
    ):
        duplicate(Recording())


def test_rows_at_returns_chosen_rows_without_a_draw():
    data, untouched = seeded(), seeded()
    x, y = data.rows_at(np.array([1, 4]))
    np.testing.assert_array_equal(x, [[1], [4]])
    np.testing.assert_allclose(y, [[1 / N], [4 / N]])
    assert data.rows_at(np.array([], int))[0].shape == (0, 1)
    assert ids(data[0]) == ids(untouched[0])


@pytest.mark.parametrize("steps", [0, -1, 1.5, math.nan, math.inf])
def test_steps_out_of_range_are_refused(steps):
    with pytest.raises(ValueError, match="`steps_per_epoch` must be a whole number"):
        Recording(steps_per_epoch=steps)


@pytest.mark.parametrize("index", [-1, 10])
def test_index_outside_the_epoch_is_refused(index):
    with pytest.raises(IndexError, match=rf"in \[0, 10\). Received: index={index}"):
        Recording()[index]
