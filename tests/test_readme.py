"""The README's code runs, and its commands are the ones that `.ci/run` takes."""

import re

import pytest

from tests.pages import ROOT, blocks, run_alone

README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("C*.md")), ROOT / "SECURITY.md"]


def commands(*pages):
    """Return the lines of the pages' shell blocks."""
    return [
        line
        for page in pages
        for _, block in blocks(page, "sh")
        for line in block.splitlines()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "block"), blocks(README, "python"))
def test_every_block_runs_alone(line, block, tmp_path):
    error = run_alone(README, line, block, tmp_path)
    assert error is None, error
    assert (tmp_path / "models" / "digits" / "1" / "saved_model.pb").is_file()


def test_it_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_there_is_one_command_for_the_main_job_and_one_for_the_tests():
    main_job, tests = commands(README)
    assert main_job.startswith("python3 -m venv")
    assert main_job.endswith(".venv/bin/python examples/train_digits.py")
    assert tests.startswith("python3 -m venv")
    assert tests.endswith(".venv/bin/python -m pytest -n 2 -m 'not slow'")


def test_ci_runs_the_commands():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = {line.strip() for line in script.splitlines()}
    _, tests = commands(README)
    assert tests in lines
    others = [
        line
        for line in commands(*PAGES)
        if re.search(r"ruff|sphinx|\[lint\]|\[docs\]|exhaustive'$", line)
    ]
    assert len(others) == 5
    for command in others:
        assert any(line.startswith(command) for line in lines), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_pages_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?:examples|tools|tests)/[\w./]*\w", text)
    linked = re.findall(r"\]\(([\w./]+)\)", text)
    for path in [*named, *linked]:
        assert (ROOT / path).exists(), path
