"""Publish one draw from a posterior: logistic regression, on breast cancer data.

A posterior that one patient cannot change much is private by itself: one draw of the
coefficients is all that is released, and no noise is added. Beside it stand DP-SGD for
the same epsilons, and the most probable coefficients without privacy:

    python examples/one_posterior_sample.py
    python examples/one_posterior_sample.py --epsilon=1 --trials=20
    python examples/one_posterior_sample.py --resume

Seven tenths of the patients of scikit-learn's data train. Features are divided by
guesses that anybody could make without them: their means would not be private.

The two guarantees are not the same. That of the draw has a delta of 0, and is for one
patient replaced by any other; that of DP-SGD has a delta, and is for one patient added
or removed. A replacement is two of those, so at equal epsilon the draw promises more.

A draw is exact where rejection sampling is sure to end soon, which public numbers
decide. Elsewhere, here from an epsilon of 7.5 on, it would be the end of a Markov
chain, and no epsilon would be stated. Trials show what a draw may look like: each
epsilon is that of one, and whoever published all of them would pay for all of them.

Results are saved as they come: with --resume a run that was killed goes on.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import plots
from absl import app, flags
from saved import SavedResults
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import tfdp

FEATURES = ("mean radius", "mean texture", "mean perimeter", "mean area")
# Guesses: a middle, and how far from it most tumours are.
MIDDLES = (14.0, 20.0, 90.0, 650.0)
WIDTHS = (4.0, 5.0, 25.0, 350.0)
# Rows of features, with a 1 for the intercept, are clipped to the first.
RADIUS, WEIGHT_RADIUS = 2.0, 4.0
DELTA, BATCH_SIZE, EPOCHS = 1e-3, 50, 20
LEARNING_RATE, L2_NORM_CLIP = 0.5, 1.0
METHODS = ("one draw", "DP-SGD")

_EPSILONS = flags.DEFINE_multi_float(
    "epsilon",
    [0.3, 1.0, 3.0],
    "Epsilon of a draw, and of DP-SGD; repeat the flag for several.",
)
_TRIALS = flags.DEFINE_integer("trials", 20, "Draws of each.", lower_bound=1)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the results beside the plot.")
_OUTPUT = flags.DEFINE_string(
    "output", "runs/one_posterior_sample.png", "File for the plot, a PNG."
)


class Data(NamedTuple):
    """Scaled features, and labels, 1 for benign."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


class Run(NamedTuple):
    """What a draw or a training leaves; the intercept comes last."""

    accuracy: float
    coefficients: list[float]


def main(argv: Sequence[str]) -> None:
    """Draw, train, compare and plot."""
    if len(argv) > 1:
        sys.exit(
            f"one_posterior_sample: everything is a flag. Received: {' '.join(argv[1:])}."
        )
    data, output = load_data(), Path(_OUTPUT.value)
    epsilons = sorted(set(_EPSILONS.value))
    try:
        noise = {epsilon: noise_for(epsilon, len(data.x_train)) for epsilon in epsilons}
        saved = SavedResults(output.with_suffix(".json"), {}, resume=_RESUME.value)
        show_one(data, epsilons[-1])
        runs = run_all(data, noise, saved)
    except (OSError, ValueError) as error:
        sys.exit(f"one_posterior_sample: {error}")
    baseline = without_privacy(data)
    report(runs, baseline)
    plot(runs, baseline, output)
    print(f"Plot: {output}")


def load_data() -> Data:
    """Load the patients, seven tenths of them for training."""
    bunch = load_breast_cancer()
    names = list(bunch.feature_names)
    x = bunch.data[:, [names.index(name) for name in FEATURES]]
    x = (x - np.array(MIDDLES)) / np.array(WIDTHS)
    # As the sampler does it; so that all methods get the same.
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    x *= np.minimum(1.0, np.sqrt(RADIUS**2 - 1) / np.maximum(lengths, 1e-12))
    x_train, x_test, y_train, y_test = train_test_split(
        x, bunch.target, test_size=0.3, random_state=42
    )
    return Data(x_train, y_train, x_test, y_test)


def noise_for(epsilon: float, patients: int) -> float:
    """Find the noise multiplier of DP-SGD."""
    return tfdp.calibrate_noise_multiplier(
        epsilon, n=patients, batch_size=BATCH_SIZE, epochs=EPOCHS, delta=DELTA
    )


def sample(data: Data, epsilon: float) -> tfdp.variational.PosteriorSample:
    """Draw the coefficients once."""
    return tfdp.variational.one_posterior_sample(
        "logistic_regression",
        data.x_train,
        data.y_train,
        epsilon=epsilon,
        radius=RADIUS,
        weight_radius=WEIGHT_RADIUS,
        again=True,  # the trials; a study on data that need no protection
    )


def show_one(data: Data, epsilon: float) -> None:
    """Show what one draw guarantees."""
    drawn = sample(data, epsilon)
    print(
        f"One draw for epsilon {epsilon:g}: {drawn.exactness}, log-likelihoods times "
        f"{drawn.likelihood_weight:.4g}, coefficients {np.round(drawn.theta, 2)}\n\n"
        f"{drawn.privacy_statement()}",
        flush=True,
    )


def run_all(
    data: Data, noise: dict[float, float], saved: SavedResults
) -> dict[tuple[str, float], list[Run]]:
    """Draw and train what is not there yet."""
    runs: dict[tuple[str, float], list[Run]] = {}
    began = time.monotonic()
    for epsilon, noise_multiplier in noise.items():
        for method in METHODS:
            for trial in range(_TRIALS.value):
                name = f"{method}, epsilon {epsilon:g}, trial {trial}"
                if name not in saved:
                    if method == "one draw":
                        saved[name] = drawn(data, epsilon)
                    else:
                        saved[name] = trained(data, noise_multiplier)
                runs.setdefault((method, epsilon), []).append(Run(*saved[name]))
            mean = np.mean([run.accuracy for run in runs[method, epsilon]])
            print(
                f"{method}, epsilon {epsilon:g}: mean accuracy {mean:.1%}, "
                f"{time.monotonic() - began:.0f} s so far",
                flush=True,
            )
    return runs


def drawn(data: Data, epsilon: float) -> Run:
    """Draw once; only exact draws have an epsilon."""
    one = sample(data, epsilon)
    if one.exactness != "exact":
        raise ValueError(
            "A draw must be exact to have an epsilon. Received: "
            f"epsilon={epsilon}, for which it is {one.exactness}. Use `--epsilon=1`."
        )
    return Run(accuracy(one.theta, data), one.theta.tolist())


def trained(data: Data, noise_multiplier: float) -> Run:
    """Train by DP-SGD."""
    model = keras.Sequential([
        keras.Input((len(FEATURES),)),
        keras.layers.Dense(1, kernel_initializer="zeros"),
    ])
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPSGD(
            LEARNING_RATE,
            l2_norm_clip=L2_NORM_CLIP,
            noise_multiplier=noise_multiplier,
        ),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    private.fit(
        data.x_train.astype("float32"),
        data.y_train[:, np.newaxis],
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        verbose=0,
    )
    coefficients = np.concatenate([weight.ravel() for weight in model.get_weights()])
    return Run(accuracy(coefficients, data), coefficients.tolist())


def without_privacy(data: Data) -> Run:
    """Find the most probable coefficients under the same prior, without privacy."""
    found = LogisticRegression(C=1.0).fit(data.x_train, data.y_train)
    coefficients = np.append(found.coef_, found.intercept_)
    return Run(accuracy(coefficients, data), coefficients.tolist())


def accuracy(coefficients: np.ndarray, data: Data) -> float:
    """Return the share of the test patients that are told right."""
    logits = data.x_test @ coefficients[:-1] + coefficients[-1]
    return float(np.mean((logits > 0) == data.y_test))


def report(runs: dict[tuple[str, float], list[Run]], baseline: Run) -> None:
    """Print the table."""
    print(f"\n{'':10}{'epsilon':>8}{'delta':>7}{'neighbours':>16}{'accuracy':>16}")
    for (method, epsilon), trials in runs.items():
        percent = 100 * np.array([run.accuracy for run in trials])
        spread = f" ± {percent.std(ddof=1):.1f}" if len(trials) > 1 else ""
        is_draw = method == "one draw"
        print(
            f"{method:10}{epsilon:>8g}{0 if is_draw else DELTA:>7g}"
            f"{'replace-one' if is_draw else 'add-or-remove':>16}"
            f"{f'{percent.mean():.1f}{spread} %':>16}"
        )
    print(
        f"{'without privacy':41}{100 * baseline.accuracy:>13.1f} %\n"
        f"All draws are exact. Means and standard deviations; trials: {_TRIALS.value}; "
        "each epsilon is that of one draw, or one training, alone."
    )


def plot(runs: dict[tuple[str, float], list[Run]], baseline: Run, path: Path) -> None:
    """Plot accuracy over epsilon, and the coefficients of the draws."""
    figure, [[left, right]] = plots.panels(1, 2, size=(5.6, 3.8))
    epsilons = sorted({epsilon for _, epsilon in runs})
    colors = {"one draw": plots.COLORS["one draw"], "DP-SGD": plots.PRIVATE}
    for method in METHODS:
        percent = 100 * np.array([
            [run.accuracy for run in runs[method, epsilon]] for epsilon in epsilons
        ])
        color = colors[method]
        left.plot(epsilons, percent.mean(1), "o-", color=color, label=method)
        for epsilon, values in zip(epsilons, percent, strict=True):
            left.plot([epsilon] * len(values), values, ".", color=color, alpha=0.35)
            left.lines[-1].set_label("_trials")
    left.axhline(
        100 * baseline.accuracy, color=plots.WITHOUT_PRIVACY, label="without privacy"
    )
    left.set_xscale("log")
    left.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    left.set_xticks([], minor=True)
    left.set(xlabel="epsilon", ylabel="accuracy on other patients, %")
    left.set_title("means, and each trial", fontsize="medium")

    names = [*FEATURES, "intercept"]
    columns = list(itertools.product(epsilons, METHODS))
    for place, (epsilon, method) in zip(
        np.linspace(-0.3, 0.3, len(columns)), columns, strict=True
    ):
        for run in runs[method, epsilon]:
            x = np.arange(len(names)) + place
            right.plot(x, run.coefficients, ".", color=colors[method], alpha=0.4)
    right.plot(
        baseline.coefficients, "_", color=plots.WITHOUT_PRIVACY, markersize=34, mew=2
    )
    right.set_xticks(np.arange(len(names)), names, rotation=30, ha="right")
    right.set_ylabel("coefficient")
    right.set_title(
        "epsilon from left to right: "
        + ", ".join(f"{epsilon:g}" for epsilon in epsilons),
        fontsize="medium",
    )
    plots.name_curves(left)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
