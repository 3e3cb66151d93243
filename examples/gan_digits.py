"""Train a GAN on handwritten digits, with privacy and without it.

Two networks learn from each other. The discriminator sees the data, so it is trained
privately. The generator sees none of them: it asks the discriminator, whose weights have
been noised by then, how real its images look. What is computed from released weights
costs nothing, so one ledger, that of the discriminator, is the price of both networks
and of all images that they will ever draw:

    python examples/gan_digits.py
    python examples/gan_digits.py --target_epsilon=1

The data are the 1797 images of 8x8 pixels that come with scikit-learn. All of it takes
about two minutes on two cores. That is a small GAN, trained for few steps: with privacy
and without it, the images of a digit differ little from each other.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import plots
import tensorflow as tf
from absl import app, flags
from keras import layers, ops
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import tfdp

CLASSES, CODE = 10, 8

_TARGET_EPSILON = flags.DEFINE_float(
    "target_epsilon", 3.0, "Epsilon that the training may cost."
)
_DELTA = flags.DEFINE_float(
    "delta", 1e-4, "Delta of the guarantee: well below 1 / 1437 images."
)
_EPOCHS = flags.DEFINE_integer("epochs", 130, "Number of epochs.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    512,
    "Expected number of images in the discriminator's batch, and the number in the "
    "generator's, which are all its own.",
    lower_bound=1,
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.01, "Learning rate of the discriminator.", lower_bound=0.0
)
_GENERATOR_LEARNING_RATE = flags.DEFINE_float(
    "generator_learning_rate", 1e-3, "Learning rate of the generator.", lower_bound=0.0
)
_L2_NORM_CLIP = flags.DEFINE_float(
    "l2_norm_clip", 1.0, "Norm that the gradient of an image is clipped to."
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/gan", "Folder for the samples and the networks."
)


def main(argv: Sequence[str]) -> None:
    """Train both ways and compare."""
    if len(argv) > 1:
        sys.exit(f"gan_digits: everything is a flag. Received: {' '.join(argv[1:])}.")
    output = Path(_OUTPUT_DIR.value)
    train, test = load_data()
    try:
        output.mkdir(parents=True, exist_ok=True)
        private, discriminator, generator = train_privately(train)
    except (OSError, ValueError) as error:
        sys.exit(f"gan_digits: {error}")
    plain = train_without_privacy(train)

    discriminator.save(output / "discriminator.keras")
    generator.save(output / "generator.keras")
    epsilon = private.epsilon(_DELTA.value)
    plot({f"epsilon {epsilon:.2g}": generator, "without privacy": plain}, output)
    print("\n" + private.privacy_statement(delta=_DELTA.value))
    print(
        "Released under it: the weights of both networks, and samples. The generator "
        "saw no image, only the released weights of the discriminator after each "
        "step.\n"
        "Test accuracy of a linear classifier that saw only samples: "
        f"{accuracy(generator, test):.1%} private, {accuracy(plain, test):.1%} without "
        "privacy\n"
        f"Epsilon: {epsilon:.3f} at delta {_DELTA.value:g}\n"
        f"Files in {output}{os.sep}:\n"
        "  discriminator.keras  tells real images from others\n"
        "  generator.keras      draws images, from a code and a digit\n"
        "  samples.png          what both generators draw"
    )


class Contest(keras.Model):
    """The discriminator's side: for each real image it sees one of the generator's.

    The loss of a row is that of the real image and of the drawn one, so both are in one
    gradient, which is clipped as a whole. Without the row neither is there.

    Args:
        discriminator: What is trained.
        draw: Draws so many ``(images, digits)``.
    """

    def __init__(
        self, discriminator: keras.Model, draw: Callable[[Any], tuple[Any, Any]]
    ) -> None:
        super().__init__()
        self.discriminator = discriminator
        # A function, in which Keras finds no variables: what draws is not trained here.
        self.draw = draw

    def call(self, inputs: tuple[Any, Any]) -> Any:
        """Score real and drawn images, shape ``(N, 2)``."""
        drawn = self.draw(ops.shape(inputs[0])[0])
        scores = [self.discriminator(list(each)) for each in (inputs, drawn)]
        return ops.stack(scores, axis=1)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> Any:
        """Ask for high scores of what is real, and for low ones of what is not."""
        real, drawn = y_pred[:, 0], y_pred[:, 1]
        return ops.mean(ops.softplus(-real) + ops.softplus(drawn))


class GeneratorSteps(keras.callbacks.Callback):
    """Trains the generator after each step of the discriminator.

    Nothing of the data comes here: the images are the generator's own, as many as a flag
    says and not as many as were in the batch, and the weights that score them have been
    noised.

    Args:
        discriminator: Scores images.
        generator: What is trained.
        draw: Draws so many ``(images, digits)`` from the generator.
    """

    def __init__(
        self,
        discriminator: keras.Model,
        generator: keras.Model,
        draw: Callable[[Any], tuple[Any, Any]],
    ) -> None:
        super().__init__()
        optimizer = keras.optimizers.Adam(_GENERATOR_LEARNING_RATE.value, beta_1=0.5)
        optimizer.build(generator.trainable_variables)
        number = _BATCH_SIZE.value

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                scores = discriminator(list(draw(number)))
                loss = ops.mean(ops.softplus(-scores))
            gradients = tape.gradient(loss, generator.trainable_variables)
            optimizer.apply(gradients, generator.trainable_variables)

        self._step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take a step."""
        self._step()


class Progress(keras.callbacks.Callback):
    """Prints what has been spent. The losses are of the data, and stay here."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Print a line for every tenth epoch."""
        if (epoch + 1) % 10 == 0:
            spent = f", epsilon {logs['epsilon']:.2f}" if "epsilon" in logs else ""
            print(f"Epoch {epoch + 1}/{_EPOCHS.value}{spent}", flush=True)


def train_privately(train: Any) -> tuple[tfdp.DPModel, keras.Model, keras.Model]:
    """Train within the target epsilon; return the ledger's model and both networks."""
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
    discriminator, generator, draw = build_networks()
    private = tfdp.DPModel(Contest(discriminator, draw))
    private.compile(
        tfdp.optimizers.DPAdam(
            learning_rate=_LEARNING_RATE.value,
            beta_1=0.5,
            l2_norm_clip=_L2_NORM_CLIP.value,
            noise_multiplier=noise_multiplier,
        )
    )
    budget = tfdp.callbacks.PrivacyBudget(
        delta=_DELTA.value, target_epsilon=_TARGET_EPSILON.value
    )
    # Images and digits are inputs both: there is nothing to predict.
    private.fit(
        train,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        callbacks=[budget, GeneratorSteps(discriminator, generator, draw), Progress()],
        verbose=0,
    )
    return private, discriminator, generator


def train_without_privacy(train: Any) -> keras.Model:
    """Train the same networks in plain Keras; return the generator."""
    print("\nThe same training without privacy")
    discriminator, generator, draw = build_networks()
    contest = Contest(discriminator, draw)
    contest.compile(keras.optimizers.Adam(_LEARNING_RATE.value, beta_1=0.5))
    contest.fit(
        train,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        callbacks=[GeneratorSteps(discriminator, generator, draw), Progress()],
        verbose=0,
    )
    return generator


def build_networks() -> tuple[
    keras.Model, keras.Model, Callable[[Any], tuple[Any, Any]]
]:
    """Build the discriminator and the generator, and what draws from the latter."""
    image, digit = keras.Input((8, 8, 1)), keras.Input((), dtype="int32")
    x = layers.Dense(32, activation="leaky_relu")(layers.Flatten()(image))
    # A score for each digit, of which one counts. With the digit among the inputs of the
    # first layer noise hides what it is good for.
    scores = layers.Dense(CLASSES)(x) * ops.one_hot(digit, CLASSES)
    discriminator = keras.Model([image, digit], ops.sum(scores, axis=1))

    code, digit = keras.Input((CODE,)), keras.Input((), dtype="int32")
    x = layers.concatenate([code, ops.one_hot(digit, CLASSES)])
    for _ in range(2):
        x = layers.Dense(64, activation="relu")(x)
    pixels = layers.Reshape((8, 8, 1))(layers.Dense(64, activation="sigmoid")(x))
    generator = keras.Model([code, digit], pixels)
    seed = keras.random.SeedGenerator()

    def draw(number: Any) -> tuple[Any, Any]:
        digits = keras.random.randint((number,), 0, CLASSES, seed=seed)
        codes = keras.random.normal((number, CODE), seed=seed)
        return generator([codes, digits]), digits

    return discriminator, generator, draw


def samples(generator: keras.Model, digits: np.ndarray) -> np.ndarray:
    """Draw an image of each of some digits."""
    codes = keras.random.normal((len(digits), CODE), seed=1)
    drawn = generator([codes, ops.convert_to_tensor(digits)])
    images: np.ndarray = ops.convert_to_numpy(drawn)
    return images


def accuracy(generator: keras.Model, test: Any) -> float:
    """Return how many real images a classifier knows that saw only drawn ones."""
    digits = np.arange(2000) % CLASSES
    classifier = LogisticRegression(C=0.1, max_iter=1000)
    classifier.fit(samples(generator, digits).reshape(-1, 64), digits)
    images, labels = test
    return float(classifier.score(images.reshape(-1, 64), labels))


def load_data() -> tuple[Any, Any]:
    """Split the images and digits into training and test data."""
    digits = load_digits()
    # 16 is the largest value a pixel can have, not a statistic of the data.
    images = digits.images[..., np.newaxis].astype("float32") / 16
    x, x_test, y, y_test = train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    return (x, y), (x_test, y_test)


def plot(generators: dict[str, keras.Model], output: Path) -> None:
    """Show ten images of each digit, of each generator."""
    figure, [panels] = plots.panels(1, len(generators), size=(3.2, 3.4))
    for axes, (title, generator) in zip(panels, generators.items(), strict=True):
        drawn = samples(generator, np.repeat(np.arange(CLASSES), 10))[..., 0]
        # A white edge around each.
        drawn = np.pad(drawn, [(0, 0), (1, 1), (1, 1)])
        rows = drawn.reshape(CLASSES, 10, 10, 10).transpose(0, 2, 1, 3)
        axes.imshow(rows.reshape(100, 100), cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(title)
        axes.set_axis_off()
    plots.save(figure, output / "samples.png")


if __name__ == "__main__":
    app.run(main)
