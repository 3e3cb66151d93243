"""Clip norms and noise multipliers that change from step to step."""

import abc
import contextlib
from collections.abc import Callable
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _validate
from tfdp._types import Tensor
from tfdp.optimizers import DPOptimizer
from tfdp.optimizers.arguments import checked_clip
from tfdp.training.callback import StepCallback

Schedule: TypeAlias = (
    keras.optimizers.schedules.LearningRateSchedule | Callable[[int], float]
)


class _Scheduler(StepCallback, abc.ABC):
    """Sets a variable of the optimizer to a value of its own for each step."""

    sets: str

    def __init__(self, schedule: Schedule, steps: int | None = None) -> None:
        super().__init__()
        if not callable(schedule):
            raise TypeError(
                "`schedule` must map the number of a step to a number. Received: "
                f"schedule={schedule!r}. Use `keras.optimizers.schedules."
                "PolynomialDecay(1.0, 1000, 0.1)` or a function."
            )
        self.schedule = schedule
        self.steps = None if steps is None else _validate.positive_int("steps", steps)
        with tf.init_scope(), _keras.unmirrored_variables():
            self._table = tf.Variable(
                tf.ones([1], tf.float64), shape=[None], trainable=False
            )

    @staticmethod
    @abc.abstractmethod
    def checked(value: float) -> float:
        """Return a value of the schedule, or raise a ValueError."""

    def before_training(
        self, optimizer: DPOptimizer, planned_steps: int | None
    ) -> None:
        """Compute the values of all steps that are planned, and check them.

        Args:
            optimizer: Of the model that trains.
            planned_steps: How many steps `fit` will take, None if it cannot know.

        Raises:
            ValueError: If a value is out of range, or their number not known.
        """
        steps = self.steps or planned_steps
        if steps is None:
            name = type(self).__name__
            raise ValueError(
                f"`{name}` must know for how many steps to compute values. Received: "
                f"steps=None, and data that do not tell. Use `{name}(schedule, "
                "steps=1000)` or `fit(..., steps_per_epoch=100)`."
            )
        # From the beginning: a backup may set the run back by any number of steps.
        values = self.values(int(optimizer.iterations.numpy()) + steps)
        if len(values):
            self._table.assign(values)

    def values(self, steps: int) -> np.ndarray:
        """Compute the schedule for the first steps, and check it.

        Args:
            steps: How many.

        Returns:
            The values, float64, of shape ``(steps,)``.

        Raises:
            ValueError: If a value is out of range.
        """
        values = tabulate(self.schedule, steps)
        for step, value in enumerate(values):
            try:
                self.checked(value)
            except ValueError as error:
                raise ValueError(f"At step {step} of the schedule: {error}") from error
        return values

    def before_step(self, optimizer: DPOptimizer) -> None:
        """Set the value of the step that begins, in the training graph."""
        getattr(optimizer, self.sets).assign(self._at(optimizer.iterations.value))

    def _at(self, iteration: Tensor) -> Tensor:
        last = tf.shape(self._table, tf.int64)[0] - 1
        return tf.gather(self._table, tf.minimum(tf.cast(iteration, tf.int64), last))


class ClipNormScheduler(_Scheduler):
    """Sets the clip norm of every step from a schedule.

    Any schedule that Keras has for learning rates is one for clip norms [1]_: a
    switch (`PiecewiseConstantDecay`), polynomial, exponential or cosine decay. The
    step is the optimizer's `iterations`, which are saved with the model, so a run
    that resumes goes on where it was. `fit` logs `l2_norm_clip`.

    Guarantees:
        Clipping and noise of a step read the same C, also inside
        `steps_per_execution`. The noise is ``noise_multiplier * C`` for every C, so
        epsilon does not depend on the schedule. All values are known, and checked,
        before the first step.

    Args:
        schedule: A `keras.optimizers.schedules` object or a function, from the
            number of a step, 0 at first, to a positive clip norm. It must not
            depend on private data.
        steps: How many steps need values, where the data do not tell `fit`; later
            ones keep the last value.

    Raises:
        TypeError: If `schedule` is neither.
        ValueError: If `steps` is not positive; and when `fit` begins, if a value is
            not positive and finite or the number of steps is not known.

    Example:
        >>> halved = keras.optimizers.schedules.PiecewiseConstantDecay(
        ...     [1000], [1.0, 0.5]
        ... )
        >>> scheduler = tfdp.callbacks.ClipNormScheduler(halved)

    References:
        .. [1] Du et al., "Dynamic Differential-Privacy Preserving SGD", 2021, which
           lets the clip norm decay. https://arxiv.org/abs/2111.00173
    """

    sets = "l2_norm_clip"
    checked = staticmethod(checked_clip)


class NoiseMultiplierScheduler(_Scheduler):
    """Sets the noise multiplier of every step from a schedule.

    The step is the optimizer's `iterations`, which are saved with the model, so a
    run that resumes goes on where it was. `fit` logs `noise_multiplier`.

    Guarantees:
        The ledger counts every step with a noise multiplier that the step's noise
        had at least. A schedule of up to 32 different values is counted as it is;
        of more, the least value in each of 32 bins of equal ratio stands for the
        others in it. A `PrivacyBudget` allows the steps whose planned noise fits.

    Args:
        schedule: A `keras.optimizers.schedules` object or a function, from the
            number of a step, 0 at first, to a positive noise multiplier. It must
            not depend on private data.
        steps: How many steps need values, where the data do not tell `fit`; later
            ones keep the last value.

    Raises:
        TypeError: If `schedule` is neither.
        ValueError: If `steps` is not positive; and when `fit` begins, if a value is
            not positive and finite or the number of steps is not known.

    Example:
        >>> less = keras.optimizers.schedules.PiecewiseConstantDecay([1000], [2.0, 1.0])
        >>> scheduler = tfdp.callbacks.NoiseMultiplierScheduler(less)

    References:
        .. [1] Du et al., "Dynamic Differential-Privacy Preserving SGD", 2021, which
           lets the noise decay. https://arxiv.org/abs/2111.00173
    """

    sets = "noise_multiplier"

    @staticmethod
    def checked(value: float) -> float:
        """Return a positive noise multiplier, or raise a ValueError."""
        return _validate.positive("noise_multiplier", value)

    def scheduled_noise_multiplier(self, iteration: Tensor) -> Tensor:
        """Return the schedule's values."""
        return self._at(iteration)


def tabulate(schedule: Schedule, steps: int) -> np.ndarray:
    """Compute a schedule for the first steps.

    Args:
        schedule: From the number of a step to its value.
        steps: How many.

    Returns:
        The values, float64, of shape ``(steps,)``.
    """

    # One by one and eagerly, Keras's schedules would take seconds for long runs.
    @tf.function(autograph=False)
    def values() -> Tensor:
        return tf.map_fn(
            lambda step: tf.cast(schedule(step), tf.float64),
            tf.range(steps),
            fn_output_signature=tf.TensorSpec([], tf.float64),
        )

    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        # A schedule of the user's own may be for plain numbers only.
        with contextlib.suppress(Exception):
            return np.asarray(values.get_concrete_function()())
    return np.array([_validate.number("schedule", schedule(n)) for n in range(steps)])
