"""Counts, inside the graph, what a model's training really runs."""

import concurrent.futures
import dataclasses
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
from tfdp._types import Tensor, Variable
from tfdp.accounting import Ledger, Segment
from tfdp.accounting.calibration import MOST_COUNT
from tfdp.accounting.levels import lowered, noise_levels
from tfdp.accounting.runs import Run, ledger_of, runs_from_state, runs_to_dict, union
from tfdp.runs.histories import (
    History,
    Snapshot,
    counters_of,
    creations,
    history_of,
    know,
    note_steps,
    runs_of,
)
from tfdp.sampling import Scheme, Unknown

_NO_LIMIT = np.iinfo(np.int64).max
_NO_LEVELS = np.array([math.inf])
_UNKNOWN = np.array([])

# Distinct noise multipliers within one segment of training. Past that many, the
# last row takes them all at the smallest.
_ROWS = 1024

# What is counted while nobody has said how the data are sampled.
UNDECLARED = Unknown()


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

    Args:
        weights: Returns the weights of the model that trains, None when it is gone;
            None for an optimizer alone, which knows no model.
    """

    def __init__(self, weights: Callable[[], list[Any] | None] | None = None) -> None:
        """Begin an empty ledger."""
        self._weights = weights
        self._ledger = Ledger()
        # How the batches of the present segment are drawn.
        self.scheme: Scheme = UNDECLARED
        # Items that are to come in all of the present segment, if that is known.
        self.planned_items: int | None = None
        self.sampled_epochs = 0
        self.budget: Budget | None = None
        # What the limit was worked out for; None if it no longer holds. And whether
        # there is no more behind it.
        self.limited_by: Hashable = None
        self.limit_is_final = False
        # How many segments have begun.
        self.beginnings = 0
        # The name of the training that is counted here, unlike any other.
        self.run = uuid.uuid4().hex
        # Others, which files or copied weights brought, up to where they had come.
        self._loaded: dict[str, Run] = {}
        self.history = History(self)
        self.created = next(creations)
        living.add(self)
        # A glimpse of the values that the last single step has left.
        self.left: list[float] = []
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
            self._limited_for = tf.Variable(tf.zeros([], tf.float64), trainable=False)
            self._last_clip = tf.Variable(math.nan, dtype=tf.float64, trainable=False)

    @property
    def own_steps(self) -> Tensor:
        """Steps of this run, a scalar int64 tensor."""
        return self._steps.read_value()

    @property
    def loaded(self) -> dict[str, Run]:
        """The runs that were loaded here, by name."""
        return dict(self._loaded)

    @property
    def runs(self) -> dict[str, Run]:
        """This run and those that were loaded here, by name."""
        clip = self.own_last_clip
        own = Run(
            self._own_ledger(math.inf),
            int(self._steps.numpy()),
            None if math.isnan(clip) else clip,
        )
        is_empty = own.ledger == Ledger() and not own.steps
        return union(self._loaded, {} if is_empty else {self.run: own})

    @property
    def steps(self) -> int:
        """How many steps those are."""
        own = {self.run: Run(Ledger(), int(self._steps.numpy()))}
        return sum(run.steps for run in union(self._loaded, own).values())

    @property
    def last_clip(self) -> float | None:
        """The clip norm of the last step, here or where values came from, or None."""
        own = self.own_last_clip
        if not math.isnan(own):
            return own
        clips = [run.l2_norm_clip for run in self.all_runs().values()]
        return next((clip for clip in clips[::-1] if clip is not None), None)

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
        return not bool(self.begins_item())

    def items_begun_by(self, steps: int) -> int:
        """Return how many items the next steps begin, at least one step."""
        per_item = int(self._steps_per_item.numpy())
        return (min(int(self._steps_in_item.numpy()), per_item) + steps - 1) // per_item

    def counted(self, noise_multiplier: float) -> float:
        """Return what the ledger counts a multiple of the clip norm as."""
        return float(noise_multiplier) / self.scheme.sensitivity_in_clips

    @property
    def ledger(self) -> Ledger:
        """What was run up to now: here, and wherever the values came from."""
        return ledger_of(self.all_runs())

    def _own_ledger(self, noise_multiplier: float) -> Ledger:
        """Return what this run counts if its open item has a step with this noise."""
        rows = zip(self._items.numpy(), self._noise_multipliers.numpy(), strict=True)
        counted = [(items, z) for items, z in rows if items]
        if self._open_items.numpy():
            opened = self._open_noise_multiplier.numpy()
            counted.append((1, min(opened, noise_multiplier)))
        segments = [Segment(self.scheme, int(items), float(z)) for items, z in counted]
        return self._ledger.add(*segments).merged()

    def begin(
        self,
        scheme: Scheme,
        *,
        steps_per_item: int = 1,
        planned_items: int | None = None,
        noise_multipliers: np.ndarray = _UNKNOWN,
    ) -> None:
        """End the segment being recorded and begin another.

        If the one that ends fell short of its plan although its limit had room,
        somebody stopped it, and the ledger says so.

        Args:
            scheme: How the batches are drawn from now on.
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
            rest = Segment(self.scheme, missing, float(least))
            ledger = dataclasses.replace(ledger, cut_short=(*ledger.cut_short, rest))
        self._ledger = ledger
        self.scheme, self.planned_items = scheme, planned_items
        self._items.assign(tf.zeros_like(self._items))
        counted = noise_multipliers / scheme.sensitivity_in_clips
        self._levels.assign(noise_levels(counted) if len(counted) else _NO_LEVELS)
        for counter in (self._rows_used, self._open_items, self._items_started):
            counter.assign(0)
        self._steps_per_item.assign(steps_per_item)
        self._steps_in_item.assign(steps_per_item)
        self._item_limit.assign(_NO_LIMIT)
        self._limited_for.assign(0.0)
        self.limited_by = None
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

    def outstanding(self) -> Segment | None:
        """Return the items that the present limit allows beyond those that have begun.

        Returns:
            A segment with as little noise as the limit allows, None without a limit
            or where it leaves nothing.
        """
        limit, started = int(self._item_limit.numpy()), self.items_started
        if limit == _NO_LIMIT or limit <= started:
            return None
        return Segment(self.scheme, limit - started, self.counted(self.limited_for))

    def lift_limit(self) -> None:
        """Allow all steps."""
        self._item_limit.assign(_NO_LIMIT)
        self._limited_for.assign(0.0)
        self.limited_by = None

    def revoke(self) -> None:
        """Allow no step before there is another limit."""
        self.limit(0)
        self.limited_by = None

    def in_clips(self, counted: float) -> float:
        """Return the multiple of the clip norm that `counted` makes this of."""
        return counted * self.scheme.sensitivity_in_clips

    def recorded(self, noise_multipliers: np.ndarray) -> np.ndarray:
        """Return what steps will be recorded with.

        Args:
            noise_multipliers: Multiples of the clip norm.
        """
        counted = noise_multipliers / self.scheme.sensitivity_in_clips
        levels: np.ndarray = lowered(counted, self._levels.numpy())
        return levels

    def run_with(self, noise_multiplier: float) -> Run:
        """Return this run, as if all of a pass that is open had this little noise.

        Args:
            noise_multiplier: Multiple of the clip norm.
        """
        is_open = self.has_passes and self.is_inside_item
        opened = self.counted(noise_multiplier) if is_open else math.inf
        return Run(self._own_ledger(opened), int(self._steps.numpy()))

    @property
    def has_passes(self) -> bool:
        """Whether an item is more than a step."""
        return bool(self._steps_per_item.numpy() != 1)

    @property
    def last_noise_multiplier(self) -> float:
        """What the last steps were counted with."""
        return float(self._open_noise_multiplier.numpy())

    def count_worth_knowing(self) -> int:
        """Return a number of items that is beyond all plans, small if there is one."""
        if self.planned_items is None:
            return MOST_COUNT
        return 2 * max(self.planned_items - self.items_started, 1)

    @property
    def limited_for(self) -> float:
        """The least noise multiplier that the present limit allows; 0 without one."""
        return float(self._limited_for.numpy())

    def has_room(self, noise_multiplier: Tensor | float = math.inf) -> Tensor:
        """Tell whether one more step is within the limit.

        Args:
            noise_multiplier: Of the step, a multiple of the clip norm, float64 scalar.

        Returns:
            A scalar bool tensor.
        """
        begins = tf.cast(self.begins_item(), tf.int64)
        is_within = self._items_started + begins <= self._item_limit
        return is_within & (noise_multiplier >= self._limited_for)

    def record(
        self, noise_multiplier: Tensor, l2_norm_clip: Tensor | None = None
    ) -> None:
        """Count one step, as operations of the graph.

        Args:
            noise_multiplier: Standard deviation of the step's noise over its l2
                sensitivity, scalar float64 tensor.
            l2_norm_clip: The clip norm of the step, a scalar tensor.
        """
        is_first = self.begins_item()
        begins = tf.cast(is_first, tf.int64)
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
        if l2_norm_clip is not None:
            self._last_clip.assign(tf.cast(l2_norm_clip, tf.float64))

    def begins_with_clip(self, begins: Tensor, l2_norm_clip: Tensor) -> Tensor:
        """Refuse, when it runs, another clip norm than that of the pass's steps before.

        Args:
            begins: Whether the step begins a pass, a scalar bool tensor.
            l2_norm_clip: Of the step, a scalar tensor.

        Returns:
            `begins`, once that is sure.
        """
        is_same = self._last_clip == tf.cast(l2_norm_clip, tf.float64)
        message = (
            "Noise that the steps of a pass share needs one clip norm for all of them. "
            "Received: another `l2_norm_clip` than in the step before. Change it "
            "between epochs."
        )
        check = tf.debugging.Assert(begins | is_same, [message])
        # No noise, and so no step, before the check has passed.
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(begins)

    def begins_item(self) -> Tensor:
        """Tell whether the next step begins an item, a scalar bool tensor."""
        return self._steps_in_item >= self._steps_per_item

    def _close_item(self, count: Tensor) -> None:
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

    @property
    def is_of_a_model(self) -> bool:
        """Whether it is that of a model, not of an optimizer alone."""
        return self._weights is not None

    def weights(self) -> list[Variable] | None:
        """Return the weights of its model, as they are now; None if that is gone."""
        return None if self._weights is None else self._weights()

    def histories(self) -> list[History]:
        """Return the histories of all that its model, or what it trains, comes from."""
        return [self.history, *map(history_of, self.weights() or [])]

    def all_runs(self) -> dict[str, Run]:
        """Return all runs in the ledger, as they are now, by name."""
        return runs_of(self.histories())

    def recorders(self) -> list["LedgerRecorder"]:
        """Return the recorders of all of them that are still there."""
        found = counters_of(self.histories())
        return [each for each in found if isinstance(each, LedgerRecorder)]

    @property
    def all_steps(self) -> int:
        """How many steps the ledger has, those inside of passes included."""
        return sum(run.steps for run in self.all_runs().values())

    @property
    def all_sampled_epochs(self) -> int:
        """The last epoch of seeded draws that this run or one before it has used."""
        return max(each.sampled_epochs for each in self.recorders())

    def begin_steps(self, trained: list[Variable], read: list[Variable]) -> None:
        """Note what steps change, and that it depends on all that they read.

        Args:
            trained: Keras variables.
            read: Likewise; the weights of the model.
        """
        self.history.depend_on(*map(history_of, read))
        note_steps(trained, self.history, self.run)

    def end_steps(self) -> None:
        """Keep what was only read up to now, not what it will be trained to later."""
        for source in list(self.history.sources):
            if source.counter is None and self.history not in source.sources:
                runs = runs_of([source])
                runs.pop(self.run, None)
                self._loaded = union(self._loaded, runs)
                del self.history.sources[source]

    def state(self) -> str:
        """Return all that a saved model must remember, as JSON."""
        return json.dumps({
            "runs": runs_to_dict(self.all_runs()),
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
        if run != self.run:
            self.begin(self.scheme, steps_per_item=int(self._steps_per_item.numpy()))
            self._loaded, self.run = self.runs, run
            self._ledger = Ledger()
            self._steps.assign(0)
        for state in dict.fromkeys(states):
            self.restore(state)

    def restore(self, state: str) -> None:
        """Take over what a saved model had run; nothing recorded here is lost.

        Args:
            state: What `state` returned.

        Raises:
            KeyError: If it is damaged.
            ValueError: If it is damaged.
        """
        saved = json.loads(state)
        runs = runs_from_state(saved)
        if self.run in runs:
            # That is counted here. Without steps it only keeps its place in the order.
            runs[self.run] = Run(Ledger(), 0)
        self._loaded = union(self._loaded, runs)
        know(runs)
        self.sampled_epochs = max(self.sampled_epochs, saved["sampled_epochs"])
        if saved["last_clip"] is not None:
            self._last_clip.assign(saved["last_clip"])
        if self.budget is None and saved["budget"]:
            self.budget = Budget(**saved["budget"])
        revoke_all()


def _counter(value: int) -> tf.Variable:
    return tf.Variable(value, dtype=tf.int64, trainable=False)


def note_loaded(variables: Iterable[Variable], runs: dict[str, Run]) -> None:
    """Let variables depend on runs whose values were loaded into them.

    Args:
        variables: Keras variables; None in place of those that are gone.
        runs: By name.
    """
    loaded = History(Snapshot(runs))
    for variable in variables:
        if variable is not None and runs:
            history_of(variable).depend_on(loaded)


class LedgerState(tf.train.experimental.PythonState):
    """Makes the ledger a part of every `tf.train.Checkpoint` of what has it.

    Args:
        get: Returns it as text.
        restore: Takes such a text.
    """

    def __init__(self, get: Callable[[], str], restore: Callable[[str], None]) -> None:
        """Keep both; nothing runs before a checkpoint is written or read."""
        self._get, self._restore = get, restore
        self.variables: list[weakref.ref[Any]] = []

    def note_loaded(self, runs: dict[str, Run]) -> None:
        """Let the variables depend on what a checkpoint has brought, their values too.

        Args:
            runs: By name.
        """
        note_loaded((each() for each in self.variables), runs)

    def serialize(self) -> str:
        """Return what the checkpoint is to hold."""
        if tf.executing_eagerly():
            return self._get()
        # TensorFlow may ask while it builds a graph; another thread is in none.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(self._get).result()

    def deserialize(self, string_value: Any) -> None:
        """Take over what a checkpoint holds."""
        text = (
            string_value.decode() if isinstance(string_value, bytes) else string_value
        )
        self._restore(text)


# All recorders of this process.
living: weakref.WeakSet[LedgerRecorder] = weakref.WeakSet()


def revoke_all() -> None:
    """Let no limit stand that did not know what was found to have run."""
    for recorder in list(living):
        if recorder.limited_by is not None or recorder.budget is not None:
            recorder.revoke()


# A forked process goes on with runs of its own.
def _rename_runs() -> None:
    for recorder in living:
        recorder.run = uuid.uuid4().hex


os.register_at_fork(after_in_child=_rename_runs)
