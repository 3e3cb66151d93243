"""Clients that exist as numbers only: who takes part when, and with which examples."""

import dataclasses

import numpy as np

from tfdp import _validate

_FEISTEL_ROUNDS = 6
_MOST_CLIENTS = 2**62


@dataclasses.dataclass(frozen=True)
class VirtualClients:
    """As many clients as one likes, none of which is ever stored.

    A client's examples are drawn, with replacement, from the rows of a data set by a
    hash of the client's number. Clients take part by permutation: in a pass over all
    clients each takes part once at most, in an order that a keyed permutation of
    their numbers gives. Both need as much memory for a billion clients as for ten.

    Args:
        number_of_clients: How many there are.
        clients_per_round: How many take part in a round. Those left over at the end
            of a pass sit it out.
        examples_per_client: How many rows each of them has.
        seed: Which clients these are, at least 0.

    Raises:
        TypeError: If a number is no whole number.
        ValueError: If a number is out of its range, or a round needs more clients
            than there are.

    Example:
        >>> clients = tfdp.federated.VirtualClients(
        ...     10_000_000, clients_per_round=1000, examples_per_client=5
        ... )
        >>> clients.rows(clients.of_round(0), 60_000).shape
        (5000,)
    """

    number_of_clients: int
    clients_per_round: int
    examples_per_client: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name in ("number_of_clients", "clients_per_round", "examples_per_client"):
            value = _validate.positive_int(name, getattr(self, name))
            object.__setattr__(self, name, value)
        _validate.seed("seed", self.seed)
        if self.number_of_clients > _MOST_CLIENTS:
            raise ValueError(
                "`number_of_clients` must be a 63-bit number. Received: "
                f"number_of_clients={self.number_of_clients}. Use "
                f"`number_of_clients={_MOST_CLIENTS}`."
            )
        if self.clients_per_round > self.number_of_clients:
            raise ValueError(
                "`clients_per_round` must be at most the number of clients. Received: "
                f"clients_per_round={self.clients_per_round}, number_of_clients="
                f"{self.number_of_clients}. Use `clients_per_round="
                f"{self.number_of_clients}`."
            )

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

    def rows(self, clients: np.ndarray, number_of_rows: int) -> np.ndarray:
        """List the rows that some clients have, client by client.

        Args:
            clients: Their numbers, shape ``(M,)``.
            number_of_rows: Of the data set.

        Returns:
            Numbers below `number_of_rows`, int64, shape
            ``(M * examples_per_client,)``.
        """
        own = np.arange(self.examples_per_client, dtype=np.uint64)
        counters = clients.astype(np.uint64)[:, None] * np.uint64(
            self.examples_per_client
        )
        hashed = _mixed(counters + own + self._key(0))
        return (hashed.ravel() % np.uint64(number_of_rows)).astype(np.int64)

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
                left, right = right, left ^ (_mixed(right + key) & mask)
            values[outside] = left << shift | right
            outside = outside[values[outside] >= self.number_of_clients]
        return values.astype(np.int64)

    def _key(self, number: int) -> np.ndarray:
        """Return a number that the seed decides, for each use another."""
        sequence = np.random.SeedSequence(self.seed, spawn_key=(number,))
        return sequence.generate_state(1, np.uint64)


def _mixed(values: np.ndarray) -> np.ndarray:
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
