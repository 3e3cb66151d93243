"""Batches of which nobody has said how they are drawn."""

import dataclasses
from typing import ClassVar

from tfdp.sampling.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Unknown(Scheme):
    """Nothing is known of the batches: every step counts in full.

    Assumes that a batch has an example at most once.

    Args:
        examples_per_unit: Examples that share one clipped gradient.

    Example:
        >>> Unknown().sampling_probability
        1.0
    """

    kind: ClassVar[str] = "unamplified_steps"
    allows_units: ClassVar[bool] = True

    number_of_examples = None
    expected_batch_size = None
    examples_per_unit: int = 1

    def words(self, count: int, noise: str) -> str:
        """Say how many steps there were."""
        return f"{count} steps, {noise}, unknown batches: each counts in full"

    def assumption(self) -> str:
        """Say that no record may be twice in a batch."""
        return "It is assumed that a batch holds a row at most once."


@dataclasses.dataclass(frozen=True)
class UnknownUsers(Scheme):
    """Nothing is known of batches of users: every step counts in full.

    Assumes that a batch has the rows of a user all together, and once.

    Example:
        >>> UnknownUsers().unit
        'user'
    """

    kind: ClassVar[str] = "unamplified_user_steps"
    unit: ClassVar[str] = "user"

    number_of_examples = None
    expected_batch_size = None

    def words(self, count: int, noise: str) -> str:
        """Say how many steps there were."""
        return f"{count} steps, {noise}, unknown batches of users: each counts in full"

    def assumption(self) -> str:
        """Say that all rows of a user are one unit of a batch."""
        return "It is assumed that a batch holds a user's rows together, and once."
