"""A Keras model whose training steps are differentially private."""

import contextlib
import dataclasses
import functools
import json
import math
import weakref
from collections.abc import Callable
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree, _validate, engines
from tfdp._augmentation import Augmentation
from tfdp._batch_clipper import BatchClipper
from tfdp._fit_callbacks import (
    LedgerCallback,
    PrivacyCallback,
    Step,
    planned_items,
    sorted_callbacks,
)
from tfdp._journal import journals
from tfdp._noise_plan import NoisePlan
from tfdp._plan import Plan
from tfdp._replicas import function_of_batches
from tfdp._workers import (
    agree_on_training,
    check_distribution,
    check_scope,
    lost_workers,
    replicas_of,
)
from tfdp.accounting import Ledger, Segment, privacy_statement
from tfdp.ascent.losses import BAM, SAT, AscentLoss, check_plain
from tfdp.ascent.released import ReleasedGradient
from tfdp.budgets import (
    enforce_budget,
    enforce_budget_of_step,
    enforce_budgets_of_loops,
    room_in_graph,
)
from tfdp.checks.tracing import signature_of
from tfdp.data import PoissonDataset
from tfdp.data.shares import Share, agreed_stream, check_shareable, shared_out
from tfdp.data.training_data import (
    TrainingData,
    first_rows,
    made_up_rows,
    number_of_examples,
    split_for_validation,
    training_data,
)
from tfdp.engines import explanation
from tfdp.engines.choice import choose
from tfdp.errors import (
    NotPrivateError,
    PrivacyBudgetError,
    UnsupportedLayerError,
)
from tfdp.histories import (
    glimpse,
    is_alone,
    recognise_copies,
    remember_values,
    was_trained,
)
from tfdp.losses import regularizers
from tfdp.losses.objective import Objective, check_takes_logits
from tfdp.optimizers import DPOptimizer
from tfdp.recorder import (
    UNDECLARED,
    LedgerRecorder,
    LedgerState,
    note_loaded,
    revoke_all,
)

# How names of saved arrays begin that hold the gradient that was released last.
_RELEASED = "released_gradient_"


# Which layers trained when the model was checked, and with how many rows.
_NOTHING_CHECKED: tuple[tuple[bool, ...], frozenset[int | None]] = ((), frozenset())
_MOST_SIZES = 4


@keras.saving.register_keras_serializable("tfdp")
class DPModel(_keras.ReplicatedModel):
    """Wraps a Keras model so that `fit` trains it with differential privacy.

    It shares the model's layers and weights: after `fit` the user's own model is
    trained, and has nothing of tfdp in it. Each step clips the gradient of every
    example, adds them up, adds Gaussian noise once, and divides by the expected
    batch size [1]_. Arrays given to `fit` are sampled by independent coin flips.
    What was run is counted in `ledger`, inside the training graph; the ledger has
    every training that the wrapped model's weights come from, and only grows.

    A model that was made in the scope of a `tf.distribute.MirroredStrategy` or
    `MultiWorkerMirroredStrategy` trains on all replicas, each with a share of every
    batch, as on one device: clipped sums are added up, and get one noise.

    Guarantees:
        ``epsilon(delta)`` holds for the weights after every step, if each record
        of the data is one row: one record replaced by an empty one. The metrics
        in the logs are not private; `privacy_statement` lists what is not covered.

    Args:
        model: Any Keras 3 model. It must not mix examples in training
            (`tfdp.validate_model`) nor override `train_step`. A model that
            overrides `compute_loss` has it evaluated for each example alone.
        engine: How per-example gradients are clipped: `"bookkeeping"`, in about the
            time of an ordinary step; `"ghost"`, in least memory; `"vectorized"`, for
            any model; `"auto"`, book-keeping where it can; or an engine object.
        physical_batch_size: Rows that go through the model at once, on each replica.
            A batch of any size runs in passes of this size, within their memory, as
            one step. By default a batch runs whole.
        sampling: For arrays given to `fit`: `"poisson"`, or `"shuffle"`, whose
            epsilon is larger.
        augmentation: A Keras layer, or a function of a batch of inputs, that makes a
            random view of each row by itself. The gradient of an example is then the
            mean over `augmentation_multiplicity` views of it, taken before clipping
            [2]_: it still is one vector that depends on one example, so epsilon does
            not change.
        augmentation_multiplicity: Views of each example in a step. A pass has
            `physical_batch_size` times as many rows. Without an augmentation, views
            differ in what the model draws: weights of `tfdp.variational`, dropout.
        **kwargs: Name of the model.

    Raises:
        TypeError: If `model` is no Keras model, or `augmentation` cannot be called.
        ValueError: If an argument is out of its range, the augmentation mixes
            examples, or the model overrides `train_step`, `test_step` or
            `compute_metrics`.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> private = tfdp.DPModel(model)
        >>> private.compile(
        ...     tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1),
        ...     loss="mse",
        ... )
        >>> x, y = np.ones((100, 2)), np.ones((100, 1))
        >>> history = private.fit(x, y, batch_size=10, epochs=2, verbose=0)
        >>> round(private.epsilon(delta=1e-3), 2)
        1.76

    References:
        .. [1] Abadi et al., "Deep Learning with Differential Privacy", CCS 2016,
           Algorithm 1. https://arxiv.org/abs/1607.00133
        .. [2] De et al., "Unlocking High-Accuracy Differentially Private Image
           Classification through Scale", 2022, section 3.2.
           https://arxiv.org/abs/2204.13650
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        engine: Any = "auto",
        physical_batch_size: int | None = None,
        sampling: str = "poisson",
        augmentation: Any = None,
        augmentation_multiplicity: int = 1,
        **kwargs: Any,
    ) -> None:
        _check_wrapped(model)
        engines.get(engine)
        if physical_batch_size is not None:
            physical_batch_size = _validate.positive_int(
                "physical_batch_size", physical_batch_size
            )
        _validate.one_of("sampling", sampling, ("poisson", "shuffle"))
        views = None
        if augmentation is None and augmentation_multiplicity != 1:
            if not _keras.draws_numbers(model):
                raise ValueError(
                    "`augmentation_multiplicity` needs an augmentation where the model "
                    "draws nothing itself: all views would be alike. Received: "
                    f"augmentation_multiplicity={augmentation_multiplicity!r}, "
                    "augmentation=None. Use `DPModel(model, "
                    "augmentation=keras.layers.RandomFlip('horizontal'), "
                    "augmentation_multiplicity=16)`."
                )
            augmentation = keras.layers.Identity()
        if augmentation is not None:
            views = Augmentation(augmentation, augmentation_multiplicity)
        kwargs.setdefault("name", f"private_{model.name}")
        replicas = replicas_of(model)
        with replicas.scope():
            super().__init__(dtype=model.dtype_policy, **kwargs)
        self._replicas = replicas
        self.model = model
        self.engine = engine
        self.physical_batch_size = physical_batch_size
        self.sampling = sampling
        self._has_own_loss = type(model).compute_loss is not keras.Model.compute_loss
        self.recorder = LedgerRecorder(_weights_of(weakref.ref(self)))
        # So `tf.train.Checkpoint` has the ledger.
        self._ledger_state = LedgerState(self._saved_ledger, self._restore_ledger)
        # Of a ledger that was loaded, which weights have been trained.
        self._loaded_as_trained = b""
        self._plan = Plan()
        self._checked = _NOTHING_CHECKED
        self.train_function: Any = None
        self.test_function: Any = None
        self._jit_compile_passes = False
        self._chosen_engine: engines.Engine | None = None
        self._in_graph: list[PrivacyCallback] = []
        self._ascent: AscentLoss | None = None
        self._released = ReleasedGradient()
        self._augmentation = views
        # Nest of `tf.TensorSpec` of the inputs that `fit` was given.
        self.fitted_signature: Any = None
        if getattr(model, "optimizer", None) is not None:
            # Its slots would be saved with the private model.
            model.optimizer = None
        self.built = model.built

    # What the model is.

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Run the wrapped model."""
        if _keras.takes_training(self.model):
            return self.model(inputs, training=training)
        return self.model(inputs)

    def build(self, input_shape: Any) -> None:
        """Build the wrapped model."""
        if not self.model.built:
            self.model.build(input_shape)
        self.built = True

    @property
    def output_names(self) -> Any:
        """Names of the wrapped model's outputs, which dict losses refer to."""
        return getattr(self.model, "output_names", None)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Print the summary of the wrapped model."""
        self.model.summary(*args, **kwargs)

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Export the wrapped model, which has nothing of tfdp in it."""
        self.model.export(*args, **kwargs)

    def explain(self) -> str:
        """Describe how each layer's per-example gradients are clipped.

        Returns:
            A table: layer, rule, how its norm is computed, and the bytes that this
            takes for one example.

        Raises:
            UnsupportedLayerError: If the engine asked for cannot be used.
            ValueError: If the model's inputs are not known before the first `fit`.
        """
        signature = self.fitted_signature or _keras.input_signature(self.model)
        if signature is None:
            raise ValueError(
                f"The inputs of model `{self.model.name}` are not known yet. Received: "
                "a model that has seen no data. Call `private.fit(...)` first."
            )
        engine = self._chosen_engine or engines.get(self.engine)
        try:
            rows = engine.explain(self.model, signature)
        except UnsupportedLayerError:
            if self.engine != "auto":
                raise
            rows = engines.get("vectorized").explain(self.model, signature)
        return explanation.table(rows)

    # What was run.

    @property
    def ledger(self) -> Ledger:
        """Every training that the wrapped model's weights come from, as of now."""
        self._take_over_copies()
        return self.recorder.ledger

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of all that was run, by the PLD accountant.

        Args:
            delta: In (0, 1); smaller than one over the number of examples.

        Returns:
            An upper bound of the epsilon; infinite if a step had no noise.
        """
        return self.ledger.epsilon(delta)

    def privacy_statement(self, delta: float) -> str:
        """Say what guarantee holds for the trained weights, and what it leaves out.

        Args:
            delta: In (0, 1); smaller than one over the number of examples.

        Returns:
            Several paragraphs and a table, as plain text.
        """
        return privacy_statement(self.ledger, delta)

    # Compilation.

    def compile(
        self,
        optimizer: DPOptimizer,
        loss: Any = None,
        *,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = False,
    ) -> None:
        """Configure the private training, like `keras.Model.compile`.

        Args:
            optimizer: A `tfdp.optimizers.DPOptimizer`.
            loss: As in Keras, or `tfdp.losses.BAM` or `SAT` of that; may be left out
                if the wrapped model overrides `compute_loss`.
            loss_weights: As in Keras.
            metrics: As in Keras. They are exact: what they show is not private.
            weighted_metrics: As in Keras.
            run_eagerly: As in Keras.
            steps_per_execution: As in Keras.
            jit_compile: Whether XLA compiles the passes through the model. `"auto"`
                does on a GPU; on CPUs the engines are faster without it.
            auto_scale_loss: Must be False: float16 losses get a constant scale.

        Raises:
            NotPrivateError: If the optimizer is not a private one.
            ValueError: If there is no loss, or one that takes logits for
                probabilities, `auto_scale_loss` is set, the optimizer
                was made in the scope of another `tf.distribute` strategy than the
                model or belongs to another private model, or there is a strategy
                and `steps_per_execution` is not 1.
        """
        _check_optimizer(optimizer)
        if auto_scale_loss:
            raise ValueError(
                "`auto_scale_loss` would change the scale and skip steps because of "
                "un-noised gradients. Received: auto_scale_loss=True. Leave it out: "
                "float16 losses get a constant scale."
            )
        check_distribution(self._replicas, optimizer, steps_per_execution)
        ascent = loss if isinstance(loss, AscentLoss) else None
        loss = loss if ascent is None else ascent.loss
        check_plain(loss)
        if loss is None and not self._has_own_loss:
            raise ValueError(
                "`loss` is missing. Received: loss=None. Use "
                "`private.compile(optimizer, loss='mse')`."
            )
        check_takes_logits(self.model, loss)
        with self._replicas.scope():
            super().compile(
                optimizer=optimizer,
                loss=loss,
                loss_weights=loss_weights,
                metrics=metrics,
                weighted_metrics=weighted_metrics,
                run_eagerly=run_eagerly,
                steps_per_execution=steps_per_execution,
                jit_compile=jit_compile,
                auto_scale_loss=False,
            )
        self._given_jit_compile = jit_compile
        self._given_ascent = ascent
        self._ascent = ascent if ascent is not None and ascent.has_ascent() else None
        if not isinstance(self._ascent, SAT):
            self._released = ReleasedGradient()
        self._checked = _NOTHING_CHECKED
        if self._has_own_loss:
            self.model.compile(
                optimizer=None, loss=loss, loss_weights=loss_weights, jit_compile=False
            )
        self._loss_weights = loss_weights
        self._bind(optimizer)
        optimizer.renew_noise_key()

    def _bind(self, optimizer: DPOptimizer) -> None:
        """Let custom loops with this optimizer count in the model's ledger."""
        if optimizer.recorder is not self.recorder:
            if optimizer.recorder.is_of_a_model:
                raise ValueError(
                    "`optimizer` belongs to another private model, whose ledger "
                    f"counts its steps. Received: optimizer={optimizer.name!r}. Make "
                    "one for each model: "
                    f"`{type(optimizer).__name__}.from_config(optimizer.get_config())`."
                )
            # What it has run before, also what it has loaded, stays in the ledger.
            self.recorder.history.depend_on(optimizer.recorder.history)
            optimizer.recorder = self.recorder
        optimizer.skip_used_noise()
        self.recorder.note_seeds(noise=optimizer.noise_is_seeded, sampling=False)
        self._bound = weakref.ref(optimizer)
        self.noise_plan = NoisePlan(optimizer)

    def get_compile_config(self) -> dict[str, Any]:
        """Return the arguments of `compile`."""
        config = {
            **super().get_compile_config(),
            "jit_compile": self._given_jit_compile,
        }
        if self._given_ascent is not None:
            config["loss"] = keras.saving.serialize_keras_object(self._given_ascent)
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile with saved arguments, and build the optimizer's variables."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    # Training.

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> keras.callbacks.History:
        """Train privately, with the arguments of `keras.Model.fit`.

        Args:
            x: Arrays, which are sampled as `sampling` says, with `batch_size` as
                the expected size of a batch; a `tfdp.data.PoissonDataset`; what
                `tfdp.data.declare` returns; or any other data that Keras takes,
                for which every step counts in full.
            y: Targets, if `x` is arrays.
            batch_size: Expected number of examples in a batch, if `x` is arrays.
            epochs: As in Keras.
            verbose: As in Keras.
            callbacks: As in Keras.
            validation_split: Fraction of the rows of arrays kept for validation;
                they do not count as examples.
            validation_data: As in Keras.
            shuffle: Must be True for arrays.
            class_weight: As in Keras; scales losses before clipping.
            sample_weight: As in Keras; scales losses before clipping.
            initial_epoch: As in Keras.
            steps_per_epoch: As in Keras.
            validation_steps: As in Keras.
            validation_batch_size: As in Keras.
            validation_freq: As in Keras.

        Returns:
            The history of the logs, which are not private.

        Raises:
            NotPrivateError: If the model was not compiled with a private optimizer.
            PrivacyBudgetError: If a `PrivacyBudget` has no room for a first step.
            TypeError: If the replicas of a strategy cannot share the data.
            UnsupportedLayerError: If layers break per-example privacy.
            ValueError: If the arguments contradict each other.
            WorkerLostError: If another process that trains the model is gone.
        """
        self._get_ready()
        if x is None:
            raise ValueError(
                "`x` is missing. Received: x=None. Use `private.fit(x, y, "
                "batch_size=256)`."
            )
        _check_class_weight(class_weight, sample_weight, y, self.model)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_for_validation(
                (x, y, sample_weight), validation_split
            )
        data = training_data(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            sampling=self.sampling,
        )
        if self._replicas.strategy is not None:
            check_shareable(data)
        callbacks = sorted_callbacks(callbacks)
        callbacks.insert(0, LedgerCallback(self.recorder, data, self._replicas))
        steps = data.steps_per_epoch and data.steps_per_epoch * (epochs - initial_epoch)
        private = [item for item in callbacks if isinstance(item, PrivacyCallback)]
        kept = journals(callbacks, self.recorder)
        for journal in kept:
            journal.restore()
        with lost_workers(self._replicas):
            agree_on_training(
                self._replicas, self, data, range(initial_epoch, epochs), kept
            )
        for callback in private:
            callback.before_training(self, steps)
        self._plan_for(data.segment, data.expected_batch_size)
        with lost_workers(self._replicas):
            data = self._check(data)
            regularizers.check_number_of_examples(
                self.trainable_variables,
                getattr(data.segment, "number_of_examples", None),
            )
            self.optimizer.renew_noise_key()
            try:
                self._take_callbacks(private)
                self.noise_plan = NoisePlan(self.optimizer, self._in_graph, steps)
                self._begin(data, epochs - initial_epoch)
                if self._replicas.strategy is not None:
                    data = shared_out(
                        data,
                        self._replicas,
                        epochs=epochs - initial_epoch,
                        rows_per_unit=self._plan.examples_per_unit,
                        class_weight=class_weight,
                    )
                    class_weight = None
                return super().fit(
                    x=data.x,
                    y=data.y,
                    batch_size=data.batch_size,
                    epochs=epochs,
                    verbose=verbose,
                    callbacks=[*callbacks, *kept],
                    validation_data=validation_data,
                    shuffle=data.shuffle,
                    class_weight=class_weight,
                    sample_weight=data.sample_weight,
                    initial_epoch=initial_epoch,
                    steps_per_epoch=data.keras_steps_per_epoch,
                    validation_steps=validation_steps,
                    validation_batch_size=validation_batch_size or batch_size,
                    validation_freq=validation_freq,
                )
            finally:
                self._end()

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Take one private step on a batch.

        Nobody has said how the batch was sampled, so the step counts in full: "a
        record at most once in a batch" is assumed. The optimizer needs its
        `expected_batch_size`.

        Args:
            x: Inputs, as in Keras.
            y: Targets, as in Keras.
            sample_weight: As in Keras; scales losses before clipping.
            class_weight: As in Keras; scales losses before clipping.
            return_dict: As in Keras.

        Returns:
            The loss and metrics, which are not private, as in Keras.

        Raises:
            NotPrivateError: If the model was not compiled with a private optimizer.
            PrivacyBudgetError: If a `PrivacyBudget` has no room for the step.
            UnsupportedLayerError: If layers break per-example privacy.
            ValueError: If there are several replicas.
        """
        self._get_ready()
        if self._replicas.number > 1:
            raise ValueError(
                "`train_on_batch` would give every replica the same batch. Received: "
                f"{self._replicas.number} replicas. Use `private.fit(...)`, which gives "
                "each a share."
            )
        _check_class_weight(class_weight, sample_weight, y, self.model)
        self._plan_for(UNDECLARED, None)
        sizes = self._unchecked_sizes(number_of_examples(x))
        if sizes:
            self._check_sample(*first_rows((x, y, sample_weight)), sizes=sizes)
        regularizers.check_number_of_examples(
            self.trainable_variables, None, rows=number_of_examples(x)
        )
        segment = self._plan.in_units(UNDECLARED)
        if self.recorder.segment != segment:
            self.recorder.begin(segment)
        self._begin_single_step()
        self.limit_to_budget()
        recorder = self.recorder
        was_in_fit, recorder.is_in_fit = recorder.is_in_fit, True
        try:
            return super().train_on_batch(
                x, y, sample_weight, class_weight, return_dict
            )
        finally:
            recorder.is_in_fit = was_in_fit
            self._released.put_back()
            if not is_alone(recorder.run):
                recorder.left = glimpse(self.model.weights)

    def _begin_single_step(self) -> None:
        """Note what a step outside of `fit` changes, and from where its values are."""
        weights = self.model.weights
        if not is_alone(self.recorder.run) and glimpse(weights) != self.recorder.left:
            self._take_over_copies()
        self.recorder.begin_steps(self.trainable_variables, weights)
        self.optimizer.skip_used_noise()

    def make_train_function(self, force: bool = False) -> Any:
        """Make the training function; XLA compiles the passes in it, not all of it."""
        if self._replicas.strategy is not None:
            if self.train_function is None or force:
                self._jit_compile_passes = bool(self.jit_compile)  # type: ignore[has-type]
                self.train_function = function_of_batches(
                    self._train_together, is_eager=self.run_eagerly
                )
            return self.train_function
        jit_compile = bool(self.jit_compile)  # type: ignore[has-type]
        self._jit_compile_passes, self.jit_compile = jit_compile, False
        try:
            return super().make_train_function(force)
        finally:
            self.jit_compile = jit_compile

    def make_test_function(self, force: bool = False) -> Any:
        """Make the function that evaluates; its metrics are those of all replicas."""
        if self._replicas.strategy is None:
            return super().make_test_function(force)
        if self.test_function is None or force:
            self.test_function = function_of_batches(
                self._test_together, is_eager=self.run_eagerly
            )
        return self.test_function

    def _test_together(self, data: Any) -> dict[str, Any]:
        self._replicas.run(self.test_step, data)
        logs: dict[str, Any] = self.get_metrics_result()
        return logs

    def _train_together(self, share: Any) -> dict[str, Any]:
        """Take one step with all replicas, each with its share of a batch."""
        if not isinstance(share, Share):  # From `train_on_batch`.
            return self.train_step(share)
        return self._take_step(share.rows, share.fingerprint)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Take one private step if the budget has room for it.

        Args:
            data: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``; may have no rows.

        Returns:
            The logs of the epoch up to now.

        Raises:
            NotPrivateError: If there are several replicas: each would count the rows.
            PrivacyBudgetError: If a budget has no room for the step. In a graph such a
                step does nothing.
        """
        if self._replicas.number > 1:
            raise NotPrivateError(
                "`train_step` would give every replica the same rows. Received: "
                f"{self._replicas.number} replicas. Use `private.fit(...)`, which gives "
                "each a share."
            )
        return self._take_step(data, tf.constant(0, tf.int64))

    def _take_step(self, data: Any, fingerprint: tf.Tensor) -> dict[str, Any]:
        """Take one private step, what is not run on all replicas once for them all."""
        data = keras.utils.unpack_x_y_sample_weight(data)
        for callback in self._in_graph:
            callback.before_step(self.optimizer)
        noise_multiplier = self.noise_plan.counted(self.optimizer.iterations.value)
        has_room = self._has_room(noise_multiplier)
        stream = agreed_stream(
            self._replicas,
            self.optimizer.noise_stream(self.optimizer.noise_number),
            fingerprint,
            [
                self.optimizer.l2_norm_clip.value,
                self.optimizer.noise_multiplier.value,
                noise_multiplier,
                self.recorder.own_steps,
                has_room,
            ],
        )
        clipper = self._clipper()
        clips_again = any(callback.clips_again for callback in self._in_graph)
        clip = clipper.later(
            data, self._objective(), clipper.states() if clips_again else []
        )
        with self._uphill():
            clipped_sum = clipper.clip(
                data,
                self.optimizer.l2_norm_clip.value,
                self._objective_uphill(),
                functools.partial(self._update_metrics, has_room),
            )

        def apply() -> bool:
            learning = [each for each in self._in_graph if each.has_own("during_step")]
            if learning:
                step = Step(
                    self.optimizer,
                    clipper.joined(clipped_sum),
                    stream,
                    clip,
                    self._ascent,
                    self._released,
                )
            for callback in learning:
                callback.during_step(step)
            released = self.optimizer.apply_and_record(
                clipped_sum,
                self.trainable_variables,
                self.recorder,
                stream=stream,
                replicas=self._replicas,
                accounted_noise_multiplier=noise_multiplier,
            )
            if isinstance(self._ascent, SAT):
                self._released.remember(released)
            return True

        tf.cond(has_room, apply, lambda: False)
        logs: dict[str, Any] = self.get_metrics_result()
        return logs

    def _has_room(self, noise_multiplier: tf.Tensor) -> tf.Tensor:
        """Tell whether the budgets have room, which loops of one's own have to ask."""
        if self.recorder.is_in_fit:
            return self.recorder.has_room(noise_multiplier)
        counted = noise_multiplier / self.recorder.in_clips(1.0)
        with tf.init_scope():
            self._begin_single_step()
        if tf.executing_eagerly():
            enforce_budget_of_step(self.recorder, float(counted))
        return room_in_graph(self.recorder, counted)

    def _uphill(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the weights are where `SAT` wants them."""
        if not isinstance(self._ascent, SAT):
            return contextlib.nullcontext()
        self._released.build(self.trainable_variables)
        iteration = self.optimizer.iterations.value
        return self._released.uphill(self._ascent.radius_at(iteration))

    def _clipper(self) -> BatchClipper:
        return BatchClipper(
            self.model,
            self._chosen_engine or engines.get(self.engine),
            may_change_engine=self.engine == "auto",
            plan=self._plan,
            replicas=self._replicas,
            augmentation=self._augmentation,
            jit_compile=self._jit_compile_passes,
        )

    def _update_metrics(
        self, has_room: tf.Tensor, data: Any, rows: tf.Tensor, y_pred: Any
    ) -> None:
        """Log the ordinary loss and metrics of the first `rows` rows."""

        def update() -> bool:
            x, y, sample_weight, predicted = _tree.map_tensors(
                lambda tensor: tensor[:rows], (*data, y_pred)
            )
            loss = self.compute_loss(
                x=x, y=y, y_pred=predicted, sample_weight=sample_weight
            )
            _keras.loss_tracker(self).update_state(loss, sample_weight=rows)
            self.compute_metrics(x, y, predicted, sample_weight)
            return True

        tf.cond(has_room & (rows > 0), update, lambda: False)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Compute the ordinary loss of a batch, as the wrapped model would."""
        if not self._has_own_loss:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        return _keras.compute_loss(self.model, x, y, y_pred, sample_weight)

    def _objective(self) -> Objective:
        if self._has_own_loss:
            return Objective.of_compute_loss(self.model)
        return Objective.of(self.model, self.loss, self._loss_weights)

    def _objective_uphill(self) -> Objective:
        """Return the objective, its gradients taken where `BAM` wants them."""
        objective = self._objective()
        if not isinstance(self._ascent, BAM):
            return objective
        ascent = self._ascent.ascent_at(self.optimizer.iterations.value)
        return dataclasses.replace(objective, ascent=ascent)

    # Before a training begins.

    def _take_callbacks(self, callbacks: list[PrivacyCallback]) -> None:
        """Let those that act in the training graph be part of it."""
        acting = [
            callback
            for callback in callbacks
            if callback.has_own("before_step", "during_step")
        ]
        if acting != self._in_graph:
            self._in_graph, self.train_function = acting, None

    def enforce_budget(self) -> None:
        """Allow only the steps that the budget set by a `PrivacyBudget` has room for.

        Traced loops that change the model's weights get a limit as well, which those
        that XLA compiles cannot ask for.

        Raises:
            PrivacyBudgetError: If there is no room for a single one.
        """
        enforce_budgets_of_loops(self.recorder)
        self.limit_to_budget()

    def limit_to_budget(self, steps: int = 1) -> None:
        """Do what `enforce_budget` does, for the steps of this model alone.

        Args:
            steps: How many are about to be taken at once.

        Raises:
            PrivacyBudgetError: See `enforce_budget`.
        """
        self.optimizer.check_dials()
        enforce_budget(
            self.recorder,
            self.noise_plan.to_come(),
            self.noise_plan.name(self.recorder.steps),
            steps=steps,
        )

    def _get_ready(self) -> None:
        """Refuse to train what cannot be, and take a newly assigned optimizer."""
        if not self.compiled:
            raise NotPrivateError(
                f"Model `{self.name}` was not compiled. Received: no optimizer. Use "
                "`private.compile(tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, "
                "noise_multiplier=1.1), loss=...)`."
            )
        if self.built and not self.trainable_variables:
            raise ValueError(
                f"Model `{self.name}` has nothing to train. Received: no trainable "
                "variables. Set `model.trainable = True` and compile again."
            )
        check_scope(self._replicas)
        if self._bound() is not self.optimizer:  # Assigned after `compile`.
            _check_optimizer(self.optimizer)
            check_distribution(self._replicas, self.optimizer, self.steps_per_execution)
            self._bind(self.optimizer)
            self.train_function = None

    def _check(self, data: TrainingData) -> TrainingData:
        """Refuse layers and losses that mix examples."""
        batch_size = data.static_batch_size
        if self.run_eagerly and batch_size is None and data.expected_batch_size:
            # Layers see how many rows there are; this stands for all numbers.
            batch_size = math.ceil(data.expected_batch_size)
        sizes = self._unchecked_sizes(batch_size)
        if sizes:
            data, sample = data.with_sample()
            self._check_sample(*sample, sizes=sizes)
        return data

    def _unchecked_sizes(self, batch_size: int | None) -> list[int | None]:
        """Return what of `_sizes_of_passes` the model was not checked with yet."""
        state, known = self._checked
        sizes = self._sizes_of_passes(batch_size)
        if state != self._trainable_state():
            return list(sizes)
        if len(known) >= _MOST_SIZES:
            # By now TensorFlow traces for any number of rows.
            return [] if None in known else [None]
        return [size for size in sizes if size not in known]

    def _sizes_of_passes(self, batch_size: int | None) -> tuple[int | None, ...]:
        """Say how many rows go through the model at once, where that is static.

        Args:
            batch_size: Of all batches, or of some, if that is static.

        Returns:
            The sizes, None for any.
        """
        examples_per_unit, physical_batch_size = self._plan
        views = 1 if self._augmentation is None else self._augmentation.multiplicity
        if physical_batch_size is not None:
            return (physical_batch_size * views,)
        if not batch_size:
            return (None,)
        whole = -(-batch_size // examples_per_unit) * examples_per_unit
        return (None, whole * views)

    def _trainable_state(self) -> tuple[bool, ...]:
        """What decides whether layers such as BatchNormalization keep data."""
        return tuple(layer.trainable for layer in _keras.flatten_layers(self.model))

    def _check_sample(
        self, x: Any, y: Any, sample_weight: Any, *, sizes: list[int | None]
    ) -> None:
        if self._replicas.strategy is not None:
            self.build_all((x, y, sample_weight))
        with self._replicas.only_first(), _keras.losses_of_one_replica():
            self._check_rows(x, y, sample_weight, sizes)

    def _check_rows(
        self, x: Any, y: Any, sample_weight: Any, sizes: list[int | None]
    ) -> None:
        rows = (x, y, sample_weight)
        if y is None and not self._has_own_loss:
            raise ValueError(
                "`y` is missing: the loss compares what the model predicts with it. "
                "Received: y=None. Use `private.fit(x, y, ...)`, or a dataset of "
                "`(x, y)`; a model that learns without targets overrides "
                "`compute_loss`."
            )
        if not number_of_examples(x):
            rows = made_up_rows(rows)
        if self._augmentation is not None:
            self._augmentation.check(rows[0])
        if not self.model.built:
            self.model(_tree.map_tensors(tf.convert_to_tensor, rows[0]))
        engine = choose(self.engine, self._objective_uphill(), rows, sizes)
        self.built = True
        state, known = self._trainable_state(), self._checked[1]
        if state != self._checked[0]:
            known = frozenset()
        self._checked = state, known.union(sizes)
        # Of attributes Keras replaces the dicts, by some that models do not expect.
        self.__dict__["fitted_signature"] = signature_of(x)
        if engine != self._chosen_engine:
            self._chosen_engine, self.train_function = engine, None

    def _plan_for(self, segment: Segment, batch_size: float | None) -> None:
        """Settle what depends on the expected batch size."""
        plan = Plan.of(
            segment,
            batch_size,
            optimizer=self.optimizer,
            physical_batch_size=self.physical_batch_size,
            jit_compile=self.jit_compile,
            replicas=self._replicas.number,
        )
        if plan != self._plan:
            self._plan, self.train_function = plan, None

    def _begin(self, data: TrainingData, epochs: int) -> None:
        """Open the ledger's segment for a call of `fit`."""
        self.recorder.is_in_fit = True
        self.recorder.begin(
            self._plan.in_units(data.segment),
            steps_per_item=data.batches_per_pass,
            planned_items=planned_items(data, epochs),
            noise_multipliers=self.noise_plan.planned,
        )
        self._take_over_copies()
        self.recorder.begin_steps(self.trainable_variables, self.model.weights)
        self.optimizer.skip_used_noise()
        self.limit_to_budget()
        is_seeded = isinstance(data.x, PoissonDataset) and data.x.seeded
        self.recorder.note_seeds(
            noise=self.optimizer.noise_is_seeded, sampling=is_seeded
        )
        if is_seeded:
            data.x.advance_to(max(data.x.epoch, self.recorder.all_sampled_epochs + 1))

    def _end(self) -> None:
        """Close the ledger's segment after a call of `fit`."""
        self._released.put_back()
        self._take_callbacks([])
        self.noise_plan = NoisePlan(self.optimizer)
        self.recorder.begin(self._plan.in_units(UNDECLARED))
        with contextlib.suppress(PrivacyBudgetError):
            self.enforce_budget()
        self.recorder.is_in_fit = False
        self.recorder.end_steps()
        remember_values(self.model.weights)

    # Saving.

    def _take_over_copies(self) -> None:
        """Let the ledger have what made values that were copied into the weights."""
        self._note_loaded()
        weights = self.recorder.weights() or []
        if not is_alone(self.recorder.run) and recognise_copies(weights):
            revoke_all()

    def _note_loaded(self) -> None:
        """Let weights depend on what was loaded into them, as soon as there are any."""
        weights = self.recorder.weights() or []
        if len(self._loaded_as_trained) == len(weights):
            pairs = zip(weights, self._loaded_as_trained, strict=True)
            note_loaded((each for each, was in pairs if was), self.recorder.loaded)
            self._loaded_as_trained = b""

    def _saved_ledger(self) -> str:
        self._take_over_copies()
        weights = self.recorder.weights() or []
        remember_values(weights)
        trained = [was_trained(weight) for weight in weights]
        return json.dumps({**json.loads(self.recorder.state()), "trained": trained})

    def _restore_ledger(self, text: str) -> None:
        self.recorder.restore(text)
        self._loaded_as_trained = bytes(json.loads(text).get("trained", []))
        self._note_loaded()

    def save_own_variables(self, store: Any) -> None:
        """Save the ledger beside the weights."""
        super().save_own_variables(store)
        store["ledger"] = np.frombuffer(self._saved_ledger().encode(), np.uint8)
        for number, gradient in enumerate(self._released.state()):
            store[f"{_RELEASED}{number}"] = gradient

    def load_own_variables(self, store: Any) -> None:
        """Take over a saved ledger; what was run here stays counted."""
        saved = {key: store[key] for key in store.keys()}  # noqa: SIM118 (HDF5)
        # The second of these is in files of tfdp 0.1.
        ledger, trained = saved.pop("ledger", None), saved.pop("trained", None)
        released = [key for key in saved if key.startswith(_RELEASED)]
        released.sort(key=lambda key: int(key.removeprefix(_RELEASED)))
        gradients = [np.asarray(saved.pop(key)) for key in released]
        super().load_own_variables(saved)
        self._released.restore(gradients)
        if ledger is not None:
            self._restore_ledger(np.asarray(ledger, np.uint8).tobytes().decode())
        if trained is not None:
            self._loaded_as_trained = np.asarray(trained, np.uint8).tobytes()
            self._note_loaded()

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights, the optimizer's state and the ledger, as Keras does."""
        if self.compiled and self.built and not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        super().load_weights(*args, **kwargs)
        if self.compiled:
            self.optimizer.renew_noise_key()
            with contextlib.suppress(PrivacyBudgetError):
                self.enforce_budget()

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that rebuild the model."""
        return {
            "model": keras.saving.serialize_keras_object(self.model),
            "engine": self.engine if isinstance(self.engine, str) else self.engine.name,
            "physical_batch_size": self.physical_batch_size,
            "sampling": self.sampling,
            **self._augmentation_config(),
            "name": self.name,
        }

    def _augmentation_config(self) -> dict[str, Any]:
        if self._augmentation is None:
            return {}
        function = self._augmentation.function
        return {
            "augmentation": keras.saving.serialize_keras_object(function),
            "augmentation_multiplicity": self._augmentation.multiplicity,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """Rebuild a model from `get_config`."""
        objects = {
            name: keras.saving.deserialize_keras_object(
                config.pop(name), custom_objects=custom_objects
            )
            for name in ("model", "augmentation")
            if name in config
        }
        return cls(**objects, **config)


def _weights_of(
    private: "weakref.ref[DPModel]",
) -> Callable[[], list[Any] | None]:
    """Return a function that returns a private model's weights while it is there."""

    def weights() -> list[Any] | None:
        model = private()
        if model is None:
            return None
        return list(model.model.weights) if model.model.built else []

    return weights


def _check_wrapped(model: Any) -> None:
    if not isinstance(model, keras.Model) or isinstance(model, DPModel):
        raise TypeError(
            "`model` must be a Keras model that is not private yet. Received: model "
            f"of type {type(model).__name__}. Use "
            "`tfdp.DPModel(keras.Sequential([...]))`."
        )
    overridden = [
        name
        for name in ("train_step", "test_step", "compute_metrics")
        if getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    if overridden:
        names = ", ".join(f"`{name}`" for name in overridden)
        raise ValueError(
            f"Model `{model.name}` overrides {names}, which DPModel replaces. Received: "
            f"model of type {type(model).__name__}. Override `compute_loss` instead: "
            "it is evaluated for each example alone."
        )


def _check_class_weight(
    class_weight: Any, sample_weight: Any, y: Any, model: keras.Model
) -> None:
    if class_weight is None:
        return
    # Data that bring their own targets do not show them here.
    targets = getattr(model, "outputs", None) if y is None else keras.tree.flatten(y)
    outputs = len(targets or [None])
    if outputs > 1 or sample_weight is not None:
        given = "`sample_weight`" if outputs == 1 else f"{outputs} targets"
        raise ValueError(
            "`class_weight` weighs the classes of one target, in the place of "
            f"`sample_weight`. Received: class_weight={class_weight!r} with {given}. "
            "Use `sample_weight=weight_of_class[y]`, for several targets a list of "
            "such arrays, times weights of your own."
        )


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, DPOptimizer):
        raise NotPrivateError(
            "`optimizer` would train without privacy. Received: optimizer="
            f"{optimizer!r}. Use `private.compile(tfdp.optimizers.DPOptimizer("
            "optimizer, l2_norm_clip=1.0, noise_multiplier=1.1), loss=...)`."
        )
