"""The folder of a simulation: its history for people, its state to go on from."""

import csv
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfdp._files import replaced

_STATE, _HISTORY, _BEGUN = "state.npz", "history.csv", "rounds_begun.txt"


class State(NamedTuple):
    """What a simulation needs to go on.

    Attributes:
        settings: What it has in common with an equal one, as JSON has it.
        clips: C of every round.
        interrupted: Numbers of rounds, as often as they were begun and not finished.
        next_clip: C of the next.
        history: See `Simulation.run`.
        nonprivate_norms: See `Simulation`.
        values: Of the variables that rounds change.
    """

    settings: dict[str, Any]
    clips: list[float]
    interrupted: list[int]
    next_clip: float
    history: dict[str, list[float]]
    nonprivate_norms: np.ndarray
    values: list[np.ndarray]


def write_state(folder: Path, state: State) -> None:
    """Write both files, each so that a kill leaves the old one or the new.

    Args:
        folder: Exists.
        state: What to write.
    """
    # NumPy's files know no bfloat16.
    values = [
        np.asarray(value, "float32") if value.dtype == "bfloat16" else value
        for value in state.values
    ]
    about = state._asdict()
    del about["values"], about["nonprivate_norms"]
    with replaced(folder / _STATE, "wb") as file:
        np.savez(
            file,
            *values,
            about=json.dumps(about),
            nonprivate_norms=state.nonprivate_norms,
        )
    if not state.history:
        return
    with replaced(folder / _HISTORY, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(state.history)
        writer.writerows(zip(*state.history.values(), strict=True))


def read_state(folder: Path) -> State | None:
    """Read what `write_state` wrote.

    Args:
        folder: Exists.

    Returns:
        The state, None if there is none.

    Raises:
        ValueError: If it is damaged.
    """
    path = folder / _STATE
    if not path.exists():
        return None
    try:
        with np.load(path) as state:
            about = json.loads(str(state["about"]))
            norms = state["nonprivate_norms"]
            values = [state[f"arr_{n}"] for n in range(len(state.files) - 2)]
        # Older states have none.
        about.setdefault("interrupted", [])
        return State(**about, nonprivate_norms=norms, values=values)
    except (TypeError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            "A folder's state must be one that a simulation wrote. Received: "
            f"directory='{folder}', whose state is damaged ({error}). Delete "
            f"'{_STATE}' to begin anew."
        ) from error


def note_round(folder: Path, number: int) -> None:
    """Write down that a round begins: its clients are about to take part.

    Args:
        folder: Exists.
        number: Of the round.
    """
    with (folder / _BEGUN).open("a") as file:
        file.write(f"{number}\n")


def rounds_without_end(folder: Path, state: State) -> list[int]:
    """Return the rounds that were begun after a state was written.

    Args:
        folder: Exists.
        state: What is in it.

    Returns:
        Their numbers, as often as they were begun.
    """
    path = folder / _BEGUN
    if not path.exists():
        return []
    # A last line without an end was not followed by a round.
    begun = [int(line) for line in path.read_text().split("\n")[:-1]]
    return [number for number in begun if number >= len(state.clips)]
