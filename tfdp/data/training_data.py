"""What `DPModel.fit` was given, and how its examples reach the steps."""

import dataclasses
import itertools
import math
import operator
import warnings
from typing import Self

import keras
import numpy as np
import tensorflow as tf

from tfdp import _tree, _validate
from tfdp._types import Nest
from tfdp.data.balls_in_bins import BallsInBins
from tfdp.data.declared import DeclaredDataset, number_of_batches
from tfdp.data.drawn_dataset import DrawnDataset
from tfdp.data.pipeline import is_read_by_one_thread, pipeline_of
from tfdp.data.rows import rows_of
from tfdp.data.users import users_of
from tfdp.losses.batch import Batch, check_equal_rows
from tfdp.sampling import PoissonUsers, Scheme, Unknown, samplings

_DEFAULT_BATCH_SIZE = 32  # as in keras.Model.fit

# Rows that the checks of a model look at, and batches to find them in.
_SAMPLE = 4
_BATCHES_LOOKED_AT = 10


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """Data in the form that Keras takes, and how they are accounted.

    Attributes:
        x: The data, as `fit` got them or as tfdp draws from them; for Keras also as one
            stream, see `as_pipeline`.
        scheme: How the batches are drawn.
        y: What Keras gets as `y`.
        sample_weight: What Keras gets as `sample_weight`.
        batches_per_pass: Steps after which a new pass has begun; 1 where steps are
            counted, not passes.
        steps_per_epoch: Steps in an epoch; None if only the data tell.
        keras_steps_per_epoch: What Keras gets as `steps_per_epoch`.
        begins_pass_each_epoch: Whether every epoch may iterate the data anew.
        shuffle: What Keras gets as `shuffle`.
        batch_size: What Keras gets as `batch_size`.
    """

    x: Nest
    scheme: Scheme
    y: Nest = None
    sample_weight: Nest = None
    batches_per_pass: int = 1
    steps_per_epoch: int | None = None
    keras_steps_per_epoch: int | None = None
    begins_pass_each_epoch: bool = True
    shuffle: bool = False
    batch_size: int | None = None

    @property
    def drawn(self) -> DrawnDataset | None:
        """The data, if tfdp draws their batches."""
        return self.x if isinstance(self.x, DrawnDataset) else None

    @property
    def rows(self) -> tuple[Nest, ...] | None:
        """The sources of rows, see `rows_of`; None if the data come in batches."""
        if self.drawn is not None:
            return self.drawn.rows
        if _comes_in_batches(self.x):
            return None
        return rows_of(self.x, self.y, self.sample_weight)

    def as_pipeline(self, steps_per_execution: int) -> Self:
        """Return what tfdp draws as one stream.

        Args:
            steps_per_execution: That of the model.

        Returns:
            The data as Keras gets them: a `tf.data.Dataset` as `x`, of one epoch for each
            iterator or, with `keras_steps_per_epoch`, of epochs without an end; no `drawn`
            and no `rows`. These data if tfdp does not draw them, or if threads read them.
        """
        drawn, counts_passes = self.drawn, self.scheme.counts_passes
        if drawn is None or not (counts_passes or is_read_by_one_thread(drawn)):
            return self
        steps = self.steps_per_epoch or len(drawn)
        # Keras takes whole executions: of 3 steps, in executions of 2, it would take 4. A
        # seed tells draws by their epochs, and what reads ahead has begun the next one.
        # Passes must begin with epochs, whatever ends these early.
        is_endless = not (counts_passes or drawn.seeded or steps % steps_per_execution)
        return dataclasses.replace(
            self,
            x=pipeline_of(drawn, is_endless=is_endless),
            keras_steps_per_epoch=steps if is_endless else self.keras_steps_per_epoch,
        )

    @property
    def static_batch_size(self) -> int | None:
        """Rows of each batch, where the graph knows that; None elsewhere."""
        if not isinstance(self.x, tf.data.Dataset):
            return None
        shape = tf.nest.flatten(self.x.element_spec)[0].shape
        return shape[0] if shape.rank else None

    @property
    def element_spec(self) -> Nest:
        """What graphs know of ``(x, y, sample_weight)``; None if only rows tell."""
        if not isinstance(self.x, tf.data.Dataset):
            return None
        # Instead of None pipelines have a specification without a shape.
        spec = tf.nest.map_structure(
            lambda each: each if hasattr(each, "shape") else None, self.x.element_spec
        )
        return keras.utils.unpack_x_y_sample_weight(spec)

    def planned_releases(self, epochs: int) -> int | None:
        """Return how many steps or passes the ledger is to count in some epochs.

        Args:
            epochs: How many.

        Returns:
            Their number, None if the data do not tell.
        """
        if self.begins_pass_each_epoch and self.batches_per_pass > 1:
            return epochs
        steps = self.steps_per_epoch and self.steps_per_epoch * epochs
        return steps and math.ceil(steps / self.batches_per_pass)

    def with_sample(self) -> tuple[Self, Nest]:
        """Take a few rows out for checks, without losing any of the data.

        Returns:
            The data, and ``(x, y, sample_weight)`` of a few rows, or of none if the
            first batches have none, with None for what is missing.
        """
        if self.drawn is not None:
            rows = self.drawn.first_rows(_SAMPLE)
            return self, keras.utils.unpack_x_y_sample_weight(rows)
        if not _comes_in_batches(self.x):
            return self, first_rows((self.x, self.y, self.sample_weight))
        if isinstance(self.x, keras.utils.PyDataset):
            return self, _rows_of([self.x[0]])
        batches = list(itertools.islice(iter(self.x), _BATCHES_LOOKED_AT))
        if not hasattr(self.x, "__next__"):
            return self, _rows_of(batches)
        # Keras knows generators by their type.
        again = (batch for batch in itertools.chain(batches, self.x))
        return dataclasses.replace(self, x=again), _rows_of(batches)


def first_rows(data: Nest) -> Nest:
    """Take the few rows that the checks of a model look at.

    Args:
        data: Nested arrays or None.

    Returns:
        The same nest with the first rows.
    """
    return _tree.map_tensors(lambda array: array[:_SAMPLE], data)


def made_up_rows(x: Nest) -> Nest:
    """Make rows up, so that layers can be checked where there are none to look at.

    Args:
        x: Nested arrays, or tensors of a graph; their values are not read.

    Returns:
        A few rows of random numbers, or of zeros for whole numbers.
    """
    rng = np.random.default_rng(0)

    def make_up(array: Nest) -> Nest:
        dtype = tf.as_dtype(array.dtype)
        shape = (_SAMPLE, *array.shape[1:])
        rows = rng.normal(size=shape) if dtype.is_floating else np.zeros(shape)
        return rows.astype(dtype.as_numpy_dtype)

    return _tree.map_tensors(make_up, x)


def _rows_of(batches: list[Nest]) -> Nest:
    """Take rows from the first batch that has some, or none from one that has none."""
    if not batches:
        raise ValueError("The data have no batches. Received: an empty dataset.")
    batch = next((batch for batch in batches if number_of_examples(batch)), batches[0])
    check_equal_rows(Batch.of(batch))
    return keras.utils.unpack_x_y_sample_weight(first_rows(batch))


def training_data(
    x: Nest,
    y: Nest,
    sample_weight: Nest,
    *,
    batch_size: int | None,
    steps_per_epoch: int | None,
    shuffle: bool,
    sampling: str,
    user_ids: Nest = None,
    examples_per_user: int | None = None,
) -> TrainingData:
    """Find out how the steps over some data must be accounted.

    Args:
        x: What `fit` got as `x`: arrays, a `DrawnDataset`, a `DeclaredDataset`,
            or anything else that Keras takes.
        y: What it got as `y`.
        sample_weight: What it got as `sample_weight`.
        batch_size: What it got as `batch_size`.
        steps_per_epoch: What it got as `steps_per_epoch`.
        shuffle: What it got as `shuffle`.
        sampling: Which of `tfdp.sampling.samplings()` arrays get.
        user_ids: What `fit` got as `user_ids`.
        examples_per_user: What it got as `examples_per_user`.

    Returns:
        The data as Keras gets them, and how their steps are accounted.

    Raises:
        ValueError: If arrays are not to be shuffled, or a batch size or users are given
            for data that come in batches.
    """
    of_users = user_ids is not None or examples_per_user is not None
    if of_users and _comes_in_batches(x):
        raise ValueError(
            "`user_ids` and `examples_per_user` belong to arrays; these data come "
            f"in batches. Received: x of type {type(x).__name__}. Use "
            "`tfdp.data.PoissonDataset(x, y, user_ids=..., examples_per_user=...)`, "
            "which reads rows by their numbers."
        )
    knows_sampling = isinstance(x, (BallsInBins, DeclaredDataset, DrawnDataset))
    if knows_sampling and not (y is None and sample_weight is None):
        raise ValueError(
            "`y` and `sample_weight` belong into the dataset. Received: x of type "
            f"{type(x).__name__} beside them. Leave them out of `fit`."
        )
    if _comes_in_batches(x):
        if batch_size is not None:
            raise ValueError(
                "`batch_size` belongs to arrays; these data come in batches. Received: "
                f"batch_size={batch_size!r}. Leave it out."
            )
        _check_dense(x)
        if knows_sampling:
            return _sampled(x, steps_per_epoch)
        return TrainingData(
            x,
            Unknown(),
            y,
            sample_weight,
            keras_steps_per_epoch=steps_per_epoch,
            steps_per_epoch=steps_per_epoch or number_of_batches(x),
            shuffle=shuffle and isinstance(x, keras.utils.PyDataset),
        )
    _check_shuffled(shuffle)
    rows = number_of_examples(x)
    users = users_of(user_ids, examples_per_user, rows)
    if users is None:
        batch_size = _checked_batch_size(batch_size, rows, "rows")
        scheme = samplings()[sampling](rows, batch_size)
    else:
        batch_size = _checked_batch_size(batch_size, len(users), "users")
        scheme = PoissonUsers(len(users), batch_size, users.most_rows)
    if not scheme.is_shuffled_by_keras:
        sources = rows_of(x, y, sample_weight)
        drawn = DrawnDataset(sources, scheme, steps_per_epoch, users=users)
        return _sampled(drawn, None)
    # Keras goes on with a pass in the next epoch if epochs are shorter.
    batches = math.ceil(rows / batch_size)
    return TrainingData(
        x,
        scheme,
        y,
        sample_weight,
        batches_per_pass=batches,
        steps_per_epoch=steps_per_epoch or batches,
        keras_steps_per_epoch=steps_per_epoch,
        begins_pass_each_epoch=steps_per_epoch is None,
        shuffle=True,
        batch_size=batch_size,
    )


def _check_dense(data: Nest) -> None:
    """Refuse batches of which TensorFlow knows no rows to take out."""
    dataset = data.dataset if isinstance(data, BallsInBins | DeclaredDataset) else data
    if not isinstance(dataset, tf.data.Dataset):
        return
    for spec in tf.nest.flatten(dataset.element_spec):
        if isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec):
            is_ragged = isinstance(spec, tf.RaggedTensorSpec)
            dense = "x.to_tensor()" if is_ragged else "tf.sparse.to_dense(x)"
            raise TypeError(
                "Batches must be of dense tensors. Received: element_spec="
                f"{dataset.element_spec}. Use `dataset.map(lambda x, y: ({dense}, y))`, "
                "before `tfdp.data.declare`."
            )


def _checked_batch_size(batch_size: int | None, examples: int, unit: str) -> int:
    """Return how many of the rows, or users, are expected in a batch."""
    if batch_size is None:
        return min(_DEFAULT_BATCH_SIZE, examples)
    batch_size = _validate.positive_int("batch_size", batch_size)
    if batch_size > examples:
        warnings.warn(
            f"`batch_size` is larger than the data: every batch will be all {unit}, and "
            f"no sampling lowers epsilon. Received: batch_size={batch_size}, {examples} "
            f"{unit}. Use a small part of them, `batch_size={math.ceil(examples / 10)}`, "
            f"or `batch_size={examples}` if this is meant.",
            stacklevel=4,
        )
    return min(batch_size, examples)


def _check_shuffled(shuffle: bool) -> None:
    """Refuse arrays in their own order."""
    if shuffle is not True:
        raise ValueError(
            "Arrays must be sampled at random: a fixed order has no amplification "
            f"and no accounting. Received: shuffle={shuffle!r}. Leave `shuffle` out, "
            "or declare what your own pipeline does: "
            "`private.fit(tfdp.data.declare(dataset, ...))`."
        )


def number_of_examples(x: Nest) -> int:
    """Return the number of rows of arrays.

    Args:
        x: Arrays or array-like sources, possibly nested.

    Returns:
        The length of the first one.

    Raises:
        TypeError: If there are numbers in place of arrays.
    """
    first = _tree.tensors(x)[0]
    if not hasattr(first, "__len__") and not hasattr(first, "shape"):
        raise TypeError(
            "The data must be arrays. Received: "
            f"{type(first).__name__} in their place. Use `np.asarray(...)`."
        )
    return int(first.shape[0]) if hasattr(first, "shape") else len(first)


def _sampled(
    data: BallsInBins | DeclaredDataset | DrawnDataset, steps_per_epoch: int | None
) -> TrainingData:
    """Account data that say themselves how they are sampled."""
    counts_passes = data.scheme.counts_passes
    # `fit` begins a pass where it begins an epoch, but for an iterator that goes on.
    if not isinstance(data, DrawnDataset):
        batches, x = data.number_of_batches, data.dataset
        # Keras goes on with the same iterator only if it knows where it ends; what a
        # `PyDataset` draws in `on_epoch_end` is new all the same.
        begins_pass_each_epoch = (
            steps_per_epoch is None
            or batches is None
            or isinstance(x, keras.utils.PyDataset)
        )
        batches_per_pass = data.batches_per_pass
    else:
        batches = batches_per_pass = len(data)
        x, begins_pass_each_epoch = data, True
        if counts_passes and steps_per_epoch not in {None, batches}:
            raise ValueError(
                "`steps_per_epoch` must be that of the data, whose epochs are passes. "
                f"Received: steps_per_epoch={steps_per_epoch}, {batches} batches in a "
                "pass. Leave it out."
            )
    return TrainingData(
        x,
        data.scheme,
        batches_per_pass=batches_per_pass if counts_passes else 1,
        steps_per_epoch=steps_per_epoch or batches,
        keras_steps_per_epoch=steps_per_epoch,
        begins_pass_each_epoch=begins_pass_each_epoch,
    )


def _comes_in_batches(x: Nest) -> bool:
    """Whether Keras takes whole batches from `x`, not rows."""
    return (
        isinstance(
            x, (tf.data.Dataset, keras.utils.PyDataset, BallsInBins, DeclaredDataset)
        )
        or hasattr(x, "__next__")
        or (hasattr(x, "__iter__") and not hasattr(x, "__len__"))
        or type(x).__module__.startswith(("torch.utils.data", "grain."))
    )


def split_for_validation(data: Nest, fraction: float) -> tuple[Nest, Nest]:
    """Cut the last rows of arrays off for validation, as Keras does.

    Args:
        data: ``(x, y, sample_weight)``, nested arrays or None.
        fraction: Share of the rows, in (0, 1).

    Returns:
        The first rows, and the last ones, each like `data`.

    Raises:
        ValueError: If the data come in batches, or one side would have no rows.
    """
    fraction = _validate.probability("validation_split", fraction)
    if _comes_in_batches(data[0]):
        raise ValueError(
            "`validation_split` needs arrays. Received: validation_split="
            f"{fraction}, x of type {type(data[0]).__name__}. Use "
            "`validation_data=...`."
        )
    rows = number_of_examples(data[0])
    kept = math.floor(rows * (1 - fraction))
    if not 0 < kept < rows:
        raise ValueError(
            "`validation_split` leaves no rows on one side. Received: "
            f"validation_split={fraction}, {rows} rows. Use `validation_data=...`."
        )
    return tuple(
        _tree.map_tensors(operator.itemgetter(part), data)
        for part in (slice(None, kept), slice(kept, None))
    )
