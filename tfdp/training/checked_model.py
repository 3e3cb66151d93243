"""A model that is checked before it trains, and the engine that will train it."""

import dataclasses
import functools
import json
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree, engines
from tfdp._tree import signature_of
from tfdp._types import Config, Loss, Nest, Tensor, Variable
from tfdp.ascent.losses import BAM, SAT, AscentLoss
from tfdp.ascent.released import ReleasedGradient
from tfdp.checks.engine import choose
from tfdp.data.training_data import first_rows, made_up_rows, number_of_examples
from tfdp.distribute.replicas import Replicas
from tfdp.engines import VectorizedEngine, explanation
from tfdp.errors import NotPrivateError, UnsupportedLayerError
from tfdp.losses.objective import Objective
from tfdp.training.attributes import attributes_of
from tfdp.training.augmentation import Augmentation
from tfdp.training.batch_clipper import BatchClipper, keeps_static_rows
from tfdp.training.units import filled_up

if TYPE_CHECKING:
    from tfdp.engines.traced import TracedPass

# Name of what a saved model has of its inputs.
_INPUTS = "inputs"

# What the leaves of a batch are: place, shape of a row (None: any length), kind of
# numbers. Floats are all alike: Keras casts them.
_Rows: TypeAlias = tuple[tuple[Hashable, tuple[int | None, ...], str], ...]


class CheckedModel:
    """A model with its loss: remembers for which rows both were checked.

    Args:
        model: To be trained.
        engine: As in `tfdp.DPModel`.
        augmentation: Makes the views of each example, if any.
        replicas: That train it.

    Attributes:
        augmentation: As given, like `replicas`.
        engine: The one that was chosen; before the first check the one asked for.
        passes: What engines do with rows, as far as that was proven: they run it.
        signature: Nest of `tf.TensorSpec` of the inputs that it was checked with last.
        outputs: Targets and predictions likewise: ``(y, y_pred)``.
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
        self.augmentation = augmentation
        self.replicas = replicas
        self.engine = engines.get(engine)
        self.signature: Nest = None
        # Of the inputs that trained a model which was loaded.
        self._loaded: list[tf.TensorSpec] = []
        self.outputs: tuple[Nest, Nest] = (None, None)
        self.passes: list[TracedPass] = []
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
        # The plain one and the iterations that it was made of, and what was made.
        self._uphill: tuple[Objective, Variable, Objective] | None = None
        # By what rows are like, and how many of them layers see.
        self._engines: dict[tuple[_Rows, int | None], engines.Engine] = {}
        # The same list always: training functions that were made hold it.
        self.passes.clear()
        self._attributes: Hashable = None

    @property
    def needs_targets(self) -> bool:
        """Whether the loss compares what the model predicts."""
        return self._loss is not None and not self.has_own_loss

    @property
    def has_losses_of_keras(self) -> bool:
        """Whether all losses are Keras's own, which assign nothing."""
        parts = [
            part
            for loss in keras.tree.flatten(self._loss)
            for part in (loss, getattr(loss, "fn", None))
            if part is not None and not isinstance(part, str)
        ]
        are_kerass = all(part.__module__.startswith("keras.") for part in parts)
        return are_kerass and not self.has_own_loss

    @property
    def fitted_signature(self) -> Nest:
        """Signature of the inputs that trained the model, here or before it was saved."""
        if self.signature is not None or not self._loaded:
            return self.signature
        like = _keras.input_signature(self._model)
        if len(self._loaded) == len(_tree.tensors(like)):
            return _tree.pack(self._loaded, like)
        return self._loaded[0] if len(self._loaded) == 1 else None

    def save(self, store: Config) -> None:
        """Put what a saved model must remember into a store of arrays."""
        self.released.save(store)
        fitted = _tree.tensors(self.fitted_signature)
        shapes = json.dumps([[list(spec.shape), spec.dtype.name] for spec in fitted])
        store[_INPUTS] = np.frombuffer(shapes.encode(), np.uint8)

    def load(self, store: Config) -> None:
        """Take what `save` has put there out again."""
        self.released.load(store)
        shapes = np.asarray(store.pop(_INPUTS, np.frombuffer(b"[]", np.uint8)))
        found = json.loads(shapes.astype(np.uint8).tobytes())
        self._loaded = [tf.TensorSpec(*each) for each in found]

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

    def objective_uphill(self, iterations: Variable) -> Objective:
        """Return what is trained: the objective with its gradients where `BAM` wants them.

        Args:
            iterations: The optimizer's.

        Returns:
            The same while nothing changes; `objective()` under other losses.
        """
        plain = self.objective()
        if not isinstance(self.ascent, BAM):
            return plain
        known = self._uphill
        if known is None or known[0] is not plain or known[1] is not iterations:
            ascent = self.ascent.ascent_at(iterations)
            known = plain, iterations, dataclasses.replace(plain, ascent=ascent)
            self._uphill = known
        return known[2]

    def explain(self) -> str:
        """Describe how each layer's gradients are clipped; see `DPModel.explain`."""
        signature = self.signature or _keras.input_signature(self._model)
        if signature is None:
            raise ValueError(
                f"The inputs of model `{self._model.name}` are not known yet. Received: "
                "a model that has seen no data. Call `private.fit(...)` first."
            )
        try:
            rows = self.engine.explain(self._model, signature)
        except UnsupportedLayerError:
            if self._asked != "auto":
                raise
            rows = engines.ApartEngine().explain(self._model, signature)
        return explanation.table(rows)

    def static_rows(self, batch_size: int | None, clipper: BatchClipper) -> int | None:
        """Return how many rows layers see at once; see `keeps_static_rows`.

        Args:
            batch_size: Of all batches, or of some; None if that is not known.
            clipper: Cuts them.

        Returns:
            None if layers do not see it, or it is not known.
        """
        if not keeps_static_rows(self.ascent) or self.replicas.strategy is not None:
            return None
        rows = clipper.physical_batch_size
        if rows is None and batch_size is not None:
            rows = filled_up(max(batch_size, 1), clipper.rows_per_unit)
        views = 1 if self.augmentation is None else self.augmentation.multiplicity
        return rows and rows * views

    def knows(self, data: Nest, static_rows: int | None) -> bool:
        """Tell whether such rows were checked, and take the engine that was chosen.

        Args:
            data: ``(x, y, sample_weight)``; only shapes and dtypes are read.
            static_rows: What `static_rows` returned.

        Returns:
            False if `check` has to be called.
        """
        return self._is_as_checked() and self._take(_rows_like(data), static_rows)

    def check(
        self, data: Nest, sample: Nest, static_rows: int | None, iterations: Variable
    ) -> None:
        """Refuse layers and losses that mix examples, and choose the engine.

        A model without weights makes them.

        Args:
            data: ``(x, y, sample_weight)`` as the graph of a step has them, or
                `tf.TensorSpec` of them: what is proven holds for all that is like it,
                and lengths that are unknown may be any.
            sample: ``(x, y, sample_weight)`` of rows to look at; their shapes are
                known. None where there are none.
            static_rows: What `static_rows` returned.
            iterations: The optimizer's.

        Raises:
            NotPrivateError: If the lengths of axes are unknown and there is no sample
                for what needs one.
            UnsupportedLayerError: If no engine can train the model privately.
        """
        like = _rows_like(data)
        if sample is None and (self.signature is None or self.augmentation):
            raise NotPrivateError(
                f"Model `{self._model.name}` was never checked, and cannot be with rows "
                "of unknown shape. Received: a batch whose axes have unknown lengths. Call "
                "`private.fit(...)` or `private.train_on_batch(...)` once before, or "
                "give the batch static shapes."
            )
        # Unfrozen layers may do what frozen ones did not: nothing is known any more.
        if not self._is_as_checked():
            self._engines = {}
            self.passes.clear()
        with self.replicas.only_first(), _keras.losses_of_one_replica():
            rows = None if sample is None else rows_to_check(sample)
            if rows is not None:
                if self.augmentation is not None:
                    self.augmentation.check(rows[0])
                if not self._model.built:
                    self._model(_tree.map_tensors(tf.convert_to_tensor, rows[0]))
            objective = self.objective_uphill(iterations)
            noting = dataclasses.replace(objective, losses=self._noting(objective))
            passes: list[TracedPass] = []
            chosen = choose(
                *(self._asked, noting, data, static_rows),
                sample=rows,
                passes=passes,
            )
        self._attributes = self._attributes_now()
        # Any number of rows was proven as well.
        self._engines |= {(like, rows): chosen for rows in (None, static_rows)}
        self.passes += [
            dataclasses.replace(proven, objective=objective) for proven in passes
        ]
        self._take(like, static_rows)
        if rows is not None:
            self.signature = signature_of(rows[0])

    def _noting(self, objective: Objective) -> Callable[..., Tensor]:
        """Return the losses of an objective, which note what the model predicts."""

        @functools.wraps(objective.losses)
        def losses(x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest) -> Tensor:
            self.outputs = signature_of((y, y_pred))
            return objective.losses(x, y, y_pred, sample_weight)

        return losses

    def _take(self, like: _Rows, static_rows: int | None) -> bool:
        """Take the engine for such rows, if it is known."""
        # What was proven for all that is like them.
        known = [
            (rows, engine)
            for (general, rows), engine in self._engines.items()
            if _covers(general, like)
        ]
        # What takes each unit by itself is right for any number of rows; once it was
        # needed for one, it is taken for all.
        if not any(
            rows == static_rows or any(_care_of(engine)) for rows, engine in known
        ):
            return False
        self.engine = max((engine for _, engine in known), key=_care_of)
        return True

    def _is_as_checked(self) -> bool:
        return self._attributes == self._attributes_now()

    def _attributes_now(self) -> Hashable:
        of_views = () if self.augmentation is None else (self.augmentation.model,)
        trainable = tuple(map(id, self._model.trainable_variables))
        return trainable, attributes_of(self._model, self._loss, *of_views)


def _care_of(engine: engines.Engine) -> tuple[bool, bool]:
    """Rank engines by how little they ask of the model."""
    return isinstance(engine, VectorizedEngine), isinstance(engine, engines.ApartEngine)


def _rows_like(data: Nest) -> _Rows:
    """Describe what a proof that rows do not meet rests on."""
    described = []
    for path, leaf in keras.tree.flatten_with_path(tuple(data)):
        if leaf is None:
            continue
        if leaf.shape is None or (
            isinstance(leaf.shape, tf.TensorShape) and leaf.shape.rank is None
        ):
            raise NotPrivateError(
                "A batch must have a known number of axes: nothing is proven without. "
                f"Received: a tensor of dtype {tf.as_dtype(leaf.dtype).name} and unknown shape. Use "
                "`dataset.map(lambda x, y: (tf.ensure_shape(x, [None, 3]), y))`."
            )
        dtype = tf.as_dtype(leaf.dtype)
        kind = "float" if dtype.is_floating else dtype.name
        described.append((path, tuple(leaf.shape[1:]), kind))
    return tuple(described)


def _covers(general: _Rows, special: _Rows) -> bool:
    """Tell whether what is proven for some rows holds for others."""
    if len(general) != len(special):
        return False
    return all(
        path == other_path
        and kind == other_kind
        and len(shape) == len(other)
        and all(a is None or a == b for a, b in zip(shape, other, strict=True))
        for (path, shape, kind), (other_path, other, other_kind) in zip(
            general, special, strict=True
        )
    )


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
