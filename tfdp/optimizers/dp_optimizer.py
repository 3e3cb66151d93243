"""An optimizer that only takes clipped sums, and noises them."""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn, Self, TypeAlias

import keras
import tensorflow as tf

from tfdp import _keras, _validate
from tfdp._types import Config, Nest, Tensor, Variable
from tfdp.accounting import Ledger
from tfdp.clipping import ClippedSum, ClippedSumOfUsers
from tfdp.errors import NotPrivateError
from tfdp.losses.regularizers import gradient_of
from tfdp.mechanisms import Gaussian, Mechanism
from tfdp.optimizers.arguments import (
    checked_clip,
    checked_inner,
    checked_mechanism,
    checked_noise_multiplier,
)
from tfdp.runs.budgets import enforce_budget_of_step, room_in_graph
from tfdp.runs.checkpoints import LedgerState
from tfdp.runs.recorder import LedgerRecorder, write_down
from tfdp.sampling import UnknownUsers

# Runs a function of the clipped sum on each replica.
OnReplicas: TypeAlias = Callable[[Callable[[ClippedSum], list[Tensor]]], list[Tensor]]


def _refused(where: str) -> Callable[..., NoReturn]:
    """Return a method that takes no gradients of whole batches."""

    def refuse(self: "DPOptimizer", *args: object, **kwargs: object) -> NoReturn:
        """Raise: gradients that are no clipped sum would not be private."""
        raise NotPrivateError(
            f"`{type(self).__name__}` never trains without privacy: {where} gives it "
            "gradients of a whole batch, which cannot be clipped for each example. "
            "Received: no ClippedSum. Wrap the model: `private = "
            "tfdp.DPModel(model); private.compile(optimizer, loss=...); "
            "private.fit(...)`, or in a loop of your own call "
            "`optimizer.apply_clipped_sum(tfdp.clipped_gradients(model, loss, x, y, "
            "l2_norm_clip=optimizer.l2_norm_clip), model.trainable_variables)`."
        )

    return refuse


@keras.saving.register_keras_serializable("tfdp")
class DPOptimizer(keras.optimizers.Optimizer):
    """Wraps a Keras optimizer so that every update it makes is private.

    It takes a `tfdp.ClippedSum` S of per-example gradients and lets the inner
    optimizer apply ``(S + Normal(0, (noise_multiplier * C)^2 I)) / D``, where D is
    the expected number of clipped units, a public constant [1]_. Gradients of
    weight regularizers do not depend on data and are added after the noise.

    Guarantees:
        Noise is drawn once in every step for every trainable variable in full,
        with the C that clipped. Without a `ClippedSum` there is no update: under a
        plain `keras.Model.fit`, and in `apply` and `apply_gradients`, the
        optimizer raises `NotPrivateError` before any weight moves.

    Args:
        inner: A `keras.optimizers.Optimizer`, or the name of one. Its learning
            rate schedule, weight decay and moving averages work as always.
        l2_norm_clip: Radius C of the ball into which each unit's gradient is
            clipped, in units of the gradient of an example's loss. Positive and
            finite.
        noise_multiplier: Standard deviation of the noise as a multiple of C.
            Finite and at least 0; 0 gives no privacy, and a warning.
        num_microbatches: None to clip each example's gradient. An integer m clips
            the mean gradient of ``expected_batch_size / m`` consecutive examples
            instead. More than one example a group doubles the sensitivity and
            needs batches of fixed size.
        expected_batch_size: Examples in a batch on average. `DPModel.fit` fills
            it in where it knows it.
        noise_seed: For tests only: makes the noise, and masks of dropout, reproducible;
            warns.
        mechanism: A `tfdp.mechanisms.Mechanism` of its own, which draws the noise; by
            default Gaussian noise, independent in every step.
        name: Name of the optimizer.

    Raises:
        ValueError: If a number is out of its range, or `inner` clips or
            accumulates gradients itself.
        TypeError: If `inner` is no optimizer for a single private step.

    Example:
        >>> optimizer = tfdp.optimizers.DPOptimizer(
        ...     keras.optimizers.SGD(0.15), l2_norm_clip=1.0, noise_multiplier=1.1
        ... )
        >>> optimizer.l2_norm_clip = 0.5
        >>> float(optimizer.l2_norm_clip)
        0.5

    References:
        .. [1] Abadi et al., "Deep Learning with Differential Privacy", CCS 2016,
           Algorithm 1. https://arxiv.org/abs/1607.00133
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str,
        *,
        l2_norm_clip: float,
        noise_multiplier: float,
        num_microbatches: int | None = None,
        expected_batch_size: float | None = None,
        noise_seed: int | None = None,
        mechanism: Mechanism | None = None,
        name: str | None = None,
    ) -> None:
        l2_norm_clip = checked_clip(l2_norm_clip)
        noise_multiplier = checked_noise_multiplier(noise_multiplier)
        if num_microbatches is not None:
            num_microbatches = _validate.positive_int(
                "num_microbatches", num_microbatches
            )
        if expected_batch_size is not None:
            expected_batch_size = _validate.positive(
                "expected_batch_size", expected_batch_size
            )
        inner = checked_inner(inner, DPOptimizer, keras.optimizers.LossScaleOptimizer)
        super().__init__(learning_rate=0.0, name=name or f"dp_{inner.name}")
        self.inner_optimizer = inner
        self.num_microbatches = num_microbatches
        self._l2_norm_clip = self._scalar("l2_norm_clip", l2_norm_clip)
        self._noise_multiplier = self._scalar("noise_multiplier", noise_multiplier)
        # Steps after which moving averages took the place of the weights.
        self._averaged_after = self._scalar("averaged_after", 0.0)
        self._configured_batch_size = expected_batch_size
        self.mechanism = checked_mechanism(mechanism, noise_seed)
        self.recorder = self.recorder_of_loops = LedgerRecorder()
        # Whether the sums of loops are of users; None before the first one.
        self._of_users: bool | None = None
        self._is_taking_step = False
        # So `tf.train.Checkpoint` has the ledger.
        self._ledger_state = LedgerState(self._saved_ledger, self._restore_ledger)
        self.recorder.note_seeds(noise=self.noise_is_seeded, sampling=False)
        with tf.init_scope(), _keras.unmirrored_variables():
            # NaN until it is known; no update can happen before.
            self._expected_batch_size = tf.Variable(
                expected_batch_size or math.nan, dtype=tf.float64, trainable=False
            )

    def _scalar(self, name: str, value: float) -> keras.Variable:
        variable = self.add_variable(
            shape=(), dtype="float64", aggregation="only_first_replica", name=name
        )
        variable.assign(value)
        return variable

    @property
    def l2_norm_clip(self) -> keras.Variable:
        """The clip norm C, a variable that clipping and noise both read."""
        return self._l2_norm_clip

    @l2_norm_clip.setter
    def l2_norm_clip(self, value: float) -> None:
        self._l2_norm_clip.assign(checked_clip(value))

    @property
    def noise_multiplier(self) -> keras.Variable:
        """Standard deviation of the noise over C, a variable."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._noise_multiplier.assign(checked_noise_multiplier(value))

    @property
    def expected_batch_size(self) -> float | None:
        """Examples in a batch on average, or None while nobody has said."""
        value = float(self._expected_batch_size.numpy())
        return None if math.isnan(value) else value

    def expect_batch_size(self, value: float) -> None:
        """Set the expected batch size for the training that begins.

        Args:
            value: Examples in a batch on average.

        Raises:
            ValueError: If the optimizer was made for another size.
        """
        configured = self._configured_batch_size
        if configured is not None and configured != value:
            raise ValueError(
                "`expected_batch_size` of the optimizer contradicts the data's. "
                f"Received: expected_batch_size={configured}, and {value} from the "
                "data. Leave `expected_batch_size` out of the optimizer, or pass "
                f"`batch_size={configured:g}`."
            )
        self._expected_batch_size.assign(_validate.positive("batch_size", value))

    def examples_per_unit(self, batch_size: float) -> int:
        """Return how many examples share one clipped gradient.

        Args:
            batch_size: Examples in a batch on average.

        Returns:
            The smallest whole number that makes `num_microbatches` groups enough.

        Raises:
            ValueError: If there are more microbatches than examples.
        """
        if self.num_microbatches is None:
            return 1
        if self.num_microbatches > batch_size:
            raise ValueError(
                "`num_microbatches` must be at most the batch size. Received: "
                f"num_microbatches={self.num_microbatches}, batch_size="
                f"{batch_size:g}. Use `num_microbatches=None` to clip each example."
            )
        return math.ceil(batch_size / self.num_microbatches)

    def expected_units(self, examples_per_unit: int | Tensor) -> Tensor:
        """Return the public divisor of a clipped sum, a float64 scalar tensor."""
        return self._expected_batch_size / tf.cast(examples_per_unit, tf.float64)

    @property
    def ledger(self) -> Ledger:
        """What was run with this optimizer, and all that its variables come from."""
        return self.recorder.ledger

    def _saved_ledger(self) -> str:
        return self.recorder.state()

    def _restore_ledger(self, text: str) -> None:
        self.recorder.restore(text)
        self._ledger_state.note_loaded(self.recorder.loaded)

    def check_dials(self) -> None:
        """Raise if clip norm or noise multiplier were assigned a value out of range.

        Raises:
            ValueError: If one is not finite, or not positive or negative.
        """
        checked_clip(float(self._l2_norm_clip.numpy()))
        _validate.non_negative(
            "noise_multiplier", float(self._noise_multiplier.numpy())
        )

    def renew_noise_key(self) -> None:
        """Draw the noise with a fresh secret key from here on."""
        self.mechanism.renew_key()

    @property
    def noise_is_seeded(self) -> bool:
        """Whether the noise can be reproduced by someone who knows the seed."""
        return self.mechanism.noise_seed is not None

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[Callable[[], None]]:
        """Take steps with another noise key within, then be as before: for rehearsals.

        Yields:
            A function after which the first step within may come again, with its noise.
        """
        held = [*self.variables, self._expected_batch_size]
        with (
            _keras.values_kept(held) as put_back,
            self.mechanism.set_aside() as put_noise_back,
        ):

            def begin() -> None:
                put_back()
                put_noise_back()

            yield begin

    @_keras.without_autograph
    def apply_clipped_sum(
        self, clipped_sum: ClippedSum, trainable_variables: list[Variable]
    ) -> None:
        """Noise a clipped sum, divide it, and let the inner optimizer apply it.

        Counts one step in `ledger`.

        Args:
            clipped_sum: From `tfdp.clipped_gradients`, one gradient for each of
                the variables.
            trainable_variables: The model's trainable variables, in order.

        Raises:
            NotPrivateError: If a `tf.distribute` strategy has several replicas, each
                of which would noise a sum of its own; or inside of another step.
            PrivacyBudgetError: If a `PrivacyBudget` of a model that has the variables
                has no room for the step; when a graph runs, `tf.errors
                .InvalidArgumentError`. Compiled by XLA the step does nothing then.
            TypeError: If `clipped_sum` is no `tfdp.ClippedSum`.
            ValueError: If the number of variables differs from the number of
                gradients, the expected batch size is not known, or the sum is one of
                users and others before were not, or the other way around.
        """
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1:
            raise NotPrivateError(
                "`apply_clipped_sum` noises the sum of one replica, and a step of "
                "several has one noise for all of them. Received: "
                f"num_replicas_in_sync={replicas}. Use `tfdp.DPModel(model).fit(...)`, "
                "which adds the sums of all replicas up."
            )
        self._check(clipped_sum, trainable_variables)
        with self.only_step():
            self._apply_clipped_sum(clipped_sum, trainable_variables)

    def _apply_clipped_sum(
        self, clipped_sum: ClippedSum, trainable_variables: list[Variable]
    ) -> None:
        if not self.built:
            self.build(trainable_variables)
        # Not that of a private model, whose batches `fit` draws.
        recorder, mechanism = self.recorder_of_loops, self.mechanism
        with tf.init_scope():
            # Private models of these variables, also later ones, count these steps.
            self._begin_units(recorder, isinstance(clipped_sum, ClippedSumOfUsers))
            self.begin_single_step(recorder, trainable_variables, trainable_variables)
            per_unit = clipped_sum.examples_per_unit
            # How many examples share a gradient may be known later only. Where there
            # are several, one that is left out can move the sum by 2C, not by C: the
            # noise is worth half as much.
            at_most = 1 if isinstance(per_unit, int) and per_unit == 1 else 2
            least = float(mechanism.counted(self._noise_multiplier.value)) / at_most
            enforce_budget_of_step(recorder, least)
            write_down(recorder, trainable_variables, least)

        mechanism.check(recorder.counter.scheme)
        noise_multiplier = tf.identity(self._noise_multiplier.value)
        counted = mechanism.counted(noise_multiplier)

        def apply() -> bool:
            # Before the count, which moves a seeded key on to the next number.
            stream = mechanism.take_stream()
            begins = self.count_step(
                clipped_sum, trainable_variables, recorder=recorder, counted=counted
            )
            self.take_step(
                clipped_sum,
                trainable_variables,
                noise_multiplier=noise_multiplier,
                stream=stream,
                begins=begins,
            )
            return True

        if tf.executing_eagerly():
            apply()
            recorder.note_left(trainable_variables)
            return
        # XLA leaves the error out; the step is not taken there, either.
        has_room = room_in_graph(recorder, counted / clipped_sum.sensitivity_in_clips)
        tf.cond(has_room, apply, _refuse)

    def _begin_units(self, recorder: LedgerRecorder, of_users: bool) -> None:
        """Let the ledger of loops say who is protected."""
        if self._of_users is None and of_users:
            recorder.begin(UnknownUsers())
        # A graph that was traced before would go on to count the others.
        if self._of_users not in (None, of_users):
            one, other = ("users", "examples") if of_users else ("examples", "users")
            raise ValueError(
                "`apply_clipped_sum` takes sums of one kind of unit: its ledger says who "
                f"is protected. Received: a sum of {one} after sums of {other}. Use "
                "another optimizer, such as `tfdp.optimizers.DPSGD(...)`, for these."
            )
        self._of_users = of_users

    def begin_single_step(
        self, recorder: LedgerRecorder, trained: list[Variable], read: list[Variable]
    ) -> None:
        """Note what a step outside of `fit` changes, and from where its values are.

        Args:
            recorder: Counts the step.
            trained: The variables that the step changes.
            read: Those that it depends on.
        """
        # To look for copies reads all weights: only where values were set meanwhile.
        if recorder.were_set(read):
            recorder.take_over_copies(read)
        recorder.begin_steps(trained, read)
        self.skip_used_noise()

    @contextlib.contextmanager
    def only_step(self) -> Iterator[None]:
        """Refuse a step inside of this one, as code runs or is traced.

        In `fit` it would count as one of the batches that are drawn, and what room a budget
        has was asked for one step.

        Raises:
            NotPrivateError: If one is under way.
        """
        if self._is_taking_step:
            raise NotPrivateError(
                "Only one step of a private optimizer may be under way. Received: another "
                f"one of optimizer={self.name!r} inside of it. Take it after this one; with "
                "`fit`, `private.train_on_batch(x, y)` in `on_train_batch_end` of a Keras "
                "callback."
            )
        self._is_taking_step = True
        try:
            yield
        finally:
            self._is_taking_step = False

    def count_step(
        self,
        clipped_sum: ClippedSum,
        trainable_variables: list[Variable],
        *,
        recorder: LedgerRecorder,
        counted: Tensor,
    ) -> Tensor:
        """Count a step before anything of it is released, and before `take_step`.

        A run that is killed in between has counted a step too many, not one too few.
        Replicas count one step together.

        Args:
            clipped_sum: See `apply_clipped_sum`; what the first replica has of it.
            trainable_variables: See `apply_clipped_sum`.
            recorder: Counts the step.
            counted: What its noise counts as, a multiple of the clip norm, float64 scalar.

        Returns:
            Whether the step begins a release, a scalar bool tensor.
        """
        if not self.built:
            self.build(trainable_variables)
        begins = recorder.counter.begins_release()
        if self.mechanism.correlates_steps:
            begins = recorder.counter.begins_with_clip(begins, clipped_sum.l2_norm_clip)
        self.mechanism.count_seeded()
        recorder.counter.record(
            counted / clipped_sum.sensitivity_in_clips, clipped_sum.l2_norm_clip
        )
        return begins

    def take_step(
        self,
        clipped_sum: ClippedSum,
        trainable_variables: list[Variable],
        *,
        noise_multiplier: Tensor,
        stream: Tensor,
        begins: Tensor,
        on_replicas: OnReplicas | None = None,
        jit_compile: bool = False,
    ) -> list[Tensor]:
        """Noise the sum of a step that is counted, and let the inner optimizer apply it.

        Each replica draws the same noise and adds it to the same sum.

        Args:
            clipped_sum: See `apply_clipped_sum`; what the first replica has of it.
            trainable_variables: See `apply_clipped_sum`.
            noise_multiplier: Of the noise that is drawn.
            stream: Of the step's noise, the same in all processes.
            begins: What `count_step` has returned.
            on_replicas: Runs a function of the clipped sum on each replica, if there
                are several.
            jit_compile: Whether XLA compiles noise and update, on one device.

        Returns:
            The noised mean gradients as they are released: without regularizers.
        """

        def update(clipped_sum: ClippedSum) -> list[Tensor]:
            # Noise is in proportion to the C that clipped, which the sum brings along:
            # a callback may have set that of the next step by now.
            noised = self.mechanism.noised(
                clipped_sum,
                noise_multiplier=noise_multiplier,
                stream=stream,
                begins=begins,
            )
            # A public constant: the size of the batch would tell who is in it.
            units = self.expected_units(clipped_sum.examples_per_unit)
            divisors = {
                dtype: tf.cast(units, dtype) for dtype in {n.dtype for n in noised}
            }
            released = [each / divisors[each.dtype] for each in noised]
            gradients = [
                with_regularizer(gradient, variable)
                for gradient, variable in zip(
                    released, trainable_variables, strict=True
                )
            ]
            self.inner_optimizer.apply(gradients, trainable_variables)
            return released

        with _keras.gradients_are_summed(self.inner_optimizer):
            if on_replicas is not None:
                return on_replicas(update)
            if jit_compile:
                # Some hundred operations, each of which a GPU would be asked for by itself.
                update = tf.function(update, autograph=False, jit_compile=True)
            return update(clipped_sum)

    def skip_used_noise(self) -> None:
        """Leave out noise that the same seed may have given in an earlier process."""
        if self.noise_is_seeded:
            self.mechanism.skip_to(self.recorder.all_steps)

    def _check(self, clipped_sum: ClippedSum, variables: list[Variable]) -> None:
        if not isinstance(clipped_sum, ClippedSum):
            raise TypeError(
                "`apply_clipped_sum` takes what `tfdp.clipped_gradients` returns. "
                f"Received: clipped_sum of type {type(clipped_sum).__name__}."
            )
        if len(clipped_sum.gradients) != len(variables):
            raise ValueError(
                "`apply_clipped_sum` needs one gradient for each variable. Received: "
                f"{len(clipped_sum.gradients)} gradients, {len(variables)} variables. "
                "Pass `model.trainable_variables` of the model that was clipped."
            )
        with tf.init_scope():
            is_unknown = self.expected_batch_size is None
        if is_unknown:
            raise ValueError(
                "`expected_batch_size` must be known: the divisor of the noised sum "
                "is a public constant, never the size of a batch. Received: "
                "expected_batch_size=None. Use "
                f"`{type(self).__name__}(..., expected_batch_size=256)`."
            )

    def build(self, variables: list[Variable]) -> None:
        """Create the inner optimizer's variables.

        Args:
            variables: The model's trainable variables.
        """
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        super().build(variables)
        self.mechanism.build(variables)
        # A checkpoint may be restored before and after.
        self._ledger_state.variables = [weakref.ref(each) for each in variables]
        self._ledger_state.note_loaded(self.recorder.loaded)

    @property
    def variables(self) -> list[keras.Variable]:
        """The optimizer's own variables and the inner optimizer's."""
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Variable:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Nest) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> keras.Variable:
        """Steps of the inner optimizer."""
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list: list[Variable]) -> None:
        """Let the inner optimizer put its moving averages into the variables."""
        self.inner_optimizer.finalize_variable_values(var_list)
        self._averaged_after.assign(int(self.iterations.numpy()))

    @property
    def averages_wait(self) -> bool:
        """Whether steps were taken whose moving averages are not the weights yet."""
        steps = int(self.iterations.numpy())
        return self.inner_optimizer.use_ema and steps != int(
            self._averaged_after.numpy()
        )

    def exclude_from_weight_decay(self, *args: object, **kwargs: object) -> None:
        """Exclude variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def load_own_variables(self, store: Config) -> None:
        """Load saved values, or raise where Keras would only warn."""
        if len(store.keys()) != len(self.variables):
            raise ValueError(
                f"Optimizer `{self.name}` cannot load a state of another shape. "
                f"Received: {len(store.keys())} saved variables for "
                f"{len(self.variables)}. Build the model and compile it with the "
                "optimizer that was saved."
            )
        super().load_own_variables(store)

    # Only a plain training step scales a whole batch's loss.
    scale_loss = _refused("a plain `keras.Model.fit`")
    apply = _refused("`apply`")
    apply_gradients = _refused("`apply_gradients`")
    minimize = _refused("`minimize`")
    compute_gradients = _refused("`compute_gradients`")
    get_gradients = _refused("`get_gradients`")

    def get_config(self) -> Config:
        """Return the arguments that rebuild the optimizer."""
        return {
            "inner": keras.saving.serialize_keras_object(self.inner_optimizer),
            **self._private_config(),
        }

    def _private_config(self) -> Config:
        config: Config = {
            "l2_norm_clip": float(self._l2_norm_clip.numpy()),
            "noise_multiplier": float(self._noise_multiplier.numpy()),
            "num_microbatches": self.num_microbatches,
            "expected_batch_size": self._configured_batch_size,
            "name": self.name,
        }
        if type(self.mechanism) is Gaussian:
            return {**config, "noise_seed": self.mechanism.noise_seed}
        mechanism = keras.saving.serialize_keras_object(self.mechanism)
        return {**config, "mechanism": mechanism}

    @classmethod
    def from_config(cls, config: Config, custom_objects: Config | None = None) -> Self:
        """Rebuild an optimizer from `get_config`."""
        arguments = dict(config)
        inner = keras.saving.deserialize_keras_object(
            arguments.pop("inner"), custom_objects=custom_objects
        )
        return cls(inner, **arguments)


def _refuse() -> bool:
    """Raise when it runs, in a graph."""
    message = (
        "The privacy budget of a model that has these variables has no room for "
        "another step. Stop here, or give that model a larger one: "
        "`private.fit(..., callbacks=[tfdp.callbacks.PrivacyBudget(delta, "
        "target_epsilon=...)])`."
    )
    tf.debugging.Assert(tf.constant(False), [message])
    return False


def with_regularizer(gradient: Tensor, variable: Variable) -> Tensor:
    """Add the gradient of a variable's regularizer, which no data enter.

    But for one that is part of each example's loss, and in the gradient already.

    Args:
        gradient: Noised, of the variable's shape.
        variable: A Keras variable.

    Returns:
        Their sum, with the dtype of `gradient`.
    """
    regularizer = getattr(variable, "regularizer", None)
    if regularizer is None or getattr(regularizer, "is_of_each_example", False):
        return gradient
    return gradient + tf.cast(gradient_of(regularizer, variable), gradient.dtype)
