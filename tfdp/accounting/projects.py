"""One data set, many trainings: their ledgers in a file, within one budget."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tfdp import _validate
from tfdp._files import locked, replaced
from tfdp.accounting.accountant import reported_epsilon
from tfdp.accounting.calibration import affordable_count
from tfdp.accounting.ledger import Ledger, compose
from tfdp.accounting.project_state import Entry, ProjectState
from tfdp.accounting.runs import Run, Runs, ledger_of, union
from tfdp.accounting.segments import Segment
from tfdp.accounting.statement import privacy_statement
from tfdp.errors import PrivacyBudgetError

# No model knows of more steps: what it says of such a training changes nothing.
_FOR_GOOD = 2**62


class _Recorder(Protocol):
    def all_runs(self) -> dict[str, Run]: ...


class Private(Protocol):
    """A private model, which knows what it comes from."""

    @property
    def recorder(self) -> _Recorder:
        """Knows its runs."""
        ...


class Project:
    """The ledgers of all models and searches that saw one data set, in one file.

    Several processes may write to the file at once: each holds a lock while it does, and
    puts a whole new file in place of the old one. Whoever is killed meanwhile leaves the
    old file, and no lock.

    A training that has the project's budget [`PrivacyBudget(project=...)`] reserves what
    it plans before its first step, and gives back what it has not used when it ends. If
    its process is killed, all that it had reserved stays counted; `unsettled` lists such
    trainings. One that goes on from its `keras.callbacks.BackupAndRestore` is settled by
    the journal there: by that folder itself, as an older copy knows of fewer steps. A
    search that was killed counts as all tries that had begun.

    Trainings have names of their own. What several models come from, and what was saved
    and has gone on, counts once.

    Guarantees:
        Trainings that reserve never make the epsilon of the project larger than its
        target, whichever run at once. Searches that are killed may: what they have run
        then counts in full.

    Args:
        path: The file, which need not exist. Its folder must, on a disk that has file
            locks. While a search runs, the file tells how many tries have begun: who may
            not see the data may not read it.
        delta: Of the budget, for a new file, or one that has none.
        target_epsilon: Of the budget, likewise: what all of it together may cost.

    Raises:
        TypeError: If a number is none.
        ValueError: If a number is out of its range, one of both is missing, the file has
            another budget, or is damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> project = Project(f"{folder}/patients.json", delta=1e-5, target_epsilon=3.0)
        >>> project.epsilon()
        0.0
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        delta: float | None = None,
        target_epsilon: float | None = None,
    ) -> None:
        # A link and its file are one project, also after `os.chdir`.
        self.path = Path(path).resolve()
        if not self.path.parent.is_dir():
            raise ValueError(
                "`path` must be a file in a folder that exists. Received: "
                f"path={str(path)!r}. Make the folder `{self.path.parent}`."
            )
        if (delta is None) != (target_epsilon is None):
            raise ValueError(
                "A budget has both numbers. Received: "
                f"delta={delta!r}, target_epsilon={target_epsilon!r}. Use "
                "`Project(path, delta=1e-5, target_epsilon=3.0)`."
            )
        budget = None
        if delta is not None:
            budget = (
                _validate.probability("delta", delta),
                _validate.positive("target_epsilon", target_epsilon),
            )
        if budget is None and self.path.exists():
            self._read()
            return
        with self._changed() as state:
            if budget is not None and state.budget not in {None, budget}:
                raise ValueError(
                    "The budget of a project is settled once. Received: "
                    f"delta={delta!r}, target_epsilon={target_epsilon!r} for "
                    f"`{self.path}`, whose (delta, epsilon) are {state.budget}. Use "
                    "`Project(path)`."
                )
            state.budget = budget or state.budget

    @property
    def delta(self) -> float | None:
        """Delta of the budget, None without one."""
        budget = self._read().budget
        return budget[0] if budget else None

    @property
    def target_epsilon(self) -> float | None:
        """Epsilon of the budget, None without one."""
        budget = self._read().budget
        return budget[1] if budget else None

    @property
    def ledger(self) -> Ledger:
        """All that has run, and what is reserved for what runs now."""
        return ledger_of(self._counted(self._read().entries))

    def epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon of all that has run, and of what is reserved.

        It is what the budget compares. Where released values have ended a run, the
        statement says somewhat more: see `Ledger.delta_at_end`.

        Args:
            delta: In (0, 1); None for that of the budget.

        Returns:
            The smaller of the bounds of both accountants.

        Raises:
            ValueError: If there is neither.
        """
        return reported_epsilon(self.ledger.planned().segments, self._delta(delta))

    def privacy_statement(self, delta: float | None = None) -> str:
        """Say what guarantee holds for all models of the project together.

        Args:
            delta: In (0, 1); None for that of the budget.

        Returns:
            As `tfdp.DPModel.privacy_statement`, with a list of the trainings.

        Raises:
            ValueError: If there is no delta.
        """
        state = self._read()
        counted = self._counted(state.entries)
        lines = [
            privacy_statement(ledger_of(counted), self._delta(delta)),
            "Trainings:",
        ]
        for name, entry in state.entries.items():
            words = "has ended"
            if entry.reserved is not None:
                alive = self._is_alive(name)
                words = (
                    "runs now: what it has reserved counts"
                    if alive
                    else "was killed: what it may have run counts, until it is settled"
                )
            lines.append(f"- {name} {entry.label}: {words}")
        if state.budget:
            delta, target = state.budget
            lines.append(f"\nBudget: epsilon {target:g} at delta = {delta:g}.")
        return "\n".join(lines) + "\n"

    def add(self, private: Private, label: str = "") -> None:
        """Count what a model comes from, whatever trained it.

        What is known already counts once, and nothing is forgotten. The budget does not
        keep anybody from writing down what has happened.

        Args:
            private: A `tfdp.DPModel`, also one that was loaded from a file.
            label: What to call it.

        Raises:
            TypeError: If it is no private model.
        """
        runs = _runs_of(private)
        with self._changed() as state:
            state.add(runs, label)

    @property
    def unsettled(self) -> list[str]:
        """Names of the trainings whose processes were killed."""
        entries = self._read().entries
        return [
            name
            for name, entry in entries.items()
            if entry.reserved is not None and not self._is_alive(name)
        ]

    def settle(self, name: str, private: Private | None = None) -> None:
        """Say that a training which was killed does not go on.

        A training that goes on from the backups of `keras.callbacks.BackupAndRestore`
        with the project's budget settles what it goes on from by itself.

        Args:
            name: Its name, from `unsettled`.
            private: A model that was restored from a backup with a journal of all its
                steps: then what its ledger says counts. Without it, all that the training
                may have run counts from now on, for good.

        Raises:
            TypeError: If `private` is no private model.
            ValueError: If there is no such training, it is running, or the model does not
                know it.
        """
        runs = {} if private is None else _runs_of(private)
        with self._changed() as state:
            entry = state.entries.get(name)
            if entry is None or entry.reserved is None or self._is_alive(name):
                raise ValueError(
                    "Only a training that was killed can be settled. Received: "
                    f"name={name!r}. `project.unsettled` lists them: "
                    f"{self.unsettled!r}."
                )
            if private is not None and name not in runs:
                raise ValueError(
                    "The model must come from the training that it settles. Received: "
                    f"name={name!r}, a model that comes from {list(runs)!r}."
                )
            if private is not None and not _is_told(name, entry, runs):
                raise ValueError(
                    "The model must know of all steps of the training that was killed, by "
                    "the journal of `keras.callbacks.BackupAndRestore`; a file that was "
                    f"saved in between does not. Received: name={name!r}, a model of "
                    f"{runs[name].steps} steps. Use `project.settle({name!r})`, which "
                    "counts all that may have run."
                )
            self._settle(state, name, runs.get(name))
            state.add(runs, entry.label)

    # For trainings.

    def reserve(
        self,
        name: str,
        runs: Runs,
        planned: Ledger,
        label: str = "",
    ) -> None:
        """Count what is about to run, before it does.

        Args:
            name: Of the training.
            runs: All that it comes from, itself included.
            planned: What is to come.
            label: What to call it.

        Raises:
            PrivacyBudgetError: If the budget has no room for all of it.
        """
        with self._changed() as state:
            before = self._without(state, name, runs)
            after = compose(before, planned.planned())
            if state.budget is not None:
                delta, target = state.budget
                cost = after.epsilon(delta)
                if not cost <= target:
                    raise PrivacyBudgetError(
                        f"The budget of the project has no room for {label or name}. "
                        f"Received: target_epsilon={target:g}, delta={delta:g}, spent "
                        f"and reserved epsilon={before.epsilon(delta):.4g}, "
                        f"{cost:.4g} with what is planned. Plan less, or more noise; "
                        f"`python -m tfdp.accounting.project {self.path}` prints what "
                        "has run."
                    )
            self._begin(state, name, runs, planned.planned().segments, label)

    def reserve_steps(
        self,
        name: str,
        runs: Runs,
        planned: tuple[Segment, ...],
        *,
        beside: tuple[Segment, ...] = (),
        label: str = "",
    ) -> int:
        """Count as many steps or passes as the budget has room for, before they run.

        Args:
            name: Of the training.
            runs: All that it comes from, itself included.
            planned: What is to come, in one scheme.
            beside: What else is to be released meanwhile, all of which is reserved.
            label: What to call it.

        Returns:
            How many there is room for, at most those that are planned.
        """
        with self._changed() as state:
            count = sum(segment.count for segment in planned)
            if state.budget is not None and count:
                delta, target = state.budget
                before = self._without(state, name, runs).add(*beside)
                if before.add(*planned).epsilon(delta) > target:
                    least = min(planned, key=lambda segment: segment.noise_multiplier)
                    count = affordable_count(before, least, target, delta, most=count)
                    planned = (least.with_count(count),)
            # Without a step nothing is released.
            planned = (*planned, *beside) if count else ()
            self._begin(state, name, runs, planned, label)
        return count

    def note(self, name: str, if_killed: Ledger) -> None:
        """Write down what counts if the process is killed from now on.

        Args:
            name: Of a training that has reserved.
            if_killed: What may have run by then.
        """
        with self._changed() as state:
            entry = state.entries[name]
            state.entries[name] = dataclasses.replace(entry, if_killed=if_killed)

    def finish(self, name: str, runs: Runs) -> None:
        """Count what has run in place of what was reserved.

        Args:
            name: Of a training that has reserved.
            runs: All that it comes from, itself included if it has run anything.
        """
        with self._changed() as state:
            entry = state.entries.pop(name, Entry(Run(Ledger(), 0)))
            if name in runs:
                state.entries[name] = Entry(runs[name], entry.label)
            state.add(runs, entry.label)
        alive = _alive.pop(self._alive_file(name), None)
        if alive is not None:
            alive.close()
            self._alive_file(name).unlink(missing_ok=True)

    def _begin(
        self,
        state: ProjectState,
        name: str,
        runs: Runs,
        planned: tuple[Segment, ...],
        label: str,
    ) -> None:
        for killed in self._killed_and_continued(state, runs):
            self._settle(state, killed, runs.get(killed, Run(Ledger(), 0)))
        own = runs.get(name, Run(Ledger(), 0))
        others = {other: run for other, run in runs.items() if other != name}
        state.add(others, label)
        reserved = own.ledger.planned().add(*planned).merged()
        state.entries[name] = Entry(own, label, reserved, reserved)
        path = self._alive_file(name)
        if path not in _alive:
            alive = contextlib.ExitStack()
            if not alive.enter_context(locked(path, wait=False)):
                alive.close()
                raise ValueError(
                    "A training reserves in one process only. Received: training "
                    f"{name!r}, which another process runs. Leave the project out where "
                    "several processes train one model, and use `project.add(private)`."
                )
            _alive[path] = alive

    def _without(self, state: ProjectState, name: str, runs: Runs) -> Ledger:
        """Return all that counts before a training reserves, itself included."""
        continued = self._killed_and_continued(state, runs)
        entries = {
            other: entry
            for other, entry in state.entries.items()
            if other != name and other not in continued
        }
        # What is reserved holds what has run of it by now.
        known = {
            other: dataclasses.replace(run, ledger=run.ledger.planned())
            for other, run in runs.items()
            if other not in entries or entries[other].reserved is None
        }
        return ledger_of(union(self._counted(entries), known))

    def _killed_and_continued(self, state: ProjectState, runs: Runs) -> list[str]:
        """Return the trainings that were killed, of which a journal told the rest.

        It did if it knows of steps that were taken after the reservation.
        """
        found = []
        for name, entry in state.entries.items():
            is_told = entry.reserved is not None and _is_told(name, entry, runs)
            if is_told and not self._is_alive(name):
                found.append(name)
        return found

    def _settle(self, state: ProjectState, name: str, run: Run | None) -> None:
        entry = state.entries[name]
        if run is None:
            assert entry.if_killed is not None  # noqa: S101
            run = dataclasses.replace(
                entry.run, ledger=entry.if_killed, steps=_FOR_GOOD
            )
        state.entries[name] = Entry(run, entry.label)
        self._alive_file(name).unlink(missing_ok=True)

    def _counted(self, entries: dict[str, Entry]) -> dict[str, Run]:
        """Return what counts of each training, as runs."""
        counted = {}
        for name, entry in entries.items():
            ledger = entry.run.ledger.planned()
            if entry.reserved is not None:
                kept = entry.reserved if self._is_alive(name) else entry.if_killed
                ledger = kept or entry.reserved
            counted[name] = dataclasses.replace(entry.run, ledger=ledger)
        return counted

    def _alive_file(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{name}.running").absolute()

    def _is_alive(self, name: str) -> bool:
        """Tell whether the process of a training is there: it holds a lock."""
        path = self._alive_file(name)
        if not path.exists():
            return False
        with locked(path, wait=False) as is_free:
            return not is_free

    def _delta(self, delta: float | None) -> float:
        if delta is None:
            delta = self.delta
        if delta is None:
            raise ValueError(
                "The project has no budget whose delta could be meant. Received: "
                "delta=None. Use `delta=1e-5`."
            )
        return _validate.probability("delta", delta)

    # The file.

    def _read(self) -> ProjectState:
        if not self.path.exists():
            return ProjectState(None, {})
        return ProjectState.from_json(self.path.read_text(encoding="utf-8"), self.path)

    @contextlib.contextmanager
    def _changed(self) -> Iterator[ProjectState]:
        """Let nobody else change the file meanwhile; an error leaves it as it was."""
        with locked(self.path.with_name(f"{self.path.name}.lock")):
            state = self._read()
            yield state
            with replaced(self.path, encoding="utf-8") as file:
                file.write(state.to_json())


def project_of(project: Project | str | os.PathLike[str]) -> Project:
    """Return a project that there is.

    Args:
        project: It, or the path of its file.

    Raises:
        TypeError: If it is something else.
        ValueError: If there is no such file: a path that was mistyped begins no project.
    """
    _validate.instance("project", project, Project, str, os.PathLike)
    if isinstance(project, Project):
        return project
    if not Path(project).exists():
        raise ValueError(
            "`project` must be a file that exists. Received: "
            f"project={os.fspath(project)!r}. {_make(project)}"
        )
    return Project(project)


def project_with_budget(project: Project | str | os.PathLike[str]) -> Project:
    """Return a project whose budget can bind trainings.

    Args:
        project: It, or the path of its file.

    Raises:
        TypeError: If it is something else.
        ValueError: If there is no such file, or it has no budget.
    """
    found = project_of(project)
    if found.target_epsilon is None:
        raise ValueError(
            "`project` must have a budget. Received: "
            f"project={str(found.path)!r}. {_make(found.path)}"
        )
    return found


def _make(path: str | os.PathLike[str]) -> str:
    return (
        "Make it first: `tfdp.accounting.Project("
        f"{os.fspath(path)!r}, delta=1e-5, target_epsilon=3.0)`."
    )


# The locks of the trainings of this process: see `Project._is_alive`.
_alive: dict[Path, contextlib.ExitStack] = {}


def _is_told(name: str, entry: Entry, runs: Runs) -> bool:
    """Tell whether a journal knows of steps that were taken after a reservation."""
    known = [
        run.steps
        for other, run in runs.items()
        if other == name or other.startswith(f"{name} after ")
    ]
    return sum(known) > entry.run.steps and (name in runs) < len(known)


def _runs_of(private: Private) -> dict[str, Run]:
    try:
        return private.recorder.all_runs()
    except AttributeError as error:
        raise TypeError(
            "`private` must be a `tfdp.DPModel`, which knows what it comes from. "
            f"Received: private of type {type(private).__name__}."
        ) from error
