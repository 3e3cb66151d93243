r"""Puts known bugs in, one at a time, and tells which test notices each.

    python tools/mutants.py
    python tools/mutants.py --mutants='noise_*' --mutants=one_factor_for_all
    python tools/mutants.py --slow --jobs=1

A mutant is a patch in `tests/mutants`. Its first line says what is wrong with it; a line
that begins with `Tests:` names the tests that ought to notice. Each mutant is put into a
copy of the checkout. The tests that it names run first, then all quick ones, up to the
first failure; with `--slow` also the slow ones. A mutant that no test notices survives,
and the exit status is 1. So is it if one of the tests that noticed a mutant fails
without any: what it says is then worth nothing.
"""

import concurrent.futures
import dataclasses
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

_ROOT = Path(__file__).resolve().parents[1]

_MUTANTS = flags.DEFINE_multi_string(
    "mutants", ["*"], "Patterns of the names of mutants in tests/mutants."
)
_JOBS = flags.DEFINE_integer(
    "jobs", os.cpu_count() or 1, "Mutants tested at the same time.", lower_bound=1
)
_SLOW = flags.DEFINE_boolean(
    "slow", default=False, help="Also run slow tests where no quick one fails."
)
_ALL = flags.DEFINE_boolean(
    "all", default=True, help="Run all tests where those that a mutant names pass."
)

_QUICK = "not slow"
# What a copy does without: environments, caches, results.
_LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build"),
    # It sees that a patch is in, not what is wrong with it.
    *("dist", "test_mutants.py"),
)
# A mutant that never ends has been noticed.
_LONGEST_SECONDS = 3600
_NEVER_ENDS = f"not through after {_LONGEST_SECONDS} s"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug that tests ought to notice.

    Attributes:
        path: Of its patch.
        title: What is wrong with it.
        tests: Paths of the tests that ought to notice, from the root.
    """

    path: Path
    title: str
    tests: list[str]

    @classmethod
    def read(cls, path: Path) -> "Mutant":
        """Read what a patch says about itself, above its first file."""
        head = path.read_text(encoding="utf-8").split("\n--- ")[0]
        (named,) = re.findall("^Tests: (.+)$", head, re.MULTILINE)
        return cls(path, head.partition("\n")[0], named.split())


@dataclasses.dataclass(frozen=True)
class Result:
    """How a mutant ended.

    Attributes:
        killer: The first test that failed; None if none did.
        stage: Which tests it was among: those that the mutant names, or all.
        seconds: Until then, the start of Python included.
    """

    killer: str | None
    stage: str
    seconds: float


def main(argv: Sequence[str]) -> None:
    """Test the mutants, and print a table."""
    if len(argv) > 1:
        sys.exit(f"mutants: everything is a flag. Received: {' '.join(argv[1:])}.")
    chosen = [
        Mutant.read(path)
        for path in sorted((_ROOT / "tests" / "mutants").glob("*.patch"))
        if any(fnmatch.fnmatch(path.stem, pattern) for pattern in _MUTANTS.value)
    ]
    if not chosen:
        sys.exit(
            "mutants: there is no such mutant. Received: mutants="
            f"{_MUTANTS.value}. Use --mutants='*'."
        )
    print("| mutant | noticed by | among | seconds |\n|---|---|---|---|", flush=True)
    killers, survivors = set(), []
    with concurrent.futures.ThreadPoolExecutor(_JOBS.value) as pool:
        futures = {pool.submit(fate, mutant): mutant for mutant in chosen}
        for future in concurrent.futures.as_completed(futures):
            name = futures[future].path.stem
            try:
                result = future.result()
            except (RuntimeError, subprocess.SubprocessError) as error:
                print(f"| {name} | **no answer** | {error!r:.200} | |", flush=True)
                survivors.append(name)
                continue
            noticed = "**nobody**" if result.killer is None else f"`{result.killer}`"
            print(
                f"| {name} | {noticed} | {result.stage} | {result.seconds:.0f} |",
                flush=True,
            )
            if result.killer is None:
                survivors.append(name)
            elif result.killer != _NEVER_ENDS:
                killers.add(result.killer)
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} mutants were noticed.")
    if survivors:
        sys.exit(f"mutants: nobody noticed {', '.join(sorted(survivors))}.")
    with copy() as folder:
        failed = first_failure(
            Path(folder), sorted(killers), _QUICK if not _SLOW.value else ""
        )
    if failed is not None:
        sys.exit(f"mutants: a test fails without any mutant. Received: {failed}.")


def fate(mutant: Mutant) -> Result:
    """Run tests on a mutant until one fails."""
    start = time.perf_counter()
    stages = [("named", mutant.tests, _QUICK)]
    if _ALL.value:
        stages.append(("quick", [], _QUICK))
    if _SLOW.value:
        stages += [("named, slow", mutant.tests, "slow"), ("slow", [], "slow")]
    with copy() as folder:
        subprocess.run(
            ["git", "apply", mutant.path], cwd=folder, check=True, capture_output=True
        )
        for stage, tests, marks in stages:
            killer = first_failure(Path(folder), tests, marks)
            if killer is not None:
                return Result(killer, stage, time.perf_counter() - start)
    return Result(None, stages[-1][0], time.perf_counter() - start)


def copy() -> tempfile.TemporaryDirectory:
    """Make a copy of the checkout."""
    folder = tempfile.TemporaryDirectory(prefix="tfdp-mutant-")
    shutil.copytree(_ROOT, folder.name, ignore=_LEFT_OUT, dirs_exist_ok=True)
    return folder


def first_failure(folder: Path, tests: list[str], marks: str) -> str | None:
    """Run tests in a folder up to the first one that fails; return its name."""
    command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-rfE"]
    try:
        run = subprocess.run(
            [sys.executable, *command, "-m", marks, *tests],
            cwd=folder,
            # Processes that tests start import this copy, too.
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _NEVER_ENDS
    # 5: there was nothing to run.
    if run.returncode in {0, 5}:
        return None
    # A file that cannot even be loaded has noticed nothing.
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", run.stdout, re.M)
    if not failed:
        raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout}")
    return str(failed[0])


if __name__ == "__main__":
    app.run(main)
