"""What a problem is: a model, examples and a loss, as data."""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

register = keras.saving.register_keras_serializable(package="tests")


class Batch(NamedTuple):
    """What `fit` takes; every leaf has the examples on its leading axis."""

    x: Any
    y: Any
    sample_weight: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A model, how to draw one example of its data, and its loss.

    Args:
        name: Test id; also the seed of the weights and of the examples.
        make_model: Builds the model under the current floatx and dtype policy.
        make_example: Draws ``(x, y)`` or ``(x, y, sample_weight)`` of one example,
            without a batch axis.
        loss_template: What ``compile`` takes, with ``Loss`` classes or partials of
            them in place of ``Loss`` objects, since an object keeps its dtype.
        loss_weights: As in ``compile``.
        tags: What a test selects by: keys of `TAGS`.
    """

    name: str
    make_model: Callable[[], keras.Model]
    make_example: Callable[[np.random.Generator], tuple[Any, ...]]
    loss_template: Any
    loss_weights: Any = None
    tags: frozenset[str] = frozenset()

    def build(self, dtype: str = "float32") -> keras.Model:
        """A fresh model under dtype policy ``dtype``; equal weights every time."""
        with precision(dtype):
            model = self.make_model()
            model(self.batch(1, dtype).x)
        rng = np.random.default_rng(self._seed())
        for variable in model.weights:
            # What starts at one, as scales and variances do, stays around one.
            center = np.all(variable.numpy() == 1)
            value = center + rng.uniform(-0.5, 0.5, variable.shape)
            variable.assign(value.astype("float32"))
        return model

    def loss(self, dtype: str = "float32") -> Any:
        """A fresh loss, as ``compile`` takes it, that computes in ``dtype``."""
        with precision(dtype):
            return keras.tree.map_structure(
                lambda leaf: leaf() if _is_factory(leaf) else leaf, self.loss_template
            )

    def batch(self, n: int = 5, dtype: str = "float32") -> Batch:
        """The first ``n`` examples; ``n`` may be 0."""
        floatx = keras.DTypePolicy(dtype).variable_dtype
        examples = [
            self.make_example(np.random.default_rng([self._seed(), index]))
            for index in range(max(n, 1))
        ]
        stacked = keras.tree.map_structure(
            lambda *leaves: _stack(leaves, floatx)[:n], *examples
        )
        return Batch(*stacked)

    def _seed(self) -> int:
        return zlib.crc32(self.name.encode())


def problem(
    name: str,
    model: Callable[[], keras.Model],
    example: Callable[[np.random.Generator], tuple[Any, ...]],
    loss: Any,
    *,
    tags: str = "",
    loss_weights: Any = None,
) -> Problem:
    """Make a problem whose tags are words of one string."""
    return Problem(name, model, example, loss, loss_weights, frozenset(tags.split()))


def _is_factory(leaf: Any) -> bool:
    return isinstance(leaf, (type, functools.partial))


def _stack(leaves: Iterable[Any], floatx: str) -> np.ndarray:
    array = np.stack(leaves)
    if array.dtype.kind == "f":
        return array.astype("float32").astype(floatx)
    return array.astype("int32")


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Keras's floatx and dtype policy, which do not follow each other, both set.

    Args:
        dtype: Name of a dtype policy; floatx becomes its variable dtype.
    """
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(keras.DTypePolicy(dtype).variable_dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


TAGS = {
    "added": "losses that layers add when they are called",
    "attention": "an attention layer",
    "conv": "a convolution",
    "coupled": "Keras's loss of a batch is neither mean nor sum over its examples",
    "compiled": "an operation that Keras compiles with XLA at each eager call on CPU",
    "custom": "a leaf layer that no rule can know",
    "embedding": "a gradient that TensorFlow gives as `IndexedSlices`",
    "frozen": "a variable that does not train",
    "lora": "low-rank adapters, which Keras 3.15 keeps in float32",
    "mask": "a Keras mask that reaches a layer or the loss",
    "norm": "a normalisation layer",
    "random": "another output for each call in training",
    "regularized": "a weight regulariser",
    "rnn": "a loop over time",
    "scalar": "a loss of rank 0, whatever its reduction",
    "shared": "a layer called twice",
    "structure": "several inputs or outputs",
    "sum": "Keras's loss of a batch is the sum over its examples, not the mean",
    "tied": "a variable used outside its layer",
    "unused": "a variable that the loss does not depend on",
}
