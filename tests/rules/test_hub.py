"""Rules of KerasHub's layers, tried on layers that stand in for them."""

import functools
import sys
import types

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfdp
from tests.engine_checks import OUTLIER, Uphill, check, runner
from tests.problems import Problem, logits
from tfdp import rules
from tfdp.engines.bookkeeping import BookkeepingEngine, GhostEngine
from tfdp.rules import hub
from tfdp.rules.generic import generic

ENGINES = [
    BookkeepingEngine(),
    GhostEngine(),
    BookkeepingEngine(norms="gram"),
    BookkeepingEngine(norms="instantiate"),
]

IDS, LENGTH, WIDTH = 6, 4, 3

needs_reversible = pytest.mark.skipif(
    not hasattr(layers, "ReversibleEmbedding"), reason="an older Keras"
)


class PositionEmbedding(layers.Layer):
    """Rows of a matrix, one for each position, whatever the inputs are."""

    def __init__(self, sequence_length, **options):
        super().__init__(**options)
        self.sequence_length = sequence_length

    def build(self, shape):
        self.position_embeddings = self.add_weight(
            shape=(self.sequence_length, shape[-1]), name="embeddings"
        )

    def call(self, inputs, start_index=0, positions=None):
        if positions is None:
            positions = ops.arange(ops.shape(inputs)[-2]) + start_index
        found = ops.take(self.position_embeddings, positions, axis=0)
        return ops.broadcast_to(found, ops.shape(inputs))


class OlderPositionEmbedding(PositionEmbedding):
    """As it was before it took positions."""

    def call(self, inputs, start_index=0):
        return super().call(inputs, start_index)


class MaskedLMHead(layers.Layer):
    """Products of some positions with the rows of a matrix, and a bias."""

    def __init__(self, vocabulary_size, token_embedding=None, activation=None):
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.token_embedding = token_embedding
        self.activation = keras.activations.get(activation)

    def build(self, inputs_shape, mask_positions_shape):
        width = inputs_shape[-1]
        self.dense = layers.Dense(width, activation="tanh")
        self.dense.build(inputs_shape)
        if self.token_embedding is None:
            self._kernel = self.add_weight(shape=(width, self.vocabulary_size))
        self._bias = self.add_weight(shape=(self.vocabulary_size,), name="output_bias")

    def call(self, inputs, mask_positions):
        x = ops.take_along_axis(inputs, mask_positions[..., None], axis=1)
        x = self.dense(x)
        if self.token_embedding is None:
            outputs = ops.matmul(x, self._kernel)
        else:
            outputs = self.token_embedding(x, reverse=True)
        return self.activation(outputs + self._bias)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    names = types.SimpleNamespace(
        PositionEmbedding=PositionEmbedding, MaskedLMHead=MaskedLMHead
    )
    stand_in = types.SimpleNamespace(layers=names)
    monkeypatch.setitem(sys.modules, "keras_hub", stand_in)
    return names


def positioned(call, sequence_length=LENGTH, layer_class=PositionEmbedding):
    """Embeds positions three times: in order, as `call` says, and of four axes."""
    ids = keras.Input((LENGTH,), dtype="int32")
    tokens = layers.Embedding(IDS, WIDTH)(ids)
    embedding = layer_class(sequence_length)
    x = layers.Dense(WIDTH, "tanh")(tokens + embedding(tokens))
    x += call(embedding, x, ids)
    pairs = ops.stack([x, ops.tanh(x)], axis=1)
    outputs = layers.GlobalAveragePooling2D()(pairs * embedding(pairs))
    return keras.Model(ids, layers.Dense(2)(outputs))


def masked(activation="tanh", change=None):
    ids = keras.Input((LENGTH,), dtype="int32")
    at = keras.Input((2,), dtype="int32")
    embedding = layers.ReversibleEmbedding(IDS, WIDTH)
    head = MaskedLMHead(IDS, embedding, activation)
    outputs = head(layers.Dense(WIDTH, "tanh")(embedding(ids)), at)
    if change is not None:
        change(head)
    return keras.Model([ids, at], outputs)


def words(rng):
    return rng.integers(IDS, size=LENGTH), rng.integers(2)


def masked_words(rng):
    at = rng.permutation(LENGTH)[:2]
    return [rng.integers(IDS, size=LENGTH), at], rng.integers(IDS, size=2)


POSITIONS = {
    "in_order": (lambda layer, x, ids: layer(x), LENGTH),
    "of_fewer": (lambda layer, x, ids: layer(x), LENGTH + 3),
    "later": (lambda layer, x, ids: layer(x, start_index=2), LENGTH + 2),
    "of_all_rows": (
        lambda layer, x, ids: layer(x, positions=ops.array([3, 0, 3, -1])),
        LENGTH,
    ),
    "of_each_row": (lambda layer, x, ids: layer(x, positions=ids), IDS),
}

PROBLEMS = [
    Problem(f"positions_{name}", functools.partial(positioned, *of), words, logits)
    for name, of in POSITIONS.items()
]
MASKED = [
    Problem("masked_lm", masked, masked_words, logits),
    Problem(
        "masked_lm_frozen_bias",
        lambda: masked(None, lambda head: setattr(head._bias, "trainable", False)),
        masked_words,
        logits,
    ),
    Problem(
        "masked_lm_frozen_embedding",
        lambda: masked(
            None, lambda head: setattr(head.token_embedding, "trainable", False)
        ),
        masked_words,
        logits,
    ),
]

QUICK = {
    "positions_of_each_row",
    "masked_lm_frozen_bias",
}

every_problem = pytest.mark.parametrize(
    "problem",
    [
        pytest.param(
            problem,
            id=problem.name,
            marks=[
                *([needs_reversible] if problem in MASKED else []),
                *([] if problem.name in QUICK else [pytest.mark.slow]),
            ],
        )
        for problem in PROBLEMS + MASKED
    ],
)

one_of_each_layer = pytest.mark.parametrize(
    "problem",
    [PROBLEMS[-1], pytest.param(MASKED[0], marks=needs_reversible)],
    ids=lambda problem: problem.name,
)


@every_problem
def test_gradients_are_those_of_single_examples(problem):
    engines = ENGINES if problem in {PROBLEMS[-1], MASKED[0]} else ENGINES[:1]
    run = runner(problem, engines)
    for rows in (OUTLIER, ()):
        check(problem, run, rows)


@pytest.mark.slow
@one_of_each_layer
def test_units_can_have_variables_of_their_own(problem):
    """Both layers are linear in their variables, as `tfdp.losses.BAM` needs."""
    ascent = Uphill(0.3, 0.7, is_exact=False)
    run = runner(problem, ENGINES[:1], ascent=ascent)
    check(problem, run, OUTLIER, ascent=ascent)


def test_a_release_without_positions(stand_ins):
    stand_ins.PositionEmbedding = OlderPositionEmbedding
    call, length = POSITIONS["later"]
    make = functools.partial(positioned, call, length, OlderPositionEmbedding)
    problem = Problem("positions_older", make, words, logits)
    check(problem, runner(problem, ENGINES[:1]), OUTLIER)


def test_rules_are_for_the_very_classes(monkeypatch):
    layer, older = PositionEmbedding(LENGTH), OlderPositionEmbedding(LENGTH)
    for each in (layer, older):
        each.build((None, LENGTH, WIDTH))
    assert rules.find(layer) is hub.position_embedding
    assert rules.find(older) is generic
    monkeypatch.delitem(sys.modules, "keras_hub")
    assert rules.find(layer) is generic


def test_a_library_that_is_not_yet_imported_whole(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", types.SimpleNamespace())
    layer = PositionEmbedding(LENGTH)
    layer.build((None, LENGTH, WIDTH))
    assert rules.find(layer) is generic


def test_users_rules_come_first(monkeypatch):
    monkeypatch.setattr(rules.registry, "RULES", dict(rules.registry.RULES))
    rules.register(PositionEmbedding, generic)
    assert rules.find(PositionEmbedding(LENGTH)) is generic


@pytest.mark.slow
def test_a_head_with_a_matrix_of_its_own_is_followed():
    """The rule gives it up; what is made of its matrix is on the graph."""
    x, at = keras.Input((LENGTH, WIDTH)), keras.Input((2,), dtype="int32")
    model = keras.Model([x, at], MaskedLMHead(IDS)(x, at))
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(3, LENGTH, WIDTH)), rng.integers(LENGTH, size=(3, 2))]
    targets = rng.normal(size=(3, 2, IDS))
    found, expected = (
        tfdp.clipped_gradients(
            model, "mse", data, targets, l2_norm_clip=0.5, engine=engine
        )
        for engine in ("bookkeeping", "vectorized")
    )
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)
    for left, right in zip(found.gradients, expected.gradients, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
