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
from tfdp._types import Array, Tensor
from tfdp.accounting import Segment, affordable_count
from tfdp.accounting.calibration import MOST_COUNT
from tfdp.accounting.runs import ledger_of, union
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
        if each.counter.limit.reason is not None or _binding(each):
            each.counter.revoke()


def lift_if_free(recorder: LedgerRecorder) -> bool:
    """Tell whether no budget binds a training, which then has no limit.

    Args:
        recorder: Of the training.

    Returns:
        False if one does.
    """
    if _binding(recorder):
        return False
    if recorder.counter.limit.reason is not None:
        recorder.counter.limit.lift()
    return True


def enforce_budget(
    recorder: LedgerRecorder,
    noise_multipliers: Array,
    plan: Hashable = "only one",
    *,
    steps: int = 1,
) -> None:
    """Limit a training to what the budgets that bind it have room for.

    Args:
        recorder: Of the training.
        noise_multipliers: That the steps to come count with, over the sensitivity; the
            last one is that of all that follow.
        plan: Tells these steps from others that were planned before.
        steps: How many are about to be taken at once.

    Raises:
        PrivacyBudgetError: If there is no room for a single one.
    """
    if lift_if_free(recorder):
        return
    counter, limit = recorder.counter, recorder.counter.limit
    binding = _binding(recorder)
    present = (
        plan,
        tuple(binding.values()),
        _unbound_steps(binding),
        recorder.reserved,
    )
    left = counter.outstanding()
    needed = counter.releases_begun_by(steps)
    is_enough = limit.is_final or (left is not None and left.count >= needed)
    if limit.reason != present or not is_enough:
        _limit(recorder, binding, noise_multipliers, needed)
        limit.reason = present
    if not counter.has_room():
        if any(each.lacks_project for each in binding.values()):
            raise PrivacyBudgetError(
                "A budget that was a part of a project's binds with its project only, which "
                "files do not tell. Received: project=None in a model that was loaded. Give "
                "it again: `private.fit(..., callbacks=[tfdp.callbacks.PrivacyBudget("
                "project='project.json')])`."
            )
        spent = {each: each.ledger.epsilon(of.delta) for each, of in binding.items()}
        most = max(spent, key=spent.__getitem__)
        budget = binding[most]
        if budget.project is not None:
            raise PrivacyBudgetError(
                "The training has no part of the project's budget left. Received: "
                f"project={str(budget.project.path)!r}, target_epsilon="
                f"{budget.target_epsilon:g}, delta={budget.delta:g}. Only `fit` reserves "
                "a part. If it had none either, the project has spent its budget: "
                f"`python -m tfdp.accounting.project {budget.project.path}`."
            )
        raise PrivacyBudgetError(
            "The privacy budget has no room for another step. Received: "
            f"target_epsilon={budget.target_epsilon:g}, delta={budget.delta:g}, "
            f"spent epsilon={spent[most]:.4g}. Stop here, or fit the model that has the "
            "budget with a larger target: `tfdp.callbacks.PrivacyBudget(delta, "
            "target_epsilon=...)`."
        )


def has_room_for(recorder: LedgerRecorder, release: Segment) -> bool:
    """Tell whether budgets have room for what is released beside the steps.

    Limits that bind the same budgets are worked out anew afterwards.

    Args:
        recorder: Of the training that it is released from.
        release: It; room that was kept for it does not count.

    Returns:
        Whether all budgets have.
    """
    binding = _binding(recorder)
    others = [each for each in list(living) if _shares(each, binding)]
    for each in others:
        # What a limit allows beyond what has begun may not be taken any more.
        each.counter.revoke()
    kept = [each for which in others for each in which.reserved]
    if release in kept:
        kept.remove(release)
    own = {recorder.run: recorder.own_run()}
    return all(
        ledger_of(union(each.all_runs(), own)).add(release, *kept).epsilon(budget.delta)
        <= budget.target_epsilon
        and not budget.lacks_project
        for each, budget in binding.items()
    )


def enforce_budget_of_step(recorder: LedgerRecorder, noise_multiplier: float) -> None:
    """Do what `enforce_budget` does, for a step of a loop of one's own.

    Args:
        recorder: Of the training.
        noise_multiplier: That the step will be recorded with.

    Raises:
        PrivacyBudgetError: If there is no room for it.
    """
    enforce_budget(recorder, np.array([noise_multiplier]), noise_multiplier)


def enforce_budgets_of_loops(recorder: LedgerRecorder) -> None:
    """Give traced loops a limit that change what the budget of a model covers.

    What XLA compiles cannot ask for one.

    Args:
        recorder: Of the model.
    """
    for other in recorder.recorders():
        if other is not recorder and other.is_in_a_graph:
            last = float(other.counter.open_noise_multiplier.numpy())
            with contextlib.suppress(PrivacyBudgetError):
                enforce_budget_of_step(other, last)


def room_in_graph(recorder: LedgerRecorder, noise_multiplier: Tensor) -> Tensor:
    """Tell in a graph whether there is room for a step, and ask for it if need be.

    Args:
        recorder: Of the training.
        noise_multiplier: That the step will be recorded with, a float64 scalar.

    Returns:
        A scalar bool tensor.
    """
    recorder.is_in_a_graph = True
    has_room = recorder.counter.has_room(noise_multiplier)
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


# By the recorders of the models that have them, always in the same order.
_Budgets = dict[LedgerRecorder, Budget]


def _binding(recorder: LedgerRecorder) -> _Budgets:
    """Return the budgets that cover what a training changes."""
    of_models = [
        (each, each.budget, weights)
        for each in living
        if each.budget is not None and (weights := each.weights()) is not None
    ]
    if not of_models:
        return {}
    own = recorder.history
    changed = {source for source in own.sources if own in source.sources}
    return {
        each: budget
        for each, budget, weights in sorted(of_models, key=lambda found: found[0].run)
        if each is recorder or not changed.isdisjoint(map(history_of, weights))
    }


def _shares(recorder: LedgerRecorder, budgets: _Budgets) -> bool:
    """Tell whether some of these budgets bind a training, too."""
    return not budgets.keys().isdisjoint(_binding(recorder))


def _unbound_steps(binding: _Budgets) -> int:
    """Count the steps that these budgets pay for but cannot limit.

    Returns:
        Steps that change weights which are only read where the budgets hold, and what
        was released beside them.
    """
    recorders = {each for of_model in binding for each in of_model.recorders()}
    return sum(
        each.steps + each.releases
        for each in recorders
        if each.steps and not _shares(each, binding)
    )


def _limit(
    recorder: LedgerRecorder,
    binding: _Budgets,
    noise_multipliers: Array,
    needed: int,
) -> None:
    """Work out how many releases may begin, of which so many are needed at once."""
    counter = recorder.counter
    if counter.steps_per_release > 1:
        # Where a pass begins and ends among these steps may change.
        noise_multipliers = np.array([noise_multipliers.min()])
    others = [
        each for each in list(living) if each is not recorder and _shares(each, binding)
    ]
    outstanding = [each.counter.outstanding() for each in others]
    reserved = [left for left in outstanding if left is not None]
    releases = [each for which in (recorder, *others) for each in which.reserved]
    count = _affordable(recorder, binding, noise_multipliers, reserved + releases)
    if count < needed and reserved:
        # They ask again if they go on.
        for each in others:
            each.counter.revoke()
        reserved = []
        count = _affordable(recorder, binding, noise_multipliers, releases)
    # Who shares a budget gets half of what is left, so that others seldom have to ask.
    granted = min(count, max(needed, (count + 1) // 2)) if others else count
    least = noise_multipliers[: max(granted, 1)].min()
    counter.allow(
        granted,
        noise_multiplier=float(least),
        is_final=granted == count and not reserved,
    )


def _affordable(
    recorder: LedgerRecorder,
    binding: _Budgets,
    noise_multipliers: Array,
    reserved: list[Segment],
) -> int:
    """Return how many more releases all budgets have room for.

    Returns:
        Their number; -1 if not even the rest of a pass that has begun.
    """
    counter = recorder.counter
    own = {recorder.run: recorder.own_run(noise_multipliers.min())}
    # Beyond all plans, but small if there is one: large counts take long.
    planned = counter.planned_releases
    most = MOST_COUNT
    if planned is not None:
        most = 2 * max(planned - counter.releases_begun, 1)
    counts = []
    for each, budget in binding.items():
        ledger = ledger_of(union(each.all_runs(), own)).add(*reserved).merged()
        if ledger.epsilon(budget.delta) > budget.target_epsilon:
            return -1
        count = affordable_count(
            ledger,
            Segment(counter.scheme, 1, 1.0),
            budget.target_epsilon,
            budget.delta,
            noise_multipliers=counter.recorded(noise_multipliers),
            most=most,
        )
        least = float(counter.recorded(noise_multipliers)[: max(count, 1)].min())
        counts.append(int(min(count, budget.has_reserved(recorder, least))))
    return min(counts)
