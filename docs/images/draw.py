"""Draws the pictures of the explanation pages, with fixed seeds.

python docs/images/draw.py                # All of them.
python docs/images/draw.py tradeoff house
"""

import configparser
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

import keras
import matplotlib as mpl
import numpy as np
import tensorflow as tf
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import tfdp
from tfdp.accounting import Ledger, PoissonSteps, ShuffledPasses, UnamplifiedSteps
from tfdp.sampling import (
    BallsInBins,
    CyclicPoisson,
    Poisson,
    PoissonUsers,
    Scheme,
    Shuffled,
    TruncatedPoisson,
)

FOLDER = Path(__file__).resolve().parent
BLUE, GREY, GREEN = "#1f5fa8", "#7a7a7a", "#2a8f5b"
ORANGE, PURPLE, RED = "#d9822b", "#7b4fa3", "#b5483a"
# Ways of drawing batches: Poisson is what tfdp does by itself.
SCHEMES = {
    "Poisson": BLUE,
    "bounded Poisson": "#5b93cf",
    "Poisson, users": PURPLE,
    "cyclic Poisson": ORANGE,
    "balls-in-bins": GREEN,
    "bins in files": "#6b8f2a",
    "shuffled": "#a0682a",
    "unknown": "#222222",
}
mpl.rcParams.update({
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "svg.hashsalt": "tfdp",
})


def save(figure: plt.Figure, name: str) -> None:
    """Write a figure as SVG, without the date."""
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def tradeoff() -> None:
    """What an attacker can do: chance of a hit over chance of a false alarm."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    alarms = np.linspace(0, 1, 400)
    delta = 1e-5
    for epsilon, shade in [(0.5, 0.45), (1, 0.6), (2, 0.8), (4, 1.0)]:
        hits = most_hits(alarms, [(epsilon, delta)])
        left.plot(100 * alarms, 100 * hits, color=plt.cm.Blues(shade))
        corner = 100 / (1 + np.exp(epsilon))
        left.annotate(
            f"$\\varepsilon$ = {epsilon:g}",
            (corner, 100 - corner),
            xytext=(5, -13),
            textcoords="offset points",
            color=plt.cm.Blues(shade),
        )
    left.plot([0, 100], [0, 100], color=GREY, linestyle=":")
    left.text(62, 55, "guessing", color=GREY, rotation=38)
    left.set(
        title=f"what one pair allows, $\\delta$ = {delta:g}",
        xlabel="false alarms (% of those who were not in the data)",
        ylabel="hits (% of those who were)",
    )
    ledger = Ledger().add(PoissonSteps(180, 3.486144, 1437, 256))
    pair = [(ledger.epsilon(delta), delta)]
    deltas = np.concatenate([np.geomspace(1e-10, 0.1, 28), np.linspace(0.12, 0.6, 13)])
    pairs = [(ledger.epsilon(float(each)), float(each)) for each in deltas]
    for all_pairs, color, label, place in [
        (pair, GREY, f"the pair ({pair[0][0]:.2f}, {delta:g}) alone", (13, 93)),
        (pairs, BLUE, "the same training,\nby all its pairs", (8, 86)),
    ]:
        hits = most_hits(alarms, all_pairs)
        right.plot(100 * alarms, 100 * hits, color=color)
        right.text(*place, label, color=color, va="top")
        print(label, [f"{np.interp(a, alarms, hits):.3f}" for a in (0.01, 0.05, 0.1)])
    right.plot([0, 100], [0, 100], color=GREY, linestyle=":")
    right.set(
        title="one training, $\\varepsilon$ = 3",
        xlabel="false alarms (%)",
        ylabel="hits (%)",
    )
    for axes in (left, right):
        axes.set(xlim=(0, 100), ylim=(0, 100), aspect="equal")
    save(figure, "tradeoff")


def most_hits(alarms: np.ndarray, pairs: list[tuple[float, float]]) -> np.ndarray:
    """Bound the chance of a hit by all pairs of epsilon and delta."""
    most = np.ones_like(alarms)
    for epsilon, delta in pairs:
        most = np.minimum(most, np.exp(epsilon) * alarms + delta)
        most = np.minimum(most, 1 - np.exp(-epsilon) * (1 - alarms - delta))
    return np.clip(most, 0, 1)


def sampling() -> None:
    """Which rows are in which batch."""
    rows, size, steps = 24, 6, 12
    bound = 8
    poisson = draws(Poisson(rows, size), steps)
    bounded = draws(TruncatedPoisson(rows, size, max_batch_size=bound), steps)
    # In the picture a part is a block of rows.
    cyclic = [
        np.sort(batch % 2 * rows // 2 + batch // 2)
        for batch in draws(CyclicPoisson(rows, size), steps)
    ]
    owners = np.repeat(np.arange(8), [1, 5, 2, 3, 1, 6, 2, 4])
    of_users = draws(PoissonUsers(8, 2, examples_per_user=6), steps)
    bins = draws(BallsInBins(rows, size), steps)
    drawn = {
        "Poisson": poisson,
        "bounded Poisson": bounded,
        "Poisson, users": [np.flatnonzero(np.isin(owners, each)) for each in of_users],
        "cyclic Poisson": cyclic,
        "balls-in-bins": bins,
        "bins in files": 3 * bins[:4],
        "shuffled": draws(Shuffled(rows, size), steps),
        "unknown": [range(0)] * steps,
    }
    figure, both = plt.subplots(2, 4, figsize=(14.0, 8.0), layout="constrained")
    for axes, (name, batches) in zip(both.flat, drawn.items(), strict=True):
        for step, batch in enumerate(batches, 1):
            axes.plot([step] * len(batch), batch, "s", color=SCHEMES[name], ms=5)
            if name != "unknown":
                axes.text(step, 24.6, len(batch), ha="center", color=GREY, size=8)
        axes.set(
            xlabel="step",
            xlim=(0.3, steps + 0.7),
            ylim=(26.6, -0.7),
            title=name,
            yticks=[0, 5, 10, 15, 20],
            xticks=[1, 4, 8, 12],
        )
        if name in {"balls-in-bins", "bins in files", "shuffled"}:
            for end in (4.5, 8.5):
                axes.axvline(end, color=GREY, linewidth=0.8, linestyle=":")
            for number in range(3):
                axes.text(2.5 + 4 * number, 26.1, f"pass {number + 1}", ha="center")
    first, second, third, fourth = both[0]
    for step, (whole, kept) in enumerate(zip(poisson, bounded, strict=True), 1):
        cut = np.setdiff1d(whole, kept)
        color = SCHEMES["bounded Poisson"]
        second.plot([step] * len(cut), cut, "s", color=color, mfc="white", ms=5)
    second.text(6.5, 26.1, f"hollow: cut, as {bound} is the bound", ha="center")
    first.text(6.5, 26.1, "by a coin for each row and step", ha="center")
    for end in np.flatnonzero(np.diff(owners)) + 0.5:
        third.axhline(end, color=GREY, linewidth=0.6)
    third.text(6.5, 26.1, "all rows of a user between two lines", ha="center")
    fourth.axhline(11.5, color=GREY, linewidth=0.6)
    fourth.text(6.5, 26.1, "from one part, then from the other", ha="center")
    unknown = both[1, 3]
    unknown.axhspan(9.5, 10.5, color=SCHEMES["unknown"], alpha=0.8)
    unknown.text(6.5, 8.9, "a row may be in every batch", ha="center", va="bottom")
    for axes in both[:, 0]:
        axes.set_ylabel("row")
    save(figure, "sampling")


def draws(scheme: Scheme, steps: int) -> list[np.ndarray]:
    """Draw some batches, in passes of four."""
    return [scheme.draw(5, *divmod(step, 4)) for step in range(steps)]


def epsilon_of_sampling() -> None:
    """Epsilon over the steps for each way of drawing batches."""
    n, batch_size, z, delta = 60_000, 256, 1.1, 1e-5
    per_pass = -(-n // batch_size)
    epochs = np.array([1, 2, 3, 4, 6, 8, 10, 14, 20, 26, 34, 42, 51, 60])
    figure, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    made = {
        "Poisson": lambda e: PoissonSteps(e * per_pass, z, n, batch_size),
        "shuffled": lambda e: ShuffledPasses(e, z, n, batch_size),
        "unknown": lambda e: UnamplifiedSteps(e * per_pass, z),
    }
    for name, make in made.items():
        curve = [Ledger().add(make(int(each))).epsilon(delta) for each in epochs]
        axes.semilogy(epochs, curve, color=SCHEMES[name])
        axes.annotate(
            f"{name}: {curve[-1]:,.3g}"
            if curve[-1] < 1000
            else f"{name}: {curve[-1]:,.0f}",
            (60, curve[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=SCHEMES[name],
            annotation_clip=False,
        )
    axes.set(
        xlabel=f"epochs ({per_pass} steps each)",
        ylabel=f"$\\varepsilon$ at $\\delta$ = {delta:g}",
        xticks=[1, 10, 20, 30, 40, 50, 60],
        xlim=(1, 60),
    )
    save(figure, "epsilon_of_sampling")


def bias() -> None:
    """Three gradients, their clipped ones, and the two means."""
    gradients = np.array([[2.6, 0.5], [0.35, 0.75], [-0.2, 0.9]])
    lengths = np.linalg.norm(gradients, axis=1)
    clipped = gradients * np.minimum(1, 1 / lengths)[:, None]
    g, g_clip = gradients.mean(0), clipped.mean(0)
    a = g_clip @ g / (g @ g)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.5, 3.9), layout="constrained", width_ratios=[1.25, 1]
    )
    circle = np.linspace(0, 2 * np.pi, 200)
    left.plot(np.cos(circle), np.sin(circle), color=GREY, linewidth=0.8)
    left.text(-0.8, -0.85, "length C", color=GREY, ha="right")
    for before, after in zip(gradients, clipped, strict=True):
        arrow(left, before, GREY, 1.2, linestyle=":")
        arrow(left, after, BLUE, 1.6)
    left.text(2.45, 0.66, "long: cut to C", color=GREY, ha="right")
    left.text(0.45, 1.0, "short: kept", color=BLUE)
    left.set(title="gradients of three examples", xlim=(-1.4, 2.8), ylim=(-1.1, 1.5))
    for vector, color, label, place in [
        (g, GREY, "$g$, the mean of the gradients", (0.63, 0.41)),
        (g_clip, BLUE, "$g_C$, of the clipped ones", (-0.06, 0.68)),
    ]:
        arrow(right, vector, color, 2)
        right.text(*place, label, color=color)
    arrow(right, a * g, "black", 1.2)
    right.text(*(a * g + [0.03, -0.11]), "$a\\,g$")
    right.annotate("", g_clip, a * g, arrowprops={"arrowstyle": "->", "color": "black"})
    right.text(*((a * g + g_clip) / 2 + [0.03, 0.02]), "$c$")
    right.annotate(
        "", g_clip, g, arrowprops={"arrowstyle": "->", "color": RED, "linewidth": 1.6}
    )
    right.text(*((g + g_clip) / 2 + [0.02, 0.08]), "bias $g_C - g$", color=RED)
    right.set(title="their means", xlim=(-0.1, 1.4), ylim=(-0.1, 0.85))
    for axes in (left, right):
        axes.set(aspect="equal", xlabel="first weight", ylabel="second weight")
    print(f"a = {a:.2f}, |c| = {np.linalg.norm(g_clip - a * g):.2f}")
    save(figure, "bias")


def arrow(axes: plt.Axes, to: np.ndarray, color: str, width: float, **kw: str) -> None:
    """Draw a vector from zero."""
    style = {"arrowstyle": "-|>", "color": color, "linewidth": width, **kw}
    axes.annotate("", to, (0, 0), arrowprops={**style, "shrinkA": 0, "shrinkB": 0})


def bias_and_noise() -> None:
    """Bias and noise over clip norms, on scikit-learn's digits."""
    x, y = load_digits(return_X_y=True)
    x = tf.constant(x.astype("float32") / 16)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.Input((64,)),
        keras.layers.Dense(64, activation="tanh"),
        keras.layers.Dense(10, activation="softmax"),
    ])
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.Adam(0.01), loss)
    model.fit(x, y, batch_size=256, epochs=2, verbose=0)

    def mean(clip: float) -> np.ndarray:
        sums = tfdp.clipped_gradients(model, loss, x, tf.constant(y), l2_norm_clip=clip)
        return np.concatenate([np.ravel(g) for g in sums.gradients]) / len(x)

    g, clips = mean(1e6), np.geomspace(0.01, 20, 30)
    length = np.linalg.norm(g)
    means = [mean(float(clip)) for clip in clips]
    along = np.array([m @ g / (g @ g) for m in means])
    across = np.array([
        np.linalg.norm(m - a * g) for m, a in zip(means, along, strict=True)
    ])
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    size = np.array([np.linalg.norm(m - g) for m in means])
    keep = size > 1e-5
    left.loglog(clips[keep], size[keep], color=RED)
    left.text(0.012, size[0] * 1.15, "bias", color=RED)
    for batch in (256, 1024):
        noise = 1.0 * clips * model.count_params() ** 0.5 / batch
        left.loglog(clips, noise, color="black", linestyle="--", linewidth=1)
        left.annotate(
            f"noise,\nB = {batch}",
            (clips[-1], noise[-1]),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )
    left.axhline(length, color=GREY, linewidth=0.8, linestyle=":")
    left.text(20, length * 0.72, "$\\|g\\|$", color=GREY, ha="right")
    left.set(xlabel="clip norm C", ylabel="length", ylim=(1e-3, 10))
    right.semilogx(clips, along, color="black")
    right.semilogx(clips, across / length, color="black", linestyle="--")
    right.text(clips[22], along[22] + 0.02, "$a$ ", ha="right")
    right.text(clips[16], across[16] / length + 0.05, "$\\|c\\| / \\|g\\|$", ha="right")
    right.set(xlabel="clip norm C", ylim=(0, 1.05), ylabel="parts of the bias")
    print(f"|g| = {length:.2f}, weights {model.count_params()}")
    save(figure, "bias_and_noise")


def engines() -> None:
    """Times of the engines: the table of the page on costs."""
    models = ["MLP", "CNN", "ResNet-9", "Transformer", "LSTM"]
    times = {
        "book-keeping": (BLUE, [1.48, 1.43, 1.29, 1.17, 1.54]),
        "ghost (Gram)": (GREEN, [1.73, 2.73, 2.93, 1.81, 2.10]),
        "vectorized": (ORANGE, [17.8, 1.70, 1.44, 1.23, 5.32]),
    }
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for number, (name, (color, values)) in enumerate(times.items()):
        places = np.arange(len(models)) + 0.27 * (number - 1)
        bars = axes.bar(places, values, 0.25, color=color)
        axes.bar_label(bars, [f"{value:.2g}" for value in values], size=8)
        axes.text(4.65, 16 / 1.45**number, name, color=color)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    axes.text(4.65, 1, "ordinary step", color=GREY, va="center")
    axes.set(yscale="log", ylim=(0.8, 25), ylabel="time of an ordinary step")
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_xticks(range(len(models)), models)
    save(figure, "engines")


def tails() -> None:
    """How far noise reaches: of float32 as usual, and of tfdp."""
    sigmas = np.linspace(3, 8, 300)
    figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    density = np.array([float(tf.math.erfc(s / 2**0.5)) for s in sigmas.astype("f8")])
    axes.semilogy(sigmas, density, color="black", linewidth=1)
    for end, color, label in [
        (5.65, GREY, "Box and Muller on\nfloat32 uniforms\nends at 5.65"),
        (7.35, BLUE, "tfdp\nends at 7.35"),
    ]:
        axes.axvline(end, color=color)
        axes.text(end - 0.06, 2e-3, label, color=color, ha="right", va="top")
    axes.set(
        xlabel="standard deviations",
        ylabel="chance of a number beyond that",
        xlim=(3, 8),
        ylim=(1e-15, 1e-2),
    )
    save(figure, "tails")


def layers() -> list[list[str]]:
    """Read the rows of the house, from the top down, where `lint-imports` has them."""
    config = configparser.ConfigParser()
    config.read(FOLDER.parents[1] / "setup.cfg")
    lines = config["importlinter:contract:layers"]["layers"].split("\n")
    rows = [re.findall(r"[a-z]\w*|_\w+", line) for line in lines if line]
    public = [[name for name in row if not name.startswith("_")] for row in rows]
    found = [row for row in public if row and row != ["errors"]]
    return [*found, ["errors, _validate, _keras, ..."]]


# What stands beside the rows of the house that have one of these.
NOTES = {
    "export": "nothing else knows these",
    "callbacks": "act inside the steps; repair models",
    "model": "DPModel: what people use",
    "reports": "what is published about a model",
    "training": "a step, and what fit does around it",
    "distribute": "shares of a batch, one noise for all replicas",
    "optimizers": "the clip norm; rows and batches",
    "mechanisms": "the noise",
    "validation": "is this model fit for it?",
    "checks": "proofs that rows do not meet",
    "engines": "clipped sums of a pass",
    "runs": "what was run, and what budgets leave",
    "rules": "factors of gradients; the loss of each example",
    "models": "networks to begin with",
    "layers": "layers that Keras lacks",
    "clipping": "norms rounded up, the clipped sum",
    "ascent": "BAM and SAT",
    "accounting": "what it costs: no TensorFlow",
    "sampling": "how batches are drawn: no TensorFlow",
}
PLAIN = {"accounting", "sampling"}
NOUNS = {"sampling": "scheme", "mechanisms": "mechanism", "training": "session"}


def house() -> None:
    """The folders, each of which imports from below only."""
    width, height, top, left = 860, 40, 34, 20
    rows = layers()
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 '
        f'{width} {top + height * len(rows) + 14}" font-family="sans-serif" '
        'font-size="14">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="20" y="20" font-size="13" fill="#555">Each row imports from rows '
        "below it, never from one above</text>",
    ]
    for row, names in enumerate(rows):
        y = top + row * height
        box = (500 - 8 * (len(names) - 1)) / len(names)
        for number, name in enumerate(names):
            x = left + number * (box + 8)
            fill = "#e3efe8" if name in PLAIN else "#e4edf7"
            edge = GREEN if name in PLAIN else BLUE
            noun = NOUNS.get(name)
            lines.append(
                f'<rect x="{x:.0f}" y="{y}" width="{box:.0f}" height="{height - 8}" '
                f'rx="4" fill="{fill}" stroke="{edge}" '
                f'stroke-width="{2.5 if noun else 1}"/>'
            )
            label = f"{name}: {noun}" if noun else name
            lines.append(
                f'<text x="{x + box / 2:.0f}" y="{y + 21}" text-anchor="middle" '
                f'fill="#111">{escape(label)}</text>'
            )
        note = next((NOTES[name] for name in names if name in NOTES), "")
        lines.append(
            f'<text x="535" y="{y + 21}" font-size="12.5" fill="#555">'
            f"{escape(note)}</text>"
        )
    lines.append("</svg>\n")
    (FOLDER / "house.svg").write_text("\n".join(lines), encoding="utf-8")


# A step: what is done, and what of it may leave.
STEPS = [
    ("rows", "x, y", GREY),
    ("draw", "scheme", BLUE),
    ("passes", "engine", BLUE),
    ("clipped sum", "and its C", BLUE),
    ("count", "ledger", BLUE),
    ("noise", "mechanism", BLUE),
    ("divide, update", "inner optimizer", GREEN),
]


def step() -> None:
    """A step from rows to noise."""
    box, gap, y = 104, 18, 34
    width = len(STEPS) * (box + gap) + 22
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 130" '
        'font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (what, who, color) in enumerate(STEPS):
        x = 20 + number * (box + gap)
        if number:
            lines.append(
                f'<path d="M{x - gap + 2} {y + 26} h{gap - 8}" stroke="#333"/>'
                f'<path d="M{x - 7} {y + 22} l6 4 l-6 4 z" fill="#333"/>'
            )
        lines.append(
            f'<rect x="{x}" y="{y}" width="{box}" height="52" rx="4" fill="white" '
            f'stroke="{color}" stroke-width="1.5"/>'
            f'<text x="{x + box / 2}" y="{y + 22}" text-anchor="middle" fill="#111">'
            f"{what}</text>"
            f'<text x="{x + box / 2}" y="{y + 41}" text-anchor="middle" '
            f'font-size="12" fill="#555">{who}</text>'
        )
    private = 20 + 6 * (box + gap) - gap / 2
    lines += [
        f'<path d="M{private} 14 v100" stroke="{RED}" stroke-dasharray="4 3"/>',
        f'<text x="{private - 8}" y="112" text-anchor="end" font-size="12" '
        f'fill="{RED}">secret, like the data</text>',
        f'<text x="{private + 8}" y="112" font-size="12" fill="{GREEN}">covered</text>',
        "</svg>\n",
    ]
    (FOLDER / "step.svg").write_text("\n".join(lines), encoding="utf-8")


def factors() -> None:
    """The gradient of a dense layer, and its two Gram matrices."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 230" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]

    def matrix(
        place: tuple[int, int], size: tuple[int, int], color: str, name: str, shape: str
    ) -> None:
        (x, y), (width, height) = place, size
        lines.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}" '
            f'fill-opacity="0.2" stroke="{color}"/>'
            f'<text x="{x + width / 2}" y="{y + height / 2 + 5}" text-anchor="middle" '
            f'font-size="15">{name}</text>'
            f'<text x="{x + width / 2}" y="{y + height + 17}" text-anchor="middle" '
            f'font-size="12" fill="#555">{shape}</text>'
        )

    def text(x: int, y: int, what: str, size: int = 13, fill: str = "#111") -> None:
        lines.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}">{what}</text>'
        )

    text(20, 24, "What one backward pass gives, for each example", fill="#555")
    matrix((30, 60), (110, 40), GREY, "A", "T positions x d inputs")
    matrix((190, 60), (90, 40), GREY, "G", "T x p outputs")
    text(355, 24, "Gram: two small products", fill=GREEN)
    matrix((365, 60), (44, 44), GREEN, "AAᵀ", "T x T")
    text(419, 88, "*", 18)
    matrix((437, 60), (44, 44), GREEN, "GGᵀ", "T x T")
    text(355, 150, "sum of all entries = squared norm", 12, GREEN)
    text(575, 24, "Instantiated: the gradient itself", fill=ORANGE)
    matrix((605, 50), (90, 110), ORANGE, "AᵀG", "d x p")
    text(575, 204, "sum of squares = squared norm", 12, ORANGE)
    lines.append("</svg>\n")
    (FOLDER / "factors.svg").write_text("\n".join(lines), encoding="utf-8")


PICTURES = {
    each.__name__: each
    for each in (
        tradeoff,
        sampling,
        epsilon_of_sampling,
        bias,
        bias_and_noise,
        engines,
        tails,
        house,
        step,
        factors,
    )
}


if __name__ == "__main__":
    for picture in sys.argv[1:] or PICTURES:
        PICTURES[picture]()
