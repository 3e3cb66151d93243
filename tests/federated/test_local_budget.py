"""The ledger on a client's disk: what it counts, and what nobody can do to it."""

import contextlib
import json
import math
import os
import subprocess
import sys
import threading

import pytest

import tfdp
from tfdp.errors import PrivacyBudgetError
from tfdp.federated.local_budget import LocalBudget

DELTA = 1e-7


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget.json"


def budget_at(path, epsilon=8.0, **options):
    return LocalBudget(path, epsilon=epsilon, delta=DELTA, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "participations"), [(0.1, 1), (1.0, 3), (8.0, 7), (100.0, 3), (1e12, 1)]
)
def test_a_budget_pays_for_what_was_planned_and_no_more(epsilon, participations, path):
    budget = budget_at(path, epsilon, max_participations=participations)
    assert budget.noise_multiplier == tfdp.federated.calibrate_local_noise_multiplier(
        epsilon, delta=DELTA, max_participations=participations
    )
    assert (budget.participations, budget.spent_epsilon) == (0, 0.0)
    for _ in range(participations):
        budget.spend()
    # Privacy loss distributions of larger ones take seconds.
    if epsilon <= 8:
        assert budget.spent_epsilon == pytest.approx(epsilon, rel=1e-3)
    # A restart of the client forgets nothing.
    for again in (budget, budget_at(path, epsilon, max_participations=participations)):
        with pytest.raises(
            PrivacyBudgetError, match=f"{participations} participations"
        ):
            again.spend()
        assert again.participations == participations


@pytest.mark.slow
def test_spent_epsilon_is_what_the_replies_cost_together(path):
    for most in (4, 2):
        budget_at(path, max_participations=most).spend()
    noise = [budget_at(path, max_participations=m).noise_multiplier for m in (4, 2)]
    segments = [tfdp.accounting.UnamplifiedSteps(1, z / 2) for z in noise]
    spent = budget_at(path).spent_epsilon
    assert spent == pytest.approx(tfdp.accounting.epsilon(segments, DELTA), rel=1e-3)
    assert spent < 8
    alone = budget_at(path, neighboring_relation="add_or_remove_one").spent_epsilon
    assert alone < spent / 1.5


@pytest.mark.parametrize(
    ("then", "now", "fits"),
    [
        ({"max_participations": 4}, {"max_participations": 2}, True),
        ({"max_participations": 4}, {"max_participations": 1}, False),
        ({"epsilon": 8.0}, {"epsilon": 4.0, "max_participations": 5}, False),
        ({"epsilon": 4.0}, {"epsilon": 8.0, "max_participations": 2}, True),
        ({"delta": 1e-3}, {"max_participations": 2}, False),
        ({"delta": 1e-9}, {"max_participations": 9}, True),
        (
            {"neighboring_relation": "add_or_remove_one"},
            {"max_participations": 9},
            False,
        ),
    ],
)
def test_replies_of_other_settings_count_with_the_noise_they_had(then, now, fits, path):
    settings = {"epsilon": 8.0, "delta": DELTA}
    LocalBudget(path, **settings | then).spend()
    budget = LocalBudget(path, **settings | now)
    with contextlib.nullcontext() if fits else pytest.raises(PrivacyBudgetError):
        budget.spend()
    assert budget.participations == 1 + fits
    if fits:
        assert budget.spent_epsilon <= (settings | now)["epsilon"] * 1.001


def test_cheap_replies_count_too(path):
    for _ in range(2):
        budget_at(path, max_participations=9).spend()
    budget = budget_at(path, max_participations=2)
    assert budget.spent_epsilon < 5
    with pytest.raises(PrivacyBudgetError):
        budget.spend()


def test_threads_share_a_ledger(path):
    barrier, outcomes = threading.Barrier(8), []
    budgets = [budget_at(path, max_participations=5) for _ in range(8)]

    def spend(budget):
        barrier.wait()
        try:
            budget.spend()
        except PrivacyBudgetError:
            outcomes.append("refused")
        else:
            outcomes.append("spent")

    threads = [threading.Thread(target=spend, args=(each,)) for each in budgets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == 3 * ["refused"] + 5 * ["spent"]
    assert budget_at(path, max_participations=5).participations == 5


@pytest.mark.slow
def test_another_process_is_waited_for(path):
    budget = budget_at(path)
    code = (
        "import fcntl, sys; lock = open(sys.argv[1], 'a'); "
        "fcntl.flock(lock, fcntl.LOCK_EX); print('locked', flush=True); input()"
    )
    command = [sys.executable, "-c", code, f"{path}.lock"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == b"locked\n"
        thread = threading.Thread(target=budget.spend)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert budget.participations == 0
        other.communicate(b"\n")
    thread.join(30)
    assert budget.participations == 1


def test_links_to_a_ledger_share_its_lock(path):
    link = path.with_name("link.json")
    link.symlink_to(path)
    budget_at(link).spend()
    assert budget_at(path).participations == 1
    assert link.is_symlink()
    assert {file.name for file in path.parent.iterdir()} == {
        *("budget.json", "budget.json.lock", "link.json")
    }


def test_a_write_that_fails_changes_nothing(path, monkeypatch):
    budget = budget_at(path, max_participations=2)
    budget.spend()

    def full(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        budget.spend()
    assert budget.participations == 1


def test_what_was_spent_is_known_without_the_file(path):
    budget, other = (budget_at(path, max_participations=3) for _ in range(2))
    budget.spend()
    before = path.read_text()
    budget.spend()
    for change in (path.unlink, lambda: path.write_text(before)):
        change()
        assert budget.participations == 2
    # The other one has not seen the second; what is written has all.
    assert other.participations == 1
    budget.spend()
    assert other.participations == 3
    path.unlink()
    for each in (budget, other):
        with pytest.raises(PrivacyBudgetError):
            each.spend()


DAMAGED = [
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"noise_multipliers": {}}',
    '{"noise_multipliers": "12"}',
    '{"noise_multipliers": [NaN]}',
    '{"noise_multipliers": [Infinity]}',
    '{"noise_multipliers": [0]}',
    '{"noise_multipliers": [-1.0]}',
    '{"noise_multipliers": [true]}',
    '{"noise_multipliers": ["1.4"]}',
    '{"noise_multipliers": [1e200]}',
    '{"noise_multipliers": [1' + 400 * "0" + "]}",
    "\0\xff",
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_ledger_is_refused(text, path):
    budget = budget_at(path)
    path.write_text(text, encoding="latin-1")
    with pytest.raises(
        ValueError, match=r"must be a ledger.*Received: path='.*damaged"
    ):
        budget_at(path)
    with pytest.raises(ValueError, match="damaged"):
        budget.spend()
    assert path.read_text(encoding="latin-1") == text


@pytest.mark.parametrize("noise", [1e-300, 5e-324, 1e-9])
def test_a_reply_almost_without_noise_has_spent_everything(noise, path):
    path.write_text(json.dumps({"noise_multipliers": [noise]}))
    budget = budget_at(path, max_participations=2)
    assert budget.spent_epsilon > 1e6
    with pytest.raises(PrivacyBudgetError):
        budget.spend()


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": math.nan},
        {"epsilon": 0.0},
        {"epsilon": math.inf},
        {"delta": math.nan},
        {"delta": 0},
        {"delta": 1},
        {"max_participations": 0},
        {"max_participations": 1.5},
        {"neighboring_relation": "other"},
    ],
)
def test_arguments_of_the_budget(options, path):
    [name] = options
    with pytest.raises(ValueError, match=f"`{name}` must .* Received: {name}="):
        LocalBudget(path, **{"epsilon": 8.0, "delta": DELTA} | options)
    assert not path.parent.joinpath("budget.json.lock").exists()


def test_the_folder_of_the_ledger_must_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        budget_at(tmp_path / "none" / "budget.json")
