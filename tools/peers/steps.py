"""What the scripts here share: their flags, the turns, the memory, the line they print.

A script takes training steps of one framework. It runs in an environment of its own,
so this module needs nothing but NumPy.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

L2_NORM_CLIP = 1.0
NOISE_MULTIPLIER = 1.1
LEARNING_RATE = 0.1
# What the rows of noise add it to.
NUMBERS_OF_NOISE = 1_000_000

# A training step that has ended when the call returns. Returns the milliseconds that
# count, if these are not those of the call.
Step = Callable[[], float | None]


class Problem(NamedTuple):
    """Inputs and labels of a model: uniform numbers, or tokens of a vocabulary."""

    shape: tuple[int, ...]
    classes: int
    batch_size: int = 256
    vocabulary: int | None = None
    has_label_per_token: bool = False


PROBLEMS = {
    "mlp": Problem((784,), 10),
    "cnn": Problem((28, 28, 1), 10),
    "resnet9": Problem((32, 32, 3), 10),
    "transformer": Problem((128,), 2, batch_size=32, vocabulary=5000),
    "lstm": Problem((64, 32), 3, batch_size=32),
    "embedding": Problem((64,), 10, vocabulary=100_000),
    "synthetic": Problem((5120,), 1280),
    "wide_sequence": Problem((32, 512), 512),
    "long_sequence": Problem((512, 32), 32),
    "frozen": Problem((2048,), 10),
    "deep": Problem((128,), 10),
    "bert": Problem((32,), 2, batch_size=32, vocabulary=30_522),
    "bert_whole": Problem((128,), 2, batch_size=32, vocabulary=30_522),
    "gpt2": Problem((256,), 50_257, 16, 50_257, has_label_per_token=True),
    "wrn16_4": Problem((32, 32, 3), 10),
    "mobilenet_v2": Problem((64, 64, 3), 10, batch_size=32),
    "resnet50": Problem((64, 64, 3), 10, batch_size=32),
    "resnext": Problem((32, 32, 3), 10, batch_size=32),
    "convnext_tiny": Problem((64, 64, 3), 10, batch_size=8),
}


class SkippedError(Exception):
    """A row that the framework has, but not for this model."""


def main(
    stepper: Callable[[argparse.Namespace, str], Step],
    about: str,
    memory: Callable[[], tuple[float, float]] | None = None,
) -> None:
    """Take the steps that the command line asks for, and print what they took.

    Args:
        stepper: Prepares the steps of one row of the table.
        about: The versions that matter.
        memory: Returns the MiB that are held, and their peak; default the host's.
    """
    memory = memory or memory_of_host
    options = parsed()
    steps = {}
    skipped = {}
    for row in options.rows:
        try:
            steps[row] = stepper(options, row)
        except SkippedError as error:
            skipped[row] = str(error)
    before, _ = memory()
    first = first_cpu_seconds(steps)
    times = in_turns(
        steps,
        warm=options.warm - 1,
        number=options.steps,
        repeats=options.repeats,
        seconds=options.seconds,
    )
    _, peak = memory()
    print(
        json.dumps({
            "about": about,
            "milliseconds": times,
            "first_cpu_seconds": first,
            "skipped": skipped,
            "peak_mib": peak,
            "before_mib": before,
        })
    )


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="such as cnn, or mlp:512")
    parser.add_argument("--rows", required=True, nargs="+")
    parser.add_argument("--batch_size", required=True, type=int)
    parser.add_argument("--warm", default=2, type=int, help="steps before timed ones")
    parser.add_argument("--steps", default=20, type=int, help="timed steps of a row")
    parser.add_argument("--repeats", default=1, type=int, help="steps timed as one")
    parser.add_argument("--seconds", default=10.0, type=float, help="... or this long")
    parser.add_argument("--poisson", action="store_true", help="vary the batch size")
    parser.add_argument("--jit_compile", action="store_true")
    parser.add_argument("--texts", help="TSV of texts and labels, for tokens of theirs")
    return parser.parse_args()


def problem_of(model: str) -> Problem:
    """Return the problem of a model, such as `"cnn"` or `"mlp:512"`."""
    return PROBLEMS[model.partition(":")[0]]


def examples(model: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw random inputs and labels: neither times nor memory depend on them."""
    problem, rng = problem_of(model), np.random.default_rng(0)
    shape = (number, *problem.shape)
    if problem.vocabulary is None:
        x = rng.random(shape, "float32")
    else:
        x = rng.integers(0, problem.vocabulary, shape, "int32")
    label_shape = shape if problem.has_label_per_token else number
    return x, rng.integers(0, problem.classes, label_shape, "int32")


def first_cpu_seconds(steps: Mapping[str, Step]) -> dict[str, float]:
    """Take a first step of each row, and return the CPU's seconds that it took."""
    seconds = {}
    for row, step in steps.items():
        start = time.process_time()
        step()
        seconds[row] = time.process_time() - start
    return seconds


def in_turns(
    steps: Mapping[str, Step], *, warm: int, number: int, repeats: int, seconds: float
) -> dict[str, list[float]]:
    """Return the milliseconds of each row's steps, which take turns.

    Whatever else the machine does then slows all of them. Every row has one time, the
    mean of some steps, and further ones up to `number` while it has used less than
    `seconds`.
    """
    for _ in range(warm):
        for step in steps.values():
            step()
    times: dict[str, list[float]] = {row: [] for row in steps}
    for _ in range(number):
        for row, step in steps.items():
            if sum(times[row]) * repeats < 1000 * seconds:
                start = time.perf_counter()
                own = [step() for _ in range(repeats)]
                if None in own:
                    own = [1000 * (time.perf_counter() - start)]
                times[row].append(sum(own) / repeats)
    return {row: taken for row, taken in times.items() if taken}


def memory_of_host() -> tuple[float, float]:
    """Return what this process keeps resident now, and the most that it ever has."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_mib = peak / 2 ** (20 if sys.platform == "darwin" else 10)
    statm = Path("/proc/self/statm")
    if not statm.exists():
        # Only the peak shows.
        return peak_mib, peak_mib
    resident = int(statm.read_text().split()[1]) * resource.getpagesize()
    return resident / 2**20, peak_mib
