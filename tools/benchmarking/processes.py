"""Steps in processes of their own: what starts, watches and reads them."""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarking import settings

FAILED = "failed"
_OUT_OF_MEMORY = (
    *("OOM when", "RESOURCE_EXHAUSTED", "ResourceExhaustedError"),  # TensorFlow, JAX
    *("MemoryError", "bad_alloc", "allocate memory"),  # NumPy, C++, PyTorch
)
_PEERS = Path(__file__).parents[1] / "peers"


@dataclasses.dataclass(frozen=True)
class Result:
    """What is known of one row; of a process with several rows, their times.

    Attributes:
        milliseconds: All times that a step of a row took.
        peak_mib: Peak of the memory; a GPU's, where tfdp has one.
        before_mib: What was held before the steps.
        problem: What went wrong.
        about: The versions that matter.
        first_cpu_seconds: What the first step of each row took, with all before it.
    """

    milliseconds: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    peak_mib: float | None = None
    before_mib: float = 0.0
    problem: str = ""
    about: str = ""
    first_cpu_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def median(self, row: str) -> float | None:
        """Return the median time of a row."""
        times = self.milliseconds.get(row)
        return statistics.median(times) if times else None

    @property
    def steps_mib(self) -> float | None:
        """How far the steps raised the memory of the process."""
        return None if self.peak_mib is None else self.peak_mib - self.before_mib


def start(
    framework: str,
    model: str,
    batch_size: int,
    rows: Iterable[str],
    *,
    timed: bool,
    options: Iterable[str] = (),
) -> Result:
    """Take steps in a process of its own, the rows in turns.

    Args:
        framework: What takes the steps.
        model: Name of the model.
        batch_size: Number of examples in a batch.
        rows: Rows of the table.
        timed: Whether to take the timed steps after the first two.
        options: What else the command line says; it takes precedence.

    Returns:
        What the process found out.
    """
    rows = list(rows)
    command = [*_command(framework, model, batch_size, rows, timed=timed), *options]
    seconds = settings.TIME_LIMIT.value + 2 * settings.SECONDS.value * timed
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=error, text=True)
        except OSError as error_:
            return Result(problem=f"{FAILED}: {error_}")
        try:
            problem = watch(process, seconds * len(rows))
        finally:
            process.kill()
            process.wait()
        for file in (out, error):
            file.seek(0)
        return result(process.returncode, problem, out.read(), error.read())


def _command(
    framework: str, model: str, batch_size: int, rows: list[str], *, timed: bool
) -> list[str]:
    """Return the command line of a process that takes steps."""
    other = settings.PYTHONS.get(framework)
    python = sys.executable if other is None else other.value
    command = [python, str(_PEERS / f"{framework}_steps.py")]
    command += [f"--model={model}", f"--batch_size={batch_size}", "--rows", *rows]
    # With Poisson batches, XLA compiles for each of their sizes.
    command += ["--warm=17"] if timed and settings.POISSON.value else ["--warm=2"]
    command += [f"--steps={settings.STEPS.value if timed else 0}"]
    command += [f"--seconds={settings.SECONDS.value}"]
    command += ["--poisson"] if settings.POISSON.value else []
    command += ["--jit_compile"] if settings.JIT_COMPILE.value else []
    return command + (
        [f"--texts={settings.TEXTS.value}"] if settings.TEXTS.value else []
    )


def watch(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait for the end of a process, and return what it took too much of."""
    end = time.monotonic() + seconds
    statm = Path(f"/proc/{process.pid}/statm")
    while time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            return ""
        with contextlib.suppress(OSError):
            pages = int(statm.read_text().split()[1])
            if pages * os.sysconf("SC_PAGE_SIZE") > settings.MEMORY_LIMIT.value * 2**30:
                return "out of memory"
    return "too slow"


def result(status: int, problem: str, out: str, error: str) -> Result:
    """Read what a process found out, or why it did not."""
    if problem:
        return Result(problem=problem)
    if status:
        # The system ends processes without a word.
        if status == -9 or any(words in error for words in _OUT_OF_MEMORY):
            return Result(problem="out of memory")
        lines = error.strip().splitlines() or [f"exit status {status}"]
        return Result(problem=f"{FAILED}: {lines[-1][:200]}")
    found = json.loads(out.splitlines()[-1])
    skipped = "; ".join(found.pop("skipped").values())
    return Result(problem=f"skipped: {skipped}") if skipped else Result(**found)


def measure(
    framework: str, model: str, batch_size: int, rows: Sequence[str]
) -> dict[str, Result]:
    """Measure the memory of each row, then time those that came to an end."""
    if settings.ALONE.value is not None:
        return {row: alone(framework, model, batch_size, row) for row in rows}
    results = {
        row: start(framework, model, batch_size, [row], timed=False) for row in rows
    }
    able = [row for row, result_ in results.items() if not result_.problem]
    if able:
        timed = start(framework, model, batch_size, able, timed=True)
        for row in able:
            results[row] = dataclasses.replace(
                results[row], milliseconds=timed.milliseconds, problem=timed.problem
            )
    return results


def alone(framework: str, model: str, batch_size: int, row: str) -> Result:
    """Measure time and memory of a row in one process, unless a file has them."""
    path = Path(settings.ALONE.value)
    options = [
        settings.TEXTS.value,
        settings.STEPS.value,
        settings.POISSON.value,
        settings.JIT_COMPILE.value,
    ]
    what = [framework, model, batch_size, row, *options]
    # A line without an end is that of a run that was killed.
    text = path.read_text() if path.exists() else ""
    for line_ in text[: text.rfind("\n") + 1].splitlines():
        found = json.loads(line_)
        if found["what"] == what:
            return Result(**found["result"])
    result_ = start(framework, model, batch_size, [row], timed=True)
    if result_.problem.startswith(FAILED):
        return result_
    path.parent.mkdir(parents=True, exist_ok=True)
    new = json.dumps({"what": what, "result": dataclasses.asdict(result_)}) + "\n"
    # Killed here, a run leaves the old file or the new one.
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text[: text.rfind("\n") + 1] + new)
    unfinished.replace(path)
    return result_
