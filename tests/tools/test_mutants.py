"""The tool that puts bugs in: what it says of a small project, and the real patches."""

import ast
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "mutants.py"
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))

CODE = "def double(x):\n    return 2 * x\n"
TESTS = """
    from code_of_project import double


    def test_of_one():
        assert double(1) == 2


    def test_of_zero():
        assert double(0) == 0
    """
PATCH = """\
It is added to itself once too often.

Tests: tests/test_double.py

--- a/code_of_project.py
+++ b/code_of_project.py
@@ -1,2 +1,2 @@
 def double(x):
-    return 2 * x
+    return {} * x
"""


@pytest.fixture
def project(tmp_path, tool, monkeypatch):
    """A project of one function, in place of this one."""
    files = {
        "code_of_project.py": CODE,
        "tests/test_double.py": textwrap.dedent(TESTS),
        "tests/mutants/three.patch": PATCH.format(3),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(tool, "_ROOT", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_first_test_that_fails_has_noticed(project, run):
    printed = run("--jobs=1")
    assert "| three | `tests/test_double.py::test_of_one` | named |" in printed
    assert "1 of 1 mutants were noticed." in printed


@pytest.mark.slow
def test_what_nobody_notices_is_named(project, run):
    (project / "tests" / "mutants" / "same.patch").write_text(PATCH.format("1 * 2"))
    with pytest.raises(SystemExit, match=r"nobody noticed same\."):
        run()


@pytest.mark.slow
def test_a_test_that_fails_anyway_notices_nothing(project, run):
    failing = "def test_of_nothing():\n    raise KeyError\n"
    (project / "tests" / "test_double.py").write_text(failing)
    with pytest.raises(SystemExit, match=r"fails without any mutant.*test_of_nothing"):
        run("--noall")


def test_unknown_names_are_refused(project, run):
    with pytest.raises(SystemExit, match=r"Received: mutants=\['four'\]"):
        run("--mutants=four")


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_the_patch_fits_the_code_and_names_tests(path, tool, tmp_path):
    mutant = tool.Mutant.read(path)
    assert mutant.title.endswith(".")
    assert all((ROOT / test).exists() for test in mutant.tests)
    if shutil.which("git") is None:
        pytest.skip("there is no git, which applies patches")
    names = re.findall(r"^\+\+\+ b/(\S+)$", path.read_text(encoding="utf-8"), re.M)
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "apply", path], cwd=tmp_path, check=True)
    for name in names:
        # What is no Python is noticed by any test.
        ast.parse((tmp_path / name).read_text(encoding="utf-8"))
