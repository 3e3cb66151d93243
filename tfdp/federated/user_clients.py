"""The users of a data set as clients."""

import zlib

import numpy as np

from tfdp import _validate
from tfdp._types import Config, Nest
from tfdp.data.users import Users
from tfdp.federated.clients import Clients


class UserClients(Clients):
    """The users of some rows: each is a client, with all of its rows.

    A client's reply is the gradient of the mean loss over the user's own rows, so what
    a simulation protects are users, as `DPModel(unit="user")` does. Clients take part
    by permutation: in a pass over all users each takes part once at most.

    Args:
        user_ids: The user of each row, whole numbers or strings, shape ``(n,)``, as
            `DPModel.fit` takes them.
        clients_per_round: How many users take part in a round. Those left over at the
            end of a pass sit it out.
        examples_per_user: How many rows of a user a reply is computed from, at most:
            of more a random part, another one in each round. Memory and time grow
            with it.
        seed: Decides the order of the users and these parts, at least 0.

    Raises:
        TypeError: If ids are neither whole numbers nor strings, or a number is none.
        ValueError: If ids are missing or of another shape, a number is out of its
            range, or a round needs more users than there are.

    Example:
        >>> ids = np.array(["ann", "ben", "ann", "eve", "ann"])
        >>> clients = tfdp.federated.UserClients(
        ...     ids, clients_per_round=3, examples_per_user=2
        ... )
        >>> clients.number_of_clients
        3
        >>> sorted(clients.rows_of_round(0, 5).tolist())[:3]  # -1: an empty place.
        [-1, -1, 1]
    """

    unit = "user"
    have_padding = True

    def __init__(
        self,
        user_ids: Nest,
        clients_per_round: int,
        examples_per_user: int,
        seed: int = 0,
    ) -> None:
        most = _validate.positive_int("examples_per_user", examples_per_user)
        self._users = Users("user_ids", user_ids, most)
        self.number_of_clients = len(self._users)
        self.clients_per_round = _validate.positive_int(
            "clients_per_round", clients_per_round
        )
        self.examples_per_client = most
        self.seed = _validate.seed("seed", seed)
        self._check_round()

    def rows_of_round(self, number: int, number_of_rows: int) -> np.ndarray:
        """List the rows that the clients of a round compute their replies from.

        Args:
            number: Of the round, 0 for the first.
            number_of_rows: Of the data set.

        Returns:
            Numbers of rows, client by client, -1 for an empty place, int64, shape
            ``(clients_per_round * examples_per_user,)``.

        Raises:
            ValueError: If there is not one id for each row.
        """
        self._users.check_rows("user_ids", number_of_rows)
        return self._users.laid_out(
            self.of_round(number),
            # Of its own, so that no reply depends on how many rows others have.
            lambda user: np.random.default_rng((self.seed, number, user)),
        )

    def settings(self) -> Config:
        """Return what tells these clients from others, as JSON has it."""
        return {
            "users": zlib.crc32(self._users.of_rows.tobytes()),
            "clients_per_round": self.clients_per_round,
            "examples_per_user": self.examples_per_client,
            "seed": self.seed,
        }
