import math
import re
import sys

import pytest

from tfdp.accounting import (
    compare_with_tensorflow_privacy,
    compute_dp_sgd_privacy,
    compute_dp_sgd_privacy_statement,
)

reference = pytest.importorskip(
    "tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib",
    reason="needs the environment that tests/parity/conftest.py describes",
)

# Where a user's epsilon is infinite, the reference subtracts infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:tensorflow_privacy.*")

TRAININGS = [
    # n, batch_size, epochs, noise_multiplier, delta
    (60_000, 256, 60, 1.1, 1e-5),
    (60_000, 150, 15, 1.3, 1e-5),
    (60_000, 256, 0.5, 0.7, 1e-6),
    (50_000, 4096, 71.7, 10.0, 1e-5),
    (1_000, 10, 3, 4.0, 1e-3),
    (1_000_000, 1, 0.01, 1.0, 1e-7),
    (1_000, 999, 7, 30.0, 1e-4),
    (1_000, 100, 5, 1, 1e-5),
    (100, 100, 2, 5.0, 1e-5),
]


def figures(text):
    """Return the epsilons in the rows of a statement of either side."""
    rows = re.findall(
        r"^ +(?:Epsilon|Each example|Poisson-sampled).*: +(inf|\d\S*)", text, re.M
    )
    return [float(row) for row in rows]


@pytest.mark.parametrize(("n", "batch_size", "epochs", "noise", "delta"), TRAININGS)
@pytest.mark.parametrize("scale", [1, 0.6, 3, 0])
def test_epsilon_and_order(n, batch_size, epochs, noise, delta, scale):
    arguments = (n, batch_size, noise * scale, epochs, delta)
    epsilon, order = reference.compute_dp_sgd_privacy(*arguments)
    assert compute_dp_sgd_privacy(*arguments) == (
        pytest.approx(epsilon, rel=1e-12),
        order,
    )


@pytest.mark.parametrize(("n", "batch_size", "epochs", "noise", "delta"), TRAININGS)
@pytest.mark.parametrize("used_microbatching", [True, False])
@pytest.mark.parametrize("max_examples_per_user", [None, 1, 2, 5, 100])
def test_statement_by_rdp(
    n, batch_size, epochs, noise, delta, used_microbatching, max_examples_per_user
):
    arguments = (n, batch_size, epochs, noise, delta)
    options = (used_microbatching, max_examples_per_user)
    theirs = reference.compute_dp_sgd_privacy_statement(*arguments, *options)
    ours = compute_dp_sgd_privacy_statement(*arguments, *options)
    ours, theirs = figures(ours), figures(theirs)
    assert len(ours) == (2 if max_examples_per_user is None else 4)
    assert ours[:2] == theirs[:2]
    if max_examples_per_user == 1:
        assert ours == theirs
    # Theirs goes from one example to several by group privacy, which knows less.
    for own, other in zip(ours[2:], theirs[2:], strict=True):
        assert own <= other


@pytest.mark.parametrize(("n", "batch_size", "epochs", "noise", "delta"), TRAININGS)
def test_statement_by_pld(n, batch_size, epochs, noise, delta):
    arguments = (n, batch_size, epochs, noise, delta)
    kind = reference.AccountantType.PLD
    theirs = reference.compute_dp_sgd_privacy_statement(
        *arguments, used_microbatching=False, accountant_type=kind
    )
    ours = compute_dp_sgd_privacy_statement(
        *arguments, used_microbatching=False, accountant_type="PLD"
    )
    assert figures(ours) == figures(theirs)


def test_statement_without_noise():
    arguments = (1000, 10, 3, 0, 1e-5)
    theirs = reference.compute_dp_sgd_privacy_statement(*arguments)
    ours = compute_dp_sgd_privacy_statement(*arguments)
    assert figures(ours) == figures(theirs) == [math.inf, math.inf]


@pytest.mark.parametrize("accountant", ["RDP", "PLD"])
def test_microbatches_by_either_accountant(accountant):
    arguments = (60_000, 256, 60, 4.0, 1e-5)
    kind = reference.AccountantType(accountant)
    theirs = reference.compute_dp_sgd_privacy_statement(
        *arguments, accountant_type=kind
    )
    ours = compute_dp_sgd_privacy_statement(*arguments, accountant_type=accountant)
    assert figures(ours) == figures(theirs)


def test_a_batch_larger_than_the_data_is_refused_by_both():
    for compute in (reference.compute_dp_sgd_privacy, compute_dp_sgd_privacy):
        with pytest.raises(Exception, match=r"batch"):
            compute(100, 101, 1.1, 1, 1e-5)


@pytest.mark.parametrize("accountant", ["RDP", "PLD"])
@pytest.mark.parametrize("used_microbatching", [True, False])
def test_the_table_has_the_figures_of_both(accountant, used_microbatching):
    table = compare_with_tensorflow_privacy(
        60_000, 256, 60, 4.0, 1e-5, used_microbatching, accountant
    )
    head, *rows = table.splitlines()
    assert head.split() == [
        *("Epsilon", "at", "delta", "=", "1e-05,", accountant),
        *("tfdp", "TensorFlow", "Privacy", "0.9.0"),
    ]
    expected = figures(
        compute_dp_sgd_privacy_statement(
            60_000, 256, 60, 4.0, 1e-5, used_microbatching, accountant_type=accountant
        )
    )
    for row, epsilon in zip(rows, expected, strict=True):
        assert len(row) == len(head)
        assert [float(each) for each in row.split()[-2:]] == [epsilon, epsilon]


def test_only_the_comparison_leaves_parts_of_tensorflow_privacy_out():
    sys.skip_tf_privacy_import = True
    compare_with_tensorflow_privacy(1000, 10, 1, 1.0, 1e-5)
    assert sys.skip_tf_privacy_import
    del sys.skip_tf_privacy_import
    try:
        compare_with_tensorflow_privacy(1000, 10, 1, 1.0, 1e-5)
        assert not hasattr(sys, "skip_tf_privacy_import")
    finally:
        sys.skip_tf_privacy_import = True
