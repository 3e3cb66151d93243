"""Token ids that name rows of a matrix."""

import functools

import keras
from keras import layers, losses, ops

from tests.problems.building import (
    KERAS_VERSION,
    logits,
    padded,
    sequential,
    with_ids,
    words,
)
from tests.problems.problem import problem, register


@register
class TiedEmbedding(keras.Model):
    """Language-model head: logits are products with the embedding's own rows."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = layers.Embedding(6, 3)
        self.hidden = layers.Dense(3, activation="tanh")

    def call(self, ids):
        hidden = self.hidden(self.embedding(ids))
        return ops.matmul(hidden, ops.transpose(self.embedding.embeddings))


def low_rank_embedding():
    model = with_ids(layers.GlobalAveragePooling1D(), layers.Dense(3))
    model.layers[0].enable_lora(2)
    return model


def shared_embedding():
    question, answer = (
        keras.Input((3,), dtype="int32"),
        keras.Input((2,), dtype="int32"),
    )
    embedding, pool = layers.Embedding(5, 3), layers.GlobalAveragePooling1D()
    product = pool(embedding(question)) * pool(embedding(answer))
    return keras.Model([question, answer], layers.Dense(1)(product))


def language_model(hidden, **options):
    ids = keras.Input((4,), dtype="int32")
    embedding = layers.ReversibleEmbedding(6, 3, **options)
    return keras.Model(ids, embedding(hidden()(embedding(ids)), reverse=True))


def low_rank_language_model():
    model = language_model(lambda: layers.Dense(3, "tanh"))
    (embedding,) = [each for each in model.layers if hasattr(each, "embeddings")]
    embedding.enable_lora(2)
    return model


PROBLEMS = (
    problem(
        "embedding_mean",
        lambda: with_ids(layers.GlobalAveragePooling1D(), layers.Dense(3)),
        words(5, 3),
        logits,
        tags="embedding",
    ),
    problem(
        "embedding_of_one",
        lambda: sequential((), layers.Embedding(6, 3), layers.Dense(2), dtype="int32"),
        lambda rng: (rng.integers(6), rng.normal(size=2)),
        "mse",
        tags="embedding",
    ),
    problem(
        "embedding_negative",
        lambda: sequential(
            (2, 3),
            layers.Embedding(6, 3, mask_zero=True),
            layers.Dense(2, activation="tanh"),
            dtype="int32",
        ),
        lambda rng: (rng.integers(-6, 6, size=(2, 3)), rng.normal(size=(2, 3, 2))),
        functools.partial(losses.MeanSquaredError, reduction="sum"),
        tags="embedding mask sum",
    ),
    problem(
        "shared_embedding",
        shared_embedding,
        lambda rng: (
            [rng.integers(5, size=3), rng.integers(5, size=2)],
            rng.normal(size=1),
        ),
        "mse",
        tags="embedding shared structure",
    ),
    problem(
        "tied_embedding",
        TiedEmbedding,
        lambda rng: (rng.integers(6, size=4), rng.integers(6, size=4)),
        logits,
        tags="tied",
    ),
    problem(
        "lora_embedding",
        low_rank_embedding,
        words(5, 3),
        logits,
        tags="frozen lora",
    ),
)


if hasattr(layers, "ReversibleEmbedding"):
    PROBLEMS += tuple(
        problem(
            name,
            functools.partial(language_model, hidden, **options),
            lambda rng: (padded(rng, length=4), rng.integers(6, size=4)),
            logits,
            tags=f"shared {tags}",
        )
        for name, hidden, options, tags in (
            (
                "reversible_tied",
                lambda: layers.Dense(3, "tanh"),
                {"logit_soft_cap": 2.0},
                "",
            ),
            (
                "reversible_untied",
                lambda: layers.Dense(3, "tanh"),
                {"tie_weights": False},
                "embedding",
            ),
            (
                "reversible_masked",
                lambda: layers.LSTM(3, return_sequences=True),
                {"mask_zero": True},
                "mask rnn",
            ),
        )
        # Keras 3.12 loses its own mask there.
        if name != "reversible_masked" or KERAS_VERSION >= (3, 15)
    )
    PROBLEMS += (
        problem(
            "reversible_lora",
            low_rank_language_model,
            lambda rng: (padded(rng, length=4), rng.integers(6, size=4)),
            logits,
            tags="shared frozen lora",
        ),
    )
