"""Print the privacy of DP-SGD, or the noise that a privacy needs.

The flags are those of TensorFlow Privacy's script of the same name, and
--target_epsilon instead of --noise_multiplier:

    python tools/compute_dp_sgd_privacy.py --N=60000 --batch_size=256 \
        --noise_multiplier=1.1 --epochs=60 --delta=1e-5 --noused_microbatching
    python tools/compute_dp_sgd_privacy.py --N=60000 --batch_size=256 \
        --target_epsilon=3 --epochs=60 --delta=1e-5

With --compare, TensorFlow Privacy's own figures stand below, beside tfdp's. That takes
Python 3.11 and `pip install 'tfdp[tensorflow-privacy]'`.
"""

import importlib.util
import sys
from collections.abc import Sequence

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
flags.mark_flags_as_mutual_exclusive(
    ["noise_multiplier", "target_epsilon"], required=True
)


def main(argv: Sequence[str]) -> None:
    """Print what the flags ask for."""
    try:
        if len(argv) > 1:
            raise ValueError(f"Everything is a flag. Received: {' '.join(argv[1:])}.")
        if _NOISE_MULTIPLIER.value is not None:
            print(_statement(_NOISE_MULTIPLIER.value))
            if _COMPARE.value:
                print(_comparison(_NOISE_MULTIPLIER.value))
        if _TARGET_EPSILON.value is not None:
            print(_noise(_TARGET_EPSILON.value))
    except (ImportError, TypeError, ValueError) as error:
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


if __name__ == "__main__":
    app.run(main)
