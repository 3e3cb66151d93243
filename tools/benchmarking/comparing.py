"""Engines and other frameworks beside ordinary steps."""

import itertools

from benchmarking import settings
from benchmarking.processes import Result, measure
from peers.steps import problem_of

# How a client's noise is drawn, and how many clients there are.
_FEDERATED_ROWS = (
    *("federated_aggregate:10000", "federated_aggregate:10000000"),
    *("federated_aggregate:1000000000", "federated_per_client:10000000"),
)


def compare() -> list[Result]:
    """Print a table of all rows for each model, and return what it shows."""
    frameworks = [
        settings.TFDP,
        *(name for name, flag in settings.PYTHONS.items() if flag.value),
    ]
    shown, about = [], {}
    columns = ("ms", "ratio", "peak MiB", "ratio", "steps MiB", "ratio")
    print(
        f"{'model':<12}{'batch':>6}  {'row':<42}"
        + "".join(f"{name:>10}" for name in columns)
    )
    for model, framework in itertools.product(
        dict.fromkeys(settings.MODELS.value), frameworks
    ):
        engines = (
            settings.ENGINES.value
            if framework == settings.TFDP
            else settings.ROWS[framework]
        )
        rows = [settings.ORDINARY, *dict.fromkeys(engines)]
        for size in settings.BATCH_SIZES.value or [problem_of(model).batch_size]:
            results = measure(framework, model, size, rows)
            for row, found in results.items():
                name = row if framework == settings.TFDP else f"{framework} {row}"
                cells = line(row, found, results[settings.ORDINARY])
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
        (found.median(row), ordinary.median(settings.ORDINARY)),
        (found.peak_mib, ordinary.peak_mib),
        (found.steps_mib, ordinary.steps_mib),
    ):
        ratio = value / base if value and base else None
        cells += "".join(
            f"{'-':>10}" if number is None else f"{number:>10.{digits}f}"
            for number, digits in ((value, 1), (ratio, 2))
        )
    return f"{cells}  {found.problem}".rstrip()


def federated() -> list[Result]:
    """Print what rounds take, beside an ordinary step on as many examples."""
    (size, *_) = settings.BATCH_SIZES.value or [5000]
    results = measure(settings.TFDP, "cnn", size, [settings.ORDINARY, *_FEDERATED_ROWS])
    print(
        f"{'row':<34}{'ms':>10}{'ratio':>10}{'peak MiB':>10}{'ratio':>10}"
        f"{'steps MiB':>10}{'ratio':>10}"
    )
    for row, found in results.items():
        print(f"{row:<34}{line(row, found, results[settings.ORDINARY])}")
    return list(results.values())
