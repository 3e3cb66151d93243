"""DP-SGD as the textbook writes it, beside the same steps taken by tfdp.

1. The textbook's loop takes one example at a time: gradient, clip, add; then noise.
   tfdp takes the same steps with the same noise: the weights come out equal, and
   the time of a step is compared.
2. One outlier shows why gradients are clipped.
3. A model is trained with tfdp's building blocks in a loop of one's own.

    python examples/from_scratch.py
    python examples/from_scratch.py --dataset=mnist --data_dir=path/to/folder

The digits come with scikit-learn. MNIST is read from --data_dir (or the environment
variable TFDP_DATA), or downloaded by Keras.
"""

import itertools
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdp
from tfdp.accounting import Ledger, PoissonSteps
from tfdp.mechanisms import Gaussian

# Poisson batches differ in size: TensorFlow traces a graph for the first one, and in
# the second step one for all sizes.
WARM_UP = 2

BATCH_SIZE = 64
LEARNING_RATE = 0.1
L2_NORM_CLIP = 1.0
NOISE_MULTIPLIER = 1.0
OUTLIER_NORM = 1e6

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

_DATASET = flags.DEFINE_enum("dataset", "digits", ["digits", "mnist"], "Images.")
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder with mnist.npz. Default: TFDP_DATA, or a download."
)
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Number of epochs.", lower_bound=1)
_TEXTBOOK_STEPS = flags.DEFINE_integer(
    "textbook_steps", 20, "Steps that are taken both ways.", lower_bound=1
)


def main(argv: Sequence[str]) -> None:
    """Run the three parts."""
    if len(argv) > 1:
        sys.exit(f"from_scratch: everything is a flag. Received: {' '.join(argv[1:])}.")
    (x, y), test = load_mnist() if _DATASET.value == "mnist" else load_small_digits()
    # Every batch is a draw of its own: each example is in it with the same small
    # probability, so batches differ in size. The epsilon at the end relies on it.
    batches = tfdp.data.PoissonDataset(x, y, expected_batch_size=BATCH_SIZE)
    print(f"{len(x)} images, {len(batches)} steps an epoch\n")
    compare_steps(batches)
    show_outlier(x[:BATCH_SIZE], y[:BATCH_SIZE])
    train(batches, test)


def compare_steps(batches: tfdp.data.PoissonDataset) -> None:
    """Take the same steps both ways; compare weights and times."""
    print("1. The textbook's steps and tfdp's, with the same noise", flush=True)
    textbook = build_model(batches)
    model = keras.models.clone_model(textbook)
    model.set_weights(textbook.get_weights())

    # The one place for a seed: only with the same noise can weights be compared.
    # Whoever knows the seed can subtract the noise, so part 3 has none.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = make_optimizer(noise_seed=0)
        noise_source = Gaussian(noise_seed=0)
    textbook_graph = tf.function(textbook_step, reduce_retracing=True)
    tfdp_step = make_step(model, optimizer)

    times: list[tuple[float, float]] = []
    difference = 0.0
    for step in range(WARM_UP + _TEXTBOOK_STEPS.value):
        x, y = map(tf.convert_to_tensor, batches[step % len(batches)])
        noise = normal_numbers(noise_source, textbook, step)
        start = time.perf_counter()
        textbook_graph(textbook, x, y, noise)
        middle = time.perf_counter()
        tfdp_step(x, y)
        times.append((middle - start, time.perf_counter() - middle))
        difference = max(
            np.max(np.abs(a - b))
            for a, b in zip(textbook.get_weights(), model.get_weights(), strict=True)
        )
        if step == 0:
            print(f"  largest difference of a weight after 1 step: {difference:.1e}")
    slow, fast = np.median(times[WARM_UP:], axis=0) * 1000
    start = time.perf_counter()
    textbook_step(textbook, x, y, noise)
    eager = (time.perf_counter() - start) * 1000
    print(
        f"  after {len(times)} steps: {difference:.1e}\n"
        f"  median step: tfdp {fast:.1f} ms, textbook {slow:.1f} ms, ratio "
        f"{slow / fast:.1f}; textbook without tf.function {eager:.0f} ms, ratio "
        f"{eager / fast:.0f}\n"
    )


def textbook_step(
    model: keras.Model, x: tf.Tensor, y: tf.Tensor, noise: list[tf.Tensor]
) -> None:
    """Take one step of DP-SGD, one example at a time.

    Args:
        model: The model.
        x: Images, shape (N, d).
        y: Labels, shape (N,).
        noise: Standard normal numbers, one tensor for each variable.
    """
    clipped_sum = [tf.zeros(variable.shape) for variable in model.trainable_variables]
    for i in tf.range(tf.shape(x)[0]):
        with tf.GradientTape() as tape:
            loss = LOSS(y[i : i + 1], model(x[i : i + 1], training=True))
        gradient = tape.gradient(loss, model.trainable_variables)
        norm = tf.linalg.global_norm(gradient)
        factor = tf.minimum(1.0, L2_NORM_CLIP / norm)
        clipped_sum = [
            total + factor * part
            for total, part in zip(clipped_sum, gradient, strict=True)
        ]
    for variable, total, numbers in zip(
        model.trainable_variables, clipped_sum, noise, strict=True
    ):
        noised = total + NOISE_MULTIPLIER * L2_NORM_CLIP * numbers
        # The expected batch size, never the size of x: who was drawn is private.
        variable.assign_sub(LEARNING_RATE * noised / BATCH_SIZE)


def normal_numbers(source: Gaussian, model: keras.Model, step: int) -> list[tf.Tensor]:
    """Return the standard normal numbers that tfdp draws in a step."""
    zeros = tfdp.ClippedSum(
        gradients=[tf.zeros(variable.shape) for variable in model.trainable_variables],
        norms=tf.zeros([0]),
        l2_norm_clip=tf.constant(1.0),
        examples_per_unit=1,
    )
    return source.noised(
        zeros,
        noise_multiplier=tf.constant(1.0),
        stream=source.stream(tf.constant(step, tf.int64)),
    )


def make_optimizer(noise_seed: int | None = None) -> tfdp.optimizers.DPOptimizer:
    """Make the private optimizer; without a seed its noise is secret."""
    return tfdp.optimizers.DPSGD(
        learning_rate=LEARNING_RATE,
        l2_norm_clip=L2_NORM_CLIP,
        noise_multiplier=NOISE_MULTIPLIER,
        expected_batch_size=BATCH_SIZE,
        noise_seed=noise_seed,
    )


def make_step(model: keras.Model, optimizer: tfdp.optimizers.DPOptimizer) -> Any:
    """Make a function that takes one private step with tfdp."""
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        clipped_sum = tfdp.clipped_gradients(
            model, LOSS, x, y, l2_norm_clip=optimizer.l2_norm_clip
        )
        optimizer.apply_clipped_sum(clipped_sum, model.trainable_variables)

    return step


def show_outlier(x: np.ndarray, y: np.ndarray) -> None:
    """Show the noise that hides one outlier, with clipping and without."""
    print("2. One outlier among the examples of a batch")
    model = build_model(x)
    norms = gradient_norms(model, x, y)
    weights = np.ones(len(x), "float32")
    weights[0] = OUTLIER_NORM / norms[0]
    norms = gradient_norms(model, x, y, weights)
    print(
        f"  gradient norms: median {np.median(norms):.2f}, largest {norms.max():.3g}\n"
        "  standard deviation of the noise on each weight:\n"
        f"    without clipping {NOISE_MULTIPLIER * norms.max():.3g}, for this batch "
        "alone: no bound holds for the next\n"
        f"    clipped to {L2_NORM_CLIP:g}   {NOISE_MULTIPLIER * L2_NORM_CLIP:.3g}, "
        "for every batch\n"
    )


def gradient_norms(
    model: keras.Model, x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Return the norm of each example's gradient before clipping; not private."""
    clipped_sum = tfdp.clipped_gradients(
        model, LOSS, x, y, weights, l2_norm_clip=L2_NORM_CLIP
    )
    return clipped_sum.norms.numpy()


def train(batches: tfdp.data.PoissonDataset, test: Any) -> None:
    """Train a fresh model privately, with progress."""
    print(f"3. Training for {_EPOCHS.value} epochs with tfdp")
    model = build_model(batches)
    optimizer = make_optimizer()
    step = make_step(model, optimizer)
    model.compile(loss=LOSS, metrics=["accuracy"])  # for `evaluate` only
    for epoch in range(1, _EPOCHS.value + 1):
        progress = keras.utils.Progbar(len(batches), unit_name="step")
        for i in range(len(batches)):
            step(*map(tf.convert_to_tensor, batches[i]))
            progress.update(i + 1)
        _, accuracy = model.evaluate(*test, verbose=0)
        # A loop of one's own is accounted by its author: these steps were Poisson
        # draws. `optimizer.ledger` cannot know that and assumes the worst.
        ledger = Ledger().add(
            PoissonSteps(
                steps=epoch * len(batches),
                noise_multiplier=NOISE_MULTIPLIER,
                number_of_examples=batches.number_of_examples,
                expected_batch_size=batches.expected_batch_size,
            )
        )
        delta = 0.1 / batches.number_of_examples
        print(
            f"  epoch {epoch}: test accuracy {accuracy:.1%}, epsilon "
            f"{ledger.epsilon(delta):.2f} at delta {delta:.1e}"
        )


def build_model(data: Any) -> keras.Model:
    """Build a network with one hidden layer of 100 units."""
    x = data[0][0] if isinstance(data, tfdp.data.PoissonDataset) else data
    return keras.Sequential([
        keras.Input(x.shape[1:]),
        keras.layers.Dense(100, activation="relu"),
        keras.layers.Dense(10),
    ])


def load_small_digits() -> tuple[Any, Any]:
    """Load scikit-learn's images of 8x8 pixels as rows."""
    x, y = load_digits(return_X_y=True)
    x = x.astype("float32") / 16
    x, x_test, y, y_test = train_test_split(
        x, y, test_size=0.2, stratify=y, random_state=0
    )
    return (x, y), (x_test, y_test)


def load_mnist() -> tuple[Any, Any]:
    """Load MNIST's images of 28x28 pixels as rows."""
    folder = _DATA_DIR.value or os.environ.get("TFDP_DATA")
    if folder is None:
        splits = itertools.chain(*keras.datasets.mnist.load_data())
    else:
        path = Path(folder) / "mnist.npz"
        if not path.is_file():
            sys.exit(
                f"from_scratch: there is no {path}. Give the folder of mnist.npz with "
                "--data_dir or TFDP_DATA, or neither to let Keras download it."
            )
        with np.load(path) as arrays:
            splits = [
                arrays[name] for name in ("x_train", "y_train", "x_test", "y_test")
            ]
    x, y, x_test, y_test = splits
    x, x_test = (
        images.reshape(len(images), -1).astype("float32") / 255
        for images in (x, x_test)
    )
    return (x, y), (x_test, y_test)


if __name__ == "__main__":
    app.run(main)
