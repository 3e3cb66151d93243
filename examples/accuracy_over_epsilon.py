"""Show what privacy costs: test accuracy over epsilon, on handwritten digits.

The same small network is trained for several epsilons, with the noise that each takes
and several seeds, and without privacy. All other settings are the same everywhere, and
none was tuned for any epsilon:

    python examples/accuracy_over_epsilon.py
    python examples/accuracy_over_epsilon.py --target_epsilon=1 --seeds=2 --epochs=20
    python examples/accuracy_over_epsilon.py --resume

The 1797 images of 8x8 pixels come with scikit-learn. All of it takes some ten minutes on
two cores. Results are saved as they come: with --resume a run that was killed goes on.
"""

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import plots
from absl import app, flags
from keras import layers
from saved import SavedResults
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdp

_EPSILONS = flags.DEFINE_multi_float(
    "target_epsilon",
    [0.5, 1.0, 2.0, 4.0, 8.0],
    "Epsilon of a training; repeat the flag for several.",
)
_SEEDS = flags.DEFINE_integer("seeds", 5, "Runs of each.", lower_bound=1)
_DELTA = flags.DEFINE_float("delta", 1e-4, "Delta of the guarantee.")
_EPOCHS = flags.DEFINE_integer("epochs", 60, "Number of epochs.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 256, "Expected number of images in a batch.", lower_bound=1
)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.01, "Learning rate of Adam.")
_L2_NORM_CLIP = flags.DEFINE_float(
    "l2_norm_clip", 1.0, "Norm that the gradient of an image is clipped to."
)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the results in the folder.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/accuracy_over_epsilon", "Folder for the plot and the results."
)
WITHOUT_PRIVACY = math.inf


def main(argv: Sequence[str]) -> None:
    """Train with each epsilon and plot."""
    if len(argv) > 1:
        sys.exit(
            "accuracy_over_epsilon: everything is a flag. Received: "
            f"{' '.join(argv[1:])}."
        )
    output = Path(_OUTPUT_DIR.value)
    train, test = load_data()
    try:
        noise = {epsilon: noise_for(epsilon, len(train[0])) for epsilon in epsilons()}
        results = SavedResults(
            output / "results.json",
            {
                "delta": _DELTA.value,
                "epochs": _EPOCHS.value,
                "batch_size": _BATCH_SIZE.value,
                "learning_rate": _LEARNING_RATE.value,
                "l2_norm_clip": _L2_NORM_CLIP.value,
            },
            resume=_RESUME.value,
        )
        run_all(noise, train, test, results)
    except (OSError, ValueError) as error:
        sys.exit(f"accuracy_over_epsilon: {error}")
    accuracies = {
        epsilon: np.array([
            results[name_of(epsilon, seed)]["accuracy"] for seed in range(_SEEDS.value)
        ])
        for epsilon in noise
    }
    report(accuracies, noise)
    plot(accuracies, output / "accuracy_over_epsilon.png")
    print(f"Plot: {output / 'accuracy_over_epsilon.png'}")


def epsilons() -> list[float]:
    """Return what to train for, from the least private to the most."""
    return [WITHOUT_PRIVACY, *sorted(set(_EPSILONS.value), reverse=True)]


def noise_for(epsilon: float, images: int) -> float:
    """Find the noise multiplier."""
    if epsilon == WITHOUT_PRIVACY:
        return 0.0
    return tfdp.calibrate_noise_multiplier(
        epsilon,
        n=images,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        delta=_DELTA.value,
    )


def name_of(epsilon: float, seed: int) -> str:
    """Name a run in the file of results."""
    return f"epsilon {epsilon:g}, seed {seed}"


def run_all(
    noise: dict[float, float], train: Any, test: Any, results: SavedResults
) -> None:
    """Train what is not there yet."""
    began = time.monotonic()
    for epsilon, noise_multiplier in noise.items():
        for seed in range(_SEEDS.value):
            name = name_of(epsilon, seed)
            done = "before" if name in results else None
            if done is None:
                results[name] = run(noise_multiplier, seed, train, test)
                done = f"{time.monotonic() - began:.0f} s so far"
            accuracy = results[name]["accuracy"]
            print(f"{name}: test accuracy {accuracy:.1%}, {done}", flush=True)


def run(noise_multiplier: float, seed: int, train: Any, test: Any) -> dict[str, Any]:
    """Train once."""
    # Initial weights follow the seed; batches and noise never do.
    keras.utils.set_random_seed(seed)
    model = build_model()
    trained: keras.Model = model
    optimizer = keras.optimizers.Adam(_LEARNING_RATE.value)
    if noise_multiplier:
        trained = tfdp.DPModel(model)
        optimizer = tfdp.optimizers.DPAdam(
            _LEARNING_RATE.value,
            l2_norm_clip=_L2_NORM_CLIP.value,
            noise_multiplier=noise_multiplier,
        )
    trained.compile(
        optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    trained.fit(*train, batch_size=_BATCH_SIZE.value, epochs=_EPOCHS.value, verbose=0)
    # Of the run itself, not of what was asked for.
    spent = trained.epsilon(_DELTA.value) if noise_multiplier else None
    _, accuracy = trained.evaluate(*test, verbose=0)
    return {"accuracy": accuracy, "epsilon": spent}


def load_data() -> tuple[Any, Any]:
    """Split the images and labels into training and test data."""
    digits = load_digits()
    # 16 is the largest value a pixel can have, not a statistic of the data.
    images = digits.images[..., np.newaxis].astype("float32") / 16
    x, x_test, y, y_test = train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    return (x, y), (x_test, y_test)


def build_model() -> keras.Model:
    """Build the network of `train_digits.py`."""
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="tanh"),
        layers.MaxPooling2D(2),
        layers.Conv2D(32, 3, padding="same", activation="tanh"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(10, activation="softmax"),
    ])


def mean_and_spread(accuracies: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation in percent; of one run, no deviation."""
    spread = accuracies.std(ddof=1) if len(accuracies) > 1 else 0.0
    return 100 * accuracies.mean(), 100 * spread


def report(accuracies: dict[float, np.ndarray], noise: dict[float, float]) -> None:
    """Print the table."""
    print(f"\n{'epsilon':>15}{'noise':>8}{'test accuracy':>18}")
    for epsilon, of_seeds in accuracies.items():
        name = "without privacy" if epsilon == WITHOUT_PRIVACY else f"{epsilon:g}"
        mean, spread = mean_and_spread(of_seeds)
        print(f"{name:>15}{noise[epsilon]:>8.3g}{mean:>10.1f} ± {spread:.1f} %")
    print(
        f"\nMeans and standard deviations; seeds: {_SEEDS.value}; delta "
        f"{_DELTA.value:g}. Each epsilon is that of one run alone."
    )


def plot(accuracies: dict[float, np.ndarray], path: Path) -> None:
    """Plot accuracy over epsilon."""
    figure, [[axes]] = plots.panels(1, 1, size=(6.5, 4.0))
    private = sorted(set(accuracies) - {WITHOUT_PRIVACY})
    mean, spread = mean_and_spread(accuracies[WITHOUT_PRIVACY])
    grey, blue = plots.WITHOUT_PRIVACY, plots.PRIVATE
    axes.axhspan(mean - spread, mean + spread, color=grey, alpha=0.15, linewidth=0)
    axes.axhline(mean, color=grey, label="without privacy", **plots.LINE)
    if private:
        means, spreads = np.transpose([mean_and_spread(accuracies[e]) for e in private])
        axes.errorbar(
            private, means, spreads, color=blue, marker="o", capsize=3, **plots.LINE
        )
        axes.lines[-1].set_label("_bars")
        axes.plot(private, means, color=blue, label="private")
        axes.set_xscale("log")
        axes.set_xticks(private, [f"{epsilon:g}" for epsilon in private])
        axes.set_xticks([], minor=True)
    axes.set(
        xlabel=f"epsilon at delta {_DELTA.value:g} (smaller is more private)",
        ylabel="test accuracy, %",
        title=f"Handwritten digits, {_EPOCHS.value} epochs; seeds: {_SEEDS.value}",
    )
    plots.name_curves(axes)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
