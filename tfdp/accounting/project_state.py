"""What is in the file of a project."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tfdp.accounting.ledger import Ledger
from tfdp.accounting.runs import Run, Runs, runs_to_dict, union

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a project knows of a training.

    Attributes:
        run: What it has run, as of when that was written down.
        label: What people call it.
        reserved: All that it may have run in the end, if it has not ended.
        if_killed: What counts in place of that if its process is gone.
    """

    run: Run
    label: str = ""
    reserved: Ledger | None = None
    if_killed: Ledger | None = None


@dataclasses.dataclass
class ProjectState:
    """What is in the file of a project.

    Attributes:
        budget: Its delta and its epsilon, None without a budget.
        entries: The trainings by name, in the order in which they were first heard of.
    """

    budget: tuple[float, float] | None
    entries: dict[str, Entry]

    def add(self, runs: Runs, label: str) -> None:
        """Count runs that have ended, each as far as it is known to have come.

        Args:
            runs: By name.
            label: What to call those that are new.
        """
        for name, run in runs.items():
            entry = self.entries.get(name, Entry(run, label))
            if entry.reserved is None:
                furthest = union({name: entry.run}, {name: run})[name]
                self.entries[name] = dataclasses.replace(entry, run=furthest)

    def to_json(self) -> str:
        """Return it as text."""
        entries = {}
        for name, entry in self.entries.items():
            fields = {"label": entry.label, **runs_to_dict({name: entry.run})[name]}
            for key in ("reserved", "if_killed"):
                ledger = getattr(entry, key)
                fields[key] = ledger and ledger.to_json()
            entries[name] = fields
        content = {"version": _VERSION, "budget": self.budget, "runs": entries}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> "ProjectState":
        """Read what `to_json` wrote.

        Args:
            text: It.
            path: Where it was.

        Returns:
            What was written.

        Raises:
            ValueError: If it is damaged.
        """
        try:
            content = json.loads(text)
            if content["version"] != _VERSION:
                raise ValueError(f"Its version is {content['version']}.")
            entries = {name: _entry(fields) for name, fields in content["runs"].items()}
            budget = content["budget"] and tuple(content["budget"])
            return cls(budget or None, entries)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"`{path}` must be a file that `Project` wrote. {error!r} "
                f"Received: {text!r:.200}."
            ) from error


def _entry(fields: dict[str, Any]) -> Entry:
    kept = {
        key: fields[key] and Ledger.from_json(fields[key])
        for key in ("reserved", "if_killed")
    }
    ledger = Ledger.from_json(fields["ledger"])
    run = Run(ledger, int(fields["steps"]), fields["l2_norm_clip"])
    return Entry(run, str(fields["label"]), **kept)
