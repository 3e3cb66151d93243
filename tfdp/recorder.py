"""Counts, inside the graph, what a model's training really runs."""

import dataclasses
import json
import math
import uuid
import weakref
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from tfdp.accounting import (
    Ledger,
    PoissonSteps,
    Segment,
    UnamplifiedSteps,
    affordable_count,
    compose,
)
from tfdp.errors import PrivacyBudgetError

_NO_LIMIT = np.iinfo(np.int64).max

# Distinct noise multipliers within one segment of training. Past that many, the
# last row takes them all at the smallest.
_ROWS = 1024

# What is counted while nobody has said how the data are sampled.
UNDECLARED = UnamplifiedSteps(steps=0, noise_multiplier=1.0)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a model's training may cost in all.

    Attributes:
        delta: The delta of the guarantee.
        target_epsilon: The largest epsilon.
    """

    delta: float
    target_epsilon: float


class LedgerRecorder:
    """The ledger of one model, written where the steps happen.

    An *item* is what the accountant counts: a step, or for shuffled data a pass.
    Items are counted by variables that the training graph updates, whatever calls
    it, in a table of ``(noise multiplier, items)``. A pass counts from its first
    step on, with the smallest noise multiplier of its steps.
    """

    def __init__(self) -> None:
        """Begin an empty ledger."""
        self._ledger = Ledger()
        self._segment: Segment = UNDECLARED
        self._planned_items: int | None = None
        self.sampled_epochs = 0
        self.budget: Budget | None = None
        # Trainings that the ledger covers, and how many steps of each.
        self._run = uuid.uuid4().hex
        self._runs: dict[str, int] = {}
        with tf.init_scope(), tf.device("CPU:0"):
            self._steps = _counter(0)
            self._items = tf.Variable(tf.zeros([_ROWS], tf.int64), trainable=False)
            self._noise_multipliers = tf.Variable(
                tf.zeros([_ROWS], tf.float64), trainable=False
            )
            self._row = _counter(0)
            self._open_items = _counter(0)
            self._open_noise_multiplier = tf.Variable(
                tf.zeros([], tf.float64), trainable=False
            )
            self._steps_in_item = _counter(1)
            self._steps_per_item = _counter(1)
            self._items_started = _counter(0)
            self._item_limit = _counter(_NO_LIMIT)
            self._limited_for = tf.Variable(tf.zeros([], tf.float64), trainable=False)

    @property
    def steps(self) -> tf.Tensor:
        """Steps ever recorded, a scalar int64 tensor that never falls."""
        return self._steps.read_value()

    @property
    def segment(self) -> Segment:
        """The kind of segment that is being recorded, its count without meaning."""
        return self._segment

    @property
    def ledger(self) -> Ledger:
        """What was run up to now."""
        rows = zip(self._items.numpy(), self._noise_multipliers.numpy(), strict=True)
        counted = [(items, z) for items, z in rows if items]
        if self._open_items.numpy():
            counted.append((1, self._open_noise_multiplier.numpy()))
        segments = [
            dataclasses.replace(
                self._segment.with_count(int(items)), noise_multiplier=float(z)
            )
            for items, z in counted
        ]
        return self._ledger.add(*segments).merged()

    def begin(
        self,
        segment: Segment,
        *,
        steps_per_item: int = 1,
        planned_items: int | None = None,
    ) -> None:
        """End the segment being recorded and begin another.

        If the one that ends fell short of its plan although its limit had room,
        somebody stopped it, and the ledger says so.

        Args:
            segment: How the data are sampled from now on; count and noise
                multiplier have no meaning.
            steps_per_item: Steps after which a new item has begun if `begin_item`
                was not called before.
            planned_items: Items that are to come, if that is known.
        """
        ledger = self.ledger
        started = int(self._items_started.numpy())
        missing = (self._planned_items or 0) - started
        if started and missing > 0 and self.has_room():
            rest = dataclasses.replace(
                self._segment.with_count(missing),
                noise_multiplier=float(self._open_noise_multiplier.numpy()),
            )
            ledger = dataclasses.replace(ledger, cut_short=(*ledger.cut_short, rest))
        self._ledger = ledger
        self._segment, self._planned_items = segment, planned_items
        self._items.assign(tf.zeros_like(self._items))
        for counter in (self._row, self._open_items, self._items_started):
            counter.assign(0)
        self._steps_per_item.assign(steps_per_item)
        self._steps_in_item.assign(steps_per_item)
        self._item_limit.assign(_NO_LIMIT)
        self._limited_for.assign(0.0)

    def note_seeds(self, *, noise: bool, sampling: bool) -> None:
        """Remember that somebody knows a seed, if so.

        Args:
            noise: Whether the noise was drawn with a known seed.
            sampling: Whether the batches were.
        """
        self._ledger = dataclasses.replace(
            self._ledger,
            noise_seed_fixed=self._ledger.noise_seed_fixed or noise,
            sampling_seed_fixed=self._ledger.sampling_seed_fixed or sampling,
        )

    def begin_item(self) -> None:
        """Let the next step begin a new item."""
        self._steps_in_item.assign(self._steps_per_item)

    def limit(self, further_items: int, *, noise_multiplier: float = 0.0) -> None:
        """Allow this many more items of the present segment, beyond those begun.

        Args:
            further_items: Whole number of at least 0.
            noise_multiplier: Steps with less noise than this have no room at all.
        """
        self._item_limit.assign(self._items_started + further_items)
        self._limited_for.assign(noise_multiplier)

    def enforce_budget(self, noise_multiplier: float) -> None:
        """Limit the present segment to what the budget has room for.

        Args:
            noise_multiplier: Of the steps to come, as a multiple of the clip norm.

        Raises:
            PrivacyBudgetError: If there is no room for a single one.
        """
        if self.budget is None:
            return
        is_unlimited = self._item_limit.numpy() == _NO_LIMIT
        if is_unlimited or noise_multiplier != self.limited_for:
            shares_gradients = (
                not isinstance(self._segment, PoissonSteps)
                and self._segment.examples_per_unit > 1
            )
            segment = dataclasses.replace(
                self._segment,
                noise_multiplier=noise_multiplier / (2 if shares_gradients else 1),
            )
            count = affordable_count(
                self.ledger, segment, self.budget.target_epsilon, self.budget.delta
            )
            self.limit(count, noise_multiplier=noise_multiplier)
        if not self.has_room():
            spent = self.ledger.epsilon(self.budget.delta)
            raise PrivacyBudgetError(
                "The privacy budget has no room for another step. Received: "
                f"target_epsilon={self.budget.target_epsilon:g}, "
                f"delta={self.budget.delta:g}, spent epsilon={spent:.4g}. Stop here, "
                "or use `tfdp.callbacks.PrivacyBudget(delta, target_epsilon=...)` with "
                "a larger target."
            )

    @property
    def limited_for(self) -> float:
        """The least noise multiplier that the present limit allows; 0 without one."""
        return float(self._limited_for.numpy())

    def has_room(self, noise_multiplier: tf.Tensor | float = math.inf) -> tf.Tensor:
        """Tell whether one more step is within the limit.

        Args:
            noise_multiplier: Of the step, a float64 scalar.

        Returns:
            A scalar bool tensor.
        """
        is_within = self._items_started + self._begins_item() <= self._item_limit
        return is_within & (noise_multiplier >= self._limited_for)

    def record(self, noise_multiplier: tf.Tensor) -> None:
        """Count one step, as operations of the graph.

        Args:
            noise_multiplier: Standard deviation of the step's noise over its l2
                sensitivity, scalar float64 tensor.
        """
        begins = self._begins_item()
        is_first = begins == 1
        # What is no noise at all must not make the ledger unreadable.
        noise_multiplier = tf.where(
            tf.math.is_finite(noise_multiplier) & (noise_multiplier >= 0),
            noise_multiplier,
            tf.zeros_like(noise_multiplier),
        )
        self._close_item(begins * self._open_items)
        self._open_noise_multiplier.assign(
            tf.where(
                is_first,
                noise_multiplier,
                tf.minimum(self._open_noise_multiplier, noise_multiplier),
            )
        )
        self._open_items.assign(1)
        self._steps_in_item.assign((1 - begins) * self._steps_in_item + 1)
        self._items_started.assign_add(begins)
        self._steps.assign_add(1)

    def _begins_item(self) -> tf.Tensor:
        return tf.cast(self._steps_in_item >= self._steps_per_item, tf.int64)

    def _close_item(self, count: tf.Tensor) -> None:
        """Move the open item into the table; nothing if `count` is 0."""
        row, opened = self._row.read_value(), self._open_noise_multiplier.read_value()
        fits = (self._items[row] == 0) | (self._noise_multipliers[row] == opened)
        row = tf.where(fits | (count == 0), row, tf.minimum(row + 1, _ROWS - 1))
        known = self._noise_multipliers[row]
        lowest = tf.where(self._items[row] == 0, opened, tf.minimum(known, opened))
        self._noise_multipliers.scatter_nd_update(
            [[row]], [tf.where(count == 0, known, lowest)]
        )
        self._items.scatter_nd_add([[row]], [count])
        self._row.assign(row)

    def state(self) -> str:
        """Return all that a saved model must remember, as JSON."""
        return json.dumps({
            "ledger": self.ledger.to_json(),
            "steps": int(self._steps.numpy()),
            "sampled_epochs": self.sampled_epochs,
            "runs": self._all_runs(),
            "budget": self.budget and dataclasses.asdict(self.budget),
        })

    def absorb(self, other: Self) -> None:
        """Add what another recorder counted, as a training on the same data.

        Args:
            other: Stays as it is.
        """
        if other is not self and int(other.steps):
            self._ledger = compose(self._ledger, other.ledger)
            self._steps.assign_add(other.steps)
            self._runs |= other._all_runs()

    def _all_runs(self) -> dict[str, int]:
        others = sum(self._runs.values())
        own = max(int(self._steps.numpy()) - others, 0)
        return {**self._runs, self._run: own} if own else dict(self._runs)

    def restore(self, state: str) -> None:
        """Take over what a saved model had run; nothing recorded here is lost.

        Args:
            state: What `state` returned.
        """
        saved = json.loads(state)
        started, limit = self._items_started.numpy(), self._item_limit.numpy()
        planned, self._planned_items = self._planned_items, None
        limited_for = self.limited_for
        self.begin(
            self._segment,
            steps_per_item=int(self._steps_per_item.numpy()),
            planned_items=planned and max(planned - int(started), 0),
        )
        if limit != _NO_LIMIT:
            self.limit(limit - started, noise_multiplier=limited_for)
        self._restore_ledger(Ledger.from_json(saved["ledger"]), saved["runs"])
        self.sampled_epochs = max(self.sampled_epochs, saved["sampled_epochs"])
        if self.budget is None and saved["budget"]:
            self.budget = Budget(**saved["budget"])

    def _restore_ledger(self, ledger: Ledger, saved_runs: dict[str, int]) -> None:
        """Take the ledger that covers the runs of both, or both of them together."""
        runs, both = self._all_runs(), compose(self._ledger, ledger)
        kept = both
        if _cover(runs, saved_runs):
            kept = self._ledger
        elif _cover(saved_runs, runs):
            kept = ledger
        self._ledger = dataclasses.replace(
            both, segments=kept.segments, cut_short=kept.cut_short
        )
        runs = {
            run: max(runs.get(run, 0), saved_runs.get(run, 0))
            for run in {**runs, **saved_runs}
        }
        self._steps.assign(sum(runs.values()))
        runs.pop(self._run, None)
        self._runs = runs


def _cover(runs: dict[str, int], others: dict[str, int]) -> bool:
    return all(steps <= runs.get(run, 0) for run, steps in others.items())


def _counter(value: int) -> tf.Variable:
    return tf.Variable(value, dtype=tf.int64, trainable=False)


# The recorder of every model and of every trainable variable, whatever wraps them,
# by `id`: Keras's variables have no hash.
_recorders: dict[int, tuple["weakref.ref[Any]", LedgerRecorder]] = {}


def recorder_of(model: keras.Model) -> LedgerRecorder:
    """Return the recorder of a model, or of another one that shares its weights.

    Args:
        model: A model that is not private itself.

    Returns:
        Always the same one; where the weights had several, the first of them, with
        what the others had counted.
    """
    owners = [model, *model.trainable_variables]
    known: dict[int, LedgerRecorder] = {}
    for owner in owners:
        entry = _recorders.get(id(owner))
        if entry is not None and entry[0]() is owner:
            known[id(entry[1])] = entry[1]
    recorder, *others = known.values() or [LedgerRecorder()]
    for other in others:
        recorder.absorb(other)
    for owner in owners:
        _recorders[id(owner)] = (weakref.ref(owner), recorder)
    return recorder


def is_of_a_model(recorder: LedgerRecorder) -> bool:
    """Tell whether a recorder is that of a model, not of an optimizer alone."""
    return any(recorder is known for _, known in _recorders.values())
