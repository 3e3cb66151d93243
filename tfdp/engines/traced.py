"""A pass of an engine that was traced for its proof, to be run as it is."""

import dataclasses
from collections.abc import Callable

from tfdp._types import Tensor
from tfdp.engines.engine import Clipped, Engine
from tfdp.losses.objective import Batch, Objective


@dataclasses.dataclass(frozen=True, eq=False)
class TracedPass:
    """What an engine does with the rows of a pass, as a function of TensorFlow.

    The graph in which rows were proven to stay apart is then the graph that runs, and
    the model is traced once.

    Attributes:
        engine: Whose pass it is.
        objective: What is differentiated in it.
        rows: How many rows it was traced for; None for any number.
        function: From ``(x, y, sample_weight, is_padding, l2_norm_clip)`` to what
            `Engine.clip_and_sum` returns, each row a unit.
    """

    engine: Engine
    objective: Objective
    rows: int | None
    function: Callable[..., Clipped]

    def fits(
        self,
        engine: Engine,
        objective: Objective,
        rows: int | None,
        rows_per_unit: int | Tensor,
    ) -> bool:
        """Tell whether it is what an engine would do.

        Args:
            engine: The engine.
            objective: What is to be differentiated.
            rows: How many there are, if that is static.
            rows_per_unit: Consecutive rows that are one unit.

        Returns:
            False if `Engine.clip_and_sum` has to be called.
        """
        return (
            engine == self.engine
            and objective is self.objective
            and self.rows in (None, rows)
            and isinstance(rows_per_unit, int)
            and rows_per_unit == 1
        )

    def clip_and_sum(self, batch: Batch, l2_norm_clip: Tensor) -> Clipped:
        """Do what `Engine.clip_and_sum` does, for units of one row."""
        return self.function(*batch, l2_norm_clip)
