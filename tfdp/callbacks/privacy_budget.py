"""Shows what a training costs, and ends it before it costs too much."""

from tfdp import _validate
from tfdp._types import Logs
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

    Guarantees:
        No step makes ``private.epsilon(delta)`` exceed `target_epsilon`, and no release
        of a `PrivateEvaluation`; room is kept for its next one.

    Args:
        delta: The delta of the guarantee, in (0, 1). Take one well below one over
            the number of examples.
        target_epsilon: The largest epsilon, positive; None only logs.

    Raises:
        ValueError: If a number is out of its range.

    Example:
        >>> budget = tfdp.callbacks.PrivacyBudget(delta=1e-5, target_epsilon=3.0)
    """

    def __init__(self, delta: float, target_epsilon: float | None = None) -> None:
        super().__init__()
        self.delta = _validate.probability("delta", delta)
        if target_epsilon is not None:
            target_epsilon = _validate.positive("target_epsilon", target_epsilon)
        self.target_epsilon = target_epsilon

    def set_model(self, model: DPModel) -> None:
        """Refuse a model that is not private."""
        if not isinstance(model, DPModel):
            raise NotPrivateError(
                "`PrivacyBudget` needs a private model. Received: model of type "
                f"{type(model).__name__}. Use `tfdp.DPModel(model).fit(...)`."
            )
        super().set_model(model)

    def before_training(
        self, optimizer: DPOptimizer, planned_steps: int | None
    ) -> None:
        """Set the budget, so that it is enforced before the first step."""
        target = self.target_epsilon
        budget = None if target is None else Budget(self.delta, target)
        set_budget(optimizer.recorder, budget)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log what all steps up to now cost."""
        if logs is not None:
            logs["epsilon"] = self.model.epsilon(self.delta)
