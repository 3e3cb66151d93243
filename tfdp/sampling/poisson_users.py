"""Poisson sampling of users: all rows of a user are in a step, or none is."""

import dataclasses
from typing import ClassVar

from tfdp.sampling.poisson import Poisson
from tfdp.sampling.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class PoissonUsers(Poisson):
    """Each user is in or out of each batch by a coin of its own, with all its rows.

    The examples that it counts and draws are users.

    Args:
        number_of_examples: Number of users, which is public.
        expected_batch_size: Expected number of users in a draw.
        examples_per_user: Largest number of rows of a user in a batch.

    Example:
        >>> PoissonUsers(1000, 50, examples_per_user=8).unit
        'user'
    """

    kind: ClassVar[str] = "poisson_user_steps"
    sampling: ClassVar[str | None] = None
    unit: ClassVar[str] = "user"

    # The most rows that a user has: no default, so that it is chosen.
    examples_per_user: int

    @property
    def rows_per_example(self) -> int:
        """Rows of a batch that one user has, padding too."""
        return self.examples_per_user

    def words(self, count: int, noise: str) -> str:
        """Say how many draws there were."""
        return (
            f"{count} steps, {noise}, Poisson-sampled users: {self.expected_batch_size} "
            f"of {self.number_of_examples} users expected, with at most "
            f"{self.examples_per_user} examples each, sampling probability "
            f"{self.sampling_probability:g}"
        )

    def redrawn(self, count: int) -> dict[str, tuple[Scheme, int]]:
        """Return nothing to compare with: other schemes draw rows."""
        return {self.label: (self, count)}
