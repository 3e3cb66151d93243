"""Prints the table of the zoo: engines, and what a private training costs.

``python -m tests.zoo [names]``, alone on a machine, or ``python -m tests.zoo hub``, for
the families of KerasHub. Seconds of CPU from the call of
`fit` to the end of the first step, and of a later step; of private and of ordinary
training, and what the one is to the other.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import keras
import tensorflow as tf

import tfdp
from tests.zoo import ZOO, Entry
from tests.zoo.entry import engine_of
from tests.zoo.hub import HUB

BATCH, STEPS = 32, 12


class _Clock(keras.callbacks.Callback):
    """Notes the CPU's time after each step."""

    def __init__(self):
        super().__init__()
        self.times = [time.process_time()]

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.process_time())


def _timed(fit: Callable[..., object], data: object) -> tuple[float, float]:
    """Return seconds to the end of the first step, and of a step."""
    clock = _Clock()
    fit(data, callbacks=[clock], verbose=0)
    steps = [after - before for before, after in itertools.pairwise(clock.times)]
    return steps[0], statistics.median(steps[2:])


def _data(entry: Entry) -> tf.data.Dataset:
    # Without weights: Keras takes none of rows for losses of positions.
    x, y, _ = entry.batch(BATCH)
    x = tuple(x) if isinstance(x, list) else x
    return tf.data.Dataset.from_tensors((x, y)).repeat(STEPS)


def _ordinary(entry: Entry) -> tuple[float, float]:
    model = entry.build(1.0)
    model.compile(keras.optimizers.Adam(), entry.make_loss())
    return _timed(model.fit, _data(entry))


def _private(entry: Entry) -> tuple[str, tuple[float, float]]:
    private = tfdp.DPModel(entry.build(1.0))
    optimizer = tfdp.optimizers.DPOptimizer(
        keras.optimizers.Adam(), l2_norm_clip=1.0, noise_multiplier=1.0
    )
    private.compile(optimizer, entry.make_loss())
    declared = tfdp.data.declare(
        _data(entry),
        number_of_examples=BATCH * STEPS,
        expected_batch_size=BATCH,
        sampling="shuffle",
    )
    times = _timed(private.fit, declared)
    return engine_of(private), times


def _line(entry: Entry) -> str:
    try:
        engine, private = _private(entry)
    except (tfdp.errors.UnsupportedLayerError, tfdp.errors.UnsupportedLossError):
        return f"{entry.name:24} refused"
    ordinary = _ordinary(entry)
    numbers = "".join(
        f"{own * unit:9.1f}{other * unit:9.1f}{own / other:7.2f}"
        for own, other, unit in zip(private, ordinary, (1, 1000), strict=True)
    )
    return f"{entry.name:24} {engine:12}{numbers}"


def main(names: list[str]) -> None:
    """Print a line for each model."""
    of_three = f"{'private':>9}{'plain':>9}{'ratio':>7}"
    print(f"{'':24} {'':12}{'first step, s':>25}{'a step, ms':>25}")
    print(f"{'model':24} {'engine':12}{of_three}{of_three}")
    # What the first of all trainings pays is none of the models' business.
    _ordinary(ZOO["imbalanced"])
    _private(ZOO["imbalanced"])
    for name in HUB if names == ["hub"] else names or ZOO:
        keras.utils.clear_session(free_memory=False)
        print(_line((ZOO | HUB)[name]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
