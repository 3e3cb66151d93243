"""Ways to do the same beside each other: rows for `fit`, files, noise."""

from collections.abc import Sequence

from benchmarking import settings
from benchmarking.processes import Result, start
from peers.steps import problem_of

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


def fits() -> list[Result]:
    """Print what a step takes in epochs of `fit`, for each way to give it rows."""
    print(f"{'model':<14}{'batch':>6}  {'rows from':<28}{'ms a step':>10}{'ratio':>10}")
    return [
        print_ratios(model, size, _FIT_ROWS)
        for model in dict.fromkeys(settings.MODELS.value)
        for size in settings.BATCH_SIZES.value or [problem_of(model).batch_size]
    ]


def reading() -> list[Result]:
    """Print what a pass over files of images takes, as bins and shuffled by tf.data."""
    size = (settings.BATCH_SIZES.value or [256])[0]
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
    for framework in (name for name, flag in settings.PYTHONS.items() if flag.value):
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
    found = start(settings.TFDP, model, size, rows, timed=True)
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
