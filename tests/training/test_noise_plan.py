"""What the noise of steps is planned to count as."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfdp.accounting.levels import folded
from tfdp.callbacks import AdaptiveMedianClip
from tfdp.optimizers import DPSGD
from tfdp.training.callback import StepCallback
from tfdp.training.noise_plan import NoisePlan
from tfdp.training.step import Session


class Lowered(StepCallback):
    """Sets noise multipliers of 4, 3, 2, ..."""

    sets = "noise_multiplier"

    def scheduled_noise_multiplier(self, iteration):
        return 4.0 - tf.cast(iteration, tf.float64)


LOWERED = Lowered()
MEDIAN = AdaptiveMedianClip([0, 1, 2], histogram_noise_multiplier=3.0, every=2)


def plan_of(optimizer, *callbacks, planned_steps=None):
    """A plan, for which a session is no more than its optimizer and callbacks."""
    nothing = [None] * sum(
        field.default is dataclasses.MISSING for field in dataclasses.fields(Session)
    )
    session = dataclasses.replace(
        Session(*nothing),
        optimizer=optimizer,
        mechanism=optimizer.mechanism,
        callbacks=callbacks,
        queries=(MEDIAN.query,) * (MEDIAN in callbacks),
    )
    return NoisePlan(optimizer, session, planned_steps)


def optimizer(iterations=0):
    made = DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=2.0)
    made.iterations.assign(iterations)
    return made


def test_without_callbacks_all_steps_have_the_optimizers_noise():
    plan = NoisePlan(optimizer())
    assert plan.to_come().tolist() == [2.0]
    assert plan.planned.size == 0
    assert plan.name(0) == plan.name(7) == 2.0


def test_noise_that_a_callback_sets():
    plan = plan_of(optimizer(1), LOWERED, planned_steps=3)
    assert plan.planned.tolist() == plan.to_come().tolist() == [3.0, 2.0, 1.0]


def test_what_callbacks_release_is_folded_in():
    plan = plan_of(optimizer(), LOWERED, MEDIAN, planned_steps=3)
    steps = tf.range(3, dtype=tf.int64)
    own = np.array([4.0, 3.0, 2.0])
    expected = np.where([True, False, True], folded(own, 3.0), own)
    np.testing.assert_allclose(plan._session.planned(steps), expected, rtol=1e-12)
    np.testing.assert_allclose(plan.planned, expected, rtol=1e-11)
    assert np.all(plan.planned < expected)


def test_steps_nobody_has_counted_are_taken_for_the_worst():
    plan = plan_of(optimizer(), MEDIAN)
    assert plan.planned.shape == (1,)
    assert plan.planned[0] == pytest.approx(folded(2.0, 3.0))


def test_steps_that_are_over_are_not_to_come():
    used = optimizer()
    plan = plan_of(used, LOWERED, planned_steps=3)
    used.iterations.assign(2)
    assert plan.to_come().tolist() == [2.0]
    used.iterations.assign(100)
    assert plan.to_come().tolist() == [2.0]


def test_a_restored_optimizer_has_earlier_steps_to_come():
    used = optimizer(2)
    plan = plan_of(used, LOWERED, planned_steps=2)
    used.iterations.assign(1)
    assert plan.to_come().tolist() == [3.0, 2.0]


def test_another_noise_multiplier_is_another_plan():
    used = optimizer()
    plan = plan_of(used, MEDIAN, planned_steps=2)
    before = plan.name(0)
    assert plan.name(1) != before  # Other steps than the optimizer's have the numbers.
    used.noise_multiplier = 1.0
    assert plan.to_come()[0] < folded(1.0, 3.0)
    assert plan.name(0) != before
