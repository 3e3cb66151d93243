"""A model that is checked before it trains, and the engine that will train it."""

import keras
import tensorflow as tf

from tfdp import _keras, _tree, engines
from tfdp._tree import signature_of
from tfdp._types import Nest
from tfdp.checks.engine import choose
from tfdp.data.training_data import made_up_rows, number_of_examples
from tfdp.losses.objective import Objective
from tfdp.training.augmentation import Augmentation

# Sizes of batches that a model is checked with, one by one. By then TensorFlow traces
# for any number of rows.
_MOST_SIZES = 4


class CheckedModel:
    """Remembers with how many rows a model was checked, and the engine for them.

    Args:
        model: To be trained.
        engine: As in `tfdp.DPModel`.
        augmentation: Makes the views of each example, if any.

    Attributes:
        engine: The one that was chosen; before the first check the one asked for.
        signature: Nest of `tf.TensorSpec` of the inputs that it was checked with last.
    """

    def __init__(
        self,
        model: keras.Model,
        engine: str | engines.Engine,
        augmentation: Augmentation | None,
    ) -> None:
        """Check nothing yet."""
        self._model = model
        self._asked = engine
        self._augmentation = augmentation
        self.engine = engines.get(engine)
        self.signature: Nest = None
        self.forget()

    def forget(self) -> None:
        """Check anew: the loss is another one."""
        self._known: frozenset[int | None] = frozenset()
        self._trainable: tuple[bool, ...] = ()

    def unchecked(
        self,
        batch_size: int | None,
        *,
        examples_per_unit: int,
        physical_batch_size: int | None,
    ) -> list[int | None]:
        """Return how many rows go through the model at once that it has not seen yet.

        Args:
            batch_size: Of all batches, or of some, if that is static.
            examples_per_unit: Examples whose mean gradient is clipped.
            physical_batch_size: Rows in a pass; None where a batch runs whole.

        Returns:
            Static sizes of passes, None for any.
        """
        views = 1 if self._augmentation is None else self._augmentation.multiplicity
        sizes: list[int | None] = [None]
        if physical_batch_size is not None:
            sizes = [physical_batch_size * views]
        elif batch_size:
            whole = -(-batch_size // examples_per_unit) * examples_per_unit
            sizes = [None, whole * views]
        if self._trainable != self._trainable_now():
            return sizes
        if len(self._known) >= _MOST_SIZES:
            return [] if None in self._known else [None]
        return [size for size in sizes if size not in self._known]

    def build(self, x: Nest) -> None:
        """Check the augmentation, and let the model make its weights.

        Args:
            x: A few rows of inputs.
        """
        if self._augmentation is not None:
            self._augmentation.check(x)
        if not self._model.built:
            self._model(_tree.map_tensors(tf.convert_to_tensor, x))

    def check(self, objective: Objective, rows: Nest, sizes: list[int | None]) -> None:
        """Refuse layers and losses that mix examples, and choose the engine.

        Args:
            objective: What will be differentiated.
            rows: ``(x, y, sample_weight)`` of a few rows.
            sizes: What `unchecked` returned.

        Raises:
            UnsupportedLayerError: If no engine can train the model privately.
        """
        self.engine = choose(self._asked, objective, rows, sizes)
        trainable = self._trainable_now()
        known = self._known if trainable == self._trainable else frozenset()
        self._trainable, self._known = trainable, known.union(sizes)
        self.signature = signature_of(rows[0])

    def _trainable_now(self) -> tuple[bool, ...]:
        """Return what decides whether layers such as BatchNormalization keep data."""
        return tuple(layer.trainable for layer in _keras.flatten_layers(self._model))


def rows_to_check(x: Nest, y: Nest, sample_weight: Nest) -> Nest:
    """Return ``(x, y, sample_weight)``, made up where there are no rows."""
    rows = (x, y, sample_weight)
    return rows if number_of_examples(x) else made_up_rows(rows)
