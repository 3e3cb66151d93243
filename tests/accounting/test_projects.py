"""Projects: who writes at once, who is killed, and what counts then."""

import contextlib
import json
import os
import signal
import types

import pytest

import tfdp
from tfdp import _files
from tfdp.accounting import (
    BestOf,
    Ledger,
    PoissonSteps,
    Project,
    UnamplifiedSteps,
)
from tfdp.accounting import projects as projects_module
from tfdp.accounting.projects import project_of, project_with_budget
from tfdp.accounting.runs import Run
from tfdp.accounting.tries import Geometric
from tfdp.errors import PrivacyBudgetError

STEPS = PoissonSteps(100, 1.0, 10_000, 100)
RUN = Run(Ledger((STEPS,)), 100)
DELTA = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def model(**runs):
    """Stands in for a private model that comes from these runs."""
    return types.SimpleNamespace(recorder=types.SimpleNamespace(all_runs=lambda: runs))


def ran(count):
    return Run(Ledger((STEPS.with_count(count),)), count)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "data.json", delta=DELTA, target_epsilon=2.0)


def in_child(function):
    """Run a function in a process of its own, which ends at once then."""
    child = os.fork()
    if child == 0:
        # Locks of the parent are no business of the child.
        projects_module._alive.clear()
        status = 1
        with contextlib.suppress(Exception):
            function()
            status = 0
        os._exit(status)
    return child


def end_of(child):
    """Wait for a child and return its status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_new_project_is_empty(project):
    assert project.ledger == Ledger()
    assert project.epsilon() == 0
    assert (project.delta, project.target_epsilon) == (DELTA, 2.0)
    assert project.unsettled == []
    assert json.loads(project.path.read_text())["budget"] == [DELTA, 2.0]


def test_a_budget_is_settled_once(project):
    again = Project(project.path)
    assert again.target_epsilon == 2.0
    assert Project(project.path, delta=DELTA, target_epsilon=2.0).target_epsilon == 2.0
    with pytest.raises(ValueError, match="is settled once"):
        Project(project.path, delta=DELTA, target_epsilon=3.0)
    assert Project(project.path).target_epsilon == 2.0


def test_a_project_may_get_a_budget_later(tmp_path):
    project = Project(str(tmp_path / "data.json"))
    assert project.target_epsilon is None
    with pytest.raises(ValueError, match="no budget whose delta"):
        project.epsilon()
    assert project.epsilon(DELTA) == 0
    Project(project.path, delta=DELTA, target_epsilon=3.0)
    assert project.target_epsilon == 3.0


@pytest.mark.parametrize(
    "budget",
    [
        {"delta": 1e-5},
        {"target_epsilon": 1.0},
        {"delta": 0, "target_epsilon": 1.0},
        {"delta": 1e-5, "target_epsilon": float("nan")},
    ],
)
def test_budgets_are_checked(tmp_path, budget):
    with pytest.raises(ValueError, match="Received"):
        Project(tmp_path / "data.json", **budget)
    assert not (tmp_path / "data.json").exists()


def test_folders_must_exist(tmp_path):
    with pytest.raises(ValueError, match="in a folder that exists"):
        Project(tmp_path / "no" / "data.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"version": 2}',
        '{"version": 1, "budget": null, "runs": {"a": {}}}',
    ],
)
def test_damaged_files_are_refused(tmp_path, text):
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="a file that `Project` wrote"):
        Project(path)
    assert path.read_text() == text


@pytest.mark.slow
def test_what_models_come_from_counts_once(project):
    project.add(model(base=ran(100), one=ran(50)), "first")
    project.add(model(base=ran(100), two=ran(30)), "second")
    assert project.ledger.segments == (STEPS.with_count(180),)
    # One has gone on; an older copy of it says nothing new.
    project.add(model(base=ran(100), one=ran(80)))
    project.add(model(base=ran(100), one=ran(50)))
    assert project.ledger.segments == (STEPS.with_count(210),)
    assert project.epsilon() == pytest.approx(project.ledger.epsilon(DELTA), abs=1e-9)


def test_runs_that_were_cut_short_count_as_planned(project):
    project.add(model(one=Run(Ledger((STEPS,), cut_short=(STEPS,)), 100)))
    assert project.ledger.segments == (STEPS.with_count(200),)


def test_only_private_models_are_added(project):
    with pytest.raises(TypeError, match="must be a `tfdp"):
        project.add(Ledger())


@pytest.mark.slow
def test_a_reservation_counts_and_what_is_not_used_is_given_back(project):
    project.reserve("one", {}, RUN.ledger, "net")
    assert project.ledger == RUN.ledger
    assert project.unsettled == []
    assert "net: runs now" in project.privacy_statement()
    project.finish("one", {"one": ran(20)})
    assert project.ledger.segments == (STEPS.with_count(20),)
    assert "net: has ended" in project.privacy_statement()
    # It goes on, and reserves what is to come.
    project.reserve("one", {"one": ran(20)}, RUN.ledger)
    assert project.ledger.segments == (STEPS.with_count(120),)
    project.finish("one", {"one": ran(120)})
    assert [path.name for path in sorted(project.path.parent.iterdir())] == [
        "data.json",
        "data.json.lock",
    ]


def test_no_run_is_left_of_a_training_that_took_no_step(project):
    project.reserve("one", {}, RUN.ledger)
    project.finish("one", {})
    assert project.ledger == Ledger()


@pytest.mark.slow
def test_without_room_nothing_is_reserved(project):
    project.add(model(one=ran(1000)))
    before = project.path.read_text()
    with pytest.raises(PrivacyBudgetError, match="has no room for two"):
        project.reserve("b", {}, Ledger((STEPS.with_count(10_000),)), "two")
    assert project.path.read_text() == before


@pytest.mark.slow
def test_steps_are_reserved_as_far_as_there_is_room(project):
    first = project.reserve_steps("a", {}, (STEPS.with_count(1_000),))
    assert first == 1_000
    # The other one has not run any of its steps, and they are gone all the same.
    second = project.reserve_steps("b", {}, (STEPS.with_count(100_000),))
    assert 0 < second < 100_000
    assert project.epsilon() <= 2.0
    assert project.ledger.add(STEPS.with_count(1)).epsilon(DELTA) > 2.0
    assert project.reserve_steps("c", {}, (STEPS,)) == 0
    for name in "abc":
        project.finish(name, {})


@pytest.mark.slow
def test_what_is_released_beside_the_steps_has_its_room(project):
    beside = (UnamplifiedSteps(1, 5.0),)
    plan = (STEPS.with_count(100_000),)
    alone = project.reserve_steps("a", {}, plan)
    project.finish("a", {})
    assert 0 < project.reserve_steps("a", {}, plan, beside=beside) < alone
    assert project.ledger.segments[-1] == beside[0]
    assert project.epsilon() <= 2.0
    project.finish("a", {})
    assert project.reserve_steps("a", {}, plan, beside=(UnamplifiedSteps(1, 1.0),)) == 0
    assert project.ledger == Ledger()
    project.finish("a", {})


def test_what_is_known_of_one_that_runs_does_not_replace_its_reservation(project):
    project.reserve("a", {}, RUN.ledger)
    project.add(model(a=ran(10), b=ran(5)))
    assert project.ledger.segments == (STEPS.with_count(105),)
    project.reserve("c", {"a": ran(10)}, Ledger((STEPS.with_count(1),)))
    assert project.ledger.segments == (STEPS.with_count(106),)
    for name in "ac":
        project.finish(name, {})


def test_a_training_reserves_in_one_process_only(project):
    project.reserve("a", {}, RUN.ledger)
    child = in_child(lambda: project.reserve("a", {}, RUN.ledger))
    assert end_of(child) == 1
    assert project.ledger == RUN.ledger
    project.finish("a", {})


def killed_after(project, *calls):
    def reserve():
        for call in calls:
            call()
        os.kill(os.getpid(), signal.SIGKILL)

    assert end_of(in_child(reserve)) == -signal.SIGKILL


def test_what_a_killed_process_had_reserved_stays_until_it_is_settled(project):
    killed_after(
        project, lambda: project.reserve("a", {"a": ran(7)}, RUN.ledger, "net")
    )
    assert project.ledger.segments == (STEPS.with_count(107),)
    assert project.unsettled == ["a"]
    assert "net: was killed" in project.privacy_statement()
    # Nobody has to wait for it.
    project.reserve("b", {}, Ledger((STEPS.with_count(1),)))
    project.finish("b", {})
    project.settle("a")
    assert project.ledger.segments == (STEPS.with_count(107),)
    assert project.unsettled == []
    # For good: a file that knows of some of its steps says nothing of the others.
    project.add(model(a=ran(50)))
    assert Project(project.path).ledger.segments == (STEPS.with_count(107),)
    with pytest.raises(ValueError, match="Only a training that was killed"):
        project.settle("a")


def test_a_model_of_its_backup_settles_it(project):
    killed_after(project, lambda: project.reserve("a", {}, RUN.ledger))
    with pytest.raises(ValueError, match="must come from the training"):
        project.settle("a", model(b=ran(3)))
    # Saved in between: it has taken more steps since.
    with pytest.raises(ValueError, match="must know of all steps"):
        project.settle("a", model(a=ran(40)))
    project.settle("a", model(**{"a": ran(40), "a after 40": ran(3)}))
    assert project.ledger.segments == (STEPS.with_count(43),)


def test_whoever_goes_on_with_a_journal_settles_it(project):
    killed_after(project, lambda: project.reserve("a", {}, RUN.ledger))
    known = {"a": ran(40), "a after 40": ran(3)}
    project.reserve("b", known, Ledger((STEPS.with_count(60),)))
    assert project.ledger.segments == (STEPS.with_count(103),)
    project.finish("b", known | {"b": ran(60)})
    assert project.unsettled == []


def test_a_journal_from_before_the_reservation_settles_nothing(project):
    killed_after(project, lambda: project.reserve("a", {"a": ran(40)}, RUN.ledger))
    known = {"a": ran(37), "a after 37": ran(3)}
    project.reserve("b", known, Ledger((STEPS.with_count(60),)))
    # What it has reserved, the journal's three once more, and what is to come.
    assert project.ledger.segments == (STEPS.with_count(140 + 3 + 60),)
    project.finish("b", known)
    assert project.unsettled == ["a"]


def test_a_link_is_the_project_of_its_file(project, tmp_path, monkeypatch):
    link = tmp_path / "link.json"
    link.symlink_to(project.path)
    monkeypatch.chdir(tmp_path)
    for other in (Project(link), Project("data.json")):
        assert other.path == project.path
    killed_after(Project(link), lambda: Project(link).reserve("a", {}, RUN.ledger))
    assert link.is_symlink()
    assert project.ledger == RUN.ledger


def test_one_that_runs_cannot_be_settled(project):
    project.reserve("a", {}, RUN.ledger)
    with pytest.raises(ValueError, match="Only a training that was killed"):
        project.settle("a")
    project.finish("a", {})


def test_a_search_that_is_killed_counts_as_the_tries_that_had_begun(tmp_path):
    project = Project(tmp_path / "data.json")
    search = Ledger((BestOf(Geometric(3), [[STEPS]]).segment(),))
    project.reserve("s", {}, search, "search")
    project.note("s", Ledger((STEPS.with_count(200),)))
    # Nobody learns how many have begun while it runs.
    assert project.ledger == search
    assert "200" not in project.privacy_statement(DELTA)
    project.finish("s", {"s": Run(search, 100)})
    assert project.ledger == search
    assert '"if_killed": null' in project.path.read_text()
    killed_after(
        project,
        lambda: project.reserve("t", {}, search, "search"),
        lambda: project.note("t", Ledger((STEPS.with_count(200),))),
    )
    assert project.ledger == search.add(STEPS.with_count(200))


@pytest.mark.slow
def test_many_processes_write_at_once(project):
    def write(number):
        for round_ in range(5):
            name = f"{number}-{round_}"
            project.reserve(name, {}, Ledger((UnamplifiedSteps(1, 1000.0),)))
            project.finish(name, {name: Run(Ledger((UnamplifiedSteps(1, 1000.0),)), 1)})

    children = [in_child(lambda n=n: write(n)) for n in range(6)]
    for _ in range(20):
        Project(project.path)  # The file is whole at all times.
    assert [end_of(child) for child in children] == [0] * 6
    assert project.ledger.segments == (UnamplifiedSteps(30, 1000.0),)


@pytest.mark.slow
def test_together_they_never_overspend(project):
    def write(number):
        planned = (STEPS.with_count(4000),)
        count = project.reserve_steps(str(number), {}, planned)
        project.finish(str(number), {str(number): ran(count)} if count else {})

    children = [in_child(lambda n=n: write(n)) for n in range(3)]
    assert [end_of(child) for child in children] == [0] * 3
    assert 1.9 < project.epsilon() <= 2.0


@pytest.mark.parametrize("when", ["write", "replace"])
def test_a_process_killed_while_it_writes_leaves_the_old_file_and_no_lock(
    project, monkeypatch, when
):
    project.add(model(one=RUN))
    before = project.path.read_text()

    @contextlib.contextmanager
    def killed(path, **options):
        with _files.replaced(path, **options) as file:
            if when == "replace":
                yield file
            else:
                file.write('{"vers')
                file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def write():
        monkeypatch.setattr(projects_module, "replaced", killed)
        project.add(model(two=RUN))

    assert end_of(in_child(write)) == -signal.SIGKILL
    assert project.path.read_text() == before
    project.add(model(three=RUN))
    assert project.ledger.segments == (STEPS.with_count(200),)


def test_projects_with_budgets(project, tmp_path):
    assert project_with_budget(project) is project
    assert project_with_budget(str(project.path)).target_epsilon == 2.0
    with pytest.raises(ValueError, match="must have a budget"):
        project_with_budget(Project(tmp_path / "free.json"))
    with pytest.raises(TypeError, match="`project`"):
        project_with_budget(3)


def test_a_path_that_was_mistyped_begins_no_project(tmp_path):
    Project(tmp_path / "free.json")
    assert project_of(tmp_path / "free.json").target_epsilon is None
    for of in (project_of, project_with_budget):
        with pytest.raises(ValueError, match="must be a file that exists") as error:
            of(tmp_path / f"{of.__name__}.json")
        assert not (tmp_path / f"{of.__name__}.json").exists()
        # What it says to do is enough.
        advice = str(error.value).split("`")[-2]
        eval(advice, {"tfdp": tfdp})
        of(tmp_path / f"{of.__name__}.json")
