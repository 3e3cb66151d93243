"""A pass of an engine whose graph was proven, to be run as it is."""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdp._types import Tensor
from tfdp.engines.engine import Clipped, Engine
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective


@dataclasses.dataclass(frozen=True, eq=False)
class TracedPass:
    """What an engine does with the rows of a pass, as a function of TensorFlow.

    The graph in which rows were proven to stay apart is the graph that runs: whatever
    code of layers and losses would do if it were asked again, it does what it did then.

    Attributes:
        engine: Whose pass it is.
        objective: What is differentiated in it.
        signature: `tf.TensorSpec` of its rows. How many they are may be open.
        rows_per_unit: Consecutive rows that are one unit.
        function: From ``(x, y, sample_weight, is_padding, l2_norm_clip)`` to what
            `Engine.clip_and_sum` returns; traced once and for all.
        moved: What it moves on, so that the next pass finds it moved: variables that it
            assigns, and other state.
    """

    engine: Engine
    objective: Objective
    signature: Batch
    rows_per_unit: int | Tensor
    function: Callable[..., Clipped]
    moved: frozenset[str] = frozenset()

    def fits(
        self,
        engine: Engine,
        objective: Objective,
        batch: Batch,
        rows_per_unit: int | Tensor,
    ) -> bool:
        """Tell whether it is what an engine would do.

        Args:
            engine: The engine.
            objective: What is to be differentiated.
            batch: The rows, or `tf.TensorSpec` of them.
            rows_per_unit: Consecutive rows that are one unit.

        Returns:
            False if another pass has to be proven.
        """
        return (
            engine == self.engine
            and isinstance(rows_per_unit, int)
            and rows_per_unit == self.rows_per_unit
            # An objective is made anew for views; what it is made of is not.
            and all(
                getattr(objective, field.name) is getattr(self.objective, field.name)
                for field in dataclasses.fields(objective)
            )
            and _takes(self.signature, batch)
        )

    def clip_and_sum(self, batch: Batch, l2_norm_clip: Tensor) -> Clipped:
        """Do what `Engine.clip_and_sum` does, with rows that fit."""
        return self.function(*batch, l2_norm_clip)


def _takes(signature: Batch, batch: Batch) -> bool:
    """Tell whether rows are such as a signature allows, in the same nest."""
    # A list is no tuple: code may ask what it has been given.
    nests = [
        repr(keras.tree.map_structure(lambda leaf: leaf is None, tuple(each)))
        for each in (signature, batch)
    ]
    return nests[0] == nests[1] and all(
        spec is None or tf.TensorSpec(leaf.shape, leaf.dtype).is_subtype_of(spec)
        for spec, leaf in zip(
            keras.tree.flatten(tuple(signature)),
            keras.tree.flatten(tuple(batch)),
            strict=True,
        )
    )
