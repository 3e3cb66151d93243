"""The command that prints what a project has spent."""

import os
import signal
import subprocess
import sys
import types

import pytest

from tests.accounting.test_projects import end_of, in_child
from tfdp.accounting import Ledger, PoissonSteps, Project
from tfdp.accounting.project import main
from tfdp.accounting.runs import Run

STEPS = PoissonSteps(14_063, 1.1, 60_000, 256)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "patients.json"
    runs = {"abc": Run(Ledger((STEPS,)), 14_063)}
    recorder = types.SimpleNamespace(all_runs=lambda: runs)
    Project(path).add(types.SimpleNamespace(recorder=recorder), "net")
    return path


@pytest.mark.slow
def test_it_prints_the_statement(path, capsys):
    assert main([str(path), "--delta=1e-5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("This training is (2.382, 1e-05)-differentially private.")
    assert "- abc net: has ended" in text


@pytest.mark.slow
def test_without_a_delta_there_must_be_a_budget(path, capsys):
    assert main([str(path)]) == 1
    assert "Use `delta=1e-5`" in capsys.readouterr().err
    Project(path, delta=1e-5, target_epsilon=3.0)
    assert main([str(path)]) == 0
    assert "Budget: epsilon 3 at delta = 1e-05." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_it_settles(path, capsys):
    def reserve():
        Project(path).reserve("gone", {}, Ledger((STEPS,)))
        os.kill(os.getpid(), signal.SIGKILL)

    end_of(in_child(reserve))
    assert main([str(path), "--delta=1e-5", "--settle=gone"]) == 0
    assert "- gone : has ended" in capsys.readouterr().out
    assert main([str(path), "--delta=1e-5", "--settle=gone"]) == 1
    assert "Only a training that was killed" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_not_made(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.json"), "--delta=1e-5"])
    assert "there is no file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_is_a_command(path):
    command = [
        sys.executable,
        "-W",
        "error::RuntimeWarning",
        "-m",
        "tfdp.accounting.project",
    ]
    done = subprocess.run(
        [*command, str(path), "--delta=1e-5"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "(2.382, 1e-05)" in done.stdout
