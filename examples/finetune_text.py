"""Fine-tune a Transformer privately, to tell good reviews from bad ones.

1. An encoder is pretrained without privacy on public reviews.
2. On private reviews its last block and a classifier are trained with differential
   privacy (or low-rank updates of all blocks, --method=lora), and once more without.
3. The model, from strings to scores, is exported for TensorFlow Serving.

    python examples/finetune_text.py
    python examples/finetune_text.py --dataset=sst2 --data_dir=path/to/folder
    python examples/finetune_text.py --table --dataset=sst2 --data_dir=path/to/folder

By default reviews are made up by a small grammar. With --data_dir (or the environment
variable TFDP_DATA) the private ones are those of SST-2 and the public ones those of
IMDB, or the other way round: the folder has sst2/sst2_train.tsv, sst2/sst2_dev.tsv and
imdb_train.jsonl.gz, imdb_test.jsonl.gz.

The vocabulary is that of the public reviews: one made from private reviews would not be
covered by the guarantee. What is printed and plotted of the training without privacy is
not private.

With --resume a run that was killed goes on: with the encoder that it had pretrained, and
with private training from its last epoch; all private steps count, those that were lost
too.

--table shows what a step takes in time and memory, for BERT's base model, by
`tools/benchmark.py`, on sentences of SST-2 with --dataset=sst2, or made-up tokens. Each
row is a process of its own; with --resume those that were measured are not again.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import plots
import tensorflow as tf
from absl import app, flags
from keras import layers
from saved import read_history

import tfdp

_DATASET = flags.DEFINE_enum(
    "dataset", "generated", ["generated", "sst2", "imdb"], "The private reviews."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", os.environ.get("TFDP_DATA"), "Folder with SST-2 and IMDB."
)
_METHOD = flags.DEFINE_enum(
    "method", "last", ["last", "lora"], "What is trained beside the classifier."
)
_TARGET_EPSILON = flags.DEFINE_float("target_epsilon", 3.0, "Epsilon to spend.")
_DELTA = flags.DEFINE_float("delta", 1e-5, "Delta of the guarantee.")
_EPOCHS = flags.DEFINE_integer("epochs", 8, "Private epochs.", lower_bound=1)
_PRETRAIN_STEPS = flags.DEFINE_integer(
    "pretrain_steps", 800, "Steps on public text.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 512, "Expected number of reviews in a private batch.", lower_bound=1
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 2e-3, "Of Adam, in private training.", lower_bound=0.0
)
_L2_NORM_CLIP = flags.DEFINE_float(
    "l2_norm_clip", 1.0, "Norm that the gradient of a review is clipped to."
)
_WIDTH = flags.DEFINE_integer("width", 128, "Width of the encoder.", lower_bound=1)
_BLOCKS = flags.DEFINE_integer("blocks", 4, "Blocks of the encoder.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 32, "Words of a review.", lower_bound=1)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with a run that was killed.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/finetune", "Folder for the plot and the models."
)
_TABLE = flags.DEFINE_bool("table", False, "Only show what a step takes.")
_TABLE_SIZES = flags.DEFINE_multi_integer(
    "table_batch_size",
    [32, 128, 512, 1024, 2048],
    "Texts in a batch of --table; repeat the flag for several.",
    1,
)
_TABLE_STEPS = flags.DEFINE_integer(
    "table_steps", 3, "Timed steps of a row of --table.", lower_bound=1
)

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

_HEADS = 4
_WORDS = 8000
_RANK = 4


class Reviews(NamedTuple):
    """Texts, and whether they are good."""

    texts: list[str]
    labels: np.ndarray


def main(argv: Sequence[str]) -> None:
    """Pretrain, fine-tune, compare and export."""
    if len(argv) > 1:
        sys.exit(f"finetune_text: everything is a flag. Received: {argv[1]}.")
    if _TABLE.value:
        sys.exit(table())
    output = Path(_OUTPUT_DIR.value)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if _WIDTH.value % _HEADS:
            raise ValueError(
                f"`width` must be a multiple of {_HEADS}. Received: "
                f"width={_WIDTH.value}. Use --width=128."
            )
        tfdp.optimizers.DPAdam(l2_norm_clip=_L2_NORM_CLIP.value, noise_multiplier=1.0)
        train, test, public = load(_DATASET.value, _DATA_DIR.value)
        noise_multiplier = tfdp.calibrate_noise_multiplier(
            _TARGET_EPSILON.value,
            n=len(train.texts),
            batch_size=_BATCH_SIZE.value,
            epochs=_EPOCHS.value,
            delta=_DELTA.value,
        )
    except (OSError, ValueError) as error:
        sys.exit(f"finetune_text: {error}")
    vectorize = layers.TextVectorization(
        _WORDS, standardize=begun, output_sequence_length=_LENGTH.value
    )
    vectorize.adapt(public.texts)
    encoder = encoder_for(vectorize, public, output)
    x, x_test = np.array(vectorize(train.texts)), np.array(vectorize(test.texts))
    data = (x, train.labels), (x_test, test.labels)

    print(f"Private training: noise multiplier {noise_multiplier:.3f}")
    optimizer = tfdp.optimizers.DPAdam(
        _LEARNING_RATE.value,
        l2_norm_clip=_L2_NORM_CLIP.value,
        noise_multiplier=noise_multiplier,
    )
    classifier = with_classifier(encoder)
    budget = tfdp.callbacks.PrivacyBudget(
        delta=_DELTA.value, target_epsilon=_TARGET_EPSILON.value
    )
    private = tfdp.DPModel(classifier)
    kept = [
        keras.callbacks.CSVLogger(output / "history.csv", append=_RESUME.value),
        keras.callbacks.BackupAndRestore(output / "backup"),
    ]
    fit(private, optimizer, *data, callbacks=[budget, *kept])
    history = read_history(output / "history.csv")
    print("\nThe same training without privacy", flush=True)
    other = with_classifier(keras.saving.load_model(output / "encoder.keras"))
    baseline = fit(other, keras.optimizers.Adam(1e-3), *data)

    served = tfdp.export.next_version(output / "reviews")
    text = keras.Input((), dtype="string", name="review")
    scores = layers.Softmax(name="bad_and_good")(classifier(vectorize(text)))
    # It has the weights of the model that was trained, and so continues its ledger.
    whole = tfdp.DPModel(keras.Model(text, scores))
    report = tfdp.export.export_private_model(whole, served, delta=_DELTA.value)
    plots.accuracy_and_epsilon(
        history,
        baseline,
        target_epsilon=_TARGET_EPSILON.value,
        delta=_DELTA.value,
        title=f"Reviews, {_DATASET.value}",
        path=output / "history.png",
    )
    print("\n" + private.privacy_statement(_DELTA.value))
    trained = sum(int(np.prod(v.shape)) for v in classifier.trainable_variables)
    print(
        f"Test accuracy: {history['val_accuracy'][-1]:.1%} private, "
        f"{baseline['val_accuracy'][-1]:.1%} without privacy; "
        f"{trained:,} of {classifier.count_params():,} weights trained\n"
        f"Epsilon: {report['epsilon']:.3f} at delta {_DELTA.value:g}\n"
        f"Plot: {output / 'history.png'}\nFor TensorFlow Serving: {served}"
    )


def encoder_for(
    vectorize: layers.TextVectorization, public: Reviews, output: Path
) -> keras.Model:
    """Pretrain an encoder, or take that of a run that goes on."""
    path = output / "encoder.keras"
    if _RESUME.value and path.exists():
        print(f"The encoder of an earlier run: {path}")
        return keras.saving.load_model(path)
    # What an earlier run left belongs to another encoder.
    shutil.rmtree(output / "backup", ignore_errors=True)
    (output / "history.csv").unlink(missing_ok=True)
    ids = np.array(vectorize(public.texts))
    encoder = pretrained(ids, public.labels, vectorize.vocabulary_size())
    unfinished = output / "encoder.unfinished.keras"
    encoder.save(unfinished)
    unfinished.replace(path)
    return encoder


def begun(text: tf.Tensor) -> tf.Tensor:
    """Keep words only, and let each text begin with one, so that none is empty."""
    words = tf.strings.regex_replace(tf.strings.lower(text), "[^a-z0-9' ]", " ")
    return tf.strings.join(["[begin] ", words])


def pretrained(ids: np.ndarray, labels: np.ndarray, words: int) -> keras.Model:
    """Train an encoder on public reviews."""
    encoder = tfdp.models.bert(
        words, _LENGTH.value, width=_WIDTH.value, heads=_HEADS, blocks=_BLOCKS.value
    )
    print(f"Pretraining without privacy, on {len(ids):,} public texts")
    epochs = 4
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, _PRETRAIN_STEPS.value, warmup_target=1e-3, warmup_steps=50
    )
    model = keras.Model(encoder.input, logits(encoder))
    optimizer = keras.optimizers.AdamW(schedule, clipnorm=1.0)
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    steps = -(-_PRETRAIN_STEPS.value // epochs)
    batches = tf.data.Dataset.from_tensor_slices((ids, labels))
    batches = batches.shuffle(len(ids)).repeat().batch(128)
    model.fit(batches, steps_per_epoch=steps, epochs=epochs, verbose=2)
    return encoder


def logits(encoder: keras.Model) -> keras.KerasTensor:
    """Put a classifier on an encoder."""
    x = layers.GlobalAveragePooling1D()(encoder.output)
    x = layers.Dense(_WIDTH.value, activation="tanh")(x)
    return layers.Dense(2)(x)


def with_classifier(encoder: keras.Model) -> keras.Model:
    """Put a new classifier on an encoder, and freeze what is not to be trained."""
    for layer in encoder.layers:
        attends = isinstance(layer, layers.MultiHeadAttention)
        if _METHOD.value == "last":
            layer.trainable = layer.name.startswith(f"block_{_BLOCKS.value - 1}_")
        else:
            layer.trainable = attends
            if attends:
                for dense in (layer.query_dense, layer.value_dense):
                    dense.enable_lora(_RANK)
                for dense in (layer.key_dense, layer.output_dense):
                    dense.trainable = False
    return keras.Model(encoder.input, logits(encoder))


def fit(
    model: keras.Model, optimizer: Any, train: Any, test: Any, **options: Any
) -> dict[str, list[float]]:
    """Train a model and return its history."""
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    return model.fit(
        *train,
        batch_size=_BATCH_SIZE.value,
        epochs=_EPOCHS.value,
        validation_data=test,
        verbose=2,
        **options,
    ).history


# Data.


def load(dataset: str, data_dir: str | None) -> tuple[Reviews, Reviews, Reviews]:
    """Return private reviews for training and for tests, and public ones."""
    if dataset == "generated":
        return (
            generated(6000, seed=0, nouns=["film", "plot", "cast", "score", "ending"]),
            generated(1000, seed=1, nouns=["film", "plot", "cast", "score", "ending"]),
            generated(20_000, seed=2, nouns=["book", "meal", "hotel", "film"]),
        )
    if data_dir is None:
        raise ValueError(
            f"`data_dir` is missing. Received: dataset={dataset}. Use "
            "`--data_dir=path/to/folder`, or leave --dataset out."
        )
    folder = Path(data_dir)
    if dataset == "sst2":
        train, test = (folder / "sst2" / f"sst2_{n}.tsv" for n in ("train", "dev"))
        return sst2(train), sst2(test), in_parts(imdb(folder / "imdb_train.jsonl.gz"))
    train, test = (folder / f"imdb_{split}.jsonl.gz" for split in ("train", "test"))
    return imdb(train), imdb(test), sst2(folder / "sst2" / "sst2_train.tsv")


def in_parts(reviews: Reviews) -> Reviews:
    """Cut long reviews into parts of as many words as the encoder takes."""
    parts, labels = [], []
    for text, label in zip(*reviews, strict=True):
        words, length = text.replace("<br />", " ").split(), _LENGTH.value
        for start in range(0, max(len(words) - length, 1), length):
            parts.append(" ".join(words[start : start + length]))
            labels.append(label)
    return Reviews(parts, np.array(labels))


def sst2(path: Path) -> Reviews:
    """Read sentences of SST-2."""
    # Sentences may have what `splitlines` takes for the end of a line.
    lines = path.read_text(encoding="utf-8").split("\n")
    pairs = [line.rsplit("\t", 1) for line in lines if line]
    return Reviews([text for text, _ in pairs], np.array([int(y) for _, y in pairs]))


def imdb(path: Path) -> Reviews:
    """Read reviews of IMDB."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return Reviews(
        [row["text"] for row in rows], np.array([int(row["label"]) for row in rows])
    )


def generated(number: int, *, seed: int, nouns: list[str]) -> Reviews:
    """Make up reviews: words of praise or blame about some nouns."""
    rng = np.random.default_rng(seed)
    praise = ["good", "great", "lovely", "moving", "clever", "warm", "honest", "fresh"]
    blame = ["bad", "poor", "dull", "cold", "stale", "clumsy", "hollow", "tired"]
    adverbs = ["very", "rather", "quite", "truly", "oddly"]
    labels = rng.integers(0, 2, number)
    texts = []
    for label in labels:
        clauses = []
        for _ in range(rng.integers(2, 5)):
            # Some words say the opposite of the whole.
            is_praise = bool(label) ^ (rng.random() < 0.2)
            quality = rng.choice(praise if is_praise else blame)
            clauses.append(
                f"the {rng.choice(nouns)} was {rng.choice(adverbs)} {quality}"
            )
        texts.append(" and ".join(clauses))
    return Reviews(texts, labels)


def table() -> int:
    """Let the benchmark measure steps of BERT's base model whose last layers train."""
    tool = Path(__file__).parents[1] / "tools" / "benchmark.py"
    rows_of = Path(_OUTPUT_DIR.value) / "table.jsonl"
    if not _RESUME.value:
        rows_of.unlink(missing_ok=True)
    options = [f"--alone={rows_of}", "--models=bert"]
    is_real = _DATASET.value == "sst2" and _DATA_DIR.value is not None
    if is_real:
        texts = Path(_DATA_DIR.value) / "sst2" / "sst2_train.tsv"
        if not texts.is_file():
            sys.exit(f"finetune_text: there is no file {texts}.")
        options += [f"--texts={texts}"]
    options += [f"--batch_size={size}" for size in _TABLE_SIZES.value]
    engines = ("vectorized", "fast_gradient_clipping", "ghost", "bookkeeping")
    options += [f"--rows={row}" for row in engines]
    options += [f"--steps={_TABLE_STEPS.value}", "--time_limit=900", "--seconds=60"]
    print(
        f"BERT base, 12 blocks, {'sentences of SST-2' if is_real else 'made-up tokens'}"
        f"; rows are kept in {rows_of}",
        flush=True,
    )
    return subprocess.run([sys.executable, tool, *options], check=False).returncode


if __name__ == "__main__":
    app.run(main)
