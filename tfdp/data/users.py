"""Which rows belong to which user."""

import numbers
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tfdp import _validate
from tfdp._types import Nest
from tfdp.sampling import fresh_key

_MISSING = {"None", "nan", "NaT", "<NA>"}


class Users:
    """The users of some rows, numbered in the order of their first rows.

    Args:
        name: What the ids are called in messages.
        ids: One id for each row: whole numbers or strings, shape ``(n,)``. Rows with
            equal ids are of one user.
        most_rows: How many rows of a user may be taken together.

    Raises:
        TypeError: If the ids are neither whole numbers nor strings.
        ValueError: If there are none, or their shape is another one.
    """

    def __init__(self, name: str, ids: Nest, most_rows: int) -> None:
        self.most_rows = most_rows
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

    def check_rows(self, name: str, rows: int) -> None:
        """Raise a ValueError unless there is an id for each of so many rows."""
        if len(self.of_rows) != rows:
            raise ValueError(
                f"`{name}` must have one id for each row. Received: "
                f"len({name})={len(self.of_rows)}, {rows} rows."
            )

    def rows(self, user: int) -> NDArray[np.int64]:
        """Return the rows of a user, in ascending order."""
        first = self._ends[user - 1] if user else 0
        return self._rows[first : self._ends[user]]

    def some_rows(
        self, user: int, random: Callable[[int], np.random.Generator]
    ) -> NDArray[np.int64]:
        """Return the rows of a user, or a uniformly random part if there are too many.

        Args:
            user: Its number.
            random: From the number of a user to what draws the part.

        Returns:
            The rows in ascending order.
        """
        rows = self.rows(user)
        if len(rows) <= self.most_rows:
            return rows
        return np.sort(random(user).choice(rows, self.most_rows, replace=False))

    def laid_out(
        self,
        users: NDArray[np.int64],
        random: Callable[[int], np.random.Generator],
    ) -> NDArray[np.int64]:
        """Return the rows of users in places that each has the same number of.

        Args:
            users: Numbers of users, shape ``(n,)``.
            random: See `some_rows`.

        Returns:
            Numbers of rows, -1 in places that are left, shape ``(n * most_rows,)``.
        """
        places = np.full((len(users), self.most_rows), -1)
        for place, user in enumerate(users.tolist()):
            rows = self.some_rows(user, random)
            places[place, : len(rows)] = rows
        return places.ravel()


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
    users = Users("ids", ids, most)
    random = np.random.Generator(np.random.Philox(key=fresh_key()))
    kept = [users.some_rows(user, lambda _: random) for user in range(len(users))]
    return np.sort(np.concatenate(kept))


def users_of(user_ids: Nest, examples_per_user: int | None, rows: int) -> Users | None:
    """Return the users of some rows, None if nobody says who they are.

    Args:
        user_ids: As `PoissonDataset` takes them.
        examples_per_user: Likewise.
        rows: How many there are.

    Returns:
        The users.

    Raises:
        TypeError: If the ids or the bound are of another type.
        ValueError: If their number is not that of the rows, or one is given without the
            other.
    """
    if user_ids is None:
        if examples_per_user is not None:
            raise ValueError(
                "`examples_per_user` needs the users of the rows. Received: "
                f"examples_per_user={examples_per_user!r}. Use `user_ids=ids`."
            )
        return None
    if examples_per_user is None:
        raise ValueError(
            "`user_ids` needs a bound on the rows of a user in a batch, a public number "
            "that does not come from the data. Received: examples_per_user=None. Use "
            "`examples_per_user=8`."
        )
    most = _validate.positive_int("examples_per_user", examples_per_user)
    users = Users("user_ids", user_ids, most)
    users.check_rows("user_ids", rows)
    return users


def _id_array(name: str, ids: Nest) -> NDArray[np.generic]:
    if np.ma.is_masked(ids):
        raise TypeError(
            f"`{name}` must be known for all rows: rows of unknown users cannot be kept "
            f"together. Received: {name} with {np.ma.count_masked(ids)} masked of "
            f"{np.size(ids)}. Leave these rows out, `x[~{name}.mask]` and "
            f"`{name}.compressed()`."
        )
    # In a list of strings NumPy would take what is missing for a name.
    is_list = isinstance(ids, (list, tuple))
    values = np.asarray(ids, object) if is_list else np.asarray(ids)
    missing = sum(map(_is_missing, values.flat)) if values.dtype.kind in "fMO" else 0
    if missing:
        raise TypeError(
            f"`{name}` must be known for all rows: rows of unknown users cannot be kept "
            f"together. Received: {name} with {missing} missing of {values.size}. Leave "
            f"these rows out, `known = pandas.notna({name})`, `x[known]` and "
            f"`np.asarray({name})[known]`."
        )
    if values.ndim != 1 or not len(values):
        flat = f"np.ravel({name})"
        if values.ndim and values.size > len(values):
            flat = f"[str(each) for each in {name}]"
        raise ValueError(
            f"`{name}` must be one id for each row, shape (n,). Received: "
            f"{name}.shape={values.shape}. Use `{flat}`."
        )
    if values.dtype.kind == "O":
        for kind, array_of in ((str, str), (bytes, bytes), (numbers.Integral, None)):
            if all(isinstance(each, kind) for each in values.flat):
                values = np.asarray(values.tolist(), array_of)
    if values.dtype.kind not in "iuSU":
        raise TypeError(
            f"`{name}` must be whole numbers or strings, which tell users apart. "
            f"Received: {name}.dtype={values.dtype}. Use `np.asarray({name}).astype(str)`."
        )
    return values


def _is_missing(value: object) -> bool:
    """Tell whether a value stands for none: None, NaN, or those of pandas."""
    return not isinstance(value, (str, bytes)) and str(value) in _MISSING
