"""Who takes part in which round of a simulation."""

import abc
from typing import ClassVar

import numpy as np

from tfdp._types import Config

_FEISTEL_ROUNDS = 6


class Clients(abc.ABC):
    """Clients that take part by permutation: `VirtualClients` or `UserClients`.

    In a pass over all clients each takes part once at most, in an order that a keyed
    permutation of their numbers gives.

    Attributes:
        number_of_clients: How many there are.
        clients_per_round: How many take part in a round. Those left over at the end
            of a pass sit it out.
        examples_per_client: Places for rows that each of them has in a round.
        seed: Which clients these are, at least 0.
        unit: What a client is in statements.
        have_padding: Whether places may be empty.
    """

    number_of_clients: int
    clients_per_round: int
    examples_per_client: int
    seed: int
    unit: ClassVar[str] = "client"
    have_padding: ClassVar[bool] = False

    @property
    def rounds_per_pass(self) -> int:
        """Rounds in which no client takes part twice."""
        return self.number_of_clients // self.clients_per_round

    def participations(self, rounds: int) -> int:
        """Return how often a client takes part at most in the first rounds."""
        return -(-rounds // self.rounds_per_pass)

    def of_round(self, number: int) -> np.ndarray:
        """List the clients of a round.

        Args:
            number: Of the round, 0 for the first.

        Returns:
            Different numbers below `number_of_clients`, int64, shape
            ``(clients_per_round,)``.
        """
        in_pass = number % self.rounds_per_pass
        places = np.arange(self.clients_per_round) + in_pass * self.clients_per_round
        return self._permuted(places, number // self.rounds_per_pass)

    @abc.abstractmethod
    def rows_of_round(self, number: int, number_of_rows: int) -> np.ndarray:
        """List the rows that the clients of a round compute their replies from.

        Args:
            number: Of the round, 0 for the first.
            number_of_rows: Of the data set.

        Returns:
            Numbers of rows, client by client, -1 for an empty place, int64, shape
            ``(clients_per_round * examples_per_client,)``.
        """

    @abc.abstractmethod
    def settings(self) -> Config:
        """Return what tells these clients from others, as JSON has it."""

    def _check_round(self) -> None:
        """Raise a ValueError if a round needs more clients than there are."""
        if self.clients_per_round > self.number_of_clients:
            raise ValueError(
                "`clients_per_round` must be at most the number of clients. Received: "
                f"clients_per_round={self.clients_per_round}, number_of_clients="
                f"{self.number_of_clients}. Use `clients_per_round="
                f"{self.number_of_clients}`."
            )

    def _permuted(self, places: np.ndarray, pass_number: int) -> np.ndarray:
        """Permute numbers below `number_of_clients`, another way in every pass."""
        # A Feistel network permutes the numbers below a power of four. What it sends
        # out of range it permutes again, until it is inside.
        half = max(1, (self.number_of_clients - 1).bit_length() + 1 >> 1)
        keys = [
            self._key(1 + pass_number * _FEISTEL_ROUNDS + number)
            for number in range(_FEISTEL_ROUNDS)
        ]
        shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
        values = places.astype(np.uint64)
        outside = np.arange(len(values))
        while len(outside):
            left, right = values[outside] >> shift, values[outside] & mask
            for key in keys:
                left, right = right, left ^ (mixed(right + key) & mask)
            values[outside] = left << shift | right
            outside = outside[values[outside] >= self.number_of_clients]
        return values.astype(np.int64)

    def _key(self, number: int) -> np.ndarray:
        """Return a number that the seed decides, for each use another."""
        sequence = np.random.SeedSequence(self.seed, spawn_key=(number,))
        return sequence.generate_state(1, np.uint64)


def mixed(values: np.ndarray) -> np.ndarray:
    """Hash 64-bit numbers one to one [1]_.

    Args:
        values: uint64 numbers.

    Returns:
        As many uint64 numbers.

    References:
        .. [1] Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
           Generators", OOPSLA 2014. https://doi.org/10.1145/2660193.2660195
    """
    mixed: np.ndarray = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
