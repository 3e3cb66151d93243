"""The folder of a simulation: its history for people, its state to go on from."""

import csv
import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfdp._files import replaced
from tfdp._types import Array, Config

_STATE, _HISTORY, _BEGUN = "state.npz", "history.csv", "rounds_begun.txt"


class State(NamedTuple):
    """What a simulation needs to go on.

    Attributes:
        settings: What decides how it goes, as JSON; one with other settings must not go
            on from here.
        clips: C of every round.
        interrupted: How often a round was begun and not finished, in this folder and in
            those that the simulation was in before.
        next_clip: C of the next round.
        history: See `Simulation.run`.
        nonprivate_norms: See `Simulation`.
        values: Of the variables that rounds change.
    """

    settings: Config
    clips: list[float]
    interrupted: int
    next_clip: float
    history: dict[str, list[float]]
    nonprivate_norms: Array
    values: list[Array]


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
        # Older states list the rounds, still older ones have none.
        interrupted = about.get("interrupted", 0)
        is_list = isinstance(interrupted, list)
        about["interrupted"] = len(interrupted) if is_list else interrupted
        return State(**about, nonprivate_norms=norms, values=values)
    except (TypeError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            "A folder's state must be one that a simulation wrote. Received: "
            f"directory='{folder}', whose state is damaged ({error}). Delete "
            f"'{_STATE}' to begin anew."
        ) from error


def forget_rounds(folder: Path) -> None:
    """Begin anew, where the state of an earlier simulation was deleted."""
    (folder / _BEGUN).unlink(missing_ok=True)


def note_round(folder: Path, number: int) -> None:
    """Write down that a round begins: its clients are about to take part.

    Args:
        folder: Exists.
        number: Of the round.
    """
    with (folder / _BEGUN).open("a") as file:
        file.write(f"{number}\n")


def interrupted_rounds(folder: Path, finished: int) -> Counter[int]:
    """Count the rounds that were begun in a folder after its state was written.

    Args:
        folder: Exists.
        finished: How many rounds the state knows.

    Returns:
        Of each round's number, how often.
    """
    path = folder / _BEGUN
    # A last line without an end was not followed by a round.
    begun = path.read_text().split("\n")[:-1] if path.exists() else []
    return Counter(number for number in map(int, begun) if number >= finished)
