"""Data that is sampled by the user's own pipeline, and how it is sampled."""

import dataclasses
import warnings

import keras
import tensorflow as tf

from tfdp import _validate
from tfdp._types import Data, Nest
from tfdp.data.balls_in_bins import BallsInBins
from tfdp.data.drawn_dataset import DrawnDataset
from tfdp.sampling import Scheme, poisson_probability, samplings

# Passes whose sizes are compared, and batches of each: fresh coins seldom make all agree,
# and one pass that differs ends the comparison.
_MOST_PASSES_READ = 4
_MOST_BATCHES_READ = 1000
# Of fewer batches, nearly all have the same size by chance.
_FEWEST_CUTS = 4
_MOST_SIZES_SAID = 8

_TENSOR_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


@dataclasses.dataclass(frozen=True)
class DeclaredDataset:
    """A dataset and what its owner says about it; made by `declare`.

    Attributes:
        dataset: The `tf.data.Dataset` or `keras.utils.PyDataset`.
        number_of_examples: Number of examples that the batches are made of.
        expected_batch_size: Mean number of examples in a batch.
        sampling: `"shuffle"`, `"poisson"` or the name of another scheme.
    """

    dataset: Data
    number_of_examples: int
    expected_batch_size: int
    sampling: str

    @property
    def scheme(self) -> Scheme:
        """How the batches are drawn, as declared."""
        scheme = samplings()[self.sampling](
            self.number_of_examples, self.expected_batch_size
        )
        batches = self.number_of_batches
        return scheme if batches is None else scheme.in_epochs_of(batches)

    @property
    def number_of_batches(self) -> int | None:
        """Number of batches of the dataset; None if it is unknown or infinite."""
        return number_of_batches(self.dataset)

    @property
    def batches_per_pass(self) -> int:
        """Number of batches in one pass over the examples.

        The number of batches of the dataset or, where it is unknown,
        `number_of_examples / expected_batch_size`, rounded up. A new pass begins
        with every new iterator, and with every further `batches_per_pass` batches
        of the same one: a dataset that is as declared has none.
        """
        if self.number_of_batches is None:
            return -(-self.number_of_examples // self.expected_batch_size)
        return self.number_of_batches


def number_of_batches(data: Nest) -> int | None:
    """Count the batches of a pipeline; None if it is endless or does not tell."""
    if isinstance(data, tf.data.Dataset):
        size = int(data.cardinality())
        return size if size >= 0 else None
    number: int | None = getattr(data, "num_batches", None)
    return number


def declare(
    dataset: Data, *, number_of_examples: int, expected_batch_size: int, sampling: str
) -> DeclaredDataset:
    """Say how a dataset samples its examples, so that its privacy can be accounted.

    Give the result to `DPModel.fit` in place of the dataset. Nothing but the worst
    case is accounted for a dataset that is not declared.

    The epsilon of the training is only as true as this declaration. What is checked
    is what the dataset tells about itself (its number of batches and their static
    size); what its code does is taken on trust:

    * `"shuffle"`: a record occurs at most once each time the dataset is iterated.
      `.repeat()` breaks this wherever it stands: behind `.shuffle()`, the batch in
      which one pass ends and the next begins can hold a record twice. So does
      oversampling.
    * `"poisson"`: every batch is a fresh draw in which each record takes part with
      probability `expected_batch_size / number_of_examples`, independently of the
      other records and of the other batches. Nothing is cached after the draw, the
      random state is secret, and no two worker processes have copies of it.
    * `"cyclic_poisson"`: the same, but the i-th batch of an iteration is drawn from the
      i-th of two fixed parts of the records, in turn, each record with twice that
      probability. No `.repeat()`: every iteration begins with the first part.
    * `"balls_in_bins"`: every time the dataset is iterated, each record is put into one
      of its batches, uniformly at random and independently of the other records and of
      the other iterations; the random state is secret. Files that were grouped once
      have the same batches every time, which is another mechanism
      (`tfdp.data.BallsInBins`), and equal cuts of a shuffled order are `"shuffle"`.
      Both are refused here, in whatever order they come, if two to four passes have
      batches of the same sizes, or all but one batch of a pass has the same: these
      passes are read. Of passes of more than 1000 batches only the first ones are, so
      that there a new order of files in every pass is not seen.

    Args:
        dataset: A `tf.data.Dataset` that yields batches, or a
            `keras.utils.PyDataset`.
        number_of_examples: Number of records that the batches are made of.
        expected_batch_size: Mean number of records in a batch, at most
            `number_of_examples`. With `"shuffle"` the last batch of a pass does not
            count and may be smaller.
        sampling: `"shuffle"`, `"poisson"`, `"cyclic_poisson"`, `"balls_in_bins"`, or the
            `sampling` of a scheme of your own.

    Returns:
        The dataset and its description. Under `"poisson"` and `"cyclic_poisson"`,
        batches of constant size draw a UserWarning: such draws vary in size.

    Raises:
        TypeError: If `dataset` is of another type or a number is none.
        ValueError: If an argument lies outside its range, or if the declaration
            contradicts what the dataset tells about itself.

    Example:
        >>> rows = tf.data.Dataset.range(1000).shuffle(1000).batch(50)
        >>> declared = declare(
        ...     rows,
        ...     number_of_examples=1000,
        ...     expected_batch_size=50,
        ...     sampling="shuffle",
        ... )
        >>> declared.batches_per_pass
        20
    """
    _check_type(dataset)
    _validate.one_of("sampling", sampling, tuple(sorted(samplings(), reverse=True)))
    poisson_probability(
        expected_batch_size=expected_batch_size, number_of_examples=number_of_examples
    )
    declared = DeclaredDataset(
        dataset, int(number_of_examples), int(expected_batch_size), sampling
    )
    static_size = _static_batch_size(dataset)
    scheme = samplings()[sampling](
        declared.number_of_examples, declared.expected_batch_size
    )
    if scheme.batches_are_bins:
        _check_bins(declared, static_size)
        return declared
    if scheme.counts_passes:
        _check_not_endless(declared)
        if scheme.allows_units:
            _check_shuffle(declared, static_size)
    if static_size is not None and not scheme.allows_units:
        warnings.warn(
            f"`sampling={sampling!r}` was declared for batches of constant size, but "
            "such draws vary in size: shuffled batches have a larger epsilon. "
            f"Received: batches of {static_size}. Use `sampling='shuffle'` unless the "
            "batches are draws padded to one size.",
            UserWarning,
            stacklevel=2,
        )
    _ = declared.scheme  # Refuses more batches than a pass has.
    return declared


def _check_type(dataset: Data) -> None:
    """Raise a TypeError unless `dataset` can and need be declared."""
    if isinstance(dataset, (BallsInBins, DrawnDataset)):
        raise TypeError(
            f"A `{type(dataset).__name__}` knows how it samples and is not declared. "
            "Use `private.fit(dataset)`."
        )
    if not isinstance(dataset, tf.data.Dataset | keras.utils.PyDataset):
        raise TypeError(
            "`dataset` must be a `tf.data.Dataset` or a `keras.utils.PyDataset`. "
            f"Received: type(dataset)={type(dataset)}. "
            "Use `private.fit(x, y, batch_size=...)` for arrays, and "
            "`tf.data.Dataset.from_generator(...)` for a generator."
        )


def _check_not_endless(declared: DeclaredDataset) -> None:
    """Raise a ValueError if passes are counted and a pass does not end."""
    if isinstance(declared.dataset, tf.data.Dataset):
        endless = declared.dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    else:
        endless = declared.number_of_batches is None
    if endless:
        raise ValueError(
            f"`sampling={declared.sampling!r}` means a pass each time the dataset is "
            "iterated. Received: an infinite dataset. Remove `.repeat()` (give a "
            "`PyDataset` its `__len__`): `fit(epochs=...)` iterates the dataset again "
            "for every epoch."
        )


def _check_shuffle(declared: DeclaredDataset, static_size: int | None) -> None:
    """Raise a ValueError if records must occur more than once in a pass."""
    examples, expected = declared.number_of_examples, declared.expected_batch_size
    batches = declared.number_of_batches
    if static_size is not None and static_size != expected:
        raise ValueError(
            "`expected_batch_size` must be the size of the batches. Received: "
            f"expected_batch_size={expected}, batches of {static_size}. "
            f"Use `expected_batch_size={static_size}`."
        )
    if batches is None:
        return
    # All batches but the last are full, and the last too where its size is static.
    least = expected * batches if static_size else expected * (batches - 1) + 1
    if least > examples:
        raise ValueError(
            f"`sampling={declared.sampling!r}` means a record at most once each time the "
            f"dataset is iterated. Received: {batches} batches, "
            f"expected_batch_size={expected}, number_of_examples={examples}. Remove "
            "`.repeat()` (`fit(epochs=...)` iterates the dataset again for every "
            "epoch), or declare what the batches are."
        )


def _check_bins(declared: DeclaredDataset, static_size: int | None) -> None:
    """Raise a ValueError if batches are not those of coins, or nobody knows how many."""
    sampling, batches = declared.sampling, declared.number_of_batches
    examples, expected = declared.number_of_examples, declared.expected_batch_size
    if batches is None:
        raise ValueError(
            f"`sampling={sampling!r}` costs the less the more batches there are, so their "
            "number must be known. Received: a dataset that does not tell it. Use "
            "`dataset.apply(tf.data.experimental.assert_cardinality(234))`, or give a "
            "`PyDataset` its `__len__`."
        )
    if abs(examples / batches - expected) >= 1:
        raise ValueError(
            f"`sampling={sampling!r}` means that every record is in one batch of each "
            f"pass. Received: expected_batch_size={expected}, {batches} batches of "
            f"number_of_examples={examples}. Use `expected_batch_size="
            f"{-(-examples // batches)}`."
        )
    sizes = (
        [static_size] if static_size else _sizes_that_stay(declared.dataset, batches)
    )
    if sizes is not None:
        some = ", ".join(map(str, dict.fromkeys(sizes[:_MOST_SIZES_SAID])))
        raise ValueError(
            f"`sampling={sampling!r}` means that in every pass a fresh coin of its own "
            "decides the batch of each record, so sizes vary from pass to pass. Received: "
            f"batches of {some}, the same in every "
            "pass: they are cut from an order of the records, or were drawn once. Use "
            "`sampling='shuffle'`, or give `fit` the files of "
            "`tfdp.data.BallsInBins.write((x, y), directory, batches_per_epoch="
            f"{batches})`."
        )


def _sizes_that_stay(dataset: Data, batches: int) -> list[int] | None:
    """Return the sizes of batches, if they are the same in some passes, in any order."""
    sizes = _sizes_of_pass(dataset, batches)
    for _ in range(_MOST_PASSES_READ - 1):
        if isinstance(dataset, keras.utils.PyDataset):
            dataset.on_epoch_end()
            dataset.on_epoch_begin()
        if _sizes_of_pass(dataset, batches) != sizes:
            return None
    return sizes


def _sizes_of_pass(dataset: Data, batches: int) -> list[int]:
    """Return the numbers of rows of batches, sorted; of cuts that of the full ones."""
    looked_at = min(batches, _MOST_BATCHES_READ)
    if isinstance(dataset, tf.data.Dataset):
        first = iter(dataset.take(looked_at))
    else:
        first = (dataset[index] for index in range(looked_at))
    sizes = sorted(len(tf.nest.flatten(batch)[0]) for batch in first)
    # The last cut of an order is smaller, and may come anywhere.
    usual = sizes[len(sizes) // 2] if sizes else 0
    if len(sizes) >= _FEWEST_CUTS and sizes.count(usual) >= len(sizes) - 1:
        return [usual]
    return sizes


def _static_batch_size(dataset: Data) -> int | None:
    """Return the number of rows if it is the same in every batch by construction."""
    if not isinstance(dataset, tf.data.Dataset):
        return None
    shapes = [
        spec.shape
        for spec in tf.nest.flatten(dataset.element_spec)
        if isinstance(spec, _TENSOR_SPECS) and spec.shape.rank is not None
    ]
    sizes = {shape[0] for shape in shapes if shape.rank > 0} - {None}
    if any(shape.rank == 0 for shape in shapes) or len(sizes) > 1:
        raise ValueError(
            "`dataset` must yield batches. "
            f"Received: dataset.element_spec={dataset.element_spec}. "
            "Use `dataset.batch(...)`."
        )
    return sizes.pop() if sizes else None
