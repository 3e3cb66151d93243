"""What a search counts as when its process is killed."""

import os
import signal

import pytest

from tests.accounting.test_projects import end_of, in_child
from tfdp.accounting import BestOf, Ledger, PoissonSteps, Project
from tfdp.errors import PrivacyBudgetError
from tfdp.runs.recorder import LedgerRecorder
from tfdp.tuning import Geometric
from tfdp.tuning.progress import SearchProgress, check_rows

STEPS = PoissonSteps(6, 1.0, 60, 20)
LONGER = PoissonSteps(9, 1.0, 60, 20)
SCHEME = BestOf(Geometric(3), [[STEPS]])
WHOLE = Ledger((SCHEME.segment(),))
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.mark.slow
def test_every_moment_in_a_project(tmp_path):
    project = Project(tmp_path / "data.json")
    progress = SearchProgress(SCHEME, {}, project)
    assert project.ledger == WHOLE
    progress.begin_try((STEPS,))
    progress.begin_try((STEPS,))
    assert project.ledger == WHOLE
    progress.end(None)
    assert project.ledger == WHOLE
    assert '"if_killed": null' in project.path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("tries", [0, 1, 5])
def test_a_kill_counts_all_tries_that_had_begun(tmp_path, tries):
    project = Project(tmp_path / "data.json")

    def search():
        progress = SearchProgress(SCHEME, {}, project)
        for _ in range(tries):
            progress.begin_try((STEPS,))
        os.kill(os.getpid(), signal.SIGKILL)

    assert end_of(in_child(search)) == -signal.SIGKILL
    assert project.ledger == Ledger((STEPS.with_count(6 * tries),) if tries else ())
    assert len(project.unsettled) == 1


@pytest.mark.slow
def test_the_budget_of_a_project_binds_searches(tmp_path):
    target = Ledger((STEPS,)).epsilon(1e-3)
    project = Project(tmp_path / "data.json", delta=1e-3, target_epsilon=target)
    with pytest.raises(PrivacyBudgetError, match="no room for search"):
        SearchProgress(SCHEME, {}, project)
    assert project.ledger == Ledger()


@pytest.mark.slow
def test_no_try_plans_more_than_was_said():
    progress = SearchProgress(SCHEME, {}, None)
    progress.begin_try((STEPS.with_count(5),))
    with pytest.raises(ValueError, match="must run what its `fit` had planned"):
        progress.begin_try((LONGER,))
    (run,) = progress.cut_short().values()
    assert run.ledger == Ledger((STEPS.with_count(5),))


@pytest.mark.slow
def test_a_try_that_ran_more_counts_with_all_of_it():
    recorder = LedgerRecorder()
    progress = SearchProgress(SCHEME, {}, None)
    progress.begin_try((STEPS,))
    progress.begin_try((STEPS,))
    recorder._past = Ledger((LONGER,))
    with pytest.raises(ValueError, match="must run what its `fit` had planned"):
        progress.check_try(recorder)
    (run,) = progress.cut_short().values()
    assert run.ledger == Ledger((STEPS.with_count(15),))


def test_other_private_rows_are_refused():
    check_rows(saw_others=False)
    progress, recorder = SearchProgress(SCHEME, {}, None), LedgerRecorder()
    progress.begin_try((STEPS,))
    recorder.note_other_rows()
    with pytest.raises(ValueError, match="rows with a ledger of their own"):
        progress.check_try(recorder)
