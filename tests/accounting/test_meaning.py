import math

import pytest

from tfdp.accounting.ledger import Ledger
from tfdp.accounting.meaning import best_attack, in_words
from tfdp.accounting.segments import UnamplifiedSteps
from tfdp.accounting.tradeoff import true_positive_rate


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0.01, "1"), (0.0401, "4.1"), (0.04, "4"), (0.9999, "100"), (0.123, "12.3")],
)
def test_figures_are_never_rounded_down(rate, shown):
    assert f"at most {shown} in 100 of" in in_words(rate, of_users=False)


def test_without_a_bound_it_says_so():
    text = in_words(1.0, of_users=True)
    assert "nothing keeps them from recognising all" in text
    assert "at most" not in text


@pytest.mark.slow
def test_it_is_the_bound_of_the_ledger():
    ledger = Ledger((UnamplifiedSteps(1, 2.0),))
    assert best_attack(ledger) == true_positive_rate(ledger, 0.01)
    assert best_attack(Ledger((UnamplifiedSteps(1, 0.0),))) == 1.0
    assert math.isclose(best_attack(Ledger()), 0.01)
