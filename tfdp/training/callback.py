"""Callbacks that act inside a private step, and what they see of it."""

import dataclasses
from collections import Counter
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdp import _validate
from tfdp._mapping import vectorized_map
from tfdp._types import Logs, Tensor
from tfdp.ascent.losses import AscentLoss
from tfdp.ascent.released import ReleasedGradient
from tfdp.checks.alone import left_by
from tfdp.checks.captures import Captures, reads_metric
from tfdp.clipping import ClippedSum
from tfdp.errors import NotPrivateError
from tfdp.mechanisms.mechanism import noise_of_query
from tfdp.optimizers import DPOptimizer


@dataclasses.dataclass(frozen=True)
class Query:
    """A question about a step: a noised sum of what each unit's gradient norm says.

    Guarantees:
        A unit moves the sum by `sensitivity` at most, whatever `of_unit` does: each
        one's vector is computed from its own norm alone and clipped to that length;
        one that is not finite counts as zeros. One whose operations assign, print or hand
        on norms is refused.

    Args:
        of_unit: From the norm of a unit's gradient before clipping and the step's clip
            norm, scalars of the same dtype, to a vector of `shape`. It may read variables.
        sensitivity: The largest length of that vector, positive.
        noise_multiplier: Standard deviation of the noise of each entry of the sum over
            `sensitivity`, positive.
        shape: Of that vector, and of the answer.
        every: Steps from one asking to the next, by the optimizer's `iterations`.

    Raises:
        TypeError: If a number is none.
        ValueError: If a number is out of its range.

    Example:
        >>> # How many units are not clipped?
        >>> query = tfdp.callbacks.Query(
        ...     lambda norm, clip: tf.cast(norm <= clip, tf.float64),
        ...     sensitivity=1.0,
        ...     noise_multiplier=10.0,
        ... )
    """

    of_unit: Callable[[Tensor, Tensor], Tensor]
    sensitivity: float
    noise_multiplier: float
    shape: tuple[int, ...] = ()
    every: int = 1

    def __post_init__(self) -> None:
        _validate.positive("sensitivity", self.sensitivity)
        _validate.positive("noise_multiplier", self.noise_multiplier)
        _validate.positive_int("every", self.every)

    def asks_at(self, iteration: Tensor) -> Tensor:
        """Tell for numbers of steps whether they ask, bool of their shape."""
        return tf.cast(iteration, tf.int64) % self.every == 0

    def answer(
        self,
        norms: Tensor,
        clip: Tensor,
        noise: Tensor,
        model: keras.Model | None = None,
    ) -> Tensor:
        """Return the noised sum.

        Args:
            norms: Of the units, shape ``(U,)``; U may be 0.
            clip: The clip norm that clipped, a float64 scalar.
            noise: Standard normal numbers of the query's shape.
            model: Whose step it is, if it is that of a model.

        Returns:
            float64, of the query's shape.

        Raises:
            NotPrivateError: If `of_unit` keeps or shows something, which no noise covers, or
                reads a metric, which knows other units of the step.
        """
        clip_of_norms = tf.cast(clip, norms.dtype)
        # What runs is what was looked at.
        of_unit = self._proven(norms.dtype, model)

        def bounded(norm: Tensor) -> Tensor:
            vector = tf.cast(of_unit(norm, clip_of_norms), tf.float64)
            vector = tf.ensure_shape(vector, self.shape)
            length = tf.norm(vector)
            limit = tf.constant(self.sensitivity, tf.float64)
            # By selection: 0 * nan is nan.
            vector = tf.where(length > limit, vector * (limit / length), vector)
            return tf.where(tf.math.is_finite(length), vector, tf.zeros_like(vector))

        # Two rows more, which are left out: TensorFlow maps over no empty axes, and of a
        # single row it forgets the axis.
        filled = tf.concat([norms, tf.zeros([2], norms.dtype)], 0)
        of_units = vectorized_map(bounded, filled)[:-2]
        stddev = self.sensitivity * self.noise_multiplier
        return tf.reduce_sum(of_units, 0) + stddev * tf.cast(noise, tf.float64)

    def _proven(
        self, dtype: tf.DType, model: keras.Model | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return `of_unit` as a graph of its own, in which it leaves nothing behind."""
        scalar = tf.TensorSpec([], dtype)
        traced = tf.function(self.of_unit, autograph=False).get_concrete_function(
            scalar, scalar
        )
        left = left_by(traced.graph, 1, Captures(None), in_turn=True)
        if left:
            raise NotPrivateError(
                "`of_unit` must compute a vector of a unit's norm and do nothing else: "
                f"what it keeps has no noise. Received: {self!r}, in which "
                f"{', '.join(left)}. Return what is to be known, and keep the noised "
                "answer, `variable.assign(step.ask(query))`."
            )
        read = [outer for outer, _ in traced.graph.captures]
        if model is not None and reads_metric(read, model):
            raise NotPrivateError(
                "`of_unit` must compute a vector of a unit's norm, whatever other units are "
                f"in the batch. Received: {self!r}, which reads a metric. Read what is "
                "public or noised, such as `step.optimizer.l2_norm_clip`."
            )
        of_unit: Callable[[Tensor, Tensor], Tensor] = traced
        return of_unit


class Answers:
    """Answers the queries of a step, each with noise of its own.

    Args:
        clipped_sum: What was clipped, on all replicas.
        stream: Of the step's noise.
    """

    def __init__(self, clipped_sum: ClippedSum, stream: Tensor) -> None:
        """Answer nothing yet."""
        self._clipped_sum = clipped_sum
        self._stream = stream
        self._asked = 0
        self._graph = tf.compat.v1.get_default_graph()

    def of(self, callback: "StepCallback") -> Callable[[Query, Tensor], Tensor]:
        """Return what answers a callback, which pays for what it said it would ask."""
        # Not by equal queries: a lambda is another one in each call.
        paid = Counter((each.noise_multiplier, each.every) for each in callback.queries)

        def answer(query: Query, iteration: Tensor) -> Tensor:
            kind = query.noise_multiplier, query.every
            if not paid[kind]:
                raise NotPrivateError(
                    f"`{type(callback).__name__}.during_step` asks a query that it did "
                    "not ask when `fit` began, so the ledger does not count it. Received: "
                    f"{query!r}. Ask the same queries in every step; `every` says how "
                    "often."
                )
            paid[kind] -= 1
            if tf.compat.v1.get_default_graph() is not self._graph:
                # A loop would ask again and again, always with the same noise.
                raise NotPrivateError(
                    f"`{type(callback).__name__}.during_step` asks inside of a branch or "
                    f"a loop, which cannot be counted. Received: {query!r}. Ask before "
                    "it, `answer = step.ask(query)`; `every` says how often."
                )
            number, self._asked = self._asked, self._asked + 1
            noise = noise_of_query(query.shape, stream=self._stream, number=number)
            norms = self._clipped_sum.norms
            clip = tf.cast(self._clipped_sum.l2_norm_clip, tf.float64)
            if query.every == 1:
                return query.answer(norms, clip, noise, callback.model)
            return tf.cond(
                query.asks_at(iteration),
                lambda: query.answer(norms, clip, noise, callback.model),
                lambda: tf.fill(query.shape, tf.constant(float("nan"), tf.float64)),
            )

        return answer


@dataclasses.dataclass(frozen=True)
class Step:
    """What a callback sees inside the training graph: all of it is public or noised.

    Attributes:
        optimizer: Has not moved the weights yet. A clip norm that is assigned here acts
            from the next step on.
        expected_units: The public divisor of the sum, a float64 scalar tensor.
    """

    optimizer: DPOptimizer
    expected_units: Tensor
    _iteration: Tensor
    _answer: Callable[[Query, Tensor], Tensor]

    def ask(self, query: Query) -> Tensor:
        """Return the noised answer to a query. The ledger counts what it costs.

        Args:
            query: The same in every step; see `Query.every`. Make it outside of
                `during_step`: for a new one `fit` traces its steps again.

        Returns:
            float64, of the query's shape; NaN on steps that do not ask.
        """
        return self._answer(query, self._iteration)

    def asks(self, query: Query) -> Tensor:
        """Tell whether the step asks a query, a scalar bool tensor."""
        return query.asks_at(self._iteration)


@dataclasses.dataclass(frozen=True)
class NonprivateStep:
    """What a callback sees that logs un-noised values, under the prefix `nonprivate_`.

    Attributes:
        optimizer: See `Step`.
        clipped_sum: What was clipped, on all replicas, not noised.
        clip: ``clip(l2_norm_clip, data=None)`` clips gradients of the plain loss again,
            with the step's dropout masks: of the step's batch, or of `data`, a tuple
            ``(x, y, sample_weight)``.
        ascent: The loss that takes gradients uphill, if any.
        released: The gradient that was released last, for `SAT`.
    """

    optimizer: DPOptimizer
    clipped_sum: ClippedSum
    clip: Callable[..., ClippedSum]
    ascent: AscentLoss | None
    released: ReleasedGradient

    @property
    def expected_units(self) -> Tensor:
        """The public divisor of the sum, a float64 scalar tensor."""
        return self.optimizer.expected_units(self.clipped_sum.examples_per_unit)


class StepCallback(keras.callbacks.Callback):
    """A Keras callback that also acts inside every private step.

    `fit` runs such callbacks before others, so that loggers see what they log. They are
    part of the training graph: what they remember must be in variables.

    Guarantees:
        A callback learns from the batches only what it asks: queries whose sensitivity
        is enforced and that get noise of their own. The ledger counts every step with
        what was asked in it. Only `nonprivate_step` sees values without noise; the
        guarantee does not hold for what it makes of them, if that is published or
        decides anything.

    Attributes:
        sets: `"l2_norm_clip"` or `"noise_multiplier"`, if the callback sets it: `fit`
            logs it, and refuses a second callback that does.
        queries: What `during_step` asks, found out when `fit` begins.
        is_alone: Whether `fit` refuses a second callback of its type.

    Example:
        >>> class HalveTheClipNorm(tfdp.callbacks.StepCallback):
        ...     "Halves the clip norm whenever most units are not clipped."
        ...
        ...     sets = "l2_norm_clip"
        ...     unclipped = tfdp.callbacks.Query(
        ...         lambda norm, clip: tf.cast(norm <= clip, tf.float64),
        ...         sensitivity=1.0,
        ...         noise_multiplier=10.0,
        ...     )
        ...
        ...     def during_step(self, step):
        ...         clip = step.optimizer.l2_norm_clip
        ...         are_most = step.ask(self.unclipped) > 0.5 * step.expected_units
        ...         clip.assign(tf.where(are_most, clip / 2, clip))
    """

    sets: str | None = None
    queries: tuple[Query, ...] = ()
    is_alone: bool = False

    def before_training(
        self, optimizer: DPOptimizer, planned_steps: int | None
    ) -> None:
        """See the optimizer, and how many steps it will take, before `fit` begins."""

    def before_step(self, optimizer: DPOptimizer) -> None:
        """Set what a step needs; runs in the training graph."""

    def during_step(self, step: Step) -> None:
        """Ask about a step before weights move; runs in the training graph."""

    def nonprivate_step(self, step: NonprivateStep) -> None:
        """See a step without noise before weights move; runs in the training graph."""

    def added_to_sum(self, l2_norm_clip: Tensor) -> list[Tensor] | None:
        """Add to the clipped sum what no row has to do with; in the training graph.

        Args:
            l2_norm_clip: The C of the step, a scalar.

        Returns:
            One tensor for each trainable variable, of its shape; None for nothing.
        """

    def after_release(self, released: list[Tensor], l2_norm_clip: Tensor) -> None:
        """See what a step has released; runs in the training graph.

        Args:
            released: The noised sums over their divisor, one for each variable.
            l2_norm_clip: The C of the step, a scalar.
        """

    def scheduled_noise_multiplier(self, iteration: Tensor) -> Tensor | None:
        """Say what noise multiplier the callback sets.

        Args:
            iteration: The optimizer's `iterations`, int64, of any shape.

        Returns:
            float64, of that shape; None if it sets none.
        """

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Log what the callback has set."""
        self._log(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log what the callback has set last."""
        self._log(logs)

    def _log(self, logs: Logs) -> None:
        if self.sets is not None and logs is not None:
            logs[self.sets] = float(getattr(self.model.optimizer, self.sets).numpy())


def has_own(callback: StepCallback, *names: str) -> bool:
    """Tell whether a callback does more in one of these methods than `StepCallback`."""
    return any(
        getattr(type(callback), name) is not getattr(StepCallback, name)
        for name in names
    )


def acts_in_steps(callback: StepCallback) -> bool:
    """Tell whether a callback is part of the training graph."""
    return has_own(
        callback,
        "before_step",
        "during_step",
        "nonprivate_step",
        "added_to_sum",
        "after_release",
    )


def find_queries(callback: StepCallback, optimizer: DPOptimizer) -> None:
    """Find out what `during_step` asks, in a graph that never runs.

    Args:
        callback: Gets what was found as its `queries`.
        optimizer: Of the model that trains.
    """
    if not has_own(callback, "during_step"):
        return
    asked: list[Query] = []

    def note(query: Query, iteration: Tensor) -> Tensor:
        del iteration
        asked.append(query)
        return tf.zeros(query.shape, tf.float64)

    @tf.function(autograph=False)
    def rehearse() -> None:
        iteration = optimizer.iterations.value
        callback.during_step(Step(optimizer, tf.ones([], tf.float64), iteration, note))

    rehearse.get_concrete_function()
    callback.queries = tuple(asked)
