"""What a client has sent already, on its own disk."""

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tfdp import _validate
from tfdp._files import replaced
from tfdp.accounting.local import (
    calibrate_local_noise_multiplier,
    joint_local_epsilon,
)
from tfdp.errors import PrivacyBudgetError

# No epsilon asks for more.
_MOST_NOISE = 1e12


class LocalBudget:
    """What a client may still send, in a ledger on the client's own disk.

    Guarantees:
        All replies that the ledger has counted cost `epsilon` together at most, also
        where earlier ones had other noise, because other arguments had been given
        then. A participation is on the disk before `spend` returns, and several
        processes and threads may share a ledger. Nothing in it is named after what a
        server assigns, such as Flower's `node_id`, so that no server can begin a new
        one. Whoever can delete the file, or put an older one in its place, can make
        the client forget; only a `LocalBudget` that has read the newer one remembers
        it. Keep the file as safe as the data.

    Args:
        path: The ledger, a JSON file, made with the first participation; beside it
            lies a file of the same name and `.lock`. Its folder must exist.
        epsilon: Epsilon that all replies together may cost.
        delta: Probability with which the bound may fail, between 0 and 1.
        max_participations: How many replies the client sends at most. The noise of
            each is what so many need.
        neighboring_relation: See `calibrate_local_noise_multiplier`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range, or the file no such ledger.
        OSError: If the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> budget = LocalBudget(f"{folder.name}/budget.json", epsilon=8.0, delta=1e-7)
        >>> budget.noise_multiplier
        1.404227
        >>> budget.spend()
        >>> budget.participations, round(budget.spent_epsilon, 3)
        (1, 8.0)
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        epsilon: float,
        delta: float,
        max_participations: int = 1,
        neighboring_relation: str = "replace_one",
    ) -> None:
        # Resolved, so that links to one ledger share one lock.
        self._path = Path(path).resolve()
        self._epsilon = _validate.positive("epsilon", epsilon)
        self._noise_multiplier = calibrate_local_noise_multiplier(
            self._epsilon,
            delta=delta,
            max_participations=max_participations,
            neighboring_relation=neighboring_relation,
        )
        self._delta = float(delta)
        self._max_participations = int(max_participations)
        self._neighboring_relation = neighboring_relation
        # What is known to be spent, whatever becomes of the file.
        self._known: Counter[float] = Counter()
        with self._locked():
            self._read()

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise of each reply over C."""
        return self._noise_multiplier

    @property
    def participations(self) -> int:
        """How many replies the ledger has counted."""
        return len(self._read())

    @property
    def spent_epsilon(self) -> float:
        """An upper bound of what they have cost."""
        return self._cost(self._read())

    def spend(self) -> None:
        """Count one participation, durably, before anything leaves the client.

        Raises:
            PrivacyBudgetError: If the budget leaves no room for it.
            ValueError: If the file is no ledger any more.
        """
        with self._locked():
            spent = self._read()
            longer = [*spent, self._noise_multiplier]
            # What was calibrated exactly may come out larger by a rounding.
            most = self._epsilon * (1 + 1e-9)
            if len(longer) > self._max_participations or self._cost(longer) > most:
                raise PrivacyBudgetError(
                    "The local privacy budget leaves no room for another reply. "
                    f"Received: {len(spent)} participations counted in "
                    f"'{self._path}', max_participations={self._max_participations}."
                )
            with replaced(self._path) as file:
                json.dump({"noise_multipliers": longer}, file)
            self._known = Counter(longer)

    def _cost(self, noise_multipliers: list[float]) -> float:
        return joint_local_epsilon(
            noise_multipliers,
            self._delta,
            neighboring_relation=self._neighboring_relation,
        )

    def _read(self) -> list[float]:
        """Return the noise multiplier of every participation."""
        try:
            text = self._path.read_text(encoding="utf-8")
            multipliers = json.loads(text)["noise_multipliers"]
            if not isinstance(multipliers, list):
                raise TypeError(f"no list: {multipliers!r}")
            found = [_validate.positive("noise_multipliers", m) for m in multipliers]
            if max(found, default=0) > _MOST_NOISE:
                raise ValueError(f"absurd noise: {max(found):g}")
        except FileNotFoundError:
            found = []
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                "`path` must be a ledger that `LocalBudget` wrote. Received: "
                f"path='{self._path}', which is damaged ({error}). Put back the last "
                "one, or count the budget as spent: a new ledger would forget what "
                "the client has sent."
            ) from error
        # Of each noise multiplier as many as were ever seen.
        self._known |= Counter(found)
        return list(self._known.elements())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes out, and threads: each opens the file anew."""
        with self._path.with_name(f"{self._path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
