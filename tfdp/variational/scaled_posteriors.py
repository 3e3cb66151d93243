"""Posteriors with a weakened likelihood, and draws from them."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfdp._types import Array, Nest, Tensor

# ``(theta, x, y) -> (N,)``.
LogLikelihood: TypeAlias = Callable[[Array, Array, Nest], Array | Tensor]

# Where more proposals than this may be needed for a draw, Markov chains are used.
_MOST_PROPOSALS = 1e6

# Log-likelihoods that are computed at once.
_MOST_NUMBERS = 2**22

_PROPOSALS = 4096

_STEPS_OF_CHAIN = 5000


class Prior(NamedTuple):
    """A Gaussian around zero, cut off outside of a ball."""

    scale: float
    radius: float

    def share_inside(self, parameters: int) -> float:
        """Return how much of the Gaussian is left, at least a tiny number."""
        half = tf.constant(parameters / 2, tf.float64)
        share = float(tf.math.igamma(half, (self.radius / self.scale) ** 2 / 2))
        return max(share, 1e-300)

    def allows(self, thetas: Array) -> Array:
        """``(S, P)`` -> ``(S,)``, whether they lie in the ball."""
        return np.asarray(np.linalg.norm(thetas, axis=1) <= self.radius)


class ScaledPosterior(NamedTuple):
    """A posterior whose log-likelihood is multiplied by a number.

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
    log_likelihoods: Callable[[Array], Array]
    draw: Callable[[np.random.Generator], Array] | None


def logistic(
    rows: Array, labels: Array, epsilon: float, radius: float, prior: Prior
) -> ScaledPosterior:
    """Describe logistic regression with an intercept."""
    if not radius > 1:
        raise ValueError(
            "`radius` must be more than 1, the intercept's share of it. Received: "
            f"radius={radius}. Use `radius={1 + radius}`, or divide the inputs."
        )
    inputs = clipped(rows, math.sqrt(radius**2 - 1))
    inputs = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
    # A record adds ln sigmoid(s), where s lies between -D R and D R. Its values there
    # are D R apart at most, and so much can the integral's logarithm change too.
    full_cost = 2 * prior.radius * radius
    weight = min(1.0, epsilon / full_cost)
    signed = inputs * np.where(labels, 1.0, -1.0)[:, None]

    def log_likelihoods(thetas: Array) -> Array:
        parts = np.array_split(thetas, 1 + thetas.shape[0] * len(rows) // _MOST_NUMBERS)
        return np.concatenate([
            -weight * np.logaddexp(0, -part @ signed.T).sum(1) for part in parts
        ])

    # By theta, ln sigmoid has a slope of radius at most and bends by radius^2 / 4.
    slope, curvature = (weight * len(rows) * each for each in (radius, radius**2 / 4))
    parameters = inputs.shape[1]
    draw = None
    if _least_share_accepted(parameters, slope, curvature, prior) * _MOST_PROPOSALS > 1:
        draw = functools.partial(_draw_concave, log_likelihoods, signed, weight, prior)
    return ScaledPosterior(
        parameters, weight, weight * full_cost, log_likelihoods, draw
    )


def _least_share_accepted(
    parameters: int, slope: float, curvature: float, prior: Prior
) -> float:
    """Bound from below how many proposals `_draw_concave` accepts, whatever the data.

    The log-likelihood lies above a parabola that touches it at the mode. So what is
    accepted is at least a Gaussian times ``exp(-kappa u)``, where u is the distance from
    the tangent plane at the edge, as far as it lies in the ball. Least of it does where
    the mode is at the edge: that is what is assumed. For each u the other directions
    are a Gaussian in a ball, and what is left is an integral over u.

    Args:
        parameters: P.
        slope: Bounds the slope of the weighted log-likelihood, and so kappa, by which
            the posterior may rise at the edge.
        curvature: Bounds its second derivatives.
        prior: The prior.

    Returns:
        A share of all proposals.
    """
    precision = prior.scale**-2
    steep = precision + curvature
    # Everything happens close to the edge, or all over the ball.
    u = prior.radius * np.logspace(-12, math.log10(2), 4000)
    # Of the radius of the ball's section at u, and the Gaussian's share in there.
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
        # Both Gaussians without their exponentials: what is accepted over proposals.
        of_proposals = precision + outwards / prior.radius
        log_share = (parameters / 2) * math.log(of_proposals / (2 * math.pi))
        log_share -= ((parameters - 1) / 2) * math.log(steep / (2 * math.pi))
        shares.append(math.exp(log_share) * float(inside))
    return min(shares)


def _draw_concave(
    log_likelihoods: Callable[[Array], Array],
    signed: Array,
    weight: float,
    prior: Prior,
    rng: np.random.Generator,
) -> Array:
    """Draw from the posterior of logistic regression by rejection.

    A concave function lies below its tangent at any point c. With it in place of the
    log-likelihood the posterior is a Gaussian around c, if c is the mode: that is what
    proposals are drawn from, and the distance from the tangent rejects. At the edge of
    the ball the posterior still rises outwards, by kappa; inside of the ball
    ``n . v <= -|v|^2 / (2 D)`` for v from c and the outward normal n, which makes the
    Gaussian narrower. Whatever c is, what is accepted has the posterior's distribution.

    Args:
        log_likelihoods: See `ScaledPosterior`.
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
        # Below the tangent, and in the ball: neither of the two parts exceeds 0 there.
        log_accepted = log_likelihoods(thetas) - at_center - moves @ slope
        squares = np.square(moves).sum(1)
        log_accepted += outwards * (moves @ normal + squares / (2 * prior.radius))
        is_accepted = -rng.exponential(size=_PROPOSALS) < log_accepted
        accepted = thetas[is_accepted & prior.allows(thetas)]
        if len(accepted):
            return np.array(accepted[0])


def _mode(signed: Array, weight: float, prior: Prior) -> Array:
    """Find the posterior's mode in the ball, by Newton's method."""

    def objective(theta: Array, precision: float) -> float:
        likelihood = -weight * np.logaddexp(0, -signed @ theta).sum()
        return float(likelihood - precision * (theta @ theta) / 2)

    def mode(precision: float) -> Array:
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

    # In the ball, or where a narrower prior puts the mode on its edge.
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


def _sigmoid(z: Array) -> Array:
    return np.asarray(np.exp(-np.logaddexp(0, -z)))


def of_function(
    log_likelihood: LogLikelihood,
    data: tuple[Array, Nest],
    *,
    epsilon: float,
    full_cost: float,
    bound: float | None,
    prior: Prior,
    parameters: int,
) -> ScaledPosterior:
    """Describe a posterior whose log-likelihood is a function."""
    if not callable(log_likelihood):
        raise TypeError(
            f"`log_likelihood` must be 'logistic_regression' or a function. Received: "
            f"log_likelihood={log_likelihood!r}. Use `lambda theta, x, y: ...`."
        )
    records = len(data[0])
    weight = min(1.0, epsilon / full_cost)

    def of_one(theta: Array) -> float:
        values = np.asarray(log_likelihood(theta, *data), np.float64)
        if values.shape != (records,):
            raise ValueError(
                "`log_likelihood` must give a number for each record. Received: shape "
                f"{values.shape} for {records} records. Return an array of shape (N,)."
            )
        if bound is not None:
            # NaN raises no error: that would tell of a single record.
            values = np.clip(np.where(np.isnan(values), -bound, values), -bound, bound)
        elif not np.isfinite(values).all():
            raise ValueError(
                "`log_likelihood` with a `lipschitz` constant must be finite. Received: "
                "values that are not. Use `bound=B`, to which values are clipped."
            )
        return weight * float(values.sum())

    def log_likelihoods(thetas: Array) -> Array:
        return np.array([of_one(theta) for theta in thetas])

    def draw(rng: np.random.Generator) -> Array:
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
    return ScaledPosterior(
        parameters,
        weight,
        weight * full_cost,
        log_likelihoods,
        draw if is_feasible else None,
    )


def end_of_chain(
    posterior: ScaledPosterior, prior: Prior, rng: np.random.Generator
) -> Array:
    """Return where elliptical slice sampling is after many steps.

    Murray et al., "Elliptical slice sampling", AISTATS 2010, figure 2. It needs no
    tuning, which would have to be by public numbers.
    """
    theta = np.zeros(posterior.parameters)
    log_likelihood = posterior.log_likelihoods(theta[None])[0]
    for _ in range(_STEPS_OF_CHAIN):
        other = prior.scale * rng.standard_normal(posterior.parameters)
        least = log_likelihood - rng.exponential()
        angle = rng.uniform(0, 2 * math.pi)
        low, high = angle - 2 * math.pi, angle
        while True:
            proposal = (theta * math.cos(angle) + other * math.sin(angle))[None]
            if prior.allows(proposal)[0]:
                log_likelihood = posterior.log_likelihoods(proposal)[0]
                if log_likelihood > least:
                    break
            low, high = (angle, high) if angle < 0 else (low, angle)
            angle = rng.uniform(low, high)
        theta = proposal[0]
    return theta


def clipped(rows: Array, radius: float) -> Array:
    """Bring rows of a greater l2 norm into the ball."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    # Rounding must not bring them out again.
    factors = np.minimum(1.0, radius / np.maximum(norms, 1e-300) * (1 - 1e-12))
    return np.where(norms > radius, rows * factors, rows)
