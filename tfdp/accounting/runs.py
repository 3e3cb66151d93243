"""Runs: what single trainings have run, each under a name that no other has."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdp.accounting.ledger import FLAGS, Ledger, compose


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training had run at some moment.

    A run only ever grows, so of two moments that of larger `extent` holds the other.

    Attributes:
        ledger: Of this training alone.
        steps: How many it had taken.
        l2_norm_clip: Of the last of them, if that is known.
    """

    ledger: Ledger
    steps: int
    l2_norm_clip: float | None = None

    @property
    def extent(self) -> tuple[int, int]:
        """How far it had come: its steps, and all that it has run beside them or owes."""
        counted = self.ledger.planned().segments
        return self.steps, sum(segment.count for segment in counted)


Runs = Mapping[str, Run]


def union(*several: Runs) -> dict[str, Run]:
    """Return all runs, each as it was at its furthest moment.

    Args:
        *several: Runs by their names.

    Returns:
        The runs by name, in the order in which they occur first.
    """
    found: dict[str, Run] = {}
    for runs in several:
        for name, run in runs.items():
            known = found.get(name, run)
            furthest = run if run.extent >= known.extent else known
            flags = {
                flag: getattr(run.ledger, flag) or getattr(known.ledger, flag)
                for flag in FLAGS
            }
            ledger = dataclasses.replace(furthest.ledger, **flags)
            found[name] = dataclasses.replace(furthest, ledger=ledger)
    return found


def ledger_of(runs: Runs) -> Ledger:
    """Return the ledger of all runs together, as trainings on the same data."""
    return compose(*(run.ledger for run in runs.values())).merged()


def runs_to_dict(runs: Runs) -> dict[str, Any]:
    """Return runs as values for JSON."""
    return {
        name: {
            "ledger": run.ledger.to_json(),
            "steps": run.steps,
            "l2_norm_clip": run.l2_norm_clip,
        }
        for name, run in runs.items()
    }


def runs_from_state(state: dict[str, Any]) -> dict[str, Run]:
    """Read the runs of a saved model.

    Args:
        state: With what `runs_to_dict` returned under ``"runs"``. Models that were
            saved before runs had ledgers of their own have one ``"ledger"`` for all,
            and under ``"runs"`` only the steps of each.

    Returns:
        The runs by name.

    Raises:
        KeyError: If something is missing.
        ValueError: If a ledger is damaged.
    """
    saved = state["runs"]
    if "ledger" in state:
        # Only a file with the very same steps has no other ones to count.
        whole = " ".join(f"{name}:{saved[name]}" for name in sorted(saved))
        name = next(iter(saved)) if len(saved) == 1 else whole
        saved = {name: {"ledger": state["ledger"], "steps": state["steps"]}}
    return {
        name: Run(
            Ledger.from_json(run["ledger"]), int(run["steps"]), run.get("l2_norm_clip")
        )
        for name, run in saved.items()
    }
