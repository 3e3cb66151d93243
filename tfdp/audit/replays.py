"""Takes steps twice, once with a row emptied, and compares what comes of them."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdp import _keras
from tfdp._types import Array, Nest
from tfdp._validate import instance, positive_int
from tfdp.audit.comparison import Comparison, Finding
from tfdp.audit.rows import Rows, rows_of_fit
from tfdp.audit.steps import Run, Seen, Steps
from tfdp.losses.batch import Batch
from tfdp.model import DPModel
from tfdp.training.arguments import check_optimizer

# So many times as many rows as neighbours are looked through for large gradients.
_CANDIDATES = 10

# Steps on no rows add to the noise that is looked at, until there are so many numbers of
# it: enough to tell 3 percent less. So many steps at most, for small models.
_NUMBERS = 20_000
_MOST_EMPTY = 40


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """What a replay has seen. It was computed from private rows: keep it where they are.

    Attributes:
        neighbours: How many rows were emptied, one at a time.
        batch_size: Rows, or users, in each batch.
        l2_sensitivity: What one of them may move a clipped sum by.
        nonprivate_largest_change: What one has moved it by, at most.
        nonprivate_clipped: How many of them had gradients longer than the clip norm:
            without any the clipping was not tried.
        noise_stddev: What the noise must have, in the units of the sum.
        nonprivate_noise_stddev: What it had, over all coordinates of all steps.
        nonprivate_findings: What is wrong; empty for nothing.
    """

    neighbours: int
    batch_size: int
    l2_sensitivity: float
    nonprivate_largest_change: float
    nonprivate_clipped: int
    noise_stddev: float
    nonprivate_noise_stddev: float
    nonprivate_findings: tuple[Finding, ...]

    @property
    def nonprivate_passed(self) -> bool:
        """Whether nothing was found."""
        return not self.nonprivate_findings

    def to_dict(self) -> dict[str, Any]:
        """Return what was seen as JSON values."""
        passed = self.nonprivate_passed
        fields = dataclasses.asdict(self)
        fields["nonprivate_findings"] = list(fields["nonprivate_findings"])
        return {"audit": "replay", **fields, "nonprivate_passed": passed}

    def __str__(self) -> str:
        """Say it in lines."""
        lines = [
            f"Replay with {self.neighbours} neighbours, batches of {self.batch_size}: "
            + ("nothing found." if self.nonprivate_passed else "NOT as it must be."),
            f"  largest change of a clipped sum: {self.nonprivate_largest_change:.6g} "
            f"of {self.l2_sensitivity:.6g} allowed; {self.nonprivate_clipped} of the "
            "neighbours were clipped",
            f"  noise: standard deviation {self.nonprivate_noise_stddev:.6g}, must be "
            f"{self.noise_stddev:.6g}",
            *(f"  {finding}" for finding in self.nonprivate_findings),
            "Computed from private rows: not to be published.",
        ]
        return "\n".join(lines)


def replay(
    private: DPModel,
    x: Nest,
    y: Nest = None,
    neighbours: int = 50,
    *,
    sample_weight: Nest = None,
    batch_size: int | None = None,
    user_ids: Nest = None,
    examples_per_user: int | None = None,
) -> ReplayReport:
    """Take private steps twice, once with a row emptied, and look for what differs.

    Each neighbour is a row that is emptied: some at random, some with the largest
    gradients among ten times as many, and some that are made outliers. The step runs on
    the same batch with and without it, from the same weights, with the same noise and
    the same masks of dropout, through the model's engine, passes, loss and optimizer. A
    replay finds

    * a clipped sum that one row moves by more than its l2 sensitivity,
    * a layer or a loss in which one row changes what comes of others,
    * state that differs afterwards: moving averages, seeds, counters of data,
    * noise that has not the standard deviation ``noise_multiplier * C`` in each
      variable, depends on the rows, or comes again,
    * a divisor that is not the public one, or depends on the size of the batch,
    * layers that run, or have shapes, by what is in the row.

    It rests on none of the proofs that `DPModel` asks for. It says what these steps
    did: no finding is no proof, and how batches are drawn is not replayed
    (`tfdp.audit.GradientCanaries` looks at the whole training). Callbacks take no part.

    Guarantees:
        Nothing is counted, written or kept: the noise has a key of its own, and model,
        optimizer, metrics and ledger are as they were, also after an error. The report
        is of private rows and without noise: its fields begin with `nonprivate_`.

    Args:
        private: A compiled model on one device.
        x: Inputs, arrays as `fit` takes them.
        y: Targets likewise.
        neighbours: How many rows, or users, to empty.
        sample_weight: As for `fit`.
        batch_size: Rows, or users, in a batch; by default that of the last `fit`.
        user_ids: As for `fit`, if the model has ``unit="user"``.
        examples_per_user: Likewise.

    Returns:
        A report that prints, and has `to_dict`.

    Raises:
        NotPrivateError: If the model was not compiled with a private optimizer.
        TypeError: If `private` is no `DPModel`, or the data come in batches.
        ValueError: If an argument is out of its range, or the model was made in the scope
            of a `tf.distribute` strategy.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> private = tfdp.DPModel(model)
        >>> private.compile(
        ...     tfdp.optimizers.DPSGD(0.1, l2_norm_clip=0.1, noise_multiplier=1.1),
        ...     loss="mse",
        ... )
        >>> x, y = np.ones((100, 2)), np.ones((100, 1))
        >>> report = tfdp.audit.replay(private, x, y, neighbours=4, batch_size=10)
        >>> report.nonprivate_findings
        ()
    """
    instance("private", private, DPModel)
    neighbours = positive_int("neighbours", neighbours)
    if _keras.strategy_of_model(private) is not None:
        raise ValueError(
            "`replay` takes steps on one device. Received: a model made in the scope of a "
            "`tf.distribute` strategy. Make the model outside of it."
        )
    check_optimizer(getattr(private, "optimizer", None))
    rows = rows_of_fit(
        private, (x, y, sample_weight), batch_size, user_ids, examples_per_user
    )
    seen, sample = Seen(), rows.with_one(int(rows.rest[0]))
    with private.sessions.rehearsal(rows.scheme, sample, [seen]) as (session, begin):
        steps = Steps(session, seen, begin, eagerly=private.run_eagerly)
        return _report(steps, rows, neighbours)


def _report(steps: Steps, rows: Rows, neighbours: int) -> ReplayReport:
    """Empty rows, one at a time, and compare."""
    size, comparison = rows.units_per_batch, Comparison(steps)
    chosen = _neighbours(steps, rows, neighbours)
    empty = rows.with_an_empty_one()
    without = steps.run(empty)
    divisor, is_public = _divisor(comparison, steps, rows, chosen[0](rows), without)
    # The gradients of all steps would not go into memory: so many of each as are looked at.
    noises: list[list[Array]] = []
    clipped, coupled = 0, None
    for number, neighbour in enumerate(chosen):
        batch = neighbour(rows)
        run = steps.run(batch, number)
        if comparison.compare(run, without):
            coupled = batch  # The last one: outliers come last, and show it best.
        clipped += bool(run.norms[-1] > run.clip)
        if _size(noises) < _NUMBERS:
            noises.append(run.noise(divisor))
    comparison.look_at_layers(
        chosen[-1](rows) if coupled is None else coupled,
        empty,
        norms_differ=coupled is not None,
    )
    # Of no rows a step releases noise alone, in every entry.
    for number in range(_MOST_EMPTY if is_public else 0):
        if number and _size(noises) >= _NUMBERS:
            break
        run = steps.run(rows.of_nobody(), len(chosen) + number)
        noises.append(run.noise(divisor))
    stddev = steps.noise_multiplier * without.clip
    found = comparison.look_at_noise(noises, stddev)
    return ReplayReport(
        neighbours=len(chosen),
        batch_size=size,
        l2_sensitivity=without.l2_sensitivity,
        nonprivate_largest_change=comparison.largest_change,
        nonprivate_clipped=clipped,
        noise_stddev=stddev,
        nonprivate_noise_stddev=found,
        nonprivate_findings=tuple(comparison.findings),
    )


def _divisor(
    comparison: Comparison, steps: Steps, rows: Rows, batch: Batch, without: Run
) -> tuple[float, bool]:
    """Return what sums are divided by, and whether that is the public divisor."""
    size = rows.units_per_batch
    first, smaller = steps.run(batch), steps.run(rows.alone())
    divisor = comparison.look_at_divisor(first, f"in a batch of {size}")
    comparison.look_at_divisor(smaller, f"in a batch of {size - 1}")
    is_public = all(finding.what != "divisor" for finding in comparison.findings)
    if is_public:
        comparison.compare_noise(first, without, divisor)
    comparison.compare_sums(smaller, without)
    return divisor, is_public


def _size(noises: list[list[Array]]) -> int:
    """Return how many numbers there are."""
    return sum(np.size(each) for step in noises for each in step)


def _neighbours(steps: Steps, rows: Rows, number: int) -> list[Callable[[Rows], Batch]]:
    """Return what makes a batch for each neighbour: some at random, far ones, outliers."""
    of_parts, parts = [], []
    for part, batch in rows.candidates(_CANDIDATES * number):
        of_units = steps.run(batch).norms
        # Examples of one unit share its norm.
        per_unit = -(-len(part) // max(1, len(of_units)))
        of_parts.append(np.repeat(of_units, per_unit)[: len(part)])
        parts.append(part)
    norms, found = np.concatenate(of_parts), np.concatenate(parts)
    # What is not finite counts as nothing.
    lengths = np.where(np.isfinite(norms), norms, -np.inf)
    longest = found[np.argsort(-lengths, kind="stable")]
    number = min(number, len(found))
    outliers = -(-number // 10) if number > 2 else 0
    large = (number - outliers + 1) // 2
    at_random = found[~np.isin(found, longest[:large])]
    ordinary = [*at_random[: number - outliers - large], *longest[:large]]
    return [
        *(operator.methodcaller("with_one", int(each)) for each in ordinary),
        *(
            operator.methodcaller("with_one", int(each), is_outlier=True)
            for each in longest[:outliers]
        ),
    ]
