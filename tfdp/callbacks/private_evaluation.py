"""Releases metrics of private rows, with noise."""

import json
from collections.abc import Mapping, Sequence

import keras
import numpy as np
from absl import logging
from numpy.typing import NDArray

from tfdp import _keras, _tree, _validate
from tfdp._types import Logs, Nest
from tfdp.accounting import Ledger, Segment
from tfdp.callbacks.evaluated import (
    LOSS,
    bounds,
    named_metrics,
    own_rows,
    trained_rows,
)
from tfdp.checks.evaluation import evaluation_function
from tfdp.data.sources import have_common_rows
from tfdp.errors import NotPrivateError
from tfdp.mechanisms.noised_mean import NoisedMean
from tfdp.model import DPModel
from tfdp.sampling import Poisson, PoissonUsers
from tfdp.training.releases import ReleasingCallback, Trained, check_logs

# Of what is logged: of the rows that the model trains on, and of other rows.
_PREFIX, _OF_OTHERS = "private_", "private_val_"
_ERROR = "_standard_error"


class PrivateEvaluation(ReleasingCallback):
    """Releases metrics of the rows that a model trains on, with noise.

    Every `every` epochs, and once a `PrivacyBudget` has ended the training, the model
    is evaluated in inference mode. Each row has a value for each metric, which is
    clipped to a public range; the values' mean gets Gaussian noise. With k metrics, m
    the middles and h the half widths of their ranges, v the values, and D the expected
    number of rows of a Poisson draw,

        m + h * (sum of (clip(v) - m) / h + Normal(0, noise_multiplier^2 k I)) / D

    is released, all metrics at once: a row moves that sum by sqrt(k) at most [1]_. `fit`
    logs `private_accuracy`, or whatever the metric is called, until the next release
    takes its place, and `private_accuracy_standard_error` beside it: how far the value
    is from the mean over all rows. That comes from the range, the noise and D alone,
    and does not tell how far the rows are from others.

    Decisions by released values (Keras's `ModelCheckpoint` and `ReduceLROnPlateau` with
    ``monitor="private_accuracy"``) cost nothing more. A training that they end
    (`tfdp.callbacks.PrivateEarlyStopping`) owes no step that it has not taken.

    All rows are evaluated by default. That is best: a draw of a share q of them with
    the noise multiplier q z costs what all rows cost with z, or more, and its mean has
    the same noise and the error of the draw beside it. `expected_batch_size` only saves
    time.

    Guarantees:
        The ledger counts a release before anybody sees it, at the noise multiplier that
        is given. A value that is no number counts as the lower end of its range, for
        the loss as the upper one. Rows that are not proven to stay apart in the model
        go through it one by one. A release for which a `PrivacyBudget` leaves no room
        is not made; room for the next one is kept beside the steps.

    Args:
        metrics: `"accuracy"`, as Keras resolves it for the outputs; `"loss"`, that of
            each example with its sample weight, without class weights and weight
            regularizers; names and
            objects of Keras's metrics that are means over examples; and functions
            ``(y_true, y_pred) -> (N,)``. Only `"loss"` sees sample weights. For a model
            with several outputs, functions get all of them.
        noise_multiplier: Standard deviation of the noise of the sums over sqrt(k),
            positive. One accuracy of N rows gets ``noise_multiplier / (2 * N)``; of
            several metrics each gets sqrt(k) times as much as it would alone.
        every: Epochs from one release to the next.
        ranges: For each metric by name its ``(lower, upper)`` end, which must not come
            from the data. Accuracies have (0, 1).
        expected_batch_size: Expected number of rows in a draw, at most their number,
            which is the default.
        physical_batch_size: Rows that go through the model at once.
        x: Other private rows to look at, of which the model does not learn: validation
            rows, arrays as for `fit`. Their logs are called `private_val_accuracy` and
            so on, and they have a ledger of their own, `ledger`, which lives as long as
            this object. The model's ledger says only that there are such rows.
        y: Their targets.
        sample_weight: Their weights.
        user_ids: Their users, whole numbers or strings. The mean value of a user's rows
            counts then, and the units are users. For rows that the model trains on
            that follows ``DPModel(unit="user")``.

    Attributes:
        names: Of the logs.
        released: What was released last, by the names of the logs; empty before.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If a number is out of its range, a metric is no mean over examples,
            or a range is missing.

    Example:
        >>> evaluation = tfdp.callbacks.PrivateEvaluation(
        ...     metrics=["accuracy", "loss"],
        ...     every=5,
        ...     noise_multiplier=20.0,
        ...     ranges={"loss": (0.0, 4.0)},
        ... )
        >>> evaluation.names[0]
        'private_accuracy'

    References:
        .. [1] Dwork and Roth, "The Algorithmic Foundations of Differential Privacy",
           2014, proposition 2.1 (what is computed from a private value) and theorem
           A.1 (Gaussian noise). https://doi.org/10.1561/0400000042
    """

    def __init__(
        self,
        metrics: Sequence[Nest],
        *,
        noise_multiplier: float,
        every: int = 1,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        expected_batch_size: int | None = None,
        physical_batch_size: int = 256,
        x: Nest = None,
        y: Nest = None,
        sample_weight: Nest = None,
        user_ids: Nest = None,
    ) -> None:
        super().__init__()
        self.noise_multiplier = _validate.positive("noise_multiplier", noise_multiplier)
        self.every = _validate.positive_int("every", every)
        self.physical_batch_size = _validate.positive_int(
            "physical_batch_size", physical_batch_size
        )
        if expected_batch_size is not None:
            expected_batch_size = _validate.positive_int(
                "expected_batch_size", expected_batch_size
            )
        self.expected_batch_size = expected_batch_size
        self._metrics = named_metrics(metrics)
        self._own = own_rows(x, y, sample_weight, user_ids)
        self.sees_other_rows = self._own is not None
        prefix = _OF_OTHERS if self.sees_other_rows else _PREFIX
        self._bounds = tuple(bounds(self._metrics, ranges or {}, prefix))
        means = [each.name for each in self._bounds]
        self.names = (*means, *(name + _ERROR for name in means))
        self.released: dict[str, float] = {}
        self.released_epoch: int | None = None
        self._ledger = Ledger()
        self._trained: Trained | None = None

    @property
    def ledger(self) -> Ledger:
        """What was released of the rows given as `x`, by all trainings together.

        Empty without such rows: those that the model trains on are in its ledger.
        """
        return self._ledger

    def set_model(self, model: DPModel) -> None:
        """Refuse a model that is not private."""
        if not isinstance(model, DPModel):
            raise NotPrivateError(
                "`PrivateEvaluation` needs a private model. Received: model of type "
                f"{type(model).__name__}. Use `tfdp.DPModel(model).fit(...)`."
            )
        super().set_model(model)

    def prepare(self, trained: Trained) -> Segment:
        """Find out how rows are evaluated, and what a release costs."""
        rows, users = self._own or trained_rows(trained)
        self._check_own(trained)
        self._rows, self._users = rows, users
        number = len(keras.tree.flatten(rows)[0]) if users is None else len(users)
        expected = self.expected_batch_size or number
        if expected > number:
            raise ValueError(
                "`expected_batch_size` must be at most the number of "
                f"{'examples' if users is None else 'users'}. Received: "
                f"expected_batch_size={expected}, {number} of them. Leave it out."
            )
        scheme = Poisson(number, expected)
        if users is not None:
            # All rows of a user make one value.
            scheme = PoissonUsers(number, expected, examples_per_user=1)
        self._mean = NoisedMean(self._bounds, scheme, self.noise_multiplier)
        x, y, weights = self._batch(np.arange(0))
        signature = tuple(_tree.signature_of(part) for part in (x, y, weights))
        with trained.replicas.only_first(), _keras.losses_of_one_replica():
            self._values = evaluation_function(
                trained.objective,
                [
                    None
                    if metric is None
                    else metric.of_rows(signature[1], trained.outputs)
                    for metric in self._metrics.values()
                ],
                signature,
            )
        self._trained = trained
        due = sum((epoch + 1) % self.every == 0 for epoch in trained.epochs)
        names = ", ".join(each.name for each in self._bounds)
        self._release = Segment(scheme, 1, self.noise_multiplier, names)
        return self._release.with_count(0 if self._own else due)

    def standard_error(self, name: str) -> float:
        """Return the standard error of a log."""
        return self._mean.standard_errors().get(name, 0.0)

    def _check_own(self, trained: Trained) -> None:
        """Refuse rows of its own that are those of the training, or not of its units."""
        if self._own is None:
            return
        if trained.unit == "user" and self._own[1] is None:
            raise ValueError(
                "A model that protects users needs the users of other rows, too. "
                "Received: x without user_ids, DPModel(unit='user'). Use "
                "`PrivateEvaluation(..., x=x, y=y, user_ids=ids)`."
            )
        inputs = [
            [each.source for each in keras.tree.flatten(rows[0])]
            for rows in (self._own[0], trained.data.rows or ((),))
        ]
        if have_common_rows(*inputs):
            raise ValueError(
                "`x` must be other rows than those that the model trains on: what is "
                "released of these belongs in the model's ledger. Received: arrays that "
                "share memory with those of `fit`. Leave `x` and `y` out."
            )

    def on_train_begin(self, logs: Logs = None) -> None:
        """Forget values of an earlier training."""
        self.released, self.released_epoch = {}, None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Release if it is time, and log what was released last."""
        for name in self.names:
            check_logs(logs, name, None)
        is_due = (epoch + 1) % self.every == 0
        # A budget has ended the training, and has kept room for a last release.
        if (is_due or self.model.stop_training) and self._may_release():
            means, errors = self._evaluate(), self._mean.standard_errors()
            self.released = means | {name + _ERROR: errors[name] for name in means}
            self.released_epoch = epoch
        elif is_due:
            logging.warning(
                "The privacy budget has no room for a release of %s in epoch %d.",
                self._release.released,
                epoch + 1,
            )
        if logs is not None:
            logs.update(self.released)

    def _may_release(self) -> bool:
        """Count a release where it belongs; tell whether there is room for it."""
        assert self._trained is not None  # noqa: S101
        if self._own is None:
            return self._trained.ledger.release(self)
        self._ledger = self._ledger.add(self._release).merged()
        self._trained.ledger.recorder.note_other_rows()
        return True

    def _evaluate(self) -> dict[str, float]:
        """Return noised means, the same ones in all processes."""
        assert self._trained is not None  # noqa: S101
        replicas = self._trained.replicas
        means: dict[str, float] = {}
        if replicas.process == 0:
            with replicas.only_first(), _keras.losses_of_one_replica():
                means = self._mean.noised(self._total())
        text: str = replicas.texts_of_all(json.dumps(means))[0]
        found: dict[str, float] = json.loads(text)
        return found

    def _total(self) -> NDArray[np.float64]:
        """Return the sum over a draw, without noise."""
        units, users = self._mean.draw(), self._users
        rows, of_rows = units, np.arange(len(units))
        if users is not None:
            is_drawn = np.isin(np.arange(len(users)), units)
            rows = np.flatnonzero(is_drawn[users.of_rows])
            of_rows = np.searchsorted(units, users.of_rows[rows])
        values = [
            self._values(*self._batch(rows[first : first + self.physical_batch_size]))
            for first in range(0, len(rows), self.physical_batch_size)
        ]
        shape = (0, len(self._bounds))
        found = np.concatenate([np.zeros(shape), *(v.numpy() for v in values)])
        total: NDArray[np.float64] = self._mean.of_units(
            found, of_rows, len(units)
        ).sum(0)
        return total

    def _batch(self, indices: NDArray[np.int64]) -> tuple[Nest, Nest, Nest]:
        """Return ``(x, y, sample_weight)`` of some rows."""
        rows = keras.tree.map_structure(lambda source: source.take(indices), self._rows)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(rows)
        return x, y, weights if LOSS in self._metrics else None
