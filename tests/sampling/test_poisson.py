import itertools
import math
import time
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from tfdp.sampling import (
    fresh_key,
    poisson_indices,
    poisson_probability,
    seeded_key,
)

KEY = seeded_key(2024)

sizes_and_probabilities = pytest.mark.parametrize(
    ("n", "q"),
    [
        (40, 0.1),
        pytest.param(40, 0.9, marks=pytest.mark.slow),
        pytest.param(20_000, 0.1, marks=pytest.mark.slow),
    ],
)


def draws(number, *, n, q, key=KEY):
    return [
        poisson_indices(
            key, (1, index, 0), number_of_examples=n, sampling_probability=q
        )
        for index in range(number)
    ]


@pytest.mark.smoke
def test_indices_are_distinct_sorted_and_in_range():
    for indices in draws(200, n=50, q=0.3):
        assert indices.dtype == np.int64
        assert np.all(np.diff(indices) > 0)
        assert np.all((indices >= 0) & (indices < 50))


@pytest.mark.slow
@pytest.mark.statistical
@sizes_and_probabilities
def test_sizes_are_binomial(n, q):
    number = 20_000 if n < 1000 else 2000
    sizes = [len(indices) for indices in draws(number, n=n, q=q)]
    binomial = stats.binom(n, q)
    edges = np.unique(binomial.ppf(np.linspace(0.05, 0.95, 10)))
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=len(edges) + 1)
    below = np.concatenate([[0.0], binomial.cdf(edges), [1.0]])
    assert stats.chisquare(observed, number * np.diff(below)).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.statistical
@sizes_and_probabilities
def test_every_example_is_included_equally_often(n, q):
    number = 20_000 if n < 1000 else 2000
    counts = np.bincount(np.concatenate(draws(number, n=n, q=q)), minlength=n)
    # Sum of squared standard scores of n independent Binomial(number, q) counts.
    statistic = np.sum((counts - number * q) ** 2) / (number * q * (1 - q))
    assert 1e-3 < stats.chi2(n).cdf(statistic) < 1 - 1e-3


@pytest.mark.slow
@pytest.mark.statistical
def test_every_subset_has_the_probability_that_independent_coins_give_it():
    n, q, number = 4, 0.3, 20_000
    observed = np.zeros(2**n)
    for indices in draws(number, n=n, q=q):
        observed[np.sum(2**indices)] += 1
    expected = [
        number * math.prod(q if coin else 1 - q for coin in reversed(coins))
        for coins in itertools.product([0, 1], repeat=n)
    ]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.statistical
@pytest.mark.parametrize("word", [0, 1, 2])
def test_neighbouring_draws_are_independent(word):
    n, q, number = 1000, 0.5, 400
    included = np.zeros((number, n))
    for row in range(number):
        draw = [5, 5, 5]
        draw[word] += row
        included[
            row,
            poisson_indices(
                KEY, tuple(draw), number_of_examples=n, sampling_probability=q
            ),
        ] = 1
    agreement = np.mean(included[1:] == included[:-1])
    assert abs(agreement - 0.5) < 4 * 0.5 / math.sqrt((number - 1) * n)


def test_same_name_gives_the_same_batch_and_any_other_name_another():
    def batch(key, *draw):
        indices = poisson_indices(
            key, draw, number_of_examples=10_000, sampling_probability=0.01
        )
        return tuple(indices.tolist())

    names = [*itertools.product([0, 1, 2**64 - 1], repeat=3)]
    batches = {batch(KEY, *name) for name in names}
    assert len(batches) == len(names)
    assert batch(KEY, 1, 2, 3) == batch(KEY, 1, 2, 3)
    assert batch(KEY, 1, 2, 3) != batch(KEY ^ 1, 1, 2, 3)
    assert batch(KEY, 1, 2, 3) != batch(KEY ^ 2**127, 1, 2, 3)


def test_probability_one_takes_all():
    assert draws(1, n=17, q=1.0)[0].tolist() == list(range(17))


def test_tiny_probability_gives_an_empty_batch():
    (indices,) = draws(1, n=10, q=1e-12)
    assert indices.shape == (0,)
    assert indices.dtype == np.int64


def test_cost_does_not_grow_with_the_number_of_examples():
    draws(1, n=10**8, q=1e-5)
    tracemalloc.start()
    start = time.perf_counter()
    batches = draws(10, n=10**8, q=1e-5)
    seconds = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 5000 < sum(map(len, batches)) < 15_000
    assert peak < 2**20
    assert seconds < 1


@pytest.mark.parametrize("q", [0, -0.1, 1.0001, math.nan, math.inf])
def test_probability_out_of_range_is_refused(q):
    with pytest.raises(ValueError, match="`sampling_probability` must be above 0"):
        draws(1, n=10, q=q)


@pytest.mark.parametrize("n", [0, -1, 2.5, math.nan, math.inf])
def test_number_of_examples_out_of_range_is_refused(n):
    with pytest.raises(ValueError, match="`number_of_examples` must be a whole"):
        draws(1, n=n, q=0.5)


@pytest.mark.parametrize("key", [-1, 2**128, 1.5, "key"])
def test_bad_key_is_refused_and_not_shown(key):
    with pytest.raises(
        ValueError, match=r"^`key` must be a whole number in \[0, 2\^128\)\.$"
    ):
        draws(1, n=10, q=0.5, key=key)


@pytest.mark.parametrize("draw", [(0, 0, -1), (2**64, 0, 0), (0, 1.0, 0), (1, 2)])
def test_bad_draw_is_refused(draw):
    with pytest.raises(ValueError, match=r"`draw` must be three .* Received: draw="):
        poisson_indices(KEY, draw, number_of_examples=10, sampling_probability=0.5)


def test_fresh_keys_differ_and_fill_128_bits():
    keys = [fresh_key() for _ in range(100)]
    assert len(set(keys)) == 100
    assert max(keys).bit_length() > 120
    assert all(0 <= key < 2**128 for key in keys)


def test_seeded_keys_differ_and_are_reproducible():
    assert len({seeded_key(seed) >> 64 for seed in range(100)}) == 100
    assert len({seeded_key(seed) % 2**64 for seed in range(100)}) == 100
    assert seeded_key(7) == seeded_key(np.int64(7)) < 2**128


@pytest.mark.parametrize("seed", [True, 1.0, "1", None, np.random.default_rng(0)])
def test_seed_of_wrong_type_is_refused(seed):
    with pytest.raises(TypeError, match="`seed` must be a whole number"):
        seeded_key(seed)


def test_negative_seed_is_refused():
    with pytest.raises(
        ValueError, match=r"`seed` must be at least 0. Received: seed=-"
    ):
        seeded_key(-1)


def test_probability_is_the_fraction_of_the_examples():
    assert poisson_probability(expected_batch_size=5, number_of_examples=20) == 0.25
    assert poisson_probability(expected_batch_size=20, number_of_examples=20) == 1.0


def test_batch_larger_than_the_data_is_refused_with_the_line_to_write():
    with pytest.raises(ValueError, match="Use `expected_batch_size=100`"):
        poisson_probability(expected_batch_size=256, number_of_examples=100)


@pytest.mark.parametrize("value", [0, -3, 1.5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["expected_batch_size", "number_of_examples"])
def test_numbers_out_of_range_are_refused(name, value):
    numbers = {"expected_batch_size": 1, "number_of_examples": 10, name: value}
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number"):
        poisson_probability(**numbers)
