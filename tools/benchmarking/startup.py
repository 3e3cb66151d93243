"""What it takes to get to the end of the first step."""

from benchmarking import settings
from benchmarking.processes import Result, start
from peers.steps import problem_of

# Processes of which the quickest to start counts.
_STARTS = 3


def startup() -> list[Result]:
    """Print what it takes to get to the end of the first step, in fresh processes.

    Of several processes the one that took least counts.

    Returns:
        What was found.
    """
    rows = [settings.ORDINARY, *dict.fromkeys(settings.ENGINES.value)]
    shown = []
    print(f"{'model':<14}{'row':<28}{'CPU s':>10}{'ratio':>10}")
    for model in dict.fromkeys(settings.MODELS.value):
        size = problem_of(model).batch_size
        ordinary = None
        for row in rows:
            found = [
                start(settings.TFDP, model, size, [row], timed=False)
                for _ in range(_STARTS)
            ]
            shown += found
            seconds = [s for each in found for s in each.first_cpu_seconds.values()]
            least = min(seconds, default=None)
            ordinary = least if row == settings.ORDINARY else ordinary
            ratio = least / ordinary if least and ordinary else None
            cells = "".join(
                f"{'-':>10}" if number is None else f"{number:>10.2f}"
                for number in (least, ratio)
            )
            print(f"{model:<14}{row:<28}{cells}  {found[0].problem}".rstrip())
    return shown
