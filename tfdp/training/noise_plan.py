"""What the noise of steps counts as, where callbacks change it."""

from collections.abc import Hashable, Sequence

import numpy as np
import tensorflow as tf

from tfdp.accounting.levels import folded
from tfdp.optimizers import DPOptimizer
from tfdp.training.callback import PrivacyCallback

# How far ahead the noise is looked at where the data do not tell the steps.
_STEPS_WITHOUT_A_PLAN = 1_000_000


class NoisePlan:
    """The noise multipliers that the steps of a training count with.

    Args:
        optimizer: Has the noise multiplier, unless a callback sets it.
        callbacks: Those that are part of the training graph.
        planned_steps: How many steps are to come; None if nobody knows.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        callbacks: Sequence[PrivacyCallback] = (),
        planned_steps: int | None = None,
    ) -> None:
        """Look at the steps to come."""
        self._optimizer = optimizer
        self._callbacks = callbacks
        self._planned_steps = planned_steps
        self._look_ahead()

    def counted(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return what the noise of steps counts as, with what callbacks release.

        Args:
            iteration: The optimizer's `iterations`, of any shape.

        Returns:
            Multiples of the clip norm, float64, of that shape.
        """
        noise_multiplier = self._optimizer.noise_multiplier.value
        noise_multiplier = tf.broadcast_to(noise_multiplier, tf.shape(iteration))
        for callback in self._callbacks:
            scheduled = callback.scheduled_noise_multiplier(iteration)
            if scheduled is not None:
                noise_multiplier = scheduled
        for callback in self._callbacks:
            of_query = callback.query_noise_multiplier(iteration)
            if of_query is not None:
                noise_multiplier = tf.where(
                    tf.math.is_finite(of_query),
                    folded(noise_multiplier, of_query),
                    noise_multiplier,
                )
        return noise_multiplier

    def to_come(self) -> np.ndarray:
        """Return what the noise of the coming steps counts as.

        Returns:
            Multiples of the clip norm, of at least one step; the last one is that of
            all that follow.
        """
        noise_multiplier = float(self._optimizer.noise_multiplier.numpy())
        if not self._changes:
            return np.array([noise_multiplier])
        iteration = int(self._optimizer.iterations.numpy())
        is_other_noise = noise_multiplier != self._noise_multiplier and not any(
            callback.sets == "noise_multiplier" for callback in self._callbacks
        )
        if is_other_noise or iteration < self._first:
            self._look_ahead()
        passed = min(iteration - self._first, len(self.planned) - 1)
        return np.array(self.planned[passed:])

    def name(self, steps: int) -> Hashable:
        """Tell the steps to come from others that were planned before.

        Args:
            steps: How many have been counted.

        Returns:
            Equal for equal steps.
        """
        if not self._changes:
            return float(self._optimizer.noise_multiplier.numpy())
        # The same steps, as long as each has its own number.
        shift = int(self._optimizer.iterations.numpy()) - steps
        return self._noise_multiplier, self._first, self._planned_steps, shift

    @property
    def _changes(self) -> bool:
        """Whether callbacks change what the noise of steps counts as."""
        return any(
            callback.has_own("scheduled_noise_multiplier", "query_noise_multiplier")
            for callback in self._callbacks
        )

    def _look_ahead(self) -> None:
        """Work out `planned`, from the optimizer's present `iterations` on.

        Its entries are multiples of the clip norm, one for each step; the least alone
        if their number is not known, and none if no callback changes them.
        """
        self._noise_multiplier = float(self._optimizer.noise_multiplier.numpy())
        self._first = int(self._optimizer.iterations.numpy())
        self.planned = np.array([])
        if not self._changes:
            return
        steps = self._planned_steps
        if steps is None:
            steps = _STEPS_WITHOUT_A_PLAN
        iterations = self._first + tf.range(max(steps, 1), dtype=tf.int64)
        self.planned = self.counted(iterations).numpy()
        if any(each.has_own("query_noise_multiplier") for each in self._callbacks):
            # The graph may round the other way.
            self.planned *= 1 - 1e-12
        if self._planned_steps is None:
            self.planned = self.planned.min(keepdims=True)
