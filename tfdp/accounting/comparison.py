"""One training under every way of drawing its batches."""

import math

from tfdp._validate import positive, positive_int
from tfdp.accounting.segments import Segment
from tfdp.sampling import (
    BallsInBins,
    CyclicPoisson,
    FixedBins,
    Poisson,
    Shuffled,
    TruncatedPoisson,
    Unknown,
)


def segments_by_sampling(
    *,
    n: int,
    batch_size: int,
    epochs: float,
    noise_multiplier: float,
    cyclic_parts: int = 2,
) -> dict[str, Segment]:
    """Return one planned training under every way of drawing its batches.

    The training is ``epochs * ceil(n / batch_size)`` steps, rounded up. Where passes
    are what counts, each counts as soon as it has begun. What each costs says
    `reported_epsilon`; the noise that those need which `DPModel(sampling=)` knows,
    `calibrate_noise_multiplier`.

    Args:
        n: Number of examples in the training data.
        batch_size: Expected number of examples in a batch; at most ``n``.
        epochs: Number of epochs, which need not be whole.
        noise_multiplier: Noise standard deviation over the clip norm.
        cyclic_parts: Parts that ``"cyclic_poisson"`` draws from in turn.

    Returns:
        A segment for each of ``"poisson"``; ``"truncated_poisson"``, at the bound that
        costs less than a percent; ``"balls_in_bins"``; ``"fixed_bins"``, drawn once and
        read in every epoch; ``"shuffle"``; ``"cyclic_poisson"``, for more than one
        example; and ``"unknown"``.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If an argument is out of its range.

    Example:
        >>> from tfdp.accounting import reported_epsilon
        >>> segments = segments_by_sampling(
        ...     n=60_000, batch_size=256, epochs=1, noise_multiplier=1.1
        ... )
        >>> for name in ("poisson", "balls_in_bins", "shuffle"):
        ...     print(f"{name}: {reported_epsilon([segments[name]], delta=1e-5):.2f}")
        poisson: 0.31
        balls_in_bins: 0.27
        shuffle: 3.92
    """
    n = positive_int("n", n)
    batch_size = positive_int("batch_size", batch_size)
    if batch_size > n:
        raise ValueError(
            f"`batch_size` must be at most `n`. Received: batch_size={batch_size}, "
            f"n={n}. Use `batch_size={n}`."
        )
    batches = -(-n // batch_size)
    steps = math.ceil(positive("epochs", epochs) * batches)
    free_bound = TruncatedPoisson(n, batch_size, max_batch_size=n).free_bound
    schemes = {
        "poisson": Poisson(n, batch_size),
        "truncated_poisson": TruncatedPoisson(n, batch_size, max_batch_size=free_bound),
        "balls_in_bins": BallsInBins(n, batch_size),
        # The number of the bins is of no use before they are drawn.
        "fixed_bins": FixedBins(n, batch_size, batches_per_epoch=batches, bins=1),
        "shuffle": Shuffled(n, batch_size),
        **(
            {"cyclic_poisson": CyclicPoisson(n, batch_size, cyclic_parts)}
            if n > 1
            else {}
        ),
        "unknown": Unknown(),
    }
    return {
        name: Segment(
            scheme,
            -(-steps // batches) if scheme.counts_passes else steps,
            noise_multiplier,
        )
        for name, scheme in schemes.items()
    }
