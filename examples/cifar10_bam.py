"""Compare DP-SGD, DP-SAT and bias-aware minimisation (BAM) under equal privacy.

    python examples/cifar10_bam.py
    python examples/cifar10_bam.py --data_dir=path/to/folder/with/cifar10.npz
    python examples/cifar10_bam.py --full
    python examples/cifar10_bam.py --full --dataset=imagenet32 --data_dir=path

Each method trains the same networks from the same weights within the same epsilon, with
several seeds. Printed are the mean and the standard deviation of the test accuracy, and
the bias of clipping over the last half of the training; plotted over the training are
accuracy, bias, its two parts, and the cosine between the way uphill and the gradient of
the batch.

By default a small network sees 10,000 images, which takes a quarter of an hour on two
cores. Runs are saved as they end, and the one that is under way after each epoch: with
--resume a comparison that was killed goes on with the epoch that was cut off. The steps of
that epoch that were lost count in the run's epsilon all the same.
With --full the arguments are those of the paper, and a GPU is needed: Knolle et
al., "Bias-Aware Minimisation: Understanding and Mitigating Estimator Bias in Private
SGD", 2023, https://arxiv.org/abs/2308.12018.

The images come from `keras.datasets`, or from a folder: cifar10.npz or cifar100.npz with
x_train, y_train, x_test and y_test, or cifar10_jpeg.npz, or the pickled batches of
ImageNet32. The bias is not private: look at it on data that need no protection.
"""

import os

# Convolutions take half of the time with it; TensorFlow leaves it off on some CPUs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import itertools
import json
import pickle
import shutil
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import image_files
import keras
import numpy as np
import plots
import tensorflow as tf
from absl import app, flags
from keras import layers
from saved import SavedResults, read_history

import tfdp
from tfdp.layers import WSConv2D

METHODS = ("dp_sgd", "sat", "bam")
# In plots.
NAMES = {"dp_sgd": "DP-SGD", "sat": "DP-SAT", "bam": "BAM"}
# What is looked at, in the order of `Run`; DP-SGD has no ascent.
LOGS = ("bias_magnitude", "bias_scale", "bias_direction", "ascent_cosine")


class Setting(NamedTuple):
    """Arguments of a comparison.

    Attributes:
        network: Name of the network.
        images: Number of training images, None for all.
        batch_size: Expected size of a batch.
        epochs: Number of epochs.
        learning_rate: Of NAdam.
        multiplicity: Views of each image.
        epsilons: Budgets.
        delta: Of the guarantee.
        radius: How far BAM goes uphill, the paper's lambda.
        sat_radius: How far DP-SAT goes.
    """

    network: str
    images: int | None
    batch_size: int
    epochs: int
    learning_rate: float
    multiplicity: int
    epsilons: tuple[float, ...]
    delta: float
    radius: float
    sat_radius: float


_FULL = Setting(*(
    "resnet9",
    None,
    32 * 128,
    75,
    2e-3,
    16,
    (1.0, 2.0, 10.0),
    1e-5,
    0.02,
    0.086,
))
FULL = {
    "cifar10": _FULL,
    "cifar100": _FULL._replace(radius=0.01),
    # The number of epochs is that of the others.
    "imagenet32": Setting(*(
        "wrn16_4",
        None,
        8 * 512,
        75,
        1e-3,
        4,
        (10.0,),
        8e-7,
        0.005,
        0.07,
    )),
}
REDUCED = Setting("small", 10_000, 512, 4, 1e-2, 1, (2.0,), 1e-5, 0.01, 0.086)
CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet32": 1000}
# Test accuracy in percent that the paper reports, by epsilon.
PUBLISHED = {
    "cifar10": {
        "dp_sgd": {1.0: 60.9, 2.0: 67.1, 10.0: 78.6},
        "sat": {1.0: 60.9, 2.0: 67.2, 10.0: 78.1},
        "bam": {1.0: 61.4, 2.0: 68.2, 10.0: 79.7},
    },
    "cifar100": {
        "dp_sgd": {1.0: 18.1, 2.0: 24.9, 10.0: 40.3},
        "sat": {1.0: 18.2, 2.0: 24.9, 10.0: 40.1},
        "bam": {1.0: 18.5, 2.0: 25.4, 10.0: 40.8},
    },
    "imagenet32": {
        "dp_sgd": {10.0: 14.97},
        "sat": {10.0: 14.70},
        "bam": {10.0: 20.67},
    },
}

_DATASET = flags.DEFINE_enum("dataset", "cifar10", list(FULL), "Images to train on.")
_DATA_DIR = flags.DEFINE_string(
    "data_dir", os.environ.get("TFDP_DATA"), "Folder with the images."
)
_IS_FULL = flags.DEFINE_bool("full", False, "Use the paper's arguments.")
_METHODS = flags.DEFINE_multi_enum(
    "methods", METHODS, METHODS, "Methods; repeat the flag for several."
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each method.", lower_bound=1)
_EPSILONS = flags.DEFINE_multi_float(
    "target_epsilon", None, "Budgets; repeat the flag for several."
)
_DELTA = flags.DEFINE_float("delta", None, "Delta of the guarantee.")
_IMAGES = flags.DEFINE_integer(
    "images", None, "Images to train on, the first ones.", lower_bound=1
)
_TEST_IMAGES = flags.DEFINE_integer(
    "test_images", None, "Images to test with, the first ones.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Expected number of images in a batch.", lower_bound=1
)
_EPOCHS = flags.DEFINE_integer("epochs", None, "Number of epochs.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", None, "Learning rate of NAdam.")
_MULTIPLICITY = flags.DEFINE_integer(
    "multiplicity", None, "Views of each image.", lower_bound=1
)
_RADIUS = flags.DEFINE_float("radius", None, "How far BAM goes uphill.")
_SAT_RADIUS = flags.DEFINE_float("sat_radius", None, "How far DP-SAT goes uphill.")
_EVERY = flags.DEFINE_integer(
    "every", 10, "Steps from one look at the bias to the next.", lower_bound=1
)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the runs beside the plot.")
_OUTPUT = flags.DEFINE_string("output", "runs/cifar10_bam.png", "File for the plot.")


class Images(NamedTuple):
    """Images with pixels in [-1, 1], and their classes."""

    x: np.ndarray
    y: np.ndarray


class Run(NamedTuple):
    """What one training shows.

    Attributes:
        epsilon: What it has spent, with steps that were lost where it was killed.
        accuracy: Test accuracy after each epoch.
        bias: Bias magnitude at each look.
        scale: What is kept of the gradient's length at each look, a.
        direction: The part of the bias across the gradient at each look, ||c||.
        cosine: Cosine of the ascent at each look; NaN for DP-SGD.
    """

    epsilon: float
    accuracy: list[float]
    bias: list[float]
    scale: list[float]
    direction: list[float]
    cosine: list[float]


# What changes over a training.
CURVES = Run._fields[1:]


def main(argv: Sequence[str]) -> None:
    """Train with every method, and compare."""
    if len(argv) > 1:
        sys.exit(f"cifar10_bam: everything is a flag. Received: {' '.join(argv[1:])}.")
    setting, output = setting_of_flags(), Path(_OUTPUT.value)
    try:
        # What is wrong is said before hours of training.
        for method in METHODS:
            loss_of(method, setting)
        if not 0 < setting.learning_rate < np.inf:
            raise ValueError(
                "`learning_rate` must be positive and finite. Received: "
                f"learning_rate={setting.learning_rate}. Use `--learning_rate=0.002`."
            )
        saved = SavedResults(
            output.with_suffix(".json"),
            what_runs_depend_on(setting),
            resume=_RESUME.value,
        )
    except (OSError, ValueError) as error:
        sys.exit(f"cifar10_bam: {error}")
    train, test = load(
        _DATASET.value, _DATA_DIR.value, (setting.images, _TEST_IMAGES.value)
    )
    try:
        runs = run_all(setting, train, test, saved)
    except ValueError as error:
        sys.exit(f"cifar10_bam: {error}")
    report(runs, setting)
    plot(runs, setting, output, steps_per_epoch=len(train.x) / setting.batch_size)
    print(f"Plot: {output}")


def what_runs_depend_on(setting: Setting) -> dict[str, Any]:
    """Return all settings but for those that runs are named by."""
    return {
        **setting._replace(epsilons=())._asdict(),
        "dataset": _DATASET.value,
        "test_images": _TEST_IMAGES.value,
        "every": _EVERY.value,
        "values": Run._fields,
    }


def run_all(
    setting: Setting, train: Images, test: Images, saved: SavedResults
) -> dict[tuple[float, str], list[Run]]:
    """Train what is not there yet."""
    runs: dict[tuple[float, str], list[Run]] = {}
    under_way = Path(_OUTPUT.value).with_suffix(".under_way")
    if not _RESUME.value:
        shutil.rmtree(under_way, ignore_errors=True)
    # What has other settings is in another folder.
    settings = json.dumps(what_runs_depend_on(setting)).encode()
    under_way /= f"{zlib.crc32(settings):08x}"
    for epsilon in setting.epsilons:
        for seed in range(_SEEDS.value):
            for method in dict.fromkeys(_METHODS.value):
                name = f"epsilon {epsilon:g}, {method}, seed {seed}"
                if name in saved:
                    print(f"{name}: run before")
                else:
                    folder = under_way / name.replace(", ", "-").replace(" ", "_")
                    folder.mkdir(parents=True, exist_ok=True)
                    saved[name] = trained(
                        method, seed, epsilon, setting, (train, test), folder
                    )
                    shutil.rmtree(folder)
                runs.setdefault((epsilon, method), []).append(Run(*saved[name]))
    return runs


def setting_of_flags() -> Setting:
    """Return the arguments, those replaced that have a flag."""
    chosen = {
        "images": _IMAGES.value,
        "batch_size": _BATCH_SIZE.value,
        "epochs": _EPOCHS.value,
        "learning_rate": _LEARNING_RATE.value,
        "multiplicity": _MULTIPLICITY.value,
        "epsilons": _EPSILONS.value and tuple(dict.fromkeys(_EPSILONS.value)),
        "delta": _DELTA.value,
        "radius": _RADIUS.value,
        "sat_radius": _SAT_RADIUS.value,
    }
    setting = FULL[_DATASET.value] if _IS_FULL.value else REDUCED
    return setting._replace(**{
        name: value for name, value in chosen.items() if value is not None
    })


def loss_of(method: str, setting: Setting) -> Any:
    """Return the loss of a method."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if method == "sat":
        return tfdp.losses.SAT(loss, radius=setting.sat_radius)
    if method == "bam":
        return tfdp.losses.BAM(loss, radius=setting.radius)
    return loss


def trained(
    method: str,
    seed: int,
    epsilon: float,
    setting: Setting,
    data: tuple[Images, Images],
    folder: Path,
) -> Run:
    """Train once, or go on from what is in the folder, and say how it went."""
    start, (train, test) = time.perf_counter(), data
    # Weights and views follow the seed; batches and noise never do.
    keras.utils.set_random_seed(seed)
    private = tfdp.DPModel(
        network(setting.network, train.x.shape[1:], CLASSES[_DATASET.value]),
        augmentation=ShiftAndFlip(),
        augmentation_multiplicity=setting.multiplicity,
    )
    noise_multiplier = tfdp.calibrate_noise_multiplier(
        epsilon,
        n=len(train.x),
        batch_size=setting.batch_size,
        epochs=setting.epochs,
        delta=setting.delta,
    )
    optimizer = tfdp.optimizers.DPNadam(
        setting.learning_rate, l2_norm_clip=1.0, noise_multiplier=noise_multiplier
    )
    private.compile(optimizer, loss_of(method, setting), metrics=["accuracy"])
    looks = Looks(_EVERY.value, folder / "looks.json")
    print(f"epsilon {epsilon:g}, {method}, seed {seed}", flush=True)
    private.fit(
        train.x,
        train.y,
        batch_size=setting.batch_size,
        epochs=setting.epochs,
        validation_data=tuple(test),
        validation_batch_size=1000,
        callbacks=[
            tfdp.callbacks.BiasLogger(every=_EVERY.value),
            looks,
            progress(setting.epochs),
            keras.callbacks.CSVLogger(folder / "history.csv", append=True),
            # The last one: what it has saved the others have noted.
            keras.callbacks.BackupAndRestore(
                folder / "backup", double_checkpoint=True, delete_checkpoint=False
            ),
        ],
        verbose=0,
    )
    accuracy = read_history(folder / "history.csv")["val_accuracy"]
    values, spent = looks.read(), private.ledger.epsilon(setting.delta)
    print(
        f"epsilon {spent:.2f}, {method}, seed {seed}: "
        f"test accuracy {accuracy[-1]:.1%}, bias {of_last_half(values[0]):.3f}, "
        f"{private.ledger.steps} steps in {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    return Run(spent, accuracy, *values)


def progress(epochs: int) -> keras.callbacks.Callback:
    """Print a line for each epoch."""
    start = time.perf_counter()

    def show(epoch: int, logs: dict[str, float]) -> None:
        print(
            f"  epoch {epoch + 1}/{epochs}: test accuracy {logs['val_accuracy']:.1%}, "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )

    return keras.callbacks.LambdaCallback(on_epoch_end=show)


class Looks(keras.callbacks.Callback):
    """Keeps what `BiasLogger` logs, each look once, in a file by epoch.

    Args:
        every: Steps from one look to the next.
        path: The file, JSON. An epoch that is run again replaces what it has of it.
    """

    def __init__(self, every: int, path: Path) -> None:
        super().__init__()
        self._every, self._path = every, path
        self._steps = 0
        self._epochs = json.loads(path.read_text()) if path.exists() else {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin with nothing of this epoch."""
        self._values: list[list[float]] = [[] for _ in LOGS]
        self._epochs[str(epoch)] = self._values

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take the values of a step that was looked at."""
        if self._steps % self._every == 0:
            for name, values in zip(LOGS, self._values, strict=True):
                values.append(float(logs.get(f"nonprivate_{name}", np.nan)))
        self._steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keep what there is."""
        # Killed here, a run leaves the old file or the new one.
        unfinished = self._path.with_name("unfinished.json")
        unfinished.write_text(json.dumps(self._epochs))
        unfinished.replace(self._path)

    def read(self) -> list[list[float]]:
        """Return the looks of all epochs, for each of `LOGS`."""
        of_epochs = [self._epochs[epoch] for epoch in sorted(self._epochs, key=int)]
        return [
            list(itertools.chain(*values)) for values in zip(*of_epochs, strict=True)
        ]


class ShiftAndFlip(layers.Layer):
    """Shifts an image by up to four pixels, and flips it, each with probability 1/2.

    Flips are from left to right, as is usual for photographs. The paper prints "vertical",
    which would turn things upside down.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seeds = keras.random.SeedGenerator()

    def call(self, images: tf.Tensor) -> tf.Tensor:
        """Make one view of each image."""
        rows, height, width = tf.unstack(tf.shape(images)[:3])
        flips, shifts = (self._coin(rows) for _ in range(2))
        down, right = (
            tf.where(
                shifts, keras.random.randint([rows, 1], -4, 5, seed=self._seeds), 0
            )
            for _ in range(2)
        )
        columns = _mirrored(tf.range(width) + right, width)
        columns = tf.where(flips, width - 1 - columns, columns)
        images = tf.gather(
            images, _mirrored(tf.range(height) + down, height), axis=1, batch_dims=1
        )
        return tf.gather(images, columns, axis=2, batch_dims=1)

    def _coin(self, rows: tf.Tensor) -> tf.Tensor:
        return keras.random.uniform([rows, 1], seed=self._seeds) < 0.5


def _mirrored(places: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Continue an image beyond its borders by its mirror image."""
    places = tf.abs(places)
    return tf.minimum(places, 2 * (size - 1) - places)


def network(name: str, shape: tuple[int, int, int], classes: int) -> keras.Model:
    """Build the network of a setting."""
    if name == "resnet9":
        return tfdp.models.resnet9(shape, classes)
    if name == "wrn16_4":
        return tfdp.models.wide_resnet(shape, classes)
    inputs = x = keras.Input(shape)
    for filters in (16, 32, 64):
        x = WSConv2D(filters, 3, padding="same")(x)
        x = layers.ReLU()(layers.GroupNormalization(8)(x))
        x = layers.AveragePooling2D(2)(x)
    return keras.Model(inputs, layers.Dense(classes)(layers.Flatten()(x)))


# Results.


def of_last_half(values: Sequence[float]) -> float:
    """Return the mean of the values of the last half."""
    return float(np.mean(values[len(values) // 2 :]))


def report(runs: dict[tuple[float, str], list[Run]], setting: Setting) -> None:
    """Print the table."""
    print(
        f"\n{'epsilon':<9}{'method':<8}{'test accuracy':>16}{'paper':>7}"
        f"{'bias':>16}{'ascent cosine':>15}"
    )
    for (epsilon, method), of_seeds in runs.items():
        accuracies = [100 * run.accuracy[-1] for run in of_seeds]
        biases = [of_last_half(run.bias) for run in of_seeds]
        cosine = np.mean([of_last_half(run.cosine) for run in of_seeds])
        published = PUBLISHED[_DATASET.value][method].get(epsilon, "")
        print(
            f"{epsilon:<9g}{method:<8}"
            f"{np.mean(accuracies):8.2f} +- {np.std(accuracies):4.2f}{published:>7}"
            f"{np.mean(biases):8.4f} +- {np.std(biases):.3f}"
            f"{'-' if np.isnan(cosine) else f'{cosine:.3f}':>15}"
        )
    for (epsilon, method), of_seeds in runs.items():
        spent = max(run.epsilon for run in of_seeds)
        if spent > epsilon:
            print(
                f"epsilon {epsilon:g}: a run of {method} was killed on its way, and has "
                f"spent {spent:.3g} with the steps that were lost"
            )
    for (epsilon, method), of_seeds in runs.items():
        if method != "dp_sgd" and (epsilon, "dp_sgd") in runs:
            lower = sum(
                of_last_half(run.bias) < of_last_half(base.bias)
                for run, base in zip(of_seeds, runs[epsilon, "dp_sgd"], strict=True)
            )
            print(
                f"epsilon {epsilon:g}: bias of {method} below that of dp_sgd with "
                f"{lower} of {len(of_seeds)} seeds"
            )
    print(
        "\nEach epsilon is that of one run alone; all of them together cost more."
        f"\nMeans and standard deviations; seeds: {_SEEDS.value}; delta "
        f"{setting.delta:g}; bias and cosine, of the last half of the training, are "
        "not private."
    )
    if setting != FULL[_DATASET.value]:
        print(
            "The paper's accuracies are those of its own network, on all images, with "
            "larger batches."
        )


def plot(
    runs: dict[tuple[float, str], list[Run]],
    setting: Setting,
    path: Path,
    *,
    steps_per_epoch: float,
) -> None:
    """Plot all values over the training, a row for each epsilon."""
    figure, rows = plots.panels(len(setting.epsilons), len(CURVES), size=(4.6, 3.3))
    labels = (
        "test accuracy, %",
        "bias, norm",
        "part kept of the gradient's length, a",
        "bias across the gradient, norm of c",
        "cosine of the ascent",
    )
    for row, epsilon in zip(rows, setting.epsilons, strict=True):
        for axes, field, label in zip(row, CURVES, labels, strict=True):
            for method in METHODS:
                if (epsilon, method) not in runs:
                    continue
                values = np.array([
                    getattr(run, field) for run in runs[epsilon, method]
                ])
                x = np.arange(values.shape[1])
                if field == "accuracy":
                    x, values = x + 1, 100 * values
                else:
                    x = x * _EVERY.value / steps_per_epoch
                if np.isfinite(values).any():
                    plots.curve(axes, x, values, method, plots.COLORS[method])
            axes.set_ylabel(label)
            first = 0.5 if field == "accuracy" else 0.0
            plots.over_epochs(axes, setting.epochs, first=first)
            plots.name_curves(axes, NAMES)
            if field != "accuracy":
                axes.set_title("not private", fontsize="small")
        row[0].set_title(f"epsilon {epsilon:g}", fontsize="small")
    plots.save(figure, path)


# Images.


def load(
    dataset: str, data_dir: str | None, numbers: tuple[int | None, int | None]
) -> tuple[Images, Images]:
    """Load the images to train on and those to test with, as many of each, or all."""
    if dataset == "imagenet32":
        arrays = imagenet32(data_dir, numbers)
    else:
        arrays = image_files.load(dataset, data_dir, numbers)
    # 255 is the largest value that a pixel can have, not a statistic of the data.
    train, test = (
        Images(
            x[:number].astype("float32") / 127.5 - 1,
            np.ravel(y[:number]).astype("int32"),
        )
        for (x, y), number in zip(arrays, numbers, strict=True)
    )
    return train, test


def imagenet32(
    data_dir: str | None, numbers: tuple[int | None, int | None]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Load the pickled batches of ImageNet32, no more than it takes."""
    paths = sorted(Path(data_dir or ".").glob("train_data_batch_*"))
    if not paths:
        sys.exit(
            f"cifar10_bam: there is no train_data_batch_1 in {data_dir}. Give the folder "
            "of ImageNet32 with --data_dir."
        )
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for path in paths:
        if numbers[0] is None or sum(len(labels) for _, labels in parts) < numbers[0]:
            parts.append(unpickled(path))
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return [(images, labels), unpickled(paths[0].with_name("val_data"))]


def unpickled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Load images of 32 x 32 pixels, and their classes, which the files count from 1."""
    with path.open("rb") as file:
        batch = pickle.load(file)
    images = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, np.asarray(batch["labels"]) - 1


if __name__ == "__main__":
    app.run(main)
