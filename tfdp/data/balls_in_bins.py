"""Examples in files, each in one of several bins that were drawn when it was written."""

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfdp import _files, _validate
from tfdp._types import Array, Nest
from tfdp.data.bin_files import BinFiles
from tfdp.data.rows import rows_of
from tfdp.sampling import FixedBins, fresh_key

_LIST = "bins.json"
_FORMAT = 1
_ROWS_AT_ONCE = 4096
# Numbers up to 2^53 are whole in every reader of JSON.
_NAME_BITS = 52


class BallsInBins:
    """Batches in files, for data that are read in order: each bin is a batch.

    When the files are written, every example is put into one of the bins by a coin of
    its own. `fit` then reads bin after bin, each as one batch: whole files, in order.
    Batches vary in size, and may be empty.

    The bins are the same in every epoch, which is *not* `DPModel(sampling=
    "balls_in_bins")`, whose coins are tossed anew for each. All epochs together, of all
    trainings on the same files, cost as much as one of that with the noise multiplier
    over the square root of their number [1]_: little for one or a few, far more than
    fresh draws for many. The ledger counts it so, by a number in the directory that
    tells these bins from others. Write the data again, with new coins, and from there
    on it is another training.

    Who sees the files knows which example is in which batch: keep them as secret as the
    data.

    Args:
        directory: That `write` has filled.

    Raises:
        ValueError: If it has no bins, or files that are not as they were written.

    Example:
        >>> import tempfile
        >>> x, y = np.ones((1000, 3)), np.ones(1000, int)
        >>> shards = tempfile.mkdtemp()
        >>> data = tfdp.data.BallsInBins.write((x, y), shards, batches_per_epoch=20)
        >>> data.number_of_examples, data.number_of_batches, data.expected_batch_size
        (1000, 20, 50)
        >>> sum(len(x) for x, y in data.dataset)
        1000

    References:
        .. [1] Feldman and Shenfeld, "Efficient Privacy Loss Accounting for Subsampling
           and Random Allocation", 2026. https://arxiv.org/abs/2602.17284
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        listed = self._directory / _LIST
        if not listed.exists():
            raise ValueError(
                f"`directory` has no bins. Received: directory={str(directory)!r}. Use "
                "`tfdp.data.BallsInBins.write((x, y), directory, batches_per_epoch=100)`."
            )
        saved = json.loads(listed.read_text())
        if saved["format"] != _FORMAT:
            raise ValueError(
                f"`directory` was written by another version of tfdp. Received: format "
                f"{saved['format']}. Write the data again: `BallsInBins.write(...)`."
            )
        self._structure = saved["structure"]
        self._rows = [int(rows) for rows in saved["rows"]]
        self._bins = int(saved["bins"])
        self._files = BinFiles(self._directory, saved["leaves"])
        self._files.check(self._rows)

    @classmethod
    def write(
        cls, source: Nest, directory: str | os.PathLike[str], batches_per_epoch: int
    ) -> Self:
        """Put every example into a bin by a coin of its own, and write the bins.

        The coins are of the operating system's; nothing keeps the key. Memory holds a
        few thousand examples, and up to 64 MiB of what is to be written.

        Args:
            source: ``(x, y)``, ``(x,)`` or ``(x, y, sample_weight)``, each as
                `PoissonDataset` takes it; ``x`` alone; or a `tf.data.Dataset` of single
                examples, which is read once.
            directory: Where to; made if it is missing, and empty.
            batches_per_epoch: Number of bins, a public number.

        Returns:
            What `fit` takes.

        Raises:
            TypeError: If a number or a source has the wrong type.
            ValueError: If the directory is not empty, there are no examples, or they
                cannot be stored.
        """
        batches = _validate.positive_int("batches_per_epoch", batches_per_epoch)
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ValueError(
                "`directory` must be empty: bins that were written before are another "
                f"draw. Received: directory={str(directory)!r}. Use a new one."
            )
        random = np.random.Generator(np.random.Philox(key=fresh_key()))
        rows = np.zeros(batches, np.int64)
        files, structure = None, None
        for chunk in _chunks(source):
            leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(chunk)]
            if files is None:
                structure = _structure_of(chunk)
                files = BinFiles.for_rows(folder, leaves, batches)
            bins = random.integers(batches, size=len(leaves[0]))
            files.add(leaves, bins)
            rows += np.bincount(bins, minlength=batches)
        if files is None:
            raise ValueError("`source` must have examples. Received: an empty one.")
        files.flush()
        with _files.replaced(folder / _LIST) as listed:
            json.dump(
                {
                    "format": _FORMAT,
                    "bins": 1 + secrets.randbits(_NAME_BITS),
                    "rows": rows.tolist(),
                    "structure": structure,
                    "leaves": files.leaves,
                },
                listed,
            )
        return cls(folder)

    @property
    def number_of_examples(self) -> int:
        """Number of examples in all bins."""
        return sum(self._rows)

    @property
    def number_of_batches(self) -> int:
        """Number of bins."""
        return len(self._rows)

    batches_per_pass = number_of_batches

    @property
    def expected_batch_size(self) -> int:
        """Expected number of examples in a bin, rounded up."""
        return -(-self.number_of_examples // self.number_of_batches)

    @property
    def scheme(self) -> FixedBins:
        """How the batches were drawn."""
        return FixedBins(
            self.number_of_examples,
            self.expected_batch_size,
            self.number_of_batches,
            self._bins,
        )

    @property
    def dataset(self) -> tf.data.Dataset:
        """The batches in order, as `evaluate` takes them; a few are read ahead."""
        specs = self._files.specs()

        def read(index: NDArray[np.int64]) -> list[Array]:
            return self._files.read(int(index), self._rows[int(index)])

        def batch(index: tf.Tensor) -> Nest:
            leaves = tf.numpy_function(read, [index], [spec.dtype for spec in specs])
            shaped = [
                tf.ensure_shape(leaf, spec.shape)
                for leaf, spec in zip(leaves, specs, strict=True)
            ]
            return _packed(self._structure, shaped)

        bins = tf.data.Dataset.range(self.number_of_batches)
        return bins.map(batch, tf.data.AUTOTUNE, deterministic=True).prefetch(
            tf.data.AUTOTUNE
        )


def _chunks(source: Nest) -> Iterator[Nest]:
    """Yield consecutive examples in the form of batches."""
    if isinstance(source, tf.data.Dataset):
        if source.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                "`source` must end. Received: an infinite dataset. Remove `.repeat()`."
            )
        parts_of_example = tf.nest.flatten(source.element_spec)
        if not all(isinstance(part, tf.TensorSpec) for part in parts_of_example):
            raise ValueError(
                "Examples of `source` must be dense tensors of one shape. Received: "
                f"element_spec={source.element_spec}. Use "
                "`tf.data.Dataset.from_tensor_slices(ragged.to_tensor())`, or "
                "`source.map(tf.sparse.to_dense)`."
            )
        try:
            for batch in source.batch(_ROWS_AT_ONCE).as_numpy_iterator():
                yield batch if isinstance(batch, tuple) else (batch,)
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(
                "`source` must give single examples of one shape. Received: "
                f"element_spec={source.element_spec}. Use `source.unbatch()`, or pad them."
            ) from error
        return
    parts = source if isinstance(source, tuple) else (source,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(
            "`source` must be `x`, `(x, y)` or `(x, y, sample_weight)`. Received: a "
            f"tuple of {len(parts)}."
        )
    rows = rows_of(*parts, *[None] * (3 - len(parts)))
    number = len(keras.tree.flatten(rows)[0])
    for first in range(0, number, _ROWS_AT_ONCE):
        indices = np.arange(first, min(first + _ROWS_AT_ONCE, number))
        yield keras.tree.map_structure(lambda leaf: leaf.take(indices), rows)  # noqa: B023


def _structure_of(nest: Nest) -> Any:
    """Describe how leaves are nested, for JSON: None for each."""
    if isinstance(nest, dict):
        # In the order in which they are flattened.
        return {"dict": [[key, _structure_of(nest[key])] for key in sorted(nest)]}
    if isinstance(nest, (tuple, list)):
        return {"tuple": [_structure_of(each) for each in nest]}
    return None


def _packed(structure: Any, leaves: list[Nest]) -> Nest:
    """Nest leaves as described; takes them from the front of the list."""
    if structure is None:
        return leaves.pop(0)
    if "dict" in structure:
        return {key: _packed(each, leaves) for key, each in structure["dict"]}
    return tuple(_packed(each, leaves) for each in structure["tuple"])
