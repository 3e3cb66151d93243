"""Clients that are numbers: who they are, what they have, when they take part."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdp.federated import VirtualClients


def passes(clients, number):
    """The clients of a pass, in order."""
    rounds = range(
        number * clients.rounds_per_pass, (number + 1) * clients.rounds_per_pass
    )
    return np.concatenate([clients.of_round(r) for r in rounds])


@pytest.mark.slow
@given(
    number=st.integers(1, 400),
    seed=st.integers(0, 2**70),
    pass_number=st.integers(0, 3),
)
def test_everyone_takes_part_once_in_a_pass(number, seed, pass_number):
    clients = VirtualClients(number, 1, 5, seed)
    assert sorted(passes(clients, pass_number)) == list(range(number))


def test_nobody_takes_part_twice_where_rounds_do_not_divide_the_clients():
    clients = VirtualClients(1003, 100, 5)
    seen = passes(clients, 0)
    assert clients.rounds_per_pass == 10
    assert len(set(seen)) == 1000
    assert [clients.participations(r) for r in (0, 1, 10, 11, 20, 21)] == [
        0,
        1,
        1,
        2,
        2,
        3,
    ]


def test_orders_differ_from_pass_to_pass_and_from_seed_to_seed():
    one, other = VirtualClients(500, 500, 5), VirtualClients(500, 500, 5, seed=1)
    orders = [passes(one, 0), passes(one, 1), passes(other, 0)]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert np.mean(orders[first] == orders[second]) < 0.05


def test_rounds_are_fair_samples():
    """Of each hundredth of the numbers a round has about as many."""
    clients = VirtualClients(1_000_000, 1000, 5)
    counts = np.bincount(
        np.concatenate([clients.of_round(r) for r in range(100)]) // 10_000,
        minlength=100,
    )
    # Chi-squared with 99 degrees of freedom.
    assert 60 < np.sum((counts - 1000) ** 2 / (1000 * 0.9)) < 145


def test_examples_are_a_function_of_the_client():
    clients = VirtualClients(10_000_000, 1000, 5)
    some = clients.of_round(3)
    rows = clients.rows(some, 60_000).reshape(-1, 5)
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(
        clients.rows(some[7:9], 60_000).reshape(2, 5), rows[7:9]
    )
    other = VirtualClients(10_000_000, 1000, 5, seed=1)
    assert np.mean(other.rows(some, 60_000).reshape(-1, 5) == rows) < 0.01


def test_examples_are_uniform_and_independent():
    clients = VirtualClients(10_000_000, 1000, 5)
    rows = clients.rows(np.arange(20_000), 100).reshape(-1, 5)
    counts = np.bincount(rows.ravel(), minlength=100)
    assert 60 < np.sum((counts - 1000) ** 2 / 1000) < 145
    assert np.abs(np.corrcoef(rows.T) - np.eye(5)).max() < 0.03
    assert abs(np.corrcoef(rows[:-1, 4], rows[1:, 0])[0, 1]) < 0.03


@pytest.mark.parametrize("number", [10_000, 1_000_000_000])
def test_memory_does_not_depend_on_the_number_of_clients(number):
    clients = VirtualClients(number, 1000, 5)
    tracemalloc.start()
    for r in (0, clients.rounds_per_pass - 1, clients.rounds_per_pass):
        drawn = clients.of_round(r)
        assert len(set(drawn)) == 1000
        assert drawn.min() >= 0
        assert drawn.max() < number
        clients.rows(drawn, 60_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 1, 1), ValueError, "number_of_clients"),
        ((10, 0, 1), ValueError, "clients_per_round"),
        ((10, 1, 0), ValueError, "examples_per_client"),
        ((10, 1, float("nan")), ValueError, "examples_per_client"),
        ((10.5, 1, 1), ValueError, "number_of_clients"),
        (("10", 1, 1), TypeError, "number_of_clients"),
        ((10, 11, 1), ValueError, "clients_per_round=10"),
        ((10**19, 1, 1), ValueError, "63-bit"),
        ((10, 1, 1, -1), ValueError, "seed"),
        ((10, 1, 1, 0.5), TypeError, "seed"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        VirtualClients(*arguments)
