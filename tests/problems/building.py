"""What problems of all families are built from: models, examples, losses."""

import functools

import keras
import numpy as np
from keras import layers, losses

KERAS_VERSION = tuple(map(int, keras.__version__.split(".")[:2]))

logits = functools.partial(losses.SparseCategoricalCrossentropy, from_logits=True)


def sequential(shape, *stack, dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *stack])


def with_ids(*stack, mask_zero=False, ids=6, width=3):
    """A model of token ids; ``ids`` tokens embedded in ``width`` numbers."""
    embedding = layers.Embedding(ids, width, mask_zero=mask_zero)
    return sequential((None,), embedding, *stack, dtype="int32")


def frozen(layer):
    layer.trainable = False
    return layer


def floats(shape, targets):
    """Normal inputs, normal targets."""
    return lambda rng: (rng.normal(size=shape), rng.normal(size=targets))


def labelled(shape, classes):
    """Normal inputs, one of ``classes`` labels."""
    return lambda rng: (rng.normal(size=shape), rng.integers(classes))


def words(length, classes, ids=6):
    """Token ids, of which some repeat, and a label."""
    return lambda rng: (rng.integers(ids, size=length), rng.integers(classes))


def padded(rng, length=5, ids=6):
    """Token ids with a tail of zeros; at least one is not zero."""
    words = rng.integers(1, ids, size=length)
    return words * (np.arange(length) <= rng.integers(length))


def padded_labelled(classes):
    return lambda rng: (padded(rng), rng.integers(classes))


def floats_of(*shapes, targets):
    """Several normal inputs, normal targets."""

    def example(rng):
        return [rng.normal(size=shape) for shape in shapes], rng.normal(size=targets)

    return example


def weighted(example, shape=()):
    """The example with a positive weight, or with one weight for each position."""
    return lambda rng: (*example(rng), rng.uniform(0.5, 2, size=shape))
