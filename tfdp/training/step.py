"""Clipping of a logical batch: in passes, over views, on all replicas, to one sum."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdp import _keras, engines
from tfdp.clipping import ClippedSum, clip_as_tensor
from tfdp.distribute.replicas import Replicas, summed
from tfdp.engines.passes import (
    OnOutputs,
    number_of_rows,
    run_in_passes,
    run_whole,
)
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Batch, Objective
from tfdp.training.augmentation import Augmentation
from tfdp.training.plan import Plan


@dataclasses.dataclass(frozen=True)
class BatchClipper:
    """Clips the units of a batch and adds them up, however the batch is cut.

    Attributes:
        model: The model that is trained.
        engine: Clips the rows of a pass.
        may_change_engine: Whether the vectorized engine takes the passes that
            `engine` turns out not to support.
        plan: Examples of a unit, and rows of a pass.
        replicas: Each has a share of the batch.
        augmentation: Makes the views of each example, if any.
        jit_compile: Whether XLA compiles the passes.
    """

    model: keras.Model
    engine: engines.Engine
    may_change_engine: bool
    plan: Plan
    replicas: Replicas
    augmentation: Augmentation | None
    jit_compile: bool

    def clip(
        self,
        data: Any,
        l2_norm_clip: tf.Tensor,
        objective: Objective,
        on_outputs: OnOutputs | None = None,
    ) -> ClippedSum:
        """Clip and add up the units of a batch.

        Args:
            data: ``(x, y, sample_weight)``, what each replica has of the batch.
            l2_norm_clip: The clip norm, a scalar tensor.
            objective: What is differentiated, for rows that are no views.
            on_outputs: Sees what the model predicts, on each replica.

        Returns:
            On each replica the sums of all, and the norms of its own units.
        """
        return self._on_all(
            lambda rows: self._on_one(rows, l2_norm_clip, objective, on_outputs), data
        )

    def states(self) -> list[Any]:
        """List the variables that decide what the model and the views draw."""
        states: list[Any] = _keras.states(self.model)
        if self.augmentation is not None:
            states += self.augmentation.seed_states()
        return states

    def later(
        self, data: Any, objective: Objective, states: list[Any]
    ) -> Callable[..., ClippedSum]:
        """Return a function that clips as it would be done now.

        Args:
            data: See `clip`; what the function clips by default.
            objective: See `clip`.
            states: Variables that it finds as they are now, and leaves as they were.

        Returns:
            A function of the clip norm and of other data, whole batches in every
            process; it returns what the first replica sees, but the norms of all.
        """

        def read() -> list[tf.Tensor]:
            return [tf.identity(state.value) for state in states]

        def assign(values: list[tf.Tensor]) -> None:
            for state, value in zip(states, values, strict=True):
                state.assign(value)

        values_now = self.replicas.run(read)

        def clip(l2_norm_clip: tf.Tensor, whole: Any = None) -> ClippedSum:
            def of_replica(values_now: list[tf.Tensor], rows: Any) -> ClippedSum:
                values_then = read()
                assign(values_now)
                if whole is not None:
                    rows = self.replicas.share_of(
                        whole, rows_per_unit=self.plan.examples_per_unit
                    )
                clipped_sum = self._on_one(rows, l2_norm_clip, objective, None)
                assign(values_then)
                return clipped_sum

            return self.joined(self._on_all(of_replica, values_now, data))

        return clip

    def joined(self, clipped_sum: ClippedSum) -> ClippedSum:
        """Return what the first replica has of a sum, with the norms of all."""
        first: ClippedSum = self.replicas.first(clipped_sum)
        return first._replace(norms=self.replicas.joined(clipped_sum.norms))

    def _on_all(self, clip: Callable[..., ClippedSum], *args: Any) -> ClippedSum:
        """Add up what all replicas have clipped; each gets the sum."""

        def of_replica(*args: Any) -> ClippedSum:
            own = clip(*args)
            return own._replace(gradients=summed(own.gradients))

        with _keras.losses_of_one_replica():
            clipped_sum: ClippedSum = self.replicas.run(of_replica, *args)
        return clipped_sum

    def _on_one(
        self,
        data: Any,
        l2_norm_clip: tf.Tensor,
        objective: Objective,
        on_outputs: OnOutputs | None,
    ) -> ClippedSum:
        """Clip and add up the units of any number of rows, on one replica."""
        examples_per_unit, physical_batch_size = self.plan
        rows_per_unit = examples_per_unit
        augmentation = self.augmentation
        if augmentation is not None:
            rows_per_unit *= augmentation.multiplicity
            objective = dataclasses.replace(objective, views=augmentation.multiplicity)
        clip = clip_as_tensor(l2_norm_clip, objective.variables)

        def run_pass(batch: Batch, clip: tf.Tensor) -> Any:
            options = {"l2_norm_clip": clip, "rows_per_unit": rows_per_unit}
            try:
                return self.engine.clip_and_sum(objective, batch, **options)
            except UnsupportedLayerError as error:
                # The data may have axes of unknown length, where the sample had not.
                if not self.may_change_engine:
                    raise
                logging.warning(
                    "tfdp takes whole gradients of each example of model `%s`, which "
                    "needs more time and memory: %s",
                    self.model.name,
                    error,
                )
            return engines.get("vectorized").clip_and_sum(objective, batch, **options)

        if self.jit_compile:
            run_pass = tf.function(run_pass, autograph=False, jit_compile=True)

        def run_views(batch: Batch) -> Any:
            if augmentation is None:
                return run_pass(batch, clip)
            sums, norms, y_pred = run_pass(augmentation.views(batch), clip)
            return sums, norms, augmentation.first(y_pred)

        if physical_batch_size is None:
            sums, norms, y_pred = run_whole(
                run_views,
                data,
                rows_per_unit=examples_per_unit,
            )
            if on_outputs is not None:
                on_outputs(data, tf.convert_to_tensor(number_of_rows(data)), y_pred)
        else:
            sums, norms = run_in_passes(
                run_views,
                data,
                rows_per_unit=examples_per_unit,
                physical_batch_size=physical_batch_size,
                on_outputs=on_outputs,
                shared_states=_keras.shared_seed_states(self.model),
            )
        return ClippedSum(sums, norms, clip, examples_per_unit)
