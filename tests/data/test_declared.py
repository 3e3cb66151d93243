import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tfdp.data import DeclaredDataset, PoissonDataset, declare, declared
from tfdp.sampling import BallsInBins, CyclicPoisson, Shuffled

N, B = 100, 8


def rows(n=N):
    return tf.data.Dataset.from_tensor_slices((np.ones((n, 3)), np.ones(n)))


def shuffled(dataset, n=N, size=B):
    return declare(
        dataset, number_of_examples=n, expected_batch_size=size, sampling="shuffle"
    )


def coins(dataset, sampling="poisson"):
    return declare(
        dataset, number_of_examples=N, expected_batch_size=B, sampling=sampling
    )


class Batches(keras.utils.PyDataset):
    def __init__(self, number):
        super().__init__()
        self.number = number

    @property
    def num_batches(self):
        return self.number

    def __getitem__(self, index):
        raise AssertionError("a declaration reads no data")


def test_fields_are_what_was_declared():
    dataset = rows().shuffle(N).batch(B)
    declared = shuffled(dataset, np.int64(N), np.int64(B))
    assert declared == DeclaredDataset(dataset, N, B, "shuffle")
    assert type(declared.number_of_examples) is int
    assert type(declared.expected_batch_size) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        declared.sampling = "poisson"


@pytest.mark.parametrize(
    ("dataset", "batches"),
    [
        (rows().batch(B), 13),
        (rows().batch(B, drop_remainder=True), 12),
        (rows().shuffle(N).batch(B).prefetch(2).cache(), 13),
        (rows().filter(lambda x, y: y > 0).batch(B), 13),
        (rows().batch(B).take(5), 5),
        (Batches(13), 13),
    ],
    ids=["partial", "dropped", "cached", "unknown", "fewer", "PyDataset"],
)
def test_shuffled_batches_of_one_pass(dataset, batches):
    assert shuffled(dataset).batches_per_pass == batches


def test_number_of_batches_is_none_where_only_the_data_tell():
    assert shuffled(rows().batch(B)).number_of_batches == 13
    assert shuffled(rows().filter(lambda *_: True).batch(B)).number_of_batches is None
    endless = declare(
        rows().batch(B).repeat(),
        number_of_examples=N,
        expected_batch_size=B,
        sampling="poisson",
    )
    assert endless.number_of_batches is None
    assert endless.batches_per_pass == 13


@pytest.mark.parametrize("n", [8, 9, 15, 16, 17, 100])
@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("passes", [2, 3])
def test_every_repetition_that_shows_is_refused(n, drop_remainder, passes):
    once = rows(n).batch(B, drop_remainder=drop_remainder)
    assert shuffled(once, n).batches_per_pass == once.cardinality()
    with pytest.raises(ValueError, match=r"at most once.*Remove `.repeat\(\)`"):
        shuffled(once.repeat(passes), n)
    with pytest.raises(ValueError, match=r"at most once.*Remove `.repeat\(\)`"):
        shuffled(rows(n).repeat(passes).batch(B, drop_remainder=drop_remainder), n)


@pytest.mark.parametrize(
    "dataset",
    [
        rows().shuffle(N).repeat().batch(B),
        rows().shuffle(N).batch(B).repeat(),
        rows().filter(lambda x, y: y > 0).repeat().batch(B),
        Batches(None),
    ],
)
def test_endless_passes_are_refused(dataset):
    with pytest.raises(ValueError, match=r"an infinite dataset. Remove `.repeat\(\)` "):
        shuffled(dataset)


def test_pydataset_with_more_batches_than_a_pass_is_refused():
    with pytest.raises(ValueError, match="Received: 14 batches, expected_batch_size=8"):
        shuffled(Batches(14))


def test_static_batches_of_another_size_are_refused():
    with pytest.raises(ValueError, match="Use `expected_batch_size=16`"):
        shuffled(rows().batch(16, drop_remainder=True))


@pytest.mark.parametrize("sampling", ["shuffle", "poisson"])
@pytest.mark.parametrize(
    "dataset",
    [rows(), tf.data.Dataset.from_tensors((np.ones((28, 2)), np.ones(10)))],
    ids=["scalar", "sizes"],
)
def test_single_examples_are_refused(dataset, sampling):
    with pytest.raises(ValueError, match=r"must yield batches.*`dataset.batch"):
        declare(dataset, number_of_examples=N, expected_batch_size=B, sampling=sampling)


def test_ragged_sparse_and_missing_components_are_batches():
    def generate():
        yield from ()

    dataset = tf.data.Dataset.from_generator(
        generate,
        output_signature=(
            {
                "ragged": tf.RaggedTensorSpec((None, None)),
                "sparse": tf.SparseTensorSpec((None, 4)),
                "any rank": tf.TensorSpec(None),
            },
            tf.TensorSpec((None,)),
        ),
    ).map(lambda x, y: (x, y, None))
    assert shuffled(dataset).batches_per_pass == 13


@pytest.mark.parametrize(
    "dataset", [rows().batch(B), rows().batch(B).repeat(), Batches(None), Batches(7)]
)
def test_poisson_batches_of_varying_size(dataset):
    declared = declare(
        dataset, number_of_examples=N, expected_batch_size=B, sampling="poisson"
    )
    assert declared.sampling == "poisson"


def test_poisson_batches_of_constant_size_draw_a_warning():
    with pytest.warns(UserWarning, match=r"vary in size.*batches of 16\. Use `sampli"):
        coins(rows().batch(16, drop_remainder=True))


@pytest.mark.parametrize("size", [B, 16])
def test_cyclic_draws_of_constant_size_draw_a_warning(size):
    """Shuffled batches cost more. Draws may be padded, to more than is expected."""
    constant = rows().batch(size, drop_remainder=True)
    with pytest.warns(UserWarning, match=f"vary in size.*batches of {size}.*'shuffle'"):
        declared = coins(constant, "cyclic_poisson")
    assert declared.scheme == CyclicPoisson(N, B)
    assert coins(rows().batch(size), "cyclic_poisson").scheme == CyclicPoisson(N, B)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (rows().batch(B).repeat(2), "26 batches in an epoch, 13 in a pass"),
        (Batches(14), "14 batches in an epoch, 13 in a pass"),
        (rows().batch(B).repeat(), "an infinite dataset"),
        (Batches(None), "an infinite dataset"),
    ],
)
def test_cyclic_draws_of_more_than_a_pass_are_refused(dataset, message):
    with pytest.raises(ValueError, match=rf"{message}.*\.repeat\(\)") as refused:
        coins(dataset, "cyclic_poisson")
    assert "shuffle" not in str(refused.value)


def test_schemes_learn_the_number_of_batches(monkeypatch):
    """One of the user's own may cost as much as an epoch is long."""
    monkeypatch.setattr(Shuffled, "in_epochs_of", lambda scheme, batches: batches)
    assert shuffled(rows().batch(B)).scheme == 13


@pytest.mark.parametrize(
    "dataset",
    [np.ones((N, 3)), iter([]), [rows()], None, (batch for batch in ())],
)
def test_other_data_is_refused(dataset):
    with pytest.raises(TypeError, match=r"`dataset` must be a.*Received: type\("):
        shuffled(dataset)


def test_poisson_dataset_needs_no_declaration():
    with pytest.raises(TypeError, match=r"`private.fit\(dataset\)`"):
        shuffled(PoissonDataset(np.ones((N, 3)), expected_batch_size=B))


@pytest.mark.parametrize("sampling", ["Shuffle", "", None, "without replacement"])
def test_unknown_sampling_is_refused(sampling):
    with pytest.raises(ValueError, match="`sampling` must be one of 'shuffle', 'po"):
        declare(
            rows().batch(B),
            number_of_examples=N,
            expected_batch_size=B,
            sampling=sampling,
        )


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["number_of_examples", "expected_batch_size"])
def test_numbers_out_of_range_are_refused(name, value):
    numbers = {"number_of_examples": N, "expected_batch_size": B, name: value}
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number"):
        declare(rows().batch(B), sampling="shuffle", **numbers)


def test_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="Use `expected_batch_size=100`"):
        shuffled(rows().batch(256), size=256)


BINNED = {"number_of_examples": 600, "sampling": "balls_in_bins"}


def in_bins(x, batches):
    """A fresh allocation in every iteration."""

    def batches_of_an_epoch():
        bins = np.random.default_rng().integers(batches, size=len(x))
        for index in range(batches):
            yield x[bins == index]

    spec = tf.TensorSpec([None, *x.shape[1:]], x.dtype)
    dataset = tf.data.Dataset.from_generator(batches_of_an_epoch, output_signature=spec)
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))


def test_bins_that_vary_are_balls_in_bins():
    dataset = in_bins(np.ones((600, 2), "float32"), 10)
    declared = declare(dataset, expected_batch_size=60, **BINNED)
    assert declared.scheme == BallsInBins(600, 60, 10)
    assert declared.batches_per_pass == 10


@pytest.mark.parametrize("drop", [True, False])
def test_cuts_of_an_order_are_no_balls_in_bins(drop):
    cut = tf.data.Dataset.range(600).shuffle(600).batch(60, drop_remainder=drop)
    with pytest.raises(ValueError, match=r"batches of 60.*Use `sampling='shuffle'`"):
        declare(cut, expected_batch_size=60, **BINNED)


@pytest.mark.parametrize(
    "cut",
    [
        lambda order: order.shuffle(1020).batch(100).shuffle(11),
        lambda order: order.batch(100).shuffle(11),
        # The last cut has another size in every pass.
        lambda order: (
            order
            .filter(lambda i: (i < 1001) | (tf.random.uniform([]) < 0.5))
            .batch(100)
            .shuffle(11)
            .apply(tf.data.experimental.assert_cardinality(11))
        ),
    ],
)
def test_cuts_in_any_order_are_no_balls_in_bins(cut):
    dataset = cut(tf.data.Dataset.range(1020))
    with pytest.raises(ValueError, match=r"batches of .*Use `sampling='shuffle'`"):
        declare(
            dataset,
            number_of_examples=1020,
            expected_batch_size=93,
            sampling="balls_in_bins",
        )


@pytest.mark.parametrize("read", [4, 10, 1000])
def test_cuts_of_which_some_are_read_are_no_balls_in_bins(read, monkeypatch):
    monkeypatch.setattr(declared, "_MOST_BATCHES_READ", read)
    cut = tf.data.Dataset.range(1020).shuffle(1020).batch(100).shuffle(11)
    numbers = {"number_of_examples": 1020, "expected_batch_size": 93}
    with pytest.raises(ValueError, match="batches of 100"):
        declare(cut, sampling="balls_in_bins", **numbers)


@pytest.mark.parametrize("size", [300, 150, 200])
def test_few_cuts_of_an_order_are_no_balls_in_bins_either(size):
    cut = tf.data.Dataset.range(600).shuffle(600).batch(size)
    with pytest.raises(
        ValueError, match=rf"batches of {size}.*Use `sampling='shuffle'`"
    ):
        declare(cut, expected_batch_size=size, **BINNED)


def test_bins_must_say_how_many_they_are():
    dataset = in_bins(np.ones((600, 2), "float32"), 10).filter(lambda _: True)
    with pytest.raises(ValueError, match=r"must be known.*assert_cardinality"):
        declare(dataset, expected_batch_size=60, **BINNED)


def test_bins_must_have_the_expected_size():
    dataset = in_bins(np.ones((600, 2), "float32"), 10)
    with pytest.raises(ValueError, match=r"Use `expected_batch_size=60`"):
        declare(dataset, expected_batch_size=30, **BINNED)
    declare(dataset, expected_batch_size=60, **BINNED)


@pytest.mark.parametrize("batches", [2, 10])
def test_bins_that_stay_are_another_mechanism(batches, tmp_path):
    bins = tfdp.data.BallsInBins.write(np.ones((600, 2)), tmp_path, batches)
    changed = bins.dataset.map(lambda x: 2 * x[0])
    for dataset in (bins.dataset, changed, bins.dataset.shuffle(100)):
        with pytest.raises(
            ValueError, match=r"same in every pass.*BallsInBins\.write\("
        ):
            declare(dataset, expected_batch_size=600 // batches, **BINNED)
    # As its message says.
    shuffled = BINNED | {"sampling": "shuffle"}
    size = bins.expected_batch_size
    assert declare(bins.dataset, expected_batch_size=size, **shuffled).batches_per_pass
    with pytest.raises(TypeError, match=r"private\.fit\(dataset\)"):
        declare(bins, expected_batch_size=size, **BINNED)


class Binned(keras.utils.PyDataset):
    """Bins that are drawn at the ends of epochs, or never again."""

    def __init__(self, stay):
        super().__init__()
        self.stay = stay
        self.bins = np.random.default_rng().integers(10, size=600)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return np.ones((int((self.bins == index).sum()), 2))

    def on_epoch_end(self):
        if not self.stay:
            self.bins = np.random.default_rng().integers(10, size=600)


def test_bins_of_a_pydataset():
    declare(Binned(stay=False), expected_batch_size=60, **BINNED)
    with pytest.raises(ValueError, match="same in every pass"):
        declare(Binned(stay=True), expected_batch_size=60, **BINNED)


@pytest.mark.slow
def test_examples_may_have_no_target():
    """A pipeline has a None as a part of its own."""
    rows = np.ones((6, 2), "float32")
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Dense(1, activity_regularizer="l2")(inputs))
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), loss=None
    )
    for given in ((rows,), (rows, None)):
        data = tfdp.data.declare(
            tf.data.Dataset.from_tensors(given),
            number_of_examples=6,
            expected_batch_size=6,
            sampling="shuffle",
        )
        private.fit(data, verbose=0)
