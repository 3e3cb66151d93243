"""Steps of tfdp and of Keras on TensorFlow.

Each goes through the model's own `train_function`, the one that `fit` calls: noise,
optimizer and metrics included.
"""

import argparse
import copy
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# TensorFlow leaves it off on some CPUs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import keras_models
import numpy as np
import steps
import tensorflow as tf

import tfdp
from tfdp.clipping import ClippedSum
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine

_NUMBER_OF_BATCHES = 16

_EXAMPLES_PER_CLIENT = 5

_BATCHES_OF_AN_EPOCH = 30
_ROWS_OF_USER = 4

# With bins of 256 as many images as MNIST has, nearly; and those that are shuffled.
_BINS, _BUFFER = 234, 10_000

_WITH_BATCH_NORMALIZATION = ("mobilenet_v2", "resnet50")

# Of the private model of a row.
OPTIONS = {
    "vectorized": {"engine": "vectorized"},
    "fast_gradient_clipping": {"engine": GhostEngine(norms="instantiate")},
    "ghost": {"engine": GhostEngine(norms="gram")},
    "bookkeeping": {"engine": BookkeepingEngine()},
    "passes": {"engine": BookkeepingEngine(), "physical_batch_size": 256},
    "sat": {"engine": BookkeepingEngine()},
    "bam_sam": {"engine": BookkeepingEngine()},
    "bam_exact": {"engine": BookkeepingEngine()},
    "vectorized_bam_sam": {"engine": "vectorized"},
}

_ASCENTS = {
    "sat": lambda loss: tfdp.losses.SAT(loss, radius=0.03),
    "bam_sam": lambda loss: tfdp.losses.BAM(loss, radius=0.02),
    "bam_exact": lambda loss: tfdp.losses.BAM(loss, radius=0.02, ascent="exact"),
    "vectorized_bam_sam": lambda loss: tfdp.losses.BAM(loss, radius=0.02),
}


def stepper(options: argparse.Namespace, row: str) -> steps.Step:
    """Return the step of a row.

    The first one is a step of `fit`, which builds the `train_function`.
    """
    if row.startswith("federated"):
        return federated_rounds(options, row)
    if row.startswith("read_"):
        return passes_over_files(options, row)
    if row.startswith("noise"):
        return noise(row)
    if row.startswith("fit_"):
        return epochs_of_fit(options, row.removeprefix("fit_"))
    model = build(options.model)
    optimizer: keras.optimizers.Optimizer = keras.optimizers.SGD(steps.LEARNING_RATE)
    if row != "ordinary":
        model = tfdp.DPModel(model, **OPTIONS[row])
        optimizer = tfdp.optimizers.DPSGD(
            steps.LEARNING_RATE,
            l2_norm_clip=steps.L2_NORM_CLIP,
            noise_multiplier=steps.NOISE_MULTIPLIER,
            expected_batch_size=options.batch_size,
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer,
        loss=_ASCENTS[row](loss) if row in _ASCENTS else loss,
        metrics=["accuracy"],
        jit_compile=options.jit_compile,
    )
    data = dataset(options)
    iterator = iter(data)

    def step() -> None:
        if model.train_function is None:
            model.fit(data, steps_per_epoch=1, verbose=0)
            return
        logs = model.train_function(iterator)
        float(logs["loss"])
        # The logs do not wait for the weights, on a GPU at least.
        model.trainable_variables[-1].numpy()

    return step


def epochs_of_fit(options: argparse.Namespace, way: str) -> steps.Step:
    """Return some epochs of `fit`, of which those after the first are timed.

    Args:
        options: Of the command line.
        way: How `fit` gets the rows: a name in `_WAYS`.
    """
    is_private, model_options, given = copy.deepcopy(_WAYS[way])
    model = build(options.model)
    optimizer: keras.optimizers.Optimizer = keras.optimizers.SGD(steps.LEARNING_RATE)
    if is_private:
        size = options.batch_size if model_options.pop("in_passes", False) else None
        model = tfdp.DPModel(model, physical_batch_size=size, **model_options)
        optimizer = tfdp.optimizers.DPSGD(
            steps.LEARNING_RATE,
            l2_norm_clip=steps.L2_NORM_CLIP,
            noise_multiplier=steps.NOISE_MULTIPLIER,
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    rows = _BATCHES_OF_AN_EPOCH * options.batch_size
    data = given(*steps.examples(options.model, rows), options.batch_size)

    def step() -> float:
        clock = _EpochClock()
        model.fit(**data, epochs=3, verbose=0, callbacks=[clock])
        first, *later = itertools.pairwise(clock.times)
        del first
        seconds = sum(past - begin for begin, past in later) / len(later)
        return 1000 * seconds / _BATCHES_OF_AN_EPOCH

    return step


class _EpochClock(keras.callbacks.Callback):
    """Notes when epochs begin, and when the last one has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())

    def on_train_end(self, logs: Any = None) -> None:
        self.times.append(time.perf_counter())


def _arrays(x: Any, y: Any, batch_size: int) -> dict[str, Any]:
    return {"x": x, "y": y, "batch_size": batch_size}


def _pipeline(x: Any, y: Any, batch_size: int) -> dict[str, Any]:
    slices = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x))
    return {"x": slices.batch(batch_size).prefetch(tf.data.AUTOTUNE)}


def _declared(x: Any, y: Any, batch_size: int) -> dict[str, Any]:
    declared = tfdp.data.declare(
        _pipeline(x, y, batch_size)["x"],
        number_of_examples=len(x),
        expected_batch_size=batch_size,
        sampling="shuffle",
    )
    return {"x": declared}


def _bounded(x: Any, y: Any, batch_size: int) -> dict[str, Any]:
    scheme = tfdp.sampling.TruncatedPoisson(len(x), batch_size, len(x))
    data = tfdp.data.PoissonDataset(
        x, y, expected_batch_size=batch_size, max_batch_size=scheme.free_bound
    )
    return {"x": data}


def _in_files(x: Any, y: Any, batch_size: int) -> dict[str, Any]:
    # As long as the rows live the folder does.
    directory = tempfile.TemporaryDirectory()
    _directories.append(directory)
    batches = len(x) // batch_size
    bins = tfdp.data.BallsInBins.write((x, y), directory.name, batches)
    return {"x": bins}


def _users(x: Any, y: Any, batch_size: int) -> dict[str, Any]:
    ids = np.arange(len(x)) // _ROWS_OF_USER
    users = batch_size // _ROWS_OF_USER
    options = {"user_ids": ids, "examples_per_user": _ROWS_OF_USER}
    return {**_arrays(x, y, users), **options}


_directories: list["tempfile.TemporaryDirectory[str]"] = []

# Whether it is private, options of the model, what `fit` gets.
_WAYS: dict[str, tuple[bool, dict[str, Any], Any]] = {
    "ordinary": (False, {}, _arrays),
    "ordinary_pipeline": (False, {}, _pipeline),
    "poisson": (True, {}, _arrays),
    "poisson_in_passes": (True, {"in_passes": True}, _arrays),
    "bounded_poisson": (True, {}, _bounded),
    "shuffled": (True, {"sampling": "shuffle"}, _arrays),
    "declared": (True, {}, _declared),
    "balls_in_bins": (True, {"sampling": "balls_in_bins"}, _arrays),
    "bins_in_files": (True, {}, _in_files),
    "users": (True, {"unit": "user"}, _users),
}


def noise(row: str) -> steps.Step:
    """Return what adds noise to a million numbers, or as many ones for comparison.

    Args:
        row: ``"noise_of_tfdp"``, ``"noise_of_tensorflow"``, whose normal numbers
            end at 5.65 sigma, or ``"noise_memory"``, a sum of two tensors.
    """
    numbers = tf.zeros([steps.NUMBERS_OF_NOISE])
    mechanism = tfdp.mechanisms.Gaussian()

    def added(number: tf.Tensor) -> tf.Tensor:
        if row == "noise_memory":
            return numbers + tf.cast(number, tf.float32)
        stream = mechanism.stream(number)
        if row == "noise_of_tensorflow":
            return numbers + tf.random.stateless_normal(numbers.shape, stream)
        clip = tf.constant(steps.L2_NORM_CLIP)
        clipped_sum = ClippedSum([numbers], tf.zeros([0]), clip, 1)
        multiplier = tf.constant(steps.NOISE_MULTIPLIER)
        options = {"noise_multiplier": multiplier, "stream": stream}
        return mechanism.noised(clipped_sum, **options)[0]

    function = tf.function(added, autograph=False)
    count = itertools.count()

    def step() -> None:
        function(tf.constant(next(count), tf.int64)).numpy()

    return step


def passes_over_files(options: argparse.Namespace, row: str) -> steps.Step:
    """Return a pass over all images in the files of bins, which are read only.

    Args:
        options: Of the command line.
        row: ``"read_bins"``, bin after bin as `fit` gets them, or ``"read_shuffled"``:
            files in a random order, rows through a buffer, cut into batches.
    """
    directory, bins = _bins_in_files(options.model, options.batch_size)
    is_in_bins = row == "read_bins"
    data = bins.dataset if is_in_bins else _shuffled_files(directory.name, options)

    def step() -> None:
        for _ in data:
            pass

    return step


@functools.cache
def _bins_in_files(
    model: str, batch_size: int
) -> tuple["tempfile.TemporaryDirectory[str]", tfdp.data.BallsInBins]:
    """Write images of random numbers into bins, once for all rows."""
    directory = tempfile.TemporaryDirectory()
    rows = steps.examples(model, _BINS * batch_size)
    return directory, tfdp.data.BallsInBins.write(rows, directory.name, _BINS)


def _shuffled_files(directory: str, options: argparse.Namespace) -> tf.data.Dataset:
    """Make the usual pipeline of the same files."""
    parts = steps.examples(options.model, 1)
    files = tuple(
        sorted(map(str, Path(directory).glob(f"bin-*-{place}.rows")))
        for place in range(len(parts))
    )

    def records(*names: tf.Tensor) -> tf.data.Dataset:
        pairs = zip(names, parts, strict=True)
        of_parts = [tf.data.FixedLengthRecordDataset(n, p.nbytes) for n, p in pairs]
        return tf.data.Dataset.zip(tuple(of_parts))

    def decoded(*records: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tuple(
            tf.reshape(tf.io.decode_raw(record, part.dtype), [-1, *part.shape[1:]])
            for record, part in zip(records, parts, strict=True)
        )

    names = tf.data.Dataset.from_tensor_slices(files).shuffle(_BINS)
    batches = names.flat_map(records).shuffle(_BUFFER).batch(options.batch_size)
    return batches.map(decoded, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def federated_rounds(options: argparse.Namespace, row: str) -> steps.Step:
    """Return the round of as many virtual clients as the row's name ends with."""
    way, _, clients = row.partition(":")
    examples = _EXAMPLES_PER_CLIENT
    simulation = tfdp.federated.Simulation(
        build(options.model),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        *steps.examples(options.model, options.batch_size),
        clients=tfdp.federated.VirtualClients(
            int(clients), options.batch_size // examples, examples
        ),
        optimizer=keras.optimizers.SGD(steps.LEARNING_RATE),
        l2_norm_clip=steps.L2_NORM_CLIP,
        noise_multiplier=steps.NOISE_MULTIPLIER,
        # Rounds are to be timed, also of few clients.
        max_participations=1_000_000,
        noise=way.removeprefix("federated_"),
        jit_compile=options.jit_compile,
    )

    def step() -> None:
        simulation.run(simulation.rounds + 1, verbose=0)

    return step


def build(name: str) -> keras.Model:
    """Build a model that the other frameworks have too, or one of tfdp's."""
    if name == "bert_whole":
        return _classifier(name, _encoder(name, blocks=12))
    if name.startswith("bert"):
        return _bert(int(name.partition(":")[2] or 12))
    if name == "wrn16_4":
        problem = steps.problem_of(name)
        return tfdp.models.wide_resnet(problem.shape, problem.classes)
    model = keras_models.build(name)
    return tfdp.fix_model(model) if name in _WITH_BATCH_NORMALIZATION else model


def _bert(blocks: int) -> keras.Model:
    """BERT's base model, or one of fewer blocks, whose last three layers train."""
    encoder = _encoder("bert", blocks=blocks)
    for layer in encoder.layers:
        layer.trainable = layer.name.startswith(f"block_{blocks - 1}_")
    return _classifier("bert", encoder)


def _encoder(name: str, *, blocks: int) -> keras.Model:
    problem = steps.problem_of(name)
    return tfdp.models.bert(problem.vocabulary, *problem.shape, blocks=blocks)


def _classifier(name: str, encoder: keras.Model) -> keras.Model:
    """Put the classes of a problem on an encoder's first token."""
    first = encoder.output[:, 0]
    pooled = keras.layers.Dense(768, activation="tanh", name="pooler")(first)
    logits = keras.layers.Dense(steps.problem_of(name).classes, name="logits")(pooled)
    return keras.Model(encoder.input, logits)


def dataset(options: argparse.Namespace) -> tf.data.Dataset:
    """Make an endless pipeline of batches, of static size unless it varies."""
    if not options.poisson:
        batch = map(tf.constant, examples(options))
        return tf.data.Dataset.from_tensors(tuple(batch)).repeat()
    sizes = np.random.default_rng(0).poisson(options.batch_size, _NUMBER_OF_BATCHES)
    x, y = map(tf.constant, steps.examples(options.model, sizes.max()))
    slices = tf.data.Dataset.from_tensor_slices(sizes)
    return slices.map(lambda size: (x[:size], y[:size])).repeat()


def examples(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return random examples, or the first texts of a file, again where they end."""
    if options.texts is None:
        return steps.examples(options.model, options.batch_size)
    problem = steps.problem_of(options.model)
    # Texts may have what `splitlines` takes for the end of a line.
    lines = Path(options.texts).read_text(encoding="utf-8").split("\n")
    pairs = [line.rsplit("\t", 1) for line in lines if line]
    # Each begins with a token, so that none is nothing but padding.
    texts = [f"begin {text}" for text, _ in pairs]
    vectorize = keras.layers.TextVectorization(
        problem.vocabulary, output_sequence_length=problem.shape[0]
    )
    vectorize.adapt(texts)
    chosen = np.arange(options.batch_size) % len(pairs)
    x = np.array(vectorize([texts[i] for i in chosen]), "int32")
    return x, np.array([int(pairs[i][1]) for i in chosen], "int32")


def about() -> str:
    """Return the versions that matter, and the GPUs."""
    gpus = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    return (
        f"tfdp {tfdp.__version__}, Keras {keras.__version__}, TensorFlow "
        f"{tf.__version__}, {', '.join(gpus) or 'no GPU'}"
    )


def main(stepper: Callable[[argparse.Namespace, str], steps.Step]) -> None:
    """Take the steps, and measure a GPU's memory where there is one."""
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    steps.main(stepper, about(), memory_of_gpu if has_gpu else None)


def memory_of_gpu() -> tuple[float, float]:
    """Return what TensorFlow holds on the GPU now, and the most that it ever has."""
    found = tf.config.experimental.get_memory_info("GPU:0")
    return found["current"] / 2**20, found["peak"] / 2**20


if __name__ == "__main__":
    main(stepper)
