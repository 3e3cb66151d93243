"""The private step: clip, count, learn, add noise.

`Session` is all that a step is made for, `private_step` is the step itself. Loops of one's
own have its two halves: `clipped_gradients`, which uses `BatchClipper` as a step does, and
`DPOptimizer.apply_clipped_sum`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from tfdp._types import Nest, Tensor
from tfdp.accounting.levels import folded
from tfdp.ascent.losses import SAT, AscentLoss
from tfdp.ascent.released import ReleasedGradient
from tfdp.clipping import ClippedSum
from tfdp.distribute.shares import agreed_stream
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective
from tfdp.mechanisms import Mechanism
from tfdp.optimizers import DPOptimizer
from tfdp.runs.recorder import LedgerRecorder
from tfdp.sampling import Scheme
from tfdp.training.batch_clipper import BatchClipper
from tfdp.training.callback import (
    Answers,
    NonprivateStep,
    Query,
    Step,
    StepCallback,
    has_own,
)


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
    before a callback learns of it and any weight moves.

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
    room = has_room(counted / session.scheme.sensitivity_in_clips)
    # Taken before anything is clipped: where processes take different steps this raises,
    # and nothing that follows from it runs.
    stream = session.mechanism.take_stream(room)
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
        recorder = session.recorder
        begins = optimizer.count_step(
            replicas.first(clipped_sum),
            variables,
            recorder=recorder,
            counted=counted,
        )
        # Callbacks see the weights that made the gradients. The C that they set is not
        # that of this step's noise, which comes with the clipped sum.
        if learn is not None:
            # Counted before it is asked: an answer is out even if the callback then fails.
            with tf.control_dependencies([recorder.counter.steps.read_value()]):
                learn(clipped_sum)
        sum_of_all = _with_added(session, clipped_sum)
        released = optimizer.take_step(
            replicas.first(sum_of_all),
            variables,
            noise_multiplier=drawn,
            stream=stream,
            begins=begins,
            on_replicas=(
                None
                if is_one_device
                else lambda update: replicas.run(update, sum_of_all)
            ),
            # On a CPU what XLA makes of the noise takes twice as long.
            jit_compile=clipper.jit_compile and session.mechanism.is_on_gpu,
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
