"""Batches drawn by Poisson sampling, in the form that `fit` takes."""

import collections
import operator
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np
from numpy.typing import NDArray

from tfdp import _validate
from tfdp.data.rows import rows_of
from tfdp.errors import NotPrivateError
from tfdp.sampling import (
    fresh_key,
    poisson_indices,
    poisson_probability,
    seeded_key,
)


class PoissonDataset(keras.utils.PyDataset):
    """Batches in which every example takes part by a coin of its own.

    Each batch is a fresh Poisson draw: example n is in it with probability
    q = `expected_batch_size / number_of_examples`, independently of all other
    examples and of all other batches [1]_. Batches therefore differ in size and may
    be empty. An empty batch has 0 rows and is a step like any other.

    Each of `x`, `y` and `sample_weight` is one source of rows, or a (nested) dict,
    tuple or list of them; a list is taken as a tuple. A source of rows is

    * an array: NumPy (`np.memmap` too), a dense TensorFlow tensor, pandas (a Series
      gives rows of shape (1,), as in Keras), or whatever has `shape`, `dtype` and
      NumPy's indexing by a slice and by an ascending integer array, such as
      `h5py.Dataset`;
    * any other object with `len(source)` and `source[i]`, the row of example i
      alone: a number, a string or an array of the same shape and type for every i.
      It is asked for row 0 once and then for the rows of each batch: this is for
      data larger than memory.

    Floating-point rows come out as `keras.config.floatx()`, integers and booleans
    as they are, strings as a string tensor. Rows are converted batch by batch, so
    the sources are not copied; they must not change while they are in use.

    Guarantees:
        No two requests for a batch return the same draw, whatever the order, the
        threads, the number of epochs and the number of calls to `fit`. The draws
        are keyed by a secret from the operating system; `numpy.random.seed` and
        `keras.utils.set_random_seed` have no influence on them. The key does not
        leave the process that made it.

    Args:
        x: The inputs of the model.
        y: The targets; `None` for a model that computes its loss without them.
        sample_weight: Factors on the losses of the examples; needs `y`.
        expected_batch_size: Mean number of examples in a batch, a whole number from
            1 to the number of examples.
        steps_per_epoch: Number of batches in an epoch. Defaults to the number of
            examples over `expected_batch_size`, rounded up.
        seed: Makes the draws predictable, for tests only: a warning says so. In
            epoch e, the k-th request for batch i returns a draw that is fixed by
            (seed, e, i, k). Pass `shuffle=False` to `fit`, or Keras requests the
            batches of an epoch in random order.

    Raises:
        TypeError: If a source of rows or a number has the wrong type.
        ValueError: If numbers of rows differ, there are none, a dtype cannot be
            given to a model, or a number lies outside its range.

    Example:
        >>> data = PoissonDataset(
        ...     np.ones((1000, 3)), np.ones(1000, int), expected_batch_size=50
        ... )
        >>> len(data), data.sampling_probability
        (20, 0.05)
        >>> x, y = data[0]
        >>> x.shape[1:], x.dtype, len(x) == len(y)
        ((3,), dtype('float32'), True)

        Rows that are read from disk can be read by several threads:

        >>> data.workers = 4

    References:
        .. [1] Abadi et al., "Deep Learning with Differential Privacy", CCS 2016.
           https://arxiv.org/abs/1607.00133
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        expected_batch_size: int,
        steps_per_epoch: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._rows = rows_of(x, y, sample_weight)
        self._number_of_examples = len(keras.tree.flatten(self._rows)[0])
        self._sampling_probability = poisson_probability(
            expected_batch_size=expected_batch_size,
            number_of_examples=self._number_of_examples,
        )
        self._expected_batch_size = int(expected_batch_size)
        if steps_per_epoch is None:
            steps_per_epoch = -(-self._number_of_examples // self._expected_batch_size)
        self._steps = _validate.positive_int("steps_per_epoch", steps_per_epoch)
        self._seeded = seed is not None
        self._key = fresh_key() if seed is None else seeded_key(seed)
        if self._seeded:
            warnings.warn(
                "Draws made with a `seed` are not secret, and without secrecy the "
                "privacy guarantee does not hold: use it in tests only. "
                f"Received: seed={seed!r}. Use `seed=None` to train.",
                UserWarning,
                stacklevel=2,
            )
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._epoch = 1
        self._requests: collections.Counter[int] = collections.Counter()

    @property
    def number_of_examples(self) -> int:
        """Number of examples that the batches are drawn from."""
        return self._number_of_examples

    @property
    def expected_batch_size(self) -> int:
        """Mean number of examples in a batch."""
        return self._expected_batch_size

    @property
    def sampling_probability(self) -> float:
        """Probability with which each example is in a batch."""
        return self._sampling_probability

    @property
    def seeded(self) -> bool:
        """Whether the draws can be predicted from a seed."""
        return self._seeded

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 1, that names the next draws.

        It is no count of training epochs: Keras ends one before it trains, and one
        for each `evaluate`.
        """
        return self._epoch

    def advance_to(self, epoch: int) -> None:
        """Go on to a later epoch, past all draws of the earlier ones.

        A dataset that is made again with the same `seed` would repeat the draws of
        the first one, unless it starts in an epoch that the first never reached.

        Args:
            epoch: The next draws belong to this epoch; at least the current one.

        Raises:
            TypeError: If `epoch` is not a number.
            ValueError: If `epoch` is not a whole number or has passed.
        """
        epoch = _validate.positive_int("epoch", epoch)
        with self._lock:
            if epoch < self._epoch:
                raise ValueError(
                    "`epoch` must not go back: draws would be repeated. "
                    f"Received: epoch={epoch}, current epoch={self._epoch}."
                )
            if epoch > self._epoch:
                self._epoch = epoch
                self._requests.clear()

    def on_epoch_end(self) -> None:
        """Go on to the next epoch.

        Keras starts the threads that read ahead before it calls `on_epoch_begin`,
        so that only the end of an epoch separates its requests from the next ones.
        """
        with self._lock:
            self._epoch += 1
            self._requests.clear()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._steps

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Draw a batch that was never drawn before.

        Args:
            index: Position in the epoch, in [0, len(self)). Asking again for the
                same position gives another draw.

        Returns:
            `(x,)`, `(x, y)` or `(x, y, sample_weight)`: NumPy arrays (tensors for
            strings) with the drawn rows, in the structure of the data.

        Raises:
            IndexError: If `index` lies outside the epoch.
            NotPrivateError: If called in another process than the one that made the
                dataset.
            TypeError: If `index` is not a whole number, or if a source gives rows of
                different dtypes.
            ValueError: If a source gives rows of different shapes.
        """
        return self.rows_at(
            poisson_indices(
                self._key,
                self._next_draw(operator.index(index)),
                number_of_examples=self._number_of_examples,
                sampling_probability=self._sampling_probability,
            )
        )

    def rows_at(self, indices: NDArray[np.int64]) -> tuple[Any, ...]:
        """Return chosen rows in the form of a batch, without a draw.

        Args:
            indices: Distinct and ascending, shape `(n,)`; n may be 0.

        Returns:
            The rows, in the structure of `self[0]`.

        Raises:
            TypeError: If a source gives rows of different dtypes.
            ValueError: If a source gives rows of different shapes.
        """
        batch: tuple[Any, ...] = keras.tree.map_structure(
            lambda rows: rows.take(indices), self._rows
        )
        return batch

    @property
    def rows(self) -> tuple[Any, ...]:
        """The sources of rows, in the structure of a batch."""
        return self._rows

    def numbered_draws(
        self, key: int, number_of_draws: int
    ) -> Callable[[int], NDArray[np.int64]]:
        """Return draws for processes that share each of them, those `fit` would make.

        The next epoch begins after as many as are asked for.

        Args:
            key: A fresh secret that all of them have; one made with a seed is used
                in its place.
            number_of_draws: How many will be used, each once.

        Returns:
            A function from the number of a draw, from 0, to the indices of its rows.
        """
        key = self._key if self._seeded else key
        # Keras ends an epoch before it trains.
        first = self._epoch + 1
        self.advance_to(first + -(-number_of_draws // self._steps))

        def draw(number: int) -> NDArray[np.int64]:
            epochs, index = divmod(number, self._steps)
            return poisson_indices(
                key,
                (first + epochs, index, 0),
                number_of_examples=self._number_of_examples,
                sampling_probability=self._sampling_probability,
            )

        return draw

    def _next_draw(self, index: int) -> tuple[int, int, int]:
        """Return the name of a draw that was never made: epoch, index, repetition."""
        if os.getpid() != self._process:
            raise NotPrivateError(
                "A `PoissonDataset` draws only in the process that made it: copies "
                "of it would repeat its draws. Use threads to read ahead, "
                "`dataset.workers = 4`."
            )
        if not 0 <= index < self._steps:
            raise IndexError(
                f"`index` must be in [0, {self._steps}). Received: index={index}."
            )
        with self._lock:
            draw = (self._epoch, index, self._requests[index])
            self._requests[index] += 1
        return draw

    @property
    def use_multiprocessing(self) -> bool:
        """Always False: copies in worker processes would repeat the draws."""
        return False

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: bool) -> None:
        if value:
            raise NotPrivateError(
                "A `PoissonDataset` cannot use worker processes: copies of it would "
                f"repeat its draws. Received: use_multiprocessing={value!r}. Use "
                "threads to read ahead, `dataset.workers = 4`."
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse `pickle`, `copy.copy` and `copy.deepcopy`.

        Args:
            protocol: Unused.

        Raises:
            NotPrivateError: Always.
        """
        raise NotPrivateError(
            "A `PoissonDataset` cannot be copied or pickled: the copy would repeat "
            "its draws. Make another one from the same data, "
            "`PoissonDataset(x, y, expected_batch_size=...)`."
        )
