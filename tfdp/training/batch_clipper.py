"""Clips the units of a batch and adds them up, in passes, on replicas, with views."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection

import keras
import tensorflow as tf
from absl import logging

from tfdp import _keras, _seeds, engines
from tfdp._types import Nest, Tensor, Variable
from tfdp.ascent.losses import Ascent, AscentLoss
from tfdp.checks.engine import proven_pass
from tfdp.checks.following import traced_pass
from tfdp.clipping import ClippedSum, clip_as_tensor
from tfdp.distribute.replicas import ONE_DEVICE, Replicas, summed
from tfdp.engines import passes
from tfdp.engines.passes import OnOutputs
from tfdp.engines.traced import TracedPass
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.batch import Batch, number_of_rows
from tfdp.losses.objective import Objective
from tfdp.training.augmentation import Augmentation

# Passes that are remembered: data may have many lengths, each with a graph of its own.
_MOST_PASSES = 128


@dataclasses.dataclass(frozen=True)
class BatchClipper:
    """Clips the units of a batch and adds them up, however the batch is cut.

    Attributes:
        model: The model that is trained.
        engine: Clips the rows of a pass.
        may_change_engine: Whether the vectorized engine takes the passes that
            `engine` turns out not to support.
        examples_per_unit: Examples whose mean gradient is clipped.
        rows_per_example: Consecutive rows that are one example: those of a user.
        physical_batch_size: Most rows in a pass through the model; None where a batch of
            any size runs whole.
        replicas: Each has a share of the batch.
        augmentation: Makes the views of each example, if any.
        jit_compile: Whether XLA compiles the passes.
        passes: What `engine` does with rows, as far as that was proven. What is proven
            here is put there.
    """

    model: keras.Model
    engine: engines.Engine
    may_change_engine: bool = False
    examples_per_unit: int | Tensor = 1
    rows_per_example: int = 1
    physical_batch_size: int | None = None
    replicas: Replicas = ONE_DEVICE
    augmentation: Augmentation | None = None
    jit_compile: bool = False
    passes: list[TracedPass] = dataclasses.field(default_factory=list, compare=False)

    @property
    def rows_per_unit(self) -> int | Tensor:
        """Consecutive rows whose mean gradient is clipped."""
        return self.examples_per_unit * self.rows_per_example

    def clip(
        self,
        batch: Batch,
        l2_norm_clip: Tensor,
        objective: Objective,
        on_outputs: OnOutputs | None = None,
    ) -> ClippedSum:
        """Clip and add up the units of a batch.

        Args:
            batch: What each replica has of the batch.
            l2_norm_clip: The clip norm, a scalar tensor.
            objective: What is differentiated, for rows that are no views.
            on_outputs: Sees what the model predicts, on each replica.

        Returns:
            On each replica the sums of all, and the norms of its own units.
        """
        once = (
            contextlib.nullcontext
            if self.physical_batch_size is None
            else _seeds.counted_once
        )
        if _keras.draws_numbers(self.model):
            # Also without passes: what went before may have left the states where its
            # second pass began.
            _seeds.move_on(self.model)

        def of_replica(rows: Batch) -> ClippedSum:
            with once(self.model):
                return self._on_one(rows, l2_norm_clip, objective, on_outputs)

        return self._on_all(of_replica, objective, batch)

    def _prove_for_replicas(self, objective: Objective, batch: Batch) -> None:
        """Prove what each replica is about to trace by itself."""
        signature = self.replicas.first(batch).signature()
        moved: set[str] = set()
        with _keras.outside_of_graphs(), self.replicas.only_first():
            if self.augmentation is not None:
                moved |= self.augmentation.prove(signature.x)
            # Units of several rows are proven as rows are.
            moved |= proven_pass(self.engine, objective, signature, 1).moved
        if self.physical_batch_size is not None:
            self._leaves_nothing(moved)

    def _with_views(self, objective: Objective) -> tuple[Objective, int | Tensor]:
        """Return the objective of all views of rows, and how many of these are a unit."""
        if self.augmentation is None:
            return objective, self.rows_per_unit
        views = self.augmentation.multiplicity
        return dataclasses.replace(objective, views=views), self.rows_per_unit * views

    def _is_replicated(self) -> bool:
        """Tell whether a strategy runs what clips, that of a loop of one's own too."""
        return bool(self.replicas.strategy or tf.distribute.has_strategy())

    def states(self) -> list[Variable]:
        """List the variables that decide what the model and the views draw."""
        states: list[Variable] = _keras.states(self.model)
        if self.augmentation is not None:
            states += self.augmentation.seed_states()
        return states

    def later(
        self, batch: Batch, objective: Objective, states: list[Variable]
    ) -> Callable[..., ClippedSum]:
        """Return a function that clips as it would be done now.

        Args:
            batch: See `clip`; what the function clips by default.
            objective: See `clip`.
            states: Variables that it finds as they are now, and leaves as they were.

        Returns:
            A function of the clip norm and of other data, whole batches in every
            process; it returns what the first replica sees, but the norms of all.
        """

        def read() -> list[Tensor]:
            return [tf.identity(state.value) for state in states]

        def assign(values: list[Tensor]) -> None:
            for state, value in zip(states, values, strict=True):
                state.assign(value)

        values_now = self.replicas.run(read) if states else []

        def clip(l2_norm_clip: Tensor, whole: Nest = None) -> ClippedSum:
            def of_replica(rows: Batch, values_now: list[Tensor]) -> ClippedSum:
                # What the step drew itself stays drawn: no later step has its masks.
                values_then = read()
                assign(values_now)
                if whole is not None:
                    rows = Batch.of(
                        self.replicas.share_of(whole, rows_per_unit=self.rows_per_unit)
                    )
                clipped_sum = self._on_one(rows, l2_norm_clip, objective, None)
                assign(values_then)
                return clipped_sum

            clipped_sum = self._on_all(of_replica, objective, batch, values_now)
            return self.seen_by_first(clipped_sum)

        return clip

    def seen_by_first(self, clipped_sum: ClippedSum) -> ClippedSum:
        """Return what the first replica has of a sum, with the norms of all."""
        first: ClippedSum = self.replicas.first(clipped_sum)
        return first._replace(norms=self.replicas.concatenated(clipped_sum.norms))

    def _on_all(
        self,
        clip: Callable[..., ClippedSum],
        objective: Objective,
        batch: Batch,
        *others: Nest,
    ) -> ClippedSum:
        """Add up what all replicas have clipped; each gets the sum."""
        if not self._is_replicated():
            return clip(batch, *others)

        def of_replica(*args: Nest) -> ClippedSum:
            own = clip(*args)
            return own._replace(gradients=summed(own.gradients))

        with _keras.losses_of_one_replica():
            self._prove_for_replicas(objective, batch)
            clipped_sum: ClippedSum = self.replicas.run(of_replica, batch, *others)
        return clipped_sum

    def _on_one(
        self,
        batch: Batch,
        l2_norm_clip: Tensor,
        objective: Objective,
        on_outputs: OnOutputs | None,
    ) -> ClippedSum:
        """Clip and add up the units of any number of rows, on one replica."""
        augmentation = self.augmentation
        objective, rows_per_unit = self._with_views(objective)
        clip = clip_as_tensor(l2_norm_clip, objective.variables)
        in_passes = self.physical_batch_size is not None
        run_pass = functools.partial(
            self._run_pass, objective, rows_per_unit, in_passes=in_passes
        )
        if self.jit_compile:
            # Pass by pass: a whole step would be compiled anew for each size of a batch.
            run_pass = tf.function(run_pass, autograph=False, jit_compile=True)

        size, rows = self.physical_batch_size, number_of_rows(batch)
        is_static = keeps_static_rows(objective.ascent) and not self._is_replicated()
        if (
            size is not None
            and not is_static
            and isinstance(rows, int)
            and rows <= size
        ):
            # The graph is for so many rows alone, and padding would be work for nothing.
            # Layers that see their number see the one that was proven.
            size = None

        def run_views(batch: Batch) -> tuple[list[Tensor], Tensor, Nest]:
            if augmentation is None:
                return run_pass(batch, clip)
            moved: Collection[str] = ()
            with _seeds.secret_seeds(self.model):
                if self._is_replicated():
                    views = augmentation.views(batch)
                else:
                    views, moved = augmentation.proven_views(batch)
            if in_passes:
                self._leaves_nothing(moved)
            sums, norms, y_pred = run_pass(views, clip)
            return sums, norms, augmentation.first(y_pred)

        sums, norms = passes.run(
            run_views,
            batch,
            rows_per_unit=self.rows_per_unit,
            physical_batch_size=size,
            has_fixed_size=is_static or self.jit_compile or _keras.inside_xla(),
            on_outputs=on_outputs,
            shared_states=_keras.shared_seed_states(self.model) if in_passes else (),
        )
        return ClippedSum(sums, norms, clip, self.examples_per_unit)

    def _run_pass(
        self,
        objective: Objective,
        rows_per_unit: int | Tensor,
        batch: Batch,
        clip: Tensor,
        *,
        in_passes: bool,
    ) -> tuple[list[Tensor], Tensor, Nest]:
        """Clip and add up the units of a pass, whose rows are views by now."""
        if self._is_replicated():
            # It was proven just before; here it is traced with a replica's variables.
            traced = traced_pass(
                self.engine, objective, batch.signature(), rows_per_unit
            )
            return traced.clip_and_sum(batch, clip)
        try:
            proven = self._proven(self.engine, objective, batch, rows_per_unit)
        except UnsupportedLayerError as error:
            # Units of several rows, and XLA, may ask more of a rule than the check did.
            if not self.may_change_engine:
                raise
            logging.warning(
                "tfdp takes whole gradients of each example of model `%s`, which "
                "needs more time and memory: %s",
                self.model.name,
                error,
            )
            vectorized = engines.get("vectorized")
            proven = self._proven(vectorized, objective, batch, rows_per_unit)
        if in_passes:
            self._leaves_nothing(proven.moved)
        return proven.clip_and_sum(batch, clip)

    def _proven(
        self,
        engine: engines.Engine,
        objective: Objective,
        batch: Batch,
        rows_per_unit: int | Tensor,
    ) -> TracedPass:
        """Return a pass for such rows that was proven, here if not before."""
        rows = (
            batch.is_padding.shape[0] if keeps_static_rows(objective.ascent) else None
        )
        signature = batch.signature(rows)
        prove = functools.partial(
            proven_pass, engine, objective, signature, rows_per_unit
        )
        if tf.is_tensor(rows_per_unit) or _keras.inside_xla():
            # Tensors of this graph cannot be in one that is kept.
            return prove()
        for known in self.passes:
            if known.fits(engine, objective, signature, rows_per_unit):
                return known
        with _keras.outside_of_graphs():
            proven = prove()
        self.passes.append(proven)
        del self.passes[:-_MOST_PASSES]
        return proven

    def _leaves_nothing(self, moved: Collection[str]) -> None:
        """Refuse what moves on where a batch is taken in several passes.

        Without one row, others would be in passes that come before or after.

        Raises:
            UnsupportedLayerError: If anything does.
        """
        if moved:
            raise UnsupportedLayerError(
                f"Model `{self.model.name}` must leave nothing between the passes of a "
                f"batch. Received: {', '.join(sorted(moved))}, moved on in a call, and "
                f"physical_batch_size={self.physical_batch_size}. Use "
                "`physical_batch_size=None`; or change variables and tables in a callback, "
                "and draw with `keras.random.SeedGenerator` in place of `tf.random`."
            )


def keeps_static_rows(ascent: Ascent | AscentLoss | None) -> bool:
    """Tell whether layers see how many rows a pass has, where that is static.

    Graphs forget it, so that one proof and one trace are for all sizes. On one device the
    exact ascent of `BAM` keeps it, whose derivatives of gradients would need more operations
    to learn shapes.

    Args:
        ascent: The step uphill, or the loss that asks for it, if any.

    Returns:
        False where any number of rows is all there is to prove anything for.
    """
    return ascent is not None and ascent.is_exact
