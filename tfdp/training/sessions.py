"""What a training is made for, settled and checked before anything is traced."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdp import _keras, _seeds, _tree
from tfdp._types import Nest, Tensor
from tfdp.data.training_data import TrainingData
from tfdp.distribute.workers import check_distribution, check_scope
from tfdp.losses.batch import Batch, number_of_rows
from tfdp.runs.counter import UNDECLARED
from tfdp.runs.recorder import LedgerRecorder
from tfdp.sampling import Scheme
from tfdp.training.arguments import (
    check_optimizer,
    check_protects,
    check_targets,
    check_trainable,
)
from tfdp.training.batch_clipper import BatchClipper
from tfdp.training.callback import StepCallback, acts_in_steps
from tfdp.training.checked_model import CheckedModel
from tfdp.training.model_ledger import ModelLedger
from tfdp.training.step import Session
from tfdp.training.units import with_sizes


class Sessions:
    """Makes the sessions of a private model, each after its checks.

    Args:
        private: The private model. Its `unit`, `engine` and `physical_batch_size` are read
            anew each time, as what Keras keeps in it is: the optimizer, and metrics.
        checked: The wrapped model with its loss.
        ledger: Of the private model.

    Attributes:
        private: As given, like `checked` and `ledger`.
        replicas: Those that train it.
        jit_compile: What `compile` was given.
        settled: What the training function was made for; None before the first one.
        acting: Callbacks that act in the steps of the `fit` that runs; None while no `fit`
            does.
        expects_batch: True from where that `fit`, or a single step, announces a batch to
            where the training function takes it.
    """

    jit_compile: bool | str = "auto"

    def __init__(
        self,
        private: _keras.ReplicatedModel,
        checked: CheckedModel,
        ledger: ModelLedger,
    ) -> None:
        """Make none yet."""
        self.private = private
        self.checked = checked
        self.ledger = ledger
        self.replicas = checked.replicas
        self.settled: Session | None = None
        self.acting: tuple[StepCallback, ...] | None = None
        self.expects_batch = False

    def get_ready(self) -> None:
        """Refuse to train what cannot be, and take a newly assigned optimizer."""
        private, replicas = self.private, self.replicas
        check_trainable(private)
        check_scope(replicas)
        if self.ledger.optimizer is not private.optimizer:  # Assigned after `compile`.
            check_optimizer(private.optimizer)
            check_distribution(replicas, private.optimizer, private.steps_per_execution)
            self.ledger.bind(private.optimizer)

    def renew_keys(self) -> None:
        """Draw noise and masks with fresh secret keys from here on."""
        optimizer = self.private.optimizer
        optimizer.renew_noise_key()
        _seeds.renew_key(self.private.model, is_known=optimizer.noise_is_seeded)

    def clipper(self, scheme: Scheme) -> BatchClipper:
        """Return what cuts batches; a session gives it the engine that was chosen.

        Args:
            scheme: How the batches are drawn. The optimizer gets to know their size.

        Raises:
            ValueError: If sizes do not go together; see `with_sizes`.
        """
        private = self.private
        asked = BatchClipper(
            private.model,
            self.checked.engine,
            may_change_engine=private.engine == "auto",
            physical_batch_size=private.physical_batch_size,
            replicas=self.replicas,
            augmentation=self.checked.augmentation,
            jit_compile=_keras.compiles_training(private, self.jit_compile),
        )
        return with_sizes(asked, scheme, private.optimizer)

    def made(
        self,
        scheme: Scheme,
        clipper: BatchClipper,
        recorder: LedgerRecorder,
        callbacks: Sequence[StepCallback],
    ) -> Session:
        """Return what a training function is made for, after the checks.

        Args:
            scheme: How the batches are drawn.
            clipper: Cuts them; with any engine.
            recorder: Counts the steps.
            callbacks: Some act in the steps.

        Raises:
            ValueError: If the optimizer's noise is not accounted for such batches.
        """
        checked, optimizer = self.checked, self.private.optimizer
        acting = tuple(each for each in callbacks if acts_in_steps(each))
        session = Session(
            dataclasses.replace(clipper, engine=checked.engine, passes=checked.passes),
            checked.objective(),
            checked.objective_uphill(optimizer.iterations),
            scheme.in_units(clipper.examples_per_unit),
            optimizer,
            optimizer.mechanism,
            recorder,
            checked.ascent,
            checked.released,
            acting,
            tuple(query for callback in acting for query in callback.queries),
        )
        optimizer.mechanism.check(session.scheme)
        return session

    def settle(self, session: Session) -> None:
        """Make the training function anew if it was made for something else."""
        private = self.private
        if not private.optimizer.built:
            # A function that makes variables is traced twice.
            with self.replicas.scope():
                private.optimizer.build(private.trainable_variables)
        if session != self.settled:
            self.settled, private.train_function = session, None

    def for_batch(self, batch: Batch) -> Session:
        """Return what was settled, with an engine for a batch as the graph has it.

        `fit` has checked the first rows. A graph may be traced for others.

        Args:
            batch: Of the training function.
        """
        session, batch = self.settled, self.replicas.first(batch)
        assert session is not None  # noqa: S101
        self._check_batch(batch, number_of_rows(batch), session.clipper)
        clipper = dataclasses.replace(session.clipper, engine=self.checked.engine)
        if clipper == session.clipper:
            return session
        return dataclasses.replace(session, clipper=clipper)

    def for_single_step(
        self, batch: Batch, recorder: LedgerRecorder, rows: int | Tensor | None = None
    ) -> Session:
        """Return what a step is made for whose batch nobody has described.

        Args:
            batch: Its rows.
            recorder: Counts it. Callbacks of the `fit` that runs act in it if that is the
                model's own.
            rows: How many there are, if layers see that.
        """
        private = self.private
        check_protects(private.unit, UNDECLARED)
        _seeds.use_key(private.model, is_known=private.optimizer.noise_is_seeded)
        clipper = self.clipper(UNDECLARED)
        self._check_batch(batch, rows, clipper)
        acting = self.acting if recorder is self.ledger.recorder else None
        session = self.made(UNDECLARED, clipper, recorder, acting or ())
        if acting is not None:
            recorder.step_between(session.scheme)
        elif recorder.counter.scheme != session.scheme:
            recorder.begin(session.scheme)
        return session

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
        self.get_ready()
        private, optimizer = self.private, self.private.optimizer
        if not optimizer.built and private.built:
            optimizer.build(private.trainable_variables)
        # The outer one has the batch size that the optimizer expected before.
        with optimizer.set_aside():
            clipper = self.clipper(scheme)
            if self.checked.signature is None:
                self._check_batch(batch, None, clipper)
            session = self.made(scheme, clipper, LedgerRecorder(), callbacks)
            session.recorder.begin(session.scheme)
            key = _seeds.key_words(private.model)
            states = [*private.model.weights, *clipper.states(), key]
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

    # Checks.

    def check(self, data: TrainingData, clipper: BatchClipper) -> TrainingData:
        """Refuse layers and losses that mix examples.

        Args:
            data: What `fit` got.
            clipper: Cuts their batches.

        Returns:
            The data, of which a few rows may have been looked at.
        """
        static_rows = self.checked.static_rows(data.static_batch_size, clipper)
        spec = data.element_spec
        if spec is None or not self.checked.knows(spec, static_rows):
            data, sample = data.with_sample()
            like = sample if spec is None else spec
            if not self.checked.knows(like, static_rows):
                self._check_rows(like, sample, static_rows)
        return data

    def _check_batch(
        self, batch: Batch, rows: int | Tensor | None, clipper: BatchClipper
    ) -> None:
        """Check what a step is about to take, or a graph is about to be traced for.

        Whatever was checked before: for rows of another shape layers may do something
        else.
        """
        data = batch[:3]
        static_rows = self.checked.static_rows(
            rows if isinstance(rows, int) else None, clipper
        )
        if self.checked.knows(data, static_rows):
            return
        shapes = [tf.TensorShape(each.shape)[1:] for each in _tree.tensors(data)]
        has_sample = all(shape.is_fully_defined() for shape in shapes)
        with _keras.outside_of_graphs():
            self._check_rows(data, data if has_sample else None, static_rows)

    def _check_rows(self, data: Nest, sample: Nest, static_rows: int | None) -> None:
        private = self.private
        check_targets(data[1], needs_them=self.checked.needs_targets)
        # A graph of several replicas is traced for what has been built before.
        is_in_graph = any(map(tf.is_symbolic_tensor, _tree.tensors(data)))
        if self.replicas.strategy is not None and not is_in_graph:
            private.build_all(sample)
        # Keras makes some of them after `compile`: those of single outputs, of names.
        _keras.note_metrics(private)
        self.checked.check(data, sample, static_rows, private.optimizer.iterations)
        _keras.build_metrics(private, *self.checked.outputs)
        private.built = True
