import h5py
import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

from tfdp.data.rows import Rows, rows_of

SOME = np.array([0, 2, 5])
NONE = np.array([], np.int64)


class Items:
    """Random access to single rows, as a reader of files gives it."""

    def __init__(self, rows):
        self.rows = rows
        self.asked = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.rows[index]


def check(source, expected):
    """`source` gives the rows of the array `expected`, none included."""
    rows = Rows("x", source)
    taken, empty = rows.take(SOME), rows.take(NONE)
    np.testing.assert_array_equal(taken, expected[SOME])
    assert len(rows) == len(expected)
    assert taken.dtype == empty.dtype == expected.dtype
    assert empty.shape == (0, *expected.shape[1:])


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64", "bool"])
def test_integers_and_booleans_are_kept(dtype):
    values = (np.arange(12).reshape(6, 2) % 2).astype(dtype)
    check(values, values)
    check(tf.constant(values), values)
    check(Items(values), values)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_become_floatx(dtype):
    values = np.arange(12).reshape(6, 2).astype(dtype)
    check(values, values.astype("float32"))
    check(tf.constant(values), values.astype("float32"))
    check(Items(values), values.astype("float32"))


def test_floatx_is_read_from_keras():
    keras.config.set_floatx("float64")
    check(np.ones((6, 2), "float32"), np.ones((6, 2), "float64"))


def test_rows_without_elements_keep_their_shape():
    check(np.ones((6, 0), "float32"), np.ones((6, 0), "float32"))


def test_numbers_as_items():
    check(Items([0.5, 1.5, 2.5, 3.5, 4.5, 5.5]), np.arange(0.5, 6).astype("float32"))


def test_memmap_is_read_row_by_row(tmp_path):
    values = np.arange(12.0).reshape(6, 2)
    mapped = np.memmap(tmp_path / "rows", "float64", "w+", shape=(6, 2))
    mapped[:] = values
    check(mapped, values.astype("float32"))


def test_hdf5_is_read_row_by_row(tmp_path):
    values = np.arange(12.0).reshape(6, 2)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        check(file.create_dataset("x", data=values), values.astype("float32"))


def test_nothing_is_read_from_items_but_the_first_row_and_what_is_drawn():
    items = Items(np.ones((6, 2)))
    rows = Rows("x", items)
    rows.take(NONE)
    assert items.asked == [0]
    rows.take(SOME)
    assert items.asked == [0, 0, 2, 5]
    assert all(type(index) is int for index in items.asked)


def test_pandas_as_in_keras():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": np.arange(6), "b": np.arange(6) / 2})
    frame.index = frame.index[::-1]
    check(frame, frame.to_numpy().astype("float32"))
    check(frame["a"], frame[["a"]].to_numpy())


class Series:
    """What is used of a `pandas.Series`."""

    iloc = None

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, label):
        raise KeyError(label)

    def to_numpy(self):
        return self.values


def test_series_gives_rows_of_one_number_as_in_keras():
    values = np.arange(6)
    check(Series(values), values[:, np.newaxis])


@pytest.mark.parametrize(
    "source",
    [
        np.array(["a", "b", "c", "d", "e", "f"]),
        np.array([b"a", b"b", b"c", b"d", b"e", b"f"]),
        np.array(["a", "b", "c", "d", "e", "f"], object),
        tf.constant(["a", "b", "c", "d", "e", "f"]),
        Items(["a", "b", "c", "d", "e", "f"]),
    ],
    ids=["U", "S", "O", "tensor", "items"],
)
def test_strings_become_a_string_tensor(source):
    rows = Rows("x", source)
    taken, empty = rows.take(SOME), rows.take(NONE)
    assert taken.numpy().tolist() == [b"a", b"c", b"f"]
    assert taken.dtype == empty.dtype == tf.string
    assert empty.shape == (0,)


def test_structure_is_kept_with_tuples_for_lists():
    array = np.ones((6, 1))
    x, y, sample_weight = rows_of(
        {"a": array, "b": [array, array]}, (array, {"c": array}), array
    )
    assert isinstance(x["a"], Rows)
    assert isinstance(x["b"], tuple)
    assert [isinstance(leaf, Rows) for leaf in x["b"]] == [True, True]
    assert isinstance(y[1]["c"], Rows)
    assert isinstance(sample_weight, Rows)
    assert len(rows_of(array, None, None)) == 1
    assert len(rows_of(array, array, None)) == 2


def test_different_numbers_of_rows_are_refused_by_shape():
    message = r"same number of rows.*x\['a'\]\[0\].shape=\(6, 3\), y.shape=\(5,\)"
    with pytest.raises(ValueError, match=message):
        rows_of({"a": (np.ones((6, 3)), np.ones((6, 2)))}, np.ones(5), None)


def test_list_of_rows_is_refused_with_the_line_to_write():
    with pytest.raises(ValueError, match=r"Use `np.stack\(rows\)`"):
        rows_of([np.ones(3)] * 6, np.ones(6), None)


def test_weights_without_targets_are_refused():
    with pytest.raises(
        ValueError, match=r"`sample_weight` needs `y`. Received: y=None"
    ):
        rows_of(np.ones(6), None, np.ones(6))


@pytest.mark.parametrize("empty", [{}, [], ((), {})])
def test_structures_without_arrays_are_refused(empty):
    with pytest.raises(ValueError, match="`x` must hold at least one array"):
        rows_of(empty, np.ones(6), None)
    with pytest.raises(ValueError, match="`y` must hold at least one array"):
        rows_of(np.ones(6), empty, None)


@pytest.mark.parametrize(
    "source", [np.ones((0, 3)), np.array(1.0), tf.constant(1.0), Items([])]
)
def test_sources_without_rows_are_refused(source):
    with pytest.raises(ValueError, match=r"`x` must have at least one row. Received: "):
        Rows("x", source)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.ones((3, 2))


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        (None, "np.asarray"),
        (1.5, "np.asarray"),
        ("text", "np.asarray"),
        ((i for i in range(3)), "np.asarray"),
        (scipy.sparse.eye_array(6).tocsr(), r"x.toarray\(\)"),
        (scipy.sparse.eye_array(6).tocoo(), r"x.toarray\(\)"),
        (tf.sparse.eye(6), "tf.sparse.to_dense"),
        (tf.ragged.constant([[1], [2, 3]]), r"x.to_tensor\(\)"),
        (tf.data.Dataset.range(6), "tfdp.data.declare"),
        (Batches(), "tfdp.data.declare"),
    ],
)
def test_other_than_rows_is_refused_with_the_line_to_write(source, fix):
    with pytest.raises(TypeError, match=rf"`x` must be an array.*Received: .*{fix}"):
        Rows("x", source)


def test_numbers_in_a_list_are_refused_as_by_keras():
    with pytest.raises(TypeError, match=r"`y\[0\]` must be an array.*np.asarray"):
        rows_of(np.ones(3), [0, 1, 1], None)


@pytest.mark.parametrize(
    "source",
    [
        np.array([1.5, None], object),
        np.array(["2024-01-01", "2024-01-02"], "datetime64[D]"),
        np.array([["a", 1.5]], object),
    ],
)
def test_dtypes_that_no_model_takes_are_refused(source):
    with pytest.raises(ValueError, match=r"`x` must hold numbers or strings. Received"):
        Rows("x", source)


def test_items_of_another_shape_are_refused():
    rows = Rows("x", Items([np.ones(2), np.ones(2), np.ones(1)]))
    with pytest.raises(ValueError, match=r"x\[0\].shape=\(2,\), x\[2\].shape=\(1,\)"):
        rows.take(np.array([1, 2]))


def test_items_of_another_dtype_are_refused():
    rows = Rows("x", Items([1, 2, 0.5]))
    with pytest.raises(TypeError, match="same_kind"):
        rows.take(np.array([1, 2]))
