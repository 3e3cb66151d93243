"""Rows of arrays and array-like sources, read by index without copying the rest."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfdp._types import Array, Nest

_STRINGS = np.dtype(object)
_OTHER_THAN_ROWS = (
    str,
    bytes,
    keras.utils.PyDataset,
    tf.data.Dataset,
    tf.RaggedTensor,
    tf.SparseTensor,
)


class Rows:
    """The rows of one source, all of one shape and dtype.

    Args:
        name: What the source is called in messages.
        source: An array or an object with `__len__` and `__getitem__`, as
            `PoissonDataset` describes them.

    Raises:
        TypeError: If `source` holds no rows.
        ValueError: If it is empty, or if a model cannot take its dtype.

    Attributes:
        source: As given.
        is_in_memory: Whether all rows can be read at once without reading a file.
    """

    def __init__(self, name: str, source: Nest) -> None:
        self.source = source
        self._read, first, self._length = _reader(name, source)
        self._row_shape = first.shape[1:]
        self._dtype = _batch_dtype(name, first)
        self._name = name
        self.is_in_memory = _is_in_memory(source)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def __str__(self) -> str:
        return f"{self._name}.shape={(self._length, *self._row_shape)}"

    def take_or_fill(self, indices: NDArray[np.int64]) -> Nest:
        """Return some of the rows in any order, with padding among them.

        Args:
            indices: Shape `(n,)`, distinct but for -1, where the result has zeros or
                empty strings.

        Returns:
            As `take`.

        Raises:
            TypeError: As `take`.
            ValueError: As `take`.
        """
        places = np.argsort(indices, kind="stable")
        places = places[np.count_nonzero(indices < 0) :]
        rows = self.take(indices[places])
        if self._dtype == _STRINGS:
            shape = (len(indices), *self._row_shape)
            return tf.scatter_nd(places[:, np.newaxis], rows, shape)
        filled = np.zeros((len(indices), *self._row_shape), rows.dtype)
        filled[places] = rows
        return filled

    def take(self, indices: NDArray[np.int64]) -> Nest:
        """Return some of the rows.

        Args:
            indices: Distinct and ascending, shape `(n,)`; n may be 0.

        Returns:
            A NumPy array, or a tensor for strings, of shape `(n, ...)`.

        Raises:
            TypeError: If the rows do not have the dtype of the first.
            ValueError: If the rows do not have the shape of the first.
        """
        if len(indices):
            rows = self._read(indices)
        else:
            rows = np.empty((0, *self._row_shape), self._dtype)
        if self._dtype == _STRINGS:
            return tf.convert_to_tensor(rows, tf.string)
        return rows.astype(self._dtype, casting="same_kind", copy=False)


def rows_of(x: Nest, y: Nest, sample_weight: Nest) -> tuple[Nest, ...]:
    """Return the structure of the data with `Rows` in place of the sources.

    Args:
        x: One source of rows, or a (nested) dict, tuple or list of them.
        y: The same, or None.
        sample_weight: The same, or None.

    Returns:
        `(x,)`, `(x, y)` or `(x, y, sample_weight)` with tuples for lists, which
        Keras does not take in batches. All `Rows` have the same length.

    Raises:
        TypeError: If a source holds no rows.
        ValueError: If there are weights without `y`, if a structure is empty, if a
            source is empty or has a dtype that a model cannot take, or if the
            numbers of rows differ.
    """
    if y is None and sample_weight is not None:
        raise ValueError(
            "`sample_weight` needs `y`. Received: y=None. Use `y=x` if the inputs are "
            "the targets."
        )
    parts = {"x": x, "y": y, "sample_weight": sample_weight}
    # Without `x` there is nothing to draw from, which is refused below.
    given = {
        name: part for name, part in parts.items() if name == "x" or part is not None
    }
    for name, sources in given.items():
        if not keras.tree.flatten(sources):
            raise ValueError(
                f"`{name}` must hold at least one array. Received: {name}={sources!r}."
            )
    leaves = [
        Rows(path[0] + "".join(f"[{key!r}]" for key in path[1:]), source)
        for path, source in keras.tree.flatten_with_path(given)
    ]
    for leaf in leaves:
        if len(leaf) != len(leaves[0]):
            raise ValueError(
                "All data must have the same number of rows. "
                f"Received: {leaves[0]}, {leaf}. "
                "Use `np.stack(rows)` if a list holds rows: a list is taken as "
                "several inputs."
            )
    filled = keras.tree.pack_sequence_as(given, leaves)
    return tuple(keras.tree.lists_to_tuples(filled[name]) for name in given)


def _is_in_memory(source: Nest) -> bool:
    if keras.ops.is_tensor(source) or hasattr(source, "iloc"):
        return True
    # A view of a `np.memmap` may be an ordinary array that has it for its base.
    while isinstance(source, np.ndarray) and not isinstance(source, np.memmap):
        if not isinstance(source.base, np.ndarray):
            return True
        source = source.base
    return False


_Read = Callable[[NDArray[np.int64]], Array]


def _reader(name: str, source: Nest) -> tuple[_Read, Array, int]:
    """Return what reads rows, the first row as a batch, and the number of rows."""
    _refuse_other_than_rows(name, source)
    if keras.ops.is_tensor(source):
        source = keras.ops.convert_to_numpy(source)
    elif hasattr(source, "iloc"):
        source = source.to_numpy()
        source = source[:, np.newaxis] if source.ndim == 1 else source
    elif not (hasattr(source, "shape") and hasattr(source, "dtype")):
        return _item_reader(name, source)
    if not source.shape or not source.shape[0]:
        raise ValueError(
            f"`{name}` must have at least one row. "
            f"Received: {name}.shape={tuple(source.shape)}."
        )
    return (
        lambda indices: np.asarray(source[indices]),
        np.asarray(source[:1]),
        int(source.shape[0]),
    )


def _item_reader(name: str, source: Nest) -> tuple[_Read, Array, int]:
    """Do what `_reader` does for an object that gives one row at a time."""
    if not len(source):
        raise ValueError(
            f"`{name}` must have at least one row. Received: len({name})=0."
        )
    first = np.asarray(source[0])

    def read_one(index: int) -> Array:
        row = np.asarray(source[index])
        if row.shape != first.shape:
            raise ValueError(
                f"All rows of `{name}` must have the shape of the first. Received: "
                f"{name}[0].shape={first.shape}, {name}[{index}].shape={row.shape}."
            )
        return row

    def read(indices: NDArray[np.int64]) -> Array:
        return np.stack([read_one(index) for index in indices.tolist()])

    return read, first[np.newaxis], len(source)


def _refuse_other_than_rows(name: str, source: Nest) -> None:
    """Raise a TypeError, with what to write, if `source` does not hold rows."""
    sparse = isinstance(source, tf.SparseTensor) or hasattr(source, "tocsr")
    indexable = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if indexable and not sparse and not isinstance(source, _OTHER_THAN_ROWS):
        return
    if sparse:
        fix = (
            "Convert it, `x.toarray()` or `tf.sparse.to_dense(x)`, or pass an object "
            "whose `__getitem__(i)` returns row i as a dense array."
        )
    elif isinstance(source, tf.RaggedTensor):
        fix = "Pad it, `x.to_tensor()`."
    elif isinstance(source, keras.utils.PyDataset | tf.data.Dataset):
        fix = (
            "It gives batches: use `private.fit(tfdp.data.declare(dataset, ...))`, or "
            "pass an object whose `__getitem__(i)` returns row i alone."
        )
    else:
        fix = (
            "Use `np.asarray(...)` for numbers in a list: a list is taken as several "
            "inputs."
        )
    raise TypeError(
        f"`{name}` must be an array, or an object with `__len__` and `__getitem__`, "
        f"with one row for each example. Received: type({name})={type(source)}. {fix}"
    )


def _batch_dtype(name: str, rows: Array) -> np.dtype:
    """Return the dtype of batches with these rows: `floatx` for floats, as in Keras."""
    if rows.dtype.kind in "SU" or (
        rows.dtype.kind == "O"
        and all(isinstance(row, str | bytes) for row in rows.flat)
    ):
        return _STRINGS
    try:
        is_float = keras.backend.is_float_dtype(rows.dtype)
    except ValueError as error:
        raise ValueError(
            f"`{name}` must hold numbers or strings. "
            f"Received: {name}.dtype={rows.dtype}. Use `np.asarray({name}, 'float32')`."
        ) from error
    return np.dtype(keras.config.floatx()) if is_float else rows.dtype
