"""Folders that appear when all of them is written, and what a kill leaves of others."""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from tfdp._files import has_lock

# TensorFlow Serving takes only folders whose names are numbers.
_UNFINISHED = re.compile(r"[0-9]+-unfinished-[0-9a-f]{32}")


@contextlib.contextmanager
def appearing(path: str) -> Iterator[str]:
    """Write a folder under another name, which it has until all of it is there.

    Other such folders beside it, which killed processes have left, are removed first.
    Whoever writes one holds a lock on it, which goes with the process: so nobody
    removes what is being written. There are locks where the operating system has the
    files; elsewhere, in buckets for example, what is left stays.

    Args:
        path: Of the folder, which must not exist; ``"models/digits/1"``.

    Yields:
        Where to write, a folder that exists.

    Raises:
        tf.errors.AlreadyExistsError: If it exists by then.
    """
    if "://" in path:
        unfinished, lock = _new_name(path), None
        tf.io.gfile.makedirs(unfinished)
    else:
        _remove_left_behind(Path(path).parent)
        unfinished, lock = _locked_folder(path)
    try:
        yield unfinished
        tf.io.gfile.rename(unfinished, path)
    finally:
        if tf.io.gfile.exists(unfinished):
            tf.io.gfile.rmtree(unfinished)
        if lock is not None:
            os.close(lock)


def _new_name(path: str) -> str:
    return f"{path}-unfinished-{uuid.uuid4().hex}"


def _locked_folder(path: str) -> tuple[str, int]:
    """Make a folder that nobody removes, and return it with what holds the lock."""
    while True:
        name = _new_name(path)
        Path(name).mkdir(parents=True)
        lock = os.open(name, os.O_RDONLY)
        with contextlib.suppress(OSError):
            has_lock(lock, wait=True)
        # Somebody may have taken it for left behind before there was a lock.
        if Path(name).exists():
            return name, lock
        os.close(lock)


def _remove_left_behind(parent: Path) -> None:
    """Remove unfinished folders that nobody writes any more."""
    left: list[Path] = []
    with contextlib.suppress(OSError):
        left = [each for each in parent.iterdir() if _UNFINISHED.fullmatch(each.name)]
    for folder in left:
        with contextlib.suppress(OSError):
            _remove_if_free(folder)


def _remove_if_free(folder: Path) -> None:
    """Remove a folder, unless somebody holds its lock.

    Raises:
        OSError: If there are no locks, or it is gone.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        if has_lock(lock, wait=False):
            shutil.rmtree(folder)
    finally:
        os.close(lock)
