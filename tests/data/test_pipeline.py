"""What `fit` reads of drawn batches is what the dataset draws, each draw once."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.data.pipeline import is_read_by_one_thread, pipeline_of

ROWS = 40


def dataset(rows=ROWS, **options):
    x = np.arange(rows, dtype="float32")[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tfdp.data.PoissonDataset(
            x, np.arange(rows), expected_batch_size=8, seed=3, **options
        )


def epoch(pipeline):
    return [tuple(np.asarray(y) for y in batch) for batch in pipeline]


@pytest.mark.parametrize("steps", [5, 64, 150])
def test_batches_are_the_draws_of_the_epochs(steps):
    data, same = dataset(steps_per_epoch=steps), dataset(steps_per_epoch=steps)
    pipeline = pipeline_of(data)
    assert int(pipeline.cardinality()) == steps
    for _ in range(2):
        batches = epoch(pipeline)
        assert len(batches) == steps
        for index, (x, y) in enumerate(batches):
            expected_x, expected_y = same[index]
            np.testing.assert_array_equal(x, expected_x)
            np.testing.assert_array_equal(y, expected_y)
            assert x.dtype == expected_x.dtype
        same.on_epoch_end()


@pytest.mark.parametrize("steps", [5, 150])
def test_one_epoch_follows_another(steps):
    data, same = dataset(steps_per_epoch=steps), dataset(steps_per_epoch=steps)
    pipeline = pipeline_of(data, is_endless=True)
    batches = [y.numpy() for _, y in pipeline.take(2 * steps + 3)]
    expected = []
    for _ in range(3):
        expected += [same[index][1] for index in range(steps)]
        same.on_epoch_end()
    for one, other in zip(batches, expected[: 2 * steps + 3], strict=True):
        np.testing.assert_array_equal(one, other)
    # Another iterator has epochs of its own.
    drawn = {b.tobytes() for b in expected}
    assert not drawn & {y.numpy().tobytes() for _, y in pipeline.take(3)}


def test_no_iteration_has_the_draws_of_another():
    pipeline = pipeline_of(dataset())
    drawn = [b"|".join(y.tobytes() for _, y in epoch(pipeline)) for _ in range(4)]
    assert len(set(drawn)) == 4


def test_large_rows_come_draw_by_draw():
    x = np.random.default_rng(0).normal(size=(20, 100_000)).astype("float32")
    data = tfdp.data.PoissonDataset(x, expected_batch_size=10)
    batches = list(pipeline_of(data))
    assert len(batches) == 2
    for (batch,) in batches:
        assert batch.shape[1:] == (100_000,)
        assert np.isin(batch.numpy()[:, 0], x[:, 0]).all()


def test_padding_is_marked():
    pipeline = pipeline_of(dataset(max_batch_size=30))
    for rows, is_padding in pipeline:
        x, y = rows
        assert x.shape == (30, 1)
        real = ~is_padding.numpy()
        np.testing.assert_array_equal(x.numpy()[real, 0], y.numpy()[real])
        assert 0 < real.sum() < 30


def test_words_and_nests():
    words = np.array([f"word {n}" for n in range(ROWS)])
    data = tfdp.data.PoissonDataset(
        {"words": words, "number": np.arange(ROWS)}, expected_batch_size=8
    )
    for (x,) in pipeline_of(data):
        assert x["words"].dtype == tf.string
        assert [int(w.split()[1]) for w in x["words"].numpy()] == list(x["number"])


def test_what_python_has_to_read_is_left_to_keras(tmp_path):
    class Own(tfdp.data.PoissonDataset):
        def __getitem__(self, index):
            return super().__getitem__(index)

    x = np.ones((ROWS, 2), "float32")
    assert is_read_by_one_thread(dataset())
    assert not is_read_by_one_thread(Own(x, expected_batch_size=8))
    in_threads = dataset()
    in_threads.workers = 2
    assert not is_read_by_one_thread(in_threads)
    np.save(tmp_path / "x.npy", x)
    in_file = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert not is_read_by_one_thread(
        tfdp.data.PoissonDataset(in_file, expected_batch_size=8)
    )


@pytest.mark.parametrize("is_endless", [False, True])
def test_an_iterator_has_no_tuner_to_wait_for(is_endless):
    stream = pipeline_of(dataset(), is_endless=is_endless)
    assert stream.options().autotune.enabled is False
