"""One draw of a posterior, compared with numerical integration."""

import functools

import keras
import numpy as np
import pytest
from scipy import stats

from tfdp.errors import PrivacyBudgetError
from tfdp.variational import one_posterior_sample, one_sample, scaled_posteriors
from tfdp.variational.scaled_posteriors import (
    Prior,
    clipped,
    end_of_chain,
    logistic,
    of_function,
)

LOGISTIC = {"radius": 2.5, "weight_radius": 4.0, "epsilon": 1.0}


@pytest.fixture(autouse=True)
def nothing_drawn(monkeypatch):
    monkeypatch.setattr(one_sample, "_spent", {})


@pytest.fixture
def few_proposals(monkeypatch):
    """At a time: most draws take few, and hundreds of draws most of the time."""
    monkeypatch.setattr(scaled_posteriors, "_PROPOSALS", 128)


@pytest.fixture
def rows(rng):
    x = rng.normal(size=(60, 1))
    return x, (x[:, 0] + 0.3 * rng.normal(size=60) > 0)


def p_values(draws, problem, prior, points_of_axis=201):
    """Kolmogorov and Smirnov's test of each of two parameters."""
    grid = np.linspace(-prior.radius, prior.radius, points_of_axis)
    points = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)
    log = problem.log_likelihoods(points)
    log -= np.square(points).sum(1) / (2 * prior.scale**2)
    log[~prior.allows(points)] = -np.inf
    density = np.exp(log - log.max()).reshape(points_of_axis, -1)
    for axis in (0, 1):
        cumulative = np.cumsum(density.sum(1 - axis))
        cumulative /= cumulative[-1]
        yield stats.kstest(
            draws[:, axis], lambda v, c=cumulative: np.interp(v, grid, c)
        ).pvalue


@pytest.mark.parametrize(
    ("scale", "radius", "epsilon"),
    [(1.0, 4.0, 5.0), (1.0, 1.0, 5.0), (3.0, 0.5, 5.0), (5.0, 2.0, 50.0)],
    ids=["inside", "at the edge", "beyond the edge", "sharp"],
)
@pytest.mark.usefixtures("few_proposals")
def test_exact_draws_are_distributed_as_the_posterior(
    rows, scale, radius, epsilon, monkeypatch
):
    prior = Prior(scale, radius)
    problem = logistic(*rows, epsilon, 2.5, prior)
    # Once for all draws.
    mode = functools.cache(lambda: find_mode(*problem.draw.args[1:]))
    find_mode = scaled_posteriors._mode
    monkeypatch.setattr(scaled_posteriors, "_mode", lambda *_: mode().copy())
    rng = np.random.default_rng(1)
    draws = np.array([problem.draw(rng) for _ in range(500)])
    assert prior.allows(draws).all()
    assert min(p_values(draws, problem, prior)) > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("few_proposals")
def test_any_point_makes_exact_draws(rows, monkeypatch):
    """The mode decides how many proposals it takes, not what is accepted."""
    prior = Prior(1.0, 2.0)
    problem = logistic(*rows, 3.0, 2.5, prior)
    mode = scaled_posteriors._mode(*problem.draw.args[1:])
    monkeypatch.setattr(scaled_posteriors, "_mode", lambda *_: 0.9 * mode)
    rng = np.random.default_rng(1)
    draws = np.array([problem.draw(rng) for _ in range(1000)])
    assert min(p_values(draws, problem, prior)) > 1e-3


@pytest.mark.parametrize(
    ("scale", "radius", "epsilon"),
    [(1.0, 4.0, 5.0), (1.0, 1.0, 5.0), (3.0, 0.5, 5.0), (5.0, 2.0, 50.0)],
)
def test_more_is_accepted_than_the_bound_says(rows, scale, radius, epsilon):
    x, _ = rows
    prior, weight = Prior(scale, radius), min(1.0, epsilon / (2 * 2.5 * radius))
    x = np.column_stack([clipped(x, np.sqrt(2.5**2 - 1)), np.ones(60)])
    least = scaled_posteriors._least_share_accepted(
        2, weight * 60 * 2.5, weight * 60 * 2.5**2 / 4, prior
    )
    counted = []

    class Counting:
        """Counts the proposals."""

        def __init__(self):
            self.rng = np.random.default_rng(1)

        def standard_normal(self, shape):
            counted.append(shape[0])
            return self.rng.standard_normal(shape)

        def exponential(self, size):
            return self.rng.exponential(size=size)

    problem = logistic(*rows, epsilon, 2.5, prior)
    scaled_posteriors._draw_concave(*problem.draw.args, rng=Counting())
    assert least > 1e-6
    assert sum(counted) <= 4096 * (1 + 10 / (least * 4096))


@pytest.mark.parametrize(
    "options",
    [
        {"d": 20, "weight_radius": 1.0, "epsilon": 0.1, "records": 20, "radius": 5.0},
        {"d": 30, "weight_radius": 1.0, "epsilon": 0.01, "records": 50, "radius": 2.0},
        {"d": 10, "weight_radius": 0.3, "epsilon": 0.05, "records": 100, "radius": 4.0},
    ],
    ids=str,
)
def test_balls_that_hold_next_to_nothing_of_the_prior_end_in_a_chain(
    rng, options, monkeypatch
):
    monkeypatch.setattr(scaled_posteriors, "_STEPS_OF_CHAIN", 500)
    d, records = options.pop("d"), options.pop("records")
    x = rng.normal(size=(records, d))
    sample = one_posterior_sample("logistic_regression", x, x[:, 0] > 0, **options)
    assert sample.exactness == "approximate"
    assert np.linalg.norm(sample.theta) <= options["weight_radius"]


@pytest.mark.parametrize("is_separable", [True, False])
def test_modes_far_away_are_found(rng, is_separable):
    x = np.column_stack([np.where(np.arange(100) % 2, 0.01, -0.01), np.ones(100)])
    y = x[:, 0] > 0 if is_separable else rng.integers(0, 2, 100)
    signed = x * np.where(y, 1.0, -1.0)[:, None]
    mode = scaled_posteriors._mode(signed, 1.0, Prior(100.0, 2000.0))
    slope = np.exp(-np.logaddexp(0, signed @ mode)) @ signed - mode / 100.0**2
    np.testing.assert_allclose(slope, 0, atol=1e-8)
    assert np.linalg.norm(mode) > (100 if is_separable else 0)


def normal(theta, x, y):
    del y
    return -np.square(x - theta).sum(1) / 2


@pytest.mark.slow
@pytest.mark.parametrize("is_exact", [True, False])
def test_functions_are_drawn_from_too(rng, is_exact, monkeypatch):
    prior = Prior(1.0, 3.0)
    x = clipped(rng.normal(size=(10, 2)), 2.0)
    problem = of_function(
        lambda *of: normal(*of) + 4.0, (x, None), epsilon=0.8, full_cost=20.0, bound=5.0, prior=prior,
        parameters=2,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    if is_exact:
        draws = np.array([problem.draw(rng) for _ in range(400)])
    else:
        monkeypatch.setattr(scaled_posteriors, "_STEPS_OF_CHAIN", 30)
        draws = np.array([end_of_chain(problem, prior, rng) for _ in range(400)])
    assert min(p_values(draws, problem, prior, 51)) > 1e-3


@pytest.mark.parametrize(("epsilon", "cost"), [(1.0, 1.0), (8.0, 8.0), (1e3, 20.0)])
def test_a_record_changes_the_density_by_what_is_paid(rows, epsilon, cost):
    """Both the density and its integral: half of epsilon each."""
    x, y = rows
    sample = one_posterior_sample(
        "logistic_regression", x, y, **LOGISTIC | {"epsilon": epsilon}
    )
    assert sample.epsilon == pytest.approx(cost)
    prior = Prior(1.0, 4.0)
    points = np.random.default_rng(0).normal(size=(500, 2))
    points *= 4.0 / np.linalg.norm(points, axis=1, keepdims=True)
    most = 0.0
    for value in (-1e9, 1e9):
        other_x, other_y = x.copy(), y.copy()
        other_x[0], other_y[0] = value, value > 0
        before, after = (
            logistic(*data, epsilon, 2.5, prior).log_likelihoods(points)
            for data in ((x, y), (other_x, other_y))
        )
        most = max(most, np.max(np.abs(before - after)))
        third_y = other_y.copy()
        third_y[0] = not third_y[0]
        third = logistic(other_x, third_y, epsilon, 2.5, prior)
        most = max(most, np.max(np.abs(after - third.log_likelihoods(points))))
    assert cost / 2 * 0.98 <= most <= cost / 2 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        ({"bound": 2.0, "epsilon": 4.0}, 0.5),
        ({"bound": 2.0, "epsilon": 100.0}, 1.0),
        ({"lipschitz": 0.5, "epsilon": 1.0}, 0.1),
    ],
)
def test_how_much_the_likelihood_counts(rng, options, weight):
    x = rng.normal(size=(3, 2))
    sample = one_posterior_sample(
        normal, x, radius=5.0, weight_radius=2.0, number_of_parameters=2, **options
    )
    assert sample.likelihood_weight == pytest.approx(weight)
    exact = "lipschitz" not in options and 2 * weight * 3 * 2 < np.log(1e6)
    assert sample.exactness == ("exact" if exact else "approximate")
    assert np.isinf(sample.epsilon) == (not exact)
    text = sample.privacy_statement()
    assert "replace-one" in text
    assert "Trust model: Central." in text
    assert ("No bound is proven" in text) == (not exact)
    assert "delta" in text.split("\n\n")[0]


def test_values_beyond_the_bound_areclipped(rng):
    def wild(theta, x, y):
        del theta, y
        return np.array([-1e9, np.nan, 0.5, 0.5])[: len(x)]

    x = rng.normal(size=(4, 2))
    problem = of_function(
        wild, (x, None), epsilon=4.0, full_cost=4.0, bound=1.0,
        prior=Prior(1.0, 1.0), parameters=1,
    )  # fmt: skip
    np.testing.assert_allclose(problem.log_likelihoods(np.zeros((2, 1))), -2 + 2 * 0.5)


def test_inputs_areclipped(rng):
    x = rng.normal(size=(50, 3)) * np.logspace(-3, 9, 50)[:, None]
    inside_all = clipped(x, 1.3)
    norms = np.linalg.norm(inside_all, axis=1)
    assert np.all(norms <= 1.3)
    inside = np.linalg.norm(x, axis=1) <= 1.3
    np.testing.assert_array_equal(inside_all[inside], x[inside])


def test_a_second_draw_is_refused_or_added(rows):
    first = one_posterior_sample("logistic_regression", *rows, **LOGISTIC)
    with pytest.raises(PrivacyBudgetError, match="`again=True`"):
        one_posterior_sample("logistic_regression", *rows, **LOGISTIC)
    second = one_posterior_sample(
        "logistic_regression", *rows, again=True, **LOGISTIC | {"epsilon": 0.5}
    )
    assert (first.epsilon, second.epsilon) == (1.0, 1.5)
    assert not np.array_equal(first.theta, second.theta)
    x, y = rows
    approximate = one_posterior_sample(
        normal, x, y, again=True, epsilon=4.0, bound=50.0, radius=1.0,
        weight_radius=1.0, number_of_parameters=1,
    )  # fmt: skip
    assert approximate.exactness == "approximate"
    assert approximate.epsilon_if_exact == pytest.approx(5.5)
    other = one_posterior_sample("logistic_regression", x[1:], y[1:], **LOGISTIC)
    assert other.epsilon == 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (x, y.astype(int)),
        lambda x, y: (x, y[:, None].astype("float32")),
        lambda x, y: (x.astype("float32"), y),
        lambda x, y: (x.astype(object), y),
        lambda x, y: (x.tolist(), y),
        lambda x, y: (x, ~y),
    ],
)
def test_the_same_data_in_another_form_are_the_same_data(rows, change):
    one_posterior_sample("logistic_regression", *rows, **LOGISTIC)
    with pytest.raises(PrivacyBudgetError, match="drawn from before"):
        one_posterior_sample("logistic_regression", *change(*rows), **LOGISTIC)


@pytest.mark.slow
def test_an_approximate_draw_leaves_no_bound_for_later_ones(rows):
    x, y = rows
    options = {"epsilon": 30.0, "bound": 1.0, "radius": 1.0, "weight_radius": 1.0}
    first = one_posterior_sample(normal, x, y, number_of_parameters=1, **options)
    second = one_posterior_sample("logistic_regression", x, y, again=True, **LOGISTIC)
    assert (first.exactness, second.exactness) == ("approximate", "exact")
    assert np.isinf(second.epsilon)
    assert second.epsilon_if_exact == pytest.approx(4.0 + 1.0)


def test_what_is_exact_is_decided_by_public_numbers(rng):
    for spread in (1e-3, 1.0, 1e3):
        x = spread * rng.normal(size=(4000, 12))
        prior = Prior(1.0, 4.0)
        problem = logistic(x, x[:, 0] > 0, 1.0, 2.5, prior)
        assert problem.draw is None


def test_seeds_of_others_do_not_decide_the_draw(rows):
    draws = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        draws.append(
            one_posterior_sample("logistic_regression", *rows, again=True, **LOGISTIC)
        )
    assert not np.array_equal(draws[0].theta, draws[1].theta)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epsilon": 0}, ValueError, "`epsilon` must be positive"),
        ({"epsilon": np.nan}, ValueError, "`epsilon` must be positive"),
        ({"epsilon": np.inf}, ValueError, "`epsilon` must be positive"),
        ({"epsilon": "1"}, TypeError, "`epsilon` must be a number"),
        ({"radius": 1.0}, ValueError, "`radius` must be more than 1"),
        ({"radius": -1.0}, ValueError, "`radius` must be positive"),
        ({"weight_radius": 0.0}, ValueError, "`weight_radius` must be positive"),
        ({"prior_scale": np.nan}, ValueError, "`prior_scale` must be positive"),
        ({"bound": 1.0}, ValueError, "has its own bound"),
        ({"again": "no"}, TypeError, "`again` must be"),
        ({"log_likelihood": "probit"}, ValueError, "`log_likelihood` must be one of"),
        ({"log_likelihood": 3, "bound": 1.0, "number_of_parameters": 1}, TypeError,
         "`log_likelihood` must be"),
        ({"log_likelihood": normal}, ValueError, "either `bound` or `lipschitz`"),
        ({"log_likelihood": normal, "bound": 1.0}, TypeError, "number_of_parameters"),
        ({"log_likelihood": normal, "bound": 1.0, "lipschitz": 1.0}, ValueError,
         "either `bound` or"),
        ({"log_likelihood": normal, "lipschitz": 1.0, "number_of_parameters": 1},
         ValueError, "targets belong into `x`"),
        ({"log_likelihood": lambda *_: 0.0, "bound": 1.0, "number_of_parameters": 1},
         ValueError, "a number for each record"),
        ({"x": np.zeros(3)}, ValueError, "`x` must be finite numbers"),
        ({"x": np.full((60, 1), np.nan)}, ValueError, "`x` must be finite numbers"),
        ({"y": np.arange(60)}, ValueError, "`y` must be zeros and ones"),
        ({"y": np.zeros(59)}, ValueError, "`y` must be zeros and ones"),
        ({"y": None}, ValueError, "`y` must be zeros and ones"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_spent(
    rows, options, error, message
):
    x, y = rows
    arguments = {"log_likelihood": "logistic_regression", "x": x, "y": y} | LOGISTIC
    with pytest.raises(error, match=message):
        one_posterior_sample(**arguments | options)
    if not callable(options.get("log_likelihood")):
        sample = one_posterior_sample("logistic_regression", x, y, **LOGISTIC)
        assert sample.epsilon == 1.0
