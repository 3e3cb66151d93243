"""Print the privacy of DP-SGD, or the noise that a privacy needs.

The flags are those of TensorFlow Privacy's script of the same name, and
--target_epsilon instead of --noise_multiplier:

    python tools/compute_dp_sgd_privacy.py --N=60000 --batch_size=256 \
        --noise_multiplier=1.1 --epochs=60 --delta=1e-5 --noused_microbatching
    python tools/compute_dp_sgd_privacy.py --N=60000 --batch_size=256 \
        --target_epsilon=3 --epochs=60 --delta=1e-5

With --sampling, every way of drawing batches stands beside the others, and --plot draws
epsilon over the epochs:

    python tools/compute_dp_sgd_privacy.py --N=60000 --batch_size=256 \
        --noise_multiplier=1.1 --epochs=60 --delta=1e-5 --sampling=all --plot=plot.png
    python tools/compute_dp_sgd_privacy.py --N=60000 --batch_size=256 \
        --noise_multiplier=1.1 --epochs=60 --sampling=poisson,balls_in_bins

With --compare, TensorFlow Privacy's own figures stand below, beside tfdp's. That takes
Python 3.11 and `pip install 'tfdp[tensorflow-privacy]'`.
"""

import importlib
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

# `import tfdp` imports TensorFlow, seconds of work that accounting has no need of. A
# bare package in its place lets `tfdp.accounting` be imported without it.
_SPEC = importlib.util.find_spec("tfdp")
if "tfdp" not in sys.modules and _SPEC is not None:
    sys.modules["tfdp"] = importlib.util.module_from_spec(_SPEC)
accounting = importlib.import_module("tfdp.accounting")

_EXAMPLES = flags.DEFINE_integer(
    "N", None, "Number of examples in the training data.", required=True
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    None,
    "Number of examples in a batch, however they are grouped.",
    required=True,
)
_NOISE_MULTIPLIER = flags.DEFINE_float(
    "noise_multiplier", None, "Noise standard deviation over the clip norm."
)
_TARGET_EPSILON = flags.DEFINE_float(
    "target_epsilon",
    None,
    "Epsilon to find the noise multiplier for: Poisson-sampled batches, every example "
    "clipped alone.",
)
_EPOCHS = flags.DEFINE_float(
    "epochs",
    None,
    "Number of epochs; may be fractional, but not beside --target_epsilon.",
    required=True,
)
_DELTA = flags.DEFINE_float("delta", 1e-6, "Probability that the bound may fail.")
_USED_MICROBATCHING = flags.DEFINE_bool(
    "used_microbatching", True, "Whether several examples shared a clipped gradient."
)
_MAX_EXAMPLES_PER_USER = flags.DEFINE_integer(
    "max_examples_per_user",
    None,
    "Largest number of examples of one user; given, the epsilon of a user is printed.",
)
_ACCOUNTANT_TYPE = flags.DEFINE_enum(
    "accountant_type", "RDP", ["RDP", "PLD"], "Accountant to compute epsilon with."
)
_COMPARE = flags.DEFINE_bool(
    "compare", False, "Print what TensorFlow Privacy computes beside tfdp's figures."
)
_SAMPLING = flags.DEFINE_list(
    "sampling",
    None,
    "Ways of drawing batches to compare, or all; every example clipped alone.",
)
_CYCLIC_PARTS = flags.DEFINE_integer(
    "cyclic_parts", 2, "Parts that cyclic_poisson draws from in turn; takes --sampling."
)
_PLOT = flags.DEFINE_string(
    "plot", None, "PNG file for epsilon over the epochs; takes --sampling."
)
flags.mark_flags_as_mutual_exclusive(
    ["noise_multiplier", "target_epsilon"], required=True
)

# What each way of drawing does, from what its segment knows.
_HOW = {
    "poisson": "each row in each step with chance {0.sampling_probability:.3g}",
    "truncated_poisson": "the same, and batches cut to {0.max_batch_size} rows",
    "balls_in_bins": "each row once an epoch, by a fresh coin in 1 of "
    "{0.steps_per_epoch} batches",
    "fixed_bins": "the same {0.steps_per_epoch} batches in every epoch, drawn once",
    "shuffle": "each row once an epoch; each epoch in full",
    "cyclic_poisson": "from {0.parts} parts in turn, with chance "
    "{0.sampling_probability:.3g}",
    "unknown": "a row may be in every step; each step in full",
}
# Epochs for which a plot computes epsilon, at most.
_POINTS = 8


def main(argv: Sequence[str]) -> None:
    """Print what the flags ask for."""
    try:
        if len(argv) > 1:
            raise ValueError(f"Everything is a flag. Received: {' '.join(argv[1:])}.")
        if _SAMPLING.value is not None:
            _compare_sampling()
        elif given := [each for each in (_PLOT, _CYCLIC_PARTS) if each.present]:
            raise ValueError(
                f"`{given[0].name}` is of ways of drawing batches. Received: "
                f"{given[0].name}={given[0].value}. Use `--sampling=all` with it."
            )
        elif _NOISE_MULTIPLIER.value is not None:
            print(_statement(_NOISE_MULTIPLIER.value))
            if _COMPARE.value:
                print(_comparison(_NOISE_MULTIPLIER.value))
        else:
            print(_noise(_TARGET_EPSILON.value))
    except (ImportError, OSError, TypeError, ValueError) as error:
        sys.exit(f"compute_dp_sgd_privacy: {error}")


def _statement(noise_multiplier: float) -> str:
    return accounting.compute_dp_sgd_privacy_statement(
        number_of_examples=_EXAMPLES.value,
        batch_size=_BATCH_SIZE.value,
        num_epochs=_EPOCHS.value,
        noise_multiplier=noise_multiplier,
        delta=_DELTA.value,
        used_microbatching=_USED_MICROBATCHING.value,
        max_examples_per_user=_MAX_EXAMPLES_PER_USER.value,
        accountant_type=_ACCOUNTANT_TYPE.value,
    )


def _comparison(noise_multiplier: float) -> str:
    return accounting.compare_with_tensorflow_privacy(
        _EXAMPLES.value,
        _BATCH_SIZE.value,
        _EPOCHS.value,
        noise_multiplier,
        _DELTA.value,
        used_microbatching=_USED_MICROBATCHING.value,
        accountant_type=_ACCOUNTANT_TYPE.value,
    )


def _noise(target_epsilon: float) -> str:
    for flag in (_USED_MICROBATCHING, _MAX_EXAMPLES_PER_USER, _COMPARE):
        if flag.present and flag.value:
            raise ValueError(
                f"`target_epsilon` is for single examples, each clipped alone. "
                f"Received: {flag.name}={flag.value}."
            )
    if not _EPOCHS.value.is_integer():
        raise ValueError(
            f"`epochs` must be a whole number beside `target_epsilon`. Received: "
            f"epochs={_EPOCHS.value}."
        )
    noise_multiplier = accounting.calibrate_noise_multiplier(
        target_epsilon,
        n=_EXAMPLES.value,
        batch_size=_BATCH_SIZE.value,
        epochs=int(_EPOCHS.value),
        delta=_DELTA.value,
        accountant=_ACCOUNTANT_TYPE.value,
    )
    return (
        f"Noise multiplier: {noise_multiplier}\n"
        f"{_EPOCHS.value:g} epochs on Poisson-sampled batches, every example clipped "
        f"alone, cost at most\nepsilon = {target_epsilon:g} at delta = "
        f"{_DELTA.value:g} by {_ACCOUNTANT_TYPE.value} accounting."
    )


def _compare_sampling() -> None:
    """Print a line for each way of drawing batches, as it is computed; plot them."""
    for flag in (
        _TARGET_EPSILON,
        _USED_MICROBATCHING,
        _MAX_EXAMPLES_PER_USER,
        _ACCOUNTANT_TYPE,
        _COMPARE,
    ):
        if flag.present and flag.value:
            is_target = flag is _TARGET_EPSILON
            raise ValueError(
                "`sampling` compares epsilons of single examples, each clipped alone, "
                "with a noise multiplier, and takes the smaller one of both accountants. "
                f"Received: {flag.name}={flag.value}. "
                + ("Use `--noise_multiplier=1.1`." if is_target else "Leave it out.")
            )
    planned = _planned(_EPOCHS.value)
    print(
        f"{_EXAMPLES.value} examples, {_EPOCHS.value:g} epochs = "
        f"{planned['unknown'].count} steps, noise multiplier "
        f"{_NOISE_MULTIPLIER.value:g}, delta = {_DELTA.value:g}\n\n"
        f"{'epsilon':>10}  {'counted':<14}{'divisor':<9}sampling"
    )
    for name in _chosen(planned):
        segment = planned[name]
        counted = f"{segment.count} {segment.scheme.counts}"
        print(
            f"{_epsilon(segment):10.3f}  {counted:<14}"
            f"{segment.scheme.expected_batch_size or 'yours':<9}"
            f"{name}: {_HOW[name].format(segment)}",
            flush=True,
        )
    print(
        "\nThe noised sum of a step is divided by the divisor, never by how many rows were "
        "drawn;\n`yours` is the `expected_batch_size` that you state. Only the line of the "
        "way that\nbatches are really drawn holds."
    )
    if _PLOT.value is not None:
        _plot(_chosen(planned), Path(_PLOT.value))
        print(f"Plot: {_PLOT.value}")


def _planned(epochs: float) -> dict[str, Any]:
    planned: dict[str, Any] = accounting.segments_by_sampling(
        n=_EXAMPLES.value,
        batch_size=_BATCH_SIZE.value,
        epochs=epochs,
        noise_multiplier=_NOISE_MULTIPLIER.value,
        cyclic_parts=_CYCLIC_PARTS.value,
    )
    return planned


def _chosen(planned: dict[str, Any]) -> list[str]:
    """Return the names that `sampling` asks for."""
    names = list(planned) if _SAMPLING.value == ["all"] else _SAMPLING.value
    if not names or set(names) - set(planned):
        raise ValueError(
            f"`sampling` must be all, or some of {','.join(planned)}. Received: "
            f"sampling={','.join(names)}."
        )
    return list(dict.fromkeys(names))


def _epsilon(segment: Any) -> float:
    return float(accounting.reported_epsilon([segment], _DELTA.value))


def _plot(names: Sequence[str], path: Path) -> None:
    """Plot epsilon over whole epochs, in the style of all pictures."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    try:
        plots = importlib.import_module("plots")
    except ImportError as error:
        raise ImportError(
            f"`plot` needs matplotlib. Received: plot={path}. Use `pip install "
            "matplotlib`, or leave it out."
        ) from error
    last = math.ceil(_EPOCHS.value)
    epochs = sorted({round(last ** (i / (_POINTS - 1))) for i in range(_POINTS)})
    figure, [[axes]] = plots.panels(1, 1, size=(7.0, 4.0))
    planned = [_planned(epoch) for epoch in epochs]
    for number, name in enumerate(names):
        print(
            f"plot: {name}, {number + 1} of {len(names)}", file=sys.stderr, flush=True
        )
        curve = [_epsilon(each[name]) for each in planned]
        style = {"marker": "o", "markersize": 3}
        plots.curve(
            axes, epochs, curve, f"{name}: {curve[-1]:.3g}", f"C{number}", **style
        )
    axes.set_yscale("log")
    axes.set_ylabel(f"epsilon at delta {_DELTA.value:g}")
    axes.set_title(
        f"{_EXAMPLES.value} examples, batches of {_BATCH_SIZE.value}, noise multiplier "
        f"{_NOISE_MULTIPLIER.value:g}",
        fontsize="medium",
    )
    plots.over_epochs(axes, last)
    plots.name_curves(axes)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
