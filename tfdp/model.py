"""A Keras model whose training steps are differentially private."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Self, overload

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree, _validate, engines, reports
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
    number_of_examples,
    split_for_validation,
    training_data,
)
from tfdp.distribute.workers import (
    check_distribution,
    replicas_of,
)
from tfdp.errors import NotPrivateError
from tfdp.losses import regularizers
from tfdp.losses.added import Predicted
from tfdp.losses.batch import Batch, number_of_rows
from tfdp.optimizers import DPOptimizer
from tfdp.runs.checkpoints import LedgerState
from tfdp.runs.histories import was_trained
from tfdp.sampling import samplings
from tfdp.training.arguments import (
    check_class_weight,
    check_inputs,
    check_loss,
    check_names_of_logs,
    check_no_class_weight,
    check_optimizer,
    check_protects,
    check_unit,
    check_validation_data,
    check_wrapped,
    note_slow_cpu,
)
from tfdp.training.augmentation import Augmentation
from tfdp.training.checked_model import CheckedModel
from tfdp.training.fit_callbacks import sorted_callbacks
from tfdp.training.fitting import fitting
from tfdp.training.functions import TrainingFunctions
from tfdp.training.model_ledger import (
    ModelLedger,
    keep_plain_steps,
    steps_of_plain_keras,
)
from tfdp.training.sessions import Sessions
from tfdp.training.step import private_step


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
        `privacy_statement` lists what is not covered, floating point among it.

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
        self._checked = CheckedModel(model, engine, views, replicas)
        self.sessions = Sessions(self, self._checked, self._model_ledger)
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
        return self._checked.explain()

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
        self.sessions.jit_compile = jit_compile
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
        self.sessions.renew_keys()

    def get_compile_config(self) -> Config:
        """Return the arguments of `compile`."""
        config = {
            **super().get_compile_config(),
            "jit_compile": self.sessions.jit_compile,
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
        self.sessions.get_ready()
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
        around = fitting(self.sessions, data, callbacks, to_run, class_weight)
        with around as (data, callbacks):
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
        self.sessions.get_ready()
        if self._replicas.number > 1:
            raise ValueError(
                "`train_on_batch` would give every replica the same batch. Received: "
                f"{self._replicas.number} replicas. Use `private.fit(...)`, which gives "
                "each a share."
            )
        check_class_weight(class_weight, sample_weight, y, self.model)
        rows = number_of_examples(x)
        # From a callback inside of `fit`, whose next steps have this function, too.
        # A step is checked as it is traced, for the number that layers see.
        session = self.sessions.for_single_step(
            Batch(x, y, sample_weight), self.recorder
        )
        regularizers.check_number_of_examples(self.trainable_variables, None, rows=rows)
        self.sessions.settle(session)
        self._model_ledger.begin_single_step(session)
        self.optimizer.check_dials()
        self._model_ledger.limit()
        try:
            self.sessions.expects_batch = True
            return super().train_on_batch(
                x, y, sample_weight, class_weight, return_dict
            )
        finally:
            self.sessions.expects_batch = False
            session.released.put_back()
            self.recorder.note_left(self.model.weights)

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
        # A `train_step` of a subclass may take any rows, and more than one step.
        is_own = getattr(self.train_step, "__func__", None) is DPModel.train_step
        is_settled = self._is_in_train_function and is_own
        if is_settled and self.sessions.settled is not None:
            session = self.sessions.for_batch(batch)
            has_room = self.recorder.counter.has_room
        else:
            # It counts as one of a loop of one's own, whose batches nobody knows, also
            # while `fit` runs.
            rows = number_of_rows(batch)
            with tf.init_scope():
                session = self.sessions.for_single_step(
                    batch, self.optimizer.recorder_of_loops, rows
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
        data = _tree.map_tensors(tf.convert_to_tensor, Batch(x, y, sample_weight))
        return objective.losses_of_rows(data, number_of_examples(x), batch_size)

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
            self.sessions.renew_keys()
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
        views = self._checked.augmentation
        if views is not None:
            config |= {
                "augmentation": keras.saving.serialize_keras_object(views.function),
                "augmentation_multiplicity": views.multiplicity,
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
