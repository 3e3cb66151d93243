"""Counts, inside the graph, what a model's training really runs."""

import dataclasses
import json
import math
import uuid
import weakref
from collections.abc import Hashable, Iterable
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp.accounting import (
    Ledger,
    PoissonSteps,
    Segment,
    UnamplifiedSteps,
    affordable_count,
    compose,
)
from tfdp.accounting.calibration import MOST_COUNT
from tfdp.accounting.levels import lowered, noise_levels
from tfdp.errors import PrivacyBudgetError

_NO_LIMIT = np.iinfo(np.int64).max
_NO_LEVELS = np.array([math.inf])
_UNKNOWN = np.array([])

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
        # Items that are to come in all of the present segment, if that is known.
        self.planned_items: int | None = None
        self.sampled_epochs = 0
        self.budget: Budget | None = None
        # What the limit was worked out for; None if it no longer holds.
        self._limited_by: Hashable = None
        # How many segments have begun.
        self.beginnings = 0
        # Trainings that the ledger covers, and how many steps of each.
        self._run = uuid.uuid4().hex
        self._runs: dict[str, int] = {}
        # Variables that steps updated.
        self._trained: dict[int, weakref.ref[Any]] = {}
        with (
            tf.init_scope(),
            _keras.unmirrored_variables(),
            tf.device("CPU:0"),
        ):
            self._steps = _counter(0)
            self._items = tf.Variable(tf.zeros([_ROWS], tf.int64), trainable=False)
            self._noise_multipliers = tf.Variable(
                tf.zeros([_ROWS], tf.float64), trainable=False
            )
            self._rows_used = _counter(0)
            # What is recorded is brought down to one of these, in rising order.
            self._levels = tf.Variable(_NO_LEVELS, shape=[None], trainable=False)
            self._open_items = _counter(0)
            self._open_noise_multiplier = tf.Variable(
                tf.zeros([], tf.float64), trainable=False
            )
            self._steps_in_item = _counter(1)
            self._steps_per_item = _counter(1)
            self._items_started = _counter(0)
            self._item_limit = _counter(_NO_LIMIT)
            self._limited_for = tf.Variable(tf.zeros([], tf.float64), trainable=False)
            self._last_clip = tf.Variable(math.nan, dtype=tf.float64, trainable=False)

    @property
    def steps(self) -> tf.Tensor:
        """Steps ever recorded, a scalar int64 tensor that never falls."""
        return self._steps.read_value()

    @property
    def last_clip(self) -> float | None:
        """The clip norm of the last step; None if there was none."""
        value = float(self._last_clip.numpy())
        return None if math.isnan(value) else value

    def has_trained(self, variable: Any) -> bool:
        """Tell whether private steps updated a Keras variable."""
        known = self._trained.get(id(variable))
        return known is not None and known() is variable

    @property
    def run(self) -> str:
        """The name of the training that this recorder counts, unlike any other."""
        return self._run

    @property
    def items_started(self) -> int:
        """Items of the present segment that have begun."""
        return int(self._items_started.numpy())

    @property
    def is_inside_item(self) -> bool:
        """Whether the next step belongs to an item that has begun."""
        return not self._begins_item()

    def items_begun_by(self, steps: int) -> int:
        """Return how many items the next steps begin, at least one step."""
        per_item = int(self._steps_per_item.numpy())
        return (min(int(self._steps_in_item.numpy()), per_item) + steps - 1) // per_item

    def counted(self, noise_multiplier: float) -> float:
        """Return what the ledger counts a multiple of the clip norm as."""
        return float(noise_multiplier) / _sensitivity_in_clips(self._segment)

    @property
    def segment(self) -> Segment:
        """The kind of segment that is being recorded, its count without meaning."""
        return self._segment

    @property
    def ledger(self) -> Ledger:
        """What was run up to now."""
        return self._ledger_with_open_item(math.inf)

    def _ledger_with_open_item(self, noise_multiplier: float) -> Ledger:
        """Return the ledger if the item that is open has a step with this noise."""
        rows = zip(self._items.numpy(), self._noise_multipliers.numpy(), strict=True)
        counted = [(items, z) for items, z in rows if items]
        if self._open_items.numpy():
            opened = self._open_noise_multiplier.numpy()
            counted.append((1, min(opened, noise_multiplier)))
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
        noise_multipliers: np.ndarray = _UNKNOWN,
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
            noise_multipliers: That the steps to come count with, if callbacks change
                them. Of many different ones some stand for all, on the safe side,
                so that the ledger stays short.
        """
        ledger = self.ledger
        started = int(self._items_started.numpy())
        missing = (self.planned_items or 0) - started
        if started and missing > 0 and self.has_room():
            # The steps that were planned may have had less noise.
            least = min(self._open_noise_multiplier.numpy(), self._levels.numpy()[0])
            rest = dataclasses.replace(
                self._segment.with_count(missing), noise_multiplier=float(least)
            )
            ledger = dataclasses.replace(ledger, cut_short=(*ledger.cut_short, rest))
        self._ledger = ledger
        self._segment, self.planned_items = segment, planned_items
        self._items.assign(tf.zeros_like(self._items))
        counted = noise_multipliers / _sensitivity_in_clips(segment)
        self._levels.assign(noise_levels(counted) if len(counted) else _NO_LEVELS)
        for counter in (self._rows_used, self._open_items, self._items_started):
            counter.assign(0)
        self._steps_per_item.assign(steps_per_item)
        self._steps_in_item.assign(steps_per_item)
        self._item_limit.assign(_NO_LIMIT)
        self._limited_for.assign(0.0)
        self._limited_by = None
        self.beginnings += 1

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
            further_items: Whole number; -1 forbids the rest of one that has begun.
            noise_multiplier: Steps with less noise than this have no room at all.
        """
        self._item_limit.assign(self._items_started + further_items)
        self._limited_for.assign(noise_multiplier)

    def enforce_budget(
        self, noise_multipliers: np.ndarray, plan: Hashable = "only one"
    ) -> None:
        """Limit the present segment to what the budget has room for.

        Args:
            noise_multipliers: That the steps to come count with, as multiples of
                the clip norm; the last one is that of all that follow.
            plan: Tells these steps from others that were planned before.

        Raises:
            PrivacyBudgetError: If there is no room for a single one.
        """
        if self.budget is None:
            return
        is_unlimited = self._item_limit.numpy() == _NO_LIMIT
        if is_unlimited or self._limited_by != plan:
            self._limit_to(self.budget, noise_multipliers)
            self._limited_by = plan
        if not self.has_room():
            spent = self.ledger.epsilon(self.budget.delta)
            raise PrivacyBudgetError(
                "The privacy budget has no room for another step. Received: "
                f"target_epsilon={self.budget.target_epsilon:g}, "
                f"delta={self.budget.delta:g}, spent epsilon={spent:.4g}. Stop here, "
                "or use `tfdp.callbacks.PrivacyBudget(delta, target_epsilon=...)` with "
                "a larger target."
            )

    def _limit_to(self, budget: Budget, noise_multipliers: np.ndarray) -> None:
        ledger = self.ledger
        if self._steps_per_item.numpy() != 1:
            # Where a pass begins and ends among these steps may change.
            noise_multipliers = np.array([noise_multipliers.min()])
            if self.is_inside_item:
                least = self.counted(noise_multipliers[0])
                ledger = self._ledger_with_open_item(least)
        if ledger.epsilon(budget.delta) > budget.target_epsilon:
            # Not even the rest of a pass that has begun.
            self.limit(-1, noise_multiplier=float(noise_multipliers.min()))
            return
        # As they will be recorded.
        levels = self._levels.numpy()
        counted = noise_multipliers / _sensitivity_in_clips(self._segment)
        counted = lowered(counted, levels)
        count = affordable_count(
            ledger,
            self._segment,
            budget.target_epsilon,
            budget.delta,
            noise_multipliers=counted,
            most=self._count_worth_knowing(),
        )
        least = noise_multipliers[: max(count, 1)].min()
        self.limit(count, noise_multiplier=float(least))

    def _count_worth_knowing(self) -> int:
        """Return a number of items that is beyond all plans, small if there is one."""
        if self.planned_items is None:
            return MOST_COUNT
        return 2 * max(self.planned_items - self.items_started, 1)

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
        level = tf.searchsorted(self._levels, noise_multiplier[None], side="right")[0]
        noise_multiplier = tf.where(
            level > 0, self._levels[tf.maximum(level - 1, 0)], noise_multiplier
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

    def note_update(self, variables: Iterable[Any], l2_norm_clip: tf.Tensor) -> None:
        """Remember what a step updates, and the clip norm in it.

        Args:
            variables: Keras variables.
            l2_norm_clip: Scalar tensor.
        """
        self.note_trained(variables)
        self._last_clip.assign(tf.cast(l2_norm_clip, tf.float64))

    def note_trained(self, variables: Iterable[Any]) -> None:
        """Remember variables whose values come from private steps."""
        self._trained |= {id(each): weakref.ref(each) for each in variables}

    def _begins_item(self) -> tf.Tensor:
        return tf.cast(self._steps_in_item >= self._steps_per_item, tf.int64)

    def _close_item(self, count: tf.Tensor) -> None:
        """Move the open item into the table; nothing if `count` is 0."""
        used = self._rows_used.read_value()
        opened = self._open_noise_multiplier.read_value()
        is_same = (self._items > 0) & (self._noise_multipliers == opened)
        is_known = tf.reduce_any(is_same)
        row = tf.where(
            is_known, tf.argmax(tf.cast(is_same, tf.int32)), tf.minimum(used, _ROWS - 1)
        )
        known = self._noise_multipliers[row]
        lowest = tf.where(self._items[row] == 0, opened, tf.minimum(known, opened))
        self._noise_multipliers.scatter_nd_update(
            [[row]], [tf.where(count == 0, known, lowest)]
        )
        self._items.scatter_nd_add([[row]], [count])
        is_new = tf.cast((count > 0) & ~is_known, tf.int64)
        self._rows_used.assign(tf.minimum(used + is_new, _ROWS))

    def state(self) -> str:
        """Return all that a saved model must remember, as JSON."""
        return json.dumps({
            "ledger": self.ledger.to_json(),
            "steps": int(self._steps.numpy()),
            "sampled_epochs": self.sampled_epochs,
            "runs": self._all_runs(),
            "budget": self.budget and dataclasses.asdict(self.budget),
            "last_clip": self.last_clip,
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
            self._trained |= other._trained
            self._last_clip.assign(other._last_clip)

    def _all_runs(self) -> dict[str, int]:
        others = sum(self._runs.values())
        own = max(int(self._steps.numpy()) - others, 0)
        return {**self._runs, self._run: own} if own else dict(self._runs)

    def agree(self, states: list[str], run: str) -> None:
        """Count what all processes of a training have counted, as one training.

        After a kill their journals may differ by a step.

        Args:
            states: What `state` returned in each, in the same order everywhere.
            run: The name of the training from here on, the same everywhere.
        """
        for state in dict.fromkeys(states):
            if state != self.state():
                self.restore(state)
        if run != self._run:
            self._runs, self._run = self._all_runs(), run

    def restore(self, state: str) -> None:
        """Take over what a saved model had run; nothing recorded here is lost.

        Args:
            state: What `state` returned.
        """
        saved = json.loads(state)
        started, limit = self._items_started.numpy(), self._item_limit.numpy()
        limited_for, levels = self.limited_for, self._levels.numpy()
        planned, self.planned_items = self.planned_items, None
        self.begin(
            self._segment,
            steps_per_item=int(self._steps_per_item.numpy()),
            planned_items=planned and max(planned - int(started), 0),
        )
        self._levels.assign(levels)
        if limit != _NO_LIMIT:
            self.limit(limit - started, noise_multiplier=limited_for)
        self._restore_ledger(Ledger.from_json(saved["ledger"]), saved["runs"])
        self.sampled_epochs = max(self.sampled_epochs, saved["sampled_epochs"])
        if saved["last_clip"] is not None:
            self._last_clip.assign(saved["last_clip"])
        if self.budget is None and saved["budget"]:
            self.budget = Budget(**saved["budget"])
        if self.budget is not None:
            # No step before `enforce_budget` has seen what was restored.
            self.limit(0)
            self._limited_by = None

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


def _sensitivity_in_clips(segment: Segment) -> int:
    """The l2 sensitivity of a step's sum, as a multiple of the clip norm."""
    if isinstance(segment, PoissonSteps) or segment.examples_per_unit == 1:
        return 1
    return 2


def _cover(runs: dict[str, int], others: dict[str, int]) -> bool:
    return all(steps <= runs.get(run, 0) for run, steps in others.items())


def _counter(value: int) -> tf.Variable:
    return tf.Variable(value, dtype=tf.int64, trainable=False)


# The recorder of every model, and of every variable that trains or trained, whatever
# wraps them, by `id`: Keras's variables have no hash.
_recorders: dict[int, tuple["weakref.ref[Any]", LedgerRecorder]] = {}


def recorder_of(model: keras.Model) -> LedgerRecorder:
    """Return the recorder of a model, or of another one that shares its weights.

    Weights that are frozen now may have been trained before.

    Args:
        model: A model that is not private itself.

    Returns:
        Always the same one; where the weights had several, the first of them, with
        what the others had counted.
    """
    return _shared([model, *model.weights], [model, *model.trainable_variables])


def recorder_of_variables(
    variables: list[Any], recorder: LedgerRecorder
) -> LedgerRecorder:
    """Return the recorder of variables, which counts what another one has counted.

    Args:
        variables: Keras variables, to be trained.
        recorder: Theirs, if they have none yet.

    Returns:
        The recorder that is to count their steps.
    """
    return _shared(variables, variables, recorder)


def note_copy(original: Any, copy: Any) -> None:
    """Let a copy of a Keras variable have the history of the original."""
    recorder = _known(original)
    if recorder is not None:
        _recorders[id(copy)] = (weakref.ref(copy), recorder)
        if recorder.has_trained(original):
            recorder.note_trained([copy])


def _shared(
    owners: list[Any], new: list[Any], *others: LedgerRecorder
) -> LedgerRecorder:
    """Merge the recorders of owners, and make the result that of the new ones too."""
    known = [recorder for each in owners if (recorder := _known(each)) is not None]
    found = list({id(each): each for each in (*known, *others)}.values())
    recorder, *rest = found or [LedgerRecorder()]
    for other in rest:
        recorder.absorb(other)
    for owner in (*new, *(each for each in owners if _known(each) is not None)):
        _recorders[id(owner)] = (weakref.ref(owner), recorder)
    return recorder


def _known(owner: Any) -> LedgerRecorder | None:
    reference, recorder = _recorders.get(id(owner), (None, None))
    return recorder if reference is not None and reference() is owner else None


def is_of_a_model(recorder: LedgerRecorder) -> bool:
    """Tell whether a recorder is that of a model, not of an optimizer alone."""
    return any(recorder is known for _, known in _recorders.values())
