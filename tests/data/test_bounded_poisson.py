"""Batches of one size, of which a part is padding."""

import keras
import numpy as np
import pytest

import tfdp
from tests.small import data, logits_loss, network, noiseless, private
from tfdp.data import PoissonDataset

ROWS, BATCH = 40, 6

pytestmark = [
    pytest.mark.filterwarnings("ignore:Draws made with a `seed`"),
    pytest.mark.filterwarnings("ignore:`max_batch_size` is near"),
]


def dataset(bound, **options):
    return PoissonDataset(
        *data(ROWS), expected_batch_size=BATCH, max_batch_size=bound, seed=3, **options
    )


def trained(bound, *, wrap=None, **options):
    model = private(opt=noiseless(), wrap=wrap, metrics=["accuracy"], **options)
    history = model.fit(dataset(bound), epochs=2, verbose=0, shuffle=False).history
    return model.get_weights(), history, model


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        pytest.param({"engine": "bookkeeping"}, {}, marks=pytest.mark.slow),
        pytest.param({"engine": "vectorized"}, {}, marks=pytest.mark.slow),
        ({"physical_batch_size": 4}, {}),
        pytest.param({}, {"run_eagerly": True}, marks=pytest.mark.slow),
        pytest.param({}, {"jit_compile": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_padding_is_in_no_gradient_and_in_no_metric(wrap, options):
    weights, history, _ = trained(ROWS, wrap=wrap, **options)
    expected, of_expected, _ = trained(None, wrap=wrap, **options)
    for found, right in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
    for name, values in of_expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


@pytest.mark.smoke
def test_a_full_batch_is_a_part_of_the_draw():
    model = tfdp.DPModel(network())
    model.compile(noiseless(), logits_loss())
    model.fit(dataset(8), epochs=2, verbose=0)
    [segment] = model.ledger.segments
    assert segment.scheme == tfdp.sampling.TruncatedPoisson(ROWS, BATCH, 8)


def test_batches_have_one_size_and_say_what_is_padding():
    free, cut = dataset(None), dataset(8)
    filled = 0
    for index in range(len(free)):
        x, y = free[index]
        (padded_x, padded_y), is_padding = cut[index]
        assert padded_x.shape == (8, 3)
        assert is_padding.sum() == max(0, 8 - len(x))
        assert not padded_x[is_padding].any()
        if len(x) <= 8:
            filled += 1
            np.testing.assert_array_equal(padded_x[: len(x)], x)
            np.testing.assert_array_equal(padded_y[: len(x)], y)
    assert filled


def test_strings_are_padded_with_empty_ones():
    names = np.array([f"{n}" for n in range(ROWS)])
    batch = PoissonDataset(
        (names, np.arange(ROWS)), expected_batch_size=3, max_batch_size=ROWS
    )[0]
    ((strings, numbers),), is_padding = batch
    for name, number, is_none in zip(strings.numpy(), numbers, is_padding, strict=True):
        assert name.decode() == ("" if is_none else str(number))


def test_a_bound_near_the_mean_draws_a_warning():
    with pytest.warns(UserWarning, match=r"epsilon.*max_batch_size=8.*_size=27`"):
        dataset(8)


@pytest.mark.parametrize("bound", [0, 5, 1.5, float("nan")])
def test_a_bound_out_of_range_is_refused(bound):
    with pytest.raises(ValueError, match="max_batch_size"):
        dataset(bound)


def test_weights_of_classes_are_refused():
    with pytest.raises(ValueError, match=r"sample_weight=weight_of_class\[y\]"):
        private().fit(dataset(30), class_weight={0: 1.0, 1: 2.0}, verbose=0)


def plain(model):
    model.compile("sgd", logits_loss())
    return model


@pytest.mark.parametrize(
    "use",
    [
        lambda batches: private().evaluate(batches, verbose=0),
        lambda batches: private().predict(batches, verbose=0),
        lambda batches: private().fit(
            *data(ROWS), batch_size=6, validation_data=batches, verbose=0
        ),
        lambda batches: plain(network()).evaluate(batches, verbose=0),
        lambda batches: plain(network()).predict(batches, verbose=0),
        lambda batches: plain(keras.Sequential([network()])).fit(batches, verbose=0),
        lambda batches: batches[0][0],
    ],
)
def test_padding_is_never_taken_for_targets(use):
    with pytest.raises((TypeError, ValueError), match=r"padding.*[(]x, y[)]`"):
        use(dataset(30))


def test_validation_with_padding_is_refused_before_a_step():
    model = private()
    with pytest.raises(ValueError, match="padding"):
        model.fit(dataset(30), validation_data=dataset(30), verbose=0)
    assert not model.ledger.segments
