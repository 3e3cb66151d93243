"""A whole experiment under one epsilon: search, early stopping, audits, report, export.

Twelve settings of a small network compete on the 1797 images of 8x8 pixels that come with
scikit-learn: nothing is downloaded, and all of it takes about three minutes on two cores.

    python examples/private_experiment.py
    python examples/private_experiment.py --mean_tries=20

A search tries settings a secret number of times and lets its best model out; the model is
trained further until a metric with noise gets no better; then it is audited, described and
exported. Its ledger has all of that. Beside it stand the twelve settings, each trained once
at the epsilon of the whole experiment: what whoever guesses would have got.
"""

import itertools
import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import plots
from absl import app, flags
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdp

DELTA = 1e-4
BATCH_SIZE = 256
EPOCHS = 20
SPACE: dict[str, list[Any]] = {
    "learning_rate": [0.002, 0.01, 0.05],
    "l2_norm_clip": [0.1, 1.0],
    "width": [16, 128],
}

_NOISE_MULTIPLIER = flags.DEFINE_float(
    "noise_multiplier", 5.0, "Noise of each try and of the training after them."
)
_MEAN_TRIES = flags.DEFINE_float("mean_tries", 10.0, "Tries of the search on average.")
_GUESSES = flags.DEFINE_bool("guesses", True, "Train each setting once, to compare.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/experiment", "Folder for the model, its reports and the plot."
)


def main(argv: Sequence[str]) -> None:
    """Run the experiment and report."""
    if len(argv) > 1:
        sys.exit(
            f"private_experiment: everything is a flag. Received: {' '.join(argv[1:])}."
        )
    output = Path(_OUTPUT_DIR.value)
    output.mkdir(parents=True, exist_ok=True)
    train, test = load_data()
    try:
        private, settings = searched(train)
    except (tfdp.errors.NotPrivateError, ValueError) as error:
        sys.exit(f"private_experiment: {error}")
    of_search = private.epsilon(DELTA)
    alone = epsilon_of_one_try(private.ledger)
    trained_further(private, train)
    # Where the run ended depends on the data, which `private.epsilon` leaves out.
    epsilon = private.privacy_report(DELTA)["epsilon"]
    accuracy = private.evaluate(*test, verbose=0, return_dict=True)["accuracy"]

    audits = audited(private, train, test)
    answers = {
        "trust_model": "Whoever runs this script.",
        "settings": f"By a private search, which is in the ledger: {settings}.",
    }
    described(private, answers, audits, output)
    private.save(output / "experiment.keras")
    exported(answers, audits, output)
    guesses = guessed(train, test, epsilon) if _GUESSES.value else {}
    if guesses:
        plot(guesses, settings, accuracy, epsilon, output / "experiment.png")
    print("\n" + private.privacy_statement(delta=DELTA))
    print(
        f"Settings that the search has found: {settings}\n"
        f"Test accuracy: {accuracy:.1%}; settings guessed at the same epsilon: "
        f"{spread(list(guesses.values()))}\n"
        f"Epsilon at delta {DELTA:g}: {epsilon:.3f} for all of it, {of_search:.3f} of it "
        f"for the search. The winner's own training would have {alone:.3f}, which is true "
        "for nobody: the other tries have seen the data, too.\n"
        f"Model, reports and plot: {output}/"
    )


def load_data() -> tuple[Any, Any]:
    """Load (images, labels) for training and test, pixels in [0, 1]."""
    x, y = load_digits(return_X_y=True)
    x = x.astype("float32") / 16
    x, x_test, y, y_test = train_test_split(x, y, test_size=360, random_state=0)
    return (x, y), (x_test, y_test)


def build(settings: dict[str, Any], noise_multiplier: float | None = None) -> Any:
    """Build and compile a private model with some settings."""
    private = tfdp.DPModel(
        keras.Sequential(
            [
                keras.Input((64,), name="pixels"),
                keras.layers.Dense(settings["width"], activation="tanh"),
                keras.layers.Dense(10, name="digit"),
            ],
            name="digits",
        )
    )
    private.compile(
        optimizer=tfdp.optimizers.DPAdam(
            settings["learning_rate"],
            l2_norm_clip=settings["l2_norm_clip"],
            noise_multiplier=noise_multiplier or _NOISE_MULTIPLIER.value,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return private


def searched(train: Any) -> tuple[tfdp.DPModel, dict[str, Any]]:
    """Search the settings; each try is scored by an accuracy with noise."""
    search = tfdp.tuning.PrivateSearch(
        build,
        space=SPACE,
        tries=tfdp.tuning.Geometric(mean=_MEAN_TRIES.value),
        score="private_accuracy",
        delta=DELTA,
    )
    # The last epoch's accuracy decides: one release a try. How long the search takes
    # tells how many tries it had: nothing here shows that.
    private = search.fit(
        *train,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        callbacks=lambda settings: [evaluation(every=EPOCHS)],
    )
    return private, search.settings


def evaluation(every: int) -> tfdp.callbacks.PrivateEvaluation:
    """Return what releases the accuracy on the training images every some epochs."""
    return tfdp.callbacks.PrivateEvaluation(
        ["accuracy"], every=every, noise_multiplier=20.0
    )


def epsilon_of_one_try(ledger: tfdp.accounting.Ledger) -> float:
    """Return what a try of a search costs, without the choice between tries."""
    (search,) = ledger.segments
    # All settings cost the same here: steps, and the release that scores them.
    (candidate,) = search.scheme.candidates
    return tfdp.accounting.Ledger(candidate).epsilon(DELTA)


def trained_further(private: tfdp.DPModel, train: Any) -> None:
    """Train the winner until its accuracy, with noise, gets no better."""
    print("The best model trains on, until its accuracy with noise gets no better.")
    private.fit(
        *train,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        callbacks=[
            evaluation(every=2),
            tfdp.callbacks.PrivateEarlyStopping(
                "private_accuracy", patience=2, restore_best_weights=True
            ),
        ],
        verbose=2,
    )


def audited(private: tfdp.DPModel, train: Any, test: Any) -> list[Any]:
    """Try the guarantee out, in two ways that leave the model as it is."""
    audits = [
        tfdp.audit.replay(private, *train, neighbours=20),
        tfdp.audit.membership(private, train, test),
    ]
    for audit in audits:
        print(audit)
    return audits


def described(
    private: tfdp.DPModel, answers: dict[str, str], audits: list[Any], output: Path
) -> None:
    """Write the report in three forms. These images are public, and so are the audits."""
    options = {"answers": answers, "audits": audits}
    for name, form in (("MODEL_CARD.md", "model-card"), ("NIST.md", "nist-800-226")):
        text = private.privacy_report(DELTA, form, **options)
        (output / name).write_text(text, "utf-8")
    report = private.privacy_report(DELTA, "registry", **options)
    (output / "registry.json").write_text(json.dumps(report, indent=2), "utf-8")


def exported(answers: dict[str, str], audits: list[Any], output: Path) -> None:
    """Export the model, in a process that has not traced the models of the tries."""
    # Names in a graph count what its process has traced, and so the secret tries.
    process = multiprocessing.get_context("spawn").Process(
        target=export, args=(answers, audits, output)
    )
    process.start()
    process.join()
    if process.exitcode:
        sys.exit("private_experiment: the export has failed.")


def export(answers: dict[str, str], audits: list[Any], output: Path) -> None:
    """Load the model that was saved, and export it with its report."""
    private = keras.models.load_model(output / "experiment.keras")
    served = tfdp.export.next_version(output / "digits")
    tfdp.export.export_private_model(
        private, served, delta=DELTA, answers=answers, audits=audits
    )


def guessed(train: Any, test: Any, epsilon: float) -> dict[tuple[Any, ...], float]:
    """Train each setting once, as if it had been guessed, at an epsilon.

    Returns:
        The test accuracy of each.
    """
    noise_multiplier = tfdp.calibrate_noise_multiplier(
        epsilon, n=len(train[0]), batch_size=BATCH_SIZE, epochs=EPOCHS, delta=DELTA
    )
    accuracies = {}
    for values in itertools.product(*SPACE.values()):
        private = build(dict(zip(SPACE, values, strict=True)), noise_multiplier)
        private.fit(*train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0)
        found = private.evaluate(*test, verbose=0, return_dict=True)
        accuracies[values] = found["accuracy"]
        print(f"guess {len(accuracies)} of 12: {values}, {found['accuracy']:.1%}")
    return accuracies


def spread(accuracies: list[float]) -> str:
    """Say where some accuracies lie."""
    if not accuracies:
        return "not trained"
    low, middle, high = np.quantile(accuracies, [0, 0.5, 1])
    return f"{low:.1%} to {high:.1%}, median {middle:.1%}"


def plot(
    guesses: dict[tuple[Any, ...], float],
    settings: dict[str, Any],
    accuracy: float,
    epsilon: float,
    path: Path,
) -> None:
    """Plot the winner's accuracy among those of all settings at the same epsilon."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    ordered = sorted(guesses, key=guesses.get)
    chosen = tuple(settings.values())
    for place, values in enumerate(ordered):
        axes.plot(
            guesses[values],
            place,
            "o",
            color=plots.PRIVATE,
            fillstyle="full" if values == chosen else "none",
        )
    axes.axvline(
        accuracy, color=plots.COLORS["search"], label="search, then stopped early"
    )
    labels = [", ".join(f"{value:g}" for value in values) for values in ordered]
    axes.set_yticks(range(len(ordered)), labels, fontsize="small")
    axes.set_ylabel(", ".join(SPACE), fontsize="small")
    axes.set_xlabel(f"test accuracy at epsilon {epsilon:.2f}, delta {DELTA:g}")
    axes.set_title("Twelve guesses, each at the epsilon of the whole experiment")
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    app.run(main)
