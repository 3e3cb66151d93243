"""Fine-tune a language model privately, by low-rank updates of its attention.

1. A small Gemma of KerasHub is pretrained without privacy on public text: Python's
   reference, and the docstrings of NumPy and Keras.
2. Adapters (`enable_lora`) are trained on the docstrings of scikit-learn and SciPy with
   differential privacy, and once more without. One sequence of tokens, the beginning of
   one docstring, is one example: that is what the guarantee protects.

    pip install -e '.[examples,hub]'
    python examples/finetune_llm.py
    python examples/finetune_llm.py --preset=gemma_2b_en --batch_size=64

All text is in packages that are installed; nothing is downloaded, but with --preset the
weights of a pretrained model, which then takes the place of the small one. A preset may
be a folder, too.

Tokens are those of the public text: a vocabulary made from private text would not be
covered by the guarantee. What a preset was trained on, nobody knows who did not train it:
the guarantee is for what the adapters learn.

Perplexities are exact values: those of the training (`perplexity`) of private text, so
that they are not to be published; those of held-out docstrings (`val_perplexity`) of text
that the guarantee does not protect. What is trained without privacy is not private.
"""

import ast
import importlib.util
import math
import pydoc_data.topics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import plots
import tensorflow as tf
from absl import app, flags
from saved import read_history

import tfdp

try:
    import keras_hub
except ModuleNotFoundError:
    keras_hub = None

_PRESET = flags.DEFINE_string(
    "preset", None, "A causal language model of KerasHub: its name, or a folder."
)
_TARGET_EPSILON = flags.DEFINE_float("target_epsilon", 3.0, "Epsilon to spend.")
_DELTA = flags.DEFINE_float("delta", 1e-5, "Delta of the guarantee.")
_EPOCHS = flags.DEFINE_integer("epochs", 6, "Private epochs.", lower_bound=1)
_PRETRAIN_STEPS = flags.DEFINE_integer(
    "pretrain_steps", 400, "Steps on public text.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 512, "Expected number of sequences in a private batch.", lower_bound=1
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 1e-2, "Of Adam, for the adapters.", lower_bound=0.0
)
_L2_NORM_CLIP = flags.DEFINE_float(
    "l2_norm_clip", 0.1, "Norm that the gradient of a sequence is clipped to."
)
_RANK = flags.DEFINE_integer("rank", 4, "Rank of the adapters.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 32, "Tokens of a sequence.", lower_bound=2)
_SEQUENCES = flags.DEFINE_integer(
    "sequences", 6000, "Private sequences, at most.", lower_bound=1
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/llm", "Folder for the plot, the history and the adapters."
)

_WORDS = 2000
_TEST = 500
_CHARACTERS = 400


class Packed(NamedTuple):
    """Sequences of tokens, padded: arguments of `fit`."""

    x: dict[str, np.ndarray]
    y: np.ndarray
    sample_weight: np.ndarray


# Makes numbers of texts.
Packer: TypeAlias = Callable[[list[str]], Packed]


def main(argv: Sequence[str]) -> None:
    """Pretrain, fine-tune both ways and compare."""
    if len(argv) > 1:
        sys.exit(f"finetune_llm: everything is a flag. Received: {argv[1]}.")
    output = Path(_OUTPUT_DIR.value)
    try:
        output.mkdir(parents=True, exist_ok=True)
        optimizer = tfdp.optimizers.DPAdam(
            _LEARNING_RATE.value, l2_norm_clip=_L2_NORM_CLIP.value, noise_multiplier=1.0
        )
        private_text, test_text = private_texts()
        optimizer.noise_multiplier = tfdp.calibrate_noise_multiplier(
            _TARGET_EPSILON.value,
            n=len(private_text),
            batch_size=_BATCH_SIZE.value,
            epochs=_EPOCHS.value,
            delta=_DELTA.value,
        )
        if keras_hub is None:
            raise ValueError("KerasHub is missing. Use `pip install keras-hub`.")
    except (OSError, ValueError) as error:
        sys.exit(f"finetune_llm: {error}")
    keras.utils.set_random_seed(0)  # Of the weights: noise and draws do not follow it.
    model, packed = preset() if _PRESET.value else pretrained()
    train, test = packed(private_text), packed(test_text)
    before = perplexity_of(model, test)
    print(f"Perplexity of held-out docstrings before: {before:.1f}")
    model.backbone.enable_lora(_RANK.value)
    start = [variable.numpy() for variable in model.trainable_variables]

    print(f"\nWithout privacy, {len(private_text):,} sequences", flush=True)
    # The texts are in a random order.
    adam = keras.optimizers.Adam(_LEARNING_RATE.value)
    plain = fit(model, adam, train, test, shuffle=False)
    for variable, value in zip(model.trainable_variables, start, strict=True):
        variable.assign(value)
    print(f"\nPrivately, noise multiplier {float(optimizer.noise_multiplier):.3f}")
    private = tfdp.DPModel(model)
    fit(
        private,
        optimizer,
        train,
        test,
        callbacks=[
            tfdp.callbacks.PrivacyBudget(
                delta=_DELTA.value, target_epsilon=_TARGET_EPSILON.value
            ),
            keras.callbacks.CSVLogger(output / "history.csv"),
        ],
    )
    history = read_history(output / "history.csv")
    model.backbone.save_lora_weights(str(output / "adapters.lora.h5"))
    plot(before, plain, history, output / "perplexity.png")
    print(
        f"\n{private.privacy_statement(_DELTA.value)}\n"
        f"One row of x is the first {_LENGTH.value} tokens of one docstring."
    )
    trained = sum(math.prod(v.shape) for v in model.trainable_variables)
    print(
        f"{trained:,} of {model.count_params():,} weights trained\n"
        f"Perplexity of held-out docstrings: {before:.1f} before, "
        f"{history['val_perplexity'][-1]:.1f} private, "
        f"{plain['val_perplexity'][-1]:.1f} without privacy\n"
        f"Epsilon: {private.epsilon(_DELTA.value):.3f} at delta {_DELTA.value:g}\n"
        f"Plot: {output / 'perplexity.png'}\n"
        f"Adapters: {output / 'adapters.lora.h5'}"
    )


def fit(
    model: keras.Model, optimizer: Any, train: Packed, test: Packed, **options: Any
) -> dict[str, list[float]]:
    """Train the adapters and return the history."""
    compiled(model, optimizer)
    return model.fit(
        **train._asdict(),
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        validation_data=test,
        verbose=2,
        **options,
    ).history


def compiled(model: keras.Model, optimizer: Any) -> keras.Model:
    """Let a model learn the next token of each sequence, and count how well it does."""
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[
            keras_hub.metrics.Perplexity(from_logits=True, name="perplexity")
        ],
    )
    return model


def perplexity_of(model: keras.Model, data: Packed) -> float:
    """Compute how many tokens a model hesitates between, on the average."""
    compiled(model, "sgd")
    results = model.evaluate(**data._asdict(), verbose=0, return_dict=True)
    return float(results["perplexity"])


# Models.


def preset() -> tuple[keras.Model, Packer]:
    """Load a model of KerasHub, and what packs text for it."""
    model = keras_hub.models.CausalLM.from_preset(_PRESET.value)
    packer = model.preprocessor
    # Inside of the model it would wait for strings.
    model.preprocessor = None

    def packed(texts: list[str]) -> Packed:
        x, *others = packer(texts, sequence_length=_LENGTH.value)
        x = {name: np.array(value) for name, value in x.items()}
        return Packed(x, *map(np.array, others))

    return model, packed


def pretrained() -> tuple[keras.Model, Packer]:
    """Train a small Gemma on public text, without privacy."""
    texts = public_texts()
    print(f"Pretraining without privacy, on {len(texts):,} public texts", flush=True)
    vocabulary = keras_hub.tokenizers.compute_word_piece_vocabulary(
        tf.data.Dataset.from_tensor_slices(texts).batch(1000),
        _WORDS,
        lowercase=True,
        reserved_tokens=["[PAD]", "[UNK]"],
    )
    tokenizer = keras_hub.tokenizers.WordPieceTokenizer(
        vocabulary, sequence_length=_LENGTH.value + 1, lowercase=True
    )
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=len(vocabulary),
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=64,
        intermediate_dim=256,
        head_dim=32,
    )
    model = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
    rows = tf.data.Dataset.from_tensor_slices(tuple(next_tokens(tokenizer(texts))))
    epochs = 4
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, _PRETRAIN_STEPS.value, warmup_target=5e-3, warmup_steps=50
    )
    compiled(model, keras.optimizers.Adam(schedule, clipnorm=1.0)).fit(
        rows.shuffle(len(texts)).repeat().batch(64),
        steps_per_epoch=-(-_PRETRAIN_STEPS.value // epochs),
        epochs=epochs,
        shuffle=False,  # A second time.
        verbose=2,
    )
    return model, lambda texts: next_tokens(tokenizer(texts))


def next_tokens(ids: tf.Tensor) -> Packed:
    """Let each token, padding aside, be followed by the next one."""
    ids = np.asarray(ids, "int32")
    is_token = ids != 0
    x = {"token_ids": ids[:, :-1], "padding_mask": is_token[:, :-1].astype("int32")}
    return Packed(x, ids[:, 1:], is_token[:, 1:].astype("float32"))


# Text.


def public_texts() -> list[str]:
    """Return paragraphs of Python's reference, and docstrings of NumPy and Keras."""
    topics = pydoc_data.topics.topics.values()
    paragraphs = [part for topic in topics for part in topic.split("\n\n")]
    return paragraphs + docstrings("numpy", "keras")


def private_texts() -> tuple[list[str], list[str]]:
    """Return docstrings of scikit-learn and SciPy, for training and for tests."""
    texts = docstrings("sklearn", "scipy")
    order = np.random.default_rng(0).permutation(len(texts))
    texts = [texts[place] for place in order]
    return texts[_TEST:][: _SEQUENCES.value], texts[:_TEST]


def docstrings(*packages: str) -> list[str]:
    """Return the beginnings of what some packages say of themselves, each once."""
    found: dict[str, None] = {}
    for package in packages:
        folders = importlib.util.find_spec(package).submodule_search_locations
        for path in sorted(Path(folders[0]).rglob("*.py")):
            if "tests" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
                    found[(ast.get_docstring(node) or "")[:_CHARACTERS]] = None
    found.pop("", None)
    return list(found)


# The picture.


def plot(
    before: float,
    plain: dict[str, list[float]],
    private: dict[str, list[float]],
    path: Path,
) -> None:
    """Plot perplexity and epsilon over the epochs.

    Args:
        before: Perplexity of the model that was fine-tuned.
        plain: History of the training without privacy.
        private: History of the private training.
        path: The file.
    """
    figure, [[perplexity], [epsilon]] = plots.panels(2, 1, size=(6.5, 3.0), sharex=True)
    for history, label in ((plain, "without privacy"), (private, "private")):
        values = [before, *history["val_perplexity"]]
        epochs = range(len(values))
        plots.curve(perplexity, epochs, values, label, plots.COLORS[label])
    perplexity.set(
        ylabel="perplexity, held-out", title="Low-rank adapters of a language model"
    )
    spent = [0.0, *private["epsilon"]]
    plots.curve(epsilon, range(len(spent)), spent, "spent", plots.PRIVATE)
    target = _TARGET_EPSILON.value
    epsilon.axhline(target, color="black", linestyle="--", linewidth=1, label="target")
    epsilon.set(ylabel=f"epsilon at delta {_DELTA.value:g}")
    epsilon.set_ylim(bottom=0)
    plots.over_epochs(epsilon, len(plain["val_perplexity"]), first=0)
    for axes in (perplexity, epsilon):
        plots.name_curves(axes)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
