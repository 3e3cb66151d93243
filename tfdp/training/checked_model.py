"""A model that is checked before it trains, and the engine that will train it."""

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdp import _keras, _tree, engines
from tfdp._tree import signature_of
from tfdp._types import Loss, Nest, Tensor
from tfdp.ascent.losses import SAT, AscentLoss
from tfdp.ascent.released import ReleasedGradient
from tfdp.checks.engine import choose
from tfdp.data.training_data import first_rows, made_up_rows, number_of_examples
from tfdp.distribute.replicas import Replicas
from tfdp.errors import NotPrivateError
from tfdp.losses.objective import Objective
from tfdp.optimizers import DPOptimizer
from tfdp.runs.recorder import LedgerRecorder
from tfdp.sampling import Scheme
from tfdp.training.augmentation import Augmentation
from tfdp.training.callback import StepCallback
from tfdp.training.step import BatchClipper, Session, objective_uphill
from tfdp.training.units import filled_up

# Sizes of batches that a model is checked with, one by one. By then TensorFlow traces
# for any number of rows.
_MOST_SIZES = 4


class CheckedModel:
    """A model with its loss: remembers for how many rows both were checked.

    Args:
        model: To be trained.
        engine: As in `tfdp.DPModel`.
        augmentation: Makes the views of each example, if any.
        replicas: That train it.

    Attributes:
        engine: The one that was chosen; before the first check the one asked for.
        signature: Nest of `tf.TensorSpec` of the inputs that it was checked with last.
        has_own_loss: Whether the model computes the loss itself.
        ascent: The loss that takes gradients uphill, if any.
        released: The gradient that was released last, for `SAT`.
    """

    def __init__(
        self,
        model: keras.Model,
        engine: str | engines.Engine,
        augmentation: Augmentation | None,
        replicas: Replicas,
    ) -> None:
        """Check nothing yet."""
        self._model = model
        self._asked = engine
        self._augmentation = augmentation
        self._replicas = replicas
        self.engine = engines.get(engine)
        self.signature: Nest = None
        self.has_own_loss = type(model).compute_loss is not keras.Model.compute_loss
        self.compile(None, None, None)

    def compile(
        self, loss: Loss, loss_weights: Nest, ascent: AscentLoss | None
    ) -> None:
        """Take another loss, and check anew.

        Args:
            loss: As in `keras.Model.compile`.
            loss_weights: Likewise.
            ascent: See `ascent`.
        """
        self._loss, self._loss_weights, self.ascent = loss, loss_weights, ascent
        if not isinstance(ascent, SAT):
            self.released = ReleasedGradient()
        self._objective: Objective | None = None
        self._known: frozenset[int | None] = frozenset()
        self._trainable: tuple[bool, ...] = ()

    def objective(self) -> Objective:
        """Return the plain loss of each example, the same while nothing changes."""
        # By their ids: Keras's variables compare their values. Equal sessions share a
        # training function, and each objective equals itself alone.
        trainable = list(map(id, self._model.trainable_variables))
        known = self._objective
        if known is None or list(map(id, known.variables)) != trainable:
            if self.has_own_loss:
                known = Objective.of_compute_loss(self._model)
            else:
                known = Objective.of(self._model, self._loss, self._loss_weights)
            self._objective = known
        return known

    def session(
        self,
        scheme: Scheme,
        clipper: BatchClipper,
        optimizer: DPOptimizer,
        recorder: LedgerRecorder,
        callbacks: Sequence[StepCallback],
    ) -> Session:
        """Return what a training function is made for, after the checks.

        Args:
            scheme: How the batches are drawn.
            clipper: Cuts them; with any engine.
            optimizer: Takes the steps.
            recorder: Counts them.
            callbacks: Some act in the steps.

        Raises:
            ValueError: If the optimizer's noise is not accounted for such batches.
        """
        acting = tuple(each for each in callbacks if each.acts_in_steps())
        session = Session(
            dataclasses.replace(clipper, engine=self.engine),
            self.objective(),
            scheme.in_units(clipper.examples_per_unit),
            optimizer,
            optimizer.mechanism,
            recorder,
            self.ascent,
            self.released,
            acting,
            tuple(query for callback in acting for query in callback.queries),
        )
        optimizer.mechanism.check(session.scheme)
        return session

    def unchecked(
        self, batch_size: int | None, clipper: BatchClipper
    ) -> list[int | None]:
        """Return how many rows go through the model at once that it has not seen yet.

        Args:
            batch_size: Of all batches, or of some, if that is static.
            clipper: Cuts them.

        Returns:
            Static sizes of passes, None for any.
        """
        views = 1 if self._augmentation is None else self._augmentation.multiplicity
        sizes: list[int | None] = [None]
        if clipper.physical_batch_size is not None:
            sizes = [clipper.physical_batch_size * views]
        elif batch_size:
            sizes = [None, filled_up(batch_size, clipper.examples_per_unit) * views]
        if self._trainable != self._trainable_now():
            return sizes
        if len(self._known) >= _MOST_SIZES:
            return [] if None in self._known else [None]
        return [size for size in sizes if size not in self._known]

    def can_be_checked(self, data: Nest, name: str) -> bool:
        """Tell whether the lengths of all axes are known, with which rows are made up.

        Args:
            data: ``(x, y, sample_weight)`` of a batch, which a graph may have.
            name: Of the private model.

        Returns:
            False if the model was checked with other rows, which must do.

        Raises:
            NotPrivateError: If they are not, and the model was never checked.
        """
        shapes = [tf.TensorShape(each.shape)[1:] for each in _tree.tensors(data)]
        is_known = all(shape.is_fully_defined() for shape in shapes)
        if not is_known and self.signature is None:
            raise NotPrivateError(
                f"Model `{name}` was never checked, and cannot be with rows "
                "of unknown shape. Received: a batch whose axes have unknown lengths. Call "
                "`private.fit(...)` or `private.train_on_batch(...)` once before, or "
                "give the batch static shapes."
            )
        return is_known

    def check(self, data: Nest, sizes: list[int | None], iteration: Tensor) -> None:
        """Refuse layers and losses that mix examples, and choose the engine.

        A model without weights makes them.

        Args:
            data: ``(x, y, sample_weight)``, see `rows_to_check`.
            sizes: What `unchecked` returned.
            iteration: The optimizer's `iterations`.

        Raises:
            UnsupportedLayerError: If no engine can train the model privately.
        """
        with self._replicas.only_first(), _keras.losses_of_one_replica():
            rows = rows_to_check(data)
            if self._augmentation is not None:
                self._augmentation.check(rows[0])
            if not self._model.built:
                self._model(_tree.map_tensors(tf.convert_to_tensor, rows[0]))
            objective = objective_uphill(self.objective(), self.ascent, iteration)
            self.engine = choose(self._asked, objective, rows, sizes)
        # Unfrozen layers may do what frozen ones did not: all sizes are unknown again.
        trainable = self._trainable_now()
        known = self._known if trainable == self._trainable else frozenset()
        self._trainable, self._known = trainable, known.union(sizes)
        self.signature = signature_of(rows[0])

    def _trainable_now(self) -> tuple[bool, ...]:
        """Return what decides whether layers such as BatchNormalization keep data."""
        return tuple(layer.trainable for layer in _keras.flatten_layers(self._model))


def rows_to_check(data: Nest) -> Nest:
    """Take the few rows that a model is checked with.

    Args:
        data: ``(x, y, sample_weight)``, nested arrays or tensors, or None.

    Returns:
        The first rows. Where there are none, or a graph has them, rows are made up.
    """
    is_in_graph = any(map(tf.is_symbolic_tensor, _tree.tensors(data)))
    if is_in_graph or not number_of_examples(data):
        return made_up_rows(data)
    return first_rows(data)
