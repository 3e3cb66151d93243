"""The families of KerasHub, tiny: whole, and with adapters in frozen weights.

KerasHub is imported when a model is built: that takes seconds, and it may not be there.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.zoo.entry import CLASSES, Entry, images
from tfdp import _keras

IDS, LENGTH, DIM, HIDDEN, HEADS = 20, 6, 16, 24, 2
IMAGE, PATCH = (8, 8, 3), 4

POSITIONS = {"max_sequence_length": LENGTH}
GROUPED = {"num_query_heads": HEADS, "num_key_value_heads": 1}
GEMMA = {**GROUPED, "head_dim": 8, "use_post_ffw_norm": True}
GEMMA3 = {**GEMMA, "image_size": None, "use_post_attention_norm": True}
ALBERT = {**POSITIONS, "embedding_dim": 8, "num_inner_repetitions": 2}
DEBERTA = {**POSITIONS, "bucket_size": 4}
WHISPER = {
    "num_mels": 4,
    "max_encoder_sequence_length": LENGTH,
    "max_decoder_sequence_length": LENGTH,
}
MIT = {
    "layerwise_depths": [1, 1],
    "num_layers": 2,
    "layerwise_num_heads": [1, HEADS],
    "layerwise_sr_ratios": [2, 1],
    "layerwise_patch_sizes": [3, 3],
    "layerwise_strides": [2, 2],
    "image_shape": IMAGE,
    "hidden_dims": [8, DIM],
}


def hub() -> Any:
    """Import KerasHub's models."""
    return importlib.import_module("keras_hub").models


# Backbones: with what chance there is in those that are trained.


def transformer(name: str, **sizes: Any) -> keras.Model:
    """Build a backbone of words."""
    if "num_query_heads" not in sizes:
        sizes["num_heads"] = HEADS
    return getattr(hub(), name)(
        vocabulary_size=IDS,
        num_layers=1,
        hidden_dim=DIM,
        intermediate_dim=HIDDEN,
        dropout=0.1,
        **sizes,
    )


def vit() -> keras.Model:
    """Build ViT."""
    return hub().ViTBackbone(IMAGE, PATCH, 1, HEADS, DIM, HIDDEN, dropout_rate=0.1)


def mit() -> keras.Model:
    """Build the encoder of SegFormer."""
    return hub().MiTBackbone(max_drop_path_rate=0.1, **MIT)


def clip_text() -> keras.Model:
    """Build CLIP's tower of words."""
    return hub().CLIPTextEncoder(IDS, DIM, DIM, 1, HEADS, HIDDEN, **POSITIONS)


def clip_vision() -> keras.Model:
    """Build CLIP's tower of images."""
    return hub().CLIPVisionEncoder(PATCH, DIM, 1, HEADS, HIDDEN, image_shape=IMAGE)


# Heads.


def classes(backbone: keras.Model, task: str) -> keras.Model:
    """Put a head of KerasHub's on a backbone, for three classes."""
    return getattr(hub(), task)(backbone=backbone, num_classes=3, preprocessor=None)


def words(backbone: keras.Model, task: str) -> keras.Model:
    """Let a backbone say the next word, or translate."""
    return getattr(hub(), task)(backbone=backbone, preprocessor=None)


def of_each_word(backbone: keras.Model) -> keras.Model:
    """Put a head of one's own on a decoder."""
    x = backbone.output["decoder_sequence_output"]
    return keras.Model(backbone.input, layers.Dense(IDS)(x))


def of_mean(backbone: keras.Model) -> keras.Model:
    """Put a head of one's own on a tower."""
    x = layers.GlobalAveragePooling1D()(backbone.output)
    return keras.Model(backbone.input, layers.Dense(3)(x))


# Rows.


def text(*parts: str, targets: int = IDS, is_class: bool = False) -> Callable[..., Any]:
    """Make a function that draws sentences of several lengths, as KerasHub packs them.

    Args:
        *parts: What is beside ids and mask: ``"segment_ids"``, or the sentences'
            names: ``"encoder_"`` and ``"decoder_"``.
        targets: How many classes or words there are.
        is_class: Whether a sentence has one target, or each of its words.
    """
    names = [part for part in parts if part.endswith("_")] or [""]

    def draw(rng: np.random.Generator, rows: int) -> tuple[Any, Any]:
        x = {}
        for name in names:
            lengths = rng.integers(3, LENGTH + 1, (rows, 1))
            mask = (np.arange(LENGTH) < lengths).astype("int32")
            ids = rng.integers(1, IDS, (rows, LENGTH)).astype("int32")
            x |= {f"{name}token_ids": ids * mask, f"{name}padding_mask": mask}
        if "segment_ids" in parts:
            x["segment_ids"] = (np.arange(LENGTH) > lengths // 2).astype("int32")
        shape = (rows,) if is_class else (rows, LENGTH)
        return x, rng.integers(targets, size=shape)

    return draw


def speech(rng: np.random.Generator, rows: int) -> tuple[Any, Any]:
    """Draw spectrograms and what is said in them."""
    x, y = text("decoder_")(rng, rows)
    return x | {"encoder_features": rng.normal(size=(rows, LENGTH, 4))}, y


def text_of_tower(rng: np.random.Generator, rows: int) -> tuple[Any, Any]:
    """Draw sentences without a mask."""
    x, y = text(targets=3, is_class=True)(rng, rows)
    return {"token_ids": x["token_ids"]}, y


def images_of_tower(rng: np.random.Generator, rows: int) -> tuple[Any, Any]:
    """Draw images with a name."""
    x, y = images(*IMAGE)(rng, rows)
    return {"images": x}, y


# Families.

# What `enable_lora` does by itself: queries and values, by the names of their layers.
BY_DEFAULT: list[str] = []


def built(
    backbone: Callable[[], keras.Model],
    head: Callable[[keras.Model], keras.Model],
    adapted: list[str] | None,
    chance: float,
) -> keras.Model:
    """Build a model, and move what trains: adapters start at zero, and biases do."""
    trunk = backbone()
    if adapted is not None:
        trunk.enable_lora(rank=2, target_layer_names=adapted or None)
    model = head(trunk)
    for _, layer in _keras.layers_by_path(model):
        if hasattr(layer, "rate"):
            layer.rate *= chance
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.05 * rng.standard_normal(variable.shape))
    return model


def family(
    name: str,
    backbone: Callable[[], keras.Model],
    head: Callable[[keras.Model], keras.Model],
    rows: Callable[[np.random.Generator, int], tuple[Any, Any]],
    *,
    engines: tuple[str, ...] = ("bookkeeping", "bookkeeping"),
    adapted: list[str] = BY_DEFAULT,
    dtype: str = "float64",
    is_quick: bool = False,
) -> list[Entry]:
    """Make the lines of a family.

    Args:
        name: Its name.
        backbone: Builds the backbone.
        head: Puts a head on it.
        rows: Draws rows.
        engines: That of the whole, and that of adapters, if the family can have some.
        adapted: Which layers get them.
        dtype: In which the whole is compared. Keras keeps adapters in float32.
        is_quick: Whether the quick tests train the whole.
    """
    make = functools.partial(built, backbone, head)
    whole, *lora = engines
    lines = [Entry(name, functools.partial(make, None), rows, CLASSES, whole)]
    lines[0] = dataclasses.replace(lines[0], dtype=dtype, is_quick=is_quick)
    for engine in lora:
        build = functools.partial(make, adapted)
        lines.append(
            Entry(f"{name}_lora", build, rows, CLASSES, engine, dtype="float32")
        )
    return lines


def of_words(
    name: str,
    backbone: str,
    sizes: dict[str, Any],
    task: str,
    *parts: str,
    **options: Any,
) -> list[Entry]:
    """Make the lines of a family of words; see `text` and `family`."""
    is_class = task.endswith("Classifier")
    return family(
        name,
        functools.partial(transformer, backbone, **sizes),
        functools.partial(classes if is_class else words, task=task),
        text(*parts, targets=3 if is_class else IDS, is_class=is_class),
        **options,
    )


# Some norms compute in float32 whatever the policy says.
SINGLE = {"dtype": "float32"}
T5 = {"adapted": ["query_projector", "value_projector"], **SINGLE}

ENTRIES = [
    *of_words("bert", "BertBackbone", POSITIONS, "BertTextClassifier", "segment_ids"),
    *of_words("roberta", "RobertaBackbone", POSITIONS, "RobertaTextClassifier"),
    *of_words(
        "distil_bert", "DistilBertBackbone", POSITIONS, "DistilBertTextClassifier"
    ),
    *of_words(
        "albert", "AlbertBackbone", ALBERT, "AlbertTextClassifier", "segment_ids"
    ),
    *of_words("deberta_v3", "DebertaV3Backbone", DEBERTA, "DebertaV3TextClassifier"),
    *of_words("gpt2", "GPT2Backbone", POSITIONS, "GPT2CausalLM"),
    *of_words("llama", "LlamaBackbone", GROUPED, "LlamaCausalLM", **SINGLE),
    *of_words("llama3", "Llama3Backbone", GROUPED, "Llama3CausalLM", **SINGLE),
    *of_words(
        "gemma", "GemmaBackbone", GEMMA, "GemmaCausalLM", **SINGLE, is_quick=True
    ),
    *of_words("gemma3", "Gemma3Backbone", GEMMA3, "Gemma3CausalLM", **SINGLE),
    *of_words("mistral", "MistralBackbone", GROUPED, "MistralCausalLM", **SINGLE),
    *of_words("phi3", "Phi3Backbone", GROUPED, "Phi3CausalLM", **SINGLE),
    *of_words("qwen", "QwenBackbone", GROUPED, "QwenCausalLM", **SINGLE),
    *of_words("t5", "T5Backbone", {}, "T5Seq2SeqLM", "encoder_", "decoder_", **T5),
    *of_words(
        "bart", "BartBackbone", POSITIONS, "BartSeq2SeqLM", "encoder_", "decoder_"
    ),
    *family(
        "whisper",
        functools.partial(transformer, "WhisperBackbone", **WHISPER),
        of_each_word,
        speech,
    ),
    *family(
        "vit",
        vit,
        functools.partial(classes, task="ViTImageClassifier"),
        images(*IMAGE),
    ),
    *family(
        "mit",
        mit,
        functools.partial(classes, task="MiTImageClassifier"),
        images(*IMAGE),
        engines=("bookkeeping",),
    ),
    *family("clip_text", clip_text, of_mean, text_of_tower),
    *family("clip_vision", clip_vision, of_mean, images_of_tower),
]

HUB: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}
