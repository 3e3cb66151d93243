import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from tfdp.accounting.selection import OneOfDpEvent, RdpAccountant, is_covered, leaves
from tfdp.accounting.tries import Geometric, Poisson, TruncatedNegativeBinomial

GAUSSIAN = dp_accounting.GaussianDpEvent(2.0)
LOUD = dp_accounting.GaussianDpEvent(1.0)
DELTA = 1e-3
LAWS = [
    Geometric(10),
    Geometric(1),
    Poisson(10),
    Poisson(1),
    TruncatedNegativeBinomial(0, 10),
    TruncatedNegativeBinomial(0.5, 4),
    TruncatedNegativeBinomial(3, 4),
]


def divergences(event, **options):
    accountant = RdpAccountant(**options)
    accountant.compose(event)
    return accountant.divergences


def test_one_of_costs_the_dearest_at_every_order():
    steps = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(0.8)),
        200,
    )
    parts = [divergences(GAUSSIAN), divergences(steps)]
    # Each of them is the dearer one somewhere.
    assert (parts[0] > parts[1]).any()
    assert (parts[0] < parts[1]).any()
    np.testing.assert_array_equal(
        divergences(OneOfDpEvent((GAUSSIAN, steps))), np.maximum(*parts)
    )


def test_one_of_composes():
    event = dp_accounting.ComposedDpEvent([
        LOUD,
        dp_accounting.SelfComposedDpEvent(OneOfDpEvent((GAUSSIAN, LOUD)), 3),
    ])
    np.testing.assert_allclose(divergences(event), 4 * divergences(LOUD))


def test_what_rdp_does_not_know_is_refused():
    event = OneOfDpEvent((GAUSSIAN, dp_accounting.UnsupportedDpEvent()))
    assert not RdpAccountant().supports(event)


def test_covered():
    assert is_covered(GAUSSIAN, [GAUSSIAN])
    assert is_covered(GAUSSIAN, [LOUD, GAUSSIAN])
    assert not is_covered(LOUD, [GAUSSIAN])
    assert not is_covered(dp_accounting.NonPrivateDpEvent(), [LOUD])


def test_leaves():
    event = dp_accounting.SelfComposedDpEvent(OneOfDpEvent((GAUSSIAN, LOUD)), 3)
    assert list(leaves(event)) == [GAUSSIAN, LOUD]


def response(value, truth, values=4):
    """Randomized response on `values` values: the law of the answer."""
    law = np.full(values, truth / values)
    law[value] += 1 - truth
    return law


def best_of(law, tries):
    """The law of the largest of K answers, -1 where K is 0, by summing over K."""
    found = np.zeros(len(law) + 1)
    up_to = np.cumsum(law)
    below = np.concatenate([[0.0], up_to[:-1]])
    for number, chance in itertools.islice(tries.law(), 5000):
        found[1:] += chance * (up_to**number - below**number)
        found[0] += chance * (number == 0)
    return found


def exact_epsilon(one, other, delta):
    """The least epsilon at delta, of two laws on finitely many values."""

    def excess(epsilon):
        return max(
            np.maximum(p - math.exp(epsilon) * q, 0).sum()
            for p, q in [(one, other), (other, one)]
        )

    low, high = 0.0, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("tries", LAWS, ids=repr)
@pytest.mark.skipif(
    not hasattr(dp_event, "RandomizedResponseDpEvent"), reason="needs dp_accounting 0.6"
)
@pytest.mark.parametrize("truths", [(0.3,), (0.9,), (0.3, 0.9)])
def test_the_bound_holds_for_randomized_response(tries, truths):
    # Settings are drawn, too: the law of a try is a mixture.
    laws = [
        best_of(np.mean([response(value, t) for t in truths], axis=0), tries)
        for value in range(4)
    ]
    truth = max(
        exact_epsilon(one, other, DELTA)
        for one, other in itertools.combinations(laws, 2)
    )
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = RdpAccountant(neighboring_relation=relation)
    events = tuple(dp_event.RandomizedResponseDpEvent(t, 4) for t in truths)
    accountant.compose(
        RepeatAndSelectDpEvent(OneOfDpEvent(events), tries.mean, tries.shape)
    )
    bound = accountant.get_epsilon(DELTA)
    assert 0 < truth <= bound
    if tries.mean > 1:
        # The search tells more than one try.
        assert truth > exact_epsilon(*(response(v, max(truths)) for v in (0, 1)), DELTA)
