"""Steps that a recorder counts without a model."""

import tensorflow as tf

from tfdp.accounting import Segment
from tfdp.runs.counter import UNDECLARED
from tfdp.runs.recorder import LedgerRecorder
from tfdp.sampling import Poisson, Shuffled

POISSON = Poisson(1000, 50)
SHUFFLED = Shuffled(1000, 50)
KINDS = (UNDECLARED, POISSON, SHUFFLED)


def record(recorder, *noise_multipliers):
    for noise_multiplier in noise_multipliers:
        recorder.counter.record(tf.constant(noise_multiplier, tf.float64), 1.0)


def recorded(segment, *noise_multipliers, **options):
    recorder = LedgerRecorder(list)
    recorder.begin(segment, **options)
    record(recorder, *noise_multipliers)
    return recorder


def counts(recorder):
    """Noise multipliers and how often each occurs."""
    return {s.noise_multiplier: s.count for s in recorder.ledger.segments}


def segments(kind, **counts_):
    """Segments of one kind: ``z1_5=3`` is three at noise multiplier 1.5."""
    return tuple(
        Segment(kind, count, float(name[1:].replace("_", ".")))
        for name, count in counts_.items()
    )


def run_schedule(recorder, noise_multipliers):
    table = tf.constant(noise_multipliers, tf.float64)

    @tf.function
    def loop():
        for number in tf.range(len(noise_multipliers)):
            recorder.counter.record(table[number], 1.0)

    loop()


def steps_that_fit(recorder, tries, noise_multiplier=1.0):
    for done in range(tries):
        if not recorder.counter.has_room():
            return done
        record(recorder, noise_multiplier)
    return tries
