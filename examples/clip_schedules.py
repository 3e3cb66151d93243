"""Compare ways to choose the clip norm C under one privacy budget.

The same small network trains once with each of them, always within the same epsilon:
clip norms that are fixed, scheduled, or follow the norms of the gradients privately:

    python examples/clip_schedules.py
    python examples/clip_schedules.py --schedules=large --schedules=polynomial
    python examples/clip_schedules.py --data_dir=path/to/folder/with/mnist.npz

The digits of scikit-learn take about two minutes on two cores, MNIST less than ten.
Runs are saved as they end: with --resume a comparison that was killed goes on, and so
does one to which a schedule is added.

The learning rate is not divided by C, so C scales the steps of plain SGD and their
noise alike: too small a C is slow, too large a C drowns the gradient in noise, and a C
that falls acts like a learning rate that falls. A C that adapts needs nobody to know
the norms, but goes wherever they go: down to nothing once most images are learnt (MNIST;
try --target_quantile=0.8), or up and up where the noise itself makes gradients longer
(the digits with --learning_rate=0.8).
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import plots
from absl import app, flags
from keras import layers
from saved import SavedResults
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdp
from tfdp.accounting import Ledger, compose

SMALL, MIDDLE, LARGE = 0.3, 1.0, 10.0
# What adaptive clip norms learn from the norms gets this many times the noise that a
# gradient gets. Three times the noise costs a ninth as much.
QUERY_NOISE = 3.0


class Plan(NamedTuple):
    """What the runs share. C changes nothing of it: the noise is a multiple of C."""

    steps_per_epoch: int
    steps: int
    noise_multiplier: float


class Schedule(NamedTuple):
    """A way to choose C.

    Attributes:
        callback: Makes the callback that sets C.
        noise: The gradient's noise over that of the plan.
    """

    callback: Callable[[Plan], keras.callbacks.Callback]
    noise: float = 1.0


def fixed(clip: float) -> keras.callbacks.Callback:
    """Keep C."""
    return tfdp.callbacks.ClipNormScheduler(lambda step: clip)


def switch(plan: Plan) -> keras.callbacks.Callback:
    """Switch from a large C to a small one, once."""
    return tfdp.callbacks.ClipNormScheduler(
        keras.optimizers.schedules.PiecewiseConstantDecay(
            [plan.steps // 2], [LARGE, SMALL]
        )
    )


def polynomial(plan: Plan) -> keras.callbacks.Callback:
    """Let C decay like C_0 (1 - t / T)^power."""
    return tfdp.callbacks.ClipNormScheduler(
        keras.optimizers.schedules.PolynomialDecay(
            LARGE,
            decay_steps=plan.steps,
            end_learning_rate=SMALL,  # a clip norm of 0 would clip everything away
            power=_POWER.value,
        )
    )


def quantile(plan: Plan) -> keras.callbacks.Callback:
    """Move C towards a quantile of the norms in every step, by a noised count."""
    return tfdp.callbacks.AdaptiveQuantileClip(
        _TARGET_QUANTILE.value,
        count_noise_multiplier=QUERY_NOISE * plan.noise_multiplier,
    )


def median(plan: Plan) -> keras.callbacks.Callback:
    """Set C to the median of the norms once an epoch, by a noised histogram."""
    return tfdp.callbacks.AdaptiveMedianClip(
        # Edges known beforehand, in equal ratios from 1/16 to 16.
        [0.0, *(2.0 ** (k / 2) for k in range(-8, 9))],
        histogram_noise_multiplier=QUERY_NOISE * plan.noise_multiplier,
        every=plan.steps_per_epoch,
    )


# In plots.
NAMES = {"small": f"fixed, {SMALL:g}", "large": f"fixed, {LARGE:g}"}
SCHEDULES = {
    "small": Schedule(lambda plan: fixed(SMALL)),
    "large": Schedule(lambda plan: fixed(LARGE)),
    "switch": Schedule(switch),
    "polynomial": Schedule(polynomial),
    # A step of a gradient and a count costs what (z^-2 + z_count^-2)^(-1/2) does. The
    # gradient gets more noise, so that this is what was planned.
    "quantile": Schedule(quantile, noise=(1 - QUERY_NOISE**-2) ** -0.5),
    # Few steps have a histogram. More noise for all the others would give part of
    # the budget away, so these few cost more, and the budget ends the run earlier.
    "median": Schedule(median),
}

_SCHEDULES = flags.DEFINE_multi_enum(
    "schedules", list(SCHEDULES), list(SCHEDULES), "A way to choose C; may be repeated."
)
_POWER = flags.DEFINE_float(
    "power", 1.0, "Power of the polynomial decay.", lower_bound=0.0
)
_TARGET_QUANTILE = flags.DEFINE_float(
    "target_quantile", 0.5, "Share of the gradients that `quantile` leaves unclipped."
)
_TARGET_EPSILON = flags.DEFINE_float(
    "target_epsilon", 3.0, "Epsilon that each run may cost."
)
_DELTA = flags.DEFINE_float(
    "delta",
    None,
    "Delta of the guarantee. Default: 1e-4 on the 1437 digits, 1e-5 on MNIST.",
)
_EPOCHS = flags.DEFINE_integer(
    "epochs",
    None,
    "Number of epochs. Default: 30 on the digits, 10 on MNIST.",
    lower_bound=1,
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 256, "Expected number of images in a batch.", lower_bound=1
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.3, "Learning rate of SGD.", lower_bound=0.0
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder with mnist.npz, to train on MNIST."
)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the runs in the folder.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/clip_schedules", "Folder for the plot and the histories."
)


class Task(NamedTuple):
    """Images, a network for them, and settings for both."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    model: keras.Model
    epochs: int
    delta: float


class Run(NamedTuple):
    """What a training leaves."""

    history: dict[str, list[float]]
    ledger: Ledger


def main(argv: Sequence[str]) -> None:
    """Train with each schedule and compare."""
    if len(argv) > 1:
        sys.exit(
            f"clip_schedules: everything is a flag. Received: {' '.join(argv[1:])}."
        )
    task = digits() if _DATA_DIR.value is None else mnist(Path(_DATA_DIR.value))
    task = task._replace(
        epochs=_EPOCHS.value or task.epochs,
        delta=task.delta if _DELTA.value is None else _DELTA.value,
    )
    output = Path(_OUTPUT_DIR.value)
    try:
        runs = train_all(task, output)
    except (OSError, ValueError) as error:
        sys.exit(f"clip_schedules: {error}")
    plot(runs, output / "comparison.png")
    report(runs, task.delta, output)


def train_all(task: Task, output: Path) -> dict[str, Run]:
    """Train with each schedule, always from the same weights."""
    n = len(task.train[0])
    noise_multiplier = tfdp.calibrate_noise_multiplier(
        _TARGET_EPSILON.value,
        n=n,
        batch_size=_BATCH_SIZE.value,
        epochs=task.epochs,
        delta=task.delta,
    )
    print(
        f"{n} images, {task.epochs} epochs: noise multiplier {noise_multiplier:.3f} "
        f"for epsilon {_TARGET_EPSILON.value:g} at delta {task.delta:g}"
    )
    steps_per_epoch = -(-n // _BATCH_SIZE.value)
    plan = Plan(steps_per_epoch, steps_per_epoch * task.epochs, noise_multiplier)
    saved = SavedResults(
        output / "runs.json", settings(task, noise_multiplier), resume=_RESUME.value
    )
    runs = {}
    for name in dict.fromkeys(_SCHEDULES.value):
        if name in saved:
            print(f"\n{name}: run before")
        else:
            run = train(name, task, plan, output)
            saved[name] = run.history, run.ledger.to_json()
        history, ledger = saved[name]
        runs[name] = Run(history, Ledger.from_json(ledger))
    return runs


def settings(task: Task, noise_multiplier: float) -> dict[str, Any]:
    """Return what all runs depend on; of initial weights each comparison has its own."""
    return {
        "data_dir": _DATA_DIR.value,
        "epochs": task.epochs,
        "delta": task.delta,
        "noise_multiplier": noise_multiplier,
        "batch_size": _BATCH_SIZE.value,
        "learning_rate": _LEARNING_RATE.value,
        "power": _POWER.value,
        "target_quantile": _TARGET_QUANTILE.value,
    }


def train(name: str, task: Task, plan: Plan, output: Path) -> Run:
    """Train with one schedule."""
    print(f"\n{name}", flush=True)
    schedule = SCHEDULES[name]
    model = keras.models.clone_model(task.model)
    model.set_weights(task.model.get_weights())
    private = tfdp.DPModel(model)
    private.compile(
        optimizer=tfdp.optimizers.DPSGD(
            learning_rate=_LEARNING_RATE.value,
            l2_norm_clip=MIDDLE,  # where the adaptive ones begin
            noise_multiplier=plan.noise_multiplier * schedule.noise,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.perf_counter()
    history = private.fit(
        *task.train,
        batch_size=_BATCH_SIZE.value,
        epochs=task.epochs,
        validation_data=task.test,
        callbacks=[
            schedule.callback(plan),
            tfdp.callbacks.PrivacyBudget(
                delta=task.delta, target_epsilon=_TARGET_EPSILON.value
            ),
            tfdp.callbacks.BiasLogger(every=plan.steps_per_epoch),
            keras.callbacks.CSVLogger(output / f"{name}.csv"),
            progress(task.epochs),
        ],
        verbose=0,
    ).history
    print(f"  {private.ledger.steps} steps in {time.perf_counter() - start:.0f} s")
    return Run(history, private.ledger)


def progress(epochs: int) -> keras.callbacks.Callback:
    """Print a line for every fifth part of the epochs."""

    def show(epoch: int, logs: dict[str, float]) -> None:
        if (epoch + 1) % max(epochs // 5, 1) == 0:
            print(
                f"  epoch {epoch + 1}/{epochs}: test accuracy "
                f"{logs['val_accuracy']:.1%}, C {logs['l2_norm_clip']:.3g}, "
                f"epsilon {logs['epsilon']:.2f}",
                flush=True,
            )

    return keras.callbacks.LambdaCallback(on_epoch_end=show)


def report(runs: dict[str, Run], delta: float, output: Path) -> None:
    """Print the table."""
    print(
        f"\n{'':12}{'test':>9}{'':9}{'last':>8}   not private:\n"
        f"{'schedule':12}{'accuracy':>9}{'epsilon':>9}{'C':>8}"
        f"{'clipped':>10}{'bias':>9}{'cosine':>8}"
    )
    for name, run in runs.items():
        last = {key: values[-1] for key, values in run.history.items()}
        print(
            f"{name:12}{last['val_accuracy']:9.1%}{last['epsilon']:9.3f}"
            f"{last['l2_norm_clip']:8.3g}"
            f"{last['nonprivate_clipped_fraction']:10.1%}"
            f"{last['nonprivate_bias_magnitude']:9.3f}"
            f"{last['nonprivate_clip_cosine']:8.3f}"
        )
    together = compose(*(run.ledger for run in runs.values())).epsilon(delta)
    print(
        f"\nEach epsilon, at delta {delta:g}, is that of one run alone; all of them "
        f"together cost {together:.2f}.\n"
        "The columns that are not private show what clipping did to a batch of the "
        "last epoch.\nNo noise covers them: with private data, neither publish them "
        "nor choose C by them.\n"
        f"Plot: {output / 'comparison.png'}; a history of each run beside it, to be "
        f"drawn by\n  python tools/plot_run.py {output / f'{next(iter(runs))}.csv'}"
    )


def plot(runs: dict[str, Run], path: Path) -> None:
    """Plot the runs over the epochs."""
    figure, all_axes = plots.panels(2, 2, size=(5.0, 3.2), sharex=True)
    panels = {
        "val_accuracy": "test accuracy, %",
        "l2_norm_clip": "clip norm C",
        "nonprivate_clipped_fraction": "clipped share, % (not private)",
        "nonprivate_bias_magnitude": "bias, norm (not private)",
    }
    colors = dict(zip(("small", "large"), plots.shades(2), strict=True)) | plots.COLORS
    for axes, (key, label) in zip(all_axes.flat, panels.items(), strict=True):
        for name, run in runs.items():
            factor = 100 if label.count("%") else 1
            values = factor * np.array(run.history[key])
            epochs = range(1, len(values) + 1)
            plots.curve(axes, epochs, values, name, colors[name])
        axes.set_ylabel(label)
        if key == "l2_norm_clip":
            axes.set_yscale("log")
        plots.over_epochs(axes, max(len(run.history[key]) for run in runs.values()))
        plots.name_curves(axes, NAMES)
    for axes in all_axes[0]:
        axes.set_xlabel("")
    figure.suptitle(f"Ways to choose the clip norm, epsilon {_TARGET_EPSILON.value:g}")
    plots.save(figure, path)


def digits() -> Task:
    """Load scikit-learn's images of 8x8 pixels."""
    data = load_digits()
    # 16 is the largest value a pixel can have, not a statistic of the data.
    x, x_test, y, y_test = train_test_split(
        data.images[..., np.newaxis].astype("float32") / 16,
        data.target,
        test_size=0.2,
        stratify=data.target,
        random_state=0,
    )
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="tanh"),
        layers.MaxPooling2D(2),
        layers.Conv2D(32, 3, padding="same", activation="tanh"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(10),
    ])
    return Task((x, y), (x_test, y_test), model, epochs=30, delta=1e-4)


def mnist(folder: Path) -> Task:
    """Load MNIST's images of 28x28 pixels."""
    path = folder / "mnist.npz"
    if not path.is_file():
        sys.exit(
            f"clip_schedules: there is no {path}. Give the folder of mnist.npz with "
            "--data_dir, or leave it out to train on the digits of scikit-learn."
        )

    def scaled(images: Any) -> np.ndarray:
        # 255 is the largest value a pixel can have, not a statistic of the data.
        return images[..., np.newaxis].astype("float32") / 255

    with np.load(path) as arrays:
        train = scaled(arrays["x_train"]), arrays["y_train"]
        test = scaled(arrays["x_test"]), arrays["y_test"]
    model = keras.Sequential([
        keras.Input((28, 28, 1)),
        layers.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
        layers.MaxPooling2D(2, strides=1),
        layers.Conv2D(32, 4, strides=2, activation="relu"),
        layers.MaxPooling2D(2, strides=1),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
        layers.Dense(10),
    ])
    return Task(train, test, model, epochs=10, delta=1e-5)


if __name__ == "__main__":
    app.run(main)
