"""How the examples' pictures look: a method has the same colour in all of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

PRIVATE, WITHOUT_PRIVACY = "#1f5fa8", "#7a7a7a"
COLORS = {
    "private": PRIVATE,
    "without privacy": WITHOUT_PRIVACY,
    # Engines, beside the ordinary step.
    "ordinary": WITHOUT_PRIVACY,
    "book-keeping": PRIVATE,
    "ghost": "#2a8f5b",
    "vectorized": "#d9822b",
    # Losses, beside plain DP-SGD.
    "dp_sgd": PRIVATE,
    "sat": "#b5483a",
    "bam": "#7b4fa3",
    # Bayes, beside DP-SGD.
    "one draw": "#8c5a2b",
    # Choosing settings, beside guessing them.
    "search": "#8c2d6b",
    # Ways to choose the clip norm; a fixed one is plain DP-SGD, in shades of its blue.
    "switch": "#159a9c",
    "polynomial": "#98911b",
    "quantile": "#c2589c",
    "median": "#2b2b2b",
}
LINE = {"linewidth": 1.8}
NOTE = {"fontsize": "small", "color": "#b00020"}


def shades(number: int) -> list[Any]:
    """Return blues of private runs that differ in one number, from light to dark.

    Args:
        number: How many.

    Returns:
        Colours of matplotlib.
    """
    return [colormaps["Blues"](place) for place in np.linspace(0.4, 0.95, number)]


def panels(
    rows: int, columns: int, *, size: tuple[float, float] = (5.0, 3.2), **options: Any
) -> tuple[Figure, np.ndarray]:
    """Make a figure with empty panels.

    Args:
        rows: How many panels are above each other.
        columns: How many are side by side.
        size: Width and height of a panel in inches.
        **options: For `Figure.subplots`.

    Returns:
        The figure, and its panels, shape (rows, columns).
    """
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def over_epochs(axes: Axes, last: float, *, first: float = 0.5) -> None:
    """Number whole epochs on the x axis.

    Args:
        axes: A panel.
        last: Number of the last epoch.
        first: Where the axis begins.
    """
    axes.set_xlabel("epoch")
    axes.set_xlim(first, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def curve(
    axes: Axes, x: Sequence[float], runs: Any, label: str, color: Any, **style: Any
) -> None:
    """Plot the mean of some runs, and the standard deviation as a band.

    Args:
        axes: A panel.
        x: Where the points are, shape (P,).
        runs: Values of one run, shape (P,), or of several, shape (runs, P).
        label: Name of the curve.
        color: Its colour.
        **style: More for `Axes.plot`.
    """
    values = np.atleast_2d(np.asarray(runs, float))
    mean = values.mean(0)
    axes.plot(x, mean, color=color, label=label, **LINE | style)
    if len(values) > 1:
        spread = values.std(0, ddof=1)
        axes.fill_between(
            x, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0
        )


def accuracy_and_epsilon(
    private: dict[str, list[float]],
    without: dict[str, list[float]],
    *,
    target_epsilon: float,
    delta: float,
    title: str,
    path: Path,
) -> None:
    """Plot test accuracy and epsilon of a training over the epochs.

    Args:
        private: History of the private training.
        without: History of the same training without privacy.
        target_epsilon: The most that the private one may spend.
        delta: Of the epsilons.
        title: Of the picture.
        path: The file.
    """
    figure, [[accuracy], [epsilon]] = panels(2, 1, size=(6.5, 3.0), sharex=True)
    for history, label in ((without, "without privacy"), (private, "private")):
        values = 100 * np.array(history["val_accuracy"])
        curve(accuracy, range(1, len(values) + 1), values, label, COLORS[label])
    accuracy.set(ylabel="test accuracy, %", title=title)
    spent = private["epsilon"]
    curve(epsilon, range(1, len(spent) + 1), spent, "spent", PRIVATE)
    epsilon.axhline(
        target_epsilon, color="black", linestyle="--", linewidth=1, label="target"
    )
    epsilon.set(ylabel=f"epsilon at delta {delta:g}")
    epsilon.set_ylim(bottom=0)
    over_epochs(epsilon, len(without["val_accuracy"]))
    for axes in (accuracy, epsilon):
        name_curves(axes)
    save(figure, path)


def name_curves(axes: Axes, names: Mapping[str, str] | None = None) -> None:
    """Write the names of all curves beside their ends, right of the panel.

    Args:
        axes: A panel, with limits and scales as they are to be.
        names: What to write for a label, if not the label itself.
    """
    figure = axes.get_figure()
    figure.draw_without_rendering()
    ends = []
    low, high = axes.get_ylim()
    for line in axes.lines:
        label = str(line.get_label())
        y = np.asarray(line.get_ydata(), float)
        y = y[np.isfinite(y)]
        if label.startswith("_") or not y.size:
            continue
        pixel = axes.transData.transform((0, np.clip(y[-1], low, high)))[1]
        place = axes.transAxes.inverted().transform((0, pixel))[1]
        ends.append((place, (names or {}).get(label, label), line.get_color()))
    height = axes.get_window_extent().height / figure.dpi * 72
    for place, (_, label, color) in zip(
        apart([end for end, _, _ in sorted(ends, key=_place)], 11 / height),
        sorted(ends, key=_place),
        strict=True,
    ):
        axes.annotate(
            label,
            (1, place),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            color=color,
            fontsize="small",
            verticalalignment="center",
            annotation_clip=False,
        )


def _place(end: tuple[float, str, Any]) -> float:
    return end[0]


def apart(places: Sequence[float], gap: float) -> np.ndarray:
    """Move places that are too near each other as little as it takes.

    Args:
        places: Sorted numbers.
        gap: Least distance between neighbours.

    Returns:
        As many numbers, in the same order.
    """
    # Least squares under order: what is left after `gap` for each is a monotone fit,
    # found by pooling neighbours that are in the wrong order.
    offsets = gap * np.arange(len(places))
    pools: list[list[float]] = []
    for target in np.asarray(places, float) - offsets:
        pools.append([target])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return offsets + [np.mean(pool) for pool in pools for _ in pool]


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file, in a folder that is made if need be.

    Args:
        figure: The figure.
        path: The file.
    """
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=130)
