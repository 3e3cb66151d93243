"""Several inputs and outputs, losses, weights, masks and reductions."""

import functools

import keras
from keras import layers, losses, ops

from tests.problems.building import (
    floats,
    logits,
    padded,
    sequential,
    weighted,
    with_ids,
)
from tests.problems.problem import problem, register


def two_heads(pack):
    """Two inputs and two outputs ("value", "label"), in the container ``pack``."""
    wide, deep = keras.Input((3,), name="wide"), keras.Input((2,), name="deep")
    hidden = layers.Dense(4, activation="tanh")(layers.concatenate([wide, deep]))
    value = layers.Dense(1, name="value")(layers.concatenate([hidden, wide]))
    label = layers.Dense(3, name="label")(hidden)
    return keras.Model(
        pack({"wide": wide, "deep": deep}), pack({"value": value, "label": label})
    )


def nested_inputs():
    inputs = {
        "user": {"age": keras.Input((1,)), "tags": keras.Input((3,), dtype="int32")},
        "item": [keras.Input((2,)), keras.Input((2,))],
    }
    tags = layers.GlobalAveragePooling1D()(
        layers.Embedding(4, 2)(inputs["user"]["tags"])
    )
    features = layers.concatenate([inputs["user"]["age"], tags, *inputs["item"]])
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(3, "tanh")(features)))


def tagger(**embedding):
    return with_ids(layers.Dense(4, activation="tanh"), layers.Dense(3), **embedding)


def two_head_example(pack):
    def example(rng):
        x = {"wide": rng.normal(size=3), "deep": rng.normal(size=2)}
        return pack(x), pack({"value": rng.normal(size=1), "label": rng.integers(3)})

    return example


def values(dictionary):
    return list(dictionary.values())


def padded_tags(rng):
    return padded(rng), rng.integers(3, size=5)


@register
def pseudo_huber(y_true, y_pred):
    """A loss as people write them: one number for each example."""
    return ops.sum(ops.sqrt(1 + ops.square(y_true - y_pred)) - 1, axis=-1)


@register
def scalar_squares(y_true, y_pred):
    """A loss of rank 0."""
    return ops.mean(ops.square(y_true - y_pred))


PROBLEMS = (
    problem(
        "list_losses",
        lambda: two_heads(values),
        two_head_example(values),
        ["mse", logits],
        loss_weights=[0.5, 2.0],
        tags="structure",
    ),
    problem(
        "list_weighted",
        lambda: two_heads(values),
        lambda rng: (
            *two_head_example(values)(rng),
            [rng.uniform(0.5, 2), rng.uniform(0.5, 2)],
        ),
        ["mse", logits],
        tags="structure",
    ),
    problem(
        "dict_losses",
        lambda: two_heads(dict),
        weighted(two_head_example(dict)),
        {"value": "mse", "label": logits},
        loss_weights={"value": 0.5, "label": 2.0},
        tags="structure",
    ),
    problem(
        "named_losses",
        lambda: two_heads(values),
        two_head_example(values),
        {"label": logits, "value": "mse"},
        loss_weights={"label": 2.0, "value": 0.5},
        tags="structure",
    ),
    problem(
        "none_loss",
        lambda: two_heads(values),
        two_head_example(values),
        ["mse", None],
        tags="structure unused",
    ),
    problem(
        "nested_inputs",
        nested_inputs,
        lambda rng: (
            {
                "user": {"age": rng.normal(size=1), "tags": rng.integers(4, size=3)},
                "item": [rng.normal(size=2), rng.normal(size=2)],
            },
            rng.normal(size=2),
        ),
        "mse",
        tags="embedding structure",
    ),
    problem(
        "positions",
        lambda: sequential((4, 2), layers.Dense(3)),
        lambda rng: (rng.normal(size=(4, 2)), rng.integers(3, size=4)),
        logits,
    ),
    problem(
        "positions_weighted",
        tagger,
        weighted(padded_tags, shape=5),
        logits,
        tags="embedding",
    ),
    problem(
        "positions_example_weighted",
        tagger,
        weighted(padded_tags),
        logits,
        tags="coupled embedding",
    ),
    problem(
        "masked",
        lambda: tagger(mask_zero=True),
        padded_tags,
        logits,
        tags="coupled embedding mask",
    ),
    problem(
        "masked_weighted",
        lambda: tagger(mask_zero=True),
        weighted(padded_tags, shape=5),
        functools.partial(logits, reduction="sum"),
        tags="embedding mask sum",
    ),
    problem(
        "masked_lstm",
        lambda: with_ids(
            layers.LSTM(3, return_sequences=True), layers.Dense(3), mask_zero=True
        ),
        padded_tags,
        logits,
        tags="coupled embedding mask rnn",
    ),
    problem(
        "ignored_class",
        lambda: sequential((4, 2), layers.Dense(3)),
        lambda rng: (rng.normal(size=(4, 2)), rng.integers(-1, 3, size=4)),
        functools.partial(logits, ignore_class=-1),
        tags="coupled mask",
    ),
    problem(
        "sum_reduction",
        lambda: sequential((3, 2), layers.Dense(4, "tanh"), layers.Dense(2)),
        floats((3, 2), (3, 2)),
        functools.partial(losses.MeanSquaredError, reduction="sum"),
        tags="sum",
    ),
    problem(
        "no_reduction",
        lambda: sequential((3, 2), layers.Dense(4, "tanh"), layers.Dense(2)),
        floats((3, 2), (3, 2)),
        functools.partial(losses.LogCosh, reduction=None),
        tags="sum",
    ),
    problem(
        "weighted_mean",
        lambda: sequential((4, 2), layers.Dense(3)),
        weighted(
            lambda rng: (rng.normal(size=(4, 2)), rng.integers(3, size=4)), shape=4
        ),
        functools.partial(logits, reduction="mean_with_sample_weight"),
        tags="coupled",
    ),
    problem(
        "custom_loss",
        lambda: sequential((3,), layers.Dense(4, "tanh"), layers.Dense(2)),
        floats(3, 2),
        pseudo_huber,
    ),
    problem(
        "scalar_loss",
        lambda: sequential((3,), layers.Dense(4, "tanh"), layers.Dense(2)),
        floats(3, 2),
        scalar_squares,
        tags="scalar",
    ),
    problem(
        "dice",
        lambda: sequential((3,), layers.Dense(4, "tanh"), layers.Dense(2, "sigmoid")),
        lambda rng: (rng.normal(size=3), rng.integers(2, size=2)),
        losses.Dice,
        tags="coupled scalar",
    ),
)
