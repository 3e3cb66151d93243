"""Privacy from one draw of the posterior, without any noise but its own."""

import dataclasses
import functools
import hashlib
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp import _validate
from tfdp.accounting.text import filled
from tfdp.errors import PrivacyBudgetError

_LOGISTIC = "logistic_regression"

# Where more proposals than this may be needed for a draw, Markov chains are used.
_MOST_PROPOSALS = 1e6

# Log-likelihoods that are computed at once.
_MOST_NUMBERS = 2**22

_PROPOSALS = 4096

_STEPS_OF_CHAIN = 5000

# What was drawn from some data in this process, by a digest of the data.
_drawn: dict[bytes, "_Drawn"] = {}


class _Drawn(NamedTuple):
    """All draws from some data: their epsilon if exact, and whether all were."""

    epsilon: float = 0.0
    exactly: bool = True


@dataclasses.dataclass(frozen=True)
class PosteriorSample:
    """A draw from a posterior, and what it costs.

    Attributes:
        theta: The parameters, float64, shape ``(P,)``.
        epsilon: Of all draws from these data in this process, this one included;
            infinite if one was approximate.
        epsilon_if_exact: What that would be with exact draws.
        exactness: `"exact"`, or `"approximate"` for the end of a Markov chain.
        likelihood_weight: What log-likelihoods were multiplied by, at most 1.
    """

    theta: np.ndarray
    epsilon: float
    epsilon_if_exact: float
    exactness: str
    likelihood_weight: float

    def privacy_statement(self) -> str:
        """Say what the draw guarantees, and what it leaves out."""
        if math.isinf(self.epsilon):
            headline = (
                "No bound is proven for this draw. An exact one would be "
                f"{self.epsilon_if_exact:.3f}-differentially private; this one is the "
                "end of a Markov chain, whose distance from the posterior nobody "
                "knows, so that no delta can be given either."
            )
        else:
            headline = (
                f"This draw is {self.epsilon:.3f}-differentially private, with a delta "
                "of 0, together with all others from these data in this process."
            )
        paragraphs = [
            headline,
            "Neighbours: one record is replaced by any other (replace-one). It comes "
            "from the posterior whose log-likelihood is multiplied by "
            f"{self.likelihood_weight:.4g}, with inputs clipped and a prior on a "
            "bounded ball, by rejection sampling if exact.",
            "Not covered: draws in other processes, from parts of these data or from "
            "other orders of them; how long the draw took; that numbers are rounded; "
            "radii, bounds and priors that were chosen by looking at the data.",
        ]
        return "\n\n".join(map(filled, paragraphs)) + "\n"


def one_posterior_sample(
    log_likelihood: str | Callable[[np.ndarray, Any, Any], Any],
    x: Any,
    y: Any = None,
    *,
    epsilon: float,
    radius: float,
    weight_radius: float,
    bound: float | None = None,
    lipschitz: float | None = None,
    number_of_parameters: int | None = None,
    prior_scale: float = 1.0,
    again: bool = False,
    seed: int | None = None,
) -> PosteriorSample:
    """Draw parameters once from a posterior, which by itself is private.

    From ``prior(theta) * exp(rho * sum_i log p(x_i | theta))``, where rho makes what
    one record can change small enough [1]_. The prior is ``N(0, prior_scale^2 I)``, cut
    off outside of the ball of `weight_radius`. Inputs are clipped to `radius`.

    * ``"logistic_regression"``: ``rho = min(1, epsilon / (2 D R))`` for a radius R of
      inputs with a constant 1 for the intercept, and D, the radius of weights. Exact,
      unless there are so many records and parameters that it could take more than a
      million proposals; that is decided by public numbers.
    * A function with a `bound` B on ``|log p|``, to which its values are clipped:
      ``rho = min(1, epsilon / (4 B))``. Exact where ``2 rho N B``
      minus the log of the prior's share in the ball is at most ``ln(10^6)``.
    * A function with a constant `lipschitz` L, by which ``log p(x | theta)`` may change
      with x for every theta: ``rho = min(1, epsilon / (4 L R))``. That it is one cannot
      be checked. Always approximate.

    Guarantees:
        An exact draw is epsilon-differentially private, delta 0, where one record is
        replaced by another (replace-one), and N is public. An approximate one, the end
        of a Markov chain, has no proven epsilon: `PosteriorSample.epsilon` is infinite.
        A second draw from the same inputs, whatever their targets, is refused in this
        process, or its epsilon added.

    Args:
        log_likelihood: `"logistic_regression"`, or a function ``(theta, x, y) ->
            (N,)``, with theta of shape ``(P,)``.
        x: Inputs, shape ``(N, d)``.
        y: For logistic regression zeros and ones, shape ``(N,)``; for functions with
            a `bound` anything; None with `lipschitz`: then targets belong into `x`,
            because they may be replaced too.
        epsilon: What the draw may cost, positive.
        radius: R, to which each row's l2 norm is clipped. For logistic regression it
            includes the intercept's 1, so it must be more than 1.
        weight_radius: D, positive.
        bound: B, positive.
        lipschitz: L, positive.
        number_of_parameters: P, of a function.
        prior_scale: Standard deviation of the prior before it is cut off.
        again: Whether these data may have been drawn from before; epsilons add up.
        seed: Makes the draw repeatable, and not private: it warns.

    Returns:
        The draw.

    Raises:
        PrivacyBudgetError: If these data were drawn from before, and not `again`.
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range, or arrays do not fit together
            or hold numbers that are not finite.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(200, 2))
        >>> y = x[:, 0] > 0
        >>> sample = one_posterior_sample(
        ...     "logistic_regression", x, y, epsilon=1.0, radius=2.5, weight_radius=3.0
        ... )
        >>> sample.theta.shape, sample.exactness, round(sample.epsilon, 6)
        ((3,), 'exact', 1.0)

    References:
        .. [1] Wang et al., "Privacy for Free: Posterior Sampling and Stochastic
           Gradient Monte Carlo", ICML 2015, section 3.
           https://arxiv.org/abs/1502.07645
    """
    epsilon = _validate.positive("epsilon", epsilon)
    radius = _validate.positive("radius", radius)
    prior = _Prior(
        _validate.positive("prior_scale", prior_scale),
        _validate.positive("weight_radius", weight_radius),
    )
    if seed is not None:
        seed = _validate.seed("seed", seed)
    if not isinstance(again, bool):
        raise TypeError(f"`again` must be True or False. Received: again={again!r}.")
    rows = _checked_rows(x)
    if isinstance(log_likelihood, str):
        _validate.one_of("log_likelihood", log_likelihood, (_LOGISTIC,))
        _refuse_arguments_of_functions(bound, lipschitz, number_of_parameters)
        problem = _logistic(rows, _checked_labels(y, len(rows)), epsilon, radius, prior)
    else:
        problem = _of_function(
            log_likelihood,
            (_clipped(rows, radius), y),
            likelihood_weight=_weight_of_function(
                epsilon, radius, y, bound=bound, lipschitz=lipschitz
            ),
            bound=bound,
            prior=prior,
            parameters=_validate.positive_int(
                "number_of_parameters", number_of_parameters
            ),
        )
    # Counted before anything is drawn.
    drawn = _count(_digest(rows), problem, again=again)
    if seed is not None:
        warnings.warn(
            "A seed makes the draw repeatable: whoever knows it can undo the privacy. "
            f"Received: seed={seed}. Leave it out for a draw that will be published.",
            stacklevel=2,
        )
    rng = np.random.default_rng(seed)
    if problem.draw is None:
        theta = _end_of_chain(problem, prior, rng)
    else:
        theta = problem.draw(rng)
    return PosteriorSample(
        theta=theta,
        epsilon=drawn.epsilon if drawn.exactly else math.inf,
        epsilon_if_exact=drawn.epsilon,
        exactness="approximate" if problem.draw is None else "exact",
        likelihood_weight=problem.likelihood_weight,
    )


class _Prior(NamedTuple):
    """A Gaussian around zero, cut off outside of a ball."""

    scale: float
    radius: float

    def share_inside(self, parameters: int) -> float:
        """Return how much of the Gaussian is left, at least a tiny number."""
        half = tf.constant(parameters / 2, tf.float64)
        share = float(tf.math.igamma(half, (self.radius / self.scale) ** 2 / 2))
        return max(share, 1e-300)

    def allows(self, thetas: np.ndarray) -> np.ndarray:
        """``(S, P)`` -> ``(S,)``, whether they lie in the ball."""
        return np.asarray(np.linalg.norm(thetas, axis=1) <= self.radius)


class _Problem(NamedTuple):
    """A posterior.

    Attributes:
        parameters: P.
        likelihood_weight: What log-likelihoods are multiplied by.
        epsilon: What an exact draw costs.
        log_likelihoods: ``(S, P) -> (S,)``: their sums over records, multiplied.
        draw: Makes an exact draw; None if that could take too long.
    """

    parameters: int
    likelihood_weight: float
    epsilon: float
    log_likelihoods: Callable[[np.ndarray], np.ndarray]
    draw: Callable[[np.random.Generator], np.ndarray] | None


def _logistic(
    rows: np.ndarray, labels: np.ndarray, epsilon: float, radius: float, prior: _Prior
) -> _Problem:
    """Describe logistic regression with an intercept."""
    if not radius > 1:
        raise ValueError(
            "`radius` must be more than 1, the intercept's share of it. Received: "
            f"radius={radius}. Use `radius={1 + radius}`, or divide the inputs."
        )
    inputs = _clipped(rows, math.sqrt(radius**2 - 1))
    inputs = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
    # A record adds ln sigmoid(s), where s lies between -D R and D R: between both ends
    # there are D R.
    reach = prior.radius * radius
    weight = min(1.0, epsilon / (2 * reach))
    signed = inputs * np.where(labels, 1.0, -1.0)[:, None]

    def log_likelihoods(thetas: np.ndarray) -> np.ndarray:
        parts = np.array_split(thetas, 1 + thetas.shape[0] * len(rows) // _MOST_NUMBERS)
        return np.concatenate([
            -weight * np.logaddexp(0, -part @ signed.T).sum(1) for part in parts
        ])

    # At most: of a record's ln sigmoid the slope is radius, and its change radius^2 / 4.
    slope, curvature = (weight * len(rows) * each for each in (radius, radius**2 / 4))
    parameters = inputs.shape[1]
    draw = None
    if _least_share_accepted(parameters, slope, curvature, prior) * _MOST_PROPOSALS > 1:
        draw = functools.partial(_draw_concave, log_likelihoods, signed, weight, prior)
    return _Problem(parameters, weight, 2 * weight * reach, log_likelihoods, draw)


def _least_share_accepted(
    parameters: int, slope: float, curvature: float, prior: _Prior
) -> float:
    """Bound from below how many proposals `_draw_concave` accepts, whatever the data.

    The log-likelihood lies above a parabola, so what is accepted is at least a Gaussian
    times ``exp(-kappa u)``, for the distance u from the edge, cut off by the ball. The
    farther from its middle the mode is, the less of that is inside. All of it is an
    integral over u.

    Args:
        parameters: P.
        slope: Bounds the slope of the weighted log-likelihood, and so kappa.
        curvature: Bounds its second derivatives.
        prior: The prior.

    Returns:
        A share of all proposals.
    """
    precision = prior.scale**-2
    steep = precision + curvature
    # Everything happens close to the edge, or all over the ball.
    u = prior.radius * np.concatenate([np.logspace(-12, math.log10(2), 4000)])
    squares = np.maximum(2 * prior.radius * u - u**2, 0)
    beside = np.ones_like(u)
    if parameters > 1:
        beside = tf.math.igamma(
            tf.constant((parameters - 1) / 2, tf.float64), steep * squares / 2
        ).numpy()
    shares = []
    for outwards in [0.0, *np.geomspace(1e-3 * max(slope, 1e-9), max(slope, 1e-9), 30)]:
        density = beside * np.exp(-outwards * u - steep * u**2 / 2)
        inside = (np.diff(u) * (density[1:] + density[:-1])).sum() / 2
        of_proposals = precision + outwards / prior.radius
        log_share = (parameters / 2) * math.log(of_proposals / (2 * math.pi))
        log_share -= ((parameters - 1) / 2) * math.log(steep / (2 * math.pi))
        shares.append(math.exp(log_share) * float(inside))
    return min(shares)


def _draw_concave(
    log_likelihoods: Callable[[np.ndarray], np.ndarray],
    signed: np.ndarray,
    weight: float,
    prior: _Prior,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draw from the posterior of logistic regression by rejection.

    A concave function lies below its tangent at any point c. With it in place of the
    log-likelihood the posterior is a Gaussian around c, if c is the mode: that is what
    proposals are drawn from, and the distance from the tangent rejects. At the edge of
    the ball the posterior still rises outwards, by kappa; inside of the ball
    ``n . v <= -|v|^2 / (2 D)`` for v from c and the outward normal n, which makes the
    Gaussian narrower. Whatever c is, what is accepted has the posterior's distribution.

    Args:
        log_likelihoods: See `_Problem`.
        signed: Inputs times 1 or -1 by their labels, shape ``(N, P)``.
        weight: Of the log-likelihoods.
        prior: The prior.
        rng: Where proposals come from.

    Returns:
        The parameters.
    """
    center = _mode(signed, weight, prior)
    at_center = log_likelihoods(center[None])[0]
    slope = weight * (_sigmoid(-signed @ center) @ signed)
    rest = slope - center / prior.scale**2
    distance = np.linalg.norm(center)
    is_at_edge = abs(distance - prior.radius) <= 1e-9 * prior.radius
    normal = center / distance if is_at_edge else np.zeros_like(center)
    outwards = max(float(rest @ normal), 0.0)
    rest -= outwards * normal
    precision = prior.scale**-2 + outwards / prior.radius
    while True:
        moves = rng.standard_normal((_PROPOSALS, len(center))) / math.sqrt(precision)
        moves += rest / precision
        thetas = center + moves
        log_accepted = log_likelihoods(thetas) - at_center - moves @ slope
        squares = np.square(moves).sum(1)
        log_accepted += outwards * (moves @ normal + squares / (2 * prior.radius))
        is_accepted = -rng.exponential(size=_PROPOSALS) < log_accepted
        accepted = thetas[is_accepted & prior.allows(thetas)]
        if len(accepted):
            return np.array(accepted[0])


def _mode(signed: np.ndarray, weight: float, prior: _Prior) -> np.ndarray:
    """Find the posterior's mode in the ball, by Newton's method."""

    def objective(theta: np.ndarray, precision: float) -> float:
        likelihood = -weight * np.logaddexp(0, -signed @ theta).sum()
        return float(likelihood - precision * (theta @ theta) / 2)

    def mode(precision: float) -> np.ndarray:
        theta = np.zeros(signed.shape[1])
        for _ in range(1000):
            shares = _sigmoid(-signed @ theta)
            gradient = weight * (shares @ signed) - precision * theta
            curvature = weight * (signed.T * (shares * (1 - shares))) @ signed
            curvature += precision * np.eye(len(theta))
            step = np.linalg.solve(curvature, gradient)
            now = objective(theta, precision)
            # A full step could go too far where the sigmoid is flat.
            while objective(theta + step, precision) < now - 1e-12 * abs(now):
                step /= 2
            theta += step
            if np.linalg.norm(step) <= 1e-9 * (1 + np.linalg.norm(theta)):
                break
        return theta

    low = high = prior.scale**-2
    found = mode(low)
    if np.linalg.norm(found) <= prior.radius:
        return found
    while np.linalg.norm(mode(high)) > prior.radius:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        outside = np.linalg.norm(mode(middle)) > prior.radius
        low, high = (middle, high) if outside else (low, middle)
    found = mode(high)
    return np.array(found * (prior.radius / np.linalg.norm(found)))


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-np.logaddexp(0, -z)))


def _weight_of_function(
    epsilon: float, radius: float, y: Any, *, bound: Any, lipschitz: Any
) -> tuple[float, float]:
    """Return what log-likelihoods are multiplied by, and what a draw then costs."""
    if (bound is None) == (lipschitz is None):
        raise ValueError(
            "A log-likelihood must come with either `bound` or `lipschitz`. Received: "
            f"bound={bound}, lipschitz={lipschitz}. Use `bound=B` for |log p| <= B."
        )
    if bound is not None:
        cost = 4 * _validate.positive("bound", bound)
    else:
        if y is not None:
            raise ValueError(
                "With `lipschitz` targets belong into `x`: a record may be replaced "
                "with its target. Received: y. Use `np.column_stack([x, y])`."
            )
        cost = 4 * _validate.positive("lipschitz", lipschitz) * radius
    weight = min(1.0, epsilon / cost)
    return weight, weight * cost


def _of_function(
    log_likelihood: Any,
    data: tuple[np.ndarray, Any],
    *,
    likelihood_weight: tuple[float, float],
    bound: float | None,
    prior: _Prior,
    parameters: int,
) -> _Problem:
    """Describe a posterior whose log-likelihood is a function."""
    if not callable(log_likelihood):
        raise TypeError(
            f"`log_likelihood` must be '{_LOGISTIC}' or a function. Received: "
            f"log_likelihood={log_likelihood!r}. Use `lambda theta, x, y: ...`."
        )
    records = len(data[0])
    weight, epsilon = likelihood_weight

    def of_one(theta: np.ndarray) -> float:
        values = np.asarray(log_likelihood(theta, *data), np.float64)
        if values.shape != (records,):
            raise ValueError(
                "`log_likelihood` must give a number for each record. Received: shape "
                f"{values.shape} for {records} records. Return an array of shape (N,)."
            )
        if bound is not None:
            # No error for what is no number: it would tell of a single record.
            values = np.clip(np.where(np.isnan(values), -bound, values), -bound, bound)
        elif not np.isfinite(values).all():
            raise ValueError(
                "`log_likelihood` with a `lipschitz` constant must be finite. Received: "
                "values that are not. Use `bound=B`, to which values are clipped."
            )
        return weight * float(values.sum())

    def log_likelihoods(thetas: np.ndarray) -> np.ndarray:
        return np.array([of_one(theta) for theta in thetas])

    def draw(rng: np.random.Generator) -> np.ndarray:
        """Accept what the prior proposes, by the likelihood over its bound."""
        most = weight * records * (bound or 0.0)
        while True:
            theta = prior.scale * rng.standard_normal(parameters)
            if prior.allows(theta[None])[0] and (
                -rng.exponential() < of_one(theta) - most
            ):
                return theta

    is_feasible = bound is not None and (
        2 * weight * records * bound - math.log(prior.share_inside(parameters))
        <= math.log(_MOST_PROPOSALS)
    )
    return _Problem(
        parameters, weight, epsilon, log_likelihoods, draw if is_feasible else None
    )


def _end_of_chain(
    problem: _Problem, prior: _Prior, rng: np.random.Generator
) -> np.ndarray:
    """Return where elliptical slice sampling is after many steps.

    Murray et al., "Elliptical slice sampling", AISTATS 2010, figure 2. It needs no
    tuning, which would have to be by public numbers.
    """
    theta = np.zeros(problem.parameters)
    log_likelihood = problem.log_likelihoods(theta[None])[0]
    for _ in range(_STEPS_OF_CHAIN):
        other = prior.scale * rng.standard_normal(problem.parameters)
        least = log_likelihood - rng.exponential()
        angle = rng.uniform(0, 2 * math.pi)
        low, high = angle - 2 * math.pi, angle
        while True:
            proposal = (theta * math.cos(angle) + other * math.sin(angle))[None]
            if prior.allows(proposal)[0]:
                log_likelihood = problem.log_likelihoods(proposal)[0]
                if log_likelihood > least:
                    break
            low, high = (angle, high) if angle < 0 else (low, angle)
            angle = rng.uniform(low, high)
        theta = proposal[0]
    return theta


def _checked_rows(x: Any) -> np.ndarray:
    rows = np.asarray(x, np.float64)
    if rows.ndim != 2 or not rows.size or not np.isfinite(rows).all():
        raise ValueError(
            "`x` must be finite numbers of shape (N, d). Received: shape "
            f"{rows.shape}, {np.sum(~np.isfinite(rows))} numbers that are not finite. "
            "Use `x[np.isfinite(x).all(axis=1)]`."
        )
    return rows


def _checked_labels(y: Any, records: int) -> np.ndarray:
    labels = np.ravel(np.asarray(y))
    if labels.shape != (records,) or not np.isin(labels, (0, 1)).all():
        raise ValueError(
            "`y` must be zeros and ones, one for each row of `x`. Received: shape "
            f"{np.shape(y)} for {records} rows, values {np.unique(labels)[:5]}. Use "
            "`y == positive_class`."
        )
    return np.asarray(labels == 1)


def _refuse_arguments_of_functions(*arguments: Any) -> None:
    if any(argument is not None for argument in arguments):
        raise ValueError(
            "Logistic regression has its own bound. Received: bound, lipschitz, "
            f"number_of_parameters={arguments}. Leave them out."
        )


def _clipped(rows: np.ndarray, radius: float) -> np.ndarray:
    """Bring rows of a greater l2 norm into the ball."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    # Rounding must not bring them out again.
    factors = np.minimum(1.0, radius / np.maximum(norms, 1e-300) * (1 - 1e-12))
    return np.where(norms > radius, rows * factors, rows)


def _digest(rows: np.ndarray) -> bytes:
    """Tell data by their inputs, rounded: targets do not make other records of them."""
    digest = hashlib.blake2b(f"{rows.shape}".encode())
    # Zero has two signs.
    digest.update(np.ascontiguousarray(rows.astype("float32") + 0.0).tobytes())
    return digest.digest()


def _count(digest: bytes, problem: _Problem, *, again: bool) -> _Drawn:
    """Add a draw to those from the same data, or refuse it."""
    before = _drawn.get(digest)
    if before is not None and not again:
        raise PrivacyBudgetError(
            "These data were drawn from before, and one sample is what the privacy is "
            f"of. Received: a draw after others with epsilon {before.epsilon:.3f}. Use "
            f"`again=True` to add {problem.epsilon:.3f} to that."
        )
    epsilon, exactly = before or _Drawn()
    drawn = _Drawn(epsilon + problem.epsilon, exactly and problem.draw is not None)
    _drawn[digest] = drawn
    return drawn
