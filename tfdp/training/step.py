"""The private step: clip, learn, count, add noise.

`Session` is all that a step is made for, `BatchClipper` clips and adds up its batch,
`private_step` is the step itself. Loops of one's own have its two halves:
`clipped_gradients`, which uses `BatchClipper`, and `DPOptimizer.apply_clipped_sum`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection

import keras
import tensorflow as tf
from absl import logging

from tfdp import _keras, _seeds, engines
from tfdp._types import Nest, Tensor, Variable
from tfdp.accounting.levels import folded
from tfdp.ascent.losses import SAT, Ascent, AscentLoss
from tfdp.ascent.released import ReleasedGradient
from tfdp.checks.engine import proven_pass, traced_pass
from tfdp.clipping import ClippedSum, clip_as_tensor
from tfdp.distribute.replicas import ONE_DEVICE, Replicas, summed
from tfdp.distribute.shares import agreed_stream
from tfdp.engines import passes
from tfdp.engines.passes import OnOutputs
from tfdp.engines.traced import TracedPass
from tfdp.errors import UnsupportedLayerError
from tfdp.losses.objective import Batch, Objective, number_of_rows
from tfdp.mechanisms import Mechanism
from tfdp.optimizers import DPOptimizer
from tfdp.runs.recorder import LedgerRecorder
from tfdp.sampling import Scheme
from tfdp.training.augmentation import Augmentation
from tfdp.training.callback import (
    Answers,
    NonprivateStep,
    Query,
    Step,
    StepCallback,
    has_own,
)

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
        return self._on_all(
            lambda rows: self._on_one(rows, l2_norm_clip, objective, on_outputs),
            objective,
            batch,
        )

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
        is_seen = sees_rows(objective.ascent) and not self._is_replicated()
        if size is not None and not is_seen and isinstance(rows, int) and rows <= size:
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
            has_fixed_size=is_seen or self.jit_compile or _keras.inside_xla(),
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
        rows = batch.is_padding.shape[0] if sees_rows(objective.ascent) else None
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


def sees_rows(ascent: Ascent | AscentLoss | None) -> bool:
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


@dataclasses.dataclass(frozen=True)
class Session:
    """All that a training function is made for.

    A model that is asked to train makes one. Where it differs from that of the training
    before, the function is made anew.

    Attributes:
        clipper: Clips the batches.
        objective: The plain loss of each example.
        objective_uphill: The same with its gradients where `BAM` wants them, if it does.
        scheme: How the batches are drawn.
        optimizer: Has the clip norm, and the steps.
        mechanism: Draws its noise.
        recorder: Counts the steps.
        ascent: The loss that takes gradients uphill, if any.
        released: The gradient that was released last, for `SAT`.
        callbacks: Those that act in the graph of a step.
        queries: What they ask in each step, beside the gradients.
    """

    clipper: BatchClipper
    objective: Objective
    objective_uphill: Objective
    scheme: Scheme
    optimizer: DPOptimizer
    mechanism: Mechanism
    recorder: LedgerRecorder
    ascent: AscentLoss | None
    released: ReleasedGradient
    callbacks: tuple[StepCallback, ...] = ()
    queries: tuple[Query, ...] = ()

    @functools.cached_property
    def sensitivity_in_clips(self) -> int:
        """The l2 sensitivity of a step's clipped sum, as a multiple of the clip norm."""
        return self.scheme.sensitivity_in_clips

    @property
    def changes_noise(self) -> bool:
        """Whether callbacks change what the noise of steps counts as."""
        changing = any(
            has_own(callback, "scheduled_noise_multiplier")
            for callback in self.callbacks
        )
        return changing or bool(self.queries)

    def planned(self, iteration: Tensor) -> Tensor:
        """Return what the noise of steps will count as, as callbacks announce it.

        Args:
            iteration: The optimizer's `iterations`, of any shape.

        Returns:
            Multiples of the clip norm, float64, of that shape.
        """
        noise_multiplier = self.optimizer.noise_multiplier.value
        noise_multiplier = tf.broadcast_to(noise_multiplier, tf.shape(iteration))
        for callback in self.callbacks:
            scheduled = callback.scheduled_noise_multiplier(iteration)
            if scheduled is not None:
                noise_multiplier = scheduled
        return self.counted(iteration, noise_multiplier)

    def counted(self, iteration: Tensor, noise_multiplier: Tensor) -> Tensor:
        """Return what noise counts as, with what callbacks ask beside the gradients.

        Args:
            iteration: The optimizer's `iterations`, of any shape.
            noise_multiplier: Of the noise that is drawn, float64, of that shape.

        Returns:
            Multiples of the clip norm, float64, of that shape.
        """
        noise_multiplier = self.mechanism.counted(noise_multiplier)
        for query in self.queries:
            both = folded(noise_multiplier, query.noise_multiplier)
            noise_multiplier = tf.where(
                query.asks_at(iteration), both, noise_multiplier
            )
        return noise_multiplier

    def uphill(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the weights are where `SAT` wants them."""
        if not isinstance(self.ascent, SAT):
            return contextlib.nullcontext()
        self.released.build(self.objective.variables)
        iteration = self.optimizer.iterations.value
        return self.released.uphill(self.ascent.radius_at(iteration))


def private_step(
    session: Session,
    batch: Batch,
    *,
    has_room: Callable[[Tensor], Tensor],
    on_outputs: Callable[[Tensor, Nest, Tensor, Nest], None],
    fingerprint: Tensor | None = None,
) -> None:
    """Take one private step if the budget has room for it.

    Noise is drawn once, with the C that clipped, for all replicas; the step is counted
    before any weight moves.

    Args:
        session: What the step is made for.
        batch: Of the step; what each replica has of it.
        has_room: Tells for what the noise counts as, over the sensitivity, whether
            there is room, a scalar bool tensor.
        on_outputs: Sees whether there is room, and for each pass what the engine's
            `OnOutputs` sees.
        fingerprint: Of the batch; processes compare it.
    """
    optimizer, clipper = session.optimizer, session.clipper
    replicas, variables = clipper.replicas, session.objective.variables
    for callback in session.callbacks:
        callback.before_step(optimizer)
    # Read once: what is drawn is what is counted, whatever callbacks assign later.
    iteration = tf.identity(optimizer.iterations.value)
    drawn = tf.identity(optimizer.noise_multiplier.value)
    counted = session.counted(iteration, drawn)
    room = has_room(counted / session.sensitivity_in_clips)
    # Read before anything is clipped: where processes take different steps this raises,
    # and nothing that follows from it runs.
    stream = session.mechanism.stream(session.mechanism.number)
    is_one_device = replicas.strategy is None
    if not is_one_device and replicas.processes > 1:
        clip = optimizer.l2_norm_clip.value
        steps = session.recorder.counter.steps.read_value()
        facts = [clip, drawn, counted, steps, room]
        stream = agreed_stream(replicas, stream, fingerprint, facts)
    learn = _learner(session, batch, stream, iteration)
    with session.uphill():
        clipped_sum = clipper.clip(
            batch,
            optimizer.l2_norm_clip.value,
            session.objective_uphill,
            functools.partial(on_outputs, room),
        )

    def apply() -> bool:
        # Callbacks see the weights that made the gradients. The C that they set is not
        # that of this step's noise, which comes with the clipped sum.
        if learn is not None:
            learn(clipped_sum)
        sum_of_all = _with_added(session, clipped_sum)
        released = optimizer.take_step(
            sum_of_all if is_one_device else replicas.first(sum_of_all),
            variables,
            recorder=session.recorder,
            noise_multiplier=drawn,
            counted=counted,
            stream=stream,
            on_replicas=(
                None
                if is_one_device
                else lambda update: replicas.run(update, sum_of_all)
            ),
        )
        for callback in session.callbacks:
            if has_own(callback, "after_release"):
                first = replicas.first(clipped_sum)
                callback.after_release(replicas.first(released), first.l2_norm_clip)
        if isinstance(session.ascent, SAT):
            session.released.remember(replicas.first(released))
        return True

    # Without room what was clipped goes nowhere: no noise, no count, no update.
    tf.cond(room, apply, lambda: False)


def _with_added(session: Session, clipped_sum: ClippedSum) -> ClippedSum:
    """Add what callbacks add to a sum, on each replica the same."""
    adding = [each for each in session.callbacks if has_own(each, "added_to_sum")]
    replicas = session.clipper.replicas

    def add(clipped_sum: ClippedSum, added: list[Tensor]) -> ClippedSum:
        both = zip(clipped_sum.gradients, added, strict=True)
        return clipped_sum._replace(
            gradients=[one + tf.cast(other, one.dtype) for one, other in both]
        )

    for callback in adding:
        added = callback.added_to_sum(replicas.first(clipped_sum).l2_norm_clip)
        if added is not None:
            clipped_sum = replicas.run(add, clipped_sum, added)
    return clipped_sum


def _learner(
    session: Session, batch: Batch, stream: Tensor, iteration: Tensor
) -> Callable[[ClippedSum], None] | None:
    """Return what lets callbacks learn from a step's sum, None if none of them does.

    It is asked for before anything is clipped. To clip again with the same masks, the
    states of random layers are kept, if a callback sees un-noised values.
    """
    asking = [each for each in session.callbacks if has_own(each, "during_step")]
    looking = [each for each in session.callbacks if has_own(each, "nonprivate_step")]
    if not asking and not looking:
        return None
    optimizer, clipper = session.optimizer, session.clipper
    states = clipper.states() if looking else []
    clip_again = clipper.later(batch, session.objective, states)

    def learn(clipped_sum: ClippedSum) -> None:
        # Replicas put their norms together.
        seen = clipper.seen_by_first(clipped_sum)
        answers = Answers(seen, stream)
        units = optimizer.expected_units(seen.examples_per_unit)
        for callback in asking:
            answer = answers.of(callback)
            callback.during_step(Step(optimizer, units, iteration, answer))
        for callback in looking:
            callback.nonprivate_step(
                NonprivateStep(
                    optimizer, seen, clip_again, session.ascent, session.released
                )
            )

    return learn
