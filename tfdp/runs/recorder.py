"""What a model's training has run, in this process and before."""

import dataclasses
import json
import math
import os
import uuid
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from tfdp._types import Array, Config, Variable
from tfdp.accounting import Ledger, Project, Segment
from tfdp.accounting.runs import (
    Run,
    Runs,
    ledger_of,
    runs_from_state,
    runs_to_dict,
    union,
)
from tfdp.runs.counter import UNPLANNED, StepCounter
from tfdp.runs.histories import (
    History,
    counters_of,
    glimpse,
    history_of,
    is_only_run,
    know,
    note_steps,
    recognise_copies,
    rename_runs,
    runs_of,
)
from tfdp.sampling import Scheme


@dataclasses.dataclass(frozen=True)
class Reservation:
    """What a training may take of the budget of a project.

    Attributes:
        run: Whose it is.
        beginnings: Its segment, which no other one takes from it.
        releases: How many may begin in that.
        noise_multiplier: Of the least noise among them.
    """

    run: str
    beginnings: int
    releases: int
    noise_multiplier: float


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a model's training may cost in all.

    Attributes:
        delta: The delta of the guarantee.
        target_epsilon: The largest epsilon.
        project: Whose budget each training takes a part of, if somebody has said so.
        reservation: That part.
        lacks_project: Whether it was loaded from a file, which does not tell the project.
    """

    delta: float
    target_epsilon: float
    project: Project | None = None
    reservation: Reservation | None = None
    lacks_project: bool = False

    def has_reserved(self, recorder: "LedgerRecorder", least_noise: float) -> float:
        """Return how many releases a training may still begin for the project.

        Args:
            recorder: Of the training, which has reserved for itself: the budget may be
                that of another model whose weights it changes.
            least_noise: Of these releases.

        Returns:
            Their number; infinite without a project, -1 if not even the rest of a pass
            that has begun.
        """
        if self.lacks_project:
            return -1
        if self.project is None:
            return math.inf
        own = recorder.budget
        if own is None or own.project is None or own.reservation is None:
            return 0
        part = own.reservation
        if own.project.path.absolute() != self.project.path.absolute():
            return 0
        if least_noise < part.noise_multiplier:
            return -1
        is_its = (recorder.run, recorder.beginnings) == (part.run, part.beginnings)
        return part.releases - recorder.counter.releases_begun if is_its else 0

    def to_dict(self) -> Config:
        """Return what files keep: the numbers, and whether there is a project."""
        return {
            "delta": self.delta,
            "target_epsilon": self.target_epsilon,
            "lacks_project": self.lacks_project or self.project is not None,
        }


class StepJournal(Protocol):
    """Writes steps down before they run, where a run that is killed finds them."""

    def begin(self) -> None:
        """Begin anew, with all that was counted up to now."""

    def write(
        self,
        recorder: "LedgerRecorder",
        steps: int,
        noise_multiplier: float | None = None,
    ) -> None:
        """Write down steps that are about to run.

        Args:
            recorder: That will count them.
            steps: How many.
            noise_multiplier: That they count with, over the sensitivity; by default that of
                the training's steps to come.
        """


class LedgerRecorder:
    """Knows what one training has run: a *run*, under a name that no other has.

    Its ledger is that of all runs that its history knows, read when it is asked for.
    What files bring is kept beside, each run by its name, so nothing counts twice.

    Args:
        weights: Returns the weights of the model that trains, None when it is gone;
            None for an optimizer alone, which knows no model.

    Attributes:
        counter: Counts the steps of the present segment.
        run: The name of the run.
        history: What the run depends on.
        loaded: Other runs by name, which files or copied weights brought, up to where
            they had come.
        budget: What it may cost, with all that it depends on, if somebody has said so.
        sampled_epochs: The last epoch of seeded draws that it has used.
        beginnings: How many segments have begun.
        is_in_a_graph: Whether a graph that a user has traced takes its steps.
        to_come: What callbacks of the present `fit` have yet to release, by callback.
        reserved: What budgets keep room for beside the steps.
        journals: Where what the present `fit` counts is written down, too.
    """

    def __init__(
        self, weights: Callable[[], list[Variable] | None] | None = None
    ) -> None:
        """Begin an empty ledger."""
        self._weights = weights
        self.counter = StepCounter()
        self.run = uuid.uuid4().hex
        self.history = History(self)
        self.budget: Budget | None = None
        self.sampled_epochs = 0
        self.beginnings = 0
        self.is_in_a_graph = False
        self.to_come: dict[Hashable, Segment] = {}
        self.reserved: tuple[Segment, ...] = ()
        self.journals: Sequence[StepJournal] = ()
        # How many steps there were when a released value ended the segment, or a budget.
        self._steps_at_release: int | None = None
        self._steps_at_budget: int | None = None
        # What the segments before it have run.
        self._past = Ledger()
        self.loaded: dict[str, Run] = {}
        # A glimpse of the values that the last single step has left.
        self._left: list[float] = []
        living.add(self)

    # What was run.

    def own_run(self, noise_multiplier: float = math.inf) -> Run:
        """Return this run alone.

        Args:
            noise_multiplier: Of a step to come, over the sensitivity: a pass that is
                open counts with that, if it is less than its noise up to now.
        """
        counter = self.counter
        opened = noise_multiplier if counter.is_inside_release else math.inf
        clip = float(counter.last_clip.numpy())
        return Run(
            self._past.add(*counter.segments(opened)).merged(),
            int(counter.steps.numpy()),
            None if math.isnan(clip) else clip,
        )

    @property
    def runs(self) -> dict[str, Run]:
        """This run and those that were loaded here, by name."""
        own = self.own_run()
        is_empty = own.ledger == Ledger() and not own.steps
        return union(self.loaded, {} if is_empty else {self.run: own})

    @property
    def steps(self) -> int:
        """How many steps those are."""
        # Under its own name nothing is loaded that has steps: see `restore`.
        loaded = sum(run.steps for run in self.loaded.values())
        return int(self.counter.steps.numpy()) + loaded

    @property
    def releases(self) -> int:
        """How much this run has released beside its steps."""
        return self._past.releases

    def histories(self) -> list[History]:
        """Return the histories of all that its model, or what it trains, comes from."""
        return [self.history, *map(history_of, self.weights() or [])]

    def all_runs(self) -> dict[str, Run]:
        """Return all runs in the ledger, as they are now, by name."""
        return runs_of(self.histories())

    def recorders(self) -> list["LedgerRecorder"]:
        """Return the recorders of all of them that are still there."""
        found = counters_of(self.histories())
        return [each for each in found if isinstance(each, LedgerRecorder)]

    @property
    def ledger(self) -> Ledger:
        """What was run up to now: here, and wherever the values came from."""
        return ledger_of(self.all_runs())

    @property
    def all_steps(self) -> int:
        """How many steps the ledger has, those inside of passes included."""
        return sum(run.steps for run in self.all_runs().values())

    @property
    def all_sampled_epochs(self) -> int:
        """The last epoch of seeded draws that this run or one before it has used."""
        return max(each.sampled_epochs for each in self.recorders())

    @property
    def last_clip(self) -> float | None:
        """The clip norm of the last step, here or where values came from, or None."""
        own = float(self.counter.last_clip.numpy())
        if not math.isnan(own):
            return own
        clips = [run.l2_norm_clip for run in self.all_runs().values()]
        return next((clip for clip in clips[::-1] if clip is not None), None)

    # Whose steps they are, and where values come from.

    @property
    def is_of_a_model(self) -> bool:
        """Whether it is that of a model, not of an optimizer alone."""
        return self._weights is not None

    def weights(self) -> list[Variable] | None:
        """Return the weights of its model, as they are now; None if that is gone."""
        return None if self._weights is None else self._weights()

    def take_over_copies(self, variables: list[Variable]) -> None:
        """Let the ledger have what made values that were copied into variables."""
        if not is_only_run(self.run) and recognise_copies(variables):
            revoke_all()

    def were_set(self, variables: list[Variable]) -> bool:
        """Tell whether variables may have other values than a single step has left."""
        return not is_only_run(self.run) and glimpse(variables) != self._left

    def note_left(self, variables: list[Variable]) -> None:
        """Note which values a single step has left."""
        if not is_only_run(self.run):
            self._left = glimpse(variables)

    def begin_steps(self, trained: list[Variable], read: list[Variable]) -> None:
        """Note what steps change, and that it depends on all that they read.

        Args:
            trained: Keras variables.
            read: Likewise; the weights of the model.
        """
        self.history.depend_on(*map(history_of, read))
        note_steps(trained, self.history, self.run)

    def end_steps(self) -> None:
        """Keep what was only read up to now, not what it will be trained to later."""
        for source in list(self.history.sources):
            if source.counter is None and self.history not in source.sources:
                runs = runs_of([source])
                runs.pop(self.run, None)
                self.loaded = union(self.loaded, runs)
                del self.history.sources[source]

    # How it goes on.

    def begin(
        self,
        scheme: Scheme,
        *,
        steps_per_release: int = 1,
        planned_releases: int | None = None,
        noise_multipliers: Array = UNPLANNED,
    ) -> None:
        """End the segment being recorded and begin another.

        If the one that ends fell short of its plan although its limit had room,
        somebody stopped it, and the ledger says so, unless released values did. Of one
        without a plan nobody knows whether these have ended it early.

        Args:
            scheme: How the batches are drawn from now on.
            steps_per_release: Steps after which a new release has begun, if
                `StepCounter.begin_release` was not called before.
            planned_releases: Releases that are to come, if that is known.
            noise_multipliers: That the steps to come count with, over the sensitivity,
                if callbacks change them. Of many different ones some stand for all, on
                the safe side, so that the ledger stays short.
        """
        ledger, steps = self.own_run().ledger, int(self.counter.steps.numpy())
        is_spent = self._steps_at_budget == steps
        missing = [] if is_spent else self.counter.missing()
        has_no_plan = self.counter.planned_releases is None
        may_be_short = bool(missing) or (has_no_plan and not is_spent)
        if may_be_short and self._steps_at_release == steps:
            ledger = dataclasses.replace(ledger, ended_by_release=True)
        elif missing:
            owed = (*ledger.cut_short, *missing, *self.to_come.values())
            ledger = dataclasses.replace(ledger, cut_short=owed)
        self._past, self._steps_at_release, self._steps_at_budget = ledger, None, None
        self.counter.begin(
            scheme, steps_per_release, planned_releases, noise_multipliers
        )
        self.beginnings += 1

    def step_between(self, scheme: Scheme) -> None:
        """Let a step come in the midst of a `fit` that the plan of this does not know.

        Args:
            scheme: Of the step. If it is another one a segment of it begins, in which the
                plan goes on: what comes after the step counts as that does.
        """
        counter, to_come = self.counter, self.counter.steps_to_come
        if counter.scheme == scheme:
            if counter.planned_releases is not None:
                counter.planned_releases += 1
            return
        # What is missing is still to come, and nothing has ended it.
        self._past = self.own_run().ledger
        self._steps_at_release = self._steps_at_budget = None
        planned = None if to_come is None else 1 + to_come
        counter.begin(scheme, 1, planned, counter.levels_for(scheme))
        self.beginnings += 1

    def count_release(self, segment: Segment) -> None:
        """Count what is about to be released beside the steps.

        Args:
            segment: It. `budgets.has_room_for` has told that budgets allow it.
        """
        self._past = self._past.add(segment).merged()

    def end_by_release(self) -> None:
        """Note that released values alone end the segment, if no step follows."""
        self._steps_at_release = int(self.counter.steps.numpy())

    def end_by_budget(self) -> None:
        """Note that budgets have no room for another step, and end the segment."""
        self._steps_at_budget = int(self.counter.steps.numpy())

    def note_other_rows(self) -> None:
        """Note that there are releases of other rows, with a ledger of their own."""
        self._past = dataclasses.replace(self._past, saw_other_rows=True)

    def plan(self, releases: int | None) -> None:
        """Note how many releases of the segment are to come in all.

        Args:
            releases: None if nobody knows. What a project has no part for is not among
                them.
        """
        part = self.budget and self.budget.reservation
        if part and releases and self.beginnings == part.beginnings:
            releases = min(releases, part.releases)
        self.counter.planned_releases = releases

    def note_seeds(self, *, noise: bool, sampling: bool) -> None:
        """Remember that somebody knows a seed, if so.

        Args:
            noise: Whether the noise was drawn with a known seed.
            sampling: Whether the batches were.
        """
        self._past = dataclasses.replace(
            self._past,
            noise_seed_fixed=self._past.noise_seed_fixed or noise,
            sampling_seed_fixed=self._past.sampling_seed_fixed or sampling,
        )

    def agree(self, states: list[str], run: str) -> None:
        """Count what all processes of a training have counted, as one training.

        After a kill their journals may differ by a step.

        Args:
            states: What `state` returned in each, in the same order everywhere.
            run: The name of the training from here on, the same everywhere and, if it
                is not the present one, new.
        """
        if run != self.run:
            self._begin_run(run, self.runs)
        for state in dict.fromkeys(states):
            self.restore(state)

    def join(self, runs: Runs, name: str) -> None:
        """Let what it has counted be a part of something else, which counts for it.

        Args:
            runs: What its values come from, that and all else.
            name: Of that among them, which no other run has.
        """
        renamed = {self.run: {name: runs[name]}}
        self._begin_run(uuid.uuid4().hex, union(self.loaded, runs))
        rename_runs(renamed)
        know(self.loaded)
        revoke_all()

    def _begin_run(self, run: str, loaded: dict[str, Run]) -> None:
        """Begin another run, with what is loaded then."""
        counter = self.counter
        self.begin(counter.scheme, steps_per_release=counter.steps_per_release)
        self.loaded, self.run = loaded, run
        self._past = Ledger()
        counter.steps.assign(0)

    # In files.

    def state(self) -> str:
        """Return all that a saved model must remember, as JSON."""
        return json.dumps({
            "runs": runs_to_dict(self.all_runs()),
            "sampled_epochs": self.all_sampled_epochs,
            "budget": self.budget and self.budget.to_dict(),
            "last_clip": self.last_clip,
        })

    def restore(self, state: str) -> None:
        """Take over what a saved model had run; nothing recorded here is lost.

        Args:
            state: What `state` returned.

        Raises:
            KeyError: If it is damaged.
            ValueError: If it is damaged.
        """
        saved = json.loads(state)
        runs = runs_from_state(saved)
        if self.run in runs:
            # That is counted here. Without steps it only keeps its place in the order.
            runs[self.run] = Run(Ledger(), 0)
        self.loaded = union(self.loaded, runs)
        know(runs)
        self.sampled_epochs = max(self.sampled_epochs, saved["sampled_epochs"])
        if saved["last_clip"] is not None:
            self.counter.last_clip.assign(saved["last_clip"])
        if self.budget is None and saved["budget"]:
            self.budget = Budget(**saved["budget"])
        revoke_all()


# All recorders of this process.
living: weakref.WeakSet[LedgerRecorder] = weakref.WeakSet()


def write_down(
    recorder: LedgerRecorder, trained: Sequence[Variable], noise_multiplier: float
) -> None:
    """Write a single step down, in the journals of all trainings of the same weights.

    Args:
        recorder: That will count the step.
        trained: What the step changes.
        noise_multiplier: That it counts with, over the sensitivity.
    """
    changed = set(map(id, trained))
    for each in list(living):
        if each.journals and not changed.isdisjoint(map(id, each.weights() or [])):
            for journal in each.journals:
                journal.write(recorder, 1, noise_multiplier)


def revoke_all() -> None:
    """Let no limit stand that did not know what was found to have run."""
    for recorder in list(living):
        if recorder.counter.limit.reason is not None or recorder.budget is not None:
            recorder.counter.revoke()


# A forked process goes on with runs of its own.
def _rename_runs() -> None:
    for recorder in living:
        recorder.run = uuid.uuid4().hex


os.register_at_fork(after_in_child=_rename_runs)
