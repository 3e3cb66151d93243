"""Attention."""

import keras
from keras import layers

from tests.problems.building import floats_of, labelled, logits, padded
from tests.problems.problem import problem


def attention(make_attention):
    inputs = keras.Input((4, 6))
    attended = make_attention()(inputs, inputs)
    hidden = layers.LayerNormalization()(inputs + attended)
    hidden = hidden + layers.Dense(6, activation="gelu")(hidden)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)))


def causal_attention():
    ids = keras.Input((4,), dtype="int32")
    hidden = layers.Embedding(6, 4, mask_zero=True)(ids)
    attend = layers.MultiHeadAttention(2, 2)
    hidden = hidden + attend(hidden, hidden, use_causal_mask=True)
    return keras.Model(ids, layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)))


def cross_attention():
    query, value = keras.Input((2, 4)), keras.Input((5, 3))
    attended = layers.MultiHeadAttention(2, 2, value_dim=3)(query, value)
    return keras.Model([query, value], layers.Dense(2)(layers.Flatten()(attended)))


def padded_attention(**options):
    """Attention within and between two masked sequences, with a mask of its own."""
    query, value = (
        keras.Input((3,), dtype="int32"),
        keras.Input((4,), dtype="int32"),
    )
    allowed = keras.Input((3, 4), dtype="bool")
    embedding = layers.Embedding(6, 4, mask_zero=True)
    attend = layers.MultiHeadAttention(2, 3, **options)
    hidden = attend(embedding(query), embedding(value), attention_mask=allowed)
    # The pooling layer divides by the number of positions that the mask leaves: 0.
    pooled = keras.ops.mean(hidden, axis=1)
    return keras.Model([query, value, allowed], layers.Dense(2)(pooled))


def scored(make_attention):
    query, value = keras.Input((3, 2)), keras.Input((4, 2))
    attended = make_attention()([layers.Dense(2)(query), value])
    return keras.Model([query, value], layers.Flatten()(attended))


PROBLEMS = (
    problem(
        "attention",
        lambda: attention(lambda: layers.MultiHeadAttention(2, 3)),
        labelled((4, 6), 3),
        logits,
        tags="attention norm",
    ),
    problem(
        "grouped_query_attention",
        lambda: attention(lambda: layers.GroupQueryAttention(3, 4, 2)),
        labelled((4, 6), 3),
        logits,
        tags="attention norm",
    ),
    problem(
        "causal_attention",
        causal_attention,
        lambda rng: (padded(rng, length=4), rng.integers(3)),
        logits,
        tags="attention embedding mask",
    ),
    problem(
        "cross_attention",
        cross_attention,
        lambda rng: (
            [rng.normal(size=(2, 4)), rng.normal(size=(5, 3))],
            rng.normal(size=2),
        ),
        "mse",
        tags="attention structure",
    ),
    problem(
        "attention_dropout",
        lambda: attention(lambda: layers.MultiHeadAttention(2, 3, dropout=0.5, seed=3)),
        labelled((4, 6), 3),
        logits,
        tags="attention norm random",
    ),
    problem(
        "attention_padded",
        lambda: padded_attention(value_dim=2, output_shape=5),
        lambda rng: (
            [
                padded(rng, length=3),
                padded(rng, length=4),
                rng.integers(2, size=(3, 4)),
            ],
            rng.normal(size=2),
        ),
        "mse",
        tags="attention embedding mask structure",
    ),
    problem(
        "attention_no_bias",
        lambda: attention(
            lambda: layers.MultiHeadAttention(2, 3, value_dim=2, use_bias=False)
        ),
        labelled((4, 6), 3),
        logits,
        tags="attention norm",
    ),
    problem(
        "dot_attention",
        lambda: scored(lambda: layers.Attention(use_scale=True, score_mode="concat")),
        floats_of((3, 2), (4, 2), targets=6),
        "mse",
        tags="attention structure",
    ),
    problem(
        "additive_attention",
        lambda: scored(layers.AdditiveAttention),
        floats_of((3, 2), (4, 2), targets=6),
        "mse",
        tags="attention structure",
    ),
)
