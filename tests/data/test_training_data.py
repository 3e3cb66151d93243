"""How data reach the steps of `fit`, and as what the steps count."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.data import PoissonDataset, declare
from tfdp.data.drawn_dataset import DrawnDataset
from tfdp.data.training_data import (
    made_up_rows,
    number_of_examples,
    split_for_validation,
    training_data,
)
from tfdp.sampling import Poisson, Shuffled, Unknown

X = np.arange(20.0).reshape(10, 2)
Y = np.arange(10)


def of(x, y=None, sample_weight=None, **options):
    defaults = {
        "batch_size": None,
        "steps_per_epoch": None,
        "shuffle": True,
        "sampling": "poisson",
    }
    return training_data(x, y, sample_weight, **{**defaults, **options})


def dataset(batch=4):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch)


class Batches(keras.utils.PyDataset):
    """Batches that are drawn anew at the end of each epoch."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        size = np.random.default_rng().integers(len(X))
        return X[:size], Y[:size]


@pytest.mark.parametrize("sampling", ["shuffle", "balls_in_bins"])
def test_what_an_epoch_draws_anew_is_another_pass(sampling):
    """Keras goes on with the iterator, and tells the data that an epoch has ended."""
    declared = declare(
        Batches(), number_of_examples=40, expected_batch_size=4, sampling=sampling
    )
    data = of(declared, steps_per_epoch=5)
    assert data.begins_pass_each_epoch
    assert data.planned_releases(3) == 3


@pytest.mark.parametrize(
    ("options", "steps_per_execution", "steps"),
    [
        ({}, 1, 3),
        ({}, 3, 3),
        # Keras would take more steps than an epoch has.
        ({}, 2, None),
        ({"steps_per_epoch": 4}, 2, 4),
        # An epoch is a pass.
        ({"sampling": "balls_in_bins"}, 1, None),
        # Keras draws these itself.
        ({"sampling": "shuffle"}, 1, None),
    ],
)
def test_streams_without_an_end(options, steps_per_execution, steps):
    data = of(X, Y, batch_size=4, **options).as_pipeline(steps_per_execution)
    assert data.keras_steps_per_epoch == steps
    if steps is not None:
        assert sum(1 for _ in data.x.take(20)) == 20


def test_an_epoch_of_a_stream_has_its_steps():
    """Whatever the number of batches that the data have."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    private = tfdp.DPModel(model)
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    private.compile(optimizer, "mse", steps_per_execution=2)
    data = PoissonDataset(X, Y[:, None], expected_batch_size=2)
    private.fit(data, epochs=3, steps_per_epoch=8, verbose=0)
    assert int(optimizer.iterations) == 24
    assert [segment.count for segment in private.ledger.segments] == [24]


@pytest.mark.filterwarnings("ignore:Draws made with a `seed`")
def test_seeded_draws_are_of_the_epoch_that_asks_for_them():
    drawn = PoissonDataset(X, Y, expected_batch_size=4, seed=3)
    data = of(drawn).as_pipeline(1)
    assert data.keras_steps_per_epoch is None
    assert sum(1 for _ in data.x.take(20)) == len(drawn)


def generator():
    yield from [(X[:0], Y[:0]), (X[:4], Y[:4]), (X[4:], Y[4:])]


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[index * 5 : index * 5 + 5], Y[index * 5 : index * 5 + 5]


# ---------------------------------------------------------------------- accounting


def test_arrays_are_drawn_by_poisson_sampling():
    data = of(X, Y, batch_size=4)
    assert data.scheme == Poisson(10, 4)
    assert isinstance(data.x, DrawnDataset)
    assert (data.y, data.steps_per_epoch, data.batch_size) == (None, 3, None)


def test_arrays_may_be_shuffled():
    data = of(X, Y, batch_size=4, sampling="shuffle")
    assert data.scheme == Shuffled(10, 4)
    assert (data.batches_per_pass, data.steps_per_epoch, data.shuffle) == (3, 3, True)
    assert data.begins_pass_each_epoch
    assert not of(X, Y, sampling="shuffle", steps_per_epoch=1).begins_pass_each_epoch


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_a_batch_larger_than_the_data_draws_a_warning(sampling):
    message = r"larger than the data.*Received: batch_size=11, 10 rows\. Use"
    with pytest.warns(UserWarning, match=message):
        data = of(X, Y, batch_size=11, sampling=sampling)
    assert data.scheme.expected_batch_size == 10
    assert of(X, Y).scheme.expected_batch_size == 10


@pytest.mark.parametrize("x", [dataset(), Sequence(), generator()], ids=type)
def test_of_other_data_nothing_is_known(x):
    data = of(x, steps_per_epoch=2)
    assert data.scheme == Unknown()
    assert data.scheme.expected_batch_size is None
    assert (data.steps_per_epoch, data.batches_per_pass) == (2, 1)


def test_declared_data_are_what_is_declared():
    facts = {"number_of_examples": 10, "expected_batch_size": 4}
    shuffled = of(declare(dataset(), sampling="shuffle", **facts))
    assert shuffled.scheme == Shuffled(10, 4)
    assert (shuffled.batches_per_pass, shuffled.steps_per_epoch) == (3, 3)


def test_items_are_passes_or_steps_of_the_epochs_to_run():
    assert of(X, Y).planned_releases(2) == 2 * of(X, Y).steps_per_epoch
    shuffled = of(X, Y, sampling="shuffle", batch_size=4)
    assert shuffled.planned_releases(2) == 2
    # A pass that has begun counts, where epochs are no passes.
    short = dataclasses.replace(
        shuffled, steps_per_epoch=2, begins_pass_each_epoch=False
    )
    assert short.batches_per_pass == 3
    assert short.planned_releases(2) == 2
    assert short.planned_releases(1) == 1
    assert of(generator()).planned_releases(2) is None


# ---------------------------------------------------------------- rows for the checks


@pytest.mark.parametrize(
    "make",
    [
        lambda: of(X, Y),
        lambda: of(X, Y, sampling="shuffle"),
        lambda: of(dataset()),
        lambda: of(Sequence()),
        lambda: of(generator()),
    ],
    ids=["poisson", "shuffle", "dataset", "sequence", "generator"],
)
def test_a_sample_is_the_first_rows(make):
    _, (x, y, sample_weight) = make().with_sample()
    np.testing.assert_array_equal(x, X[:4])
    np.testing.assert_array_equal(y, Y[:4])
    assert sample_weight is None


def test_a_sample_takes_nothing_away_from_a_generator():
    data, _ = of(generator()).with_sample()
    assert [len(y) for _, y in data.x] == [0, 4, 6]


def test_data_without_batches_are_refused():
    with pytest.raises(ValueError, match="no batches"):
        of(dataset().take(0)).with_sample()


def test_rows_are_made_up_where_there_are_none():
    x = {"floats": np.zeros((0, 3), "float32"), "ids": np.zeros((0, 2), "int32")}
    rows = made_up_rows(x)
    assert rows["floats"].shape == (4, 3)
    assert rows["floats"].dtype == "float32"
    assert len(np.unique(rows["floats"])) == 12
    np.testing.assert_array_equal(rows["ids"], np.zeros((4, 2)))
    assert made_up_rows(X).shape == (4, 2)


def test_validation_takes_the_last_rows():
    training, validation = split_for_validation((X, Y, None), 0.25)
    np.testing.assert_array_equal(training[1], Y[:7])
    np.testing.assert_array_equal(validation[0], X[7:])
    assert training[2] is validation[2] is None


def test_numbers_of_examples():
    assert number_of_examples({"a": X, "b": Y}) == 10
    assert number_of_examples((None, tf.zeros([5, 2]))) == 5
    with pytest.raises(TypeError, match="must be arrays"):
        number_of_examples(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X, "shuffle": False}, "sampled at random"),
        ({"x": X, "batch_size": 0}, "`batch_size` must"),
        ({"x": dataset(), "batch_size": 4}, "`batch_size` belongs to arrays"),
        ({"x": PoissonDataset(X, expected_batch_size=4), "y": Y}, "into the dataset"),
    ],
    ids=["shuffle", "batch_size", "batch_size_of_dataset", "y"],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        of(**arguments)


@pytest.mark.parametrize(
    ("x", "fix"),
    [
        (tf.ragged.constant([[1.0], [2.0, 3.0]]), r"\(x.to_tensor\(\), y\)"),
        (
            tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]]),
            r"\(tf.sparse.to_dense\(x\), y\)",
        ),
    ],
    ids=["ragged", "sparse"],
)
@pytest.mark.parametrize("is_declared", [True, False])
def test_batches_that_are_not_dense_are_refused(x, fix, is_declared):
    data = tf.data.Dataset.from_tensors((x, tf.ones([2, 1])))
    if is_declared:
        data = declare(
            data, number_of_examples=2, expected_batch_size=2, sampling="shuffle"
        )
    with pytest.raises(TypeError, match=fix):
        training_data(
            data,
            None,
            None,
            batch_size=None,
            steps_per_epoch=None,
            shuffle=True,
            sampling="poisson",
        )
