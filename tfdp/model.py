"""A Keras model whose training steps are differentially private."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Self, overload

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _seeds, _tree, _validate, engines, reports
from tfdp._types import Config, Loss, Nest, Tensor
from tfdp.accounting import Ledger, Segment, privacy_statement
from tfdp.accounting.text import filled
from tfdp.ascent.losses import AscentLoss
from tfdp.checks.evaluation import check_assigns_no_weight, no_weight_assigned
from tfdp.checks.metrics import (
    losses_keep_nothing,
    only_metrics_assigned,
    only_metrics_called,
)
from tfdp.data.sources import have_common_rows
from tfdp.data.training_data import (
    TrainingData,
    number_of_examples,
    split_for_validation,
    training_data,
)
from tfdp.distribute.shares import check_shareable, shared_out
from tfdp.distribute.workers import (
    agree_on_training,
    check_distribution,
    check_scope,
    lost_workers,
    replicas_of,
)
from tfdp.engines import explanation
from tfdp.errors import NotPrivateError, UnsupportedLayerError
from tfdp.losses import regularizers
from tfdp.losses.added import Predicted
from tfdp.losses.batch import Batch, number_of_rows
from tfdp.optimizers import DPOptimizer
from tfdp.runs.checkpoints import LedgerState
from tfdp.runs.counter import UNDECLARED
from tfdp.runs.histories import was_trained
from tfdp.runs.recorder import LedgerRecorder
from tfdp.sampling import Scheme, samplings
from tfdp.training.arguments import (
    check_class_weight,
    check_inputs,
    check_loss,
    check_names_of_logs,
    check_no_class_weight,
    check_optimizer,
    check_protects,
    check_targets,
    check_trainable,
    check_unit,
    check_validation_data,
    check_wrapped,
    note_slow_cpu,
)
from tfdp.training.augmentation import Augmentation
from tfdp.training.batch_clipper import BatchClipper
from tfdp.training.callback import StepCallback, find_queries
from tfdp.training.checked_model import CheckedModel
from tfdp.training.fit_callbacks import (
    BatchCallback,
    LedgerCallback,
    sorted_callbacks,
)
from tfdp.training.functions import TrainingFunctions
from tfdp.training.journal import restored_journals
from tfdp.training.model_ledger import (
    ModelLedger,
    keep_plain_steps,
    steps_of_plain_keras,
)
from tfdp.training.releases import ReleasingCallback, Trained, WatchingCallback
from tfdp.training.step import Session, private_step
from tfdp.training.units import with_sizes


@keras.saving.register_keras_serializable("tfdp")
class DPModel(TrainingFunctions):
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
        Neighbouring data sets differ in one record, a row of `x` or all rows of a user,
        that one of them replaces by an empty one. For these ``epsilon(delta)`` bounds what the weights
        after every step reveal. The metrics in the logs are not private;
        `privacy_statement` lists what is not covered.

    Args:
        model: Any Keras 3 model. It must not mix examples in training
            (`tfdp.validate_model`) nor override `train_step`. A model that
            overrides `compute_loss` has the loss that each example would have alone: it
            is asked for all rows where their sum or mean can be taken apart, otherwise
            for one row after the other. Losses that compare the rows of a batch are
            refused. What layers add (`add_loss`,
            `activity_regularizer`) is part of each example's loss.
        engine: How per-example gradients are clipped: `"bookkeeping"`, in about the
            time of an ordinary step; `"ghost"`, by a second backward pass in place of
            keeping what the first one found; `"apart"`, with each example by itself;
            `"vectorized"`, for any model; `"auto"`, book-keeping where it can, with each
            example by itself where rows are not proven to stay apart; or an engine
            object.
        physical_batch_size: Most rows that go through the model at once, on each
            replica. A batch of any size runs in passes, within their memory, as one
            step. By default a batch runs whole.
        sampling: For arrays given to `fit`: `"poisson"`; `"balls_in_bins"`, every row
            once an epoch, in a batch that a coin of its own decides; `"shuffle"`, whose
            epsilon is larger; `"cyclic_poisson"`, by coins from one half of the rows and
            then from the other; or the `sampling` name of a `tfdp.sampling.Scheme` of your own.
        unit: What is protected: `"example"`, a row of `x`; or `"user"`, all rows that
            `fit(..., user_ids=)` gives one user. Each step then draws users by
            independent coin flips, and clips the mean gradient of a user's rows.
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
        unit: str = "example",
        augmentation: keras.layers.Layer | Callable[[Nest], Nest] | None = None,
        augmentation_multiplicity: int = 1,
        **kwargs: object,
    ) -> None:
        check_wrapped(model)
        engines.get(engine)
        if physical_batch_size is not None:
            physical_batch_size = _validate.positive_int(
                "physical_batch_size", physical_batch_size
            )
        _validate.one_of("sampling", sampling, tuple(samplings()))
        check_unit(unit, sampling)
        views = Augmentation.of(model, augmentation, augmentation_multiplicity)
        kwargs.setdefault("name", f"private_{model.name}")
        replicas = replicas_of(model)
        with replicas.scope():
            super().__init__(dtype=model.dtype_policy, **kwargs)
        self._replicas = replicas
        self.model = model
        self.engine = engine
        self.physical_batch_size = physical_batch_size
        self.sampling = sampling
        self.unit = unit
        self._model_ledger = ModelLedger(self)
        self.recorder = self._model_ledger.recorder
        # So `tf.train.Checkpoint` has the ledger.
        self._ledger_state = LedgerState(
            self._model_ledger.state, self._model_ledger.restore
        )
        # What the training function was made for.
        self._session: Session | None = None
        # Callbacks that act in the steps of the `fit` that runs.
        self._acting: tuple[StepCallback, ...] = ()
        self._augmentation = views
        self._checked = CheckedModel(model, engine, views, replicas)
        if getattr(model, "optimizer", None) is not None:
            # Steps before any private one are a pre-training.
            if any(map(was_trained, model.trainable_variables)):
                keep_plain_steps(model)
            # Its slots would be saved with the private model.
            model.optimizer = None
        self.built = model.built

    # What the model is.

    def call(self, inputs: Nest, training: bool | None = None) -> Nest:
        """Run the wrapped model; for inference, refuse that it assigns a weight."""
        keeps = contextlib.nullcontext() if training else no_weight_assigned(self.model)
        with keeps:
            return _keras.run_model(self.model, inputs, training=training)

    def build(self, input_shape: Nest) -> None:
        """Build the wrapped model."""
        if not self.model.built:
            self.model.build(input_shape)
        self.built = True

    @property
    def fitted_signature(self) -> Nest:
        """Nest of `tf.TensorSpec` of the inputs that `fit` was given last, or None.

        A model that was loaded knows it, but for several inputs of a subclassed one.
        """
        return self._checked.fitted_signature

    @property
    def output_names(self) -> list[str] | None:
        """Names of the wrapped model's outputs, which dict losses refer to."""
        return getattr(self.model, "output_names", None)

    def summary(self, *args: object, **kwargs: object) -> None:
        """Print the summary of the wrapped model."""
        self.model.summary(*args, **kwargs)

    def export(self, *args: object, **kwargs: object) -> None:
        """Export the wrapped model, which has nothing of tfdp in it.

        What its layers have measured of rows (`keras.metrics`) is reset before.
        """
        _keras.reset_metrics(self.model)
        self.model.export(*args, **kwargs)

    def explain(self) -> str:
        """Describe how each layer's per-example gradients are clipped.

        Returns:
            A table: layer, rule, how its norm is computed, and the bytes that this
            takes for one example. Many steps of a loop that are alike are one
            line.

        Raises:
            UnsupportedLayerError: If the engine asked for cannot be used.
            ValueError: If the model's inputs are not known before the first `fit`.
        """
        signature = self._checked.signature or _keras.input_signature(self.model)
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
            rows = engines.ApartEngine().explain(self.model, signature)
        return explanation.table(rows)

    # What was run.

    @property
    def ledger(self) -> Ledger:
        """Every training that the wrapped model's weights come from, as of now."""
        self._model_ledger.take_over_copies()
        return self.recorder.ledger

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of all that was run, by the PLD accountant.

        Args:
            delta: In (0, 1); smaller than one over the number of examples.

        Returns:
            An upper bound of the epsilon; infinite if a step had no noise.
        """
        return self.ledger.epsilon(delta)

    def privacy_statement(
        self, delta: float, *, max_examples_per_user: int | None = None
    ) -> str:
        """Say what guarantee holds for the trained weights, and what it leaves out.

        Args:
            delta: In (0, 1); smaller than one over the number of examples.
            max_examples_per_user: How many rows a user has at most, if the text is to
                say what holds for a user: see `tfdp.data.bound_contributions`.

        Returns:
            Several paragraphs and a table, as plain text. If plain Keras has trained the
            wrapped model since it became private, that comes first.
        """
        text = privacy_statement(
            self.ledger, delta, max_examples_per_user=max_examples_per_user
        )
        own_steps = steps_of_plain_keras(self.model)
        if not own_steps:
            return text
        warning = filled(
            f"Warning: plain Keras has taken {own_steps} steps on the wrapped model, "
            "without clipping and noise. Nothing of what follows covers them: the weights "
            "as they are now are not private."
        )
        return f"{warning}\n\n{text}"

    @overload
    def privacy_report(
        self,
        delta: float,
        format: Literal["json", "registry"] = "json",
        *,
        answers: Mapping[str, str] | None = None,
        audits: Iterable[object] = (),
    ) -> Config: ...

    @overload
    def privacy_report(
        self,
        delta: float,
        format: str,
        *,
        answers: Mapping[str, str] | None = None,
        audits: Iterable[object] = (),
    ) -> Config | str: ...

    def privacy_report(
        self,
        delta: float,
        format: str = "json",  # noqa: A002
        *,
        answers: Mapping[str, str] | None = None,
        audits: Iterable[object] = (),
    ) -> Config | str:
        """Report what was run and what is proven, in a form that others ask for.

        What no program can know is a blank, ``____``, with a question and its name.
        An answer under that name fills it, in all forms that ask.

        No training metric, norm or drawn batch is in any of them. What audits measured
        is in them if you pass it: that is not private.

        Args:
            delta: In (0, 1); smaller than one over the number of examples.
            format: `"json"`: all that is known, for programs. `"registry"`: an entry of
                the Differential Privacy Deployments Registry [1]_. `"nist-800-226"`: a
                checklist after NIST SP 800-226 [2]_. `"model-card"`: a model card with
                the front matter that model hubs read.
            answers: From names of questions to answers; ``"questions"`` of the form
                `"json"` has all that are open.
            audits: Results of audits, which have a method `to_dict`, or dictionaries of
                those parts of them that are to be published.

        Returns:
            For `"json"` and `"registry"` a dictionary that JSON, and so YAML, can hold;
            for the others Markdown.

            That of `"json"` has all of `tfdp.accounting.privacy_report`, and

            * ``report_version``: 2, and ``date``, in UTC;
            * ``model``: its name, and ``weights``: how many numbers they are, their
              ``sha256``, the same after saving and loading, and ``how`` it comes about;
            * ``trainings``: sentences, and ``numbers_of_examples``: of users where these
              are drawn, None if it is not known; ``budget``: what binds all, or None;
            * ``steps``: noised steps that were taken, of whatever batches;
            * ``plain_keras_steps``: steps without noise since the model became private.
              If there are any, nothing is proven: ``epsilon`` is None;
            * ``l2_norm_clip``: the clip norm of the last step, which epsilon does not
              depend on; ``noise_multiplier`` is relative to the sensitivity, which is
              twice that for units of several examples; None if there was no step;
            * ``covered``: what epsilon is a bound for, a sentence;
            * ``not_trained``: paths of the weights that no private step updated. The
              guarantee says nothing about their values; ``pretrained``: nor about what
              the others were before; ``settings``: whether a search chose some;
            * ``audits``, ``answers``, ``questions``: as given, and what is open;
            * ``versions``: of tfdp, of what it stands on, and of Python.

        Raises:
            TypeError: If an argument has another type.
            ValueError: If `delta` is outside (0, 1), there is no such format or
                question, or an answer is blank or none of those that there are.

        Example:
            >>> private = tfdp.DPModel(keras.Sequential([keras.Input((2,))]))
            >>> card = private.privacy_report(
            ...     1e-5, "model-card", answers={"license": "apache-2.0"}
            ... )
            >>> card.splitlines()[1]
            'license: "apache-2.0"'

        References:
            .. [1] https://registry.opendp.org
            .. [2] https://doi.org/10.6028/NIST.SP.800-226
        """
        form = _validate.one_of("format", format, tuple(reports.FORMS))
        facts = reports.facts_of(
            self.model,
            self.recorder,
            self.ledger,
            delta,
            plain_steps=steps_of_plain_keras(self.model),
            answers=answers,
            audits=audits,
        )
        return reports.FORMS[form](facts)

    def planned_segments(self) -> tuple[Segment, ...]:
        """Return what the call of `fit` that runs now is to run, if nothing ends it.

        Returns:
            Parts for a ledger, without what ran before. For callbacks, from
            `on_train_begin` on.

        Raises:
            ValueError: If the data do not tell how many steps there are.
        """
        return self._model_ledger.planned()

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
                if the wrapped model overrides `compute_loss`, or its layers add losses.
            loss_weights: As in Keras.
            metrics: As in Keras. They are exact: what they show is not private.
            weighted_metrics: As in Keras.
            run_eagerly: Whether steps run without a graph. The pass through the model does
                not: it is the graph that was proven.
            steps_per_execution: As in Keras.
            jit_compile: Whether XLA compiles the passes through the model and, on a
                GPU, noise and update: with a mechanism, optimizer or schedule that it
                cannot compile (`tf.numpy_function`) use False, as in Keras. `"auto"`
                does on a GPU; on CPUs the engines are faster without it. Recurrent layers
                train without cuDNN, which XLA cannot compile: their passes are compiled,
                although Keras says otherwise on a GPU, of evaluation.
            auto_scale_loss: Must be False: float16 losses get a constant scale.

        Raises:
            NotPrivateError: If the optimizer is not a private one.
            ValueError: If there is no loss, or one that takes logits for
                probabilities, `auto_scale_loss` is set, a metric would be logged as one
                of validation rows or as a released one, the optimizer
                was made in the scope of another `tf.distribute` strategy than the
                model or belongs to another private model, or there is a strategy
                and `steps_per_execution` is not 1.
        """
        check_optimizer(optimizer)
        if auto_scale_loss:
            raise ValueError(
                "`auto_scale_loss` would change the scale and skip steps because of "
                "un-noised gradients. Received: auto_scale_loss=True. Leave it out: "
                "float16 losses get a constant scale."
            )
        check_distribution(self._replicas, optimizer, steps_per_execution)
        ascent = loss if isinstance(loss, AscentLoss) else None
        loss = loss if ascent is None else ascent.loss
        has_own_loss = self._checked.has_own_loss
        check_loss(self.model, loss, has_own_loss=has_own_loss)
        check_names_of_logs(self.model, metrics, weighted_metrics)
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
        _keras.note_metrics(self, metrics, weighted_metrics)
        self._given_jit_compile = jit_compile
        self._given_ascent = ascent
        self._checked.compile(
            loss, loss_weights, ascent if ascent and ascent.has_ascent() else None
        )
        if has_own_loss:
            keep_plain_steps(self.model)
            self.model.compile(
                optimizer=None, loss=loss, loss_weights=loss_weights, jit_compile=False
            )
        self._model_ledger.bind(optimizer)
        self._renew_keys()

    def _renew_keys(self) -> None:
        """Draw noise and masks with fresh secret keys from here on."""
        self.optimizer.renew_noise_key()
        _seeds.renew_key(self.model, is_known=self.optimizer.noise_is_seeded)

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
        *,
        user_ids: Nest = None,
        examples_per_user: int | None = None,
    ) -> keras.callbacks.History:
        """Train privately, with the arguments of `keras.Model.fit`.

        Args:
            x: Arrays, which are sampled as `sampling` says, with `batch_size` as
                the expected size of a batch, and must not change meanwhile: batches
                of later epochs are read ahead; a `tfdp.data.PoissonDataset`; what
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
            user_ids: For `unit="user"` and arrays: the user of each row, whole numbers
                or strings, shape ``(n,)``. `batch_size` is then the expected number of
                users in a step, and the divisor.
            examples_per_user: With them: how many rows of a user take part in a step,
                at most; of more a secret random part does. A public number, which must
                not come from the data. A step takes time for so many rows of each user.

        Returns:
            The history of the logs, which are not private.

        Raises:
            NotPrivateError: If the model was not compiled with a private optimizer, or
                another `fit` of it runs.
            PrivacyBudgetError: If a `PrivacyBudget` has no room for a first step.
            TypeError: If the replicas of a strategy cannot share the data.
            UnsupportedLayerError: If layers break per-example privacy.
            ValueError: If the arguments contradict each other.
            WorkerLostError: If another process that trains the model is gone.
        """
        self._get_ready()
        note_slow_cpu()
        check_inputs(x)
        check_validation_data(validation_data)
        check_class_weight(class_weight, sample_weight, y, self.model)
        if user_ids is not None and validation_split:
            raise ValueError(
                "`validation_split` would cut users in two. Received: validation_split="
                f"{validation_split} beside `user_ids`. Use `held_out = "
                "np.isin(user_ids, np.unique(user_ids)[::5])`, fit the others, `x[~held_out]`"
                ", and `validation_data=(x[held_out], y[held_out])`."
            )
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
            user_ids=user_ids,
            examples_per_user=examples_per_user,
        )
        check_protects(self.unit, data.scheme)
        if data.drawn is not None and data.drawn.is_padded:
            check_no_class_weight(class_weight)
        x_validated = keras.utils.unpack_x_y_sample_weight(validation_data)[0]
        callbacks = sorted_callbacks(
            callbacks, validates_private_rows=have_common_rows(x, x_validated)
        )
        to_run = range(initial_epoch, epochs)
        with (
            self._only_fit(),
            self._training(data, callbacks, to_run, class_weight) as (data, callbacks),
        ):
            is_weighed = self._replicas.strategy is not None
            if validation_data is not None and not is_weighed:
                check_assigns_no_weight(self, self.fitted_signature)
            return super().fit(
                x=data.x,
                y=data.y,
                batch_size=data.batch_size,
                epochs=epochs,
                verbose=verbose,
                callbacks=callbacks,
                validation_data=validation_data,
                shuffle=data.shuffle,
                class_weight=None if is_weighed else class_weight,
                sample_weight=data.sample_weight,
                initial_epoch=initial_epoch,
                steps_per_epoch=data.keras_steps_per_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size or batch_size,
                validation_freq=validation_freq,
            )

    @contextlib.contextmanager
    def _only_fit(self) -> Iterator[None]:
        """Refuse a `fit` inside of this one."""
        if self._is_fitting:
            raise NotPrivateError(
                "Only one `fit` of a private model may run: the steps of both would be "
                f"clipped as those of the last one. Received: model={self.name!r}, in the "
                "midst of its own `fit`. Call it when that has returned, or take single "
                "steps in the callback: `private.train_on_batch(x, y)`."
            )
        self._is_fitting, self._expects_batch = True, False
        try:
            yield
        finally:
            self._is_fitting = False

    @contextlib.contextmanager
    def _training(
        self,
        data: TrainingData,
        callbacks: list[keras.callbacks.Callback],
        epochs: range,
        class_weight: dict[int, float] | None,
    ) -> Iterator[tuple[TrainingData, list[keras.callbacks.Callback]]]:
        """Settle what a call of `fit` is made for, and count what Keras runs in it.

        Args:
            data: What `fit` was given.
            callbacks: Likewise, tfdp's own first.
            epochs: That are to run.
            class_weight: What replicas weigh the rows of their shares with.

        Yields:
            Data and callbacks as Keras gets them.
        """
        replicas, ledger, optimizer = self._replicas, self._model_ledger, self.optimizer
        if replicas.strategy is not None:
            check_shareable(data)
        steps = data.steps_per_epoch and data.steps_per_epoch * len(epochs)
        acting = [each for each in callbacks if isinstance(each, StepCallback)]
        first = LedgerCallback(ledger, data, replicas)
        kept = restored_journals(callbacks, self.recorder, ledger.noise_to_come)
        with lost_workers(replicas):
            paths = [journal.path for journal in kept]
            agree_on_training(replicas, self.recorder, optimizer, data, epochs, paths)
            for callback in acting:
                callback.before_training(optimizer, steps)
            clipper = self._clipper(data.scheme)
            data = self._check(data, clipper)
            regularizers.check_number_of_examples(
                self.trainable_variables, data.scheme.number_of_examples
            )
            self._renew_keys()
            for callback in acting:
                callback.set_model(self)
                find_queries(callback, optimizer)
            session = self._checked.session(
                data.scheme, clipper, optimizer, self.recorder, acting
            )
            self._settle(session)
            releases = self._prepare_releases(data, callbacks, epochs)
            self.recorder.journals = kept
            with ledger.counting(session, data, len(epochs), steps, releases):
                if replicas.strategy is not None:
                    data = shared_out(
                        data,
                        replicas,
                        epochs=len(epochs),
                        rows_per_unit=session.clipper.rows_per_unit,
                        class_weight=class_weight,
                    )
                else:
                    data = data.as_pipeline(self.steps_per_execution)
                self.__dict__["_acting"] = session.callbacks
                try:
                    yield data, [first, *callbacks, *kept, BatchCallback()]
                finally:
                    session.released.put_back()
                    self.__dict__["_acting"] = ()
                    # Keras would export what layers have measured of the rows.
                    _keras.reset_metrics(self.model)

    def _prepare_releases(
        self,
        data: TrainingData,
        callbacks: list[keras.callbacks.Callback],
        epochs: range,
    ) -> dict[ReleasingCallback, Segment]:
        """Let callbacks that release metrics see what they will release them of."""
        trained = Trained(
            self._checked.objective(),
            self._checked.outputs[1],
            data,
            self._model_ledger,
            self._replicas,
            epochs,
            self.unit,
        )
        found = [each for each in callbacks if isinstance(each, ReleasingCallback)]
        releases = {callback: callback.prepare(trained) for callback in found}
        for callback in callbacks:
            if isinstance(callback, WatchingCallback):
                callback.watch(found, self._model_ledger)
        return releases

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
        check_class_weight(class_weight, sample_weight, y, self.model)
        rows = number_of_examples(x)
        recorder = self.recorder
        # From a callback inside of `fit`, whose next steps have this function, too.
        # A step is checked as it is traced, for the number that layers see.
        session = self._session_of_single_step(
            Batch(x, y, sample_weight), None, recorder, self._acting
        )
        regularizers.check_number_of_examples(self.trainable_variables, None, rows=rows)
        self._settle(session)
        self._model_ledger.begin_single_step(session)
        self._model_ledger.check_dials()
        self._model_ledger.limit()
        try:
            self.expect_batch()
            return super().train_on_batch(
                x, y, sample_weight, class_weight, return_dict
            )
        finally:
            session.released.put_back()
            recorder.note_left(self.model.weights)

    def compute_metrics(
        self, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest = None
    ) -> dict[str, Tensor]:
        """Compute the metrics that `compile` was given, as Keras does.

        Returns:
            Their values up to now, which are not private.

        Raises:
            UnsupportedLayerError: If one assigns a variable that is not a metric's.
        """
        with only_metrics_assigned(self):
            logs: dict[str, Tensor] = super().compute_metrics(
                x, y, y_pred, sample_weight
            )
            return logs

    def reset_metrics(self) -> None:
        """Reset the metrics, as Keras does where an epoch or an evaluation begins.

        Raises:
            UnsupportedLayerError: If one assigns a variable of the model or the optimizer.
        """
        with only_metrics_called(self, "reset_state"):
            super().reset_metrics()

    def get_metrics_result(self) -> dict[str, Tensor]:
        """Return the values of the metrics, which are not private, as Keras does.

        Raises:
            UnsupportedLayerError: If one assigns a variable of the model or the optimizer.
        """
        with only_metrics_called(self, "result"):
            values: dict[str, Tensor] = super().get_metrics_result()
            return values

    @_keras.without_autograph
    def train_step(self, data: Nest) -> dict[str, Tensor]:
        """Take one private step if the budget has room for it.

        Args:
            data: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``; may have no rows.

        Returns:
            The logs of the epoch up to now.

        Raises:
            NotPrivateError: If there are several replicas, each of which would count the
                rows, or inside of another step.
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
        """Take one private step; replicas share what is done here, once for all."""
        with self.optimizer.only_step():
            return self._take_only_step(Batch.of(data), fingerprint)

    def _take_only_step(
        self, batch: Batch, fingerprint: Tensor | None
    ) -> dict[str, Tensor]:
        if self._is_in_train_function and self._session is not None:
            session, has_room = self._session_for(batch), self.recorder.counter.has_room
        else:
            # It counts as one of a loop of one's own, whose batches nobody knows, also
            # while `fit` runs.
            rows = number_of_rows(batch)
            with tf.init_scope():
                session = self._session_of_single_step(
                    batch,
                    rows if isinstance(rows, int) else None,
                    self.optimizer.recorder_of_loops,
                )
            has_room = functools.partial(self._model_ledger.has_room, session)
        private_step(
            session,
            batch,
            has_room=has_room,
            on_outputs=self._update_metrics,
            fingerprint=fingerprint,
        )
        logs: dict[str, Tensor] = self.get_metrics_result()
        return logs

    def _session_for(self, batch: Batch) -> Session:
        """Return the session of `fit`, with an engine for the batch as the graph has it.

        `fit` has checked the first rows. A graph may be traced for others.
        """
        session, rows = self._session, None
        assert session is not None  # noqa: S101
        if self._replicas.strategy is not None:
            batch = self._replicas.first(batch)
        else:
            rows = number_of_rows(batch)
        rows = rows if isinstance(rows, int) else None
        self._check_batch(batch, rows, session.clipper)
        clipper = dataclasses.replace(session.clipper, engine=self._checked.engine)
        if clipper == session.clipper:
            return session
        return dataclasses.replace(session, clipper=clipper)

    def _update_metrics(
        self, has_room: Tensor, data: Nest, rows: Tensor, outputs: Nest
    ) -> None:
        """Log the ordinary loss and metrics of some rows."""

        def update() -> bool:
            x, y, sample_weight = data
            with self._losses_of(outputs):
                loss = self.compute_loss(
                    x=x, y=y, y_pred=y_pred, sample_weight=sample_weight
                )
            _keras.loss_tracker(self).update_state(loss, sample_weight=rows)
            self.compute_metrics(x, y, y_pred, sample_weight)
            return True

        y_pred = outputs.masked() if isinstance(outputs, Predicted) else outputs
        tf.cond(has_room & (rows > 0), update, lambda: False)

    def _losses_of(self, outputs: Nest) -> contextlib.AbstractContextManager[None]:
        """Let the losses be those that layers add for rows, and those of weights."""
        if not isinstance(outputs, Predicted) or not outputs.added:
            return contextlib.nullcontext()
        asked = self.model if self._checked.has_own_loss else self
        added = tf.reduce_mean(outputs.added[0])
        # What layers have kept may be of another graph.
        _keras.clear_losses(asked)
        return _keras.with_losses(asked, [added, *asked.losses])

    def compute_loss(
        self,
        x: Nest = None,
        y: Nest = None,
        y_pred: Nest = None,
        sample_weight: Nest = None,
        training: bool = True,
    ) -> Tensor:
        """Compute the ordinary loss of a batch, as the wrapped model would.

        Returns:
            A scalar, which is not private.

        Raises:
            UnsupportedLayerError: If it assigns a weight, or a variable of the optimizer.
        """
        if self._checked.has_losses_of_keras:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        with losses_keep_nothing(self, training=training):
            if not self._checked.has_own_loss:
                return super().compute_loss(x, y, y_pred, sample_weight, training)
            return _keras.compute_loss(
                self.model, x, y, y_pred, sample_weight, training=training
            )

    def nonprivate_losses(
        self, x: Nest, y: Nest = None, sample_weight: Nest = None, batch_size: int = 256
    ) -> np.ndarray:
        """Compute the loss of each example, without noise, as `evaluate` runs the model.

        Args:
            x: Inputs, arrays as in Keras.
            y: Targets likewise.
            sample_weight: Weights likewise.
            batch_size: Examples that go through the model at once.

        Returns:
            What training would minimise for each, without regularizers, shape ``(n,)``.
        """
        objective = dataclasses.replace(self._checked.objective(), training=False)
        data = _tree.map_tensors(tf.convert_to_tensor, (x, y, sample_weight))

        @tf.function(autograph=False, reduce_retracing=True)
        def losses(batch: Batch) -> Tensor:
            return objective.forward(batch)[1]

        found = [
            losses(
                Batch(
                    *_tree.map_tensors(
                        operator.itemgetter(slice(first, first + batch_size)), data
                    )
                )
            ).numpy()
            for first in range(0, number_of_examples(x), batch_size)
        ]
        return np.concatenate(found)

    # Before a training begins.

    @contextlib.contextmanager
    def rehearsal(
        self, scheme: Scheme, batch: Batch, callbacks: Sequence[StepCallback]
    ) -> Iterator[tuple[Session, Callable[[], None]]]:
        """Let `tfdp.audit` take steps that nothing counts and that leave nothing.

        Where the model was checked before it is not checked again: an audit does not
        rest on what was proven.

        Args:
            scheme: How the batches are drawn.
            batch: Rows such as theirs.
            callbacks: Act in the steps.

        Yields:
            A session with a recorder of its own, and a function after which the first
            step may come again, with its noise and its masks.
        """
        self._get_ready()
        optimizer = self.optimizer
        if not optimizer.built and self.built:
            optimizer.build(self.trainable_variables)
        # The outer one has the batch size that the optimizer expected before.
        with optimizer.set_aside():
            clipper = self._clipper(scheme)
            if self._checked.signature is None:
                self._check_batch(batch, None, clipper)
            session = self._checked.session(
                scheme, clipper, optimizer, LedgerRecorder(), callbacks
            )
            session.recorder.begin(session.scheme)
            key = _seeds.key_words(self.model)
            states = [*self.model.weights, *clipper.states(), key]
            released = session.released.state()
            with (
                _keras.values_kept(states) as put_back,
                optimizer.set_aside() as put_optimizer_back,
            ):

                def begin() -> None:
                    put_back()
                    put_optimizer_back()
                    session.released.restore(released)

                try:
                    yield session, begin
                finally:
                    session.released.put_back()
                    session.released.restore(released)

    def _clipper(self, scheme: Scheme) -> BatchClipper:
        """Return what cuts batches; a session gives it the engine that was chosen."""
        asked = BatchClipper(
            self.model,
            self._checked.engine,
            may_change_engine=self.engine == "auto",
            physical_batch_size=self.physical_batch_size,
            replicas=self._replicas,
            augmentation=self._augmentation,
            jit_compile=_keras.compiles_training(self, self._given_jit_compile),
        )
        return with_sizes(asked, scheme, self.optimizer)

    def _session_of_single_step(
        self,
        batch: Batch,
        rows: int | None,
        recorder: LedgerRecorder,
        callbacks: Sequence[StepCallback] = (),
    ) -> Session:
        """Return what a step is made for whose batch nobody has described."""
        check_protects(self.unit, UNDECLARED)
        _seeds.use_key(self.model, is_known=self.optimizer.noise_is_seeded)
        clipper = self._clipper(UNDECLARED)
        self._check_batch(batch, rows, clipper)
        session = self._checked.session(
            UNDECLARED, clipper, self.optimizer, recorder, callbacks
        )
        if self._is_fitting and recorder is self.recorder:
            recorder.step_between(session.scheme)
        elif recorder.counter.scheme != session.scheme:
            recorder.begin(session.scheme)
        return session

    def _settle(self, session: Session) -> None:
        """Make the training function anew if it was made for something else."""
        if not self.optimizer.built:
            # A function that makes variables is traced twice.
            with self._replicas.scope():
                self.optimizer.build(self.trainable_variables)
        if session != self._session:
            self.__dict__["_session"], self.train_function = session, None

    def _get_ready(self) -> None:
        """Refuse to train what cannot be, and take a newly assigned optimizer."""
        check_trainable(self)
        check_scope(self._replicas)
        if (
            self._model_ledger.optimizer is not self.optimizer
        ):  # Assigned after `compile`.
            check_optimizer(self.optimizer)
            check_distribution(self._replicas, self.optimizer, self.steps_per_execution)
            self._model_ledger.bind(self.optimizer)

    def _check(self, data: TrainingData, clipper: BatchClipper) -> TrainingData:
        """Refuse layers and losses that mix examples."""
        static_rows = self._checked.static_rows(data.static_batch_size, clipper)
        spec = data.element_spec
        if spec is None or not self._checked.knows(spec, static_rows):
            data, sample = data.with_sample()
            like = sample if spec is None else spec
            if not self._checked.knows(like, static_rows):
                self._check_rows(like, sample, static_rows)
        return data

    def _check_batch(
        self, batch: Batch, rows: int | None, clipper: BatchClipper
    ) -> None:
        """Check what a step is about to take, or a graph is about to be traced for.

        Whatever was checked before: for rows of another shape layers may do something
        else.
        """
        data = batch[:3]
        static_rows = self._checked.static_rows(rows, clipper)
        if self._checked.knows(data, static_rows):
            return
        shapes = [tf.TensorShape(each.shape)[1:] for each in _tree.tensors(data)]
        has_sample = all(shape.is_fully_defined() for shape in shapes)
        with _keras.outside_of_graphs():
            self._check_rows(data, data if has_sample else None, static_rows)

    def _check_rows(self, data: Nest, sample: Nest, static_rows: int | None) -> None:
        check_targets(data[1], needs_them=self._checked.needs_targets)
        # A graph of several replicas is traced for what has been built before.
        is_in_graph = any(map(tf.is_symbolic_tensor, _tree.tensors(data)))
        if self._replicas.strategy is not None and not is_in_graph:
            self.build_all(sample)
        # Keras makes some of them after `compile`: those of single outputs, of names.
        _keras.note_metrics(self)
        self._checked.check(data, sample, static_rows, self.optimizer.iterations)
        _keras.build_metrics(self, *self._checked.outputs)
        self.built = True

    # Saving.

    def save_own_variables(self, store: Config) -> None:
        """Save the ledger beside the weights."""
        super().save_own_variables(store)
        store["ledger"] = np.frombuffer(self._model_ledger.state().encode(), np.uint8)
        self._checked.save(store)

    def load_own_variables(self, store: Config) -> None:
        """Take over a saved ledger; what was run here stays counted."""
        saved = {key: store[key] for key in store.keys()}  # noqa: SIM118 (HDF5)
        # The second of these is in files of tfdp 0.1.
        ledger, trained = saved.pop("ledger", None), saved.pop("trained", None)
        self._checked.load(saved)
        super().load_own_variables(saved)
        if ledger is not None:
            self._model_ledger.restore(np.asarray(ledger, np.uint8).tobytes().decode())
        if trained is not None:
            self._model_ledger.note_trained(np.asarray(trained, np.uint8).tobytes())

    def load_weights(self, *args: object, **kwargs: object) -> None:
        """Load weights, the optimizer's state and the ledger, as Keras does."""
        if self.compiled and self.built and not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        super().load_weights(*args, **kwargs)
        if self.compiled:
            self._renew_keys()
            self._model_ledger.limit_again()

    def get_config(self) -> Config:
        """Return the arguments that rebuild the model."""
        config = {
            "model": keras.saving.serialize_keras_object(self.model),
            "engine": self.engine if isinstance(self.engine, str) else self.engine.name,
            "physical_batch_size": self.physical_batch_size,
            "sampling": self.sampling,
            "unit": self.unit,
            "name": self.name,
        }
        if self._augmentation is not None:
            function = self._augmentation.function
            config |= {
                "augmentation": keras.saving.serialize_keras_object(function),
                "augmentation_multiplicity": self._augmentation.multiplicity,
            }
        return config

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
