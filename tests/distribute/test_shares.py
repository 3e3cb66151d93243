"""Shares of batches: who reads which rows."""

import contextlib
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.data.training_data import training_data
from tfdp.distribute import shares
from tfdp.distribute.replicas import Replicas
from tfdp.distribute.shares import agreed_stream, check_shareable, shared_out

ROWS = 50


@dataclasses.dataclass(frozen=True)
class Cluster(Replicas):
    """Processes that are only looked at one after the other."""

    workers: int = 1
    per_worker: int = 1

    @property
    def number(self):
        return self.workers * self.per_worker

    @property
    def processes(self):
        return self.workers

    def of_all(self, numbers):
        return np.array([numbers] * self.workers)

    def distributed(self, pipeline):
        return [
            pipeline(
                tf.distribute.InputContext(
                    num_input_pipelines=self.workers,
                    input_pipeline_id=worker,
                    num_replicas_in_sync=self.number,
                )
            )
            for worker in range(self.workers)
        ]


class OneOfTwo(Cluster):
    """A process beside another one, which was looked at before."""

    def __init__(self, of_other=None):
        super().__init__(workers=2)
        object.__setattr__(self, "said", [])
        object.__setattr__(self, "of_other", of_other)

    def of_all(self, numbers):
        self.said.append(numbers)
        if self.of_other is None:
            return np.array([numbers] * 2)
        return np.array([self.of_other.said[len(self.said) - 1], numbers])


def given_data(x, y=None, sample_weight=None, *, batch_size=None, sampling="poisson"):
    return training_data(
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        steps_per_epoch=None,
        shuffle=True,
        sampling=sampling,
    )


def steps_of(data, cluster, *, steps, rows_per_unit=1, class_weight=None):
    """Return, for each step, what the replicas of all workers have."""
    shared = shared_out(
        data, cluster, epochs=2, rows_per_unit=rows_per_unit, class_weight=class_weight
    )
    of_workers = [
        list(dataset.take(steps * cluster.per_worker).as_numpy_iterator())
        for dataset in shared.x
    ]
    return [
        [
            share
            for shares in of_workers
            for share in shares[step * cluster.per_worker :][: cluster.per_worker]
        ]
        for step in range(len(of_workers[0]) // cluster.per_worker)
    ]


def indices_of(step):
    """Join the rows of all replicas, which hold their own numbers."""
    assert len({int(share.fingerprint) for share in step}) == 1
    return np.concatenate([share.rows[0][:, 0] for share in step])


CLUSTERS = [(1, 2), (2, 2)]
numbers = np.arange(ROWS, dtype="float32")[:, np.newaxis]


@pytest.mark.parametrize(("workers", "per_worker"), CLUSTERS)
def test_replicas_share_a_poisson_draw(workers, per_worker):
    cluster = Cluster(workers=workers, per_worker=per_worker)
    with pytest.warns(UserWarning, match="not secret"):
        seeded = [
            tfdp.data.PoissonDataset(numbers, numbers, expected_batch_size=4, seed=1)
            for _ in range(2)
        ]
    steps = steps_of(given_data(seeded[0]), cluster, steps=20)
    # What one device draws.
    alone = seeded[1]
    for epoch in (1, 2):
        alone.advance_to(epoch)
        for index in range(len(alone)):
            if steps:
                drawn = alone[index][0][:, 0]
                np.testing.assert_array_equal(indices_of(steps.pop(0)), drawn)
    assert not steps
    assert seeded[0].epoch > 2


@pytest.mark.slow
def test_draws_are_secret_and_independent():
    cluster = Cluster(workers=2)
    data = given_data(numbers, numbers, batch_size=10)
    steps = [
        indices_of(step)
        for _ in range(2)
        for step in steps_of(data, cluster, steps=200)
    ]
    sizes = [len(step) for step in steps]
    assert np.mean(sizes) == pytest.approx(10, abs=0.6)
    assert np.var(sizes) == pytest.approx(8, abs=2)
    counts = np.bincount(np.concatenate(steps).astype(int), minlength=ROWS)
    assert counts.min() > 40
    assert len({tuple(step) for step in steps}) == len(steps)


@pytest.mark.parametrize(("workers", "per_worker"), CLUSTERS)
def test_replicas_share_shuffled_passes(workers, per_worker):
    cluster = Cluster(workers=workers, per_worker=per_worker)
    data = given_data(numbers, numbers, batch_size=8, sampling="shuffle")
    steps = [indices_of(step) for step in steps_of(data, cluster, steps=14)]
    assert [len(step) for step in steps[:7]] == [8] * 6 + [2]
    first, second = np.concatenate(steps[:7]), np.concatenate(steps[7:])
    np.testing.assert_array_equal(np.sort(first), numbers[:, 0])
    np.testing.assert_array_equal(np.sort(second), numbers[:, 0])
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(("workers", "per_worker"), CLUSTERS)
def test_replicas_share_the_batches_of_a_pipeline(workers, per_worker):
    cluster = Cluster(workers=workers, per_worker=per_worker)
    dataset = tf.data.Dataset.from_tensor_slices((numbers, numbers)).batch(8)
    steps = steps_of(given_data(dataset), cluster, steps=7)
    for step, batch in zip(steps, dataset.as_numpy_iterator(), strict=True):
        np.testing.assert_array_equal(indices_of(step), batch[0][:, 0])


def test_no_replica_has_rows_without_their_targets():
    """Nor targets without their rows, which nobody would miss."""
    batches = [(numbers[:6], numbers[:6]), (numbers[:1], numbers[:6])]
    spec = tf.TensorSpec([None, 1])
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=(spec, spec)
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        steps_of(given_data(dataset), Cluster(per_worker=2), steps=2)


def test_only_endless_pipelines_have_a_known_length():
    """Keras would take the number of shares for that of batches."""
    cluster = Cluster(per_worker=2)
    dataset = tf.data.Dataset.from_tensor_slices(numbers).batch(8)

    def cardinality(dataset):
        shared = shared_out(
            given_data(dataset), cluster, epochs=1, rows_per_unit=1, class_weight=None
        )
        return int(shared.x[0].cardinality())

    assert cardinality(dataset) == tf.data.UNKNOWN_CARDINALITY
    assert cardinality(dataset.repeat()) == tf.data.INFINITE_CARDINALITY


@pytest.mark.slow
def test_other_batches_have_other_fingerprints():
    def fingerprints(x, y):
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
        steps = steps_of(given_data(dataset), Cluster(workers=2), steps=5)
        return [int(step[0].fingerprint) for step in steps]

    same = fingerprints(numbers, numbers)
    assert same == fingerprints(numbers, numbers)
    assert len(set(same)) == 5
    other = numbers.copy()
    other[12] += 1e-5
    changed = fingerprints(numbers, other)
    assert [one == two for one, two in zip(same, changed, strict=True)] == [
        True,
        False,
        True,
        True,
        True,
    ]


def test_units_stay_together():
    dataset = tf.data.Dataset.from_tensor_slices((numbers, numbers)).batch(16)
    cluster = Cluster(workers=3)
    steps = steps_of(given_data(dataset), cluster, steps=3, rows_per_unit=4)
    assert [len(share.rows[0]) for share in steps[0]] == [4, 4, 8]
    assert [share.rows[0][0, 0] % 4 for share in steps[0]] == [0, 0, 0]


def test_weights_of_classes():
    y = np.arange(ROWS) % 2
    cluster = Cluster(workers=2)
    data = given_data(numbers, y, batch_size=10)
    for step in steps_of(data, cluster, steps=3, class_weight={0: 1.0, 1: 5.0}):
        for share in step:
            x, labels, weights = share.rows
            np.testing.assert_array_equal(labels, x[:, 0] % 2)
            np.testing.assert_array_equal(weights, np.where(labels, 5.0, 1.0))
    with pytest.raises(ValueError, match="takes the place of"):
        steps_of(
            given_data(numbers, y, np.ones(ROWS), batch_size=10),
            cluster,
            steps=1,
            class_weight={0: 1.0, 1: 5.0},
        )


def test_structures_and_dtypes():
    x = {"image": numbers, "text": np.array([f"row {i}" for i in range(ROWS)])}
    y = (np.arange(ROWS), numbers.astype("float64"))
    cluster = Cluster(workers=2)
    for step in steps_of(given_data(x, y, batch_size=10), cluster, steps=2):
        for share in step:
            inputs, (labels, targets) = share.rows
            expected = [f"row {i}".encode() for i in inputs["image"][:, 0].astype(int)]
            assert inputs["text"].tolist() == expected
            assert labels.dtype == np.int64
            assert targets.dtype == np.float32


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(TypeError, match="Replicas share"):
        check_shareable(given_data(each for each in [np.zeros((2, 1))]))


def strings(number):
    return np.array([f"row {n}" for n in range(number)], object)


SOURCES = {
    "numbers": lambda rows: np.arange(3.0 * rows).reshape(rows, 3),
    "strings": strings,
    "views": lambda rows: np.arange(6.0 * rows).reshape(rows, 6)[:, ::2],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_single_row_that_differs_between_workers_is_found(kind, monkeypatch):
    # More than are read at once.
    rows = 9_000
    monkeypatch.setattr("tfdp.distribute.shares.fresh_key", lambda: 1)

    def share(x, y, cluster):
        shared_out(
            given_data(x, y, batch_size=4),
            cluster,
            epochs=1,
            rows_per_unit=1,
            class_weight=None,
        )
        return cluster

    y = np.zeros(rows)
    first = share(SOURCES[kind](rows), y, OneOfTwo())
    share(SOURCES[kind](rows), y, OneOfTwo(first))
    for row in (0, 5_000, rows - 1):
        x = SOURCES[kind](rows)
        x[row] = x[(row + 1) % rows]
        with pytest.raises(tfdp.errors.NotPrivateError, match="different rows"):
            share(x, y, OneOfTwo(first))
    y[4_999] = 1
    with pytest.raises(tfdp.errors.NotPrivateError, match="different rows"):
        share(SOURCES[kind](rows), y, OneOfTwo(first))


def test_files_are_not_read_whole_to_be_compared(tmp_path, monkeypatch):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(100_000, 2))
    read = []
    take = tfdp.data.rows.Rows.take
    monkeypatch.setattr(
        tfdp.data.rows.Rows,
        "take",
        lambda rows, indices: read.append(len(indices)) or take(rows, indices),
    )
    shared_out(
        given_data(x[:, :1], batch_size=4),
        OneOfTwo(),
        epochs=1,
        rows_per_unit=1,
        class_weight=None,
    )
    # Drawn with replacement: a few of the 4,096 are the same.
    assert 3_900 < sum(read) <= 4_096


# ------------------------------------------------------------------- the same step


def agreements(monkeypatch, fingerprints, clips):
    """Return, for each of some processes, the stream it goes on with; True if it stops."""
    places = range(len(fingerprints))

    class Processes(Replicas):
        number = processes = len(fingerprints)

    def agreed(place):
        monkeypatch.setattr(shares, "replica_number", lambda: tf.constant(place))
        return agreed_stream(
            Processes(),
            tf.constant([10 + place, 20 + place], tf.int64),
            tf.constant(fingerprints[place], tf.int64),
            [tf.constant(clips[place], tf.float64)],
        )

    said = []
    monkeypatch.setattr(shares, "summed", lambda own: said.append(own) or own)
    for place in places:
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            agreed(place)
    sums = [tf.add_n(of_all) for of_all in zip(*said, strict=True)]
    monkeypatch.setattr(shares, "summed", lambda _: sums)
    found = []
    for place in places:
        try:
            found.append(agreed(place).numpy().tolist())
        except tf.errors.InvalidArgumentError as error:
            found.append(shares.DIFFERENT_STEPS in str(error))
    return found


def test_processes_that_take_the_same_step_have_the_noise_of_the_chief(monkeypatch):
    # What is the same in float32 is the same.
    found = agreements(monkeypatch, [7, 7, 7], [0.1, 0.1, np.float32(0.1)])
    assert found == [[10, 20]] * 3


@pytest.mark.parametrize(
    ("fingerprints", "clips"),
    [
        ([7, 7, 8], [1.0] * 3),
        ([1, 2, 3], [1.0] * 3),  # The second one has their mean.
        ([0, 2**32 - 1], [1.0] * 2),
        ([7, 7, 7], [1.0, 1.0, 1.0 + 2**-20]),
    ],
)
def test_no_process_goes_on_where_one_takes_another_step(
    monkeypatch, fingerprints, clips
):
    assert agreements(monkeypatch, fingerprints, clips) == [True] * len(clips)
