r"""What more replicas cost, on paper: from costs that are measured on one device.

    python tools/scaling.py
    python tools/scaling.py --examples_per_replica=256 --gigabytes_per_second=25

A step of R replicas is a clipped step of each on its share of the batch, one all-reduce
of the clipped sums, the noise, which each replica draws in full, and the update. Each
process draws the indices of the whole batch, whatever its share. Measured, as medians on
this machine, are the clipped step, the noise and the draw. Assumed are how much faster
an accelerator is at the first two, and the bandwidth between accelerators; a ring takes
2 (R - 1) / R times the bytes of the sums. Nothing is overlapped but the draw, which is
made ahead on the host, and the latency of the network is left out.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdp
from tfdp.clipping import ClippedSum
from tfdp.mechanisms import Gaussian
from tfdp.sampling import fresh_key, poisson_indices

_REPLICAS = flags.DEFINE_multi_integer(
    "replicas", [1, 8, 64, 512], "Numbers of replicas.", lower_bound=1
)
_EXAMPLES = flags.DEFINE_integer(
    "examples_per_replica", 64, "Rows of a replica's share on average.", lower_bound=1
)
_DATA = flags.DEFINE_integer(
    "number_of_examples", 10_000_000, "Rows of the training data.", lower_bound=1
)
_BANDWIDTH = flags.DEFINE_float(
    "gigabytes_per_second",
    12.5,
    "Assumed bandwidth of the network for each accelerator.",
    lower_bound=1e-9,
)
_TIMES_FASTER = flags.DEFINE_float(
    "times_faster",
    100.0,
    "Assumed speed of an accelerator over this machine, at clipping and at noise.",
    lower_bound=1e-9,
)
_REPEATS = 7


def main(argv: Sequence[str]) -> None:
    """Measure, and print the estimate."""
    if len(argv) > 1:
        sys.exit(f"scaling: everything is a flag. Received: {' '.join(argv[1:])}.")
    if max(_REPLICAS.value) * _EXAMPLES.value > _DATA.value:
        sys.exit(
            "scaling: a batch cannot be larger than the data. Received: "
            f"number_of_examples={_DATA.value}. Use --number_of_examples="
            f"{10 * max(_REPLICAS.value) * _EXAMPLES.value}."
        )
    model = tfdp.models.resnet9((32, 32, 3), 10)
    shapes = [variable.shape for variable in model.trainable_variables]
    weights = sum(int(np.prod(shape)) for shape in shapes)
    step, noise = clipped_step(model), noise_of(shapes)
    faster = _TIMES_FASTER.value
    print(
        f"ResNet-9, {weights:,} weights; {_EXAMPLES.value} rows of 32x32x3 for each "
        f"replica, of {_DATA.value:,}\n"
        f"measured here: clipped step {1e3 * step:.0f} ms, noise {1e3 * noise:.0f} ms "
        f"({1e9 * noise / weights:.1f} ns a weight)\n"
        f"assumed: accelerators {faster:g} times as fast, {_BANDWIDTH.value:g} GB/s\n"
    )
    print(
        "| replicas | batch | MB sent by each | all-reduce ms | clipped step ms "
        "| noise ms | draw ms | speed over one |\n|---|---|---|---|---|---|---|---|"
    )
    step, noise = step / faster, noise / faster
    for replicas in _REPLICAS.value:
        sent = 2 * (replicas - 1) / replicas * 4 * weights
        all_reduce, draw = sent / (1e9 * _BANDWIDTH.value), draw_of(replicas)
        speed = replicas * (step + noise) / max(step + noise + all_reduce, draw)
        print(
            f"| {replicas} | {replicas * _EXAMPLES.value:,} | {sent / 1e6:.1f} "
            f"| {1e3 * all_reduce:.1f} | {1e3 * step:.1f} | {1e3 * noise:.1f} "
            f"| {1e3 * draw:.2f} | {speed:.0f} |"
        )


def median_time(run: Callable[[], Any]) -> float:
    """Return the median of a few runs in seconds, after one that is not counted."""
    run()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def clipped_step(model: Any) -> float:
    """Time the clipped sum of a replica's share."""
    x = np.random.default_rng(0).normal(size=(_EXAMPLES.value, 32, 32, 3))
    x = tf.constant(x, tf.float32)
    y = tf.zeros((_EXAMPLES.value,), tf.int32)

    @tf.function(autograph=False)
    def clip() -> list[tf.Tensor]:
        return tfdp.clipped_gradients(
            model, "sparse_categorical_crossentropy", x, y, l2_norm_clip=1.0
        ).gradients

    return median_time(lambda: [each.numpy() for each in clip()])


def noise_of(shapes: list[Any]) -> float:
    """Time the noise of a step."""
    source = Gaussian()
    clipped_sum = ClippedSum(
        [tf.zeros(shape) for shape in shapes], tf.zeros([1]), tf.constant(1.0), 1
    )

    @tf.function(autograph=False)
    def noise() -> list[tf.Tensor]:
        return source.noised(
            clipped_sum,
            noise_multiplier=tf.constant(1.0),
            stream=source.stream(tf.constant(0, tf.int64)),
        )

    return median_time(lambda: [each.numpy() for each in noise()])


def draw_of(replicas: int) -> float:
    """Time the draw of a step, which every process makes once."""
    key = fresh_key()
    probability = replicas * _EXAMPLES.value / _DATA.value
    numbers = iter(range(1000))
    return median_time(
        lambda: poisson_indices(
            key,
            (1, next(numbers), 0),
            number_of_examples=_DATA.value,
            sampling_probability=probability,
        )
    )


if __name__ == "__main__":
    app.run(main)
