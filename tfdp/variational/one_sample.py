"""Privacy from one draw of the posterior, without any noise but its own."""

import dataclasses
import hashlib
import math

import numpy as np

from tfdp import _validate
from tfdp._types import Array, Nest
from tfdp.accounting.text import filled
from tfdp.errors import PrivacyBudgetError
from tfdp.variational.scaled_posteriors import (
    LogLikelihood,
    Prior,
    ScaledPosterior,
    clipped,
    end_of_chain,
    logistic,
    of_function,
)

_LOGISTIC = "logistic_regression"

# What all draws from some data cost in this process, and what they would if all were
# exact, by a digest of the data.
_spent: dict[bytes, tuple[float, float]] = {}


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

    theta: Array
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
            "Trust model: Central. Whoever draws has the records as they are.",
            "Not covered: draws in other processes, from parts of these data or from "
            "other orders of them; how long the draw took; that numbers are rounded; "
            "radii, bounds and priors that were chosen by looking at the data.",
        ]
        return "\n\n".join(map(filled, paragraphs)) + "\n"


def one_posterior_sample(
    log_likelihood: str | LogLikelihood,
    x: Array,
    y: Nest = None,
    *,
    epsilon: float,
    radius: float,
    weight_radius: float,
    bound: float | None = None,
    lipschitz: float | None = None,
    number_of_parameters: int | None = None,
    prior_scale: float = 1.0,
    again: bool = False,
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
            a `bound` anything; None with `lipschitz`: then targets belong in `x`,
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
           Gradient Monte Carlo", ICML 2015, section 3, Theorem 1.
           https://arxiv.org/abs/1502.07645
    """
    epsilon = _validate.positive("epsilon", epsilon)
    radius = _validate.positive("radius", radius)
    prior = Prior(
        _validate.positive("prior_scale", prior_scale),
        _validate.positive("weight_radius", weight_radius),
    )
    if not isinstance(again, bool):
        raise TypeError(f"`again` must be True or False. Received: again={again!r}.")
    rows = _checked_rows(x)
    if isinstance(log_likelihood, str):
        _validate.one_of("log_likelihood", log_likelihood, (_LOGISTIC,))
        of_functions = bound, lipschitz, number_of_parameters
        if of_functions != (None, None, None):
            raise ValueError(
                "Logistic regression has its own bound. Received: bound, lipschitz, "
                f"number_of_parameters={of_functions}. Leave them out."
            )
        posterior = logistic(
            rows, _checked_labels(y, len(rows)), epsilon, radius, prior
        )
    else:
        posterior = of_function(
            log_likelihood,
            (clipped(rows, radius), y),
            epsilon=epsilon,
            full_cost=_full_cost(radius, y, bound=bound, lipschitz=lipschitz),
            bound=bound,
            prior=prior,
            parameters=_validate.positive_int(
                "number_of_parameters", number_of_parameters
            ),
        )
    # Counted before anything is drawn.
    spent, spent_if_exact = _count(_digest(rows), posterior, again=again)
    rng = np.random.default_rng()
    if posterior.draw is None:
        theta = end_of_chain(posterior, prior, rng)
    else:
        theta = posterior.draw(rng)
    return PosteriorSample(
        theta=theta,
        epsilon=spent,
        epsilon_if_exact=spent_if_exact,
        exactness="approximate" if posterior.draw is None else "exact",
        likelihood_weight=posterior.likelihood_weight,
    )


def _full_cost(
    radius: float, y: Nest, *, bound: float | None, lipschitz: float | None
) -> float:
    """Return the epsilon of a draw whose log-likelihoods count in full."""
    if (bound is None) == (lipschitz is None):
        raise ValueError(
            "A log-likelihood must come with either `bound` or `lipschitz`. Received: "
            f"bound={bound}, lipschitz={lipschitz}. Use `bound=B` for |log p| <= B."
        )
    # Another record in the place of one changes the log-likelihood by 2 B at most, or by
    # 2 L R, and the logarithm of the integral that the posterior is divided by as much.
    if bound is not None:
        return 4 * _validate.positive("bound", bound)
    if y is not None:
        raise ValueError(
            "With `lipschitz` targets belong into `x`: a record may be replaced "
            "with its target. Received: y. Use `np.column_stack([x, y])`."
        )
    return 4 * _validate.positive("lipschitz", lipschitz) * radius


def _checked_rows(x: Array) -> Array:
    rows = np.asarray(x, np.float64)
    if rows.ndim != 2 or not rows.size or not np.isfinite(rows).all():
        raise ValueError(
            "`x` must be finite numbers of shape (N, d). Received: shape "
            f"{rows.shape}, {np.sum(~np.isfinite(rows))} numbers that are not finite. "
            "Use `x[np.isfinite(x).all(axis=1)]`."
        )
    return rows


def _checked_labels(y: Nest, records: int) -> Array:
    labels = np.ravel(np.asarray(y))
    if labels.shape != (records,) or not np.isin(labels, (0, 1)).all():
        raise ValueError(
            "`y` must be zeros and ones, one for each row of `x`. Received: shape "
            f"{np.shape(y)} for {records} rows, values {np.unique(labels)[:5]}. Use "
            "`y == positive_class`."
        )
    return np.asarray(labels == 1)


def _digest(rows: Array) -> bytes:
    """Identify data by their rounded inputs, which other targets leave the same."""
    digest = hashlib.blake2b(f"{rows.shape}".encode())
    # Zero has two signs.
    digest.update(np.ascontiguousarray(rows.astype("float32") + 0.0).tobytes())
    return digest.digest()


def _count(
    digest: bytes, posterior: ScaledPosterior, *, again: bool
) -> tuple[float, float]:
    """Add a draw to those from the same data, or refuse it."""
    spent, spent_if_exact = _spent.get(digest, (0.0, 0.0))
    if digest in _spent and not again:
        raise PrivacyBudgetError(
            "These data were drawn from before, and one sample is what the privacy is "
            f"of. Received: a draw after others with epsilon {spent_if_exact:.3f}. Use "
            f"`again=True` to add {posterior.epsilon:.3f} to that."
        )
    spent += math.inf if posterior.draw is None else posterior.epsilon
    _spent[digest] = spent, spent_if_exact + posterior.epsilon
    return _spent[digest]
