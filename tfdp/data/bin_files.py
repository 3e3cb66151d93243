"""The files of bins: one for each bin and each part of its rows."""

import struct
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfdp._types import Array

# Written together; files are not open between.
_BYTES_AT_ONCE = 64 * 2**20
_STRINGS = "string"
_LENGTH = struct.Struct("<Q")


class BinFiles:
    """Rows of several parts, in a file for each bin and part.

    Numbers are stored as they lie in memory, strings each behind its length.

    Args:
        directory: Of the files.
        leaves: For each part its ``"dtype"`` and the ``"shape"`` of a row, as JSON
            has them.
    """

    def __init__(self, directory: Path, leaves: list[dict[str, Any]]) -> None:
        self._directory = directory
        self.leaves = leaves
        self._waiting: dict[Path, list[bytes]] = {}
        self._bytes = 0

    @classmethod
    def for_rows(cls, directory: Path, rows: list[Array], batches: int) -> "BinFiles":
        """Make empty files for rows like some.

        Args:
            directory: Of the files.
            rows: For each part an array of at least one row.
            batches: Number of bins.

        Returns:
            What writes the rows.

        Raises:
            ValueError: If a part holds neither numbers nor strings.
        """
        files = cls(directory, [_leaf(part) for part in rows])
        for index in range(batches):
            for place in range(len(rows)):
                files._path(index, place).touch()
        return files

    def add(self, rows: list[Array], bins: NDArray[np.int64]) -> None:
        """Write rows into bins.

        Args:
            rows: For each part an array of shape ``(n, ...)``.
            bins: Of each row, shape ``(n,)``.

        Raises:
            ValueError: If rows are not like the first ones.
        """
        order = np.argsort(bins, kind="stable")
        found, first = np.unique(bins[order], return_index=True)
        for place, (part, leaf) in enumerate(zip(rows, self.leaves, strict=True)):
            if list(part.shape[1:]) != leaf["shape"]:
                raise ValueError(
                    "All rows must have the shape of the first. Received: shapes "
                    f"{tuple(leaf['shape'])} and {part.shape[1:]}. Pad them."
                )
            in_bins = np.split(part[order], first[1:])
            for index, of_bin in zip(found.tolist(), in_bins, strict=True):
                written = _as_bytes(of_bin, leaf["dtype"])
                path = self._path(index, place)
                self._waiting.setdefault(path, []).append(written)
                self._bytes += len(written)
        if self._bytes > _BYTES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        for path, waiting in self._waiting.items():
            with path.open("ab") as file:
                file.write(b"".join(waiting))
        self._waiting, self._bytes = {}, 0

    def specs(self) -> list[tf.TensorSpec]:
        """Return what a bin's rows are, for each part."""
        return [
            tf.TensorSpec([None, *leaf["shape"]], _dtype_of_batches(leaf["dtype"]))
            for leaf in self.leaves
        ]

    def read(self, index: int, number_of_rows: int) -> list[Array]:
        """Read a bin.

        Args:
            index: Its number.
            number_of_rows: How many rows it must have.

        Returns:
            For each part an array of shape ``(number_of_rows, ...)``.

        Raises:
            ValueError: If it has more or less.
        """
        parts = []
        for place, leaf in enumerate(self.leaves):
            path = self._path(index, place)
            if leaf["dtype"] == _STRINGS:
                values = _strings(path.read_bytes())
            else:
                values = np.fromfile(path, leaf["dtype"])
            if values.size != number_of_rows * int(np.prod(leaf["shape"])):
                raise ValueError(_changed(path))
            values = values.reshape(number_of_rows, *leaf["shape"])
            if leaf["dtype"] != _STRINGS:
                dtype = _dtype_of_batches(leaf["dtype"])
                values = values.astype(dtype.as_numpy_dtype, copy=False)
            parts.append(values)
        return parts

    def check(self, rows: list[int]) -> None:
        """Refuse files that are not as long as they were written.

        Args:
            rows: Of each bin.

        Raises:
            ValueError: If one is missing, or has another length.
        """
        for index, number in enumerate(rows):
            for place, leaf in enumerate(self.leaves):
                path = self._path(index, place)
                size = path.stat().st_size if path.exists() else -1
                is_right = size >= 0
                if leaf["dtype"] != _STRINGS:
                    row = int(np.prod(leaf["shape"])) * np.dtype(leaf["dtype"]).itemsize
                    is_right = size == number * row
                if not is_right:
                    raise ValueError(_changed(path))

    def _path(self, index: int, place: int) -> Path:
        return self._directory / f"bin-{index:06}-{place}.rows"


def _leaf(rows: Array) -> dict[str, Any]:
    """Describe the rows of a part."""
    shape = list(rows.shape[1:])
    if rows.dtype.kind in "OSU":
        return {"dtype": _STRINGS, "shape": shape}
    try:
        tf.as_dtype(rows.dtype)
    except TypeError as error:
        raise ValueError(
            "`source` must hold numbers or strings. Received: dtype="
            f"{rows.dtype}. Use `np.asarray(x, 'float32')`."
        ) from error
    return {"dtype": rows.dtype.name, "shape": shape}


def _dtype_of_batches(dtype: str) -> tf.DType:
    """Return what a model gets: `floatx` for floats, as in Keras."""
    if dtype == _STRINGS:
        return tf.string
    is_float = keras.backend.is_float_dtype(dtype)
    return tf.as_dtype(keras.config.floatx() if is_float else dtype)


def _as_bytes(rows: Array, dtype: str) -> bytes:
    if dtype != _STRINGS:
        return rows.astype(dtype, casting="same_kind", copy=False).tobytes()
    values = (
        each.encode() if isinstance(each, str) else bytes(each) for each in rows.flat
    )
    return b"".join(_LENGTH.pack(len(value)) + value for value in values)


def _strings(data: bytes) -> Array:
    """Cut what `_as_bytes` has made of strings."""
    found, place = [], 0
    while place < len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size + length
        found.append(data[place - length : place])
    values = np.empty(len(found), object)
    values[:] = found
    return values


def _changed(path: Path) -> str:
    return (
        f"The files of the bins must be as they were written. Received: `{path.name}` "
        "of another length. Write the data again into a new directory: "
        "`tfdp.data.BallsInBins.write(...)`."
    )
