"""A folder appears whole; what a kill leaves is removed, what is written is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tfdp import _files
from tfdp.export import folders
from tfdp.export.folders import appearing

HEX = "0123456789abcdef" * 2


def left_behind(parent):
    return sorted(path.name for path in parent.iterdir() if "unfinished" in path.name)


def test_it_appears_when_all_of_it_is_written(tmp_path):
    path = tmp_path / "m" / "1"
    with appearing(str(path)) as folder:
        Path(folder, "file").write_text("whole")
        assert not path.exists()
        assert Path(folder).parent == path.parent
    assert (path / "file").read_text() == "whole"
    assert not left_behind(path.parent)


def write(path, then):
    with appearing(str(path)) as folder:
        Path(folder, "file").write_text("half")
        then()


def test_a_failure_leaves_nothing(tmp_path):
    path = tmp_path / "m" / "1"

    def fail():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write(path, fail)
    assert not list(path.parent.iterdir())


def test_who_comes_second_is_told(tmp_path):
    path = tmp_path / "m" / "1"

    def be_first():
        path.mkdir()
        (path / "file").write_text("first")

    with pytest.raises(tf.errors.AlreadyExistsError):
        write(path, be_first)
    assert not left_behind(path.parent)
    assert (path / "file").read_text() == "first"


def test_others_beside_it_are_removed_if_nobody_writes_them(tmp_path):
    left = [f"1-unfinished-{HEX}", f"23-unfinished-{HEX}"]
    kept = [f"v-unfinished-{HEX}", "7-unfinished-0", "7", f"7-unfinished-{HEX}.old"]
    for name in (*left, *kept):
        (tmp_path / name / "variables").mkdir(parents=True)
    (tmp_path / f"5-unfinished-{HEX}").touch()  # No folder.
    with appearing(str(tmp_path / "8")):
        found = {path.name for path in tmp_path.iterdir()}
        assert found >= {*kept, f"5-unfinished-{HEX}"}
        assert not found & set(left)


def test_one_that_is_being_written_in_this_process_stays(tmp_path):
    with appearing(str(tmp_path / "1")) as first:
        with appearing(str(tmp_path / "2")):
            assert Path(first).exists()
        assert Path(first).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_one_that_was_taken_for_left_behind_before_it_was_locked_is_made_anew(
    tmp_path, monkeypatch
):
    has_lock, removed = folders.has_lock, []

    def too_late(lock, *, wait):
        if not removed and wait:
            (name,) = left_behind(tmp_path)
            (tmp_path / name).rmdir()
            removed.append(name)
        return has_lock(lock, wait=wait)

    monkeypatch.setattr(folders, "has_lock", too_late)
    with appearing(str(tmp_path / "1")) as folder:
        assert Path(folder).name not in removed
        assert Path(folder).exists()
    assert removed
    assert (tmp_path / "1").exists()


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    # As on Windows.
    monkeypatch.setattr(_files, "fcntl", None)
    old = tmp_path / f"1-unfinished-{HEX}"
    old.mkdir()
    with appearing(str(tmp_path / "2")):
        assert old.exists()
    assert (tmp_path / "2").exists()


def test_buckets_have_no_locks(tmp_path):
    """A path with a scheme is TensorFlow's alone."""
    old = tmp_path / f"1-unfinished-{HEX}"
    old.mkdir()
    with (
        appearing(f"file://{tmp_path}/2") as folder,
        tf.io.gfile.GFile(f"{folder}/file", "w") as file,
    ):
        file.write("whole")
    assert (tmp_path / "2" / "file").read_text() == "whole"
    assert left_behind(tmp_path) == [old.name]


EXPORT = """
import sys
import time
import keras
import tfdp
from tfdp.export import private_model

def wait(*args, **kwargs):
    print("writing", flush=True)
    time.sleep(600)

private_model._rehearse = wait
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
tfdp.export.export_private_model(tfdp.DPModel(model), sys.argv[1], delta=1e-3)
"""


def exporting(path):
    """Start a process, and return it when it has written the model."""
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORT, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline() == "writing\n"
    return process


def end(process):
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path,
):
    killed, writing = exporting(tmp_path / "1"), exporting(tmp_path / "2")
    try:
        end(killed)
        old, new = left_behind(tmp_path)
        assert (tmp_path / old / "saved_model.pb").exists()
        with appearing(str(tmp_path / "3")):
            assert not (tmp_path / old).exists()
            assert (tmp_path / new / "saved_model.pb").exists()
    finally:
        end(writing)
    with appearing(str(tmp_path / "4")):
        assert not (tmp_path / new).exists()
