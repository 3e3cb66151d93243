"""What privacy budgets leave for the steps of a training.

A budget belongs to a private model, and covers whoever changes its weights: the model
itself, other models that have some of them, and loops of one's own. Each of them gets a
limit, which the graph of its steps reads. What a limit still allows is taken as spent
when the limit of another one is worked out, so that no order of steps overspends.
"""

import contextlib
from collections.abc import Hashable

import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor
from tfdp.accounting import Segment, affordable_count
from tfdp.accounting.runs import Run, ledger_of, union
from tfdp.errors import PrivacyBudgetError
from tfdp.runs.histories import history_of
from tfdp.runs.recorder import Budget, LedgerRecorder, living


def set_budget(recorder: LedgerRecorder, budget: Budget | None) -> None:
    """Set the budget of a model.

    Args:
        recorder: Of the model.
        budget: None for none.
    """
    recorder.budget = budget
    for each in list(living):
        # Whoever steps has to ask again.
        if each.limited_by is not None or _binding(each):
            each.revoke()


def enforce_budget(
    recorder: LedgerRecorder,
    noise_multipliers: np.ndarray,
    plan: Hashable = "only one",
    *,
    steps: int = 1,
) -> None:
    """Limit a training to what the budgets that bind it have room for.

    Args:
        recorder: Of the training.
        noise_multipliers: That the steps to come count with, as multiples of the clip
            norm; the last one is that of all that follow.
        plan: Tells these steps from others that were planned before.
        steps: How many are about to be taken at once.

    Raises:
        PrivacyBudgetError: If there is no room for a single one.
    """
    binding = _binding(recorder)
    if not binding:
        if recorder.limited_by is not None:
            recorder.lift_limit()
        return
    budgets = tuple(each.budget for each in binding)
    present = (plan, budgets, _unbound_steps(binding))
    left = recorder.outstanding()
    needed = recorder.items_begun_by(steps)
    is_enough = recorder.limit_is_final or (left is not None and left.count >= needed)
    if recorder.limited_by != present or not is_enough:
        _limit(recorder, binding, noise_multipliers, steps)
        recorder.limited_by = present
    if not recorder.has_room():
        spent = [
            each.ledger.epsilon(each.budget.delta) for each in binding if each.budget
        ]
        most = int(np.argmax(spent))
        budget = binding[most].budget
        assert budget is not None  # noqa: S101
        raise PrivacyBudgetError(
            "The privacy budget has no room for another step. Received: "
            f"target_epsilon={budget.target_epsilon:g}, delta={budget.delta:g}, "
            f"spent epsilon={spent[most]:.4g}. Stop here, or fit the model that has the "
            "budget with a larger target: `tfdp.callbacks.PrivacyBudget(delta, "
            "target_epsilon=...)`."
        )


def enforce_budget_of_step(recorder: LedgerRecorder, noise_multiplier: float) -> None:
    """Do what `enforce_budget` does, for a step of a loop of one's own.

    Args:
        recorder: Of the training.
        noise_multiplier: That the step will be recorded with.

    Raises:
        PrivacyBudgetError: If there is no room for it.
    """
    in_clips = recorder.in_clips(noise_multiplier)
    enforce_budget(recorder, np.array([in_clips]), noise_multiplier)


def enforce_budgets_of_loops(recorder: LedgerRecorder) -> None:
    """Give traced loops a limit that change what the budget of a model covers.

    What XLA compiles cannot ask for one.

    Args:
        recorder: Of the model.
    """
    for other in recorder.recorders():
        if other is not recorder and other.is_in_a_graph:
            with contextlib.suppress(PrivacyBudgetError):
                enforce_budget_of_step(other, other.last_noise_multiplier)


def room_in_graph(recorder: LedgerRecorder, noise_multiplier: Tensor) -> Tensor:
    """Tell in a graph whether there is room for a step, and ask for it if need be.

    Args:
        recorder: Of the training.
        noise_multiplier: That the step will be recorded with, a float64 scalar.

    Returns:
        A scalar bool tensor.
    """
    recorder.is_in_a_graph = True
    has_room = recorder.has_room(recorder.in_clips(noise_multiplier))
    if _keras.inside_xla():
        return has_room

    def ask(noise_multiplier: Tensor) -> bool:
        try:
            enforce_budget_of_step(recorder, float(noise_multiplier))
        except PrivacyBudgetError:
            return False
        return True

    def asked() -> Tensor:
        answer = tf.py_function(ask, [noise_multiplier], tf.bool)
        return tf.ensure_shape(answer, [])

    return tf.cond(has_room, lambda: tf.constant(True), asked)


def _binding(recorder: LedgerRecorder) -> list[LedgerRecorder]:
    """Return the recorders of the models whose budget covers what a training changes."""
    of_models = [
        (each, weights)
        for each in living
        if each.budget is not None and (weights := each.weights()) is not None
    ]
    if not of_models:
        return []
    own = recorder.history
    changed = {source for source in own.sources if own in source.sources}
    binding = [
        each
        for each, weights in of_models
        if each is recorder or not changed.isdisjoint(map(history_of, weights))
    ]
    return sorted(binding, key=lambda each: each.run)


def _unbound_steps(binding: list[LedgerRecorder]) -> int:
    """Return how many steps cost of these budgets though none of them binds them.

    Returns:
        Steps that change weights which are only read where the budgets hold.
    """
    recorders = {each for of_model in binding for each in of_model.recorders()}
    return sum(
        each.steps
        for each in recorders
        if each.steps and set(_binding(each)).isdisjoint(binding)
    )


def _limit(
    recorder: LedgerRecorder,
    binding: list[LedgerRecorder],
    noise_multipliers: np.ndarray,
    steps: int,
) -> None:
    if recorder.has_passes:
        # Where a pass begins and ends among these steps may change.
        noise_multipliers = np.array([noise_multipliers.min()])
    others = [
        each
        for each in list(living)
        if each is not recorder and not set(_binding(each)).isdisjoint(binding)
    ]
    needed = recorder.items_begun_by(steps)
    reserved = [left for each in others if (left := each.outstanding()) is not None]
    count = _affordable(recorder, binding, noise_multipliers, reserved)
    if count < needed and reserved:
        # They ask again if they go on.
        for each in others:
            each.revoke()
        reserved = []
        count = _affordable(recorder, binding, noise_multipliers, reserved)
    # Who shares a budget gets half of what is left, so that others seldom have to ask.
    granted = min(count, max(needed, (count + 1) // 2)) if others else count
    least = noise_multipliers[: max(granted, 1)].min()
    recorder.limit(granted, noise_multiplier=float(least))
    recorder.limit_is_final = granted == count and not reserved


def _affordable(
    recorder: LedgerRecorder,
    binding: list[LedgerRecorder],
    noise_multipliers: np.ndarray,
    reserved: list[Segment],
) -> int:
    """Return how many more items all budgets have room for.

    Returns:
        Their number; -1 if not even the rest of a pass that has begun.
    """
    own: dict[str, Run] = {recorder.run: recorder.run_with(noise_multipliers.min())}
    counts = []
    for each in binding:
        budget = each.budget
        assert budget is not None  # noqa: S101
        ledger = ledger_of(union(each.all_runs(), own)).add(*reserved).merged()
        if ledger.epsilon(budget.delta) > budget.target_epsilon:
            return -1
        count = affordable_count(
            ledger,
            Segment(recorder.scheme, 1, 1.0),
            budget.target_epsilon,
            budget.delta,
            noise_multipliers=recorder.recorded(noise_multipliers),
            most=recorder.count_worth_knowing(),
        )
        counts.append(count)
    return min(counts)
