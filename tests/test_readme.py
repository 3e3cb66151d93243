"""The README's code runs, and its commands are the ones that `.ci/run` takes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    """Return (line number, text) of the fenced blocks of a language."""
    return [
        (README.count("\n", 0, match.start(1)) + 1, match[1])
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)
    ]


def commands():
    """Return the lines of the shell blocks."""
    return [line for _, block in blocks("sh") for line in block.splitlines()]


@pytest.mark.slow
def test_python_blocks_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for line, block in blocks("python"):
        # Errors point to the lines of README.md.
        code = compile("\n" * (line - 1) + block, ROOT / "README.md", "exec")
        exec(code, namespace)
    assert (tmp_path / "models" / "digits" / "1" / "saved_model.pb").is_file()


def test_there_is_one_command_for_the_main_job_and_one_for_the_tests():
    single = [line for line in commands() if "venv" in line and "&&" in line]
    main_job, tests = (line for line in single if line.startswith("python3 -m venv"))
    assert main_job.endswith(".venv/bin/python examples/train_digits.py")
    assert tests.endswith(".venv/bin/python -m pytest -n 2 -m 'not slow'")


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = {line.strip() for line in script.splitlines()}
    [tests] = [line for line in commands() if line.endswith("-m 'not slow'")]
    assert tests in lines
    others = [
        line
        for line in commands()
        if "ruff" in line or "[lint]" in line or line.endswith("-m slow")
    ]
    assert len(others) == 3
    for command in others:
        assert any(line.startswith(command) for line in lines), command


@pytest.mark.parametrize("line", commands())
def test_files_in_commands_exist(line):
    for path in re.findall(r"(?:examples|tools|tests)/[\w./]+", line):
        assert (ROOT / path).exists()


def test_files_in_the_text_exist():
    for path in re.findall(r"`((?:examples|tools|tests)/[\w./]+|LICENSE)`", README):
        assert (ROOT / path).exists()
