"""Logistic regression with a private posterior, on scikit-learn's breast cancer data.

    python examples/dpvi_breast_cancer.py
    python examples/dpvi_breast_cancer.py --features=all --trials=10

Variational inference finds a Gaussian for each coefficient. It is trained without
privacy and with it, for several epsilons, each calibrated for the steps and the sampling
rate that `fit` really has. Beside that stands what noise costs that was chosen for the
epsilon as if there were one step and no sampling, by the textbook's formula.

Seven tenths of the patients train; the features are standardised by them, without
privacy: with private data use bounds that are public. The plot shows minus the evidence
lower bound over training, which is no private value either, and the coefficients with
the intervals that hold 95 % of their posterior, beside the width with which all of them
began: one that is about as wide has not moved, and says nothing of the data. These
intervals know nothing of the noise; `dpvi_coverage.py` has some that do.

Results are saved as they come: with --resume a run that was killed goes on.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import plots
from absl import app, flags
from saved import SavedResults
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import tfdp

DELTA = 1e-3
L2_NORM_CLIP = 5.0
BATCH_SIZE = 20
EPOCHS = 25
FEATURES = ("mean radius", "mean texture", "mean perimeter", "mean area")
WITHOUT_PRIVACY = "none"
# Standard deviation that every posterior begins with.
INITIAL_SCALE = 0.1

_EPSILONS = flags.DEFINE_multi_float(
    "epsilon",
    [0.01, 0.1, 1.0, 10.0],
    "Epsilons at delta 0.001; repeat the flag for several.",
)
_FEATURES = flags.DEFINE_enum(
    "features", "four", ["four", "all"], "Four features of a tumour, or all thirty."
)
_TRIALS = flags.DEFINE_integer("trials", 2, "Runs of each.", lower_bound=1)
_DRAWS = flags.DEFINE_integer(
    "draws", 1, "Draws of the coefficients for each patient in a step.", lower_bound=1
)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the results beside the plot.")
_OUTPUT = flags.DEFINE_string(
    "output", "runs/dpvi_breast_cancer.png", "File for the plot, a PNG."
)


class Data(NamedTuple):
    """Standardised features and labels, 1 for benign."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    names: list[str]


class Run(NamedTuple):
    """What a training leaves: its coefficients are in the order of the names."""

    accuracy: float
    losses: list[float]
    coefficients: list[float]
    low: list[float]
    high: list[float]


def main(argv: Sequence[str]) -> None:
    """Train, compare and plot."""
    if len(argv) > 1:
        sys.exit(
            f"dpvi_breast_cancer: everything is a flag. Received: {' '.join(argv[1:])}."
        )
    data = load_data(_FEATURES.value)
    try:
        noise = {epsilon: calibrated(epsilon, data) for epsilon in _EPSILONS.value}
    except ValueError as error:
        sys.exit(f"dpvi_breast_cancer: {error}")
    output = Path(_OUTPUT.value)
    try:
        saved = SavedResults(
            output.with_suffix(".json"),
            {"features": _FEATURES.value, "draws": _DRAWS.value},
            resume=_RESUME.value,
        )
    except (OSError, ValueError) as error:
        sys.exit(f"dpvi_breast_cancer: {error}")
    results = run_all(data, noise, saved)
    report(results, noise, data)
    plot(results, data, output)
    print(f"Plot: {output}")


def run_all(
    data: Data, noise: dict[float, float], saved: SavedResults
) -> dict[Any, list[Run]]:
    """Train what is not there yet."""
    results: dict[Any, list[Run]] = {}
    began = time.monotonic()
    for epsilon in [WITHOUT_PRIVACY, *noise]:
        for trial in range(_TRIALS.value):
            name = f"epsilon {epsilon}, trial {trial}"
            done = "before"
            if name not in saved:
                saved[name] = train(data, noise.get(epsilon), trial)
                done = f"{time.monotonic() - began:.0f} s so far"
            run = Run(*saved[name])
            results.setdefault(epsilon, []).append(run)
            print(f"{name}: accuracy {run.accuracy:.1%}, {done}", flush=True)
    return results


def load_data(features: str) -> Data:
    """Load the patients, seven tenths of them for training."""
    bunch = load_breast_cancer()
    names = list(bunch.feature_names)
    kept = list(FEATURES) if features == "four" else names
    x = bunch.data[:, [names.index(name) for name in kept]]
    x_train, x_test, y_train, y_test = train_test_split(
        x, bunch.target, test_size=0.3, random_state=42
    )
    scaler = StandardScaler().fit(x_train)
    return Data(
        scaler.transform(x_train).astype("float32"),
        y_train[:, np.newaxis].astype("float32"),
        scaler.transform(x_test).astype("float32"),
        y_test[:, np.newaxis].astype("float32"),
        [*kept, "intercept"],
    )


def calibrated(epsilon: float, data: Data) -> float:
    """Find the noise multiplier for all steps of `fit`."""
    return tfdp.calibrate_noise_multiplier(
        epsilon,
        n=len(data.x_train),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        delta=DELTA,
    )


def train(data: Data, noise_multiplier: float | None, trial: int) -> Run:
    """Train with this noise, or without privacy."""
    keras.utils.set_random_seed(trial)
    model = tfdp.variational.BayesianLogisticRegression(
        number_of_examples=len(data.x_train),
        prior_scale=1.0,
        initial_scale=INITIAL_SCALE,
    )
    trained: keras.Model = model
    optimizer = keras.optimizers.Adam(0.01)
    if noise_multiplier is not None:
        trained = tfdp.DPModel(model, augmentation_multiplicity=_DRAWS.value)
        optimizer = tfdp.optimizers.DPOptimizer(
            optimizer, l2_norm_clip=L2_NORM_CLIP, noise_multiplier=noise_multiplier
        )
    trained.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    history = trained.fit(
        data.x_train, data.y_train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0
    )
    logits = keras.ops.convert_to_numpy(model(data.x_test))
    posterior = tfdp.variational.posterior(model)
    intervals = tfdp.variational.credible_intervals(model, 0.95)
    low, high = (
        np.concatenate([np.ravel(intervals[name][end]) for name in posterior])
        for end in (0, 1)
    )
    means = np.concatenate([np.ravel(each.mean) for each in posterior.values()])
    return Run(
        float(np.mean((logits > 0) == data.y_test)),
        history.history["loss"],
        means.tolist(),
        low.tolist(),
        high.tolist(),
    )


def report(
    results: dict[Any, list[Run]], noise: dict[float, float], data: Data
) -> None:
    """Print accuracy, noise, and what naive noise would have cost."""
    steps = EPOCHS * -(-len(data.x_train) // BATCH_SIZE)
    print(
        f"\n{len(data.x_train)} patients, {steps} steps, delta {DELTA:g}, C = "
        f"{L2_NORM_CLIP:g}; accuracy on {len(data.x_test)} others\n"
        f"{'epsilon':>8}{'noise':>9}{'accuracy':>18}{'bound':>9}"
        f"{'naive noise':>13}{'its epsilon':>13}"
    )
    for epsilon, runs in results.items():
        accuracies = 100 * np.array([run.accuracy for run in runs])
        spread = f" ± {accuracies.std(ddof=1):.1f}" if len(runs) > 1 else ""
        bound = -len(data.x_train) * np.mean([run.losses[-1] for run in runs])
        line = f"{epsilon:>8}{noise.get(epsilon, 0):>9.3g}"
        line += f"{f'{accuracies.mean():.1f}{spread} %':>18}{bound:>9.1f}"
        if epsilon != WITHOUT_PRIVACY:
            naive = float(np.sqrt(2 * np.log(1.25 / DELTA)) / epsilon)
            segment = tfdp.accounting.PoissonSteps(
                steps, naive, len(data.x_train), BATCH_SIZE
            )
            real = tfdp.accounting.Ledger((segment,)).epsilon(DELTA)
            line += f"{naive:>13.3g}{real:>13.3g}"
        print(line)


def plot(results: dict[Any, list[Run]], data: Data, path: Path) -> None:
    """Plot the bound over training, and the posteriors of the first run of each."""
    figure, [[left, right]] = plots.panels(1, 2, size=(6.0, 4.2))
    blues = iter(plots.shades(len(results) - 1))
    offsets = np.linspace(-0.3, 0.3, len(results))
    for (epsilon, runs), offset in zip(results.items(), offsets, strict=True):
        is_private = epsilon != WITHOUT_PRIVACY
        label = f"epsilon {epsilon:g}" if is_private else "without privacy"
        color = next(blues) if is_private else plots.WITHOUT_PRIVACY
        losses = len(data.x_train) * np.mean([run.losses for run in runs], 0)
        plots.curve(left, np.arange(1, EPOCHS + 1), losses, label, color)
        run = runs[0]
        right.errorbar(
            np.arange(len(data.names)) + offset,
            run.coefficients,
            np.abs(np.subtract([run.low, run.high], run.coefficients)),
            fmt="o",
            markersize=3.5,
            color=color,
        )
    plots.over_epochs(left, EPOCHS)
    left.set_ylabel("minus the evidence lower bound, nats")
    left.set_title("training (not private)")
    right.set_xticks(np.arange(len(data.names)), data.names, rotation=30, ha="right")
    right.set_ylabel("coefficient, and 95 % of its posterior")
    right.set_title("posteriors, one run each (colours as on the left)")
    right.axhline(0, color="black", linewidth=0.5)
    # A normal variable is within 1.96 standard deviations in 95 % of cases.
    right.axhspan(
        -1.96 * INITIAL_SCALE,
        1.96 * INITIAL_SCALE,
        color=plots.NOTE["color"],
        alpha=0.12,
        linewidth=0,
        label="where all began; as narrow as this: did not move",
    )
    right.legend(fontsize="small", loc="best")
    plots.name_curves(left)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
