"""Bins in files: drawn once, read whole, and counted as what they are."""

import itertools
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdp
from tfdp.accounting import Ledger, Segment, compose
from tfdp.data import BallsInBins
from tfdp.sampling import FixedBins

N, BINS = 600, 10
X = np.arange(N, dtype="float32")[:, np.newaxis]


def private(noise_multiplier=4.0):
    model = tfdp.DPModel(
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]),
    )
    model.compile(
        tfdp.optimizers.DPSGD(0.0, l2_norm_clip=1.0, noise_multiplier=noise_multiplier),
        "mse",
    )
    return model


def write(folder, source=None, batches_per_epoch=BINS):
    source = (X, X / N) if source is None else source
    return BallsInBins.write(source, folder, batches_per_epoch)


def rows(data):
    return [np.asarray(batch[0])[:, 0].astype(int).tolist() for batch in data.dataset]


def test_every_row_is_in_one_bin_and_stays_there(tmp_path):
    data = write(tmp_path / "shards")
    batches = rows(data)
    assert sorted(itertools.chain(*batches)) == list(range(N))
    assert batches == rows(data) == rows(BallsInBins(tmp_path / "shards"))
    assert (data.number_of_examples, data.number_of_batches) == (N, BINS)
    assert len({len(batch) for batch in batches}) > 1
    assert int(data.dataset.cardinality()) == BINS


@pytest.mark.slow
@pytest.mark.statistical
def test_bins_are_uniform_and_of_secret_coins(tmp_path):
    keras.utils.set_random_seed(0)
    sizes, found = [], []
    for number in range(20):
        batches = rows(write(tmp_path / str(number)))
        sizes += map(len, batches)
        found.append(batches[0])
    assert stats.chisquare(sizes).pvalue > 1e-4
    assert np.var(sizes) == pytest.approx(N * 0.1 * 0.9, rel=0.6)
    assert len(set(map(tuple, found))) == 20


def test_nests_strings_and_whole_numbers_come_back(tmp_path):
    x = {"b": np.ones((N, 2, 3)), "a": np.arange(N, dtype=np.uint8)}
    y = (np.array([f"row {i}" for i in range(N)]), np.arange(N, dtype=np.int64))
    seen = []
    for inputs, (words, numbers) in write(tmp_path, (x, y)).dataset:
        assert inputs["b"].dtype == tf.float32
        assert inputs["b"].shape[1:] == (2, 3)
        np.testing.assert_array_equal(inputs["a"], np.asarray(numbers) % 256)
        assert words.numpy().tolist() == [b"row %d" % i for i in numbers.numpy()]
        seen += numbers.numpy().tolist()
    assert sorted(seen) == list(range(N))


@pytest.mark.parametrize("source", ["dataset", "x alone", "weights"])
def test_sources(tmp_path, source):
    data = write(
        tmp_path,
        {
            "dataset": tf.data.Dataset.from_tensor_slices((X, X / N)),
            "x alone": X,
            "weights": (X, X / N, np.ones(N)),
        }[source],
    )
    assert len(data.dataset.element_spec) == {"dataset": 2, "x alone": 1}.get(source, 3)
    assert sorted(itertools.chain(*rows(data))) == list(range(N))


RAGGED = tf.ragged.constant([[1], [1, 2]])


@pytest.mark.parametrize(
    "source",
    [
        tf.data.Dataset.from_tensor_slices(RAGGED),
        tf.data.Dataset.from_tensor_slices(({"a": RAGGED}, [0, 1])),
        tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(3))),
    ],
    ids=["ragged", "nested", "sparse"],
)
def test_rows_that_are_not_dense_are_refused(tmp_path, source):
    with pytest.raises(ValueError, match=r"must be dense.*ragged\.to_tensor"):
        write(tmp_path, source)
    assert not list(tmp_path.iterdir())


def test_padded_rows_are_stored(tmp_path):
    data = write(tmp_path, tf.data.Dataset.from_tensor_slices(RAGGED.to_tensor()))
    stored = np.concatenate([batch[0] for batch in data.dataset])
    assert sorted(stored.tolist()) == [[1, 0], [1, 2]]


def test_empty_bins_are_batches(tmp_path):
    data = write(tmp_path, X[:2], batches_per_epoch=5)
    sizes = [len(batch) for batch in rows(data)]
    assert sum(sizes) == 2
    assert len(sizes) == 5


@pytest.mark.slow
@pytest.mark.smoke
def test_all_trainings_on_the_same_files_are_one_allocation(tmp_path):
    data = write(tmp_path / "one")
    model = private()
    model.fit(data, epochs=2, verbose=0)
    model.fit(BallsInBins(tmp_path / "one"), epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 4 * BINS
    [segment] = model.ledger.segments
    assert segment == Segment(data.scheme, 4, 4.0)
    # One allocation with the noise over the square root of four.
    once = Segment(tfdp.sampling.BallsInBins(N, N // BINS), 1, 2.0)
    expected = Ledger((once,)).epsilon(1e-4)
    assert model.epsilon(1e-4) == pytest.approx(expected, rel=1e-9)
    # Another model on the same files, of other noise: the variances add up.
    other = private(noise_multiplier=2.0)
    other.fit(data, verbose=0)
    both = compose(model.ledger, other.ledger).epsilon(1e-4)
    joined = Segment(once.scheme, 1, 1 / math.sqrt(4 / 16 + 1 / 4))
    assert both == pytest.approx(Ledger((joined,)).epsilon(1e-4), rel=1e-9)
    statement = " ".join(model.privacy_statement(1e-4).split())
    assert "bins that were drawn once" in statement
    assert "the same batch of every pass" in statement


@pytest.mark.slow
def test_files_that_are_written_again_are_other_bins(tmp_path):
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    assert one.scheme != other.scheme
    model = private()
    for data in (one, other):
        model.fit(data, epochs=2, verbose=0)
    assert [each.scheme for each in model.ledger.segments] == [one.scheme, other.scheme]
    same = Ledger((Segment(one.scheme, 4, 4.0),))
    assert model.epsilon(1e-4) < same.epsilon(1e-4)


@pytest.mark.slow
def test_the_ledger_is_saved_and_a_budget_ends_training(tmp_path):
    data = write(tmp_path / "shards")
    model = private()
    model.fit(data, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.ledger == model.ledger
    target = Ledger((Segment(data.scheme, 3, 4.0),)).epsilon(1e-4)
    budget = tfdp.callbacks.PrivacyBudget(1e-4, target_epsilon=target)
    loaded.fit(data, epochs=20, verbose=0, callbacks=[budget])
    assert loaded.ledger.segments == (Segment(data.scheme, 3, 4.0),)


def test_the_scheme_says_what_the_directory_says(tmp_path):
    data = write(tmp_path)
    saved = json.loads((tmp_path / "bins.json").read_text())
    assert data.scheme == FixedBins(N, 60, BINS, saved["bins"])


def test_a_directory_is_written_once(tmp_path):
    write(tmp_path)
    with pytest.raises(ValueError, match="must be empty"):
        write(tmp_path)


def test_a_directory_without_bins_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no bins.*BallsInBins\.write"):
        BallsInBins(tmp_path)


def test_what_was_not_written_to_its_end_is_refused(tmp_path):
    def fails():
        yield from ((row, row) for row in X[:5])
        raise OSError("The disk is gone.")

    source = tf.data.Dataset.from_generator(
        fails, output_signature=(tf.TensorSpec([1]), tf.TensorSpec([1]))
    )
    with pytest.raises(tf.errors.UnknownError):
        write(tmp_path, source)
    with pytest.raises(ValueError, match="has no bins"):
        BallsInBins(tmp_path)


def test_files_that_have_changed_are_refused(tmp_path):
    write(tmp_path)
    changed = tmp_path / "bin-000003-0.rows"
    changed.write_bytes(changed.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"as they were written.*bin-000003-0\.rows"):
        BallsInBins(tmp_path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (tf.data.Dataset.range(3).repeat(), "must end"),
        (tf.data.Dataset.range(0), "must have examples"),
        ((X, X, X, X), "a tuple of 4"),
        (tf.data.Dataset.range(10).batch(4), r"one shape.*\.unbatch\(\)"),
    ],
    ids=["endless", "empty", "four", "batches"],
)
def test_sources_that_cannot_be_written_are_refused(tmp_path, source, words):
    with pytest.raises(ValueError, match=words):
        write(tmp_path, source)


def test_validation_takes_the_dataset(tmp_path):
    bins = write(tmp_path)
    declared = tfdp.data.declare(
        bins.dataset, number_of_examples=N, expected_batch_size=60, sampling="shuffle"
    )
    model = private()
    for data in (bins, declared):
        with pytest.raises(ValueError, match=r"Use `validation_data=data.dataset`"):
            model.fit(X, X / N, batch_size=60, validation_data=data, verbose=0)
        assert not model.ledger.segments
        assert model.evaluate(data.dataset, verbose=0) > 0


def test_targets_belong_into_the_files(tmp_path):
    with pytest.raises(ValueError, match="belong into the dataset"):
        private().fit(write(tmp_path), X)
