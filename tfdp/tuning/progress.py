"""What a search counts as at every moment, here and in a project."""

import dataclasses
import uuid

from tfdp.accounting import BestOf, Ledger, Project, Segment
from tfdp.accounting.best_of import candidate_event
from tfdp.accounting.runs import Run, Runs, union
from tfdp.accounting.selection import is_covered
from tfdp.runs.recorder import LedgerRecorder


class SearchProgress:
    """Counts a search, from before its first try on.

    Guarantees:
        Whenever the process is killed, the file of the project says that all tries up to
        then have run, one after the other; once the search is over it says what the
        search costs, and no longer how many tries there were.

    Args:
        scheme: What the search costs.
        before: Runs that its models come from, and earlier searches.
        project: That it counts in, if any.

    Raises:
        PrivacyBudgetError: If the budget of the project has no room.
    """

    def __init__(self, scheme: BestOf, before: Runs, project: Project | None) -> None:
        """Reserve what the search costs."""
        self._name = uuid.uuid4().hex
        self._whole = Ledger((scheme.segment(),))
        self._before, self._project = dict(before), project
        self._candidates = [candidate_event(each) for each in scheme.candidates]
        self._begun = self._earlier = Ledger()
        if project is not None:
            project.reserve(self._name, self._before, self._whole, "search")
            project.note(self._name, self._begun)

    def begin_try(self, planned: tuple[Segment, ...]) -> None:
        """Write down that another try begins.

        Args:
            planned: All that it may run.

        Raises:
            ValueError: If that is more than what any candidate was said to run.
        """
        self._check(Ledger(planned))
        self._earlier = self._begun
        self._begun = self._begun.add(*planned).merged()
        if self._project is not None:
            self._project.note(self._name, self._begun)

    def check_try(self, recorder: LedgerRecorder) -> None:
        """Refuse a try that ran more than any that was planned, or knows of others.

        Args:
            recorder: Of its model.

        Raises:
            ValueError: If it did. What it has run then counts, too.
        """
        ledger = recorder.own_run().ledger.planned()
        check_rows(saw_others=ledger.saw_other_rows)
        try:
            self._check(ledger)
        except ValueError:
            # More than what was written down when it began.
            self._begun = self._earlier.add(*ledger.segments).merged()
            raise
        others = recorder.all_runs().keys() - {recorder.run}
        if not others <= self._before.keys():
            raise ValueError(
                "Tries must not know of each other. Received: a model that comes from "
                "another training. Make layers, model and optimizer inside of `build`, "
                "and train nothing there."
            )

    def end(self, winner: LedgerRecorder | None) -> dict[str, Run]:
        """Count the search in place of its tries.

        Args:
            winner: The recorder of the model that leaves.

        Returns:
            All that the model comes from.
        """
        run = Run(self._whole, 0)
        if winner is not None:
            own = winner.own_run()
            # What else the ledger says of a training holds of this one.
            ledger = dataclasses.replace(
                own.ledger, segments=self._whole.segments, cut_short=()
            )
            run = Run(ledger, own.steps, own.l2_norm_clip)
        runs = union(self._before, {self._name: run})
        if winner is not None:
            winner.join(runs, self._name)
        self._finish(runs)
        return runs

    def cut_short(self) -> dict[str, Run]:
        """Count all tries that have begun: nothing else holds where a search breaks off.

        Returns:
            That, and what was before.
        """
        steps = sum(segment.count for segment in self._begun.segments)
        run = {self._name: Run(self._begun, steps)} if steps else {}
        runs = union(self._before, run)
        self._finish(runs)
        return runs

    def _finish(self, runs: Runs) -> None:
        if self._project is not None:
            self._project.finish(self._name, runs)

    def _check(self, ledger: Ledger) -> None:
        if not is_covered(candidate_event(ledger.segments), self._candidates):
            raise ValueError(
                "A try must run what its `fit` had planned before the search, at most. "
                f"Received: {'; '.join(each.words() for each in ledger.segments)}. "
                "Train in `fit` only, with steps and noise that the settings decide."
            )


def check_rows(*, saw_others: bool) -> None:
    """Refuse tries that also look at other private rows, whose cost is elsewhere.

    Args:
        saw_others: Whether they do.

    Raises:
        ValueError: If they do.
    """
    if saw_others:
        raise ValueError(
            "What a search costs other private rows is not known. Received: tries that "
            "release metrics of rows with a ledger of their own. Release them of the "
            "training rows, or use `fit(..., "
            "public_data=(x_public, y_public))`."
        )
