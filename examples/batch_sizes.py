"""Measure what clipping and noise do to the mean gradient, for several batch sizes.

A small network is trained privately for a while; then its weights stay, and what
`BiasLogger` says is averaged over some batches of each size:

    python examples/batch_sizes.py
    python examples/batch_sizes.py --data_dir=path/to/folder/with/mnist.npz

The mean gradient of a small batch is mostly chance, and clipping moves it far: larger
batches have less bias. What is left of it does not average out, because it is what
clipping does to all examples, so the cosine between the clipped and the unclipped mean
falls. But noise is divided by the batch size, and it is the larger evil: the cosine
with noise added rises.

The data are the digits of scikit-learn or, with --data_dir, the images of MNIST. What is
measured is not private: look at it on data that need no protection.

The values of each size are saved as they come: with --resume a run that was killed goes
on. It measures the weights that the first one had trained.
"""

import sys
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

import tfdp

_SIZES = flags.DEFINE_multi_integer(
    "batch_size",
    [64, 128, 256, 512, 1024, 2048, 4096],
    "Sizes of batches; repeat the flag for several.",
    lower_bound=1,
)
_BATCHES = flags.DEFINE_integer(
    "batches", 20, "Batches of each size that are averaged.", lower_bound=1
)
_EPOCHS = flags.DEFINE_integer("epochs", 2, "Epochs before that.", lower_bound=1)
_L2_NORM_CLIP = flags.DEFINE_float(
    "l2_norm_clip", 1.0, "Norm that the gradient of an image is clipped to."
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder with mnist.npz.")
_RESUME = flags.DEFINE_bool(
    "resume", False, "Go on with the values and the weights beside the plot."
)
_OUTPUT = flags.DEFINE_string(
    "output", "runs/batch_sizes.png", "File for the plot, a PNG."
)
_NOISE_MULTIPLIER = 1.0
_VALUES = ("bias_magnitude", "bias_scale", "bias_direction", "clip_cosine")
_PANELS = (
    "bias",
    "its direction c",
    "cosine of clipped mean",
    "cosine with noise",
)
_LABELS = (
    "bias, norm",
    "part of it across the gradient, norm",
    "cosine of clipped and true mean",
    "the same with noise",
)


class Average(keras.callbacks.Callback):
    """Averages what `BiasLogger` logs for each batch.

    Args:
        batch_size: Expected number of images in a batch.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self._batch_size = batch_size

    def on_train_begin(self, logs: Any = None) -> None:
        """Forget earlier batches."""
        self._seen: list[list[float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take the values of one batch."""
        magnitude, scale, direction, cosine = (
            logs[f"nonprivate_{name}"] for name in _VALUES
        )
        # ||g_clip - g||^2 = (1 - a)^2 ||g||^2 + ||c||^2.
        kept = scale / abs(1 - scale) * np.sqrt(max(magnitude**2 - direction**2, 0.0))
        noise = _NOISE_MULTIPLIER * _L2_NORM_CLIP.value / self._batch_size
        noise *= np.sqrt(self.model.count_params())
        self._seen.append([
            magnitude,
            direction,
            cosine,
            kept / np.sqrt(kept**2 + direction**2 + noise**2),
        ])

    @property
    def values(self) -> np.ndarray:
        """The means, in the order of the panels."""
        return np.mean(self._seen, axis=0)


def main(argv: Sequence[str]) -> None:
    """Train, measure and plot."""
    if len(argv) > 1:
        sys.exit(f"batch_sizes: everything is a flag. Received: {' '.join(argv[1:])}.")
    x, y = load_data(_DATA_DIR.value)
    model = keras.Sequential([
        keras.Input(x.shape[1:]),
        layers.Dense(128, activation="tanh"),
        layers.Dense(10),
    ])
    sizes = sorted({size for size in _SIZES.value if size <= len(x)})
    if not sizes:
        sys.exit(
            f"batch_sizes: there are {len(x)} images only. Received: "
            f"batch_size={min(_SIZES.value)}."
        )
    output = Path(_OUTPUT.value)
    weights = output.with_suffix(".weights.h5")
    try:
        saved = SavedResults(
            output.with_suffix(".json"), settings(), resume=_RESUME.value
        )
    except (OSError, ValueError) as error:
        sys.exit(f"batch_sizes: {error}")
    if "trained" in saved:
        model.load_weights(weights)
    else:
        train(model, x, y)
        model.save_weights(weights)
        saved["trained"] = True
    print(f"{'batch':>6}" + "".join(f"{label:>26}" for label in _PANELS), flush=True)
    measured = []
    for size in sizes:
        if str(size) not in saved:
            saved[str(size)] = bias(model, x, y, size).tolist()
        measured.append(saved[str(size)])
        cells = "".join(f"{value:>26.4f}" for value in measured[-1])
        print(f"{size:>6}{cells}", flush=True)
    plot(sizes, np.array(measured), output)
    print(f"Not private: a look at unprotected gradients.\nPlot: {output}")


def settings() -> dict[str, Any]:
    """Return what all values depend on."""
    return {
        "data_dir": _DATA_DIR.value,
        "epochs": _EPOCHS.value,
        "batches": _BATCHES.value,
        "l2_norm_clip": _L2_NORM_CLIP.value,
    }


def load_data(data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Load flat images with pixels in [0, 1], and their labels."""
    if data_dir is None:
        x, y = load_digits(return_X_y=True)
        return (x / 16).astype("float32"), y
    path = Path(data_dir) / "mnist.npz"
    if not path.is_file():
        sys.exit(f"batch_sizes: there is no {path}. Leave --data_dir out for digits.")
    with np.load(path) as arrays:
        x, y = arrays["x_train"], arrays["y_train"]
    return x.reshape(len(x), -1).astype("float32") / 255, y


def train(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    """Bring the weights to where training soon is."""
    compiled(model, learning_rate=0.25).fit(
        x, y, batch_size=256, epochs=_EPOCHS.value, verbose=2
    )


def bias(model: keras.Model, x: np.ndarray, y: np.ndarray, size: int) -> np.ndarray:
    """Measure the bias in batches of about one size, with weights that stay."""
    average = Average(size)
    batches = tfdp.data.PoissonDataset(
        x, y, expected_batch_size=size, steps_per_epoch=_BATCHES.value
    )
    compiled(model, learning_rate=0.0).fit(
        batches, callbacks=[tfdp.callbacks.BiasLogger(every=1), average], verbose=0
    )
    return average.values


def compiled(model: keras.Model, learning_rate: float) -> tfdp.DPModel:
    """Wrap the model to train it privately."""
    private = tfdp.DPModel(model, physical_batch_size=512)
    private.compile(
        tfdp.optimizers.DPSGD(
            learning_rate,
            l2_norm_clip=_L2_NORM_CLIP.value,
            noise_multiplier=_NOISE_MULTIPLIER,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return private


def plot(sizes: Sequence[int], measured: np.ndarray, path: Path) -> None:
    """Plot each value over the sizes of the batches."""
    figure, all_axes = plots.panels(2, 2, size=(4.6, 3.0), sharex=True)
    for axes, label, values in zip(all_axes.flat, _LABELS, measured.T, strict=True):
        axes.plot(sizes, values, marker=".", color=plots.PRIVATE, **plots.LINE)
        axes.set(ylabel=label, xscale="log")
        axes.set_ylim(0, 1.08 * values.max())
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xticks([], minor=True)
    for axes in all_axes[-1]:
        axes.set_xlabel("expected batch size, images")
    data = "the digits" if _DATA_DIR.value is None else "MNIST"
    figure.suptitle(
        f"What clipping to {_L2_NORM_CLIP.value:g} does to the mean gradient of {data} "
        "(not private)"
    )
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
