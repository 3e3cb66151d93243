"""An embedding whose vectors have a posterior: independent Gaussians."""

import math
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdp import _validate
from tfdp._types import Config, Tensor
from tfdp.variational.base import VariationalLayer


@keras.saving.register_keras_serializable(package="tfdp")
class VariationalEmbedding(VariationalLayer):
    """An embedding with a Gaussian posterior over each number of its vectors.

    All is as in `VariationalDense`. An id has the same vector wherever it occurs in an
    example.

    Args:
        input_dim: How many ids there are: they lie in ``[0, input_dim)``.
        output_dim: Length of a vector.
        draws: `"shared"`: one draw of all vectors for all examples of a step.
            `"per_example"`: each example has vectors of its own, ``input_dim
            output_dim`` numbers for each. `"flipout"`: that shared draw, whose numbers
            each example adds to the means with `output_dim` signs of its own: for one
            example it is a draw from the posterior, and vectors of two examples are not
            correlated.
        embeddings_initializer: Of the means.
        **kwargs: `number_of_examples`, `prior_scale`, `kl`, `initial_scale` and `seed`
            of `VariationalDense`; name, dtype, and `trainable`.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of its range.

    Example:
        >>> layer = VariationalEmbedding(10, 4, number_of_examples=100)
        >>> layer(np.array([[1, 2, 2]])).shape
        TensorShape([1, 3, 4])
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        draws: str = "shared",
        embeddings_initializer: keras.initializers.Initializer | str = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(draws=draws, **kwargs)
        self.input_dim = _validate.positive_int("input_dim", input_dim)
        self.output_dim = _validate.positive_int("output_dim", output_dim)
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        # Whole numbers must not be rounded to a dtype of fewer digits.
        self.autocast = False

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Add means and scales of all vectors."""
        shape = (self.input_dim, self.output_dim)
        self._add("embeddings", shape, self.embeddings_initializer)

    @property
    def embeddings_scale(self) -> Tensor:
        """Standard deviations of the vectors' numbers."""
        return self.posteriors["embeddings"].scale

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Look vectors up: drawn ones in training, otherwise their means."""
        if training:
            noise, signs = self.noise(inputs)["embeddings"], self.signs(inputs)
            return self.looked_up(inputs, noise, signs)
        vectors = ops.take(self.embeddings_mean, ops.cast(inputs, "int32"), axis=0)
        return ops.cast(vectors, self.compute_dtype)

    def signs(self, ids: Tensor) -> Tensor | None:
        """Draw the signs of `"flipout"`, those of each row.

        Args:
            ids: Shape ``(R, ...)``.

        Returns:
            Numbers 1 and -1, of shape ``(R, 1, ..., output_dim)``; None if there are no
            such signs.
        """
        if self.draws != "flipout":
            return None
        between = [1] * (len(ids.shape) - 1)
        return self._signs((ops.shape(ids)[0], *between, self.output_dim))

    def looked_up(
        self, ids: Tensor, noise: Tensor, signs: Tensor | None = None
    ) -> Tensor:
        """Look up drawn vectors.

        Args:
            ids: Shape ``(R, ...)``.
            noise: From `noise`, V draws; row r takes number ``r % V``.
            signs: From `signs`: what a row's deviations from the means are multiplied by.

        Returns:
            Shape ``(R, ..., output_dim)``.
        """
        weights = self.posteriors["embeddings"]
        if signs is None:
            vectors = of_rows(weights.drawn(noise), ids)
        else:
            means = ops.cast(ops.convert_to_tensor(weights.mean), noise.dtype)
            vectors = of_rows(means[None], ids)
            vectors += signs * of_rows(weights.deviations(noise), ids)
        return ops.cast(vectors, self.compute_dtype)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        """Return the shape of the outputs."""
        return (*input_shape, self.output_dim)

    def get_config(self) -> Config:
        """Return the arguments."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
        }


def of_rows(tables: Tensor, ids: Tensor) -> Tensor:
    """Look ids up, those of row r in table ``r % V``.

    Args:
        tables: Shape ``(V, d, p)``.
        ids: Shape ``(R, ...)``, in ``[-d, d)``.

    Returns:
        Shape ``(R, ..., p)``.
    """
    number, (d, p) = ops.shape(tables)[0], tables.shape[1:]
    between = ops.shape(ids)[1:]
    ids = tf.cast(ids, tf.int32)
    ids = tf.where(ids < 0, ids + d, ids)
    by_table = tf.reshape(ids, (-1, number, math.prod(between)))
    found = tf.gather(tables, tf.transpose(by_table, (1, 0, 2)), batch_dims=1)
    shape = (ops.shape(ids)[0], *between, p)
    return tf.reshape(tf.transpose(found, (1, 0, 2, 3)), shape)
