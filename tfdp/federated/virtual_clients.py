"""Clients that exist as numbers only."""

import dataclasses

import numpy as np

from tfdp import _validate
from tfdp._types import Config
from tfdp.federated.clients import Clients, mixed

_MOST_CLIENTS = 2**62


@dataclasses.dataclass(frozen=True)
class VirtualClients(Clients):
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
        self._check_round()

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
        hashed = mixed(counters + own + self._key(0))
        return (hashed.ravel() % np.uint64(number_of_rows)).astype(np.int64)

    def rows_of_round(self, number: int, number_of_rows: int) -> np.ndarray:
        """List the rows that the clients of a round have, all of them."""
        return self.rows(self.of_round(number), number_of_rows)

    def settings(self) -> Config:
        """Return the arguments."""
        return dataclasses.asdict(self)
