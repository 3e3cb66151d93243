"""Train on MNIST with the settings of TensorFlow Privacy's tutorial table.

Prints the test accuracy beside the published one and the epsilon by both
accountants, and plots them over the epochs:

    python examples/mnist.py --row=1
    python examples/mnist.py --row=2 --data_dir=path/to/folder/with/mnist.npz

Row 1 is the shortest. With --resume a training that was killed goes on from its last
epoch, and all its steps count, those that were lost too. Without --data_dir (or the environment variable TFDP_DATA)
Keras downloads the images.
"""

import os

# Convolutions take half of the time with it; TensorFlow leaves it off on some CPUs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import plots
from absl import app, flags
from keras import layers
from saved import read_history

import tfdp

DELTA = 1e-5
BATCH_SIZE = 256


class Row(NamedTuple):
    """A row of the table: settings, and the test accuracy published for them."""

    learning_rate: float
    noise_multiplier: float
    l2_norm_clip: float
    epochs: int
    published_accuracy: float


ROWS = {
    "1": Row(0.25, 1.3, 1.5, epochs=15, published_accuracy=0.950),
    "2": Row(0.15, 1.1, 1.0, epochs=60, published_accuracy=0.966),
    "3": Row(0.25, 0.7, 1.5, epochs=45, published_accuracy=0.970),
}

_ROW = flags.DEFINE_enum("row", "1", list(ROWS), "Row of the table.")
_EPOCHS = flags.DEFINE_integer(
    "epochs", None, "Number of epochs instead of the row's.", lower_bound=1
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with mnist.npz. Default: the environment variable TFDP_DATA; without it "
    "Keras downloads the file.",
)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with a training that was killed.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/mnist", "Folder for the plot, the history and the model."
)
_ENGINE = flags.DEFINE_string("engine", "auto", "Engine of `tfdp.DPModel`.")


def main(argv: Sequence[str]) -> None:
    """Train one row of the table and report."""
    if len(argv) > 1:
        sys.exit(f"mnist: everything is a flag. Received: {' '.join(argv[1:])}.")
    row = ROWS[_ROW.value]
    epochs = _EPOCHS.value or row.epochs
    train, test = load_mnist(_DATA_DIR.value)
    output = Path(_OUTPUT_DIR.value) / f"row{_ROW.value}"
    output.mkdir(parents=True, exist_ok=True)
    if not _RESUME.value:
        shutil.rmtree(output / "backup", ignore_errors=True)

    model = build_model()
    private = tfdp.DPModel(model, engine=_ENGINE.value)
    private.compile(
        optimizer=tfdp.optimizers.DPSGD(
            learning_rate=row.learning_rate,
            l2_norm_clip=row.l2_norm_clip,
            noise_multiplier=row.noise_multiplier,
            # Averaging what was released costs no privacy and takes noise away.
            use_ema=True,
            ema_momentum=0.99,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.perf_counter()
    private.fit(
        *train,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        validation_data=test,
        callbacks=[
            tfdp.callbacks.PrivacyBudget(delta=DELTA),
            keras.callbacks.CSVLogger(output / "history.csv", append=_RESUME.value),
            keras.callbacks.BackupAndRestore(output / "backup"),
        ],
        verbose=2,
    )
    seconds = time.perf_counter() - start

    reached = private.evaluate(*test, verbose=0, return_dict=True)["accuracy"]
    model.save(output / "mnist.keras")
    plot(read_history(output / "history.csv"), reached, row, output / "history.png")
    print("\n" + private.privacy_statement(delta=DELTA))
    print(
        f"{private.ledger.steps} steps in {seconds:.0f} s\n"
        f"Test accuracy: {reached:.2%}, published "
        f"{row.published_accuracy:.1%} after {row.epochs} epochs\n"
        f"Epsilon at delta {DELTA:g}: "
        f"{private.ledger.epsilon(DELTA, 'RDP'):.3f} (RDP), "
        f"{private.ledger.epsilon(DELTA, 'PLD'):.3f} (PLD)\n"
        f"Plot, history and model: {output}{os.sep}"
    )


def load_mnist(data_dir: str | None) -> tuple[Any, Any]:
    """Load (images, labels) for training and test, pixels in [0, 1]."""
    data_dir = data_dir or os.environ.get("TFDP_DATA")
    if data_dir is None:
        (x, y), (x_test, y_test) = keras.datasets.mnist.load_data()
    else:
        path = Path(data_dir) / "mnist.npz"
        if not path.is_file():
            sys.exit(
                f"mnist: there is no {path}. Give the folder of mnist.npz with "
                "--data_dir or TFDP_DATA, or neither to let Keras download it."
            )
        with np.load(path) as arrays:
            x, y = arrays["x_train"], arrays["y_train"]
            x_test, y_test = arrays["x_test"], arrays["y_test"]
    # 255 is the largest value a pixel can have, not a statistic of the data.
    return (_scaled(x), y), (_scaled(x_test), y_test)


def _scaled(images: np.ndarray) -> np.ndarray:
    return images[..., np.newaxis].astype("float32") / 255


def build_model() -> keras.Model:
    """Build the network of the tutorial, which returns logits."""
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


def plot(history: dict[str, list[float]], reached: float, row: Row, path: Path) -> None:
    """Plot test accuracy and epsilon over the epochs, and the accuracy at the end."""
    epochs = range(1, len(history["epsilon"]) + 1)
    figure, [[accuracy], [epsilon]] = plots.panels(2, 1, size=(6.5, 3.0), sharex=True)
    percent = 100 * np.array(history["val_accuracy"])
    plots.curve(accuracy, epochs, percent, "private", plots.PRIVATE)
    accuracy.plot(
        epochs[-1], 100 * reached, "*", color=plots.PRIVATE, label="its mean weights"
    )
    accuracy.axhline(
        100 * row.published_accuracy,
        color="black",
        linestyle="--",
        linewidth=1,
        label=f"published, {row.epochs} epochs",
    )
    accuracy.set(ylabel="test accuracy, %")
    plots.curve(epsilon, epochs, history["epsilon"], "spent", plots.PRIVATE)
    epsilon.set(ylabel=f"epsilon at delta {DELTA:g}")
    epsilon.set_ylim(bottom=0)
    plots.over_epochs(epsilon, len(epochs))
    for axes in (accuracy, epsilon):
        plots.name_curves(axes)
    figure.suptitle(
        f"MNIST: learning rate {row.learning_rate}, noise multiplier "
        f"{row.noise_multiplier}, clip norm {row.l2_norm_clip}",
        fontsize="medium",
    )
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
