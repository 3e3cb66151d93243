"""Draw the times of the engines as they stand in the first table of a page.

    python tools/plot_costs.py docs/costs.md --output=docs/images/engines.png

The table is `tools/benchmark.py`'s: a row for each model, whose first cell says the
ordinary step's time, and the others how many times that an engine takes.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags
from matplotlib.figure import Figure

# The style of all pictures.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
import plots

_OUTPUT = flags.DEFINE_string("output", "engines.png", "PNG file.")
_ORDINARY = "ordinary"
# Columns of the table, and how they are drawn.
_ENGINES = {
    _ORDINARY: "ordinary",
    "book-keeping": "book-keeping",
    "ghost (Gram)": "ghost",
    "vectorized": "vectorized",
}


def main(argv: Sequence[str]) -> None:
    """Draw the table of the page that is named on the command line."""
    try:
        if len(argv) != 2:
            given = " ".join(argv[1:]) or "none"
            raise ValueError(f"Name one page, the rest is flags. Received: {given}.")
        page = Path(argv[1])
        figure = draw(read(page.read_text(encoding="utf-8")))
        plots.save(figure, Path(_OUTPUT.value))
    except OSError as error:
        sys.exit(f"plot_costs: {error.strerror}. Received: {error.filename}.")
    except ValueError as error:
        sys.exit(f"plot_costs: {error}")
    print(f"Plot: {_OUTPUT.value}")


def read(text: str) -> dict[str, dict[str, float]]:
    """Read the first table of a page.

    Args:
        text: The page.

    Returns:
        Of each model, named with the milliseconds of its ordinary step, the times of
        the engines as multiples of that; NaN where a cell has no number.

    Raises:
        ValueError: If there is no such table.
    """
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = rows[0] if rows else []
    missing = [name for name in _ENGINES if name not in names]
    if missing:
        raise ValueError(
            f"The first table must have all engines. Received: no {', '.join(missing)}."
        )
    models = {}
    for cells in rows[2:]:
        if len(cells) != len(names):
            break
        row = dict(zip(names, cells, strict=True))
        ordinary = re.match(r"([\d.,]+) ms", row[_ORDINARY])
        if ordinary is None:
            break
        found = {_ORDINARY: 1.0}
        for engine in _ENGINES:
            if engine != _ORDINARY:
                number = re.match(r"[\d.]+", row[engine])
                found[engine] = float(number[0]) if number else np.nan
        models[f"{cells[0]}\nordinary step: {ordinary[1]} ms"] = found
    return models


def draw(models: dict[str, dict[str, float]]) -> Figure:
    """Draw a group of bars for each model.

    Args:
        models: What `read` returns.

    Returns:
        The figure.
    """
    figure, [[axes]] = plots.panels(1, 1, size=(8.5, 0.85 * len(models) + 0.9))
    height = 0.8 / len(_ENGINES)
    for number, (engine, label) in enumerate(_ENGINES.items()):
        times = [found[engine] for found in models.values()]
        places = np.arange(len(models)) + (number - (len(_ENGINES) - 1) / 2) * height
        axes.barh(places, times, height, color=plots.COLORS[label], label=label)
        for place, time in zip(places, times, strict=True):
            axes.annotate(
                f"{time:.3g}" if np.isfinite(time) else f"{label}: not run",
                (np.nan_to_num(time), place),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize="x-small",
                verticalalignment="center",
            )
    axes.set_axisbelow(True)
    axes.set_yticks(np.arange(len(models)), list(models), fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("time of a step, as a multiple of the ordinary step's")
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False, ncols=len(_ENGINES)
    )
    return figure


if __name__ == "__main__":
    app.run(main)
