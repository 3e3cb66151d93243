"""Compare the time of a private training step with that of an ordinary one.

Both models are the same Keras model with the same data, each step through its own
`train_function`, the one that `fit` calls: noise, optimizer and metrics included.
The steps take turns in one process, so that whatever else the machine does slows
both; the ratio of the medians is what counts.

    python tools/benchmark.py
    python tools/benchmark.py --models=cnn --steps=20 --jit_compile --plot=steps.png
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

import tfdp

_NUMBER_OF_BATCHES = 16


def build_cnn() -> keras.Model:
    """Build the network of the MNIST example."""
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


def build_mlp() -> keras.Model:
    """Build a network of two wide layers, 1.9 million weights."""
    return keras.Sequential([
        keras.Input((784,)),
        layers.Dense(1024, activation="relu"),
        layers.Dense(1024, activation="relu"),
        layers.Dense(10),
    ])


_MODELS: dict[str, Callable[[], keras.Model]] = {"cnn": build_cnn, "mlp": build_mlp}

_CHOSEN = flags.DEFINE_multi_enum(
    "models", list(_MODELS), list(_MODELS), "Models; repeat the flag for several."
)
_ENGINE = flags.DEFINE_string("engine", "vectorized", "Engine of `tfdp.DPModel`.")
_STEPS = flags.DEFINE_integer("steps", 50, "Timed steps of each kind.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 256, "Examples in a batch, on average.", lower_bound=1
)
_JIT_COMPILE = flags.DEFINE_bool("jit_compile", False, "Let XLA compile both models.")
_PLOT = flags.DEFINE_string("plot", None, "PNG file for a plot of the times.")


class Result(NamedTuple):
    """Median milliseconds of a step."""

    model: str
    batches: str
    keras: float
    tfdp: float

    @property
    def ratio(self) -> float:
        """Time of a private step in ordinary ones."""
        return self.tfdp / self.keras


def main(argv: Sequence[str]) -> None:
    """Measure what the flags ask for, and print a table."""
    if len(argv) > 1:
        sys.exit(f"benchmark: everything is a flag. Received: {' '.join(argv[1:])}.")
    print(machine())
    print(
        f"engine {_ENGINE.value!r}, batch size {_BATCH_SIZE.value}, XLA "
        f"{'on' if _JIT_COMPILE.value else 'off'}, medians of {_STEPS.value} steps "
        "each, taken in turns\n"
    )
    print(f"{'model':<8}{'batches':<10}{'Keras ms':>10}{'tfdp ms':>10}{'ratio':>8}")
    results = []
    for name in dict.fromkeys(_CHOSEN.value):
        for result in measure(name):
            print(
                f"{result.model:<8}{result.batches:<10}{result.keras:>10.1f}"
                f"{result.tfdp:>10.1f}{result.ratio:>8.2f}",
                flush=True,
            )
            results.append(result)
    if _PLOT.value is not None:
        plot(results, Path(_PLOT.value))
        print(f"\nPlot: {_PLOT.value}")


def machine() -> str:
    """Describe the versions and the machine, as far as they matter for times."""
    gpus = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"tfdp {tfdp.__version__}, Keras {keras.__version__}, TensorFlow "
        f"{tf.__version__}, Python {platform.python_version()}\n"
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"{', '.join(gpus) or 'no GPU'}{load}"
    )


def measure(name: str) -> Iterator[Result]:
    """Time one model on batches of fixed and of Poisson sizes.

    Args:
        name: Name of the model.

    Yields:
        One result for each kind of batches.
    """
    plain, private = compiled_models(_MODELS[name])
    size, rng = _BATCH_SIZE.value, np.random.default_rng(0)
    for batches, sizes in (
        ("fixed", np.full(_NUMBER_OF_BATCHES, size)),
        ("Poisson", rng.poisson(size, _NUMBER_OF_BATCHES)),
    ):
        times = times_in_turns([
            stepper(model, dataset(plain, sizes, rng)) for model in (plain, private)
        ])
        yield Result(name, batches, *times)


def compiled_models(
    build: Callable[[], keras.Model],
) -> tuple[keras.Model, tfdp.DPModel]:
    """Build an ordinary and a private model that have been fitted for one step."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plain, private = build(), tfdp.DPModel(build(), engine=_ENGINE.value)
    plain.compile(
        keras.optimizers.SGD(0.1),
        loss=loss,
        metrics=["accuracy"],
        jit_compile=_JIT_COMPILE.value,
    )
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1),
        loss=loss,
        metrics=["accuracy"],
        jit_compile=_JIT_COMPILE.value,
    )
    x, y = examples(plain, _BATCH_SIZE.value * 4, np.random.default_rng(0))
    for model in (plain, private):
        model.fit(x, y, batch_size=_BATCH_SIZE.value, steps_per_epoch=1, verbose=0)
    return plain, private


def examples(
    model: keras.Model, number: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw random inputs and labels: times do not depend on them."""
    x = rng.random((number, *model.input_shape[1:]), "float32")
    return x, rng.integers(0, model.output_shape[-1], number)


def dataset(
    model: keras.Model, sizes: np.ndarray, rng: np.random.Generator
) -> tf.data.Dataset:
    """Make an endless pipeline of batches of these sizes, cheap to read."""
    x, y = map(tf.constant, examples(model, sizes.sum(), rng))
    ends = np.cumsum(sizes)
    slices = tf.data.Dataset.from_tensor_slices((ends - sizes, ends))
    return slices.map(lambda start, end: (x[start:end], y[start:end])).repeat()


def stepper(model: keras.Model, data: tf.data.Dataset) -> Callable[[], None]:
    """Return a function that takes one training step and waits for its end."""
    iterator = iter(data.prefetch(2))

    def step() -> None:
        logs = model.train_function(iterator)
        float(logs["loss"])
        # The logs do not wait for the weights, on a GPU at least.
        model.trainable_variables[0].numpy()

    return step


def times_in_turns(steps: Sequence[Callable[[], None]]) -> list[float]:
    """Return the median milliseconds of each step, taken in turns."""
    times: list[list[float]] = [[] for _ in steps]
    # One round over all the batches first: graphs are traced and XLA compiles.
    for number in range(_NUMBER_OF_BATCHES + _STEPS.value):
        for step, of_this_step in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            of_this_step.append((time.perf_counter() - start) * 1000)
        if sys.stderr.isatty():
            print(f"\r{number + 1} steps", end="\r", file=sys.stderr)
    return [statistics.median(all_[_NUMBER_OF_BATCHES:]) for all_ in times]


def plot(results: Sequence[Result], path: Path) -> None:
    """Plot the times, with the ratio above each pair of bars."""
    # Only here, so that the table needs no matplotlib.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(1.5 + 1.5 * len(results), 4), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(results))
    axes.bar(places - 0.2, [result.keras for result in results], 0.4, label="Keras")
    axes.bar(places + 0.2, [result.tfdp for result in results], 0.4, label="tfdp")
    for place, result in zip(places, results, strict=True):
        highest = max(result.keras, result.tfdp)
        axes.annotate(
            f"x{result.ratio:.2f}", (place, highest), ha="center", va="bottom"
        )
    axes.set_xticks(places, [f"{r.model}\n{r.batches}" for r in results])
    axes.set(ylabel="milliseconds a step", title=f"Batch size {_BATCH_SIZE.value}")
    axes.margins(y=0.15)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    app.run(main)
