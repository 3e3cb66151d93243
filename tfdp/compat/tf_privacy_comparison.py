"""TensorFlow Privacy's own figures beside tfdp's."""

import importlib
import re
import sys
from types import ModuleType

from tfdp.compat.tf_privacy_accounting import compute_dp_sgd_privacy_statement

_LIBRARY = "tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib"
# While `sys` has this attribute, TensorFlow Privacy imports its accounting alone. The
# rest of version 0.9.0 does not import beside TensorFlow 2.16 or later.
_ACCOUNTING_ALONE = "skip_tf_privacy_import"


def compare_with_tensorflow_privacy(
    number_of_examples: int,
    batch_size: int,
    num_epochs: float,
    noise_multiplier: float,
    delta: float,
    used_microbatching: bool = True,
    accountant_type: str = "RDP",
) -> str:
    """Put the epsilons that TensorFlow Privacy computes beside those of tfdp.

    Both sides get the same numbers. Needs the extra `tensorflow-privacy`, which
    installs on Python 3.11 only: ``pip install 'tfdp[tensorflow-privacy]'``.

    Args:
        number_of_examples: See `compute_dp_sgd_privacy_statement`.
        batch_size: Likewise.
        num_epochs: Likewise.
        noise_multiplier: Likewise.
        delta: Likewise.
        used_microbatching: Likewise.
        accountant_type: Likewise.

    Returns:
        A table: a row for each way of drawing batches, a column for each library,
        epsilon rounded to three decimals.

    Raises:
        ImportError: If TensorFlow Privacy is not installed.
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range.

    Example:
        >>> table = compare_with_tensorflow_privacy(
        ...     60_000, 256, 60, 1.1, 1e-5, used_microbatching=False
        ... )  # doctest: +SKIP
        >>> print(table)  # doctest: +SKIP
        Epsilon at delta = 1e-05, RDP       tfdp TensorFlow Privacy 0.9.0
          Each example once an epoch      56.950                   56.950
          Poisson-sampled batches          2.597                    2.597
    """
    training = (number_of_examples, batch_size, num_epochs, noise_multiplier, delta)
    # First: its errors say what is wrong with an argument.
    ours = compute_dp_sgd_privacy_statement(
        *training, used_microbatching, accountant_type=accountant_type
    )
    library = _accounting_of_tensorflow_privacy()
    theirs = library.compute_dp_sgd_privacy_statement(
        *training,
        used_microbatching,
        accountant_type=library.AccountantType(accountant_type),
    )
    name = f"TensorFlow Privacy {sys.modules['tensorflow_privacy'].__version__}"
    head = f"Epsilon at delta = {delta:g}, {accountant_type}"
    rows = [
        f"  {way:{len(head) - 2}} {own:>10} {other:>{len(name)}}"
        for way, own, other in zip(
            ("Each example once an epoch", "Poisson-sampled batches"),
            _figures(ours),
            _figures(theirs),
            strict=True,
        )
    ]
    return "\n".join([f"{head} {'tfdp':>10} {name}", *rows])


def _accounting_of_tensorflow_privacy() -> ModuleType:
    is_set = hasattr(sys, _ACCOUNTING_ALONE)
    setattr(sys, _ACCOUNTING_ALONE, True)
    try:
        return importlib.import_module(_LIBRARY)
    except ImportError as error:
        raise ImportError(
            "TensorFlow Privacy's accounting must be installed to compare with it; "
            "version 0.9.0 needs Python 3.11. Received: "
            f"Python {sys.version_info.major}.{sys.version_info.minor}, {error}. Use "
            "`pip install 'tfdp[tensorflow-privacy]'`."
        ) from error
    finally:
        if not is_set:
            delattr(sys, _ACCOUNTING_ALONE)


def _figures(statement: str) -> list[str]:
    """Return the epsilons in the rows of a statement of either library."""
    return re.findall(
        r"^ +(?:Epsilon|Each example|Poisson-sampled).*: +(inf|\d\S*)", statement, re.M
    )
