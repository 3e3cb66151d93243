"""What a line of the table says of a model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfdp

ROWS = 6
# The row that is scaled until nothing but its clipped gradient is left of it.
OUTLIER = 2


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model, rows for it, its loss, and the engine that clips it.

    Args:
        name: Of the pattern.
        build: Makes the model. Takes how much chance there is: 1, or 0, for models that
            draw numbers in training, but none that matter.
        rows: Draws ``(x, y)`` of so many rows from a generator.
        loss: Of each row; what makes a Keras loss, or its name. None if the model
            overrides `compute_loss`.
        engine: Which one `tfdp.DPModel` chooses; "apart": book-keeping with each example
            by itself.
        is_quick: Whether the quick tests train it.
        dtype: In which it is compared: float32 where TensorFlow or Keras has no other.
    """

    name: str
    build: Callable[[float], keras.Model]
    rows: Callable[[np.random.Generator, int], tuple[Any, Any]]
    loss: Any
    engine: str
    is_quick: bool = False
    dtype: str = "float64"

    def make_loss(self) -> Any:
        """Make the loss anew, under the current dtype policy."""
        return self.loss() if callable(self.loss) else self.loss

    def batch(self, rows: int = ROWS) -> tuple[Any, Any, Any]:
        """Draw ``(x, y, sample_weight)``, of which one row counts a thousand times.

        Where the model has a loss of its own, which takes no weights, the numbers that
        go in are thirty times as large instead.
        """
        x, y = self.rows(np.random.default_rng(0), rows)
        if self.loss is None:
            return keras.tree.map_structure(_with_outlier, x), y, None
        weights = np.ones(_shape_of_losses(y))
        weights[OUTLIER] = 1000
        return x, y, weights


def engine_of(private: tfdp.DPModel) -> str:
    """Tell how the examples of a model in training are clipped, as an `Entry` does."""
    return private._checked.engine.name


def _shape_of_losses(y: np.ndarray) -> tuple[int, ...]:
    """Return the shape that Keras wants of weights."""
    if y.ndim < 3:
        # Labels of positions have a loss each.
        return y.shape if y.dtype.kind in "iu" and y[:1].size > 1 else y.shape[:1]
    return y.shape[:-1] if y.dtype.kind == "f" else y.shape


def _with_outlier(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind != "f":
        return array
    array = array.copy()
    array[OUTLIER] *= 30
    return array


CLASSES = functools.partial(
    keras.losses.SparseCategoricalCrossentropy, from_logits=True
)
YES_OR_NO = functools.partial(keras.losses.BinaryCrossentropy, from_logits=True)


def images(
    *shape: int, classes: int | None = 3
) -> Callable[[np.random.Generator, int], tuple[Any, Any]]:
    """Make a function that draws arrays and their classes, or themselves as targets."""

    def draw(rng: np.random.Generator, rows: int) -> tuple[Any, Any]:
        x = rng.normal(size=(rows, *shape))
        return x, x if classes is None else rng.integers(classes, size=rows)

    return draw


def words(
    length: int, vocabulary: int, *targets: int, classes: int = 3
) -> Callable[[np.random.Generator, int], tuple[Any, Any]]:
    """Make a function that draws sentences, padded with 0, and classes."""

    def draw(rng: np.random.Generator, rows: int) -> tuple[Any, Any]:
        x = rng.integers(1, vocabulary, (rows, length))
        x *= np.arange(length) < rng.integers(3, length + 1, (rows, 1))
        return x, rng.integers(classes, size=(rows, *targets))

    return draw


def numbers(
    *shape: int, targets: tuple[int, ...] = (1,)
) -> Callable[[np.random.Generator, int], tuple[Any, Any]]:
    """Make a function that draws arrays and numbers to predict."""

    def draw(rng: np.random.Generator, rows: int) -> tuple[Any, Any]:
        return rng.normal(size=(rows, *shape)), rng.normal(size=(rows, *targets))

    return draw
