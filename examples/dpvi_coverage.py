"""Measure how often intervals of a private posterior hold the truth.

    python examples/dpvi_coverage.py
    python examples/dpvi_coverage.py --datasets=20 --epsilon=1

Coefficients are drawn from the prior, and then the answers of 500 people from logistic
regression with them. For coefficients that come from the prior, an exact 95 % interval
holds the true one in 95 of 100 such data sets. Three posteriors are compared, without
privacy and with it:

* one that begins narrow, with a standard deviation of 0.1,
* one that begins at the prior,
* the same with `tfdp.variational.AveragedPosterior`, which adds the noise to it.

Results are saved as they come: with --resume a run that was killed goes on.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import plots
from absl import app, flags
from saved import SavedResults

import tfdp

PEOPLE, FEATURES = 500, 4
BATCH_SIZE, EPOCHS = 50, 20
L2_NORM_CLIP, LEARNING_RATE = 2.0, 0.05
DELTA = 1e-4
PRIOR_SCALE = 1.0
LEVELS = (0.5, 0.95)
WITHOUT_PRIVACY = "none"
# The second and the third are of one training.
WAYS = ("begins at 0.1", "begins at the prior", "averaged")

_EPSILONS = flags.DEFINE_multi_float(
    "epsilon", [0.3, 1.0, 3.0], "Epsilons at delta 0.0001; repeat the flag for several."
)
_DATASETS = flags.DEFINE_integer("datasets", 100, "Simulated data sets.", lower_bound=1)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the results beside the plot.")
_OUTPUT = flags.DEFINE_string(
    "output", "runs/dpvi_coverage.png", "File for the plot, a PNG."
)


def main(argv: Sequence[str]) -> None:
    """Simulate, train, and count."""
    if len(argv) > 1:
        sys.exit(
            f"dpvi_coverage: everything is a flag. Received: {' '.join(argv[1:])}."
        )
    output = Path(_OUTPUT.value)
    try:
        noise = {epsilon: calibrated(epsilon) for epsilon in _EPSILONS.value}
        saved = SavedResults(
            output.with_suffix(".json"), {"people": PEOPLE}, resume=_RESUME.value
        )
    except (OSError, ValueError) as error:
        sys.exit(f"dpvi_coverage: {error}")
    began, results = time.monotonic(), {}
    for epsilon in (WITHOUT_PRIVACY, *noise):
        narrow, wide = (
            Trainer(noise.get(epsilon), scale) for scale in (0.1, PRIOR_SCALE)
        )
        found = []
        for dataset in range(_DATASETS.value):
            name = f"epsilon {epsilon}, data set {dataset}"
            if name not in saved:
                saved[name] = [narrow.errors(dataset)[0], *wide.errors(dataset)]
                print(f"{name}: {time.monotonic() - began:.0f} s so far", flush=True)
            found.append(saved[name])
        # (data sets, ways, 2, coefficients)
        for way, of_way in zip(WAYS, np.swapaxes(found, 0, 1), strict=True):
            results[epsilon, way] = of_way
    report(results)
    plot(results, output)
    print(f"Plot: {output}")


def calibrated(epsilon: float) -> float:
    """Find the noise multiplier for all steps of `fit`."""
    return tfdp.calibrate_noise_multiplier(
        epsilon, n=PEOPLE, batch_size=BATCH_SIZE, epochs=EPOCHS, delta=DELTA
    )


def simulated(dataset: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw coefficients, the intercept last, and the answers of people."""
    rng = np.random.default_rng(dataset)
    true = rng.normal(scale=PRIOR_SCALE, size=FEATURES + 1)
    x = rng.normal(size=(PEOPLE, FEATURES)).astype("float32")
    chances = 1 / (1 + np.exp(-(x @ true[:-1] + true[-1])))
    y = (rng.random(PEOPLE) < chances).astype("float32")
    return x, y[:, np.newaxis], true


class Trainer:
    """Trains posteriors of one kind, on one data set after the other.

    Args:
        noise_multiplier: None to train without privacy.
        initial_scale: Standard deviation that posteriors begin with.
    """

    def __init__(self, noise_multiplier: float | None, initial_scale: float) -> None:
        self._model = tfdp.variational.BayesianLogisticRegression(
            number_of_examples=PEOPLE,
            prior_scale=PRIOR_SCALE,
            initial_scale=initial_scale,
        )
        self._model.build((None, FEATURES))
        self._trained: keras.Model = self._model
        self._optimizer = keras.optimizers.Adam(LEARNING_RATE)
        if noise_multiplier is not None:
            self._trained = tfdp.DPModel(self._model)
            self._optimizer = tfdp.optimizers.DPOptimizer(
                self._optimizer,
                l2_norm_clip=L2_NORM_CLIP,
                noise_multiplier=noise_multiplier,
            )
        self._trained.compile(
            self._optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True)
        )
        self._start = self._model.get_weights()

    def errors(self, dataset: int) -> list[np.ndarray]:
        """Return how far means are off the truth, and standard deviations.

        Each data set begins anew, and is other people: their epsilon is that of one
        training.

        Args:
            dataset: Its number.

        Returns:
            Of the last posterior and of the averaged one, each of shape
            (2, coefficients), as lists.
        """
        x, y, true = simulated(dataset)
        self._model.set_weights(self._start)
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        # Moments of other people, and the count of steps that Adam divides them by.
        for variable in inner.variables:
            if variable is not inner.learning_rate:
                variable.assign(np.zeros(variable.shape))
        found: list[Any] = []

        def look(logs: Any = None) -> None:
            posterior = tfdp.variational.posterior(self._model)
            mean, scale = (
                np.concatenate([
                    np.ravel(getattr(posterior[name], part))
                    for name in ("logit/kernel", "logit/bias")
                ]).astype(float)
                for part in ("mean", "scale")
            )
            found.append([(mean - true).tolist(), scale.tolist()])

        self._trained.fit(
            x,
            y,
            batch_size=BATCH_SIZE,
            epochs=EPOCHS,
            verbose=0,
            callbacks=[
                keras.callbacks.LambdaCallback(on_train_end=look),
                tfdp.variational.AveragedPosterior(),
            ],
        )
        look()
        return found


def covered(found: np.ndarray, level: float) -> np.ndarray:
    """Return for each data set the share of coefficients that lie in their interval."""
    half = statistics.NormalDist().inv_cdf((1 + level) / 2)
    errors, scales = found[:, 0], found[:, 1]
    return (np.abs(errors) <= half * scales).mean(1)


def report(results: dict[Any, np.ndarray]) -> None:
    """Print how often the truth was inside, and how wide intervals were."""
    print(
        f"\n{_DATASETS.value} data sets, {PEOPLE} people each, {FEATURES + 1} "
        f"coefficients, delta {DELTA:g}\n"
        f"{'epsilon':>8} {'posterior':<20}"
        + "".join(f"{f'in {level:.0%}':>16}" for level in LEVELS)
        + f"{'error':>9}{'std. dev.':>11}"
    )
    for (epsilon, way), found in results.items():
        cells = ""
        for level in LEVELS:
            shares = 100 * covered(found, level)
            spread = shares.std(ddof=1) / np.sqrt(len(shares)) if len(shares) > 1 else 0
            cells += f"{f'{shares.mean():.1f} ± {spread:.1f} %':>16}"
        error, scale = np.sqrt((found**2).mean((0, 2)))
        print(f"{epsilon:>8} {way:<20}{cells}{error:>9.3f}{scale:>11.3f}")


def plot(results: dict[Any, np.ndarray], path: Path) -> None:
    """Plot how often intervals of every level hold the truth."""
    epsilons = list(dict.fromkeys(epsilon for epsilon, _ in results))
    figure, [row] = plots.panels(1, len(epsilons), size=(3.4, 3.4), sharey=True)
    levels = np.linspace(0.05, 0.99, 60)
    colors = (plots.WITHOUT_PRIVACY, *plots.shades(len(WAYS) - 1))
    for axes, epsilon in zip(row, epsilons, strict=True):
        is_private = epsilon != WITHOUT_PRIVACY
        axes.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=0.8)
        for way, color in zip(WAYS, colors, strict=True):
            shares = [covered(results[epsilon, way], level).mean() for level in levels]
            axes.plot(levels, shares, color=color, label=way, **plots.LINE)
        axes.set(
            title=f"epsilon {epsilon:g}" if is_private else "without privacy",
            xlabel="level of the interval",
        )
    row[0].set_ylabel("share that holds the truth")
    row[0].legend(fontsize="small", loc="upper left")
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
