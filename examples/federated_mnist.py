"""Compare clip sizes for federated learning under local differential privacy.

Ten million virtual clients with five images of MNIST each; a thousand take part in a
round, once in their lives. Each clips the gradient of its images to C and adds noise
of 1.404 C itself, for epsilon 8 at delta 1e-7 against everybody, the server included:

    python examples/federated_mnist.py
    python examples/federated_mnist.py --runs=fixed-0.05 --runs=switch-0.2 --rounds=1000
    python examples/federated_mnist.py --full --data_dir=path/to/folder/with/mnist.npz

The default is a hundred rounds of every run. --full has 10,000 rounds and five trials of
each, which are days on two cores, and goes on where it was stopped; --noresume begins
all that is asked for anew. Without --data_dir
(or the environment variable TFDP_DATA) Keras downloads the images.

Runs: `fixed-C` keeps C. `switch-s` begins with 0.05 and takes 0.01 after a share s of
the rounds. `polynomial-C-p` decays like C (1 - t/T)^p. `quantile-q` begins with 0.01
and moves C in every round so that a share q of the gradients is not clipped.
`median-C` begins with C and takes the median of the norms ten times, from a histogram.
The last two need an aggregator that is trusted with exact norms. `without-privacy`
neither clips nor noises.
"""

import os

# Convolutions take half of the time with it; TensorFlow leaves it off on some CPUs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import plots
from absl import app, flags
from keras import layers
from matplotlib.ticker import NullFormatter

import tfdp
from tfdp.callbacks import AdaptiveMedianClip, AdaptiveQuantileClip, ClipNormScheduler

EPSILON, DELTA = 8.0, 1e-7
CLIENTS, CLIENTS_PER_ROUND, EXAMPLES_PER_CLIENT = 10_000_000, 1000, 5
# Of each histogram; the edges are known beforehand.
MEDIAN_EPSILON, MEDIAN_DELTA = 0.8, 1e-8
MEDIAN_EDGES = (0, 2**-7, 2**-6, 2**-5, 2**-4, 2**-3)
BASELINE = "without-privacy"
# Of the server; C scales the steps of private runs besides.
LEARNING_RATE, BASELINE_LEARNING_RATE = 1.0, 0.1


class Run(NamedTuple):
    """A way to choose C.

    Attributes:
        clip: The first C.
        policy: Makes what changes C, from the number of rounds.
    """

    clip: float
    policy: Callable[[int], Any] = lambda rounds: None


def switched(share: float) -> Run:
    """Begin with 0.05, and take 0.01 after a share of the rounds."""
    return Run(
        0.05,
        lambda rounds: ClipNormScheduler(
            keras.optimizers.schedules.PiecewiseConstantDecay(
                # The last round with the first value.
                [round(share * rounds) - 1],
                [0.05, 0.01],
            )
        ),
    )


def polynomial(clip: float, power: float) -> Run:
    """Let C decay to 0, which it would reach in the first round that is not run."""
    return Run(
        clip,
        lambda rounds: ClipNormScheduler(
            keras.optimizers.schedules.PolynomialDecay(
                clip, decay_steps=rounds, end_learning_rate=0.0, power=power
            )
        ),
    )


def quantile(share: float) -> Run:
    """Move C from 0.01 towards a quantile of the norms, by a noised count."""
    return Run(0.01, lambda rounds: AdaptiveQuantileClip(share))


def median(clip: float) -> Run:
    """Set C to the median of the norms ten times, by a noised histogram."""
    noise = tfdp.accounting.calibrate_gaussian(MEDIAN_EPSILON, MEDIAN_DELTA)
    return Run(
        clip,
        lambda rounds: AdaptiveMedianClip(
            MEDIAN_EDGES,
            histogram_noise_multiplier=noise,
            every=max(1, rounds // 10),
        ),
    )


# By the figure that shows them.
FIGURES = {
    "fixed": {f"fixed-{c:g}": Run(c) for c in (0.01, 0.05, 0.1, 0.5, 1.0)},
    "scheduled": {
        **{f"switch-{share:g}": switched(share) for share in (0.2, 0.6)},
        **{
            f"polynomial-{c:g}-{power:g}": polynomial(c, power)
            for c in (0.01, 0.05)
            for power in (0.5, 1.0, 2.0)
        },
    },
    "adaptive": {
        **{f"quantile-{share:g}": quantile(share) for share in (0.1, 0.5)},
        **{f"median-{c:g}": median(c) for c in (0.01, 0.05)},
    },
}
# Clips nothing.
RUNS = {BASELINE: Run(1e6)} | {
    name: run for runs in FIGURES.values() for name, run in runs.items()
}

_RUNS = flags.DEFINE_multi_enum(
    "runs", list(RUNS), list(RUNS), "A run; may be repeated."
)
_FULL = flags.DEFINE_bool(
    "full", False, "Full size: 10,000 rounds, five trials, the larger network."
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", None, "Rounds of each run. Default: 100.", lower_bound=10
)
_TRIALS = flags.DEFINE_integer(
    "trials", None, "Trials of each run. Default: 1.", lower_bound=1
)
_NETWORK = flags.DEFINE_enum(
    "network",
    None,
    ["compact", "large"],
    "9,594 or 26,010 parameters. Default: compact.",
)
_EVALUATE_EVERY = flags.DEFINE_integer(
    "evaluate_every",
    None,
    "Default: 20 times in a run. Each tenth of the rounds is evaluated, too.",
    lower_bound=1,
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with mnist.npz. Default: the environment variable TFDP_DATA; without it "
    "Keras downloads the file.",
)
_RESUME = flags.DEFINE_bool(
    "resume", True, "Go on with the runs in the folder, from their last states."
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/federated_mnist", "Folder for plots, histories and states."
)


class Size(NamedTuple):
    """How much to run."""

    rounds: int
    trials: int
    network: str
    evaluate_every: int


class Result(NamedTuple):
    """What a trial leaves: entries of the history, and norms by the round they are of."""

    history: dict[str, list[float]]
    norms: dict[int, np.ndarray]
    statement: str


def main(argv: Sequence[str]) -> None:
    """Run what was asked for and compare."""
    if len(argv) > 1:
        sys.exit(
            f"federated_mnist: everything is a flag. Received: {' '.join(argv[1:])}."
        )
    size = chosen_size()
    data = load_mnist(_DATA_DIR.value)
    output = Path(_OUTPUT_DIR.value)
    noise_multiplier = tfdp.federated.calibrate_local_noise_multiplier(
        EPSILON, delta=DELTA
    )
    print(f"Noise multiplier {noise_multiplier:g}: epsilon {EPSILON:g} at {DELTA:g}")
    results: dict[str, list[Result]] = {}
    for name in dict.fromkeys(_RUNS.value):
        for trial in range(size.trials):
            print(f"\n{name}, trial {trial}", flush=True)
            folder = output / f"{size.network}-{size.rounds}" / name / str(trial)
            if folder.exists() and not _RESUME.value:
                shutil.rmtree(folder)
            try:
                result = train(name, trial, size, data, noise_multiplier, folder)
            except ValueError as error:
                sys.exit(f"federated_mnist: {error}")
            results.setdefault(name, []).append(result)
    output.mkdir(parents=True, exist_ok=True)
    for figure, runs in FIGURES.items():
        if results.keys() & runs.keys():
            names = dict.fromkeys((BASELINE, *FIGURES["fixed"], *runs))
            shown = {name: results[name] for name in names if name in results}
            plot_runs(shown, output / f"{figure}.png")
    plot_norms(results, noise_multiplier, size.network, output / "norms.png")
    plot_histograms(results, noise_multiplier, size.network, output / "histograms.png")
    report(results, output)


def chosen_size() -> Size:
    """Return how much to run, by the flags."""
    rounds, trials, network = (
        (10_000, 5, "large") if _FULL.value else (100, 1, "compact")
    )
    rounds = _ROUNDS.value or rounds
    return Size(
        rounds,
        _TRIALS.value or trials,
        _NETWORK.value or network,
        _EVALUATE_EVERY.value or max(1, rounds // 20),
    )


def train(
    name: str,
    trial: int,
    size: Size,
    data: tuple[Any, Any],
    noise_multiplier: float,
    folder: Path,
) -> Result:
    """Run a trial, or what is left of it."""
    run, (train_data, test_data) = RUNS[name], data
    keras.utils.set_random_seed(trial)
    is_private = name != BASELINE
    simulation = tfdp.federated.Simulation(
        build_model(size.network),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        *train_data,
        clients=tfdp.federated.VirtualClients(
            CLIENTS, CLIENTS_PER_ROUND, EXAMPLES_PER_CLIENT, seed=trial
        ),
        optimizer=keras.optimizers.SGD(
            LEARNING_RATE if is_private else BASELINE_LEARNING_RATE
        ),
        l2_norm_clip=run.clip,
        noise_multiplier=noise_multiplier if is_private else 0.0,
        clip_policy=run.policy(size.rounds),
        metrics=["accuracy"],
    )
    norms = {}
    # The median is released as often.
    ends = [round(size.rounds * tenth / 10) for tenth in range(1, 11)]
    for end in ends:
        history = simulation.run(
            end,
            validation_data=test_data,
            evaluate_every=size.evaluate_every,
            directory=folder,
        )
        path = folder / f"norms_{end}.npy"
        # A run that goes on may be past this round already.
        if simulation.rounds == end:
            # Killed here, a run leaves no half of a file.
            unfinished = path.with_name("unfinished.npy")
            np.save(unfinished, simulation.nonprivate_norms)
            unfinished.replace(path)
        if path.exists():
            norms[end] = np.load(path)
    # A run that was stopped and went on has a look more, which others have not.
    looks = [
        place
        for place, end in enumerate(history["round"])
        if end in ends or end % size.evaluate_every == 0
    ]
    history = {key: [each[place] for place in looks] for key, each in history.items()}
    return Result(history, norms, simulation.privacy_statement(DELTA))


def load_mnist(data_dir: str | None) -> tuple[Any, Any]:
    """Load (images, labels) for training and test."""
    data_dir = data_dir or os.environ.get("TFDP_DATA")
    if data_dir is None:
        (x, y), (x_test, y_test) = keras.datasets.mnist.load_data()
    else:
        path = Path(data_dir) / "mnist.npz"
        if not path.is_file():
            sys.exit(
                f"federated_mnist: there is no {path}. Give the folder of mnist.npz "
                "with --data_dir or TFDP_DATA, or neither to let Keras download it."
            )
        with np.load(path) as arrays:
            x, y = arrays["x_train"], arrays["y_train"]
            x_test, y_test = arrays["x_test"], arrays["y_test"]
    return (_scaled(x), y), (_scaled(x_test), y_test)


def _scaled(images: np.ndarray) -> np.ndarray:
    # Mean and standard deviation of MNIST's pixels, which have long been published. Of
    # data that are private such statistics would have to be noised, or guessed.
    return (images[..., np.newaxis].astype("float32") / 255 - 0.1307) / 0.3081


def build_model(network: str) -> keras.Model:
    """Build one of the networks, which return logits."""
    if network == "compact":
        return keras.Sequential([
            keras.Input((28, 28, 1)),
            layers.ZeroPadding2D(2),
            layers.Conv2D(16, 8, strides=2),
            # The greatest of what is positive is what is positive of the greatest, and
            # there are four times fewer of them.
            layers.MaxPooling2D(2),
            layers.ReLU(),
            layers.Conv2D(32, 4, strides=2),
            layers.MaxPooling2D(2),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(10),
        ])
    return keras.Sequential([
        keras.Input((28, 28, 1)),
        layers.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
        layers.MaxPooling2D(2, strides=1),
        layers.Conv2D(32, 4, strides=2, activation="relu"),
        layers.MaxPooling2D(2, strides=1),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
        layers.Dense(10),
    ])


def colors() -> dict[str, Any]:
    """Return a colour for each run; what is alike but for one number has shades."""
    fixed = dict(zip(FIGURES["fixed"], plots.shades(5), strict=True))
    others = {
        name: plots.COLORS[name.partition("-")[0]]
        for name in (FIGURES["scheduled"] | FIGURES["adaptive"])
    }
    return {BASELINE: plots.WITHOUT_PRIVACY, **fixed, **others}


def style_of(name: str) -> dict[str, Any]:
    """Return how a run is drawn beside others of its colour."""
    dashed = name.startswith((
        "switch-0.2",
        "polynomial-0.01",
        "quantile-0.1",
        "median-0.01",
    ))
    thin = {"0.5": 0.8, "1": 1.4}.get(name.rpartition("-")[2], 2.0)
    return {
        "linestyle": "--" if dashed else "-",
        "linewidth": thin if name.startswith("polynomial") else 1.6,
    }


def plot_runs(results: dict[str, list[Result]], path: Path) -> None:
    """Plot accuracy, loss and C over the rounds, means over the trials."""
    if not results:
        return
    figure, [[accuracy], [loss], [clip]] = plots.panels(
        3, 1, size=(7.5, 3.0), sharex=True
    )
    for name, trials in results.items():
        for axes, key in (
            (accuracy, "val_accuracy"),
            (loss, "val_loss"),
            (clip, "l2_norm_clip"),
        ):
            if key == "l2_norm_clip" and name == BASELINE:
                continue
            factor = 100 if key == "val_accuracy" else 1
            values = [factor * np.array(trial.history[key]) for trial in trials]
            rounds = trials[0].history["round"]
            plots.curve(axes, rounds, values, name, colors()[name], **style_of(name))
    accuracy.set(ylabel="test accuracy, %")
    loss.set(ylabel="test loss, nats", yscale="log")
    clip.set(xlabel="round", ylabel="clip norm C", yscale="log")
    figure.suptitle(f"MNIST, local privacy: epsilon {EPSILON:g} at delta {DELTA:g}")
    # Some losses grow without end.
    loss.set_ylim(top=min(10.0, loss.get_ylim()[1]))
    for axes in (accuracy, loss, clip):
        plots.name_curves(axes)
    plots.save(figure, path)


def plot_norms(
    results: dict[str, list[Result]], noise_multiplier: float, network: str, path: Path
) -> None:
    """Plot norms of clients' gradients: raw and noised, with and without privacy."""
    dimension = build_model(network).count_params()
    figure, [(raw, noised), (means, noised_means)] = plots.panels(2, 2, size=(5.4, 3.6))
    for name, trials in results.items():
        color, last = colors()[name], trials[0]
        rounds, clips = last.history["round"], np.array(last.history["l2_norm_clip"])
        style = {"bins": 50, "histtype": "step", "color": color, "label": name}
        of_end = last.norms[max(last.norms)]
        if name == BASELINE or name in FIGURES["fixed"]:
            raw.hist(of_end[np.isfinite(of_end)], **style)
            norms = last.history["nonprivate_mean_norm"]
            plots.curve(means, rounds, norms, name, color)
        if name in FIGURES["fixed"]:
            noised.hist(
                noised_norms(of_end, clips[-1], noise_multiplier, dimension),
                **style,
            )
        if name in FIGURES["fixed"] | FIGURES["scheduled"]:
            # What clients send is nearly all noise.
            expected = clips * noise_multiplier * math.sqrt(dimension)
            plots.curve(noised_means, rounds, expected, name, color, **style_of(name))
    for axes, title in (
        (raw, "last round, before clipping"),
        (noised, "last round, replies with noise"),
    ):
        axes.set(title=title, xlabel="norm of a client's gradient", ylabel="clients")
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    raw.set_yscale("log")
    noised.set_xscale("log")
    noised.xaxis.set_minor_formatter(NullFormatter())
    means.set(title="mean before clipping (not private)")
    noised_means.set(title="mean of the replies with noise")
    for axes in (means, noised_means):
        axes.set(xlabel="round", ylabel="norm of a client's gradient", yscale="log")
        plots.name_curves(axes)
    plots.save(figure, path)


def plot_histograms(
    results: dict[str, list[Result]], noise_multiplier: float, network: str, path: Path
) -> None:
    """Plot how norms are distributed over the training: a row for each private run."""
    results = {name: trials for name, trials in results.items() if name != BASELINE}
    if not results:
        return
    dimension = build_model(network).count_params()
    figure, rows = plots.panels(len(results), 2, size=(5.4, 2.4))
    for (raw, noised), (name, trials) in zip(rows, results.items(), strict=True):
        last = trials[-1]
        clips = dict(
            zip(last.history["round"], last.history["l2_norm_clip"], strict=True)
        )
        for (end, norms), color in zip(
            last.norms.items(), plots.shades(len(last.norms)), strict=True
        ):
            style = {"bins": 50, "histtype": "step", "color": color}
            replies = noised_norms(norms, clips[end], noise_multiplier, dimension)
            for axes, values in ((raw, norms), (noised, replies)):
                seen = values[np.isfinite(values) & (values > 0)]
                axes.hist(np.log10(seen), **style)
        raw.set(title=f"{name}, before clipping", ylabel="clients")
        noised.set(title=f"{name}, replies with noise")
    for axes in rows[-1]:
        axes.set_xlabel("log10 of the norm of a client's gradient")
    figure.suptitle("After each tenth of the rounds, later ones darker (not private)")
    plots.save(figure, path)


def noised_norms(
    norms: np.ndarray, clip: float, noise_multiplier: float, dimension: int
) -> np.ndarray:
    """Draw the norms that clients' replies have after noise."""
    # Noise is the same in all directions, so only the length of what it is added to
    # matters: one coordinate has it, and the squares of the others are chi-squared.
    rng = np.random.default_rng(0)
    stddev = noise_multiplier * clip
    along = np.minimum(norms, clip) + stddev * rng.standard_normal(len(norms))
    across = stddev**2 * rng.chisquare(dimension - 1, len(norms))
    return np.sqrt(along**2 + across)


def report(results: dict[str, list[Result]], output: Path) -> None:
    """Print what the runs have reached."""
    print(f"\n{'run':<22}{'accuracy':>16}{'half-way':>10}{'loss':>9}{'last C':>10}")
    for name, trials in results.items():
        accuracy = 100 * np.array([trial.history["val_accuracy"] for trial in trials])
        last = accuracy[:, -1]
        spread = f" ± {last.std(ddof=1):.2f}" if len(trials) > 1 else ""
        loss = np.mean([trial.history["val_loss"][-1] for trial in trials])
        clip = trials[0].history["l2_norm_clip"][-1]
        middle = accuracy[:, (accuracy.shape[1] - 1) // 2].mean()
        print(
            f"{name:<22}{f'{last.mean():.2f}{spread}':>16}{middle:>10.2f}{loss:>9.3f}"
            f"{clip:>10.4g}"
        )
    names: dict[str, list[str]] = {}
    for name, trials in results.items():
        names.setdefault(trials[0].statement, []).append(name)
    for statement, same in names.items():
        print(f"\n{', '.join(same)}:\n{statement}")
    print(f"Plots and histories: {output}{os.sep}")


if __name__ == "__main__":
    app.run(main)
