"""TensorFlow Privacy's two functions, with its meanings and its numbers."""

import math
from collections.abc import Callable
from typing import TypeAlias

from dp_accounting import rdp

from tfdp._validate import non_negative, one_of, positive, positive_int, probability
from tfdp.accounting.accountant import ACCOUNTANTS, epsilon
from tfdp.accounting.segments import PoissonSteps, Segment, ShuffledPasses
from tfdp.accounting.text import filled
from tfdp.accounting.users import user_epsilon

# Those of TensorFlow Privacy: with others epsilon would be another.
_ORDERS = (
    [1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5]
    + [float(order) for order in range(5, 64)]
    + [128.0, 256.0, 512.0]
)


def compute_dp_sgd_privacy(
    n: int, batch_size: int, noise_multiplier: float, epochs: float, delta: float
) -> tuple[float, float]:
    """Compute the epsilon of DP-SGD on Poisson-sampled batches by RDP accounting.

    It holds for batches that were Poisson draws and for clipping of one example at a
    time, and for nothing else. `compute_dp_sgd_privacy_statement` gives the figures
    of other training too.

    Args:
        n: Number of examples in the training data.
        batch_size: Expected number of examples in a batch; at most ``n``.
        noise_multiplier: Noise standard deviation over the clip norm; ``0`` is no
            noise.
        epochs: Number of epochs, which may be fractional.
        delta: Probability with which the bound may fail, between 0 and 1.

    Returns:
        Epsilon, and the Rényi order at which it was found.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range.

    Example:
        >>> epsilon, order = compute_dp_sgd_privacy(60_000, 150, 1.3, 15, 1e-5)
        >>> round(epsilon, 4), order
        (0.7242, 19.0)
    """
    _, poisson = _training(n, batch_size, epochs, noise_multiplier, name="n")
    accountant = rdp.RdpAccountant(_ORDERS).compose(poisson.event())
    result, order = accountant.get_epsilon_and_optimal_order(
        probability("delta", delta)
    )
    return float(result), float(order)


def compute_dp_sgd_privacy_statement(
    number_of_examples: int,
    batch_size: int,
    num_epochs: float,
    noise_multiplier: float,
    delta: float,
    used_microbatching: bool = True,
    max_examples_per_user: int | None = None,
    accountant_type: str = "RDP",
) -> str:
    """Describe the privacy of DP-SGD from the numbers it was configured with.

    The text has a row for batches in which an example occurs once an epoch and one
    for Poisson-sampled batches; which of them holds is for the reader to know.

    Args:
        number_of_examples: Number of examples in the training data.
        batch_size: Number of examples in a batch, however they are grouped; at most
            ``number_of_examples``.
        num_epochs: Number of epochs, which may be fractional.
        noise_multiplier: Noise standard deviation over the clip norm; ``0`` is no
            noise.
        delta: Probability with which the bound may fail, between 0 and 1.
        used_microbatching: Whether several examples shared one clipped gradient. The
            sensitivity is then twice the clip norm.
        max_examples_per_user: Largest number of examples that one user contributes;
            given, the text has the epsilon of a whole user too.
        accountant_type: ``"RDP"`` or ``"PLD"``.

    Returns:
        The text, with epsilon rounded to three decimals.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range.

    Example:
        >>> text = compute_dp_sgd_privacy_statement(
        ...     60_000, 256, 60, 1.1, 1e-5, used_microbatching=False
        ... )
        >>> "Poisson-sampled batches:            2.597" in text
        True
    """
    one_of("accountant_type", accountant_type, ACCOUNTANTS)
    delta = probability("delta", delta)
    if max_examples_per_user is not None:
        max_examples_per_user = positive_int(
            "max_examples_per_user", max_examples_per_user
        )
    training = _training(
        number_of_examples,
        batch_size,
        num_epochs,
        noise_multiplier,
        sensitivity=2 if used_microbatching else 1,
    )
    grouping = (
        "several examples to a clipped gradient, which doubles the sensitivity"
        if used_microbatching
        else "every example clipped alone"
    )
    return "\n\n".join([
        filled(
            f"DP-SGD on {number_of_examples} examples for {num_epochs:g} epochs, "
            f"{batch_size} examples to a batch, noise multiplier {noise_multiplier}, "
            f"{grouping}."
        ),
        filled(
            "The epsilons below bound what all weights seen during training, not only "
            "the last, tell about the data."
        ),
        f"Adding or removing one example, delta = {delta}, {accountant_type}:\n"
        + _rows(training, lambda run: epsilon([run], delta, accountant_type)),
        _user_paragraph(training, delta, max_examples_per_user, accountant_type),
        filled(
            "The row of Poisson-sampled batches holds only where every step drew each "
            "example by a coin of its own. Shuffled batches of a fixed size are not "
            "that: for them only the row above it is proven."
        )
        + "\n",
    ])


# Both ways of drawing batches: nothing in the numbers tells which it was.
_Training: TypeAlias = tuple[Segment, Segment]


def _training(
    number_of_examples: int,
    batch_size: int,
    epochs: float,
    noise_multiplier: float,
    sensitivity: int = 1,
    *,
    name: str = "number_of_examples",
) -> _Training:
    """Return the training as it would be under either way of drawing batches."""
    number_of_examples = positive_int(name, number_of_examples)
    batch_size = positive_int("batch_size", batch_size)
    if batch_size > number_of_examples:
        raise ValueError(
            f"`batch_size` must be at most `{name}`. Received: "
            f"batch_size={batch_size}, {name}={number_of_examples}."
        )
    epochs = positive("epochs" if name == "n" else "num_epochs", epochs)
    noise = non_negative("noise_multiplier", noise_multiplier) / sensitivity
    steps = _ceil(epochs * number_of_examples / batch_size)
    return (
        ShuffledPasses(_ceil(epochs), noise, number_of_examples, batch_size),
        PoissonSteps(steps, noise, number_of_examples, batch_size),
    )


def _ceil(value: float) -> int:
    """Round up, taking a whole number with a rounding error for that number."""
    return math.ceil(value * (1 - 1e-12))


def _rows(training: _Training, epsilon_of: Callable[[Segment], float]) -> str:
    shuffled, poisson = (epsilon_of(run) for run in training)
    return (
        f"  Each example once an epoch:  {shuffled:12.3f}\n"
        f"  Poisson-sampled batches:     {poisson:12.3f}"
    )


def _user_paragraph(
    training: _Training, delta: float, size: int | None, accountant_type: str
) -> str:
    if size is None:
        return filled(
            "Nothing is said about users: that takes a bound on the number of examples "
            "of one user, `max_examples_per_user`."
        )
    paragraph = (
        f"Adding or removing one user with at most {size} examples, delta = {delta}, "
        f"{accountant_type}:\n"
    )
    return paragraph + _rows(
        training,
        lambda run: user_epsilon(
            run, delta, max_examples_per_user=size, accountant=accountant_type
        ),
    )
