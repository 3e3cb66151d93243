"""The batches of a replay: some rows, and one more that may be empty."""

import dataclasses
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfdp import _tree
from tfdp._types import Nest
from tfdp.data.rows import rows_of
from tfdp.data.training_data import number_of_examples, training_data
from tfdp.data.users import Users, users_of
from tfdp.losses.batch import Batch
from tfdp.model import DPModel
from tfdp.sampling import Scheme
from tfdp.training.arguments import check_protects

# An outlier is so many times as large as the largest number of its batch.
_OUTLIER = 1e3


@dataclasses.dataclass(frozen=True)
class Rows:
    """Examples, or users, some of which are in every batch, and one of the others.

    Attributes:
        sources: ``(x, y, sample_weight)`` without what is missing, sources of rows.
        scheme: How `fit` draws them.
        users: Whose rows they are, if users are what is protected.
        common: Numbers of those in every batch.
        rest: Numbers of the others, in random order.
    """

    sources: tuple[Nest, ...]
    scheme: Scheme
    users: Users | None
    common: NDArray[np.int64]
    rest: NDArray[np.int64]

    @property
    def units_per_batch(self) -> int:
        """Examples, or users, in a batch with one more."""
        return len(self.common) + 1

    @property
    def rows_of_one(self) -> int:
        """Rows that each of them has, padding too."""
        return self.scheme.rows_per_example

    def with_one(self, one: int, *, is_outlier: bool = False) -> Batch:
        """Return the batch with one of the others, which comes last.

        Args:
            one: Its number.
            is_outlier: Whether its inputs are far from all others.
        """
        batch = self._batch(np.append(self.common, one))
        if not is_outlier:
            return batch
        begin = len(self.common) * self.rows_of_one

        def far(leaf: tf.Tensor) -> tf.Tensor:
            if not leaf.dtype.is_floating:
                return leaf
            others, own = leaf[:begin], leaf[begin:]
            # Beside large ones what a smaller one does would pass for rounding.
            unit = tf.math.divide_no_nan(own, _largest(own))
            return tf.concat([others, unit * _OUTLIER * _largest(leaf)], 0)

        return batch._replace(x=_tree.map_tensors(far, batch.x))

    def with_an_empty_one(self) -> Batch:
        """Return the batch with padding where the last one was."""
        return self._batch(np.append(self.common, -1))

    def alone(self) -> Batch:
        """Return the batch of those in every batch, as `fit` has it."""
        batch = self._batch(self.common)
        return batch if self.users is not None else batch._replace(is_padding=None)

    def of_nobody(self) -> Batch:
        """Return a batch of nothing but padding."""
        return self._batch(np.full(self.units_per_batch, -1))

    def candidates(self, number: int) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yield batches of others, and who is in them.

        Args:
            number: How many others, at most.
        """
        some = self.rest[:number]
        for begin in range(0, len(some), self.units_per_batch):
            part = some[begin : begin + self.units_per_batch]
            yield part, self._batch(part)

    def _batch(self, numbers: NDArray[np.int64]) -> Batch:
        indices = numbers
        if self.users is not None:
            empty = np.full(self.rows_of_one, -1)
            of_each = [
                self.users.laid_out(np.array([each]), np.random.default_rng)
                if each >= 0
                else empty
                for each in numbers.tolist()
            ]
            indices = np.concatenate(of_each)
        rows = keras.tree.map_structure(
            lambda source: tf.convert_to_tensor(source.take_or_fill(indices)),
            self.sources,
        )
        return Batch(*keras.utils.unpack_x_y_sample_weight(rows))._replace(
            is_padding=tf.constant(indices < 0)
        )


def _largest(leaf: tf.Tensor) -> tf.Tensor:
    """Return the largest absolute value of those that are finite."""
    sizes = tf.where(tf.math.is_finite(leaf), tf.abs(leaf), tf.zeros_like(leaf))
    return tf.reduce_max(sizes)


def rows_of_fit(
    private: DPModel,
    data: tuple[Nest, Nest, Nest],
    batch_size: int | None,
    user_ids: Nest,
    examples_per_user: int | None,
) -> Rows:
    """Take some rows at random of data that `fit` takes.

    Args:
        private: Trains on them.
        data: ``(x, y, sample_weight)``, arrays.
        batch_size: As for `replay`.
        user_ids: Likewise.
        examples_per_user: Likewise.

    Returns:
        Rows; at most half of them are in every batch.

    Raises:
        TypeError: If the data are no arrays.
        ValueError: If there are fewer than two, or the arguments contradict each other.
    """
    if batch_size is None and private.optimizer.expected_batch_size is not None:
        batch_size = round(private.optimizer.expected_batch_size)
    found = training_data(
        *data,
        batch_size=batch_size,
        steps_per_epoch=None,
        shuffle=True,
        sampling=private.sampling,
        user_ids=user_ids,
        examples_per_user=examples_per_user,
    )
    if found.scheme.number_of_examples is None or isinstance(
        data[0], (tf.data.Dataset, keras.utils.PyDataset)
    ):
        raise TypeError(
            "`replay` needs rows that it can take one by one. Received: x of type "
            f"{type(data[0]).__name__}. Use `replay(private, x, y)` with arrays."
        )
    check_protects(private.unit, found.scheme)
    users = users_of(user_ids, examples_per_user, number_of_examples(data[0]))
    number = found.scheme.number_of_examples
    if number < 2:
        raise ValueError(
            f"`replay` needs two {found.scheme.unit}s at least. Received: {number}."
        )
    order = np.random.default_rng().permutation(number)
    size = min((found.scheme.expected_batch_size or 1) - 1, number // 2)
    return Rows(rows_of(*data), found.scheme, users, order[:size], order[size:])
