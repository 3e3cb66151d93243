"""Processes that are forks of one that has imported some modules and run nothing.

They are as good as fresh ones, seconds earlier. Only who asks for what is imported, or
for how Python is started, needs a process that is no fork.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "tests.forks",
    "matplotlib.figure",
    "sklearn.datasets",
    "sklearn.model_selection",
    "tfdp",
])
STREAMS = ("stdout", "stderr")


def _become(
    program: Path | str,
    arguments: list[str],
    output: Path,
    environment: Mapping[str, str | None],
    cwd: Path | None,
) -> None:
    for number, name in enumerate(STREAMS, start=1):
        with (output / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if cwd is not None:
        os.chdir(cwd)
    sys.argv = [str(program) if isinstance(program, Path) else "-c", *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})


def start(
    program: Path | str,
    *arguments: object,
    output: Path,
    environment: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
) -> BaseProcess:
    """Start a script, or a program as ``python -c`` takes it.

    Args:
        program: Path of the script, or the program's text.
        *arguments: Of the command line.
        output: Folder for what it prints, in files `STREAMS`.
        environment: Variables that it sees changed; None takes one away.
        cwd: Folder in which it runs.

    Returns:
        The process, whose `exitcode` is negative after a signal.
    """
    process = FORKS.Process(
        target=_become,
        args=(program, list(map(str, arguments)), output, environment or {}, cwd),
    )
    process.start()
    return process


def run(
    program: Path | str, *arguments: object, **options: object
) -> subprocess.CompletedProcess:
    """Run it to its end; see `start`."""
    with tempfile.TemporaryDirectory() as folder:
        process = start(program, *arguments, output=Path(folder), **options)
        process.join()
        texts = {name: (Path(folder) / name).read_text("utf-8") for name in STREAMS}
    return subprocess.CompletedProcess(program, process.exitcode, **texts)
