"""Measure what clipping and noise do to the mean gradient, for several batch sizes.

A small network is trained privately. At some moments of the training its weights are held,
and gradients of random batches of each size are compared with what clipping and noise
make of them:

    python examples/batch_sizes.py
    python examples/batch_sizes.py --dataset=mnist --data_dir=path/to/folder
    python examples/batch_sizes.py --dataset=cifar10 --data_dir=path/to/folder

The bias is what clipping changes in the mean gradient of a batch. Cosines are four: of the
clipped mean, without noise and with it; and with the true mean of the same batch, or of
all images. A small batch's own mean is mostly chance, and so is what it is compared with:
only the mean of all images is where training wants to go.

The data are the digits of scikit-learn, MNIST or CIFAR-10; the last two come from
`keras.datasets` or, with --data_dir, from mnist.npz, cifar10.npz or cifar10_jpeg.npz. What
is measured is not private: look at it on data that need no protection.

The values of each size are saved as they come: with --resume a run that was killed goes
on. It measures the weights that the first one had trained.
"""

import os

# Convolutions take half of the time with it; TensorFlow leaves it off on some CPUs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import image_files
import keras
import numpy as np
import plots
import tensorflow as tf
from absl import app, flags
from keras import layers
from saved import SavedResults
from sklearn.datasets import load_digits

import tfdp

_DATASET = flags.DEFINE_enum(
    "dataset", "digits", ["digits", "mnist", "cifar10"], "Images."
)
_IMAGES = flags.DEFINE_integer(
    "images", 10_000, "Images to take at most, the first ones.", lower_bound=1
)
_SIZES = flags.DEFINE_multi_integer(
    "batch_size",
    [64, 128, 256, 512, 1024, 2048, 4096],
    "Sizes of batches; repeat the flag for several.",
    lower_bound=1,
)
_BATCHES = flags.DEFINE_integer(
    "batches", 20, "Batches of each size that are averaged.", lower_bound=1
)
_EPOCHS = flags.DEFINE_multi_integer(
    "epochs",
    [0, 2, 10],
    "Epochs after which to measure; repeat the flag for several.",
    lower_bound=0,
)
_L2_NORM_CLIP = flags.DEFINE_float(
    "l2_norm_clip", 1.0, "Norm that the gradient of an image is clipped to."
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder with the images.")
_RESUME = flags.DEFINE_bool(
    "resume", False, "Go on with the values and the weights beside the plot."
)
_OUTPUT = flags.DEFINE_string(
    "output", "runs/batch_sizes.png", "File for the plot, a PNG."
)
_NOISE_MULTIPLIER = 1.0
# Of a pass: memory does not depend on the size of a batch.
_PHYSICAL_BATCH_SIZE = 512
_PANELS = {
    "bias": "bias, norm",
    "across": "part of it across the gradient, norm",
    "cosine": "cosine with the batch's mean",
    "with noise": "the same with noise",
    "cosine, all": "cosine with all images' mean",
    "noise, all": "the same with noise",
}


def main(argv: Sequence[str]) -> None:
    """Train, measure and plot."""
    if len(argv) > 1:
        sys.exit(f"batch_sizes: everything is a flag. Received: {' '.join(argv[1:])}.")
    if _DATASET.value == "digits" and _DATA_DIR.value is not None:
        sys.exit(
            "batch_sizes: the digits are those of scikit-learn. Received: "
            f"data_dir={_DATA_DIR.value}. Use --dataset=mnist or --dataset=cifar10."
        )
    x, y = load_data()
    sizes = sorted({size for size in _SIZES.value if size <= len(x)})
    if not sizes:
        sys.exit(
            f"batch_sizes: there are {len(x)} images only. Received: "
            f"batch_size={min(_SIZES.value)}."
        )
    output = Path(_OUTPUT.value)
    try:
        saved = SavedResults(
            output.with_suffix(".json"), settings(), resume=_RESUME.value
        )
    except (OSError, ValueError) as error:
        sys.exit(f"batch_sizes: {error}")
    model = network(x.shape[1:])
    private = compiled(model)
    measured, trained = {}, 0
    for epochs in sorted(set(_EPOCHS.value)):
        weights = output.with_suffix(f".{epochs}.weights.h5")
        if f"trained {epochs}" in saved:
            model.load_weights(weights)
        else:
            if epochs > trained:
                private.fit(
                    x,
                    y,
                    batch_size=256,
                    epochs=epochs,
                    initial_epoch=trained,
                    verbose=2,
                )
            model.save_weights(weights)
            saved[f"trained {epochs}"] = True
        trained = epochs
        measured[epochs] = over_sizes(model, x, y, sizes, epochs, saved)
    plot(sizes, measured, output)
    print(f"Not private: a look at unprotected gradients.\nPlot: {output}")


def settings() -> dict[str, Any]:
    """Return what all values depend on."""
    return {
        "dataset": _DATASET.value,
        "data_dir": _DATA_DIR.value,
        "images": _IMAGES.value,
        "epochs": sorted(set(_EPOCHS.value)),
        "batches": _BATCHES.value,
        "l2_norm_clip": _L2_NORM_CLIP.value,
    }


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Load images with pixels in [0, 1], flat but for CIFAR's, and their labels."""
    number = _IMAGES.value
    if _DATASET.value == "digits":
        x, y = load_digits(return_X_y=True)
        return (x[:number] / 16).astype("float32"), y[:number]
    (x, y), _ = image_files.load(_DATASET.value, _DATA_DIR.value, (number, 1))
    x = x[:number].astype("float32") / 255
    return x if x.ndim == 4 else x.reshape(len(x), -1), np.ravel(y[:number])


def network(shape: tuple[int, ...]) -> keras.Model:
    """Build a small network, which returns logits."""
    if len(shape) == 1:
        hidden = [layers.Dense(128, activation="tanh")]
    else:
        hidden = [
            layers.Conv2D(16, 3, strides=2, activation="tanh"),
            layers.Conv2D(32, 3, strides=2, activation="tanh"),
            layers.Flatten(),
        ]
    return keras.Sequential([keras.Input(shape), *hidden, layers.Dense(10)])


def compiled(model: keras.Model) -> tfdp.DPModel:
    """Wrap the model to train it privately."""
    private = tfdp.DPModel(model, physical_batch_size=_PHYSICAL_BATCH_SIZE)
    private.compile(
        tfdp.optimizers.DPSGD(
            0.25, l2_norm_clip=_L2_NORM_CLIP.value, noise_multiplier=_NOISE_MULTIPLIER
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return private


def over_sizes(
    model: keras.Model,
    x: np.ndarray,
    y: np.ndarray,
    sizes: Sequence[int],
    epochs: int,
    saved: SavedResults,
) -> np.ndarray:
    """Measure what is not saved yet, and print it: shape (sizes, values)."""
    gradients = Gradients(model)
    of_all = None
    print(f"after {epochs} epochs" + "".join(f"{label:>14}" for label in _PANELS))
    rng = np.random.default_rng()
    values = []
    for size in sizes:
        name = f"{epochs} {size}"
        if name not in saved:
            of_all = gradients(x, y)[0] if of_all is None else of_all
            batches = [
                rng.choice(len(x), size, replace=False) for _ in range(_BATCHES.value)
            ]
            found = [
                compared(*gradients(x[rows], y[rows]), of_all, size) for rows in batches
            ]
            saved[name] = np.mean(found, axis=0).tolist()
        values.append(saved[name])
        cells = "".join(f"{value:>14.4f}" for value in values[-1])
        print(f"{size:>{len(f'after {epochs} epochs')}}{cells}", flush=True)
    return np.array(values)


class Gradients:
    """Mean gradients of a model, all its variables in one vector.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="sum"
        )
        self._sums = tf.function(self._sums_of, reduce_retracing=True)

    def __call__(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean of the gradients of some images, true and clipped."""
        starts = range(0, len(x), _PHYSICAL_BATCH_SIZE)
        sums = [
            np.array(
                self._sums(*(part[start:][:_PHYSICAL_BATCH_SIZE] for part in (x, y)))
            )
            for start in starts
        ]
        true, clipped = np.sum(sums, axis=0) / len(x)
        return true, clipped

    def _sums_of(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        variables = [weight.value for weight in self._model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = self._loss(y, self._model(x, training=True))
        clipped = tfdp.clipped_gradients(
            self._model, self._loss, x, y, l2_norm_clip=_L2_NORM_CLIP.value
        )
        return _flat(tape.gradient(loss, variables)), _flat(clipped.gradients)


def _flat(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(each, [-1]) for each in gradients], 0)


def compared(
    true: np.ndarray, clipped: np.ndarray, of_all: np.ndarray, size: int
) -> list[float]:
    """Compare the clipped mean gradient of a batch, in the order of the panels."""
    bias = clipped - true
    along = true @ bias / (true @ true) * true
    stddev = _NOISE_MULTIPLIER * _L2_NORM_CLIP.value / size
    # Noise is nearly orthogonal to any gradient, and adds to the length alone.
    noised = np.sqrt(clipped @ clipped + stddev**2 * len(true))
    cosines = [
        clipped @ other / np.sqrt(other @ other) / length
        for other in (true, of_all)
        for length in (np.sqrt(clipped @ clipped), noised)
    ]
    return [
        float(value)
        for value in (np.linalg.norm(bias), np.linalg.norm(bias - along), *cosines)
    ]


def plot(sizes: Sequence[int], measured: dict[int, np.ndarray], path: Path) -> None:
    """Plot each value over the sizes of the batches, a curve for each moment."""
    figure, all_axes = plots.panels(3, 2, size=(5.0, 2.8), sharex=True)
    colors = plots.shades(len(measured))
    for column, (axes, label) in enumerate(
        zip(all_axes.flat, _PANELS.values(), strict=True)
    ):
        for (epochs, values), color in zip(measured.items(), colors, strict=True):
            plots.curve(
                axes, sizes, values[:, column], f"epoch {epochs}", color, marker="."
            )
        axes.set(ylabel=label, xscale="log")
        axes.set_ylim(0, 1.08 * max(of[:, column].max() for of in measured.values()))
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xticks([], minor=True)
        plots.name_curves(axes)
    for axes in all_axes[-1]:
        axes.set_xlabel("batch size, images")
    names = {"digits": "the digits", "mnist": "MNIST", "cifar10": "CIFAR-10"}
    figure.suptitle(
        f"What clipping to {_L2_NORM_CLIP.value:g} does to the mean gradient of "
        f"{names[_DATASET.value]} (not private)"
    )
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
