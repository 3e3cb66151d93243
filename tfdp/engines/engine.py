"""What an engine does; each of them is one of these."""

import abc
from typing import ClassVar, TypeAlias

import keras

from tfdp._types import Nest, Tensor
from tfdp.engines.explanation import Explanation
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective

# Clipped sums in the order of the variables, the units' norms before clipping with
# shape (U,), and the model's outputs for all rows.
Clipped: TypeAlias = tuple[list[Tensor], Tensor, Nest]


class Engine(abc.ABC):
    """Turns a batch and a clip norm into a clipped sum.

    Subclass it to write an engine. Before the first step its sums and norms are
    compared with those of single rows. It is asked while a graph is traced, never
    eagerly, and the graph runs.

    Attributes:
        name: What messages and `DPModel.explain` call it.
        notes_what_it_reads: Whether `clip_and_sum` tells a trace that it is part of
            what `read` would return. Then the graph of the proof can be run.
    """

    name: str
    notes_what_it_reads: ClassVar[bool] = False

    @abc.abstractmethod
    def clip_and_sum(
        self,
        objective: Objective,
        batch: Batch,
        *,
        l2_norm_clip: Tensor,
        rows_per_unit: int | Tensor,
    ) -> Clipped:
        """Sum the clipped gradients of the units of a batch.

        Args:
            objective: What to differentiate.
            batch: Its number of rows is a multiple of `rows_per_unit`.
            l2_norm_clip: Radius of the clip ball, a positive scalar tensor.
            rows_per_unit: Consecutive rows whose mean loss is one unit's loss. A
                unit without a real row contributes nothing.

        Returns:
            The clipped sums in the order of the variables, the units' norms
            before clipping with shape ``(U,)``, and the model's outputs for all
            rows.

        Raises:
            UnsupportedLayerError: If some layer's gradients are out of reach.
        """

    @abc.abstractmethod
    def read(self, objective: Objective, batch: Batch) -> list[Tensor]:
        """Compute all that norms and sums are made of, each example a unit.

        Before the first step it is proven, on the graph of this method, that each entry
        depends on its own row alone.

        Args:
            objective: What to differentiate.
            batch: Its rows.

        Returns:
            Tensors with one entry on the first axis for each row; none where the engine
            evaluates each unit alone.
        """

    @abc.abstractmethod
    def explain(self, model: keras.Model, signature: Nest) -> list[Explanation]:
        """Say what each layer's gradients take; see `DPModel.explain`.

        Args:
            model: The model.
            signature: Nest of `tf.TensorSpec` of its inputs.
        """
