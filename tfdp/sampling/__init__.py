"""Drawing the examples of a training step. NumPy only."""

from tfdp.sampling.poisson import (
    fresh_key,
    poisson_indices,
    poisson_probability,
    seeded_key,
)
from tfdp.sampling.shuffled import shuffled_order

__all__ = [
    "fresh_key",
    "poisson_indices",
    "poisson_probability",
    "seeded_key",
    "shuffled_order",
]
