"""Files of bins: what is written comes back, whatever is flushed when."""

import keras
import numpy as np
import pytest

from tfdp.data import bin_files
from tfdp.data.bin_files import BinFiles


def test_rows_come_back_in_the_order_of_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(bin_files, "_BYTES_AT_ONCE", 50)
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(40, 2)).astype("float32")
    words = np.array(["ä" * i for i in range(40)], object)
    bins = rng.integers(3, size=40)
    files = BinFiles.for_rows(tmp_path, [numbers, words], 4)
    for part in np.array_split(np.arange(40), 5):
        files.add([numbers[part], words[part]], bins[part])
    files.flush()
    files = BinFiles(tmp_path, files.leaves)
    counts = np.bincount(bins, minlength=4)
    files.check(counts.tolist())
    for index, count in enumerate(counts):
        of_bin, its_words = files.read(index, int(count))
        np.testing.assert_array_equal(of_bin, numbers[bins == index])
        expected = [word.encode() for word in words[bins == index]]
        assert its_words.tolist() == expected


def test_floats_come_as_keras_wants_them(tmp_path):
    rows = np.ones((3, 2), "float16")
    files = BinFiles.for_rows(tmp_path, [rows], 1)
    files.add([rows], np.zeros(3, int))
    files.flush()
    assert files.read(0, 3)[0].dtype == keras.config.floatx()
    assert files.specs()[0].dtype == keras.config.floatx()


def test_rows_of_other_shapes_are_refused(tmp_path):
    files = BinFiles.for_rows(tmp_path, [np.ones((3, 2))], 1)
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(4,\)"):
        files.add([np.ones((1, 4))], np.zeros(1, int))


def test_rows_that_are_no_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="numbers or strings"):
        BinFiles.for_rows(tmp_path, [np.array(["2020"], "datetime64[D]")], 1)


@pytest.mark.parametrize("rows", [2, 4])
def test_another_number_of_rows_is_refused(tmp_path, rows):
    files = BinFiles.for_rows(tmp_path, [np.ones((3, 2))], 1)
    files.add([np.ones((3, 2))], np.zeros(3, int))
    files.flush()
    with pytest.raises(ValueError, match="as they were written"):
        files.check([rows])
    with pytest.raises(ValueError, match="as they were written"):
        files.read(0, rows)
