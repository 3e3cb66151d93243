"""Counts, inside the graph, what a model's training really runs."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp.accounting import (
    Ledger,
    PoissonSteps,
    Segment,
    UnamplifiedSteps,
    affordable_count,
)
from tfdp.accounting.calibration import MOST_COUNT
from tfdp.accounting.levels import lowered, noise_levels
from tfdp.accounting.runs import Run, ledger_of, runs_from_state, runs_to_dict, union
from tfdp.errors import PrivacyBudgetError
from tfdp.histories import History, history_of, note_steps, runs_of_copies

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
    """Counts one training where its steps happen: a *run*.

    Its ledger is that of all runs that its history knows, read when it is asked for.
    What files bring is kept beside, each run by its name, so nothing counts twice.

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
        # The name of the training that is counted here, unlike any other.
        self.run = uuid.uuid4().hex
        # Others, which files or copied weights brought, up to where they had come.
        self._loaded: dict[str, Run] = {}
        self.history = History(self)
        _recorders.add(self)
        # Whether it is that of a model, not of an optimizer alone.
        self.is_of_a_model = False
        # Whether a graph that a user has traced takes its steps.
        self.is_in_a_graph = False
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
            # Steps of all others when the limit was worked out.
            self._others_steps = _counter(0)
            self._limited_for = tf.Variable(tf.zeros([], tf.float64), trainable=False)
            self._last_clip = tf.Variable(math.nan, dtype=tf.float64, trainable=False)

    @property
    def own_steps(self) -> tf.Tensor:
        """Steps of this run, a scalar int64 tensor."""
        return self._steps.read_value()

    @property
    def runs(self) -> dict[str, Run]:
        """This run and those that were loaded, by name."""
        own = Run(self._own_ledger(math.inf), int(self._steps.numpy()))
        is_empty = own == Run(Ledger(), 0)
        return union(self._loaded, {} if is_empty else {self.run: own})

    @property
    def steps(self) -> int:
        """How many steps those are."""
        loaded = {**self._loaded, self.run: Run(Ledger(), int(self._steps.numpy()))}
        return sum(run.steps for run in union(self._loaded, loaded).values())

    @property
    def last_clip(self) -> float | None:
        """The clip norm of the last step, here or where values came from, or None."""
        clips = [each.own_last_clip for each in self._all()]
        return next((clip for clip in clips if not math.isnan(clip)), None)

    @property
    def own_last_clip(self) -> float:
        """The clip norm of the last step of this run; NaN if there was none."""
        return float(self._last_clip.numpy())

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
        """What was run up to now: here, and wherever the values came from."""
        return ledger_of(self.history.runs())

    def _own_ledger(self, noise_multiplier: float) -> Ledger:
        """Return what this run counts if its open item has a step with this noise."""
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
        ledger = self._own_ledger(math.inf)
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

    def bind(self, weights: list[Any]) -> None:
        """Let the budget cover all steps that change some weights, whoever takes them.

        Args:
            weights: Keras variables of the model.
        """
        if self.budget is not None:
            for weight in weights:
                history_of(weight).bound_by[self.history] = None

    def enforce_budget(
        self, noise_multipliers: np.ndarray, plan: Hashable = "only one"
    ) -> None:
        """Limit the present segment to what all budgets that bind it have room for.

        Args:
            noise_multipliers: That the steps to come count with, as multiples of
                the clip norm; the last one is that of all that follow.
            plan: Tells these steps from others that were planned before.

        Raises:
            PrivacyBudgetError: If there is no room for a single one.
        """
        binding = self._binding()
        if not binding:
            if self._limited_by is not None:
                self._item_limit.assign(_NO_LIMIT)
                self._limited_for.assign(0.0)
                self._limited_by = None
            return
        present = (
            plan,
            tuple((each.budget, each.steps_beside(self)) for each in binding),
        )
        is_unlimited = self._item_limit.numpy() == _NO_LIMIT
        if is_unlimited or self._limited_by != present:
            self._limit_to(binding, noise_multipliers)
            self._limited_by = present
        self._others_steps.assign(_steps_of_all() - self._steps)
        if not self.has_room():
            spent, budget = max(
                (each.ledger.epsilon(each.budget.delta), each.budget)
                for each in binding
            )
            raise PrivacyBudgetError(
                "The privacy budget has no room for another step. Received: "
                f"target_epsilon={budget.target_epsilon:g}, "
                f"delta={budget.delta:g}, spent epsilon={spent:.4g}. Stop here, "
                "or use `tfdp.callbacks.PrivacyBudget(delta, target_epsilon=...)` with "
                "a larger target."
            )

    def enforce_budget_of_step(self, noise_multiplier: float) -> None:
        """Do what `enforce_budget` does, for steps of a loop of one's own.

        Args:
            noise_multiplier: That `record` will get.

        Raises:
            PrivacyBudgetError: If there is no room for one.
        """
        in_clips = noise_multiplier * _sensitivity_in_clips(self._segment)
        self.enforce_budget(np.array([in_clips]), noise_multiplier)

    def enforce_budget_of_loops(self) -> None:
        """Limit traced loops that change what the budget of this run covers.

        They cannot work out a limit themselves: what they have was worked out with
        the steps of all others, and holds until others take a step.
        """
        for other in self._all():
            if other is not self and other.is_in_a_graph:
                with contextlib.suppress(PrivacyBudgetError):
                    other.enforce_budget_of_step(other.last_noise_multiplier)

    @property
    def last_noise_multiplier(self) -> float:
        """What the last steps were counted with."""
        return float(self._open_noise_multiplier.numpy())

    def _binding(self) -> list[Any]:
        """Return the recorders of models whose budget covers the steps of this run."""
        histories = {self.history: None}
        for source in self.history.sources:
            if self.history in source.sources:
                histories |= source.bound_by
        counters: list[Any] = [each.counter for each in histories]
        return [each for each in counters if each.budget is not None]

    def steps_beside(self, run: "LedgerRecorder") -> tuple[tuple[str, int], ...]:
        """Return how many steps the ledger has that are not of a given run."""
        return tuple(
            (each.run, each.steps - (int(run.own_steps) if each is run else 0))
            for each in self._all()
        )

    def _limit_to(self, binding: list[Any], noise_multipliers: np.ndarray) -> None:
        opened = math.inf
        if self._steps_per_item.numpy() != 1:
            # Where a pass begins and ends among these steps may change.
            noise_multipliers = np.array([noise_multipliers.min()])
            if self.is_inside_item:
                opened = self.counted(noise_multipliers[0])
        own = {self.run: Run(self._own_ledger(opened), int(self._steps.numpy()))}
        # As they will be recorded.
        counted = noise_multipliers / _sensitivity_in_clips(self._segment)
        counted = lowered(counted, self._levels.numpy())
        counts = []
        for each in binding:
            budget: Budget = each.budget
            ledger = ledger_of(union(each.history.runs(), own))
            if ledger.epsilon(budget.delta) > budget.target_epsilon:
                # Not even the rest of a pass that has begun.
                self.limit(-1, noise_multiplier=float(noise_multipliers.min()))
                return
            count = affordable_count(
                ledger,
                self._segment,
                budget.target_epsilon,
                budget.delta,
                noise_multipliers=counted,
                most=self._count_worth_knowing(),
            )
            counts.append(count)
        least = noise_multipliers[: max(min(counts), 1)].min()
        self.limit(min(counts), noise_multiplier=float(least))

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

    def has_room_in_loops(self, noise_multiplier: tf.Tensor) -> tf.Tensor:
        """Tell what `has_room` tells, and that nobody else has taken a step meanwhile.

        Args:
            noise_multiplier: That `record` will get, a float64 scalar.

        Returns:
            A scalar bool tensor.
        """
        is_unlimited = self._item_limit.read_value() == _NO_LIMIT
        is_up_to_date = _steps_of_all() - self._steps == self._others_steps
        in_clips = noise_multiplier * _sensitivity_in_clips(self._segment)
        return is_unlimited | (is_up_to_date & self.has_room(in_clips))

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
        _steps_of_all().assign_add(1)

    def note_update(self, variables: Iterable[Any], l2_norm_clip: tf.Tensor) -> None:
        """Remember what a step updates, and the clip norm in it.

        Args:
            variables: Keras variables.
            l2_norm_clip: Scalar tensor.
        """
        note_steps(variables, self.history)
        self._last_clip.assign(tf.cast(l2_norm_clip, tf.float64))

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

    def note_weights(self, weights: list[Any]) -> None:
        """Let the ledger have all that made the weights that steps read.

        Args:
            weights: Keras variables of the model, with their present values.
        """
        self.history.depend_on(*map(history_of, weights))

    def recognise_copies(self, weights: list[Any]) -> None:
        """Take over the runs whose values were copied into weights.

        Args:
            weights: Keras variables of the model.
        """
        copied = runs_of_copies(weights, self.history.runs())
        if copied:
            self._loaded = union(self._loaded, copied)
            note_steps(weights, self.history)

    @property
    def all_sampled_epochs(self) -> int:
        """The last epoch of seeded draws that this run or one before it has used."""
        return max(each.sampled_epochs for each in self._all())

    @property
    def ledger_steps(self) -> int:
        """How many steps the ledger has, those inside of passes included."""
        return sum(run.steps for run in self.history.runs().values())

    def _all(self) -> list["LedgerRecorder"]:
        """Return the recorders of all runs in the ledger."""
        recorders: list[Any] = self.history.counters()
        return recorders

    def state(self) -> str:
        """Return all that a saved model must remember, as JSON."""
        return json.dumps({
            "runs": runs_to_dict(self.history.runs()),
            "sampled_epochs": self.all_sampled_epochs,
            "budget": self.budget and dataclasses.asdict(self.budget),
            "last_clip": self.last_clip,
        })

    def agree(self, states: list[str], run: str) -> None:
        """Count what all processes of a training have counted, as one training.

        After a kill their journals may differ by a step.

        Args:
            states: What `state` returned in each, in the same order everywhere.
            run: The name of the training from here on, the same everywhere and, if it
                is not the present one, new.
        """
        for state in dict.fromkeys(states):
            self.restore(state)
        if run != self.run:
            self.begin(self._segment, steps_per_item=int(self._steps_per_item.numpy()))
            self._loaded, self.run = self.runs, run
            self._ledger = Ledger()
            self._steps.assign(0)

    def restore(self, state: str) -> None:
        """Take over what a saved model had run; nothing recorded here is lost.

        Args:
            state: What `state` returned.

        Raises:
            KeyError: If it is damaged.
            ValueError: If it is damaged.
        """
        saved = json.loads(state)
        self._loaded = union(self._loaded, runs_from_state(saved))
        self.sampled_epochs = max(self.sampled_epochs, saved["sampled_epochs"])
        if saved["last_clip"] is not None:
            self._last_clip.assign(saved["last_clip"])
        if self.budget is None and saved["budget"]:
            self.budget = Budget(**saved["budget"])
        if self.budget is not None:
            # No step before `enforce_budget` has seen what was restored.
            self.limit(0)
            self._limited_by = None


def _sensitivity_in_clips(segment: Segment) -> int:
    """The l2 sensitivity of a step's sum, as a multiple of the clip norm."""
    if isinstance(segment, PoissonSteps) or segment.examples_per_unit == 1:
        return 1
    return 2


def _counter(value: int) -> tf.Variable:
    return tf.Variable(value, dtype=tf.int64, trainable=False)


class LedgerState(tf.train.experimental.PythonState):
    """Makes the ledger a part of every `tf.train.Checkpoint` of what has it.

    Args:
        get: Returns it as text.
        restore: Takes such a text.
    """

    def __init__(self, get: Callable[[], str], restore: Callable[[str], None]) -> None:
        """Keep both; nothing runs before a checkpoint is written or read."""
        self._get, self._restore = get, restore

    def serialize(self) -> str:
        """Return what the checkpoint is to hold."""
        return self._get()

    def deserialize(self, string_value: Any) -> None:
        """Take over what a checkpoint holds."""
        text = (
            string_value.decode() if isinstance(string_value, bytes) else string_value
        )
        self._restore(text)


@functools.cache
def _steps_of_all() -> tf.Variable:
    """Return the number of steps that were taken in this process."""
    with tf.init_scope(), _keras.unmirrored_variables(), tf.device("CPU:0"):
        return _counter(0)


# A forked process goes on with runs of its own.
_recorders: weakref.WeakSet[LedgerRecorder] = weakref.WeakSet()


def _rename_runs() -> None:
    for recorder in _recorders:
        recorder.run = uuid.uuid4().hex


os.register_at_fork(after_in_child=_rename_runs)
