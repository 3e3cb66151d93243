"""Batches that tfdp draws, in the form that `fit` takes."""

import collections
import dataclasses
import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

import keras
import numpy as np
from numpy.typing import NDArray

from tfdp import _validate
from tfdp._types import Nest, Padded
from tfdp.data.users import Users
from tfdp.errors import NotPrivateError
from tfdp.sampling import Scheme, fresh_key, seeded_key
from tfdp.sampling.poisson import second_generator


class DrawnDataset(keras.utils.PyDataset):
    """Batches that a scheme draws, each once.

    Guarantees:
        See `tfdp.data.PoissonDataset`.

    Args:
        rows: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, from `rows_of`.
        scheme: Draws the batches, and says what they cost.
        steps_per_epoch: Number of batches in an epoch. Defaults to that of the scheme,
            or else to the number of examples over the expected batch size, rounded up.
        seed: Makes the draws predictable, for tests only: a warning says so.
        users: Whose rows they are, if the scheme draws users.

    Raises:
        TypeError: If a number has the wrong type.
        ValueError: If one lies outside its range.
    """

    def __init__(
        self,
        rows: tuple[Nest, ...],
        scheme: Scheme,
        steps_per_epoch: int | None = None,
        seed: int | None = None,
        users: Users | None = None,
    ) -> None:
        super().__init__()
        if steps_per_epoch is not None:
            steps_per_epoch = _validate.positive_int("steps_per_epoch", steps_per_epoch)
            scheme = scheme.in_epochs_of(steps_per_epoch)
        self._rows = rows
        self._scheme = scheme
        self._users = users
        self._steps = steps_per_epoch or scheme.steps_per_epoch or 1
        if scheme.batches_are_bins and steps_per_epoch is None:
            # Their number is rounded up, so that they may be smaller than asked for.
            size = -(-(scheme.number_of_examples or 0) // self._steps)
            self._scheme = dataclasses.replace(  # type: ignore[type-var]
                scheme, expected_batch_size=size
            )
        self._seeded = seed is not None
        self._key = fresh_key() if seed is None else seeded_key(seed)
        if self._seeded:
            warnings.warn(
                "Draws made with a `seed` are not secret, and without secrecy the "
                "privacy guarantee does not hold: use it in tests only. "
                f"Received: seed={seed!r}. Use `seed=None` to train.",
                UserWarning,
                stacklevel=3,
            )
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._epoch = 1
        self._requests: collections.Counter[int] = collections.Counter()

    @property
    def scheme(self) -> Scheme:
        """How the batches are drawn."""
        return self._scheme

    @property
    def number_of_examples(self) -> int | None:
        """Number of examples, or users, that the batches are drawn from."""
        return self._scheme.number_of_examples

    @property
    def number_of_rows(self) -> int:
        """Number of rows that the examples, or users, have together."""
        return len(keras.tree.flatten(self._rows)[0])

    @property
    def expected_batch_size(self) -> int | None:
        """Mean number of examples, or users, in a batch."""
        return self._scheme.expected_batch_size

    @property
    def sampling_probability(self) -> float:
        """Probability with which each example, or user, is in a batch."""
        return self._scheme.sampling_probability

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

    def __getitem__(self, index: int) -> tuple[Nest, ...] | Padded:
        """Draw a batch that was never drawn before.

        Args:
            index: Position in the epoch, in [0, len(self)). Asking again for the
                same position gives another draw.

        Returns:
            `(x,)`, `(x, y)` or `(x, y, sample_weight)`: NumPy arrays (tensors for
            strings) with the drawn rows, in the structure of the data. Where batches
            are padded, that and which rows are padding.

        Raises:
            IndexError: If `index` lies outside the epoch.
            NotPrivateError: If called in another process than the one that made the
                dataset.
            TypeError: If `index` is not a whole number, or if a source gives rows of
                different dtypes.
            ValueError: If a source gives rows of different shapes.
        """
        return self.batch_of(
            self._draw(self._key, *self._next_draw(operator.index(index)))
        )

    @property
    def is_padded(self) -> bool:
        """Whether batches have padding, and come as `Padded`."""
        return self._users is not None or self._scheme.slots is not None

    def batch_of(self, indices: NDArray[np.int64]) -> tuple[Nest, ...] | Padded:
        """Return rows in the form of a batch, without a draw.

        Args:
            indices: Of a draw, or consecutive ones of it; -1 for padding.

        Returns:
            As `self[0]`.

        Raises:
            TypeError: If a source gives rows of different dtypes.
            ValueError: If a source gives rows of different shapes.
        """
        if not self.is_padded:
            return self.rows_at(indices)
        rows: tuple[Nest, ...] = keras.tree.map_structure(
            lambda source: source.take_or_fill(indices), self._rows
        )
        return Padded(rows, indices < 0)

    def _draw(self, key: int, *draw: int) -> NDArray[np.int64]:
        """Return the rows of a draw, with -1 where there is padding."""
        indices = self._scheme.draw(key, *draw)
        if self._users is not None:
            random = second_generator(key, draw)
            return self._users.laid_out(indices, lambda _: random)
        missing = (self._scheme.slots or 0) - len(indices)
        return np.pad(indices, (0, max(0, missing)), constant_values=-1)

    def first_rows(self, number: int) -> tuple[Nest, ...]:
        """Return the first rows, without a draw."""
        return self.rows_at(np.arange(min(number, self.number_of_rows)))

    def rows_at(self, indices: NDArray[np.int64]) -> tuple[Nest, ...]:
        """Return chosen rows in the form of a batch, without a draw.

        Args:
            indices: Distinct and ascending, shape `(n,)`; n may be 0.

        Returns:
            The rows, in the structure of `self[0]`.

        Raises:
            TypeError: If a source gives rows of different dtypes.
            ValueError: If a source gives rows of different shapes.
        """
        batch: tuple[Nest, ...] = keras.tree.map_structure(
            lambda rows: rows.take(indices), self._rows
        )
        return batch

    @property
    def users(self) -> Users | None:
        """Whose rows they are, if the scheme draws users."""
        return self._users

    @property
    def rows(self) -> tuple[Nest, ...]:
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
            A function from the number of a draw, from 0, to the indices of its rows,
            with -1 for padding.
        """
        key = self._key if self._seeded else key
        first = self._epoch + bool(self._requests)
        self.advance_to(first + -(-number_of_draws // self._steps))

        def draw(number: int) -> NDArray[np.int64]:
            epochs, index = divmod(number, self._steps)
            return self._draw(key, first + epochs, index, 0)

        return draw

    def draws_of_an_epoch(self) -> Iterator[NDArray[np.int64]]:
        """Draw all batches of an epoch that nobody has asked for, each once.

        Where an epoch is one draw that is cut into batches, this keeps them together,
        whoever else asks for batches meanwhile.

        Yields:
            The indices of the rows of a batch, with -1 for padding.

        Raises:
            NotPrivateError: As `self[0]`.
        """
        self._check_process()
        with self._lock:
            epoch = self._epoch + bool(self._requests)
            self._epoch = epoch + 1
            self._requests.clear()
        for index in range(self._steps):
            yield self._draw(self._key, epoch, index, 0)

    def _check_process(self) -> None:
        """Refuse to draw in another process than the one that made the dataset."""
        if os.getpid() != self._process:
            raise NotPrivateError(
                f"A `{type(self).__name__}` draws only in the process that made it: copies "
                "of it would repeat its draws. Use threads to read ahead, "
                "`dataset.workers = 4`."
            )

    def _next_draw(self, index: int) -> tuple[int, int, int]:
        """Return the name of a draw that was never made: epoch, index, repetition."""
        self._check_process()
        if not 0 <= index < self._steps:
            raise IndexError(
                f"`index` must be in [0, {self._steps}). Received: index={index}."
            )
        # Keras reads ahead in threads, and asks for the same place again where `fit`
        # ends early: every request gets a number of its own.
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
                f"A `{type(self).__name__}` cannot use worker processes: copies of it would "
                f"repeat its draws. Received: use_multiprocessing={value!r}. Use "
                "threads to read ahead, `dataset.workers = 4`."
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse `pickle`, `copy.copy` and `copy.deepcopy`.

        Args:
            protocol: Unused.

        Raises:
            NotPrivateError: Always.
        """
        raise NotPrivateError(
            f"A `{type(self).__name__}` cannot be copied or pickled: the copy would repeat "
            "its draws. Make another one from the same data."
        )
