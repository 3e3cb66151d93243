"""Which rows belong to which user."""

import numpy as np
from numpy.typing import NDArray

from tfdp import _validate
from tfdp._types import Nest
from tfdp.sampling import fresh_key


class Users:
    """The users of some rows, numbered in the order of their first rows.

    Args:
        name: What the ids are called in messages.
        ids: One id for each row: whole numbers or strings, shape ``(n,)``. Rows with
            equal ids are of one user.

    Raises:
        TypeError: If the ids are neither whole numbers nor strings.
        ValueError: If there are none, or their shape is another one.
    """

    def __init__(self, name: str, ids: Nest) -> None:
        values = _id_array(name, ids)
        _, first, found = np.unique(values, return_index=True, return_inverse=True)
        # The n-th user is the one whose first row comes n-th.
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        self.of_rows: NDArray[np.int64] = rank[found]
        self._rows = np.argsort(self.of_rows, kind="stable")
        self._ends = np.cumsum(np.bincount(self.of_rows))

    def __len__(self) -> int:
        """Return the number of users."""
        return len(self._ends)

    def rows(self, user: int) -> NDArray[np.int64]:
        """Return the rows of a user, in ascending order."""
        first = self._ends[user - 1] if user else 0
        return self._rows[first : self._ends[user]]

    def some_rows(
        self, user: int, most: int, random: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return the rows of a user, or a uniformly random part if there are too many.

        Args:
            user: Its number.
            most: How many there may be.
            random: Draws the part.

        Returns:
            The rows in ascending order.
        """
        rows = self.rows(user)
        if len(rows) <= most:
            return rows
        return np.sort(random.choice(rows, most, replace=False))


def bound_contributions(ids: Nest, *, max_per_user: int) -> NDArray[np.int64]:
    """Choose rows of which no user has many.

    Of a user with more rows a uniformly random part stays, which a secret of the
    operating system decides. Train on the chosen rows alone; what was trained protects
    each row, and ``private.privacy_statement(delta, max_examples_per_user=...)`` says
    how much it protects all rows of a user.

    Args:
        ids: The user of each row, whole numbers or strings, shape ``(n,)``.
        max_per_user: How many rows of a user stay, at most. A public number: it must
            not come from the data.

    Returns:
        Numbers of rows in ascending order, int64. How many there are depends on the
        data, as the number of rows does; it counts as public.

    Raises:
        TypeError: If ids are neither whole numbers nor strings, or the bound is no
            number.
        ValueError: If there are no ids, their shape is another one, or the bound is not
            a whole number of at least 1.

    Example:
        >>> ids = np.array(["ann", "ben", "ann", "ann", "eve"])
        >>> kept = tfdp.data.bound_contributions(ids, max_per_user=2)
        >>> len(kept), sorted(ids[kept].tolist())
        (4, ['ann', 'ann', 'ben', 'eve'])
    """
    most = _validate.positive_int("max_per_user", max_per_user)
    users = Users("ids", ids)
    random = np.random.Generator(np.random.Philox(key=fresh_key()))
    kept = [users.some_rows(user, most, random) for user in range(len(users))]
    return np.sort(np.concatenate(kept))


def _id_array(name: str, ids: Nest) -> NDArray[np.generic]:
    values = np.asarray(ids)
    if values.dtype.kind == "O":
        for kind in (str, bytes):
            if all(isinstance(each, kind) for each in values.flat):
                values = values.astype(kind)
    if values.dtype.kind not in "iuSU":
        raise TypeError(
            f"`{name}` must be whole numbers or strings: rows of unknown users cannot be "
            f"kept together. Received: {name}.dtype={values.dtype}. Use "
            f"`np.asarray({name}).astype(str)` if each of them is known."
        )
    if values.ndim != 1 or not len(values):
        raise ValueError(
            f"`{name}` must be one id for each row, shape (n,). Received: "
            f"{name}.shape={values.shape}. Use `np.ravel({name})`."
        )
    return values
