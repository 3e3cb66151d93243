"""Train a small network on handwritten digits, without privacy and with it; export it.

The data are the 1797 images of 8x8 pixels that come with scikit-learn: nothing is
downloaded, and all of it takes about a minute on two cores:

    python examples/train_digits.py
    python examples/train_digits.py --target_epsilon=1
"""

import os
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

_TARGET_EPSILON = flags.DEFINE_float(
    "target_epsilon", 3.5, "Epsilon that the training may cost."
)
_DELTA = flags.DEFINE_float(
    "delta", 1e-4, "Delta of the guarantee: well below 1 / 1437 images."
)
_EPOCHS = flags.DEFINE_integer("epochs", 60, "Number of epochs.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    256,
    "Expected number of images in a batch. Large batches suit private training: the "
    "noise of a step does not grow with them.",
    lower_bound=1,
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.01, "Learning rate of Adam.", lower_bound=0.0
)
_L2_NORM_CLIP = flags.DEFINE_float(
    "l2_norm_clip", 1.0, "Norm that the gradient of an image is clipped to."
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/digits", "Folder for the plot, the history and the models."
)


def main(argv: Sequence[str]) -> None:
    """Train both ways and compare."""
    if len(argv) > 1:
        sys.exit(f"train_digits: everything is a flag. Received: {' '.join(argv[1:])}.")
    output = Path(_OUTPUT_DIR.value)
    train, test = load_data()
    try:
        output.mkdir(parents=True, exist_ok=True)
        model, private, history = train_privately(train, test, output)
    except (OSError, ValueError) as error:
        sys.exit(f"train_digits: {error}")
    baseline = train_without_privacy(train, test)

    model.save(output / "digits.keras")
    private.save(output / "digits_private.keras")
    plots.accuracy_and_epsilon(
        history,
        baseline,
        target_epsilon=_TARGET_EPSILON.value,
        delta=_DELTA.value,
        title="Handwritten digits",
        path=output / "history.png",
    )
    served = tfdp.export.next_version(output / "digits")
    report = tfdp.export.export_private_model(private, served, delta=_DELTA.value)
    print("\n" + private.privacy_statement(delta=_DELTA.value))
    print(
        f"Test accuracy: {history['val_accuracy'][-1]:.1%} private, "
        f"{baseline['val_accuracy'][-1]:.1%} without privacy\n"
        f"Epsilon: {report['epsilon']:.3f} at delta {_DELTA.value:g}\n"
        f"Files in {output}{os.sep}:\n"
        "  digits.keras          the trained model, plain Keras\n"
        "  digits_private.keras  the same to go on training: optimizer and ledger\n"
        "  history.csv           loss, accuracy and epsilon of every epoch\n"
        "  history.png           accuracy and epsilon over the epochs\n"
        f"  {Path(served).relative_to(output)!s:<21} the model for TensorFlow Serving, and its privacy "
        "report"
    )


def train_privately(
    train: Any, test: Any, output: Path
) -> tuple[keras.Model, tfdp.DPModel, dict[str, list[float]]]:
    """Train within the target epsilon."""
    noise_multiplier = tfdp.calibrate_noise_multiplier(
        _TARGET_EPSILON.value,
        n=len(train[0]),
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        delta=_DELTA.value,
    )
    print(
        f"Private training: noise multiplier {noise_multiplier:.3f} for epsilon "
        f"{_TARGET_EPSILON.value:g} at delta {_DELTA.value:g}"
    )
    model = build_model()
    private = tfdp.DPModel(model)
    private.compile(
        optimizer=tfdp.optimizers.DPAdam(
            learning_rate=_LEARNING_RATE.value,
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
        callbacks=[
            tfdp.callbacks.PrivacyBudget(
                delta=_DELTA.value, target_epsilon=_TARGET_EPSILON.value
            ),
            keras.callbacks.CSVLogger(output / "history.csv"),
        ],
        verbose=2,
    )
    return model, private, history.history


def train_without_privacy(train: Any, test: Any) -> dict[str, list[float]]:
    """Train the same model with the same settings in plain Keras."""
    print("\nThe same training without privacy")
    model = build_model()
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=_LEARNING_RATE.value),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    start = time.perf_counter()
    history = model.fit(
        *train,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        validation_data=test,
        verbose=0,
    )
    print(f"{_EPOCHS.value} epochs in {time.perf_counter() - start:.0f} s")
    return history.history


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
    """Build a small convolutional network."""
    # Private training tends to do better with tanh than with relu: activations that
    # are bounded keep gradients short, and clipping changes them less.
    return keras.Sequential([
        keras.Input((8, 8, 1), name="image"),
        layers.Conv2D(16, 3, padding="same", activation="tanh"),
        layers.MaxPooling2D(2),
        layers.Conv2D(32, 3, padding="same", activation="tanh"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(10, activation="softmax", name="digit"),
    ])


if __name__ == "__main__":
    app.run(main)
