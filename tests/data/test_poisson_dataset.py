import copy
import itertools
import math
import os
import pickle
import threading

import keras
import numpy as np
import pytest

from tfdp.data import PoissonDataset
from tfdp.errors import NotPrivateError

N, B = 600, 60
IDS = np.arange(N, dtype="float32")[:, np.newaxis]


class Recording(PoissonDataset):
    """Remembers the rows of every batch that anyone asked for."""

    def __init__(self, **kwargs):
        super().__init__(IDS, IDS / N, expected_batch_size=B, **kwargs)
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
        ({}, {"epochs": 3, "steps_per_epoch": 4}, None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
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
    monkeypatch.setattr(PoissonDataset, "_next_draw", lambda _, index: (1, index, 0))
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
    child = os.fork()
    if child == 0:
        try:
            data[0]
        except NotPrivateError:
            os._exit(42)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(duplicate):
    with pytest.raises(NotPrivateError, match="cannot be copied or pickled"):
        duplicate(Recording())


def test_facts():
    data = PoissonDataset(np.ones((1000, 2)), expected_batch_size=64)
    assert data.number_of_examples == 1000
    assert data.expected_batch_size == 64
    assert data.sampling_probability == 0.064
    assert len(data) == data.num_batches == 16
    assert data.seeded is False
    assert seeded().seeded is True
    assert len(Recording(steps_per_epoch=3)) == 3


@pytest.mark.parametrize(
    "fact",
    ["number_of_examples", "expected_batch_size", "sampling_probability", "seeded"],
)
def test_facts_are_read_only(fact):
    with pytest.raises(AttributeError):
        setattr(Recording(), fact, 1)


def test_rows_stay_together():
    x = np.arange(100)
    data = PoissonDataset(
        {"a": x, "b": [x + 1000, x / 2]},
        (x, x * 3),
        x.astype("float32"),
        expected_batch_size=20,
    )
    inputs, targets, weights = data[0]
    rows = inputs["a"]
    np.testing.assert_array_equal(inputs["b"][0], rows + 1000)
    np.testing.assert_array_equal(inputs["b"][1], (rows / 2).astype("float32"))
    np.testing.assert_array_equal(targets[0], rows)
    np.testing.assert_array_equal(targets[1], rows * 3)
    np.testing.assert_array_equal(weights, rows)


def test_rows_at_returns_chosen_rows_without_a_draw():
    data, untouched = seeded(), seeded()
    x, y = data.rows_at(np.array([1, 4]))
    np.testing.assert_array_equal(x, [[1], [4]])
    np.testing.assert_allclose(y, [[1 / N], [4 / N]])
    assert data.rows_at(np.array([], int))[0].shape == (0, 1)
    assert ids(data[0]) == ids(untouched[0])


def test_expected_batch_size_of_all_examples_draws_all_of_them():
    data = PoissonDataset(IDS, expected_batch_size=N)
    assert len(data) == 1
    assert ids(data[0]) == tuple(range(N))


def test_empty_batches_have_the_structure_of_the_others():
    data = PoissonDataset(
        {"a": np.ones((400, 2, 3)), "b": np.ones(400, "uint8")},
        np.ones((400, 1), "int64"),
        np.ones(400),
        expected_batch_size=1,
    )
    batches = itertools.chain.from_iterable(data for _ in itertools.count())
    x, y, weights = next(batch for batch in batches if len(batch[1]) == 0)
    assert (x["a"].shape, x["a"].dtype) == ((0, 2, 3), "float32")
    assert (x["b"].shape, x["b"].dtype) == ((0,), "uint8")
    assert (y.shape, y.dtype) == ((0, 1), "int64")
    assert (weights.shape, weights.dtype) == ((0,), "float32")


def test_fit_takes_empty_batches():
    data = PoissonDataset(IDS, IDS, expected_batch_size=1, steps_per_epoch=60)
    model = regression()
    model.fit(data, verbose=0)
    assert int(model.optimizer.iterations) == 60


@pytest.mark.parametrize("tuples", [True, False])
def test_fit_takes_several_inputs_outputs_and_weights(tuples):
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    p = keras.layers.Dense(1, name="p")(a + b)
    q = keras.layers.Dense(1, name="q")(a - b)
    x, y = np.ones((50, 1)), np.ones((50, 1))
    if tuples:
        model = keras.Model([a, b], [p, q])
        model.compile("sgd", ["mse", "mse"])
        data = PoissonDataset([x, x], [y, y], [y, y], expected_batch_size=5)
    else:
        model = keras.Model({"a": a, "b": b}, {"p": p, "q": q})
        model.compile("sgd", {"p": "mse", "q": "mse"})
        data = PoissonDataset({"a": x, "b": x}, {"p": y, "q": y}, expected_batch_size=5)
    model.fit(data, verbose=0)
    assert int(model.optimizer.iterations) == 10


def test_fit_takes_inputs_alone_and_strings():
    class Unsupervised(Watching):
        def train_step(self, data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            assert y is None
            assert sample_weight is None
            assert x[1].dtype == "string"
            return super().train_step(x)

    model = Unsupervised()
    model.fit(
        PoissonDataset((IDS, np.full(N, "text")), expected_batch_size=B), verbose=0
    )
    assert len(model.seen) == 10


def test_class_weight_reaches_the_loss():
    labels = np.arange(N) % 2
    model = keras.Sequential([
        keras.Input((1,)),
        keras.layers.Dense(1, kernel_initializer="zeros"),
    ])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    data = PoissonDataset(IDS * 0, labels, expected_batch_size=N, steps_per_epoch=2)
    history = model.fit(data, class_weight={0: 1.0, 1: 5.0}, verbose=0)
    np.testing.assert_allclose(history.history["loss"], [2.5], rtol=1e-6)


@pytest.mark.parametrize("size", [0, -1, 1.5, math.nan, math.inf])
def test_batch_size_out_of_range_is_refused(size):
    with pytest.raises(ValueError, match="`expected_batch_size` must be a whole"):
        PoissonDataset(IDS, expected_batch_size=size)


def test_batch_larger_than_the_data_is_refused_with_the_line_to_write():
    with pytest.raises(ValueError, match="Use `expected_batch_size=600`"):
        PoissonDataset(IDS, expected_batch_size=601)


@pytest.mark.parametrize("steps", [0, -1, 1.5, math.nan, math.inf])
def test_steps_out_of_range_are_refused(steps):
    with pytest.raises(ValueError, match="`steps_per_epoch` must be a whole number"):
        Recording(steps_per_epoch=steps)


@pytest.mark.parametrize("name", ["expected_batch_size", "steps_per_epoch"])
@pytest.mark.parametrize("value", [True, "8"])
def test_numbers_of_wrong_type_are_refused(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be a whole number"):
        PoissonDataset(IDS, **{"expected_batch_size": 10, name: value})


@pytest.mark.parametrize("index", [-1, 10])
def test_index_outside_the_epoch_is_refused(index):
    with pytest.raises(IndexError, match=rf"in \[0, 10\). Received: index={index}"):
        Recording()[index]
