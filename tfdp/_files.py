"""Files that a kill leaves whole."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # There are no such locks on Windows.
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def replaced(path: Path, mode: str = "w", **options: Any) -> Iterator[IO[Any]]:
    """Open a file that takes the place of another when it is complete, and on disk.

    Args:
        path: The file to replace; need not exist.
        mode: As for `open`.
        options: Likewise.

    Yields:
        The file to write to.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open(mode, **options) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    # The new name too, which is the folder's.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock that no other process, and no other caller here, holds meanwhile.

    The operating system holds it, and lets go when the process dies, however it does.

    Args:
        path: A file that is made if need be, and stays.
        wait: Whether to wait until it is free.

    Yields:
        Whether the lock is held; False only without waiting.

    Raises:
        OSError: If the file cannot be made, or this system has no such locks.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield has_lock(file, wait=wait)
    finally:
        os.close(file)


def has_lock(descriptor: int, *, wait: bool) -> bool:
    """Take the lock of an open file or folder, which goes when it is closed.

    Args:
        descriptor: Of the file or folder.
        wait: Whether to wait until it is free.

    Returns:
        Whether it is held; False only without waiting.

    Raises:
        OSError: If this system has no such locks.
    """
    if fcntl is None:
        raise OSError("This system has no file locks.")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
