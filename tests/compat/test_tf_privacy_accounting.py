import math
import re

import pytest
from dp_accounting import rdp

from tfdp.accounting.ledger import Ledger
from tfdp.accounting.segments import PoissonSteps, ShuffledPasses
from tfdp.compat import tf_privacy_accounting
from tfdp.compat.tf_privacy_accounting import (
    compute_dp_sgd_privacy,
    compute_dp_sgd_privacy_statement,
)

MNIST = {
    "number_of_examples": 60_000,
    "batch_size": 256,
    "num_epochs": 60,
    "noise_multiplier": 1.1,
    "delta": 1e-5,
}


def figures(text):
    """Return the epsilons in the rows of a statement, top to bottom."""
    rows = re.findall(r"^  (?:Each example|Poisson-sampled).*: +(\S+)$", text, re.M)
    return [float(row) for row in rows]


@pytest.mark.smoke
def test_known_value():
    result, order = compute_dp_sgd_privacy(60_000, 150, 1.3, 15, 1e-5)
    assert result == pytest.approx(0.7242234, rel=2e-3)
    assert order == 19
    assert type(result) is type(order) is float


@pytest.mark.slow
def test_known_value_of_the_statement():
    text = compute_dp_sgd_privacy_statement(**MNIST, used_microbatching=False)
    assert figures(text)[1] == pytest.approx(2.596656, rel=2e-3)
    text = compute_dp_sgd_privacy_statement(
        **MNIST, used_microbatching=False, accountant_type="PLD"
    )
    assert figures(text) == pytest.approx([54.05, 2.382], rel=1e-3)


def test_microbatches_halve_the_noise_multiplier():
    """The sensitivity of a mean over several examples is twice the clip norm."""
    text = compute_dp_sgd_privacy_statement(**MNIST)
    halved = MNIST | {"noise_multiplier": 0.55}
    assert "clipped alone" not in text
    assert figures(text) == figures(
        compute_dp_sgd_privacy_statement(**halved, used_microbatching=False)
    )


@pytest.mark.parametrize(
    "accountant", ["RDP", pytest.param("PLD", marks=pytest.mark.slow)]
)
def test_the_rows_are_those_of_the_ledger(accountant):
    text = compute_dp_sgd_privacy_statement(
        **MNIST, used_microbatching=False, accountant_type=accountant
    )
    ledgers = [
        Ledger((ShuffledPasses(60, 1.1, 60_000, 256),)),
        Ledger((PoissonSteps(14_063, 1.1, 60_000, 256),)),
    ]
    costs = [round(ledger.epsilon(1e-5, accountant), 3) for ledger in ledgers]
    assert figures(text) == costs


def test_no_noise_is_infinite():
    assert compute_dp_sgd_privacy(60_000, 150, 0, 15, 1e-5)[0] == math.inf
    text = compute_dp_sgd_privacy_statement(**(MNIST | {"noise_multiplier": 0}))
    assert figures(text) == [math.inf, math.inf]


def test_all_of_the_data_in_a_batch():
    result, _ = compute_dp_sgd_privacy(100, 100, 4.0, 3, 1e-5)
    orders = rdp.RdpAccountant(tf_privacy_accounting._ORDERS)
    gaussian = ShuffledPasses(3, 4.0, 100, 100).event()
    assert result == orders.compose(gaussian).get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("epochs", "passes", "steps"), [(60, 60, 14_063), (0.5, 1, 118), (1.5, 2, 352)]
)
def test_fractional_epochs_are_rounded_up(epochs, passes, steps):
    shuffled, poisson = tf_privacy_accounting._training(60_000, 256, epochs, 1.1)
    assert (shuffled.count, poisson.count) == (passes, steps)


@pytest.mark.parametrize("steps", range(1, 2000, 17))
def test_the_epochs_of_some_steps_are_those_steps(steps):
    """In floating point, 235 * 256 / 60000 epochs are a little more than 235 steps."""
    _, poisson = tf_privacy_accounting._training(60_000, 256, steps * 256 / 60_000, 1.1)
    assert poisson.count == steps


def test_a_user_costs_more_than_an_example():
    texts = [
        compute_dp_sgd_privacy_statement(
            **(MNIST | {"noise_multiplier": 4.0}),
            used_microbatching=False,
            max_examples_per_user=size,
        )
        for size in (1, 2, 3)
    ]
    rows = [figures(text) for text in texts]
    assert rows[0][2:] == rows[0][:2]
    assert rows[1][:2] == rows[0][:2]
    assert rows[0][3] < rows[1][3] < rows[2][3] < math.inf


@pytest.mark.parametrize(("size", "cost"), [(1, 13.376), (3, 56.224), (10, 366.374)])
def test_users_of_a_pass_cost_as_many_times_the_sensitivity(size, cost):
    text = compute_dp_sgd_privacy_statement(
        10_000, 64, 5, 2.0, 1e-6, max_examples_per_user=size
    )
    assert figures(text)[2] == cost


@pytest.mark.slow
def test_users_by_either_accountant():
    by_rdp, by_pld = (
        figures(
            compute_dp_sgd_privacy_statement(
                **(MNIST | {"noise_multiplier": 4.0}),
                max_examples_per_user=3,
                accountant_type=accountant,
            )
        )
        for accountant in ("RDP", "PLD")
    )
    assert len(by_rdp) == len(by_pld) == 4
    for more, less in zip(by_rdp, by_pld, strict=True):
        # Older versions of dp_accounting have no mixtures for PLD.
        assert 0.8 * more < less <= more
    assert "max_examples_per_user" in compute_dp_sgd_privacy_statement(**MNIST)


def test_what_was_configured_is_in_the_text():
    text = compute_dp_sgd_privacy_statement(**MNIST).replace("\n", " ")
    for fact in ("60000 examples", "60 epochs", "256 examples", "1.1", "delta = 1e-05"):
        assert fact in text


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("number_of_examples", 0, ValueError),
        ("number_of_examples", 1000.5, ValueError),
        ("number_of_examples", "60000", TypeError),
        ("batch_size", 60_001, ValueError),
        ("batch_size", math.nan, ValueError),
        ("num_epochs", 0, ValueError),
        ("num_epochs", math.inf, ValueError),
        ("noise_multiplier", -1, ValueError),
        ("noise_multiplier", math.nan, ValueError),
        ("noise_multiplier", None, TypeError),
        ("delta", 0, ValueError),
        ("delta", 1, ValueError),
        ("max_examples_per_user", 0, ValueError),
        ("max_examples_per_user", 1.5, ValueError),
        ("accountant_type", "GDP", ValueError),
    ],
)
def test_wrong_arguments_of_the_statement_are_refused(name, value, error):
    with pytest.raises(error, match=f"`{name}`.*Received: {name}="):
        compute_dp_sgd_privacy_statement(**(MNIST | {name: value}))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((100, 101, 1.1, 1, 1e-5), "batch_size"),
        ((0, 10, 1.1, 1, 1e-5), "n"),
        ((100, 10, -1.1, 1, 1e-5), "noise_multiplier"),
        ((100, 10, 1.1, 0, 1e-5), "epochs"),
        ((100, 10, 1.1, 1, 1.5), "delta"),
    ],
)
def test_wrong_arguments_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}="):
        compute_dp_sgd_privacy(*arguments)
