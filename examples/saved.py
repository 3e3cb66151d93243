"""Results that are kept as they come, so that what was killed can go on later."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class SavedResults:
    """Results by name, in a file that is written anew after each of them.

    Args:
        path: The file, JSON; its folder is made.
        settings: What all results depend on, made of what JSON has.
        resume: Whether to go on with what is in the file. Otherwise all begins anew.

    Raises:
        ValueError: If the file is to be gone on with, and has other settings or is
            no such file.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], *, resume: bool
    ) -> None:
        self._path = path
        # As they are when they have been read again.
        self._settings = json.loads(json.dumps(settings))
        self._results: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self._results = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text())
            settings, results = content["settings"], content["results"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self._path} has no results to go on with. Leave --resume out."
            ) from error
        if settings != self._settings:
            other = {
                name: value
                for name, value in settings.items()
                if value != self._settings.get(name)
            }
            raise ValueError(
                f"The results in {self._path} are of other settings. Received: "
                f"{other} there. Use the same flags, or leave --resume out."
            )
        return dict(results)

    def __contains__(self, name: str) -> bool:
        """Say whether there is a result."""
        return name in self._results

    def __getitem__(self, name: str) -> Any:
        """Return a result."""
        return self._results[name]

    def __setitem__(self, name: str, result: Any) -> None:
        """Keep a result, on disk before this returns."""
        self._results[name] = result
        content = {"settings": self._settings, "results": self._results}
        # A run that is killed here leaves the old file or the new one.
        unfinished = self._path.with_name(f"{self._path.name}.unfinished")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        Path(unfinished).replace(self._path)


def read_history(path: Path) -> dict[str, list[float]]:
    """Read the log of a `keras.callbacks.CSVLogger`, of a training that went on too.

    Args:
        path: The file.

    Returns:
        The values of each column, one for each epoch.
    """
    with path.open() as file:
        # An epoch that was run again has two rows, and the later one is right.
        rows = {int(row["epoch"]): row for row in csv.DictReader(file)}
    ordered = [rows[epoch] for epoch in sorted(rows)]
    return {name: [float(row[name]) for row in ordered] for name in ordered[0]}
