"""Shows what a training costs, and ends it before it costs too much."""

import os

from tfdp import _validate
from tfdp._types import Logs
from tfdp.accounting import Project
from tfdp.accounting.projects import project_with_budget
from tfdp.distribute.workers import replicas_of
from tfdp.errors import NotPrivateError
from tfdp.model import DPModel
from tfdp.optimizers import DPOptimizer
from tfdp.runs.budgets import set_budget
from tfdp.runs.recorder import Budget
from tfdp.training.callback import StepCallback


class PrivacyBudget(StepCallback):
    """Logs epsilon after every epoch and stops before a target is overspent.

    The target becomes a number of steps that the training graph itself checks: a
    step beyond it does nothing, is not counted, and ends `fit`. So it also binds
    inside `steps_per_execution`, and it goes on binding whoever changes a weight of the
    model: `train_on_batch` and later calls of `fit`, other private models that have a
    part of it, and loops of one's own, which raise (in a graph, TensorFlow's
    `InvalidArgumentError`). It ends with another `PrivacyBudget` on the model, and with
    the private model itself. What earlier trainings have spent counts.

    With a `project` the budget is that of all models and searches on one data set, which
    several processes may train at once. Each call of `fit`, this one and later ones, then
    reserves the steps that it plans, or as many as there is room for, before the first of
    them, and gives back in the end what it has not used. Single steps have no room. Files
    do not tell the project: a model that was loaded is given it again.

    Guarantees:
        No step makes ``private.epsilon(delta)`` exceed `target_epsilon`, nor
        ``project.epsilon()`` the target of the project, and no release of a
        `PrivateEvaluation` does; room is kept for its next one.

    Args:
        delta: The delta of the guarantee, in (0, 1). Take one well below one over
            the number of examples.
        target_epsilon: The largest epsilon, positive; None only logs. With a project,
            both may be left out, or are a budget of the model alone beside it.
        project: A `tfdp.accounting.Project` that has a budget, or the path of its file.

    Raises:
        TypeError: If there is neither a delta nor a project.
        ValueError: If a number is out of its range, or the project has no budget.

    Example:
        >>> budget = tfdp.callbacks.PrivacyBudget(delta=1e-5, target_epsilon=3.0)
    """

    is_alone = True

    def __init__(
        self,
        delta: float | None = None,
        target_epsilon: float | None = None,
        *,
        project: Project | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.project = None
        if project is not None:
            self.project = project_with_budget(project)
            if (delta is None) != (target_epsilon is None):
                raise ValueError(
                    "Beside a project, `delta` and `target_epsilon` are a budget of the "
                    f"model alone. Received: delta={delta!r}, target_epsilon="
                    f"{target_epsilon!r}. Give both, or none: "
                    "`PrivacyBudget(project=...)`."
                )
            if delta is None:
                delta, target_epsilon = self.project.delta, self.project.target_epsilon
        self.delta = _validate.probability("delta", delta)
        if target_epsilon is not None:
            target_epsilon = _validate.positive("target_epsilon", target_epsilon)
        self.target_epsilon = target_epsilon

    def set_model(self, model: DPModel) -> None:
        """Refuse a model that is not private, or whose processes would all reserve."""
        if not isinstance(model, DPModel):
            raise NotPrivateError(
                "`PrivacyBudget` needs a private model. Received: model of type "
                f"{type(model).__name__}. Use `tfdp.DPModel(model).fit(...)`."
            )
        if self.project is not None and replicas_of(model.model).processes > 1:
            raise ValueError(
                "Only one process can reserve a part of a project's budget. Received: "
                "`PrivacyBudget` with a project for a model that several processes train. "
                "Use `target_epsilon=`, and `project.add(private)` in one of them."
            )
        super().set_model(model)

    def before_training(
        self, optimizer: DPOptimizer, planned_steps: int | None
    ) -> None:
        """Set the budget, so that it is enforced before the first step."""
        target = self.target_epsilon
        budget = None if target is None else Budget(self.delta, target, self.project)
        set_budget(optimizer.recorder, budget)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log what all steps up to now cost."""
        if logs is not None:
            logs["epsilon"] = self.model.epsilon(self.delta)
