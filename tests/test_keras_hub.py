"""Families of KerasHub, built from their options, and what else is done with BERT and GPT-2."""

import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.pages import ROOT
from tests.zoo.entry import engine_of
from tests.zoo.hub import HUB
from tests.zoo.single_rows import check_single_rows, trained
from tfdp import _keras, rules
from tfdp.checks.engine import choose
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.losses.objective import Objective
from tfdp.rules import hub
from tfdp.rules.generic import generic

pytestmark = [
    # Of its own dependencies.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # Of masks that stop, and of training without noise.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROWS, LENGTH, IDS = 8, 12, 50

OPTIONS = {
    "vocabulary_size": IDS,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 64,
    "max_sequence_length": 32,
}

LOSS = keras.losses.SparseCategoricalCrossentropy


def keras_hub():
    """Return the package, which takes seconds to import."""
    return pytest.importorskip("keras_hub")


def bert(dropout=0.0):
    return keras_hub().models.BertBackbone(dropout=dropout, **OPTIONS)


def gpt2(dropout=0.0):
    return keras_hub().models.GPT2Backbone(dropout=dropout, **OPTIONS)


def classifier(backbone, dropout=0.0):
    return keras_hub().models.BertTextClassifier(
        backbone, num_classes=2, preprocessor=None, dropout=dropout
    )


def language_model(backbone):
    return keras_hub().models.GPT2CausalLM(backbone, preprocessor=None)


def masked_language_model(backbone):
    return keras_hub().models.BertMaskedLM(backbone, preprocessor=None)


def adapted(backbone, *names):
    backbone.enable_lora(rank=4, target_layer_names=list(names) or None)
    return backbone


def trained_in(model, *names):
    for layer in model.backbone.layers:
        layer.trainable = layer.name in names
    return model


MODELS = {
    "bert_lora_everywhere": lambda: classifier(
        adapted(
            bert(),
            "query",
            "key",
            "value",
            "attention_output",
            "feedforward_intermediate_dense",
            "feedforward_output_dense",
            "token_embedding",
            "segment_embedding",
            "pooled_dense",
        )
    ),
    "bert_last_layer": lambda: trained_in(
        classifier(bert()), "transformer_layer_1", "pooled_dense"
    ),
    "bert_head": lambda: trained_in(classifier(bert())),
    "bert_positions": lambda: trained_in(classifier(bert()), "position_embedding"),
    "gpt2_lora_embedding": lambda: language_model(
        adapted(gpt2(), "query", "value", "token_embedding")
    ),
}


def away_from_zero(model):
    """Move what trains: adapters start at zero, and so do biases."""
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.05 * rng.standard_normal(variable.shape))
    return model


def data(model, rows=ROWS):
    """Sentences of several lengths, their targets and weights, one of them huge."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, LENGTH + 1, rows)[:, None]
    mask = (np.arange(LENGTH) < lengths).astype("int32")
    x = {
        "token_ids": rng.integers(1, IDS, (rows, LENGTH)).astype("int32") * mask,
        "padding_mask": mask,
        "segment_ids": (np.arange(LENGTH) > lengths // 2).astype("int32") * mask,
        "mask_positions": rng.integers(3, size=(rows, 4)).astype("int32"),
    }
    x = {name: x[name] for name in model.input}
    targets = {2: (rows,), 3: (rows, 4 if "mask_positions" in x else LENGTH)}
    rank = len(model.output.shape)
    y = rng.integers(model.output.shape[-1], size=targets[rank])
    weights = np.ones(rows, "float32")
    weights[2] = 1000
    return x, y, weights


def assert_engines_agree(model, tolerance, *engines):
    """Compare with the engine that takes each example's whole gradient."""
    batch = data(model)

    def clipped(engine, clip):
        return tfdp.clipped_gradients(
            model,
            LOSS(from_logits=True, dtype=model.dtype_policy),
            *batch,
            l2_norm_clip=clip,
            engine=engine,
        )

    clip = 0.9 * float(np.median(clipped(engines[0], 1e9).norms))
    expected = clipped("vectorized", clip)
    norms = np.asarray(expected.norms)
    assert norms.max() > 100 * clip
    for engine in engines:
        found = clipped(engine, clip)
        np.testing.assert_allclose(found.norms, norms, rtol=tolerance)
        for one, other in zip(found.gradients, expected.gradients, strict=True):
            assert np.linalg.norm(one - other) <= tolerance * clip * ROWS


def marks_of(entry):
    if entry.is_quick:
        return []
    # One for each kind of backbone, whole or with adapters.
    is_of_a_kind = entry.name in {
        *("albert", "bert", "bert_lora", "clip_vision", "gemma_lora", "gpt2"),
        *("llama", "t5_lora", "vit_lora"),
    }
    return [pytest.mark.slow if is_of_a_kind else pytest.mark.exhaustive]


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=name, marks=marks_of(entry))
        for name, entry in HUB.items()
    ],
)
def test_families_are_clipped_as_single_rows(entry, caplog):
    """Without a word about layers that are run twice, or about whole gradients."""
    keras_hub()
    with caplog.at_level(logging.WARNING, "absl"):
        check_single_rows(entry)
    assert "tfdp" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("bert", "gpt2", "gemma3", "llama"),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("gemma", "mistral", "phi3", "qwen")
        ),
    ],
)
def test_sequences_of_any_length(name):
    """Of whatever length the sentences of a batch are."""
    keras_hub()
    entry = HUB[name]
    x, y, _ = entry.batch()
    x, y = keras.tree.map_structure(
        lambda array: tf.TensorSpec([None] * array.ndim, array.dtype), (x, y)
    )
    objective = Objective.of(entry.build(1.0), entry.make_loss())
    assert isinstance(choose("auto", objective, (x, y, None)), BookkeepingEngine)


def test_the_guide_has_the_table():
    page = (ROOT / "docs" / "guides" / "language_models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\w-]+) \| ([\w-]+) \|", page, re.M)
    found = {}
    for name, *engines in rows:
        for line, engine in zip((name, f"{name}_lora"), engines, strict=True):
            found[line] = engine.replace("-", "")
    assert {name: engine for name, engine in found.items() if engine != "none"} == {
        name: entry.engine for name, entry in HUB.items()
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in HUB if not name.endswith("_lora")])
def test_families_with_chance(name):
    """What a family draws does not change which engine clips it."""
    keras_hub()
    entry = HUB[name]
    private = trained(entry, entry.build(1.0), entry.batch(), 1.0)
    assert engine_of(private) == entry.engine
    assert all(np.isfinite(v).all() for v in private.model.get_weights())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.slow
            if name == "gpt2_lora_embedding"
            else pytest.mark.exhaustive,
        )
        for name in MODELS
    ],
)
def test_engines_agree(name):
    model = away_from_zero(MODELS[name]())
    x, _, _ = data(model)
    assert tfdp.validate_model(model, x) == []
    trained = [
        layer for _, layer in _keras.layers_by_path(model) if layer.trainable_variables
    ]
    assert generic not in map(rules.find, trained)
    assert_engines_agree(model, 1e-4, "bookkeeping")


@pytest.mark.exhaustive
def test_masked_words_train_by_bookkeeping():
    model = away_from_zero(masked_language_model(bert()))
    assert_engines_agree(model, 1e-4, "bookkeeping")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "task", "is_adapted"),
    [
        (bert, classifier, True),
        (gpt2, language_model, False),
        pytest.param(bert, classifier, False, marks=pytest.mark.exhaustive),
        pytest.param(gpt2, language_model, True, marks=pytest.mark.exhaustive),
    ],
)
def test_training(backbone, task, is_adapted, caplog):
    """With dropout, chosen by itself and without a word."""
    backbone = backbone(dropout=0.1)
    model = task(adapted(backbone) if is_adapted else backbone)
    frozen = [variable.numpy() for variable in model.non_trainable_variables]
    private = tfdp.DPModel(model)
    private.compile(
        tfdp.optimizers.DPOptimizer(
            keras.optimizers.Adam(0.01), l2_norm_clip=1.0, noise_multiplier=0.5
        ),
        LOSS(from_logits=True),
    )
    x, y, _ = data(model, rows=32)
    with caplog.at_level(logging.WARNING, "absl"):
        history = private.fit(x, y, batch_size=16, epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert "whole gradient" not in caplog.text
    assert "generic" not in private.explain()
    if is_adapted:
        assert "lora" in " ".join(v.path for v in model.trainable_variables)
        for variable, before in zip(model.non_trainable_variables, frozen, strict=True):
            if "seed" not in variable.path:
                np.testing.assert_array_equal(variable, before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["start_index", "positions", "neither"])
def test_positions(mode):
    """The layer by itself, called as nobody calls it in training."""
    arguments = {"start_index": 3, "positions": np.array([[4, 0, 4], [1, 2, 0]])}
    inputs = keras.Input((3, 2))
    layer = keras_hub().layers.PositionEmbedding(6)
    chosen = {name: arguments[name] for name in arguments if name == mode}
    if mode == "positions":
        positions = keras.Input((3,), dtype="int32")
        model = keras.Model([inputs, positions], layer(inputs, positions=positions))
        x = [np.ones((2, 3, 2), "float32"), arguments["positions"]]
    else:
        model = keras.Model(inputs, layer(inputs, **chosen))
        x = np.ones((2, 3, 2), "float32")
    assert rules.find(layer) is hub.position_embedding
    y = np.random.default_rng(0).normal(size=(2, 3, 2))
    one, other = (
        tfdp.clipped_gradients(model, "mse", x, y, l2_norm_clip=0.1, engine=engine)
        for engine in ("bookkeeping", "vectorized")
    )
    np.testing.assert_allclose(one.norms, other.norms, rtol=1e-5)
    np.testing.assert_allclose(
        one.gradients[0], other.gradients[0], rtol=1e-5, atol=1e-8
    )
