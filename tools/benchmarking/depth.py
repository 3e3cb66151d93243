"""Time over the depth of a network."""

import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarking import settings
from benchmarking.processes import Result, start
from peers.steps import PROBLEMS


def over_depth() -> list[Result]:
    """Print and plot how long steps take in networks of more and more layers.

    As in the paper on BAM: ten trials of five steps, compiled by XLA.

    Returns:
        What was measured, for each depth.
    """
    path = Path(settings.BAM_PLOT.value)
    rows = [settings.ORDINARY, "bookkeeping", "sat", "bam_sam", "bam_exact"]
    options = ["--jit_compile", "--steps=10", "--repeats=5", "--seconds=inf"]
    size = (settings.BATCH_SIZES.value or [PROBLEMS["deep"].batch_size])[0]
    print(f"Milliseconds a step, mean +- standard deviation; {size} examples\n")
    print(f"{'layers':<8}" + "".join(f"{row:>22}" for row in rows))
    results = {}
    for depth in settings.DEPTH.value:
        found = start(
            settings.TFDP, f"deep:{depth}", size, rows, timed=True, options=options
        )
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
