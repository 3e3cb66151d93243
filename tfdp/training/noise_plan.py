"""What the noise of steps counts as, where callbacks change it."""

from collections.abc import Hashable

import numpy as np
import tensorflow as tf

from tfdp.optimizers import DPOptimizer
from tfdp.training.step import Session

# How far ahead the noise is looked at where the data do not tell the steps.
_STEPS_WITHOUT_A_PLAN = 1_000_000


class NoisePlan:
    """The noise multipliers that the steps of a training count with.

    Args:
        optimizer: Has the noise multiplier, unless a callback sets it.
        session: What the steps are made for; None where no callback acts in them.
        planned_steps: How many steps are to come; None if nobody knows.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        session: Session | None = None,
        planned_steps: int | None = None,
    ) -> None:
        """Look at the steps to come."""
        self._optimizer = optimizer
        # None where all steps have the optimizer's own noise.
        self._session = session if session and session.changes_noise else None
        self._planned_steps = planned_steps
        self._look_ahead()

    def to_come(self) -> np.ndarray:
        """Return what the noise of the coming steps counts as.

        Returns:
            Multiples of the clip norm, of at least one step; the last one is that of
            all that follow.
        """
        noise_multiplier = float(self._optimizer.noise_multiplier.numpy())
        session = self._session
        if session is None:
            counted = self._optimizer.mechanism.counted(
                tf.constant([noise_multiplier], tf.float64)
            )
            return np.asarray(counted)
        iteration = int(self._optimizer.iterations.numpy())
        is_scheduled = any(
            callback.sets == "noise_multiplier" for callback in session.callbacks
        )
        is_other_noise = noise_multiplier != self._noise_multiplier and not is_scheduled
        if is_other_noise or iteration < self._first:
            self._look_ahead()
        passed = min(iteration - self._first, len(self.planned) - 1)
        return self.planned[passed:]

    def name(self, steps: int) -> Hashable:
        """Tell the steps to come from others that were planned before.

        Args:
            steps: How many have been counted.

        Returns:
            Equal for equal steps.
        """
        if self._session is None:
            return float(self._optimizer.noise_multiplier.numpy())
        # The same steps, as long as each has its own number.
        shift = int(self._optimizer.iterations.numpy()) - steps
        return self._noise_multiplier, self._first, self._planned_steps, shift

    def _look_ahead(self) -> None:
        """Work out `planned`, from the optimizer's present `iterations` on.

        Its entries are multiples of the clip norm, one for each step; the least alone
        if their number is not known, and none if no callback changes them.
        """
        self._noise_multiplier = float(self._optimizer.noise_multiplier.numpy())
        self._first = int(self._optimizer.iterations.numpy())
        self.planned = np.array([])
        if self._session is None:
            return
        steps = self._planned_steps
        if steps is None:
            steps = _STEPS_WITHOUT_A_PLAN
        iterations = self._first + tf.range(max(steps, 1), dtype=tf.int64)
        self.planned = self._session.planned(iterations).numpy()
        if self._session.queries:
            # The graph may round the other way: the plan must not have more noise.
            self.planned *= 1 - 1e-12
        if self._planned_steps is None:
            # Nobody knows which step is the last: all count as those of least noise.
            self.planned = self.planned.min(keepdims=True)
