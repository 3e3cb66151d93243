"""Files that are replaced whole."""

import pytest

from tfdp import _files
from tfdp._files import locked, replaced


def test_takes_the_place_of_another(tmp_path):
    path = tmp_path / "file"
    for text in ("first", "second"):
        with replaced(path) as file:
            file.write(text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_changes_before_it_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replaced(path, "wb") as file:
        file.write(b"ne")
        assert path.read_text() == "old"
        file.write(b"w")
    assert path.read_text() == "new"


def test_what_fails_while_it_is_written_changes_nothing(tmp_path):
    def write():
        with replaced(path) as file:
            file.write("new")
            raise OSError("full")

    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="full"):
        write()
    assert path.read_text() == "old"


def test_what_did_not_reach_the_disk_changes_nothing(tmp_path, monkeypatch):
    def fsync(_):
        raise OSError("full")

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(_files.os, "fsync", fsync)
    with pytest.raises(OSError, match="full"), replaced(path) as file:
        file.write("new")
    assert path.read_text() == "old"


def test_a_lock_is_held_once_and_let_go(tmp_path):
    path = tmp_path / "lock"
    with locked(path) as is_held:
        assert is_held
        with locked(path, wait=False) as is_held_twice:
            assert not is_held_twice
    with locked(path, wait=False) as is_held:
        assert is_held


def test_systems_without_locks_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "fcntl", None)
    with pytest.raises(OSError, match="no file locks"), locked(tmp_path / "lock"):
        pass
