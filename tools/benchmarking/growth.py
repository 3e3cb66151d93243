"""Time and memory over batch sizes and numbers of weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarking import settings
from benchmarking.comparing import line
from benchmarking.processes import Result, measure


def growth() -> list[Result]:
    """Plot time and memory of an MLP over batch sizes and over numbers of weights."""
    path = Path(settings.GROWTH.value)
    rows = [settings.ORDINARY, *dict.fromkeys(settings.ENGINES.value)]
    sizes = settings.BATCH_SIZES.value or [32, 128, 512, 2048]
    over: dict[str, dict[float, dict[str, Result]]] = {
        "examples in a batch, width 1024": {
            size: measure(settings.TFDP, "mlp", size, rows) for size in sizes
        },
        "weights, 256 examples in a batch": {
            width * (784 + width + 12) + 10: measure(
                settings.TFDP, f"mlp:{width}", 256, rows
            )
            for width in (256, 512, 1024, 2048)
        },
    }
    for label, results in over.items():
        print(label)
        for place, found in results.items():
            for row in rows:
                print(
                    f"{place:<12}{row:<42}{line(row, found[row], found[settings.ORDINARY])}"
                )
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
