r"""Time and memory of a private training step, beside an ordinary one.

    python tools/benchmark.py
    python tools/benchmark.py --models=cnn --rows=vectorized --steps=50 --jit_compile
    python tools/benchmark.py --startup
    python tools/benchmark.py --fit --models=cnn
    python tools/benchmark.py --reading
    python tools/benchmark.py --noise
    python tools/benchmark.py --growth=growth.png
    python tools/benchmark.py --synthetic
    python tools/benchmark.py --passes
    python tools/benchmark.py --bam
    python tools/benchmark.py --federated

Times are medians of whole steps, noise, optimizer and metrics included. The steps of
all rows take turns in one process, so that whatever else the machine does slows all of
them; the ratio of the medians is what counts.

Memory is the peak of what a process of its own keeps resident, for each row, over its
first steps; "steps MiB" leaves out what the process held before them: interpreter,
libraries, weights, batch. It is the host's memory, on a GPU too. Running out of it, or
of time, is a result.

Other frameworks train the same models on batches of the same size, in environments of
their own, which the scripts in `tools/peers` describe. Their rows are compared to
their own ordinary step:

    python tools/benchmark.py --opacus_python=PATH --jax_privacy_python=PATH \
        --tensorflow_privacy_python=PATH
"""

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from peers.steps import PROBLEMS, problem_of

_ORDINARY = "ordinary"
_TFDP = "tfdp"
_FAILED = "failed"
_OUT_OF_MEMORY = (
    *("OOM when", "RESOURCE_EXHAUSTED", "ResourceExhaustedError"),  # TensorFlow, JAX
    *("MemoryError", "bad_alloc", "allocate memory"),  # NumPy, C++, PyTorch
)
_ROWS = {
    _TFDP: [
        *("vectorized", "fast_gradient_clipping", "ghost", "bookkeeping"),
        *("sat", "bam_sam", "bam_exact", "vectorized_bam_sam"),
    ],
    "opacus": ["hooks", "ghost"],
    "jax_privacy": ["vmap", "one_by_one"],
    "tensorflow_privacy": ["vectorized", "fast_gradient_clipping"],
}
# Processes of which the quickest to start counts.
_STARTS = 3
# Ways to give `fit` its rows; the first is what others are compared with.
_FIT_ROWS = [
    *("fit_ordinary", "fit_ordinary_pipeline", "fit_poisson", "fit_poisson_in_passes"),
    *("fit_bounded_poisson", "fit_shuffled", "fit_declared", "fit_balls_in_bins"),
    *("fit_bins_in_files", "fit_users"),
]
# What adds to a million numbers; the first adds other numbers, and no noise.
_NOISE_ROWS = ["noise_memory", "noise_of_tensorflow", "noise_of_tfdp"]
# Ways to read the files of bins; the first is what the other is compared with.
_READING_ROWS = ["read_shuffled", "read_bins"]
_TFDP_ALONE = ("frozen", "bert", "bert:4", "mobilenet_v2", "resnet50")
_MODELS = [name for name in PROBLEMS if name not in {"synthetic", "deep", *_TFDP_ALONE}]
_DEPTHS = (2, 8, 32, 128, 200)
# How a client's noise is drawn, and how many clients there are.
_FEDERATED_ROWS = (
    *("federated_aggregate:10000", "federated_aggregate:10000000"),
    *("federated_aggregate:1000000000", "federated_per_client:10000000"),
)

_CHOSEN = flags.DEFINE_multi_enum(
    "models",
    _MODELS,
    [*_MODELS, *_TFDP_ALONE],
    "Models; repeat the flag for several. Other frameworks have no "
    f"{', '.join(_TFDP_ALONE)}.",
)
_ENGINES = flags.DEFINE_multi_enum(
    "rows", _ROWS[_TFDP], _ROWS[_TFDP], "Engines; repeat the flag for several."
)
_BATCH_SIZES = flags.DEFINE_multi_integer(
    "batch_size", None, "Examples in a batch; repeat the flag for several.", 1
)
_TEXTS = flags.DEFINE_string(
    "texts", None, "TSV of texts and labels for bert, whose tokens are else made up."
)
_ALONE = flags.DEFINE_string(
    "alone",
    None,
    "File of JSON lines, one for each row that was measured, in a process of its own "
    "for time and memory; the rows that are in it already are not measured again.",
)
_POISSON = flags.DEFINE_bool("poisson", False, "Let tfdp's batch sizes vary.")
_JIT_COMPILE = flags.DEFINE_bool(
    "jit_compile", False, "Let XLA compile what can do without it."
)
_STEPS = flags.DEFINE_integer("steps", 20, "Timed steps of a row.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 5.0, "... but none after this many seconds.")
_CORES = flags.DEFINE_integer(
    "cores", None, "Cores for every framework; Linux only.", lower_bound=1
)
_TIME_LIMIT = flags.DEFINE_float(
    "time_limit", 60.0, "Seconds that a row has to start and to take two steps."
)
_MEMORY_LIMIT = flags.DEFINE_float(
    "memory_limit", 12.0, "GiB that a process may keep resident; Linux only."
)
_STARTUP = flags.DEFINE_bool(
    "startup", False, "CPU seconds from `fit` to the end of the first step, in all."
)
_FIT = flags.DEFINE_bool(
    "fit", False, "Steps of epochs of `fit`, for each way to give it rows."
)
_READING = flags.DEFINE_bool(
    "reading", False, "Passes over bins in files, beside tf.data shuffling of them."
)
_NOISE = flags.DEFINE_bool("noise", False, "What the noise of a million weights takes.")
_GROWTH = flags.DEFINE_string(
    "growth", None, "PNG file for a plot over batch sizes and numbers of weights."
)
_SYNTHETIC = flags.DEFINE_bool(
    "synthetic", False, "Memory of dense layers 5120-2560-1280 over batch sizes."
)
_PASSES = flags.DEFINE_bool(
    "passes", False, "Memory of the MLP over batch sizes, in passes of 256 examples."
)
_FEDERATED = flags.DEFINE_bool(
    "federated", False, "Rounds of 1000 virtual clients with 5 examples each."
)
_BAM = flags.DEFINE_bool(
    "bam", False, "Time of DP-SGD, DP-SAT and BAM over the depth of a network, XLA."
)
_BAM_PLOT = flags.DEFINE_string("bam_plot", "runs/bam.png", "PNG file for its plot.")
_DEPTH = flags.DEFINE_multi_integer(
    "depth", _DEPTHS, "Numbers of its layers; repeat the flag for several.", 1
)
_PYTHONS = {
    peer: flags.DEFINE_string(f"{peer}_python", None, f"A Python that has {peer}.")
    for peer in _ROWS
    if peer != _TFDP
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What is known of one row; of a process with several rows, their times.

    Attributes:
        milliseconds: All times that a step of a row took.
        peak_mib: Peak of the memory.
        before_mib: What was resident before the steps.
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


def main(argv: Sequence[str]) -> None:
    """Measure what the flags ask for, and print it."""
    if len(argv) > 1:
        sys.exit(f"benchmark: everything is a flag. Received: {' '.join(argv[1:])}.")
    other = [name for name in _CHOSEN.value if not name.startswith("bert")]
    if _TEXTS.value and (other or _POISSON.value):
        sys.exit(
            "benchmark: --texts are for bert in batches of one size. Received: "
            f"models={_CHOSEN.value}, poisson={_POISSON.value}. Use --models=bert."
        )
    if _CORES.value is not None:
        # Every process inherits it, and starts as many threads.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: _CORES.value])
    print(f"{machine()}\n")
    asked = {
        memory_of_layers: _SYNTHETIC.value,
        memory_in_passes: _PASSES.value,
        federated: _FEDERATED.value,
        startup: _STARTUP.value,
        fits: _FIT.value,
        reading: _READING.value,
        noise: _NOISE.value,
        over_depth: _BAM.value,
        growth: _GROWTH.value is not None,
    }
    results = next((show for show, is_asked in asked.items() if is_asked), compare)()
    if any(each.problem.startswith(_FAILED) for each in results):
        sys.exit("benchmark: not all rows could be measured.")


def machine() -> str:
    """Describe the machine, as far as it matters for times."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{platform.system()} {platform.machine()}, {cores} cores{load}, up to "
        f"{_MEMORY_LIMIT.value:g} GiB and {_TIME_LIMIT.value:g} s a row"
    )


# Processes.


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
    python = sys.executable if framework == _TFDP else _PYTHONS[framework].value
    command = [python, str(Path(__file__).parent / "peers" / f"{framework}_steps.py")]
    command += [f"--model={model}", f"--batch_size={batch_size}", "--rows", *rows]
    # With Poisson batches, XLA compiles for each of their sizes.
    command += ["--warm=17"] if timed and _POISSON.value else ["--warm=2"]
    command += [f"--steps={_STEPS.value if timed else 0}"]
    command += [f"--seconds={_SECONDS.value}"]
    command += ["--poisson"] if _POISSON.value else []
    command += ["--jit_compile"] if _JIT_COMPILE.value else []
    command += [f"--texts={_TEXTS.value}"] if _TEXTS.value else []
    command += options
    seconds = (_TIME_LIMIT.value + 2 * _SECONDS.value * timed) * len(rows)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=error, text=True)
        except OSError as error_:
            return Result(problem=f"{_FAILED}: {error_}")
        try:
            problem = watch(process, seconds)
        finally:
            process.kill()
            process.wait()
        for file in (out, error):
            file.seek(0)
        return result(process.returncode, problem, out.read(), error.read())


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
            if pages * os.sysconf("SC_PAGE_SIZE") > _MEMORY_LIMIT.value * 2**30:
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
        return Result(problem=f"{_FAILED}: {lines[-1][:200]}")
    found = json.loads(out.splitlines()[-1])
    skipped = "; ".join(found.pop("skipped").values())
    return Result(problem=f"skipped: {skipped}") if skipped else Result(**found)


def measure(
    framework: str, model: str, batch_size: int, rows: Sequence[str]
) -> dict[str, Result]:
    """Measure the memory of each row, then time those that came to an end."""
    if _ALONE.value is not None:
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
    path = Path(_ALONE.value)
    options = [_TEXTS.value, _STEPS.value, _POISSON.value, _JIT_COMPILE.value]
    what = [framework, model, batch_size, row, *options]
    # A line without an end is that of a run that was killed.
    text = path.read_text() if path.exists() else ""
    for line_ in text[: text.rfind("\n") + 1].splitlines():
        found = json.loads(line_)
        if found["what"] == what:
            return Result(**found["result"])
    result_ = start(framework, model, batch_size, [row], timed=True)
    if result_.problem.startswith(_FAILED):
        return result_
    path.parent.mkdir(parents=True, exist_ok=True)
    new = json.dumps({"what": what, "result": dataclasses.asdict(result_)}) + "\n"
    # Killed here, a run leaves the old file or the new one.
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text[: text.rfind("\n") + 1] + new)
    unfinished.replace(path)
    return result_


# Tables.


def compare() -> list[Result]:
    """Print a table of all rows for each model, and return what it shows."""
    frameworks = [_TFDP, *(name for name, flag in _PYTHONS.items() if flag.value)]
    shown, about = [], {}
    columns = ("ms", "ratio", "peak MiB", "ratio", "steps MiB", "ratio")
    print(
        f"{'model':<12}{'batch':>6}  {'row':<42}"
        + "".join(f"{name:>10}" for name in columns)
    )
    for model, framework in itertools.product(dict.fromkeys(_CHOSEN.value), frameworks):
        engines = _ENGINES.value if framework == _TFDP else _ROWS[framework]
        rows = [_ORDINARY, *dict.fromkeys(engines)]
        for size in _BATCH_SIZES.value or [problem_of(model).batch_size]:
            results = measure(framework, model, size, rows)
            for row, found in results.items():
                name = row if framework == _TFDP else f"{framework} {row}"
                cells = line(row, found, results[_ORDINARY])
                print(f"{model:<12}{size:>6}  {name:<42}{cells}", flush=True)
                about[framework] = found.about or about.get(framework, "")
                shown.append(found)
            print()
    print("\n".join(about.values()))
    return shown


def line(row: str, found: Result, ordinary: Result) -> str:
    """Return the cells of a row, and what went wrong."""
    cells = ""
    for value, base in (
        (found.median(row), ordinary.median(_ORDINARY)),
        (found.peak_mib, ordinary.peak_mib),
        (found.steps_mib, ordinary.steps_mib),
    ):
        ratio = value / base if value and base else None
        cells += "".join(
            f"{'-':>10}" if number is None else f"{number:>10.{digits}f}"
            for number, digits in ((value, 1), (ratio, 2))
        )
    return f"{cells}  {found.problem}".rstrip()


def memory_of_layers() -> list[Result]:
    """Print the memory of dense layers over batch sizes."""
    sizes = _BATCH_SIZES.value or [32 * 8**power for power in range(5)]
    return print_memory("synthetic", sizes, [_ORDINARY, *_ENGINES.value])


def memory_in_passes() -> list[Result]:
    """Print the memory of the MLP over batch sizes, whole and in passes."""
    sizes = _BATCH_SIZES.value or [256, 1024, 4096, 16384]
    return print_memory("mlp", sizes, [_ORDINARY, "bookkeeping", "passes"])


def print_memory(
    model: str, batch_sizes: Sequence[int], rows: Sequence[str]
) -> list[Result]:
    """Print the peak memory of each row over batch sizes, and that of the steps."""
    shown = []
    rows = list(dict.fromkeys(rows))
    print(f"Peak MiB, of it during the steps; model {model}\n")
    print(f"{'batch size':<12}" + "".join(f"{row:>24}" for row in rows))
    for batch_size in batch_sizes:
        print(f"{batch_size:<12}", end="", flush=True)
        for row in rows:
            found = start(_TFDP, model, batch_size, [row], timed=False)
            cell = found.problem or f"{found.peak_mib:.0f}, {found.steps_mib:.0f}"
            print(f"{cell:>24}", end="", flush=True)
            shown.append(found)
        print()
    return shown


def startup() -> list[Result]:
    """Print what it takes to get to the end of the first step, in fresh processes.

    Of several processes the one that took least counts.

    Returns:
        What was found.
    """
    rows = [_ORDINARY, *dict.fromkeys(_ENGINES.value)]
    shown = []
    print(f"{'model':<14}{'row':<28}{'CPU s':>10}{'ratio':>10}")
    for model in dict.fromkeys(_CHOSEN.value):
        size = problem_of(model).batch_size
        ordinary = None
        for row in rows:
            found = [
                start(_TFDP, model, size, [row], timed=False) for _ in range(_STARTS)
            ]
            shown += found
            seconds = [s for each in found for s in each.first_cpu_seconds.values()]
            least = min(seconds, default=None)
            ordinary = least if row == _ORDINARY else ordinary
            ratio = least / ordinary if least and ordinary else None
            cells = "".join(
                f"{'-':>10}" if number is None else f"{number:>10.2f}"
                for number in (least, ratio)
            )
            print(f"{model:<14}{row:<28}{cells}  {found[0].problem}".rstrip())
    return shown


def fits() -> list[Result]:
    """Print what a step takes in epochs of `fit`, for each way to give it rows."""
    print(f"{'model':<14}{'batch':>6}  {'rows from':<28}{'ms a step':>10}{'ratio':>10}")
    return [
        print_ratios(model, size, _FIT_ROWS)
        for model in dict.fromkeys(_CHOSEN.value)
        for size in _BATCH_SIZES.value or [problem_of(model).batch_size]
    ]


def reading() -> list[Result]:
    """Print what a pass over files of images takes, as bins and shuffled by tf.data."""
    size = (_BATCH_SIZES.value or [256])[0]
    print(f"{'images':<14}{'batch':>6}  {'files':<28}{'ms a pass':>10}{'ratio':>10}")
    return [print_ratios("cnn", size, _READING_ROWS)]


def noise() -> list[Result]:
    """Print what adding noise to a million numbers takes, beside reading them.

    Returns:
        What was found.
    """
    print(f"{'':<22}{'what is added':<28}{'ms':>10}{'ratio':>10}")
    shown = [print_ratios("", 1, _NOISE_ROWS)]
    memory = shown[0].median(_NOISE_ROWS[0])
    for framework in (name for name, flag in _PYTHONS.items() if flag.value):
        found = start(framework, "", 1, ["noise"], timed=True)
        median = found.median("noise")
        cells = f"{median:>10.2f}{median / memory:>10.2f}" if median and memory else ""
        print(
            f"{'':<22}{f'of {framework}':<28}{cells}  {found.problem}".rstrip(),
            flush=True,
        )
        shown.append(found)
    return shown


def print_ratios(model: str, size: int, rows: Sequence[str]) -> Result:
    """Print the times of rows that take turns, over that of the first."""
    found = start(_TFDP, model, size, rows, timed=True)
    first = found.median(rows[0])
    for row in rows:
        median = found.median(row)
        cells = "".join(
            f"{'-':>10}" if number is None else f"{number:>10.2f}"
            for number in (median, median and first and median / first)
        )
        name = row.partition("_")[2]
        about = f"{model:<14}{size:>6}" if model else ""
        print(f"{about:<22}{name:<28}{cells}")
    print(found.problem, flush=True)
    return found


def federated() -> list[Result]:
    """Print what rounds take, beside an ordinary step on as many examples."""
    (size, *_) = _BATCH_SIZES.value or [5000]
    results = measure(_TFDP, "cnn", size, [_ORDINARY, *_FEDERATED_ROWS])
    print(
        f"{'row':<34}{'ms':>10}{'ratio':>10}{'peak MiB':>10}{'ratio':>10}"
        f"{'steps MiB':>10}{'ratio':>10}"
    )
    for row, found in results.items():
        print(f"{row:<34}{line(row, found, results[_ORDINARY])}")
    return list(results.values())


# Plots.


def over_depth() -> list[Result]:
    """Print and plot how long steps take in networks of more and more layers.

    As in the paper on BAM: ten trials of five steps, compiled by XLA.

    Returns:
        What was measured, for each depth.
    """
    path = Path(_BAM_PLOT.value)
    rows = [_ORDINARY, "bookkeeping", "sat", "bam_sam", "bam_exact"]
    options = ["--jit_compile", "--steps=10", "--repeats=5", "--seconds=inf"]
    size = (_BATCH_SIZES.value or [PROBLEMS["deep"].batch_size])[0]
    print(f"Milliseconds a step, mean +- standard deviation; {size} examples\n")
    print(f"{'layers':<8}" + "".join(f"{row:>22}" for row in rows))
    results = {}
    for depth in _DEPTH.value:
        found = start(_TFDP, f"deep:{depth}", size, rows, timed=True, options=options)
        cells = [
            f"{statistics.mean(times):.2f} +- {statistics.pstdev(times):.2f}"
            if (times := found.milliseconds.get(row))
            else "-"
            for row in rows
        ]
        row_of_cells = "".join(f"{cell:>22}" for cell in cells)
        print(f"{depth:<8}{row_of_cells}  {found.problem}".rstrip(), flush=True)
        results[depth] = found
    plot_over_depth(results, path)
    print(f"\n{found.about}\nPlot: {path}")
    return list(results.values())


def plot_over_depth(results: Mapping[int, Result], path: Path) -> None:
    """Plot the times over the depth; a row ends where it could not go on."""
    # Only here, so that the tables need no matplotlib.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    by_row: dict[str, dict[int, list[float]]] = {}
    for depth, found in results.items():
        for row, times in found.milliseconds.items():
            by_row.setdefault(row, {})[depth] = times
    for row, times_of in by_row.items():
        means = [statistics.mean(times) for times in times_of.values()]
        deviations = [statistics.pstdev(times) for times in times_of.values()]
        axes.errorbar(list(times_of), means, deviations, marker="o", label=row)
    axes.set(xlabel="layers", ylabel="milliseconds a step", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def growth() -> list[Result]:
    """Plot time and memory of an MLP over batch sizes and over numbers of weights."""
    path = Path(_GROWTH.value)
    rows = [_ORDINARY, *dict.fromkeys(_ENGINES.value)]
    sizes = _BATCH_SIZES.value or [32, 128, 512, 2048]
    over: dict[str, dict[float, dict[str, Result]]] = {
        "examples in a batch, width 1024": {
            size: measure(_TFDP, "mlp", size, rows) for size in sizes
        },
        "weights, 256 examples in a batch": {
            width * (784 + width + 12) + 10: measure(_TFDP, f"mlp:{width}", 256, rows)
            for width in (256, 512, 1024, 2048)
        },
    }
    for label, results in over.items():
        print(label)
        for place, found in results.items():
            for row in rows:
                print(f"{place:<12}{row:<42}{line(row, found[row], found[_ORDINARY])}")
        print()
    plot(over, rows, path)
    print(f"Plot: {path}")
    return [
        result_
        for results in over.values()
        for found in results.values()
        for result_ in found.values()
    ]


def plot(over: Mapping[str, Any], rows: Sequence[str], path: Path) -> None:
    """Plot times above and memory below; a row ends where it could not go on."""
    # Only here, so that the tables need no matplotlib.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, len(over), sharex="col", sharey="row")
    for column, (label, results) in enumerate(over.items()):
        for row in rows:
            found = [result_[row] for result_ in results.values()]
            times = [each.median(row) or float("nan") for each in found]
            peaks = [each.peak_mib or float("nan") for each in found]
            axes[0, column].plot(list(results), times, marker="o", label=row)
            axes[1, column].plot(list(results), peaks, marker="o", label=row)
        axes[1, column].set(xlabel=label, xscale="log")
    axes[0, 0].set(ylabel="milliseconds a step", yscale="log")
    axes[1, 0].set(ylabel="peak MiB", yscale="log")
    axes[0, 0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    app.run(main)
