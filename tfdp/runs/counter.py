"""Counts, inside the graph, what a model's training really runs."""

import math
from collections.abc import Hashable

import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Array, Tensor
from tfdp.accounting import Segment
from tfdp.accounting.levels import lowered, noise_levels
from tfdp.sampling import Scheme, Unknown

_NO_LIMIT = np.iinfo(np.int64).max
_NO_LEVELS = np.array([math.inf])
UNPLANNED = np.array([])

# Distinct noise multipliers within one segment of training. Past that many, the
# last row takes them all at the smallest.
_ROWS = 1024
_NO_NOISE_MULTIPLIERS = np.full(_ROWS, math.inf)

# What is counted while nobody has said how the data are sampled.
UNDECLARED = Unknown()


class Limit:
    """How far a training may go: the graph of its steps reads it, budgets set it.

    Attributes:
        reason: What the limit was worked out for. None if there is no limit, or if it
            no longer holds and has to be worked out anew.
        is_final: Whether the budgets leave nothing beyond it. False where it no longer
            holds.
        releases: Variable: how many of the present segment may begin, in all.
        noise_multiplier: Variable: steps with less noise are not taken.
    """

    reason: Hashable

    def __init__(self) -> None:
        """Begin without a limit."""
        self.reason = None
        self.is_final = False
        self.releases = _variable(_NO_LIMIT)
        self.noise_multiplier = _variable(0.0)

    def lift(self) -> None:
        """Allow all steps."""
        self.set(_NO_LIMIT)
        self.reason = None

    def set(
        self,
        releases: Tensor | int,
        noise_multiplier: float = 0.0,
        *,
        is_final: bool = False,
    ) -> None:
        """Allow so many releases in all, and so little noise."""
        self.releases.assign(releases)
        self.noise_multiplier.assign(noise_multiplier)
        self.is_final = is_final


class StepCounter:
    """Counts steps in variables that the training graph updates, whatever calls it.

    The accountant counts *releases*: steps, or for shuffled data passes. A pass counts
    from its first step on, with the least noise of its steps.

    It counts one segment of training at a time, of batches that are drawn in one way:
    in a table of ``(noise multiplier, releases)``, and the release that is open beside
    it. Noise multipliers are over the l2 sensitivity, as in ledgers.

    Attributes:
        scheme: How the batches of the segment are drawn.
        planned_releases: How many are to come in all of it, if that is known.
        limit: How many may begin.
        steps: Variable: steps of all segments together.
        last_clip: Variable: the clip norm of the last step; NaN if there was none.
        open_noise_multiplier: Variable: what the release that is open counts with.
    """

    def __init__(self) -> None:
        """Begin without steps."""
        self.scheme: Scheme = UNDECLARED
        self.planned_releases: int | None = None
        with tf.init_scope(), _keras.unmirrored_variables(), tf.device("CPU:0"):
            self.limit = Limit()
            self.steps = _variable(0)
            self.last_clip = _variable(math.nan)
            self.open_noise_multiplier = _variable(0.0)
            self._releases = _variable(np.zeros(_ROWS, np.int64))
            # Infinite in rows where nothing is counted: those that come take the least.
            self._noise_multipliers = _variable(_NO_NOISE_MULTIPLIERS)
            # What is recorded is brought down to one of these, in rising order.
            self._levels = tf.Variable(_NO_LEVELS, shape=[None], trainable=False)
            self._begun = _variable(0)
            self._steps_in_release = _variable(1)
            self._steps_per_release = _variable(1)

    def begin(
        self,
        scheme: Scheme,
        steps_per_release: int,
        planned_releases: int | None,
        noise_multipliers: Array,
    ) -> None:
        """Begin another segment, without a limit; see `LedgerRecorder.begin`."""
        self.scheme, self.planned_releases = scheme, planned_releases
        self._releases.assign(np.zeros(_ROWS, np.int64))
        self._noise_multipliers.assign(_NO_NOISE_MULTIPLIERS)
        has_plan = len(noise_multipliers) > 0
        self._levels.assign(noise_levels(noise_multipliers) if has_plan else _NO_LEVELS)
        self._begun.assign(0)
        self._steps_per_release.assign(steps_per_release)
        self.begin_release()
        self.limit.lift()

    def begin_release(self) -> None:
        """Let the next step begin a new release."""
        self._steps_in_release.assign(self._steps_per_release)

    def begins_release(self) -> Tensor:
        """Tell whether the next step begins a release, a scalar bool tensor."""
        return self._steps_in_release >= self._steps_per_release

    @property
    def is_inside_release(self) -> bool:
        """Whether the next step belongs to a release that has begun."""
        # In Python: each kind of operation that TensorFlow runs takes milliseconds at first.
        return int(self._steps_in_release.numpy()) < self.steps_per_release

    @property
    def steps_per_release(self) -> int:
        """Steps after which a release ends, if nothing ends it before."""
        return int(self._steps_per_release.numpy())

    @property
    def releases_begun(self) -> int:
        """How many releases of the segment have begun."""
        return int(self._begun.numpy())

    def releases_begun_by(self, steps: int) -> int:
        """Return how many releases the next steps begin, at least one step."""
        per_release = self.steps_per_release
        # One that is full has room for no step: the first one begins another.
        in_release = min(int(self._steps_in_release.numpy()), per_release)
        return (in_release + steps - 1) // per_release

    def segments(self, noise_multiplier: float = math.inf) -> list[Segment]:
        """Return what the segment has run, one for each noise multiplier.

        Args:
            noise_multiplier: Of a step that is taken for one of the open release.
        """
        table = zip(
            self._releases.numpy(), self._noise_multipliers.numpy(), strict=True
        )
        counted = [(count, z) for count, z in table if count]
        if self.releases_begun:
            opened = self.open_noise_multiplier.numpy()
            counted.append((1, min(opened, noise_multiplier)))
        return [Segment(self.scheme, int(count), float(z)) for count, z in counted]

    @property
    def steps_to_come(self) -> int | None:
        """How many steps of what was planned have not been taken; None if nobody knows."""
        if self.planned_releases is None:
            return None
        whole = max(0, self.planned_releases - self.releases_begun)
        in_release = int(self._steps_in_release.numpy())
        return (whole + 1) * self.steps_per_release - in_release

    def levels_for(self, scheme: Scheme) -> Array:
        """Return the noise that was planned, as releases over such batches count it."""
        levels = self._levels.numpy()
        if not np.isfinite(levels).all():
            return UNPLANNED
        ratio = self.scheme.sensitivity_in_clips / scheme.sensitivity_in_clips
        return np.asarray(levels * ratio)

    def missing(self) -> list[Segment]:
        """Return what was planned and not begun, as far as budgets have room for it."""
        begun, limit = self.releases_begun, self.limit
        missing = (self.planned_releases or 0) - begun
        is_spent = limit.is_final and not self.has_room()
        if not begun or missing <= 0 or is_spent:
            return []
        # The steps that were planned may have had less noise.
        least = min(self.open_noise_multiplier.numpy(), self._levels.numpy()[0])
        if limit.is_final and limit.noise_multiplier.numpy() >= least:
            # For less noise the limit was never asked for what was planned.
            missing = min(missing, int(limit.releases.numpy()) - begun)
        return [Segment(self.scheme, missing, float(least))] if missing > 0 else []

    def recorded(self, noise_multipliers: Array) -> Array:
        """Return what steps with such noise will be recorded with."""
        return lowered(noise_multipliers, self._levels.numpy())

    def allow(
        self, further: int, *, noise_multiplier: float = 0.0, is_final: bool = True
    ) -> None:
        """Allow this many more releases of the segment, beyond those begun.

        Args:
            further: Whole number; -1 forbids the rest of one that has begun.
            noise_multiplier: Steps with less noise than this have no room at all.
            is_final: Whether the budgets leave nothing beyond these.
        """
        self.limit.set(self._begun + further, noise_multiplier, is_final=is_final)

    def revoke(self) -> None:
        """Allow no step before there is another limit."""
        # To be worked out anew: it may well leave some.
        self.allow(0, is_final=False)
        self.limit.reason = None

    def outstanding(self) -> Segment | None:
        """Return what the limit allows beyond the releases that have begun.

        Returns:
            A segment with as little noise as the limit allows, None without a limit
            or where it leaves nothing.
        """
        limit, begun = int(self.limit.releases.numpy()), self.releases_begun
        if limit == _NO_LIMIT or limit <= begun:
            return None
        noise_multiplier = float(self.limit.noise_multiplier.numpy())
        return Segment(self.scheme, limit - begun, noise_multiplier)

    def has_room(self, noise_multiplier: Tensor | float = math.inf) -> Tensor:
        """Tell whether one more step is within the limit.

        Args:
            noise_multiplier: Of the step, a float64 scalar.

        Returns:
            A scalar bool tensor.
        """
        begins = tf.cast(self.begins_release(), tf.int64)
        is_within = self._begun + begins <= self.limit.releases
        return is_within & (noise_multiplier >= self.limit.noise_multiplier)

    def record(self, noise_multiplier: Tensor, l2_norm_clip: Tensor | float) -> None:
        """Count one step, as operations of the graph.

        Args:
            noise_multiplier: Standard deviation of the step's noise over its l2
                sensitivity, scalar float64 tensor.
            l2_norm_clip: The clip norm of the step, a scalar.
        """
        begins = self.begins_release()
        # What is no noise at all must not make the ledger unreadable.
        noise_multiplier = tf.where(
            tf.math.is_finite(noise_multiplier) & (noise_multiplier >= 0),
            noise_multiplier,
            tf.zeros_like(noise_multiplier),
        )
        # Down to what was planned: never more noise than was drawn, and few entries.
        levels = self._levels.read_value()
        level = tf.reduce_max(tf.where(levels <= noise_multiplier, levels, -1.0))
        noise_multiplier = tf.where(level >= 0, level, noise_multiplier)
        # From the first step of a segment on there is always a release that is open.
        self._close(begins & (self._begun > 0))
        self._steps_in_release.assign(
            tf.where(begins, tf.constant(1, tf.int64), self._steps_in_release + 1)
        )
        opened = self.open_noise_multiplier
        least = tf.minimum(opened, noise_multiplier)
        opened.assign(tf.where(begins, noise_multiplier, least))
        self._begun.assign_add(tf.cast(begins, tf.int64))
        self.steps.assign_add(1)
        self.last_clip.assign(tf.cast(l2_norm_clip, tf.float64))

    def _close(self, is_closed: Tensor) -> None:
        """Move the open release into the table, if it is closed."""
        opened = self.open_noise_multiplier.read_value()
        # The row with that noise multiplier, else the first that is free, behind all that
        # are not. Only the last one takes releases of several noise multipliers.
        takes = (self._releases == 0) | (self._noise_multipliers == opened)
        row = tf.reduce_min(tf.where(takes, tf.range(_ROWS), _ROWS - 1))
        lowest = tf.where(is_closed, opened, math.inf)
        self._noise_multipliers.scatter_min(tf.IndexedSlices(lowest, row))
        self._releases.scatter_add(tf.IndexedSlices(tf.cast(is_closed, tf.int64), row))

    def begins_with_clip(self, begins: Tensor, l2_norm_clip: Tensor) -> Tensor:
        """Refuse, when it runs, another clip norm than that of the pass's steps before.

        Args:
            begins: Whether the step begins a pass, a scalar bool tensor.
            l2_norm_clip: Of the step, a scalar tensor.

        Returns:
            `begins`, once that is sure.
        """
        is_same = self.last_clip == tf.cast(l2_norm_clip, tf.float64)
        message = (
            "Noise that the steps of a pass share needs one clip norm for all of them. "
            "Received: another `l2_norm_clip` than in the step before. Change it "
            "between epochs."
        )
        check = tf.debugging.Assert(begins | is_same, [message])
        # No noise, and so no step, before the check has passed.
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(begins)


def _variable(value: Array | float) -> tf.Variable:
    """Make a variable of int64 or float64 numbers."""
    return tf.Variable(np.asarray(value), trainable=False)
