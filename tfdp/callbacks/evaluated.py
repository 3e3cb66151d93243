"""What `PrivateEvaluation` is asked to evaluate: metrics with ranges, and rows."""

from collections.abc import Mapping, Sequence

import keras
import numpy as np

from tfdp import _validate
from tfdp._types import Nest
from tfdp.data.rows import rows_of
from tfdp.data.users import Users, users_of
from tfdp.losses.metrics import MeanMetric
from tfdp.mechanisms.noised_mean import Bounded
from tfdp.training.releases import Trained

# The name of the loss that the model trains with.
LOSS = "loss"


def named_metrics(metrics: Sequence[Nest]) -> dict[str, MeanMetric | None]:
    """Return metrics by their names.

    Args:
        metrics: As `PrivateEvaluation` takes them.

    Returns:
        They, None for the loss.

    Raises:
        TypeError: If one is none.
        ValueError: If there are none, one is no mean over examples, or two have the
            same name.
    """
    if isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    if not isinstance(metrics, list | tuple) or not metrics:
        raise ValueError(
            "`metrics` must be a list of metrics. Received: "
            f"metrics={metrics!r}. Use `metrics=['accuracy']`."
        )
    found: dict[str, MeanMetric | None] = {}
    for identifier in metrics:
        is_loss = isinstance(identifier, str) and identifier == LOSS
        metric = None if is_loss else MeanMetric(identifier)
        name = LOSS if metric is None else metric.name
        if name in found or (name == LOSS and not is_loss):
            raise ValueError(
                "Each metric needs a name of its own. Received: "
                f"metrics={metrics!r}, two named {name!r}."
            )
        found[name] = metric
    return found


def bounds(
    metrics: Mapping[str, MeanMetric | None], ranges: Nest, prefix: str
) -> Sequence[Bounded]:
    """Return the ranges that values of metrics are clipped to.

    Args:
        metrics: By name.
        ranges: As `PrivateEvaluation` takes them.
        prefix: Of the names that they are logged under.

    Returns:
        One for each metric.

    Raises:
        TypeError: If an end is no number.
        ValueError: If a range is missing, not finite, or of no metric.
    """
    if not isinstance(ranges, Mapping) or ranges.keys() - metrics.keys():
        raise ValueError(
            "`ranges` must be a dict of ranges by the names of metrics, "
            f"{', '.join(map(repr, metrics))}. Received: ranges={ranges!r}."
        )
    return [
        Bounded(prefix + name, *_range(name, metric, ranges), metric is None)
        for name, metric in metrics.items()
    ]


def _range(name: str, metric: MeanMetric | None, ranges: Nest) -> tuple[float, float]:
    fix = f"Use `ranges={{{name!r}: (0.0, 4.0)}}`; the numbers must not come from the data."
    given = ranges.get(name)
    if given is None:
        if metric is None or not metric.is_accuracy:
            raise ValueError(
                f"Metric {name!r} needs a range that its values are clipped to. "
                f"Received: ranges={dict(ranges)!r}. {fix}"
            )
        given = (0.0, 1.0)
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ValueError(
            f"A range must be (lower, upper). Received: ranges[{name!r}]={given!r}. {fix}"
        )
    lower, upper = (_validate.number("ranges", end) for end in given)
    if not -np.inf < lower < upper < np.inf:
        raise ValueError(
            f"A range must be two finite numbers that rise. Received: ranges[{name!r}]="
            f"{given!r}. {fix}"
        )
    return lower, upper


Source = tuple[tuple[Nest, ...], Users | None]


def own_rows(x: Nest, y: Nest, sample_weight: Nest, user_ids: Nest) -> Source | None:
    """Return other rows than those of the training.

    Args:
        x: As `PrivateEvaluation` takes it.
        y: Likewise.
        sample_weight: Likewise.
        user_ids: Likewise.

    Returns:
        The rows and their users, if these are known; None without rows.

    Raises:
        TypeError: If these are no rows, or ids of another type.
        ValueError: If their numbers differ, or something is given without `x`.
    """
    if x is None:
        if not (y is None and sample_weight is None and user_ids is None):
            raise ValueError(
                "`y`, `sample_weight` and `user_ids` belong to `x`, other rows than "
                "those of the training. Received: x=None. Leave them out, or give `x`."
            )
        return None
    rows = rows_of(x, y, sample_weight)
    number = len(keras.tree.flatten(rows)[0])
    # All rows of a user make one value, however many there are.
    users = users_of(user_ids, None if user_ids is None else number, number)
    return rows, users


def trained_rows(trained: Trained) -> Source:
    """Return the rows that a model trains on, and their users, if there are any.

    Args:
        trained: The training.

    Returns:
        As `own_rows`.

    Raises:
        ValueError: If the data come in batches.
    """
    data = trained.data
    rows = data.rows
    if rows is None:
        raise ValueError(
            "`PrivateEvaluation` draws rows by their numbers, and these data come in "
            f"batches. Received: x of type {type(data.x).__name__}. Use arrays or a "
            "`tfdp.data.PoissonDataset`, or give it other private rows, "
            "`PrivateEvaluation(..., x=x, y=y)`."
        )
    return rows, None if data.drawn is None else data.drawn.users
