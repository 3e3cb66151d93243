"""Batches drawn by Poisson sampling, in the form that `fit` takes."""

import warnings

import keras

from tfdp._types import Nest
from tfdp.data.drawn_dataset import DrawnDataset
from tfdp.data.rows import rows_of
from tfdp.data.users import users_of
from tfdp.sampling import (
    Poisson,
    PoissonUsers,
    TruncatedPoisson,
    poisson_probability,
)


class PoissonDataset(DrawnDataset):
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
        max_batch_size: A bound on the number of examples in a batch, which must not
            come from the data. A draw above it loses a uniformly random part, and every
            batch is padded to it: `data[0]` is then the batch and a bool array that
            marks the padding, which takes part in no gradient and in no metric. A bound
            near `expected_batch_size` costs much epsilon: where more than a draw in a
            million is cut a warning says so, and which bound costs less than a percent.
            At deltas below 1e-6 a bound without a warning may cost more than that; the
            statement has the epsilon of draws that are not cut beside it.
        user_ids: For `DPModel(unit="user")`: the user of each row, whole numbers or
            strings, shape ``(n,)``. Users are drawn then, and `expected_batch_size` is
            their mean number. A batch has `examples_per_user` rows for each, padded as
            with `max_batch_size`.
        examples_per_user: How many rows of a user are in a batch, at most: of more a
            secret random part, another one in each draw. A public number, which must
            not come from the data; memory and time grow with it.
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

        Batches of one size:

        >>> data = PoissonDataset(
        ...     np.ones((1000, 3)), expected_batch_size=50, max_batch_size=95
        ... )
        >>> (x,), is_padding = data[0]
        >>> x.shape, is_padding.shape
        ((95, 3), (95,))

    References:
        .. [1] Abadi et al., "Deep Learning with Differential Privacy", CCS 2016.
           https://arxiv.org/abs/1607.00133
    """

    def __init__(
        self,
        x: Nest,
        y: Nest = None,
        sample_weight: Nest = None,
        *,
        expected_batch_size: int,
        max_batch_size: int | None = None,
        user_ids: Nest = None,
        examples_per_user: int | None = None,
        steps_per_epoch: int | None = None,
        seed: int | None = None,
    ) -> None:
        rows = rows_of(x, y, sample_weight)
        number_of_rows = len(keras.tree.flatten(rows)[0])
        users = users_of(user_ids, examples_per_user, number_of_rows)
        number_of_examples = number_of_rows if users is None else len(users)
        poisson_probability(
            expected_batch_size=expected_batch_size,
            number_of_examples=number_of_examples,
        )
        scheme = Poisson(number_of_examples, expected_batch_size)
        if users is not None:
            if max_batch_size is not None:
                raise ValueError(
                    "`max_batch_size` bounds examples, not users. Received: "
                    f"max_batch_size={max_batch_size!r} beside `user_ids`. Leave it out."
                )
            scheme = PoissonUsers(
                number_of_examples, expected_batch_size, users.most_rows
            )
        elif max_batch_size is not None:
            scheme = truncated(scheme, max_batch_size)
        super().__init__(rows, scheme, steps_per_epoch, seed, users)


def truncated(scheme: Poisson, max_batch_size: int) -> TruncatedPoisson:
    """Bound a scheme's batches, with a warning where that costs epsilon.

    Args:
        scheme: Draws them.
        max_batch_size: The bound.

    Returns:
        The scheme with the bound.

    Raises:
        TypeError: If the bound is not a number.
        ValueError: If it is not a whole number, or below the mean.
    """
    bounded = TruncatedPoisson(
        scheme.number_of_examples, scheme.expected_batch_size, max_batch_size
    )
    if bounded.cuts_often:
        warnings.warn(
            "`max_batch_size` is near the expected batch size: draws that it cuts cost "
            "far more epsilon than others, up to several times as much in all. Received: "
            f"max_batch_size={max_batch_size}, expected_batch_size="
            f"{scheme.expected_batch_size}. Use `max_batch_size={bounded.free_bound}`, "
            "which costs less than a percent at a delta of 1e-9 or more.",
            stacklevel=3,
        )
    return bounded
