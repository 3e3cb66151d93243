"""Memory over batch sizes."""

from collections.abc import Sequence

from benchmarking import settings
from benchmarking.processes import Result, start


def memory_of_layers() -> list[Result]:
    """Print the memory of dense layers over batch sizes."""
    sizes = settings.BATCH_SIZES.value or [32 * 8**power for power in range(5)]
    return print_memory(
        "synthetic", sizes, [settings.ORDINARY, *settings.ENGINES.value]
    )


def memory_in_passes() -> list[Result]:
    """Print the memory of the MLP over batch sizes, whole and in passes."""
    sizes = settings.BATCH_SIZES.value or [256, 1024, 4096, 16384]
    return print_memory("mlp", sizes, [settings.ORDINARY, "bookkeeping", "passes"])


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
            found = start(settings.TFDP, model, batch_size, [row], timed=False)
            cell = found.problem or f"{found.peak_mib:.0f}, {found.steps_mib:.0f}"
            print(f"{cell:>24}", end="", flush=True)
            shown.append(found)
        print()
    return shown
