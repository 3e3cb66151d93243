"""Plot the log of one training: loss, accuracy, epsilon, clipping and its bias.

    python tools/plot_run.py runs/mnist/row1/history.csv
    python tools/plot_run.py history.json --output=plots/history.png

The log is the CSV file of a `keras.callbacks.CSVLogger`, or a file named .json with the
`history` of what `fit` returns. Of several runs in one file, every line counts as an
epoch.
"""

import csv
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from matplotlib.figure import Figure

# The style of all pictures.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
import plots

_NONPRIVATE = "nonprivate_"
_BIAS_LOGGER = f"({_NONPRIVATE}|public_)"
_PANELS = {
    "loss": "(val_)?loss",
    "accuracy": ".*accuracy.*",
    "epsilon": "epsilon",
    "clip norm": f"l2_norm_clip|{_BIAS_LOGGER}norm_q(10|50|90)",
    "noise multiplier": "noise_multiplier",
    "clipped fraction": f"{_BIAS_LOGGER}clipped_fraction",
    "bias": f"{_BIAS_LOGGER}bias_(magnitude|direction)",
    "scale and cosine": f"{_BIAS_LOGGER}(bias_scale|clip_cosine)",
}
_UNITS = {
    "loss": "loss",
    "clip norm": "norm of a gradient",
    "noise multiplier": "noise over clip norm",
    "clipped fraction": "share of the units",
    "bias": "norm of a mean gradient",
}
# CSVLogger writes NA; JSON's null reads as None.
_GAPS = ("", "NA", None)

_OUTPUT = flags.DEFINE_string(
    "output", None, "PNG file. Default: beside the log, named like it."
)


def main(argv: Sequence[str]) -> None:
    """Plot the log that is named on the command line."""
    try:
        if len(argv) != 2:
            given = " ".join(argv[1:]) or "none"
            raise ValueError(f"Name one log, the rest is flags. Received: {given}.")
        log = Path(argv[1])
        table = read(log)
        output = Path(_OUTPUT.value or log.with_suffix(".png"))
        if output.exists() and output.samefile(log):
            raise ValueError(
                f"The plot must not overwrite the log. Received: output={output}. Use "
                "`--output` with another name."
            )
        figure = draw(epochs(table), panels(table), str(log))
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, format="png", dpi=150)
    except OSError as error:
        sys.exit(f"plot_run: {error.strerror}. Received: {error.filename}.")
    except ValueError as error:
        sys.exit(f"plot_run: {error}")
    print(f"Plot: {output}")


def read(log: Path) -> dict[str, list[Any]]:
    """Read a log.

    Args:
        log: CSV file, or JSON file if its name ends in .json.

    Returns:
        The cells of each column as they stand there, at least one, equally many.

    Raises:
        ValueError: If the file is no such table.
    """
    is_json = log.suffix.lower() == ".json"
    try:
        text = log.read_text(encoding="utf-8-sig")
        content = json.loads(text) if is_json else list(csv.reader(text.splitlines()))
    except (ValueError, RecursionError, csv.Error) as error:
        raise ValueError(
            f"The log must be CSV, or JSON if its name ends in .json. Received: {log} "
            f"({error})."
        ) from error
    table = _lists(content) if is_json else _columns(content)
    if not any(table.values()):
        raise ValueError(f"The log must have rows. Received: {log} without any.")
    return table


def _columns(lines: Sequence[Sequence[str]]) -> dict[str, list[Any]]:
    names, *rows = [line for line in lines if line] or [[]]
    for row, cells in enumerate(rows, start=1):
        # Appended by a run that logs other values, they would be in wrong columns.
        if len(cells) != len(names):
            raise ValueError(
                "Every row must have as many cells as the header. Received: "
                f"{len(cells)} cells in row {row}, {len(names)} in the header."
            )
    return {name: [cells[i] for cells in rows] for i, name in enumerate(names)}


def _lists(content: Any) -> dict[str, list[Any]]:
    if not isinstance(content, dict) or not all(
        isinstance(cells, list) for cells in content.values()
    ):
        raise ValueError(
            "The JSON must be a dict of lists, as `History.history` is. Received: "
            f"{content!r:.60}."
        )
    lengths = {name: len(cells) for name, cells in content.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} in {name}" for name, length in lengths.items())
        raise ValueError(f"All lists must have the same length. Received: {listed}.")
    return content


def epochs(table: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Number the rows of a table.

    Args:
        table: The cells of each column.

    Returns:
        Epochs, the first of a training being 1. Where the column `epoch` does not rise,
        as after a restart, the numbers of the rows.
    """
    if "epoch" in table:
        epoch = _numbers("epoch", table["epoch"])
        if (np.diff(epoch, prepend=-1) > 0).all():
            return epoch + 1
    return np.arange(1, len(next(iter(table.values()))) + 1)


def panels(table: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, np.ndarray]]:
    """Distribute the columns of a table among panels.

    Args:
        table: The cells of each column.

    Returns:
        Of each panel that has any, the columns as numbers; NaN where a cell is empty.

    Raises:
        ValueError: If there is no panel, or a cell in one is not a number.
    """
    found = {}
    for label, pattern in _PANELS.items():
        curves = {
            name: _numbers(name, cells)
            for name, cells in table.items()
            if re.fullmatch(pattern, name)
        }
        # Without validation, CSVLogger adds val_ columns in which all cells are NA.
        curves = {
            name: curve for name, curve in curves.items() if np.isfinite(curve).any()
        }
        if curves:
            found[label] = curves
    if not found:
        raise ValueError(
            "The log must have a column that can be plotted, with a number in it. "
            f"Received: {', '.join(table)}."
        )
    return found


def _numbers(name: str, cells: Sequence[Any]) -> np.ndarray:
    numbers = []
    for row, cell in enumerate(cells, start=1):
        try:
            numbers.append(math.nan if cell in _GAPS else float(cell))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"`{name}` must be a number in every row. Received: {cell!r:.60} in row "
                f"{row}."
            ) from error
    return np.array(numbers)


def draw(
    epochs: np.ndarray, panels: Mapping[str, Mapping[str, np.ndarray]], title: str
) -> Figure:
    """Draw the panels in two columns.

    Args:
        epochs: Where the rows are on the x axes.
        panels: Of each panel, the curves by name.
        title: What to write above, as it is.

    Returns:
        The figure.
    """
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(7 * columns, 2.8 * rows + 0.5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    for place, (label, curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        for number, (name, curve) in enumerate(curves.items()):
            style = "--" if name.startswith(_NONPRIVATE) else "-"
            color = _color(name, number)
            axes.plot(epochs, curve, style, marker=".", color=color, label=name)
        axes.set_title(label, fontsize="medium")
        axes.set_ylabel(_UNITS.get(label, label))
        # The same in all panels, also where a curve has gaps at its ends.
        plots.over_epochs(axes, epochs[-1], first=epochs[0] - 0.5)
        # Quantiles can be zero, and a logarithmic axis needs a number above it.
        if label == "clip norm" and any((curve > 0).any() for curve in curves.values()):
            axes.set_yscale("log", nonpositive="mask")
        if label == "epsilon":
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        plots.name_curves(axes)
    if any(
        name.startswith(_NONPRIVATE) for curves in panels.values() for name in curves
    ):
        figure.supxlabel(
            f"Dashed curves ({_NONPRIVATE}) are not private and not for publication, "
            "like training loss and metrics.",
            fontsize="small",
            color="#b00020",
        )
    return figure


def _color(name: str, number: int) -> str:
    """Choose the colour of a curve, by what it is and its place in its panel."""
    if name.startswith(("val_", "epsilon", "l2_norm_clip", "noise_multiplier")):
        return plots.PRIVATE
    greys = (plots.WITHOUT_PRIVACY, "#b0b0b0", "#4a4a4a", "#c8c8c8", "#8f8f8f")
    return greys[number % len(greys)]


if __name__ == "__main__":
    app.run(main)
