"""Ways of drawing batches, and ways of protecting people, beside each other.

The digits of scikit-learn, three ways at the same epsilon: Poisson draws, balls in bins,
and shuffled. Then 1,000 simulated users with 1 to 50 rows each: what equally noisy
trainings cost a user by units of users, by bounded contributions, and by group privacy:

    python examples/sampling_schemes.py
    python examples/sampling_schemes.py --target_epsilon=1 --seeds=5

Nothing is downloaded, and all of it takes less than three minutes on two cores.
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
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdp
from tfdp.accounting import Segment
from tfdp.sampling import Poisson, PoissonUsers

_TARGET_EPSILON = flags.DEFINE_float(
    "target_epsilon", 3.5, "Epsilon that each training on the digits may cost."
)
_DELTA = flags.DEFINE_float("delta", 1e-4, "Delta of all guarantees.")
_EPOCHS = flags.DEFINE_integer("epochs", 60, "Epochs on the digits.", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each way.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 256, "Expected number of images in a batch.", lower_bound=1
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.01, "Learning rate of Adam.", lower_bound=0.0
)
_L2_NORM_CLIP = flags.DEFINE_float(
    "l2_norm_clip", 1.0, "Norm that the gradient of an image is clipped to."
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/sampling_schemes", "Folder for the plot."
)
SAMPLINGS = ("poisson", "balls_in_bins", "shuffle")
# The simulated users: public numbers, like all of a plan.
USERS, MOST_ROWS, KEPT_ROWS = 1000, 50, (1, 2, 5, 10, 20, 50)
# Each row, or user, is in a step with this chance; the noise of the mean gradient is
# the same for all, in units of the clip norm.
CHANCE, USER_STEPS, NOISE_OF_MEAN = 0.05, 400, 0.02


def main(argv: Sequence[str]) -> None:
    """Train on the digits, account for the users, and plot both."""
    if len(argv) > 1:
        sys.exit(
            f"sampling_schemes: everything is a flag. Received: {' '.join(argv[1:])}."
        )
    path = Path(_OUTPUT_DIR.value) / "sampling_schemes.png"
    train, test = load_data()
    try:
        noise = {sampling: noise_for(sampling, len(train[0])) for sampling in SAMPLINGS}
        users = costs_of_users()
        digits = train_three_ways(noise, train, test)
        plot(digits, users, path)
    except (OSError, ValueError) as error:
        sys.exit(f"sampling_schemes: {error}")
    print(f"Plot: {path}")


def train_three_ways(
    noise: dict[str, float], train: Any, test: Any
) -> dict[str, np.ndarray]:
    """Train on the digits by each sampling, and print the table.

    Args:
        noise: Noise multipliers by sampling.
        train: Images and labels.
        test: Likewise.

    Returns:
        Test accuracies after each epoch, shape (seeds, epochs), by sampling.
    """
    began, accuracies, spent = time.monotonic(), {}, {}
    for sampling, noise_multiplier in noise.items():
        runs = []
        for seed in range(_SEEDS.value):
            history, spent[sampling] = run(
                sampling, noise_multiplier, seed, train, test
            )
            runs.append(history)
            print(
                f"{sampling}, seed {seed}: test accuracy {history[-1]:.1%}, "
                f"{time.monotonic() - began:.0f} s so far",
                flush=True,
            )
        accuracies[sampling] = 100 * np.array(runs)
    print(f"\n{'sampling':>14}{'noise':>8}{'epsilon':>9}{'test accuracy':>18}")
    for sampling, of_seeds in accuracies.items():
        last = of_seeds[:, -1]
        spread = last.std(ddof=1) if len(last) > 1 else 0.0
        print(
            f"{sampling:>14}{noise[sampling]:>8.3f}{spent[sampling]:>9.3f}"
            f"{last.mean():>10.1f} ± {spread:.1f} %"
        )
    print(
        f"Means and standard deviations; seeds: {_SEEDS.value}; delta {_DELTA.value:g}. "
        "Each epsilon is that of one run alone.\n"
    )
    return accuracies


def noise_for(sampling: str, images: int) -> float:
    """Find the noise multiplier that keeps a training within the target."""
    return tfdp.calibrate_noise_multiplier(
        _TARGET_EPSILON.value,
        n=images,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        delta=_DELTA.value,
        sampling=sampling,
    )


def run(
    sampling: str, noise_multiplier: float, seed: int, train: Any, test: Any
) -> tuple[list[float], float]:
    """Train once; return test accuracies after each epoch, and epsilon."""
    # Initial weights follow the seed; batches and noise never do.
    keras.utils.set_random_seed(seed)
    private = tfdp.DPModel(build_model(), sampling=sampling)
    private.compile(
        tfdp.optimizers.DPAdam(
            _LEARNING_RATE.value,
            l2_norm_clip=_L2_NORM_CLIP.value,
            noise_multiplier=noise_multiplier,
        ),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = private.fit(
        *train,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        validation_data=test,
        verbose=0,
    )
    return history.history["val_accuracy"], private.epsilon(_DELTA.value)


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


def costs_of_users() -> dict[str, dict[int, float]]:
    """Print what equally noisy trainings cost users with several rows, by three ways.

    Returns:
        Epsilons of a user by the most rows of one, by the way.
    """
    # Most users have few rows, and some have many.
    random = np.random.default_rng(0)
    rows = np.minimum(random.geometric(0.08, USERS), MOST_ROWS)
    ids = np.repeat(np.arange(USERS), rows)
    print(
        f"{USERS} users with {rows.min()} to {rows.max()} rows, {len(ids)} in all; each "
        f"row, or user, in {USER_STEPS} steps with chance {CHANCE:g};\nnoise of "
        f"{NOISE_OF_MEAN:g} C in the mean gradient; epsilon of a user at delta "
        f"{_DELTA.value:g}:\n\n"
        f"{'':>18}{'rows used':>11}{'batch':>7}{'noise':>8}{'epsilon':>9}"
        f"{'by group privacy':>18}"
    )
    found: dict[str, dict[int, float]] = {"units": {}, "bounded": {}, "group": {}}
    for most in KEPT_ROWS:
        kept = len(tfdp.data.bound_contributions(ids, max_per_user=most))
        size = round(CHANCE * kept)
        segment = Segment(Poisson(kept, size), USER_STEPS, NOISE_OF_MEAN * size)
        bounded = tfdp.accounting.user_epsilon(
            segment, _DELTA.value, max_examples_per_user=most
        )
        group = group_epsilon(segment, most)
        found["bounded"][most], found["group"][most] = bounded, group
        row(f"{most} rows of a user", kept / len(ids), segment, bounded, group)
    scheme = PoissonUsers(USERS, round(CHANCE * USERS), examples_per_user=MOST_ROWS)
    noise = NOISE_OF_MEAN * scheme.expected_batch_size
    segment = Segment(scheme, USER_STEPS, noise)
    of_units = tfdp.accounting.reported_epsilon([segment], _DELTA.value)
    found["units"] = dict.fromkeys(KEPT_ROWS, of_units)
    row("users as units", 1.0, segment, of_units)
    print()
    return found


def row(
    name: str, used: float, segment: Segment, bound: float, group: float | None = None
) -> None:
    """Print a row of the table of users."""
    print(
        f"{name:>18}{used:>11.0%}{segment.scheme.expected_batch_size:>7}"
        f"{segment.noise_multiplier:>8.2f}{bound:>9.2f}"
        + ("" if group is None else f"{group:>18.2f}"),
        flush=True,
    )


def group_epsilon(segment: Segment, size: int) -> float:
    """Bound the epsilon of a group from what is proven for single rows, and no more.

    Where a row has (e, d), a group of k has (k e, d (1 + exp(e) + ... + exp(k e - e))).

    Args:
        segment: What is planned.
        size: The k.

    Returns:
        The least k e for the delta of the flags, to a tenth of a percent.
    """
    of_row = 0.0
    while True:
        log_sum = np.logaddexp.reduce(of_row * np.arange(size))
        delta = math.exp(math.log(_DELTA.value) - log_sum)
        if not delta:  # Too small for a float.
            return math.inf
        needed = tfdp.accounting.reported_epsilon([segment], delta)
        if needed <= of_row:
            return size * of_row
        of_row = 1.001 * needed


def plot(
    digits: dict[str, np.ndarray], users: dict[str, dict[int, float]], path: Path
) -> None:
    """Plot accuracies over the epochs, and a user's epsilon over its rows."""
    figure, [[left, right]] = plots.panels(1, 2, size=(6.2, 3.8))
    for number, (sampling, runs) in enumerate(digits.items()):
        plots.curve(left, range(1, _EPOCHS.value + 1), runs, sampling, f"C{number}")
    left.set(
        ylabel="test accuracy, %",
        title=f"Digits, epsilon {_TARGET_EPSILON.value:g} at delta {_DELTA.value:g}",
    )
    plots.over_epochs(left, _EPOCHS.value)
    names = {
        "units": "users as units",
        "bounded": "bounded rows",
        "group": "group privacy",
    }
    for number, (way, figures) in enumerate(users.items()):
        plots.curve(
            right, list(figures), list(figures.values()), names[way], f"C{number}"
        )
    right.set(
        xscale="log",
        yscale="log",
        xlabel="most rows of a user",
        ylabel=f"a user's epsilon at delta {_DELTA.value:g}",
        title=f"{USERS} users, noise of {NOISE_OF_MEAN:g} C in the mean gradient",
    )
    right.set_xticks(KEPT_ROWS, map(str, KEPT_ROWS))
    right.set_xticks([], minor=True)
    low, high = right.get_ylim()
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100) if low < tick < high]
    right.set_yticks(ticks, map(str, ticks))
    right.set_yticks([], minor=True)
    for axes in (left, right):
        plots.name_curves(axes)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
