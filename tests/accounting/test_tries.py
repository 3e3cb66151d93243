import itertools
import math

import numpy as np
import pytest
from scipy import stats

from tfdp.accounting import tries as tries_module
from tfdp.accounting.tries import (
    Geometric,
    Poisson,
    TruncatedNegativeBinomial,
    tries_from_dict,
)


def negative_binomial(shape, gamma):
    """The probabilities of 1, 2, ... of a negative binomial law that is not 0."""
    law = stats.nbinom(shape, gamma)
    return lambda numbers: law.pmf(numbers) / law.sf(0)


@pytest.mark.parametrize(
    ("tries", "reference"),
    [
        (Geometric(10), stats.geom(0.1).pmf),
        (Poisson(3.5), stats.poisson(3.5).pmf),
        (Poisson(1000), stats.poisson(1000).pmf),
        (TruncatedNegativeBinomial(1, 10), stats.geom(0.1).pmf),
        (TruncatedNegativeBinomial(0, 10), None),
        (TruncatedNegativeBinomial(0.5, 10), None),
        (TruncatedNegativeBinomial(20, 300), None),
    ],
)
def test_law(tries, reference):
    found = list(itertools.islice(tries.law(), 20_000))
    numbers, chances = map(np.array, zip(*found, strict=True))
    assert chances.sum() == pytest.approx(1, abs=1e-9)
    assert numbers @ chances == pytest.approx(tries.mean, rel=1e-6)
    if reference is None:
        gamma = tries._gamma()
        law = stats.logser(1 - gamma).pmf
        reference = negative_binomial(tries.shape, gamma) if tries.shape else law
    np.testing.assert_allclose(chances, reference(numbers), rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("shape", [0.0, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("mean", [1.0, 1.01, 3.0, 1e4])
def test_the_mean_that_is_drawn_is_not_larger(shape, mean):
    law = TruncatedNegativeBinomial(shape, mean)
    assert mean * (1 - 1e-9) <= (law._mean_of(law._gamma()) if mean > 1 else 1) <= mean


def test_a_mean_of_one_is_one_try():
    assert TruncatedNegativeBinomial(0.5, 1).draw() == 1
    assert Geometric(1).draw() == 1


@pytest.mark.statistical
@pytest.mark.parametrize(
    "tries", [Geometric(3), Poisson(3), TruncatedNegativeBinomial(0, 3)]
)
def test_draws_have_the_law(tries):
    draws = np.array([tries.draw() for _ in range(4000)])
    found = list(itertools.islice(tries.law(), 12))
    for number, chance in found:
        error = math.sqrt(chance * (1 - chance) / len(draws))
        assert abs(np.mean(draws == number) - chance) < 6 * error + 1e-9


def test_draws_follow_the_level(monkeypatch):
    class Always:
        def __init__(self, level):
            self.random = lambda: level

    monkeypatch.setattr(tries_module, "_random", Always(0.0))
    assert Geometric(4).draw() == 1
    assert Poisson(4).draw() == 0
    monkeypatch.setattr(tries_module, "_random", Always(0.3))
    assert Geometric(4).draw() == 2
    # Beyond all that is likely it ends.
    monkeypatch.setattr(tries_module, "_random", Always(1.0))
    assert Geometric(4).draw() < 1000


@pytest.mark.parametrize(
    "tries", [Geometric(3), Poisson(3), TruncatedNegativeBinomial(0.5, 3)]
)
def test_dictionaries(tries):
    assert tries_from_dict(tries.to_dict()) == tries
    assert "mean 3" in tries.words()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"law": "fixed", "mean": 3},
        {"law": "poisson"},
        {"law": "poisson", "mean": 0},
    ],
)
def test_damaged_dictionaries(fields):
    with pytest.raises(ValueError, match="Received"):
        tries_from_dict(fields)


@pytest.mark.parametrize("mean", [0, 0.5, -1, math.nan, math.inf])
@pytest.mark.parametrize("law", [Geometric, Poisson])
def test_means_out_of_range(law, mean):
    with pytest.raises(ValueError, match="`mean` must be"):
        law(mean)


@pytest.mark.parametrize("shape", [-0.5, math.nan, math.inf])
def test_shapes_out_of_range(shape):
    with pytest.raises(ValueError, match="`shape` must be"):
        TruncatedNegativeBinomial(shape, 3)


def test_means_are_numbers():
    with pytest.raises(TypeError, match="mean"):
        Geometric("3")
