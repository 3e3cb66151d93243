"""A Keras model whose training steps are differentially private."""

import contextlib
import functools
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree, _validate, engines
from tfdp._types import Config, Logs, Loss, Nest, Tensor, Variable
from tfdp.accounting import Ledger, privacy_statement
from tfdp.ascent.losses import SAT, AscentLoss, check_plain
from tfdp.ascent.released import ReleasedGradient
from tfdp.data.training_data import (
    TrainingData,
    first_rows,
    made_up_rows,
    number_of_examples,
    split_for_validation,
    training_data,
)
from tfdp.distribute.replicas import function_of_batches
from tfdp.distribute.shares import Share, check_shareable, shared_out
from tfdp.distribute.workers import (
    agree_on_training,
    check_distribution,
    check_scope,
    lost_workers,
    replicas_of,
)
from tfdp.engines import explanation
from tfdp.engines.passes import number_of_rows
from tfdp.errors import (
    NotPrivateError,
    PrivacyBudgetError,
    UnsupportedLayerError,
)
from tfdp.losses import regularizers
from tfdp.losses.objective import Batch, Objective, check_takes_logits
from tfdp.optimizers import DPOptimizer
from tfdp.runs.budgets import (
    enforce_budget,
    enforce_budget_of_step,
    enforce_budgets_of_loops,
    room_in_graph,
)
from tfdp.runs.histories import (
    glimpse,
    is_alone,
    recognise_copies,
    remember_values,
    was_trained,
)
from tfdp.runs.recorder import (
    UNDECLARED,
    LedgerRecorder,
    LedgerState,
    note_loaded,
    revoke_all,
)
from tfdp.sampling import Scheme, samplings
from tfdp.training.augmentation import Augmentation
from tfdp.training.callback import StepCallback
from tfdp.training.checked_model import CheckedModel, rows_to_check
from tfdp.training.fit_callbacks import LedgerCallback, planned_items, sorted_callbacks
from tfdp.training.journal import journals
from tfdp.training.noise_plan import NoisePlan
from tfdp.training.step import (
    BatchClipper,
    Session,
    objective_uphill,
    private_step,
)
from tfdp.training.units import units_and_passes

# How names of saved arrays begin that hold the gradient that was released last.
_RELEASED = "released_gradient_"


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
        Neighbouring data sets differ in one record, a row of `x`, that one of them
        replaces by an empty row. For these ``epsilon(delta)`` bounds what the weights
        after every step reveal. The metrics in the logs are not private;
        `privacy_statement` lists what is not covered.

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
        sampling: For arrays given to `fit`: `"poisson"`; `"shuffle"`, whose epsilon is
            larger; or the `sampling` name of a `tfdp.sampling.Scheme` of your own.
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
        engine: str | engines.Engine = "auto",
        physical_batch_size: int | None = None,
        sampling: str = "poisson",
        augmentation: keras.layers.Layer | Callable[[Nest], Nest] | None = None,
        augmentation_multiplicity: int = 1,
        **kwargs: object,
    ) -> None:
        _check_wrapped(model)
        engines.get(engine)
        if physical_batch_size is not None:
            physical_batch_size = _validate.positive_int(
                "physical_batch_size", physical_batch_size
            )
        _validate.one_of("sampling", sampling, tuple(samplings()))
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
        # What the training function was made for, and whether it runs.
        self._is_in_train_function = False
        # Callbacks that act in the steps of the `fit` that runs.
        self._acting: tuple[StepCallback, ...] = ()
        self._session: Session | None = None
        self.train_function: Nest = None
        self.test_function: Callable[[Nest], Logs] | None = None
        self._objective_of_compile: Objective | None = None
        self._ascent: AscentLoss | None = None
        self._released = ReleasedGradient()
        self._augmentation = views
        self._checked = CheckedModel(model, engine, views)
        if getattr(model, "optimizer", None) is not None:
            # Its slots would be saved with the private model.
            model.optimizer = None
        self.built = model.built

    # What the model is.

    def call(self, inputs: Nest, training: bool | None = None) -> Nest:
        """Run the wrapped model."""
        if _keras.takes_training(self.model):
            return self.model(inputs, training=training)
        return self.model(inputs)

    def build(self, input_shape: Nest) -> None:
        """Build the wrapped model."""
        if not self.model.built:
            self.model.build(input_shape)
        self.built = True

    @property
    def fitted_signature(self) -> Nest:
        """Nest of `tf.TensorSpec` of the inputs that `fit` was given last, or None."""
        return self._checked.signature

    @property
    def output_names(self) -> list[str] | None:
        """Names of the wrapped model's outputs, which dict losses refer to."""
        return getattr(self.model, "output_names", None)

    def summary(self, *args: object, **kwargs: object) -> None:
        """Print the summary of the wrapped model."""
        self.model.summary(*args, **kwargs)

    def export(self, *args: object, **kwargs: object) -> None:
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
        engine = self._checked.engine
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
        loss: Loss = None,
        *,
        loss_weights: Nest = None,
        metrics: Nest = None,
        weighted_metrics: Nest = None,
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
        self._checked.forget()
        if self._has_own_loss:
            self.model.compile(
                optimizer=None, loss=loss, loss_weights=loss_weights, jit_compile=False
            )
        self._loss_weights = loss_weights
        self._objective_of_compile = None
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

    def get_compile_config(self) -> Config:
        """Return the arguments of `compile`."""
        config = {
            **super().get_compile_config(),
            "jit_compile": self._given_jit_compile,
        }
        if self._given_ascent is not None:
            config["loss"] = keras.saving.serialize_keras_object(self._given_ascent)
        return config

    def compile_from_config(self, config: Config) -> None:
        """Compile with saved arguments, and build the optimizer's variables."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    # Training.

    def fit(
        self,
        x: Nest = None,
        y: Nest = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Nest = "auto",
        callbacks: Nest = None,
        validation_split: float = 0.0,
        validation_data: Nest = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Nest = None,
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
            callbacks: Keras's, and `tfdp.callbacks`, also a `StepCallback` of your own.
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
        steps = data.steps_per_epoch and data.steps_per_epoch * (epochs - initial_epoch)
        acting = [each for each in callbacks if isinstance(each, StepCallback)]
        first = LedgerCallback(
            self.recorder, data, self._replicas, self.optimizer, self.limit_to_budget
        )
        # The plan of the noise is another one by then.
        to_come = lambda: self.noise_plan.to_come()  # noqa: E731, PLW0108
        kept = journals(callbacks, self.recorder, to_come)
        for journal in kept:
            journal.restore()
        with lost_workers(self._replicas):
            agree_on_training(
                self._replicas,
                self.recorder,
                self.optimizer,
                data,
                range(initial_epoch, epochs),
                [journal.path for journal in kept],
            )
        for callback in acting:
            callback.before_training(self.optimizer, steps)
        sizes = self._units_and_passes(data.scheme)
        with lost_workers(self._replicas):
            data = self._check(data, sizes)
            regularizers.check_number_of_examples(
                self.trainable_variables, data.scheme.number_of_examples
            )
            self.optimizer.renew_noise_key()
            for callback in acting:
                callback.set_model(self)
                callback.find_queries(self.optimizer)
            acting = [each for each in acting if each.acts_in_steps()]
            session = self._settle(data.scheme, sizes, acting)
            with self._counted(session, data, epochs - initial_epoch, steps):
                if self._replicas.strategy is not None:
                    data = shared_out(
                        data,
                        self._replicas,
                        epochs=epochs - initial_epoch,
                        rows_per_unit=session.scheme.examples_per_unit,
                        class_weight=class_weight,
                    )
                    class_weight = None
                return super().fit(
                    x=data.x,
                    y=data.y,
                    batch_size=data.batch_size,
                    epochs=epochs,
                    verbose=verbose,
                    callbacks=[first, *callbacks, *kept],
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

    def train_on_batch(
        self,
        x: Nest,
        y: Nest = None,
        sample_weight: Nest = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Nest:
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
        sizes = self._units_and_passes(UNDECLARED)
        unchecked = self._unchecked(number_of_examples(x), sizes)
        if unchecked:
            self._check_sample(*first_rows((x, y, sample_weight)), sizes=unchecked)
        regularizers.check_number_of_examples(
            self.trainable_variables, None, rows=number_of_examples(x)
        )
        # From a callback inside of `fit`, whose next steps have this function, too.
        session = self._settle(UNDECLARED, sizes, self._acting)
        if self.recorder.scheme != session.scheme:
            self.recorder.begin(session.scheme)
        self._begin_single_step(self.recorder)
        self.limit_to_budget()
        recorder = self.recorder
        try:
            return super().train_on_batch(
                x, y, sample_weight, class_weight, return_dict
            )
        finally:
            self._released.put_back()
            if not is_alone(recorder.run):
                recorder.left = glimpse(self.model.weights)

    def _begin_single_step(self, recorder: LedgerRecorder) -> None:
        """Note what a step outside of `fit` changes, and from where its values are."""
        weights = self.model.weights
        if not is_alone(recorder.run) and glimpse(weights) != recorder.left:
            self._take_over_copies()
        recorder.begin_steps(self.trainable_variables, weights)
        self.optimizer.skip_used_noise()

    def make_train_function(self, force: bool = False) -> Callable[[Nest], Logs]:
        """Make the training function; XLA compiles the passes in it, not all of it."""
        known: Callable[[Nest], Logs] | None = self.train_function
        if known is not None and not force:
            return known
        if self._replicas.strategy is not None:
            function = function_of_batches(
                self._train_together, is_eager=self.run_eagerly
            )
        else:
            jit_compile = self.jit_compile  # type: ignore[has-type]
            self.jit_compile = False
            try:
                super().make_train_function(force)
                function = self.train_function  # Keras has put it there.
            finally:
                self.jit_compile = jit_compile

        def train(batches: Nest) -> Logs:
            # Only what this calls takes the batches that `fit` has counted on:
            # callbacks may take steps of their own meanwhile.
            was, self._is_in_train_function = self._is_in_train_function, True
            try:
                logs: Logs = function(batches)
                return logs
            finally:
                self._is_in_train_function = was

        self.train_function = train
        return train

    def make_test_function(self, force: bool = False) -> Callable[[Nest], Logs]:
        """Make the function that evaluates; its metrics are those of all replicas."""
        if self._replicas.strategy is None:
            function: Callable[[Nest], Logs] = super().make_test_function(force)
            return function
        if self.test_function is None or force:
            self.test_function = function_of_batches(
                self._test_together, is_eager=self.run_eagerly
            )
        return self.test_function

    def _test_together(self, data: Nest) -> dict[str, Tensor]:
        self._replicas.run(self.test_step, data)
        logs: dict[str, Tensor] = self.get_metrics_result()
        return logs

    def _train_together(self, share: Nest) -> dict[str, Tensor]:
        """Take one step with all replicas, each with its share of a batch."""
        if not isinstance(share, Share):  # From `train_on_batch`.
            return self.train_step(share)
        return self._take_step(share.rows, share.fingerprint)

    @_keras.without_autograph
    def train_step(self, data: Nest) -> dict[str, Tensor]:
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
        if self._replicas.strategy is not None and self._replicas.number > 1:
            raise NotPrivateError(
                "`train_step` would give every replica the same rows. Received: "
                f"{self._replicas.number} replicas. Use `private.fit(...)`, which gives "
                "each a share."
            )
        return self._take_step(data)

    def _take_step(
        self, data: Nest, fingerprint: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Take one private step, what is not run on all replicas once for them all."""
        batch = Batch.of(data)
        if self._is_in_train_function and self._session is not None:
            session, has_room = self._session, self.recorder.has_room
        else:
            session = self._session_of_own_loop(batch)
            has_room = functools.partial(self._room_of_own_loop, session.recorder)
        private_step(
            session,
            batch,
            has_room=has_room,
            on_outputs=self._update_metrics,
            fingerprint=fingerprint,
        )
        logs: dict[str, Tensor] = self.get_metrics_result()
        return logs

    def _session_of_own_loop(self, batch: Batch) -> Session:
        """Return what a step is made for that `fit` does not take.

        It counts as one of a loop of one's own, whose batches nobody knows, also while
        `fit` runs.
        """
        with tf.init_scope():
            sizes = self._units_and_passes(UNDECLARED)
            rows = number_of_rows(batch)
            unchecked = self._unchecked(rows if isinstance(rows, int) else None, sizes)
            if unchecked:
                self._check_like(batch, unchecked)
            session = self._session_for(
                UNDECLARED, sizes, recorder=self.optimizer.recorder_of_loops
            )
            if session.recorder.scheme != session.scheme:
                session.recorder.begin(session.scheme)
        return session

    def _check_like(self, batch: Batch, sizes: list[int | None]) -> None:
        """Check the model with rows like those of a batch, which a graph may have."""
        rows = batch[:3]
        tensors = _tree.tensors(rows)
        shapes = [tf.TensorShape(each.shape)[1:] for each in tensors]
        if all(shape.is_fully_defined() for shape in shapes):
            with _keras.outside_of_graphs():
                self._check_sample(*made_up_rows(rows), sizes=sizes)
        elif self._checked.signature is None:
            raise NotPrivateError(
                f"Model `{self.name}` was never checked, and cannot be with rows of "
                "unknown shape. Received: a batch whose axes have unknown lengths. Call "
                "`private.fit(...)` or `private.train_on_batch(...)` once before, or "
                "give the batch static shapes."
            )

    def _room_of_own_loop(
        self, recorder: LedgerRecorder, noise_multiplier: Tensor
    ) -> Tensor:
        """Tell whether the budgets have room, which loops of one's own have to ask."""
        counted = noise_multiplier / recorder.in_clips(1.0)
        with tf.init_scope():
            self._begin_single_step(recorder)
            # A recorder that was never limited would have room for every step.
            own = self.optimizer.mechanism.counted(
                self.optimizer.noise_multiplier.value
            )
            with contextlib.suppress(PrivacyBudgetError):
                enforce_budget_of_step(recorder, float(own) / recorder.in_clips(1.0))
        if tf.executing_eagerly():
            enforce_budget_of_step(recorder, float(counted))
        return room_in_graph(recorder, counted)

    def _update_metrics(
        self, has_room: Tensor, data: Nest, rows: Tensor, y_pred: Nest
    ) -> None:
        """Log the ordinary loss and metrics of some rows."""

        def update() -> bool:
            x, y, sample_weight = data
            loss = self.compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight
            )
            _keras.loss_tracker(self).update_state(loss, sample_weight=rows)
            self.compute_metrics(x, y, y_pred, sample_weight)
            return True

        tf.cond(has_room & (rows > 0), update, lambda: False)

    def compute_loss(
        self,
        x: Nest = None,
        y: Nest = None,
        y_pred: Nest = None,
        sample_weight: Nest = None,
        training: bool = True,
    ) -> Tensor:
        """Compute the ordinary loss of a batch, as the wrapped model would."""
        if not self._has_own_loss:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        return _keras.compute_loss(self.model, x, y, y_pred, sample_weight)

    def _objective(self) -> Objective:
        """Return the plain loss of each example, the same while nothing changes."""
        known = self._objective_of_compile
        trainable = self.model.trainable_variables
        if known is not None and list(map(id, known.variables)) == list(
            map(id, trainable)
        ):
            return known
        if self._has_own_loss:
            objective = Objective.of_compute_loss(self.model)
        else:
            objective = Objective.of(self.model, self.loss, self._loss_weights)
        # Keras would track what an attribute has.
        self.__dict__["_objective_of_compile"] = objective
        return objective

    # Before a training begins.

    def _units_and_passes(self, scheme: Scheme) -> tuple[int, int | None]:
        """Settle the sizes that depend on the expected batch size."""
        return units_and_passes(
            scheme,
            optimizer=self.optimizer,
            physical_batch_size=self.physical_batch_size,
            jit_compile=self.jit_compile,
            replicas=self._replicas.number,
        )

    def _settle(
        self,
        scheme: Scheme,
        sizes: tuple[int, int | None],
        callbacks: Sequence[StepCallback] = (),
    ) -> Session:
        """Make the training function anew if it was made for something else."""
        session = self._session_for(scheme, sizes, callbacks, recorder=self.recorder)
        if session != self._session:
            self.__dict__["_session"], self.train_function = session, None
        return session

    def _session_for(
        self,
        scheme: Scheme,
        sizes: tuple[int, int | None],
        callbacks: Sequence[StepCallback] = (),
        *,
        recorder: LedgerRecorder,
    ) -> Session:
        examples_per_unit, physical_batch_size = sizes
        clipper = BatchClipper(
            self.model,
            self._checked.engine,
            may_change_engine=self.engine == "auto",
            examples_per_unit=examples_per_unit,
            physical_batch_size=physical_batch_size,
            replicas=self._replicas,
            augmentation=self._augmentation,
            jit_compile=bool(self.jit_compile),
        )
        session = Session(
            clipper,
            self._objective(),
            scheme.in_units(examples_per_unit),
            self.optimizer,
            self.optimizer.mechanism,
            recorder,
            self._ascent,
            self._released,
            tuple(callbacks),
            tuple(query for callback in callbacks for query in callback.queries),
        )
        self.optimizer.mechanism.check(session.scheme)
        return session

    @contextlib.contextmanager
    def _counted(
        self, session: Session, data: TrainingData, epochs: int, steps: int | None
    ) -> Iterator[None]:
        """Count the steps of a call of `fit` in a segment of its own."""
        recorder = self.recorder
        try:
            self.noise_plan = NoisePlan(self.optimizer, session, steps)
            self.__dict__["_acting"] = session.callbacks
            recorder.begin(
                session.scheme,
                steps_per_item=data.batches_per_pass,
                planned_items=planned_items(data, epochs),
                noise_multipliers=self.noise_plan.planned,
            )
            self._take_over_copies()
            recorder.begin_steps(self.trainable_variables, self.model.weights)
            self.optimizer.skip_used_noise()
            self.limit_to_budget()
            drawn = data.drawn
            is_seeded = drawn is not None and drawn.seeded
            recorder.note_seeds(
                noise=self.optimizer.noise_is_seeded, sampling=is_seeded
            )
            if drawn is not None and is_seeded:
                drawn.advance_to(max(drawn.epoch, recorder.all_sampled_epochs + 1))
            yield
        finally:
            self._released.put_back()
            self.__dict__["_acting"] = ()
            self.noise_plan = NoisePlan(self.optimizer)
            recorder.begin(UNDECLARED.in_units(session.scheme.examples_per_unit))
            with contextlib.suppress(PrivacyBudgetError):
                self.enforce_budget()
            recorder.end_steps()
            remember_values(self.model.weights)

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

    def _check(self, data: TrainingData, sizes: tuple[int, int | None]) -> TrainingData:
        """Refuse layers and losses that mix examples."""
        batch_size = data.static_batch_size
        if self.run_eagerly and batch_size is None:
            # Layers see how many rows there are; this stands for all numbers.
            batch_size = data.scheme.expected_batch_size
        unchecked = self._unchecked(batch_size, sizes)
        if unchecked:
            data, sample = data.with_sample()
            self._check_sample(*sample, sizes=unchecked)
        return data

    def _unchecked(
        self, batch_size: int | None, sizes: tuple[int, int | None]
    ) -> list[int | None]:
        examples_per_unit, physical_batch_size = sizes
        return self._checked.unchecked(
            batch_size,
            examples_per_unit=examples_per_unit,
            physical_batch_size=physical_batch_size,
        )

    def _check_sample(
        self, x: Nest, y: Nest, sample_weight: Nest, *, sizes: list[int | None]
    ) -> None:
        if y is None and not self._has_own_loss:
            raise ValueError(
                "`y` is missing: the loss compares what the model predicts with it. "
                "Received: y=None. Use `private.fit(x, y, ...)`, or a dataset of "
                "`(x, y)`; a model that learns without targets overrides "
                "`compute_loss`."
            )
        if self._replicas.strategy is not None:
            self.build_all((x, y, sample_weight))
        with self._replicas.only_first(), _keras.losses_of_one_replica():
            rows = rows_to_check(x, y, sample_weight)
            self._checked.build(rows[0])
            objective = objective_uphill(
                self._objective(), self._ascent, self.optimizer.iterations.value
            )
            self._checked.check(objective, rows, sizes)
            self.built = True

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

    def save_own_variables(self, store: Config) -> None:
        """Save the ledger beside the weights."""
        super().save_own_variables(store)
        store["ledger"] = np.frombuffer(self._saved_ledger().encode(), np.uint8)
        for number, gradient in enumerate(self._released.state()):
            store[f"{_RELEASED}{number}"] = gradient

    def load_own_variables(self, store: Config) -> None:
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

    def load_weights(self, *args: object, **kwargs: object) -> None:
        """Load weights, the optimizer's state and the ledger, as Keras does."""
        if self.compiled and self.built and not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        super().load_weights(*args, **kwargs)
        if self.compiled:
            self.optimizer.renew_noise_key()
            with contextlib.suppress(PrivacyBudgetError):
                self.enforce_budget()

    def get_config(self) -> Config:
        """Return the arguments that rebuild the model."""
        return {
            "model": keras.saving.serialize_keras_object(self.model),
            "engine": self.engine if isinstance(self.engine, str) else self.engine.name,
            "physical_batch_size": self.physical_batch_size,
            "sampling": self.sampling,
            **self._augmentation_config(),
            "name": self.name,
        }

    def _augmentation_config(self) -> Config:
        if self._augmentation is None:
            return {}
        function = self._augmentation.function
        return {
            "augmentation": keras.saving.serialize_keras_object(function),
            "augmentation_multiplicity": self._augmentation.multiplicity,
        }

    @classmethod
    def from_config(cls, config: Config, custom_objects: Config | None = None) -> Self:
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
) -> Callable[[], list[Variable] | None]:
    """Return a function that returns a private model's weights while it is there."""

    def weights() -> list[Variable] | None:
        model = private()
        if model is None:
            return None
        return list(model.model.weights) if model.model.built else []

    return weights


def _check_wrapped(model: object) -> None:
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
    class_weight: dict[int, float] | None,
    sample_weight: Nest,
    y: Nest,
    model: keras.Model,
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


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, DPOptimizer):
        raise NotPrivateError(
            "`optimizer` would train without privacy. Received: optimizer="
            f"{optimizer!r}. Use `private.compile(tfdp.optimizers.DPOptimizer("
            "optimizer, l2_norm_clip=1.0, noise_multiplier=1.1), loss=...)`."
        )
