"""Fenced blocks of Markdown pages, each run alone in a process of its own."""

import os
import re
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from tests.forks import FORKS

ROOT = Path(__file__).resolve().parents[1]


def blocks(page, language):
    """Return (line number, text) of a page's fenced blocks of a language."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(1)) + 1, match[1])
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    ]


def _run(page: str, line: int, block: str, folder: str, errors: Connection) -> None:
    os.chdir(folder)
    try:
        # Errors point to the lines of the page.
        code = compile("\n" * (line - 1) + block, page, "exec")
        exec(code, {"__name__": "__main__"})
    except BaseException:
        errors.send(traceback.format_exc())
        raise
    errors.send(None)


def run_alone(page, line, block, folder):
    """Run a block in a fresh process, in a folder; return its traceback or None."""
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(
        target=_run, args=(str(page), line, block, str(folder), sender)
    )
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return f"{page}, line {line}: the process died with {process.exitcode}."
    finally:
        process.join()
