"""Poisson batches of every form of data."""

import itertools
import math

import keras
import numpy as np
import pytest

from tfdp.data import PoissonDataset

N, B = 600, 60
IDS = np.arange(N, dtype="float32")[:, np.newaxis]


def regression():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_facts():
    data = PoissonDataset(np.ones((1000, 2)), expected_batch_size=64)
    assert data.number_of_examples == 1000
    assert data.expected_batch_size == 64
    assert data.sampling_probability == 0.064
    assert len(data) == data.num_batches == 16
    assert data.seeded is False
    assert len(PoissonDataset(IDS, expected_batch_size=B, steps_per_epoch=3)) == 3


def test_users_are_the_examples():
    data = PoissonDataset(
        np.ones((100, 2)),
        expected_batch_size=2,
        user_ids=np.arange(100) % 10,
        examples_per_user=4,
    )
    assert data.number_of_examples == data.scheme.number_of_examples == 10
    assert len(data.first_rows(20)[0]) == 20


@pytest.mark.parametrize(
    "fact",
    ["number_of_examples", "expected_batch_size", "sampling_probability", "seeded"],
)
def test_facts_are_read_only(fact):
    with pytest.raises(AttributeError):
        setattr(PoissonDataset(IDS, expected_batch_size=B), fact, 1)


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


def test_expected_batch_size_of_all_examples_draws_all_of_them():
    data = PoissonDataset(IDS, expected_batch_size=N)
    assert len(data) == 1
    np.testing.assert_array_equal(data[0][0], IDS)


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


@pytest.mark.slow
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
    class Unsupervised(keras.Model):
        steps = 0

        def train_step(self, data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            assert y is None
            assert sample_weight is None
            assert x[1].dtype == "string"
            self.steps += 1
            return {"loss": 0.0}

    model = Unsupervised()
    model.compile(run_eagerly=True)
    model.fit(
        PoissonDataset((IDS, np.full(N, "text")), expected_batch_size=B), verbose=0
    )
    assert model.steps == 10


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


@pytest.mark.parametrize("name", ["expected_batch_size", "steps_per_epoch"])
@pytest.mark.parametrize("value", [True, "8"])
def test_numbers_of_wrong_type_are_refused(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be a whole number"):
        PoissonDataset(IDS, **{"expected_batch_size": 10, name: value})
