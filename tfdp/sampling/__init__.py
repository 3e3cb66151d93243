"""Drawing the examples of a training step. NumPy only."""

from tfdp.sampling.poisson import (
    fresh_key,
    poisson_indices,
    poisson_probability,
    seeded_key,
)

__all__ = ["fresh_key", "poisson_indices", "poisson_probability", "seeded_key"]
