"""Memory of a step by its stages."""

from benchmarking import settings
from benchmarking.processes import Result, start
from peers.steps import problem_of

# Losses that lead uphill go through some of the stages twice.
_ENGINES = ("vectorized", "fast_gradient_clipping", "ghost", "bookkeeping")
# What ends a step early, and which stages an ordinary one does not have.
_STAGES = ("forward", "backward", "norms", "sums", "update")
_PRIVATE_STAGES = ("norms", "sums")


def stages() -> list[Result]:
    """Print the peak memory of steps up to the end of each stage.

    Each is that of a process of its own, which takes steps that end there.

    Returns:
        What was found.
    """
    engines = [row for row in dict.fromkeys(settings.ENGINES.value) if row in _ENGINES]
    shown = []
    print("Peak MiB of the steps, up to the end of a stage\n")
    print(
        f"{'model':<16}{'batch':>6}  {'row':<26}"
        + "".join(f"{stage:>10}" for stage in _STAGES)
    )
    for model in dict.fromkeys(settings.MODELS.value):
        for size in settings.BATCH_SIZES.value or [problem_of(model).batch_size]:
            for row in (settings.ORDINARY, *engines):
                print(f"{model:<16}{size:>6}  {row:<26}", end="", flush=True)
                shown += _print_row(model, size, row)
        print()
    return shown


def _print_row(model: str, size: int, row: str) -> list[Result]:
    """Print the cells of a row, up to the stage that could not be measured."""
    shown: list[Result] = []
    for stage in _STAGES:
        if row == settings.ORDINARY and stage in _PRIVATE_STAGES:
            print(f"{'-':>10}", end="")
            continue
        found = start("tfdp_stage", model, size, [f"{row}:{stage}"], timed=False)
        shown.append(found)
        if found.problem:
            print(f"  {found.problem}", end="")
            break
        print(f"{found.steps_mib:>10.0f}", end="", flush=True)
    print(flush=True)
    return shown
